"""Example arguments of the canonical operators, for tracing patterns and for the contract test over the catalogue."""

from __future__ import annotations

import torch

from rope_fusion.canonical.attributes import (
    ArrangeAttributes,
    GroupQuantAttributes,
    KvWriteAttributes,
    LayerWriteAttributes,
    QuantAttributes,
    RotaryAttributes,
)

TOKENS, Q_HEADS, KV_HEADS, DIM, ROWS, BLOCKS, PAGE = 6, 4, 2, 16, 32, 5, 4


def rotary_example() -> list[torch.Tensor | str]:
    """q, k, cos, sin, positions and attributes of `rotary_qk`."""
    attributes = RotaryAttributes(
        rotary_dim=DIM,
        start=0,
        interleaved=False,
        inverse=False,
        halves_out=False,
        out_dtype=torch.bfloat16,
        math_dtype=torch.float32,
        exact=False,
    )
    return [
        torch.randn(1, TOKENS, Q_HEADS, DIM, dtype=torch.bfloat16),
        torch.randn(1, TOKENS, KV_HEADS, DIM, dtype=torch.bfloat16),
        torch.randn(ROWS, DIM // 2),
        torch.randn(ROWS, DIM // 2),
        torch.arange(TOKENS),
        attributes.encode(),
    ]


def quant_example() -> list[torch.Tensor | str]:
    """scale and attributes of `quantize_fp8`."""
    attributes = QuantAttributes(dtype=torch.float8_e4m3fn, multiplies=False, scale_value=1.0)
    return [torch.full((1,), 0.05), attributes.encode()]


def group_quant_example() -> list[torch.Tensor | str]:
    """Attributes of `quantize_group_fp8`."""
    return [GroupQuantAttributes(dtype=torch.float8_e4m3fn, size=DIM, min_amax=1e-4, power_of_two=False).encode()]


def arrange_example() -> list[torch.Tensor | str]:
    """Attributes of `arrange`."""
    return [ArrangeAttributes(layout="g b s h d", groups=2).encode()]


def kv_example() -> list[torch.Tensor | str]:
    """k_cache, v_cache, v, slots, slot_offsets, k_scale, v_scale and attributes of `kv_write`; k is the rotated one."""
    attributes = KvWriteAttributes(
        k_layout="n p h d",
        v_layout="n p h d",
        skip_negative_slots=False,
        kv_fp8=None,
        scale_multiplies=False,
        k_scale_value=1.0,
        v_scale_value=1.0,
        in_place_already=False,
    )
    return [
        torch.zeros(BLOCKS, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16),
        torch.zeros(BLOCKS, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16),
        torch.randn(1, TOKENS, KV_HEADS, DIM, dtype=torch.bfloat16),
        torch.arange(TOKENS),
        torch.zeros(TOKENS, dtype=torch.int64),
        torch.ones(1),
        torch.ones(1),
        attributes.encode(),
    ]


def layer_example() -> list[torch.Tensor | str]:
    """v and attributes of `kv_write_by_layer`; k is the rotated one."""
    attributes = LayerWriteAttributes(node="write", provider="engine", fused_by_engine=False)
    return [torch.randn(1, TOKENS, KV_HEADS, DIM, dtype=torch.bfloat16), attributes.encode()]
