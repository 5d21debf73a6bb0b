"""`rope_fusion::rotate` and its forms: the reference, the fakes and what they refuse. Runs anywhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from rope_fusion.kernels.rotate import (
    GroupFp8,
    Rotary,
    StaticFp8,
    rotate,
    rotate_,
    rotate_fp8,
    rotate_group_fp8,
    unsupported,
)

BATCH, SEQUENCE, HEADS, DIM, ROTARY, ROWS = 2, 3, 4, 24, 8, 11


def keywords(**changes: Any) -> dict[str, Any]:
    base = {
        "interleaved": False,
        "inverse": False,
        "halves_out": False,
        "rotary_dim": ROTARY,
        "rotary_start": 16,
        "math_dtype": torch.float32,
        "exact": False,
    }
    return base | changes


def operands(dtype: torch.dtype = torch.float32, columns: int = ROTARY // 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, SEQUENCE, HEADS, DIM, generator=generator).to(dtype)
    angle = torch.rand(ROWS, columns, generator=generator) * 6
    positions = torch.randint(0, ROWS, (BATCH, SEQUENCE), generator=generator)
    return x, angle.cos(), angle.sin(), positions


def rotated_by_loops(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    start: int,
    interleaved: bool,
    inverse: bool,
    halves_out: bool,
) -> Tensor:
    """The definition, element by element, in float64."""
    out = x.double().clone()
    half, full = ROTARY // 2, cos.shape[1] == ROTARY
    for i in range(half):
        left, right = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        first, second = (i, i + half) if halves_out else (left, right)
        a, b = x[..., start + left].double(), x[..., start + right].double()
        sign = -1 if inverse else 1

        def at(table: Tensor, element: int, pair: int = i) -> Tensor:
            return table[positions][..., element if full else pair].double()[..., None]

        out[..., start + first] = a * at(cos, first) - sign * b * at(sin, first)
        out[..., start + second] = b * at(cos, second) + sign * a * at(sin, second)
    return out


PAIRINGS = [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("interleaved", "halves_out"), PAIRINGS)
@pytest.mark.parametrize("columns", [ROTARY // 2, ROTARY])
@pytest.mark.parametrize("start", [0, 6, 16])
def test_matches_the_definition_in_float64(
    inverse: bool, interleaved: bool, halves_out: bool, columns: int, start: int
) -> None:
    x, cos, sin, positions = operands(columns=columns)
    wanted = rotated_by_loops(
        x, cos, sin, positions, start=start, interleaved=interleaved, inverse=inverse, halves_out=halves_out
    )
    got = rotate(
        x,
        cos,
        sin,
        positions,
        **keywords(rotary_start=start, interleaved=interleaved, inverse=inverse, halves_out=halves_out),
        out_dtype=torch.float32,
    )
    # two products and a sum of numbers below 8, in fp32
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=4e-6)


def test_inverse_undoes_the_rotation() -> None:
    x, cos, sin, positions = operands(torch.float64)
    there = rotate(x, cos.double(), sin.double(), positions, **keywords(), out_dtype=torch.float64)
    back = rotate(there, cos.double(), sin.double(), positions, **keywords(inverse=True), out_dtype=torch.float64)
    # cos and sin were rounded to fp32, so cos² + sin² is 1 within 1e-7
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pass_through_bits_are_kept_even_of_nan_infinity_and_negative_zero(dtype: torch.dtype) -> None:
    x, cos, sin, positions = operands(dtype)
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    x[..., 0], x[..., 1], x[..., 2] = float("inf"), -0.0, float("nan")
    x.view(bits)[..., 3] = x.view(bits)[..., 2] + 1  # a NaN with a payload
    out = rotate(x, cos, sin, positions, **keywords(), out_dtype=dtype)
    assert torch.equal(out.view(bits)[..., :16], x.view(bits)[..., :16])


@pytest.mark.parametrize("math_dtype", [torch.float32, torch.bfloat16])
def test_exact_equals_the_eager_spelling_bit_for_bit(math_dtype: torch.dtype) -> None:
    x, cos, sin, positions = operands(torch.bfloat16, columns=ROTARY)
    part = x[..., 16:].to(math_dtype)
    c, s = (table[positions][:, :, None].to(math_dtype) for table in (cos, sin))
    turned = torch.cat((-part[..., ROTARY // 2 :], part[..., : ROTARY // 2]), -1)
    eager = torch.cat((x[..., :16], (part * c + turned * s).to(x.dtype)), -1)
    got = rotate(x, cos, sin, positions, **keywords(exact=True, math_dtype=math_dtype), out_dtype=torch.bfloat16)
    assert torch.equal(got, eager)


def test_default_numerics_are_no_further_from_float64_than_bf16_arithmetic() -> None:
    x, cos, sin, positions = operands(torch.bfloat16)
    wanted = rotated_by_loops(x, cos, sin, positions, start=16, interleaved=False, inverse=False, halves_out=False)
    error = {
        exact: (
            rotate(
                x, cos, sin, positions, **keywords(exact=exact, math_dtype=torch.bfloat16), out_dtype=torch.bfloat16
            ).double()
            - wanted
        )
        .abs()
        .max()
        for exact in (False, True)
    }
    assert error[False] < error[True]


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
)
def test_output_is_rounded_once_to_its_own_dtype(source: torch.dtype, target: torch.dtype) -> None:
    x, cos, sin, positions = operands(source)
    wide = rotate(x.float(), cos, sin, positions, **keywords(), out_dtype=torch.float32)
    assert torch.equal(rotate(x, cos, sin, positions, **keywords(), out_dtype=target), wide.to(target))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(BATCH, SEQUENCE), (1, SEQUENCE), (SEQUENCE,)])
def test_gathered_tables_equal_gathered_rows(index_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, cos, sin, positions = operands()
    positions = positions.flatten()[: torch.Size(shape).numel()].view(shape).to(index_dtype)
    rows = positions.long() if positions.dim() == 2 else positions.long()[None]
    gathered = rotate(x, cos, sin, positions, **keywords(), out_dtype=x.dtype)
    assert torch.equal(gathered, rotate(x, cos[rows], sin[rows], None, **keywords(), out_dtype=x.dtype))


def test_tables_may_be_columns_of_one_joined_table_and_x_may_be_a_view() -> None:
    x, cos, sin, positions = operands()
    joined = torch.cat((cos, sin), 1)
    packed = torch.randn(BATCH, HEADS, SEQUENCE, DIM + 8)
    packed[..., 8:] = x.transpose(1, 2)
    got = rotate(packed[..., 8:].transpose(1, 2), *joined.chunk(2, 1), positions, **keywords(), out_dtype=x.dtype)
    assert torch.equal(got, rotate(x, cos, sin, positions, **keywords(), out_dtype=x.dtype))


def test_layout_writes_groups_of_heads_where_the_consumer_wants_them() -> None:
    x, cos, sin, positions = operands()
    plain = rotate(x, cos, sin, positions, **keywords(), out_dtype=x.dtype)
    grouped = rotate(x, cos, sin, positions, **keywords(), out_dtype=x.dtype, layout="g b s h d", groups=2)
    assert grouped.is_contiguous()
    assert torch.equal(grouped, plain.unflatten(2, (2, HEADS // 2)).permute(2, 0, 1, 3, 4))
    heads_first = rotate(x, cos, sin, positions, **keywords(), out_dtype=x.dtype, layout="b h s d")
    assert heads_first.is_contiguous()
    assert torch.equal(heads_first, plain.transpose(1, 2))


@pytest.mark.parametrize(("interleaved", "halves_out"), PAIRINGS)
def test_in_place_form_changes_the_rotary_slice_only_and_agrees_with_the_copy(
    interleaved: bool, halves_out: bool
) -> None:
    x, cos, sin, positions = operands(torch.bfloat16)
    arguments = keywords(interleaved=interleaved, halves_out=halves_out, inverse=True)
    wanted = rotate(x, cos, sin, positions, **arguments, out_dtype=x.dtype)
    padded = torch.full((BATCH, SEQUENCE, HEADS, DIM + 8), 7.0, dtype=x.dtype)
    padded[..., :DIM] = x
    rotate_(padded[..., :DIM], cos, sin, positions, **arguments)
    assert torch.equal(padded[..., :DIM], wanted)
    assert (padded[..., DIM:] == 7).all()


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_static_fp8_quantises_the_rounded_value(multiplies: bool, as_tensor: bool) -> None:
    x, cos, sin, positions = operands(torch.bfloat16)
    value = rotate(x, cos, sin, positions, **keywords(), out_dtype=torch.bfloat16).float()
    scaled = value * 300 if multiplies else value / 300  # one overflows without the clamp, the other underflows
    wanted = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    got = rotate_fp8(
        x,
        cos,
        sin,
        positions,
        torch.tensor([300.0]) if as_tensor else None,
        **keywords(),
        out_dtype=torch.bfloat16,
        fp8_dtype=torch.float8_e4m3fn,
        scale_value=300.0,
        scale_multiplies=multiplies,
    )
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def test_group_fp8_scales_each_group_by_its_largest_magnitude() -> None:
    x, cos, sin, positions = operands(torch.bfloat16)
    x[0, 0, 0, :8] = 0
    value = rotate(x, cos, sin, positions, **keywords(), out_dtype=torch.bfloat16).float()
    groups = value.unflatten(-1, (3, 8))
    scales = groups.abs().amax(-1).clamp(min=1e-4) / 448
    got, got_scales = rotate_group_fp8(
        x,
        cos,
        sin,
        positions,
        **keywords(),
        out_dtype=torch.bfloat16,
        fp8_dtype=torch.float8_e4m3fn,
        group_size=8,
        min_amax=1e-4,
        layout="g b s h d",
        groups=2,
    )
    order = (2, 0, 1, 3, 4)
    assert torch.equal(got_scales, scales.unflatten(2, (2, 2)).permute(order))
    wanted = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2).unflatten(2, (2, 2)).permute(order)
    assert torch.equal(got.float(), wanted.float())


def test_power_of_two_scales_are_the_smallest_not_below() -> None:
    x, cos, sin, positions = operands()
    arguments = keywords() | {"out_dtype": x.dtype, "fp8_dtype": torch.float8_e4m3fn, "group_size": 8}
    plain = rotate_group_fp8(x, cos, sin, positions, **arguments)[1]
    scales = rotate_group_fp8(x, cos, sin, positions, **arguments, power_of_two=True)[1]
    assert (torch.frexp(scales)[0] == 0.5).all()
    assert ((scales >= plain) & (scales < 2 * plain)).all()


def test_zero_tokens_give_an_empty_result() -> None:
    _, cos, sin, _ = operands()
    empty = torch.empty(1, 0, HEADS, DIM)
    assert rotate(empty, cos, sin, torch.empty(0, dtype=torch.int64), **keywords(), out_dtype=torch.bfloat16).shape == (
        1,
        0,
        HEADS,
        DIM,
    )


def test_torch_accepts_the_schemas_fakes_and_dynamic_shapes() -> None:
    x, cos, sin, positions = operands()
    fp8 = {"out_dtype": x.dtype, "fp8_dtype": torch.float8_e4m3fn}
    torch.library.opcheck(rotate, (x, cos, sin, positions), keywords() | {"out_dtype": torch.bfloat16})
    torch.library.opcheck(
        rotate, (x, cos, sin, positions), keywords() | {"out_dtype": x.dtype, "layout": "g b s h d", "groups": 2}
    )
    torch.library.opcheck(rotate_, (x.clone(), cos, sin, positions), keywords())
    # comparing FP8 outputs is beyond opcheck's own assert_close
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(rotate_fp8, (x, cos, sin, positions, None), keywords() | fp8, test_utils=utilities)
    torch.library.opcheck(
        rotate_group_fp8, (x, cos, sin, positions), keywords() | fp8 | {"group_size": 8}, test_utils=utilities
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rotary_dim": 7}, "rotary_dim must be even and positive, got 7"),
        ({"rotary_start": 20}, "the rotary slice 20:28 lies outside the head dim 24"),
        ({"halves_out": True}, "halves_out only applies to interleaved pairs"),
        ({"rotary_dim": 6}, "cos and sin must have one shape with 6 or 3 columns, got (11, 4) and (11, 4)"),
        ({"groups": 3, "layout": "g b s h d"}, "groups must divide the 4 heads, got 3"),
        ({"layout": "b s d h"}, "layout must order b s h d with d last, got 'b s d h'"),
        ({"groups": 2}, "layout must order b s g h d with d last, got 'b s h d'"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    x, cos, sin, positions = operands()
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        rotate(x, cos, sin, positions, **(keywords() | {"out_dtype": x.dtype} | changes))


def test_positions_and_tables_of_the_wrong_kind_are_refused() -> None:
    x, cos, sin, positions = operands()
    with pytest.raises(ValueError, match="cos and sin must be tables"):
        rotate(x, cos[None], sin[None], positions, **keywords(), out_dtype=x.dtype)
    with pytest.raises(ValueError, match="cos and sin must be rows"):
        rotate(x, cos, sin, None, **keywords(), out_dtype=x.dtype)
    with pytest.raises(ValueError, match="positions must be int32 or int64"):
        rotate(x, cos, sin, positions.float(), **keywords(), out_dtype=x.dtype)
    with pytest.raises(ValueError, match=r"rotate takes x as \[B, S, H, D\]"):
        rotate(x[0], cos, sin, positions, **keywords(), out_dtype=x.dtype)


def test_the_kernel_says_what_it_does_not_take() -> None:
    x, cos, sin, _ = operands(torch.bfloat16)
    rotary = Rotary(**keywords())
    bf16 = torch.bfloat16
    interleaved = Rotary(**keywords(interleaved=True, rotary_start=3))
    exact = Rotary(**keywords(exact=True))
    assert unsupported(x, cos, sin, rotary, bf16) is None
    assert "float64" in str(unsupported(x.double(), cos, sin, rotary, torch.float64))
    assert "cos and sin must both be float32" in str(unsupported(x, cos.half(), sin.half(), rotary, bf16))
    assert "even element, got 3" in str(unsupported(x, cos, sin, interleaved, bf16))
    assert "stride 1" in str(unsupported(x.transpose(2, 3), cos, sin, rotary, bf16))
    group = GroupFp8(torch.float8_e4m3fn, 16, 0.0, False)
    assert "got 16" in str(unsupported(x, cos, sin, rotary, bf16, group))
    rounded = GroupFp8(torch.float8_e4m3fn, 8, 0.0, True)
    assert "log2" in str(unsupported(x, cos, sin, exact, bf16, rounded))
    static = StaticFp8(torch.float8_e4m3fn, torch.ones(HEADS), 1.0, False)
    assert "one element, got (4,)" in str(unsupported(x, cos, sin, rotary, bf16, static))
