"""Engine operators fuse in every functionalised form; stand-ins where the real ones are absent."""

from __future__ import annotations

from itertools import repeat

import pytest
import torch
from engine_cases import (
    BLOCKS,
    DIM,
    FORMS,
    KV_HEADS,
    PAGE,
    Q_HEADS,
    SPLITS,
    TOKENS,
    arguments,
    form_settings,
    held_by,
    latent_layer,
    quantised,
    rotate,
    split_heads,
    store,
    table,
)
from engine_graphs import FUSED, check, close_in_fp8
from engine_standins import rotated, to_fp8
from torch import Tensor


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("split", SPLITS)
def test_three_operators_become_one(form, split):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split(x)
        rotate(positions, q, k, table)
        q8 = quantised(q.reshape(q.shape[0], -1), scale)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q8, k_cache.float().sum()

    result = check(layer, list(arguments().values()), {"rope_static_q_fp8_kv": 1}, **form_settings(form))
    assert result.count(FUSED) == 1
    assert not any(name in call for call in result.calls() for name in ("_C.", "_C_cache_ops", "clone"))


@pytest.mark.parametrize("form", FORMS)
def test_one_joint_buffer(form):
    def layer(x, positions, table, joint, slots, scale):
        q, k, v = split_heads(x)
        rotate(positions, q, k, table)
        k_cache, v_cache = joint.unbind(0)
        torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, k_cache, v_cache, slots, "auto", scale, scale)
        return q.reshape(-1, DIM), joint.float().sum()

    given = arguments()
    joint = torch.zeros(2, BLOCKS, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16)
    args = [given["x"], given["positions"], given["table"], joint, given["slots"], given["scale"]]
    result = check(layer, args, {"rope_kv": 1}, **form_settings(form))
    assert "k_layout='0 n p h d', v_layout='1 n p h d'" in result.after


def latent_caches(kind: str) -> Tensor:
    dtype = torch.bfloat16 if kind == "auto" else torch.uint8
    return torch.zeros(BLOCKS, PAGE, 48, dtype=dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_latent_attention_stores_its_row_in_one_launch(form, kind):
    """DeepSeek's: q's and k's rotary parts are interleaved, k_pe has one head, and a row holds kv_c and k_pe."""

    latent = latent_layer(kind)

    def layer(*args):
        return latent(*args), args[4] * 2 if kind == "auto" else args[4]

    torch.manual_seed(0)
    given = arguments()
    q = torch.randn(TOKENS, Q_HEADS, 48, dtype=torch.bfloat16)
    kv = torch.randn(TOKENS, 48, dtype=torch.bfloat16)
    args = [q, kv, given["positions"], given["table"], latent_caches(kind), given["slots"], given["scale"]]
    result = check(layer, args, {"rope_kv": 1}, held=repeat(held_by(kind)), **form_settings(form))
    assert "k_layout='n p d[32:48]', v_layout='n p d[0:32]'" in result.after


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_blocked_caches_of_paged_attention(form, kind):
    """reshape_and_cache: K in pieces of 16 bytes before and after the places, V with the places last."""

    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_heads(x)
        rotate(positions, q, k, table)
        torch.ops._C_cache_ops.reshape_and_cache(k, v, k_cache, v_cache, slots, kind, scale, scale)
        return q.reshape(-1, DIM)

    dtype = torch.bfloat16 if kind == "auto" else torch.uint8
    piece = 16 // dtype.itemsize
    k_cache = torch.zeros(BLOCKS, KV_HEADS, DIM // piece, PAGE, piece, dtype=dtype)
    v_cache = torch.zeros(BLOCKS, KV_HEADS, DIM, PAGE, dtype=dtype)
    args = list(arguments(k_cache=k_cache, v_cache=v_cache).values())
    check(layer, args, {"rope_kv": 1}, held=repeat(held_by(kind)), **form_settings(form))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_values_may_differ_by_what_the_rounding_of_products_explains_and_no_more(dtype):
    torch.manual_seed(0)
    x, scale = torch.randn(64, Q_HEADS, DIM).bfloat16() * 4, torch.tensor([0.05])
    cos, sin = table()[torch.arange(64) % 32, None].chunk(2, -1)

    def values(cos: Tensor, sin: Tensor, **options: bool) -> Tensor:
        return to_fp8(rotated(x, cos, sin, True, **options), scale, dtype, reciprocal=False)

    theirs = values(cos, sin)
    close_in_fp8(values(cos.float(), sin.float()), theirs)
    for wrong in (values(cos, sin, inverse=True), values(cos.roll(1, 0), sin.roll(1, 0)), values(cos, sin.roll(1, 2))):
        with pytest.raises(AssertionError):
            close_in_fp8(wrong, theirs)
