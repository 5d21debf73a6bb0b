"""Changes to an FX graph that can be taken back exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten


class GraphTransaction:
    """Remembers a graph's nodes, their order and arguments; `roll_back` restores all three.

    The nodes that the graph had at the start must not be erased before `roll_back` or the end of the transaction.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._saved: list[tuple[Node, tuple[Any, ...], dict[str, Any]]] = [
            (node, node.args, dict(node.kwargs)) for node in graph.nodes
        ]

    @property
    def original_nodes(self) -> list[Node]:
        return [node for node, _, _ in self._saved]

    def rewired(self) -> Iterator[tuple[Node, Node, Node]]:
        """Where an original node reads another value now: (reader, what it read, what it reads)."""
        alive = set(self._graph.nodes)
        for node, args, kwargs in self._saved:
            if node not in alive:
                continue
            before, _ = tree_flatten((args, kwargs))
            after, _ = tree_flatten((node.args, node.kwargs))
            for old, new in zip(before, after, strict=True):
                if isinstance(old, Node) and isinstance(new, Node) and old is not new:
                    yield node, old, new

    def roll_back(self) -> None:
        """Put the graph back, node for node."""
        originals = {node for node, _, _ in self._saved}
        for node, args, kwargs in self._saved:
            if node.args != args:
                node.args = args
            if node.kwargs != kwargs:
                node.kwargs = kwargs
        added = [node for node in self._graph.nodes if node not in originals]
        for node in added:  # in any order: none of them has an original user left
            node.args, node.kwargs = (), {}
        for node in added:
            self._graph.erase_node(node)
        previous: Node | None = None
        for node, _, _ in self._saved:
            if previous is not None and previous.next is not node:
                previous.append(node)
            previous = node
