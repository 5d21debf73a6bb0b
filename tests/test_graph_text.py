"""Graphs as text: the same from run to run, and differences that show only what changed."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from rope_fusion.graph_text import AFTER, BEFORE, DIFFERENCE, diff, dtype_name, dump_graphs, graph_to_text
from rope_fusion.testing import assert_graph

aten = torch.ops.aten


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layers: int = 1) -> torch.Tensor:
    for _ in range(layers):
        first, second = x.chunk(2, -1)
        x = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return x


def traced(function: Callable[..., Any], *args: torch.Tensor, symbolic: bool = False) -> GraphModule:
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*args)


def rotation(layers: int = 1) -> GraphModule:
    return traced(lambda x, c, s: rotate(x, c, s, layers), torch.ones(4, 8), torch.ones(4, 4), torch.ones(4, 4))


def test_text_shows_names_dtypes_shapes_and_targets() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.bfloat16) * 2.5).t()

    assert graph_to_text(traced(program, torch.ones(2, 3)).graph) == (
        "# tensors are on cpu where nothing else is said\n"
        "%in_0: f32[2, 3] = input\n"
        "%to_copy_0: bf16[2, 3] = aten._to_copy.default(%in_0, dtype=bf16)\n"
        "%mul_0: bf16[2, 3] = aten.mul.Tensor(%to_copy_0, 2.5)\n"
        "%t_0: bf16[3, 2] strides (1, 3) = aten.t.default(%mul_0)\n"
        "return %t_0\n"
    )


def test_text_does_not_depend_on_node_names() -> None:
    plain, renamed = rotation(), rotation()
    for number, node in enumerate(renamed.graph.nodes):
        if node.op != "output":
            node._rename(f"whatever_{number * 7}")
    assert str(plain.graph) != str(renamed.graph)
    assert graph_to_text(plain.graph) == graph_to_text(renamed.graph)


def test_symbols_of_sizes_are_numbered_by_appearance() -> None:
    text = graph_to_text(traced(lambda x: x * x.shape[1], torch.ones(5, 7), symbolic=True).graph)
    assert "%in_0: f32[s0, s1] = input\n" in text


def test_text_holds_no_address() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    argument: Any = object()
    graph.output(graph.call_function(operator.getitem, (x, argument)))
    assert "0x" not in graph_to_text(graph)


def test_every_kind_of_argument_is_shown() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    args: Any = (x, (slice(None, 3, None), [1, x]), {"k": x})
    kwargs: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "device": torch.device("cpu")}
    kwargs |= {"f": operator.neg, "word": "a", "c": torch.ones(2)}
    y = graph.call_function(operator.getitem, args, kwargs)
    graph.output((y,))
    assert graph_to_text(graph) == (
        "# tensors are on cpu where nothing else is said\n"
        "%in_0 = input\n"
        "%getitem_0 = getitem(%in_0, (:3:, [1, %in_0]), {'k': %in_0}, dtype=f8_e4m3fn, device=cpu, f=neg, word='a', "
        "c=constant f32[2])\n"
        "return (%getitem_0,)\n"
    )


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bf16"), (torch.float32, "f32"), (torch.int64, "i64"), (torch.uint8, "u8"), (torch.bool, "bool")],
)
def test_dtype_names_are_short(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name


def test_a_graph_does_not_differ_from_itself() -> None:
    text = graph_to_text(rotation(3).graph)
    assert diff(text, text) == ""


def test_difference_of_one_operator_is_two_changed_lines() -> None:
    gm = rotation(3)
    before = graph_to_text(gm.graph)
    first_sub = next(node for node in gm.graph.nodes if node.target is aten.sub.Tensor)
    first_sub.target = aten.add.Tensor
    changed = [line for line in diff(before, graph_to_text(gm.graph)).splitlines() if line[0] in "+-"][2:]
    # The operator itself and the one line that uses it; every later add and cat keeps its name.
    assert len(changed) == 4
    assert "aten.sub.Tensor" in changed[0]
    assert "aten.add.Tensor" in changed[1]
    assert "aten.cat.default" in changed[2]
    assert "aten.cat.default" in changed[3]


def test_removing_a_node_does_not_rename_later_ones() -> None:
    gm = rotation(3)
    before = graph_to_text(gm.graph)
    muls = [node for node in gm.graph.nodes if node.target is aten.mul.Tensor]
    muls[0].replace_all_uses_with(muls[0].args[0])
    gm.graph.erase_node(muls[0])
    changed = [line for line in diff(before, graph_to_text(gm.graph)).splitlines() if line[0] in "+-"][2:]
    assert len(changed) == 3  # the removed line, and the line that used it before and after


def test_renaming_in_a_difference_never_merges_two_nodes() -> None:
    gm = rotation(3)
    before = graph_to_text(gm.graph)
    for node in list(gm.graph.nodes)[4::3]:
        if node.target is aten.mul.Tensor:
            node.target = aten.add.Tensor
    after = diff("", graph_to_text(gm.graph)), diff(before, graph_to_text(gm.graph))
    added = [line[1:].split(":")[0] for line in after[1].splitlines() if line.startswith("+%")]
    kept = [line[1:].split(":")[0] for line in after[1].splitlines() if line.startswith(" %")]
    assert len(set(added + kept)) == len(added + kept)


def test_dump_writes_before_after_and_difference(tmp_path: Path) -> None:
    folder = dump_graphs(tmp_path / "new" / "graphs", "graph", "return 1\n", "return 2\n")
    assert folder == tmp_path / "new" / "graphs" / "0000-graph"
    assert (folder / BEFORE).read_text() == "return 1\n"
    assert (folder / AFTER).read_text() == "return 2\n"
    assert "+return 2\n" in (folder / DIFFERENCE).read_text()


@pytest.mark.parametrize(
    "name", ["../../outside", "/etc/passwd", "..", "", ".hidden", "a/b\\c", "x" * 500, "näme\n", "a\0b"]
)
def test_dump_stays_inside_its_folder_whatever_the_name(tmp_path: Path, name: str) -> None:
    root = tmp_path / "graphs"
    folder = dump_graphs(root, name, "", "")
    assert folder.parent == root
    assert folder.resolve().is_relative_to(root.resolve())
    assert len(folder.name) < 100
    assert os.listdir(tmp_path) == ["graphs"]
    assert os.listdir(root) == [folder.name]


def test_dumps_are_numbered_and_never_overwritten(tmp_path: Path) -> None:
    folders = [dump_graphs(tmp_path, "graph", str(n), "") for n in range(3)]
    assert [folder.name for folder in folders] == ["0000-graph", "0001-graph", "0002-graph"]
    assert [(folder / BEFORE).read_text() for folder in folders] == ["0", "1", "2"]


def test_threads_that_dump_at_once_get_a_folder_each(tmp_path: Path) -> None:
    written: list[Path] = []

    def write() -> None:
        written.extend(dump_graphs(tmp_path, "graph", "a", "b") for _ in range(5))

    threads = [threading.Thread(target=write) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(written)) == 30
    assert sorted(os.listdir(tmp_path)) == sorted(folder.name for folder in written)
    assert all(len(os.listdir(folder)) == 3 for folder in written)


def test_expected_graph_is_written_on_request_and_then_held(tmp_path: Path) -> None:
    file = tmp_path / "golden" / "rotation.txt"
    with pytest.raises(AssertionError, match=r"no expected graph .*--refresh-graphs"):
        assert_graph(file, rotation())
    assert_graph(file, rotation(), refresh=True)
    assert_graph(file, rotation())
    with pytest.raises(AssertionError, match="the graph is not the one in"):
        assert_graph(file, rotation(2))
