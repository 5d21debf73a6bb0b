"""Derived tensors: what is taken out of a graph, shared, bounded and freed."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from derived_harness import FP8, Harness, QuantisedLinear, inputs
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from rope_fusion.derived import hoisting_compile
from rope_fusion.derived.store import DerivedStore, process_store
from rope_fusion.fusion_pass import FusionPass
from rope_fusion.options import Options
from rope_fusion.report import GraphReport, RopeFusionWarning


@torch.library.custom_op("rope_fusion_tests::opaque_rotary", mutates_args=())
def opaque_rotary(x: Tensor, table: Tensor) -> Tensor:
    return x * table[: x.shape[0]]


@opaque_rotary.register_fake
def _(x: Tensor, table: Tensor) -> Tensor:
    return torch.empty_like(x)


class Attention(nn.Module):
    """A layer whose rotary operator wants the whole table in the activations' dtype."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return opaque_rotary(x, self.table.to(x.dtype))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


# --------------------------------------------------------------------------------------- taking it out


def test_a_dequantised_weight_leaves_the_graph():
    module, harness, x = QuantisedLinear(), Harness(), inputs()
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {"weight_dequant": 1}
    assert harness.casts_left() == 0
    assert [(entry.name, entry.bytes, entry.kept) for entry in harness.reports[0].derived] == [("weight", 2048, True)]


def test_every_layer_of_a_stack_is_derived():
    module, harness, x = nn.Sequential(*[QuantisedLinear() for _ in range(8)]), Harness(), inputs()
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {"weight_dequant": 8}
    assert [entry.name for entry in harness.reports[0].derived] == [f"{index}.weight" for index in range(8)]


def test_the_generated_code_builds_no_weight():
    module, harness, x = nn.Sequential(*[QuantisedLinear() for _ in range(2)]), Harness(generate=True), inputs()
    from torch._inductor.utils import run_and_get_code

    result, (code,) = run_and_get_code(harness.compile(module), x)
    torch.testing.assert_close(result, module(x), rtol=2e-2, atol=2e-2)  # bf16: another summation order
    _, (plain,) = run_and_get_code(torch.compile(module), x)
    assert "Float8_e4m3fn" in plain  # the C++ type in Inductor's dequantising kernel
    assert "Float8_e4m3fn" not in code


def test_a_table_cast_for_an_opaque_operator_is_made_once_for_all_layers():
    table = torch.rand(64, 32)
    module, harness, x = nn.Sequential(*[Attention(table) for _ in range(8)]), Harness(), inputs()
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {"cos_sin_cast": 8}
    assert harness.casts_left() == 0
    assert len(harness.store.entries()) == 1


def test_views_of_a_table_around_its_cast_are_taken_along():
    class Sliced(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return opaque_rotary(x, self.table[:16].unsqueeze(0).to(x.dtype).squeeze(0))

    module, harness, x = Sliced(torch.rand(64, 32)), Harness(), inputs()
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {"cos_sin_cast": 1}


class Prefix(Attention):
    """Casts as many rows as there are tokens, as older rotary modules do."""

    def forward(self, x: Tensor) -> Tensor:
        return opaque_rotary(x, self.table[: x.shape[0]].to(x.dtype))


def test_a_cast_of_a_part_that_varies_becomes_a_part_of_the_table_cast_once():
    table = torch.rand(64, 32)
    module, harness = nn.Sequential(*[Prefix(table) for _ in range(3)]), Harness()
    compiled = harness.compile(module, dynamic=True)
    for tokens in (3, 7):
        x = inputs(tokens)
        assert torch.equal(compiled(x), module(x))
    assert harness.hits == {"cos_sin_cast": 3}
    assert harness.casts_left() == 0
    (entry,) = harness.store.entries()
    assert entry.value.shape == (64, 32)


def test_a_varying_part_is_cast_as_the_program_does_where_the_whole_table_exceeds_the_budget():
    module, harness = Prefix(torch.rand(64, 32)), Harness(derived_budget=64)
    x = inputs(3)
    assert torch.equal(harness.compile(module, dynamic=True)(x), module(x))
    assert harness.hits == {}
    (cast,) = [node for node in harness.graphs[0].graph.nodes if "convert_element_type" in node.name]
    assert cast.meta["val"].shape[0] != 64


def test_refuses_what_is_also_returned_and_says_so():
    class Returns(QuantisedLinear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            weight = self.dequantised(x.dtype)
            return F.linear(x, weight), weight.t()

    module, harness, x = Returns(), Harness(), inputs()
    compiled = harness.compile(module)
    _, weight = compiled(x)
    weight.zero_()
    assert torch.equal(compiled(x)[0], module(x)[0])
    assert harness.hits == {}
    assert "also returned" in harness.refusals[0]


def test_equal_tables_of_different_layers_are_kept_apart_and_reported():
    table = torch.rand(64, 32)
    module, harness, x = nn.Sequential(Attention(table), Attention(table.clone())), Harness(), inputs()
    harness.compile(module)(x)
    assert len(harness.store.entries()) == 2
    assert [entry.reason for entry in harness.reports[0].derived] == [
        "",
        "its sampled values equal those of 0.table; one buffer would do",
    ]


def test_a_contiguous_copy_of_the_transposed_weight_is_derived_as_such():
    class Transposed(QuantisedLinear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.dequantised(x.dtype).t().contiguous()

    module, harness, x = Transposed(), Harness(), inputs()
    assert torch.equal(harness.compile(module)(x), module(x))
    (entry,) = harness.store.entries()
    assert torch.equal(entry.value, module.dequantised(x.dtype).t())
    assert entry.value.is_contiguous()


def test_weights_joined_before_one_product_are_derived_joined():
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = QuantisedLinear(), QuantisedLinear()

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, torch.cat([self.q.dequantised(x.dtype), self.k.dequantised(x.dtype)]))

    module, harness, x = Joined(), Harness(), inputs()
    assert torch.equal(harness.compile(module)(x), module(x))
    assert [entry.value.shape for entry in harness.store.entries()] == [(64, 32)]


def test_derived_inputs_are_static_inputs():
    harness = Harness()
    harness.compile(QuantisedLinear())(inputs())
    assert harness.static_inputs == [3]  # codes, scale, derived weight


def test_the_number_of_tokens_may_be_dynamic():
    module, harness = QuantisedLinear(), Harness()
    compiled = harness.compile(module, dynamic=True)
    for tokens in (3, 5, 9):
        x = inputs(tokens=tokens)
        assert torch.equal(compiled(x), module(x))
    assert len(harness.reports) == 1
    assert harness.hits == {"weight_dequant": 1}


def test_works_under_inference_mode():
    module, harness, x = QuantisedLinear(), Harness(), inputs()
    with torch.inference_mode():
        compiled = harness.compile(module)
        assert torch.equal(compiled(x), module(x))
    assert harness.hits == {"weight_dequant": 1}
    module.weight.copy_(module.weight.float() * 2)
    with torch.inference_mode():
        assert torch.equal(compiled(x), module(x))


# ----------------------------------------------------------------------------------------- refusals


def test_refuses_a_graph_compiled_for_training_and_says_so():
    module, harness = QuantisedLinear(), Harness()
    module.scale.requires_grad_(True)
    with torch.enable_grad():
        harness.compile(module)(inputs()).sum().backward()
    assert harness.hits == {}
    assert "compiled for training" in harness.refusals[0]


def test_refuses_a_table_that_is_being_trained_and_says_so():
    harness = Harness()
    module = Attention(torch.rand(64, 32))
    del module.table
    module.table = nn.Parameter(torch.rand(64, 32))
    harness.compile(module)(inputs())
    assert harness.hits == {}
    assert "requires grad" in harness.refusals[0]


def test_derives_quantised_weights_whose_flag_says_they_require_grad():
    """Modules leave requires_grad at its default for FP8 weights; without a backward nothing depends on it."""
    module, harness, x = QuantisedLinear(), Harness(), inputs()
    module.requires_grad_(True)
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {"weight_dequant": 1}


def test_refuses_tensors_without_a_version_and_says_what_to_do():
    with torch.inference_mode():
        module = QuantisedLinear()
    harness, x = Harness(), inputs()
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {}
    assert "rope_fusion.assume_frozen" in harness.refusals[0]


def test_derives_tensors_without_a_version_when_told_that_they_are_frozen():
    with torch.inference_mode():
        module = QuantisedLinear()
    harness, x = Harness(assume_frozen=True), inputs()
    compiled = harness.compile(module)
    for _ in range(40):  # past a sampled check
        assert torch.equal(compiled(x), module(x))
    assert harness.hits == {"weight_dequant": 1}


def test_refuses_a_weight_that_the_graph_writes():
    class Writes(QuantisedLinear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.scale.mul_(2)
            return y

    module, harness, x = Writes(), Harness(), inputs()
    compiled = harness.compile(module)
    first, second = compiled(x), compiled(x)
    torch.testing.assert_close(second, 2 * first, rtol=2e-2, atol=1e-1)  # bf16 rounding of the scaled weight
    assert harness.hits == {}
    assert "is written by this graph" in harness.refusals[0]


def test_leaves_out_patterns_that_are_disabled():
    harness = Harness(disable=("weight_dequant",))
    harness.compile(QuantisedLinear())(inputs())
    assert harness.hits == {}


@pytest.mark.parametrize("setting", ["bundled_autograd_cache"])
def test_refuses_while_a_cache_stores_inner_functions_alone(setting):
    harness = Harness()
    with torch._functorch.config.patch(setting, True), contextlib.suppress(Exception):
        harness.compile(QuantisedLinear())(inputs())
    assert "stores compiled functions without their wrappers" in harness.refusals[0]


def test_refusals_of_the_recogniser_are_reported_with_the_pattern():
    class Scaled(QuantisedLinear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype) * x.amax())

    harness = Harness()
    harness.compile(Scaled())(inputs())
    assert "depends on the input" in harness.refusals[0]


def test_a_failure_leaves_the_graph_as_it_came_and_is_reported(monkeypatch):
    from rope_fusion.derived import plan

    def fail(*arguments: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(plan, "take_out", fail)
    module, harness, x = QuantisedLinear(), Harness(), inputs()
    with pytest.warns(RopeFusionWarning, match="deriving tensors failed with RuntimeError: no such thing"):
        result = harness.compile(module)(x)
    assert torch.equal(result, module(x))
    assert harness.casts_left() == 2
    assert harness.reports[0].failures
    assert (harness.hits, harness.reports[0].derived) == ({}, [])


def test_a_failure_is_raised_in_strict_mode(monkeypatch):
    from rope_fusion.derived import plan

    def fail(*arguments: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(plan, "take_out", fail)
    with pytest.raises(Exception, match="no such thing"):
        Harness(strict=True).compile(QuantisedLinear())(inputs())


def test_inside_plain_inductor_the_patterns_stay_out_and_say_why():
    harness = Harness(derived_budget=0)
    harness.compile(QuantisedLinear())(inputs())
    reports: list[GraphReport] = []
    FusionPass(Options(), reports.append)(harness.graphs[0].graph)
    for name in ("weight_dequant", "cos_sin_cast"):
        assert 'need backend="rope_fusion"' in str(reports[0].patterns[name].gate)


# ------------------------------------------------------------------------------------------ the budget


def test_nothing_is_derived_beyond_the_budget():
    module, harness, x = (
        nn.Sequential(*[QuantisedLinear() for _ in range(4)]),
        Harness(derived_budget=2 * 2048),
        inputs(),
    )
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {"weight_dequant": 2}
    assert sum("derived_budget" in sentence for sentence in harness.refusals) == 1
    assert [entry.kept for entry in harness.reports[0].derived] == [True, True, False, False]


def test_the_biggest_saving_per_byte_goes_first():
    table = torch.rand(64, 32)
    module = nn.Sequential(QuantisedLinear(), *[Attention(table) for _ in range(8)])
    harness = Harness(derived_budget=4096)
    harness.compile(module)(inputs())
    assert harness.hits == {"cos_sin_cast": 8}


def test_a_budget_of_zero_derives_nothing():
    harness = Harness(derived_budget=0)
    harness.compile(QuantisedLinear())(inputs())
    assert harness.hits == {}


def test_a_second_graph_of_the_same_model_needs_no_further_budget():
    module, harness = QuantisedLinear(), Harness(derived_budget=2048)
    compiled = harness.compile(module, dynamic=False)
    for tokens in (3, 5):
        compiled(inputs(tokens=tokens))
    assert harness.hits == {"weight_dequant": 2}
    assert harness.store.live_bytes(torch.device("cpu")) == 2048


def test_one_graph_called_with_many_models_respects_the_budget_and_stays_right():
    modules, harness, x = [QuantisedLinear() for _ in range(4)], Harness(derived_budget=2 * 2048), inputs()
    for module in modules:
        module.forward = torch.compile(module.forward, backend=harness.backend)  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for module in modules:
                assert torch.equal(module(x), QuantisedLinear.forward(module, x))
    assert harness.store.live_bytes(torch.device("cpu")) <= 2 * 2048
    assert len(harness.reports) > 1 or any("derived_budget" in str(warning.message) for warning in caught)


# ------------------------------------------------------------------------------------ sharing and lifetime


def test_one_graph_serves_many_models_without_computing_again():
    first, second, harness, x = QuantisedLinear(), QuantisedLinear(), Harness(), inputs()

    def call(module: nn.Module, value: Tensor) -> Tensor:
        return module(value)

    compiled = harness.compile(call)
    for _ in range(3):
        for module in (first, second):
            assert torch.equal(compiled(module, x), module(x))
    assert len(harness.reports) == 1
    assert len(harness.store.entries()) == 2


def test_two_modules_with_a_common_parameter_share_the_derived_tensor():
    first, second, harness, x = QuantisedLinear(), QuantisedLinear(), Harness(), inputs()
    second.weight, second.scale = first.weight, first.scale
    for module in (first, second):
        torch._dynamo.reset()
        assert torch.equal(harness.compile(module)(x), first(x))
    assert harness.hits == {"weight_dequant": 2}
    assert len(harness.store.entries()) <= 1


def test_tied_weights_are_derived_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = QuantisedLinear(), QuantisedLinear()
            self.b.weight, self.b.scale = self.a.weight, self.a.scale

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    module, harness, x = Tied(), Harness(), inputs()
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {"weight_dequant": 2}
    assert len(harness.store.entries()) == 1


def test_a_module_compiled_twice_keeps_one_derived_tensor():
    module, harness, x = QuantisedLinear(), Harness(), inputs()
    first, second = harness.compile(module), harness.compile(module, dynamic=True)
    assert torch.equal(first(x), second(x))
    assert len(harness.store.entries()) == 1


def test_graphs_on_both_sides_of_a_break_share():
    class Broken(QuantisedLinear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(y)

    module, harness, x = Broken(), Harness(), inputs()
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {"weight_dequant": 2}
    assert len(harness.store.entries()) == 1


def test_derived_tensors_die_with_the_compiled_function():
    module, harness = QuantisedLinear(), Harness()
    compiled = harness.compile(module)
    compiled(inputs())
    value = weakref.ref(harness.store.entries()[0].value)
    del compiled
    torch._dynamo.reset()
    harness.graphs.clear()
    gc.collect()
    assert value() is None
    assert harness.store.entries() == []


def test_derived_tensors_die_with_the_model_while_the_compiled_function_lives():
    module, other, harness, x = QuantisedLinear(), QuantisedLinear(), Harness(), inputs()

    def call(module: nn.Module, value: Tensor) -> Tensor:
        return module(value)

    compiled = harness.compile(call)
    compiled(module, x)
    compiled(other, x)
    assert len(harness.store.entries()) == 2
    del module
    gc.collect()
    assert [entry.derivation.name for entry in harness.store.entries()] == ["weight"]
    assert torch.equal(compiled(other, x), other(x))


def test_nothing_leaks_over_a_hundred_compilations():
    """Compiled directly: Dynamo would take a minute. The next test goes through it."""

    def program(weight: Tensor, scale: Tensor, x: Tensor) -> tuple[Tensor]:
        return (F.linear(x, (weight.float() * scale).to(x.dtype)),)

    shape, x = (16, 32), inputs()
    store, values = DerivedStore(), []
    for _ in range(100):
        weight, scale = torch.randn(shape).to(FP8), torch.rand(16, 1)
        gm = make_fx(program, tracing_mode="fake")(weight, scale, x)
        compiled = hoisting_compile(
            gm,
            [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"],
            next_compile=Harness().compile_inner,
            options=Options(),
            report=GraphReport(),
            store=store,
            static_input_idxs=[0, 1],
            is_inference=True,
        )
        assert torch.equal(compiled([weight, scale, x])[0], program(weight, scale, x)[0])
        values += [weakref.ref(entry.value) for entry in store.entries()]
        del weight, scale, gm, compiled
    gc.collect()
    assert len(values) >= 100
    assert not any(value() is not None for value in values)
    assert store.entries() == []


def test_nothing_leaks_through_torch_compile():
    harness, x = Harness(), inputs()
    values: list[weakref.ref[Tensor]] = []
    for _ in range(8):
        module = QuantisedLinear(16, 32)
        harness.compile(module)(x)
        values += [weakref.ref(entry.value) for entry in harness.store.entries()]
        del module
        torch._dynamo.reset()
        harness.graphs.clear()
        harness.reports.clear()
    gc.collect()
    assert values
    assert not any(value() is not None for value in values)


def test_the_store_of_the_process_is_one():
    assert process_store() is process_store()


# ---------------------------------------------------------------------------------------------- threads


def test_threads_compute_a_value_once_and_never_read_it_torn():
    module, harness, x = QuantisedLinear(64, 64), Harness(freshness_interval=0), inputs(columns=64)
    compiled = harness.compile(module)
    compiled(x)
    (entry,) = harness.store.entries()
    runs: list[int] = []
    original = entry.derivation.compute

    def counted(*sources: Tensor) -> Tensor:
        runs.append(1)
        return original(*sources)

    object.__setattr__(entry.derivation, "compute", counted)
    for step in range(5):
        module.weight.copy_(torch.full_like(module.weight.float(), float(step)))
        expected = module(x)
        barrier = threading.Barrier(4)
        wrong: list[Tensor] = []

        def call(
            expected: Tensor = expected, barrier: threading.Barrier = barrier, wrong: list[Tensor] = wrong
        ) -> None:
            with torch.no_grad():
                barrier.wait()
                result = compiled(x)
                if not torch.equal(result, expected):
                    wrong.append(result)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert len(runs) == step + 1


def test_replicas_in_threads_each_have_their_own():
    harness, x = Harness(), inputs()
    replicas = [QuantisedLinear() for _ in range(3)]
    results: dict[int, Tensor] = {}

    def call(module: nn.Module, value: Tensor) -> Tensor:
        return module(value)

    compiled = harness.compile(call)
    compiled(replicas[0], x)

    def work(index: int) -> None:
        with torch.no_grad():
            results[index] = compiled(replicas[index], x)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, replica in enumerate(replicas):
        assert torch.equal(results[index], replica(x))
    assert len(harness.store.entries()) == 3
