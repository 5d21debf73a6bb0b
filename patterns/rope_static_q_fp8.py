"""RoPE of q (and k) and static FP8 quantisation of q become one kernel."""

from __future__ import annotations

from rope_fusion.canonical.examples import quant_example, rotary_example
from rope_fusion.canonical.operators import quantize_fp8, rotary_qk
from rope_fusion.capability import fp8_conversion, profitable_kernel
from rope_fusion.kernels.prologue import call_prologue, refuse_prologue
from rope_fusion.pattern import FusionPattern


def search(q, k, cos, sin, positions, rotary, q_scale, quant):
    q_rot, k_rot = rotary_qk(q, k, cos, sin, positions, rotary)
    return quantize_fp8(q_rot, q_scale, quant), q_rot, k_rot


def replacement(q, k, cos, sin, positions, rotary, q_scale, quant):
    q_rot, k_rot, q8 = call_prologue(
        q=q, k=k, cos=cos, sin=sin, positions=positions, rotary=rotary, quant=quant, q_scale=q_scale
    )
    return q8, q_rot, k_rot


def example_inputs():
    return [*rotary_example(), *quant_example()]


PATTERN = FusionPattern(
    priority=200,
    search=search,
    replacement=replacement,
    example_inputs=example_inputs,
    requires=(profitable_kernel, fp8_conversion),
    refuse=refuse_prologue,
)
