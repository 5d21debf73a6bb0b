"""No pickle, no evaluation of text that was read, no network; files only where they were asked for; third parties are named."""

from __future__ import annotations

import ast
import dataclasses
import os
import socket
import stat
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_fusion import catalog
from rope_fusion.catalog import ENTRY_POINT_GROUP, PatternError, load_patterns
from rope_fusion.fusion_pass import FusionPass
from rope_fusion.graph_text import dump_graphs
from rope_fusion.options import Options
from rope_fusion.report import GraphReport

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "rope_fusion").rglob("*.py"), *(ROOT / "patterns").glob("*.py")])

# Modules that load code or objects from bytes, or that reach another machine.
FORBIDDEN_MODULES = {
    "cloudpickle", "dill", "ftplib", "http", "marshal", "pickle", "requests", "shelve", "smtplib", "socket", "ssl",
    "telnetlib", "urllib", "xmlrpc",
}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {("torch", "load"), ("os", "system"), ("os", "popen"), ("tempfile", "mktemp"), ("yaml", "load")}


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_loads_objects_evaluates_text_or_reaches_the_network(file: Path) -> None:
    for node in ast.walk(tree_of(file)):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES, where
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES, where
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, where
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                assert (node.func.value.id, node.func.attr) not in FORBIDDEN_METHODS, where
            assert not any(k.arg == "shell" for k in node.keywords), f"{where}: no command goes through a shell"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.text(max_size=80), st.sampled_from(["../../x", "/etc/passwd", "..", ".", "a/../../b", "\0", "CON", "~"])
    )
)
def test_dumps_stay_in_the_folder_asked_for_whatever_the_graphs_name(tmp_path_factory: Any, name: str) -> None:
    outside = tmp_path_factory.getbasetemp() / "outside"
    inside = outside / "dumps"
    inside.mkdir(parents=True, exist_ok=True)
    before = {path for path in outside.rglob("*") if not path.is_relative_to(inside)}
    folder = dump_graphs(inside, name, "a = 1\n", "a = 2\n")
    assert folder.resolve().parent == inside.resolve()
    assert {path.name for path in folder.iterdir()} == {"before.txt", "after.txt", "diff.txt"}
    assert {path for path in outside.rglob("*") if not path.is_relative_to(inside)} == before


def test_dumps_follow_no_link_out_of_their_folder(tmp_path: Path) -> None:
    """A link with the name of the next dump is not written through."""
    target, inside = tmp_path / "target", tmp_path / "dumps"
    target.mkdir()
    inside.mkdir()
    (inside / "0000-graph").symlink_to(target)
    folder = dump_graphs(inside, "graph", "a", "b")
    assert folder.name == "0001-graph"
    assert not list(target.iterdir())


def test_dumps_appear_whole_and_leave_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = dump_graphs(tmp_path, "graph", "a", "b")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    mode = stat.S_IMODE(os.stat(folder / "before.txt").st_mode)
    assert not mode & 0o111


def test_compiling_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with torch.no_grad():
        torch.compile(lambda x: x.sin() + 1, backend="rope_fusion")(torch.ones(3))


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs entry points for the length of a test."""

    def install(**objects: Any) -> None:
        class Point(EntryPoint):
            def load(self) -> Any:
                loaded = objects[self.name]
                if isinstance(loaded, Exception):
                    raise loaded
                return loaded

        points = [Point(name, f"their_package.{name}", ENTRY_POINT_GROUP) for name in objects]
        monkeypatch.setattr(catalog, "entry_points", lambda group: points)
        catalog._enabled_patterns.cache_clear()

    yield install
    monkeypatch.undo()
    catalog._enabled_patterns.cache_clear()


def simple_graph() -> torch.fx.Graph:
    from trust.differential import capture_call

    (call,) = capture_call(lambda x: x + 1, torch.ones(3))
    return call.graph.graph


def test_a_third_partys_pattern_is_named_with_its_origin_and_in_the_report(third_party: Any) -> None:
    ours = load_patterns()[0].pattern
    third_party(theirs=dataclasses.replace(ours, priority=1))
    (entry,) = [entry for entry in load_patterns() if entry.name == "theirs"]
    assert entry.origin != "rope_fusion"
    assert "their_package" in entry.origin
    reports: list[GraphReport] = []
    FusionPass(Options(), reports.append)(simple_graph())
    assert "theirs" in reports[0].patterns


def test_a_third_partys_pattern_can_be_turned_off(third_party: Any) -> None:
    third_party(theirs=AssertionError("its code runs although it is turned off"))
    assert "theirs" not in [entry.name for entry in load_patterns(["theirs"])]


def test_a_third_partys_pattern_that_cannot_be_loaded_says_whose_it_is_and_can_be_turned_off(third_party: Any) -> None:
    third_party(theirs=ImportError("no module named their_dependency"))
    with pytest.raises(
        PatternError, match=r"their_package\.theirs.*their_dependency.*rope_fusion.disable=\['theirs'\]"
    ):
        load_patterns()
    assert load_patterns(["theirs"])


def test_a_third_partys_pattern_cannot_take_the_name_of_one_of_ours(third_party: Any) -> None:
    third_party(rope_kv=load_patterns()[0].pattern)
    with pytest.raises(PatternError, match="two patterns are named 'rope_kv'"):
        load_patterns()
