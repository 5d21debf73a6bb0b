"""Casts of a part of a table whose bounds are known only in the call: ``table[:length].to(dtype)``.

The part cannot be computed once, but the whole table can be, and the part taken from it. Lifting turns the one into the
other; where the whole is not derived after all, the program's own nodes are put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node, map_arg

from rope_fusion.canonical.dequant import readers
from rope_fusion.canonical.static_values import CASTS, aten, is_opaque, tensor_of

_PARTS = frozenset(
    {
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.transpose.int,
        aten.unsqueeze.default,
    }
)


@dataclass(frozen=True)
class LiftedCast:
    """`part` takes from `whole`, the cast of a whole table, what `original` cast of a part of it."""

    original: Node
    whole: Node
    part: Node


def lift_casts(graph: Graph, tables: Iterable[Node]) -> list[LiftedCast]:
    """Lift every cast of a varying part of one of the `tables` (placeholders) that an opaque operator reads."""
    known = set(tables)
    lifted = []
    for node in list(graph.nodes):
        path = _path(node, known)
        if not path or not any(is_opaque(user) for user in readers(node)):
            continue
        table = path[0].args[0]
        assert isinstance(table, Node)
        with graph.inserting_before(path[0]):
            whole = _call(graph, node, table)
        with graph.inserting_before(node):
            part = whole
            for step in path:
                part = _call(graph, step, part)
        # The reader may rely on the strides that it was traced with.
        if str(part.meta["val"].stride()) != str(node.meta["val"].stride()):
            continue
        node.replace_all_uses_with(part)
        lifted.append(LiftedCast(node, whole, part))
    return lifted


def _path(node: Node, tables: set[Node]) -> list[Node]:
    """The views between a table and a cast of a part whose sizes are not all known numbers, from the table on."""
    if node.op != "call_function" or node.target not in CASTS or tensor_of(node) is not None:
        return []
    path: list[Node] = []
    source = node.args[0]
    while isinstance(source, Node) and source.op == "call_function" and source.target in _PARTS:
        path.append(source)
        source = source.args[0]
    if source not in tables:
        return []
    value = source.meta["val"]  # type: ignore[union-attr]
    return path[::-1] if value.dtype.is_floating_point and value.dtype.itemsize > 1 else []


def _call(graph: Graph, model: Node, source: Node) -> Node:
    """A node that does to `source` what `model` does to its first argument."""
    node = graph.call_function(model.target, (source, *model.args[1:]), dict(model.kwargs))  # type: ignore[arg-type]
    arguments, keywords = map_arg((node.args, dict(node.kwargs)), lambda item: item.meta["val"])
    with model.meta["val"].fake_mode, torch.no_grad():
        node.meta["val"] = node.target(*arguments, **keywords)  # type: ignore[operator]
    return node


def settle(graph: Graph, lifted: Sequence[LiftedCast], derived: set[Node]) -> None:
    """Put the program's own cast back where the whole table is not derived, and erase what nobody reads then."""
    for item in lifted:
        if item.whole not in derived:
            item.part.replace_all_uses_with(item.original)
    for item in lifted:
        for node in (item.original, item.part):
            erase_unread(graph, node)


def erase_unread(graph: Graph, node: Node) -> None:
    """Erase a node, and then what it alone read, unless somebody reads it."""
    waiting, erased = [node], set()
    while waiting:
        item = waiting.pop()
        if item.op == "placeholder" or item.users or item in erased or item._erased:
            continue
        waiting.extend(item.all_input_nodes)
        erased.add(item)
        graph.erase_node(item)
