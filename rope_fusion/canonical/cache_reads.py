"""Who reads a cache as it was before a write, and whether what is written depends on that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from rope_fusion.canonical.cache_views import (
    PIECES,
    CacheView,
    Index,
    certainly_disjoint,
    step_into,
    view_source,
    whole,
)

aten = torch.ops.aten

_SHAPE_ONLY = frozenset(
    {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}
)


@dataclass(frozen=True)
class VersionedWrite:
    """A write into `base`; the writes of one base are listed in the order in which they follow each other."""

    base: Node
    node: Node
    path: Sequence[Node]  # from `node` to the whole cache after the write
    view: CacheView  # the part that `node` writes into


@dataclass(frozen=True)
class _Holding:
    """A node that holds (part of) a cache after `version` writes."""

    base: Node
    version: int
    selected: Mapping[int, Index]
    view: CacheView | None  # None where the part cannot be described; `selected` still bounds it


class OldReads:
    """Follows every version of every written cache through the graph, once.

    A read conflicts with each later write of the same cache, unless both select different positions of one dim (K and V
    of a joint buffer, say).
    """

    def __init__(self, graph: Graph, writes: Sequence[VersionedWrite]) -> None:
        self._bits = {write.node: 1 << at for at, write in enumerate(writes)}
        self._by_base: dict[Node, list[VersionedWrite]] = {}
        self._depends: dict[Node, int] = {}  # bit mask of the writes whose old values a node is computed from
        self._read = 0
        holdings: dict[Node, _Holding] = {}
        for write in writes:
            versions = self._by_base.setdefault(write.base, [])
            versions.append(write)
            holdings[write.base] = _Holding(write.base, 0, {}, whole(write.base))
            for node in write.path:
                selected = write.view.selected if node is write.node else {}
                view = write.view if node is write.node else None
                holdings[node] = _Holding(write.base, len(versions), selected, view)
            holdings[write.path[-1]] = _Holding(write.base, len(versions), {}, whole(write.path[-1]))
        own = {node for write in writes for node in write.path}
        for node in graph.nodes:
            self._visit(node, holdings, own)

    def feed(self, write: Node) -> bool:
        """Whether what a write stores, or where, depends on what the cache held before in the same place."""
        inputs = [source for source in write.all_input_nodes if source is not write.args[0]]
        return any(self._depends[source] & self._bits[write] for source in inputs)

    def beside(self, write: Node) -> bool:
        """Whether anything reads what the cache held before in the same place."""
        return bool(self._read & self._bits[write])

    def _visit(self, node: Node, holdings: dict[Node, _Holding], own: set[Node]) -> None:
        mask = 0
        for source in node.all_input_nodes:
            mask |= self._depends[source]
        self._depends[node] = mask
        if node in own:
            return
        viewed = view_source(node)
        if viewed is not None and viewed in holdings:
            holding = holdings[viewed]
            view = step_into(holding.view, node) if holding.view is not None else None
            selected = view.selected if view is not None else holding.selected
            holdings[node] = _Holding(holding.base, holding.version, selected, view)
            return
        if node.target in _SHAPE_ONLY or node.target in PIECES:
            return
        for source in self._reads_of(node):
            if source in holdings:
                mask |= self._conflicts(holdings[source])
        self._depends[node] = mask

    @staticmethod
    def _reads_of(node: Node) -> list[Node]:
        """The inputs whose values a node uses; a copy uses its destination's shape alone."""
        if node.target in (aten.copy.default, aten.copy_.default):
            return [source for source in node.args[1:] if isinstance(source, Node)]
        return node.all_input_nodes

    def _conflicts(self, holding: _Holding) -> int:
        mask = 0
        for write in self._by_base[holding.base][holding.version :]:
            if not certainly_disjoint(holding.selected, write.view.selected):
                mask |= self._bits[write.node]
        self._read |= mask
        return mask
