"""The Triton kernel of `rope_fusion::rotate` and its forms. Imported only where it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rope_fusion.kernels.rotate import GroupFp8, Rotary, StaticFp8


# fmt: off
@triton.jit
def _turn(own, other, cos, sin, ROUND: tl.constexpr, MATH: tl.constexpr):
    """own · cos + other · sin in fp32; with ROUND every operand and result is rounded to MATH, as eager does."""
    own, other, cos, sin = own.to(tl.float32), other.to(tl.float32), cos.to(tl.float32), sin.to(tl.float32)
    if ROUND:
        own, other = own.to(MATH).to(tl.float32), other.to(MATH).to(tl.float32)
        cos, sin = cos.to(MATH).to(tl.float32), sin.to(MATH).to(tl.float32)
        return (own * cos).to(MATH).to(tl.float32) + (other * sin).to(MATH).to(tl.float32)
    return own * cos + other * sin


@triton.jit
def _cast(value, ROUND: tl.constexpr, MATH: tl.constexpr, DTYPE: tl.constexpr):
    if ROUND:
        value = value.to(MATH)
    return value.to(DTYPE)


@triton.jit
def _head_offset(head, group_stride, head_stride, HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr):
    """Where each head's row begins in an output with its heads in groups."""
    if GROUP_HEADS < HEADS:
        group = (head // GROUP_HEADS).to(tl.int64)
        return (group * group_stride + (head % GROUP_HEADS).to(tl.int64) * head_stride)[None, :, None]
    return (head.to(tl.int64) * head_stride)[None, :, None]


@triton.jit
def _trig(row, column, mask, BLOCK_H: tl.constexpr):
    """Columns of the tokens' cos or sin rows, loaded for every head.

    The repeats hit the first-level cache. Loaded once and broadcast, they would get a thread layout of their own, and x
    would have to go through shared memory to meet it.
    """
    shape: tl.constexpr = (row.shape[0], BLOCK_H, column.shape[0])
    pointers = tl.broadcast_to(row + column[None, None, :], shape)
    return tl.load(pointers, mask=tl.broadcast_to(mask, shape), other=0.0)


@triton.jit(do_not_specialize=["tokens", "sequence", "p_b", "p_s"])
def rotate_kernel(
    x, cos, sin, positions, scale, out, scales,
    tokens, sequence, scale_value,
    x_b, x_s, x_h, cos_b, cos_s, sin_b, sin_s, p_b, p_s, o_b, o_s, o_g, o_h, q_b, q_s, q_g, q_h,
    HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, ONE_ROW: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, HALVES_OUT: tl.constexpr, INVERSE: tl.constexpr, FULL: tl.constexpr,
    GATHER: tl.constexpr, IN_PLACE: tl.constexpr,
    ROUND: tl.constexpr, MATH: tl.constexpr, ROUNDED: tl.constexpr, FP8_MAX: tl.constexpr,
    HAS_SCALE: tl.constexpr, MULTIPLIES: tl.constexpr, EXACT: tl.constexpr,
    GROUP: tl.constexpr, MIN_AMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """BLOCK_T tokens × BLOCK_H heads of columns FIRST : FIRST + WIDTH, 2·HALF of which, from START on, are rotary."""
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    token = (program // HEAD_BLOCKS) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = (program % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    if ONE_ROW:  # batch and sequence fold into one stride
        b = tl.zeros_like(token).to(tl.int64)
        s = token.to(tl.int64)
    else:
        b = (token // sequence).to(tl.int64)
        s = (token % sequence).to(tl.int64)
    inside = (token < tokens)[:, None, None]
    mask = inside & (head < HEADS)[None, :, None] & (column < WIDTH)[None, None, :]

    # the chain position -> row -> cos is the longest: it starts first
    if GATHER:
        row = tl.load(positions + b * p_b + s * p_s, mask=token < tokens, other=0).to(tl.int64)
        cos_row = cos + (row * cos_s)[:, None, None]
        sin_row = sin + (row * sin_s)[:, None, None]
    else:
        cos_row = cos + (b * cos_b + s * cos_s)[:, None, None]
        sin_row = sin + (b * sin_b + s * sin_s)[:, None, None]

    r = column - START
    rotary = (r >= 0) & (r < 2 * HALF)
    own_column = column
    if HALVES_OUT:
        own_column = tl.where(rotary, START + tl.where(r < HALF, 2 * r, 2 * (r - HALF) + 1), column)
    x_row = x + FIRST + (b * x_b + s * x_s)[:, None, None] + (head.to(tl.int64) * x_h)[None, :, None]
    own = tl.load(x_row + own_column[None, None, :], mask=mask)

    if INTERLEAVED and not HALVES_OUT:
        # both elements of a pair are in one thread's 16 bytes: no second load
        first, second = tl.split(tl.reshape(own, (BLOCK_T, BLOCK_H, BLOCK_D // 2, 2)))
        k = tl.arange(0, BLOCK_D // 2) - START // 2
        pair = ((k >= 0) & (k < HALF))[None, None, :]
        if FULL:
            cos_first = _trig(cos_row, 2 * k, inside & pair, BLOCK_H)
            cos_second = _trig(cos_row, 2 * k + 1, inside & pair, BLOCK_H)
            sin_first = _trig(sin_row, 2 * k, inside & pair, BLOCK_H)
            sin_second = _trig(sin_row, 2 * k + 1, inside & pair, BLOCK_H)
        else:
            cos_first = _trig(cos_row, k, inside & pair, BLOCK_H)
            sin_first = _trig(sin_row, k, inside & pair, BLOCK_H)
            cos_second = cos_first
            sin_second = sin_first
        if INVERSE:
            sin_second = -sin_second
        else:
            sin_first = -sin_first
        turned_first = _cast(_turn(first, second, cos_first, sin_first, ROUND, MATH), ROUND, MATH, ROUNDED)
        turned_second = _cast(_turn(second, first, cos_second, sin_second, ROUND, MATH), ROUND, MATH, ROUNDED)
        # the choice is made on rounded values: a pass-through NaN keeps its bits
        y = tl.reshape(
            tl.join(tl.where(pair, turned_first, first.to(ROUNDED)), tl.where(pair, turned_second, second.to(ROUNDED))),
            (BLOCK_T, BLOCK_H, BLOCK_D),
        )
    else:
        low = r < HALF
        if HALVES_OUT:
            other_column = START + tl.where(low, 2 * r + 1, 2 * (r - HALF))
        else:
            other_column = tl.where(low, column + HALF, column - HALF)
        turned_mask = mask & rotary[None, None, :]
        other = tl.load(x_row + other_column[None, None, :], mask=turned_mask)
        k = r
        if not FULL:
            k = tl.where(low, r, r - HALF)
        trig_mask = inside & rotary[None, None, :]
        c = _trig(cos_row, k, trig_mask, BLOCK_H)
        sn = _trig(sin_row, k, trig_mask, BLOCK_H)
        sn = tl.where(low[None, None, :] == INVERSE, sn, -sn)
        turned = _cast(_turn(own, other, c, sn, ROUND, MATH), ROUND, MATH, ROUNDED)
        y = tl.where(rotary[None, None, :], turned, own.to(ROUNDED))

    if IN_PLACE:
        tl.debug_barrier()  # other threads of this program may still read what this one overwrites
    o_row = out + FIRST + (b * o_b + s * o_s)[:, None, None] + _head_offset(head, o_g, o_h, HEADS, GROUP_HEADS)
    o_tile = o_row + column[None, None, :]
    if GROUP > 0:
        chunks = tl.reshape(y.to(tl.float32), (BLOCK_T, BLOCK_H, BLOCK_D // GROUP, GROUP))
        # magnitudes order like their bits, and NaN lies above them all: the maximum keeps NaN as eager's does
        amax = tl.max(tl.abs(chunks).to(tl.int32, bitcast=True), axis=3).to(tl.float32, bitcast=True)
        amax = tl.maximum(amax, MIN_AMAX, propagate_nan=tl.PropagateNan.ALL)
        # eager on a GPU divides by a number as it does here in exact mode
        step = amax * (1.0 / FP8_MAX) if EXACT else tl.div_rn(amax, tl.full(amax.shape, FP8_MAX, tl.float32))
        if POWER_OF_TWO:
            step = ((step.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scaled = tl.div_rn(chunks, tl.broadcast_to(step[:, :, :, None], chunks.shape))
        scaled = tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        tl.store(o_tile, tl.reshape(scaled, (BLOCK_T, BLOCK_H, BLOCK_D)).to(out.dtype.element_ty), mask=mask)
        chunk = tl.arange(0, BLOCK_D // GROUP)
        q_row = scales + (b * q_b + s * q_s)[:, None, None] + _head_offset(head, q_g, q_h, HEADS, GROUP_HEADS)
        chunk_mask = inside & (head < HEADS)[None, :, None] & (chunk < WIDTH // GROUP)[None, None, :]
        tl.store(q_row + chunk[None, None, :], step, mask=chunk_mask)
    elif FP8_MAX > 0:
        factor = scale_value
        if HAS_SCALE:
            factor = tl.load(scale).to(tl.float32)
        value = y.to(tl.float32)
        value = value * factor if MULTIPLIES else tl.div_rn(value, tl.full(value.shape, 0.0, tl.float32) + factor)
        value = tl.clamp(value, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        tl.store(o_tile, value.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(o_tile, y, mask=mask)
# fmt: on


@dataclass(frozen=True)
class Launch:
    """Up to how many elements a program shape is used, and that shape."""

    max_elements: int
    tile: int  # elements per program
    warps: int


# Measured on one H200, see docs/performance.md.
LAUNCHES = (
    Launch(max_elements=1 << 17, tile=512, warps=1),
    Launch(max_elements=1 << 20, tile=2048, warps=4),
    Launch(max_elements=1 << 62, tile=8192, warps=8),
)

_TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def pick_launch(elements: int) -> Launch:
    """The row of the table for this many elements of x."""
    return next(row for row in LAUNCHES if elements <= row.max_elements)


def launch(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotary: Rotary,
    out: Tensor,
    *,
    layout: str = "b s h d",
    groups: int = 1,
    rounded: torch.dtype | None = None,
    quant: StaticFp8 | GroupFp8 | None = None,
    scales: Tensor | None = None,
    shape: Launch | None = None,
) -> None:
    """Run the kernel into `out`: a tensor in `layout`, or `x` itself, of which only the rotary slice is touched."""
    if x.numel() == 0:
        return
    batch, sequence, heads, width = x.shape
    shape = shape or pick_launch(x.numel())
    in_place = out is x
    first, width = (rotary.rotary_start, rotary.rotary_dim) if in_place else (0, width)
    block_d = triton.next_power_of_2(width)
    all_heads = triton.next_power_of_2(heads)
    block_h = min(all_heads, max(1, shape.tile // block_d))
    block_t = max(1, shape.tile // (block_d * all_heads))
    grid = (triton.cdiv(batch * sequence, block_t) * triton.cdiv(heads, block_h),)

    x_strides = dict(zip("bsh", x.stride(), strict=False))
    o_strides = x_strides if in_place else _strides(out, layout)
    q_strides = {} if scales is None else _strides(scales, layout)
    # one token per batch row: the batch takes the place of the sequence, and the kernel need not divide
    one_row = batch == 1 or sequence == 1

    def token_strides(b: int, s: int) -> tuple[int, int]:
        return (0, b) if sequence == 1 and batch > 1 else (b, s)

    if positions is None:
        trig = [*token_strides(*_row_strides(cos)), *token_strides(*_row_strides(sin)), 0, 0]
    else:
        rows = positions if positions.dim() == 2 else positions.unsqueeze(0)
        trig = [0, cos.stride(0), 0, sin.stride(0), *token_strides(*_row_strides(rows))]
    static = quant if isinstance(quant, StaticFp8) else None
    grouped = quant if isinstance(quant, GroupFp8) else None
    # a fused multiply-add skips a rounding that eager does
    options: dict[str, Any] = {"enable_fp_fusion": False} if rotary.exact else {}
    rotate_kernel[grid](
        x, cos, sin, positions, static and static.scale, out, scales,
        batch * sequence, sequence, static.scale_value if static else 1.0,
        *token_strides(x_strides["b"], x_strides["s"]), x_strides["h"],
        *trig,
        *token_strides(o_strides["b"], o_strides["s"]), o_strides.get("g", 0), o_strides["h"],
        *token_strides(q_strides.get("b", 0), q_strides.get("s", 0)), q_strides.get("g", 0), q_strides.get("h", 0),
        HEADS=heads, GROUP_HEADS=heads // groups, ONE_ROW=one_row,
        FIRST=first, WIDTH=width, START=rotary.rotary_start - first, HALF=rotary.rotary_dim // 2,
        INTERLEAVED=rotary.interleaved, HALVES_OUT=rotary.halves_out, INVERSE=rotary.inverse,
        FULL=cos.shape[-1] == rotary.rotary_dim, GATHER=positions is not None, IN_PLACE=in_place,
        ROUND=rotary.exact and rotary.math_dtype != torch.float32,
        MATH=_TRITON_DTYPE[rotary.math_dtype] if rotary.exact else tl.float32,
        ROUNDED=_TRITON_DTYPE[rounded or out.dtype], FP8_MAX=torch.finfo(quant.dtype).max if quant else 0.0,
        HAS_SCALE=static is not None and static.scale is not None, MULTIPLIES=static is not None and static.multiplies,
        EXACT=rotary.exact, GROUP=grouped.size if grouped else 0, MIN_AMAX=grouped.min_amax if grouped else 0.0,
        POWER_OF_TWO=grouped is not None and grouped.power_of_two,
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=shape.warps, **options,
    )  # fmt: skip


def _strides(out: Tensor, layout: str) -> dict[str, int]:
    """Stride of each token of `layout`."""
    return dict(zip(layout.split(), out.stride(), strict=True))


def _row_strides(rows: Tensor) -> tuple[int, int]:
    """Batch and sequence strides of ``[B or 1, S or 1, ...]``, 0 along a dim of size 1."""
    return rows.stride(0) if rows.shape[0] > 1 else 0, rows.stride(1) if rows.shape[1] > 1 else 0
