"""A KV-cache write that Inductor would turn into a clone of the whole cache is made in place."""

from __future__ import annotations

from rope_fusion.canonical.attributes import KvWriteAttributes
from rope_fusion.canonical.examples import kv_example, rotary_example
from rope_fusion.canonical.kv_cache import write_in_place_expression
from rope_fusion.canonical.operators import kv_write
from rope_fusion.pattern import FusionPattern


def search(k_cache, v_cache, k, v, slots, slot_offsets, k_scale, v_scale, kv):
    new_k, new_v = kv_write(k_cache, v_cache, k, v, slots, slot_offsets, k_scale, v_scale, kv)
    return new_k, new_v


def replacement(k_cache, v_cache, k, v, slots, slot_offsets, k_scale, v_scale, kv):
    write = KvWriteAttributes.decode(kv)
    new_k = write_in_place_expression(k_cache, k, slots, slot_offsets, write.k_layout, "b s h d")
    if v is None:
        return new_k, new_k
    if v_cache is None:
        joint = write_in_place_expression(new_k, v, slots, slot_offsets, write.v_layout, "b s h d")
        return joint, joint
    return new_k, write_in_place_expression(v_cache, v, slots, slot_offsets, write.v_layout, "b s h d")


def refuse(*, kv, **tensors):
    if KvWriteAttributes.decode(kv).in_place_already:
        return "Inductor already performs this write in place"
    return None


def example_inputs():
    k = rotary_example()[1]
    k_cache, v_cache, *rest = kv_example()
    return [k_cache, v_cache, k, *rest]


PATTERN = FusionPattern(
    priority=100,
    search=search,
    replacement=replacement,
    example_inputs=example_inputs,
    refuse=refuse,
)
