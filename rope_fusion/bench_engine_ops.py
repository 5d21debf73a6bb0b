"""Stand-ins for vLLM's operators, for benchmarks of engine graphs where no vLLM is installed.

`register_missing` defines those of these operators that the process lacks, with vLLM's exact schemas:

* ``_C::rotary_embedding``: rotates q and k in place;
* ``_C::static_scaled_fp8_quant``: static per-tensor FP8 quantisation;
* ``_C_cache_ops::reshape_and_cache_flash``: writes k and v to a paged cache.

Each is one Triton kernel that splits its work, and rounds, as vLLM's CUDA kernel does, so that its cost is about the same; where the real
operators are there, they are what a benchmark runs. No part of what rope_fusion offers, and no pass depends on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

SCHEMAS = {
    "_C::rotary_embedding": "(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox, "
    "int rope_dim_offset=0, bool inverse=False) -> ()",
    "_C::static_scaled_fp8_quant": "(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "_C_cache_ops::reshape_and_cache_flash": "(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()",
}
FP8_KINDS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
REAL_LIBRARY = "ROPE_FUSION_VLLM_OPS"  # a path
HEADS = 16  # of one token in one program of the rotation
ELEMENTS = 1024  # of one row in one program of the quantisation


@triton.jit
def _product(x, y, MATH: tl.constexpr):
    """Rounded to MATH, in float32."""
    return (x.to(tl.float32) * y).to(MATH).to(tl.float32)


@triton.jit
def _rotate(
    positions, q, k, table, q_stride, k_stride, q_head_stride, k_head_stride, table_stride, q_heads, k_heads,
    START: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    NEOX: tl.constexpr, INVERSE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """One token and some heads of q, or of k, in place."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(q_heads, HEADS)
    of_q = block < q_blocks
    head = tl.where(of_q, block, block - q_blocks) * HEADS + tl.arange(0, HEADS)
    row = tl.where(of_q, token * q_stride, token * k_stride) + head * tl.where(of_q, q_head_stride, k_head_stride)
    column = tl.arange(0, BLOCK)
    angle = tl.load(positions + token).to(tl.int64) * table_stride + column
    cos = tl.load(table + angle, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(table + angle + HALF, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        sin = -sin
    if NEOX:
        at = row[:, None] + START + column[None, :]
        second = HALF
    else:
        at = row[:, None] + START + 2 * column[None, :]
        second = 1
    mask = (head < tl.where(of_q, q_heads, k_heads))[:, None] & (column < HALF)[None, :]
    pointer = (q if of_q else k) + at
    a = tl.load(pointer, mask=mask, other=0.0)
    b = tl.load(pointer + second, mask=mask, other=0.0)
    first = _product(a, cos, MATH) - _product(b, sin, MATH)
    last = _product(b, cos, MATH) + _product(a, sin, MATH)
    tl.store(pointer, first.to(a.dtype), mask=mask)
    tl.store(pointer + second, last.to(a.dtype), mask=mask)


@triton.jit
def _quantise(result, x, scale, x_stride, width, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row of x, times the reciprocal of the scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32) * (1.0 / tl.load(scale))
    value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    tl.store(result + row * width + column, value.to(result.dtype.element_ty), mask=column < width)


@triton.jit
def _stored(value, scale, LIMIT: tl.constexpr):
    """The value as the cache holds it; LIMIT is 0 where nothing is quantised."""
    if LIMIT == 0:
        return value
    else:
        return tl.minimum(tl.maximum(value.to(tl.float32) / tl.load(scale), -LIMIT), LIMIT)


@triton.jit
def _store(
    key, value, key_cache, value_cache, slots, k_scale, v_scale, key_stride, value_stride, key_head, value_head,
    block_stride, place_stride, head_stride, places, width, DIM: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """All heads of one token's k and v."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    element = tl.arange(0, BLOCK)
    head, column = element // DIM, element % DIM
    mask = (element < width) & (slot >= 0)
    to = (slot // places) * block_stride + (slot % places) * place_stride + head * head_stride + column
    k = tl.load(key + token * key_stride + head * key_head + column, mask=mask, other=0.0)
    v = tl.load(value + token * value_stride + head * value_head + column, mask=mask, other=0.0)
    tl.store(key_cache + to, _stored(k, k_scale, LIMIT).to(key_cache.dtype.element_ty), mask=mask)
    tl.store(value_cache + to, _stored(v, v_scale, LIMIT).to(value_cache.dtype.element_ty), mask=mask)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotates in place, reading strides as vLLM's operator does.

    Args:
        positions: [T] or [B, S], integers.
        query, key: [*positions, heads * head_size] or [*positions, heads, head_size]; the rows are evenly apart.
        cos_sin_cache: [P, rotary_dim], cos first, of the query's dtype or float32.
    """
    lead = positions.dim()
    half = cos_sin_cache.shape[1] // 2
    k = query if key is None else key

    def heads(x: Tensor) -> int:
        return x.shape[lead:].numel() // head_size

    def head_stride(x: Tensor) -> int:
        return x.stride(-2) if x.dim() == lead + 2 else head_size

    k_heads = 0 if key is None else heads(k)
    dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    grid = (positions.numel(), triton.cdiv(heads(query), HEADS) + triton.cdiv(k_heads, HEADS))
    _rotate[grid](
        positions, query, k, cos_sin_cache, query.stride(lead - 1), k.stride(lead - 1), head_stride(query), head_stride(k),
        cos_sin_cache.stride(0), heads(query), k_heads, rope_dim_offset, half, triton.next_power_of_2(half), HEADS,
        is_neox, inverse, dtypes[query.dtype] if cos_sin_cache.dtype == query.dtype else tl.float32, num_warps=4,
    )  # fmt: skip


def static_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor, group_shape: list[int] | None = None) -> None:
    """result [..., N], contiguous, is input [..., N] over the scale of one element; rows of the input are evenly apart."""
    if scale.numel() != 1:
        raise NotImplementedError(f"the stand-in quantises per tensor, got scales of shape {tuple(scale.shape)}")
    width = input.shape[-1]
    rows = input.numel() // width
    grid = (rows, triton.cdiv(width, ELEMENTS))
    stride = input.stride(-2) if input.dim() > 1 else width
    _quantise[grid](result, input, scale, stride, width, torch.finfo(result.dtype).max, ELEMENTS, num_warps=4)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Stores key and value, [T, H, D] with contiguous heads' elements, at slots [T or fewer]; negative ones store nothing.

    The caches are [blocks, places, H, D], both with the same strides, the last of them 1.
    """
    fp8 = FP8_KINDS.get(kv_cache_dtype)
    if fp8 is None and kv_cache_dtype != "auto":
        raise NotImplementedError(
            f"the stand-in knows the kinds auto and {', '.join(FP8_KINDS)}, got {kv_cache_dtype!r}"
        )
    if key_cache.stride() != value_cache.stride():
        raise NotImplementedError("the stand-in stores to caches of the same strides")
    if fp8 is not None:
        key_cache, value_cache = key_cache.view(fp8), value_cache.view(fp8)
    width = key.shape[1] * key.shape[2]
    _store[(slot_mapping.shape[0],)](
        key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, key.stride(0), value.stride(0), key.stride(1),
        value.stride(1), *key_cache.stride()[:3], key_cache.shape[1], width, key.shape[2], triton.next_power_of_2(width),
        0.0 if fp8 is None else torch.finfo(fp8).max, num_warps=4,
    )  # fmt: skip


BODIES: dict[str, Callable[..., None]] = {
    "_C::rotary_embedding": rotary_embedding,
    "_C::static_scaled_fp8_quant": static_scaled_fp8_quant,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
}
LIBRARIES = {namespace: torch.library.Library(namespace, "FRAGMENT") for namespace in ("_C", "_C_cache_ops")}


def register_missing() -> list[str]:
    """Define the operators that this process lacks, for CUDA devices; the names of the stand-ins made by this call.

    The library that the environment variable ROPE_FUSION_VLLM_OPS names is loaded first.
    """
    if library := os.environ.get(REAL_LIBRARY):
        torch.ops.load_library(library)
    made = []
    for name, schema in SCHEMAS.items():
        namespace, operator = name.split("::")
        if hasattr(getattr(torch.ops, namespace), operator):
            continue
        LIBRARIES[namespace].define(operator + schema)
        LIBRARIES[namespace].impl(operator, BODIES[name], "CUDA")
        made.append(name)
    return made
