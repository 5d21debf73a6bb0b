"""RoPE of q and k, static FP8 quantisation of q and the KV-cache update become one in-place kernel."""

from __future__ import annotations

from rope_fusion.canonical.examples import kv_example, quant_example, rotary_example
from rope_fusion.canonical.operators import kv_write, quantize_fp8, rotary_qk
from rope_fusion.capability import fp8_conversion, profitable_kernel
from rope_fusion.kernels.prologue import call_prologue, refuse_prologue
from rope_fusion.pattern import FusionPattern


def search(
    q, k, cos, sin, positions, rotary, q_scale, quant, k_cache, v_cache, v, slots, slot_offsets, k_scale, v_scale, kv
):
    q_rot, k_rot = rotary_qk(q, k, cos, sin, positions, rotary)
    q8 = quantize_fp8(q_rot, q_scale, quant)
    new_k, new_v = kv_write(k_cache, v_cache, k_rot, v, slots, slot_offsets, k_scale, v_scale, kv)
    return q8, new_k, new_v, q_rot, k_rot


def replacement(
    q, k, cos, sin, positions, rotary, q_scale, quant, k_cache, v_cache, v, slots, slot_offsets, k_scale, v_scale, kv
):
    q_rot, k_rot, q8, new_k, new_v = call_prologue(
        q=q,
        k=k,
        cos=cos,
        sin=sin,
        positions=positions,
        rotary=rotary,
        quant=quant,
        q_scale=q_scale,
        k_cache=k_cache,
        v_cache=v_cache,
        v=v,
        slots=slots,
        slot_offsets=slot_offsets,
        k_scale=k_scale,
        v_scale=v_scale,
        kv=kv,
    )
    return q8, new_k, new_v, q_rot, k_rot


def example_inputs():
    rope, quant, kv = rotary_example(), quant_example(), kv_example()
    return [*rope, *quant, *kv]


PATTERN = FusionPattern(
    priority=400,
    search=search,
    replacement=replacement,
    example_inputs=example_inputs,
    requires=(profitable_kernel, fp8_conversion),
    refuse=refuse_prologue,
)
