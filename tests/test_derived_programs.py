"""Whole programs with derived tensors compute, bit for bit, what they compute without.

Graphs run by their eager operators here: the derived values and what reads them are the program's own, so nothing is
summed in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from derived_harness import FP8, Harness, QuantisedLinear, inputs
from torch import Tensor, nn

import rope_fusion
import rope_fusion.backend  # makes the backend known where the package is not installed
from rope_fusion.derived import plan
from rope_fusion.report import Report

BF16 = torch.bfloat16
ROWS, COLUMNS = 48, 32


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@torch.library.custom_op("rope_fusion_tests::rotary_of_rows", mutates_args=())
def rotary_of_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x * rows[..., : x.shape[-1]]


@rotary_of_rows.register_fake
def _(x: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(x)


class Program(nn.Module):
    """A function of an input and of the module's own buffers `b0`, `b1`, ..."""

    b0: Tensor

    def __init__(self, function: Callable[..., Tensor], *buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        for index, value in enumerate(buffers):
            self.register_buffer(f"b{index}", value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *[buffer for _, buffer in self.named_buffers()])


def codes(dtype: torch.dtype, *shape: int) -> Tensor:
    shape = shape or (ROWS, COLUMNS)
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -8, 8, shape).to(dtype)


# ------------------------------------------------------------------------------------------------ weights


def product(weight: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *buffers: F.linear(x, weight(*buffers).to(x.dtype))


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    return scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:ROWS, :COLUMNS]


def by_index(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.float() * scale[torch.arange(ROWS)[:, None] // 16, torch.arange(COLUMNS)[None] // 8]


def expanded(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.float() * scale[:, None, :, None].expand(3, 16, 4, 8).reshape(ROWS, COLUMNS)


def fixed_zero(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.float() - 8).unflatten(1, (4, 8)).mul(scale[:, :, None]).flatten(1)


WEIGHTS = {
    "per tensor": (lambda w, s: w.float() * s, (torch.rand(()),)),
    "per tensor, divided": (lambda w, s: w.float() / s, (torch.rand(1) + 0.5,)),
    "per row": (lambda w, s: w.float() * s[:, None], (torch.rand(ROWS),)),
    "per row, divided": (lambda w, s: w.float() / s[:, None], (torch.rand(ROWS) + 0.5,)),
    "per column": (lambda w, s: w.float() * s, (torch.rand(COLUMNS),)),
    "blocks": (lambda w, s: w.float() * spread(s, 16, 8), (torch.rand(3, 4),)),
    "blocks, divided": (lambda w, s: w.float() / spread(s, 16, 8), (torch.rand(3, 4) + 0.5,)),
    "incomplete blocks": (lambda w, s: w.float() * spread(s, 20, 12), (torch.rand(3, 3),)),
    "blocks by index": (by_index, (torch.rand(3, 4),)),
    "blocks expanded": (expanded, (torch.rand(3, 4),)),
    "groups with a zero point": (fixed_zero, (torch.rand(ROWS, 4),)),
    "E8M0 blocks": (lambda w, s: w.float() * spread(s, 16, 8), (torch.rand(3, 4).to(torch.float8_e8m0fnu),)),
}


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("spelling", WEIGHTS)
def test_weights_of_every_code_and_scale(spelling: str, dtype: torch.dtype):
    function, scales = WEIGHTS[spelling]
    module, harness, x = Program(product(function), codes(dtype), *scales), Harness(), inputs(4, COLUMNS)
    compiled = harness.compile(module)
    assert torch.equal(compiled(x), module(x))
    assert harness.hits == {"weight_dequant": 1}
    module.b0.copy_(codes(dtype))
    assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "read",
    [
        lambda x, w: F.linear(x, w),
        lambda x, w: F.linear(x, w, w[:, 0]),
        lambda x, w: x @ w.t(),
        lambda x, w: torch.matmul(x[None], w.t()),
        lambda x, w: torch.bmm(x[None], w.t()[None]),
        lambda x, w: torch.einsum("tk,rk->tr", x, w),
    ],
    ids=["linear", "linear with a bias of it", "mm", "matmul", "bmm", "einsum"],
)
def test_weights_of_every_product_and_target(read: Callable[..., Tensor], target: torch.dtype):
    def function(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return read(x, (weight.float() * scale).to(target))

    module, harness, x = Program(function, codes(FP8), torch.rand(ROWS, 1)), Harness(), inputs(4, COLUMNS).to(target)
    # Decomposed into other products than eager calls, which may sum in another order: one rounding.
    torch.testing.assert_close(harness.compile(module)(x), module(x), rtol=1e-2, atol=1e-2)
    assert harness.hits["weight_dequant"] >= 1
    assert harness.casts_left() == 0


def test_a_weight_that_is_used_quantised_elsewhere_is_derived_beside_it():
    def function(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, (weight.float() * scale).to(x.dtype)) + weight.view(torch.uint8).to(x.dtype).amax()

    module, harness, x = Program(function, codes(FP8), torch.rand(ROWS, 1)), Harness(), inputs(4, COLUMNS)
    compiled = harness.compile(module)
    for _ in range(2):
        assert torch.equal(compiled(x), module(x))
        module.b0.copy_(codes(FP8))
    assert harness.hits == {"weight_dequant": 1}


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_geometry_is_refused_and_computes_what_the_program_says(seed: int):
    """Scales of blocks that are permuted, or too few and repeated: no block scaling, whatever it was meant to be."""
    torch.manual_seed(seed)

    def function(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        spreads = [scale.repeat(16, 8), spread(scale, 16, 8).roll(seed + 1, 1), spread(scale, 16, 8).flip(0).roll(3, 0)]
        return F.linear(x, (weight.float() * spreads[seed]).to(x.dtype))

    module, harness, x = Program(function, codes(FP8), torch.rand(3, 4)), Harness(), inputs(4, COLUMNS)
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {}
    assert harness.refusals


# ------------------------------------------------------------------------------------------------ tables


def whole_then_gather(x: Tensor, table: Tensor) -> Tensor:
    return x * table.to(x.dtype)[torch.arange(x.shape[0])]


def gather_then_cast(x: Tensor, table: Tensor) -> Tensor:
    return x * table[torch.arange(x.shape[0])].to(x.dtype)


def gather_then_cast_for_an_operator(x: Tensor, table: Tensor) -> Tensor:
    return rotary_of_rows(x, table[torch.arange(x.shape[0])].to(x.dtype))


def scaled_and_then_rounded(x: Tensor, table: Tensor) -> Tensor:
    return rotary_of_rows(x, (table * x.float().amax()).to(x.dtype)[: x.shape[0]])


@pytest.mark.parametrize("numerics", ["fp32", "exact"])
@pytest.mark.parametrize(
    "function",
    [whole_then_gather, gather_then_cast, gather_then_cast_for_an_operator, scaled_and_then_rounded],
)
def test_tables_are_never_rounded_before_the_program_rounds(function: Callable[..., Tensor], numerics: str):
    module, harness, x = Program(function, torch.rand(64, COLUMNS)), Harness(numerics=numerics), inputs(4, COLUMNS)
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {}


@pytest.mark.parametrize("numerics", ["fp32", "exact"])
def test_a_cast_table_of_an_opaque_operator_is_the_program_s_own_and_its_buffer_stays_as_it_is(numerics: str):
    table = torch.rand(64, COLUMNS)
    before, version = table.clone(), table._version
    module = Program(lambda x, t: rotary_of_rows(x, t.to(x.device, x.dtype)[: x.shape[0]]), table)
    harness, x = Harness(numerics=numerics), inputs(4, COLUMNS)
    assert torch.equal(harness.compile(module)(x), module(x))
    assert harness.hits == {"cos_sin_cast": 1}
    assert torch.equal(table, before) and table._version == version


class Layers(nn.Module):
    """Layers with one rotary table each, or one for all, and a graph break between them as at an attention call."""

    def __init__(self, tables: list[Tensor]) -> None:
        super().__init__()
        self.rotaries = nn.ModuleList([Program(self.rotate, table) for table in tables])

    @staticmethod
    def rotate(x: Tensor, table: Tensor) -> Tensor:
        return rotary_of_rows(x, table.to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.rotaries[0](x) + 1
        torch._dynamo.graph_break()
        x = self.rotaries[1](x) + 1
        torch._dynamo.graph_break()
        return self.rotaries[2](x)


@pytest.mark.parametrize("shared", [True, False])
def test_a_table_is_shared_by_graphs_that_are_split_at_attention(shared: bool):
    table = torch.rand(4, COLUMNS)
    module = Layers([table if shared else table.clone() for _ in range(3)])
    harness, x = Harness(), inputs(4, COLUMNS)
    compiled = harness.compile(module)
    assert torch.equal(compiled(x), module(x))
    assert len(harness.graphs) == 3
    assert len(harness.store.entries()) == (1 if shared else 3)
    module.rotaries[1].get_buffer("b0").mul_(2)
    assert torch.equal(compiled(x), module(x))


# ------------------------------------------------------------------------------------------------ training


def test_flagged_codes_are_derived_without_grad_and_left_alone_with_it():
    """Grad mode is one of Dynamo's guards: with gradients the same call is another graph, and that one is refused."""
    module, harness, x = QuantisedLinear(), Harness(), inputs()
    module.requires_grad_(True)
    compiled = harness.compile(module)
    assert torch.equal(compiled(x), module(x))
    assert harness.hits == {"weight_dequant": 1}
    with torch.enable_grad():
        compiled(x).sum().backward()
        found = module.scale.grad
        module.zero_grad()
        module(x).sum().backward()
    assert harness.hits == {"weight_dequant": 1}
    assert any("compiled for training" in refusal for refusal in harness.refusals)
    assert found is not None and module.scale.grad is not None
    torch.testing.assert_close(found, module.scale.grad)
    module.scale.sub_(0.1 * module.scale.grad)  # what an optimizer does
    assert torch.equal(compiled(x), module(x))


def test_a_step_of_training_between_two_evaluations_is_seen():
    module, harness, x = QuantisedLinear(), Harness(), inputs()
    module.scale.requires_grad_(True)
    compiled, optimizer = harness.compile(module), torch.optim.SGD([module.scale], lr=0.1)
    assert torch.equal(compiled(x), module(x))
    for _ in range(2):
        with torch.enable_grad():
            compiled(x).square().sum().backward()
        optimizer.step()
        assert torch.equal(compiled(x), module(x))


# ------------------------------------------------------------------------------------------------ what is reported


def test_the_table_of_the_report_lists_each_derived_tensor_with_its_bytes():
    module, harness, x = nn.Sequential(QuantisedLinear(), QuantisedLinear()), Harness(derived_budget=2048), inputs()
    harness.compile(module)(x)
    text = Report(graphs=harness.reports).table()
    assert "0.weight" in text and "2.0 KiB" in text
    assert "1.weight" in text and "derived_budget" in text


def test_a_budget_may_be_a_fraction_of_the_memory():
    cpu = torch.device("cpu")
    assert plan.budget_bytes(0.25, cpu) == plan.memory_of(cpu) // 4
    assert plan.budget_bytes(4096, cpu) == 4096


@pytest.mark.parametrize("spelling", ["blocks by index", "E8M0 blocks"])
def test_the_backend_itself_derives_and_reports(spelling: str):
    function, scales = WEIGHTS[spelling]
    module, x = Program(product(function), codes(FP8), *scales), inputs(4, COLUMNS)
    with rope_fusion.record() as report:
        result: Any = torch.compile(module, backend="rope_fusion")(x)
    expected = module(x)
    # bf16 sums in another order
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    assert report.hits == {"weight_dequant": 1}
    assert report.derived_bytes == 2 * ROWS * COLUMNS
