"""One small program for each kind of mistake that random programs and perturbed graphs have found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from trust.differential import Outcome, capture_call, check_captured

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
