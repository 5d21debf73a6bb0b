"""`rope_fusion.max_tokens`: graphs with more tokens are left alone, also where their number is dynamic."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_cases import TOKENS, arguments, rotate, split_columns, store
from engine_graphs import check, close, compiled
from engine_standins import register

register()


def layer(x, positions, table, k_cache, v_cache, slots, scale):
    q, k, v = split_columns(x)
    rotate(positions, q, k, table)
    store(k, v, k_cache, v_cache, slots, "auto", scale)
    return q * 2


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


def with_dynamic_tokens(**bounds: int) -> list[Any]:
    """Arguments whose numbers of tokens are dynamic, each by itself: nobody says that they are the same."""
    args = copy.deepcopy(list(arguments().values()))
    for at in (0, 1, 5):
        torch._dynamo.mark_dynamic(args[at], 0, **bounds)
    return args


def test_unbounded_dynamic_number_of_tokens_is_refused():
    result = compiled(layer, *with_dynamic_tokens(), max_tokens=1000)
    assert result.hits == {}
    assert refusals(result) == [
        "rope_fusion.max_tokens is 1000, and it has a dynamic number of tokens that may be more"
    ]


@pytest.mark.parametrize(("limit", "hits"), [(9, 0), (10, 1)])
def test_range_of_a_dynamic_number_of_tokens_is_known(limit, hits):
    result = compiled(layer, *with_dynamic_tokens(min=2, max=10), max_tokens=limit)
    assert result.hits == ({"rope_kv": 1} if hits else {})


def test_tokens_that_only_the_operators_hold_to_be_the_same_many():
    """Neither the compiler nor a fake body compares positions with rows of q; the operators themselves insist on it."""
    eager, own = copy.deepcopy(list(arguments().values())), with_dynamic_tokens()
    expected = layer(*eager)
    result = compiled(layer, *own)
    assert result.hits == {"rope_kv": 1}
    close(result.outputs, expected, None)
    for ours, theirs in zip(own[3:5], eager[3:5], strict=True):
        close(ours, theirs, None)


def test_symbolic_width_of_the_table_is_refused_with_a_sentence():
    result = compiled(layer, *copy.deepcopy(list(arguments().values())), dynamic=True)
    assert result.hits == {}
    (sentence,) = result.report.near_misses
    assert "[positions, even rotary_dim] is known" in sentence
    assert "mark only tokens as dynamic" in sentence
