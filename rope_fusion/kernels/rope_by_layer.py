"""``rope_fusion::rope_qkv_by_layer``: `rope_qkv` into the caches of a layer that is known by name.

A cache provider (`rope_fusion.engines`) gives the tensors when the operator runs. Like the operators of the engines that it takes the
place of, it declares no mutation, because the caches are none of its arguments; its last output, an empty tensor, orders what follows.

There is an operator for each type that a layer's name comes in: ``str``, or an opaque object of the engine's. Those whose name ends in
``eager`` carry ``torch.Tag.cudagraph_unsafe``, for engines that keep their cache updates out of CUDA graphs. They have names of their own
and are no overloads, because torch 2.13 aborts at exit when a library with opaque types holds four overloads of one operator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rope_fusion._torch import OPAQUE_TYPE
from rope_fusion.canonical.attributes import QuantAttributes, RotaryAttributes
from rope_fusion.engines import CacheBinding, bind
from rope_fusion.kernels.rope_qkv import decoded, encoded, fake_of_encoded, options_of

SCHEMA = """{name}(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? positions,
    Tensor? q_scale, {layer} layer, str provider, str options, *, bool need_q, bool need_k) -> (Tensor q_rot,
    Tensor k_rot, Tensor q_fp8_out, Tensor done)"""

LIBRARY = torch.library.Library("rope_fusion", "FRAGMENT")


def rope_qkv_by_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_scale: Tensor | None,
    layer: Any,
    provider: str,
    options: str,
    *,
    need_q: bool,
    need_k: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes as in `rope_qkv`: q [B, S, Hq, D], k [B, S, Hk, D], v [B, S, Hk, Dv]; `options` as `encoded_options` makes them."""
    call = torch.ops.rope_fusion.rope_qkv.encoded
    found = bind(provider, layer)
    if isinstance(found, CacheBinding):
        q_rot, k_rot, q8 = call(
            q,
            k,
            v,
            cos,
            sin,
            positions,
            found.k_cache,
            found.v_cache,
            found.slots,
            None,
            q_scale,
            found.k_scale,
            found.v_scale,
            _with_cache(options, found.fp8, found.k_layout, found.v_layout),
            need_q,
            need_k,
        )
    else:
        must_rotate = need_k or found is not None
        q_rot, k_rot, q8 = call(
            q, k, None, cos, sin, positions, None, None, None, None, q_scale, None, None, options, need_q, must_rotate
        )
        if found is not None:
            found(k_rot.flatten(0, 1), v.flatten(0, 1))
    return q_rot, k_rot if need_k else q.new_empty(0), q8, q.new_empty(0)


def encoded_options(rotary: RotaryAttributes, quant: QuantAttributes | None) -> str:
    """What the operator takes as `options`: those of `rope_qkv.encoded`, as yet without a cache.

    They are one string for the reason given there: the dispatcher would convert each by itself, in every call.
    """
    return encoded(**options_of(rotary, quant, None) | {"skip_negative_slots": True})


@lru_cache(maxsize=1024)
def _with_cache(options: str, fp8: torch.dtype | None, k_layout: str, v_layout: str) -> str:
    return encoded(**vars(decoded(options)) | {"kv_fp8": fp8, "k_layout": k_layout, "v_layout": v_layout})


def fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_scale: Tensor | None,
    layer: Any,
    provider: str,
    options: str,
    *,
    need_q: bool,
    need_k: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As of `rope_qkv`, and the empty tensor that orders."""
    return (*fake_of_encoded(q, k, options, need_q, need_k), q.new_empty(0))


def _define(name: str, layer: str, tags: tuple[torch.Tag, ...]) -> None:
    LIBRARY.define(SCHEMA.format(name=name, layer=layer), tags=(torch.Tag.needs_fixed_stride_order, *tags))
    LIBRARY.impl(name, rope_qkv_by_layer, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rope_fusion::{name}", fake, lib=LIBRARY)


# The type of a layer's name -> the names of its two operators. All are defined at once: a graph that comes from a cache calls its operator
# although no pass ran in this process.
NAMES = {
    "str": ("rope_qkv_by_layer", "rope_qkv_by_layer_eager"),
    "opaque": ("rope_qkv_by_opaque_layer", "rope_qkv_by_opaque_layer_eager"),
}
for _layer, (_name, _eager_name) in zip(("str", OPAQUE_TYPE), NAMES.values(), strict=True):
    if _layer is not None:
        _define(_name, _layer, ())
        _define(_eager_name, _layer, (torch.Tag.cudagraph_unsafe,))


def takes_opaque_layer(operator: torch._ops.OpOverload) -> bool:
    """Whether an engine operator's argument ``layer_name`` is an opaque object rather than a str."""
    argument = next(a for a in operator._schema.arguments if a.name == "layer_name")
    return str(argument.type) != "str"


def by_layer_operator(operator: torch._ops.OpOverload, cudagraph_unsafe: bool) -> torch._ops.OpOverload:
    """The one of our operators that takes layers as an engine's operator does."""
    name, eager_name = NAMES["opaque" if takes_opaque_layer(operator) else "str"]
    return getattr(torch.ops.rope_fusion, eager_name if cudagraph_unsafe else name).default
