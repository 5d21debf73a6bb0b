"""Patterns `inverse_rope` and `partial_rope`: every spelling hits once, what is no such rotation keeps its value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_fusion
from rope_fusion.kernels.rotation import FEWEST_QUANTISED, too_small
from rope_fusion.testing import assert_hits

TOKENS, HEADS, WIDTH, ROTARY, ROWS = 6, 4, 32, 8, 40
OPTIONS = {"rope_fusion.kernels": "reference", "rope_fusion.strict": True}
Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]


def table(rows: int = ROWS, rotary: int = ROTARY) -> Tensor:
    """[rows, rotary] fp32, cos first."""
    angle = torch.outer(torch.arange(rows).float(), 1.0 / 10.0 ** (torch.arange(0, rotary, 2) / rotary))
    return torch.cat([angle.cos(), angle.sin()], -1)


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    o = torch.randn(tokens, HEADS, WIDTH, generator=generator).to(dtype)
    return o, torch.randint(0, ROWS, (tokens,), generator=generator), table()


def halves(positions: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cache[positions].chunk(2, -1)
    return cos[:, None], sin[:, None]


# spellings of the inverse rotation of the last ROTARY elements


def pairs_by_repeat_interleave(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    o = o.clone()
    cos, sin = cache.index_select(0, positions).chunk(2, -1)
    cos = cos.repeat_interleave(2, -1)[:, None]
    sin = (-sin).repeat_interleave(2, -1)[:, None]
    x = o[..., -ROTARY:].float()
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return torch.cat([o[..., :-ROTARY], (x * cos + turned * sin).to(o.dtype)], -1)


def pairs_turned_the_other_way(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = (t.repeat_interleave(2, -1) for t in halves(positions, cache))
    x = o[..., -ROTARY:].float()
    turned = torch.stack((x[..., 1::2], -x[..., ::2]), -1).flatten(-2)
    return torch.cat([o[..., :-ROTARY], (x * cos + turned * sin).to(o.dtype)], -1)


def pairs_by_formula(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = halves(positions, cache)
    a, b = o[..., -ROTARY:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)
    return torch.cat([o[..., :-ROTARY], turned.to(o.dtype)], -1)


def conjugate(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = cache.chunk(2, -1)
    turns = torch.complex(cos, sin)[positions][:, None].conj()
    x = torch.view_as_complex(o[..., -ROTARY:].float().unflatten(-1, (-1, 2)))
    return torch.cat([o[..., :-ROTARY], torch.view_as_real(x * turns).flatten(-2).to(o.dtype)], -1)


def assigned_slice(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = halves(positions, cache)
    out = o.clone()
    a, b = o[..., -ROTARY:].float().unflatten(-1, (-1, 2)).unbind(-1)
    out[..., -ROTARY:] = torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2).to(o.dtype)
    return out


def neox_by_rotate_half(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = (torch.cat((t, t), -1) for t in halves(positions, cache))
    x = o[..., -ROTARY:].float()
    turned = torch.cat((-x[..., ROTARY // 2 :], x[..., : ROTARY // 2]), -1)
    return torch.cat([o[..., :-ROTARY], (x * cos - turned * sin).to(o.dtype)], -1)


def neox_with_negated_sin(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = halves(positions, cache)
    cos, sin = torch.cat((cos, cos), -1), -torch.cat((sin, sin), -1)
    x = o[..., -ROTARY:].float()
    turned = torch.cat((-x[..., ROTARY // 2 :], x[..., : ROTARY // 2]), -1)
    return torch.cat([o[..., :-ROTARY], (x * cos + turned * sin).to(o.dtype)], -1)


def neox_by_halves(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = halves(positions, cache)
    a, b = o[..., -ROTARY:].float().chunk(2, -1)
    return torch.cat([o[..., :-ROTARY], (a * cos + b * sin).to(o.dtype), (b * cos - a * sin).to(o.dtype)], -1)


def rotary_first(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = halves(positions, cache)
    a, b = o[..., :ROTARY].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)
    return torch.cat([turned.to(o.dtype), o[..., ROTARY:]], -1)


def whole_head(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = halves(positions, cache)
    a, b = o[..., :ROTARY].float().chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1).to(o.dtype)


def table_in_own_dtype(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = halves(positions, cache.to(o.dtype))
    a, b = o[..., -ROTARY:].unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([o[..., :-ROTARY], torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)], -1)


SPELLINGS: list[Spelling] = [
    pairs_by_repeat_interleave,
    pairs_turned_the_other_way,
    pairs_by_formula,
    conjugate,
    assigned_slice,
    neox_by_rotate_half,
    neox_with_negated_sin,
    neox_by_halves,
    rotary_first,
    whole_head,
    table_in_own_dtype,
]


def compiled(function: Callable[..., Any], hits: dict[str, int], *args: Any, **options: Any) -> Any:
    """The result of the compiled function after its hits were counted."""
    dynamic = options.pop("dynamic", None)
    settings = OPTIONS | {f"rope_fusion.{name}": value for name, value in options.items()}
    assert_hits(function, args, hits, options=settings, dynamic=dynamic)
    return compile_again(function, settings, dynamic)(*args)


def compile_again(function: Callable[..., Any], settings: dict[str, Any], dynamic: bool | None) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend="rope_fusion", options=settings, dynamic=dynamic)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_hits_once_and_is_no_further_from_float64_than_eager(spelling: Spelling) -> None:
    o, positions, cache = inputs()
    got = compiled(spelling, {"inverse_rope": 1}, o, positions, cache)
    exactly = (
        spelling(o.double(), positions, cache.double())
        if spelling is not conjugate
        else pairs_by_formula(o.double(), positions, cache.double())
    )
    # `.float()` in a spelling narrows float64 inputs: eager is then fp32 throughout, which bf16 results cannot tell
    eager = spelling(o, positions, cache)
    assert (got.double() - exactly).abs().max() <= (eager.double() - exactly).abs().max()
    if spelling is not rotary_first and spelling is not whole_head:
        assert torch.equal(got[..., :-ROTARY], o[..., :-ROTARY])


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s is not conjugate])
def test_exact_numerics_give_the_bits_of_eager(spelling: Spelling) -> None:
    o, positions, cache = inputs()
    got = compiled(spelling, {"inverse_rope": 1}, o, positions, cache, numerics="exact")
    assert torch.equal(got, spelling(o, positions, cache))


@pytest.mark.parametrize(("layers", "dynamic"), [(1, True), (2, False), (8, True)])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_hits_once_in_every_layer(spelling: Spelling, layers: int, dynamic: bool) -> None:
    def stack(outputs: list[Tensor], positions: Tensor, cache: Tensor) -> list[Tensor]:
        return [spelling(o, positions, cache) for o in outputs]

    _, positions, cache = inputs()
    outputs = [inputs(seed=layer)[0] for layer in range(layers)]
    for tensor in (*outputs, positions) if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    assert_hits(stack, (outputs, positions, cache), {"inverse_rope": layers}, options=OPTIONS)


def test_a_dynamic_token_count_hits_and_compiles_once() -> None:
    o, positions, cache = inputs()
    for tensor in (o, positions):
        torch._dynamo.mark_dynamic(tensor, 0)
    assert_hits(pairs_by_repeat_interleave, (o, positions, cache), {"inverse_rope": 1}, options=OPTIONS)
    compiled_once = compile_again(pairs_by_repeat_interleave, OPTIONS, None)
    compiled_once(o, positions, cache)
    for tokens in (3, 17):
        more = inputs(tokens)
        with torch.compiler.set_stance("fail_on_recompile"):
            got = compiled_once(*more)
        assert torch.equal(got[..., :-ROTARY], more[0][..., :-ROTARY])


def test_zero_tokens_are_rotated_into_nothing() -> None:
    got = compiled(pairs_by_formula, {"inverse_rope": 1}, *inputs(0))
    assert got.shape == (0, HEADS, WIDTH)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_positions_and_of_the_tensor(index_dtype: torch.dtype, dtype: torch.dtype) -> None:
    o, positions, cache = inputs(dtype=dtype)
    got = compiled(neox_by_halves, {"inverse_rope": 1}, o, positions.to(index_dtype), cache)
    # one step of the tensor's dtype: eager rounds the same fp32 sum
    torch.testing.assert_close(got, neox_by_halves(o, positions, cache), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_four_dims_in_either_order(layout: str) -> None:
    def rotate_back(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        cos, sin = cache[positions].unsqueeze(2 if layout == "bshd" else 1).chunk(2, -1)
        a, b = o[..., -ROTARY:].float().chunk(2, -1)
        return torch.cat([o[..., :-ROTARY], (a * cos + b * sin).to(o.dtype), (b * cos - a * sin).to(o.dtype)], -1)

    o = torch.randn(2, TOKENS, HEADS, WIDTH).to(torch.bfloat16)
    o = o if layout == "bshd" else o.transpose(1, 2)
    positions = torch.randint(0, ROWS, (2, TOKENS))
    got = compiled(rotate_back, {"inverse_rope": 1}, o, positions, table())
    torch.testing.assert_close(got, rotate_back(o, positions, table()), rtol=2**-8, atol=1e-6)


def test_heads_are_grouped_for_the_projection_without_a_copy() -> None:
    def project(o: Tensor, positions: Tensor, cache: Tensor, weight: Tensor) -> Tensor:
        o = pairs_by_repeat_interleave(o, positions, cache)
        return torch.einsum("tgd,grd->tgr", o.view(o.shape[0], 2, -1), weight)

    o, positions, cache = inputs()
    weight = torch.randn(2, 5, HEADS // 2 * WIDTH).to(o.dtype)
    assert_hits(project, (o, positions, cache, weight), {"inverse_rope": 1}, options=OPTIONS)
    function = compile_again(project, OPTIONS, None)
    got, (code,) = torch._inductor.utils.run_and_get_code(function, o, positions, cache, weight)
    # bf16 sums of 64 products in another order
    torch.testing.assert_close(got, project(o, positions, cache, weight), rtol=2**-6, atol=2**-4)
    assert code.count("= empty_strided") == 1  # the projection's result; the operator's own is not made here
    assert "cpp_fused" not in code  # nothing is left to do beside the rotation and the projection


@pytest.mark.parametrize("wants_both", [False, True])
def test_static_fp8_quantisation_that_follows_is_done_by_the_same_kernel(wants_both: bool) -> None:
    def quantise(o: Tensor, positions: Tensor, cache: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        o = pairs_by_formula(o, positions, cache)
        q8 = (o.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (q8, o) if wants_both else (q8,)

    arguments = (*inputs(), torch.tensor([0.05]))
    got = compiled(quantise, {"inverse_rope_static_fp8": 1}, *arguments, numerics="exact")
    for value, wanted in zip(got, quantise(*arguments), strict=True):
        assert torch.equal(value.float(), wanted.float())


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numerics", ["fp32", "exact"])
def test_the_conversion_of_an_fp32_rotation_to_a_narrow_result_is_part_of_it(
    narrow: torch.dtype, numerics: str
) -> None:
    def rotate_and_narrow(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        return pairs_by_formula(o, positions, cache).to(narrow)

    arguments = inputs(dtype=torch.float32)
    settings = OPTIONS | {"rope_fusion.numerics": numerics}
    assert_hits(rotate_and_narrow, arguments, {"inverse_rope": 1}, options=settings)
    function = compile_again(rotate_and_narrow, settings, None)
    got, (code,) = torch._inductor.utils.run_and_get_code(function, *arguments)
    wanted = rotate_and_narrow(*arguments)
    if numerics == "exact":
        assert torch.equal(got, wanted)
    # fused products move an fp32 sum by a trifle, which can cross one rounding boundary of the narrow dtype
    torch.testing.assert_close(got, wanted, rtol=torch.finfo(narrow).eps, atol=1e-6)
    assert "cpp_fused" not in code  # the conversion is done by the operator


@pytest.mark.parametrize("numerics", ["fp32", "exact"])
def test_parts_of_an_fp32_tensor_that_are_narrowed_one_by_one_are_one_rotation(numerics: str) -> None:
    def narrow_each(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        cos, sin = halves(positions, cache)
        a, b = o[..., -ROTARY:].unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)
        return torch.cat([o[..., :-ROTARY].to(torch.bfloat16), turned.to(torch.bfloat16)], -1)

    arguments = inputs(dtype=torch.float32)
    settings = OPTIONS | {"rope_fusion.numerics": numerics}
    assert_hits(narrow_each, arguments, {"inverse_rope": 1}, options=settings)
    function = compile_again(narrow_each, settings, None)
    got, (code,) = torch._inductor.utils.run_and_get_code(function, *arguments)
    wanted = narrow_each(*arguments)
    assert torch.equal(got[..., :-ROTARY], wanted[..., :-ROTARY])
    # fused products move an fp32 sum by a trifle, which can cross one rounding boundary of bf16
    torch.testing.assert_close(
        got, wanted, rtol=0 if numerics == "exact" else 2**-7, atol=0 if numerics == "exact" else 1e-6
    )
    assert "cpp_fused" not in code  # nothing is narrowed beside the operator


def produced(rotate: Spelling, o: Tensor, positions: Tensor, cache: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A rotated matrix product, and that product as it was before."""
    made = (o @ weight).reshape(o.shape)
    return rotate(made, positions, cache), made


@pytest.mark.parametrize("spelling", [pairs_by_repeat_interleave, neox_by_halves])
@pytest.mark.parametrize("numerics", ["fp32", "exact"])
def test_an_input_that_dies_is_rotated_where_it_lies(spelling: Spelling, numerics: str) -> None:
    def alone(*arguments: Tensor) -> Tensor:
        return produced(spelling, *arguments)[0] * 2

    arguments = (*inputs(dtype=torch.float32), torch.eye(WIDTH).flip(0))
    settings = OPTIONS | {"rope_fusion.numerics": numerics}
    assert_hits(alone, arguments, {"rope_in_place": 1}, options=settings)
    function = compile_again(alone, settings, None)
    got, (code,) = torch._inductor.utils.run_and_get_code(function, *arguments)
    # fp32 rotations that round products or not, by one step of a number below 8
    torch.testing.assert_close(got, alone(*arguments), rtol=0, atol=0 if numerics == "exact" else 2**-20)
    assert "rope_fusion.rotate_." in code
    assert code.count("= empty_strided") == 2  # the product and its double: no copy for the rotation


def test_an_input_that_is_read_elsewhere_or_belongs_to_the_caller_is_not_overwritten() -> None:
    def also_read(*arguments: Tensor) -> Tensor:
        turned, before = produced(neox_by_halves, *arguments)
        return turned + before.flip(-1)

    def also_returned(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        return produced(neox_by_halves, *arguments)

    arguments = (*inputs(), torch.eye(WIDTH).to(torch.bfloat16))
    for function in (also_read, also_returned):
        got = compiled(function, {"inverse_rope": 1}, *arguments, numerics="exact")
        assert all(map(torch.equal, got, function(*arguments)))
    before = arguments[0].clone()
    compiled(neox_by_halves, {"inverse_rope": 1}, *arguments[:3])
    assert torch.equal(arguments[0], before)


def test_a_package_compiled_ahead_of_time_gives_the_same(tmp_path: Path) -> None:
    """Arguments with their default values were missing in it, and it failed when it was run."""

    class Module(torch.nn.Module):
        def forward(self, o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
            return neox_by_halves(o, positions, cache)

    arguments = inputs()
    with rope_fusion.record() as report:
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(Module(), arguments),
            package_path=str(tmp_path / "rotation.pt2"),
            inductor_configs=rope_fusion.inductor_options(kernels="reference", numerics="exact"),
        )
    assert report.hits == {"inverse_rope": 1}
    assert torch.equal(torch._inductor.aoti_load_package(package)(*arguments), neox_by_halves(*arguments))


def test_bits_seen_as_another_dtype_are_not_rotated_in_place() -> None:
    """Inductor writes to no view of bits; that failed to compile."""

    def bits(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        return neox_by_halves((o + 1).view(torch.float16), positions, cache)

    arguments = inputs()
    assert torch.equal(compiled(bits, {"inverse_rope": 1}, *arguments, numerics="exact"), bits(*arguments))


def test_a_forward_rotation_of_part_of_the_head_is_partial_rope() -> None:
    def forward(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        cos, sin = halves(positions, cache)
        a, b = o[..., :ROTARY].float().chunk(2, -1)
        return torch.cat([(a * cos - b * sin).to(o.dtype), (b * cos + a * sin).to(o.dtype), o[..., ROTARY:]], -1)

    o, positions, cache = inputs()
    got = compiled(forward, {"partial_rope": 1}, o, positions, cache)
    torch.testing.assert_close(got, forward(o, positions, cache), rtol=2**-8, atol=1e-6)


def test_a_forward_rotation_of_the_whole_head_is_left_to_inductor_which_is_said() -> None:
    def forward(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        cos, sin = halves(positions, cache)
        a, b = o.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(o.dtype)

    o, positions, cache = inputs()
    report = assert_hits(forward, (o[..., :ROTARY], positions, cache), {}, options=OPTIONS)
    assert "the whole head is rotated" in report.table()


def test_copies_too_small_to_pay_stay_with_inductor_on_a_gpu_alone() -> None:
    small, large = (torch.empty(1, 1, heads, 512, device="meta") for heads in (16, 32))
    assert "8192 elements" in (too_small(small, None) or "")
    assert too_small(large, small) == too_small(small)
    assert too_small(large, None) is None
    assert too_small(large, fewest=FEWEST_QUANTISED) == (
        "it rotates 16384 elements, and below 32768 Inductor's own kernel is as fast"
    )
    assert too_small(torch.empty(1, 1, 1, 8)) is None  # on a CPU only the reference runs, on demand


def transposed_table(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = (t[:, positions].t()[:, None] for t in cache.t().contiguous().chunk(2, 0))
    a, b = o[..., -ROTARY:].float().chunk(2, -1)
    return torch.cat([o[..., :-ROTARY], (a * cos + b * sin).to(o.dtype), (b * cos - a * sin).to(o.dtype)], -1)


def test_a_table_stored_by_columns_is_refused_with_a_sentence_because_a_copy_of_it_would_not_pay() -> None:
    o, positions, cache = inputs()
    with rope_fusion.record() as report:
        got = compile_again(transposed_table, OPTIONS, None)(o, positions, cache)
    assert report.hits == {}
    assert "the columns of cos and sin are not contiguous" in report.table()
    want = transposed_table(o, positions, cache)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)  # one bf16 step


def test_another_use_of_the_untouched_clone_keeps_its_value() -> None:
    def both(o: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        kept = o.clone()
        return pairs_by_formula(kept, positions, cache), kept.exp()

    o, positions, cache = inputs()
    _, kept = compiled(both, {"inverse_rope": 1}, o, positions, cache)
    torch.testing.assert_close(kept, o.exp())


def one_half_flipped(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = halves(positions, cache)
    a, b = o[..., -ROTARY:].float().chunk(2, -1)
    return torch.cat([o[..., :-ROTARY], (a * cos + b * sin).to(o.dtype), (b * cos + a * sin).to(o.dtype)], -1)


def cos_of_other_rows(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, _ = halves((positions + 1) % ROWS, cache)
    _, sin = halves(positions, cache)
    a, b = o[..., -ROTARY:].float().chunk(2, -1)
    return torch.cat([o[..., :-ROTARY], (a * cos + b * sin).to(o.dtype), (b * cos - a * sin).to(o.dtype)], -1)


def odd_rotary_dim(o: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = (t[..., :1] for t in halves(positions, cache))
    a, b, rest = o[..., -3:].float().unbind(-1)
    turned = torch.stack((a * cos[..., 0] + b * sin[..., 0], b * cos[..., 0] - a * sin[..., 0], rest * cos[..., 0]), -1)
    return torch.cat([o[..., :-3], turned.to(o.dtype)], -1)


@pytest.mark.parametrize("control", [one_half_flipped, odd_rotary_dim])
def test_what_is_no_rotation_does_not_match_and_keeps_its_value(control: Spelling) -> None:
    o, positions, cache = inputs()
    got = compiled(control, {}, o, positions, cache)
    torch.testing.assert_close(got, control(o, positions, cache), rtol=2**-7, atol=1e-6)


def test_cos_and_sin_of_different_rows_keep_their_rows() -> None:
    o, positions, cache = inputs()
    settings = OPTIONS | {"rope_fusion.numerics": "exact"}
    got = compile_again(cos_of_other_rows, settings, None)(o, positions, cache)
    assert torch.equal(got, cos_of_other_rows(o, positions, cache))
