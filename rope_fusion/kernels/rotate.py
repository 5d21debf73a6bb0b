"""Rotation of part of each head, as one operator: `rope_fusion::rotate` and its in-place and FP8 forms.

================== ==========================================================================================
`rotate`           rotated copy, cast to `out_dtype`, laid out as the consumer wants it
`rotate_`          in place: only the rotary slice of `x` is touched
`rotate_fp8`       rotated, rounded to `out_dtype`, divided by one static scale, stored as FP8
`rotate_group_fp8` the same with one scale per group of consecutive elements -> (values, fp32 scales)
================== ==========================================================================================

All take ``x [B, S, H, D]`` in any strides whose last is 1, and cos and sin either as tables ``[P, C]`` gathered
by ``positions`` (``[B, S]``, ``[1, S]`` or ``[S]``, int32 or int64, each in ``[0, P)``) or as rows
``[B or 1, S or 1, C]``. C is ``rotary_dim``, one column per output element, or half of it, one per pair.

With R = rotary_dim, the slice ``x[..., rotary_start : rotary_start + R]`` is rotated and the rest passes through
bit for bit (cast where ``out_dtype`` differs). Pairs are ``(i, i + R/2)``, or ``(2i, 2i + 1)`` when
``interleaved``; with ``halves_out`` interleaved pairs come out as two halves. ``inverse`` flips the sign of sin.
Arithmetic is fp32 with one rounding at the end; ``exact`` rounds every product and sum to ``math_dtype`` instead, as
eager does.

``layout`` names the dims of the result in memory order, ``"b s h d"`` by default. With ``groups`` = G a token ``g``
stands for the group and ``h`` for the head in it: ``"g b s h d"`` is a contiguous ``[G, B, S, H/G, D]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_fusion.kernels.failures import or_reference, process_failures
from rope_fusion.kernels.rope_qkv import fp8_unsupported, quantise_reference, rotate_reference, target_of

TOKENS = ("b", "s", "g", "h", "d")

# What the Triton kernel takes. The gates and the tests read these; nothing repeats them.
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_KERNEL_HEAD_DIM = 4096

_ROTARY = (
    "bool interleaved, bool inverse, bool halves_out, int rotary_dim, int rotary_start, "
    "ScalarType math_dtype, bool exact"
)
_TRIG = "Tensor cos, Tensor sin, Tensor? positions"
_PLACE = 'str layout="b s h d", int groups=1'


@dataclass(frozen=True)
class Rotary:
    """Which elements are rotated, and how: the keyword arguments that the four operators share."""

    interleaved: bool
    inverse: bool
    halves_out: bool
    rotary_dim: int
    rotary_start: int
    math_dtype: torch.dtype
    exact: bool


@dataclass(frozen=True)
class StaticFp8:
    """Quantisation by one scale: the tensor if there is one, else the number."""

    dtype: torch.dtype
    scale: Tensor | None
    scale_value: float
    multiplies: bool


@dataclass(frozen=True)
class GroupFp8:
    """Quantisation by the largest magnitude of each `size` consecutive elements of a head.

    ``scale = max(amax, min_amax) / finfo(dtype).max``, raised to the next power of two where `power_of_two`.
    """

    dtype: torch.dtype
    size: int
    min_amax: float
    power_of_two: bool


def check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, rotary: Rotary) -> None:
    """Raise a ValueError that says what is wrong with the operands of a rotation."""
    if x.dim() != 4:
        raise ValueError(f"rotate takes x as [B, S, H, D], got {x.dim()} dims; view [T, H, D] as [1, T, H, D]")
    dim, start, width = rotary.rotary_dim, rotary.rotary_start, x.shape[3]
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary_dim must be even and positive, got {dim}")
    if start < 0 or start + dim > width:
        raise ValueError(f"the rotary slice {start}:{start + dim} lies outside the head dim {width}")
    if rotary.halves_out and not rotary.interleaved:
        raise ValueError("halves_out only applies to interleaved pairs")
    if cos.shape != sin.shape or cos.shape[-1] not in (dim, dim // 2):
        raise ValueError(
            f"cos and sin must have one shape with {dim} or {dim // 2} columns, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos.dim() != (3 if positions is None else 2):
        wanted = "rows [B or 1, S or 1, C] without positions" if positions is None else "tables [P, C] with positions"
        raise ValueError(f"cos and sin must be {wanted}, got {tuple(cos.shape)}")
    if positions is not None and (positions.dim() not in (1, 2) or positions.dtype not in (torch.int32, torch.int64)):
        raise ValueError(
            "positions must be int32 or int64 of shape [S], [1, S] or [B, S], "
            f"got {positions.dtype} {tuple(positions.shape)}"
        )


def output_shape(x: Tensor, layout: str, groups: int, last: int) -> list[int]:
    """Sizes of the result in the order that `layout` names, with `last` elements along d."""
    tokens = layout.split()
    wanted = TOKENS if groups > 1 or "g" in tokens else ("b", "s", "h", "d")
    if sorted(tokens) != sorted(wanted) or tokens[-1] != "d":
        raise ValueError(f"layout must order {' '.join(wanted)} with d last, got {layout!r}")
    batch, sequence, heads, _ = x.shape
    if groups < 1 or heads % groups:
        raise ValueError(f"groups must divide the {heads} heads, got {groups}")
    sizes = {"b": batch, "s": sequence, "g": groups, "h": heads // groups, "d": last}
    return [sizes[token] for token in tokens]


def unsupported(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotary: Rotary,
    out_dtype: torch.dtype,
    quant: StaticFp8 | GroupFp8 | None = None,
) -> str | None:
    """The sentence that says why the Triton kernel cannot do this, or None. Fake tensors will do."""
    if x.dtype not in KERNEL_DTYPES or out_dtype not in KERNEL_DTYPES:
        return f"the rotation kernel takes {_names(KERNEL_DTYPES)}, not {x.dtype} to {out_dtype}"
    if cos.dtype != sin.dtype or cos.dtype not in (torch.float32, x.dtype):
        return f"cos and sin must both be float32 or {x.dtype}, got {cos.dtype} and {sin.dtype}"
    if rotary.exact and rotary.math_dtype not in KERNEL_DTYPES:
        return f"the rotation kernel cannot round to {rotary.math_dtype}"
    if x.shape[3] > MAX_KERNEL_HEAD_DIM:
        return f"the head dim must be at most {MAX_KERNEL_HEAD_DIM}, got {x.shape[3]}"
    if x.stride(3) != 1 or cos.stride(-1) != 1 or sin.stride(-1) != 1:
        return "the last dim of x, cos and sin must have stride 1"
    if rotary.interleaved and not rotary.halves_out and rotary.rotary_start % 2:
        return f"interleaved pairs must start at an even element, got {rotary.rotary_start}"
    if quant is not None and x.is_cuda and (sentence := fp8_unsupported(target_of(x.device), quant.dtype)):
        return sentence
    if isinstance(quant, StaticFp8) and quant.scale is not None and quant.scale.numel() != 1:
        return f"the FP8 scale must have one element, got {tuple(quant.scale.shape)}"
    if isinstance(quant, GroupFp8):
        if sentence := group_size_unsupported(x.shape[3], quant.size):
            return sentence
        if rotary.exact and quant.power_of_two:
            return "power-of-two scales are rounded exactly here, while eager goes through an inexact log2"
    return None


def group_size_unsupported(width: int, size: int) -> str | None:
    """Why groups of `size` elements cannot be quantised in a head of `width`, or None."""
    if size & (size - 1) or width % size:
        return f"an FP8 group must be a power of two that divides the head dim {width}, got {size}"
    return None


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


# ---- reference


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, rotary: Rotary, out_dtype: torch.dtype
) -> Tensor:
    """Reference of `rotate` before its layout: ``[B, S, H, D]`` in `out_dtype`."""
    # one rounding, whichever of the two dtypes is wider; nothing is converted where they agree
    x = x.to(torch.promote_types(x.dtype, out_dtype))
    wide = torch.float64 if torch.float64 in (x.dtype, rotary.math_dtype) else torch.float32
    if positions is not None:
        rows = positions if positions.dim() == 2 else positions.unsqueeze(0)
        cos, sin = cos[rows.long()], sin[rows.long()]
    if rotary.halves_out:  # the pairs become halves first: then cos and sin columns go with the output's elements
        stop = rotary.rotary_start + rotary.rotary_dim
        pairs = x[..., rotary.rotary_start : stop]
        pieces = (x[..., : rotary.rotary_start], pairs[..., 0::2], pairs[..., 1::2], x[..., stop:])
        x = torch.cat(pieces, -1)
    result = rotate_reference(
        x,
        cos.unsqueeze(2),
        sin.unsqueeze(2),
        interleaved=rotary.interleaved and not rotary.halves_out,
        inverse=rotary.inverse,
        halves_out=False,
        rotary_dim=rotary.rotary_dim,
        rotary_start=rotary.rotary_start,
        math_dtype=rotary.math_dtype if rotary.exact else wide,
    )
    return result.to(out_dtype)


def arranged(value: Tensor, layout: str, groups: int) -> Tensor:
    """``[B, S, H, D]`` as the contiguous tensor that `layout` describes."""
    order = [TOKENS.index(token) for token in layout.split()]
    grouped = value.unflatten(2, (groups, value.shape[2] // groups))
    if "g" not in layout:
        grouped, order = grouped.squeeze(2), [index if index < 2 else index - 1 for index in order]
    return grouped.permute(order).contiguous()


def group_quantized(value: Tensor, quant: GroupFp8) -> tuple[Tensor, Tensor]:
    """FP8 values and fp32 scales ``[B, S, H, D / size]``."""
    groups = value.float().unflatten(-1, (-1, quant.size))
    scales = groups.abs().amax(-1).clamp(min=quant.min_amax) / torch.finfo(quant.dtype).max
    if quant.power_of_two:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), torch.where(mantissa == 0.5, exponent - 1, exponent))
    limit = torch.finfo(quant.dtype).max
    return (groups / scales.unsqueeze(-1)).clamp(-limit, limit).to(quant.dtype).flatten(-2), scales


# ---- operators


@dataclass(frozen=True)
class Request:
    """What one of the operators is asked for: its keyword arguments, defaults filled in."""

    rotary: Rotary
    out_dtype: torch.dtype | None  # None: x itself is rotated
    layout: str
    groups: int
    quant: StaticFp8 | GroupFp8 | None

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Uninitialised results."""
        if self.out_dtype is None:
            return ()
        dtype = self.out_dtype if self.quant is None else self.quant.dtype
        out = x.new_empty(output_shape(x, self.layout, self.groups, x.shape[3]), dtype=dtype)
        if not isinstance(self.quant, GroupFp8):
            return (out,)
        scales = output_shape(x, self.layout, self.groups, x.shape[3] // self.quant.size)
        return out, x.new_empty(scales, dtype=torch.float32)


def requested(
    name: str, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, scale: Tensor | None = None, *,
    out_dtype: torch.dtype | None = None, fp8_dtype: torch.dtype | None = None, layout: str = "b s h d", groups: int = 1,
    scale_value: float = 1.0, scale_multiplies: bool = False, group_size: int = 128, min_amax: float = 0.0,
    power_of_two: bool = False, **rotary_arguments: Any,
) -> Request:  # fmt: skip
    """The arguments of the operator called `name`, checked; what the dispatcher leaves out has the schema's default."""
    rotary = Rotary(**rotary_arguments)
    check(x, cos, sin, positions, rotary)
    others = {str(t.device) for t in (cos, sin, positions, scale) if t is not None and t.device != x.device}
    if others:
        raise ValueError(f"{name} takes tensors of one device, got {x.device} and {', '.join(sorted(others))}")
    output_shape(x, layout, groups, x.shape[3])
    quant: StaticFp8 | GroupFp8 | None = None
    if fp8_dtype is not None and name == "rotate_group_fp8":
        if group_size < 1 or x.shape[3] % group_size:
            raise ValueError(f"group_size must divide the head dim {x.shape[3]}, got {group_size}")
        quant = GroupFp8(fp8_dtype, group_size, min_amax, power_of_two)
    elif fp8_dtype is not None:
        quant = StaticFp8(fp8_dtype, scale, scale_value, scale_multiplies)
    return Request(rotary, out_dtype, layout, groups, quant)


def prepared(
    request: Request, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, *_: Tensor | None
) -> tuple[tuple[Tensor, ...], Any] | None:
    """Outputs and the kernel's `Call` for tensors on a GPU; None for others, and where the kernel has failed before.

    Raises:
        ValueError: with the sentence of ``unsupported``.
    """
    if not x.is_cuda or process_failures().reason("rotate", x.device) is not None:
        return None
    rotary, quant, dtype = request.rotary, request.quant, request.out_dtype or x.dtype
    if (sentence := unsupported(x, cos, sin, rotary, dtype, quant)) is not None:
        raise ValueError(sentence)
    from rope_fusion.kernels.rotate_triton import prepare  # Triton is optional until a GPU tensor arrives

    outputs = request.outputs(x)
    out, scales = (*outputs, None, None)[:2] if outputs else (x, None)
    assert out is not None
    return outputs, prepare(
        x, cos, sin, positions, rotary, out,
        layout=request.layout, groups=request.groups, rounded=dtype, quant=quant, scales=scales,
    )  # fmt: skip


def results_of(outputs: tuple[Tensor, ...]) -> Any:
    """Outputs as an operator returns them."""
    return outputs[0] if len(outputs) == 1 else outputs or None


def _reference(
    request: Request, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, *_: Tensor | None
) -> tuple[Tensor, ...]:
    rotary, quant, layout, groups = request.rotary, request.quant, request.layout, request.groups
    if request.out_dtype is None:
        rotary_slice = slice(rotary.rotary_start, rotary.rotary_start + rotary.rotary_dim)
        x[..., rotary_slice] = rotated(x, cos, sin, positions, rotary, x.dtype)[..., rotary_slice]
        return ()
    value = rotated(x, cos, sin, positions, rotary, request.out_dtype)
    if isinstance(quant, GroupFp8):
        value, scales = group_quantized(value, quant)
        return arranged(value, layout, groups), arranged(scales, layout, groups)
    if isinstance(quant, StaticFp8):
        factor = quant.scale_value if quant.scale is None else quant.scale
        value = quantise_reference(value, factor, quant.dtype, multiply=quant.multiplies)
    return (arranged(value, layout, groups),)


_LIBRARY = torch.library.Library("rope_fusion", "FRAGMENT")


def _define(name: str, schema: str) -> Any:
    def run(x: Tensor, *tensors: Any, **options: Any) -> Any:
        request = requested(name, x, *tensors, **options)
        if (call := prepared(request, x, *tensors)) is None:
            return results_of(_reference(request, x, *tensors))
        from rope_fusion.kernels.driver_launch import run_on_device
        from rope_fusion.kernels.rotate_triton import run as launch

        outputs, kernel_call = call
        run_on_device(launch, kernel_call)
        return results_of(outputs)

    def fake(x: Tensor, *tensors: Any, **options: Any) -> Any:
        return results_of(requested(name, x, *tensors, **options).outputs(x))

    # any strides with last stride 1 are taken as they are; only a change of their order would cost a copy
    _LIBRARY.define(name + schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, or_reference("rotate", run, run), "CUDA")  # after a failure `prepared` gives no call
    torch.library.register_fake(f"rope_fusion::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.rope_fusion, name).default


rotate = _define("rotate", f"(Tensor x, {_TRIG}, *, {_ROTARY}, ScalarType out_dtype, {_PLACE}) -> Tensor")
rotate_ = _define("rotate_", f"(Tensor(a!) x, {_TRIG}, *, {_ROTARY}) -> ()")
rotate_fp8 = _define(
    "rotate_fp8",
    f"(Tensor x, {_TRIG}, Tensor? scale, *, {_ROTARY}, ScalarType out_dtype, ScalarType fp8_dtype, "
    f"float scale_value=1.0, bool scale_multiplies=False, {_PLACE}) -> Tensor",
)
rotate_group_fp8 = _define(
    "rotate_group_fp8",
    f"(Tensor x, {_TRIG}, *, {_ROTARY}, ScalarType out_dtype, ScalarType fp8_dtype, int group_size=128, "
    f"float min_amax=0.0, bool power_of_two=False, {_PLACE}) -> (Tensor, Tensor)",
)
