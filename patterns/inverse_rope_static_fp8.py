"""The inverse rotation of an attention output and its static FP8 quantisation become one kernel."""

from __future__ import annotations

from rope_fusion.canonical.attributes import RotaryAttributes
from rope_fusion.canonical.examples import quant_example, rotary_example
from rope_fusion.canonical.operators import quantize_fp8, rotary_qk
from rope_fusion.capability import fp8_conversion, profitable_kernel
from rope_fusion.kernels.rotation import FEWEST_QUANTISED, call_rotation, call_static_fp8, refuse_rotation, too_small
from rope_fusion.pattern import FusionPattern


def search(q, k, cos, sin, positions, rotary, scale, quant):
    q_rot, k_rot = rotary_qk(q, k, cos, sin, positions, rotary)
    return quantize_fp8(q_rot, scale, quant), q_rot, k_rot


def replacement(q, k, cos, sin, positions, rotary, scale, quant):
    # what nobody reads of the unquantised results is dead code
    q_rot = call_rotation(q, cos, sin, positions, rotary, q)
    k_rot = call_rotation(k, cos, sin, positions, rotary, q)
    return call_static_fp8(q, cos, sin, positions, rotary, scale, quant), q_rot, k_rot


def refuse(q, k, cos, sin, positions, rotary, scale, quant):
    if not RotaryAttributes.decode(rotary).inverse:
        return "the rotation is a forward one"
    return too_small(q, k, fewest=FEWEST_QUANTISED) or refuse_rotation(q, k, cos, sin, positions, rotary, scale, quant)


def example_inputs():
    return [*rotary_example(), *quant_example()]


PATTERN = FusionPattern(
    priority=210,
    search=search,
    replacement=replacement,
    example_inputs=example_inputs,
    requires=(profitable_kernel, fp8_conversion),
    refuse=refuse,
)
