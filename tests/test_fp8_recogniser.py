"""Static FP8 quantisation is found in every spelling, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from captured import Captured, captured
from torch import Tensor

from rope_fusion.canonical.fp8 import find_fp8_quantisations
from rope_fusion.canonical.records import Fp8Quantisation

FP8 = torch.float8_e4m3fn
HALF = torch.bfloat16
FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]


def tensor(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Values well beyond the FP8 range once divided by the scales of these tests, and small ones."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-3, 4, shape[-1])
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


def only(found: Captured) -> Fp8Quantisation:
    quantisations, refusals = find_fp8_quantisations(found.graph)
    assert refusals == []
    (quantisation,) = quantisations
    return quantisation


def refusal(function: Callable[..., Tensor], *args: Tensor) -> str:
    quantisations, refusals = find_fp8_quantisations(captured(function, *args).graph)
    assert quantisations == []
    (sentence,) = refusals
    return sentence


def quantised(found: Captured, record: Fp8Quantisation) -> Tensor:
    """What the record says, from the values of its nodes, in the shape of x."""
    values = found.values()
    x = values[record.x].float()
    scale = values[record.scale].float() if isinstance(record.scale, torch.fx.Node) else torch.tensor(record.scale)
    if record.scale_axis is not None:
        scale = scale.reshape([-1] + [1] * (-record.scale_axis - 1))
    else:
        assert scale.numel() == 1
        scale = scale.reshape(())
    scaled = x * scale if record.scale_multiplies else x / scale
    limit = torch.finfo(record.dtype).max
    return scaled.to(record.scale_dtype).clamp(-limit, limit).to(record.dtype)


def assert_means_what_the_program_computes(found: Captured, record: Fp8Quantisation) -> None:
    expected = found.values()[record.out]
    actual = quantised(found, record).reshape(expected.shape)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


SPELLINGS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    # name: (spelling, dtype in which the scaled value is held)
    "half": (lambda x, s: (x / s.to(x.dtype)).clamp(-448, 448).to(FP8), HALF),
    "upcast": (lambda x, s: (x.float() / s).clamp(-448.0, 448.0).to(FP8), torch.float32),
    "one element": (lambda x, s: (x / s.reshape(1)).clamp(-448, 448).to(FP8), torch.float32),
    "finfo": (lambda x, s: (x.float() / s).clamp(torch.finfo(FP8).min, torch.finfo(FP8).max).to(FP8), torch.float32),
    "two clamps": (lambda x, s: (x.float() / s).clamp(min=-448).clamp(max=448).to(FP8), torch.float32),
    "upper first": (lambda x, s: (x.float() / s).clamp_max(448.0).clamp_min(-448).to(FP8), torch.float32),
    "in place": (lambda x, s: (x.float() / s).clamp_(-448, 448).to(FP8), torch.float32),
    "hardtanh": (lambda x, s: torch.nn.functional.hardtanh(x.float() / s, -448.0, 448.0).to(FP8), torch.float32),
    "minimum": (
        lambda x, s: torch.maximum(torch.minimum(torch.full((), 448.0), x.float() / s), torch.full((), -448.0)).to(FP8),
        torch.float32,
    ),
    "constant bounds": (
        lambda x, s: torch.clamp(x.float() / s, torch.tensor(-448.0), torch.tensor(448.0)).to(FP8),
        torch.float32,
    ),
    "rounded before the clamp": (lambda x, s: (x.float() / s).to(HALF).clamp(-448, 448).to(FP8), HALF),
    "rounded after the clamp": (lambda x, s: (x.float() / s).clamp(-448, 448).to(HALF).to(FP8), HALF),
    "expanded scale": (
        lambda x, s: (x.float() / s.reshape(1, 1, 1).expand(x.shape)).clamp(-448, 448).to(FP8),
        torch.float32,
    ),
    "unsqueezed scale": (lambda x, s: (x.float() / s[None, None, None]).clamp(-448, 448).to(FP8), torch.float32),
    "reshape between": (
        lambda x, s: (x.float() / s).reshape(x.shape[0], -1).clamp(-448, 448).to(FP8).view(x.shape),
        torch.float32,
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_finds_division_by_a_tensor(name: str) -> None:
    spelling, scale_dtype = SPELLINGS[name]
    x = tensor(5, 4, 16)
    found = captured(lambda x, s: (spelling(x, s), x + 1), x, torch.tensor(0.5))
    record = only(found)
    assert record.x.op == "placeholder"
    assert record.x.meta["val"].shape == x.shape
    assert not record.scale_multiplies
    assert (record.dtype, record.scale_dtype) == (FP8, scale_dtype)
    assert not record.per_head
    assert record.out in record.nodes
    assert record.x not in record.nodes
    assert_means_what_the_program_computes(found, record)


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_finds_every_fp8_dtype_with_its_own_limit(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    found = captured(lambda x, s: (x.float() / s).clamp(-limit, limit).to(dtype), tensor(5, 16), torch.tensor(0.01))
    assert only(found).dtype == dtype
    assert_means_what_the_program_computes(found, only(found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_finds_quantisation_of_other_float_dtypes(dtype: torch.dtype) -> None:
    found = captured(lambda x, s: (x / s.to(x.dtype)).clamp(-448, 448).to(FP8), tensor(5, 16).to(dtype), torch.ones(1))
    assert only(found).scale_dtype == dtype


def test_a_python_scale_is_a_number() -> None:
    found = captured(lambda x: (x.float() / 0.25).clamp(-448, 448).to(FP8), tensor(5, 16))
    assert (only(found).scale, only(found).scale_multiplies) == (0.25, False)
    assert_means_what_the_program_computes(found, only(found))


def test_multiplication_is_reported() -> None:
    found = captured(lambda x: (x.float() * 4.0).clamp(-448, 448).to(FP8), tensor(5, 16))
    assert (only(found).scale, only(found).scale_multiplies) == (4.0, True)
    found = captured(lambda x, s: (s * x.float()).clamp(-448, 448).to(FP8), tensor(5, 16), torch.tensor([3.0]))
    assert only(found).scale_multiplies
    assert_means_what_the_program_computes(found, only(found))


def test_a_missing_scale_is_one() -> None:
    found = captured(lambda x: x.clamp(-448, 448).to(FP8), tensor(5, 16))
    assert only(found).scale == 1.0
    assert only(found).x.op == "placeholder"
    assert_means_what_the_program_computes(found, only(found))


@pytest.mark.parametrize("invert", [torch.reciprocal, lambda s: 1.0 / s, lambda s: s**-1])
def test_multiplication_by_a_reciprocal_is_division(invert: Callable[[Tensor], Tensor]) -> None:
    def program(x: Tensor, s: Tensor) -> Tensor:
        return (x.float() * invert(s)).clamp(-448, 448).to(FP8)

    found = captured(program, tensor(5, 16), torch.tensor(0.3))
    record = only(found)
    assert isinstance(record.scale, torch.fx.Node)
    assert record.scale.op == "placeholder"
    assert not record.scale_multiplies
    assert record.reciprocal is not None
    values = found.values()
    assert values[record.reciprocal].item() == pytest.approx(1 / 0.3)
    # x * (1 / s) and x / s differ by an fp32 rounding, which moves a value at most to the next FP8 number
    steps = quantised(found, record).view(torch.uint8).int() - values[record.out].view(torch.uint8).int()
    assert steps.abs().max() <= 1


def test_a_scale_per_head_is_reported_with_its_dim() -> None:
    def program(x: Tensor, s: Tensor) -> Tensor:
        return (x.float() / s[:, None]).clamp(-448, 448).to(FP8)

    found = captured(program, tensor(5, 4, 16), torch.tensor([0.5, 1.0, 2.0, 4.0]))
    record = only(found)
    assert record.per_head
    assert record.scale_axis == -2
    assert isinstance(record.scale, torch.fx.Node)
    assert record.scale.op == "placeholder"
    assert_means_what_the_program_computes(found, record)


def test_a_scale_per_head_is_found_in_a_transposed_tensor() -> None:
    def program(hidden: Tensor, s: Tensor) -> Tensor:
        x = hidden.view(2, 5, 4, 16).transpose(1, 2)
        return (x.float() / s.view(1, 4, 1, 1)).clamp(-448, 448).to(FP8)

    found = captured(program, tensor(2, 5, 64), torch.tensor([0.5, 1.0, 2.0, 4.0]))
    assert only(found).scale_axis == -3
    assert_means_what_the_program_computes(found, only(found))


def test_refuses_clamp_bounds_of_another_dtype_and_says_which() -> None:
    sentence = refusal(lambda x: (x.float() / 0.5).clamp(-240, 240).to(FP8), tensor(5, 16))
    assert "clamped at 240" in sentence
    assert "448" in sentence
    assert "-448" in refusal(lambda x: (x.float() / 0.5).clamp(-2, 448).to(FP8), tensor(5, 16))


def test_refuses_a_conversion_without_clamp() -> None:
    assert "no clamp" in refusal(lambda x: (x.float() / 0.5).to(FP8), tensor(5, 16))
    assert "no clamp" in refusal(lambda x: (x.float() / 0.5).clamp(max=448).to(FP8), tensor(5, 16))


def test_refuses_a_clamp_before_the_scale() -> None:
    assert "no clamp" in refusal(lambda x: (x.float().clamp(-448, 448) / 0.5).to(FP8), tensor(5, 16))


def test_refuses_a_scale_measured_on_the_tensor() -> None:
    def dynamic(x: Tensor) -> Tensor:
        scale = x.abs().max().float() / 448
        return (x.float() / scale).clamp(-448, 448).to(FP8)

    assert "computed from the tensor that it scales" in refusal(dynamic, tensor(5, 4, 16))


def test_refuses_a_scale_measured_on_what_the_tensor_is_made_of() -> None:
    def dynamic(hidden: Tensor, weight: Tensor) -> Tensor:
        projected = hidden @ weight
        scale = projected.float().square().mean().sqrt()
        return (projected.view(5, 4, 8).float().cos() / scale).clamp(-448, 448).to(FP8)

    assert "computed from the tensor that it scales" in refusal(dynamic, tensor(5, 16), tensor(16, 32))


def test_a_scale_computed_from_other_scales_is_static() -> None:
    def program(x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        upstream = x * s  # x and the scale share a small tensor
        return (upstream.float() / (s * t)).clamp(-448, 448).to(FP8)

    found = captured(program, tensor(5, 16), torch.tensor(0.5), torch.tensor(0.25))
    assert_means_what_the_program_computes(found, only(found))


def test_refuses_a_scale_per_token() -> None:
    def per_token(x: Tensor, s: Tensor) -> Tensor:
        return (x.float() / s).clamp(-448, 448).to(FP8)

    assert "per token" in refusal(per_token, tensor(5, 4, 16), torch.rand(5, 1, 1) + 1)
    assert "per token" in refusal(per_token, tensor(5, 16), torch.rand(5, 1) + 1)
    assert "per channel" in refusal(per_token, tensor(5, 4, 16), torch.rand(5, 4, 1) + 1)
    assert "per channel" in refusal(per_token, tensor(5, 4, 16), torch.rand(16) + 1)


def test_refuses_a_scale_per_token_where_the_heads_are_known() -> None:
    def per_token(hidden: Tensor, s: Tensor) -> Tensor:
        x = hidden.view(2, 5, 4, 16).transpose(1, 2)
        return (x.float() / s.view(5, 1)).clamp(-448, 448).to(FP8)

    assert "per token" in refusal(per_token, tensor(2, 5, 64), torch.rand(5) + 1)


def test_division_of_the_scale_by_the_tensor_has_no_scale() -> None:
    found = captured(lambda x, s: (s / x.float()).clamp(-448, 448).to(FP8), tensor(5, 16), torch.tensor(0.5))
    record = only(found)
    assert record.scale == 1.0
    assert record.x.target is torch.ops.aten.div.Tensor


def test_token_count_may_be_dynamic() -> None:
    def program(x: Tensor, s: Tensor) -> Tensor:
        return (x.float() / s).clamp(-448, 448).to(FP8)

    found = captured(program, tensor(5, 4, 16), torch.tensor([0.5]), dynamic=True)
    assert only(found).scale_dtype == torch.float32
    assert_means_what_the_program_computes(found, only(found))


def test_other_users_do_not_hide_a_quantisation() -> None:
    def program(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        scaled = x.float() / s
        clamped = scaled.clamp(-448, 448)
        return clamped.to(FP8), clamped, scaled, x + 1

    assert_means_what_the_program_computes(found := captured(program, tensor(5, 16), torch.tensor(0.5)), only(found))
