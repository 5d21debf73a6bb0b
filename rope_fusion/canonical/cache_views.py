"""Views of a cache: which of its elements a node of the graph holds, and in which arrangement.

A functional graph has no aliasing. A write into a view of a cache is the view (select, slice, reshape, …), a functional
write into it, and the inverse of each view step (select_scatter, slice_scatter, reshape, …) up to a value of the whole
cache again. `climb` follows the first half, `descend` the second; a write is one where both meet in the same view.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rope_fusion.canonical.cache_reshapes import regrouped_splitting
from rope_fusion.canonical.layout import Atom, Dims, atoms_of, equal, is_one

aten = torch.ops.aten

Index = int | Node
"""A position: a number, or a node that holds a SymInt."""

_RESHAPES = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.clone.default,  # index_copy_ into a permuted cache leaves one
    }
)
_PERMUTES = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
PIECES = frozenset({aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default})
_STEPS = (
    _RESHAPES
    | _PERMUTES
    | frozenset({aten.select.int, aten.slice.Tensor, aten.view.dtype, aten.as_strided.default, operator.getitem})
)


@dataclass(frozen=True)
class CacheView:
    """A view of a whole cache.

    Attributes:
        dims: for each dim of the view, the dims of the cache that it runs over (none for a dim of size one). An atom is
            named by the number of its cache dim, or by ``(dim, part, parts)`` where a reshape split that dim.
        selected: cache dim → the only position of it that the view holds.
        ranges: cache dim → start and length of the part that the view holds.
    """

    dims: Dims
    selected: Mapping[int, Index] = field(default_factory=dict)
    ranges: Mapping[int, tuple[Index, Any]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return not self.selected and not self.ranges


def whole(cache: Node) -> CacheView:
    """The view that is the cache itself."""
    shape = cache.meta["val"].shape
    return CacheView(atoms_of(shape, range(len(shape))))


def view_source(node: Node) -> Node | None:
    """The tensor that `node` is one view step of; None where it is no view."""
    if node.op != "call_function" or node.target not in _STEPS:
        return None
    source = node.args[0]
    if node.target is operator.getitem:
        if not isinstance(source, Node) or source.target not in PIECES:
            return None
        source = source.args[0]
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), Tensor):
        return None
    if node.target is aten.view.dtype and source.meta["val"].dtype.itemsize != node.meta["val"].dtype.itemsize:
        return None
    return source


def climb(node: Node) -> tuple[Node, list[Node]]:
    """The tensor that `node` is a view of, and the view steps from it to `node`."""
    steps: list[Node] = []
    source = view_source(node)
    while source is not None:
        steps.append(node)
        node = source
        source = view_source(node)
    return node, steps[::-1]


def view_along(root: Node, steps: Sequence[Node]) -> CacheView | None:
    """The view of `root` at the end of `steps`."""
    view: CacheView | None = whole(root)
    for step in steps:
        view = step_into(view, step) if view is not None else None
    return view


def step_into(view: CacheView, node: Node) -> CacheView | None:
    """The view that `node`, one view step of `view`, holds; None where it cannot be described."""
    target: Any = node.target
    if target in _RESHAPES:
        return _reshaped(view, node.meta["val"].shape)
    if target in _PERMUTES:
        return replace(view, dims=tuple(view.dims[d] for d in permutation(node)))
    if target is aten.view.dtype:
        return view
    if target in (aten.select.int, aten.slice.Tensor, aten.as_strided.default):
        return region(view, node, node.args[1:], node.meta["val"].shape)
    if target is operator.getitem:
        return _piece(view, node)
    return None


def _piece(view: CacheView, node: Node) -> CacheView | None:
    """One piece of an unbind or split."""
    pieces: Any = node.args[0]
    which: Any = node.args[1]
    given = pieces.args[1 if pieces.target is aten.unbind.int else 2 :]
    dim = (given[0] if given else pieces.kwargs.get("dim", 0)) % len(view.dims)
    if pieces.target is aten.unbind.int:
        return selected(view, dim, which)
    before = [piece.shape[dim] for piece in pieces.meta["val"][:which]]
    if not all(isinstance(size, int) for size in before):
        return None
    return narrowed(view, dim, sum(before), node.meta["val"].shape[dim])


def region(view: CacheView, node: Node, arguments: Sequence[Any], shape: Sequence[Any]) -> CacheView | None:
    """The part of `view` that a select, slice or as_strided, or the scatter of one, of `arguments` addresses."""
    target: Any = node.target
    kind = REGION_OF.get(target, target)
    if kind is aten.as_strided.default:
        return _strided(view, node, arguments)
    given: Any = arguments[0] if arguments else node.kwargs.get("dim", 0)
    dim = given % len(view.dims)
    if kind is aten.select.int:
        return selected(view, dim, arguments[1])
    start = slice_start(view, dim, node, arguments, shape[dim])
    return None if start is None else narrowed(view, dim, start, shape[dim])


REGION_OF: dict[Any, Any] = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.as_strided_scatter.default: aten.as_strided.default,
}
"""The view that each scatter of a whole region writes into."""


def slice_start(view: CacheView, dim: int, node: Node, arguments: Sequence[Any], length: Any) -> Index | None:
    """Where a slice starts: element i is at ``start + i``, wrapping as indices do. None where it may be clamped."""
    given: dict[str, Any] = dict(zip(("dim", "start", "end", "step"), arguments, strict=False)) | dict(node.kwargs)
    start, end, step = given.get("start"), given.get("end"), given.get("step", 1)
    if step != 1:
        return None
    start = 0 if start is None else start
    size = math.prod(atom.size for atom in view.dims[dim])
    if isinstance(start, int) and isinstance(size, int):
        return min(max(start + size if start < 0 else start, 0), size)
    start_value: Any
    end_value: Any
    start_value, end_value = (x.meta["val"] if isinstance(x, Node) else x for x in (start, end))
    if isinstance(start_value, int) and start_value == 0:
        return 0
    # A slice as long as end - start was not clamped, whatever the inputs; nor was one as long as the rest.
    if end_value is None or (isinstance(end_value, int) and end_value == sys.maxsize):
        negative = isinstance(start_value, int) and start_value < 0
        return start if equal(length, -start_value if negative else size - start_value) else None
    return start if equal(length, end_value - start_value) else None


def selected(view: CacheView, dim: int, index: Index) -> CacheView | None:
    """One position of a dim of `view`."""
    atoms = view.dims[dim]
    rest = (*view.dims[:dim], *view.dims[dim + 1 :])
    if not atoms:
        return replace(view, dims=rest)
    name = atoms[0].name
    if len(atoms) != 1 or not isinstance(name, int):
        return None
    if isinstance(index, int) and index < 0:
        if not isinstance(atoms[0].size, int):
            return None
        index += atoms[0].size
    ranges = dict(view.ranges)
    if name in ranges:
        start = ranges.pop(name)[0]
        if not isinstance(start, int) or not isinstance(index, int):
            return None
        index += start
    return CacheView(rest, {**view.selected, name: index}, ranges)


def narrowed(view: CacheView, dim: int, start: Index, length: Any) -> CacheView | None:
    """A contiguous part of a dim of `view`."""
    atoms = view.dims[dim]
    if not atoms or equal(length, math.prod(atom.size for atom in atoms)):
        return view
    name = atoms[0].name
    if len(atoms) != 1 or not isinstance(name, int) or name in view.ranges:
        return None
    if is_one(length):
        dims = (*view.dims[:dim], (), *view.dims[dim + 1 :])
        return CacheView(dims, {**view.selected, name: start}, view.ranges)
    dims = (*view.dims[:dim], (Atom(length, name),), *view.dims[dim + 1 :])
    return CacheView(dims, view.selected, {**view.ranges, name: (start, length)})


def permutation(node: Node) -> list[int]:
    """``order`` such that dim i of `node` is dim ``order[i]`` of its source."""
    rank = node.meta["val"].dim()
    arguments: Any = node.args
    if node.target is aten.permute.default:
        return [d % rank for d in arguments[1]]
    order = list(range(rank))
    first, second = (0, 1) if node.target is aten.t.default else (d % rank for d in arguments[1:3])
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return order


def before_step(view: CacheView, node: Node) -> CacheView | None:
    """The view that the source of `node` holds, where `node` is a reshape, permutation or view.dtype holding `view`."""
    source = node.args[0]
    assert isinstance(source, Node)
    if node.target in _RESHAPES:
        return _reshaped(view, source.meta["val"].shape)
    if node.target in _PERMUTES:
        dims: list[tuple[Atom, ...]] = [()] * len(view.dims)
        for position, origin in enumerate(permutation(node)):
            dims[origin] = view.dims[position]
        return replace(view, dims=tuple(dims))
    if node.target is aten.view.dtype and source.meta["val"].dtype.itemsize == node.meta["val"].dtype.itemsize:
        return view
    return None


def same_view(first: CacheView, second: CacheView) -> bool:
    """Whether both certainly hold the same elements in the same arrangement."""
    names = [[[atom.name for atom in dim] for dim in view.dims] for view in (first, second)]
    if names[0] != names[1] or first.selected.keys() != second.selected.keys():
        return False
    if first.ranges.keys() != second.ranges.keys():
        return False
    return all(same_index(first.selected[dim], second.selected[dim]) for dim in first.selected) and all(
        same_index(first.ranges[dim][0], second.ranges[dim][0]) and equal(first.ranges[dim][1], second.ranges[dim][1])
        for dim in first.ranges
    )


def same_index(first: Index, second: Index) -> bool:
    if first is second:
        return True
    values = [index.meta["val"] if isinstance(index, Node) else index for index in (first, second)]
    return equal(values[0], values[1])


def certainly_disjoint(first: Mapping[int, Index], second: Mapping[int, Index]) -> bool:
    """Whether two selections differ in a dim for which both have a number."""
    return any(
        isinstance(first[dim], int) and isinstance(second.get(dim), int) and first[dim] != second[dim] for dim in first
    )


def _reshaped(view: CacheView, shape: Sequence[Any]) -> CacheView | None:
    dims = regrouped_splitting(view.dims, shape)
    return None if dims is None else replace(view, dims=dims)


def _strided(view: CacheView, node: Node, arguments: Sequence[Any]) -> CacheView | None:
    """An as_strided of a whole cache, where each of its dims runs along one dim of the cache."""
    source = node.args[0]
    assert isinstance(source, Node)
    cache = source.meta["val"]
    size, stride = arguments[0], arguments[1]
    offset = arguments[2] if len(arguments) > 2 else node.kwargs.get("storage_offset")
    offset = cache.storage_offset() if offset is None else offset
    numbers = [*cache.shape, *cache.stride(), cache.storage_offset(), *size, *stride, offset]
    if not view.is_whole or not all(isinstance(number, int) for number in numbers):
        return None
    names = [[atom.name for atom in dim] for dim in view.dims]
    if names != [[] if is_one(cache.shape[dim]) else [dim] for dim in range(cache.dim())]:
        return None
    along = {cache.stride(dim): dim for dim in range(cache.dim()) if cache.shape[dim] != 1}
    rest = offset - cache.storage_offset()
    starts: dict[int, int] = {}
    for step in sorted(along, reverse=True):
        starts[along[step]], rest = divmod(rest, step)
    used = [along.get(step) for extent, step in zip(size, stride, strict=True) if extent != 1]
    if rest or None in used or len(set(used)) != len(used) or len(along) != len(starts):
        return None
    extents = iter(extent for extent in size if extent != 1)
    length = {dim: next(extents) for dim in used}
    if any(not 0 <= starts[dim] <= cache.shape[dim] - length.get(dim, 1) for dim in starts):
        return None
    dims = iter(used)
    atoms = tuple(() if extent == 1 else (Atom(extent, next(dims)),) for extent in size)
    ranges = {dim: (starts[dim], length[dim]) for dim in used if dim is not None and length[dim] != cache.shape[dim]}
    return CacheView(atoms, {dim: starts[dim] for dim in starts if dim not in length}, ranges)
