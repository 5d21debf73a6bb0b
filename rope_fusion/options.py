"""The options of rope_fusion: their names, checks, defaults and documentation, stated once.

Users give them as ``rope_fusion.*`` keys of ``torch.compile(options=...)``, or without the prefix as keyword arguments
of ``rope_fusion.inductor_options``. The field documentation below is what ``rope-fusion options`` prints.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rope_fusion.report import Report

PREFIX = "rope_fusion."
DUMP_VARIABLE = "ROPE_FUSION_DUMP"


class RopeFusionOptionError(ValueError):
    """An option of rope_fusion is unknown or has a value that it cannot take."""


def _one_of(*words: str) -> tuple[str, Callable[[Any], Any]]:
    def check(value: Any) -> str:
        if isinstance(value, str) and value in words:
            return value
        near = difflib.get_close_matches(value, words, 1) if isinstance(value, str) else []
        raise ValueError(f"use {near[0]!r}" if near else "use one of those")

    return " or ".join(f'"{word}"' for word in words), check


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("use True or False")


def _directory(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise ValueError("use a str or a pathlib.Path")
    path = os.fspath(value)
    if not path or "\0" in path:
        raise ValueError("name a folder")
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError("it is a file; name a folder")
    return path


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise ValueError("use a list of pattern names, as `rope-fusion list` prints them")
    names = list(value)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError("every pattern name is a non-empty str")
    return tuple(sorted(set(names)))


def _budget(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("use an int (bytes) or a float between 0.0 and 1.0 (fraction of the device's memory)")
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise ValueError("a fraction lies between 0.0 and 1.0; use an int for bytes")
    if value < 0:
        raise ValueError("it cannot be negative; 0 keeps nothing")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("use an int")
    if value < 0:
        raise ValueError("it cannot be negative")
    return value


def _limit(value: Any) -> int | None:
    return None if value is None else _count(value)


def _mode(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value  # torch.compile's own list is checked by the backend; it grows with torch
    raise ValueError("use a str")


def _report(value: Any) -> Report | None:
    if value is None or isinstance(value, Report):
        return value
    raise ValueError("make one with rope_fusion.Report()")


def _option(default: Any, takes: str, check: Callable[[Any], Any], doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"takes": takes, "check": check, "doc": doc})


@dataclass(frozen=True)
class Options:
    """Checked options of one compilation; hashable, comparable, never changed."""

    kernels: str = _option(
        "auto",
        *_one_of("auto", "reference", "triton"),
        doc="Which implementation the fused operators take. auto: the Triton kernel where it is known to win, "
        "elsewhere the program stays as it is. reference: the eager reference on any device, for tests. triton: the "
        "Triton kernel wherever it runs.",
    )
    numerics: str = _option(
        "fp32",
        *_one_of("fp32", "exact"),
        doc="fp32: compute in float32, never further from the float64 result than the unfused program. exact: bit for "
        "bit what eager computes.",
    )
    mode: str | None = _option(
        None,
        'a mode of torch.compile such as "reduce-overhead", or None',
        _mode,
        doc="The mode of torch.compile, which itself takes either mode= or options=, never both.",
    )
    report: Report | None = _option(  # noqa: RUF009
        None,
        "a rope_fusion.Report, or None",
        _report,
        doc="Add the report of every graph compiled for this function to this Report; rope_fusion.record() collects "
        "them without it.",
    )
    strict: bool = _option(
        False,
        "bool",
        _boolean,
        doc="Raise where rope_fusion would otherwise warn and compile the graph unfused.",
    )
    disable: tuple[str, ...] = _option(
        (),
        "a list of pattern names",
        _names,
        doc="Patterns to leave out, by the names that `rope-fusion list` prints.",
    )
    dump_dir: str | None = _option(
        None,
        "a folder, or None",
        _directory,
        doc="Write every graph before and after the pass, and their difference, as text into this folder. Inductor's "
        "caches are bypassed, so that there is a graph to write. The environment variable "
        f"{DUMP_VARIABLE} sets it too.",
    )
    max_tokens: int | None = _option(
        None,
        "an int, or None",
        _limit,
        doc="Leave graphs alone whose token count may exceed this number. None: no limit.",
    )
    derived_budget: int | float = _option(
        0.1,
        "bytes (int) or a fraction of the device's memory (float)",
        _budget,
        doc="The most memory that derived tensors may hold. 0 derives none.",
    )
    assume_frozen: bool = _option(
        False,
        "bool",
        _boolean,
        doc="Derive from tensors that carry no version counter (made under inference_mode), promising that they are "
        "never written.",
    )
    freshness_interval: int = _option(
        32,
        "an int",
        _count,
        doc="Every how many calls a few elements of each derived tensor's source are compared, to notice writes that "
        "leave the version counter alone (`.data.copy_`, NumPy aliases). 0: never.",
    )
    verify: str = _option(
        "off",
        *_one_of("off", "first", "always"),
        doc="Run the unfused program beside each fused site and compare: at its first call, or at every call (slow).",
    )
    on_mismatch: str = _option(
        "raise",
        *_one_of("raise", "fallback"),
        doc="What a failed verification does: raise, or warn and use the unfused result from then on.",
    )
    check_bounds: bool = _option(
        False,
        "bool",
        _boolean,
        doc="Check positions and slots against the table and the cache inside the fused kernel (device-side assert).",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))

    def cache_key(self) -> str:
        """The options that may change what is compiled, as stable text."""
        names = sorted(field.name for field in dataclasses.fields(self) if field.name not in ("dump_dir", "report"))
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    try:
        return field.metadata["check"](value)
    except ValueError as problem:
        raise RopeFusionOptionError(
            f"option {PREFIX}{field.name} takes {field.metadata['takes']}, got {_shown(value)}: {problem}"
        ) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def make_options(settings: Mapping[str, Any]) -> Options:
    """Options from names without the prefix; unknown names and unfit values raise ``RopeFusionOptionError``.

    Where ``dump_dir`` is not among them, the environment variable ``ROPE_FUSION_DUMP`` gives it.
    """
    known = [field.name for field in dataclasses.fields(Options)]
    settings = {name.replace("-", "_"): value for name, value in settings.items()}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name.lower(), known, 1, cutoff=0.0)[0]
            raise RopeFusionOptionError(
                f"unknown option {PREFIX}{_clip(name)}; the nearest known one is {PREFIX}{near} "
                "(`rope-fusion options` lists them all)"
            )
    if "dump_dir" not in settings and os.environ.get(DUMP_VARIABLE):
        settings["dump_dir"] = os.environ[DUMP_VARIABLE]
    return Options(**settings)


def _clip(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."


def parse(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Split ``torch.compile``'s options into ours (keys ``rope_fusion.*``) and those of Inductor (every other key)."""
    ours: dict[str, Any] = {}
    inductors: dict[str, Any] = {}
    if options is not None and not isinstance(options, Mapping):
        raise RopeFusionOptionError(f"options must be a dict of str to value, got {_shown(options)}")
    for key, value in (options or {}).items():
        if not isinstance(key, str):
            raise RopeFusionOptionError(f"options must have str keys, got {_shown(key)}")
        if key.replace("-", "_").startswith(PREFIX):
            ours[key[len(PREFIX) :]] = value
        elif key.replace("-", "_") == PREFIX.rstrip("."):
            raise RopeFusionOptionError(f"option {key!r} lacks a name; write for example {PREFIX}dump_dir")
        else:
            inductors[key] = value
    return make_options(ours), inductors


def describe() -> list[tuple[str, str, str, str]]:
    """One row per option: full name, what it takes, default, documentation."""
    return [
        (PREFIX + field.name, field.metadata["takes"], repr(field.default), field.metadata["doc"])
        for field in dataclasses.fields(Options)
    ]
