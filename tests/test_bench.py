"""``rope-fusion bench``: what it checks before it times, what it prints, and that one failure does not cost the other figures."""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rope_fusion import bench, bench_cases_decode, bench_cases_prologue, bench_cases_writes, bench_programs, bench_stack
from rope_fusion.bench_programs import Call, Program
from rope_fusion.bench_timing import machine, needs_gpu, poison, times_us
from rope_fusion.cli import main

DEVICE = "cpu"


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine is measured with little data: no test reads its figures."""
    machine.cache_clear()
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **how: randn(1024 if size == (1 << 24,) else size, **how))
    machine(DEVICE)
    monkeypatch.undo()
    yield
    machine.cache_clear()


def doubled(x: Tensor) -> Tensor:
    return x * 2


def measured(eager: Callable[[Tensor], Tensor], program: Callable[[Tensor], Tensor]) -> bench_programs.Measurement:
    def make(device: str) -> Call:
        return Call(program, eager, (torch.randn(8, device=device),), (), moved=64)

    (found,) = bench_programs.measure([Program("a case", 8, make)], DEVICE)
    return found


def test_a_right_program_is_measured() -> None:
    found = measured(doubled, doubled)
    assert found.wrong is None
    assert found.error == 0.0
    assert found.hits == {}
    assert found.eager_us is not None
    assert min(found.eager_us, found.inductor_us, found.rope_fusion_us, found.floor_us) > 0
    assert found.gain == found.inductor_us / found.rope_fusion_us
    assert found.kernels_inductor is None, "a CPU launches nothing"
    assert "not fused" in bench_programs.table([found])


def test_results_that_ours_alone_has_wrong_are_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    original = bench_programs.compiled

    def compiled(call: Call, device: str, with_us: bool) -> Callable[..., Tensor]:
        return (lambda x: x * 2.1) if with_us else original(call, device, with_us)

    monkeypatch.setattr(bench_programs, "compiled", compiled)
    found = measured(doubled, doubled)
    assert found.wrong is not None
    assert found.wrong.startswith("error 0.05, plain Inductor 0")
    assert "WRONG" in bench_programs.table([found])


def test_elements_that_nothing_wrote_are_wrong() -> None:
    right, unwritten = torch.ones(4), torch.tensor([1.0, 1.0, float("nan"), 1.0])
    _, error = bench_programs._differences([unwritten], [right])
    assert math.isnan(error)
    _, error = bench_programs._differences([unwritten], [unwritten])
    assert error == 0.0, "what was never to be written may be NaN"


def test_fp8_values_are_compared_bit_by_bit_where_something_was_written() -> None:
    fp8 = torch.float8_e4m3fn
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0]).to(fp8)
    got = torch.tensor([1.0, 2.0, 3.0, 5.0]).to(fp8)
    cache = torch.full((96,), 0xFF, dtype=torch.uint8).view(fp8)
    mismatch, _ = bench_programs._differences([got, cache], [expected, cache])
    assert mismatch == 0.25


def test_poison_leaves_tensors_alone() -> None:
    x = torch.ones(4, dtype=torch.bfloat16)
    poison([x])
    assert torch.equal(x, torch.ones_like(x))


def test_calls_are_timed_in_turns() -> None:
    order: list[str] = []
    first, second = times_us([lambda: order.append("a"), lambda: order.append("b")], DEVICE, rounds=2)
    assert min(first, second) > 0
    assert "".join(order) == "aabb" * 2, "each is called once before it is timed"


@pytest.mark.parametrize("shape", bench_cases_prologue.REHEARSED, ids=lambda shape: shape.name)
def test_the_prologue_moves_the_bytes_that_its_floor_counts(shape: bench_cases_prologue.Shape) -> None:
    tokens = 5
    call = bench_cases_prologue.make(shape, tokens, DEVICE)
    qkv, table, positions, slots = call.arguments[:4]
    q = call.eager(*call.arguments)
    stored = sum(
        tokens * cache[0, 0].numel() * cache.element_size()  # one row of each cache per token
        for cache in call.arguments[5:]
    )
    rows = tokens * table.shape[1] * table.element_size()
    assert call.moved == rows + stored + sum(x.numel() * x.element_size() for x in (qkv, positions, slots, q))


def test_the_prologue_fuses_and_is_right_in_a_rehearsal() -> None:
    programs = [bench_cases_prologue.programs(DEVICE, quick=True)[0]]
    (found,) = bench_programs.measure(programs, DEVICE)
    assert found.hits == {"rope_static_q_fp8_kv": 1}
    assert found.wrong is None
    assert found.fp8_mismatch == 0.0


def test_a_decode_stack_fuses_whatever_the_spelling_and_is_right() -> None:
    shape = next(shape for shape in bench_stack.REHEARSED if shape.fp8)
    (found,) = bench_cases_decode.benchmark(DEVICE, wanted=[(shape, 3)])
    assert found.wrong is None
    assert found.hits == {f"rope_fusion, {way}": {"rope_static_q_fp8_kv": 1} for way in ("view", "direct")}
    assert found.gain == min(found.us["Inductor, view"], found.us["Inductor, direct"]) / max(
        found.us["rope_fusion, view"], found.us["rope_fusion, direct"]
    )
    assert shape.name in bench_cases_decode.table([found])


def test_profiles_in_one_process_are_of_compiled_code_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo counts the compilations of one function, and a layer is the same function in every variant and batch size."""
    monkeypatch.setattr(bench_cases_decode, "kernel_times_us", lambda call: {"all": float(call().isnan().sum())})
    monkeypatch.setattr(bench_cases_decode, "_how", lambda variant, device: {"backend": "eager"})
    direct = bench_cases_decode.PLAIN_OPERATORS[1]
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for batch in (1, 2, 3):
            profiled = bench_cases_decode.profile_job(bench_stack.REHEARSED[0], batch, direct, DEVICE)
            assert profiled == {"all": 0.0}


def test_a_step_that_forgets_to_write_its_cache_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_cases_decode.register(DEVICE)
    shape = bench_stack.REHEARSED[0]
    layers = bench_stack.make_layers(shape, 2, 1, DEVICE)
    arguments = bench_stack.inputs(shape, 2, DEVICE)
    function = bench_stack.layer_function(shape, "bytes", DEVICE)
    step = functools.partial(bench_stack.step, function, layers)
    bench_stack.forget_new_tokens(layers, arguments[3])
    assert not step(*arguments).isnan().any()
    bench_stack.forget_new_tokens(layers, arguments[3])
    monkeypatch.setattr(bench_stack, "store", lambda *_: None)
    assert step(*arguments).isnan().any()
    assert bench_cases_decode._wrong({"Inductor": 0.0, "rope_fusion": float("nan")}, {}) is not None


@pytest.fixture
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement returns nothing at once."""
    for name in bench.names():
        case = importlib.import_module(f"rope_fusion.bench_cases_{name}")
        monkeypatch.setattr(case, "benchmark", lambda device: [])


@pytest.mark.usefixtures("without_measuring")
def test_without_a_name_what_suits_the_device_runs_and_the_rest_says_why_not() -> None:
    results = {result.name: result for result in bench.run((), DEVICE)}
    assert sorted(results) == bench.names()
    ran = {name for name, result in results.items() if result.skipped is None}
    assert ran == {"compile", "derived", "writes"}
    assert results["prologue"].skipped == needs_gpu(DEVICE)
    assert results["prologue"].text().startswith("== prologue\n\nnot run: it compares kernels for GPUs")


@pytest.mark.usefixtures("without_measuring")
def test_a_name_rehearses_what_does_not_suit_the_device_and_says_so() -> None:
    (result,) = bench.run(["decode"], DEVICE)
    assert result.skipped is None
    assert "note: it compares kernels for GPUs" in result.text()


@pytest.mark.usefixtures("without_measuring")
def test_a_measurement_that_fails_leaves_the_others_and_is_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(device: str) -> list[object]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(bench_cases_decode, "benchmark", fail)
    file = tmp_path / "figures.json"
    assert main(["bench", "decode", "writes", "--device", DEVICE, "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: RuntimeError: no memory" in printed
    assert "== writes" in printed
    assert [one["failed"] for one in json.loads(file.read_text())["measurements"]] == ["RuntimeError: no memory", None]


@pytest.mark.usefixtures("without_measuring")
def test_wrong_results_are_status_1_and_in_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = bench_programs.Measurement("a case", 1, 1.0, 2.0, 1.0, 0.5, 3, 1, None, None, 0.5, {}, "error 0.5")
    monkeypatch.setattr(bench_cases_prologue, "benchmark", lambda device: [figures])
    assert main(["bench", "prologue", "--device", DEVICE, "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    (measurement,) = printed["measurements"]
    assert measurement["figures"][0]["wrong"] == "error 0.5"
    assert measurement["figures"][0]["gain"] == 2.0
    assert printed["machine"]["device"] == DEVICE


def test_quick_takes_fewer_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, ...]] = []

    def measure(device: torch.device, blocks: tuple[int, ...]) -> list[bench_cases_writes.Measurement]:
        taken.append(blocks)
        return []

    monkeypatch.setattr(bench_cases_writes, "_measure", measure)
    list(bench.run(["writes"], DEVICE, quick=True))
    list(bench.run(["writes"], DEVICE))
    assert taken == [(1024,), (1024, 4096)]
