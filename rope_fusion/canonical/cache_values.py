"""What a cache write stores: which of its dims is which, and where it comes from before cast and quantisation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from rope_fusion.canonical.cache_views import permutation
from rope_fusion.canonical.fp8_scale import CONVERSIONS, ORDER_PRESERVING
from rope_fusion.canonical.layout import Atom, Dims, equal, is_one
from rope_fusion.canonical.records import CacheWrite, Fp8Quantisation

aten = torch.ops.aten

_PERMUTES = frozenset({aten.permute.default, aten.transpose.int})
_PARTS = {"t": ("b", "s"), "(hd)": ("h", "d")}
_HALVES = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class StoredValue:
    """A tensor whose dims have roles: an atom is named t, b, s, h, d or (hd); dims of size one have theirs too."""

    node: Node
    dims: Dims

    @property
    def axes(self) -> str:
        return " ".join(axis_name(dim) for dim in self.dims)


def axis_name(dim: Sequence[Atom]) -> str:
    if not dim:
        return "1"
    if len(dim) == 1:
        return str(dim[0].name)
    return "(" + "".join(str(atom.name).strip("()") for atom in dim) + ")"


def named(dims: Dims) -> Dims | None:
    """`dims` with a role for each unnamed dim of size one; None where no role is left for one.

    A dim of size one before the tokens is the batch; the tokens are then the sequence.
    """
    names = [str(atom.name) for dim in dims for atom in dim]
    missing = {role for role in ("b", "s", "h") if role not in names}
    if "t" in names:
        missing.discard("s")
    if "(hd)" in names:
        missing.discard("h")
    result = list(dims)
    for at, dim in enumerate(dims):
        if dim:
            continue
        after = {atom.name for later in dims[at:] for atom in later}
        leading = "b" in missing and after & {"s", "t"}
        role = "b" if leading else next((role for role in ("h", "s", "b") if role in missing), None)
        if role is None:
            return None
        missing.discard(role)
        result[at] = (Atom(1, role),)
    if any(dim and dim[0].name == "b" for dim in result):
        result = [tuple(Atom(atom.size, "s" if atom.name == "t" else atom.name) for atom in dim) for dim in result]
    return tuple(result)


def regrouped(dims: Dims, shape: Sequence[Any]) -> Dims | None:
    """The dims of a reshape to `shape`; tokens may be split into batch and sequence, (hd) into heads and dim."""
    pending = [atom for dim in dims for atom in dim]
    sizes = list(shape)
    result: list[tuple[Atom, ...]] = []
    while sizes:
        size = sizes.pop(0)
        if is_one(size):
            result.append((pending.pop(0),) if pending and is_one(pending[0].size) else ())
            continue
        taken: list[Atom] = []
        product: Any = 1
        while pending and not (taken and equal(product, size)):
            atom = pending.pop(0)
            if not is_one(atom.size):
                taken.append(atom)
            product = math.prod(atom.size for atom in taken)
        if taken and equal(product, size):
            result.append(tuple(taken))
            continue
        pending[:0] = taken[1:]
        parts = _PARTS.get(str(taken[0].name)) if taken else None
        if parts is None or not sizes or not equal(size * sizes[0], taken[0].size):
            return None
        result += [(Atom(size, parts[0]),), (Atom(sizes.pop(0), parts[1]),)]
    if any(not is_one(atom.size) for atom in pending):
        return None
    return named(tuple(result))


def earlier(value: StoredValue) -> StoredValue | None:
    """The tensor that `value` is a rearrangement of; None where it is none."""
    node = value.node
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    dims: Dims | None = None
    if node.target in (aten.clone.default, aten.alias.default):
        dims = value.dims
    elif node.target in ORDER_PRESERVING:
        dims = regrouped(value.dims, source.meta["val"].shape)
    elif node.target in _PERMUTES:
        before: list[tuple[Atom, ...]] = [()] * len(value.dims)
        for position, origin in enumerate(permutation(node)):
            before[origin] = value.dims[position]
        dims = tuple(before)
    return None if dims is None else StoredValue(source, dims)


def before_storage(
    stored: StoredValue, cache: torch.dtype, quantisations: Mapping[Node, Fp8Quantisation]
) -> tuple[StoredValue, Fp8Quantisation | None, set[Node]]:
    """What is stored before quantisation or cast to the dtype of the cache, and the nodes from there to `stored`."""
    passed: set[Node] = set()
    value: StoredValue | None = stored
    while value is not None:
        node = value.node
        quantisation = quantisations.get(node)
        if quantisation is not None:
            if cache.is_floating_point and cache != quantisation.dtype:
                break
            dims: Dims | None = value.dims
            shapes = [n.meta["val"].shape for n in (node, quantisation.x)]
            if len(shapes[0]) != len(shapes[1]) or not all(map(equal, *shapes)):
                dims = regrouped(value.dims, shapes[1])
            if dims is None or not scales_heads(quantisation, dims):
                break
            return StoredValue(quantisation.x, dims), quantisation, passed | quantisation.nodes
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, Node):
            break
        if node.target is aten.view.dtype and source.meta["val"].dtype.itemsize == node.meta["val"].dtype.itemsize:
            value = StoredValue(source, value.dims)
        elif node.target in CONVERSIONS and node.meta["val"].dtype == cache and _is_storage_cast(source, node):
            return StoredValue(source, value.dims), None, passed | {node}
        else:
            value = earlier(value)
        passed.add(node)
    return stored, None, set()


def _is_storage_cast(source: Node, cast: Node) -> bool:
    """Whether a cast is made for the cache's sake.

    One from float32 to a half may as well end the computation of the value (a rotation in float32, say): it stays.
    """
    before, after = source.meta["val"].dtype, cast.meta["val"].dtype
    return before in _HALVES or (before == torch.float32 and after not in _HALVES)


def scales_heads(quantisation: Fp8Quantisation, dims: Dims) -> bool:
    """Whether a scale per head varies along the dim that the cache holds as heads."""
    if quantisation.scale_axis is None:
        return True
    return [atom.name for atom in dims[quantisation.scale_axis]] == ["h"]


def value_lineage(write: CacheWrite) -> Iterator[tuple[Node, str]]:
    """`write.value` and the tensors that it is a rearrangement of, nearest first, each with its axes."""
    shape = write.value.meta["val"].shape
    value: StoredValue | None = StoredValue(write.value, dims_of(write.value_axes, shape))
    while value is not None:
        yield value.node, value.axes
        value = earlier(value)


def dims_of(axes: str, shape: Sequence[Any]) -> Dims:
    return tuple((Atom(size, axis),) for axis, size in zip(axes.split(), shape, strict=True))
