"""A cache write in the form that Inductor performs in place: ``index_put`` on the cache itself, in its own shape.

Inductor turns ``copy_(cache, index_put(cache, …))`` into one scatter. Through a select, or with any other kind of write
than `index_put`, it copies the whole cache instead (through any view before torch 2.13).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from rope_fusion.canonical.cache_views import REGION_OF, climb
from rope_fusion.canonical.layout import equal
from rope_fusion.canonical.records import CacheWrite

aten = torch.ops.aten
prims = torch.ops.prims

_DATA = ("h", "d", "(hd)")


class _Eager:
    """Calls operators on tensors; also what a tracer records."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def value(self, x: Any) -> Any:
        return x

    def size(self, x: Any, dim: int) -> Any:
        return x.shape[dim]


class _Inserter:
    """Inserts the same calls into a graph, before one of its nodes."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph = graph
        self._before = before
        self._fake_mode = before.meta["val"].fake_mode

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._fake_mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def value(self, x: Any) -> Any:
        return x.meta["val"] if isinstance(x, Node) else x

    def size(self, x: Node, dim: int) -> Any:
        size = x.meta["val"].shape[dim]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, x, dim)


_Ops = _Eager | _Inserter


def write_in_place_expression(
    base: Tensor, value: Tensor, slots: Tensor | int, slot_offsets: Tensor | None, layout: str, value_axes: str
) -> Tensor:
    """The cache `base` after `value` is written into it: one `index_put` on `base` itself.

    Args:
        base: the whole cache, in the dims that `layout` names.
        value: what is stored; cast to the cache's dtype, but FP8 and bytes stand for each other bit by bit.
        slots: flat slots ``[T]`` or ``[B, S]``, places ``[S]`` or ``[B, S]`` where the layout has a batch, block
            numbers where `slot_offsets` is given, or the number of the first slot. Negative ones wrap as indices do.
        slot_offsets: places within the blocks.
        layout: one token per dim of the cache (see docs/architecture.md).
        value_axes: one token per dim of `value`: t or b and s, h and d or (hd); a dim of size one may be left out.
    """
    return _write(_Eager(), base, value, slots, slot_offsets, layout.split(), value_axes.split())


def emit_in_place(graph: Graph, write: CacheWrite) -> Node:
    """Replace `write` by its form in place; whoever reads the written cache, or the view written, reads the new one.

    Returns:
        the node that holds the whole cache after the write. The replaced nodes are left without users.
    """
    target = write.node.args[0]
    assert isinstance(target, Node) and write.stored is not None
    previous, steps = climb(target)
    inserter = _Inserter(graph, write.node)
    new = _write(
        inserter,
        previous,
        write.stored,
        write.slots,
        write.slot_offsets,
        write.layout.split(),
        write.stored_axes.split(),
    )
    if write.node is not write.result and len(write.node.users) > 0:
        write.node.replace_all_uses_with(_replayed(inserter, steps, new))
    write.result.replace_all_uses_with(new)
    return new


def is_already_in_place(write: CacheWrite, through_views: bool = False) -> bool:
    """Whether Inductor performs the write without a copy of the cache as it stands.

    Args:
        through_views: whether it does so for an `index_put` through reshapes and permutations, as from torch 2.13 on.
    """
    if write.old_value_read:
        return False
    target = write.node.args[0]
    assert isinstance(target, Node)
    is_index_put = write.node.target in (aten.index_put.default, aten._unsafe_index_put.default)
    if is_index_put and target is write.previous and write.node is write.result:
        return True
    copied = any(user.target is aten.copy_.default and user.args[0] is write.base for user in write.result.users)
    if write.previous is not write.base or not copied:
        return False
    path = _path(write)
    steps = climb(target)[1]
    if is_index_put:
        cuts = {aten.select.int, aten.slice.Tensor, operator.getitem, aten.as_strided.default, aten.clone.default}
        return through_views and not any(step.target in cuts for step in (*path, *steps))
    regions = set(REGION_OF.values())
    return all(node.target in REGION_OF for node in path) and all(step.target in regions for step in steps)


def _path(write: CacheWrite) -> list[Node]:
    """The nodes from the write to the whole cache after it."""
    path = [write.result]
    while path[-1] is not write.node:
        node = path[-1]
        inner = node.args[1] if node.target in REGION_OF else node.args[0]
        assert isinstance(inner, Node)
        path.append(inner)
    return path[::-1]


def _replayed(inserter: _Inserter, steps: Sequence[Node], start: Node) -> Node:
    """`start` through copies of view steps."""
    node = start
    for step in steps:
        if step.target is aten.clone.default:
            continue
        if step.target is operator.getitem:
            pieces = step.args[0]
            assert isinstance(pieces, Node)
            all_pieces = inserter.call(pieces.target, node, *pieces.args[1:], **pieces.kwargs)
            node = inserter.call(operator.getitem, all_pieces, step.args[1])
        else:
            node = inserter.call(step.target, node, *step.args[1:], **step.kwargs)
    return node


def _write(
    ops: _Ops, base: Any, value: Any, slots: Any, offsets: Any, layout: Sequence[str], axes: Sequence[str]
) -> Any:
    value = _cast(ops, base, value)
    value, axes = _data_as(ops, base, value, list(layout), list(axes))
    batched = "b" in layout
    slots, offsets, value, axes = _tokens(ops, value, slots, offsets, axes, batched)
    slot_rank = ops.value(slots).dim()
    rows = batched and (slot_rank == 2 or not _whole_batch(ops, base, value, layout, axes))
    if rows and slot_rank == 1:
        slots = ops.call(aten.unsqueeze.default, slots, 0)
    indices: list[Any] = []
    for dim, name in enumerate(layout):
        indices.append(_index(ops, base, value, slots, offsets, name, dim, layout, axes, rows))
    addressed = [dim for dim, index in enumerate(indices) if index is not None]
    untouched = [name for name, index in zip(layout, indices, strict=True) if index is None]
    adjacent = addressed == list(range(addressed[0], addressed[0] + len(addressed)))
    front = sum(index is None for index in indices[: addressed[0]]) if adjacent else 0
    tokens = [name for name in axes if name not in _DATA and name not in untouched]
    tokens.sort(key="bst".index)
    order = [*untouched[:front], *tokens, *untouched[front:]]
    value = _arranged(ops, value, axes, order)
    return ops.call(aten.index_put.default, base, indices, value)


def _cast(ops: _Ops, base: Any, value: Any) -> Any:
    have, want = ops.value(value).dtype, ops.value(base).dtype
    if have == want:
        return value
    if {have.itemsize, want.itemsize} == {1} and have.is_floating_point != want.is_floating_point:
        return ops.call(aten.view.dtype, value, want)
    return ops.call(prims.convert_element_type.default, value, want)


def _data_as(ops: _Ops, base: Any, value: Any, layout: list[str], axes: list[str]) -> tuple[Any, list[str]]:
    """`value` with heads and head dim merged or split as the cache holds them."""
    if "(hd)" in layout and "h" in axes and "d" in axes:
        rest = [name for name in axes if name not in _DATA]
        value = _arranged(ops, value, axes, [*rest, "h", "d"])
        # no -1, which has no meaning where there are no tokens
        sizes = [*_sizes(ops, value)[:-2], ops.size(base, layout.index("(hd)"))]
        return ops.call(aten.reshape.default, value, sizes), [*rest, "(hd)"]
    if "(hd)" in layout and "d" in axes:
        return value, ["(hd)" if name == "d" else name for name in axes]
    if "(hd)" in axes and "(hd)" not in layout:
        at = axes.index("(hd)")
        sizes = _sizes(ops, value)
        data = [ops.size(base, layout.index(name)) for name in ("h", "d")]
        value = ops.call(aten.reshape.default, value, [*sizes[:at], *data, *sizes[at + 1 :]])
        return value, [*axes[:at], "h", "d", *axes[at + 1 :]]
    return value, axes


def _sizes(ops: _Ops, x: Any) -> list[Any]:
    return [ops.size(x, dim) for dim in range(ops.value(x).dim())]


def _tokens(
    ops: _Ops, value: Any, slots: Any, offsets: Any, axes: list[str], batched: bool
) -> tuple[Any, Any, Any, list[str]]:
    """Slots as a tensor, and a value whose token dims are those of the slots."""
    is_tensor = isinstance(ops.value(slots), Tensor)
    rank = ops.value(slots).dim() if is_tensor else 1
    if not batched and rank < 2 and ("b" in axes or "s" in axes):
        value, axes = _flat_tokens(ops, value, axes)
    if not is_tensor:
        along = "s" if batched else "t"
        length = ops.size(value, axes.index(along)) if along in axes else 1
        keywords = {"start": slots, "step": 1, "dtype": torch.int64, "device": ops.value(value).device}
        slots = ops.call(prims.iota.default, length, **keywords, requires_grad=False)
    elif rank == 0:
        slots = ops.call(aten.unsqueeze.default, slots, 0)
    for name in ("b", "s") if batched or rank == 2 else ("t",):
        if name not in axes:
            value = ops.call(aten.unsqueeze.default, value, 0)
            axes = [name, *axes]
    return slots, offsets, value, axes


def _flat_tokens(ops: _Ops, value: Any, axes: Sequence[str]) -> tuple[Any, list[str]]:
    """`value` with its batch and sequence as one dim of tokens, the first."""
    rest = [name for name in axes if name in _DATA]
    tokens = [name for name in ("b", "s") if name in axes]
    value = _arranged(ops, value, axes, [*tokens, *rest])
    if len(tokens) == 2:
        value = ops.call(aten.reshape.default, value, [-1, *_sizes(ops, value)[2:]])
    return value, ["t", *rest]


def _whole_batch(ops: _Ops, base: Any, value: Any, layout: Sequence[str], axes: Sequence[str]) -> bool:
    return equal(ops.value(value).shape[axes.index("b")], ops.value(base).shape[layout.index("b")])


def _index(
    ops: _Ops,
    base: Any,
    value: Any,
    slots: Any,
    offsets: Any,
    name: str,
    dim: int,
    layout: Sequence[str],
    axes: Sequence[str],
    rows: bool,
) -> Any:
    """What addresses one dim of the cache; None takes it whole."""
    device = ops.value(slots).device
    if name.isdigit():
        return ops.call(aten.full.default, [], int(name), dtype=torch.int64, device=device, pin_memory=False)
    if name == "b" and rows:
        keywords = {"start": 0, "step": 1, "dtype": torch.int64, "device": device}
        count = ops.size(value, axes.index("b"))
        return ops.call(aten.unsqueeze.default, ops.call(prims.iota.default, count, **keywords, requires_grad=False), 1)
    if name not in ("n", "p"):
        return None
    if "n" not in layout:
        return slots
    if offsets is not None:
        return slots if name == "n" else offsets
    # Rounding down keeps the wrap: slot -1 is the last place of block -1.
    places = ops.size(base, layout.index("p"))
    if name == "n":
        return ops.call(aten.div.Tensor_mode, slots, places, rounding_mode="floor")
    return ops.call(aten.remainder.Scalar, slots, places)


def _arranged(ops: _Ops, value: Any, axes: Sequence[str], order: Sequence[str]) -> Any:
    """`value` with its dims in `order`; dims that it lacks have size one."""
    for name in order:
        if name not in axes:
            value = ops.call(aten.unsqueeze.default, value, 0)
            axes = [name, *axes]
    permutation = [list(axes).index(name) for name in order]
    if permutation == list(range(len(permutation))):
        return value
    return ops.call(aten.permute.default, value, permutation)
