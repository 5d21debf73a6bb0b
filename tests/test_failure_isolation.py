"""Whatever fails inside the pass, the graph compiles as it came, one warning says so, and `strict` raises.

Faults are injected at the entry of every function of the package that a pass over a fusing graph calls, at its first and at its last call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from blocks import GptOssAttention, cos_sin_table
from trust.differential import Captured, capture_call, compare_on, copy_graph

import rope_fusion
from rope_fusion import catalog, fusion_pass
from rope_fusion._torch import inductor_config
from rope_fusion.fusion_pass import FusionPass
from rope_fusion.graph_text import graph_to_text
from rope_fusion.options import Options
from rope_fusion.report import GraphReport, RopeFusionWarning

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (str(ROOT / "rope_fusion"), str(ROOT / "patterns"))
REFERENCE = Options(kernels="reference")

# What runs outside the rewriting itself: the pass's own frame, its roll-back, and the report.
OUTSIDE = {
    ("fusion_pass.py", "__call__"),
    ("fusion_pass.py", "__init__"),
    ("transaction.py", "__init__"),
    ("transaction.py", "roll_back"),
}


class Fault(Exception):
    """Injected."""


@pytest.fixture(scope="module")
def captured() -> Captured:
    """The graph of a block in which RoPE, FP8 quantisation and cache writes fuse."""
    torch.manual_seed(0)
    model = GptOssAttention().eval()
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    (call,) = capture_call(model, x, cos_sin_table(32, 16), torch.arange(5), torch.arange(5) * 3)
    return call


def run_pass(call: Captured, options: Options = REFERENCE) -> tuple[torch.fx.GraphModule, GraphReport]:
    made = copy_graph(call.graph)
    reports: list[GraphReport] = []
    FusionPass(options, reports.append)(made.graph)
    return made, reports[0]


def key_of(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def ours(code: CodeType) -> bool:
    if not code.co_filename.startswith(FOLDERS) or code.co_name.startswith("<"):
        return False
    return (Path(code.co_filename).name, code.co_name) not in OUTSIDE


@contextlib.contextmanager
def watched(on_call: Any) -> Iterator[None]:
    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and ours(frame.f_code):
            on_call(key_of(frame.f_code))

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def calls_of_a_pass(call: Captured) -> Counter[tuple[str, str, int]]:
    """How often a pass over the graph calls each function of ours, what runs once in a process left out."""
    run_pass(call)
    made = copy_graph(call.graph)
    counts: Counter[tuple[str, str, int]] = Counter()
    with watched(lambda key: counts.update([key])):
        FusionPass(REFERENCE, lambda report: None)(made.graph)
    return counts


def inject(
    call: Captured, wanted: tuple[str, str, int], at: int, options: Options = REFERENCE
) -> tuple[Any, GraphReport]:
    made = copy_graph(call.graph)
    seen = 0

    def fail(key: tuple[str, str, int]) -> None:
        nonlocal seen
        if key == wanted:
            seen += 1
            if seen == at:
                raise Fault(f"{wanted[1]} call {at}")

    reports: list[GraphReport] = []
    with watched(fail):
        FusionPass(options, reports.append)(made.graph)
    assert seen >= at, f"{wanted} was called {seen} times, not {at}"
    return made, reports[0]


def test_a_fault_in_any_function_leaves_the_graph_as_it_came(captured: Captured) -> None:
    _, whole = run_pass(captured)
    assert whole.hits, "nothing fuses, so nothing is tested"
    before = graph_to_text(captured.graph.graph)
    names = [node.name for node in captured.graph.graph.nodes]
    counts = calls_of_a_pass(captured)
    assert len(counts) > 100  # recognisers, emitters, patterns, gates
    injected, swallowed = 0, []
    for wanted, count in counts.items():
        for at in sorted({1, count}):
            made, report = inject(captured, wanted, at)
            injected += 1
            if not report.failures:  # a function whose caller expects that it may fail
                swallowed.append(wanted[1])
                continue
            where = f"{wanted} at call {at} of {count}"
            assert not report.hits, where
            assert "Fault" in report.failures[0], where
            made.graph.lint()
            assert [node.name for node in made.graph.nodes] == names, where
            assert graph_to_text(made.graph) == before, where
    assert not swallowed, swallowed
    made, report = run_pass(captured)
    assert report.hits == whole.hits, "a fault left something behind"
    compare_on(captured.graph, made, captured.arguments)


def test_strict_raises_whatever_failed(captured: Captured) -> None:
    for wanted in list(calls_of_a_pass(captured))[::7]:
        with pytest.raises(Fault):
            inject(captured, wanted, 1, Options(kernels="reference", strict=True))


def test_a_gate_that_fails_is_no_reason_not_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates are asked for the graph's identity in caches too, before the pass runs."""

    def fail(*_: Any) -> Any:
        raise Fault("gate")

    monkeypatch.setattr(catalog.CatalogEntry, "verdict", fail)
    assert FusionPass(REFERENCE).uuid() is None
    with (
        inductor_config.patch(fx_graph_cache=True),
        rope_fusion.record() as report,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        result = torch.compile(lambda x: x.sin() * 2, backend="rope_fusion")(torch.ones(3))
    torch.testing.assert_close(result, torch.ones(3).sin() * 2)
    assert any("gate" in sentence for graph in report.graphs for sentence in graph.failures)
    assert [warning for warning in caught if warning.category is RopeFusionWarning]


@pytest.mark.parametrize("part", ["search", "replacement", "example_inputs", "refuse"])
def test_a_pattern_whose_part_fails_leaves_the_graph_as_it_came(
    part: str, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third party's pattern is traced and asked like ours."""

    def fail(*_: Any, **__: Any) -> Any:
        raise Fault(part)

    good = catalog.load_patterns()
    failing: dict[str, Any] = {part: fail}
    broken = [
        dataclasses.replace(entry, name=f"their_{entry.name}", pattern=dataclasses.replace(entry.pattern, **failing))
        for entry in good
        if entry.name.startswith("rope_static_q_fp8_kv")
    ]
    monkeypatch.setattr(fusion_pass, "load_patterns", lambda disable: [*broken, *good])
    before = graph_to_text(captured.graph.graph)
    made, report = run_pass(captured)
    assert graph_to_text(made.graph) == before
    assert part in report.failures[0]
    assert not report.hits
    with pytest.raises(Fault):
        run_pass(captured, Options(kernels="reference", strict=True))
