"""What stands before attention: rotate q and k, quantise, write both caches, as models write it, compiled.

Random data, slots, and positions in a table of 131072 rows; blocks of 16 places. The program is given to both backends in the direct
spelling ``cache[slots // 16, slots % 16] = k``, the fastest that plain Inductor has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rope_fusion.bench_programs import Call, Measurement, Program, measure, table
from rope_fusion.bench_stack import BF16, FP8, PAGE, quantised, store
from rope_fusion.bench_timing import POISON, fp8_suits, needs_gpu

__all__ = ["benchmark", "skipped", "table"]

skipped = needs_gpu


@dataclass(frozen=True)
class Shape:
    """Heads of q and of k and v, their width, and what is quantised."""

    name: str
    q_heads: int
    kv_heads: int
    dim: int
    q_fp8: bool = False
    kv_fp8: bool = False
    tokens: tuple[int, ...] = (1, 8, 64, 256, 2048, 16384)


SHAPES = (
    Shape("gpt-oss 64/8x64, FP8 q and KV", 64, 8, 64, True, True, (1, 8, 64, 256, 2048, 16384, 65536)),
    Shape("gpt-oss 64/8x64, bf16", 64, 8, 64),
    Shape("gpt-oss 64/8x64, bf16 q, FP8 KV", 64, 8, 64, False, True, (1, 64, 2048)),
    Shape("llama-3-8b 32/8x128, bf16", 32, 8, 128),
    Shape("llama-3-70b 64/8x128, FP8 q and KV", 64, 8, 128, True, True, (1, 64, 256, 2048, 16384)),
)
REHEARSED = (
    Shape("small 8/2x16, FP8 q and KV", 8, 2, 16, True, True, (5,)),
    Shape("small 8/2x16, bf16", 8, 2, 16, tokens=(5,)),
)


def prologue(
    shape: Shape,
    spelling: str,
    rounds: bool,
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    scales: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """The rotated, perhaps quantised q; K and V go to their caches in a `spelling` of `store`.

    `rounds`: what is quantised is rounded to bf16 first.
    """
    sizes = [shape.q_heads, shape.kv_heads, shape.kv_heads]
    q, k, v = qkv.view(qkv.shape[0], -1, shape.dim).split(sizes, 1)
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)

    def rotated(x: Tensor, fp8: bool) -> Tensor:
        first, second = x.float().chunk(2, -1)
        wide = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return wide.to(x.dtype) if rounds or not fp8 else wide

    q, k = rotated(q, shape.q_fp8), rotated(k, shape.kv_fp8)
    if shape.kv_fp8:
        k, v = quantised(k, scales[1:2]), quantised(v, scales[2:3])
    store(k_cache, k, slots, spelling)
    store(v_cache, v, slots, spelling)
    return quantised(q, scales[:1]) if shape.q_fp8 else q


def make(shape: Shape, tokens: int, device: str) -> Call:
    """Fresh random operands for so many tokens."""
    heads = shape.q_heads + 2 * shape.kv_heads
    blocks = max(tokens // PAGE * 2, 64)
    rows = 131072 if device.startswith("cuda") else 128
    cache_type = FP8 if shape.kv_fp8 else BF16

    def cache() -> Tensor:
        size = (blocks, PAGE, shape.kv_heads, shape.dim)
        empty = torch.empty(size, dtype=cache_type, device=device)
        empty.view(torch.uint8).fill_(POISON)  # what should be written and is not shows
        return empty

    qkv = torch.randn(tokens, heads * shape.dim, device=device).to(BF16)
    table = torch.randn(rows, shape.dim, device=device)
    positions = torch.randint(0, rows, (tokens,), device=device)
    slots = torch.randperm(blocks * PAGE, device=device)[:tokens]
    scales = torch.rand(3, device=device) * 0.1 + 0.01
    moved = (
        2 * qkv.numel()
        + tokens * (shape.dim * 4 + 16)
        + tokens * shape.dim * shape.q_heads * (1 if shape.q_fp8 else 2)
        + tokens * shape.dim * 2 * shape.kv_heads * cache_type.itemsize
    )
    arguments = (qkv, table, positions, slots, scales, cache(), cache())
    unrounded = _program(shape, "bytes", rounds=False)
    return Call(_program(shape, "direct"), _program(shape, "bytes"), arguments, (5, 6), moved, unrounded)


def _program(shape: Shape, spelling: str, rounds: bool = True) -> Callable[..., Tensor]:
    def program(*operands: Tensor) -> Tensor:
        return prologue(shape, spelling, rounds, *operands)

    return program


def programs(device: str, quick: bool) -> list[Program]:
    """Every shape at every number of tokens."""
    shapes = SHAPES if device.startswith("cuda") else REHEARSED
    return [
        Program(shape.name, tokens, functools.partial(make, shape, tokens))
        for shape in shapes
        if fp8_suits(device) or not (shape.q_fp8 or shape.kv_fp8)
        for tokens in (shape.tokens[:3] if quick else shape.tokens)
    ]


def benchmark(device: str, quick: bool = False) -> list[Measurement]:
    """Measure them."""
    return measure(programs(device, quick), device)
