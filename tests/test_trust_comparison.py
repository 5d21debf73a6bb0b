"""The oracle of random programs: what two results may differ by, where rounding decides between two values, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from trust.differential import WrongRewrite, capture_call, compare, compare_on

NAN = float("nan")
FP8 = torch.float8_e4m3fn


def of_fp8(*values: float) -> Tensor:
    """One row; the conversion is of numbers that every torch converts alike."""
    return torch.tensor([values]).to(FP8)


def true(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(("unfused", "fused"), [(NAN, -448.0), (-448.0, NAN)])
def test_rounding_may_decide_whether_a_conversion_overflows(unfused: float, fused: float) -> None:
    """-464 is where overflow begins; bf16 has steps of two there."""
    compare("q8", of_fp8(unfused, 2.0), of_fp8(fused, 2.0), true(-463.3, 2.0), coarsest=torch.bfloat16)


@pytest.mark.parametrize(("unfused", "fused"), [(float("inf"), 57344.0), (57344.0, float("inf"))])
def test_rounding_may_decide_whether_a_conversion_becomes_infinite(unfused: float, fused: float) -> None:
    reference, value = (torch.tensor([[each]]).to(torch.float8_e5m2) for each in (unfused, fused))
    compare("q8", reference, value, true(61500.0), coarsest=torch.bfloat16)
    with pytest.raises(WrongRewrite, match=r"differs where it is not finite|too far off"):
        compare("q8", reference, value, true(62500.0), coarsest=torch.bfloat16)


@pytest.mark.parametrize(
    ("unfused", "fused", "exactly", "coarsest"),
    [
        (NAN, -448.0, -500.0, torch.bfloat16),  # clamped where the program does not clamp
        (-448.0, NAN, -440.0, torch.bfloat16),  # overflows where the program does not
        (NAN, -448.0, -463.3, torch.float32),  # no rounding of fp32 reaches from there to -464
        (NAN, 448.0, -463.3, torch.bfloat16),  # of the other sign
        (NAN, -416.0, -463.3, torch.bfloat16),  # another number
    ],
)
def test_nan_elsewhere_is_an_error(unfused: float, fused: float, exactly: float, coarsest: torch.dtype) -> None:
    with pytest.raises(WrongRewrite, match="NaN elsewhere"):
        compare("q8", of_fp8(unfused, 2.0), of_fp8(fused, 2.0), true(exactly, 2.0), coarsest=coarsest)


def test_nan_elsewhere_is_an_error_where_there_is_no_float64_value() -> None:
    with pytest.raises(WrongRewrite, match="NaN elsewhere"):
        compare("q8", of_fp8(NAN), of_fp8(-448.0), None, coarsest=torch.bfloat16)


def test_the_message_shows_the_elements_that_are_nan_once_only() -> None:
    unfused, fused = of_fp8(NAN, NAN, -448.0), of_fp8(NAN, NAN, NAN)
    with pytest.raises(WrongRewrite, match=r"1 of 3 elements.*\n  \[0, 2\]: unfused -448.0, fused nan, true -300.0"):
        compare("q8", unfused, fused, true(-500.0, -500.0, -300.0))


def test_what_both_programs_make_nan_is_the_same_whatever_its_float64_value_is() -> None:
    compare("q8", of_fp8(NAN, 2.0), of_fp8(NAN, 2.0), true(-448.0, 2.0))


# Scales that are rounded up to a power of two


def program(codes: float = 1.0, scale: float = 1.0) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """FP8 codes and scales of rows; before they are rounded up, the scales are multiplied by these factors."""

    def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
        least = x.float().abs().amax(-1, keepdim=True) / 448.0
        of_codes = torch.exp2(torch.ceil(torch.log2(least * codes)))
        own = of_codes if scale == codes else torch.exp2(torch.ceil(torch.log2(least * scale)))
        return (x / of_codes).clamp(-448.0, 448.0).to(FP8), own.squeeze(-1)

    return quantise


def judge(x: Tensor, codes: float, scale: float, exact: bool = False) -> None:
    (plain,), (other,) = capture_call(program(), x), capture_call(program(codes, scale), x)
    compare_on(plain.graph, other.graph, plain.arguments, exact=exact)


def rows(largest: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The scales of the first two rows are `largest` / 448; that of the last is far from a power of two."""
    torch.manual_seed(0)
    each = torch.cat([torch.rand(7) * 0.9, torch.ones(1)])
    return torch.stack([each * largest, each.flip(0) * largest, each * 300.0]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [7.0, 448.0, 448.0 * 2.0**-20])
def test_a_scale_on_a_power_of_two_may_come_out_as_either(largest: float, dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps
    more = max(unit / 2, 2**-21)  # fp32's log2 does not tell smaller ones
    judge(rows(largest, dtype), 1 + more, 1 + more)
    judge(rows(largest, dtype) * (1 + unit), 1 - unit, 1 - unit)


@pytest.mark.parametrize(
    ("largest", "codes", "scale"),
    [
        (7.0, 1 + 2**-21, 1.0),  # the codes are of the upper power, the scale is the lower one
        (7.0, 1.0, 1 + 2**-21),
        (7.0, 4.0, 4.0),  # neither of the two powers
        (6.999, 1.001, 1.001),  # a thousandth below a power of two
        (7.001, 0.999, 0.999),
        (7.0, 2.0, 2.0),  # the last row's scale is twice as large, too
    ],
)
def test_a_scale_is_held_to_its_own_power_of_two(largest: float, codes: float, scale: float) -> None:
    with pytest.raises(WrongRewrite):
        judge(rows(largest), codes, scale)


def test_exact_numerics_allow_no_other_power_of_two() -> None:
    with pytest.raises(WrongRewrite):
        judge(rows(7.0), 1 + 2**-21, 1 + 2**-21, exact=True)
