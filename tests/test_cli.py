"""The command line: what it prints, and that a mistake is one sentence and status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rope_fusion.cli import main

MODEL = """
import torch

def make():
    cache = torch.zeros(2, 4, 4, 2, 8)
    slots = torch.tensor([3, 9])
    def write(k):
        cache[1].view(-1, 2, 8)[slots] = k
        return cache.sum()
    return write, (torch.ones(2, 2, 8),)

def make_nothing():
    return 3

def make_failing():
    def fail(x):
        raise ValueError("this model\\nalways fails")
    return fail, (torch.ones(2),)

not_callable = 3
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "tiny_model.py"
    file.write_text(MODEL)
    return str(file)


def failing(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    status = main(arguments)
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("rope-fusion: ")
    assert captured.err.count("\n") == 1, "one sentence, no traceback"
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["lst"], "there is no command 'lst'; did you mean 'list'?"),
        (["zzz"], "commands are: demo, list, explain, dump, diff, bench, options"),
        ([], "COMMAND"),
        (["options", "--verbose"], "unrecognized arguments: --verbose"),
        (["list", "--device", "abacus"], "there is no device type 'abacus'"),
        (["explain"], "MODULE:FUNCTION"),
        (["explain", "model"], "write the target as MODULE:FUNCTION or FILE.py:FUNCTION, got 'model'"),
        (["explain", ":make"], "write the target as"),
        (["explain", "no_such_module:make"], "'no_such_module' cannot be imported: ModuleNotFoundError"),
        (["explain", "no_such_file.py:make"], "there is no file 'no_such_file.py'"),
        (["explain", "os:getcw"], "'os' has no function 'getcw'; did you mean 'getcwd'?"),
        (["explain", "os:getcwd", "-o", "kernels"], "write an option as KEY=VALUE, got 'kernels'"),
        (["explain", "os:getcwd", "-o", "rope_fusion.kernel=auto"], "nearest known one is rope_fusion.kernels"),
        (["explain", "os:getcwd", "-o", "rope_fusion.strict=2"], "option rope_fusion.strict takes bool, got 2"),
        (["explain", "os:getcwd"], "os:getcwd must return (model, args) or (model, args, kwargs), got str"),
        (["dump", "os:getcwd"], "DIR"),
        (["dump", "os:getcwd", "/proc/nowhere"], "cannot make the folder '/proc/nowhere'"),
        (["bench", "write"], "there is no measurement 'write'; did you mean 'writes'?"),
        (["bench", "prologue", "zzz"], "there is no measurement 'zzz'; there are: compile, decode"),
        (["bench", "writes", "--device", "abacus"], "there is no device type 'abacus'"),
        (["bench", "--json", "writes"], "--json takes a file, got the measurement 'writes'; give names before it"),
        (["bench", "writes", "--json", "/proc/nowhere"], "cannot write '/proc/nowhere': No such file"),
        (["bench", "writes", "--json", "\0"], "cannot write"),
        (["diff", "a.txt"], "required: B"),
        (["diff", "no_such.txt", "b.txt"], "cannot read a graph from 'no_such.txt': No such file"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in failing(arguments, capsys)


def test_a_file_without_a_graph_says_how_to_write_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "write one with: rope-fusion dump" in failing(["diff", str(empty), str(empty)], capsys)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "it is no text" in failing(["diff", str(binary), str(binary)], capsys)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("make_nothing", "must return (model, args) or (model, args, kwargs), got int"),
        ("make_failing", "failed with ValueError: this model (--traceback shows where)"),
        ("mak", "did you mean 'make'?"),
        ("not_callable", "has no function 'not_callable'"),
    ],
)
def test_a_wrong_target_is_one_sentence(
    model: str, function: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in failing(["explain", f"{model}:{function}"], capsys)


def test_a_failing_model_shows_its_traceback_on_request(model: str) -> None:
    with pytest.raises(ValueError, match="always fails"):
        main(["explain", f"{model}:make_failing", "--traceback"])


def test_options_lists_every_option_with_its_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    printed = capsys.readouterr().out
    assert "rope_fusion.dump_dir = None    (a folder, or None)" in printed
    assert max(map(len, printed.splitlines())) <= 110


def test_bench_lists_the_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert {"decode", "prologue", "writes"} <= set(capsys.readouterr().out.split())


def test_list_shows_priorities_in_order_and_why_a_gate_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    from rope_fusion.catalog import load_patterns

    assert main(["list", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    places = [printed.index(f"\n{entry.name} ") for entry in load_patterns()]
    assert places == sorted(places)
    assert "no kernel of ours pays on cpu" in " ".join(printed.split())


def test_diff_of_equal_graphs_is_empty_and_of_others_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("%in_0 = input\n%mul_0 = aten.mul.Tensor(%in_0, 2)\nreturn %mul_0\n")
    (tmp_path / "b.txt").write_text("%in_0 = input\n%mul_7 = aten.mul.Tensor(%in_0, 2)\nreturn %mul_7\n")
    (tmp_path / "c.txt").write_text("%in_0 = input\n%mul_7 = aten.mul.Tensor(%in_0, 3)\nreturn %mul_7\n")
    a, b, c = (str(tmp_path / f"{name}.txt") for name in "abc")
    assert main(["diff", a, b]) == 0
    assert capsys.readouterr().out == ""
    assert main(["diff", a, c]) == 1
    assert "+%mul_7 = aten.mul.Tensor(%in_0, 3)" in capsys.readouterr().out


def test_explain_prints_the_report(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{model}:make", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hits"] == {"kv_write_in_place": 1}
    assert main(["explain", f"{model}:make"]) == 0
    assert "kv_write_in_place" in capsys.readouterr().out


def test_dump_writes_graphs_that_diff_can_read(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", f"{model}:make", str(tmp_path / "graphs")]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.parent == tmp_path / "graphs"
    assert main(["diff", str(folder / "before.txt"), str(folder)]) == 1
    assert "aten.index_put" in capsys.readouterr().out


_words = st.one_of(
    st.text(max_size=8), st.sampled_from(["-o", "--json", "--device", "cpu", "os:getcwd", ".", "x.py:f"])
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["explain", "dump", "diff", "bench --list", "options", "lisst", ""]), st.lists(_words, max_size=4)
)
def test_whatever_the_arguments_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, words: list[str]
) -> None:
    assume(not any(word.startswith(("-h", "--h")) for word in words))  # help, which is no mistake
    monkeypatch.chdir("/proc")  # nothing can be written by accident
    status = main([*command.split(" "), *words])
    assert status in (0, 2)
    error = capsys.readouterr().err
    assert error.startswith("rope-fusion: ") if status else not error
    assert "Traceback" not in error


def test_output_may_be_cut_short_by_its_reader() -> None:
    command = f"{sys.executable} -m rope_fusion.cli options | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
