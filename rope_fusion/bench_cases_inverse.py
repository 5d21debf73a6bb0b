"""The rotation back of an attention output, with and without FP8 quantisation, and rotations of part of each head, compiled.

bf16, a float32 table of 65536 rows, random positions; the outputs are 512 wide, of which the last 64 elements are rotated in interleaved
pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_fusion.bench_programs import Call, Measurement, Program, measure, table
from rope_fusion.bench_timing import fp8_suits, needs_gpu

__all__ = ["benchmark", "skipped", "table"]

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
GROUP = 128
skipped = needs_gpu


def inverse(o: Tensor, positions: Tensor, table: Tensor, start: int) -> Tensor:
    """The o-projection's spelling: clone, index_select, repeat_interleave, neg, stack, cat and casts."""
    o = o.clone()
    cos, sin = table.index_select(0, positions).chunk(2, -1)
    cos = cos.repeat_interleave(2, -1)[:, None]
    sin = (-sin).repeat_interleave(2, -1)[:, None]
    x = o[..., start:].float()
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return torch.cat([o[..., :start], (x * cos + turned * sin).to(o.dtype)], -1)


def inverse_static(o: Tensor, positions: Tensor, table: Tensor, start: int) -> Tensor:
    """One scale for all."""
    return (inverse(o, positions, table, start).float() / 0.02).clamp(-448, 448).to(FP8)


def inverse_group(o: Tensor, positions: Tensor, table: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """A scale for each group of a row."""
    groups = inverse(o, positions, table, start).float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1).clamp(min=1e-4) / 448
    return (groups / scales[..., None]).clamp(-448, 448).to(FP8).flatten(-2), scales


def neox(x: Tensor, positions: Tensor, table: Tensor, start: int) -> Tensor:
    """Half against half."""
    dim = table.shape[1]
    c, s = (torch.cat((t, t), -1)[:, None] for t in table[positions].chunk(2, -1))
    part = x[..., start : start + dim].float()
    turned = torch.cat((-part[..., dim // 2 :], part[..., : dim // 2]), -1)
    return torch.cat((x[..., :start], (part * c + turned * s).to(x.dtype), x[..., start + dim :]), -1)


def pairs(x: Tensor, positions: Tensor, table: Tensor, start: int) -> Tensor:
    """Interleaved."""
    dim = table.shape[1]
    c, s = (t[:, None] for t in table[positions].chunk(2, -1))
    a, b = x[..., start : start + dim].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :start], turned, x[..., start + dim :]), -1)


def halves(x: Tensor, positions: Tensor, table: Tensor, start: int) -> Tensor:
    """Interleaved pairs that come out as two halves."""
    dim = table.shape[1]
    part = x[..., start : start + dim].float().unflatten(-1, (dim // 2, 2)).transpose(-1, -2).flatten(-2)
    c, s = (torch.cat((t, t), -1)[:, None] for t in table[positions].chunk(2, -1))
    turned = torch.cat((-part[..., dim // 2 :], part[..., : dim // 2]), -1)
    return torch.cat((x[..., :start], (part * c + turned * s).to(x.dtype), x[..., start + dim :]), -1)


@dataclass(frozen=True)
class Shape:
    """A program at its sizes: head width, first rotated element, rotated elements, and tokens × heads."""

    name: str
    program: Callable[..., Any]
    width: int
    start: int
    dim: int
    sizes: tuple[tuple[int, int], ...]


OUTPUT = ((1, 16), (16, 16), (64, 16), (1, 128), (64, 128), (4096, 16), (4096, 128))
FEWER = ((1, 16), (64, 16), (64, 128), (4096, 128))
SHAPES = (
    Shape("inverse 64/512", inverse, 512, 448, 64, OUTPUT),
    Shape("inverse 64/512, static FP8", inverse_static, 512, 448, 64, FEWER),
    Shape("inverse 64/512, group FP8", inverse_group, 512, 448, 64, FEWER),
    Shape("neox 32/128", neox, 128, 0, 32, ((1, 32), (64, 32), (1024, 32), (8192, 32))),
    Shape("pairs 64/128", pairs, 128, 0, 64, ((1, 32), (64, 32), (8192, 32))),
    Shape("pairs 64/192", pairs, 192, 128, 64, ((64, 128), (8192, 128))),
    Shape("halves 64/192", halves, 192, 128, 64, ((64, 128), (8192, 128))),
)
REHEARSED = (
    Shape("inverse 8/128", inverse, 128, 120, 8, ((64, 2),)),
    Shape("inverse 8/128, static FP8", inverse_static, 128, 120, 8, ((64, 2),)),
)


def make(shape: Shape, tokens: int, heads: int, device: str) -> Call:
    """Fresh random operands."""
    rows = 65536 if device.startswith("cuda") else 128
    x = torch.randn(tokens, heads, shape.width, device=device).to(BF16)
    table = torch.randn(rows, shape.dim, device=device)
    positions = torch.randint(0, rows, (tokens,), device=device)
    written = {inverse_static: 1.0, inverse_group: 1.0 + 4 / GROUP}.get(shape.program, 2.0)  # bytes of an element
    moved = int(x.numel() * (2 + written)) + tokens * (shape.dim * 4 + 8)

    def program(x: Tensor, positions: Tensor, table: Tensor) -> Any:
        return shape.program(x, positions, table, shape.start)

    return Call(program, program, (x, positions, table), (), moved)


def programs(device: str, quick: bool) -> list[Program]:
    """Every shape at every size."""
    shapes = SHAPES if device.startswith("cuda") else REHEARSED
    return [
        Program(f"{shape.name} × {heads} heads", tokens, functools.partial(make, shape, tokens, heads))
        for shape in shapes
        if fp8_suits(device) or "FP8" not in shape.name
        for tokens, heads in (shape.sizes[:2] if quick else shape.sizes)
    ]


def benchmark(device: str, quick: bool = False) -> list[Measurement]:
    """Measure them."""
    return measure(programs(device, quick), device)
