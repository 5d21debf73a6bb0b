"""A contract that every pattern of the catalogue keeps, and how patterns are found."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rope_fusion import catalog
from rope_fusion._torch import FakeTensorMode, PatternMatcherPass
from rope_fusion.canonical.examples import quant_example
from rope_fusion.canonical.operators import quantize_fp8
from rope_fusion.capability import GateContext
from rope_fusion.catalog import CatalogEntry, PatternError, load_patterns
from rope_fusion.matcher import PatternRunner
from rope_fusion.pattern import FusionPattern

ENTRIES = {entry.name: entry for entry in load_patterns()}


@pytest.fixture(params=list(ENTRIES))
def entry(request) -> CatalogEntry:
    return ENTRIES[request.param]


def test_the_summary_is_one_sentence(entry):
    assert entry.summary.endswith(".")
    assert len(entry.summary) < 120


def test_search_and_replacement_take_the_same_arguments(entry):
    search, replacement = (inspect.signature(f) for f in (entry.pattern.search, entry.pattern.replacement))
    assert list(search.parameters) == list(replacement.parameters)


def test_search_and_replacement_return_alike(entry):
    """The canonical operators have no values, so what can be compared is what a graph's other nodes rely on."""

    def described(value):
        return (tuple(value.shape), value.dtype, value.device) if isinstance(value, Tensor) else value

    with FakeTensorMode():
        arguments = entry.pattern.example_inputs()
        searched = entry.pattern.search(*arguments)
        replaced = entry.pattern.replacement(*arguments)
    if isinstance(searched, Tensor):
        searched, replaced = [searched], [replaced]
    assert [described(v) for v in searched] == [described(v) for v in replaced]


def test_the_search_is_found_by_the_matcher_where_its_own_graph_stands(entry):
    runner = PatternRunner(entry)
    assert runner.targets
    assert isinstance(runner._pass, PatternMatcherPass)


def test_gates_answer_nothing_or_a_sentence(entry):
    for device in ("cpu", "cuda", "xpu"):
        for kernels in ("auto", "reference"):
            if device == "cuda" and kernels == "auto" and not torch.cuda.is_available():
                continue  # there a gate asks the device
            verdict = entry.verdict(GateContext(torch.device(device), kernels))
            assert verdict is None or ((verdict[0].islower() or verdict[0].isupper()) and " " in verdict)


def test_refusals_are_asked_by_argument_name(entry):
    with FakeTensorMode():
        arguments = dict(
            zip(inspect.signature(entry.pattern.search).parameters, entry.pattern.example_inputs(), strict=True)
        )
        sentence = entry.pattern.refuse(**arguments)
    assert sentence is None or " " in sentence


def test_patterns_run_from_the_most_to_the_least_specific():
    names = [entry.name for entry in load_patterns()]
    order = ["rope_static_q_fp8_kv", "rope_kv", "rope_static_q_fp8", "kv_write_in_place"]
    assert [name for name in names if name in order] == order
    priorities = [entry.priority for entry in load_patterns()]
    assert priorities == sorted(priorities, reverse=True)
    assert len(set(priorities)) == len(priorities), "two patterns of one priority run in an order that nobody chose"


def test_every_file_of_the_folder_is_a_pattern_and_named_like_it():
    folder = importlib.import_module("rope_fusion.patterns").__path__[0]
    files = {path.stem for path in Path(folder).glob("*.py")} - {"__init__"}
    assert files == {name for name, entry in ENTRIES.items() if entry.origin == "rope_fusion"}


def test_a_misspelt_name_to_disable_names_the_nearest():
    with pytest.raises(PatternError, match="no pattern 'rope_vk' to disable; did you mean 'rope_kv'"):
        load_patterns(["rope_vk"])


EXTRA = ENTRIES["rope_kv"].pattern


def with_entry_points(monkeypatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(catalog, "entry_points", lambda group: list(points))
    catalog._enabled_patterns.cache_clear()


@pytest.fixture(autouse=True)
def fresh_catalogue():
    yield
    catalog._enabled_patterns.cache_clear()


def test_a_pattern_of_another_package_is_found_and_can_be_disabled(monkeypatch):
    point = EntryPoint("theirs", f"{__name__}:EXTRA", catalog.ENTRY_POINT_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: EXTRA)
    with_entry_points(monkeypatch, point)
    found = {entry.name: entry for entry in load_patterns()}
    assert found["theirs"].pattern is EXTRA
    assert found["theirs"].origin != "rope_fusion"
    assert "theirs" not in {entry.name for entry in load_patterns(["theirs"])}


def test_a_pattern_of_another_package_that_cannot_be_loaded_is_one_error(monkeypatch):
    with_entry_points(monkeypatch, EntryPoint("broken", "no_such_module:PATTERN", catalog.ENTRY_POINT_GROUP))
    with pytest.raises(PatternError, match=r"the pattern 'broken' of .* cannot be loaded"):
        load_patterns()


def test_two_patterns_of_one_name_are_one_error(monkeypatch):
    monkeypatch.setattr(EntryPoint, "load", lambda self: EXTRA)
    with_entry_points(monkeypatch, EntryPoint("rope_kv", "theirs:EXTRA", catalog.ENTRY_POINT_GROUP))
    with pytest.raises(PatternError, match="two patterns are named 'rope_kv'"):
        load_patterns()


def test_what_is_no_pattern_is_one_error(monkeypatch):
    monkeypatch.setattr(EntryPoint, "load", lambda self: object())
    with_entry_points(monkeypatch, EntryPoint("thing", "theirs:thing", catalog.ENTRY_POINT_GROUP))
    with pytest.raises(PatternError, match="holds no FusionPattern"):
        load_patterns()


def test_examples_that_share_a_text_are_refused():
    """Texts stand for arguments, so two equal ones could not be told apart."""

    def search(x, scale, first, second):
        return quantize_fp8(x, scale, first), quantize_fp8(x, scale, second)

    def example():
        scale, text = quant_example()
        return [torch.randn(1, 2, 2, 16), scale, text, text]

    broken = FusionPattern(1, search, search, example)
    with pytest.raises(ValueError, match="must differ from each other"):
        PatternRunner(CatalogEntry("broken", broken, "Broken.", "test", None))
