"""RoPE of q and k, static FP8 quantisation of q and the KV-cache update of a layer known by name become one operator."""

from __future__ import annotations

from rope_fusion.canonical.examples import layer_example, quant_example, rotary_example
from rope_fusion.canonical.operators import fused_by_layer, kv_write_by_layer, quantize_fp8, rotary_qk
from rope_fusion.capability import fp8_conversion, profitable_kernel
from rope_fusion.kernels.prologue import refuse_prologue
from rope_fusion.pattern import FusionPattern


def search(q, k, cos, sin, positions, rotary, q_scale, quant, v, layer):
    q_rot, k_rot = rotary_qk(q, k, cos, sin, positions, rotary)
    q8 = quantize_fp8(q_rot, q_scale, quant)
    return kv_write_by_layer(k_rot, v, layer), q8, q_rot, k_rot


def replacement(q, k, cos, sin, positions, rotary, q_scale, quant, v, layer):
    q_rot, k_rot, q8, done = fused_by_layer(q, k, v, cos, sin, positions, q_scale, rotary, quant, layer)
    return done, q8, q_rot, k_rot


def refuse(*, layer, **tensors):
    return refuse_prologue(**tensors)


def example_inputs():
    return [*rotary_example(), *quant_example(), *layer_example()]


PATTERN = FusionPattern(
    priority=410,
    search=search,
    replacement=replacement,
    example_inputs=example_inputs,
    requires=(profitable_kernel, fp8_conversion),
    refuse=refuse,
)
