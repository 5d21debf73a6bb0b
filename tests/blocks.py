"""Small attention blocks in the spellings that users write; the tests compile them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LIMIT = torch.finfo(FP8).max


def cos_sin_table(rows: int, rotary_dim: int, base: float = 10000.0) -> Tensor:
    """[rows, rotary_dim] fp32, cos first."""
    inverse = 1.0 / base ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    angles = torch.outer(torch.arange(rows).float(), inverse)
    return torch.cat([angles.cos(), angles.sin()], -1)


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neox rotation in fp32; cos and sin [T, D/2]."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-LIMIT, LIMIT).to(FP8)


class GptOssAttention(nn.Module):
    """Packed qkv, neox RoPE gathered by positions, static FP8 q, paged cache written through a view."""

    k_cache: Tensor
    v_cache: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor

    def __init__(
        self,
        hidden: int = 64,
        q_heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        blocks: int = 8,
        page: int = 4,
        quantise_q: bool = True,
        fp8_cache: bool = True,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.q_heads, self.kv_heads, self.dim = q_heads, kv_heads, dim
        self.quantise_q, self.fp8_cache = quantise_q, fp8_cache
        self.qkv = nn.Linear(hidden, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
        self.out = nn.Linear(q_heads * dim, hidden, dtype=dtype)
        shape = (blocks, page, kv_heads, dim)
        for name in ("k_cache", "v_cache"):
            cache = torch.zeros(shape, dtype=torch.uint8).view(FP8) if fp8_cache else torch.zeros(shape, dtype=dtype)
            self.register_buffer(name, cache)
        for name, value in (("q_scale", 0.05), ("k_scale", 0.04), ("v_scale", 0.03)):
            self.register_buffer(name, torch.tensor([value]))

    def write(self, cache: Tensor, x: Tensor, slots: Tensor, scale: Tensor) -> None:
        flat = cache.view(-1, self.kv_heads, self.dim)
        if self.fp8_cache:
            flat.view(torch.uint8)[slots] = to_fp8(x, scale).view(torch.uint8)
        else:
            flat[slots] = x

    def forward(self, x: Tensor, table: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        sizes = [self.q_heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        q, k, v = self.qkv(x).split(sizes, -1)
        q, k, v = (t.view(-1, t.shape[-1] // self.dim, self.dim) for t in (q, k, v))
        cos, sin = table[positions].chunk(2, -1)
        q, k = rope_half(q, cos, sin), rope_half(k, cos, sin)
        if self.quantise_q:
            q = to_fp8(q, self.q_scale).to(x.dtype) * self.q_scale.to(x.dtype)
        self.write(self.k_cache, k, slots, self.k_scale)
        self.write(self.v_cache, v, slots, self.v_scale)
        keys = self.k_cache.view(-1, self.kv_heads, self.dim)[slots].to(x.dtype)
        values = self.v_cache.view(-1, self.kv_heads, self.dim)[slots].to(x.dtype)
        if self.fp8_cache:
            keys, values = keys * self.k_scale.to(x.dtype), values * self.v_scale.to(x.dtype)
        group = self.q_heads // self.kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        )
        return x + self.out(attended[0].transpose(0, 1).reshape(x.shape[0], -1))


class Stack(nn.Module):
    """Layers that share the cos/sin table, positions and slots."""

    def __init__(self, layers: int, **arguments: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GptOssAttention(**arguments) for _ in range(layers))  # type: ignore[arg-type]

    def forward(self, x: Tensor, table: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, table, positions, slots)
        return x


def stack_inputs(
    tokens: int = 6, hidden: int = 64, rows: int = 32, slots: int = 32, dim: int = 16
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16),
        cos_sin_table(rows, dim),
        torch.randint(0, rows, (tokens,), generator=generator),
        torch.randperm(slots, generator=generator)[:tokens],
    )
