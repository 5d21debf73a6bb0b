"""The Triton kernel of `rope_fusion::rotate` and its forms. Imported only where it is launched.

One program owns a tile of tokens × heads and the columns of whole heads (in place: the rotary columns alone), so each
element is read once and written once. Strides arrive as multiples of one power of two, which tells the compiler what it
needs for 16-byte accesses and leaves sizes and strides out of the kernel's cache key: a new token count compiles
nothing.
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

from rope_fusion.kernels.driver_launch import ALIGNMENT, Runner, run_on_device, runner_of
from rope_fusion.kernels.rope_qkv_triton import (
    BATCH_AND_PLACE,
    ONE_BATCH,
    ONE_PLACE,
    TRITON_DTYPES,
    WIDEST_UNIT,
    _quantise,
    _reciprocal,
    _row,
    index_strides,
    next_power_of_2,
    row_strides,
)
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
    return tl.load(pointers, mask=tl.broadcast_to(mask, shape), other=float("nan"))


# Sizes, strides and the scale vary from call to call; as plain numbers of a declared type they cause no recompilation.
@triton.jit(do_not_specialize=list(range(7, 28)))
def rotate_kernel(
    x, cos, sin, positions, scale, out, scales,
    scale_value: tl.float32, tokens: tl.int32, sequence: tl.int32, table_rows: tl.int64,
    x_b: tl.int64, x_s: tl.int64, x_h: tl.int64,
    cos_b: tl.int64, cos_s: tl.int64, sin_b: tl.int64, sin_s: tl.int64,
    o_b: tl.int64, o_s: tl.int64, o_g: tl.int64, o_h: tl.int64,
    p_b: tl.int64, p_s: tl.int64, q_b: tl.int64, q_s: tl.int64, q_g: tl.int64, q_h: tl.int64,
    UNIT: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, HALVES_OUT: tl.constexpr, INVERSE: tl.constexpr, FULL: tl.constexpr,
    IN_PLACE: tl.constexpr, EXACT: tl.constexpr, ROUND: tl.constexpr, MATH: tl.constexpr, ROUNDED: tl.constexpr,
    FP8: tl.constexpr, FP8_MAX: tl.constexpr, MULTIPLIES: tl.constexpr,
    GROUP: tl.constexpr, MIN_AMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """BLOCK_T tokens × BLOCK_H heads of columns FIRST : FIRST + WIDTH, 2·HALF of which, from START on, are rotary."""
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    token = (program // HEAD_BLOCKS) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = (program % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    if SPLIT == ONE_BATCH:
        b, s = tl.zeros_like(token), token
    elif SPLIT == ONE_PLACE:
        b, s = token, tl.zeros_like(token)
    else:
        b, s = token // sequence, token % sequence
    live = token < tokens
    inside = live[:, None, None]
    mask = inside & (head < HEADS)[None, :, None] & (column < WIDTH)[None, None, :]
    if DEPENDENT:  # launched before the kernel ahead of it has ended: nothing may be read or written before this point
        gdc_wait()
        gdc_launch_dependents()

    # the chain position -> row -> cos is the longest: it starts first, and x is on its way before it is waited for
    if positions is not None:
        position = tl.load(positions + _row(b, s, p_b, p_s, SPLIT), mask=live, other=0)
    r = column - START
    rotary = (r >= 0) & (r < 2 * HALF)
    low = r < HALF
    # both elements of a pair are in one thread's 16 bytes; groups of the output are not where those of x are, though
    PAIRS: tl.constexpr = INTERLEAVED and (not HALVES_OUT or (GROUP == 0 and START % 2 == 0))
    own_column = column
    other_column = tl.where(low, column + HALF, column - HALF)
    if HALVES_OUT and not PAIRS:
        own_column = tl.where(rotary, START + tl.where(low, 2 * r, 2 * (r - HALF) + 1), column)
        other_column = START + tl.where(low, 2 * r + 1, 2 * (r - HALF))
    x_row = x + FIRST + _row(b, s, x_b * UNIT, x_s * UNIT, SPLIT)[:, None, None] + (head * (x_h * UNIT))[None, :, None]
    own = tl.load(x_row + own_column[None, None, :], mask=mask)
    if not PAIRS:
        other = tl.load(x_row + other_column[None, None, :], mask=mask & rotary[None, None, :])
    if FP8 is not None and GROUP == 0:
        divisor = scale_value
        if scale is not None:
            divisor = tl.load(scale).to(tl.float32)
        upper, lower = _reciprocal(divisor)

    if positions is not None:
        # between one load and the next every instruction counts: 32 bits where a table's size and strides fit
        row = position.to(tl.int32)
        row = tl.where(position < 0, row + table_rows.to(tl.int32), row).to(tl.int64)
        cos_row = (cos + row * cos_s.to(tl.int32).to(tl.int64) * UNIT)[:, None, None]
        sin_row = (sin + row * sin_s.to(tl.int32).to(tl.int64) * UNIT)[:, None, None]
        # a position outside the table reads NaN, not foreign memory
        wide = position.to(tl.int64)
        in_table = (live & (wide >= -table_rows) & (wide < table_rows))[:, None, None]
    else:
        cos_row = (cos + _row(b, s, cos_b * UNIT, cos_s * UNIT, SPLIT))[:, None, None]
        sin_row = (sin + _row(b, s, sin_b * UNIT, sin_s * UNIT, SPLIT))[:, None, None]
        in_table = inside

    if PAIRS:
        first, second = tl.split(tl.reshape(own, (BLOCK_T, BLOCK_H, BLOCK_D // 2, 2)))
        k = tl.arange(0, BLOCK_D // 2) - START // 2
        pair = ((k >= 0) & (k < HALF))[None, None, :]
        if FULL:
            # a column goes with the output's element
            k_first = k if HALVES_OUT else 2 * k
            k_second = HALF + k if HALVES_OUT else 2 * k + 1
            cos_first = _trig(cos_row, k_first, in_table & pair, BLOCK_H)
            cos_second = _trig(cos_row, k_second, in_table & pair, BLOCK_H)
            sin_first = _trig(sin_row, k_first, in_table & pair, BLOCK_H)
            sin_second = _trig(sin_row, k_second, in_table & pair, BLOCK_H)
        else:
            cos_first = _trig(cos_row, k, in_table & pair, BLOCK_H)
            sin_first = _trig(sin_row, k, in_table & pair, BLOCK_H)
            cos_second = cos_first
            sin_second = sin_first
        if INVERSE:
            sin_second = -sin_second
        else:
            sin_first = -sin_first
        turned_first = _cast(_turn(first, second, cos_first, sin_first, ROUND, MATH), ROUND, MATH, ROUNDED)
        turned_second = _cast(_turn(second, first, cos_second, sin_second, ROUND, MATH), ROUND, MATH, ROUNDED)
        if HALVES_OUT:
            y = own.to(ROUNDED)
        else:
            # the choice is made on rounded values: a pass-through NaN keeps its bits
            y_first = tl.where(pair, turned_first, first.to(ROUNDED))
            y_second = tl.where(pair, turned_second, second.to(ROUNDED))
            y = tl.reshape(tl.join(y_first, y_second), (BLOCK_T, BLOCK_H, BLOCK_D))
    else:
        k = r
        if not FULL:
            k = tl.where(low, r, r - HALF)
        trig_mask = in_table & rotary[None, None, :]
        c = _trig(cos_row, k, trig_mask, BLOCK_H)
        sn = _trig(sin_row, k, trig_mask, BLOCK_H)
        sn = tl.where(low[None, None, :] == INVERSE, sn, -sn)
        turned = _cast(_turn(own, other, c, sn, ROUND, MATH), ROUND, MATH, ROUNDED)
        y = tl.where(rotary[None, None, :], turned, own.to(ROUNDED))

    if IN_PLACE:
        tl.debug_barrier()  # other threads of this program may still read what this one overwrites
    o_row = out + FIRST + _row(b, s, o_b * UNIT, o_s * UNIT, SPLIT)[:, None, None]
    o_row = o_row + _head_offset(head, o_g * UNIT, o_h * UNIT, HEADS, GROUP_HEADS)
    o_tile = o_row + column[None, None, :]
    if GROUP > 0:
        chunks = tl.reshape(y.to(tl.float32), (BLOCK_T, BLOCK_H, BLOCK_D // GROUP, GROUP))
        # magnitudes order like their bits, and NaN lies above them all: the maximum keeps NaN as eager's does
        amax = tl.max(tl.abs(chunks).to(tl.int32, bitcast=True), axis=3).to(tl.float32, bitcast=True)
        amax = tl.maximum(amax, MIN_AMAX, propagate_nan=tl.PropagateNan.ALL)
        # eager on a GPU divides by a number as it does here in exact mode
        step = amax * (1.0 / FP8_MAX) if EXACT else tl.div_rn(amax, FP8_MAX)
        if POWER_OF_TWO:
            step = ((step.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        divisor = tl.broadcast_to(step[:, :, :, None], chunks.shape)
        upper, lower = _reciprocal(divisor)
        quantised = _quantise(chunks, divisor, upper, lower, FP8, FP8_MAX, False, EXACT)
        tl.store(o_tile, tl.reshape(quantised, (BLOCK_T, BLOCK_H, BLOCK_D)), mask=mask)
        chunk = tl.arange(0, BLOCK_D // GROUP)
        q_row = scales + _row(b, s, q_b, q_s, SPLIT)[:, None, None] + _head_offset(head, q_g, q_h, HEADS, GROUP_HEADS)
        chunk_mask = inside & (head < HEADS)[None, :, None] & (chunk < WIDTH // GROUP)[None, None, :]
        tl.store(q_row + chunk[None, None, :], step, mask=chunk_mask)
    else:
        if HALVES_OUT and PAIRS:  # each half where it belongs, the rest around them
            half_mask = inside & (head < HEADS)[None, :, None] & pair
            if FP8 is not None:
                turned_first = _quantise(turned_first, divisor, upper, lower, FP8, FP8_MAX, MULTIPLIES, EXACT)
                turned_second = _quantise(turned_second, divisor, upper, lower, FP8, FP8_MAX, MULTIPLIES, EXACT)
            tl.store(o_row + (START + k)[None, None, :], turned_first, mask=half_mask)
            tl.store(o_row + (START + HALF + k)[None, None, :], turned_second, mask=half_mask)
            mask = mask & (rotary == 0)[None, None, :]
        if FP8 is not None:
            y = _quantise(y, divisor, upper, lower, FP8, FP8_MAX, MULTIPLIES, EXACT)
        tl.store(o_tile, y, mask=mask)
# fmt: on


@dataclass(frozen=True)
class Launch:
    """A program shape, and up to how many elements it is used."""

    max_elements: float
    tile: int  # elements per program; a head that is longer takes as many times the warps
    warps: int
    # start while the kernel before it ends (CUDA's programmatic dependent launch): no row of the table does, it costs
    dependent: bool = False


# Measured on one H200, see docs/performance.md.
LAUNCHES = (
    Launch(max_elements=1 << 16, tile=1024, warps=4),
    Launch(max_elements=1 << 17, tile=2048, warps=8),
    Launch(max_elements=1 << 20, tile=1024, warps=4),
    Launch(max_elements=float("inf"), tile=1024, warps=1),
)


def pick_launch(elements: int) -> Launch:
    """The row of the table for this many elements that are read."""
    return next(row for row in LAUNCHES if elements <= row.max_elements)


class Spec(NamedTuple):
    """Everything about a call that is compiled into the kernel, apart from the pointers' types and alignment."""

    heads: int
    groups: int
    width: int
    rotary: Rotary
    full_width: bool
    in_place: bool
    rounded: torch.dtype
    fp8: torch.dtype | None
    multiplies: bool
    group: tuple[int, float, bool] | None  # size, min_amax, power_of_two
    split: int
    unit: int


@dataclass(frozen=True)
class Variant:
    """One specialisation of the kernel; remembers what was compiled for which pointer types and alignments."""

    constexprs: dict[str, Any]
    options: dict[str, Any]
    compiled: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False)

    def grid(self, tokens: int) -> tuple[int, int, int]:
        """Programs in one dim, because the second holds at most 65535; those of one token are neighbours."""
        head_blocks = triton.cdiv(self.constexprs["HEADS"], self.constexprs["BLOCK_H"])
        return (triton.cdiv(tokens, self.constexprs["BLOCK_T"]) * head_blocks, 1, 1)


@lru_cache(maxsize=1024)
def variant_of(spec: Spec, shape: Launch) -> Variant:
    """The specialisation of the kernel that serves `spec` with programs of `shape`."""
    rotary = spec.rotary
    first, width = (rotary.rotary_start, rotary.rotary_dim) if spec.in_place else (0, spec.width)
    block_d, all_heads = next_power_of_2(width), next_power_of_2(spec.heads)
    size, min_amax, power_of_two = spec.group or (0, 0.0, False)
    constexprs = {
        "UNIT": spec.unit,
        "SPLIT": spec.split,
        "HEADS": spec.heads,
        "GROUP_HEADS": spec.heads // spec.groups,
        "FIRST": first,
        "WIDTH": width,
        "START": rotary.rotary_start - first,
        "HALF": rotary.rotary_dim // 2,
        "INTERLEAVED": rotary.interleaved,
        "HALVES_OUT": rotary.halves_out,
        "INVERSE": rotary.inverse,
        "FULL": spec.full_width,
        "IN_PLACE": spec.in_place,
        "EXACT": rotary.exact,
        "ROUND": rotary.exact and rotary.math_dtype != torch.float32,
        "MATH": TRITON_DTYPES[rotary.math_dtype],
        "ROUNDED": TRITON_DTYPES[spec.rounded],
        "FP8": None if spec.fp8 is None else TRITON_DTYPES[spec.fp8],
        "FP8_MAX": 0.0 if spec.fp8 is None else torch.finfo(spec.fp8).max,
        "MULTIPLIES": spec.multiplies,
        "GROUP": size,
        "MIN_AMAX": min_amax,
        "POWER_OF_TWO": power_of_two,
        "BLOCK_T": max(1, shape.tile // (block_d * all_heads)),
        "BLOCK_H": min(all_heads, max(1, shape.tile // block_d)),
        "BLOCK_D": block_d,
        "DEPENDENT": shape.dependent,
    }
    # a fused multiply-add would skip a rounding that eager does
    warps = shape.warps * max(1, block_d // shape.tile)
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": not rotary.exact}
    if shape.dependent:  # an option of the CUDA backend alone
        options["launch_pdl"] = True
    return Variant(constexprs, options)


class Call(NamedTuple):
    """One call, ready to launch: pointers and numbers in the kernel's order, and what is compiled in."""

    pointers: tuple[Tensor | None, ...]
    numbers: tuple[float | int, ...]
    variant: Variant
    tokens: int

    @property
    def launches(self) -> bool:
        """Whether there is anything to do."""
        return self.pointers[0].numel() > 0  # type: ignore[union-attr]

    @property
    def device(self) -> torch.device:
        """That of all its tensors."""
        return self.pointers[0].device  # type: ignore[union-attr]


def prepare(
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
) -> Call:
    """Work out the kernel's arguments; launches nothing and works on tensors of the meta device too.

    Args:
        x, cos, sin, positions, rotary: as for `rope_fusion::rotate`.
        out: a tensor in `layout`, or `x` itself, of which only the rotary slice is touched then.
        rounded: dtype that the rotated value is rounded to before it is quantised; by default that of `out`.
        scales: receives the scales of group quantisation, in `layout` too.
        shape: overrides the launch table.
    """
    batch, sequence, heads, width = x.shape
    in_place = out is x
    touched = rotary.rotary_dim if in_place else width
    x_strides = row_strides(x)
    o_strides = (*x_strides[:2], 0, x_strides[2]) if in_place else _strides(out, layout)
    angle_strides = (
        (*_row_strides(cos), *_row_strides(sin)) if positions is None else (0, cos.stride(0), 0, sin.stride(0))
    )
    strides = (*x_strides, *angle_strides, *o_strides)
    unit = gcd(WIDEST_UNIT, *strides)
    static = quant if isinstance(quant, StaticFp8) else None
    spec = Spec(
        heads,
        groups,
        width,
        rotary,
        cos.shape[-1] == rotary.rotary_dim,
        in_place,
        rounded or out.dtype,
        None if quant is None else quant.dtype,
        static is not None and static.multiplies,
        (quant.size, quant.min_amax, quant.power_of_two) if isinstance(quant, GroupFp8) else None,
        (ONE_BATCH if batch == 1 else ONE_PLACE if sequence == 1 else BATCH_AND_PLACE).value,
        unit,
    )
    numbers = (
        1.0 if static is None else static.scale_value,
        batch * sequence,
        sequence,
        0 if positions is None else cos.shape[0],
        *[stride // unit for stride in strides],
        *((0, 0) if positions is None else index_strides(positions, sequence, False)),
        *((0, 0, 0, 0) if scales is None else _strides(scales, layout)),
    )
    pointers = (x, cos, sin, positions, None if static is None else static.scale, out, scales)
    return Call(
        pointers, numbers, variant_of(spec, shape or pick_launch(batch * sequence * heads * touched)), batch * sequence
    )


def launch(x: Tensor, *args: Any, **options: Any) -> None:
    """Run the kernel; arguments as for `prepare`.

    With ``TRITON_INTERPRET=1`` in the environment before Triton is imported, tensors on the CPU are taken too.
    """
    run_on_device(run, prepare(x, *args, **options))


def run(call: Call) -> None:
    """Launch a prepared call on the current device. No elements, no launch."""
    variant, device = call.variant, call.device
    if not call.launches:
        return
    grid = variant.grid(call.tokens)
    if device.type != "cuda" or torch.version.hip:
        # The interpreter takes no options. On ROCm a kernel depends on the sizes of buffers too, which Triton tracks.
        options = variant.options if device.type == "cuda" else {}
        rotate_kernel[grid](*call.pointers, *call.numbers, **variant.constexprs, **options)
        return
    # Triton's own dispatch takes tens of microseconds; what it looks at is in this key, so it runs once for each.
    key = _types(call)
    compiled = variant.compiled.get(key)
    if compiled is None:
        variant.compiled[key] = rotate_kernel[grid](
            *call.pointers, *call.numbers, **variant.constexprs, **variant.options
        )
    else:
        compiled[grid](*call.pointers, *call.numbers, *variant.constexprs.values())


def _types(call: Call) -> tuple[object, ...]:
    return (
        call.device.index,
        *[None if t is None else (t.dtype, t.data_ptr() % ALIGNMENT == 0) for t in call.pointers],
    )


def runner_of_call(call: Call) -> Runner | None:
    """What launches the kernel that was compiled for such a call, given the addresses of its tensors; None where none was."""
    variant = call.variant
    compiled = variant.compiled.get(_types(call)) if call.launches and variant.compiled else None
    if compiled is None:
        return None
    values = (*[None if t is None else ... for t in call.pointers], *call.numbers, *variant.constexprs.values())
    arguments = dict(zip(rotate_kernel.arg_names, values, strict=True))
    return runner_of(compiled, variant.grid(call.tokens), call.device.index, arguments)


def _strides(out: Tensor, layout: str) -> tuple[int, int, int, int]:
    """Strides of b, s, g and h; 0 for one that `layout` lacks or that has one element."""
    sizes = dict(zip(layout.split(), zip(out.shape, out.stride(), strict=True), strict=True))
    b, s, g, h = (stride if size > 1 else 0 for size, stride in (sizes.get(token, (1, 0)) for token in "bsgh"))
    return b, s, g, h


def _row_strides(rows: Tensor) -> tuple[int, int]:
    """Batch and sequence strides of ``[B or 1, S or 1, C]``, 0 along a dim of size 1."""
    return rows.stride(0) if rows.shape[0] > 1 else 0, rows.stride(1) if rows.shape[1] > 1 else 0
