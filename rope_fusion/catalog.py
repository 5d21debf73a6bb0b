"""Finds patterns: ours (every file of `rope_fusion.patterns`) and third parties' (entry points `rope_fusion.patterns`)."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from rope_fusion.capability import GateContext
from rope_fusion.pattern import FusionPattern

ENTRY_POINT_GROUP = "rope_fusion.patterns"


class PatternError(RuntimeError):
    """A pattern that cannot be loaded or is not what it should be."""


class UnknownPatternError(PatternError):
    """A name that no pattern has: the user's mistake, and no failure of the pass."""


@dataclass(frozen=True)
class CatalogEntry:
    """A pattern with its name, its summary and where it came from."""

    name: str
    pattern: FusionPattern
    summary: str
    origin: str  # "rope_fusion" or the distribution that provides the entry point
    file: str | None

    @property
    def priority(self) -> int:
        return self.pattern.priority

    def verdict(self, context: GateContext) -> str | None:
        """None when every gate is open on this device, else a sentence."""
        return self.pattern.verdict(context)


def load_patterns(disable: Iterable[str] = ()) -> list[CatalogEntry]:
    """Every enabled pattern, by descending priority, then by name.

    Raises:
        PatternError: a name in `disable` is unknown, a file holds no PATTERN, or two patterns share a name.
    """
    return list(_enabled_patterns(frozenset(disable)))


def check_names(names: Collection[str]) -> None:
    """Raise PatternError for the first of `names` that no pattern has; loads none."""
    if not names:
        return
    own = [info.name for info in pkgutil.iter_modules(_patterns_package().__path__)]
    known = [*own, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]
    for name in sorted(names):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known patterns: {', '.join(sorted(known))}"
            raise PatternError(f"there is no pattern {name!r} to disable; {hint}")


@functools.cache
def _enabled_patterns(disabled: frozenset[str]) -> tuple[CatalogEntry, ...]:
    """Every pattern but those named. None of the code of a third party's pattern that is turned off runs."""
    check_names(disabled)
    entries = [*_own_patterns(), *_third_party_patterns(disabled)]
    seen: dict[str, CatalogEntry] = {}
    for entry in entries:
        if entry.name in seen:
            raise PatternError(
                f"two patterns are named {entry.name!r}: one from {seen[entry.name].origin}, one from {entry.origin}; "
                "rename or uninstall one"
            )
        seen[entry.name] = entry
    enabled = (entry for entry in entries if entry.name not in disabled)
    return tuple(sorted(enabled, key=lambda entry: (-entry.priority, entry.name)))


def _own_patterns() -> list[CatalogEntry]:
    package = _patterns_package()
    entries = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        entries.append(_entry(info.name, module, "rope_fusion"))
    if not entries:
        raise PatternError(
            f"no pattern files in {list(package.__path__)}; in a checkout install with: pip install -e ."
        )
    return entries


def _patterns_package() -> ModuleType:
    """`rope_fusion.patterns`, also in a checkout that is not installed, where the files lie beside the package."""
    try:
        return importlib.import_module("rope_fusion.patterns")
    except ModuleNotFoundError as error:
        folder = Path(__file__).resolve().parent.parent / "patterns"
        if error.name != "rope_fusion.patterns" or not (folder / "__init__.py").is_file():
            raise
    spec = importlib.util.spec_from_file_location(
        "rope_fusion.patterns", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _third_party_patterns(disabled: frozenset[str]) -> list[CatalogEntry]:
    entries = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in disabled:
            continue
        origin = point.dist.name if point.dist is not None else point.value
        try:
            loaded = point.load()
        except Exception as error:
            raise PatternError(
                f"the pattern {point.name!r} of {origin} ({point.value}) cannot be loaded: {error!r}; "
                f"uninstall or repair it, or leave it out with rope_fusion.disable=[{point.name!r}]"
            ) from error
        entries.append(_entry(point.name, loaded, origin))
    return entries


def _entry(name: str, source: ModuleType | FusionPattern, origin: str) -> CatalogEntry:
    pattern = source if isinstance(source, FusionPattern) else getattr(source, "PATTERN", None)
    if not isinstance(pattern, FusionPattern):
        raise PatternError(f"{origin}: {name} holds no FusionPattern named PATTERN, got {type(pattern).__name__}")
    module = source if isinstance(source, ModuleType) else inspect.getmodule(pattern.search)
    doc = inspect.getdoc(module) if module is not None else None
    file = getattr(module, "__file__", None)
    return CatalogEntry(name, pattern, (doc or "").strip().split("\n")[0], origin, file)
