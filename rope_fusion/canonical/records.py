"""What the recognisers return: plain records over FX nodes, made without changing the graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node


@dataclass(frozen=True)
class CosSin:
    """One trigonometric operand of a rotation.

    ``node`` is broadcastable against the rotated tensor's leading dims; its columns ``offset : offset + width`` of the last
    dim are the ones used. ``part`` says which component of a complex node is meant.
    """

    node: Node
    offset: int
    part: str = "real"  # "real" | "imag"
    negated: bool = False


@dataclass(frozen=True)
class Rotation:
    """``out`` is ``x`` with ``rotary_dim`` elements of its last dim rotated by cos/sin, the rest passed through.

    ``out[..., j] = x[..., x_offset + j]`` for elements outside ``start : start + rotary_dim``.
    """

    out: Node
    x: Node
    x_offset: int
    width: int  # size of out's last dim
    start: int
    rotary_dim: int
    cos: CosSin
    sin: CosSin
    full_width: bool  # cos/sin hold rotary_dim columns (one per element), else rotary_dim / 2 (one per pair)
    interleaved: bool  # pairs (2i, 2i+1), else (i, i + rotary_dim / 2)
    inverse: bool
    halves_out: bool  # interleaved pairs come out as two halves (DeepSeek-V3 family)
    math_dtype: torch.dtype | None  # dtype of every multiply and add; None when they differ or are not rounded each
    nodes: frozenset[Node]  # every node of the rotation's own subgraph, `out` included, leaves excluded


@dataclass(frozen=True)
class Fp8Quantisation:
    """``out = clamp(x / scale, ±max).to(dtype)`` elementwise, where ``max`` is that of ``dtype``."""

    out: Node
    x: Node  # the tensor before the scale, in its own dtype (fp32 upcasts are looked through)
    scale: Node | float  # one element, or one per head where `per_head`
    scale_multiplies: bool  # out = x * scale
    dtype: torch.dtype
    scale_dtype: torch.dtype  # dtype to which the scaled value is rounded before it becomes FP8
    nodes: frozenset[Node]
    per_head: bool = False  # the scale holds one element per head, else a single one
    scale_axis: int | None = None  # dim of `x`, counted from the end, along which a per-head scale varies
    reciprocal: Node | None = None  # the node that holds 1 / scale where the program multiplied by it


@dataclass(frozen=True)
class GroupQuantisation:
    """``out = clamp(x / scale, ±max).to(dtype)`` with one float32 scale per `size` consecutive elements of x.

    ``scale = clamp(amax(abs(group)), min=min_amax) / max``, raised to the next power of two where `power_of_two`.
    """

    out: Node  # FP8, of the elements of x in their order
    x: Node  # [..., size], perhaps converted to float32
    scale: Node  # float32, one element per group in the groups' order
    size: int
    dtype: torch.dtype
    min_amax: float
    power_of_two: bool
    inexact: str | None = None  # how the program rounds that the fused operator does not


@dataclass(frozen=True)
class CacheWrite:
    """A functional write of one tensor into a cache that the program owns.

    ``base`` is the cache as the graph receives it (a placeholder). ``result`` has base's shape and dtype and holds the whole cache
    after the write (what the trailing ``copy_(base, ...)`` stores, or the input of the next write into the same base).
    """

    node: Node  # the write itself: index_put, slice_scatter, scatter, ...
    base: Node
    previous: Node  # whole-cache value before the write (base itself, or an earlier write's result: joint buffers)
    result: Node
    layout: str  # one token per dim of base, e.g. "n p h d", "b h p d", "0 n p h d" (see docs/architecture.md)
    value: Node  # what is stored, before quantisation / cast to the cache dtype
    value_axes: str  # layout of `value`: "t h d", "t (hd)", "b h s d", "b s h d"
    slots: (
        Node | int
    )  # flat slot, place in the batch's row, or block number when slot_offsets is given; int or SymInt node for slice writes
    slot_offsets: Node | None
    quantisation: Fp8Quantisation | None
    nodes: frozenset[Node]
    old_value_read: bool = False  # some other node reads, as it was before, what this write may overwrite
    call: Node | None = (
        None  # the engine operator that makes this write together with another one: both fuse or neither
    )
    stored: Node | None = None  # what `node` stores as it stands, quantised and cast; None for engine operators
    stored_axes: str = ""  # its axes, as `value_axes`


@dataclass(frozen=True)
class LayerWrite:
    """A write of K and V to a cache that the graph knows only by the name of a layer.

    ``value`` and ``value_axes`` are those of K, as in `CacheWrite`; ``node`` is a tensor that orders what follows the write.
    """

    node: Node
    value: Node
    v: Node
    layer: Node | str | object  # the name, or an opaque object that holds it
    provider: str  # who resolves the name: the namespace of the engine's operators
    operator: torch._ops.OpOverload  # what wrote
    fused_by_engine: bool  # the engine's operator rotates already
    value_axes: str = "t h d"
