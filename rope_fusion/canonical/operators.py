"""The canonical operators: what recognisers rewrite into, and what patterns are written over.

They live only while the pass runs: a pattern replaces them or the pass restores the nodes they came from, so only
fake implementations exist. All activations are 4-D, ``[batch, sequence, heads, dim]``, in any strides.

=================  ==============================================================================================
`rotary_qk`        rotation of the tensors of one layer that share cos and sin -> (q', k'); k' is empty without k
`quantize_fp8`     static FP8 quantisation with clamp, elementwise
`quantize_group_fp8`  FP8 quantisation with one scale measured on each group of consecutive elements of a head ->
                   (values, float32 scales ``[batch, sequence, heads, dim / size]``)
`arrange`          contiguous copy with the dims, and groups of heads, in another order
`kv_write`         functional update of whole caches -> (k_cache', v_cache'). Without `v` one tensor is stored; with
                   `v` but no `v_cache` both live in one joint buffer, and k_cache' holds both writes
`kv_write_by_layer`  write of k and v to caches known only by a layer's name -> an empty tensor that orders what
                   follows; `fused_by_layer` is what its patterns put in place, until the name is known again
=================  ==============================================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from rope_fusion.canonical.attributes import ArrangeAttributes, GroupQuantAttributes, QuantAttributes, RotaryAttributes

_LIBRARY = torch.library.Library("rope_fusion_canonical", "DEF")
_LIBRARY.define(
    "rotary_qk(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, str attributes) -> (Tensor, Tensor)"
)
_LIBRARY.define("quantize_fp8(Tensor x, Tensor? scale, str attributes) -> Tensor")
_LIBRARY.define("arrange(Tensor x, str attributes) -> Tensor")
_LIBRARY.define("quantize_group_fp8(Tensor x, str attributes) -> (Tensor, Tensor)")
_LIBRARY.define(
    "kv_write(Tensor k_cache, Tensor? v_cache, Tensor k, Tensor? v, Tensor slots, Tensor? slot_offsets, "
    "Tensor? k_scale, Tensor? v_scale, str attributes) -> (Tensor, Tensor)"
)
_LIBRARY.define("kv_write_by_layer(Tensor k, Tensor v, str attributes) -> Tensor")
_LIBRARY.define(
    "fused_by_layer(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? positions, Tensor? q_scale, "
    "str rotary, str? quant, str layer) -> (Tensor, Tensor, Tensor, Tensor)"
)

rotary_qk = torch.ops.rope_fusion_canonical.rotary_qk.default
quantize_fp8 = torch.ops.rope_fusion_canonical.quantize_fp8.default
quantize_group_fp8 = torch.ops.rope_fusion_canonical.quantize_group_fp8.default
arrange = torch.ops.rope_fusion_canonical.arrange.default
kv_write = torch.ops.rope_fusion_canonical.kv_write.default
kv_write_by_layer = torch.ops.rope_fusion_canonical.kv_write_by_layer.default
fused_by_layer = torch.ops.rope_fusion_canonical.fused_by_layer.default

CANONICAL = frozenset({rotary_qk, quantize_fp8, quantize_group_fp8, arrange, kv_write, kv_write_by_layer})


@torch.library.register_fake("rope_fusion_canonical::rotary_qk", lib=_LIBRARY)
def _rotary_qk(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, attributes: str
) -> tuple[Tensor, Tensor]:
    dtype = RotaryAttributes.decode(attributes).out_dtype
    rotated_k = q.new_empty((0,), dtype=dtype) if k is None else torch.empty_like(k, dtype=dtype)
    return torch.empty_like(q, dtype=dtype), rotated_k


@torch.library.register_fake("rope_fusion_canonical::quantize_fp8", lib=_LIBRARY)
def _quantize_fp8(x: Tensor, scale: Tensor | None, attributes: str) -> Tensor:
    return torch.empty_like(x, dtype=QuantAttributes.decode(attributes).dtype)


@torch.library.register_fake("rope_fusion_canonical::quantize_group_fp8", lib=_LIBRARY)
def _quantize_group_fp8(x: Tensor, attributes: str) -> tuple[Tensor, Tensor]:
    quant = GroupQuantAttributes.decode(attributes)
    scales = x.new_empty((*x.shape[:-1], x.shape[-1] // quant.size), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=quant.dtype), scales


@torch.library.register_fake("rope_fusion_canonical::arrange", lib=_LIBRARY)
def _arrange(x: Tensor, attributes: str) -> Tensor:
    place = ArrangeAttributes.decode(attributes)
    batch, sequence, heads, dim = x.shape
    sizes = {"b": batch, "s": sequence, "g": place.groups, "h": heads // place.groups, "d": dim}
    return x.new_empty([sizes[token] for token in place.layout.split()])


@torch.library.register_fake("rope_fusion_canonical::kv_write", lib=_LIBRARY)
def _kv_write(
    k_cache: Tensor,
    v_cache: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    slot_offsets: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    attributes: str,
) -> tuple[Tensor, Tensor]:
    v_result = k_cache.new_empty((0,)) if v_cache is None else torch.empty_like(v_cache)
    return torch.empty_like(k_cache), v_result


@torch.library.register_fake("rope_fusion_canonical::kv_write_by_layer", lib=_LIBRARY)
def _kv_write_by_layer(k: Tensor, v: Tensor, attributes: str) -> Tensor:
    return k.new_empty(0)


@torch.library.register_fake("rope_fusion_canonical::fused_by_layer", lib=_LIBRARY)
def _fused_by_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_scale: Tensor | None,
    rotary: str,
    quant: str | None,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q8 = q.new_empty(0) if quant is None else torch.empty_like(q, dtype=QuantAttributes.decode(quant).dtype)
    dtype = RotaryAttributes.decode(rotary).out_dtype
    return torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype), q8, k.new_empty(0)
