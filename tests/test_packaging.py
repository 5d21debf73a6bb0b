"""What is installed, what importing costs, and what a wheel holds."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import rope_fusion

ROOT = Path(__file__).resolve().parent.parent


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_is_light() -> None:
    # Timed inside the process: neither the interpreter's start nor torch counts. Best of three, for busy machines.
    code = """
import sys, time
import torch
start = time.perf_counter()
import rope_fusion
print(time.perf_counter() - start, any(name.startswith("torch._inductor.") for name in sys.modules))
"""
    taken, inductor = zip(*(python(code).split() for _ in range(3)), strict=True)
    assert set(inductor) == {"False"}
    assert min(map(float, taken)) < 0.3


@pytest.mark.parametrize(
    "code",
    [
        "import rope_fusion",
        "import rope_fusion; rope_fusion.Options, rope_fusion.Report, rope_fusion.record, rope_fusion.invalidate",
        "import rope_fusion.pytest_plugin",
        "import rope_fusion.cli",
    ],
)
def test_neither_torch_nor_inductor_is_imported_by(code: str) -> None:
    assert python(f"{code}\nimport sys; print('torch' in sys.modules)") == "False"


def test_public_names_all_resolve() -> None:
    for name in rope_fusion.__all__:
        assert getattr(rope_fusion, name) is not None
    assert set(dir(rope_fusion)) == set(rope_fusion.__all__)


def test_unknown_attribute_names_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'inductor_option'; it offers .*inductor_options"):
        rope_fusion.inductor_option  # noqa: B018


def test_backend_is_known_to_torch_without_an_import() -> None:
    assert python("import torch; print('rope_fusion' in torch._dynamo.list_backends())") == "True"


def test_a_process_that_loaded_the_backend_ends_cleanly() -> None:
    assert python("import rope_fusion.backend; print('loaded')") == "loaded"  # operators are taken down at exit


def test_entry_points_are_installed() -> None:
    points = importlib.metadata.entry_points()
    assert points.select(group="torch_dynamo_backends")["rope_fusion"].value == "rope_fusion.backend:rope_fusion"
    assert points.select(group="console_scripts")["rope-fusion"].value == "rope_fusion.cli:main"


def test_a_checkout_that_is_not_installed_works_by_importing_the_backend() -> None:
    # -S: no site-packages, hence no entry point; torch's own folder is put back by hand.
    import torch

    packages = Path(torch.__file__).parent.parent
    code = f"""
import sys, importlib.metadata
sys.path += [{str(ROOT)!r}, {str(packages)!r}]
importlib.metadata.entry_points = lambda **kw: importlib.metadata.EntryPoints(())
import torch, rope_fusion.backend
from rope_fusion.catalog import load_patterns
print('rope_fusion' in torch._dynamo.list_backends(), len(load_patterns()) > 0)
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True True", done.stderr


def test_patterns_imported_under_their_folder_name_are_refused() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import patterns"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "would load a second copy" in done.stderr


def test_every_package_folder_is_listed_for_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "rope_fusion").rglob("*.py")}
    assert listed == {".".join(folder.parts) for folder in folders} | {"rope_fusion.patterns"}


def test_wheel_holds_every_source_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("rope_fusion", "patterns"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "rope_fusion").rglob("*.py")}
    wanted |= {f"rope_fusion/patterns/{path.name}" for path in (ROOT / "patterns").glob("*.py")}
    assert wanted | {"rope_fusion/py.typed"} <= held
    assert not any(name.startswith(("patterns/", "tests/")) for name in held)


def test_requirements_for_development_satisfy_the_package() -> None:
    from packaging.requirements import Requirement

    pins = {}
    for line in (ROOT / "requirements-dev.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            pins[requirement.name] = specifier.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[requirement.name]), requirement
