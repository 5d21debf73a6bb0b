"""`rope_fusion.max_tokens`: graphs with more tokens are left alone, also where their number is dynamic."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_cases import TOKENS, arguments, rotate, split_columns, store
from engine_graphs import check, compiled
from engine_standins import register

register()


def layer(x, positions, table, k_cache, v_cache, slots, scale):
    q, k, v = split_columns(x)
    rotate(positions, q, k, table)
    store(k, v, k_cache, v_cache, slots, "auto", scale)
    return q * 1


def refusals(result: Any) -> list[str]:
    return list(result.report.patterns["rope_kv"].refusals)


def test_no_limit_by_default():
    check(layer, list(arguments().values()), {"rope_kv": 1})


@pytest.mark.parametrize(("limit", "hits"), [(TOKENS + 1, 1), (TOKENS, 1), (TOKENS - 1, 0), (0, 0)])
def test_limit_counts_to_its_edge(limit, hits):
    result = compiled(layer, *copy.deepcopy(list(arguments().values())), max_tokens=limit)
    assert result.hits == ({"rope_kv": 1} if hits else {})
    if not hits:
        assert refusals(result) == [f"rope_fusion.max_tokens is {limit}, and it has {TOKENS} tokens"]
        assert result.before == result.after


def test_unbounded_dynamic_number_of_tokens_is_refused():
    result = compiled(layer, *copy.deepcopy(list(arguments().values())), dynamic=True, max_tokens=1000)
    assert result.hits == {}
    assert refusals(result) == [
        "rope_fusion.max_tokens is 1000, and it has a dynamic number of tokens that may be more"
    ]


@pytest.mark.parametrize(("limit", "hits"), [(9, 0), (10, 1)])
def test_range_of_a_dynamic_number_of_tokens_is_known(limit, hits):
    args = copy.deepcopy(list(arguments().values()))
    for at in (0, 1, 5):
        torch._dynamo.mark_dynamic(args[at], 0, min=2, max=10)
    result = compiled(layer, *args, max_tokens=limit)
    assert result.hits == ({"rope_kv": 1} if hits else {})
