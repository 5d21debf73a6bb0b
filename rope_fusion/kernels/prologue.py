"""The fused attention prologue as a functional call: what the RoPE patterns replace their matches by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rope_fusion._torch import (
    add_needs_realized_inputs,
    auto_functionalized,
    lower_to_call_site,
    register_lowering,
)
from rope_fusion.canonical.attributes import KvWriteAttributes, QuantAttributes, RotaryAttributes
from rope_fusion.kernels import rope_qkv as _operator
from rope_fusion.kernels.cache_layout import parse_layout

_ARGUMENTS = torch.ops.rope_fusion.rope_qkv.default._schema.arguments
_TENSORS = [argument.name for argument in _ARGUMENTS if not argument.kwarg_only]


@register_lowering(torch.ops.rope_fusion.rope_qkv.default, type_promotion_kind=None)
def _lower_to_encoded(*tensors: Any, need_q: bool, need_k: bool, **named: Any) -> Any:
    """Generated code calls the form of the operator that costs least."""
    given = dict(zip(_TENSORS, tensors, strict=False))
    given |= {name: named.pop(name) for name in _TENSORS if name in named}
    arguments = [*[given[name] for name in _TENSORS], _operator.encoded(**named), need_q, need_k]
    return lower_to_call_site(torch.ops.rope_fusion.rope_qkv.encoded, *arguments)


add_needs_realized_inputs(torch.ops.rope_fusion.rope_qkv.default)  # as of any operator that is not lowered further


def call_prologue(
    *,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotary: str,
    quant: str | None = None,
    q_scale: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    v: Tensor | None = None,
    slots: Tensor | None = None,
    slot_offsets: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv: str | None = None,
) -> tuple[Any, ...]:
    """`rope_fusion::rope_qkv` made functional -> (q_rot, k_rot, q_fp8, k_cache', v_cache').

    `rotary`, `quant` and `kv` are encoded attributes of the canonical operators. Both rotated tensors are requested; the
    pass drops those that nobody reads.
    """
    rope = RotaryAttributes.decode(rotary)
    q_fp8 = QuantAttributes.decode(quant) if quant is not None else None
    write = KvWriteAttributes.decode(kv) if kv is not None else None
    arguments: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "cos": cos,
        "sin": sin,
        "positions": positions,
        "slots": slots,
        "slot_offsets": slot_offsets,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        **_operator.options_of(rope, q_fp8, write),
        "need_q": True,
        "need_k": k is not None,
    }
    operator = torch.ops.rope_fusion.rope_qkv.default
    if write is None:
        return operator(**arguments, k_cache=None, v_cache=None)
    result: Any = auto_functionalized(operator, **arguments, k_cache=k_cache, v_cache=v_cache)
    q_rot, k_rot, q8, new_k, new_v = result
    return q_rot, k_rot, q8, new_k, new_v if v_cache is not None else new_k


def refuse_prologue(
    *,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotary: str,
    quant: str | None = None,
    q_scale: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    v: Tensor | None = None,
    slots: Tensor | None = None,
    slot_offsets: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv: str | None = None,
) -> str | None:
    """Why this match must stay as it is, or None; the arguments are those of `call_prologue` as fake tensors."""
    for what, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is None:
            continue
        if not all(isinstance(size, int) for size in tensor.shape[2:]):
            return (
                f"the heads or head_dim of {what} are symbolic ({tuple(tensor.shape[2:])}); "
                "mark only batch and sequence as dynamic (dynamic=None or torch._dynamo.mark_dynamic)"
            )
        if tensor.stride(3) != 1:
            return f"the last dim of {what} has stride {tensor.stride(3)}; the fused operator reads contiguous heads"
    if kv is not None and v is None:
        return "only k is written to a cache, no write of a v at the same slots was found"
    tensors = (q, k, v, cos, sin, positions, k_cache, v_cache, slots, slot_offsets, q_scale, k_scale, v_scale)
    if sentence := _operator.several_devices(*tensors):
        return sentence
    if cos.stride(-1) != 1 or sin.stride(-1) != 1:
        return "the columns of cos and sin are not contiguous"
    rope = RotaryAttributes.decode(rotary)
    if rope.out_dtype not in (q.dtype, torch.float32):
        return f"the rotated {q.dtype} goes on as {rope.out_dtype}; the fused operator gives its input's dtype or fp32"
    if q.device.type == "cpu":
        return None
    write = KvWriteAttributes.decode(kv) if kv is not None else None
    if write is not None and k is not None and k_cache is not None:
        for cache, layout in ((k_cache, write.k_layout), (k_cache if v_cache is None else v_cache, write.v_layout)):
            geometry = parse_layout(layout).geometry(tuple(cache.shape), cache.stride(), k.shape[2])
            if geometry.dim_stride != 1:
                return f"the fused kernel writes caches whose head dim is contiguous, which {layout!r} is not"
    return _operator.unsupported(
        _operator.target_of(q.device),
        q_dtype=q.dtype,
        cos_dtype=cos.dtype,
        head_dim=q.shape[3],
        rotary_dim=rope.rotary_dim,
        v_head_dim=v.shape[3] if v is not None else None,
        math_dtype=rope.math_dtype if rope.exact else torch.float32,
        out_dtype=rope.out_dtype,
        q_fp8=QuantAttributes.decode(quant).dtype if quant is not None else None,
        kv_fp8=write.kv_fp8 if write is not None else None,
        cache_dtypes=[cache.dtype for cache in (k_cache, v_cache) if cache is not None],
        index_dtypes=[index.dtype for index in (positions, slots, slot_offsets) if index is not None],
    )
