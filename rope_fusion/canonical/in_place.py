"""In-place operators in a graph that is functional no longer: made functional, given back, and their order watched.

There the order of nodes is all that says whether a reader of a tensor comes before or after an operator that writes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from rope_fusion._torch import auto_functionalized
from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.graph_views import SPLITS, live_nodes, root_of, view_steps, viewed, written_back

aten = torch.ops.aten


def written_arguments(target: torch._ops.OpOverload) -> list[str]:
    """Names of the tensors that an operator writes, in the schema's order."""
    return [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def with_defaults(target: torch._ops.OpOverload, arguments: dict[str, Any]) -> dict[str, Any]:
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    return {**defaults, **arguments}


def is_raw_call(node: Node, targets: Collection[torch._ops.OpOverload]) -> bool:
    return node.op == "call_function" and node.target in targets and node.target._schema.is_mutable  # type: ignore[union-attr]


@dataclass
class Functionalised:
    """What `functionalise` did: which functional calls stand for which in-place ones, and why others were left alone."""

    functional: dict[Node, Node] = field(default_factory=dict)  # in-place call -> its functional one
    refusals: list[str] = field(default_factory=list)
    _roots: dict[Node, set[Node]] = field(default_factory=dict)  # in-place call -> tensors that it writes
    _values: list[tuple[Node, Node, Node]] = field(default_factory=list)  # call, value after it, what held it in place
    _copies: dict[Node, Node] = field(default_factory=dict)  # tensor -> the copy back into it

    def give_back(self, graph: Graph, stays: Callable[[Node], bool]) -> None:
        """Let calls that were not fused work in place again, unless a tensor of theirs is also written by one that was."""
        left = {call for call, functional in self.functional.items() if stays(functional)}
        while True:
            fused = {root for call in self.functional if call not in left for root in self._roots[call]}
            shared = {call for call in left if self._roots[call] & fused}
            if not shared:
                break
            left -= shared
        for call, value, held in reversed(self._values):
            if call in left:
                value.replace_all_uses_with(held)
        for call in left:
            for root in self._roots[call]:
                if (copy := self._copies.pop(root, None)) is not None:
                    graph.erase_node(copy)
            del self.functional[call]


class OrderOfEffects:
    """Which nodes stand before and after the in-place calls of a graph that touch the same tensors.

    No edge of the graph expresses that order, so a pass that moves nodes has to compare afterwards.
    """

    def __init__(self, graph: Graph) -> None:
        self._place = {node: at for at, node in enumerate(graph.nodes)}
        self._calls = [node for node in graph.nodes if _works_in_place(node)]

    def broken(self, graph: Graph, replaced: Container[Node] = ()) -> str | None:
        """A sentence if some node now reads a tensor on the other side of an in-place call, else None."""
        calls = [call for call in self._calls if call not in replaced]
        if not calls:
            return None
        alive = {node: at for at, node in enumerate(graph.nodes)}
        live = live_nodes(graph, replaced)
        for call in calls:
            roots = {root_of(node) for node in _written(call)}
            for node in live:
                if node is call or viewed(node) is not None or node.target in SPLITS:
                    continue
                if not any(root_of(source) in roots for source in node.all_input_nodes):
                    continue
                known = node in self._place
                if not known or (self._place[node] < self._place[call]) != (alive[node] < alive[call]):
                    return f"{node.name} reads what {call.name} writes in place, and their order could not be kept"
        return None


def functionalise(graph: Graph, emitter: Emitter, targets: Collection[torch._ops.OpOverload]) -> Functionalised:
    """Give each in-place call of `targets` a v1 call that computes the same, and make later readers read its values.

    The in-place nodes stay, for the caller to erase (or the transaction to restore). A tensor that some other in-place operator
    writes too is left alone, because only the order of nodes says who reads what.
    """
    return _Functionaliser(graph, emitter, targets).run()


class _Functionaliser:
    def __init__(self, graph: Graph, emitter: Emitter, targets: Collection[torch._ops.OpOverload]) -> None:
        self._graph = graph
        self._emit = emitter
        self._nodes = list(graph.nodes)
        self._calls = [node for node in self._nodes if is_raw_call(node, targets)]
        self._state: dict[Node, Node] = {}  # root -> its value now
        self._maker: dict[Node, Node] = {}  # value of a root -> the call that made it
        self._seen: dict[tuple[Node, Node], Node] = {}
        self._result = Functionalised()

    def run(self) -> Functionalised:
        if not self._calls:
            return self._result
        calls = self._safe_calls()
        roots = {root_of(node) for call in calls for node in _written(call)}
        for node in self._nodes:
            if node in calls:
                self._replace(node)
            elif viewed(node) is None and node.target not in SPLITS:
                self._redirect(node, roots)
        output = next(node for node in self._nodes if node.op == "output")
        for root in roots:
            if root.op in ("placeholder", "get_attr") and self._state.get(root, root) is not root:
                with self._graph.inserting_before(output):
                    copy = self._graph.call_function(aten.copy_.default, (root, self._state[root]))
                    copy.meta["val"] = root.meta["val"]
                    self._result._copies[root] = copy
        return self._result

    def _safe_calls(self) -> list[Node]:
        """The calls none of whose written tensors is written by anything else in place."""
        shared = {}
        for node in self._nodes:
            schema = getattr(node.target, "_schema", None)
            if node.op == "call_function" and schema is not None and schema.is_mutable and node not in self._calls:
                for written in _written(node):
                    shared[root_of(written)] = node
        calls = list(self._calls)
        while True:
            refused = [call for call in calls if any(root_of(w) in shared for w in _written(call))]
            if not refused:
                return calls
            for call in refused:
                tensors = [root_of(w) for w in _written(call)]
                other = next(shared[root] for root in tensors if root in shared)
                self._result.refusals.append(f"{call.name} works in place on a tensor that {other.name} writes too")
                calls.remove(call)
                shared.update(dict.fromkeys(tensors, call))

    def _replace(self, call: Node) -> None:
        target: Any = call.target
        arguments = with_defaults(target, _bind(call))
        current = torch.fx.map_arg(arguments, self._current)
        functional = self._emit.call(auto_functionalized, target, **current)
        self._result.functional[call] = functional
        self._result._roots[call] = {root_of(node) for node in _written(call)}
        returned = len(target._schema.returns)
        for index, name in enumerate(written_arguments(target)):
            if isinstance(arguments.get(name), Node):
                value = self._emit.call(operator.getitem, functional, max(returned, 1) + index)
                root = root_of(arguments[name])
                self._state[root] = written_back(
                    self._emit, view_steps(root, arguments[name]), self._current(root), value
                )
                self._maker[self._state[root]] = call
                self._result._values.append((call, self._state[root], root))
        if returned == 1:
            result = self._emit.call(operator.getitem, functional, 0)
            call.replace_all_uses_with(result)
            self._result._values.append((call, result, call))

    def _redirect(self, node: Node, roots: set[Node]) -> None:
        """Make a reader of the written tensors read their values of now."""
        if node.op == "placeholder" or not any(root_of(source) in roots for source in node.all_input_nodes):
            return
        node.args = torch.fx.map_arg(node.args, self._current)
        node.kwargs = torch.fx.map_arg(node.kwargs, self._current)

    def _current(self, node: Node) -> Node:
        root = root_of(node)
        state = self._state.get(root, root)
        if state is root:
            return node
        if node is root:
            return state
        if (node, state) not in self._seen:
            self._seen[node, state] = self._emit.replay(view_steps(root, node), state)
            self._result._values.append((self._maker[state], self._seen[node, state], node))
        return self._seen[node, state]


def _works_in_place(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return (
        node.op == "call_function"
        and schema is not None
        and schema.is_mutable
        and node.target is not aten.copy_.default  # the copy back into an input, which comes last
    )


def _written(node: Node) -> list[Node]:
    arguments = _bind(node)
    names = written_arguments(node.target)  # type: ignore[arg-type]
    return [arguments[name] for name in names if isinstance(arguments.get(name), Node)]


def _bind(node: Node) -> dict[str, Any]:
    """Arguments of a call of an operator by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
