"""Pattern `rope_rearranged`: the copy that brings a rotated tensor into another order is written by the rotation."""

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

TOKENS, HEADS, WIDTH, ROTARY, ROWS, GROUPS = 6, 4, 32, 8, 40, 2
OPTIONS: dict[str, Any] = {"rope_fusion.kernels": "reference", "rope_fusion.strict": True}
Move = Callable[[Tensor], Any]


def table() -> Tensor:
    """[ROWS, ROTARY] fp32, cos first."""
    angle = torch.outer(torch.arange(ROWS).float(), 1.0 / 10.0 ** (torch.arange(0, ROTARY, 2) / ROTARY))
    return torch.cat([angle.cos(), angle.sin()], -1)


def inputs(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(tokens, HEADS, WIDTH, generator=generator).to(torch.bfloat16)
    return o, torch.randint(0, ROWS, (tokens,), generator=generator), table()


def rotated(o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last elements of each head, turned back."""
    a, b = o[..., -ROTARY:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)
    return torch.cat([o[..., :-ROTARY], turned.to(o.dtype)], -1)


def program(move: Move) -> Callable[[Tensor, Tensor, Tensor], Any]:
    return lambda o, positions, cache: move(rotated(o, *cache[positions][:, None].chunk(2, -1)))


def rewritten(function: Callable[..., Any], hits: dict[str, int], *args: Any) -> tuple[Any, list[str]]:
    """What the rewritten graph returns, executed node by node, and the operators in it that compute or copy."""
    found = captured(function, *args)
    reports: list[GraphReport] = []
    options = make_options({"kernels": "reference", "strict": True, "numerics": "exact"})
    FusionPass(options, reports.append)(found.graph)
    found.graph.lint()
    assert {name: pattern.hits for name, pattern in reports[0].patterns.items() if pattern.hits} == hits
    names = [str(node.target) for node in found.graph.nodes if node.op == "call_function"]
    return found.run()[1], [name for name in names if name.startswith("rope_fusion") or "clone" in name]


def groups_first(y: Tensor) -> Tensor:
    return y.view(y.shape[0], GROUPS, HEADS // GROUPS * WIDTH).transpose(0, 1).contiguous()


def groups_first_with_heads(y: Tensor) -> Tensor:
    return y.view(y.shape[0], GROUPS, HEADS // GROUPS, WIDTH).permute(1, 0, 2, 3).contiguous().flatten(-2)


def heads_of_groups_first(y: Tensor) -> Tensor:
    return y.view(y.shape[0], GROUPS, HEADS // GROUPS, WIDTH).permute(2, 0, 1, 3).contiguous()


def one_head_per_group(y: Tensor) -> Tensor:
    return y.view(y.shape[0], HEADS, WIDTH).transpose(0, 1).contiguous()


def heads_first(y: Tensor) -> Tensor:
    return y.transpose(0, 1).contiguous()


def heads_first_by_reshape(y: Tensor) -> Tensor:
    return y.transpose(0, 1).reshape(-1, WIDTH)


MOVES: list[Move] = [
    groups_first,
    groups_first_with_heads,
    heads_of_groups_first,
    one_head_per_group,
    heads_first,
    heads_first_by_reshape,
]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
def test_a_copy_in_another_order_is_written_by_the_rotation(move: Move, tokens: int) -> None:
    if tokens < 2:  # nothing changes places, or nothing is there: the copy may be gone before
        found = captured(program(move), *inputs(tokens))
        FusionPass(make_options({"kernels": "reference", "strict": True, "numerics": "exact"}))(found.graph)
        got = found.run()[1]
    else:
        got, operators = rewritten(program(move), {"rope_rearranged": 1}, *inputs(tokens))
        assert operators == ["rope_fusion.rotate.default"]
    wanted = program(move)(*inputs(tokens))
    assert torch.equal(got[0], wanted) and got[0].stride() == wanted.stride()


@pytest.mark.parametrize("layers", [2, 8])
def test_every_layer_hits_once(layers: int) -> None:
    def stack(outputs: list[Tensor], positions: Tensor, cache: Tensor) -> list[Tensor]:
        return [program(groups_first)(o, positions, cache) for o in outputs]

    o, positions, cache = inputs()
    outputs = [o * (layer + 1) for layer in range(layers)]
    got, _ = rewritten(stack, {"rope_rearranged": layers}, outputs, positions, cache)
    assert all(map(torch.equal, got, stack(outputs, positions, cache)))


def test_heads_before_tokens_are_merged_behind_them() -> None:
    def merge(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        cos, sin = cache[positions].unsqueeze(1).chunk(2, -1)
        return rotated(o, cos, sin).transpose(1, 2).reshape(2, TOKENS, -1)

    o = torch.randn(2, HEADS, TOKENS, WIDTH).to(torch.bfloat16)
    arguments = (o, torch.randint(0, ROWS, (2, TOKENS)), table())
    got, operators = rewritten(merge, {"rope_rearranged": 1}, *arguments)
    assert torch.equal(got[0], merge(*arguments))
    assert operators == ["rope_fusion.rotate.default"]


def test_an_input_that_dies_is_better_written_in_the_new_order_than_turned_in_place() -> None:
    def produced(o: Tensor, positions: Tensor, cache: Tensor, weight: Tensor) -> Tensor:
        return program(groups_first)((o @ weight).reshape(o.shape), positions, cache)

    arguments = (*inputs(), torch.eye(WIDTH).flip(0).to(torch.bfloat16))
    got, operators = rewritten(produced, {"rope_rearranged": 1}, *arguments)
    assert torch.equal(got[0], produced(*arguments))
    assert operators == ["rope_fusion.rotate.default"]


def test_a_dynamic_token_count_hits_and_only_the_product_is_left_beside_the_kernel() -> None:
    def project(o: Tensor, positions: Tensor, cache: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(program(groups_first)(o, positions, cache), weight)

    weight = torch.randn(GROUPS, HEADS // GROUPS * WIDTH, 5).to(torch.bfloat16)
    o, positions, cache = inputs()
    for tensor in (o, positions):
        torch._dynamo.mark_dynamic(tensor, 0)
    assert_hits(project, (o, positions, cache, weight), {"rope_rearranged": 1}, options=OPTIONS)
    torch.compiler.reset()
    function = torch.compile(project, backend="rope_fusion", options=OPTIONS)
    _, (code,) = torch._inductor.utils.run_and_get_code(function, o, positions, cache, weight)
    assert "cpp_fused" not in code
    for tokens in (3, 17):
        more = (*inputs(tokens), weight)
        with torch.compiler.set_stance("fail_on_recompile"):
            got = function(*more)
        # bf16 sums of 64 products in another order
        torch.testing.assert_close(got, project(*more), rtol=2**-6, atol=2**-4)


# what keeps its copy


def also_read_in_the_first_order(y: Tensor) -> tuple[Tensor, Tensor]:
    return groups_first(y), y


def groups_that_cut_heads(y: Tensor) -> Tensor:
    return y.view(y.shape[0], 2 * HEADS, -1).transpose(0, 1).contiguous()


def elements_first(y: Tensor) -> Tensor:
    return y.transpose(1, 2).contiguous()


def never_copied(y: Tensor) -> Tensor:
    return y.view(y.shape[0], GROUPS, -1).transpose(0, 1)


@pytest.mark.parametrize(
    "move",
    [also_read_in_the_first_order, groups_that_cut_heads, elements_first, never_copied],
    ids=lambda f: f.__name__,
)
def test_what_the_kernel_cannot_write_or_others_read_stays_a_rotation_of_its_own(move: Move) -> None:
    got, _ = rewritten(program(move), {"inverse_rope": 1}, *inputs())
    wanted = program(move)(*inputs())
    assert all(map(torch.equal, got, wanted if isinstance(wanted, tuple) else (wanted,)))


def test_a_whole_head_rotated_forward_is_left_to_inductor() -> None:
    def forward(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        cos, sin = cache[positions][:, None].chunk(2, -1)
        a, b = o.float().chunk(2, -1)
        return heads_first(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(o.dtype))

    o, positions, cache = inputs()
    got, _ = rewritten(forward, {}, o[..., :ROTARY].contiguous(), positions, cache)
    assert torch.equal(got[0], forward(o[..., :ROTARY], positions, cache))
