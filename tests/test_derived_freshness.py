"""No compiled call uses a derived tensor that is older than its sources."""

from __future__ import annotations

import copy
import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from derived_harness import FP8, Harness, QuantisedLinear, inputs
from torch import Tensor, nn
from torch.fx import GraphModule

import rope_fusion
from rope_fusion.derived.store import process_store
from rope_fusion.report import RopeFusionWarning


class Compiled(Harness):
    """A module compiled with derived tensors, beside the module itself."""

    def __init__(self, module: Callable[..., Any], *, dynamic: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.module = module
        self.function = self.compile(module, dynamic=dynamic)

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)

    def agrees(self, x: Tensor) -> bool:
        expected = self.module(x)
        if self._generate:  # another summation order in bf16
            return torch.allclose(self(x), expected, rtol=3e-2, atol=3e-2 * float(expected.abs().max()))
        return torch.equal(self(x), expected)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


# ------------------------------------------------------------------------- writes that a counter or an address shows


def copy_in_place(module: QuantisedLinear) -> None:
    module.weight.copy_(torch.randn(module.weight.shape))


def multiply_the_scale(module: QuantisedLinear) -> None:
    module.scale.mul_(3)


def load_a_state_dict(module: QuantisedLinear) -> None:
    module.load_state_dict(QuantisedLinear(*module.weight.shape).state_dict())


def load_a_state_dict_by_assignment(module: QuantisedLinear) -> None:
    module.load_state_dict(QuantisedLinear(*module.weight.shape).state_dict(), assign=True)


def replace_the_parameter(module: QuantisedLinear) -> None:
    module.weight = nn.Parameter(torch.randn(module.weight.shape).to(FP8), requires_grad=False)


def assign_data(module: QuantisedLinear) -> None:
    module.weight.data = torch.randn(module.weight.shape).to(FP8)


def assign_data_twice(module: QuantisedLinear) -> None:
    """The second storage may lie where the first one was."""
    for _ in range(2):
        module.weight.data = torch.randn(module.weight.shape).to(FP8)


def move_as_to_does(module: QuantisedLinear) -> None:
    """What `module.to(device)` does on one device: every tensor gets new memory."""
    module._apply(lambda tensor: tensor.clone())
    module.scale.mul_(2)


def merge_an_adapter(module: QuantisedLinear) -> None:
    low_rank = torch.randn(module.weight.shape[0], 2) @ torch.randn(2, module.weight.shape[1])
    module.weight.copy_(module.weight.float() + low_rank)


def write_through_a_view(module: QuantisedLinear) -> None:
    module.weight.view(torch.uint8)[3].fill_(56)


def write_under_inference_mode(module: QuantisedLinear) -> None:
    with torch.inference_mode():
        module.scale.mul_(5)


def write_from_another_compiled_function(module: QuantisedLinear) -> None:
    @torch.compile(backend="aot_eager")
    def double(scale: Tensor) -> None:
        scale.mul_(2)

    double(module.scale)


SEEN = [
    copy_in_place,
    multiply_the_scale,
    load_a_state_dict,
    load_a_state_dict_by_assignment,
    replace_the_parameter,
    assign_data,
    assign_data_twice,
    move_as_to_does,
    merge_an_adapter,
    write_through_a_view,
    write_under_inference_mode,
    write_from_another_compiled_function,
]


@pytest.mark.parametrize(("dynamic", "mode"), [(False, torch.no_grad), (True, torch.inference_mode)])
@pytest.mark.parametrize("update", SEEN)
def test_the_next_call_sees(update: Callable[[Any], None], dynamic: bool, mode: Callable[[], Any]):
    module = QuantisedLinear()
    compiled = Compiled(module, dynamic=dynamic)
    with mode():
        assert compiled.agrees(inputs())
        assert compiled.agrees(inputs())
    update(module)
    with mode():
        assert compiled.agrees(inputs(7 if dynamic else 4))
        assert compiled.agrees(inputs())
    update(module)
    with mode():
        assert compiled.agrees(inputs())
    assert compiled.hits == {"weight_dequant": 1}


@pytest.mark.parametrize("update", SEEN)
def test_a_change_before_the_first_call_is_seen(update: Callable[[Any], None]):
    module = QuantisedLinear()
    compiled = Compiled(module)
    update(module)
    assert compiled.agrees(inputs())


@pytest.mark.parametrize("update", [copy_in_place, multiply_the_scale, load_a_state_dict, assign_data, move_as_to_does])
def test_a_refresh_keeps_the_storage(update: Callable[[Any], None]):
    """A captured CUDA graph has recorded the address."""
    module = QuantisedLinear()
    compiled = Compiled(module)
    compiled(inputs())
    (entry,) = compiled.store.entries()
    address = entry.value.data_ptr()
    update(module)
    assert compiled.agrees(inputs())
    (entry,) = compiled.store.entries()
    assert entry.value.data_ptr() == address


def test_nothing_is_computed_again_while_nothing_changes():
    module = QuantisedLinear()
    compiled = Compiled(module)
    compiled(inputs())
    (entry,) = compiled.store.entries()
    object.__setattr__(entry.derivation, "compute", None)  # any further computation fails
    for _ in range(70):  # past two sampled checks
        assert compiled.agrees(inputs())


def test_a_source_that_is_written_before_every_call_is_named():
    module = QuantisedLinear()
    compiled = Compiled(module)

    def decode() -> None:
        for _ in range(40):
            module.scale.mul_(1.01)
            assert compiled.agrees(inputs())

    with pytest.warns(RopeFusionWarning, match="scale was written before each of 32 calls"):
        decode()


def test_a_shared_tensor_whose_data_moves_in_one_place_is_not_changed_in_the_other():
    module = QuantisedLinear()
    alias = QuantisedLinear()
    alias.weight = nn.Parameter(module.weight.data, requires_grad=False)
    alias.scale = nn.Parameter(module.scale.data, requires_grad=False)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = module, alias

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) - 2 * self.second(x)

    compiled = Compiled(Both())
    assert compiled.agrees(inputs())
    module.weight.data = torch.randn(32, 32).to(FP8)
    assert compiled.agrees(inputs())
    assert compiled.agrees(inputs())


def test_a_module_that_is_copied_has_its_own_values():
    def call(module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    module = QuantisedLinear()
    compiled = Compiled(call)
    twin = copy.deepcopy(module)
    twin.scale.mul_(2)
    x = inputs()
    for one in (module, twin, module, twin):
        assert torch.equal(compiled.function(one, x), one(x))


# ------------------------------------------------------------------------------- writes that nothing shows


def copy_into_data(module: QuantisedLinear) -> None:
    module.weight.data.copy_(torch.randn(module.weight.shape))


def write_through_numpy(module: QuantisedLinear) -> None:
    module.scale.numpy()[:] *= 4


def write_from_elsewhere(module: QuantisedLinear) -> None:
    """As a foreign kernel does: through the address."""
    ctypes.memset(module.weight.data_ptr(), 0x30, module.weight.numel())


def call_often(compiled: Compiled, times: int) -> None:
    for _ in range(times):
        compiled(inputs())


UNSEEN = [copy_into_data, write_through_numpy, write_from_elsewhere]


@pytest.mark.parametrize("update", UNSEEN)
def test_invalidate_refreshes_what_no_counter_shows(update: Callable[[Any], None]):
    module = QuantisedLinear()
    compiled = Compiled(module, freshness_interval=0, store=process_store())
    assert compiled.agrees(inputs())
    update(module)
    assert not compiled.agrees(inputs())  # the reason for invalidate
    rope_fusion.invalidate(module)
    assert compiled.agrees(inputs())


@pytest.mark.parametrize("target", [lambda module: module.weight, lambda module: [module.scale, module.weight]])
def test_invalidate_takes_tensors(target: Callable[[Any], Any]):
    module = QuantisedLinear()
    compiled = Compiled(module, freshness_interval=0, store=process_store())
    compiled(inputs())
    copy_into_data(module)
    rope_fusion.invalidate(target(module))
    assert compiled.agrees(inputs())


def test_invalidate_computes_at_once_and_in_place():
    """A CUDA graph that the user captured replays without calling the compiled function."""
    module = QuantisedLinear()
    compiled = Compiled(module, store=process_store())
    compiled(inputs())
    (entry,) = [entry for entry in process_store().entries() if entry.tensors[0]() is module.weight]
    value, address = entry.value, entry.value.data_ptr()
    copy_into_data(module)
    rope_fusion.invalidate(module)
    assert value.data_ptr() == address
    assert torch.equal(value, module.dequantised(torch.bfloat16))


def test_invalidate_refuses_what_holds_no_tensors_and_says_what_it_takes():
    with pytest.raises(TypeError, match="a module, a tensor or an iterable of them, got int"):
        rope_fusion.invalidate(3)


def test_invalidate_before_anything_was_compiled_does_nothing():
    rope_fusion.invalidate(QuantisedLinear())


@pytest.mark.parametrize("update", UNSEEN)
def test_the_sampled_check_notices_within_its_interval_and_names_the_tensor(update: Callable[[Any], None]):
    module = QuantisedLinear()
    compiled = Compiled(module, freshness_interval=4)
    for _ in range(3):
        compiled(inputs())
    update(module)
    with pytest.warns(RopeFusionWarning, match=r"(weight|scale) was written without its version counter showing it"):
        call_often(compiled, 4)
    assert compiled.agrees(inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            assert compiled.agrees(inputs())


def test_the_sampled_check_is_on_by_default_every_32_calls():
    module = QuantisedLinear()
    compiled = Compiled(module)
    compiled(inputs())
    copy_into_data(module)
    with pytest.warns(RopeFusionWarning, match="32 at most"):
        call_often(compiled, 32)
    assert compiled.agrees(inputs())


def test_the_sampled_check_reaches_every_one_of_many_models():
    """Their calls take turns; a common counter would always meet the same ones."""

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    modules = [QuantisedLinear() for _ in range(4)]
    compiled = Compiled(call, freshness_interval=2)
    x = inputs()
    for module in modules:
        compiled.function(module, x)
    for module in modules:
        copy_into_data(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for module in modules:
                compiled.function(module, x)
    assert len([warning for warning in caught if "without its version counter" in str(warning.message)]) == 4
    for module in modules:
        assert torch.equal(compiled.function(module, x), module(x))


def test_the_sampled_check_is_silent_about_counted_writes():
    module = QuantisedLinear()
    compiled = Compiled(module, freshness_interval=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            copy_in_place(module)
            assert compiled.agrees(inputs())


def test_the_sampled_check_takes_nan_for_equal_to_itself():
    module = QuantisedLinear()
    module.scale.fill_(float("nan"))
    compiled = Compiled(module, freshness_interval=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            compiled(inputs())


# ------------------------------------------------------------------------------------------- Inductor's caches


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_warm_cache_neither_loses_nor_stales_derived_tensors(dynamic: bool, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters = torch._dynamo.utils.counters
    with (
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        for run in range(2):
            torch._dynamo.reset()
            counters.clear()
            module = QuantisedLinear()
            compiled = Compiled(module, generate=True, dynamic=dynamic)
            assert compiled.agrees(inputs())
            assert compiled.hits == {"weight_dequant": 1}
            assert counters["inductor"]["fxgraph_cache_hit"] == run
            assert counters["aot_autograd"]["autograd_cache_hit"] == 0
            for update in SEEN:
                update(module)
                assert compiled.agrees(inputs(7 if dynamic else 4)), update.__name__
            assert compiled.hits == {"weight_dequant": 1}


@pytest.mark.parametrize(("options", "saved"), [({"derived_budget": 0}, 0), ({"disable": ("weight_dequant",)}, 1)])
def test_a_run_that_refuses_derivations_leaves_no_cache_entry_for_one_that_takes_them(
    options, saved, tmp_path, monkeypatch
):
    """What was refused depends on more than the cache's key (free memory, tensors made under inference_mode)."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters = torch._dynamo.utils.counters
    counters.clear()

    class Keyed(Compiled):
        def compile_inner(self, gm: GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
            run = super().compile_inner(gm, example_inputs, **kwargs)
            run._fx_graph_cache_key = "as Inductor's own"
            return run

    with (
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        assert Keyed(QuantisedLinear(), **options).agrees(inputs())
    assert counters["aot_autograd"]["autograd_cache_saved"] == saved
