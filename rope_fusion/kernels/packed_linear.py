"""``rope_fusion::packed_linear``: a linear on the CPU whose weight already lies as oneDNN computes with it.

``mm`` and ``linear`` take ordinary weights and let oneDNN rearrange them in every call (one thread, bf16 [1024, 1024], one
token: 194 µs; arranged before: 78 µs). These are the operators that ``torch._inductor.config.freezing`` uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rope_fusion._torch import add_needs_realized_inputs, fallback_handler, register_lowering

_LIBRARY = torch.library.Library("rope_fusion", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")

packed_linear = torch.ops.rope_fusion.packed_linear.default
_NO_EPILOGUE: tuple[Any, ...] = ("none", [], "")
# torch builds without oneDNN lack its operators, so they are looked up where `packs` has said that they exist.


def packs(dtype: torch.dtype) -> bool:
    """Whether this CPU has linears with packed weights of that dtype: those of half precision, where oneDNN has them."""
    if not (torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()):
        return False
    if torch.ops.mkldnn._is_mkldnn_acl_supported():  # another library computes there
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


def pack_weight(weight: Tensor) -> Tensor:
    """A dense weight [N, K] in oneDNN's arrangement: an opaque tensor that `packed_linear` and ``copy_`` understand."""
    # Without a number of tokens: weights packed for one number were no faster for it, and slower for others.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous())
    return packed


@torch.library.impl(_LIBRARY, "packed_linear", "CompositeExplicitAutograd")
def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K], weight [N, K] packed, bias [N] → [M, N], all of one dtype."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, *_NO_EPILOGUE)


@torch.library.register_fake("rope_fusion::packed_linear", lib=_LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@register_lowering(packed_linear, type_promotion_kind=None)
def _lower(x: Any, weight: Any, bias: Any) -> Any:
    """Generated code calls oneDNN's operator itself."""
    call = fallback_handler(torch.ops.mkldnn._linear_pointwise.default, add_to_fallback_set=False)
    return call(x, weight, bias, *_NO_EPILOGUE)


add_needs_realized_inputs(packed_linear)
