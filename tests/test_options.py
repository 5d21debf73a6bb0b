"""Options: what is accepted, and what a wrong one says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rope_fusion.options import DUMP_VARIABLE, Options, RopeFusionOptionError, describe, make_options, parse
from rope_fusion.report import Report


def test_keys_without_the_prefix_go_to_inductor() -> None:
    ours, inductors = parse({"rope_fusion.numerics": "exact", "max_autotune": True, "triton.cudagraphs": False})
    assert ours == Options(numerics="exact")
    assert inductors == {"max_autotune": True, "triton.cudagraphs": False}


def test_no_options_are_the_defaults() -> None:
    assert parse(None) == (Options(), {})
    assert parse({}) == (Options(), {})


def test_dashes_are_underscores_as_in_inductors_own_options() -> None:
    assert parse({"rope_fusion.on-mismatch": "fallback"})[0].on_mismatch == "fallback"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rope_fusion.dumpdir", "rope_fusion.dump_dir"),
        ("rope_fusion.strikt", "rope_fusion.strict"),
        ("rope_fusion.kernel", "rope_fusion.kernels"),
        ("rope_fusion.MAX_TOKEN", "rope_fusion.max_tokens"),
    ],
)
def test_unknown_key_names_the_nearest_known_one(key: str, nearest: str) -> None:
    with pytest.raises(RopeFusionOptionError, match=f"unknown option .*nearest known one is {nearest} "):
        parse({key: 1})


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("kernels", "tritton", "use 'triton'"),
        ("kernels", None, "use one of those"),
        ("numerics", 32, 'takes "fp32" or "exact", got 32'),
        ("strict", 1, "use True or False"),
        ("strict", "yes", "use True or False"),
        ("dump_dir", 7, "use a str or a pathlib.Path"),
        ("dump_dir", "", "name a folder"),
        ("dump_dir", "a\0b", "name a folder"),
        ("dump_dir", b"folder", "use a str or a pathlib.Path"),
        ("disable", {"rope_kv": True}, "use a list of pattern names"),
        ("disable", [3], "every pattern name is a non-empty str"),
        ("disable", 3, "use a list of pattern names"),
        ("derived_budget", -1, "cannot be negative"),
        ("derived_budget", 1.5, "between 0.0 and 1.0"),
        ("derived_budget", float("nan"), "between 0.0 and 1.0"),
        ("derived_budget", True, "use an int"),
        ("freshness_interval", 2.0, "use an int"),
        ("freshness_interval", -2, "cannot be negative"),
        ("max_tokens", "16", "use an int"),
        ("verify", "once", "use one of those"),
        ("on_mismatch", "rais", "use 'raise'"),
        ("check_bounds", 0, "use True or False"),
        ("report", {}, "make one with rope_fusion.Report()"),
        ("mode", 3, "use a str"),
        ("mode", "", "use a str"),
    ],
)
def test_unfit_value_says_what_it_got_and_what_to_do(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(RopeFusionOptionError) as caught:
        parse({f"rope_fusion.{name}": value})
    text = str(caught.value)
    assert text.startswith(f"option rope_fusion.{name} takes ")
    assert sentence in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "options", [[("rope_fusion.strict", True)], "rope_fusion.strict", 3, {3: 4}, {"rope_fusion": 1}]
)
def test_options_that_are_no_dict_of_names_are_refused(options: Any) -> None:
    with pytest.raises(RopeFusionOptionError):
        parse(options)


def test_a_file_is_no_dump_dir(tmp_path: Path) -> None:
    file = tmp_path / "graphs"
    file.write_text("")
    with pytest.raises(RopeFusionOptionError, match="it is a file; name a folder"):
        make_options({"dump_dir": file})
    assert make_options({"dump_dir": tmp_path}).dump_dir == str(tmp_path)


def test_environment_gives_dump_dir_unless_the_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DUMP_VARIABLE, "from_environment")
    assert make_options({}).dump_dir == "from_environment"
    assert make_options({"dump_dir": "from_option"}).dump_dir == "from_option"
    assert make_options({"dump_dir": None}).dump_dir is None
    monkeypatch.setenv(DUMP_VARIABLE, "")
    assert make_options({}).dump_dir is None


def test_disabled_names_are_sorted_and_given_once_or_by_comma() -> None:
    assert make_options({"disable": ["b", "a", "b"]}).disable == ("a", "b")
    assert make_options({"disable": "b, a"}).disable == ("a", "b")


def test_cache_key_covers_every_option_but_where_reports_and_dumps_go() -> None:
    changed: dict[str, Any] = {
        "kernels": "reference",
        "numerics": "exact",
        "mode": "reduce-overhead",
        "strict": True,
        "disable": ("rope_kv",),
        "max_tokens": 5,
        "derived_budget": 5,
        "assume_frozen": True,
        "freshness_interval": 5,
        "verify": "first",
        "on_mismatch": "fallback",
        "check_bounds": True,
    }
    names = {field.name for field in dataclasses.fields(Options)}
    assert names == {*changed, "dump_dir", "report"}
    keys = {Options(**{name: value}).cache_key() for name, value in changed.items()}
    assert len(keys | {Options().cache_key()}) == len(changed) + 1
    assert Options(dump_dir="x", report=Report()).cache_key() == Options().cache_key()


def test_every_option_is_documented_and_its_default_passes_its_own_check() -> None:
    rows = describe()
    assert [name for name, *_ in rows] == [f"rope_fusion.{field.name}" for field in dataclasses.fields(Options)]
    for name, takes, default, doc in rows:
        assert takes, name
        assert default, name
        assert doc.endswith("."), name


def test_options_are_hashable_and_frozen() -> None:
    options = make_options({"disable": ["a"]})
    assert hash(options) == hash(make_options({"disable": ["a"]}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.strict = True  # type: ignore[misc]


_names = st.one_of(st.sampled_from([field.name for field in dataclasses.fields(Options)]), st.text(max_size=20))
_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.text()),
    st.sets(st.integers()),
)


@given(st.dictionaries(_names, _values, max_size=3))
def test_any_settings_give_options_or_one_sentence(settings: dict[str, Any]) -> None:
    try:
        ours, inductors = parse({f"rope_fusion.{name}": value for name, value in settings.items()})
    except RopeFusionOptionError:
        return
    assert inductors == {}
    assert isinstance(ours, Options)
