"""The benchmarks' stand-in operators: schemas of the real ones, and the values of the reference bodies, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_standins import BODIES
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # chosen when Triton is imported: a process of its own
TOKENS, Q_HEADS, KV_HEADS, DIM, PAGE = 5, 18, 2, 8, 4


def in_a_process(*command: str, **environment: str) -> str:
    root = Path(__file__).parent.parent
    paths = {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *command], env=os.environ | paths | environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's own process")
def test_kernels_agree_with_the_reference_in_the_interpreter():
    pytest.importorskip("triton")
    out = in_a_process(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", __file__, TRITON_INTERPRET="1"
    )
    assert "24 passed" in out


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's own process")
def test_only_what_is_missing_is_registered_and_with_the_schemas_of_the_real_operators():
    pytest.importorskip("triton")
    program = """
import torch
library = torch.library.Library("_C", "FRAGMENT")
library.define("static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()")
from rope_fusion.bench_engine_ops import SCHEMAS, register_missing
print(register_missing() == [name for name in SCHEMAS if name != "_C::static_scaled_fp8_quant"], register_missing() == [])
from engine_standins import SCHEMAS, compare_schemas
print(compare_schemas())
"""
    assert in_a_process("-c", program).split("\n")[:2] == ["True True", "[]"]


@pytest.mark.skipif(INTERPRETED, reason="compiled, not interpreted")
@pytest.mark.parametrize("kernel", ["_rotate", "_quantise", "_store"])
def test_kernels_compile_for_a_gpu_that_is_not_here(kernel):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rope_fusion import bench_engine_ops

    function = getattr(bench_engine_ops, kernel)
    options: dict[str, Any] = {
        "START": 0,
        "HALF": 32,
        "BLOCK": 512,
        "HEADS": 16,
        "NEOX": True,
        "INVERSE": True,
        "DIM": 64,
    }
    options["MATH"] = triton.language.bfloat16
    pointers = {"positions": "*i64", "slots": "*i64", "scale": "*fp32", "k_scale": "*fp32", "v_scale": "*fp32"}
    pointers |= dict.fromkeys(("q", "k", "table", "key", "value", "x"), "*bf16")
    for fp8 in (False, True):
        options["LIMIT"] = 448.0 if fp8 else 0.0
        stored = "*fp8e4nv" if fp8 or kernel == "_quantise" else "*bf16"
        pointers |= dict.fromkeys(("result", "key_cache", "value_cache"), stored)
        names = function.arg_names
        signature = {name: "constexpr" if name in options else pointers.get(name, "i32") for name in names}
        constants = {(names.index(name),): value for name, value in options.items() if name in names}
        source = ASTSource(function, signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    from interpreter import exact_arithmetic

    exact_arithmetic(monkeypatch)


def agree(name: str, *args: Any) -> None:
    """The kernel leaves in its arguments what the reference body does, FP8 to a step and the rest to one rounding."""
    from rope_fusion import bench_engine_ops

    expected = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    BODIES[name](*expected)
    bench_engine_ops.BODIES[name](*args)
    for ours, theirs in zip(args, expected, strict=True):
        if isinstance(ours, Tensor):
            if ours.dtype == torch.uint8:
                ours, theirs = ours.view(torch.float8_e4m3fn), theirs.view(torch.float8_e4m3fn)
            narrow = ours.is_floating_point() and ours.element_size() == 1
            torch.testing.assert_close(
                *((ours.float(), theirs.float()) if narrow else (ours, theirs)),
                rtol=0.126 if narrow else 2**-7,  # one step of FP8; of bf16
                atol=2**-9 if narrow else 2**-8,  # the least FP8 number; a rounding of products near one
            )


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", ["columns", "heads, and part of each head"])
def test_interpreted_rotation(shape, table_dtype, is_neox, inverse):
    torch.manual_seed(0)
    packed = torch.randn(TOKENS, (Q_HEADS + 2 * KV_HEADS) * DIM, dtype=torch.bfloat16)
    q, k, _ = packed.split([Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
    width, start = DIM, 0
    if shape != "columns":
        q, k, width, start = q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), DIM - 2, 2
    table = torch.rand(9, width).to(table_dtype)
    positions = torch.tensor([3, 0, 8, 2, 2])
    agree("_C::rotary_embedding", positions, q, k, DIM, table, is_neox, start, inverse)


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("width", [64, 1030])
def test_interpreted_quantisation(width):
    x = torch.randn(TOKENS, 2 * width, dtype=torch.bfloat16)[:, :width]
    result = torch.empty(TOKENS, width, dtype=torch.float8_e4m3fn)
    agree("_C::static_scaled_fp8_quant", result, x, torch.tensor([0.005]))


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e5m2"])
def test_interpreted_cache_write(kind, heads_first):
    key, value = torch.randn(2, TOKENS, KV_HEADS, DIM, dtype=torch.bfloat16)
    dtype = torch.bfloat16 if kind == "auto" else torch.uint8
    shape = (3, KV_HEADS, PAGE, DIM) if heads_first else (3, PAGE, KV_HEADS, DIM)
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    if heads_first:
        caches = [cache.transpose(1, 2) for cache in caches]
    slots = torch.tensor([7, -1, 2, 0])
    scale = torch.tensor([0.05])
    agree("_C_cache_ops::reshape_and_cache_flash", key, value, *caches, slots, kind, scale, scale)
