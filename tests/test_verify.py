"""The self-check: what `rope_fusion.verify` notices, what it says, and what it leaves alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import GptOssAttention, cos_sin_table
from torch import Tensor

import rope_fusion
from rope_fusion.backend import inductor_options
from rope_fusion.kernels import rope_qkv
from rope_fusion.options import RopeFusionOptionError
from rope_fusion.report import RopeFusionWarning
from rope_fusion.verify import SelfCheckError, VerifiedFunction, find_mismatch

OPTIONS: dict[str, Any] = {"rope_fusion.kernels": "reference", "rope_fusion.strict": True}


def arguments(tokens: int = 5) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(tokens, 64, dtype=torch.bfloat16)
    return x, cos_sin_table(32, 16), torch.arange(tokens), torch.arange(tokens) * 3


def compiled(model: Callable[..., Any], **options: Any) -> Any:
    named: dict[str, Any] = {f"rope_fusion.{name}": value for name, value in options.items()}
    return torch.compile(model, backend="rope_fusion", options={**OPTIONS, **named})


@pytest.fixture
def model() -> GptOssAttention:
    torch.manual_seed(1)
    return GptOssAttention().eval()


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused operator whose rotation turns the wrong way."""
    right = rope_qkv.rotate_reference

    def wrong(x: Tensor, cos: Tensor, sin: Tensor, **keywords: Any) -> Tensor:
        return right(x, cos, -sin, **keywords)

    monkeypatch.setattr(rope_qkv, "rotate_reference", wrong)


@torch.no_grad()
def test_first_call_agrees_and_later_calls_run_the_compiled_graph_alone(
    model: GptOssAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []
    original = VerifiedFunction._check

    def counting(self: VerifiedFunction, args: list[Any]) -> Any:
        checks.append(self._both_ways.sites)
        return original(self, args)

    monkeypatch.setattr(VerifiedFunction, "_check", counting)
    plain = copy.deepcopy(model)
    function = compiled(model, verify="first")
    with rope_fusion.record() as report:
        for _ in range(3):
            got = function(*arguments())
    assert report.hits, "the pass fused nothing, so nothing was checked"
    assert len(checks) == 1
    assert checks[0] >= 3  # the quantised q and both caches
    expected = plain(*arguments())
    # q, k and v go through FP8, whose unit is 1/8; attention averages over tokens
    torch.testing.assert_close(got, expected, rtol=0.125, atol=0.02)
    assert torch.equal(model.k_cache.view(torch.uint8) != 0, plain.k_cache.view(torch.uint8) != 0)


@torch.no_grad()
def test_a_write_that_nothing_reads_happens_in_the_checked_call_too() -> None:
    def write(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        for part, value in zip(cache, (k, -k), strict=True):
            part.view(-1, 2, 8)[slots] = value

    cache, k, slots = torch.zeros(2, 4, 4, 2, 8), torch.ones(3, 2, 8), torch.tensor([1, 5, 9])
    with rope_fusion.record() as report:
        compiled(write, verify="first")(cache, k, slots)
    assert report.hits
    assert torch.equal(cache[0].view(-1, 2, 8)[slots], k)
    assert torch.equal(cache[1].view(-1, 2, 8)[slots], -k)


@torch.no_grad()
def test_always_checks_every_call(model: GptOssAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    original = VerifiedFunction._check

    def counted(self: VerifiedFunction, args: Any) -> Any:
        checks.append(1)
        return original(self, args)

    monkeypatch.setattr(VerifiedFunction, "_check", counted)
    function = compiled(model, verify="always")
    for _ in range(3):
        function(*arguments())
    assert len(checks) == 3


@torch.no_grad()
@pytest.mark.usefixtures("wrong_kernel")
def test_mismatch_raises_and_names_site_element_and_both_values(model: GptOssAttention) -> None:
    with pytest.raises(
        SelfCheckError, match=r"element \[\d+, \d+, \d+\] is -?[\d.]+ fused and -?[\d.]+ unfused"
    ) as caught:
        compiled(model, verify="first")(*arguments())
    assert "of 320 elements" in str(caught.value)  # q: 5 tokens, 4 heads, 16 elements


@torch.no_grad()
@pytest.mark.usefixtures("wrong_kernel")
def test_fallback_gives_the_unfused_result_from_the_first_call_on(model: GptOssAttention) -> None:
    plain = copy.deepcopy(model)
    function = compiled(model, verify="first", on_mismatch="fallback")
    with pytest.warns(RopeFusionWarning, match="runs unfused from now on"):
        first = function(*arguments())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = function(*arguments())
    expected = plain(*arguments())
    for got in (first, second):
        torch.testing.assert_close(got, expected, rtol=0.125, atol=0.02)  # see above
    # Inductor keeps the rotated k in fp32 until it is quantised: one FP8 unit
    torch.testing.assert_close(model.k_cache.float(), plain.k_cache.float(), rtol=0.125, atol=0)


@torch.no_grad()
@pytest.mark.usefixtures("wrong_kernel")
def test_off_checks_nothing(model: GptOssAttention) -> None:
    compiled(model)(*arguments())


@torch.no_grad()
def test_layer_is_named(wrong_kernel: None) -> None:
    torch.manual_seed(1)
    model = torch.nn.ModuleDict({"attention": GptOssAttention()})

    def forward(*args: Tensor) -> Tensor:
        return model["attention"](*args)

    with pytest.raises(SelfCheckError, match="attention"):
        compiled(forward, verify="first")(*arguments())


def test_verify_needs_the_backend() -> None:
    with pytest.raises(RopeFusionOptionError, match="backend"):
        inductor_options(verify="first")


def test_values_within_rounding_pass_and_others_do_not() -> None:
    row = torch.tensor([[1.0, 0.001, -0.5]])
    assert find_mismatch(row, row + 1e-7, "here", exact=False) is None
    found = find_mismatch(row, row + 1e-3, "here", exact=False)
    assert found is not None
    assert (found.site, found.wrong, found.elements) == ("here", 3, 3)
    exact = find_mismatch(row, torch.nextafter(row, row + 1), "here", exact=True)
    assert exact is not None


def test_nan_and_infinity_must_stay_where_they_are() -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    assert find_mismatch(special, special.clone(), "here", exact=False) is None
    for index in range(3):
        moved = special.clone()
        moved[index] = 0.0
        found = find_mismatch(special, moved, "here", exact=False)
        assert found is not None
        assert found.index == (index,)
    broken = special.clone()
    broken[3] = float("nan")
    assert find_mismatch(special, broken, "here", exact=False) is not None
