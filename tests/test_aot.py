"""Each shipped form of the fused operator compiles, without a GPU, for the architectures it is offered on, unspilt.

What is compiled: model shapes x the rows of the launch table, all of them on sm_90; on the other architectures the
shapes alternate over the rows, so that each shape and each row is met on each. That keeps the file under a minute on
two cores.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rope_fusion.kernels.rope_qkv import Target, fp8_unsupported
from rope_fusion.kernels.variants import BF16, E4M3, FP16, FP32, Variant, make_call

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from rope_fusion.kernels.aot import Compiled, compile_call
from rope_fusion.kernels.rope_qkv_triton import LAUNCH_TABLE, choose_parameters, prepare

GPT_OSS = Variant(
    dtype=BF16,
    angle_dtype=FP32,
    angles="table",
    full_width=False,
    pairing="neox",
    inverse=False,
    dims=(64, 64, 0),
    v_dim=None,
    heads=(64, 8),
    batch_seq=(1, 3),
    source="packed",
    layout="n p h d",
    paired_slots=False,
    index_dtype=torch.int64,
    slots="padded",
    q_fp8=E4M3,
    cache="fp8",
    scales="tensor",
    multiplies=False,
    needs=(False, False),
    wide_out=False,
    narrow_result=False,
    math="fp32",
    writes="kv",
)
PLAIN = replace(GPT_OSS, q_fp8=None, cache="same", needs=(True, False))
STATIC: dict[str, Any] = {"layout": "b h p d", "angles": "shared rows", "slots": "all", "source": "transposed"}
SHAPES = {
    "gpt-oss, fp8": GPT_OSS,
    "gpt-oss, fp8 bytes in one buffer, exact": replace(GPT_OSS, cache="bytes", layout="n 0 p h d", math="exact fp32"),
    "llama": replace(PLAIN, dims=(128, 128, 0), heads=(32, 8), full_width=True, **STATIC),
    "llama, fp8, heads before places": replace(GPT_OSS, dims=(128, 128, 0), heads=(32, 8), layout="n h p d"),
    "gpt-oss, fp8 of unrounded values": replace(GPT_OSS, wide_out=True),
    "gpt-oss, rounded q beside fp8 of unrounded values": replace(
        GPT_OSS, needs=(True, False), wide_out=True, narrow_result=True
    ),
    "phi, exact": replace(PLAIN, dims=(96, 96, 0), heads=(32, 32), math="exact own dtype"),
    "gpt-neox, partial": replace(PLAIN, dims=(80, 20, 0), heads=(32, 32), dtype=FP16, angle_dtype=FP16),
    "gpt-j, interleaved": replace(PLAIN, dims=(256, 64, 0), heads=(16, 16), pairing="interleaved"),
    "deepseek, halves out": replace(PLAIN, dims=(192, 64, 128), v_dim=128, heads=(16, 16), pairing="halves out"),
    "gemma, both outputs": replace(PLAIN, dims=(256, 256, 0), heads=(8, 4), needs=(True, True), **STATIC),
}
TARGETS = [
    Target("cuda", 80),
    Target("cuda", 89),
    Target("cuda", 90),
    Target("cuda", 100),
    Target("cuda", 120),
    Target("hip", "gfx942"),
    Target("hip", "gfx950"),
]


def adapted(variant: Variant, target: Target) -> Variant:
    """The same shape with the FP8 dtype of the target, or without FP8 where it has none."""
    if variant.q_fp8 is None:
        return variant
    known = [dtype for dtype in (E4M3, torch.float8_e4m3fnuz) if fp8_unsupported(target, dtype) is None]
    return (
        replace(variant, q_fp8=known[0]) if known else replace(variant, q_fp8=None, cache="same", needs=(True, False))
    )


def compiled(target: Target, variant: Variant, rule: int) -> Compiled:
    variant = adapted(variant, target)
    call = make_call(variant, device="meta")
    tokens = min(int(min(LAUNCH_TABLE[rule].up_to, 1 << 20)), 1 << 20)
    parameters = choose_parameters(tokens, *variant.heads, *variant.dims[:2])
    return compile_call(target, prepare(*call.args, **call.encoded, parameters=parameters, target=target))


def chosen() -> list[Any]:
    cases = []
    for target in TARGETS:
        for number, name in enumerate(SHAPES):
            rules = range(len(LAUNCH_TABLE)) if target == Target("cuda", 90) else [number % len(LAUNCH_TABLE)]
            cases += [pytest.param(target, name, rule, id=f"{target.arch}-{name}-{rule}") for rule in rules]
    return cases


@pytest.mark.parametrize(("target", "name", "rule"), chosen())
def test_shipped_variant_compiles_without_spills(target: Target, name: str, rule: int) -> None:
    result = compiled(target, SHAPES[name], rule)
    assert result.binary
    assert result.spilled_registers == 0


def test_gpt_oss_prefill_accesses_memory_sixteen_bytes_at_a_time() -> None:
    result = compiled(Target("cuda", 90), GPT_OSS, len(LAUNCH_TABLE) - 1)
    assert "ld.global.v4.b32" in result.assembly
    assert "st.global.v4.b32" in result.assembly


def test_arithmetic_is_rounded_operation_by_operation() -> None:
    """No product and sum are contracted; the one fused multiply-add written out is the correction of a quotient."""
    import triton

    result = compiled(Target("cuda", 90), replace(PLAIN, math="exact fp32"), 0)
    assert "FMUL" in disassembled(result, triton.knobs.nvidia.nvdisasm.path)
    assert "FFMA" not in disassembled(result, triton.knobs.nvidia.nvdisasm.path)


def disassembled(result: Compiled, tool: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(result.binary)
        return subprocess.run([tool, "-c", str(path)], check=True, capture_output=True, text=True).stdout
