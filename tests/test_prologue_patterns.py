"""The RoPE, FP8 and KV patterns on graphs that torch.compile makes: hits, near misses, numerics, other users."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import FP8, LIMIT, GptOssAttention, Stack, cos_sin_table, rope_half, stack_inputs, to_fp8
from engine_graphs import FUSED, compiled
from torch import Tensor

import rope_fusion

HEADS, KV_HEADS, DIM, ROWS, SLOTS, TOKENS = 4, 2, 16, 32, 24, 5
ALL_FUSED = {"rope_static_q_fp8_kv": 1}


def arguments(seed: int = 0, cache_dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return {
        "q": normal(TOKENS, HEADS, DIM),
        "k": normal(TOKENS, KV_HEADS, DIM),
        "v": normal(TOKENS, KV_HEADS, DIM),
        "table": cos_sin_table(ROWS, DIM),
        "positions": torch.randint(0, ROWS, (TOKENS,), generator=generator),
        "slots": torch.randperm(SLOTS, generator=generator)[:TOKENS],
        "k_cache": torch.zeros(SLOTS, KV_HEADS, DIM, dtype=cache_dtype),
        "v_cache": torch.zeros(SLOTS, KV_HEADS, DIM, dtype=cache_dtype),
        "scale": torch.tensor([0.05]),
    }


def layer(a: dict[str, Tensor], rope: Callable[..., Tensor] = rope_half) -> tuple[Tensor, ...]:
    cos, sin = a["table"][a["positions"]].chunk(2, -1)
    q, k = rope(a["q"], cos, sin), rope(a["k"], cos, sin)
    q8 = to_fp8(q, a["scale"])
    a["k_cache"][a["slots"]] = k
    a["v_cache"][a["slots"]] = a["v"]
    return q8.float(), a["k_cache"][a["slots"]].float() + 1


def hits_of(program: Callable[..., Any], a: dict[str, Tensor], **options: Any) -> dict[str, int]:
    return compiled(lambda kw: program(kw), a, **options).hits


@pytest.mark.parametrize("layers", [1, 2, 8])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("block", "pattern"),
    [
        ({}, "rope_static_q_fp8_kv"),
        ({"fp8_cache": False}, "rope_static_q_fp8_kv"),
        ({"quantise_q": False}, "rope_kv"),
        ({"quantise_q": False, "fp8_cache": False}, "rope_kv"),
    ],
)
def test_every_layer_takes_the_most_specific_pattern_and_none_a_lesser(block, pattern, layers, dynamic):
    torch.manual_seed(0)
    model, inputs = Stack(layers, **block), stack_inputs()
    if dynamic:
        for at in (0, 2, 3):
            torch._dynamo.mark_dynamic(inputs[at], 0)
    result = compiled(model, *inputs, dynamic=None)
    assert result.hits == {pattern: layers}
    assert result.report.rotations == 2 * layers
    assert result.count(FUSED) == layers
    assert result.count("index_put") == 0


def test_the_fused_stack_computes_what_eager_computes():
    torch.manual_seed(0)
    model = Stack(2, fp8_cache=False)
    inputs = stack_inputs()
    eager = copy.deepcopy(model)
    with torch.no_grad():
        expected = eager(*inputs)
    result = compiled(model, *inputs)
    # One rounding to bf16 in place of eager's same one: only contraction differs, which moves an FP8 value of q to its
    # neighbour at most, a relative 2^-3 of one of sixteen products of a head.
    torch.testing.assert_close(result.outputs, expected, rtol=0, atol=0.03)
    for ours, theirs in zip(model.layers, eager.layers, strict=True):
        torch.testing.assert_close(ours.k_cache, theirs.k_cache, rtol=2**-7, atol=2**-7)  # one bf16 step


def test_k_in_the_cache_is_no_further_from_float64_than_eager():
    a = arguments()
    ours, eager = copy.deepcopy(a), copy.deepcopy(a)
    compiled(lambda kw: layer(kw), ours)
    layer(eager)
    cos, sin = (t.double()[:, None] for t in a["table"][a["positions"]].chunk(2, -1))
    first, second = a["k"].double().chunk(2, -1)
    true = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def error(cache: Tensor) -> float:
        return (cache[a["slots"]].double() - true).abs().max().item()

    assert 0 < error(ours["k_cache"]) <= error(eager["k_cache"])


def test_two_readers_of_rotated_q_and_k_get_their_values():
    a = arguments()

    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        q, k = rope_half(kw["q"], cos, sin), rope_half(kw["k"], cos, sin)
        kw["k_cache"][kw["slots"]] = k
        kw["v_cache"][kw["slots"]] = kw["v"]
        return to_fp8(q, kw["scale"]).float(), q * 2, k + 1, k.transpose(0, 1).reshape(KV_HEADS, -1)

    expected = program(copy.deepcopy(a))
    result = compiled(program, a)
    assert result.hits == ALL_FUSED
    for ours, theirs in zip(result.outputs[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)  # one bf16 step


def interleaved(x, cos, sin):
    pairs = x.float().unflatten(-1, (-1, 2))
    first, second = pairs.unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x.dtype)


def complex_product(x, cos, sin):
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.complex(cos, sin)[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def full_width(x, cos, sin):
    cos, sin = torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def partial(x, cos, sin):
    half = x.shape[-1] // 2
    turned = rope_half(x[..., :half], cos[:, : half // 2], sin[:, : half // 2])
    return torch.cat([turned, x[..., half:]], -1)


def sliced_assignment(x, cos, sin):
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    first, second = x.float().chunk(2, -1)
    out[..., :half] = (first * cos[:, None] - second * sin[:, None]).to(x.dtype)
    out[..., half:] = (second * cos[:, None] + first * sin[:, None]).to(x.dtype)
    return out


@pytest.mark.parametrize("rope", [rope_half, interleaved, full_width, partial, sliced_assignment, complex_product])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_every_spelling_of_the_rotation_fuses(rope, index_dtype):
    a = arguments()
    a["positions"], a["slots"] = a["positions"].to(index_dtype), a["slots"].to(index_dtype)
    expected = copy.deepcopy(a)
    layer(expected, rope)
    result = compiled(lambda kw: layer(kw, rope), a)
    assert result.hits == ALL_FUSED
    torch.testing.assert_close(a["k_cache"], expected["k_cache"], rtol=2**-7, atol=2**-7)  # one bf16 step
    assert torch.equal(a["v_cache"], expected["v_cache"])


def view_write(cache, x, slots):
    cache.view(-1, KV_HEADS, DIM)[slots] = x


def pair_write(cache, x, slots):
    page = cache.shape[1]
    cache[slots // page, slots % page] = x


def copy_write(cache, x, slots):
    cache.view(-1, KV_HEADS, DIM).index_copy_(0, slots, x)


def scatter_write(cache, x, slots):
    width = KV_HEADS * DIM
    cache.view(-1, width).scatter_(0, slots[:, None].expand(-1, width), x.reshape(-1, width))


@pytest.mark.parametrize("write", [view_write, pair_write, copy_write, scatter_write])
@pytest.mark.parametrize("joint", ["", "select", "unbind"])
def test_every_spelling_of_the_write_fuses(write, joint):
    a = arguments()
    pages = torch.zeros(2, 6, 4, KV_HEADS, DIM, dtype=torch.bfloat16)
    a["k_cache"], a["v_cache"] = (pages, pages) if joint else (pages[0].clone(), pages[1].clone())

    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        q, k = rope_half(kw["q"], cos, sin), rope_half(kw["k"], cos, sin)
        k_cache, v_cache = kw["k_cache"], kw.get("v_cache")
        if joint:
            k_cache, v_cache = k_cache.unbind(0) if joint == "unbind" else (k_cache[0], k_cache[1])
        write(k_cache, k, kw["slots"])
        write(v_cache, kw["v"], kw["slots"])
        return to_fp8(q, kw["scale"]).float(), k_cache.float().sum() + v_cache.float().sum()

    if joint:
        del a["v_cache"]
    expected = copy.deepcopy(a)
    program(expected)
    result = compiled(program, a)
    assert result.hits == ALL_FUSED
    torch.testing.assert_close(a["k_cache"], expected["k_cache"], rtol=2**-7, atol=2**-7)  # one bf16 step


def test_minus_one_is_the_last_slot_as_it_is_for_index_put():
    a = arguments()
    a["slots"] = torch.tensor([3, -1, 7, 1, -2])
    expected = copy.deepcopy(a)
    layer(expected)
    assert compiled(lambda kw: layer(kw), a).hits == ALL_FUSED
    assert torch.equal(a["v_cache"], expected["v_cache"])
    assert a["v_cache"][-1].any()


def test_a_rotation_without_a_cache_takes_the_lesser_pattern():
    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        return to_fp8(rope_half(kw["q"], cos, sin), kw["scale"]).float(), rope_half(kw["k"], cos, sin)

    assert hits_of(program, arguments()) == {"rope_static_q_fp8": 1}


def test_an_unrounded_rotation_is_quantised_unrounded():
    """As torch 2.11 makes it of any: the rounding between two conversions is removed."""

    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        q, k = rope_half(kw["q"].float(), cos, sin), rope_half(kw["k"], cos, sin)
        kw["k_cache"][kw["slots"]] = k
        kw["v_cache"][kw["slots"]] = kw["v"]
        return (q / kw["scale"]).clamp(-LIMIT, LIMIT).to(FP8).float(), k * 2

    a = arguments()
    eager = copy.deepcopy(a)
    q8, doubled = program(eager)
    result = compiled(program, a)
    assert result.hits == ALL_FUSED
    assert (result.outputs[0] != q8).float().mean() < 0.01  # contraction decides near ties; rounding first moves 1.3 %
    torch.testing.assert_close(result.outputs[1], doubled, rtol=2**-7, atol=2**-7)  # one bf16 step
    torch.testing.assert_close(a["k_cache"], eager["k_cache"], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("also_read", [False, True])
def test_q_is_returned_rounded_where_an_unrounded_k_is_quantised(also_read):
    """The operator works in fp32 then; no kernel may be left that only rounds what it returned."""

    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        q, k = rope_half(kw["q"], cos, sin), rope_half(kw["k"].float(), cos, sin)
        kw["k_cache"].view(torch.uint8)[kw["slots"]] = to_fp8(k, kw["scale"]).view(torch.uint8)
        kw["v_cache"].view(torch.uint8)[kw["slots"]] = to_fp8(kw["v"], kw["scale"]).view(torch.uint8)
        return (q, k * 2) if also_read else (q, kw["slots"] + 1)

    a = arguments(cache_dtype=FP8)
    eager = copy.deepcopy(a)
    want = program(eager)
    result = compiled(program, a)
    assert result.hits == {"rope_kv": 1}
    assert result.count("convert_element_type") == (1 if also_read else 0)
    for got, expected in zip(result.outputs, want, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7)  # one bf16 step
    for cache in ("k_cache", "v_cache"):
        differ = a[cache].view(torch.uint8) != eager[cache].view(torch.uint8)
        assert differ.float().mean() < 0.01  # contraction decides near ties; rounding first moves 1.3 %


def test_k_is_returned_rounded_where_an_unrounded_q_is_quantised_and_nothing_is_cached():
    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        q, k = rope_half(kw["q"].float(), cos, sin), rope_half(kw["k"], cos, sin)
        return to_fp8(q, kw["scale"]).float(), k

    a = arguments()
    result = compiled(program, a)
    assert result.hits == {"rope_static_q_fp8": 1}
    assert result.count("convert_element_type") == 1  # of the FP8 values
    torch.testing.assert_close(result.outputs[1], program(a)[1], rtol=2**-7, atol=2**-7)  # one bf16 step


# Near misses: nothing of the kind may be rewritten as if it were the real thing.


def wrong_sign(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos - first * sin], -1).to(x.dtype)


def swapped_halves(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([second * cos + first * sin, first * cos - second * sin], -1).to(x.dtype)


def other_rows(x, cos, sin):
    return rope_half(x, cos.flip(0), sin)


def sin_for_cos(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * sin + first * sin], -1).to(x.dtype)


@pytest.mark.parametrize("rope", [wrong_sign, swapped_halves, sin_for_cos])
def test_what_is_almost_a_rotation_is_left_alone(rope):
    a = arguments()
    expected = copy.deepcopy(a)
    outputs = layer(expected, rope)
    result = compiled(lambda kw: layer(kw, rope), a)
    assert set(result.hits) <= {"kv_write_in_place"}
    assert torch.equal(a["k_cache"], expected["k_cache"])
    # torch 2.11 removes the rounding to bf16 before the one to FP8: a step of FP8 in some elements
    torch.testing.assert_close(result.outputs[0].float(), outputs[0].float(), rtol=2**-3, atol=2**-9)


def test_cos_of_other_rows_keeps_its_value():
    """Still a linear map of the same form, so it may fuse; it must use each operand's own rows."""
    a = arguments()
    expected = copy.deepcopy(a)
    layer(expected, other_rows)
    compiled(lambda kw: layer(kw, other_rows), a)
    torch.testing.assert_close(a["k_cache"], expected["k_cache"], rtol=2**-7, atol=2**-7)  # one bf16 step


def test_k_rotated_by_other_positions_does_not_share_the_operator():
    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        k_cos, k_sin = kw["table"][kw["slots"]].chunk(2, -1)
        q, k = rope_half(kw["q"], cos, sin), rope_half(kw["k"], k_cos, k_sin)
        kw["k_cache"][kw["slots"]] = k
        kw["v_cache"][kw["slots"]] = kw["v"]
        return to_fp8(q, kw["scale"]).float()

    a = arguments()
    expected = copy.deepcopy(a)
    program(expected)
    result = compiled(program, a)
    assert result.hits == {"rope_static_q_fp8": 1}
    assert any("no rotation of a q shares its cos and sin" in sentence for sentence in result.report.near_misses)
    torch.testing.assert_close(a["k_cache"], expected["k_cache"], rtol=2**-7, atol=2**-7)  # one bf16 step


@pytest.mark.parametrize(
    "quantise",
    [
        lambda q, scale: (q.float() / (q.float().abs().amax() / LIMIT)).clamp(-LIMIT, LIMIT).to(FP8),
        lambda q, scale: (q.float() / scale).clamp(-240, 240).to(FP8),
        lambda q, scale: (q.float() / scale).clamp(-57344, 57344).to(FP8),
        lambda q, scale: (q.float() / scale + 1).clamp(-LIMIT, LIMIT).to(FP8),
    ],
    ids=["scale depends on q", "clamp of e4m3fnuz", "clamp of e5m2", "shifted"],
)
def test_what_is_almost_static_quantisation_leaves_q_unquantised(quantise):
    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        q, k = rope_half(kw["q"], cos, sin), rope_half(kw["k"], cos, sin)
        kw["k_cache"][kw["slots"]] = k
        kw["v_cache"][kw["slots"]] = kw["v"]
        return quantise(q, kw["scale"]).float()

    assert hits_of(program, arguments()) == {"rope_kv": 1}


def test_a_write_that_accumulates_is_no_cache_write():
    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        q, k = rope_half(kw["q"], cos, sin), rope_half(kw["k"], cos, sin)
        kw["k_cache"].index_put_((kw["slots"],), k, accumulate=True)
        kw["v_cache"][kw["slots"]] = kw["v"]
        return to_fp8(q, kw["scale"]).float()

    assert hits_of(program, arguments()) == {"rope_static_q_fp8": 1}


def test_a_cache_read_before_its_write_keeps_the_old_value():
    def program(kw):
        old = kw["k_cache"].float().sum(-1)
        outputs = layer(kw)
        return *outputs, old

    a = arguments()
    a["k_cache"].normal_()
    expected = copy.deepcopy(a)
    outputs = program(expected)
    result = compiled(program, a)
    torch.testing.assert_close(result.outputs[2], outputs[2], rtol=0, atol=0)
    assert "rope_static_q_fp8_kv" not in result.hits
    assert any("read as it was before" in sentence for sentence in result.report.near_misses)


def test_v_computed_from_the_written_k_cache_is_not_fused_with_it():
    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        q, k = rope_half(kw["q"], cos, sin), rope_half(kw["k"], cos, sin)
        kw["k_cache"][kw["slots"]] = k
        kw["v_cache"][kw["slots"]] = kw["k_cache"][kw["slots"]] * 2
        return q

    a = arguments()
    expected = copy.deepcopy(a)
    program(expected)
    result = compiled(program, a)
    assert "rope_kv" not in result.hits
    torch.testing.assert_close(a["v_cache"], expected["v_cache"], rtol=2**-7, atol=2**-6)  # one bf16 step of the double


def test_v_computed_from_quantised_q_keeps_the_cache_out():
    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        q, k = rope_half(kw["q"], cos, sin), rope_half(kw["k"], cos, sin)
        q8 = to_fp8(q, kw["scale"])
        kw["k_cache"][kw["slots"]] = k
        kw["v_cache"][kw["slots"]] = q8[:, :KV_HEADS].to(torch.bfloat16)
        return q8.float()

    a = arguments()
    expected = copy.deepcopy(a)
    program(expected)
    result = compiled(program, a)
    assert "rope_static_q_fp8_kv" not in result.hits
    torch.testing.assert_close(a["v_cache"], expected["v_cache"], rtol=0.125, atol=0)  # an FP8 neighbour


def test_a_graph_without_a_hit_comes_out_node_for_node():
    def program(kw):
        cos, sin = kw["table"][kw["positions"]].chunk(2, -1)
        return rope_half(kw["q"], cos, sin), rope_half(kw["k"], cos, sin) * kw["scale"]

    result = compiled(program, arguments())
    assert result.hits == {}
    assert result.before == result.after
    assert result.report.rotations == 2


def test_cpu_stays_out_by_itself_and_says_so():
    result = compiled(lambda kw: layer(kw), arguments(), kernels="auto")
    assert result.hits == {}
    gates = {name: pattern.gate for name, pattern in result.report.patterns.items()}
    assert "no kernel of ours pays on cpu" in str(gates["rope_kv"])
    assert gates["kv_write_in_place"] is None


def test_a_disabled_pattern_gives_way_to_the_next():
    result = compiled(lambda kw: layer(kw), arguments(), disable=["rope_static_q_fp8_kv"])
    assert result.hits == {"rope_kv": 1}


def apart(q, k, v, table, positions, slots, k_cache, v_cache):
    cos, sin = table[positions].chunk(2, -1)
    q, k = rope_half(q, cos, sin), rope_half(k, cos, sin)
    k_cache[slots] = k
    v_cache[slots] = v
    return q


def test_tokens_of_k_and_v_that_are_marked_dynamic_one_by_one_are_the_same_tokens():
    a = arguments()
    del a["scale"]
    torch.compiler.reset()
    settings: dict[str, Any] = {"rope_fusion.kernels": "reference", "rope_fusion.strict": True}
    program = torch.compile(apart, backend="rope_fusion", options=settings)
    with torch.no_grad(), rope_fusion.record() as report:
        for tokens in (TOKENS, 3, 7):
            given = {
                n: t if n.endswith("cache") or n == "table" else t[[*range(TOKENS), 0, 1][:tokens]]
                for n, t in a.items()
            }
            given["slots"] = torch.arange(tokens) * 2
            eager = copy.deepcopy(given)
            for name in ("q", "k", "v", "positions", "slots"):
                torch._dynamo.mark_dynamic(given[name], 0)
            with torch.compiler.set_stance("default" if tokens == TOKENS else "fail_on_recompile"):
                got = program(**given)
            torch.testing.assert_close(got, apart(**eager), rtol=2**-7, atol=2**-7)  # one bf16 step
            torch.testing.assert_close(given["k_cache"], eager["k_cache"], rtol=2**-7, atol=2**-7)
            assert torch.equal(given["v_cache"], eager["v_cache"])
        assert report.hits == {"rope_kv": 1}
        with pytest.raises((RuntimeError, IndexError)):  # never fewer rows than slots, silently
            program(**{**given, "v": given["v"][:4]})


def test_dynamic_heads_are_refused_with_a_sentence():
    block = GptOssAttention()
    inputs = stack_inputs()
    result = compiled(block, *inputs, dynamic=True)
    sentences = [*result.report.near_misses, *(s for p in result.report.patterns.values() for s in p.refusals)]
    assert result.hits or sentences


def slice_write(cache, x, start):
    cache[:, :, start : start + x.shape[2]] = x


def position_write(cache, x, start):
    cache[:, :, start] = x[:, :, 0]


@pytest.mark.parametrize(("write", "hits"), [(slice_write, {"rope_kv": 1}), (position_write, {})])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_a_write_at_one_position_of_a_static_cache_keeps_its_value(write, hits, kernels):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, HEADS, 1, DIM, generator=generator).to(torch.bfloat16)
    kv = torch.randn(2, KV_HEADS, 1, DIM, generator=generator).to(torch.bfloat16)
    rows = cos_sin_table(ROWS, DIM)[4:5]

    def program(q, kv, k_cache, v_cache):
        cos, sin = rows.chunk(2, -1)
        first, second = kv.float().chunk(2, -1)
        k = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(kv.dtype)
        first, second = q.float().chunk(2, -1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(q.dtype)
        write(k_cache, k, 4)
        write(v_cache, kv, 4)
        return rotated, k_cache.float().sum()

    caches = [torch.zeros(2, KV_HEADS, 8, DIM, dtype=torch.bfloat16) for _ in range(4)]
    expected = program(q, kv, *caches[:2])
    result = compiled(program, q, kv, *caches[2:], kernels=kernels)
    assert result.hits == (hits if kernels == "reference" else {})
    torch.testing.assert_close(result.outputs[0], expected[0], rtol=2**-7, atol=2**-7)  # one bf16 step
    torch.testing.assert_close(caches[2], caches[0], rtol=2**-7, atol=2**-7)
    assert torch.equal(caches[3], caches[1])
