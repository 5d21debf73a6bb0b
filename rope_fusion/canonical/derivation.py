"""The canonical operators of derived tensors.

They stand for values that depend only on parameters and buffers, while the patterns over them decide which of these are
computed once, outside the graph. As with all canonical operators only fake implementations exist.

==============  =====================================================================================================
`dequantize`    a weight made from codes and a scale (how: `records` of `canonical.dequant`), in whatever arrangement
                its reader wants it
`cast_table`    a whole cos/sin cache in another dtype or on another device
`derived`       what replaces them: the value, handed in from outside
==============  =====================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rope_fusion.canonical.attributes import Attributes
from rope_fusion.capability import GateContext

# A fragment, because `canonical.operators` defines the namespace and needs none of this.
_LIBRARY = torch.library.Library("rope_fusion_canonical", "FRAGMENT")
_LIBRARY.define("dequantize(Tensor codes, Tensor? scale, str attributes) -> Tensor")
_LIBRARY.define("cast_table(Tensor table, str attributes) -> Tensor")
_LIBRARY.define("derived(Tensor source, str attributes) -> Tensor")

dequantize = torch.ops.rope_fusion_canonical.dequantize.default
cast_table = torch.ops.rope_fusion_canonical.cast_table.default
derived = torch.ops.rope_fusion_canonical.derived.default


@dataclass(frozen=True)
class DerivableAttributes(Attributes):
    """The value that `dequantize`, `cast_table` and `derived` stand for.

    Attributes:
        candidate, occurrence: which of the graph's candidates it is, and which of the places where that is computed.
        shape, stride, dtype, device: of the value.
        obstacle: why it must stay in the graph, as a sentence; empty where nothing stands in the way.
    """

    candidate: int
    occurrence: int
    shape: list[int]
    stride: list[int]
    dtype: torch.dtype
    device: str
    obstacle: str = ""


@dataclass(frozen=True)
class DerivingContext(GateContext):
    """The gate context of a graph that can be given further inputs."""


def inputs_can_be_added(context: GateContext) -> str | None:
    """Open where a function of ours stands around the compiled one and can hand it derived tensors."""
    if isinstance(context, DerivingContext):
        return None
    return 'derived tensors need backend="rope_fusion": a pass inside plain Inductor cannot give a graph further inputs'


def refuse_obstacle(attributes: str) -> str | None:
    """The obstacle that `DerivableAttributes` name, or None."""
    return DerivableAttributes.decode(attributes).obstacle or None


def derivable_example(dtype: torch.dtype = torch.bfloat16) -> str:
    """Attributes for tracing: a [32, 16] value."""
    return DerivableAttributes(
        candidate=0, occurrence=0, shape=[32, 16], stride=[16, 1], dtype=dtype, device="cpu"
    ).encode()


def _empty(like: Tensor, attributes: str) -> Tensor:
    value = DerivableAttributes.decode(attributes)
    return like.new_empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)


@torch.library.register_fake("rope_fusion_canonical::dequantize", lib=_LIBRARY)
def _dequantize(codes: Tensor, scale: Tensor | None, attributes: str) -> Tensor:
    return _empty(codes, attributes)


@torch.library.register_fake("rope_fusion_canonical::cast_table", lib=_LIBRARY)
def _cast_table(table: Tensor, attributes: str) -> Tensor:
    return _empty(table, attributes)


@torch.library.register_fake("rope_fusion_canonical::derived", lib=_LIBRARY)
def _derived(source: Tensor, attributes: str) -> Tensor:
    return _empty(source, attributes)
