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
def _stride(value, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """The stride of a head: a constant where heads follow one another."""
    if DENSE > 0:
        return DENSE
    else:
        return value * UNIT


@triton.jit
def _load_pairs(ptr, mask, OTHER: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of each row's pairs, [tokens, heads, BLOCK] each; `ptr` and `mask` are [tokens, heads, 1]."""
    if INTERLEAVED:
        index = tl.arange(0, 2 * BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = mask & (index < ROTARY)
        both = tl.load(ptr + index, mask=mask, other=OTHER)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK, 2)))
    else:
        index = tl.arange(0, BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = mask & (index < ROTARY // 2)
        first = tl.load(ptr + index, mask=mask, other=OTHER)
        second = tl.load(ptr + index + ROTARY // 2, mask=mask, other=OTHER)
    return first, second


@triton.jit
def _load_angles(
    ptr, mask, OTHER: tl.constexpr,
    ROTARY: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """Cosines (or sines) of first and second elements; the same values twice where one column serves a pair."""
    if FULL:
        return _load_pairs(ptr, mask, OTHER, ROTARY, BLOCK, INTERLEAVED)
    else:
        index = tl.arange(0, BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = mask & (index < ROTARY // 2)
        column = tl.load(ptr + index, mask=mask, other=OTHER)
        return column, column


@triton.jit
def _store_pairs(ptr, mask, first, second, ROTARY: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK))
        index = tl.arange(0, 2 * BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = mask & (index < ROTARY)
        tl.store(ptr + index, both, mask=mask)
    else:
        index = tl.arange(0, BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = mask & (index < ROTARY // 2)
        tl.store(ptr + index, first, mask=mask)
        tl.store(ptr + index + ROTARY // 2, second, mask=mask)


@triton.jit
def _widened(x, WIDE: tl.constexpr, NVIDIA: tl.constexpr):
    """`x` in WIDE precision."""
    if NVIDIA and x.dtype == tl.bfloat16 and tl.float32 == WIDE:
        # One instruction for each element; left to itself the compiler takes the upper one of a pair out in two.
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(WIDE)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, NVIDIA: tl.constexpr):
    """`x` in fp32, rounded to the dtype of the tensor that a program would have stored here."""
    if NVIDIA and tl.bfloat16 == DTYPE and x.dtype == tl.float32:
        # Left to itself the compiler rounds values that are not stored one by one, at a fraction of the rate of pairs.
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
            "=r,=r,f,f", [x], dtype=tl.int32, is_pure=True, pack=2,
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(tl.float32)


@triton.jit
def _round(x, WIDE: tl.constexpr, MATH: tl.constexpr, EXACT: tl.constexpr):
    """What one eager operation does to its result: round it to the arithmetic's dtype."""
    if EXACT:
        return x.to(MATH).to(WIDE)
    else:
        return x


@triton.jit
def _rotate(
    a, b, c1, c2, s1, s2,
    INVERSE: tl.constexpr, WIDE: tl.constexpr, MATH: tl.constexpr, EXACT: tl.constexpr, NVIDIA: tl.constexpr,
):
    """The rotated pair in WIDE precision; in exact mode every operand, product and sum is rounded to MATH."""
    a, b = _round(_widened(a, WIDE, NVIDIA), WIDE, MATH, EXACT), _round(_widened(b, WIDE, NVIDIA), WIDE, MATH, EXACT)
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
    """The scale and its reciprocal in two parts, in fp32: scalars, or of the shape of `head`."""
    if PER_HEAD:
        scale = tl.load(ptr + head, mask=head < HEADS, other=1.0).to(tl.float32)
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
    x, ptr, scale, upper, lower, OUT: tl.constexpr,
    FP8: tl.constexpr, LIMIT: tl.constexpr, MULTIPLIES: tl.constexpr, EXACT: tl.constexpr, NVIDIA: tl.constexpr,
):
    """`x`, rounded to OUT, as the tensor behind `ptr` holds it: quantised, as bytes where it is typed uint8, or cast."""
    if FP8 is None:
        return x.to(OUT).to(ptr.dtype.element_ty)
    else:
        x = _widened(x, tl.float32, NVIDIA) if x.dtype == OUT else _rounded(x, OUT, NVIDIA)
        quantised = _quantise(x, scale, upper, lower, FP8, LIMIT, MULTIPLIES, EXACT)
        if ptr.dtype.element_ty == tl.uint8:
            return quantised.to(tl.uint8, bitcast=True)
        else:
            return quantised


@triton.jit
def _angle_rows(
    cos_ptr, sin_ptr, position, batch, place, live, table_rows, cos_batch, cos_place, sin_batch, sin_place,
    UNIT: tl.constexpr, SPLIT: tl.constexpr,
):
    """Pointers to the cos and sin row of each token, at its position or its own, and whether there is one."""
    if position is not None:
        position = position.to(tl.int64)
        position = tl.where(position < 0, position + table_rows, position)
        # A position outside the table reads NaN, not foreign memory.
        in_table = live & (position >= 0) & (position < table_rows)
        return cos_ptr + position * (cos_place * UNIT), sin_ptr + position * (sin_place * UNIT), in_table
    else:
        cos_row = _row(batch, place, cos_batch * UNIT, cos_place * UNIT, SPLIT)
        sin_row = _row(batch, place, sin_batch * UNIT, sin_place * UNIT, SPLIT)
        return cos_ptr + cos_row, sin_ptr + sin_row, live


@triton.jit
def _locate(
    slot_ptr, slot_offset_ptr, batch, place, valid, slot_batch, slot_place, slot_offset_batch, slot_offset_place,
    blocks, places, block_stride, place_stride,
    ADDRESSING: tl.constexpr, PAGE: tl.constexpr, SKIP_NEGATIVE: tl.constexpr, SPLIT: tl.constexpr,
):
    """Row offset of each token in a cache, and whether it is stored: a slot outside the cache is dropped."""
    slot = tl.load(slot_ptr + _row(batch, place, slot_batch, slot_place, SPLIT), mask=valid, other=-1).to(tl.int64)
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
        slot_offset_row = _row(batch, place, slot_offset_batch, slot_offset_place, SPLIT)
        slot_offset = tl.load(slot_offset_ptr + slot_offset_row, mask=valid, other=-1).to(tl.int64)
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


@triton.jit
def _rotate_heads(
    x_rows, x_head, cos_ptr, sin_ptr, position, batch, place, live, table_rows,
    cos_batch, cos_place, sin_batch, sin_place, first_head,
    out_rows, out_head, stored_rows, stored_head, stored, scale_ptr, scale_value, UNIT: tl.constexpr, SPLIT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, STEPS: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, START: tl.constexpr, FULL: tl.constexpr,
    INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    WIDE: tl.constexpr, MATH: tl.constexpr, OUT: tl.constexpr, EXACT: tl.constexpr, NVIDIA: tl.constexpr,
    FP8: tl.constexpr, LIMIT: tl.constexpr, MULTIPLIES: tl.constexpr, SCALE_PER_HEAD: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_PASS: tl.constexpr,
):
    """Rotate STEPS x BLOCK_HEADS heads of a block of tokens: into `out`, and quantised or cast into `stored`.

    Rows are pointers [tokens, 1, 1], None for an output that nobody wants; `live` and `stored` say which tokens exist
    and have a place to be stored at.
    """
    head = first_head + tl.arange(0, BLOCK_HEADS)[None, :, None]
    x_rows += head * x_head
    a, b = _load_pairs(x_rows + START, live & (head < HEADS), None, ROTARY, BLOCK_HALF, INTERLEAVED)
    scale, upper, lower = 1.0, 1.0, 0.0
    if FP8 is not None and not SCALE_PER_HEAD:
        scale, upper, lower = _load_scale(scale_ptr, scale_value, head, False, HEADS)
    # Only now is the position waited for, with the loads above on their way.
    cos_rows, sin_rows, in_table = _angle_rows(
        cos_ptr, sin_ptr, position, batch, place, live, table_rows, cos_batch, cos_place, sin_batch, sin_place,
        UNIT, SPLIT,
    )
    # Each head loads its own copy of the angles, in the layout of the heads: the repeats hit the first-level cache, and
    # nothing has to be exchanged between threads. A NaN among the cosines reaches both elements of its pair.
    shape: tl.constexpr = (in_table.shape[0], BLOCK_HEADS, 1)
    has_angles = tl.broadcast_to(in_table, shape)
    cos_rows, sin_rows = tl.broadcast_to(cos_rows, shape), tl.broadcast_to(sin_rows, shape)
    c1, c2 = _load_angles(cos_rows, has_angles, float("nan"), ROTARY, BLOCK_HALF, FULL, INTERLEAVED)
    s1, s2 = _load_angles(sin_rows, has_angles, None, ROTARY, BLOCK_HALF, FULL, INTERLEAVED)
    for step in tl.static_range(STEPS):
        first, second = _rotate(a, b, c1, c2, s1, s2, INVERSE, WIDE, MATH, EXACT, NVIDIA)
        step_head = head + step * BLOCK_HEADS
        inside = live & (step_head < HEADS)
        step_rows = x_rows + step * BLOCK_HEADS * x_head
        if ROTARY < DIM:
            element, is_rest = _pass_index(START, ROTARY, DIM, BLOCK_PASS)
            rest = tl.load(step_rows + element, mask=inside & is_rest)
        if step + 1 < STEPS:  # on their way before the stores below, which no load overtakes
            next_rows = x_rows + (step + 1) * BLOCK_HEADS * x_head
            next_inside = live & (step_head + BLOCK_HEADS < HEADS)
            a, b = _load_pairs(next_rows + START, next_inside, None, ROTARY, BLOCK_HALF, INTERLEAVED)
        if out_rows is not None:
            rows = out_rows + step_head * out_head
            _store_pairs(rows + START, inside, first.to(OUT), second.to(OUT), ROTARY, BLOCK_HALF, OUT_INTERLEAVED)
            if ROTARY < DIM:
                tl.store(rows + element, rest.to(OUT), mask=inside & is_rest)
        if stored_rows is not None:
            if FP8 is not None and SCALE_PER_HEAD:
                scale, upper, lower = _load_scale(scale_ptr, scale_value, step_head, True, HEADS)
            rows = stored_rows + step_head * stored_head
            inside = inside & stored
            first = _as_stored(first, stored_rows, scale, upper, lower, OUT, FP8, LIMIT, MULTIPLIES, EXACT, NVIDIA)
            second = _as_stored(second, stored_rows, scale, upper, lower, OUT, FP8, LIMIT, MULTIPLIES, EXACT, NVIDIA)
            _store_pairs(rows + START, inside, first, second, ROTARY, BLOCK_HALF, OUT_INTERLEAVED)
            if ROTARY < DIM:
                rest = _as_stored(
                    rest, stored_rows, scale, upper, lower, rest.dtype, FP8, LIMIT, MULTIPLIES, EXACT, NVIDIA
                )
                tl.store(rows + element, rest, mask=inside & is_rest)


@triton.jit
def _store_heads(
    x_rows, x_head, live, first_head, stored_rows, stored_head, stored, scale_ptr, scale_value,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, STEPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    FP8: tl.constexpr, LIMIT: tl.constexpr, MULTIPLIES: tl.constexpr, SCALE_PER_HEAD: tl.constexpr,
    EXACT: tl.constexpr, NVIDIA: tl.constexpr,
):
    """Store STEPS x BLOCK_HEADS heads of a block of tokens, quantised or cast; arguments as of `_rotate_heads`."""
    head = first_head + tl.arange(0, BLOCK_HEADS)[None, :, None]
    element = tl.arange(0, BLOCK)[None, None, :]
    for step in tl.static_range(STEPS):
        step_head = head + step * BLOCK_HEADS
        inside = live & (step_head < HEADS) & (element < DIM)
        x = tl.load(x_rows + step_head * x_head + element, mask=inside)
        scale, upper, lower = 1.0, 1.0, 0.0
        if FP8 is not None:
            scale, upper, lower = _load_scale(scale_ptr, scale_value, step_head, SCALE_PER_HEAD, HEADS)
        x = _as_stored(x, stored_rows, scale, upper, lower, x.dtype, FP8, LIMIT, MULTIPLIES, EXACT, NVIDIA)
        tl.store(stored_rows + step_head * stored_head + element, x, mask=inside & stored)


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
    Q_DENSE: tl.constexpr, K_DENSE: tl.constexpr, V_DENSE: tl.constexpr, Q_OUT_DENSE: tl.constexpr,
    K_OUT_DENSE: tl.constexpr, K_CACHE_DENSE: tl.constexpr, V_CACHE_DENSE: tl.constexpr,
    SKIP_NEGATIVE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr, Q_STEPS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr, KV_STEPS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_PASS: tl.constexpr, BLOCK_V: tl.constexpr,
    Q_GROUPS: tl.constexpr, K_GROUPS: tl.constexpr, V_GROUPS: tl.constexpr,
    NVIDIA: tl.constexpr, DEPENDENT: tl.constexpr,
):
    pid = tl.program_id(0)
    GROUPS: tl.constexpr = Q_GROUPS + K_GROUPS + V_GROUPS
    group = pid % GROUPS
    token = (pid // GROUPS) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None, None]
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

    if group < Q_GROUPS:
        if Q_GROUPS > 0:
            position = None
            if position_ptr is not None:
                position_row = _row(batch, place, position_batch, position_place, SPLIT)
                position = tl.load(position_ptr + position_row, mask=live, other=0)
            q_rows = q_ptr + _row(batch, place, q_batch * UNIT, q_place * UNIT, SPLIT)
            q_out_row = _row(batch, place, q_out_batch * UNIT, q_out_place * UNIT, SPLIT)
            q_out_rows, q8_rows = None, None
            if q_out_ptr is not None:
                q_out_rows = q_out_ptr + q_out_row
            if q8_ptr is not None:
                q8_rows = q8_ptr + q_out_row
            q_out_stride = _stride(q_out_head, UNIT, Q_OUT_DENSE)
            _rotate_heads(
                q_rows, _stride(q_head, UNIT, Q_DENSE), cos_ptr, sin_ptr, position, batch, place, live,
                table_rows, cos_batch, cos_place, sin_batch, sin_place, group * (Q_STEPS * BLOCK_Q_HEADS),
                q_out_rows, q_out_stride, q8_rows, q_out_stride, live, q_scale_ptr, q_scale_value, UNIT, SPLIT,
                Q_HEADS, BLOCK_Q_HEADS, Q_STEPS, DIM, ROTARY, START, FULL, INTERLEAVED, OUT_INTERLEAVED, INVERSE,
                WIDE, MATH, OUT, EXACT, NVIDIA, Q_FP8, Q_LIMIT, Q_MULTIPLIES, False, BLOCK_HALF, BLOCK_PASS,
            )
    elif group < Q_GROUPS + K_GROUPS:
        if K_GROUPS > 0:
            position = None
            if position_ptr is not None:
                position_row = _row(batch, place, position_batch, position_place, SPLIT)
                position = tl.load(position_ptr + position_row, mask=live, other=0)
            k_rows = k_ptr + _row(batch, place, k_batch * UNIT, k_place * UNIT, SPLIT)
            k_out_rows, k_stored_rows, k_stored = None, None, live
            if k_out_ptr is not None:
                k_out_rows = k_out_ptr + _row(batch, place, k_out_batch * UNIT, k_out_place * UNIT, SPLIT)
            if k_cache_ptr is not None:
                k_row, k_stored = _locate(
                    slot_ptr, slot_offset_ptr, batch, place, live & (token < stored_tokens), slot_batch, slot_place,
                    slot_offset_batch, slot_offset_place, k_blocks, k_places, k_block_stride * UNIT,
                    k_place_stride * UNIT, K_ADDRESSING, K_PAGE, SKIP_NEGATIVE, SPLIT,
                )
                k_stored_rows = k_cache_ptr + k_offset * UNIT + k_row
            _rotate_heads(
                k_rows, _stride(k_head, UNIT, K_DENSE), cos_ptr, sin_ptr, position, batch, place, live,
                table_rows, cos_batch, cos_place, sin_batch, sin_place,
                (group - Q_GROUPS) * (KV_STEPS * BLOCK_KV_HEADS),
                k_out_rows, _stride(k_out_head, UNIT, K_OUT_DENSE),
                k_stored_rows, _stride(k_head_stride, UNIT, K_CACHE_DENSE), k_stored, k_scale_ptr, k_scale_value,
                UNIT, SPLIT, KV_HEADS, BLOCK_KV_HEADS, KV_STEPS, DIM, ROTARY, START, FULL, INTERLEAVED, OUT_INTERLEAVED, INVERSE,
                WIDE, MATH, OUT, EXACT, NVIDIA, KV_FP8, KV_LIMIT, KV_MULTIPLIES, K_SCALE_PER_HEAD,
                BLOCK_HALF, BLOCK_PASS,
            )
    else:
        if V_GROUPS > 0:
            v_rows = v_ptr + _row(batch, place, v_batch * UNIT, v_place * UNIT, SPLIT)
            v_row, v_stored = _locate(
                slot_ptr, slot_offset_ptr, batch, place, live & (token < stored_tokens), slot_batch, slot_place,
                slot_offset_batch, slot_offset_place, v_blocks, v_places, v_block_stride * UNIT,
                v_place_stride * UNIT, V_ADDRESSING, V_PAGE, SKIP_NEGATIVE, SPLIT,
            )
            _store_heads(
                v_rows, _stride(v_head, UNIT, V_DENSE), live,
                (group - Q_GROUPS - K_GROUPS) * (KV_STEPS * BLOCK_KV_HEADS),
                v_cache_ptr + v_offset * UNIT + v_row, _stride(v_head_stride, UNIT, V_CACHE_DENSE), v_stored,
                v_scale_ptr, v_scale_value, KV_HEADS, BLOCK_KV_HEADS, KV_STEPS, V_DIM, BLOCK_V,
                KV_FP8, KV_LIMIT, KV_MULTIPLIES, V_SCALE_PER_HEAD, EXACT, NVIDIA,
            )
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
    """How the work is cut: one program takes ``steps`` tiles of tokens x heads, one after the other."""

    tokens: int
    q_heads: int
    q_steps: int
    kv_heads: int
    kv_steps: int
    warps: int
    dependent: bool  # start while the kernel before it ends: programmatic dependent launch, on NVIDIA from sm_90


class LaunchRule(NamedTuple):
    """Row of the launch table, for up to ``up_to`` tokens; a tile holds ``elements`` (heads x head dim) of a token."""

    up_to: float
    tokens: int
    elements: int
    steps: int
    warps: int
    dependent: bool


LAUNCH_TABLE = (
    LaunchRule(8, 1, 256, 1, 1, False),
    LaunchRule(512, 1, 512, 1, 1, False),
    LaunchRule(float("inf"), 4, 512, 4, 4, False),
)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def choose_parameters(tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> LaunchParameters:
    """The launch parameters that were measured best for these sizes."""
    rule = next(rule for rule in LAUNCH_TABLE if tokens <= rule.up_to)
    fitting = max(rule.elements // next_power_of_2(head_dim), 1)

    def tile(heads: int) -> tuple[int, int]:
        block = min(fitting, next_power_of_2(heads))
        return block, min(rule.steps, -(-heads // block))

    return LaunchParameters(rule.tokens, *tile(q_heads), *tile(max(kv_heads, 1)), rule.warps, rule.dependent)


class Spec(NamedTuple):
    """Everything about a call that is compiled into the kernel, apart from the pointers' types and alignment."""

    q_dtype: torch.dtype
    cos_dtype: torch.dtype
    q_heads: int  # 0: nobody wants the rotated q
    kv_heads: int  # 0: neither k nor v is there
    has_k: bool
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
    dense: tuple[int, ...]  # of q, k, v, outputs of q and k, caches of k and v: the stride of a head if it is its size
    nvidia: bool  # NVIDIA's instructions may be used, and a conversion to FP8 clamps by itself


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
    q_groups = -(-spec.q_heads // (p.q_heads * p.q_steps))
    kv_groups = -(-spec.kv_heads // (p.kv_heads * p.kv_steps))
    k_groups, v_groups = kv_groups * spec.has_k, kv_groups * (spec.v_head_dim > 0)
    dense = dict(zip(("Q", "K", "V", "Q_OUT", "K_OUT", "K_CACHE", "V_CACHE"), spec.dense, strict=True))
    dependent = p.dependent and spec.nvidia
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
        "Q_LIMIT": None if spec.q_fp8 is None or spec.nvidia else torch.finfo(spec.q_fp8).max,
        "Q_MULTIPLIES": spec.q_scale_multiplies,
        "KV_FP8": None if spec.kv_fp8 is None else TRITON_DTYPES[spec.kv_fp8],
        "KV_LIMIT": None if spec.kv_fp8 is None or spec.nvidia else torch.finfo(spec.kv_fp8).max,
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
        "Q_STEPS": p.q_steps,
        "BLOCK_KV_HEADS": p.kv_heads,
        "KV_STEPS": p.kv_steps,
        "BLOCK_HALF": next_power_of_2(half),
        "BLOCK_PASS": next_power_of_2(rest),
        "BLOCK_V": next_power_of_2(spec.v_head_dim),
        "Q_GROUPS": q_groups,
        "K_GROUPS": k_groups,
        "V_GROUPS": v_groups,
        "NVIDIA": spec.nvidia,
        "DEPENDENT": dependent,
        **{f"{name}_DENSE": stride for name, stride in dense.items()},
    }
    # A fused multiply-add would skip a rounding that eager does.
    options = {"num_warps": p.warps, "enable_fp_fusion": False}
    if dependent:  # an option of the CUDA backend alone
        options["launch_pdl"] = True
    return Variant(spec, constexprs, options, q_groups + k_groups + v_groups, p.tokens)


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


def dense_stride(x: Tensor | None) -> int:
    """The stride of heads that follow one another, else 0. A constant of the kernel: it does not vary with sizes."""
    return x.shape[3] if x is not None and (x.stride(2) == x.shape[3] or x.shape[2] == 1) else 0


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
    v_dim = 0 if v is None else v.shape[3]

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
        k is not None,
        head_dim,
        v_dim,
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
        (
            dense_stride(q),
            dense_stride(k),
            dense_stride(v),
            dense_stride(q_result),
            dense_stride(k_out),
            head_dim if k_geometry.head_stride == head_dim or kv_heads == 1 else 0,
            v_dim if v_geometry.head_stride == v_dim or kv_heads == 1 else 0,
        ),
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
