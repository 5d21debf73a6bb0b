"""Cache writes in the form that Inductor performs in place: right values, no copy of the cache."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_spellings import BLOCKS, DIM, FP8, HALF, HEADS, PAGE, PAGED, SPELLINGS, TOKENS, program, to_fp8
from captured import Captured, captured
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from rope_fusion._torch import CustomGraphPass
from rope_fusion.canonical.kv_cache import (
    emit_in_place,
    find_cache_writes,
    is_already_in_place,
    write_in_place_expression,
)

aten = torch.ops.aten


class WriteInPlace(CustomGraphPass):
    """Rewrites every write of a graph, or those alone that Inductor would not perform in place."""

    def __init__(self, all_writes: bool = True) -> None:
        self.all_writes = all_writes
        self.count = 0

    def __call__(self, graph: Graph) -> None:
        writes, refusals = find_cache_writes(graph)
        assert refusals == []
        for write in writes:
            if self.all_writes or not is_already_in_place(write):
                emit_in_place(graph, write)
                self.count += 1
        graph.eliminate_dead_code()
        graph.lint()

    def uuid(self) -> Any:
        return None


def same_bytes(first: Tensor, second: Tensor) -> bool:
    first, second = first.contiguous(), second.contiguous()
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def assert_index_puts_on_the_cache_itself(found: Captured) -> None:
    """The form that Inductor reinplaces: copy_(cache, index_put(... index_put(cache, ...)))."""
    for copy in found.graph.find_nodes(op="call_function", target=aten.copy_.default):
        base, value = copy.args
        while value is not base:
            assert value.target is aten.index_put.default
            value = value.args[0]


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_becomes_index_puts_on_the_cache_itself(name: str) -> None:
    spelling = SPELLINGS[name]
    found = captured(program(spelling), *spelling.arguments())
    inputs, outputs = found.run()
    WriteInPlace()(found.graph)
    assert_index_puts_on_the_cache_itself(found)
    rewritten_inputs, rewritten_outputs = found.run()
    assert all(map(same_bytes, inputs, rewritten_inputs))
    assert all(map(same_bytes, outputs, rewritten_outputs))


@pytest.mark.parametrize("name", ["view", "pair", "joint", "joint inside blocks", "scatter_", "FP8 as bytes"])
def test_sizes_may_be_dynamic(name: str) -> None:
    spelling = SPELLINGS[name]

    def call(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        spelling.write(cache, k, v, slots)
        return cache.view(torch.uint8).flatten().float().cos()

    found = captured(call, *spelling.arguments(), dynamic=True)
    inputs, outputs = found.run()
    WriteInPlace()(found.graph)
    assert_index_puts_on_the_cache_itself(found)
    rewritten_inputs, rewritten_outputs = found.run()
    for before, after in zip([*inputs, *outputs], [*rewritten_inputs, *rewritten_outputs], strict=True):
        assert before == after if isinstance(before, int) else same_bytes(before, after)


@pytest.mark.parametrize("first_slot", [-1, -PAGE, -BLOCKS * PAGE])
@pytest.mark.parametrize("name", ["view", "joint, pairs", "heads before places, transposed"])
def test_negative_slots_wrap_inside_their_part_of_the_cache(name: str, first_slot: int) -> None:
    spelling = SPELLINGS[name]
    cache, k, v, _ = spelling.arguments()
    found = captured(program(spelling), cache, k, v, torch.tensor([first_slot, 3, 6]))
    inputs, _ = found.run()
    WriteInPlace()(found.graph)
    assert all(map(same_bytes, inputs, found.run()[0]))


def test_readers_of_the_written_view_read_the_new_cache() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        view = cache[0].view(-1, HEADS, DIM)
        view[slots] = k
        return view[slots] * 2

    found = captured(
        program, torch.randn(2, *PAGED).to(HALF), torch.randn(TOKENS, HEADS, DIM).to(HALF), torch.arange(3)
    )
    _, outputs = found.run()
    WriteInPlace()(found.graph)
    assert_index_puts_on_the_cache_itself(found)
    assert all(map(same_bytes, outputs, found.run()[1]))


# the expression, which a pattern's replacement traces


SHAPES = {"n": BLOCKS, "p": PAGE, "b": 2, "h": HEADS, "d": DIM, "(hd)": HEADS * DIM}
FLAT_AXES = ["t h d", "t (hd)", "b s h d", "b h s d", "s h d"]
BATCHED_AXES = ["b s h d", "b h s d", "b s (hd)"]


def assert_writes(
    layout: str, axes: str, slots: Tensor | int, offsets: Tensor | None, by: Callable[..., Tensor]
) -> None:
    names = layout.split()
    base = torch.randn(*(SHAPES.get(name, 3) for name in names))
    sizes = {**SHAPES, "t": 6, "b": 2, "s": 3 if "b" in axes else 6}
    value = torch.randn(*(sizes[name] for name in axes.split()))
    expected = base.clone()
    for b, s in itertools.product(range(2 if "b" in axes else 1), range(sizes["s"] if "t" not in axes else 6)):
        flat = b * sizes["s"] + s
        source: dict[str, Any] = {"t": s, "b": b, "s": s, "h": slice(None), "d": slice(None), "(hd)": slice(None)}
        token = value[tuple(source[name] for name in axes.split())].reshape(HEADS, DIM)
        row = s if "b" in names else flat
        place = slots + row if isinstance(slots, int) else int(slots[b, s] if slots.dim() == 2 else slots[row])
        block = 0
        if offsets is not None:
            block, place = place, int(offsets[row])
        elif "n" in names:
            block, place = divmod(place, PAGE)
        for h in range(HEADS):
            target: dict[str, Any] = {
                "n": block,
                "p": place,
                "b": b,
                "h": h,
                "d": slice(None),
                "(hd)": slice(h * DIM, h * DIM + DIM),
            }
            expected[tuple(int(name) if name.isdigit() else target[name] for name in names)] = token[h]
    before = base.clone()
    assert torch.equal(by(base, value, slots, offsets, layout, axes), expected)
    assert torch.equal(base, before)


@pytest.mark.parametrize(
    "layout", ["n p h d", "n h p d", "0 n p h d", "1 n h p d", "n 1 p h d", "2 1 n p h d", "n p (hd)"]
)
@pytest.mark.parametrize("axes", FLAT_AXES)
def test_expression_writes_paged_caches(layout: str, axes: str) -> None:
    slots = torch.randperm(BLOCKS * PAGE)[:6]
    assert_writes(layout, axes, slots, None, write_in_place_expression)
    assert_writes(layout, axes, slots - BLOCKS * PAGE, None, write_in_place_expression)
    assert_writes(layout, axes, slots.int(), None, write_in_place_expression)
    assert_writes(layout, axes, slots // PAGE, slots % PAGE, write_in_place_expression)
    assert_writes(layout, axes, 7, None, write_in_place_expression)
    if "b" in axes:
        assert_writes(layout, axes, slots.view(2, 3), None, write_in_place_expression)


@pytest.mark.parametrize("layout", ["p h d", "p (hd)", "1 p h d", "h p d"])
@pytest.mark.parametrize("axes", FLAT_AXES)
def test_expression_writes_flat_caches(layout: str, axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "p", 24)
    assert_writes(layout, axes, torch.randperm(24)[:6], None, write_in_place_expression)
    assert_writes(layout, axes, torch.randperm(24)[:6] - 24, None, write_in_place_expression)


@pytest.mark.parametrize("layout", ["b h p d", "b p h d", "b p (hd)", "1 b h p d", "b h d p"])
@pytest.mark.parametrize("axes", BATCHED_AXES)
@pytest.mark.parametrize("rows", [2, 5])
def test_expression_writes_static_caches(layout: str, axes: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of more rows than the batch has keeps its last rows."""
    monkeypatch.setitem(SHAPES, "p", 8)
    monkeypatch.setitem(SHAPES, "b", rows)
    assert_writes(layout, axes, torch.tensor([5, 0, -1]), None, write_in_place_expression)
    assert_writes(layout, axes, torch.tensor([[5, 0, 7], [2, 3, 1]]), None, write_in_place_expression)
    assert_writes(layout, axes, 4, None, write_in_place_expression)


@pytest.mark.parametrize("axes", ["h d", "(hd)"])
def test_expression_writes_a_single_token(axes: str) -> None:
    value = torch.randn(*(SHAPES[name] for name in axes.split()))
    base = torch.zeros(PAGED)
    for slots in (13, torch.tensor(13), torch.tensor([13])):
        new = write_in_place_expression(base, value, slots, None, "n p h d", axes)
        assert torch.equal(new[3, 1].flatten(), value.flatten())
        assert new.count_nonzero() == value.count_nonzero()


def test_expression_casts_to_the_cache_and_takes_fp8_and_bytes_for_each_other() -> None:
    value, slots = torch.randn(TOKENS, HEADS, DIM), torch.arange(TOKENS)
    new = write_in_place_expression(torch.zeros(PAGED, dtype=HALF), value, slots, None, "n p h d", "t h d")
    assert torch.equal(new[0, :TOKENS], value.to(HALF))
    x8 = to_fp8(value)
    for dtype in (FP8, torch.uint8):
        base = torch.zeros(PAGED, dtype=torch.uint8).view(dtype)
        for stored in (x8, x8.view(torch.uint8)):
            new = write_in_place_expression(base, stored, slots, None, "n p h d", "t h d")
            assert new.dtype == dtype
            assert torch.equal(new.view(torch.uint8)[0, :TOKENS], x8.view(torch.uint8))


def test_expression_can_be_traced() -> None:
    def replacement(base: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        first = write_in_place_expression(base, k, slots, None, "0 n p h d", "b s h d")
        return write_in_place_expression(first, v, slots, None, "1 n p h d", "b s h d")

    base, k, v = torch.zeros(2, *PAGED), torch.randn(1, 3, HEADS, DIM), torch.randn(1, 3, HEADS, DIM)
    graph = make_fx(replacement)(base, k, v, torch.arange(3)).graph
    second = next(iter(reversed(graph.nodes))).args[0]
    assert second.target is aten.index_put.default
    assert second.args[0].target is aten.index_put.default
    assert second.args[0].args[0].op == "placeholder"


# generated code


def allocations(code: str) -> list[int]:
    """Sizes in elements of the buffers that generated code makes."""
    shapes = re.findall(r"= empty_strided(?:_\w+)?\(\(([^)]*)\)", code)
    return [math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes]


GROUPS = {
    "paged": ["view", "flatten", "view, index_copy_", "pair", "heads before places, transposed", "scatter_"],
    "joint": ["joint", "joint, pairs", "joint, unbind", "joint inside blocks"],
    "static": ["static, index_copy_", "static, slice", "static, transposed slice", "static, transposed index_copy_"],
    "FP8": ["FP8", "FP8 as bytes", "FP8 in a joint cache of bytes"],
}
SCALE = 64  # more blocks, so that a copy of a cache stands out among the buffers


@pytest.mark.parametrize("all_writes", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_generated_code_holds_no_copy_of_the_cache(group: str, all_writes: bool) -> None:
    spellings = [SPELLINGS[name] for name in GROUPS[group]]

    def call(*arguments: Tensor) -> Tensor:
        read = torch.zeros(())
        for at, spelling in enumerate(spellings):
            cache, k, v, slots = arguments[4 * at : 4 * at + 4]
            spelling.write(cache, k, v, slots)
            cache = cache if cache.dtype != FP8 else cache.view(torch.uint8)
            while cache.dim() > 2:  # as attention reads some rows of what was written
                cache = cache.select(0, 1)
            read = read + cache.float().sum()
        return read

    arguments = []
    for spelling in spellings:
        cache, *rest = spelling.arguments()
        along = next(dim for dim, size in enumerate(cache.shape) if size in (BLOCKS, 16))
        arguments += [cache.repeat_interleave(SCALE, along) if cache.dtype != FP8 else _repeated(cache, along), *rest]
    expected = [x.clone() for x in arguments]
    read = call(*expected)
    rewrite = WriteInPlace(all_writes)
    with config.patch(post_grad_custom_pre_pass=rewrite), torch.no_grad():
        compiled, (code,) = run_and_get_code(torch.compile(call, dynamic=False), *arguments)
    assert all(map(same_bytes, arguments, expected))
    torch.testing.assert_close(compiled, read)  # sums of float32 in another order
    assert rewrite.count > 0
    smallest = min(arguments[4 * at].numel() for at in range(len(spellings)))
    assert max(allocations(code), default=0) < smallest // 4


def _repeated(cache: Tensor, along: int) -> Tensor:
    return cache.view(torch.uint8).repeat_interleave(SCALE, along).view(cache.dtype)
