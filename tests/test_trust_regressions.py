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
