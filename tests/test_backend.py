"""The backend: what it hands to Inductor, whose passes run, and what is reported."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_fusion
from rope_fusion import backend
from rope_fusion._torch import CustomGraphPass, inductor_config
from rope_fusion.backend import PassSequence, inductor_options
from rope_fusion.fusion_pass import FusionPass
from rope_fusion.options import Options, RopeFusionOptionError
from rope_fusion.report import GraphReport, Report, RopeFusionWarning, published
from rope_fusion.testing import assert_hits, find_rotations

HOOK = backend.HOOK


def write_joint(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
    """A write into the second half of a joint cache, which Inductor alone would do by copying all of it."""
    cache[1].view(-1, 2, 8)[slots] = k
    return cache.sum()


def cache_arguments() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.zeros(2, 4, 4, 2, 8), torch.randn(2, 2, 8), torch.tensor([3, 9])


class NotingPass(CustomGraphPass):
    def __init__(self, notes: list[str], name: str, identity: Any = "noting") -> None:
        self.notes, self.name, self.identity = notes, name, identity

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.notes.append(self.name)

    def uuid(self) -> Any:
        return self.identity


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran, in order; our own pass notes itself as "ours"."""
    found: list[str] = []
    original = FusionPass.__call__

    def noting(self: FusionPass, graph: torch.fx.Graph) -> None:
        found.append("ours")
        original(self, graph)

    monkeypatch.setattr(FusionPass, "__call__", noting)
    return found


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings handed to Inductor; nothing is compiled."""
    found: list[dict[str, Any]] = []

    def compile_fx(gm: Any, inputs: Any, config_patches: dict[str, Any], **others: Any) -> Any:
        found.append(config_patches)
        return gm.forward

    monkeypatch.setattr(backend, "compile_fx", compile_fx)
    return found


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("chosen", ["rope_fusion", backend.rope_fusion, functools.partial(backend.rope_fusion)])
def test_backend_works_by_name_and_as_a_function(chosen: Any) -> None:
    x = torch.ones(2)
    assert torch.equal(torch.compile(double, backend=chosen)(x), double(x))


def test_mode_and_inductor_settings_reach_inductor(patches: list[dict[str, Any]]) -> None:
    x = torch.ones(2)
    torch.compile(double, backend="rope_fusion", mode="reduce-overhead")(x)
    torch.compile(double, backend="rope_fusion", options={"rope_fusion.mode": "reduce-overhead"})(x)
    torch.compile(double, backend="rope_fusion", options={"epilogue_fusion": False})(x)
    assert [patch.get("triton.cudagraphs") for patch in patches] == [True, True, None]
    assert patches[2]["epilogue_fusion"] is False
    assert all(not key.startswith("rope_fusion") for patch in patches for key in patch)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rope_fusion.dumpdir": "x"}, "nearest known one is rope_fusion.dump_dir"),
        ({"rope_fusion.kernels": "gpu"}, 'takes "auto" or "reference" or "triton"'),
        ({"max_autotun": True}, "Unexpected optimization option max_autotun"),
        ({"rope_fusion.mode": "fast"}, "fast"),
    ],
)
def test_a_wrong_option_stops_the_compilation_with_its_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        torch.compile(double, backend="rope_fusion", options=options)(torch.ones(2))


def test_the_users_pass_runs_before_ours(notes: list[str]) -> None:
    with inductor_config.patch({HOOK: NotingPass(notes, "configured")}):
        torch.compile(double, backend="rope_fusion")(torch.ones(2))
        torch.compile(double, backend="rope_fusion", options={HOOK: NotingPass(notes, "given")})(torch.ones(2))
    assert notes == ["configured", "ours", "given", "ours"]


def test_several_passes_of_the_user_keep_their_order(notes: list[str]) -> None:
    options: dict[str, Any] = {HOOK: [NotingPass(notes, "first"), NotingPass(notes, "second")]}
    torch.compile(double, backend="rope_fusion", options=options)(torch.ones(2))
    assert notes == ["first", "second", "ours"]


def test_the_users_pass_may_be_a_plain_function(notes: list[str]) -> None:
    options: dict[str, Any] = {HOOK: lambda graph: notes.append("function")}
    torch.compile(double, backend="rope_fusion", options=options)(torch.ones(2))
    assert notes == ["function", "ours"]


def test_a_sequence_has_an_identity_only_if_all_its_passes_have() -> None:
    first, second = NotingPass([], "a", "one"), NotingPass([], "b", "two")
    assert PassSequence([first, second]).uuid() == ("one", "two")
    assert PassSequence([first, NotingPass([], "c", None)]).uuid() is None
    assert PassSequence([first, lambda graph: None]).uuid() is None


def test_inductor_options_put_the_pass_into_plain_inductor(notes: list[str]) -> None:
    options = inductor_options({"epilogue_fusion": False, HOOK: NotingPass(notes, "given")}, numerics="exact")
    assert options["epilogue_fusion"] is False
    with rope_fusion.record() as report:
        torch.compile(write_joint, options=options)(*cache_arguments())
    assert notes == ["given", "ours"]
    assert report.hits == {"kv_write_in_place": 1}


def test_inductor_options_of_inductor_options_hold_the_pass_once() -> None:
    twice = inductor_options(inductor_options(), numerics="exact")
    assert isinstance(twice[HOOK], FusionPass)
    assert twice[HOOK].options == Options(numerics="exact")


@pytest.mark.parametrize(
    ("settings", "ours", "sentence"),
    [
        ({"rope_fusion.strict": True}, {}, r"goes without its prefix here: inductor_options\(strict=...\)"),
        ({}, {"strikt": True}, "nearest known one is rope_fusion.strict"),
        ({}, {"report": Report()}, 'needs backend="rope_fusion"; use rope_fusion.record()'),
        ({}, {"mode": "max-autotune"}, 'needs backend="rope_fusion"'),
    ],
)
def test_wrong_inductor_options_say_what_to_do(settings: dict, ours: dict, sentence: str) -> None:
    with pytest.raises(RopeFusionOptionError, match=sentence):
        inductor_options(settings, **ours)


def test_each_compiled_graph_reaches_the_recording_and_the_report_option() -> None:
    report = Report()
    options: dict[str, Any] = {"rope_fusion.report": report}
    compiled = torch.compile(write_joint, backend="rope_fusion", options=options)
    with rope_fusion.record() as recorded:
        compiled(*cache_arguments())
    assert report.hits == recorded.hits == {"kv_write_in_place": 1}
    assert report.graphs[0].nodes_before > 0
    assert report.graphs[0].pass_ms > 0


def test_compiling_leaves_nothing_among_inductors_counters() -> None:
    before = published()
    torch.compile(write_joint, backend="rope_fusion")(*cache_arguments())
    assert published() == before


def test_fixture_reports_what_the_test_compiles(rope_fusion_report: Report) -> None:
    torch.compile(write_joint, backend="rope_fusion")(*cache_arguments())
    assert rope_fusion_report.hits == {"kv_write_in_place": 1}


def test_threads_get_their_own_reports() -> None:
    functions: list[Callable[[Tensor], Tensor]] = [lambda x: x + 1, lambda x: (x + 2).sin() * 3]
    seen: dict[int, list[GraphReport]] = {}
    together = threading.Barrier(2)

    def work(index: int) -> None:
        with rope_fusion.record() as report:
            together.wait()
            torch.compile(functions[index], backend="rope_fusion")(torch.ones(4))
            together.wait()
        seen[index] = report.graphs

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(seen[index]) for index in range(2)] == [1, 1]
    assert seen[0][0].nodes_before < seen[1][0].nodes_before


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotation_arguments() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    angles = torch.randn(1, 6, 1, 4)
    return torch.randn(2, 6, 3, 8), angles.cos(), angles.sin()


def test_rotations_that_stay_unfused_are_one_warning_with_the_reason() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        torch.compile(rotated, backend="rope_fusion")(*rotation_arguments())
    ours = [str(warning.message) for warning in caught if warning.category is RopeFusionWarning]
    assert len(ours) == 1
    assert ours[0].startswith("rope_fusion: 1 rotation was found and none fused: ")


@pytest.mark.filterwarnings("ignore::rope_fusion.report.RopeFusionWarning")
def test_training_gives_eagers_gradients() -> None:
    gradients = []
    for function in (rotated, torch.compile(rotated, backend="rope_fusion", options={"rope_fusion.strict": True})):
        x, cos, sin = rotation_arguments()
        x.requires_grad_()
        function(x, cos, sin).square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    # A rotation is linear and two products deep; the compiled one may only fuse a multiply and an add.
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_a_failing_pass_leaves_the_graph_unfused_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("injected")

    monkeypatch.setattr("rope_fusion.fusion_pass.find_rotations", fail)
    cache, k, slots = cache_arguments()
    with warnings.catch_warnings(record=True) as caught, rope_fusion.record() as report:
        warnings.simplefilter("always")
        torch.compile(write_joint, backend="rope_fusion")(cache, k, slots)
    assert torch.equal(cache[1].view(-1, 2, 8)[slots], k)
    assert report.hits == {}
    assert "injected" in report.graphs[0].failures[0]
    assert len([warning for warning in caught if warning.category is RopeFusionWarning]) == 1
    with pytest.raises(Exception, match="injected"):
        assert_hits(write_joint, cache_arguments(), {}, options={"rope_fusion.strict": True})


def test_dump_dir_gets_the_graphs_also_when_caches_are_warm(tmp_path: Path) -> None:
    with inductor_config.patch(fx_graph_cache=True):
        for name in ("first", "second"):
            torch.compiler.reset()
            options: dict[str, Any] = {"rope_fusion.dump_dir": str(tmp_path / name)}
            torch.compile(write_joint, backend="rope_fusion", options=options)(*cache_arguments())
    for name in ("first", "second"):
        (folder,) = (tmp_path / name).iterdir()
        assert {file.name for file in folder.iterdir()} == {"before.txt", "after.txt", "diff.txt"}
        assert (folder / "before.txt").read_text() != (folder / "after.txt").read_text()


def test_assert_hits_takes_modules_and_functions() -> None:
    class Writer(torch.nn.Module):
        def forward(self, cache: Tensor, k: Tensor, *, slots: Tensor) -> Tensor:
            return write_joint(cache, k, slots)

    cache, k, slots = cache_arguments()
    assert_hits(Writer(), (cache, k), {"kv_write_in_place": 1, "rope_kv": 0}, kwargs={"slots": slots})
    assert torch.equal(cache[1].view(-1, 2, 8)[slots], k)
    report = assert_hits(write_joint, (cache, k, slots), {"kv_write_in_place": 1})
    assert report.graphs[0].hits == {"kv_write_in_place": 1}


@pytest.mark.parametrize("expected", [{}, {"kv_write_in_place": 2}, {"kv_write_in_place": 1, "rope_kv": 1}])
def test_assert_hits_shows_the_table_when_hits_differ(expected: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match=r"got \{'kv_write_in_place': 1\}\n\n +graph +pattern"):
        assert_hits(write_joint, cache_arguments(), expected)


def test_find_rotations_names_the_last_node_of_each() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(rotated, tracing_mode="fake")(*rotation_arguments())
    assert find_rotations(gm) == [{"out": "cat"}]


def test_reset_forgets_recorded_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    import torch._inductor.cudagraph_trees as trees

    monkeypatch.setattr(trees, "reset_cudagraph_trees", lambda: calls.append(True))
    torch.compile(double, backend="rope_fusion")(torch.ones(2))
    torch.compiler.reset()
    assert calls


def test_the_backend_and_plain_inductor_never_share_a_cache_entry(patches: list[dict[str, Any]]) -> None:
    torch.compile(double, backend="rope_fusion")(torch.ones(2))
    identities = [patches[0][HOOK].uuid(), inductor_options()[HOOK].uuid()]
    assert None not in identities
    assert identities[0] != identities[1]


def test_only_plain_inductor_says_that_derived_tensors_need_the_backend(rope_fusion_report: Report) -> None:
    torch.compile(double, backend="rope_fusion")(torch.ones(2))
    with rope_fusion.record() as plain:
        torch.compile(double, options=inductor_options())(torch.ones(2))
    sentence = 'derived tensors need backend="rope_fusion"'
    assert not any(closed.startswith(sentence) for closed in rope_fusion_report.graphs[0].closed_gates)
    assert any(closed.startswith(sentence) for closed in plain.graphs[0].closed_gates)


WARM_PROGRAM = """
import sys, warnings, torch, torch._functorch.config
sys.path.insert(0, sys.argv[2])
warnings.simplefilter("always")
import rope_fusion
from test_backend import cache_arguments, rotated, rotation_arguments, write_joint
torch._functorch.config.enable_autograd_cache = sys.argv[1] == "autograd"
from rope_fusion.fusion_pass import FusionPass
original = FusionPass.__call__
def noting(self, graph):
    print("the pass ran", file=sys.stderr)
    original(self, graph)
FusionPass.__call__ = noting
how = {"options": rope_fusion.inductor_options()} if sys.argv[3] == "plain" else {"backend": "rope_fusion"}
cache, k, slots = cache_arguments()
with rope_fusion.record() as report:
    torch.compile(write_joint, **how)(cache, k, slots)
    torch.compile(rotated, **how)(*rotation_arguments())
assert torch.equal(cache[1].view(-1, 2, 8)[slots], k)
print(report.to_json())
"""


@pytest.mark.parametrize("how", ["backend", "plain"])
@pytest.mark.parametrize("cache", ["fx", "autograd"])
def test_a_warm_cache_gives_the_same_hits_report_and_result(how: str, cache: str, tmp_path: Path) -> None:
    # A tag of its own makes the first run cold; the compiled C++ is still shared with every other test.
    environment = {**os.environ, "TORCH_COMPILE_CACHE_KEY_TAG": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WARM_PROGRAM, cache, str(Path(__file__).parent), how]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    cold, warm = run(), run()
    assert cold.stderr.count("the pass ran") == 2
    assert warm.stderr.count("the pass ran") == 0
    assert json.loads(cold.stdout)["hits"] == {"kv_write_in_place": 1}
    assert warm.stdout == cold.stdout
    if how == "backend":  # inside plain Inductor nobody of ours runs on a hit; the recording has the warning
        assert "1 rotation was found and none fused" in warm.stderr
