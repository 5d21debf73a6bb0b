"""One small program for each kind of mistake that random programs and perturbed graphs have found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from trust.differential import Outcome, capture_call, check_captured
from trust.mutate import refresh

from rope_fusion.options import Options


def check(program: Callable[..., Any], *arguments: Tensor, exact: bool = False) -> Outcome:
    """Fused against unfused and float64; whatever fails in the pass raises."""
    options = Options(kernels="reference", strict=True, numerics="exact" if exact else "fp32")
    return check_captured(capture_call(program, *arguments), options, exact=exact)


@pytest.fixture(autouse=True)
def same_values_each_time() -> None:
    torch.manual_seed(0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def test_a_q_computed_from_the_written_v_cache_is_not_written_with_it() -> None:
    """Its operator would need the cache that it writes."""

    def program(q, k, v, cos, sin, k_cache, v_cache, slots):
        k = rotate(k, cos, sin)
        v_cache[slots] = v
        q = rotate(q + v_cache[:3], cos, sin)
        k_cache[slots] = k
        return q

    shapes = [*[(3, 2, 8)] * 3, *[(3, 1, 4)] * 2, *[(20, 2, 8)] * 2]
    check(program, *map(torch.randn, shapes), torch.tensor([1, 7, 4]))


def test_no_tokens_are_written_into_a_cache_of_merged_heads() -> None:
    """A reshape to [0, -1] says nothing about the other size."""

    def program(k, v, k_cache, v_cache, slots):
        k_cache.scatter_(0, slots[:, None].expand(-1, 16), k.flatten(1))
        v_cache.index_copy_(0, slots, v.flatten(1))
        return k * 2

    rows, caches = [torch.randn(0, 2, 8) for _ in range(2)], [torch.randn(20, 16) for _ in range(2)]
    check(program, *rows, *caches, torch.zeros(0, dtype=torch.int64))


def test_merged_heads_whose_size_is_an_expression() -> None:
    """Sizes that nodes take are numbers or nodes, never symbols: here fake tensors know 16 as 32 * (S // 2) // S."""

    def program(k, cache, slots):
        rows = (k[:, 8:24] + slots[:, None]).reshape(2, 8, -1).float().reshape(k.shape[0], 16)
        cache.scatter_(0, slots[:, None].expand(-1, 16), rows)

    k, slots = torch.randn(6, 32).bfloat16(), torch.tensor([1, 7, 4, 8, 2, 0])
    for tensor in (k, slots):
        torch._dynamo.mark_dynamic(tensor, 0)
    assert check(program, k, torch.randn(20, 16), slots).hits


def test_a_half_of_a_cache_that_is_unbound_and_written_again() -> None:
    """What reads a half afterwards gets it from the new cache through the same unbind, whatever its dim."""

    def program(q, k, v, cos, sin, cache, slots):
        halves = cache.unbind(1)
        at = slots // 5, slots % 5
        halves[0][at] = rotate(k, cos, sin)
        halves[1][at] = v
        first, second = cache.select(1, 0).clone(), cache.select(1, 1)
        first[at] = k
        second[at] = k * 2
        return rotate(q, cos, sin), first

    shapes = [*[(3, 2, 8)] * 3, *[(3, 1, 4)] * 2, (2, 2, 5, 2, 8)]
    outcome = check(program, *map(torch.randn, shapes), torch.tensor([1, 7, 4]))
    assert outcome.hits == {"rope_kv": 1, "kv_write_in_place": 1}


def test_bytes_that_come_back_as_another_fp8_are_converted_not_stored() -> None:
    def program(cache, k, slots):
        for part, rows in zip(cache.unbind(0), (k, k * 2), strict=True):
            eight = rows.to(torch.float8_e4m3fn).view(torch.uint8)
            part.flatten(0, 1).view(torch.uint8).index_copy_(0, slots, eight)

    cache = torch.randn(2, 4, 5, 16).to(torch.float8_e4m3fn)
    (call,) = capture_call(program, cache, torch.randn(3, 16), torch.tensor([1, 7, 4]))
    *_, back = call.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype)
    back.args = (back.args[0], torch.float8_e5m2)
    assert refresh(call.graph, back)
    check_captured([call], Options(kernels="reference", strict=True))


def test_an_fp8_written_over_bytes_is_converted_not_stored() -> None:
    def program(cache, k, scale):
        for part, rows in zip(cache.unbind(0), (k, k * 2), strict=True):
            part[2:5] = (rows / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)

    cache = torch.randn(2, 20, 2, 8).to(torch.float8_e4m3fn).view(torch.uint8)
    (call,) = capture_call(program, cache, torch.randn(3, 2, 8), torch.tensor(0.05))
    *_, bits = call.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype)
    bits.args = (bits.args[0], torch.float8_e5m2)
    assert refresh(call.graph, bits)
    check_captured([call], Options(kernels="reference", strict=True))


@pytest.mark.parametrize(("dtype", "seen_as"), [(torch.bfloat16, torch.int16), (torch.float32, torch.int32)])
def test_bits_written_into_a_view_of_a_wider_cache_are_not_taken_for_numbers(
    dtype: torch.dtype, seen_as: torch.dtype
) -> None:
    def program(cache, k, slots):
        for part, rows in zip(cache.unbind(0), (k, k * 2), strict=True):
            part.view(seen_as).index_copy_(0, slots, rows.view(seen_as))

    check(program, torch.randn(2, 20, 16).to(dtype), torch.randn(3, 16).to(dtype), torch.tensor([1, 7, 4]))


@pytest.mark.parametrize("seen_as", [torch.float8_e5m2, torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_fp8_written_into_a_view_of_another_fp8_cache(seen_as: torch.dtype) -> None:
    def program(cache, k, slots):
        for part, rows in zip(cache.unbind(0), (k, k * 2), strict=True):
            part.view(seen_as).view(torch.uint8).index_copy_(0, slots, rows.to(torch.float8_e5m2).view(torch.uint8))

    cache = torch.randn(2, 20, 16).to(torch.float8_e4m3fn)
    check(program, cache, torch.randn(3, 16), torch.tensor([1, 7, 4]))


def test_exact_numerics_leave_a_complex_product_alone_also_where_its_cos_and_sin_are_real() -> None:
    """A device may round the parts of a complex product once or twice."""

    def program(x, cos, sin):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)

    arguments = torch.randn(3, 2, 8), torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    outcome = check(program, *arguments, exact=True)
    assert not outcome.hits
    assert any("a complex product" in sentence for sentence in outcome.reports[0].near_misses)
    assert outcome.reports[0].rotations == 1


def test_an_unrounded_q_is_quantised_where_no_cache_is_written() -> None:
    def program(q, k, cos, sin, scale):
        wide = rotate(q.float(), cos, sin)
        q8 = (wide / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return q8, rotate(k.float(), cos, sin).to(torch.bfloat16)

    q, k, cos, sin = map(torch.randn, [*[(3, 2, 8)] * 2, *[(3, 1, 4)] * 2])
    outcome = check(program, q.bfloat16(), k.bfloat16(), cos, sin, torch.tensor(0.05))
    assert outcome.hits == {"rope_static_q_fp8": 1}


def test_fp8_bits_are_stored_beside_a_rotated_k_that_is_cast() -> None:
    def program(q, k, v, cos, sin, k_cache, v_cache, slots):
        k_cache[slots] = rotate(k, cos, sin).to(torch.float8_e4m3fn)
        v_cache.view(torch.uint8).index_copy_(0, slots, v.to(torch.float8_e4m3fn).view(torch.uint8))
        return rotate(q, cos, sin)

    q, k, v, cos, sin, *caches = map(torch.randn, [*[(3, 2, 8)] * 3, *[(3, 1, 4)] * 2, *[(20, 2, 8)] * 2])
    caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    assert check(program, q, k, v, cos, sin, *caches, torch.tensor([1, 7, 4])).hits == {"rope_kv": 1}


def test_a_v_that_holds_bits_is_not_written_with_k() -> None:
    def program(q, k, v, cos, sin, k_cache, v_cache, slots):
        k_cache[slots] = rotate(k, cos, sin).to(torch.float8_e4m3fn)
        v_cache.view(torch.uint8).index_copy_(0, slots, v)
        return rotate(q, cos, sin)

    q, k, cos, sin, *caches = map(torch.randn, [*[(3, 2, 8)] * 2, *[(3, 1, 4)] * 2, *[(20, 2, 8)] * 3])
    first, second, v = (cache.to(torch.float8_e4m3fn) for cache in caches)
    check(program, q, k, v[:3].view(torch.uint8), cos, sin, first, second, torch.tensor([1, 7, 4]))


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, torch.int16), (torch.float32, torch.int32), (torch.float8_e4m3fn, torch.uint8)]
)
@pytest.mark.parametrize("joint", [False, True])
def test_a_cache_seen_as_bits_between_two_writes(dtype: torch.dtype, bits: torch.dtype, joint: bool) -> None:
    def program(cache, k, slots):
        seen = cache.view(bits)
        if joint:
            seen[0].index_copy_(0, slots, k.view(bits))
            seen[1].index_copy_(0, slots, k.flip(0).view(bits))
        else:
            seen[slots] = k.view(bits)
            cache[1:2] = k[:1]

    shape = (2, 20, 16) if joint else (20, 16)
    check(program, torch.randn(shape).to(dtype), torch.randn(3, 16).to(dtype), torch.tensor([1, 7, 4]))


@pytest.mark.parametrize("rotated_first", [False, True])
def test_two_writes_into_one_half_of_a_cache_are_not_taken_for_k_and_v(rotated_first: bool) -> None:
    def program(q, k, v, cos, sin, cache, slots):
        at = slots // 5, slots % 5
        writes = [k, rotate(k, cos, sin)]
        for rows in reversed(writes) if rotated_first else writes:
            cache[0][at] = rows
        cache[1][at] = v
        return rotate(q, cos, sin)

    shapes = [*[(3, 2, 8)] * 3, *[(3, 1, 4)] * 2, (2, 4, 5, 2, 8)]
    check(program, *map(torch.randn, shapes), torch.tensor([1, 7, 4]))
