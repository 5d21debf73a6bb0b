"""Decides which candidates of a graph are derived: obstacles, the budget, and the patterns of the catalogue."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from rope_fusion.canonical.derivation import (
    DerivableAttributes,
    DerivingContext,
    cast_table,
    dequantize,
    derived,
    inputs_can_be_added,
)
from rope_fusion.canonical.static_values import FREE_VIEWS, written_placeholders
from rope_fusion.catalog import CatalogEntry, load_patterns
from rope_fusion.derived.inputs import InputInfo
from rope_fusion.derived.plan import Candidate, budget_bytes, within_budget
from rope_fusion.derived.store import DerivedStore
from rope_fusion.matcher import PatternRunner
from rope_fusion.options import Options
from rope_fusion.report import GraphReport

_PASSED_OVER = frozenset({torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


def deriving_patterns(options: Options, device: torch.device, report: GraphReport) -> list[PatternRunner]:
    """The enabled patterns that need inputs to be added and may run on this device, by descending priority."""
    context = DerivingContext(device, options.kernels, options.numerics)
    runners = []
    for entry in load_patterns(options.disable):
        if inputs_can_be_added in entry.pattern.requires:
            verdict = entry.verdict(context)
            report.gate(entry.name, verdict)
            if verdict is None:
                runners.append(_runner(entry))
    return runners


class Selector:
    """Chooses among the candidates of one graph.

    Args:
        graph: the graph that holds them.
        infos: what is known of each placeholder.
        options: the user's choices.
        store: what is derived already.
        is_inference: whether the graph was captured without a backward.
        stored_alone: whether torch will store the compiled function by itself, where no wrapper can be put around it.
    """

    def __init__(
        self,
        graph: Graph,
        infos: Mapping[Node, InputInfo],
        options: Options,
        store: DerivedStore,
        is_inference: bool,
        stored_alone: bool,
    ) -> None:
        self._graph, self._infos = graph, infos
        self._options, self._store = options, store
        self._is_inference, self._stored_alone = is_inference, stored_alone
        self._written = written_placeholders(graph)
        self._views: list[Node] = []  # of sources, for the canonical operators only

    def choose(
        self, candidates: Sequence[Candidate], runners: Sequence[PatternRunner], report: GraphReport
    ) -> list[Candidate]:
        """The candidates that a pattern takes. The graph is left as it was."""
        obstacles = self._obstacles(candidates)
        for index, candidate in enumerate(candidates):
            for occurrence in range(len(candidate.nodes)):
                self._canonicalise(candidate, index, occurrence, obstacles[index])
        for runner in runners:
            runner.apply(self._graph, report)
        taken = self._restore(candidates)
        for index, candidate in enumerate(candidates):
            reason = "" if index in taken else obstacles[index] or "no pattern takes it"
            report.derive(self.name(candidate), candidate.bytes, index in taken, reason)
        return [candidate for index, candidate in enumerate(candidates) if index in taken]

    def name(self, candidate: Candidate) -> str:
        """The weight or table that it comes from."""
        return self._infos[candidate.sources[0]].name

    def _canonicalise(self, candidate: Candidate, index: int, occurrence: int, obstacle: str) -> None:
        """Put the canonical operator in the place of one of the candidate's nodes, which stay in the graph."""
        node = candidate.nodes[occurrence]
        value = node.meta["val"]
        attributes = DerivableAttributes(
            candidate=index,
            occurrence=occurrence,
            shape=list(value.shape),
            stride=list(value.stride()),
            dtype=value.dtype,
            device=str(value.device),
            obstacle=obstacle,
        ).encode()
        with self._graph.inserting_before(node):
            main, *scales = map(self._matchable, candidate.sources[:2])
        scale = scales[0] if scales else None
        arguments = (main, attributes) if candidate.operator is cast_table else (main, scale, attributes)
        with self._graph.inserting_after(node):
            new = self._graph.call_function(candidate.operator, arguments)
        new.meta["val"] = value
        node.replace_all_uses_with(new)

    def _matchable(self, source: Node) -> Node:
        """The source itself, or its bytes: Inductor's matcher passes over nodes that read a dtype without code on some GPU."""
        value = source.meta["val"]
        if value.dtype not in _PASSED_OVER:
            return source
        new = self._graph.call_function(torch.ops.aten.view.dtype, (source, torch.uint8))
        with value.fake_mode:
            new.meta["val"] = value.view(torch.uint8)
        self._views.append(new)
        return new

    def _restore(self, candidates: Sequence[Candidate]) -> set[int]:
        """Put the original nodes back everywhere; the indices of the candidates that a pattern took."""
        taken: set[int] = set()
        for node in list(self._graph.nodes):
            if node.target in (dequantize, cast_table, derived):
                attributes = DerivableAttributes.decode(node.args[-1])
                node.replace_all_uses_with(candidates[attributes.candidate].nodes[attributes.occurrence])
                self._graph.erase_node(node)
                if node.target is derived:
                    taken.add(attributes.candidate)
        for node in self._views:
            self._graph.erase_node(node)
        self._views.clear()
        return taken

    def _obstacles(self, candidates: Sequence[Candidate]) -> list[str]:
        """Per candidate the sentence that speaks against it, empty where there is none."""
        obstacles = [self._obstacle(candidate) for candidate in candidates]
        open_ones = [index for index, obstacle in enumerate(obstacles) if not obstacle]
        allowed = [candidates[index] for index in open_ones]
        devices = {candidate.device for candidate in allowed}
        limits = {device: budget_bytes(self._options.derived_budget, device) for device in devices}
        free = {device: limit - self._store.live_bytes(device) for device, limit in limits.items()}
        fitting = within_budget(allowed, free, [candidate for candidate in allowed if self._exists(candidate)])
        for place, index in enumerate(open_ones):
            if place not in fitting:
                limit = limits[candidates[index].device]
                obstacles[index] = f"rope_fusion.derived_budget ({limit} bytes here) is used up"
        return obstacles

    def _obstacle(self, candidate: Candidate) -> str:
        name = self.name(candidate)
        if not self._is_inference:
            return (
                f"{name}: the graph is compiled for training; compile under torch.no_grad() or torch.inference_mode()"
            )
        if self._stored_alone:
            return (
                f"{name}: a cache that stores compiled functions without their wrappers is on (bundled or precompiled)"
            )
        for source in candidate.sources:
            info = self._infos[source]
            if source in self._written:
                return f"{info.name} is written by this graph"
            if info.is_inference and not self._options.assume_frozen:
                return (
                    f"{info.name} was made under inference_mode and carries no version counter; make it outside, or "
                    "set rope_fusion.assume_frozen"
                )
        if any(_is_returned(node) for node in candidate.nodes):
            return f"what is made of {name} is also returned, and whoever gets it may write into it"
        main = candidate.sources[0]
        if self._infos[main].requires_grad and main.meta["val"].dtype.itemsize > 1:
            return f"{name} requires grad: what is being trained is not derived; call requires_grad_(False)"
        return ""

    def _exists(self, candidate: Candidate) -> bool:
        """Whether another graph derived the very same value already."""
        references = [self._infos[source].tensor for source in candidate.sources]
        tensors = [reference() for reference in references if reference is not None]
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) < len(candidate.sources) or any(type(t) not in (Tensor, nn.Parameter) for t in present):
            return False
        return self._store.find(candidate.structure, present) is not None


def _is_returned(node: Node) -> bool:
    """Whether the graph returns the value or a view of it."""
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                return True
            if user.op == "call_function" and user.target in FREE_VIEWS:
                waiting.append(user)
    return False


@functools.lru_cache(maxsize=16)
def _runner(entry: CatalogEntry) -> PatternRunner:
    """Patterns are traced when first needed."""
    return PatternRunner(entry)
