"""Ahead-of-time compilation of the Triton kernels, for a GPU that need not be there, and what it costs in registers.

    >>> compiled = compile_call(Target("cuda", 90), prepare(*meta_tensors, **options))
    >>> compiled.spilled_registers
    0

CI uses this to hold every shipped variant to "compiles, and spills no register" on every supported architecture.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rope_fusion.kernels.rope_qkv import Target
from rope_fusion.kernels.rope_qkv_triton import Call, rope_qkv_kernel

POINTER_TYPES = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.float8_e5m2: "*fp8e5",
}
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for ``target``; ``spilled_registers`` counts bytes of stack on CUDA."""

    target: Target
    binary: bytes
    assembly: str
    signature: Mapping[str, str]  # the type of each parameter, "constexpr" for one that is compiled in
    registers: int
    spilled_registers: int
    shared_bytes: int


def gpu_target(target: Target) -> GPUTarget:
    """Triton's own description of ``target``: wavefronts of 64 on AMD's data-centre GPUs, warps of 32 on NVIDIA's."""
    return GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32)


def number_type(value: int | float) -> str:
    """The type that a launch gives a number whose parameter declares none."""
    if isinstance(value, float):
        return "fp32"
    return "i32" if value.bit_length() < 32 else "i64"


def compile_kernel(
    target: Target,
    kernel: Any,
    arguments: Sequence[torch.Tensor | int | float | None],
    constexprs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Compiled:
    """Compile ``kernel`` for arguments like these.

    Tensors, of any device including meta, are taken as aligned to 16 bytes, None as an absent argument.

    Args:
        target: what to compile for.
        kernel: a ``triton.jit`` function.
        arguments: one for each parameter that is not a constexpr, in order; numbers take the type the kernel
            declares, or the one that a launch gives them.
        constexprs: values of the constexpr parameters by name.
        options: launch options, such as ``num_warps``.
    """
    signature: dict[str, str] = {}
    constants = dict(constexprs)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    values = iter(arguments)
    for index, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            continue
        value = next(values)
        if value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = None
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTER_TYPES[value.dtype]
            attributes[(index,)] = ALIGNED
        else:
            signature[parameter.name] = parameter.annotation_type or number_type(value)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=gpu_target(target), options=dict(options))
    if target.backend == "hip":
        assembly = compiled.asm["amdgcn"]
        registers, spilled = amd_resources(assembly)
        binary = compiled.asm["hsaco"]
    else:
        assembly = compiled.asm["ptx"]
        binary = compiled.asm["cubin"]
        registers, spilled = cuda_resources(binary)
    return Compiled(target, binary, assembly, signature, registers, spilled, compiled.metadata.shared)


def compile_call(target: Target, call: Call) -> Compiled:
    """Compile the fused prologue for a call prepared with ``rope_qkv_triton.prepare``."""
    plan = call.plan
    variant = plan.variant
    return compile_kernel(target, rope_qkv_kernel, (*call.pointers, *plan.numbers), variant.constexprs, variant.options)


def amd_resources(assembly: str) -> tuple[int, int]:
    """Vector registers, and registers spilled, from the metadata at the end of AMD assembly."""

    def entry(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if found is None:
            raise ValueError(f"no .{name} in the kernel's metadata; is this AMD assembly?")
        return int(found.group(1))

    return entry("vgpr_count"), entry("vgpr_spill_count") + entry("sgpr_spill_count")


def cuda_resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack (where ptxas spills to); Triton brings along the cuobjdump that reads them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "--dump-resource-usage", str(path)], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump reports no resource usage: {text!r}")
    return int(found.group(1)), int(found.group(2))
