"""Weights that only linears on the CPU read are kept as oneDNN wants them, and are as fresh as any other derived tensor."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from derived_harness import FP8, Harness, QuantisedLinear, inputs
from torch import Tensor, nn

import rope_fusion
from rope_fusion.derived.store import process_store
from rope_fusion.kernels.packed_linear import packed_linear, packs

pytestmark = pytest.mark.skipif(not packs(torch.bfloat16), reason="this CPU has no bf16 linears with packed weights")
SIZE = 128  # the smallest weight worth packing


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def layer() -> QuantisedLinear:
    return QuantisedLinear(SIZE, SIZE, 32)


def tokens(count: int = 4) -> Tensor:
    return inputs(count, SIZE)


def packed_products(harness: Harness) -> int:
    return sum(node.target is packed_linear for graph in harness.graphs for node in graph.graph.nodes)


def close(result: Tensor, expected: Tensor) -> bool:
    """Sums in another order round to the same bf16 value or the next; of two layers, the first one's steps add up to one of the largest."""
    return torch.allclose(result, expected, rtol=2**-7, atol=2**-8 * float(expected.abs().max()))


def test_a_weight_of_linears_is_kept_packed():
    module, harness, x = nn.Sequential(layer(), layer()), Harness(), tokens()
    assert close(harness.compile(module)(x), module(x))
    assert packed_products(harness) == 2
    assert harness.casts_left() == 0
    assert harness.hits == {"weight_dequant": 2}
    assert [entry.value.is_mkldnn for entry in harness.store.entries()] == [True, True]
    assert [entry.bytes for entry in harness.reports[0].derived] == [2 * SIZE * SIZE] * 2


def test_generated_code_calls_the_operator_that_freezing_calls():
    from torch._inductor.utils import run_and_get_code

    module, harness, x = layer(), Harness(generate=True), tokens()
    result, (code,) = run_and_get_code(harness.compile(module), x)
    assert close(result, module(x))
    assert "mkldnn._linear_pointwise" in code
    assert "extern_kernels.mm" not in code
    assert "Float8_e4m3fn" not in code
    with torch._inductor.config.patch(freezing=True):
        torch._dynamo.reset()
        frozen = torch.compile(module)(x)
    assert torch.equal(result, frozen)


class Biased(nn.Module):
    """The weight of `layer` with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()
        self.bias = nn.Parameter(torch.randn(SIZE, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.dequantised(x.dtype), self.bias)


class TransposedStorage(QuantisedLinear):
    """[columns, rows] codes that are multiplied from the right as they lie."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.dequantised(x.dtype)


@pytest.mark.parametrize(
    "module", [Biased, lambda: TransposedStorage(SIZE, 2 * SIZE, 32)], ids=["bias", "multiplied as it lies"]
)
@pytest.mark.parametrize("generate", [False, True])
def test_takes(module: Callable[[], nn.Module], generate: bool):
    one, harness, x = module(), Harness(generate=generate), tokens().reshape(2, 2, SIZE)
    assert close(harness.compile(one)(x), one(x))
    assert packed_products(harness) == 1


@pytest.mark.parametrize("generate", [False, True])
def test_the_number_of_tokens_may_be_dynamic(generate: bool):
    module, harness = layer(), Harness(generate=generate)
    compiled = harness.compile(module, dynamic=True)
    for count in (3, 1, 7, 0):
        x = tokens(count)
        result = compiled(x)
        assert result.shape == (count, SIZE)
        assert not count or close(result, module(x))
    (entry,) = harness.store.entries()
    assert entry.value.is_mkldnn


def test_an_activation_that_lies_transposed_is_taken():
    module, harness = layer(), Harness(generate=True)
    x = torch.randn(SIZE, 5, dtype=torch.bfloat16)
    compiled = harness.compile(lambda x: module(x.t()))
    assert close(compiled(x), module(x.t()))
    assert packed_products(harness) == 1


class AlsoAdded(QuantisedLinear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.dequantised(x.dtype)
        return F.linear(x, weight) + weight.sum()


class Batched(QuantisedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x[None], self.dequantised(x.dtype).t()[None])


class ScaledSum(QuantisedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(x, x, self.dequantised(x.dtype).t(), beta=0.5)


class MatrixBias(QuantisedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(x, x, self.dequantised(x.dtype).t())


class Squared(QuantisedLinear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.dequantised(x.dtype)
        return x + torch.mm(weight, weight.t()).sum()


class PermutedInPlace(QuantisedLinear):
    """Permuted, and lying as before: not the transposed weight, for which a square one passes."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.dequantised(x.dtype).permute(-2, 1)


@pytest.mark.parametrize("kind", [AlsoAdded, Batched, ScaledSum, MatrixBias, Squared, PermutedInPlace])
def test_what_anything_else_reads_is_kept_as_it_is(kind: type[QuantisedLinear]):
    module, harness, x = kind(SIZE, SIZE, 32), Harness(), tokens()
    assert close(harness.compile(module)(x), module(x))
    assert packed_products(harness) == 0
    assert not any(entry.value.is_mkldnn for entry in harness.store.entries())


def test_float32_and_small_weights_are_kept_as_they_are():
    for module, x in ((layer(), tokens().float()), (QuantisedLinear(), inputs())):
        harness = Harness()
        assert torch.equal(harness.compile(module)(x), module(x))
        assert (harness.hits, packed_products(harness)) == ({"weight_dequant": 1}, 0)


def test_nothing_is_packed_while_onednn_is_off():
    module, harness, x = layer(), Harness(), tokens()
    with torch.backends.mkldnn.flags(enabled=False):
        harness.compile(module)(x)
    assert packed_products(harness) == 0


# ------------------------------------------------------------------------------------------------ freshness


def copy_in_place(module: QuantisedLinear) -> None:
    module.weight.copy_(torch.randn(module.weight.shape))


def multiply_the_scale(module: QuantisedLinear) -> None:
    module.scale.mul_(3)


def load_a_state_dict(module: QuantisedLinear) -> None:
    module.load_state_dict(layer().state_dict())


def replace_the_parameter(module: QuantisedLinear) -> None:
    module.weight = nn.Parameter(torch.randn(module.weight.shape).to(FP8), requires_grad=False)


def assign_data(module: QuantisedLinear) -> None:
    module.weight.data = torch.randn(module.weight.shape).to(FP8)


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize(
    ("update", "in_place"),
    [
        (copy_in_place, True),
        (multiply_the_scale, True),
        (load_a_state_dict, True),
        (replace_the_parameter, False),
        (assign_data, True),
    ],
)
def test_the_next_call_sees(update: Callable[[Any], None], in_place: bool, generate: bool):
    module, harness, x = layer(), Harness(generate=generate), tokens()
    compiled = harness.compile(module)
    assert close(compiled(x), module(x))
    (entry,) = harness.store.entries()
    place = torch.ops.mkldnn.data_ptr(entry.value)
    for _ in range(2):
        update(module)
        assert close(compiled(x), module(x))
    if in_place:
        (entry,) = harness.store.entries()
        assert torch.ops.mkldnn.data_ptr(entry.value) == place


def test_invalidate_packs_again_and_in_place():
    module, x = layer(), tokens()
    harness = Harness(store=process_store(), freshness_interval=0)
    compiled = harness.compile(module)
    compiled(x)
    module.weight.data.copy_(torch.randn(module.weight.shape))
    assert not close(compiled(x), module(x))
    rope_fusion.invalidate(module)
    assert close(compiled(x), module(x))


def test_the_sampled_check_packs_again():
    module, harness, x = layer(), Harness(freshness_interval=2), tokens()
    compiled = harness.compile(module)
    compiled(x)
    module.weight.data.copy_(torch.randn(module.weight.shape))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(x)
    assert any("without its version counter" in str(warning.message) for warning in caught)
    assert close(compiled(x), module(x))


def test_tensors_without_a_version_are_packed_when_told_that_they_are_frozen():
    with torch.inference_mode():
        module = layer()
    harness, x = Harness(assume_frozen=True), tokens()
    with torch.inference_mode():
        compiled = harness.compile(module)
        assert close(compiled(x), module(x))
    assert packed_products(harness) == 1


def test_threads_that_share_a_packed_weight_agree():
    module, harness, x = layer(), Harness(freshness_interval=0), tokens()
    compiled = harness.compile(module)
    compiled(x)
    for step in range(1, 5):
        module.scale.fill_(float(step))
        expected = module(x)
        barrier = threading.Barrier(4)
        results: list[Tensor] = []

        def call(barrier: threading.Barrier = barrier, results: list[Tensor] = results) -> None:
            with torch.no_grad():
                barrier.wait()
                results.append(compiled(x))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4 and all(close(result, expected) for result in results)


def test_readers_that_pack_and_readers_that_do_not_each_have_their_own_value():
    module, harness, x = layer(), Harness(), tokens()
    linear, batched = harness.compile(module), harness.compile(lambda x: Batched.forward(module, x))  # type: ignore[arg-type]
    for _ in range(2):
        assert close(linear(x), module(x))
        assert close(batched(x)[0], module(x))
        module.scale.mul_(2)
    assert sorted(entry.value.is_mkldnn for entry in harness.store.entries()) == [False, True]


def test_a_module_compiled_twice_keeps_one_packed_value():
    module, harness, x = layer(), Harness(), tokens()
    first, second = harness.compile(module), harness.compile(module, dynamic=True)
    assert torch.equal(first(x), second(x))
    assert len(harness.store.entries()) == 1


def test_a_packed_value_that_exceeds_the_budget_stays_in_the_graph():
    module, harness, x = nn.Sequential(layer(), layer()), Harness(derived_budget=2 * SIZE * SIZE), tokens()
    assert close(harness.compile(module)(x), module(x))
    assert packed_products(harness) == 1


def test_packed_values_die_with_the_compiled_function():
    module, harness = layer(), Harness()
    compiled = harness.compile(module)
    compiled(tokens())
    value = weakref.ref(harness.store.entries()[0].value)
    del compiled
    torch._dynamo.reset()
    harness.graphs.clear()
    gc.collect()
    assert value() is None


def test_a_warm_cache_brings_the_packed_linear_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters = torch._dynamo.utils.counters
    with torch._inductor.config.patch(fx_graph_cache=True):
        for run in range(2):
            torch._dynamo.reset()
            counters.clear()
            module, harness, x = layer(), Harness(generate=True), tokens()
            compiled = harness.compile(module)
            assert close(compiled(x), module(x))
            assert counters["inductor"]["fxgraph_cache_hit"] == run
            module.scale.mul_(2)
            assert close(compiled(x), module(x))
