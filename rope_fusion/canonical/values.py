"""Value numbering: which nodes of a functional graph compute the same value.

No common-subexpression elimination has run on inference graphs when the pass sees them, so q and k often use
two copies of one cos/sin chain. Numbering finds that without changing the graph.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node


def is_pure(node: Node) -> bool:
    """Whether two calls of this node's target with equal arguments give equal values."""
    if node.op != "call_function":
        return False
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


class ValueNumbering:
    """Structural equality of nodes, computed once for a graph in O(nodes)."""

    def __init__(self, graph: Graph) -> None:
        self._number: dict[Node, int] = {}
        seen: dict[Any, int] = {}
        for node in graph.nodes:
            key: Any
            if is_pure(node):
                key = (node.target, self._freeze(node.args), self._freeze(node.kwargs))
            elif node.op == "get_attr":
                key = ("get_attr", node.target)
            else:
                key = node
            self._number[node] = seen.setdefault(key, len(seen))

    def _freeze(self, value: Any) -> Any:
        if isinstance(value, Node):
            return ("node", self._number[value])
        if isinstance(value, (list, tuple)):
            return tuple(self._freeze(item) for item in value)
        if isinstance(value, dict):
            return tuple(sorted((key, self._freeze(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return ("slice", self._freeze(value.start), self._freeze(value.stop), self._freeze(value.step))
        # 1, 1.0 and True are equal in Python but not as operator arguments
        return (type(value), str(value))

    def same(self, first: Node, second: Node) -> bool:
        """Whether both nodes certainly hold the same value."""
        return first is second or self.number(first) == self.number(second)

    def number(self, node: Node) -> int:
        """The value number; a node added after the numbering gets one of its own."""
        return self._number.setdefault(node, len(self._number) + (1 << 40))
