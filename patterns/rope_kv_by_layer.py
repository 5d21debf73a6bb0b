"""RoPE of q and k and the KV-cache update of a layer known by name become one operator."""

from __future__ import annotations

from rope_fusion.canonical.attributes import LayerWriteAttributes
from rope_fusion.canonical.examples import layer_example, rotary_example
from rope_fusion.canonical.operators import fused_by_layer, kv_write_by_layer, rotary_qk
from rope_fusion.capability import profitable_kernel
from rope_fusion.kernels.prologue import refuse_prologue
from rope_fusion.pattern import FusionPattern


def search(q, k, cos, sin, positions, rotary, v, layer):
    q_rot, k_rot = rotary_qk(q, k, cos, sin, positions, rotary)
    return kv_write_by_layer(k_rot, v, layer), q_rot, k_rot


def replacement(q, k, cos, sin, positions, rotary, v, layer):
    q_rot, k_rot, _, done = fused_by_layer(q, k, v, cos, sin, positions, None, rotary, None, layer)
    return done, q_rot, k_rot


def refuse(*, layer, **tensors):
    if LayerWriteAttributes.decode(layer).fused_by_engine:
        return "the engine's own operator does this already"
    return refuse_prologue(**tensors)


def example_inputs():
    return [*rotary_example(), *layer_example()]


PATTERN = FusionPattern(
    priority=310,
    search=search,
    replacement=replacement,
    example_inputs=example_inputs,
    requires=(profitable_kernel,),
    refuse=refuse,
)
