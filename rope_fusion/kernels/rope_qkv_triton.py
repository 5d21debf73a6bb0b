"""The Triton kernel of ``rope_fusion::rope_qkv``: rotation, FP8 quantisation and both cache writes in one launch.

One program owns a tile of tokens x heads of q, or of k and v together; programs of the same tokens are neighbours, so
the cos/sin rows they share come from the cache. Every row address is 64-bit (a cache may hold more than 2^31 elements),
offsets inside a row are 32-bit. Strides arrive as multiples of one power of two, which tells the compiler what it needs
for 16-byte accesses and leaves sizes and strides out of the kernel's cache key: a new token count, batch or cache size
compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rope_fusion.kernels.cache_layout import Geometry, parse_layout
from rope_fusion.kernels.rope_qkv import Target, target_of, unsupported

LINEAR = tl.constexpr(0)  # how a token finds its row in a cache: slot * place stride,
PAGED = tl.constexpr(1)  # slot = block * places + place,
STATIC = tl.constexpr(2)  # block = batch entry of the token, place = slot,
PAIR = tl.constexpr(3)  # or block = slot, place = slot offset.

ONE_BATCH = tl.constexpr(0)  # how a token index splits into batch entry and place in the sequence
ONE_PLACE = tl.constexpr(1)
BATCH_AND_PLACE = tl.constexpr(2)


# fmt: off
@triton.jit
def _row(batch, place, batch_stride, place_stride, SPLIT: tl.constexpr):
    """Offset of a token's row: only the strides that matter are multiplied."""
    if SPLIT == ONE_BATCH:
        return place * place_stride
    elif SPLIT == ONE_PLACE:
        return batch * batch_stride
    else:
        return batch * batch_stride + place * place_stride


@triton.jit
def _tile_rows(batch, place, head, batch_stride, place_stride, head_stride, SPLIT: tl.constexpr):
    """Offsets of the rows of a tile, [tokens, heads, 1]."""
    return _row(batch, place, batch_stride, place_stride, SPLIT)[:, None, None] + (head * head_stride)[None, :, None]


@triton.jit
def _load_pairs(ptr, rows, mask, other, ROTARY: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of each row's pairs, [tokens, heads, BLOCK] each; `rows` and `mask` are [tokens, heads, 1]."""
    if INTERLEAVED:
        index = tl.arange(0, 2 * BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = mask & (index < ROTARY)
        both = tl.load(ptr + rows + index, mask=mask, other=other)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK, 2)))
    else:
        index = tl.arange(0, BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = mask & (index < ROTARY // 2)
        first = tl.load(ptr + rows + index, mask=mask, other=other)
        second = tl.load(ptr + rows + ROTARY // 2 + index, mask=mask, other=other)
    return first, second


@triton.jit
def _load_angles(
    ptr, rows, mask, ROTARY: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Cosines (or sines) of first and second elements; the same values twice where one column serves a pair."""
    if FULL:
        return _load_pairs(ptr, rows, mask, float("nan"), ROTARY, BLOCK, INTERLEAVED)
    else:
        index = tl.arange(0, BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = mask & (index < ROTARY // 2)
        column = tl.load(ptr + rows + index, mask=mask, other=float("nan"))
        return column, column


@triton.jit
def _store_pairs(ptr, rows, mask, first, second, ROTARY: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK))
        index = tl.arange(0, 2 * BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = mask & (index < ROTARY)
        tl.store(ptr + rows + index, both, mask=mask)
    else:
        index = tl.arange(0, BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = mask & (index < ROTARY // 2)
        tl.store(ptr + rows + index, first, mask=mask)
        tl.store(ptr + rows + ROTARY // 2 + index, second, mask=mask)


@triton.jit
def _round(x, WIDE: tl.constexpr, MATH: tl.constexpr, EXACT: tl.constexpr):
    """What one eager operation does to its result: round it to the arithmetic's dtype."""
    if EXACT:
        return x.to(MATH).to(WIDE)
    else:
        return x


@triton.jit
def _rotate(a, b, c1, c2, s1, s2, INVERSE: tl.constexpr, WIDE: tl.constexpr, MATH: tl.constexpr, EXACT: tl.constexpr):
    """The rotated pair in WIDE precision; in exact mode every operand, product and sum is rounded to MATH."""
    a, b = _round(a.to(WIDE), WIDE, MATH, EXACT), _round(b.to(WIDE), WIDE, MATH, EXACT)
    c1, c2 = _round(c1.to(WIDE), WIDE, MATH, EXACT), _round(c2.to(WIDE), WIDE, MATH, EXACT)
    s1, s2 = _round(s1.to(WIDE), WIDE, MATH, EXACT), _round(s2.to(WIDE), WIDE, MATH, EXACT)
    ac, bs = _round(a * c1, WIDE, MATH, EXACT), _round(b * s1, WIDE, MATH, EXACT)
    bc, as_ = _round(b * c2, WIDE, MATH, EXACT), _round(a * s2, WIDE, MATH, EXACT)
    if INVERSE:
        first, second = ac + bs, bc - as_
    else:
        first, second = ac - bs, bc + as_
    return _round(first, WIDE, MATH, EXACT), _round(second, WIDE, MATH, EXACT)


@triton.jit
def _materialised(x, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """`x` rounded to the dtype of the tensor that a program would have stored here."""
    if PACKED:
        # Left to itself the compiler rounds values that are not stored one by one, at a quarter of the rate of pairs.
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
            "=r,=r,f,f", [x], dtype=tl.int32, is_pure=True, pack=2,
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def _load_rotated(
    ptr, rows, mask, cos_ptr, sin_ptr, cos_row, sin_row, in_table,
    ROTARY: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    WIDE: tl.constexpr, MATH: tl.constexpr, OUT: tl.constexpr, EXACT: tl.constexpr, WIDE_ANGLES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The rotated pairs of a tile, rounded to OUT."""
    a, b = _load_pairs(ptr, rows, mask, 0.0, ROTARY, BLOCK, INTERLEAVED)
    cos_rows, sin_rows, angle_mask = cos_row[:, None, None], sin_row[:, None, None], in_table[:, None, None]
    if WIDE_ANGLES:  # each head loads its own copy, in the layout of the tile: more first-level traffic, no exchange
        cos_rows, sin_rows = tl.broadcast_to(cos_rows, rows.shape), tl.broadcast_to(sin_rows, rows.shape)
        angle_mask = tl.broadcast_to(angle_mask, rows.shape)
    c1, c2 = _load_angles(cos_ptr, cos_rows, angle_mask, ROTARY, BLOCK, FULL, INTERLEAVED)
    s1, s2 = _load_angles(sin_ptr, sin_rows, angle_mask, ROTARY, BLOCK, FULL, INTERLEAVED)
    first, second = _rotate(a, b, c1, c2, s1, s2, INVERSE, WIDE, MATH, EXACT)
    return _materialised(first, OUT, PACKED), _materialised(second, OUT, PACKED)


@triton.jit
def _reciprocal(scale):
    """1 / scale in two parts of fp32, which add up to it within 2^-45 of it."""
    # The first part lies below the reciprocal, so that the second has its sign: no infinity meets its opposite when
    # both multiply an x. Where there is no finite reciprocal the parts are alike, for the same reason.
    upper = (1.0 / scale) * (1.0 - 2.0**-20)
    rest = tl.fma(-upper, scale, 1.0)
    lower = tl.fma(upper * rest, rest, upper * rest)
    return upper, tl.where(rest > 0.0, lower, upper)


@triton.jit
def _load_scale(ptr, value, head, PER_HEAD: tl.constexpr, HEADS: tl.constexpr):
    """The scale and its reciprocal in two parts, in fp32: scalars, or [1, heads, 1]."""
    if PER_HEAD:
        scale = tl.load(ptr + head, mask=head < HEADS, other=1.0).to(tl.float32)[None, :, None]
    elif ptr is not None:
        scale = tl.load(ptr).to(tl.float32)
    else:
        scale = value
    upper, lower = _reciprocal(scale)
    return scale, upper, lower


@triton.jit
def _quantise(
    x, scale, upper, lower, FP8: tl.constexpr, LIMIT: tl.constexpr, MULTIPLIES: tl.constexpr, EXACT: tl.constexpr
):
    """`clamp(x / scale, ±LIMIT)` in FP8; NaN stays NaN. No LIMIT where the conversion itself saturates."""
    x = x.to(tl.float32)
    if MULTIPLIES:
        scaled = x * scale
    elif EXACT:
        scaled = tl.div_rn(x, scale)
    else:
        # A product with a reciprocal in fp32 errs in the last bit, which moves values that sit between two FP8 numbers.
        # With the reciprocal in two parts it is the rounded quotient, for one fused multiply-add more.
        scaled = tl.fma(x, upper, x * lower)
    if LIMIT is not None:
        scaled = tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(FP8)


@triton.jit
def _as_stored(
    x, ptr, scale, upper, lower,
    FP8: tl.constexpr, LIMIT: tl.constexpr, MULTIPLIES: tl.constexpr, EXACT: tl.constexpr,
):
    """`x` as the tensor behind `ptr` holds it: quantised, as bytes where the tensor is typed uint8, or cast."""
    if FP8 is None:
        return x.to(ptr.dtype.element_ty)
    else:
        quantised = _quantise(x, scale, upper, lower, FP8, LIMIT, MULTIPLIES, EXACT)
        if ptr.dtype.element_ty == tl.uint8:
            return quantised.to(tl.uint8, bitcast=True)
        else:
            return quantised


@triton.jit
def _locate(
    slot, slot_offset, batch, valid, blocks, places, block_stride, place_stride,
    ADDRESSING: tl.constexpr, PAGE: tl.constexpr, SKIP_NEGATIVE: tl.constexpr,
):
    """Row offset of each token in a cache, and whether it is stored: a slot outside the cache is dropped."""
    slot = slot.to(tl.int64)
    if ADDRESSING == STATIC:
        limit = places
    elif ADDRESSING == PAIR:
        limit = blocks
    else:
        limit = blocks * places
    if not SKIP_NEGATIVE:
        slot = tl.where(slot < 0, slot + limit, slot)
    valid = valid & (slot >= 0) & (slot < limit)
    if ADDRESSING == LINEAR:
        row = slot * place_stride
    elif ADDRESSING == STATIC:
        row = batch.to(tl.int64) * block_stride + slot * place_stride
    elif ADDRESSING == PAGED:
        block = slot // PAGE
        row = block * block_stride + (slot - block * PAGE) * place_stride
    else:
        slot_offset = slot_offset.to(tl.int64)
        if not SKIP_NEGATIVE:
            slot_offset = tl.where(slot_offset < 0, slot_offset + places, slot_offset)
        valid = valid & (slot_offset >= 0) & (slot_offset < places)
        row = slot * block_stride + slot_offset * place_stride
    return row, valid


@triton.jit
def _pass_index(START: tl.constexpr, ROTARY: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Indices of the elements outside the rotary slice, [1, 1, BLOCK]: a range where the slice ends a head."""
    index = tl.arange(0, BLOCK)[None, None, :]
    if START == 0:
        return index + ROTARY, index < DIM - ROTARY
    elif START + ROTARY == DIM:
        return index, index < DIM - ROTARY
    else:
        return tl.where(index < START, index, index + ROTARY), index < DIM - ROTARY


# Sizes, strides and scales vary from call to call; as plain numbers of a declared type they cause no recompilation.
@triton.jit(do_not_specialize=list(range(16, 60)))
def rope_qkv_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, position_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, slot_offset_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, q_out_ptr, k_out_ptr, q8_ptr,
    q_scale_value: tl.float32, k_scale_value: tl.float32, v_scale_value: tl.float32,
    tokens: tl.int32, seq: tl.int32, stored_tokens: tl.int32, table_rows: tl.int64,
    q_batch: tl.int64, q_place: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_place: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_place: tl.int64, v_head: tl.int64,
    q_out_batch: tl.int64, q_out_place: tl.int64, q_out_head: tl.int64,
    k_out_batch: tl.int64, k_out_place: tl.int64, k_out_head: tl.int64,
    cos_batch: tl.int64, cos_place: tl.int64, sin_batch: tl.int64, sin_place: tl.int64,
    position_batch: tl.int64, position_place: tl.int64, slot_batch: tl.int64, slot_place: tl.int64,
    slot_offset_batch: tl.int64, slot_offset_place: tl.int64,
    k_offset: tl.int64, k_blocks: tl.int64, k_places: tl.int64,
    k_block_stride: tl.int64, k_place_stride: tl.int64, k_head_stride: tl.int64,
    v_offset: tl.int64, v_blocks: tl.int64, v_places: tl.int64,
    v_block_stride: tl.int64, v_place_stride: tl.int64, v_head_stride: tl.int64,
    UNIT: tl.constexpr, SPLIT: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, ROTARY: tl.constexpr, START: tl.constexpr, FULL: tl.constexpr,
    INTERLEAVED: tl.constexpr, HALVES_OUT: tl.constexpr, INVERSE: tl.constexpr,
    WIDE: tl.constexpr, MATH: tl.constexpr, OUT: tl.constexpr, EXACT: tl.constexpr,
    Q_FP8: tl.constexpr, Q_LIMIT: tl.constexpr, Q_MULTIPLIES: tl.constexpr,
    KV_FP8: tl.constexpr, KV_LIMIT: tl.constexpr, KV_MULTIPLIES: tl.constexpr,
    K_SCALE_PER_HEAD: tl.constexpr, V_SCALE_PER_HEAD: tl.constexpr,
    K_ADDRESSING: tl.constexpr, V_ADDRESSING: tl.constexpr, K_PAGE: tl.constexpr, V_PAGE: tl.constexpr,
    SKIP_NEGATIVE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_Q_HEADS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_PASS: tl.constexpr, BLOCK_V: tl.constexpr,
    Q_GROUPS: tl.constexpr, KV_GROUPS: tl.constexpr,
    WIDE_ANGLES: tl.constexpr, Q_PACKED: tl.constexpr, K_PACKED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    pid = tl.program_id(0)
    group = pid % (Q_GROUPS + KV_GROUPS)
    token = (pid // (Q_GROUPS + KV_GROUPS)) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    live = token < tokens
    if SPLIT == ONE_BATCH:
        batch, place = tl.zeros_like(token), token
    elif SPLIT == ONE_PLACE:
        batch, place = token, tl.zeros_like(token)
    else:
        batch, place = token // seq, token % seq
    OUT_INTERLEAVED: tl.constexpr = INTERLEAVED and not HALVES_OUT
    if DEPENDENT:  # launched before the kernel ahead of it has ended: nothing may be read or written before this point
        gdc_wait()
        gdc_launch_dependents()

    # The cos/sin row of each token: gathered by position, or its own. A position outside the table reads NaN, not
    # foreign memory.
    if position_ptr is not None:
        position_row = _row(batch, place, position_batch, position_place, SPLIT)
        position = tl.load(position_ptr + position_row, mask=live, other=0).to(tl.int64)
        position = tl.where(position < 0, position + table_rows, position)
        cos_row, sin_row = position * (cos_place * UNIT), position * (sin_place * UNIT)
        in_table = live & (position >= 0) & (position < table_rows)
    else:
        cos_row = _row(batch, place, cos_batch * UNIT, cos_place * UNIT, SPLIT)
        sin_row = _row(batch, place, sin_batch * UNIT, sin_place * UNIT, SPLIT)
        in_table = live

    if group < Q_GROUPS:
        if Q_GROUPS > 0:
            q_index = group * BLOCK_Q_HEADS + tl.arange(0, BLOCK_Q_HEADS)
            q_mask = live[:, None, None] & (q_index < Q_HEADS)[None, :, None]
            q_rows = _tile_rows(batch, place, q_index, q_batch * UNIT, q_place * UNIT, q_head * UNIT, SPLIT)
            out_rows = _tile_rows(
                batch, place, q_index, q_out_batch * UNIT, q_out_place * UNIT, q_out_head * UNIT, SPLIT
            )
            if Q_FP8 is not None:
                q_scale, q_upper, q_lower = _load_scale(q_scale_ptr, q_scale_value, q_index, False, Q_HEADS)
            q1, q2 = _load_rotated(
                q_ptr, q_rows + START, q_mask, cos_ptr, sin_ptr, cos_row, sin_row, in_table,
                ROTARY, BLOCK_HALF, FULL, INTERLEAVED, INVERSE, WIDE, MATH, OUT, EXACT, WIDE_ANGLES, Q_PACKED,
            )
            if q_out_ptr is not None:
                _store_pairs(q_out_ptr, out_rows + START, q_mask, q1, q2, ROTARY, BLOCK_HALF, OUT_INTERLEAVED)
            if Q_FP8 is not None:
                q1_fp8 = _quantise(q1, q_scale, q_upper, q_lower, Q_FP8, Q_LIMIT, Q_MULTIPLIES, EXACT)
                q2_fp8 = _quantise(q2, q_scale, q_upper, q_lower, Q_FP8, Q_LIMIT, Q_MULTIPLIES, EXACT)
                _store_pairs(q8_ptr, out_rows + START, q_mask, q1_fp8, q2_fp8, ROTARY, BLOCK_HALF, OUT_INTERLEAVED)
            if ROTARY < DIM:
                q_element, q_inside = _pass_index(START, ROTARY, DIM, BLOCK_PASS)
                q_rest = tl.load(q_ptr + q_rows + q_element, mask=q_mask & q_inside, other=0.0)
                if q_out_ptr is not None:
                    tl.store(q_out_ptr + out_rows + q_element, q_rest, mask=q_mask & q_inside)
                if Q_FP8 is not None:
                    q_rest_fp8 = _quantise(q_rest, q_scale, q_upper, q_lower, Q_FP8, Q_LIMIT, Q_MULTIPLIES, EXACT)
                    tl.store(q8_ptr + out_rows + q_element, q_rest_fp8, mask=q_mask & q_inside)
    else:
        if KV_GROUPS > 0:
            kv_index = (group - Q_GROUPS) * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)
            kv_mask = live[:, None, None] & (kv_index < KV_HEADS)[None, :, None]
            stored = live & (token < stored_tokens)
            slot, slot_offset = tl.zeros_like(token), tl.zeros_like(token)
            if slot_ptr is not None:
                slot_row = _row(batch, place, slot_batch, slot_place, SPLIT)
                slot = tl.load(slot_ptr + slot_row, mask=stored, other=-1)
            if slot_offset_ptr is not None:
                slot_offset_row = _row(batch, place, slot_offset_batch, slot_offset_place, SPLIT)
                slot_offset = tl.load(slot_offset_ptr + slot_offset_row, mask=stored, other=-1)
            if v_ptr is not None:
                v_element = tl.arange(0, BLOCK_V)[None, None, :]
                v_mask = kv_mask
                if BLOCK_V != V_DIM:
                    v_mask = v_mask & (v_element < V_DIM)
                v_rows = _tile_rows(batch, place, kv_index, v_batch * UNIT, v_place * UNIT, v_head * UNIT, SPLIT)
                v = tl.load(v_ptr + v_rows + v_element, mask=v_mask, other=0.0)
            if k_ptr is not None:
                k_rows = _tile_rows(batch, place, kv_index, k_batch * UNIT, k_place * UNIT, k_head * UNIT, SPLIT)
                k_scale, k_upper, k_lower = 1.0, 1.0, 0.0
                if KV_FP8 is not None:
                    k_scale, k_upper, k_lower = _load_scale(
                        k_scale_ptr, k_scale_value, kv_index, K_SCALE_PER_HEAD, KV_HEADS
                    )
                k1, k2 = _load_rotated(
                    k_ptr, k_rows + START, kv_mask, cos_ptr, sin_ptr, cos_row, sin_row, in_table,
                    ROTARY, BLOCK_HALF, FULL, INTERLEAVED, INVERSE, WIDE, MATH, OUT, EXACT, WIDE_ANGLES, K_PACKED,
                )
                if ROTARY < DIM:
                    k_element, k_inside = _pass_index(START, ROTARY, DIM, BLOCK_PASS)
                    k_rest = tl.load(k_ptr + k_rows + k_element, mask=kv_mask & k_inside, other=0.0)
                if k_out_ptr is not None:
                    k_out_rows = _tile_rows(
                        batch, place, kv_index, k_out_batch * UNIT, k_out_place * UNIT, k_out_head * UNIT, SPLIT
                    )
                    _store_pairs(k_out_ptr, k_out_rows + START, kv_mask, k1, k2, ROTARY, BLOCK_HALF, OUT_INTERLEAVED)
                    if ROTARY < DIM:
                        tl.store(k_out_ptr + k_out_rows + k_element, k_rest, mask=kv_mask & k_inside)
                if k_cache_ptr is not None:
                    k_row, k_valid = _locate(
                        slot, slot_offset, batch, stored, k_blocks, k_places,
                        k_block_stride * UNIT, k_place_stride * UNIT, K_ADDRESSING, K_PAGE, SKIP_NEGATIVE,
                    )
                    k_heads = k_offset * UNIT + kv_index * (k_head_stride * UNIT)
                    k_cache_rows = k_row[:, None, None] + k_heads[None, :, None]
                    k_mask = kv_mask & k_valid[:, None, None]
                    k1 = _as_stored(k1, k_cache_ptr, k_scale, k_upper, k_lower, KV_FP8, KV_LIMIT, KV_MULTIPLIES, EXACT)
                    k2 = _as_stored(k2, k_cache_ptr, k_scale, k_upper, k_lower, KV_FP8, KV_LIMIT, KV_MULTIPLIES, EXACT)
                    _store_pairs(k_cache_ptr, k_cache_rows + START, k_mask, k1, k2, ROTARY, BLOCK_HALF, OUT_INTERLEAVED)
                    if ROTARY < DIM:
                        k_rest = _as_stored(
                            k_rest, k_cache_ptr, k_scale, k_upper, k_lower, KV_FP8, KV_LIMIT, KV_MULTIPLIES, EXACT
                        )
                        tl.store(k_cache_ptr + k_cache_rows + k_element, k_rest, mask=k_mask & k_inside)
            if v_ptr is not None:
                v_scale, v_upper, v_lower = 1.0, 1.0, 0.0
                if KV_FP8 is not None:
                    v_scale, v_upper, v_lower = _load_scale(
                        v_scale_ptr, v_scale_value, kv_index, V_SCALE_PER_HEAD, KV_HEADS
                    )
                v_row, v_valid = _locate(
                    slot, slot_offset, batch, stored, v_blocks, v_places,
                    v_block_stride * UNIT, v_place_stride * UNIT, V_ADDRESSING, V_PAGE, SKIP_NEGATIVE,
                )
                v_heads = v_offset * UNIT + kv_index * (v_head_stride * UNIT)
                v = _as_stored(v, v_cache_ptr, v_scale, v_upper, v_lower, KV_FP8, KV_LIMIT, KV_MULTIPLIES, EXACT)
                v_mask = v_mask & v_valid[:, None, None]
                tl.store(v_cache_ptr + v_row[:, None, None] + v_heads[None, :, None] + v_element, v, mask=v_mask)
# fmt: on


TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2: tl.float8e5,
}
WIDEST_UNIT = 16  # elements; 16 bytes of the narrowest dtype


class LaunchParameters(NamedTuple):
    """How the work is cut: what one program owns, and with how many warps."""

    tokens: int
    q_heads: int
    kv_heads: int
    warps: int
    wide_angles: bool
    packed_rounding: bool = False
    dependent: bool = False
    contract: bool = False


class LaunchRule(NamedTuple):
    """Row of the launch table, for up to ``up_to`` tokens; tile sizes are elements (heads x head dim) of one token."""

    up_to: float
    tokens: int
    q_elements: int
    kv_elements: int
    warps: int
    wide_angles: bool


LAUNCH_TABLE = (
    LaunchRule(8, 1, 512, 512, 1, False),
    LaunchRule(512, 1, 1024, 512, 2, False),
    LaunchRule(float("inf"), 4, 1024, 512, 4, False),
)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def choose_parameters(tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> LaunchParameters:
    """The launch parameters that were measured best for these sizes."""
    rule = next(rule for rule in LAUNCH_TABLE if tokens <= rule.up_to)
    width = next_power_of_2(head_dim)

    def heads(elements: int, available: int) -> int:
        return min(max(elements // width, 1), next_power_of_2(available))

    return LaunchParameters(
        rule.tokens, heads(rule.q_elements, q_heads), heads(rule.kv_elements, kv_heads), rule.warps, rule.wide_angles
    )


class Spec(NamedTuple):
    """Everything about a call that is compiled into the kernel, apart from the pointers' types and alignment."""

    q_dtype: torch.dtype
    cos_dtype: torch.dtype
    q_heads: int  # 0: nobody wants the rotated q
    kv_heads: int  # 0: neither k nor v is there
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    rotary_start: int
    full_width: bool
    interleaved: bool
    halves_out: bool
    inverse: bool
    math_dtype: torch.dtype
    out_dtype: torch.dtype
    exact: bool
    q_fp8: torch.dtype | None
    q_scale_multiplies: bool
    kv_fp8: torch.dtype | None
    kv_scale_multiplies: bool
    k_scale_per_head: bool
    v_scale_per_head: bool
    k_addressing: int
    v_addressing: int
    k_page: int
    v_page: int
    skip_negative_slots: bool
    unit: int
    split: int
    need_q: bool
    need_k: bool
    saturating: bool  # a conversion to FP8 clamps by itself


@dataclass(frozen=True)
class Variant:
    """One specialisation of the kernel; remembers what was compiled for which pointer types and alignments."""

    spec: Spec
    constexprs: dict[str, Any]
    options: dict[str, Any]
    groups: int
    tokens_per_program: int
    compiled: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False)

    def grid(self, tokens: int) -> tuple[int, int, int]:
        """Each group of heads for each block of tokens, in one dim because a second holds at most 65535."""
        return (self.groups * -(-tokens // self.tokens_per_program), 1, 1)


@lru_cache(maxsize=1024)
def variant_of(spec: Spec, launch_parameters: LaunchParameters) -> Variant:
    """The specialisation of the kernel that serves ``spec``."""
    p = launch_parameters
    half, rest = spec.rotary_dim // 2, spec.head_dim - spec.rotary_dim
    packed = p.packed_rounding and spec.out_dtype == torch.bfloat16 and not spec.exact
    q_groups = -(-spec.q_heads // p.q_heads)
    kv_groups = -(-spec.kv_heads // p.kv_heads)
    constexprs = {
        "UNIT": spec.unit,
        "SPLIT": spec.split,
        "Q_HEADS": spec.q_heads,
        "KV_HEADS": spec.kv_heads,
        "DIM": spec.head_dim,
        "V_DIM": spec.v_head_dim,
        "ROTARY": spec.rotary_dim,
        "START": spec.rotary_start,
        "FULL": spec.full_width,
        "INTERLEAVED": spec.interleaved,
        "HALVES_OUT": spec.halves_out,
        "INVERSE": spec.inverse,
        "WIDE": tl.float64 if spec.math_dtype == torch.float64 else tl.float32,
        "MATH": TRITON_DTYPES[spec.math_dtype],
        "OUT": TRITON_DTYPES[spec.out_dtype],
        "EXACT": spec.exact,
        "Q_FP8": None if spec.q_fp8 is None else TRITON_DTYPES[spec.q_fp8],
        "Q_LIMIT": None if spec.q_fp8 is None or spec.saturating else torch.finfo(spec.q_fp8).max,
        "Q_MULTIPLIES": spec.q_scale_multiplies,
        "KV_FP8": None if spec.kv_fp8 is None else TRITON_DTYPES[spec.kv_fp8],
        "KV_LIMIT": None if spec.kv_fp8 is None or spec.saturating else torch.finfo(spec.kv_fp8).max,
        "KV_MULTIPLIES": spec.kv_scale_multiplies,
        "K_SCALE_PER_HEAD": spec.k_scale_per_head,
        "V_SCALE_PER_HEAD": spec.v_scale_per_head,
        "K_ADDRESSING": spec.k_addressing,
        "V_ADDRESSING": spec.v_addressing,
        "K_PAGE": spec.k_page,
        "V_PAGE": spec.v_page,
        "SKIP_NEGATIVE": spec.skip_negative_slots,
        "BLOCK_TOKENS": p.tokens,
        "BLOCK_Q_HEADS": p.q_heads,
        "BLOCK_KV_HEADS": p.kv_heads,
        "BLOCK_HALF": next_power_of_2(half),
        "BLOCK_PASS": next_power_of_2(rest),
        "BLOCK_V": next_power_of_2(spec.v_head_dim),
        "Q_GROUPS": q_groups,
        "KV_GROUPS": kv_groups,
        "WIDE_ANGLES": p.wide_angles,
        "Q_PACKED": packed and spec.q_fp8 is not None and not spec.need_q,
        "K_PACKED": packed and spec.kv_fp8 is not None and not spec.need_k,
        "DEPENDENT": p.dependent,
    }
    options = {"num_warps": p.warps, "enable_fp_fusion": p.contract and not spec.exact}
    if p.dependent:  # an option of the CUDA backend alone
        options["launch_pdl"] = True
    return Variant(spec, constexprs, options, q_groups + kv_groups, p.tokens)


@lru_cache(maxsize=1024)
def geometry_of(layout: str, shape: tuple[int, ...], stride: tuple[int, ...], heads: int, paired: bool):
    """Geometry and addressing mode of a cache; the addressing is one of the kernel's constants."""
    parsed = parse_layout(layout)
    geometry = parsed.geometry(shape, stride, heads)
    if geometry.dim_stride != 1 and geometry.dim > 1:
        raise ValueError(
            f"the fused kernel needs the head dim of a cache contiguous, got stride {geometry.dim_stride} in {layout!r}"
        )
    if parsed.addressing == "batch":
        addressing = STATIC
    elif paired:
        addressing = PAIR
    else:
        addressing = LINEAR if geometry.is_linear else PAGED
    return geometry, addressing.value


NO_GEOMETRY = Geometry(0, 0, 0, 0, 0, 0, 0, 0, 0)


def row_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, place and head; 0 for a dim of one element, whose stride means nothing."""
    batch, place, head, _ = x.stride()
    return (
        batch if x.shape[0] > 1 else 0,
        place if x.shape[1] > 1 else 0,
        head if x.shape[2] > 1 else 0,
    )


def index_strides(index: Tensor, seq: int, flat: bool) -> tuple[int, int]:
    """Strides of batch and place; a 1-D tensor runs over all tokens if ``flat``, else over one sequence."""
    if index.dim() == 1:
        step = index.stride(0) if index.shape[0] > 1 else 0
        return (seq * step if flat else 0, step)
    batch, place = index.stride()
    return (batch if index.shape[0] > 1 else 0, place if index.shape[1] > 1 else 0)


class Call(NamedTuple):
    """One call, ready to launch: pointers and numbers in the kernel's order, and what is compiled in."""

    pointers: tuple[Tensor | None, ...]
    numbers: tuple[float | int, ...]
    variant: Variant
    tokens: int
    device: torch.device
    outputs: tuple[Tensor, Tensor, Tensor]


def prepare(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slots: Tensor | None,
    slot_offsets: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    interleaved: bool,
    inverse: bool,
    halves_out: bool,
    rotary_dim: int,
    rotary_start: int,
    q_fp8: torch.dtype | None,
    kv_fp8: torch.dtype | None,
    q_scale_value: float,
    k_scale_value: float,
    v_scale_value: float,
    q_scale_multiplies: bool,
    kv_scale_multiplies: bool,
    k_layout: str,
    v_layout: str,
    skip_negative_slots: bool,
    math_dtype: torch.dtype,
    out_dtype: torch.dtype,
    exact: bool,
    need_q: bool,
    need_k: bool,
    parameters: LaunchParameters | None = None,
    target: Target | None = None,
) -> Call:
    """Allocate the outputs and work out the kernel's arguments.

    Tensors of the meta device are taken too, for compilation ahead of time: for ``target``, which is otherwise that of
    q's device.
    """
    if target is None and q.is_cuda:
        target = target_of(q.device)
    batch, seq, q_heads, head_dim = q.shape
    tokens = batch * seq
    q_out = torch.empty_like(q, dtype=out_dtype) if need_q else None
    k_out = torch.empty_like(k, dtype=out_dtype) if need_k and k is not None else None
    q8 = None if q_fp8 is None else torch.empty_like(q, dtype=q_fp8)
    outputs = (
        q.new_empty(0, dtype=out_dtype) if q_out is None else q_out,
        q.new_empty(0, dtype=out_dtype) if k_out is None else k_out,
        q.new_empty(0) if q8 is None else q8,
    )

    if v_cache is None:
        v_cache = k_cache  # a joint buffer
    if v is None or v_cache is None or slots is None:
        v = v_cache = None
    if k is None or slots is None:
        k_cache = None
    if k is not None and k_cache is None and k_out is None:
        k = None
    kv = v if k is None else k
    kv_heads = 0 if kv is None else kv.shape[2]

    k_geometry, k_addressing = NO_GEOMETRY, 0
    v_geometry, v_addressing = NO_GEOMETRY, 0
    paired = slot_offsets is not None
    if k_cache is not None:
        k_geometry, k_addressing = geometry_of(k_layout, k_cache.shape, k_cache.stride(), kv_heads, paired)
    if v_cache is not None:
        v_geometry, v_addressing = geometry_of(v_layout, v_cache.shape, v_cache.stride(), kv_heads, paired)

    q_strides = row_strides(q)
    q_result = q8 if q_out is None else q_out  # both are laid out alike
    q_out_strides = (0, 0, 0) if q_result is None else row_strides(q_result)
    k_strides = (0, 0, 0) if k is None else row_strides(k)
    k_out_strides = (0, 0, 0) if k_out is None else row_strides(k_out)
    v_strides = (0, 0, 0) if v is None else row_strides(v)
    if positions is not None:
        table_rows = cos.shape[0]
        angle_strides = (0, cos.stride(0), 0, sin.stride(0))
        position_strides = index_strides(positions, seq, False)
    else:
        table_rows = 0
        angle_strides = (
            cos.stride(0) if cos.shape[0] > 1 else 0,
            cos.stride(1) if cos.shape[1] > 1 else 0,
            sin.stride(0) if sin.shape[0] > 1 else 0,
            sin.stride(1) if sin.shape[1] > 1 else 0,
        )
        position_strides = (0, 0)
    static = STATIC.value in (k_addressing, v_addressing)
    slot_strides = (0, 0) if slots is None else index_strides(slots, seq, not static)
    slot_offset_strides = (0, 0) if slot_offsets is None else index_strides(slot_offsets, seq, True)
    stored_tokens = tokens if static or slots is None else min(slots.numel(), tokens)

    k_cache_strides = (k_geometry.block_stride, k_geometry.place_stride, k_geometry.head_stride)
    v_cache_strides = (v_geometry.block_stride, v_geometry.place_stride, v_geometry.head_stride)
    strides = (*q_strides, *k_strides, *v_strides, *q_out_strides, *k_out_strides, *angle_strides)
    unit = gcd(
        WIDEST_UNIT, *strides, *k_cache_strides, *v_cache_strides, k_geometry.offset, v_geometry.offset
    )  # a stride of 0 divides by anything

    spec = Spec(
        q.dtype,
        cos.dtype,
        q_heads if q_out is not None or q8 is not None else 0,
        kv_heads,
        head_dim,
        0 if v is None else v.shape[3],
        rotary_dim,
        rotary_start,
        cos.shape[-1] == rotary_dim,
        interleaved,
        halves_out,
        inverse,
        math_dtype,
        out_dtype,
        exact,
        q_fp8,
        q_scale_multiplies,
        kv_fp8,
        kv_scale_multiplies,
        k_scale is not None and k_scale.numel() > 1,
        v_scale is not None and v_scale.numel() > 1,
        k_addressing,
        v_addressing,
        k_geometry.places if k_addressing == PAGED.value else 0,
        v_geometry.places if v_addressing == PAGED.value else 0,
        skip_negative_slots,
        unit,
        ONE_BATCH.value if batch == 1 else ONE_PLACE.value if seq == 1 else BATCH_AND_PLACE.value,
        need_q,
        k_out is not None,
        target is not None and target.backend == "cuda",
    )
    variant = variant_of(spec, parameters or choose_parameters(tokens, q_heads, kv_heads, head_dim))
    inputs = (q, k, v, cos, sin, positions, k_cache, v_cache, slots, slot_offsets, q_scale, k_scale, v_scale)
    pointers = (*inputs, q_out, k_out, q8)
    numbers = (
        q_scale_value,
        k_scale_value,
        v_scale_value,
        tokens,
        seq,
        stored_tokens,
        table_rows,
        *[stride // unit for stride in strides],
        *position_strides,
        *slot_strides,
        *slot_offset_strides,
        k_geometry.offset // unit,
        k_geometry.blocks,
        k_geometry.places,
        *[stride // unit for stride in k_cache_strides],
        v_geometry.offset // unit,
        v_geometry.blocks,
        v_geometry.places,
        *[stride // unit for stride in v_cache_strides],
    )
    return Call(pointers, numbers, variant, tokens, q.device, outputs)


def refusal(call: Call, device: torch.device) -> str | None:
    """Why a kernel for this call cannot be compiled for ``device``, or None."""
    spec = call.variant.spec
    _, _, _, cos, _, positions, k_cache, v_cache, slots, slot_offsets = call.pointers[:10]
    assert cos is not None
    return unsupported(
        target_of(device),
        q_dtype=spec.q_dtype,
        cos_dtype=cos.dtype,
        head_dim=spec.head_dim,
        rotary_dim=spec.rotary_dim,
        v_head_dim=spec.v_head_dim,
        math_dtype=spec.math_dtype,
        out_dtype=spec.out_dtype,
        q_fp8=spec.q_fp8,
        kv_fp8=spec.kv_fp8,
        cache_dtypes=[cache.dtype for cache in (k_cache, v_cache) if cache is not None],
        index_dtypes=[index.dtype for index in (positions, slots, slot_offsets) if index is not None],
    )


def run(call: Call) -> None:
    """Launch the kernel for a prepared call; on the CPU only under Triton's interpreter."""
    variant = call.variant
    grid = variant.grid(call.tokens)
    device = call.device
    if device.type != "cuda" or torch.version.hip:
        # The interpreter takes no options. On ROCm a kernel also depends on the size of each buffer, which Triton
        # tracks itself.
        options = variant.options if device.type == "cuda" else {}
        rope_qkv_kernel[grid](*call.pointers, *call.numbers, **variant.constexprs, **options)
        return
    # Triton's own dispatch takes tens of microseconds for this many arguments; what it looks at is in this key, so it
    # runs once for each.
    key = (device.index, *[None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in call.pointers])
    compiled = variant.compiled.get(key)
    if compiled is None:
        if reason := refusal(call, device):
            raise RuntimeError(f"rope_qkv: {reason}")
        variant.compiled[key] = rope_qkv_kernel[grid](
            *call.pointers, *call.numbers, **variant.constexprs, **variant.options
        )
    else:
        compiled[grid](*call.pointers, *call.numbers, *variant.constexprs.values())


def launch(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator by the Triton kernel: arguments and results as those of ``rope_qkv.reference``.

    ``parameters`` overrides the launch table. No tokens, no launch. With ``TRITON_INTERPRET=1`` in the environment
    before Triton is imported, tensors on the CPU are taken too.
    """
    call = prepare(*args, **options)
    if call.tokens and call.variant.groups:
        device = call.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                run(call)
        else:
            run(call)
    return call.outputs
