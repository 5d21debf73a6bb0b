"""What is recognised as the dequantisation of a weight, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph

from rope_fusion.canonical.dequant import Dequantisation, Findings, find_dequantisations, find_table_casts
from rope_fusion.canonical.static_values import StaticValues, written_placeholders

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ROWS, COLUMNS = 256, 192


class Program(nn.Module):
    """A function of an input and of the module's own buffers."""

    def __init__(self, function: Callable[..., Tensor], **buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_buffers()))


def trace(module: nn.Module, x: Tensor, dynamic: bool = False) -> tuple[Graph, StaticValues]:
    """The graph that `compile_fx_inner` would get, without generating code."""
    graphs: list[tuple[Graph, StaticValues]] = []

    def keep(gm, inputs, **kwargs):
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        static = {placeholders[index] for index in kwargs["static_input_idxs"]}
        graphs.append((gm.graph, StaticValues.of(gm.graph, static - written_placeholders(gm.graph))))

        def run(arguments: list[Any]) -> Any:
            return gm(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with torch.no_grad():
        torch.compile(module, backend=lambda gm, inputs: compile_fx(gm, inputs, inner_compile=keep), dynamic=dynamic)(x)
    (result,) = graphs
    return result


def find(function: Callable[..., Tensor], x: Tensor | None = None, **buffers: Tensor) -> Findings:
    x = torch.randn(4, COLUMNS, dtype=BF16) if x is None else x
    return find_dequantisations(*trace(Program(function, **buffers), x))


def only(findings: Findings) -> Dequantisation:
    assert findings.refusals == []
    (found,) = findings.dequantisations
    return found


def codes(dtype: torch.dtype = FP8, *shape: int) -> Tensor:
    shape = shape or (ROWS, COLUMNS)
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 8, shape, dtype=dtype)


# ------------------------------------------------------------------------------------------- the spellings


def per_row(x, w, s):
    return F.linear(x, (w.float() * s[:, None]).to(BF16))


def per_column(x, w, s):
    return F.linear(x, (w.float() * s).to(BF16))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_recognises_one_scale_for_the_whole_weight(shape):
    found = only(find(lambda x, w, s: F.linear(x, (w.float() * s).to(BF16)), w=codes(), s=torch.rand(shape)))
    assert found.granularity == "tensor"
    assert found.dtype == BF16
    assert [(scale.block, scale.divides) for scale in found.scales] == [((ROWS, COLUMNS), False)]


def test_recognises_a_scale_per_row():
    found = only(find(per_row, w=codes(), s=torch.rand(ROWS)))
    assert (found.granularity, found.scales[0].block) == ("channel", (1, COLUMNS))


def test_recognises_a_scale_per_column():
    found = only(find(per_column, w=codes(), s=torch.rand(COLUMNS)))
    assert (found.granularity, found.scales[0].block) == ("channel", (ROWS, 1))


def test_recognises_division_by_the_scale():
    found = only(find(lambda x, w, s: F.linear(x, (w.float() / s).to(BF16)), w=codes(), s=torch.rand(1)))
    assert found.scales[0].divides


def test_recognises_multiplication_by_a_reciprocal_as_division():
    found = only(find(lambda x, w, s: F.linear(x, (w.float() * s.reciprocal()).to(BF16)), w=codes(), s=torch.rand(1)))
    assert found.scales[0].divides


def test_recognises_a_number_as_the_scale():
    found = only(find(lambda x, w: F.linear(x, w.to(BF16) * 0.125), w=codes()))
    assert (found.granularity, found.constant, found.scales) == ("tensor", 0.125, ())


def interleave(x, w, s):
    return F.linear(x, (w.float() * s.repeat_interleave(64, 0).repeat_interleave(32, 1)).to(BF16))


def four_dims(x, w, s):
    return F.linear(x, (w.float().view(4, 64, 6, 32) * s[:, None, :, None]).view(ROWS, COLUMNS).to(BF16))


def expand_scale(x, w, s):
    return F.linear(x, (w.float() * s[:, None, :, None].expand(4, 64, 6, 32).reshape(ROWS, COLUMNS)).to(BF16))


def index_twice(x, w, s):
    return F.linear(x, (w.float() * s[torch.arange(ROWS) // 64][:, torch.arange(COLUMNS) // 32]).to(BF16))


def index_once(x, w, s):
    rows, columns = torch.arange(ROWS) // 64, torch.arange(COLUMNS) // 32
    return F.linear(x, (w.float() * s[rows[:, None], columns[None]]).to(BF16))


def index_select(x, w, s):
    scale = s.index_select(0, torch.arange(ROWS) // 64).index_select(1, torch.arange(COLUMNS) // 32)
    return F.linear(x, (w.float() * scale).to(BF16))


def scale_rows_by_view(x, w, s):
    rows = s.repeat_interleave(64, 0)
    return F.linear(x, (w.float().unflatten(1, (6, 32)) * rows[:, :, None]).flatten(1).to(BF16))


def assign_in_place(x, w, s):
    weight = w.to(BF16)
    weight.unflatten(1, (6, 32)).mul_(s.to(BF16).repeat_interleave(64, 0)[:, :, None])
    return F.linear(x, weight)


def kronecker(x, w, s):
    return F.linear(x, (w.float() * s[:, None, :, None].repeat(1, 64, 1, 32).view(ROWS, COLUMNS)).to(BF16))


def transposed_product(x, w, s):
    return x @ (w.t().float() * s.repeat_interleave(64, 0).repeat_interleave(32, 1).t()).to(BF16)


@pytest.mark.parametrize(
    "spelling",
    [
        interleave,
        four_dims,
        expand_scale,
        index_twice,
        index_once,
        index_select,
        scale_rows_by_view,
        assign_in_place,
        kronecker,
        transposed_product,
    ],
)
def test_recognises_blocks_however_the_scale_is_spread(spelling):
    found = only(find(spelling, w=codes(), s=torch.rand(4, 6)))
    assert (found.granularity, found.scales[0].block) == ("block", (64, 32))


@pytest.mark.parametrize("block", [(128, 128), (100, 50), (256, 7), (1, 192), (3, 1)])
def test_recognises_any_block_with_incomplete_blocks_at_the_edges(block):
    rows, columns = block

    def cropped(x, w, s):
        scale = s.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:ROWS, :COLUMNS]
        return F.linear(x, (w.float() * scale).to(BF16))

    grid = torch.rand(-(-ROWS // rows), -(-COLUMNS // columns))
    assert only(find(cropped, w=codes(), s=grid)).scales[0].block == block


@pytest.mark.parametrize("block", [128, 64, 96])
def test_recognises_the_slice_assignments_of_transformers(block):
    dequantise = pytest.importorskip("transformers.integrations.finegrained_fp8")._dequantize_fp8_weight
    grid = torch.rand(-(-ROWS // block), -(-COLUMNS // block))
    found = only(find(lambda x, w, s: F.linear(x, dequantise(w, s, [block, block], BF16)), w=codes(), s=grid))
    assert found.scales[0].block == (block, block)


def test_recognises_groups_within_rows():
    def grouped(x, w, s):
        return F.linear(x, (w.to(BF16).view(ROWS, 6, 32) * s[:, :, None]).view(ROWS, COLUMNS))

    found = only(find(grouped, w=codes(torch.int8), s=torch.rand(ROWS, 6).to(BF16)))
    assert (found.granularity, found.scales[0].block) == ("block", (1, 32))


def test_recognises_groups_of_a_flattened_weight():
    def flat(x, w, s):
        return F.linear(x, (w.view(-1, 32).to(BF16) * s).view(ROWS, COLUMNS))

    found = only(find(flat, w=codes(torch.int8), s=torch.rand(ROWS * 6, 1).to(BF16)))
    assert found.scales[0].block == (1, 32)


def test_recognises_two_scales_of_one_weight():
    def both(x, w, s, t):
        return F.linear(x, (w.float().view(ROWS, 6, 32) * s[:, :, None] * t).view(ROWS, COLUMNS).to(BF16))

    found = only(find(both, w=codes(), s=torch.rand(ROWS, 6), t=torch.rand(1)))
    assert sorted(scale.block for scale in found.scales) == [(1, 32), (ROWS, COLUMNS)]


# ----------------------------------------------------------------------------------- dtypes and zero points


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_recognises_every_fp8_dtype(name):
    dtype = getattr(torch, name)
    assert only(find(per_row, w=codes(dtype), s=torch.rand(ROWS))).codes.meta["val"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_recognises_integer_codes(dtype):
    assert only(find(per_row, w=codes(dtype), s=torch.rand(ROWS))).zero is None


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
def test_recognises_every_target_dtype(target):
    found = only(
        find(
            lambda x, w, s: F.linear(x, (w.float() * s).to(target)),
            torch.randn(4, COLUMNS, dtype=target),
            w=codes(),
            s=torch.rand(1),
        )
    )
    assert found.dtype == target


def test_recognises_e8m0_scales():
    def program(x, w, s):
        return F.linear(x, (w.float().view(4, 64, 6, 32) * s.float()[:, None, :, None]).view(ROWS, COLUMNS).to(BF16))

    grid = torch.rand(4, 6).to(torch.float8_e8m0fnu)
    assert only(find(program, w=codes(), s=grid)).scales[0].block == (64, 32)


def test_recognises_exponents_stored_as_bytes():
    def program(x, w, s):
        scale = (s.float() - 127).exp2()[:, None, :, None]
        return F.linear(x, (w.float().view(4, 64, 6, 32) * scale).view(ROWS, COLUMNS).to(BF16))

    grid = torch.randint(100, 140, (4, 6), dtype=torch.uint8)
    assert only(find(program, w=codes(), s=grid)).scales[0].block == (64, 32)


def test_recognises_e4m3_scales():
    def program(x, w, s):
        return F.linear(x, (w.float().view(ROWS, 6, 32) * s.float()[:, :, None]).view(ROWS, COLUMNS).to(BF16))

    assert only(find(program, w=codes(), s=codes(FP8, ROWS, 6))).scales[0].block == (1, 32)


def test_recognises_bytes_viewed_as_fp8():
    def program(x, w, s):
        return F.linear(x, (w.view(FP8).float() * s).to(BF16))

    assert only(find(program, w=codes(torch.uint8), s=torch.rand(1))).granularity == "tensor"


def test_recognises_unpacked_int4_with_a_fixed_zero_point():
    def program(x, w, s):
        return F.linear(x, ((w.to(BF16) - 8).view(ROWS, 6, 32) * s[:, :, None]).view(ROWS, COLUMNS))

    assert only(find(program, w=codes(torch.uint8), s=torch.rand(ROWS, 6).to(BF16))).zero == 8.0


def test_recognises_int4_codes_that_the_program_unpacks():
    def program(x, w, s):
        codes = torch.stack([w & 0xF, w >> 4], -1).view(ROWS, COLUMNS)
        return F.linear(x, ((codes.to(BF16) - 8).view(ROWS, 6, 32) * s[:, :, None]).view(ROWS, COLUMNS))

    found = only(find(program, w=codes(torch.uint8, ROWS, COLUMNS // 2), s=torch.rand(ROWS, 6).to(BF16)))
    assert (found.zero, found.scales[0].block) == (8.0, (1, 32))
    assert found.codes.op == "call_function"


def test_recognises_codes_decoded_by_a_table():
    def program(x, w, t, s):
        return F.linear(x, (t[w.int()].view(ROWS, 6, 32) * s[:, :, None]).view(ROWS, COLUMNS).to(BF16))

    found = only(find(program, w=codes(torch.uint8), t=torch.rand(16), s=torch.rand(ROWS, 6)))
    assert found.scales[0].block == (1, 32)


def test_recognises_a_zero_point_per_group():
    def program(x, w, s, z):
        return F.linear(x, ((w.view(ROWS, 6, 32).to(BF16) - z) * s).view(ROWS, COLUMNS))

    group = torch.rand(ROWS, 6, 1).to(BF16)
    found = only(find(program, w=codes(torch.uint8), s=group, z=group.clone()))
    assert isinstance(found.zero, torch.fx.Node)


def test_recognises_a_bare_cast_whose_scale_is_applied_to_the_product():
    found = only(find(lambda x, w, s: F.linear(x, w.to(x.dtype)) * s, w=codes(torch.int8), s=torch.rand(ROWS).to(BF16)))
    assert (found.granularity, found.scales) == ("cast", ())


# ------------------------------------------------------------------------------------------- the products


def test_recognises_a_batched_weight_of_an_einsum():
    def program(x, w, s):
        weight = (w.float().view(2, 2, 64, 3, 32) * s[:, :, None, :, None]).view(2, 128, 96).to(BF16)
        return torch.einsum("tgk,grk->tgr", x.view(4, 2, 96), weight)

    found = only(find(program, w=codes(FP8, 2, 128, 96), s=torch.rand(2, 2, 3)))
    assert found.scales[0].block == (1, 64, 32)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, weight: x @ weight.t(),
        lambda x, weight: torch.mm(x, weight.t()),
        lambda x, weight: F.linear(x, weight),
        lambda x, weight: F.linear(x, weight, torch.zeros(ROWS, dtype=BF16)),
        lambda x, weight: torch.einsum("tk,rk->tr", x, weight),
        lambda x, weight: torch.bmm(x[None], weight.t()[None]),
        lambda x, weight: F.conv1d(x[None, :, :].transpose(1, 2), weight[:, :, None]),
    ],
)
def test_recognises_weights_of_every_product(product):
    found = only(find(lambda x, w, s: product(x, (w.float() * s).to(BF16)), w=codes(), s=torch.rand(COLUMNS)))
    assert found.granularity == "channel"


def test_recognises_a_weight_beside_its_use_in_quantised_form():
    def program(x, w, s):
        return F.linear(x, (w.float() * s).to(BF16)) + w.view(torch.uint8).sum()

    assert only(find(program, w=codes(), s=torch.rand(COLUMNS))).granularity == "channel"


def test_recognises_each_of_several_weights():
    def program(x, a, b, s):
        return F.linear(F.linear(x, (a.float() * s).to(BF16)), (b.float() * s).to(BF16))

    findings = find(program, a=codes(FP8, COLUMNS, COLUMNS), b=codes(FP8, COLUMNS, COLUMNS), s=torch.rand(COLUMNS))
    assert len(findings.dequantisations) == 2


def test_recognises_weights_with_a_dynamic_number_of_tokens():
    graph, static = trace(Program(per_row, w=codes(), s=torch.rand(ROWS)), torch.randn(5, COLUMNS, dtype=BF16), True)
    assert len(find_dequantisations(graph, static).dequantisations) == 1


# ----------------------------------------------------------------------------------------- negative controls


def test_refuses_a_scale_that_depends_on_the_input_and_says_so():
    findings = find(lambda x, w: F.linear(x, w.to(BF16) * x.amax()), w=codes())
    assert findings.dequantisations == []
    assert "depends on the input" in findings.refusals[0]


def test_refuses_scales_that_do_not_follow_blocks_and_says_so():
    findings = find(lambda x, w, s: F.linear(x, (w.float() * s.repeat(64, 32)).to(BF16)), w=codes(), s=torch.rand(4, 6))
    assert findings.dequantisations == []
    assert "does not follow blocks" in findings.refusals[0]


def test_refuses_blocks_that_are_shifted():
    def shifted(x, w, s):
        scale = s.repeat_interleave(64, 0).repeat_interleave(32, 1).roll(1, 0)
        return F.linear(x, (w.float() * scale).to(BF16))

    findings = find(shifted, w=codes(), s=torch.rand(4, 6))
    assert findings.dequantisations == []
    assert findings.refusals


def test_refuses_a_weight_that_is_written_in_the_graph():
    def writes(x, w, s):
        y = F.linear(x, (w.float() * s).to(BF16))
        w.copy_(codes(torch.int8))
        return y

    findings = find(writes, w=codes(torch.int8), s=torch.rand(1))
    assert findings.dequantisations == []


def test_refuses_a_sum_after_the_scale():
    findings = find(
        lambda x, w, s, d: F.linear(x, (w.float() * s + d).to(BF16)), w=codes(), s=torch.rand(1), d=torch.rand(COLUMNS)
    )
    assert findings.dequantisations == []
    assert "added after the scale" in findings.refusals[0]


def test_refuses_rows_used_twice():
    def repeated(x, w, s):
        return F.linear(x, (w.float() * s)[torch.arange(ROWS) // 2].to(BF16))

    assert find(repeated, w=codes(), s=torch.rand(COLUMNS)).dequantisations == []


def test_leaves_a_quantised_embedding_to_inductor():
    """The gather and the dequantisation of the gathered rows are one kernel already."""
    findings = find(lambda x, w: w.to(BF16)[torch.tensor([1, 2])] + x[:2], w=codes())
    assert (findings.dequantisations, findings.refusals) == ([], [])


def test_leaves_a_matrix_vector_product_to_inductor():
    """It becomes one reduction that reads the codes themselves, half the bytes of a bf16 weight."""
    findings = find(lambda x, w, s: torch.mv((w.float() * s).to(BF16), x[0]), w=codes(), s=torch.rand(1))
    assert (findings.dequantisations, findings.refusals) == ([], [])


def test_leaves_weights_that_are_ordinary_inputs():
    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x[:, :COLUMNS].to(BF16), x[:, COLUMNS:].to(FP8).to(BF16))

    graph, static = trace(Function(), torch.randn(4, 2 * COLUMNS))
    assert find_dequantisations(graph, static).dequantisations == []


def test_ignores_tables_that_only_aten_code_reads():
    graph, static = trace(
        Program(lambda x, t: x * t.to(BF16), t=torch.rand(COLUMNS)), torch.randn(4, COLUMNS, dtype=BF16)
    )
    assert find_table_casts(graph, static) == []
