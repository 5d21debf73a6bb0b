"""Runs one pattern over a graph of canonical operators, and says why a match was refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.experimental.symbolic_shapes import statically_known_true

from rope_fusion._torch import (
    CallFunction,
    FakeTensorMode,
    KeywordArg,
    Match,
    MultiOutputPattern,
    PatternExpr,
    PatternMatcherPass,
    fwd_only,
    register_replacement,
    stable_topological_sort,
)
from rope_fusion.canonical.operators import CANONICAL
from rope_fusion.catalog import CatalogEntry
from rope_fusion.report import GraphReport


class PatternRunner:
    """One `PatternMatcherPass` for one pattern.

    The search function is traced once, with strings and tensors as wildcards: a canonical operator's attributes are one
    string, and what they may be is for `refuse` to say, so no constant is left that a second trace would have to check.
    """

    def __init__(self, entry: CatalogEntry) -> None:
        self.entry = entry
        self._names = list(inspect.signature(entry.pattern.search).parameters)
        self._report: GraphReport | None = None
        self._graph: Graph | None = None
        self._max_tokens: int | None = None
        self._replaced_inputs: list[Node] = []  # of the last accepted match
        self._pass = PatternMatcherPass(f"rope_fusion_{entry.name}")
        with FakeTensorMode():
            example = list(entry.pattern.example_inputs())
            expression = self._expression(example)
            register_replacement(
                entry.pattern.search,
                entry.pattern.replacement,
                example,
                fwd_only,
                self._pass,
                extra_check=self._accept,
                search_fn_pattern=expression,
            )

    def _expression(self, example: Sequence[Any]) -> PatternExpr:
        """The search graph as a pattern in which every argument of `search` is a wildcard."""
        module = fwd_only(self.entry.pattern.search, example, run_functional_passes=False)
        self.targets = frozenset(node.target for node in module.graph.nodes if node.op == "call_function")
        self._needed = self.targets & CANONICAL
        return _to_expression(module, self._names, example)

    def apply(self, graph: Graph, report: GraphReport, max_tokens: int | None = None) -> int:
        """Replace every accepted match and count them; those that may have more than `max_tokens` are refused."""
        if not self._needed <= {node.target for node in graph.nodes}:
            return 0  # Inductor's matcher would look at each getitem and each view of a large graph to find so
        self._graph, self._report, self._max_tokens = graph, report, max_tokens
        self._replaced_inputs = []
        try:
            count = self._pass.apply(graph)
        finally:
            self._graph = self._report = self._max_tokens = None
            self._replaced_inputs = []
        if count:
            stable_topological_sort(graph)
        for _ in range(count):
            report.hit(self.entry.name)
        return count

    def _accept(self, match: Match) -> bool:
        assert self._report is not None
        sentence = self._refusal(match)
        self._report.candidate(self.entry.name)
        if sentence is not None:
            self._report.refusal(self.entry.name, sentence)
        return sentence is None

    def _refusal(self, match: Match) -> str | None:
        self._keep_sorted()
        outputs = [node for node in match.output_nodes() if node is not None]
        inputs: list[Node] = []
        map_arg(list(match.kwargs.values()), inputs.append)
        if depends(inputs, outputs):
            return "one of its inputs depends on one of its outputs"
        values = map_arg(dict(match.kwargs), lambda node: node.meta["val"])
        sentence = _too_many_tokens(values, self._max_tokens) or self.entry.pattern.refuse(**values)
        if sentence is None:
            self._replaced_inputs = inputs
        return sentence

    def _keep_sorted(self) -> None:
        """A replacement is placed before the first of its outputs, which may be before the last of its inputs."""
        for user in {user for node in self._replaced_inputs for user in node.users}:
            hoist([source for source in user.all_input_nodes if source > user], user)
        self._replaced_inputs = []


def hoist(nodes: Sequence[Node], before: Node) -> None:
    """Move `nodes`, and what they are computed from, in front of `before`, on which none of them depends."""
    behind: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in behind and node > before:
            behind.add(node)
            stack.extend(node.all_input_nodes)
    for node in sorted(behind):
        before.prepend(node)


def _too_many_tokens(values: Mapping[str, Any], most: int | None) -> str | None:
    """Whether an activation [batch, sequence, heads, dim] may hold more than `most` tokens."""
    if most is None:
        return None
    for name in ("q", "k", "x"):
        value = values.get(name)
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            tokens = value.shape[0] * value.shape[1]
            if not statically_known_true(tokens <= most):
                have = f"{tokens} tokens" if isinstance(tokens, int) else "a dynamic number of tokens that may be more"
                return f"rope_fusion.max_tokens is {most}, and it has {have}"
    return None


def depends(inputs: Sequence[Node], outputs: Sequence[Node]) -> bool:
    """Whether some input is computed from some output; walks only what lies between them in the (sorted) graph."""
    if not inputs or not outputs:
        return False
    wanted, bound = set(inputs), max(inputs)
    stack = [user for node in outputs for user in node.users]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in wanted:
            return True
        if node in seen or node > bound:
            continue
        seen.add(node)
        stack.extend(node.users)
    return False


def _to_expression(module: GraphModule, names: Sequence[str], example: Sequence[Any]) -> PatternExpr:
    """The traced graph as a pattern; every argument, text included, becomes a wildcard of its name."""
    texts = {value: name for name, value in zip(names, example, strict=True) if isinstance(value, str)}
    if len(texts) != sum(isinstance(value, str) for value in example):
        raise ValueError(
            "the example texts of a pattern must differ from each other, because they stand for its arguments"
        )
    made: dict[Node, Any] = {}
    placeholders = iter(names)

    def convert(value: Any) -> Any:
        if isinstance(value, Node):
            return made[value]
        if isinstance(value, (list, tuple)):
            return type(value)(convert(item) for item in value)
        if isinstance(value, str) and value in texts:
            return made.setdefault(texts[value], KeywordArg(texts[value]))  # type: ignore[call-overload]
        return value

    for node in module.graph.nodes:
        if node.op == "placeholder":
            made[node] = KeywordArg(next(placeholders))
        elif node.op == "call_function":
            arguments = [convert(argument) for argument in node.args]
            keywords = {key: convert(value) for key, value in node.kwargs.items()}
            made[node] = CallFunction(node.target, *arguments, _users=len(node.users), **keywords)
        elif node.op == "output":
            outputs = node.args[0]
            if isinstance(outputs, (list, tuple)):
                return MultiOutputPattern([made[output] for output in outputs])
            return made[outputs]
    raise AssertionError("a traced function has an output")
