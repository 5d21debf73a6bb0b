"""Pattern `inverse_rope_group_fp8`: the quantisation by groups that follows an inverse rotation is done by its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import captured
from torch import Tensor

from rope_fusion.fusion_pass import FusionPass
from rope_fusion.options import make_options
from rope_fusion.report import GraphReport
from rope_fusion.testing import assert_hits

TOKENS, HEADS, WIDTH, ROTARY, ROWS, GROUP = 6, 4, 256, 64, 40, 128
OPTIONS: dict[str, Any] = {"rope_fusion.kernels": "reference", "rope_fusion.strict": True}
FP8, LIMIT, LEAST = torch.float8_e4m3fn, 448.0, 1e-4
Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


def table() -> Tensor:
    """[ROWS, ROTARY] fp32, cos first."""
    angle = torch.outer(torch.arange(ROWS).float(), 1.0 / 10.0 ** (torch.arange(0, ROTARY, 2) / ROTARY))
    return torch.cat([angle.cos(), angle.sin()], -1)


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(tokens, HEADS, WIDTH, generator=generator).to(dtype)
    if tokens:
        o[0, 0] = 0  # a group whose amax is the least one
    return o, torch.randint(0, ROWS, (tokens,), generator=generator), table()


def rotate_back(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = cache[positions].to(torch.promote_types(o.dtype, torch.float32))[:, None].chunk(2, -1)
    a, b = o[..., -ROTARY:].to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)
    return torch.cat([o[..., :-ROTARY], turned.to(o.dtype)], -1)


def in_groups(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.float().view(*y.shape[:-1], -1, GROUP)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LIMIT
    return (groups / scales).clamp(-LIMIT, LIMIT).to(FP8).view(y.shape), scales.squeeze(-1)


def flattened(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.reshape(-1, GROUP)
    scales = groups.abs().float().amax(1).clamp(min=LEAST) / LIMIT
    values = torch.clamp(groups.float() / scales.unsqueeze(1), min=-LIMIT, max=LIMIT).to(FP8)
    return values.view(y.shape[0], 2, -1), scales.view(y.shape[0], -1)


def one_group_per_head(y: Tensor) -> tuple[Tensor, Tensor]:
    scales = torch.maximum(y.abs().amax(-1, keepdim=True).float(), torch.tensor(LEAST)) / LIMIT
    return (y / scales).clamp(-LIMIT, LIMIT).to(FP8), scales


def by_reciprocals(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LIMIT
    return (groups * (1.0 / scales)).clamp(-LIMIT, LIMIT).to(FP8).flatten(-2), scales.squeeze(-1)


def powers_of_two(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.float().unflatten(-1, (-1, GROUP))
    scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LIMIT)))
    return (groups / scales).clamp(-LIMIT, LIMIT).to(FP8).flatten(-2), scales.squeeze(-1)


def by_pow(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.float().unflatten(-1, (-1, GROUP))
    scales = torch.pow(2.0, torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LIMIT)))
    return (groups * (1.0 / scales)).clamp(-LIMIT, LIMIT).to(FP8).flatten(-2), scales.squeeze(-1)


EXACT: list[Quantise] = [in_groups, flattened, one_group_per_head]
INEXACT: list[Quantise] = [by_reciprocals, powers_of_two, by_pow]


def program(quantise: Quantise) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda o, positions, cache: quantise(rotate_back(o, positions, cache))


def rewritten(
    function: Callable[..., Any], hits: dict[str, int], *args: Any, numerics: str = "fp32"
) -> tuple[Any, GraphReport]:
    """What the rewritten graph returns, executed node by node, and the report of its hits, which are asserted."""
    found = captured(function, *args)
    reports: list[GraphReport] = []
    options = make_options({"kernels": "reference", "strict": True, "numerics": numerics})
    FusionPass(options, reports.append)(found.graph)
    found.graph.lint()
    (report,) = reports
    assert {name: pattern.hits for name, pattern in report.patterns.items() if pattern.hits} == hits
    return found.run()[1], report


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    return (values.double().view(*scales.reshape(-1).shape, -1) * scales.double().reshape(-1, 1)).flatten()


@pytest.mark.parametrize("quantise", EXACT)
def test_exact_numerics_give_the_values_and_scales_of_eager(quantise: Quantise) -> None:
    got, _ = rewritten(program(quantise), {"inverse_rope_group_fp8": 1}, *inputs(), numerics="exact")
    for value, wanted in zip(got, program(quantise)(*inputs()), strict=True):
        assert value.dtype == wanted.dtype and value.shape == wanted.shape
        assert torch.equal(value.float(), wanted.float())


@pytest.mark.parametrize("quantise", EXACT + INEXACT)
def test_values_times_scales_are_as_near_to_float64_as_those_of_eager(quantise: Quantise) -> None:
    o, positions, cache = inputs()
    got, _ = rewritten(program(quantise), {"inverse_rope_group_fp8": 1}, o, positions, cache)
    wanted = program(quantise)(o, positions, cache)
    assert [(v.shape, v.dtype) for v in got] == [(v.shape, v.dtype) for v in wanted]
    exactly = rotate_back(o.double(), positions, cache.double()).flatten()
    errors = [(dequantised(*pair) - exactly).norm() for pair in (got, wanted)]
    # a few elements may fall to the other side of a rounding boundary of bf16 or FP8
    assert errors[0] <= 1.001 * errors[1]
    # one rounding of the amax to bf16 at most
    torch.testing.assert_close(got[1], wanted[1], rtol=2**-8, atol=0)


@pytest.mark.parametrize("quantise", INEXACT)
def test_exact_numerics_leave_what_they_cannot_reproduce_and_say_so(quantise: Quantise) -> None:
    got, report = rewritten(program(quantise), {"inverse_rope": 1}, *inputs(), numerics="exact")
    assert any("which exact numerics cannot reproduce" in sentence for sentence in report.near_misses)
    assert torch.equal(got[1], program(quantise)(*inputs())[1])


def test_other_readers_of_the_rotated_tensor_and_of_the_scales_keep_their_values() -> None:
    def with_readers(o: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        y = rotate_back(o, positions, cache)
        values, scales = in_groups(y)
        return values, scales, y, scales.sum(-1), y.abs().amax(-1)

    got, _ = rewritten(with_readers, {"inverse_rope_group_fp8": 1}, *inputs(), numerics="exact")
    for value, wanted in zip(got, with_readers(*inputs()), strict=True):
        assert torch.equal(value.float(), wanted.float())


def test_one_kernel_is_all_that_is_left() -> None:
    torch.compiler.reset()
    function = torch.compile(program(in_groups), backend="rope_fusion", options=OPTIONS)
    _, (code,) = torch._inductor.utils.run_and_get_code(function, *inputs())
    assert code.count("= torch.ops.rope_fusion.rotate_group_fp8.default(") == 1
    assert "cpp_fused" not in code and "rope_fusion.rotate.default" not in code


@pytest.mark.parametrize("quantise", [in_groups, flattened])
def test_a_dynamic_token_count_hits_and_serves_no_tokens(quantise: Quantise) -> None:
    o, positions, cache = inputs()
    for tensor in (o, positions):
        torch._dynamo.mark_dynamic(tensor, 0)
    settings = OPTIONS | {"rope_fusion.numerics": "exact"}
    assert_hits(program(quantise), (o, positions, cache), {"inverse_rope_group_fp8": 1}, options=settings)
    torch.compiler.reset()
    function = torch.compile(program(quantise), backend="rope_fusion", options=settings)
    function(o, positions, cache)
    more = inputs(17)
    with torch.compiler.set_stance("fail_on_recompile"):
        got = function(*more)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, program(quantise)(*more), strict=True))


def test_heads_before_tokens_are_quantised_in_their_own_order() -> None:
    def heads_first(o: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cache[positions].unsqueeze(1).chunk(2, -1)
        a, b = o[..., -ROTARY:].float().chunk(2, -1)
        turned = torch.cat([a * cos + b * sin, b * cos - a * sin], -1)
        return in_groups(torch.cat([o[..., :-ROTARY], turned.to(o.dtype)], -1))

    o = torch.randn(2, HEADS, TOKENS, WIDTH).to(torch.bfloat16)
    arguments = (o, torch.randint(0, ROWS, (2, TOKENS)), table())
    got, _ = rewritten(heads_first, {"inverse_rope_group_fp8": 1}, *arguments, numerics="exact")
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, heads_first(*arguments), strict=True))


# near misses


def shared_by_two_groups(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax((-1, -2), keepdim=True).clamp(min=LEAST) / LIMIT
    return (groups / scales).clamp(-LIMIT, LIMIT).to(FP8).flatten(-2), scales


def across_heads(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.float().view(y.shape[0], -1, 2 * WIDTH)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LIMIT
    return (groups / scales).clamp(-LIMIT, LIMIT).to(FP8).view(y.shape), scales


def without_a_least(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = (y.float() + 0).unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / LIMIT
    return (groups / scales).clamp(-LIMIT, LIMIT).to(FP8).flatten(-2), scales


def to_another_limit(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / 400.0
    return (groups / scales).clamp(-LIMIT, LIMIT).to(FP8).flatten(-2), scales


def by_the_maximum(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.float().unflatten(-1, (-1, GROUP))
    scales = groups.amax(-1, keepdim=True).clamp(min=LEAST) / LIMIT
    return (groups / scales).clamp(-LIMIT, LIMIT).to(FP8).flatten(-2), scales


def measured_on_its_neighbour(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.float().unflatten(-1, (-1, GROUP))
    scales = groups.roll(1, 0).abs().amax(-1, keepdim=True).clamp(min=LEAST) / LIMIT
    return (groups / scales).clamp(-LIMIT, LIMIT).to(FP8).flatten(-2), scales


def in_bfloat16(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = y.unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1).clamp(min=LEAST)
    scales = largest.unsqueeze(-1).float() / LIMIT  # the view keeps torch 2.11 from removing the rounding of the bound
    return (groups.float() / scales).clamp(-LIMIT, LIMIT).to(FP8).flatten(-2), scales


@pytest.mark.parametrize(
    ("quantise", "sentence"),
    [
        (shared_by_two_groups, "one is shared between groups"),
        (across_heads, "its groups of 512 elements do not divide the heads of 256"),
        (without_a_least, "nothing keeps them from being zero"),
        (to_another_limit, "they are not the amax divided by 448"),
        (by_the_maximum, "their amax is not one of magnitudes"),
        (measured_on_its_neighbour, "they are measured on another tensor"),
        (in_bfloat16, "in another dtype than float32"),
    ],
)
def test_other_scales_are_refused_with_a_sentence_and_keep_their_values(quantise: Quantise, sentence: str) -> None:
    o, positions, cache = inputs()
    o[0, 0] = 1.0  # nothing else compares equal where an amax of zero makes NaN
    got, report = rewritten(program(quantise), {"inverse_rope": 1}, o, positions, cache, numerics="exact")
    assert any(sentence in miss for miss in report.near_misses), report.near_misses
    for value, wanted in zip(got, program(quantise)(o, positions, cache), strict=True):
        assert torch.equal(value.float(), wanted.float())


def test_a_group_of_another_size_than_a_power_of_two_is_refused_by_the_kernel() -> None:
    def of_96(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        groups = rotate_back(o, positions, cache).float().unflatten(-1, (-1, 96))
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LIMIT
        return (groups / scales).clamp(-LIMIT, LIMIT).to(FP8).flatten(-2).float()

    o, positions, cache = inputs()
    arguments = (o[..., -192:].contiguous(), positions, cache)
    got, report = rewritten(of_96, {"inverse_rope": 1}, *arguments, numerics="exact")
    refusals = report.patterns["inverse_rope_group_fp8"].refusals
    assert "must be a power of two that divides the head dim 192, got 96" in str(refusals)
    assert torch.equal(got[0], of_96(*arguments))


def test_a_forward_rotation_stays_with_its_own_pattern() -> None:
    def forward(o: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cache[positions][:, None].chunk(2, -1)
        a, b = o[..., -ROTARY:].float().chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return in_groups(torch.cat([o[..., :-ROTARY], turned.to(o.dtype)], -1))

    _, report = rewritten(forward, {"partial_rope": 1}, *inputs())
    assert "the rotation is a forward one" in str(report.patterns["inverse_rope_group_fp8"].refusals)
