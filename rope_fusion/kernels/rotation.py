"""The rotation operators as the patterns call them: from the arguments of a canonical `rotary_qk`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from rope_fusion._torch import add_needs_realized_inputs, auto_functionalized, lower_to_call_site, register_lowering
from rope_fusion.canonical.attributes import ArrangeAttributes, GroupQuantAttributes, QuantAttributes, RotaryAttributes
from rope_fusion.kernels import rotate as _operators
from rope_fusion.kernels.rope_qkv import several_devices

# Measured on one H200, see docs/performance.md: Inductor's kernel is as fast below.
FEWEST_ELEMENTS = 1 << 14  # of a rotated copy
FEWEST_QUANTISED = 1 << 15  # of one that is quantised by one scale


def _lower(operator: torch._ops.OpOverload) -> None:
    # AOTInductor does not write down arguments that tracing left out because they have their default value.
    defaults = {a.name: a.default_value for a in operator._schema.arguments if a.kwarg_only and a.has_default_value()}

    @register_lowering(operator, type_promotion_kind=None)
    def lower(*tensors: Any, **options: Any) -> Any:
        return lower_to_call_site(operator, *tensors, **(defaults | options))

    add_needs_realized_inputs(operator)  # as of any operator that is not lowered further


for _operator in (_operators.rotate, _operators.rotate_, _operators.rotate_fp8, _operators.rotate_group_fp8):
    _lower(_operator)


def rotation_arguments(rotary: str) -> dict[str, Any]:
    """Keyword arguments that `rotate` and its forms share, from the attributes of a canonical `rotary_qk`."""
    rope = RotaryAttributes.decode(rotary)
    return {
        "interleaved": rope.interleaved,
        "inverse": rope.inverse,
        "halves_out": rope.halves_out,
        "rotary_dim": rope.rotary_dim,
        "rotary_start": rope.start,
        "math_dtype": rope.math_dtype,
        "exact": rope.exact,
    }


def call_rotation(
    x: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, rotary: str, empty_like: Tensor
) -> Tensor:
    """`x` rotated, or an empty tensor where the canonical operator had no such operand."""
    if x is None:
        return torch.ops.aten.new_empty.default(empty_like, [0])
    out_dtype = RotaryAttributes.decode(rotary).out_dtype
    return torch.ops.rope_fusion.rotate.default(
        x, cos, sin, positions, **rotation_arguments(rotary), out_dtype=out_dtype
    )


def call_arranged(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, rotary: str, arrangement: str
) -> Tensor:
    """`x` rotated, laid out as the canonical `arrange` would lay out the result."""
    place = ArrangeAttributes.decode(arrangement)
    out_dtype = RotaryAttributes.decode(rotary).out_dtype
    return torch.ops.rope_fusion.rotate.default(
        x,
        cos,
        sin,
        positions,
        **rotation_arguments(rotary),
        out_dtype=out_dtype,
        layout=place.layout,
        groups=place.groups,
    )


def call_in_place(
    x: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, rotary: str, empty_like: Tensor
) -> Tensor:
    """`x` rotated where it lies, as a functional call of which Inductor makes the operator itself."""
    if x is None:
        return torch.ops.aten.new_empty.default(empty_like, [0])
    operator = torch.ops.rope_fusion.rotate_.default
    arguments = rotation_arguments(rotary)
    results: Any = auto_functionalized(operator, x=x, cos=cos, sin=sin, positions=positions, **arguments)
    return results[1]


def call_static_fp8(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, rotary: str, scale: Tensor | None, quant: str
) -> Tensor:
    """`x` rotated, rounded to its dtype and quantised by one scale."""
    fp8 = QuantAttributes.decode(quant)
    return torch.ops.rope_fusion.rotate_fp8.default(
        x,
        cos,
        sin,
        positions,
        scale,
        **rotation_arguments(rotary),
        out_dtype=RotaryAttributes.decode(rotary).out_dtype,
        fp8_dtype=fp8.dtype,
        scale_value=fp8.scale_value,
        scale_multiplies=fp8.multiplies,
    )


def call_group_fp8(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, rotary: str, quant: str
) -> tuple[Tensor, Tensor]:
    """`x` rotated, rounded to its dtype and quantised by one scale per group of elements: values and scales."""
    groups = GroupQuantAttributes.decode(quant)
    return torch.ops.rope_fusion.rotate_group_fp8.default(
        x,
        cos,
        sin,
        positions,
        **rotation_arguments(rotary),
        out_dtype=RotaryAttributes.decode(rotary).out_dtype,
        fp8_dtype=groups.dtype,
        group_size=groups.size,
        min_amax=groups.min_amax,
        power_of_two=groups.power_of_two,
    )


def refuse_group_fp8(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, rotary: str, quant: str
) -> str | None:
    """Why a rotation and the quantisation of its q by groups must stay as they are, or None."""
    if (sentence := refuse_rotation(q, k, cos, sin, positions, rotary)) is not None:
        return sentence
    groups = GroupQuantAttributes.decode(quant)
    if sentence := _operators.group_size_unsupported(q.shape[3], groups.size):
        return sentence
    if q.device.type == "cpu":
        return None
    how = _operators.Rotary(**rotation_arguments(rotary))
    fp8 = _operators.GroupFp8(groups.dtype, groups.size, groups.min_amax, groups.power_of_two)
    return _operators.unsupported(q, cos, sin, how, RotaryAttributes.decode(rotary).out_dtype, fp8)


def too_small(*tensors: Tensor | None, fewest: int = FEWEST_ELEMENTS) -> str | None:
    """Why rotated copies of these stay with Inductor: one is known to be too small to pay on a GPU."""
    for x in tensors:
        if x is not None and x.device.type != "cpu" and statically_known_true(x.numel() < fewest):
            return f"it rotates {x.numel()} elements, and below {fewest} Inductor's own kernel is as fast"
    return None


def refuse_rotation(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotary: str,
    scale: Tensor | None = None,
    quant: str | None = None,
) -> str | None:
    """Why these operands must stay as they are, or None; all are fake tensors, q and k ``[B, S, H, D]``."""
    rope = RotaryAttributes.decode(rotary)
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        if not all(isinstance(size, int) for size in x.shape[2:]):
            return (
                f"the heads or head_dim of {name} are symbolic ({tuple(x.shape[2:])}); "
                "mark only batch and sequence as dynamic (dynamic=None or torch._dynamo.mark_dynamic)"
            )
        if x.stride(3) != 1:
            return f"the last dim of {name} has stride {x.stride(3)}; the rotation reads contiguous heads"
    if cos.stride(-1) != 1 or sin.stride(-1) != 1:
        return "the columns of cos and sin are not contiguous"
    if sentence := several_devices(q, k, cos, sin, positions, scale):
        return sentence
    if q.device.type == "cpu":
        return None
    how = _operators.Rotary(**rotation_arguments(rotary))
    fp8 = QuantAttributes.decode(quant) if quant is not None else None
    static = _operators.StaticFp8(fp8.dtype, scale, fp8.scale_value, fp8.multiplies) if fp8 is not None else None
    for x in (q, k):
        if x is not None and (sentence := _operators.unsupported(x, cos, sin, how, rope.out_dtype, static)) is not None:
            return sentence
    return None
