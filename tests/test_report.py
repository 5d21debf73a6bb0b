"""Reports: what they count, how they read, and that a warm cache reports like a cold one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from torch._dynamo.utils import counters

from rope_fusion.report import (
    GraphReport,
    Report,
    RopeFusionWarning,
    deliver,
    publish,
    publish_and_warn,
    published,
    record,
    take,
)

LONG = "the head dimension must be even, " * 8 + "got 7"


def full_graph() -> GraphReport:
    graph = GraphReport(name="decode", rotations=4, nodes_before=120, nodes_after=90, pass_ms=12.34)
    graph.gate("rope_kv", None)
    graph.gate("rope_static_q_fp8_kv", "FP8 conversion needs compute capability 8.9 or newer, this device has 8.0")
    for _ in range(3):
        graph.candidate("rope_kv")
    graph.hit("rope_kv")
    graph.refusal("rope_kv", LONG)
    graph.refusal("rope_kv", LONG)
    graph.near_miss("rotation found, no KV write of its k")
    graph.near_miss("rotation found, no KV write of its k")
    graph.derive("cos_cached → bf16", 3 << 20)
    graph.derive("lm_head.weight → bf16", 3 << 30, kept=False, reason="over rope_fusion.derived_budget")
    graph.dump = "graphs/0000-decode"
    return graph


def unfused_graph() -> GraphReport:
    graph = GraphReport(rotations=2)
    graph.gate("rope_kv", "no kernel of ours pays on cpu")
    return graph


def test_hits_and_rotations_add_up_over_graphs() -> None:
    report = Report([full_graph(), full_graph(), unfused_graph()])
    assert report.hits == {"rope_kv": 2}
    assert report.rotations == 10
    assert report.derived_bytes == 6 << 20


def test_a_graph_survives_the_way_through_json() -> None:
    graph = full_graph()
    assert GraphReport.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph


def test_report_as_json_holds_totals_and_graphs() -> None:
    data = json.loads(Report([full_graph(), unfused_graph()]).to_json())
    assert data["hits"] == {"rope_kv": 1}
    assert data["rotations"] == 6
    assert len(data["graphs"]) == 2
    assert len(data["warnings"]) == 1
    assert data["graphs"][0]["patterns"]["rope_kv"]["refusals"] == {LONG: 2}


def test_table_shows_counts_and_sentences_within_100_columns() -> None:
    table = Report([full_graph(), unfused_graph()]).table()
    assert max(len(line) for line in table.splitlines()) <= 100
    rows = [line.split() for line in table.splitlines()]
    assert ["0", "rope_kv", "3", "1", "2"] in rows
    assert not any(row[1:2] == ["rope_static_q_fp8_kv"] for row in rows)
    flat = " ".join(table.split())
    for sentence in (
        "graph 0 (decode): 4 rotations, 120 → 90 nodes, pass 12.3 ms",
        "rope_static_q_fp8_kv stays out: FP8 conversion needs",
        f"rope_kv refused 2×: {LONG}",
        "near miss 2×: rotation found, no KV write of its k",
        "derived once: cos_cached → bf16, 3.0 MiB",
        "not derived: lm_head.weight → bf16, 3.0 GiB: over rope_fusion.derived_budget",
        "graphs in graphs/0000-decode",
    ):
        assert sentence in flat


def test_table_of_nothing_says_so() -> None:
    assert Report().table() == "no graph was compiled"


def test_rotations_without_a_hit_are_a_warning_with_the_reason() -> None:
    assert full_graph().warning is None
    assert GraphReport().warning is None
    warning = unfused_graph().warning
    assert warning == "2 rotations were found and none fused: rope_kv: no kernel of ours pays on cpu"


def test_refusals_come_before_gates_in_a_warning_and_long_lists_are_cut() -> None:
    graph = unfused_graph()
    for number in range(5):
        graph.refusal("rope_static_q_fp8", f"reason {number}")
    assert graph.warning is not None
    assert "fused: rope_static_q_fp8: reason 0; " in graph.warning
    assert graph.warning.endswith("and 3 more (rope_fusion.record() lists them)")


def test_derived_tensors_join_the_report_of_their_graph() -> None:
    graph, derived = unfused_graph(), GraphReport()
    derived.hit("dequantise_once")
    derived.derive("weight → bf16", 128)
    graph.merge(derived)
    assert graph.hits == {"dequantise_once": 1}
    assert set(graph.patterns) == {"rope_kv", "dequantise_once"}
    assert [entry.name for entry in graph.derived] == ["weight → bf16"]


def test_a_failure_is_the_warning() -> None:
    graph = full_graph()
    graph.failure("the pass failed with KeyError: 'val'; the graph was compiled unfused")
    assert graph.warning == "the pass failed with KeyError: 'val'; the graph was compiled unfused"


def test_a_compile_in_plain_inductor_warns_once() -> None:
    before = published()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            publish_and_warn(unfused_graph())
    take(before)
    assert [str(warning.message) for warning in caught] == [f"rope_fusion: {unfused_graph().warning}"]
    assert caught[0].category is RopeFusionWarning


def test_published_reports_are_taken_once_and_leave_no_trace() -> None:
    before = published()
    publish(full_graph())
    publish(full_graph())
    publish(unfused_graph())
    assert take(before) == [full_graph(), full_graph(), unfused_graph()]
    assert take(before) == []
    assert published() == before


def test_reports_published_before_are_left_where_they_are() -> None:
    publish(unfused_graph())
    before = published()
    publish(unfused_graph())
    assert take(before) == [unfused_graph()]
    assert published() == before
    assert take({})[-1] == unfused_graph()


def test_counters_cleared_in_between_do_not_hide_a_report() -> None:
    publish(full_graph())
    before = published()
    counters.clear()
    publish(unfused_graph())
    assert take(before) == [unfused_graph()]


def test_recordings_nest() -> None:
    with record() as outer:
        deliver([full_graph()])
        with record() as inner:
            deliver([unfused_graph()])
            publish(full_graph())
        publish(unfused_graph())
    assert inner.graphs == [unfused_graph(), full_graph()]
    assert outer.graphs == [full_graph(), unfused_graph(), full_graph(), unfused_graph()]


def test_recording_ends_with_its_block_also_after_an_exception() -> None:
    with contextlib.suppress(KeyError), record() as report:
        deliver([full_graph()])
        raise KeyError
    deliver([full_graph()])
    assert len(report.graphs) == 1


def test_each_thread_has_its_own_recording() -> None:
    together = threading.Barrier(2)
    seen: dict[str, Report] = {}

    def work(name: str) -> None:
        with record() as report:
            together.wait()
            deliver([GraphReport(name=name)])
            together.wait()
        seen[name] = report

    with record() as outside:
        threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {name: [graph.name for graph in report.graphs] for name, report in seen.items()} == {"a": ["a"], "b": ["b"]}
    assert outside.graphs == []


# What the pass does to the report is not the matter here, so a toy takes its place inside Inductor.
WARM_CACHE_PROGRAM = """
import sys, torch, torch._functorch.config
from rope_fusion._torch import CustomGraphPass
from rope_fusion.report import GraphReport, publish, record

class Toy(CustomGraphPass):
    def __call__(self, graph):
        print("the pass ran", file=sys.stderr)
        report = GraphReport(rotations=1, nodes_before=len(graph.nodes))
        report.hit("toy")
        publish(report)
    def uuid(self):
        return "toy"

def program(x):
    return (x * 2 + 1).relu()

torch._functorch.config.enable_autograd_cache = sys.argv[1] == "autograd"
with record() as report:
    compiled = torch.compile(program, options={"post_grad_custom_pre_pass": Toy()})
    compiled(torch.ones(5))
    x = torch.ones(5, 6, requires_grad=True)
    compiled(x).sum().backward()
print(report.to_json())
"""


@pytest.mark.parametrize("cache", ["fx", "autograd"])
def test_a_warm_cache_reports_like_a_cold_one(cache: str, tmp_path: Path) -> None:
    # A tag of its own makes the first run cold; the compiled C++ is still shared with every other test.
    environment = {**os.environ, "TORCH_COMPILE_CACHE_KEY_TAG": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}

    def run() -> tuple[str, int]:
        command = [sys.executable, "-c", WARM_CACHE_PROGRAM, cache]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr.count("the pass ran")

    cold, runs = run()
    warm, warm_runs = run()
    assert runs == 3  # inference, forward, backward
    assert warm_runs == 0
    assert json.loads(cold)["hits"] == {"toy": 3}
    assert warm == cold
