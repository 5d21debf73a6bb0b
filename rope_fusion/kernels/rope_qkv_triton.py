"""The Triton kernel of ``rope_fusion::rope_qkv``: rotation, FP8 quantisation and both cache writes in one launch.

One program takes a block of tokens and some heads of q, of k or of v, tile by tile with the same cos and sin; programs of
the same tokens are neighbours, so the rows they share come from a cache. Every row address is 64-bit (a cache may hold
more than 2^31 elements), offsets inside a row are 32-bit. Strides arrive as multiples of one power of two, which tells
the compiler what it needs for 16-byte accesses and leaves sizes and strides out of the kernel's cache key: a new token
count, batch or cache size compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, reduce
from math import gcd
from operator import or_
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rope_fusion.kernels.cache_layout import Geometry, parse_layout
from rope_fusion.kernels.driver_launch import ALIGNMENT, Runner, run_on_device, runner_of
from rope_fusion.kernels.rope_qkv import PrologueOptions, Target, decoded, target_of, unsupported

LINEAR = tl.constexpr(0)  # how a token finds its row in a cache: slot * place stride,
PAGED = tl.constexpr(1)  # slot = block * places + place,
STATIC = tl.constexpr(2)  # block = batch entry of the token, place = slot,
PAIR = tl.constexpr(3)  # or block = slot, place = slot offset.

ONE_BATCH = tl.constexpr(0)  # how a token index splits into batch entry and place in the sequence
ONE_PLACE = tl.constexpr(1)
BATCH_AND_PLACE = tl.constexpr(2)


# fmt: off
@triton.jit
def _row(batch, place, batch_stride, place_stride, SPLIT: tl.constexpr, UNIT: tl.constexpr = 1):
    """Offset of a token's row, for strides in units: only those that matter are multiplied."""
    if SPLIT == ONE_BATCH:
        return place.to(tl.int64) * place_stride * UNIT
    elif SPLIT == ONE_PLACE:
        return batch.to(tl.int64) * batch_stride * UNIT
    else:
        return (batch.to(tl.int64) * batch_stride + place.to(tl.int64) * place_stride) * UNIT


@triton.jit
def _heads(head, stride, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """Offset of heads: their stride is a constant where they follow one another."""
    if DENSE > 0:
        return head * DENSE
    else:
        return head.to(tl.int64) * stride * UNIT


@triton.jit
def _step(STEP: tl.constexpr, stride, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """Offset from a head to the STEPth after it; a constant likewise."""
    if DENSE > 0:
        return STEP * DENSE
    else:
        return stride.to(tl.int64) * (STEP * UNIT)


@triton.jit
def _both(mask, other):
    """Conjunction of masks, of which the first is None where it would be true throughout."""
    return other if mask is None else mask & other


@triton.jit
def _load_pairs(ptr, mask, OTHER: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of each row's pairs, [tokens, heads, BLOCK] each; `ptr` and `mask` are [tokens, heads, 1]."""
    if INTERLEAVED:
        index = tl.arange(0, 2 * BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = _both(mask, index < ROTARY)
        both = tl.load(ptr + index, mask=mask, other=OTHER)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK, 2)))
    else:
        index = tl.arange(0, BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = _both(mask, index < ROTARY // 2)
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
            mask = _both(mask, index < ROTARY // 2)
        column = tl.load(ptr + index, mask=mask, other=OTHER)
        return column, column


@triton.jit
def _store_pairs(ptr, mask, first, second, ROTARY: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK))
        index = tl.arange(0, 2 * BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = _both(mask, index < ROTARY)
        tl.store(ptr + index, both, mask=mask)
    else:
        index = tl.arange(0, BLOCK)[None, None, :]
        if 2 * BLOCK != ROTARY:
            mask = _both(mask, index < ROTARY // 2)
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
def _reciprocal(scale, NVIDIA: tl.constexpr = False):
    """1 / scale in two parts of fp32, which add up to it within 2^-45 of it."""
    # The first part lies below the reciprocal, so that the second has its sign: no infinity meets its opposite when
    # both multiply an x. Where there is no finite reciprocal the parts are alike, for the same reason.
    if NVIDIA:
        upper = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        upper = 1.0 / scale
    upper *= 1.0 - 2.0**-20
    rest = tl.fma(-upper, scale, 1.0)
    lower = tl.fma(upper * rest, rest, upper * rest)
    return upper, tl.where(rest > 0.0, lower, upper)


@triton.jit
def _load_scale(ptr, value, head, PER_HEAD: tl.constexpr, HEADS: tl.constexpr, NVIDIA: tl.constexpr):
    """The scale and its reciprocal in two parts, in fp32: scalars, or of the shape of `head`."""
    if PER_HEAD:
        scale = tl.load(ptr + head, mask=head < HEADS, other=1.0).to(tl.float32)
    elif ptr is not None:
        scale = tl.load(ptr).to(tl.float32)
    else:
        scale = value
    upper, lower = _reciprocal(scale, NVIDIA)
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
        # With the reciprocal in two parts it is the rounded quotient but for about one value in 10^5, for one fused
        # multiply-add more.
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
def _table_row(position, table_rows):
    """Row of a table of angles at a token's position, and whether there is one."""
    position = position.to(tl.int64)
    position = tl.where(position < 0, position + table_rows, position)
    in_table = position.to(tl.uint64) < table_rows.to(tl.uint64)
    # One multiplication where rows are counted in 32 bits.
    return position.to(table_rows.dtype).to(tl.int64), in_table


@triton.jit
def _cache_rows(
    cache_ptr, offset, slot_ptr, slot_offset_ptr, batch, place, given, slot_batch, slot_place,
    slot_offset_batch, slot_offset_place, slots, places, block_stride, place_stride,
    ADDRESSING: tl.constexpr, PAGE: tl.constexpr, SKIP_NEGATIVE: tl.constexpr, UNIT: tl.constexpr, SPLIT: tl.constexpr,
):
    """Pointers to each token's row in a cache, and whether it is stored: a slot outside the cache is dropped."""
    slot = tl.load(slot_ptr + _row(batch, place, slot_batch, slot_place, SPLIT), mask=given, other=-1).to(tl.int64)
    if not SKIP_NEGATIVE:
        slot = tl.where(slot < 0, slot + slots, slot)
    valid = given & (slot.to(tl.uint64) < slots.to(tl.uint64))
    slot = slot.to(slots.dtype)
    if ADDRESSING == PAGED:
        block = slot // PAGE
        slot -= block * PAGE
        row = block.to(tl.int64) * block_stride + slot.to(tl.int64) * place_stride
    elif ADDRESSING == PAIR:
        slot_offset_row = _row(batch, place, slot_offset_batch, slot_offset_place, SPLIT)
        slot_offset = tl.load(slot_offset_ptr + slot_offset_row, mask=given, other=-1).to(tl.int64)
        if not SKIP_NEGATIVE:
            slot_offset = tl.where(slot_offset < 0, slot_offset + places, slot_offset)
        valid = valid & (slot_offset.to(tl.uint64) < places.to(tl.uint64))
        slot_offset = slot_offset.to(places.dtype)
        row = slot.to(tl.int64) * block_stride + slot_offset.to(tl.int64) * place_stride
    elif ADDRESSING == STATIC:
        row = batch.to(tl.int64) * block_stride + slot.to(tl.int64) * place_stride
    else:
        row = slot.to(tl.int64) * place_stride
    if offset is not None:
        row += offset
    return cache_ptr + row * UNIT, valid


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
    x_rows, x_head, cos_ptr, sin_ptr, position, batch, place, table_rows,
    cos_batch, cos_place, sin_batch, sin_place, first_head,
    out_rows, out_head, stored_rows, stored_head, stored, scale_ptr, scale_value,
    X_DENSE: tl.constexpr, OUT_DENSE: tl.constexpr, STORED_DENSE: tl.constexpr, UNIT: tl.constexpr, SPLIT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, STEPS: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, START: tl.constexpr, FULL: tl.constexpr,
    INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    WIDE: tl.constexpr, MATH: tl.constexpr, OUT: tl.constexpr, EXACT: tl.constexpr, NVIDIA: tl.constexpr,
    FP8: tl.constexpr, LIMIT: tl.constexpr, MULTIPLIES: tl.constexpr, SCALE_PER_HEAD: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_PASS: tl.constexpr,
):
    """Rotate STEPS x BLOCK_HEADS heads of a block of tokens: into `out`, and quantised or cast into `stored`.

    Rows are pointers [tokens, 1, 1], None for an output that nobody wants; `stored` says which tokens have a place to be
    stored at, None: all of them.
    """
    WHOLE: tl.constexpr = HEADS % (BLOCK_HEADS * STEPS) == 0
    head = first_head + tl.arange(0, BLOCK_HEADS)[None, :, None]
    x_rows += _heads(head, x_head, UNIT, X_DENSE)
    if out_rows is not None:
        out_rows += _heads(head, out_head, UNIT, OUT_DENSE)
    if stored_rows is not None:
        stored_rows += _heads(head, stored_head, UNIT, STORED_DENSE)
    inside = None if WHOLE else head < HEADS
    a, b = _load_pairs(x_rows + START, inside, None, ROTARY, BLOCK_HALF, INTERLEAVED)
    scale, upper, lower = 1.0, 1.0, 0.0
    if FP8 is not None and not SCALE_PER_HEAD:
        scale, upper, lower = _load_scale(scale_ptr, scale_value, head, False, HEADS, NVIDIA)
    # Each head loads its own copy of the angles, in the layout of the heads: the repeats hit the first-level cache, and
    # nothing has to be exchanged between threads.
    shape: tl.constexpr = (x_rows.shape[0], BLOCK_HEADS, 1)
    if position is not None:  # only now is it waited for, with the loads above on their way
        row, in_table = _table_row(position, table_rows)
        cos_row, sin_row = row * cos_place * UNIT, row * sin_place * UNIT
        # A position outside the table reads NaN, not foreign memory; among the cosines it reaches both elements of a pair.
        has_angles = tl.broadcast_to(in_table, shape)
        MISSING: tl.constexpr = float("nan")
    else:
        cos_row = _row(batch, place, cos_batch, cos_place, SPLIT, UNIT)
        sin_row = _row(batch, place, sin_batch, sin_place, SPLIT, UNIT)
        has_angles = None
        MISSING: tl.constexpr = None  # type: ignore[no-redef]
    cos_rows, sin_rows = tl.broadcast_to(cos_ptr + cos_row, shape), tl.broadcast_to(sin_ptr + sin_row, shape)
    c1, c2 = _load_angles(cos_rows, has_angles, MISSING, ROTARY, BLOCK_HALF, FULL, INTERLEAVED)
    s1, s2 = _load_angles(sin_rows, has_angles, None, ROTARY, BLOCK_HALF, FULL, INTERLEAVED)
    for step in tl.static_range(STEPS):
        first, second = _rotate(a, b, c1, c2, s1, s2, INVERSE, WIDE, MATH, EXACT, NVIDIA)
        step_head = head + step * BLOCK_HEADS
        inside = None if WHOLE else step_head < HEADS
        if ROTARY < DIM:
            element, is_rest = _pass_index(START, ROTARY, DIM, BLOCK_PASS)
            rest_rows = x_rows + _step(step * BLOCK_HEADS, x_head, UNIT, X_DENSE)
            rest = tl.load(rest_rows + element, mask=_both(inside, is_rest))
        if step + 1 < STEPS:  # on their way before the stores below, which no load overtakes
            next_rows = x_rows + _step((step + 1) * BLOCK_HEADS, x_head, UNIT, X_DENSE)
            next_inside = None if WHOLE else step_head + BLOCK_HEADS < HEADS
            a, b = _load_pairs(next_rows + START, next_inside, None, ROTARY, BLOCK_HALF, INTERLEAVED)
        if out_rows is not None:
            rows = out_rows + _step(step * BLOCK_HEADS, out_head, UNIT, OUT_DENSE)
            returned = out_rows.dtype.element_ty
            _store_pairs(
                rows + START, inside, first.to(OUT).to(returned), second.to(OUT).to(returned),
                ROTARY, BLOCK_HALF, OUT_INTERLEAVED,
            )
            if ROTARY < DIM:
                tl.store(rows + element, rest.to(OUT).to(returned), mask=_both(inside, is_rest))
        if stored_rows is not None:
            if FP8 is not None and SCALE_PER_HEAD:
                scale, upper, lower = _load_scale(scale_ptr, scale_value, step_head, True, HEADS, NVIDIA)
            rows = stored_rows + _step(step * BLOCK_HEADS, stored_head, UNIT, STORED_DENSE)
            if stored is not None:
                inside = _both(inside, stored)
            first = _as_stored(first, stored_rows, scale, upper, lower, OUT, FP8, LIMIT, MULTIPLIES, EXACT, NVIDIA)
            second = _as_stored(second, stored_rows, scale, upper, lower, OUT, FP8, LIMIT, MULTIPLIES, EXACT, NVIDIA)
            _store_pairs(rows + START, inside, first, second, ROTARY, BLOCK_HALF, OUT_INTERLEAVED)
            if ROTARY < DIM:
                rest = _as_stored(
                    rest, stored_rows, scale, upper, lower, rest.dtype, FP8, LIMIT, MULTIPLIES, EXACT, NVIDIA
                )
                tl.store(rows + element, rest, mask=_both(inside, is_rest))


@triton.jit
def _store_heads(
    x_rows, x_head, first_head, stored_rows, stored_head, stored, scale_ptr, scale_value,
    X_DENSE: tl.constexpr, STORED_DENSE: tl.constexpr, UNIT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, STEPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    FP8: tl.constexpr, LIMIT: tl.constexpr, MULTIPLIES: tl.constexpr, SCALE_PER_HEAD: tl.constexpr,
    EXACT: tl.constexpr, NVIDIA: tl.constexpr,
):
    """Store STEPS x BLOCK_HEADS heads of a block of tokens, quantised or cast; arguments as of `_rotate_heads`."""
    head = first_head + tl.arange(0, BLOCK_HEADS)[None, :, None]
    WHOLE: tl.constexpr = HEADS % (BLOCK_HEADS * STEPS) == 0
    element = tl.arange(0, BLOCK)[None, None, :]
    x_rows += _heads(head, x_head, UNIT, X_DENSE)
    stored_rows += _heads(head, stored_head, UNIT, STORED_DENSE)
    for step in tl.static_range(STEPS):
        step_head = head + step * BLOCK_HEADS
        inside = None if WHOLE else step_head < HEADS
        if BLOCK != DIM:
            inside = _both(inside, element < DIM)
        x = tl.load(x_rows + _step(step * BLOCK_HEADS, x_head, UNIT, X_DENSE) + element, mask=inside)
        scale, upper, lower = 1.0, 1.0, 0.0
        if FP8 is not None:
            scale, upper, lower = _load_scale(scale_ptr, scale_value, step_head, SCALE_PER_HEAD, HEADS, NVIDIA)
        x = _as_stored(x, stored_rows, scale, upper, lower, x.dtype, FP8, LIMIT, MULTIPLIES, EXACT, NVIDIA)
        rows = stored_rows + _step(step * BLOCK_HEADS, stored_head, UNIT, STORED_DENSE)
        tl.store(rows + element, x, mask=_both(inside, stored))


# Sizes, strides and scales vary from call to call; as plain numbers they cause no recompilation. One that a variant has
# no use for is None, which takes it off the list: each argument costs time at a launch.
@triton.jit(do_not_specialize=list(range(16, 60)))
def rope_qkv_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, position_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, slot_offset_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, q_out_ptr, k_out_ptr, q8_ptr,
    q_scale_value, k_scale_value, v_scale_value, tokens, seq, stored_tokens, table_rows,
    q_batch, q_place, q_head, k_batch, k_place, k_head, v_batch, v_place, v_head,
    q_out_batch, q_out_place, q_out_head, k_out_batch, k_out_place, k_out_head,
    cos_batch, cos_place, sin_batch, sin_place, position_batch, position_place, slot_batch, slot_place,
    slot_offset_batch, slot_offset_place,
    k_offset, k_slots, k_places, k_block_stride, k_place_stride, k_head_stride,
    v_offset, v_slots, v_places, v_block_stride, v_place_stride, v_head_stride,
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
    NVIDIA: tl.constexpr,
):
    pid = tl.program_id(0)
    GROUPS: tl.constexpr = Q_GROUPS + K_GROUPS + V_GROUPS
    group = pid % GROUPS
    token = (pid // GROUPS) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None, None]
    if BLOCK_TOKENS > 1:  # programs that reach beyond the last token do it again, which costs less than masks
        token = tl.minimum(token, tokens - 1)
    if SPLIT == ONE_BATCH:
        batch, place = tl.zeros_like(token), token
    elif SPLIT == ONE_PLACE:
        batch, place = token, tl.zeros_like(token)
    else:
        batch, place = token // seq, token % seq
    OUT_INTERLEAVED: tl.constexpr = INTERLEAVED and not HALVES_OUT

    if group < Q_GROUPS:
        if Q_GROUPS > 0:
            position = None
            if position_ptr is not None:
                position_row = _row(batch, place, position_batch, position_place, SPLIT)
                position = tl.load(position_ptr + position_row)
            q_rows = q_ptr + _row(batch, place, q_batch, q_place, SPLIT, UNIT)
            q_out_row = _row(batch, place, q_out_batch, q_out_place, SPLIT, UNIT)
            q_out_rows, q8_rows = None, None
            if q_out_ptr is not None:
                q_out_rows = q_out_ptr + q_out_row
            if q8_ptr is not None:
                q8_rows = q8_ptr + q_out_row
            _rotate_heads(
                q_rows, q_head, cos_ptr, sin_ptr, position, batch, place, table_rows,
                cos_batch, cos_place, sin_batch, sin_place, group * (Q_STEPS * BLOCK_Q_HEADS),
                q_out_rows, q_out_head, q8_rows, q_out_head, None, q_scale_ptr, q_scale_value,
                Q_DENSE, Q_OUT_DENSE, Q_OUT_DENSE, UNIT, SPLIT, Q_HEADS, BLOCK_Q_HEADS, Q_STEPS,
                DIM, ROTARY, START, FULL, INTERLEAVED, OUT_INTERLEAVED, INVERSE, WIDE, MATH, OUT, EXACT, NVIDIA,
                Q_FP8, Q_LIMIT, Q_MULTIPLIES, False, BLOCK_HALF, BLOCK_PASS,
            )
    elif group < Q_GROUPS + K_GROUPS:
        if K_GROUPS > 0:
            position = None
            if position_ptr is not None:
                position_row = _row(batch, place, position_batch, position_place, SPLIT)
                position = tl.load(position_ptr + position_row)
            k_rows = k_ptr + _row(batch, place, k_batch, k_place, SPLIT, UNIT)
            k_out_rows, k_stored_rows, k_stored = None, None, None
            if k_out_ptr is not None:
                k_out_rows = k_out_ptr + _row(batch, place, k_out_batch, k_out_place, SPLIT, UNIT)
            if k_cache_ptr is not None:
                k_stored_rows, k_stored = _cache_rows(
                    k_cache_ptr, k_offset, slot_ptr, slot_offset_ptr, batch, place, token < stored_tokens,
                    slot_batch, slot_place, slot_offset_batch, slot_offset_place,
                    k_slots, k_places, k_block_stride, k_place_stride, K_ADDRESSING, K_PAGE, SKIP_NEGATIVE, UNIT, SPLIT,
                )
            _rotate_heads(
                k_rows, k_head, cos_ptr, sin_ptr, position, batch, place, table_rows,
                cos_batch, cos_place, sin_batch, sin_place, (group - Q_GROUPS) * (KV_STEPS * BLOCK_KV_HEADS),
                k_out_rows, k_out_head, k_stored_rows, k_head_stride, k_stored, k_scale_ptr, k_scale_value,
                K_DENSE, K_OUT_DENSE, K_CACHE_DENSE, UNIT, SPLIT, KV_HEADS, BLOCK_KV_HEADS, KV_STEPS,
                DIM, ROTARY, START, FULL, INTERLEAVED, OUT_INTERLEAVED, INVERSE, WIDE, MATH, OUT, EXACT, NVIDIA,
                KV_FP8, KV_LIMIT, KV_MULTIPLIES, K_SCALE_PER_HEAD, BLOCK_HALF, BLOCK_PASS,
            )
    else:
        if V_GROUPS > 0:
            v_rows = v_ptr + _row(batch, place, v_batch, v_place, SPLIT, UNIT)
            v_stored_rows, v_stored = _cache_rows(
                v_cache_ptr, v_offset, slot_ptr, slot_offset_ptr, batch, place, token < stored_tokens,
                slot_batch, slot_place, slot_offset_batch, slot_offset_place,
                v_slots, v_places, v_block_stride, v_place_stride, V_ADDRESSING, V_PAGE, SKIP_NEGATIVE, UNIT, SPLIT,
            )
            _store_heads(
                v_rows, v_head, (group - Q_GROUPS - K_GROUPS) * (KV_STEPS * BLOCK_KV_HEADS),
                v_stored_rows, v_head_stride, v_stored, v_scale_ptr, v_scale_value, V_DENSE, V_CACHE_DENSE, UNIT,
                KV_HEADS, BLOCK_KV_HEADS, KV_STEPS, V_DIM, BLOCK_V,
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
Q, K, V, COS, SIN, POSITIONS, K_CACHE, V_CACHE, SLOTS, SLOT_OFFSETS, Q_SCALE, K_SCALE, V_SCALE = range(13)


class LaunchParameters(NamedTuple):
    """How the work is cut: one program takes ``steps`` tiles of tokens x heads, one after the other."""

    tokens: int
    q_heads: int
    q_steps: int
    kv_heads: int
    kv_steps: int
    warps: int


class LaunchRule(NamedTuple):
    """Row of the launch table, for up to ``up_to`` tokens; a tile holds ``elements`` (heads x width) of a token."""

    up_to: float
    tokens: int
    elements: int
    steps: int
    warps: int


# Measured on one H200, see docs/performance.md.
LAUNCH_TABLE = (
    LaunchRule(up_to=16, tokens=1, elements=1024, steps=1, warps=4),
    LaunchRule(up_to=128, tokens=2, elements=512, steps=1, warps=4),
    LaunchRule(up_to=512, tokens=4, elements=256, steps=2, warps=4),
    LaunchRule(up_to=4096, tokens=2, elements=512, steps=2, warps=2),
    LaunchRule(up_to=float("inf"), tokens=1, elements=512, steps=4, warps=1),
)
MOST_STEPS_OF_PART = 2  # where part of each head passes through, which makes a step longer


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def width_of(head_dim: int, rotary_dim: int) -> int:
    """Columns of a tile: those of the wider part of a head, which is turned or passed through."""
    return next_power_of_2(max(rotary_dim, head_dim - rotary_dim))


def choose_parameters(tokens: int, q_heads: int, kv_heads: int, head_dim: int, rotary_dim: int) -> LaunchParameters:
    """The launch parameters that were measured best for these sizes."""
    rule = next(rule for rule in LAUNCH_TABLE if tokens <= rule.up_to)
    fitting = max(rule.elements // width_of(head_dim, rotary_dim), 1)
    steps = rule.steps if rotary_dim == head_dim else min(rule.steps, MOST_STEPS_OF_PART)

    def tile(heads: int) -> tuple[int, int]:
        block = min(fitting, next_power_of_2(heads))
        return block, min(steps, -(-heads // block))

    return LaunchParameters(rule.tokens, *tile(q_heads), *tile(max(kv_heads, 1)), rule.warps)


class Spec(NamedTuple):
    """Everything about a call that is compiled into the kernel, apart from the types of pointers and numbers."""

    options: PrologueOptions
    q_dtype: torch.dtype
    q_heads: int  # 0: nobody wants the rotated q
    kv_heads: int  # 0: neither k nor v is there
    has_k: bool
    head_dim: int
    v_head_dim: int
    full_width: bool
    k_scale_per_head: bool
    v_scale_per_head: bool
    addressing: tuple[int, ...]  # of the caches of k and v
    pages: tuple[int, ...]
    unit: int
    split: int
    dense: tuple[int, ...]  # of q, k, v, outputs of q and k, caches of k and v: the stride of a head if it is its size
    cuda: int  # the architecture, 90 for sm_90; 0 for other devices


@dataclass(frozen=True)
class Variant:
    """One specialisation of the kernel; remembers what was compiled for which types and alignments."""

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
    p, o = launch_parameters, spec.options
    half, rest = o.rotary_dim // 2, spec.head_dim - o.rotary_dim
    q_groups = -(-spec.q_heads // (p.q_heads * p.q_steps))
    kv_groups = -(-spec.kv_heads // (p.kv_heads * p.kv_steps))
    k_groups, v_groups = kv_groups * spec.has_k, kv_groups * (spec.v_head_dim > 0)
    dense = dict(zip(("Q", "K", "V", "Q_OUT", "K_OUT", "K_CACHE", "V_CACHE"), spec.dense, strict=True))

    def limit(fp8: torch.dtype | None) -> float | None:
        return None if fp8 is None or spec.cuda else torch.finfo(fp8).max

    constexprs = {
        "UNIT": spec.unit,
        "SPLIT": spec.split,
        "Q_HEADS": spec.q_heads,
        "KV_HEADS": spec.kv_heads,
        "DIM": spec.head_dim,
        "V_DIM": spec.v_head_dim,
        "ROTARY": o.rotary_dim,
        "START": o.rotary_start,
        "FULL": spec.full_width,
        "INTERLEAVED": o.interleaved,
        "HALVES_OUT": o.halves_out,
        "INVERSE": o.inverse,
        "WIDE": tl.float64 if o.math_dtype == torch.float64 else tl.float32,
        "MATH": TRITON_DTYPES[o.math_dtype],
        "OUT": TRITON_DTYPES[o.out_dtype],
        "EXACT": o.exact,
        "Q_FP8": None if o.q_fp8 is None else TRITON_DTYPES[o.q_fp8],
        "Q_LIMIT": limit(o.q_fp8),
        "Q_MULTIPLIES": o.q_scale_multiplies,
        "KV_FP8": None if o.kv_fp8 is None else TRITON_DTYPES[o.kv_fp8],
        "KV_LIMIT": limit(o.kv_fp8),
        "KV_MULTIPLIES": o.kv_scale_multiplies,
        "K_SCALE_PER_HEAD": spec.k_scale_per_head,
        "V_SCALE_PER_HEAD": spec.v_scale_per_head,
        "K_ADDRESSING": spec.addressing[0],
        "V_ADDRESSING": spec.addressing[1],
        "K_PAGE": spec.pages[0],
        "V_PAGE": spec.pages[1],
        **{f"{name}_DENSE": stride for name, stride in dense.items()},
        "SKIP_NEGATIVE": o.skip_negative_slots,
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
        "NVIDIA": spec.cuda > 0,
    }
    # A fused multiply-add would skip a rounding that eager does.
    options = {"num_warps": p.warps, "enable_fp_fusion": False}
    return Variant(spec, constexprs, options, q_groups + k_groups + v_groups, p.tokens)


class Layout(NamedTuple):
    """What a plan depends on in a tensor: shape, strides and dtype."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def steps(self) -> tuple[int, int, int]:
        """Strides of batch, place and head; 0 for a dim of one element, whose stride means nothing."""
        return tuple(s if n > 1 else 0 for n, s in zip(self.shape[:3], self.stride[:3], strict=True))  # type: ignore[return-value]

    def dense(self) -> int:
        """The stride of heads that follow one another, else 0. A constant of the kernel: it does not vary with sizes."""
        return self.shape[3] if self.stride[2] == self.shape[3] or self.shape[2] == 1 else 0


def row_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, place and head; 0 for a dim of one element, whose stride means nothing."""
    return Layout(x.shape, x.stride(), x.dtype).steps()


def index_strides(index: Tensor | Layout, seq: int, flat: bool) -> tuple[int, int]:
    """Strides of batch and place; a 1-D tensor runs over all tokens if ``flat``, else over one sequence."""
    stride = index.stride if isinstance(index, Layout) else index.stride()
    if len(index.shape) == 1:
        step = stride[0] if index.shape[0] > 1 else 0
        return (seq * step if flat else 0, step)
    batch, place = stride
    return (batch if index.shape[0] > 1 else 0, place if index.shape[1] > 1 else 0)


@lru_cache(maxsize=1024)
def geometry_of(layout: str, cache: Layout, heads: int, paired: bool) -> tuple[Geometry, int]:
    """Geometry and addressing mode of a cache; the addressing is one of the kernel's constants."""
    parsed = parse_layout(layout)
    geometry = parsed.geometry(cache.shape, cache.stride, heads)
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


NUMBERS: tuple[str, ...] = tuple(
    rope_qkv_kernel.arg_names[
        rope_qkv_kernel.arg_names.index("q_scale_value") : rope_qkv_kernel.arg_names.index("UNIT")
    ]
)


@dataclass(frozen=True)
class Plan:
    """What calls with tensors of the same layouts have in common."""

    variant: Variant
    numbers: tuple[float | int | None, ...]  # as named by NUMBERS; None where the variant has no use for one
    tokens: int
    grid: tuple[int, int, int]
    sources: tuple[int | None, ...]  # for each of the kernel's input pointers, which of the operator's tensors it is
    returned: torch.dtype
    q_out: bool
    k_out: bool
    q_fp8: torch.dtype | None
    signature: tuple[object, ...]  # types of what is passed
    runners: dict[object, Runner] = field(default_factory=dict, compare=False)

    @property
    def launches(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.tokens and self.variant.groups)


@lru_cache(maxsize=4096)
def plan_of(
    options: str,
    need_q: bool,
    need_k: bool,
    parameters: LaunchParameters | None,
    target: Target | None,
    *tensors: tuple[torch.Size, tuple[int, ...], torch.dtype] | None,
) -> Plan:
    """Work out everything that does not depend on where the tensors lie.

    Args:
        options, need_q, need_k: as the operator's.
        parameters: None takes those of the launch table.
        target: what to compile for; None for the interpreter.
        tensors: shape, strides and dtype of each of the operator's tensors.
    """
    o = decoded(options)
    layouts = [None if t is None else Layout(*t) for t in tensors]
    q, k, v, cos, sin, positions, k_cache, v_cache, slots, slot_offsets, _, k_scale, v_scale = layouts
    assert q is not None
    assert cos is not None
    assert sin is not None
    batch, seq, q_heads, head_dim = q.shape
    tokens = batch * seq
    sources: list[int | None] = [None if t is None else index for index, t in enumerate(tensors)]

    def drop(*names: int) -> None:
        for name in names:
            sources[name] = None

    if v_cache is None and k_cache is not None:  # a joint buffer
        v_cache, sources[V_CACHE] = k_cache, K_CACHE
    if v is None or v_cache is None or slots is None:
        v = v_cache = None
        drop(V, V_CACHE)
    if k is None or slots is None:
        k_cache = None
        drop(K_CACHE)
    k_out = need_k and k is not None
    if k is not None and k_cache is None and not k_out:
        k = None
        drop(K)
    kv = v if k is None else k
    kv_heads = 0 if kv is None else kv.shape[2]
    q_result = like(q) if need_q or o.q_fp8 is not None else None
    k_result = like(k) if k_out and k is not None else None

    split = ONE_BATCH if batch == 1 else ONE_PLACE if seq == 1 else BATCH_AND_PLACE
    numbers: dict[str, float | int | None] = dict.fromkeys(NUMBERS)
    scaled: dict[str, int] = {}  # counted in elements; passed in units

    def pair(name: str, batch_stride: int, place_stride: int, into: dict[str, Any]) -> None:
        if split is not ONE_BATCH:
            into[f"{name}_batch"] = batch_stride
        if split is not ONE_PLACE:
            into[f"{name}_place"] = place_stride

    for name, rows in (("q", q), ("k", k), ("v", v), ("q_out", q_result), ("k_out", k_result)):
        if rows is not None:
            batch_stride, place_stride, head_stride = rows.steps()
            pair(name, batch_stride, place_stride, scaled)
            if not rows.dense():
                scaled[f"{name}_head"] = head_stride
    if positions is not None:
        scaled |= {"cos_place": cos.stride[0], "sin_place": sin.stride[0]}
        pair("position", *index_strides(positions, seq, False), numbers)
        numbers["table_rows"] = cos.shape[0]
    else:
        for name, table in (("cos", cos), ("sin", sin)):
            steps = [s if n > 1 else 0 for n, s in zip(table.shape[:2], table.stride[:2], strict=True)]
            pair(name, steps[0], steps[1], scaled)

    addressing, pages, cache_dense = [0, 0], [0, 0], [0, 0]
    for number, (name, cache, layout, width) in enumerate(
        (("k", k_cache, o.k_layout, head_dim), ("v", v_cache, o.v_layout, 0 if v is None else v.shape[3]))
    ):
        if cache is None:
            continue
        geometry, mode = geometry_of(layout, cache, kv_heads, slot_offsets is not None)
        addressing[number] = mode
        if geometry.offset:
            scaled[f"{name}_offset"] = geometry.offset
        scaled[f"{name}_place_stride"] = geometry.place_stride
        if mode != LINEAR.value:
            scaled[f"{name}_block_stride"] = geometry.block_stride
        if geometry.head_stride == width or kv_heads == 1:
            cache_dense[number] = width
        else:
            scaled[f"{name}_head_stride"] = geometry.head_stride
        if mode == PAGED.value:
            pages[number] = geometry.places
        if mode == PAIR.value:
            numbers[f"{name}_places"] = geometry.places
        numbers[f"{name}_slots"] = {STATIC.value: geometry.places, PAIR.value: geometry.blocks}.get(
            mode, geometry.blocks * geometry.places
        )
    static = STATIC.value in addressing
    if slots is not None:
        pair("slot", *index_strides(slots, seq, not static), numbers)
    if slot_offsets is not None:
        pair("slot_offset", *index_strides(slot_offsets, seq, True), numbers)
    stored_tokens = tokens if static or slots is None else min(slots.shape.numel(), tokens)
    unit = gcd(WIDEST_UNIT, *scaled.values())  # a stride of 0 divides by anything
    numbers |= {name: stride // unit for name, stride in scaled.items()}
    numbers |= {"tokens": tokens, "stored_tokens": stored_tokens, "seq": seq if split is BATCH_AND_PLACE else None}
    for name, scale, value in (
        ("q", sources[Q_SCALE], o.q_scale_value),
        ("k", sources[K_SCALE], o.k_scale_value),
        ("v", sources[V_SCALE], o.v_scale_value),
    ):
        numbers[f"{name}_scale_value"] = value if scale is None else None

    spec = Spec(
        o,
        q.dtype,
        0 if q_result is None else q_heads,
        kv_heads,
        k is not None,
        head_dim,
        0 if v is None else v.shape[3],
        cos.shape[-1] == o.rotary_dim,
        k_scale is not None and k_scale.shape.numel() > 1,
        v_scale is not None and v_scale.shape.numel() > 1,
        tuple(addressing),
        tuple(pages),
        unit,
        split.value,
        (*[0 if x is None else x.dense() for x in (q, k, v, q_result, k_result)], *cache_dense),
        int(target.arch) if target is not None and target.backend == "cuda" else 0,
    )
    variant = variant_of(spec, parameters or choose_parameters(tokens, q_heads, kv_heads, head_dim, o.rotary_dim))
    values = tuple(numbers[name] for name in NUMBERS)
    return Plan(
        variant,
        values,
        tokens,
        variant.grid(tokens),
        tuple(sources),
        o.returned,
        need_q,
        k_out,
        o.q_fp8,
        (
            *[None if source is None else layouts[source].dtype for source in sources],  # type: ignore[union-attr]
            need_q,  # of the outputs' pointers, what the variant does not say: one that is None is compiled away
            k_out,
            *[None if value is None else isinstance(value, int) and value.bit_length() > 31 for value in values],
        ),
    )


def like(x: Layout) -> Layout:
    """The layout that ``torch.empty_like`` gives a tensor of this one."""
    out = torch.empty_like(torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta"))
    return Layout(out.shape, out.stride(), x.dtype)


class Call(NamedTuple):
    """One call, ready to launch."""

    plan: Plan
    pointers: tuple[Tensor | None, ...]  # in the kernel's order
    device: torch.device
    outputs: tuple[Tensor, Tensor, Tensor]


def prepare(
    *tensors: Tensor | None,
    options: str,
    need_q: bool,
    need_k: bool,
    parameters: LaunchParameters | None = None,
    target: Target | None = None,
) -> Call:
    """Allocate the outputs and line up what the kernel takes; arguments as of ``plan_of``.

    Tensors of the meta device are taken too, for compilation ahead of time: for ``target``, which is otherwise that of
    q's device.
    """
    q, k = tensors[:2]
    assert q is not None
    device = q.device
    if any(t is not None and t.device != device for t in tensors):
        found = sorted({str(t.device) for t in tensors if t is not None})
        raise ValueError(f"rope_qkv takes tensors of one device, got {', '.join(found)}; move them to {device}")
    if target is None and device.type == "cuda":
        target = target_of(device)
    layouts = [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]
    plan = plan_of(options, need_q, need_k, parameters, target, *layouts)
    q_out = torch.empty_like(q, dtype=plan.returned) if plan.q_out else None
    k_out = torch.empty_like(k, dtype=plan.returned) if plan.k_out and k is not None else None
    q8 = torch.empty_like(q, dtype=plan.q_fp8) if plan.q_fp8 is not None else None
    inputs = [None if source is None else tensors[source] for source in plan.sources]
    outputs = (
        q.new_empty(0, dtype=plan.returned) if q_out is None else q_out,
        q.new_empty(0, dtype=plan.returned) if k_out is None else k_out,
        q.new_empty(0) if q8 is None else q8,
    )
    return Call(plan, (*inputs, q_out, k_out, q8), device, outputs)


def refusal(call: Call) -> str | None:
    """Why a kernel for this call cannot be compiled for its device, or None."""
    spec = call.plan.variant.spec
    _, _, _, cos, _, positions, k_cache, v_cache, slots, slot_offsets = call.pointers[:10]
    assert cos is not None
    return unsupported(
        target_of(call.device),
        q_dtype=spec.q_dtype,
        cos_dtype=cos.dtype,
        head_dim=spec.head_dim,
        rotary_dim=spec.options.rotary_dim,
        v_head_dim=spec.v_head_dim,
        math_dtype=spec.options.math_dtype,
        out_dtype=spec.options.out_dtype,
        q_fp8=spec.options.q_fp8,
        kv_fp8=spec.options.kv_fp8,
        cache_dtypes=[cache.dtype for cache in (k_cache, v_cache) if cache is not None],
        index_dtypes=[index.dtype for index in (positions, slots, slot_offsets) if index is not None],
    )


def run(call: Call) -> None:
    """Launch the kernel for a prepared call, if there is anything to do; on the CPU only under Triton's interpreter."""
    plan, device = call.plan, call.device
    variant = plan.variant
    if not plan.launches:
        return
    if device.type != "cuda" or torch.version.hip:
        # The interpreter takes no options. On ROCm a kernel also depends on the size of each buffer, which Triton
        # tracks itself.
        options = variant.options if device.type == "cuda" else {}
        rope_qkv_kernel[plan.grid](*call.pointers, *plan.numbers, **variant.constexprs, **options)
        return
    # Triton's own dispatch takes tens of microseconds for this many arguments; what it looks at is in the plan and in
    # the key, so it runs once for each.
    if (runner := runner_of_call(call)) is not None:
        runner([t.data_ptr() for t in call.pointers if t is not None])
        return
    if reason := refusal(call):
        raise RuntimeError(f"rope_qkv: {reason}")
    variant.compiled[_alignment(call), plan.signature] = rope_qkv_kernel[plan.grid](
        *call.pointers, *plan.numbers, **variant.constexprs, **variant.options
    )


def _alignment(call: Call) -> object:
    """What a compiled kernel takes for granted of addresses: as a rule that all are multiples of 16 bytes."""
    addresses = [t.data_ptr() for t in call.pointers if t is not None]
    if reduce(or_, addresses) % ALIGNMENT == 0:
        return call.device.index
    return (call.device.index, *[address % ALIGNMENT == 0 for address in addresses])


def runner_of_call(call: Call) -> Runner | None:
    """What launches the kernel that was compiled for such a call, given the addresses of its tensors; None where none was."""
    plan = call.plan
    if not (plan.launches and plan.variant.compiled):
        return None
    key = _alignment(call)
    runner = plan.runners.get(key)
    if runner is None:
        compiled = plan.variant.compiled.get((key, plan.signature))
        if compiled is None:
            return None
        pointers = [None if t is None else ... for t in call.pointers]
        values = (*pointers, *plan.numbers, *plan.variant.constexprs.values())
        arguments = dict(zip(rope_qkv_kernel.arg_names, values, strict=True))
        runner = plan.runners[key] = runner_of(compiled, plan.grid, call.device.index, arguments)
    return runner


def launch(
    *tensors: Tensor | None,
    options: str,
    need_q: bool,
    need_k: bool,
    parameters: LaunchParameters | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator by the Triton kernel: arguments and results as those of ``rope_qkv.encoded``.

    ``parameters`` overrides the launch table. No tokens, no launch. With ``TRITON_INTERPRET=1`` in the environment
    before Triton is imported, tensors on the CPU are taken too.
    """
    call = prepare(*tensors, options=options, need_q=need_q, need_k=need_k, parameters=parameters)
    run_on_device(run, call)
    return call.outputs
