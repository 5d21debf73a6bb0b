"""Decoder stacks for the measurements of whole steps: the shapes of GPT-OSS-20B and Llama-3-8B, with random weights.

GPT-OSS's four active experts hold 4-bit weights: 4 × 4.25 bits for each weight of an expert, about what one expert's weights take in bf16.
So a token reads as many bytes as from one dense bf16 MLP of an expert's size, 2880, which stands here for the experts. (In a larger batch
more experts are active than four, which is left out.) The shapes named "dense" have the four experts as one MLP of 4 × 2880 in bf16, which
reads four times as much.

"engine" is the same layer in vLLM's operators: rotary_embedding, static_scaled_fp8_quant and reshape_and_cache_flash, with a cos/sin cache
in bf16. With "cast" that cache is in float32 and every layer casts all of it before it rotates, as vLLM's rotary layer does.

A layer begins by adding what the previous one left for it, so that compiling a layer by itself gives the kernels of a whole stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from rope_fusion.bench_timing import POISON

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
CONTEXT, PAGE, FILLED = 1040, 16, 1023  # with the new one, a sequence has 1024 tokens


@dataclass(frozen=True)
class Shape:
    """A decoder stack."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    dim: int
    mlp: int
    fp8: bool = False
    engine: bool = False
    cast: bool = False  # the cos/sin cache, in every layer
    bias: bool = False


_GPT_OSS = Shape("gpt-oss-20b bf16", 24, 2880, 64, 8, 64, 2880, bias=True)
SHAPES = (
    _GPT_OSS,
    replace(_GPT_OSS, name="gpt-oss-20b fp8", fp8=True),
    replace(_GPT_OSS, name="gpt-oss-20b engine fp8", fp8=True, engine=True),
    replace(_GPT_OSS, name="gpt-oss-20b engine fp8, cast", fp8=True, engine=True, cast=True),
    Shape("llama-3-8b bf16", 32, 4096, 32, 8, 128, 14336),
    replace(_GPT_OSS, name="gpt-oss-20b dense bf16", mlp=4 * 2880),
    replace(_GPT_OSS, name="gpt-oss-20b dense fp8", mlp=4 * 2880, fp8=True),
)
REHEARSED = (
    Shape("small bf16", 2, 64, 8, 2, 16, 64),
    Shape("small fp8", 2, 64, 8, 2, 16, 64, fp8=True, bias=True),
    Shape("small engine fp8", 2, 64, 8, 2, 16, 64, fp8=True, engine=True, bias=True),
    Shape("small engine fp8, cast", 2, 64, 8, 2, 16, 64, fp8=True, engine=True, cast=True, bias=True),
)


class Weight(NamedTuple):
    """Of a linear layer, [out, in], and its bias."""

    weight: Tensor
    bias: Tensor | None


class Layer(NamedTuple):
    """One layer's weights and caches, [blocks, PAGE, heads, dim]."""

    qkv: Weight
    out: Weight
    up: Weight
    down: Weight
    k_cache: Tensor
    v_cache: Tensor


class Rotary(nn.Module):
    """vLLM's rotary layer: one for all layers of a model; it owns the cos/sin cache."""

    cos_sin_cache: Tensor

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        table = cos_sin_table(shape, device)
        self.dim = shape.dim
        self.register_buffer("cos_sin_cache", table if shape.cast else table.to(BF16))

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> None:
        """Rotate q and k in place; a cache that is in bf16 already is not cast."""
        torch.ops._C.rotary_embedding(positions, q, k, self.dim, self.cos_sin_cache.to(q.dtype), True)


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    """Static FP8."""
    return (x.float() / scale).clamp(-448, 448).to(FP8)


def store(cache: Tensor, x: Tensor, slots: Tensor, spelling: str) -> None:
    """Write x [B, H, D] at its slots; "bytes" is the direct spelling for eager torch, and "view" writes through one."""
    if x.element_size() == 1 and spelling != "direct":  # eager torch cannot index FP8 tensors; Inductor can
        cache, x = cache.view(torch.uint8), x.view(torch.uint8)
    if spelling == "view":
        cache.view(-1, *cache.shape[2:])[slots] = x
    else:
        cache[slots // PAGE, slots % PAGE] = x


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neox pairs, in float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def prologue(
    shape: Shape,
    spelling: str,
    rotary: Rotary | None,
    qkv: Tensor,
    layer: Layer,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    scale: Tensor,
) -> Tensor:
    """The q that attention takes, [B, Hq, D]; K and V are in their caches."""
    sizes = [shape.q_heads * shape.dim, shape.kv_heads * shape.dim, shape.kv_heads * shape.dim]
    q, k, v = qkv.split(sizes, -1)
    if rotary is not None:
        rotary(positions, q, k)
        q8 = torch.empty(q.shape, dtype=FP8, device=q.device)
        torch.ops._C.static_scaled_fp8_quant(q8, q, scale)
        k, v = (x.view(x.shape[0], -1, shape.dim) for x in (k, v))
        torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, layer.k_cache, layer.v_cache, slots, "fp8", scale, scale)
        return q8.view(q.shape[0], -1, shape.dim)
    q, k, v = (x.view(x.shape[0], -1, shape.dim) for x in (q, k, v))
    cos, sin = (x[:, None] for x in table[positions].chunk(2, -1))
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    if shape.fp8:
        q, k, v = (quantised(x, scale) for x in (q, k, v))
    store(layer.k_cache, k, slots, spelling)
    store(layer.v_cache, v, slots, spelling)
    return q


def layer_function(shape: Shape, spelling: str, device: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """One layer: add, norm, packed qkv, RoPE, cache write, attention, MLP."""
    rotary = Rotary(shape, device) if shape.engine else None

    def forward(
        x: Tensor, delta: Tensor, layer: Layer, table: Tensor, positions: Tensor, slots: Tensor, length: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = x + delta
        qkv = linear(rms_norm(x, x.shape[-1:]), *layer.qkv)
        q = prologue(shape, spelling, rotary, qkv, layer, table, positions, slots, scale)
        attended = torch.ops.rope_fusion_bench.decode_attention(
            q, layer.k_cache, layer.v_cache, length, scale, scale, scale, CONTEXT
        )
        x = x + linear(attended.reshape(x.shape[0], -1), *layer.out)
        gate, up = linear(rms_norm(x, x.shape[-1:]), *layer.up).chunk(2, -1)
        return x, linear(silu(gate) * up, *layer.down)

    return forward


def step(function: Callable[..., tuple[Tensor, Tensor]], layers: Sequence[Layer], x: Tensor, *shared: Tensor) -> Tensor:
    """All layers, by a function for one."""
    delta = torch.zeros_like(x)
    for layer in layers:
        x, delta = function(x, delta, layer, *shared)
    return x + delta


def make_layers(shape: Shape, batch: int, count: int, device: str) -> list[Layer]:
    """Random weights of a size that keeps values near 1, and caches full of random values."""
    generator = torch.Generator(device).manual_seed(0)

    def weight(rows: int, columns: int) -> Weight:
        random = torch.randn(rows, columns + 1, device=device, dtype=BF16, generator=generator)
        matrix = random[:, 1:] * columns**-0.5
        return Weight(matrix.contiguous(), random[:, 0] * 0.1 if shape.bias else None)

    def cache() -> Tensor:
        size = (batch * CONTEXT // PAGE, PAGE, shape.kv_heads, shape.dim)
        return torch.randn(size, device=device, dtype=BF16, generator=generator).to(FP8 if shape.fp8 else BF16)

    width, heads = shape.q_heads * shape.dim, shape.q_heads + 2 * shape.kv_heads
    return [
        Layer(
            weight(heads * shape.dim, shape.hidden),
            weight(shape.hidden, width),
            weight(2 * shape.mlp, shape.hidden),
            weight(shape.hidden, shape.mlp),
            cache(),
            cache(),
        )
        for _ in range(count)
    ]


def cos_sin_table(shape: Shape, device: str) -> Tensor:
    """[positions, dim] in float32, cos first."""
    frequency = 150000.0 ** (-torch.arange(0, shape.dim, 2, device=device) / shape.dim)
    rows = 131072 if device.startswith("cuda") else 2 * FILLED
    angles = torch.arange(rows, device=device)[:, None] * frequency
    return torch.cat([angles.cos(), angles.sin()], -1)


def inputs(shape: Shape, batch: int, device: str) -> tuple[Tensor, ...]:
    """x, cos/sin table, positions, slots, length and scale."""
    return (
        torch.randn(batch, shape.hidden, device=device).to(BF16),
        cos_sin_table(shape, device),
        torch.full((batch,), FILLED, device=device),
        torch.arange(batch, device=device) * CONTEXT + FILLED,
        torch.full((1,), FILLED + 1, device=device, dtype=torch.int32),
        torch.full((1,), 0.05 if shape.fp8 else 1.0, device=device),
    )


def forget_new_tokens(layers: Sequence[Layer], slots: Tensor) -> None:
    """NaN where the step is to write, so that a write that is missing shows in its result."""
    for layer in layers:
        for cache in (layer.k_cache, layer.v_cache):
            cache.view(torch.uint8)[slots // PAGE, slots % PAGE] = POISON
