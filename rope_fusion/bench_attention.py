"""A plain flash-decoding kernel for the decode benchmark: the same attention beside every prologue.

Sequences lie in a cache one after the other, `context` slots each. It reads bf16 or FP8, and is no part of what rope_fusion offers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
PROGRAMS = 1024  # that the splits of a sequence aim at: a few for each multiprocessor of a large GPU


def splits_of(sequences: int, kv_heads: int) -> int:
    """Parts that each sequence is split into: many where there are few sequences, few where merging them costs more."""
    return max(2, min(16, triton.next_power_of_2(PROGRAMS // (sequences * kv_heads))))


@triton.jit
def _partial(
    q, k, v, sums, out, length, q_scale, k_scale, v_scale, soft_scale, context, HQ: tl.constexpr, HK: tl.constexpr,
    D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0) // HK
    head = tl.program_id(0) % HK
    split = tl.program_id(1)
    GROUP: tl.constexpr = HQ // HK
    ROWS: tl.constexpr = 16 if GROUP < 16 else GROUP
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    t = tl.arange(0, BLOCK)
    queries = head * GROUP + row
    used = row < GROUP
    # FP8 widens to fp16 by one instruction, and exactly
    WIDE: tl.constexpr = tl.bfloat16 if k.dtype.element_ty == tl.bfloat16 else tl.float16
    qv = tl.load(q + (sequence * HQ + queries)[:, None] * D + d[None, :], mask=used[:, None], other=0.0).to(WIDE)
    scale = tl.load(q_scale) * tl.load(k_scale) * soft_scale
    last = tl.load(length)
    each = tl.cdiv(tl.cdiv(last, SPLITS), BLOCK) * BLOCK
    start = split * each
    stop = tl.minimum(start + each, last)
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for at in range(start, stop, BLOCK):
        inside = at + t < stop
        place = ((sequence * context + at + t).to(tl.int64) * HK + head) * D
        kv = tl.load(k + place[None, :] + d[:, None], mask=inside[None, :], other=0.0).to(WIDE)
        score = tl.where(inside[None, :], tl.dot(qv, kv) * scale, -float("inf"))
        new = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp(score - new[:, None])
        keep = tl.exp(best - new)
        vv = tl.load(v + place[:, None] + d[None, :], mask=inside[:, None], other=0.0).to(WIDE)
        acc = acc * keep[:, None] + tl.dot(weight.to(WIDE), vv)
        total = total * keep + tl.sum(weight, 1)
        best = new
    to = (sequence * HQ + queries) * SPLITS + split
    tl.store(sums + to * 2, best, mask=used)
    tl.store(sums + to * 2 + 1, total, mask=used)
    tl.store(out + to[:, None] * D + d[None, :], acc * tl.load(v_scale), mask=used[:, None])


@triton.jit
def _merge(sums, partial, out, D: tl.constexpr, SPLITS: tl.constexpr):
    query = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    best = tl.load(sums + (query * SPLITS + s) * 2)
    total = tl.load(sums + (query * SPLITS + s) * 2 + 1)
    weight = tl.where(total > 0, tl.exp(best - tl.max(best, 0)), 0.0)
    acc = tl.load(partial + (query * SPLITS + s)[:, None] * D + d[None, :])
    value = tl.sum(tl.where(total[:, None] > 0, acc, 0.0) * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + query * D + d, value.to(tl.bfloat16))


@triton.jit
def nothing(x):
    """A kernel that does nothing: what a launch costs."""


@torch.library.custom_op("rope_fusion_bench::decode_attention", mutates_args=())
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, length: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, context: int
) -> Tensor:
    """Attention of one query per sequence over the first `length` slots of its part of the cache.

    Args:
        q: [B, Hq, D] bf16 or FP8, contiguous.
        k, v: caches whose memory is [B * context, Hk, D], bf16 or FP8.
        length: int32 [1].
        q_scale, k_scale, v_scale: fp32 [1]; 1 where nothing is quantised.
    """
    batch, q_heads, dim = q.shape
    kv_heads = k.shape[-2]
    splits = splits_of(batch, kv_heads)
    partial = torch.empty(batch * q_heads, splits, dim, device=q.device, dtype=torch.float32)
    sums = torch.empty(batch * q_heads, splits, 2, device=q.device, dtype=torch.float32)
    out = torch.empty(batch, q_heads, dim, device=q.device, dtype=torch.bfloat16)
    _partial[(batch * kv_heads, splits)](
        q, k, v, sums, partial, length, q_scale, k_scale, v_scale, dim**-0.5, context, q_heads, kv_heads, dim, splits, BLOCK
    )  # fmt: skip
    _merge[(batch * q_heads,)](sums, partial, out, dim, splits)
    return out


@decode_attention.register_kernel("cpu")
def _(q, k, v, length, q_scale, k_scale, v_scale, context):
    """In float32, for rehearsals."""
    batch, q_heads, dim = q.shape
    keys, values = (
        cache.float()
        .reshape(batch, context, -1, dim)[:, : int(length)]
        .repeat_interleave(q_heads // cache.shape[-2], 2)
        for cache in (k, v)
    )
    scores = torch.einsum("bhd,bthd->bht", q.float(), keys) * (q_scale * k_scale * dim**-0.5)
    return (torch.einsum("bht,bthd->bhd", scores.softmax(-1), values) * v_scale).to(torch.bfloat16)


@decode_attention.register_fake
def _(q, k, v, length, q_scale, k_scale, v_scale, context):
    return q.new_empty(q.shape, dtype=torch.bfloat16)
