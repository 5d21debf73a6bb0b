"""What was fused, what was refused and why: one ``GraphReport`` per compiled graph, gathered in a ``Report``.

The pass fills a ``GraphReport`` and hands it to ``publish``, which puts it, as JSON, among Inductor's counters.
Inductor stores what it counted with each entry of its caches and counts it again when an entry is used, so a graph that
comes from a warm cache, where no pass runs, is reported like one that was just compiled. The backend and ``record``
take the published reports out again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

COUNTER_PREFIX = "rope_fusion:report:"
WIDTH = 100


class RopeFusionWarning(UserWarning):
    """rope_fusion left something unfused that it was expected to fuse."""


@dataclass
class PatternReport:
    """What one pattern did in one graph."""

    gate: str | None = None  # None: open; otherwise the sentence that says why the pattern stays out
    candidates: int = 0
    hits: int = 0
    refusals: dict[str, int] = field(default_factory=dict)  # sentence → how often


@dataclass
class DerivedTensor:
    """A tensor computed once from parameters and buffers instead of in every call, or one left in the graph."""

    name: str
    bytes: int
    kept: bool = True
    reason: str = ""


@dataclass
class GraphReport:
    """What the pass found and did in one graph. The pass writes it; afterwards it is only read."""

    name: str = ""
    rotations: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    pass_ms: float = 0.0  # of the compilation that ran the pass, also when the graph comes from a cache
    patterns: dict[str, PatternReport] = field(default_factory=dict)
    near_misses: dict[str, int] = field(default_factory=dict)  # sentence → how often
    failures: list[str] = field(default_factory=list)  # exceptions after which the graph was compiled unfused
    derived: list[DerivedTensor] = field(default_factory=list)
    dump: str | None = None  # the folder that holds the graph before and after

    def gate(self, pattern: str, verdict: str | None) -> None:
        """Note that ``pattern`` may run here (``verdict`` None) or why not."""
        self._pattern(pattern).gate = verdict

    def candidate(self, pattern: str) -> None:
        """Note a place where the structure of ``pattern`` was found, before its refusals were asked."""
        self._pattern(pattern).candidates += 1

    def hit(self, pattern: str) -> None:
        """Note a place that ``pattern`` replaced."""
        self._pattern(pattern).hits += 1

    def refusal(self, pattern: str, sentence: str) -> None:
        """Note why ``pattern`` did not replace a candidate."""
        refusals = self._pattern(pattern).refusals
        refusals[sentence] = refusals.get(sentence, 0) + 1

    def near_miss(self, sentence: str) -> None:
        """Note something recognised that no pattern could use."""
        self.near_misses[sentence] = self.near_misses.get(sentence, 0) + 1

    def derive(self, name: str, size: int, kept: bool = True, reason: str = "") -> None:
        """Note a tensor of ``size`` bytes that is computed once, or (``kept`` False) why it is not."""
        self.derived.append(DerivedTensor(name, size, kept, reason))

    def failure(self, sentence: str) -> None:
        """Note an exception because of which the graph was compiled as it came."""
        self.failures.append(sentence)

    def merge(self, other: GraphReport) -> None:
        """Add what another part of the same compilation noted, in other patterns than this one."""
        self.patterns.update(other.patterns)
        self.derived += other.derived
        self.failures += other.failures

    @property
    def hits(self) -> dict[str, int]:
        """Pattern name → places replaced; only patterns that replaced something."""
        return {name: pattern.hits for name, pattern in self.patterns.items() if pattern.hits}

    @property
    def closed_gates(self) -> dict[str, list[str]]:
        """Sentence that closes a gate → the patterns that stay out because of it."""
        gates: dict[str, list[str]] = {}
        for name, pattern in self.patterns.items():
            if pattern.gate:
                gates.setdefault(pattern.gate, []).append(name)
        return gates

    @property
    def warning(self) -> str | None:
        """What a user should know: the pass failed, or nothing was fused although rotations were found."""
        if self.failures:
            return shorten_list(self.failures)
        if not self.rotations or self.hits:
            return None
        reasons = [
            *(f"{name}: {sentence}" for name, p in self.patterns.items() for sentence in p.refusals),
            *self.near_misses,
            *(f"{', '.join(names)}: {sentence}" for sentence, names in self.closed_gates.items()),
        ]
        found = "1 rotation was" if self.rotations == 1 else f"{self.rotations} rotations were"
        return f"{found} found and none fused: " + (shorten_list(reasons) or "no pattern covers what surrounds them")

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and text."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GraphReport:
        """The inverse of ``to_dict``."""
        patterns = {name: PatternReport(**pattern) for name, pattern in data.get("patterns", {}).items()}
        derived = [DerivedTensor(**entry) for entry in data.get("derived", [])]
        return cls(**{**data, "patterns": patterns, "derived": derived})

    def _pattern(self, name: str) -> PatternReport:
        return self.patterns.setdefault(name, PatternReport())


def shorten_list(reasons: list[str], most: int = 3) -> str:
    """The first few of ``reasons`` in one line, saying how many more there are."""
    distinct = list(dict.fromkeys(reasons))
    more = f"; and {len(distinct) - most} more (rope_fusion.record() lists them)" if len(distinct) > most else ""
    return "; ".join(distinct[:most]) + more


@dataclass(eq=False, repr=False)
class Report:
    """The graphs that were compiled, in the order of their compilation."""

    graphs: list[GraphReport] = field(default_factory=list)

    def __repr__(self) -> str:  # torch prints options, hence this, when it explains a recompilation
        return f"<Report of {len(self.graphs)} graphs, hits {self.hits}>"

    def add(self, graph: GraphReport) -> None:
        """Append one graph's report."""
        self.graphs.append(graph)

    @property
    def hits(self) -> dict[str, int]:
        """Pattern name → places replaced, over all graphs."""
        total: Counter[str] = Counter()
        for graph in self.graphs:
            total.update(graph.hits)
        return dict(total)

    @property
    def rotations(self) -> int:
        """Rotations recognised, over all graphs."""
        return sum(graph.rotations for graph in self.graphs)

    @property
    def warnings(self) -> list[str]:
        """What went, or may have gone, unfused by mistake: one sentence per graph concerned."""
        return [graph.warning for graph in self.graphs if graph.warning]

    @property
    def derived_bytes(self) -> int:
        """Bytes held by derived tensors, over all graphs; one shared by several graphs counts in each."""
        return sum(entry.bytes for graph in self.graphs for entry in graph.derived if entry.kept)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and text."""
        return {
            "hits": self.hits,
            "rotations": self.rotations,
            "warnings": self.warnings,
            "graphs": [graph.to_dict() for graph in self.graphs],
        }

    def to_json(self) -> str:
        """``to_dict`` as indented JSON."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def table(self) -> str:
        """A table of graphs and patterns and below it, wrapped at 100 columns, the sentences that explain it.

        Patterns that stay out are in the sentences alone.
        """
        if not self.graphs:
            return "no graph was compiled"
        from tabulate import tabulate

        rows = [
            (index, name, p.candidates, p.hits, sum(p.refusals.values()))
            for index, graph in enumerate(self.graphs)
            for name, p in graph.patterns.items()
            if not p.gate or p.candidates
        ]
        headers = ("graph", "pattern", "candidates", "hits", "refused")
        parts = [tabulate(rows, headers)] if rows else []
        parts += [_sentences(index, graph) for index, graph in enumerate(self.graphs)]
        return "\n\n".join(parts)


def _sentences(index: int, graph: GraphReport) -> str:
    name = f" ({graph.name})" if graph.name else ""
    head = (
        f"graph {index}{name}: {graph.rotations} rotation{'' if graph.rotations == 1 else 's'}, "
        f"{graph.nodes_before} → {graph.nodes_after} nodes, pass {graph.pass_ms:.1f} ms"
    )
    lines = [f"failed: {sentence}" for sentence in graph.failures]
    for sentence, names in graph.closed_gates.items():
        lines.append(f"{', '.join(names)} {'stays' if len(names) == 1 else 'stay'} out: {sentence}")
    for pattern, p in graph.patterns.items():
        lines += [f"{pattern} refused{_times(count)}: {sentence}" for sentence, count in p.refusals.items()]
    lines += [f"near miss{_times(count)}: {sentence}" for sentence, count in graph.near_misses.items()]
    for entry in graph.derived:
        kept = "derived once" if entry.kept else "not derived"
        why = f": {entry.reason}" if entry.reason else ""
        lines.append(f"{kept}: {entry.name}, {_size(entry.bytes)}{why}")
    if graph.dump:
        lines.append(f"graphs in {graph.dump}")
    wrapped = [
        textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        for line in lines
    ]
    return "\n".join([textwrap.fill(head, WIDTH), *wrapped])


def _times(count: int) -> str:
    return "" if count == 1 else f" {count}×"


def _size(count: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


# The reports that are being recorded in this thread (or task), outermost first.
_recording: ContextVar[tuple[Report, ...]] = ContextVar("rope_fusion_recording", default=())


@contextlib.contextmanager
def record() -> Iterator[Report]:
    """Collect the reports of every graph compiled inside, by the backend or by Inductor with ``inductor_options``.

    Recordings nest, and each thread has its own. Graphs compiled by Inductor itself, or for a backward pass that ran
    later than its forward compilation, are in the report when the block has been left.
    """
    report = Report()
    before = published()
    token = _recording.set((*_recording.get(), report))
    try:
        yield report
    finally:
        try:
            deliver(take(before))
        finally:
            _recording.reset(token)


def deliver(graphs: list[GraphReport]) -> None:
    """Add ``graphs`` to every report that is being recorded in this thread."""
    for report in _recording.get():
        report.graphs.extend(graphs)


def publish(graph: GraphReport) -> None:
    """Hand over a finished report from inside a compilation, so that Inductor's caches store it with the graph."""
    _inductor_counters()[COUNTER_PREFIX + json.dumps(graph.to_dict(), ensure_ascii=False)] += 1


def publish_and_warn(graph: GraphReport) -> None:
    """``publish`` for a pass inside plain Inductor, where no backend of ours is there to warn afterwards."""
    publish(graph)
    warn_unfused([graph])


def warn_unfused(graphs: list[GraphReport]) -> None:
    """Warn, once per distinct reason, of what ``GraphReport.warning`` says."""
    for sentence in dict.fromkeys(graph.warning for graph in graphs if graph.warning):
        warnings.warn(f"rope_fusion: {sentence}", RopeFusionWarning, stacklevel=2)


def published() -> dict[str, int]:
    """How often each report stands among Inductor's counters now; the mark to give ``take`` later."""
    return {key: count for key, count in _inductor_counters().items() if key.startswith(COUNTER_PREFIX)}


def take(before: dict[str, int]) -> list[GraphReport]:
    """Take the reports published since ``before`` out of Inductor's counters."""
    counters = _inductor_counters()
    graphs = []
    for key, count in published().items():
        kept = min(before.get(key, 0), count)
        graphs += [GraphReport.from_dict(json.loads(key[len(COUNTER_PREFIX) :])) for _ in range(count - kept)]
        if kept:
            counters[key] = kept
        else:
            del counters[key]
    return graphs


def _inductor_counters() -> Counter[str]:
    """Inductor's counters; where Dynamo was never imported nothing was compiled, and importing it would take long."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return Counter() if dynamo is None else dynamo.counters["inductor"]
