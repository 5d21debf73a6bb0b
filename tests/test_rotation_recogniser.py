"""The rotation recogniser on graphs of real compilations, one per spelling, each record checked numerically.

A record replaces a subgraph, so it is held against the graph: the formula it stands for is computed in float64 from
the values that x, cos and sin had when the graph ran, and compared with the value of `out`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Interpreter, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from rope_fusion.canonical.records import CosSin, Rotation
from rope_fusion.canonical.rotary import explain_near_misses, find_in_module, find_rotations
from rope_fusion.canonical.values import ValueNumbering

B, H, S, D = 2, 3, 5, 16


@dataclass
class Recording:
    """A compiled function's graph, as Inductor's passes get it, and the value of each node in one run of it."""

    module: GraphModule
    values: dict[Node, Any]

    @property
    def rotations(self) -> list[Rotation]:
        return find_rotations(self.module.graph)

    @property
    def near_misses(self) -> list[str]:
        return explain_near_misses(self.module.graph, self.rotations)


class _Recorder(Interpreter):
    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def record(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> Recording:
    """Compile without generating code."""
    recordings: list[Recording] = []

    def keep_graph(module: GraphModule, example_inputs: Any, **_: Any) -> Any:
        def run(*arguments: Any) -> Any:
            recorder = _Recorder(module)
            result = recorder.run(*arguments)
            recordings.append(Recording(module, recorder.values))
            return result

        return make_boxed_func(run)

    def backend(module: GraphModule, example_inputs: Any) -> Any:
        return compile_fx(module, example_inputs, inner_compile=keep_graph)

    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    return recordings[0]


def trace(function: Callable[..., Any], *inputs: Tensor) -> Recording:
    """As `record`, without Dynamo and Inductor's joint passes: ten times faster."""
    module = make_fx(functionalize(function, remove="mutations"), select_decomp_table(), tracing_mode="fake")(*inputs)
    recorder = _Recorder(module)
    recorder.run(*inputs)
    return Recording(module, recorder.values)


def rotated(rotation: Rotation, values: dict[Node, Any]) -> Tensor:
    """What a rotation says that `out` holds, in float64."""
    size, half = rotation.rotary_dim, rotation.rotary_dim // 2

    def table(operand: CosSin) -> Tensor:
        value = values[operand.node]
        if value.is_complex():
            value = value.real if operand.part == "real" else value.imag
        width = size if rotation.full_width else half
        value = value.double()[..., operand.offset : operand.offset + width]
        assert value.shape[-1] == width
        return -value if operand.negated else value

    def column(value: Tensor, pair: int, element: int) -> Tensor:
        return value[..., element if rotation.full_width else pair]

    x = values[rotation.x].double()[..., rotation.x_offset : rotation.x_offset + rotation.width]
    cos, sin = table(rotation.cos), table(rotation.sin)
    if rotation.inverse:
        sin = -sin
    result = x.clone()
    part = x[..., rotation.start : rotation.start + size]
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if rotation.interleaved else (pair, pair + half)
        out_first, out_second = (pair, pair + half) if rotation.halves_out else (first, second)
        a, b = part[..., first], part[..., second]
        result[..., rotation.start + out_first] = a * column(cos, pair, out_first) - b * column(sin, pair, out_first)
        result[..., rotation.start + out_second] = b * column(cos, pair, out_second) + a * column(sin, pair, out_second)
    return result


def check(recording: Recording, rotation: Rotation) -> None:
    """The record is true of the run, and its nodes are those between its leaves and its result."""
    actual = recording.values[rotation.out]
    expected = rotated(rotation, recording.values)
    assert actual.shape == expected.shape
    # Inputs are bounded by 4, so terms by 16 and sums by 32: three roundings and that of the conversion, each at most
    # eps / 2 of it, where eps is the coarsest dtype's.
    dtypes = [actual.dtype, recording.values[rotation.x].dtype]
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=4 * eps / 2 * 32)
    numbering = ValueNumbering(recording.module.graph)
    leaves = {rotation.x, rotation.cos.node, rotation.sin.node}
    numbers = {numbering.number(leaf) for leaf in leaves}  # copies of a leaf's computation are the leaf
    assert rotation.out in rotation.nodes
    assert not leaves & rotation.nodes
    for node in rotation.nodes:
        for source in node.all_input_nodes:
            inside = source in rotation.nodes or numbering.number(source) in numbers
            assert inside or _overwritten(source, node), (node, source)


def _overwritten(source: Node, node: Node) -> bool:
    """Whether nothing of `source` is left in the result: an assignment to it, or to all of it in parts."""
    return (node.target is torch.ops.aten.copy.default and source is node.args[0]) or "empty" in str(source.target)


def only(recording: Recording) -> Rotation:
    (rotation,) = recording.rotations
    check(recording, rotation)
    return rotation


def keeps_rounding(recording: Recording) -> bool:
    """Whether the graph converts to bf16 and back; torch 2.11 removes that before any pass of ours."""
    convert = torch.ops.prims.convert_element_type.default
    narrowed = [
        node for node in recording.module.graph.nodes if node.target is convert and node.args[1] == torch.bfloat16
    ]
    return any(user.target is convert for node in narrowed for user in node.users)


def inputs(width: int, rows: tuple[int, ...] = (B, 1, S), x: tuple[int, ...] = (B, H, S, D), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-4, 4).to(dtype)

    return make(*x), make(*rows, width), make(*rows, width)


def turn(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + turn(x) * sin


def chunked(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2], x[..., 1::2]


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = pairs(x)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


# Spellings with cos and sin of one column per pair: name -> (function, interleaved).


def halves_by_view(x, cos, sin):
    a, b = x.view(*x.shape[:-1], 2, -1).unbind(-2)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -2).reshape(x.shape)


def halves_assigned(x, cos, sin):
    half = x.shape[-1] // 2
    out = x.clone()
    out[..., :half] = x[..., :half] * cos - x[..., half:] * sin
    out[..., half:] = x[..., half:] * cos + x[..., :half] * sin
    return out


def finished_in_place(x, cos, sin):
    half = x.shape[-1] // 2
    out = x * torch.cat((cos, cos), -1)
    out[..., :half] -= x[..., half:] * sin
    out[..., half:] += x[..., :half] * sin
    return out


def repeated_halves(x, cos, sin):
    return rotate_half(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))


def multiply_then_add(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), -1)


def unsqueezed_per_use(x, cos, sin):
    cos, sin = cos.squeeze(1), sin.squeeze(1)
    a, b = x.chunk(2, -1)
    first = a * cos.unsqueeze(1) - b * sin.unsqueeze(1)
    return torch.cat((first, b * cos.unsqueeze(1) + a * sin.unsqueeze(1)), -1)


def joined_table(x, cos, sin):
    cos, sin = torch.cat((cos, sin), -1).expand(-1, H, -1, -1).chunk(2, -1)
    return chunked(x, cos, sin)


def scaled_by_one(x, cos, sin):
    return chunked(x * 1.0, cos * 1.0, sin / 1.0) * 1.0


def pairs_by_view(x, cos, sin):
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)


def every_two(x, cos, sin):
    a, b = pairs(x)
    return x * cos.repeat_interleave(2, -1) + torch.stack((-b, a), -1).flatten(-2) * sin.repeat_interleave(2, -1)


def pairs_flipped(x, cos, sin):
    swapped = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return x * cos.repeat_interleave(2, -1) + swapped * torch.stack((-sin, sin), -1).flatten(-2)


def pairs_assigned(x, cos, sin):
    a, b = pairs(x)
    out = torch.empty_like(x)
    out[..., ::2] = a * cos - b * sin
    out[..., 1::2] = b * cos + a * sin
    return out


def pairs_assigned_by_index(x, cos, sin):
    a, b = pairs(x)
    out = torch.empty_like(x).view(*x.shape[:-1], -1, 2)
    out[..., 0] = a * cos - b * sin
    out[..., 1] = b * cos + a * sin
    return out.view(x.shape)


def complex_product(x, cos, sin):
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * torch.complex(cos, sin)).flatten(-2)


def matrix_sum(x, cos, sin):
    matrix = torch.stack((cos, -sin, sin, cos), -1).view(*cos.shape, 2, 2)
    return (matrix * x.view(*x.shape[:-1], -1, 1, 2)).sum(-1).flatten(-2)


HALF_WIDTH: dict[str, tuple[Callable[..., Tensor], bool]] = {
    f.__name__: (f, False)
    for f in (
        chunked,
        halves_by_view,
        halves_assigned,
        finished_in_place,
        repeated_halves,
        multiply_then_add,
        unsqueezed_per_use,
        joined_table,
        scaled_by_one,
    )
} | {
    f.__name__: (f, True)
    for f in (
        interleaved,
        pairs_by_view,
        every_two,
        pairs_flipped,
        pairs_assigned,
        pairs_assigned_by_index,
        complex_product,
        matrix_sum,
    )
}


@pytest.mark.parametrize("name", HALF_WIDTH)
def test_finds_a_rotation_in_every_spelling(name):
    function, is_interleaved = HALF_WIDTH[name]
    recording = record(function, *inputs(D // 2))
    rotation = only(recording)
    assert (rotation.start, rotation.rotary_dim, rotation.width, rotation.x_offset) == (0, D, D, 0)
    assert rotation.interleaved is is_interleaved
    assert not rotation.full_width
    assert not rotation.inverse
    assert not rotation.halves_out
    assert rotation.x.op == "placeholder"
    in_one_step = {torch.ops.aten.addcmul.default, torch.ops.aten.addcmul_.default}  # torch 2.11 takes them apart
    unrounded = name == "complex_product" or any(node.target in in_one_step for node in recording.module.graph.nodes)
    assert rotation.math_dtype == (None if unrounded else torch.float32)


def test_finds_a_half_rotation_with_a_column_per_element():
    rotation = only(record(rotate_half, *inputs(D)))
    assert rotation.full_width
    assert not rotation.interleaved


def test_finds_an_interleaved_rotation_with_a_column_per_element():
    def spelled(x, cos, sin):
        a, b = pairs(x)
        return x * cos + torch.stack((-b, a), -1).flatten(-2) * sin

    rotation = only(record(spelled, *inputs(D)))
    assert rotation.full_width
    assert rotation.interleaved


# Inverse.


def negated_sin(x, cos, sin):
    return interleaved(x, cos, -sin)


def conjugated(x, cos, sin):
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * torch.complex(cos, sin).conj()).flatten(-2)


def turned_the_other_way(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos.repeat(1, 1, 1, 2) + torch.cat((x[..., half:], -x[..., :half]), -1) * sin.repeat(1, 1, 1, 2)


def subtracted(x, cos, sin):
    return x * torch.cat((cos, cos), -1) - turn(x) * torch.cat((sin, sin), -1)


@pytest.mark.parametrize("function", [negated_sin, conjugated, turned_the_other_way, subtracted])
def test_tells_the_inverse_by_its_signs(function):
    assert only(record(function, *inputs(D // 2))).inverse


# Interleaved pairs in, halves out.


def halves_from_strided_slices(x, cos, sin):
    a, b = pairs(x)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def halves_from_transposed_view(x, cos, sin):
    y = x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).reshape(x.shape)
    return rotate_half(y, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))


def halves_moved_afterwards(x, cos, sin):
    y = interleaved(x, cos, sin)
    return y.view(*x.shape[:-1], -1, 2).transpose(-1, -2).reshape(x.shape)


@pytest.mark.parametrize("function", [halves_from_strided_slices, halves_from_transposed_view, halves_moved_afterwards])
def test_finds_interleaved_pairs_that_come_out_as_halves(function):
    rotation = only(record(function, *inputs(D // 2)))
    assert rotation.interleaved
    assert rotation.halves_out


# Part of each head.


def passed_after(x, cos, sin):
    return torch.cat((chunked(x[..., :8], cos, sin), x[..., 8:]), -1)


def passed_before(x, cos, sin):
    rest, part = x.split([D - 8, 8], -1)
    return torch.cat((rest, interleaved(part, cos, sin)), -1)


def passed_around(x, cos, sin):
    return torch.cat((x[..., :4], chunked(x[..., 4:12], cos, sin), x[..., 12:]), -1)


def part_assigned(x, cos, sin):
    out = x.clone()
    out[..., :8] = chunked(x[..., :8], cos, sin)
    return out


def passed_beside_a_sum(x, cos, sin):
    return passed_after(x + x.mean(), cos, sin)


def passed_beside_a_product(x, cos, sin):
    return passed_after(x * x[:1, :1, :1], cos, sin)


@pytest.mark.parametrize(
    ("function", "start"),
    [
        (passed_after, 0),
        (passed_before, D - 8),
        (passed_around, 4),
        (part_assigned, 0),
        (passed_beside_a_sum, 0),
        (passed_beside_a_product, 0),
    ],
)
def test_a_partial_rotation_covers_the_elements_passed_through(function, start):
    rotation = only(record(function, *inputs(4)))
    assert (rotation.start, rotation.rotary_dim, rotation.width, rotation.x_offset) == (start, 8, D, 0)


def test_a_partial_rotation_that_is_not_put_back_is_one_of_a_slice():
    rotation = only(record(lambda x, cos, sin: chunked(x[..., 8:], cos, sin), *inputs(4)))
    assert (rotation.x_offset, rotation.start, rotation.rotary_dim, rotation.width) == (8, 0, 8, 8)


def test_the_first_node_with_the_rotated_slice_is_known_too():
    recording = record(passed_after, *inputs(4))
    (first,) = find_in_module(recording.module)
    assert first in only(recording).nodes
    assert recording.values[first].shape[-1] == 8


# Layouts.

LAYOUTS = {
    "t h d": ((S, H, D), (S, 1)),
    "b h s d": ((B, H, S, D), (B, 1, S)),
    "b s h d": ((B, S, H, D), (S, 1)),
    "b s d": ((B, S, D), (B, S)),
    "s d": ((S, D), (S,)),
    "one batch": ((1, H, S, D), (S,)),
    "two heads": ((S, 2, D), (S, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spelling", [rotate_half, interleaved])
def test_finds_a_rotation_in_every_layout(layout, spelling):
    x, rows = LAYOUTS[layout]
    rotation = only(record(spelling, *inputs(D if spelling is rotate_half else D // 2, rows, x)))
    assert rotation.x.meta["val"].shape == x


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("spelling", [chunked, halves_by_view, pairs_by_view])
def test_heads_split_off_a_projection_are_told_from_halves_and_pairs(heads, spelling):
    def packed(qkv, cos, sin):
        q, _ = qkv.split([heads * D, 8], -1)
        return spelling(q.view(S, heads, D), cos, sin)

    rotation = only(record(packed, *inputs(D // 2, (S, 1), (S, heads * D + 8))))
    assert rotation.x.meta["val"].shape == (S, heads, D)


def test_the_rotated_tensor_may_be_a_column_slice_of_a_wider_one():
    rotation = only(record(lambda x, cos, sin: chunked(x[..., 3 : 3 + D], cos, sin), *inputs(D // 2, x=(B, H, S, 40))))
    assert (rotation.x_offset, rotation.width) == (3, D)


def test_a_dynamic_sequence_is_followed():
    x, cos, sin = inputs(D // 2)
    for tensor in (x, cos, sin):
        torch._dynamo.mark_dynamic(tensor, 2)
    recording = record(chunked, x, cos, sin)
    assert not isinstance(only(recording).x.meta["val"].shape[2], int)


def test_rows_gathered_by_positions_are_leaves():
    def gathered(x, cos, sin, positions):
        return rotate_half(x, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))

    x, cos, sin = inputs(D, rows=(7,))
    rotation = only(record(gathered, x, cos, sin, torch.randint(7, (B, S))))
    assert rotation.cos.node.target is torch.ops.aten.unsqueeze.default


def test_a_joined_table_is_told_from_the_rotated_tensor():
    """Complex numbers commute, so with as many rows as x has the table could be rotated by x just as well."""

    def gathered(table, x, positions):
        cos, sin = table[positions].chunk(2, -1)
        return torch.cat((cos * x[..., :8] - sin * x[..., 8:], sin * x[..., :8] + cos * x[..., 8:]), -1)

    x, table = torch.randn(S, D), torch.randn(7, D)
    rotation = only(record(gathered, table, x, torch.randint(7, (S,))))
    assert rotation.x.op == "placeholder"
    assert (rotation.cos.offset, rotation.sin.offset) == (0, 8)


def test_a_table_may_hold_cos_and_sin_in_different_rows():
    def stacked(x, table):
        return rotate_half(x, table[0:1], table[1:2])

    x, table, _ = inputs(D, (2, 1, S))
    only(record(stacked, x[:1], table))


# The rotated tensor is what the program computed before.


def test_a_sum_is_a_rotated_tensor_of_its_own():
    rotation = only(record(lambda x, cos, sin: rotate_half(x + 3 * x.roll(1, -1), cos, sin), *inputs(D)))
    assert rotation.x.target is torch.ops.aten.add.Tensor


def test_a_concatenation_is_a_rotated_tensor_of_its_own():
    def spelled(x, cos, sin):
        return rotate_half(torch.cat((x[..., :8], x[..., :8].exp()), -1), cos, sin)

    assert only(record(spelled, *inputs(D))).x.target is torch.ops.aten.cat.default


def test_factors_stay_outside():
    """A factor on cos and sin (attention scaling) lies in their leaves, one on x in x, one on the result behind it."""
    recording = record(lambda x, cos, sin: 0.5 * rotate_half(x * 3, cos * 1.2, sin * 1.2), *inputs(D))
    rotation = only(recording)
    products = (rotation.x, rotation.cos.node, rotation.sin.node, *rotation.out.users)
    assert [node.args[1] for node in products] == [3, 1.2, 1.2, 0.5]


def test_q_and_k_that_share_tables_are_two_rotations_in_graph_order():
    def both(q, k, cos, sin):
        return rotate_half(q, cos, sin), rotate_half(k, cos, sin)

    x, cos, sin = inputs(D)
    recording = record(both, x, x[:, :1].clone(), cos, sin)
    first, second = recording.rotations
    check(recording, first)
    check(recording, second)
    assert first.out < second.out
    assert first.cos == second.cos
    assert not recording.near_misses


def test_rotations_of_the_two_halves_of_a_head_are_two():
    def axial(x, rows, columns):
        return torch.cat((chunked(x[..., :8], rows, columns), chunked(x[..., 8:], columns, rows)), -1)

    recording = record(axial, *inputs(4))
    assert len(recording.rotations) == 2
    for rotation in recording.rotations:
        check(recording, rotation)


def test_a_rotation_used_before_its_concatenation_ends_there():
    def spelled(x, cos, sin):
        part = chunked(x[..., :8], cos, sin)
        return torch.cat((part, x[..., 8:]), -1), part.exp()

    recording = record(spelled, *inputs(4))
    assert only(recording).width == 8


# Dtypes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_conversion_back_belongs_to_the_rotation(dtype):
    def upcast(x, cos, sin):
        return rotate_half(x.float(), cos.float(), sin.float()).to(x.dtype)

    rotation = only(record(upcast, *inputs(D, dtype=dtype)))
    assert rotation.x.op == "placeholder"
    assert rotation.out.meta["val"].dtype == dtype
    assert rotation.math_dtype == torch.float32


def test_the_conversion_back_may_come_before_the_elements_passed_through():
    def upcast(x, cos, sin):
        return torch.cat((chunked(x[..., :8].float(), cos, sin).to(x.dtype), x[..., 8:]), -1)

    x, cos, sin = inputs(4)
    rotation = only(record(upcast, x.bfloat16(), cos, sin))
    assert (rotation.width, rotation.math_dtype) == (D, torch.float32)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("assigned", [False, True])
def test_parts_that_are_narrowed_one_by_one_are_one_rotation(narrow, assigned):
    def joined(x, cos, sin):
        return torch.cat((x[..., :-8].to(narrow), chunked(x[..., -8:], cos, sin).to(narrow)), -1)

    def overwritten(x, cos, sin):
        out = x.to(narrow)
        out[..., -8:] = chunked(x[..., -8:], cos, sin).to(narrow)
        return out

    rotation = only(record(overwritten if assigned else joined, *inputs(4)))
    assert (rotation.width, rotation.start, rotation.math_dtype) == (D, D - 8, torch.float32)
    assert (rotation.x.meta["val"].dtype, rotation.out.meta["val"].dtype) == (torch.float32, narrow)


def test_parts_of_another_tensor_or_narrowed_twice_are_not_passed_through():
    def of_another(x, cos, sin):
        return torch.cat((x.sin()[..., :-8].bfloat16(), chunked(x[..., -8:], cos, sin).bfloat16()), -1)

    def rotated_after_narrowing(x, cos, sin):
        turned = chunked(x[..., -8:].bfloat16().float(), cos, sin).bfloat16()
        return torch.cat((x[..., :-8].bfloat16(), turned), -1)

    def out_of_place(x, cos, sin):
        return torch.cat((x[..., 8:].bfloat16(), chunked(x[..., -8:], cos, sin).bfloat16()), -1)

    for function in (of_another, rotated_after_narrowing, out_of_place):
        recording = record(function, *inputs(4))
        if function is not rotated_after_narrowing or keeps_rounding(recording):
            assert all(rotation.width == 8 for rotation in recording.rotations)


def test_arithmetic_in_the_dtype_of_x_is_reported_as_such():
    assert only(record(rotate_half, *inputs(D, dtype=torch.bfloat16))).math_dtype == torch.bfloat16


def test_arithmetic_in_float64_is_reported_as_such():
    def doubled(x, cos, sin):
        return rotate_half(x.double(), cos.double(), sin.double()).to(x.dtype)

    rotation = only(record(doubled, *inputs(D)))
    assert rotation.math_dtype == torch.float64
    assert rotation.out.meta["val"].dtype == torch.float32


def test_mixed_arithmetic_has_no_one_dtype():
    def mixed(x, cos, sin):
        return x * cos + (turn(x) * sin.float()).bfloat16()

    assert only(record(mixed, *inputs(D, dtype=torch.bfloat16))).math_dtype is None


def test_a_rounding_of_x_makes_another_x():
    recording = record(lambda x, cos, sin: rotate_half(x.bfloat16().float(), cos, sin), *inputs(D))
    rounded = torch.bfloat16 if keeps_rounding(recording) else torch.float32
    assert only(recording).x.meta["val"].dtype == rounded


def test_a_rounding_of_cos_and_sin_stays_outside():
    def rounded(x, cos, sin):
        return rotate_half(x, cos.to(x.dtype), sin.to(x.dtype))

    x, cos, sin = inputs(D)
    rotation = only(record(rounded, x.bfloat16(), cos, sin))
    assert rotation.cos.node.meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_a_conversion_to_a_third_dtype_is_none_of_the_rotation(dtype):
    rotation = only(record(lambda x, cos, sin: rotate_half(x, cos, sin).to(dtype), *inputs(D)))
    assert rotation.out.meta["val"].dtype == torch.float32


def test_a_second_rounding_is_none_of_the_rotation():
    def twice(x, cos, sin):
        y = rotate_half(x.double(), cos.double(), sin.double()).half()
        return y.view(*y.shape[:-1], 2, -1).bfloat16().view(y.shape)  # the view keeps Inductor from merging the two

    x, cos, sin = inputs(D)
    recording = record(twice, x.bfloat16(), cos, sin)
    assert only(recording).out.meta["val"].dtype == torch.float64


# What is no rotation.


def swapped_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((b * cos - a * sin, a * cos + b * sin), -1)


def wrong_sign(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos + a * sin), -1)


def negated_result(x, cos, sin):
    return -x * torch.cat((cos, cos), -1) - turn(x) * torch.cat((sin, sin), -1)


def negated_half(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, -(b * cos + a * sin)), -1)


def scaled_half(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, 2.0 * b * cos + a * sin), -1)


def scaled_term(x, cos, sin):
    return rotate_half(x, torch.cat((cos, cos), -1), torch.cat((sin, 2 * sin), -1))


def three_factors(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos * sin - b * sin, b * cos + a * sin), -1)


def third_term(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin + a * sin, b * cos + a * sin), -1)


def other_tensor_turned(x, cos, sin):
    return x * torch.cat((cos, cos), -1) + turn(x.exp()) * torch.cat((sin, sin), -1)


def sum_of_squares(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * a + b * b, a * a - b * b), -1)


def rolled_columns(x, cos, sin):
    a, b = x.chunk(2, -1)
    sin = torch.cat((sin[..., 1:], sin[..., :1]), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def flipped_columns(x, cos, sin):
    return interleaved(x, cos, sin.flip(-1))


def cos_and_sin_differ_by_half(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * sin + a * cos), -1)


def shifted_columns(x, cos, sin):
    return chunked(x[..., :8], cos[..., :4], sin[..., 1:5])


def overlapping_columns(x, cos, sin):
    return chunked(x[..., :8], cos[..., :4], cos[..., 1:5])


def cos_for_both(x, cos, sin):
    return chunked(x, cos, cos)


def sine_for_cosine(x, angle, other):
    return chunked(x, angle.sin(), angle.cos())


def different_angles(x, angle, other):
    return chunked(x, angle.cos(), other.sin())


def different_rows(x, cos, sin):
    return chunked(x, cos[:, :, :1], sin[:, :, 1:2])


def broadcast_differently(x, cos, sin):
    return chunked(x, cos, sin[:1])


def pairs_of_heads(x, cos, sin):
    a, b = x.transpose(1, 3).chunk(2, -1)
    return torch.cat((a * cos[..., :1] - b * sin[..., :1], b * cos[..., :1] + a * sin[..., :1]), 1)


def rotated_rows(x, cos, sin):
    a, b = x[:, :, :2, :8], x[:, :, 2:4, :8]
    return torch.cat((a * cos[:, :, :2] - b * sin[:, :, :2], b * cos[:, :, :2] + a * sin[:, :, :2]), 2)


def rotation_of_a_gap(x, cos, sin):
    a, b = x[..., :4], x[..., 8:12]
    cos, sin = cos[..., :4], sin[..., :4]
    return torch.cat((a * cos - b * sin, x[..., 4:8], b * cos + a * sin, x[..., 12:]), -1)


def passed_from_elsewhere(x, cos, sin):
    return torch.cat((chunked(x[..., :8], cos[..., :4], sin[..., :4]), x[..., :8]), -1)


def rounded_between(x, cos, sin):
    return rotate_half(x.bfloat16(), cos.bfloat16().repeat(1, 1, 1, 2), sin.bfloat16().repeat(1, 1, 1, 2)).long()


NONE_AT_ALL = [
    swapped_halves,
    wrong_sign,
    negated_result,
    negated_half,
    scaled_half,
    scaled_term,
    three_factors,
    third_term,
    other_tensor_turned,
    sum_of_squares,
    rolled_columns,
    flipped_columns,
    cos_and_sin_differ_by_half,
    shifted_columns,
    overlapping_columns,
    cos_for_both,
    sine_for_cosine,
    different_angles,
    different_rows,
    broadcast_differently,
    pairs_of_heads,
    rotated_rows,
    rotation_of_a_gap,
]


@pytest.mark.parametrize("function", NONE_AT_ALL)
def test_is_no_rotation(function):
    assert not record(function, *inputs(D // 2)).rotations


@pytest.mark.parametrize("joined", [True, False])
def test_cos_and_sin_of_other_positions_are_no_rotation(joined):
    def gathered(x, cos, sin, positions, others):
        if joined:
            table = torch.cat((cos, sin), -1)
            return chunked(x, table[positions][..., : D // 2], table[others][..., D // 2 :])
        return chunked(x, cos[positions], sin[others])

    x, cos, sin = inputs(D // 2, (7,), (S, D))
    positions = torch.randint(7, (2, S))
    recording = record(gathered, x, cos, sin, *positions)
    assert not recording.rotations
    (sentence,) = recording.near_misses
    assert "different rows" in sentence


def test_elements_from_elsewhere_are_not_passed_through():
    rotation = only(record(passed_from_elsewhere, *inputs(D // 2)))
    assert rotation.width == 8


def test_an_odd_number_of_elements_is_no_rotation():
    def odd(x, cos, sin):
        x = x[..., :5]
        return x * cos[..., :5] + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin[..., :5]

    assert not record(odd, *inputs(D)).rotations


def test_a_broadcast_tensor_is_not_the_rotated_one():
    recording = record(lambda x, cos, sin: rotate_half(x[:, :1], cos, sin), *inputs(D, rows=(B, H, S)))
    assert not recording.rotations
    (sentence,) = recording.near_misses
    assert "broadcast" in sentence


# Near misses.


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (wrong_sign, "signs"),
        (rolled_columns, "columns"),
        (cos_for_both, "share columns"),
        (sine_for_cosine, "a sine stands where its cosine belongs"),
        (different_angles, "different angles"),
        (different_rows, "different rows"),
        (broadcast_differently, "broadcast over different dims"),
        (shifted_columns, "starts at column 0 of one tensor, its sin at 1 of another"),
    ],
)
def test_says_why_it_is_almost_a_rotation(function, words):
    (sentence,) = record(function, *inputs(D // 2)).near_misses
    assert words in sentence


def test_says_that_a_symbolic_head_dim_cannot_be_followed():
    recording = record(rotate_half, *inputs(D), dynamic=True)
    assert not recording.rotations
    (sentence,) = recording.near_misses
    assert "is symbolic" in sentence
    assert "mark_dynamic" in sentence


def test_says_the_same_reason_once():
    def layers(x, cos, sin):
        for _ in range(3):
            x = wrong_sign(x.exp(), cos, sin)
        return x

    (sentence,) = record(layers, *inputs(D // 2)).near_misses
    assert "and 2 more: " in sentence


def test_a_gated_product_is_no_near_miss():
    recording = record(lambda x, cos, sin: x * cos.sigmoid() + x.exp() * sin, *inputs(D))
    assert not recording.rotations
    assert not recording.near_misses


# Properties.

SPELLINGS = [function for function, _ in HALF_WIDTH.values() if function not in (joined_table, unsqueezed_per_use)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    spelling=st.sampled_from(SPELLINGS),
    before=st.sampled_from([0, 0, 2, 8]),
    after=st.sampled_from([0, 0, 4]),
    half=st.sampled_from([2, 4, 6]),
    layout=st.sampled_from([((S, H), (S, 1)), ((B, H, S), (S,)), ((B, S, H), (B, S, 1))]),
    inverse=st.booleans(),
    upcast=st.booleans(),
)
def test_the_record_is_true_whatever_the_spelling(spelling, before, after, half, layout, inverse, upcast):
    leading, rows = layout

    def program(x, cos, sin):
        part = x[..., before : before + 2 * half]
        part = part.float() if upcast else part
        part = spelling(part, cos, -sin if inverse else sin).to(x.dtype)
        return torch.cat((x[..., :before], part, x[..., before + 2 * half :]), -1) if before + after else part

    x, cos, sin = inputs(half, rows, (*leading, before + 2 * half + after))
    rotation = only(trace(program, x.bfloat16() if upcast else x, cos, sin))
    assert rotation.inverse is inverse
    assert (rotation.start, rotation.rotary_dim, rotation.width) == (before, 2 * half, x.shape[-1])


def test_time_is_linear_in_layers_and_small():
    """About 60 nodes and two rotations a layer; 32 layers take some 40 ms, and 0.5 s allows for a busy machine."""

    def model(x, cos, sin, layers):
        for _ in range(layers):
            q, k = x * x.rsqrt(), x[:, :1].tanh()
            q, k = rotate_half(q, cos, sin), rotate_half(k, cos, sin)
            x = (q + k).softmax(-1)
        return x

    seconds = {}
    for layers in (8, 32):
        recording = trace(partial(model, layers=layers), *inputs(D))
        start = time.process_time()
        rotations = recording.rotations
        seconds[layers] = time.process_time() - start
        assert len(rotations) == 2 * layers
    assert seconds[32] < 0.5
    # four times the layers; twice that for the noise of so short a time
    assert seconds[32] < 8 * seconds[8]


# Stored graphs of real models.

CORPUS = Path(__file__).parents[2] / "shared" / "corpus"

# Each spelling, and what has been hard: rotated slices put together outside of the rotating function, pairs that come out
# as halves, a matrix, complex numbers, 2-D positions, float64.
FAMILIES = (
    "axk1",
    "clvp",
    "glm4",
    "gpt_oss",
    "llama4",
    "musicflamingo",
    "openai_privacy_filter",
    "pe_audio_video",
    "phi",
    "sam3",
)


@pytest.mark.skipif(not CORPUS.is_dir(), reason=f"the corpus of real models' graphs is not at {CORPUS}")
@pytest.mark.parametrize("family", FAMILIES)
def test_finds_the_rotations_of_real_models(family, monkeypatch):
    monkeypatch.syspath_prepend(str(CORPUS))
    graph_io = importlib.import_module("graph_io")
    paths = [path for path in CORPUS.glob(f"graphs/{family}.*json.gz") if path.name.split(".")[0] == family]
    assert paths
    for stored in (graph for path in paths for part in graph_io.load_json(path) for graph in part["graphs"]):
        module = graph_io.load(stored["graph"])
        true = [set(rotation["nodes"]) for rotation in stored["rots"]]
        for node in find_in_module(module):
            true.remove(next(nodes for nodes in true if node.name in nodes))
        assert not true
        for rotation in find_rotations(module.graph):
            values = run_in_float64(rotation, module.graph)
            # a handful of float64 roundings of products of standard normal numbers
            torch.testing.assert_close(values[rotation.out], rotated(rotation, values), rtol=1e-12, atol=1e-12)


def run_in_float64(rotation: Rotation, graph: Graph) -> dict[Node, Tensor]:
    """Run the nodes of a rotation alone, on random x, cos and sin and without its roundings."""
    numbering = ValueNumbering(graph)
    leaves = {numbering.number(leaf): leaf for leaf in (rotation.x, rotation.cos.node, rotation.sin.node)}
    values: dict[Node, Any] = {}

    def argument(node: Node) -> Any:
        return values[node] if node in values else _number(node.meta["val"])

    for leaf in leaves.values():
        fake = leaf.meta["val"]
        dtype = torch.complex128 if fake.is_complex() else torch.float64
        values[leaf] = torch.randn([_number(size) for size in fake.shape], dtype=dtype)
    for node in graph.nodes:
        if numbering.number(node) in leaves:
            values[node] = values[leaves[numbering.number(node)]]
        elif node in rotation.nodes:
            if node.target is torch.ops.prims.convert_element_type.default:
                values[node] = values[node.args[0]]
            else:
                arguments, keywords = map_arg((node.args, dict(node.kwargs)), argument)
                values[node] = node.target(*arguments, **keywords)
    return values


def _number(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
