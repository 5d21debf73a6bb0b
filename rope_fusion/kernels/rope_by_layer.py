"""``rope_fusion::rope_qkv_by_layer``: `rope_qkv` into the caches of a layer that is known by name.

A cache provider (`rope_fusion.engines`) gives the tensors when the operator runs. Like the operators of the engines that it takes the
place of, it declares no mutation, because the caches are none of its arguments; its last output, an empty tensor, orders what follows.

There is an operator for each type that a layer's name comes in: ``str``, or an opaque object of the engine's. Those whose name ends in
``eager`` carry ``torch.Tag.cudagraph_unsafe``, for engines that keep their cache updates out of CUDA graphs. They have names of their own
and are no overloads, because torch 2.13 aborts at exit when a library with opaque types holds four overloads of one operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rope_fusion._torch import OPAQUE_TYPE
from rope_fusion.engines import CacheBinding, bind
from rope_fusion.kernels import rope_qkv  # noqa: F401  (registers the operator that this one calls)

SCHEMA = """{name}(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? positions,
    Tensor? q_scale, {layer} layer, str provider, *,
    bool interleaved, bool inverse, bool halves_out, int rotary_dim, int rotary_start,
    ScalarType? q_fp8, float q_scale_value, bool q_scale_multiplies, ScalarType math_dtype, ScalarType out_dtype,
    bool exact, bool need_q, bool need_k) -> (Tensor q_rot, Tensor k_rot, Tensor q_fp8_out, Tensor done)"""

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
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes as in `rope_qkv`: q [B, S, Hq, D], k [B, S, Hk, D], v [B, S, Hk, Dv]."""
    found = bind(provider, layer)
    cache = found if isinstance(found, CacheBinding) else None
    store = found if callable(found) else None
    need_k = options.pop("need_k")
    q_rot, k_rot, q8 = torch.ops.rope_fusion.rope_qkv.default(
        q,
        k,
        v if cache else None,
        cos,
        sin,
        positions,
        cache.k_cache if cache else None,
        cache.v_cache if cache else None,
        cache.slots if cache else None,
        None,
        q_scale,
        cache.k_scale if cache else None,
        cache.v_scale if cache else None,
        kv_fp8=cache.fp8 if cache else None,
        k_scale_value=1.0,
        v_scale_value=1.0,
        kv_scale_multiplies=False,
        k_layout=cache.k_layout if cache else "",
        v_layout=cache.v_layout if cache else "",
        skip_negative_slots=True,
        need_k=need_k or store is not None,
        **options,
    )
    if store is not None:
        store(k_rot.flatten(0, 1), v.flatten(0, 1))
    return q_rot, k_rot if need_k else q.new_empty(0), q8, q.new_empty(0)


def fake(
    q: Tensor,
    k: Tensor,
    *_: object,
    q_fp8: torch.dtype | None,
    out_dtype: torch.dtype,
    need_q: bool,
    need_k: bool,
    **__: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As of `rope_qkv`, and the empty tensor that orders."""
    return (
        torch.empty_like(q, dtype=out_dtype) if need_q else q.new_empty(0, dtype=out_dtype),
        torch.empty_like(k, dtype=out_dtype) if need_k else q.new_empty(0, dtype=out_dtype),
        q.new_empty(0) if q_fp8 is None else torch.empty_like(q, dtype=q_fp8),
        q.new_empty(0),
    )


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
