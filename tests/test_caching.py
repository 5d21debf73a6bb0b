"""What a compiled graph is stored under: everything that could change it, and nothing that could not."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor

from rope_fusion import engines, fusion_pass
from rope_fusion._torch import counters, inductor_config
from rope_fusion.backend import inductor_options
from rope_fusion.capability import GateContext
from rope_fusion.catalog import CatalogEntry, load_patterns
from rope_fusion.fusion_pass import FusionPass
from rope_fusion.options import Options

ROOT = Path(__file__).resolve().parent.parent


def identity(**options: Any) -> Any:
    return FusionPass(Options(**options)).uuid()


def test_identity_is_the_same_for_the_same_settings() -> None:
    assert identity() == identity()
    assert identity(disable=("rope_kv", "inverse_rope")) == identity(disable=["inverse_rope", "rope_kv"])


OTHER: dict[str, Any] = {
    "kernels": "reference",
    "numerics": "exact",
    "strict": True,
    "disable": ("rope_kv",),
    "max_tokens": 7,
    "derived_budget": 0,
    "assume_frozen": True,
    "freshness_interval": 5,
    "on_mismatch": "fallback",
    "check_bounds": True,
}


@pytest.mark.parametrize("name", OTHER)
def test_every_option_that_may_change_the_graph_changes_the_identity(name: str) -> None:
    assert identity(**{name: OTHER[name]}) != identity()


def test_every_option_is_accounted_for() -> None:
    """A new option is either part of the identity, or keeps graphs out of caches, or only says where reports go."""
    elsewhere = {"verify", "dump_dir", "report", "mode"}
    assert {field.name for field in dataclasses.fields(Options)} == set(OTHER) | elsewhere


def test_graphs_that_must_be_seen_are_kept_out_of_caches(tmp_path: Path) -> None:
    assert identity(verify="first") is None
    assert identity(verify="always") is None
    assert identity(dump_dir=str(tmp_path)) is None


def test_where_reports_go_does_not_change_the_identity() -> None:
    from rope_fusion.report import Report

    assert identity(report=Report()) == identity()


def test_every_file_of_the_package_and_of_the_patterns_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: set[Path] = set()

    def digest(files: Any) -> str:
        digested.update(Path(file).resolve() for file in files)
        return ""

    monkeypatch.setattr(fusion_pass, "_files_digest", digest)
    identity()
    package = {path.resolve() for path in (ROOT / "rope_fusion").rglob("*.py")}
    patterns = {path.resolve() for path in (ROOT / "patterns").glob("*.py")} - {ROOT / "patterns" / "__init__.py"}
    assert package <= digested
    assert patterns <= digested


def test_a_changed_file_changes_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "pattern.py"
    file.write_text("PRIORITY = 1\n")
    before = fusion_pass._files_digest((str(file),))
    fusion_pass._files_digest.cache_clear()  # another process
    file.write_text("PRIORITY = 2\n")
    assert fusion_pass._files_digest((str(file),)) != before


def test_versions_of_torch_and_triton_are_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.9")
        assert identity() != before
    monkeypatch.setattr(fusion_pass, "_triton_version", lambda: "9.9.9")
    assert identity() != before


def test_what_a_gate_answers_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity()
    original = CatalogEntry.verdict

    def shut(self: CatalogEntry, context: GateContext) -> str | None:
        return "shut today" if self.name == "kv_write_in_place" else original(self, context)

    monkeypatch.setattr(CatalogEntry, "verdict", shut)
    assert identity() != before


def test_a_third_partys_pattern_and_its_file_are_part_of_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identity()
    file = tmp_path / "theirs.py"
    file.write_text("# one\n")
    theirs = dataclasses.replace(load_patterns()[-1], name="theirs", origin="their-package", file=str(file))
    ours = load_patterns()
    monkeypatch.setattr(fusion_pass, "load_patterns", lambda disable: [*ours, theirs][: None if not disable else -1])
    with_theirs = identity()
    assert with_theirs != before
    fusion_pass._files_digest.cache_clear()
    file.write_text("# two\n")
    assert identity() != with_theirs
    assert identity(disable=("theirs",)) != with_theirs


def test_a_cache_provider_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity()
    monkeypatch.setattr(fusion_pass, "cache_providers", lambda: [*engines.cache_providers(), "another"])
    assert identity() != before


def write(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
    """Both halves of a joint cache: a write that the pass changes on the CPU."""
    cache[0].view(-1, 2, 8)[slots] = k
    cache[1].view(-1, 2, 8)[slots] = -k
    return k + 1


def arguments() -> tuple[Tensor, ...]:
    return torch.zeros(2, 4, 4, 2, 8), torch.ones(3, 2, 8), torch.tensor([1, 5, 9])


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder; generated kernels are few and small."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with inductor_config.patch(fx_graph_cache=True):
        yield tmp_path


def traffic(**how: Any) -> Counter[str]:
    """What Inductor's and AOTAutograd's caches counted while one function was compiled and called."""
    torch.compiler.reset()
    counters.clear()
    cache, k, slots = arguments()
    with torch.no_grad():
        result = torch.compile(write, **how)(cache, k, slots)
    assert torch.equal(cache[0].view(-1, 2, 8)[slots], k)
    assert torch.equal(result, k + 1)
    found = Counter({name: n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache_")})
    found.update({name: n for name, n in counters["aot_autograd"].items() if name.startswith("autograd_cache_")})
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "plain Inductor": {},
    "ours": {"backend": "rope_fusion"},
    "ours, exact": {"backend": "rope_fusion", "options": {"rope_fusion.numerics": "exact"}},
    "ours, one pattern out": {"backend": "rope_fusion", "options": {"rope_fusion.disable": ["kv_write_in_place"]}},
}


@pytest.mark.slow
@pytest.mark.parametrize("autograd", [False, True])
def test_no_two_settings_share_an_entry(cache_dir: Path, autograd: bool) -> None:
    with torch._functorch.config.patch(enable_autograd_cache=autograd):
        for name, how in SETTINGS.items():
            counted = traffic(**how)
            assert counted["fxgraph_cache_hit"] == 0, name
            assert counted["autograd_cache_hit"] == 0, name
        for name, how in SETTINGS.items():
            counted = traffic(**how)
            assert counted["fxgraph_cache_miss"] == 0, name
            assert counted["autograd_cache_miss"] == 0, name


@pytest.mark.slow
def test_the_same_pass_in_plain_inductor_shares_no_entry_with_other_settings(cache_dir: Path) -> None:
    assert traffic(options=inductor_options())["fxgraph_cache_miss"] == 1
    assert traffic(options=inductor_options())["fxgraph_cache_hit"] == 1
    assert traffic(options=inductor_options(numerics="exact"))["fxgraph_cache_hit"] == 0
    assert traffic()["fxgraph_cache_hit"] == 0


@pytest.mark.slow
def test_a_gate_that_answers_otherwise_recompiles(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic(backend="rope_fusion")
    monkeypatch.setattr(CatalogEntry, "verdict", lambda self, context: "shut today")
    assert traffic(backend="rope_fusion")["fxgraph_cache_hit"] == 0


@pytest.mark.slow
def test_a_self_checked_graph_is_never_stored(cache_dir: Path) -> None:
    checked = {"backend": "rope_fusion", "options": {"rope_fusion.verify": "first"}}
    for _ in range(2):
        counted = traffic(**checked)
        assert counted["fxgraph_cache_hit"] == 0
        assert counted["autograd_cache_hit"] == 0


def test_triton_is_looked_up_where_it_is_installed() -> None:
    assert (fusion_pass._triton_version() is None) == (importlib.util.find_spec("triton") is None)
