"""Imports of the package point one way, from what users touch down to what nothing else explains."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From top to bottom. A module imports only from its own layer or from lower ones.
LAYERS = [
    {"cli"},
    {"demo", "bench", "pytest_plugin"},
    {"testing"},
    {"backend"},
    {"vllm"},
    {"fusion_pass", "derived"},
    {"matcher", "verify", "bounds"},
    {"catalog"},
    {"patterns"},
    {"canonical", "kernels", "pattern", "capability", "transaction"},
    {"options", "engines"},
    {"report", "graph_text", "_torch", "_version"},
]
RANK = {area: rank for rank, layer in enumerate(reversed(LAYERS)) for area in layer}


def _files() -> list[Path]:
    package = [path for path in (ROOT / "rope_fusion").rglob("*.py") if path != ROOT / "rope_fusion" / "__init__.py"]
    return sorted([*package, *(ROOT / "patterns").glob("*.py")])


def _area(file: Path) -> str:
    if file.is_relative_to(ROOT / "patterns"):
        return "patterns"
    return _room(file.relative_to(ROOT / "rope_fusion").with_suffix("").parts[0])


def _room(name: str) -> str:
    return "bench" if name.startswith("bench_") else name


def _imported_areas(file: Path) -> dict[str, int]:
    """Area of rope_fusion → line that imports it, function-level imports and type-checking ones included."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write absolute imports; static tools lose relative ones"
            parts = (node.module or "").split(".")
            names = [alias.name for alias in node.names] if parts == ["rope_fusion"] else parts[1:2]
        elif isinstance(node, ast.Import):
            split = [alias.name.split(".") for alias in node.names]
            parts = ["rope_fusion"] if any(name[0] == "rope_fusion" for name in split) else [""]
            names = [name[1] for name in split if name[0] == "rope_fusion" and len(name) > 1]
        else:
            continue
        if parts[0] == "rope_fusion":
            found.update(dict.fromkeys((_room(name) for name in names if name != "__version__"), node.lineno))
    return found


@pytest.mark.parametrize("file", _files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_one_way(file: Path) -> None:
    area = _area(file)
    assert area in RANK, f"give {area!r} a place in LAYERS of {Path(__file__).name}"
    for imported, line in _imported_areas(file).items():
        assert imported in RANK, f"{file}:{line}: give {imported!r} a place in LAYERS of {Path(__file__).name}"
        assert RANK[imported] <= RANK[area], f"{file}:{line}: {area} must not import {imported}, which lies above it"


def test_patterns_do_not_import_each_other() -> None:
    for file in (ROOT / "patterns").glob("*.py"):
        assert "patterns" not in _imported_areas(file), f"{file}: a pattern stands alone; shared code goes below it"


def test_upward_imports_would_be_noticed(tmp_path: Path) -> None:
    wrong = tmp_path / "report.py"
    wrong.write_text("def f():\n    from rope_fusion.backend import rope_fusion\n    import rope_fusion.cli\n")
    assert _imported_areas(wrong) == {"backend": 2, "cli": 3}
    assert RANK["backend"] > RANK["report"]
