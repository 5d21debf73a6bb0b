"""Which values of a graph to derive once, and how to take their computation out of the graph."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from rope_fusion.canonical.dequant import find_dequantisations, find_table_casts, structure_of
from rope_fusion.canonical.derivation import cast_table, dequantize
from rope_fusion.canonical.static_values import FREE_VIEWS, MOVEMENTS, StaticValues, tensor_of
from rope_fusion.derived.lifting import LiftedCast, lift_casts
from rope_fusion.derived.packing import Packing, append_packing, packing_of, read_packed, stand_in


@dataclass(frozen=True)
class Candidate:
    """A value that could be computed once.

    Attributes:
        operator: the canonical operator that stands for it, `dequantize` or `cast_table`.
        nodes: the nodes of the graph that compute this same value, one per occurrence.
        sources: the placeholders it is computed from; the first is the weight or table itself.
        structure: text that equal computations share.
        saving: bytes of memory traffic that each call is spared.
        bytes: memory that keeping it takes.
        packing: how its readers take it in oneDNN's own arrangement; None where it is kept as the program has it.
    """

    operator: Callable[..., Any]
    nodes: tuple[Node, ...]
    sources: tuple[Node, ...]
    structure: str
    saving: int
    bytes: int
    packing: Packing | None = None

    @property
    def device(self) -> torch.device:
        """Where the value lies."""
        return self.nodes[0].meta["val"].device


@dataclass(frozen=True)
class Finding:
    """The candidates of a graph, sentences about weights that came close, and what was rearranged to get there."""

    candidates: tuple[Candidate, ...]
    near_misses: tuple[str, ...]
    lifted: tuple[LiftedCast, ...]


def find_candidates(graph: Graph, static_placeholders: Iterable[Node]) -> Finding:
    """Everything in the graph that is a known derivation of static placeholders, in graph order.

    Casts of varying parts of a table are lifted: `lifting.settle` has the last word on them.
    """
    placeholders = list(static_placeholders)
    lifted = lift_casts(graph, placeholders)
    static = StaticValues.of(graph, placeholders)
    found = find_dequantisations(graph, static)
    anchors = [(dequantize, item.out, _placeholder_of(item.codes, static)) for item in found.dequantisations]
    anchors += [(cast_table, item.out, item.table) for item in find_table_casts(graph, static)]
    groups: dict[tuple[Callable[..., Any], str, tuple[Node, ...]], list[Node]] = {}
    taken: set[Node] = set()
    for operator, anchor, main in anchors:
        for node in frontier_of(anchor, static):
            if node in taken:
                continue
            taken.add(node)
            nodes = static.slice(node)
            others = [item for item in nodes if item.op == "placeholder" and item is not main]
            structure = hashlib.sha256(structure_of(nodes, node).encode()).hexdigest()
            groups.setdefault((operator, structure, (main, *others)), []).append(node)
    candidates = tuple(
        _candidate(operator, nodes, sources, structure) for (operator, structure, sources), nodes in groups.items()
    )
    return Finding(candidates, tuple(found.refusals), tuple(lifted))


def frontier_of(anchor: Node, static: StaticValues) -> list[Node]:
    """Where the values that only move `anchor`'s elements leave the static part, less the views that cost nothing."""
    region, waiting = {anchor}, [anchor]
    while waiting:
        for user in waiting.pop().users:
            if user not in region and user in static.derived and user.target in MOVEMENTS:
                region.add(user)
                waiting.append(user)
    ends: set[Node] = set()
    for node in region:
        if all(user in region for user in node.users):
            continue
        while node is not anchor and node.target in FREE_VIEWS:
            node = node.all_input_nodes[0]
        ends.add(node)
    return sorted(ends)


def _candidate(
    operator: Callable[..., Any], nodes: Sequence[Node], sources: tuple[Node, ...], structure: str
) -> Candidate:
    size = _bytes(nodes[0])
    traffic = size + sum(_bytes(source) for source in sources)
    packing = packing_of(nodes)
    if packing is not None:
        structure = f"packed {structure}"
    return Candidate(operator, tuple(nodes), sources, structure, traffic * len(nodes), size, packing)


def _placeholder_of(codes: Node, static: StaticValues) -> Node:
    return max(static.sources(codes), key=_bytes)


def _bytes(node: Node) -> int:
    value = tensor_of(node)
    assert value is not None
    return value.numel() * value.dtype.itemsize


def within_budget(
    candidates: Sequence[Candidate], free: Mapping[torch.device, int], already_kept: Iterable[Candidate] = ()
) -> set[int]:
    """Indices of the candidates to take: the biggest saving per byte first, as far as each device's free bytes reach.

    Those in `already_kept` exist (another graph derived them) and take no further memory.
    """
    kept = {id(item) for item in already_kept}
    left = dict(free)
    order = sorted(range(len(candidates)), key=lambda i: -candidates[i].saving / max(candidates[i].bytes, 1))
    taken = set()
    for index in order:
        item = candidates[index]
        if id(item) in kept:
            taken.add(index)
        elif item.bytes <= left[item.device]:
            left[item.device] -= item.bytes
            taken.add(index)
    return taken


def budget_bytes(budget: int | float, device: torch.device) -> int:
    """The option `derived_budget` in bytes: a float is a fraction of the device's memory (on the CPU, of the RAM)."""
    return budget if isinstance(budget, int) else int(budget * memory_of(device))


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_of(graph: Graph) -> torch.device:
    """The device that the graph computes on: the first accelerator found, else the CPU."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")


def computation_of(candidate: Candidate) -> GraphModule:
    """The candidate's computation as a function of its sources, in their order."""
    needed: set[Node] = set()
    waiting = [candidate.nodes[0]]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    graph = Graph()
    copies = {source: graph.placeholder(source.name) for source in candidate.sources}
    for node in sorted(needed):
        if node not in copies:
            copies[node] = graph.node_copy(node, lambda item: copies[item])
    result = copies[candidate.nodes[0]]
    graph.output(append_packing(graph, result, candidate.packing) if candidate.packing else result)
    for node in graph.nodes:
        node.meta.clear()  # fake tensors of the compilation
    return GraphModule({}, graph)


def take_out(graph: Graph, candidates: Sequence[Candidate]) -> list[torch.Tensor]:
    """Replace the candidates by new placeholders after the last one; the fake tensors that stand for them.

    The nodes that computed them stay, unread, and so do the products that read a packed one.
    """
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    values = []
    for index, candidate in enumerate(candidates):
        old, packing = candidate.nodes[0].meta["val"], candidate.packing
        with old.fake_mode:
            if packing is not None:
                value = stand_in(old, packing)
            else:
                value = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device)
        with graph.inserting_after(last):
            last = graph.placeholder(f"derived_{index}")
        last.meta["val"] = value
        values.append(value)
        if packing is not None:
            read_packed(graph, packing, last)
            continue
        if "tensor_meta" in candidate.nodes[0].meta:
            last.meta["tensor_meta"] = candidate.nodes[0].meta["tensor_meta"]
        for node in candidate.nodes:
            node.replace_all_uses_with(last)
    return values
