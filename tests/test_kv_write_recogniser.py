"""Cache writes are found in every spelling, mean what the program does, and nothing else is taken for one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_spellings import (
    BLOCKS,
    BSHD,
    DIM,
    FP8,
    HALF,
    HEADS,
    K_BSHD,
    PAGE,
    PAGED,
    SPELLINGS,
    TOKENS,
    pairs,
    program,
    stored,
)
from captured import Captured, captured
from torch import Tensor

import rope_fusion
from rope_fusion.canonical.cache_values import value_lineage
from rope_fusion.canonical.kv_cache import find_cache_writes, is_already_in_place
from rope_fusion.canonical.records import CacheWrite

aten = torch.ops.aten


def writes_of(found: Captured) -> list[CacheWrite]:
    writes, refusals = find_cache_writes(found.graph)
    assert refusals == []
    return writes


def refusals_of(function: Callable[..., Any], *args: Any) -> list[str]:
    writes, refusals = find_cache_writes(captured(function, *args).graph)
    assert writes == []
    return refusals


def paged(dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(PAGED).to(dtype)


def tokens() -> Tensor:
    return torch.randn(TOKENS, HEADS, DIM).to(HALF)


SLOTS = torch.tensor([9, 2, 17])


@functools.cache
def captured_spelling(name: str) -> Captured:
    """Looking at a graph changes nothing, so tests may share it."""
    spelling = SPELLINGS[name]
    return captured(program(spelling), *spelling.arguments())


@pytest.mark.parametrize("name", SPELLINGS)
def test_finds_the_write_and_its_record_means_what_the_program_does(name: str) -> None:
    spelling = SPELLINGS[name]
    found = captured_spelling(name)
    writes = writes_of(found)
    assert [(write.layout, write.value_axes) for write in writes] == list(spelling.expected)
    values = found.values()
    previous = writes[0].base
    for write in writes:
        assert write.base.op == "placeholder"
        assert write.previous is previous
        assert write.result.meta["val"].shape == write.base.meta["val"].shape
        assert write.node in write.nodes
        assert write.result in write.nodes
        assert write.value not in write.nodes
        assert not write.old_value_read
        assert (write.quantisation is not None) == ("FP8" in name)
        assert torch.equal(stored(found, write).view(torch.uint8), values[write.result].view(torch.uint8))
        previous = write.result
    copies = found.graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert [(copy.args[0], copy.args[1]) for copy in copies] == [(writes[0].base, previous)]


@pytest.mark.parametrize("name", SPELLINGS)
def test_says_which_writes_inductor_performs_in_place(name: str) -> None:
    spelling = SPELLINGS[name]
    for write in writes_of(captured_spelling(name)):
        assert is_already_in_place(write) == spelling.in_place
        assert is_already_in_place(write, through_views=True) == (spelling.in_place or spelling.through_views)


@pytest.mark.parametrize("name", ["view", "pair", "joint", "joint inside blocks", "scatter_", "FP8 as bytes"])
def test_sizes_may_be_dynamic(name: str) -> None:
    spelling = SPELLINGS[name]

    def call(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        spelling.write(cache, k, v, slots)
        return cache.view(torch.uint8).flatten().float().cos()

    found = captured(call, *spelling.arguments(), dynamic=True)
    writes = writes_of(found)
    assert [(write.layout, write.value_axes) for write in writes] == list(spelling.expected)
    values = found.values()
    for write in writes:
        assert torch.equal(stored(found, write).view(torch.uint8), values[write.result].view(torch.uint8))


@pytest.mark.parametrize("name", ["view", "pair", "pair by shifts", "heads before places", "joint, pairs"])
def test_negative_slots_wrap_as_indices_do(name: str) -> None:
    spelling = SPELLINGS[name]
    cache, k, v, _ = spelling.arguments()
    found = captured(program(spelling), cache, k, v, torch.tensor([-1, 3, -BLOCKS * PAGE]))
    values = found.values()
    for write in writes_of(found):
        assert write.slot_offsets is None
        assert torch.equal(stored(found, write), values[write.result])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_a_pair_are_those_before_widening(dtype: torch.dtype) -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache[(slots // PAGE).long(), (slots % PAGE).long()] = k

    (write,) = writes_of(captured(program, paged(), tokens(), SLOTS.to(dtype)))
    assert write.slots.op == "placeholder"  # type: ignore[union-attr]
    assert write.slot_offsets is None


def test_slots_computed_twice_are_the_same_slots() -> None:
    def program(cache: Tensor, k: Tensor, positions: Tensor) -> None:
        cache[(positions + 1) // PAGE, (positions + 1) % PAGE] = k

    (write,) = writes_of(captured(program, paged(), tokens(), SLOTS))
    assert write.slot_offsets is None


@pytest.mark.parametrize(
    "split",
    [
        lambda s: (s // PAGE, s % (PAGE - 1)),
        lambda s: (s // (PAGE + 1), s % PAGE),
        lambda s: (s // PAGE, (s + 1) % PAGE),
        lambda s: (torch.div(s, PAGE, rounding_mode="trunc"), s % PAGE),
        lambda s: (s >> 1, s & 3),
    ],
)
def test_blocks_and_places_of_other_kinds_stay_a_pair(split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache[split(slots)] = k

    found = captured(program, paged(), tokens(), torch.tensor([9, 2, 7]))
    (write,) = writes_of(found)
    assert write.slot_offsets is not None
    assert torch.equal(stored(found, write), found.values()[write.result])


def test_symbolic_start_of_a_slice() -> None:
    def program(cache: Tensor, k: Tensor, start: int) -> None:
        cache[:, start : start + k.shape[1]] = k

    found = captured(program, torch.zeros(BSHD, dtype=HALF), torch.randn(K_BSHD).to(HALF), 7, dynamic=True)
    (write,) = writes_of(found)
    assert (write.layout, write.value_axes) == ("b p h d", "b s h d")
    assert isinstance(write.slots, torch.fx.Node)
    assert isinstance(write.slots.meta["val"], torch.SymInt)
    assert torch.equal(stored(found, write), found.values()[write.result])


def test_a_value_of_known_size_beyond_one_cannot_be_broadcast() -> None:
    """Token counts of k and of the slots are different symbols where they come from different inputs."""

    def program(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache.view(-1, HEADS, DIM)[slots] = k

    k, slots = tokens(), SLOTS.clone()
    for x in (k, slots):
        torch._dynamo.mark_dynamic(x, 0)
    (write,) = writes_of(captured(program, paged(), k, slots))
    assert write.value_axes == "t h d"


def test_quantised_values_are_reported_before_quantisation() -> None:
    found = captured_spelling("FP8 as bytes")
    (write,) = writes_of(found)
    assert write.quantisation is not None
    assert write.quantisation.dtype == FP8
    assert write.value is write.quantisation.x
    assert write.value.op == "placeholder"
    assert write.quantisation.out in write.nodes
    assert write.stored is not None
    assert write.stored.meta["val"].dtype == torch.uint8


def test_scale_per_head_is_one_of_the_caches_heads() -> None:
    def program(cache: Tensor, k: Tensor, scale: Tensor, slots: Tensor) -> None:
        x8 = (k.float() / scale).clamp(-448, 448).to(FP8)
        cache.view(-1, HEADS, DIM)[slots] = x8

    cache = paged(FP8)
    (write,) = writes_of(captured(program, cache, tokens(), torch.rand(HEADS, 1) + 1, SLOTS))
    assert write.quantisation is not None
    assert write.quantisation.per_head

    def per_place(cache: Tensor, k: Tensor, scale: Tensor) -> None:
        cache[:, :, 3:6] = (k.float() / scale).clamp(-448, 448).to(FP8)

    static = torch.zeros(2, HEADS, 16, DIM).to(FP8)
    (write,) = writes_of(captured(per_place, static, torch.randn(2, HEADS, 3, DIM), torch.rand(3, 1) + 1))
    assert write.quantisation is None
    assert write.value is write.stored


@pytest.mark.parametrize(("cache_dtype", "is_cast"), [(torch.float32, True), (torch.float16, True), (HALF, False)])
def test_a_cast_for_the_caches_sake_is_looked_through(cache_dtype: torch.dtype, is_cast: bool) -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache.view(-1, HEADS, DIM)[slots] = k.to(cache.dtype)

    (write,) = writes_of(captured(program, paged(cache_dtype), tokens(), SLOTS))
    assert (write.value is not write.stored) == is_cast
    assert write.value.meta["val"].dtype == HALF


def test_a_cast_from_float32_may_belong_to_the_value() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache.view(-1, HEADS, DIM)[slots] = (k.float() * 2).to(HALF)

    (write,) = writes_of(captured(program, paged(), tokens(), SLOTS))
    assert write.value.meta["val"].dtype == HALF


def test_lineage_names_the_dims_of_what_the_value_was_rearranged_from() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache.view(-1, HEADS, DIM)[slots] = (k * 2).transpose(1, 2).reshape(-1, HEADS, DIM)

    found = captured(program, paged(), torch.randn(2, HEADS, 3, DIM).to(HALF), torch.arange(6))
    (write,) = writes_of(found)
    assert [axes for _, axes in value_lineage(write)][-1] == "b h s d"
    assert list(value_lineage(write))[-1][0].target is aten.mul.Tensor


def test_each_layer_of_one_buffer_is_a_write_of_its_own() -> None:
    def program(cache: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        for layer in range(2):
            for part in range(2):
                cache[layer, part][pairs(slots)] = x + part
            x = x + cache[layer].flatten(0, 2)[: x.shape[0]]  # reads what this layer wrote
        return x

    found = captured(program, torch.randn(2, 2, *PAGED).to(HALF), tokens(), SLOTS)
    writes = writes_of(found)
    assert [write.layout[:3] for write in writes] == ["0 0", "0 1", "1 0", "1 1"]
    assert not any(write.old_value_read for write in writes)
    values = found.values()
    for write in writes:
        assert torch.equal(stored(found, write), values[write.result])


def test_a_read_of_the_old_cache_is_reported() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        before = cache.float().sum()
        cache.view(-1, HEADS, DIM)[slots] = k
        return before

    (write,) = writes_of(captured(program, paged(), tokens(), SLOTS))
    assert write.old_value_read
    assert not is_already_in_place(write, through_views=True)


def test_a_read_of_v_between_the_writes_of_k_and_v_concerns_v_alone() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache[0][pairs(slots)] = k
        between = cache[1].float().sum()
        cache[1][pairs(slots)] = k
        return between

    writes = writes_of(captured(program, torch.randn(2, *PAGED).to(HALF), tokens(), SLOTS))
    assert [write.old_value_read for write in writes] == [False, True]


def test_a_read_of_k_between_the_writes_of_k_and_v_is_harmless() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache[0][pairs(slots)] = k
        between = cache[0].float().sum()
        cache[1][pairs(slots)] = k
        return between

    writes = writes_of(captured(program, torch.randn(2, *PAGED).to(HALF), tokens(), SLOTS))
    assert [write.old_value_read for write in writes] == [False, False]


# what is no cache write


def test_refuses_accumulation_in_both_spellings() -> None:
    def flag(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache.view(-1, HEADS, DIM).index_put_((slots,), k, accumulate=True)

    def sum_of_both(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache.view(-1, HEADS, DIM)[slots] += k

    assert "it accumulates" in refusals_of(flag, paged(), tokens(), SLOTS)[0]
    assert "computed from what the cache held before" in refusals_of(sum_of_both, paged(), tokens(), SLOTS)[0]


def test_refuses_a_value_that_depends_on_another_part_of_the_same_place() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache[1][pairs(slots)] = k * cache.float().mean().to(HALF)

    assert (
        "computed from what the cache held" in refusals_of(program, torch.randn(2, *PAGED).to(HALF), tokens(), SLOTS)[0]
    )


def test_refuses_a_mask() -> None:
    def program(cache: Tensor, k: Tensor, mask: Tensor) -> None:
        cache.view(-1, HEADS, DIM)[mask] = k  # a number in its place would become a `where` in torch 2.15

    assert "torch.bool" in refusals_of(program, paged(), tokens(), torch.arange(BLOCKS * PAGE) < 3)[0]


def test_refuses_a_write_that_is_not_copied_back() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        return cache.index_put(pairs(slots), k)

    assert "nothing copies its result back" in refusals_of(program, paged(), tokens(), SLOTS)[0]


def test_a_write_in_a_graph_with_a_backward_is_refused_with_the_way_out() -> None:
    weight = torch.nn.Parameter(torch.ones(DIM))

    def program(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache.view(-1, HEADS, DIM)[slots] = k * weight
        return k * weight

    torch.compiler.reset()
    with rope_fusion.record() as report:
        torch.compile(program, backend="rope_fusion")(paged(), tokens(), SLOTS)
    assert report.hits == {}
    assert "compiled for training; compile under torch.no_grad()" in " ".join(report.table().split())


def test_refuses_a_cache_that_is_changed_before_the_write() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache.mul_(0.5)
        cache.view(-1, HEADS, DIM)[slots] = k

    assert "not into the cache as the graph received it" in refusals_of(program, paged(), tokens(), SLOTS)[0]


def test_a_temporary_is_no_cache() -> None:
    def program(x: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        y = x * 2  # newer torch removes a product with one
        y.view(-1, HEADS, DIM)[slots] = k
        return y

    assert refusals_of(program, paged(), tokens(), SLOTS) == []


def test_a_counter_is_no_cache() -> None:
    def program(counter: Tensor, scores: Tensor, slots: Tensor) -> None:
        counter.add_(1)
        scores[slots] = 1.0

    sentences = refusals_of(program, torch.tensor(0), torch.zeros(24), SLOTS)
    assert len(sentences) == 1
    assert "holds 0 dims" in sentences[0]


def test_a_table_of_integers_is_no_cache() -> None:
    def program(table: Tensor, slots: Tensor) -> None:
        table[slots] = torch.ones(3, 2, 8, dtype=torch.int64)

    assert "holds torch.int64" in refusals_of(program, torch.zeros(24, 2, 8, dtype=torch.int64), SLOTS)[0]


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda c, k, s: c.__setitem__(s % 4, k[:, None].expand(3, PAGE, HEADS, DIM) * 2), "whole blocks"),
        (lambda c, k, s: c.view(-1, HEADS, DIM).__setitem__(s, k[0, 0] * 2), "broadcast"),
        (lambda c, k, s: c.view(-1, HEADS, DIM).__setitem__(s, k[:1] * 2), "broadcast"),
        (lambda c, k, s: c[..., :4].__setitem__(pairs(s), k[..., :4]), "slice of the head dim"),
        (lambda c, k, s: c[2:].__setitem__(((s // PAGE) % 2, s % PAGE), k), "slice of the blocks"),
        (lambda c, k, s: c.view(-1, HEADS, DIM)[0:6:2].copy_(k), "steps"),
        (lambda c, k, s: c.view(2, 3, PAGE, HEADS, DIM)[1].__setitem__(((s // PAGE) % 3, s % PAGE), k), "cache"),
    ],
)
def test_refuses_what_no_layout_describes(write: Callable[[Tensor, Tensor, Tensor], object], sentence: str) -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        write(cache, k, slots)
        return cache + 1

    assert sentence in " ".join(refusals_of(program, paged(), tokens(), SLOTS))


def test_refuses_some_of_the_heads() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        cache[:, :, 2:4][pairs(slots)] = k

    assert "slice of the heads" in refusals_of(program, torch.randn(BLOCKS, PAGE, 5, DIM).to(HALF), tokens(), SLOTS)[0]


def test_refuses_a_second_write_through_the_same_view() -> None:
    def program(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        view = cache.view(-1, HEADS, DIM)
        view[slots] = k
        view[slots + 1] = k

    (sentence,) = refusals_of(program, paged(), tokens(), SLOTS)
    assert "not the part of the cache" in sentence


def test_looking_changes_nothing() -> None:
    found = captured_spelling("joint")
    before = [(node, node.args, dict(node.kwargs)) for node in found.graph.nodes]
    find_cache_writes(found.graph)
    assert [(node, node.args, dict(node.kwargs)) for node in found.graph.nodes] == before


def test_static_caches_of_transformers_are_found_in_every_layer() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    cache = transformers.StaticCache(config=config, max_cache_len=16)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), cache=cache, use_cache=True)
    found = captured(
        lambda ids, positions: model(ids, cache=cache, use_cache=True, position_ids=positions).logits,
        torch.tensor([[4]]),
        torch.tensor([[3]]),
    )
    writes = writes_of(found)
    assert [(write.layout, write.value_axes) for write in writes] == [("b h p d", "b h s d")] * 4
    assert all(is_already_in_place(write) for write in writes)
    assert not any(write.old_value_read for write in writes)
