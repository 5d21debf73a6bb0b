"""The inverse rotation of an attention output and its FP8 quantisation by groups of elements become one kernel."""

from __future__ import annotations

from rope_fusion.canonical.attributes import RotaryAttributes
from rope_fusion.canonical.examples import group_quant_example, rotary_example
from rope_fusion.canonical.operators import quantize_group_fp8, rotary_qk
from rope_fusion.capability import fp8_conversion, profitable_kernel
from rope_fusion.kernels.rotation import call_group_fp8, call_rotation, refuse_group_fp8
from rope_fusion.pattern import FusionPattern


def search(q, k, cos, sin, positions, rotary, quant):
    q_rot, k_rot = rotary_qk(q, k, cos, sin, positions, rotary)
    values, scales = quantize_group_fp8(q_rot, quant)
    return values, scales, q_rot, k_rot


def replacement(q, k, cos, sin, positions, rotary, quant):
    # what nobody reads of the unquantised results is dead code
    q_rot = call_rotation(q, cos, sin, positions, rotary, q)
    k_rot = call_rotation(k, cos, sin, positions, rotary, q)
    values, scales = call_group_fp8(q, cos, sin, positions, rotary, quant)
    return values, scales, q_rot, k_rot


def refuse(q, k, cos, sin, positions, rotary, quant):
    if not RotaryAttributes.decode(rotary).inverse:
        return "the rotation is a forward one"
    return refuse_group_fp8(q, k, cos, sin, positions, rotary, quant)


def example_inputs():
    return [*rotary_example(), *group_quant_example()]


PATTERN = FusionPattern(
    priority=220,
    search=search,
    replacement=replacement,
    example_inputs=example_inputs,
    requires=(profitable_kernel, fp8_conversion),
    refuse=refuse,
)
