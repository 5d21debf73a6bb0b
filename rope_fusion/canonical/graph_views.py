"""Views of tensors in a functional graph: which elements they cover, replayed elsewhere, and written back.

A functional graph has no aliasing, so a view is a value that is computed from another one. What it covers of that one is a `Region`.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.layout import equal, is_one

aten = torch.ops.aten

SCATTER_OF = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}
VIEW_OF = {scatter: view for view, scatter in SCATTER_OF.items()}
SCATTERS = frozenset(VIEW_OF)
# operators whose result is a view of their first argument; reshape is one where it need not copy
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.as_strided.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})


@dataclass(frozen=True)
class Region:
    """The elements of a tensor that a view of it covers, as a strided view of the contiguous tensor of that shape."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any

    def runs(self) -> list[tuple[Any, Any]]:
        """(size, stride) from the outermost to the innermost, without dims of one element, neighbours merged."""
        merged: list[tuple[Any, Any]] = []
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if is_one(size):
                continue
            if merged and equal(merged[-1][1], size * stride):
                merged[-1] = (merged[-1][0] * size, stride)
            else:
                merged.append((size, stride))
        return merged

    def same(self, other: Region) -> bool:
        """Whether both cover the same elements in the same order, so that one is a reshape of the other."""
        mine, theirs = self.runs(), other.runs()
        return (
            equal(self.offset, other.offset)
            and len(mine) == len(theirs)
            and all(equal(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True))
        )

    def disjoint(self, other: Region) -> bool:
        """Whether they certainly share no element: two windows of the same rows, or one wholly before the other."""
        for first, second in ((self, other), (other, self)):
            if statically_known_true(first.offset + first.extent() <= second.offset):
                return True
        rows = {str(stride): stride for region in (self, other) for _, stride in region.runs()[:-1]}
        for row in rows.values():
            windows = [region._window(row) for region in (self, other)]
            if None not in windows:
                (start, end), (other_start, other_end) = windows  # type: ignore[misc]
                if statically_known_true(end <= other_start) or statically_known_true(other_end <= start):
                    return True
        return False

    def extent(self) -> Any:
        """One more than the distance from the first to the last element."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def _window(self, row: Any) -> tuple[Any, Any] | None:
        """First and last column of the region in rows of `row` elements, or None where it is no such window."""
        if not isinstance(row, int) or not isinstance(self.offset, int):
            return None
        inner: list[tuple[Any, int]] = []
        outer: list[tuple[Any, int]] = []
        for size, stride in self.runs():
            if not isinstance(stride, int):
                return None
            (outer if stride % row == 0 else inner).append((size, stride))
        start = self.offset % row
        if not all(isinstance(size, int) for size, _ in inner):
            return None
        end = start + 1 + sum((size - 1) * stride for size, stride in inner)
        return (start, end) if end <= row else None


def region_of(shape: Sequence[Any], steps: Sequence[tuple[Any, ...]], fake_mode: Any) -> Region | None:
    """The region that view steps (target, further arguments, keywords, item) of a tensor of `shape` show; None if one copies."""
    with fake_mode, torch.no_grad():
        tensor = torch.empty(list(shape), device="meta")
        for step in steps:
            target, arguments, keywords, item = (*step, {}, None)[:4] if len(step) == 2 else (*step, None)[:4]
            arguments, keywords = torch.fx.map_arg((tuple(arguments), keywords), lambda node: node.meta["val"])
            result = target(tensor, *arguments, **keywords)
            result = result[item] if item is not None else result
            if result.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
                return None
            tensor = result
        return Region(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


def steps_of(path: Sequence[Node]) -> list[tuple[Any, ...]]:
    steps: list[tuple[Any, ...]] = []
    for node in path:
        if node.target is operator.getitem:
            split = node.args[0]
            assert isinstance(split, Node)
            steps.append((split.target, split.args[1:], split.kwargs, node.args[1]))
        else:
            steps.append((node.target, node.args[1:], node.kwargs))
    return steps


def viewed(node: Node) -> Node | None:
    """The tensor that `node` certainly shares its elements with, or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    if node.target is operator.getitem:
        if source.op == "call_function" and source.target in SPLITS:
            tensor = source.args[0]
            return tensor if isinstance(tensor, Node) else None
        return None
    if node.target not in VIEWS:
        return None
    if node.target is aten.reshape.default:
        mine, theirs = node.meta["val"], source.meta["val"]
        return source if mine.untyped_storage()._cdata == theirs.untyped_storage()._cdata else None
    return source


def root_of(node: Any) -> Node:
    """What `node` is a view of, through views of views."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def view_steps(base: Node, view: Node) -> list[Node]:
    """The views that lead from `base` to `view`, without the splits whose parts they take."""
    path = []
    while view is not base:
        path.append(view)
        source = view.args[0]
        assert isinstance(source, Node)
        if view.target is operator.getitem:
            source = source.args[0]
            assert isinstance(source, Node)
        view = source
    return path[::-1]


def size_arguments(emitter: Emitter, shape: Sequence[Any], value: Node) -> list[Any] | None:
    """Arguments for a reshape of `value` to `shape`; one symbolic size is inferred, further ones are read off `value`."""
    symbolic = [at for at, size in enumerate(shape) if not isinstance(size, int)]
    sizes: list[Any] = list(shape)
    for at in symbolic[1:]:
        dims = [dim for dim, size in enumerate(value.meta["val"].shape) if equal(size, shape[at])]
        if not dims:
            return None
        sizes[at] = emitter.call(aten.sym_size.int, value, dims[0])
    if symbolic:
        sizes[symbolic[0]] = -1
    return sizes


def written_back(emitter: Emitter, path: Sequence[Node], whole: Node, value: Node) -> Node:
    """`whole` with `value` written to the view that `path` makes of it."""
    if not path:
        return value
    step, *rest = path
    if rest:
        value = written_back(emitter, rest, emitter.replay([step], whole), value)
    call, target = emitter.call, step.target
    if target is operator.getitem:
        split, index = step.args
        assert isinstance(split, Node) and isinstance(index, int)
        if split.target is aten.unbind.int:
            dim = split.args[1] if len(split.args) > 1 else 0
            return call(aten.select_scatter.default, whole, value, dim, index)
        sizes, dim = split.args[1], split.args[2] if len(split.args) > 2 else 0
        assert isinstance(dim, int)
        start: Any = sizes * index if isinstance(sizes, int) else sum(sizes[:index])  # type: ignore[index, arg-type]
        return call(aten.slice_scatter.default, whole, value, dim, start, start + step.meta["val"].shape[dim])
    if target in SCATTER_OF:
        return call(SCATTER_OF[target], whole, value, *step.args[1:])
    if target is aten.transpose.int:
        return call(target, value, *step.args[1:])
    if target is aten.permute.default:
        order: Any = step.args[1]
        rank = len(order)
        return call(target, value, [[d % rank for d in order].index(d) for d in range(rank)])
    if target is aten.alias.default:
        return value
    return call(aten.reshape.default, value, size_arguments(emitter, whole.meta["val"].shape, whole))


def live_nodes(graph: Graph, without: Container[Node] = ()) -> set[Node]:
    """The nodes of a sorted graph that something reads or that have an effect, nodes among `without` not counted."""
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if node not in without and (node in live or node.is_impure()):
            live.update((node, *node.all_input_nodes))
    return live
