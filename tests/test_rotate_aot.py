"""The rotation kernel compiles for every architecture it is offered on, spills nothing, and moves 16 bytes at a time.

All shapes are compiled for sm_90; on the others each shape takes the row of the launch table whose turn it is.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from rope_fusion.kernels.aot import Compiled, compile_kernel
from rope_fusion.kernels.rope_qkv import Target, fp8_unsupported
from rope_fusion.kernels.rotate import GroupFp8, Rotary, StaticFp8
from rope_fusion.kernels.rotate_triton import LAUNCHES, prepare, rotate_kernel

TARGETS = [
    Target("cuda", 80),
    Target("cuda", 89),
    Target("cuda", 90),
    Target("cuda", 100),
    Target("cuda", 120),
    Target("hip", "gfx942"),
    Target("hip", "gfx950"),
]
BF16 = torch.bfloat16
# heads, width, start, dim, and what differs from an interleaved inverse rotation in bf16
SHAPES: dict[str, dict[str, Any]] = {
    "o-projection": {"shape": (128, 512, 448, 64)},
    "o-projection, in place": {"shape": (16, 512, 448, 64), "in_place": True},
    "o-projection, static fp8": {"shape": (16, 512, 448, 64), "quant": "static"},
    "o-projection, group fp8": {"shape": (128, 512, 448, 64), "quant": "group"},
    "partial, first half of 128": {"shape": (32, 128, 0, 64), "interleaved": False, "inverse": False},
    "whole head, exact, fp16": {"shape": (32, 96, 0, 96), "interleaved": False, "dtype": torch.float16, "exact": True},
    "interleaved in, halves out": {"shape": (128, 192, 128, 64), "halves_out": True, "inverse": False},
    "fp32": {"shape": (8, 80, 16, 40), "dtype": torch.float32},
}


def compiled(target: Target, shape: tuple[int, int, int, int], rule: int, **how: Any) -> Compiled | None:
    """None where the target has no FP8 to quantise to."""
    heads, width, start, dim = shape
    dtype, in_place, quantise = how.get("dtype", BF16), how.get("in_place", False), how.get("quant")
    x = torch.empty(1, 64, heads, width, dtype=dtype, device="meta")
    table = torch.empty(1024, dim, dtype=torch.float32, device="meta")
    positions = torch.empty(64, dtype=torch.int64, device="meta")
    rotary = Rotary(
        how.get("interleaved", True), how.get("inverse", True), how.get("halves_out", False), dim, start, dtype,
        how.get("exact", False),
    )  # fmt: skip
    options: dict[str, Any] = {}
    out = x if in_place else torch.empty_like(x)
    if quantise:
        known = [f for f in (torch.float8_e4m3fn, torch.float8_e4m3fnuz) if fp8_unsupported(target, f) is None]
        if not known:
            return None
        out = torch.empty_like(x, dtype=known[0])
        if quantise == "static":
            options["quant"] = StaticFp8(known[0], torch.empty(1, device="meta"), 1.0, False)
        else:
            options["quant"] = GroupFp8(known[0], 128, 1e-4, True)
            options["scales"] = torch.empty(1, 64, heads, width // 128, device="meta")
    call = prepare(
        x,
        table[:, : dim // 2],
        table[:, dim // 2 :],
        positions,
        rotary,
        out,
        rounded=dtype,
        shape=LAUNCHES[rule],
        **options,
    )
    arguments = (*call.pointers, *call.numbers)
    return compile_kernel(target, rotate_kernel, arguments, call.variant.constexprs, call.variant.options)


def chosen() -> list[Any]:
    cases = []
    for target in TARGETS:
        for number, name in enumerate(SHAPES):
            rules = range(len(LAUNCHES)) if target == Target("cuda", 90) else [number % len(LAUNCHES)]
            cases += [pytest.param(target, name, rule, id=f"{target.arch}-{name}-{rule}") for rule in rules]
    return cases


@pytest.mark.parametrize(("target", "name", "rule"), chosen())
def test_shipped_form_compiles_without_spills(target: Target, name: str, rule: int) -> None:
    result = compiled(target, rule=rule, **SHAPES[name])
    if result is None:
        pytest.skip(f"sm_{target.arch} does not convert to FP8")
    assert result.binary
    assert result.spilled_registers == 0


@pytest.mark.parametrize("rule", range(len(LAUNCHES)))
@pytest.mark.parametrize("name", ["o-projection", "partial, first half of 128"])
def test_rows_are_read_and_written_sixteen_bytes_at_a_time(name: str, rule: int) -> None:
    result = compiled(Target("cuda", 90), rule=rule, **SHAPES[name])
    assert result is not None
    stores = re.findall(r"st\.global\S*", result.assembly)
    assert stores
    assert set(stores) == {"st.global.v4.b32"}
    loads = set(re.findall(r"ld\.global\S*", result.assembly))
    assert loads == {"ld.global.v4.b32", "ld.global.b64"}  # the second is the position
    assert result.shared_bytes == 0  # nothing is exchanged between threads


def test_exact_mode_contracts_no_product_and_sum() -> None:
    shape = SHAPES["fp32"] | {"exact": True}
    result = compiled(Target("cuda", 90), rule=0, **shape)
    assert result is not None
    assert "fma.rn.f32" not in result.assembly
