"""Inserts nodes with their fake values, each right after the last of its inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from rope_fusion._torch import FakeTensorMode
from rope_fusion.canonical.layout import CANONICAL_ROLES, is_one

aten = torch.ops.aten


class Emitter:
    """Adds call_function nodes to a graph and keeps `meta["val"]` true."""

    def __init__(self, graph: Graph, fake_mode: FakeTensorMode) -> None:
        self._graph = graph
        self._fake_mode = fake_mode

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A node that calls `target`, placed after its latest input."""
        inputs: list[Node] = []
        map_arg((args, kwargs), inputs.append)
        latest = max(inputs) if inputs else None
        if latest is None or latest.op == "placeholder":
            first = next(node for node in self._graph.nodes if node.op != "placeholder")
            context = self._graph.inserting_before(first)
        else:
            context = self._graph.inserting_after(latest)
        with context:
            node = self._graph.call_function(target, args, kwargs)
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._fake_mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def to_canonical(self, node: Node, roles: str) -> Node:
        """A view of `node`, whose dims have the given roles, as [batch, sequence, heads, dim]."""
        present = [role for role in CANONICAL_ROLES if role in roles]
        order = [roles.index(role) for role in present]
        if order != list(range(len(order))):
            node = self.call(aten.permute.default, node, order)
        for at, role in enumerate(CANONICAL_ROLES):
            if role not in roles:
                node = self.call(aten.unsqueeze.default, node, at)
        return node

    def from_canonical(self, node: Node, roles: str) -> Node:
        """The inverse of `to_canonical`."""
        for at in reversed(range(len(CANONICAL_ROLES))):
            if CANONICAL_ROLES[at] not in roles:
                node = self.call(aten.squeeze.dim, node, at)
        present = [role for role in CANONICAL_ROLES if role in roles]
        order = [present.index(role) for role in roles]
        if order != list(range(len(order))):
            node = self.call(aten.permute.default, node, order)
        return node

    def replay(self, path: Iterable[Node], start: Node) -> Node:
        """`start` through copies of the single-input nodes of `path`; a piece of a tensor stands for both its steps."""
        node = start
        for step in path:
            if step.target is operator.getitem:
                pieces = step.args[0]
                assert isinstance(pieces, Node)
                node = self.call(pieces.target, node, *pieces.args[1:], **pieces.kwargs)  # type: ignore[arg-type]
            node = self.call(step.target, node, *step.args[1:], **step.kwargs)  # type: ignore[arg-type]
        return node

    def columns(self, node: Node, offset: int, width: int) -> Node:
        """Columns offset : offset + width of the last dim."""
        value = node.meta["val"]
        if offset == 0 and value.shape[-1] == width:
            return node
        return self.call(aten.slice.Tensor, node, value.dim() - 1, offset, offset + width)

    def squeeze_heads(self, node: Node, roles: str) -> tuple[Node, str]:
        """`node` without its (size-1) heads dim, and its roles then."""
        if "h" not in roles:
            return node, roles
        at = roles.index("h")
        assert is_one(node.meta["val"].shape[at])
        return self.call(aten.squeeze.dim, node, at), roles.replace("h", "")
