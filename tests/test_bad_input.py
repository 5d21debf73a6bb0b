"""Whatever users pass, they get one sentence: never a traceback, never a hang, never a silent success."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rope_fusion
from rope_fusion.backend import inductor_options
from rope_fusion.catalog import PatternError
from rope_fusion.cli import main
from rope_fusion.options import Options, RopeFusionOptionError, describe

COMMANDS = ("demo", "list", "explain", "dump", "diff", "bench", "options")
FLAGS = ("-o", "--option", "--json", "--dump", "--device", "--traceback", "-x", "--", "-", "")
# Words that name nothing, so that no module is imported and no model is run.
WORDS = (
    "no_such_module:make",
    "no_such.py:make",
    "abc",
    "rope_fusion.kernels=gpu",
    "a=b=c",
    "=",
    "é",
    "\0",
    "x" * 300,
    "-1",
)


def run(arguments: list[str]) -> tuple[int, str]:
    """Exit status and standard error of the command line; whatever it raises would be a traceback."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as stop:  # --help
            status = stop.code if isinstance(stop.code, int) else 0
    return status, err.getvalue()


# `demo` and `bench` without a mistake among their arguments would run for minutes; their own tests run them.
_arguments = st.tuples(
    st.sampled_from([c for c in COMMANDS if c not in ("demo", "bench")]),
    st.lists(st.one_of(st.sampled_from([*FLAGS, *WORDS]), st.text(max_size=8)), max_size=4),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_arguments)
def test_any_command_line_ends_in_one_sentence_or_success(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[str, list[str]]
) -> None:
    command, rest = drawn
    with contextlib.chdir(tmp_path_factory.getbasetemp()):  # a folder to dump into may be named
        status, said = run([command, *rest])
    assert status in (0, 1, 2)
    if status == 2:
        assert said.startswith("rope-fusion: ")
        assert said.count("\n") == 1 or "\n" in "".join(rest)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--dump", "/proc/nowhere/at/all"],
        ["demo", "--dump", "\0"],
        ["demo", "extra"],
        ["demo", "--dump"],
        ["bench", "--no-such-flag"],
        ["bench", "writes", "--device", "abacus"],
        ["bench", "no_such_measurement"],
        ["explain", "tests:no_such"],
        ["explain", "/:make"],
        ["explain", "/etc/passwd:make"],
        ["explain", "\0:make"],
        ["explain", "a.b.c:d.e"],
        ["dump", "no_such:make", "\0"],
        ["diff", "/proc/self/mem", "/proc/self/mem"],
        ["diff", "/", "/"],
        ["list", "--device", "\0"],
        ["list", "--device", "cuda:99"],
        ["list", "--device", "meta:0:0"],
    ],
    ids=str,
)
def test_mistakes_of_each_command_are_one_sentence(arguments: list[str]) -> None:
    status, said = run(arguments)
    assert status == 2, said
    assert said.startswith("rope-fusion: ")
    assert "Traceback" not in said


BAD: dict[str, list[Any]] = {
    "kernels": ["", "AUTO", None, 1, b"auto", ["auto"]],
    "numerics": ["fp16", 0, True, {}],
    "mode": ["", 3, b"x"],
    "report": [{}, "report", True, 0],
    "strict": [0, 1, "true", None],
    "disable": [3, None, [3], [""], {"a": 1}, [None]],
    "dump_dir": ["", "\0", 3, b"folder", __file__, True],
    "max_tokens": [-1, 1.5, "many", True],
    "derived_budget": [-1, 1.5, float("nan"), float("inf"), "10%", True, None],
    "assume_frozen": ["no", 0, None],
    "freshness_interval": [-1, 2.0, "often", None, True],
    "verify": [True, None, "once", 1],
    "on_mismatch": ["ignore", None, 0],
    "check_bounds": [1, "yes", None],
}


def test_every_option_has_bad_values_here() -> None:
    assert {name.removeprefix("rope_fusion.") for name, *_ in describe()} == set(BAD)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=repr
)
def test_a_bad_value_is_one_sentence_that_names_the_option_and_the_value(name: str, value: Any) -> None:
    with pytest.raises(RopeFusionOptionError) as caught:
        Options(**{name: value})
    said = str(caught.value)
    assert said.startswith(f"option rope_fusion.{name} takes ")
    assert "\n" not in said
    assert len(said) < 400


@pytest.mark.parametrize("value", [None, 3, "model", ["model"], b"model", object()])
def test_invalidate_says_what_it_takes(value: Any) -> None:
    with pytest.raises(TypeError, match=r"rope_fusion\.invalidate takes a module, a tensor or an iterable"):
        rope_fusion.invalidate(value)


def test_inductor_options_say_what_they_take() -> None:
    with pytest.raises(RopeFusionOptionError, match="goes without its prefix"):
        inductor_options({"rope_fusion.kernels": "auto"})


def test_an_unknown_pattern_to_disable_names_the_nearest() -> None:
    options: dict[str, Any] = {"rope_fusion.disable": ["rope_kw"]}
    with pytest.raises(Exception, match="did you mean 'rope_kv'"):
        torch.compile(lambda x: x + 1, backend="rope_fusion", options=options)(torch.ones(2))
    with pytest.raises(PatternError, match="did you mean 'rope_kv'"):
        inductor_options(disable=["rope_kw"])
