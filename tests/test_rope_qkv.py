"""What the fused operator means: reference against eager spellings, caches, fake, and how Inductor runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rope_fusion.kernels.rope_qkv import (
    LIMITS,
    Target,
    decoded,
    fp8_unsupported,
    reference,
    store_reference,
    unsupported,
)
from rope_fusion.kernels.variants import AXES, PreparedCall, covering, describe, is_valid, make_call, plain_options

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3 = torch.float8_e4m3fn
VARIANTS = covering()
PLAIN = plain_options(64, need_q=True, need_k=True)
OPERATOR = torch.ops.rope_fusion.rope_qkv


def operands(dtype: torch.dtype, angle_dtype: torch.dtype | None = None, dim: int = 64) -> tuple[Tensor, ...]:
    """q [2, 5, 4, dim], k [2, 5, 2, dim], cos and sin tables [50, dim / 2], positions [2, 5]."""
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(2, 5, 4, dim, generator=generator).to(dtype)
    k = torch.randn(2, 5, 2, dim, generator=generator).to(dtype)
    angle = torch.outer(torch.arange(50.0), 10000 ** (-torch.arange(0, dim, 2) / dim))
    positions = torch.randint(0, 50, (2, 5), generator=generator)
    return q, k, angle.cos().to(angle_dtype or dtype), angle.sin().to(angle_dtype or dtype), positions


def rotated(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, **changes: Any) -> Any:
    nothing = [None] * 8
    options = {**PLAIN, "out_dtype": q.dtype, **changes}
    return OPERATOR(q, k, None, cos, sin, positions, *nothing[:4], *nothing[:3], **options)[:2]


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@pytest.mark.parametrize("math_dtype", [BF16, FP16, FP32, FP64])
def test_exact_mode_gives_the_bits_of_the_rotate_half_spelling(math_dtype: torch.dtype) -> None:
    q, k, cos, sin, positions = operands(BF16 if math_dtype == FP32 else math_dtype, FP32)
    c, s = (torch.cat((t, t), -1)[positions][:, :, None].to(math_dtype) for t in (cos, sin))
    got = rotated(q, k, cos, sin, positions, math_dtype=math_dtype, exact=True)
    for x, y in zip((q, k), got, strict=True):
        wide = x.to(math_dtype)
        assert torch.equal(y, (wide * c + rotate_half(wide) * s).to(x.dtype))


@pytest.mark.parametrize("math_dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("inverse", [False, True])
def test_exact_mode_gives_the_bits_of_the_interleaved_spelling(math_dtype: torch.dtype, inverse: bool) -> None:
    q, k, cos, sin, positions = operands(math_dtype)
    c, s = (t[positions][:, :, None] for t in (cos, -sin if inverse else sin))
    got = rotated(q, k, cos, sin, positions, math_dtype=math_dtype, exact=True, interleaved=True, inverse=inverse)
    for x, y in zip((q, k), got, strict=True):
        even, odd = x[..., ::2], x[..., 1::2]
        assert torch.equal(y, torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2))


def test_halves_out_is_the_interleaved_result_with_its_pairs_taken_apart() -> None:
    q, k, cos, sin, positions = operands(FP32)
    pairs, _ = rotated(q, k, cos, sin, positions, interleaved=True)
    halves, _ = rotated(q, k, cos, sin, positions, interleaved=True, halves_out=True)
    assert torch.equal(halves, torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1))


def test_inverse_undoes_the_rotation() -> None:
    q, k, cos, sin, positions = operands(FP64)
    forward, _ = rotated(q, k, cos, sin, positions)
    back, _ = rotated(forward, k, cos, sin, positions, inverse=True)
    torch.testing.assert_close(back, q)  # float64's own default: rounding of four products


def test_full_width_angles_use_each_elements_own_column() -> None:
    q, _, _, _, _ = operands(FP64)
    generator = torch.Generator().manual_seed(3)
    cos, sin = (torch.randn(2, 5, 64, generator=generator, dtype=FP64) for _ in range(2))
    got, _ = rotated(q, None, cos, sin, None)
    assert torch.equal(got, q * cos[:, :, None] + rotate_half(q) * sin[:, :, None])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_default_mode_is_no_further_from_float64_than_eager(dtype: torch.dtype) -> None:
    q, k, cos, sin, positions = operands(dtype)
    truth = rotated(q.double(), k.double(), cos.double(), sin.double(), positions, math_dtype=FP64)
    eager = rotated(q, k, cos, sin, positions, math_dtype=dtype, exact=True)
    default = rotated(q, k, cos, sin, positions, math_dtype=dtype)
    for t, e, d in zip(truth, eager, default, strict=True):
        assert (d - t).abs().max() <= (e - t).abs().max()


def test_elements_outside_the_rotary_slice_pass_through() -> None:
    q, k, cos, sin, positions = operands(BF16, dim=128)
    got = rotated(q, k, cos[:, :16], sin[:, :16], positions, rotary_dim=32, rotary_start=64)
    for x, y in zip((q, k), got, strict=True):
        assert torch.equal(x[..., :64], y[..., :64])
        assert torch.equal(x[..., 96:], y[..., 96:])
        assert not torch.equal(x[..., 64:96], y[..., 64:96])


def stored(layout: str, cache: Tensor, slots: Tensor, **changes: Any) -> Tensor:
    """Write numbers that can be followed by eye, as a K rotated by nothing; returns them."""
    batch, seq = 2, 3
    k = torch.arange(batch * seq * 2 * 4, dtype=FP32).reshape(batch, seq, 2, 4) + 1
    cos, sin = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
    args = [k, k, None, cos, sin, None, cache, None, slots, changes.pop("slot_offsets", None), None, None, None]
    OPERATOR(*args, **{**PLAIN, "rotary_dim": 4, "k_layout": layout, **changes})
    return k


def test_flat_slots_run_over_blocks_and_places() -> None:
    cache = torch.zeros(4, 5, 2, 4)
    slots = torch.tensor([19, 0, 7, 3, 12, 5])
    k = stored("n p h d", cache, slots)
    assert torch.equal(cache.view(20, 2, 4)[slots], k.view(6, 2, 4))
    assert cache.count_nonzero() == k.numel()


def test_heads_before_places_store_the_same_rows() -> None:
    nhd, hnd = torch.zeros(4, 5, 2, 4), torch.zeros(4, 2, 5, 4)
    slots = torch.tensor([19, 0, 7, 3, 12, 5])
    stored("n p h d", nhd, slots)
    stored("n h p d", hnd, slots)
    assert torch.equal(nhd, hnd.transpose(1, 2))


def test_static_cache_takes_each_batch_entry_to_its_own_row() -> None:
    cache = torch.zeros(2, 2, 9, 4)
    k = stored("b h p d", cache, torch.tensor([4, 0, 8]))
    assert torch.equal(cache[:, :, [4, 0, 8]], k.transpose(1, 2))


def test_merged_heads_and_dims_are_one_axis_of_the_cache() -> None:
    cache = torch.zeros(10, 8)
    slots = torch.tensor([9, 0, 7, 3, 2, 5])
    k = stored("p (hd)", cache, slots)
    assert torch.equal(cache[slots], k.view(6, 8))


def test_slot_offsets_make_slots_block_numbers() -> None:
    cache = torch.zeros(4, 5, 2, 4)
    blocks, places = torch.tensor([3, 0, 1, 0, 2, 1]), torch.tensor([4, 0, 2, 3, 2, 0])
    k = stored("n p h d", cache, blocks, slot_offsets=places)
    assert torch.equal(cache[blocks, places], k.view(6, 2, 4))


def test_a_negative_slot_is_skipped_or_wraps_as_the_program_says() -> None:
    slots = torch.tensor([19, -1, 7, 3, -6, 5])
    skipped, wrapped = torch.zeros(4, 5, 2, 4), torch.zeros(4, 5, 2, 4)
    k = stored("n p h d", skipped, slots).view(6, 2, 4)
    assert skipped.count_nonzero() == 4 * 8
    slots = torch.tensor([18, -1, 7, 3, -6, 5])
    stored("n p h d", wrapped, slots, skip_negative_slots=False)
    assert torch.equal(wrapped.view(20, 2, 4)[slots], k)


def test_tokens_beyond_the_slots_are_rotated_but_not_stored() -> None:
    cache = torch.zeros(4, 5, 2, 4)
    k = stored("n p h d", cache, torch.tensor([6, 1]))
    assert torch.equal(cache.view(20, 2, 4)[[6, 1]], k.view(6, 2, 4)[:2])
    assert cache.count_nonzero() == 16


def quantised(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(E4M3)


def test_fp8_values_are_made_from_the_rounded_rotation() -> None:
    q, k, cos, sin, positions = operands(BF16, FP32)
    scale = torch.tensor([0.013])
    args = [q, k, None, cos, sin, positions, None, None, None, None, scale, None, None]
    q_rot, _, q8 = OPERATOR(*args, **{**PLAIN, "q_fp8": E4M3, "out_dtype": BF16})
    assert torch.equal(q8.view(torch.uint8), quantised(q_rot, scale).view(torch.uint8))


def test_fp8_values_are_made_from_the_unrounded_rotation_where_the_program_never_rounds() -> None:
    q, k, cos, sin, positions = operands(BF16, FP32)
    scale = torch.tensor([0.013])
    args = [q, k, None, cos, sin, positions, None, None, None, None, scale, None, None]
    q_rot, k_rot, q8 = OPERATOR(*args, **PLAIN)[:2] + OPERATOR(*args, **{**PLAIN, "q_fp8": E4M3})[2:]
    for got, x in ((q_rot, q), (k_rot, k)):
        assert got.dtype == FP32
        assert torch.equal(got, rotated(x.float(), None, cos, sin, positions)[0])
    assert torch.equal(q8.view(torch.uint8), quantised(q_rot, scale).view(torch.uint8))
    rounded = OPERATOR(*args, **{**PLAIN, "q_fp8": E4M3, "out_dtype": BF16})[2]
    assert not torch.equal(q8.view(torch.uint8), rounded.view(torch.uint8))


def test_scales_per_head_meet_their_heads_in_a_joint_byte_buffer() -> None:
    q, k, cos, sin, positions = operands(BF16, FP32)
    buffer = torch.zeros(2, 6, 4, 2, 64, dtype=torch.uint8)
    k_scale, v_scale = torch.tensor([0.02, 0.5]), torch.tensor([0.3, 0.01])
    slots = torch.randperm(24)[:10]
    options = {**PLAIN, "out_dtype": BF16, "kv_fp8": E4M3, "k_layout": "0 n p h d", "v_layout": "1 n p h d"}
    _, k_rot, _ = OPERATOR(q, k, k, cos, sin, positions, buffer, None, slots, None, None, k_scale, v_scale, **options)
    for part, value, scale in ((0, k_rot, k_scale), (1, k, v_scale)):
        want = quantised(value, scale[:, None]).view(torch.uint8).view(10, 2, 64)
        assert torch.equal(buffer[part].view(24, 2, 64)[slots], want)


def as_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else x


@pytest.mark.parametrize("variant", VARIANTS[::3], ids=describe)
def test_fake_outputs_have_the_shapes_dtypes_and_strides_of_real_ones(variant: Any) -> None:
    call = make_call(variant)
    real = OPERATOR(*call.args, **call.options)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = OPERATOR(*[None if t is None else mode.from_tensor(t) for t in call.args], **call.options)

    def seen(t: Tensor) -> tuple[Any, ...]:  # the stride of a dim of one element means nothing
        return t.dtype, [(size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]

    assert [seen(t) for t in real] == [seen(t) for t in fakes]
    assert [t.shape for t in real] == [t.shape for t in fakes]


def test_operator_schema_declares_what_it_mutates() -> None:
    call = make_call(next(v for v in VARIANTS if v.cache == "same" and v.q_fp8 is None))  # opcheck multiplies: no FP8
    torch.library.opcheck(
        OPERATOR.default, tuple(call.args), call.options, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("functional", ["v1", "v2"])
def test_compiled_call_writes_the_callers_cache_and_copies_none(joint: bool, functional: str) -> None:
    import torch._inductor.config
    from torch._inductor.utils import run_and_get_code

    import rope_fusion.kernels.prologue  # noqa: F401  (the lowering)

    variant = next(v for v in VARIANTS if v.joint == joint and v.writes == "kv" and v.source == "packed")
    call = make_call(variant)
    eager, compiled = call.with_own_caches(), call.with_own_caches()

    def program(call: PreparedCall) -> tuple[Tensor, ...]:
        return OPERATOR(*call.args, **call.options)

    want = program(eager)
    with torch._inductor.config.patch(enable_auto_functionalized_v2=functional == "v2"):
        got, (code,) = run_and_get_code(torch.compile(program, fullgraph=True), compiled)
    for w, g in zip((*want, *eager.caches), (*got, *compiled.caches), strict=True):
        assert torch.equal(as_bits(w), as_bits(g))
    assert "rope_qkv.encoded" in code
    assert "copy_" not in code
    assert "clone" not in code
    assert "empty_strided_cpu(" not in code.split("def call")[1].split("return")[0]


def test_options_as_text_need_no_escaping_in_generated_code_and_come_back_as_they_were() -> None:
    for variant in VARIANTS[:10]:
        call = make_call(variant)
        text = call.encoded["options"]
        assert not set(text) & set('"\\\n')
        assert vars(decoded(text)) == {k: v for k, v in call.options.items() if k not in ("need_q", "need_k")}


@pytest.mark.parametrize("slot", [-25, 24])
def test_a_flat_slot_outside_the_cache_is_an_error_and_nothing_is_written(slot: int) -> None:
    cache = torch.zeros(4, 6, 2, 8)
    with pytest.raises(IndexError):
        store_reference(cache, "n p h d", torch.ones(1, 1, 2, 8), torch.tensor([slot]), None, skip_negative_slots=False)
    assert not cache.any()


def test_refusals_name_the_limit_and_what_was_met() -> None:
    h200, a100 = Target("cuda", 90), Target("cuda", 80)
    fits: dict[str, Any] = {"q_dtype": BF16, "cos_dtype": FP32, "head_dim": 64, "rotary_dim": 64}
    assert unsupported(h200, **fits, q_fp8=E4M3, kv_fp8=E4M3, cache_dtypes=[torch.uint8]) is None
    assert unsupported(a100, **fits) is None
    assert "sm_89 or newer, this device is sm_80" in str(unsupported(a100, **fits, q_fp8=E4M3))
    assert "even and between 2 and head_dim 64, got 63" in str(unsupported(h200, **{**fits, "rotary_dim": 63}))
    assert "up to 512, got 576" in str(unsupported(h200, **{**fits, "head_dim": 576}))
    assert "int16" in str(unsupported(h200, **fits, index_dtypes=[torch.int16]))
    assert "bf16, fp16, fp32 or FP8, got torch.int8" in str(unsupported(h200, **fits, cache_dtypes=[torch.int8]))
    assert "bf16, fp16 or fp32, got torch.float64" in str(unsupported(h200, **{**fits, "q_dtype": FP64}))
    assert "leaves it in fp32, got torch.float16" in str(unsupported(h200, **fits, out_dtype=FP16))


def test_amd_devices_take_the_fp8_dtype_of_their_generation() -> None:
    assert fp8_unsupported(Target("hip", "gfx942"), torch.float8_e4m3fnuz) is None
    assert "gfx942" in str(fp8_unsupported(Target("hip", "gfx950"), torch.float8_e4m3fnuz))
    assert fp8_unsupported(Target("hip", "gfx950"), E4M3) is None
    assert "CUDA" in str(fp8_unsupported(Target("cuda", 90), torch.float8_e4m3fnuz))
    assert LIMITS.max_head_dim >= 256


def test_covering_set_holds_every_pair_of_choices_that_go_together() -> None:
    def pairs(variant: Any) -> set[tuple[str, Any, str, Any]]:
        values = {name: getattr(variant, name) for name in AXES if name != "angle_dtype"}
        return {(a, values[a], b, values[b]) for a in values for b in values if a < b}

    held = set().union(*map(pairs, VARIANTS))
    others = [v for v in covering(seed=1) + covering(seed=2) if is_valid(v)]
    assert set().union(*map(pairs, others)) == held


def test_reference_takes_no_tokens() -> None:
    q, k, cos, sin, positions = operands(BF16, FP32)
    args: list[Any] = [q[:0], k[:0], None, cos, sin, positions[:0], *[None] * 7]
    q_rot, k_rot, _ = reference(*args, **{**PLAIN, "out_dtype": BF16})
    assert q_rot.shape == (0, 5, 4, 64)
    assert k_rot.shape == (0, 5, 2, 64)
