"""The rotation kernel under Triton's interpreter, on the CPU, against the reference.

The interpreter is chosen when Triton is imported, so the tests run in a process of their own: collected normally, this
file holds one test that runs it again with TRITON_INTERPRET=1.

The interpreter narrows floats by a routine of its own that is not rounding to nearest; the fixture puts torch's
conversions in its place, so that every comparison is of bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from interpreter import exact_arithmetic
from torch import Tensor

from rope_fusion.kernels.rope_qkv import quantise_reference
from rope_fusion.kernels.rotate import GroupFp8, Rotary, StaticFp8, arranged, group_quantized, rotated

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")

PAIRINGS = [(False, False), (True, False), (True, True)]


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's own process")
def test_kernel_agrees_with_the_reference_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(autouse=True)
def gpu_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        exact_arithmetic(monkeypatch)


def rotary(**changes: Any) -> Rotary:
    base: dict[str, Any] = {
        "interleaved": False,
        "inverse": True,
        "halves_out": False,
        "rotary_dim": 8,
        "rotary_start": 16,
        "math_dtype": torch.float32,
        "exact": False,
    }
    return Rotary(**(base | changes))


def operands(
    shape: tuple[int, int, int, int], columns: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(dtype)
    angle = torch.rand(19, columns, generator=generator) * 6
    return x, angle.cos(), angle.sin(), torch.randint(0, 19, shape[:2], generator=generator)


def run(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, how: Rotary, out: Tensor, **options: Any
) -> Tensor:
    """Launch with a small tile, so that several tokens and several head blocks occur in small tensors."""
    from rope_fusion.kernels.rotate_triton import Launch, launch

    launch(
        x, cos, sin, positions, how, out, shape=Launch(max_elements=0, tile=options.pop("tile", 64), warps=1), **options
    )
    return out


def poisoned(shape: Any, dtype: torch.dtype) -> Tensor:
    """A tensor in which an element that nothing wrote stands out."""
    return torch.full(tuple(shape), float("nan")).to(dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("interleaved", "halves_out"), PAIRINGS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("shape", "start", "dim"),
    [((1, 5, 3, 24), 16, 8), ((3, 1, 4, 16), 0, 16), ((2, 3, 2, 48), 6, 20)],
    ids=["end", "whole", "middle"],
)
def test_every_pairing_place_and_width_is_bit_equal(
    dtype: torch.dtype,
    exact: bool,
    interleaved: bool,
    halves_out: bool,
    full: bool,
    shape: tuple[int, int, int, int],
    start: int,
    dim: int,
) -> None:
    x, cos, sin, positions = operands(shape, dim if full else dim // 2, dtype)
    how = rotary(
        interleaved=interleaved,
        halves_out=halves_out,
        inverse=exact != full,
        rotary_start=start,
        rotary_dim=dim,
        exact=exact,
        math_dtype=dtype,
    )
    wanted = rotated(x, cos, sin, positions, how, dtype)
    assert torch.equal(run(x, cos, sin, positions, how, poisoned(shape, dtype)), wanted)
    in_place = x.clone()
    assert torch.equal(run(in_place, cos, sin, positions, how, in_place), wanted)


@interpreted
@pytest.mark.parametrize("tile", [8, 64, 256, 4096])
def test_every_program_shape_covers_every_token_and_head(tile: int) -> None:
    x, cos, sin, positions = operands((1, 7, 5, 24), 4)
    how = rotary()
    got = run(x, cos, sin, positions, how, poisoned(x.shape, x.dtype), tile=tile)
    assert torch.equal(got, rotated(x, cos, sin, positions, how, x.dtype))


@interpreted
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("positions_shape", [(2, 3), (1, 3), (3,), None])
@pytest.mark.parametrize("rows_shape", [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_positions_and_rows_broadcast_over_the_batch(
    index_dtype: torch.dtype, positions_shape: tuple[int, ...] | None, rows_shape: tuple[int, int]
) -> None:
    x, cos, sin, _ = operands((2, 3, 2, 24), 4)
    how = rotary()
    if positions_shape is None:
        count = rows_shape[0] * rows_shape[1]
        cos, sin, positions = cos[:count].view(*rows_shape, 4), sin[:count].view(*rows_shape, 4), None
    else:
        positions = torch.arange(torch.Size(positions_shape).numel(), dtype=index_dtype).view(positions_shape) * 3
    got = run(x, cos, sin, positions, how, poisoned(x.shape, x.dtype))
    assert torch.equal(got, rotated(x, cos, sin, positions, how, x.dtype))


@interpreted
@pytest.mark.parametrize("shape", [(2, 3, 4, 24), (5, 1, 4, 24), (1, 5, 4, 24)])
def test_strided_x_tables_and_positions_are_read_where_they_lie(shape: tuple[int, int, int, int]) -> None:
    x, cos, sin, positions = operands(shape, 4)
    batch, sequence, heads, dim = shape
    packed = torch.full((batch, heads, sequence, dim + 5), float("nan"))
    view = packed[..., 5:].transpose(1, 2)
    view.copy_(x)
    joined = torch.cat((cos, sin, cos), 1)
    wide_positions = torch.full((batch, 2 * sequence), 10**6)
    wide_positions[:, ::2] = positions
    how = rotary(interleaved=True)
    got = run(view, joined[:, :4], joined[:, 4:8], wide_positions[:, ::2], how, poisoned(shape, x.dtype))
    assert torch.equal(got, rotated(x, cos, sin, positions, how, x.dtype))


@interpreted
@pytest.mark.parametrize(
    ("layout", "groups"), [("b h s d", 1), ("g b s h d", 2), ("b g s h d", 4), ("b s g h d", 2), ("s b h d", 1)]
)
@pytest.mark.parametrize("shape", [(2, 3, 4, 24), (1, 5, 4, 24), (5, 1, 4, 24)])
def test_output_layouts(layout: str, groups: int, shape: tuple[int, int, int, int]) -> None:
    x, cos, sin, positions = operands(shape, 4)
    how = rotary()
    wanted = arranged(rotated(x, cos, sin, positions, how, x.dtype), layout, groups)
    got = run(x, cos, sin, positions, how, poisoned(wanted.shape, x.dtype), layout=layout, groups=groups)
    assert torch.equal(got, wanted)


@interpreted
def test_pass_through_bits_are_kept_even_of_nan_infinity_and_negative_zero() -> None:
    x, cos, sin, positions = operands((1, 5, 3, 24), 4, torch.bfloat16)
    x[..., 0], x[..., 1], x[..., 2] = float("inf"), -0.0, float("nan")
    x.view(torch.int16)[..., 3] = x.view(torch.int16)[..., 2] + 1
    for interleaved in (False, True):
        got = run(x, cos, sin, positions, rotary(interleaved=interleaved), poisoned(x.shape, x.dtype))
        assert torch.equal(got.view(torch.int16)[..., :16], x.view(torch.int16)[..., :16])


@interpreted
@pytest.mark.parametrize(("source", "target"), [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_output_dtype_differs_from_the_input_dtype(source: torch.dtype, target: torch.dtype) -> None:
    x, cos, sin, positions = operands((1, 5, 3, 24), 4, source)
    how = rotary(interleaved=True)
    got = run(x, cos, sin, positions, how, poisoned(x.shape, target))
    assert torch.equal(got, rotated(x, cos, sin, positions, how, target))


def same_bytes(got: Tensor, wanted: Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8))


@interpreted
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize(("interleaved", "halves_out"), PAIRINGS)
def test_static_fp8(fp8: torch.dtype, as_tensor: bool, multiplies: bool, interleaved: bool, halves_out: bool) -> None:
    x, cos, sin, positions = operands((1, 5, 3, 24), 4, torch.float16)
    x[0, 0, 0, 0], x[0, 0, 1, 0] = 6e4, -6e4  # beyond ±448: clamped
    how = rotary(interleaved=interleaved, halves_out=halves_out)
    quant = StaticFp8(fp8, torch.tensor([0.5]) if as_tensor else None, 0.5, multiplies)
    value = rotated(x, cos, sin, positions, how, x.dtype)
    wanted = quantise_reference(value, 0.5, fp8, multiply=multiplies)
    got = run(x, cos, sin, positions, how, poisoned(x.shape, fp8), rounded=x.dtype, quant=quant)
    assert same_bytes(got, wanted)


@interpreted
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("layout", "groups"), [("b s h d", 1), ("g b s h d", 2)])
@pytest.mark.parametrize("dim", [32, 24])
def test_group_fp8(power_of_two: bool, interleaved: bool, layout: str, groups: int, dim: int) -> None:
    x, cos, sin, positions = operands((1, 5, 4, dim), 4, torch.float16)
    x[0, 0, 0, :8] = 0  # a group of zeros takes its scale from min_amax
    how = rotary(interleaved=interleaved)
    quant = GroupFp8(torch.float8_e4m3fn, 8, 1e-4, power_of_two)
    wanted, wanted_scales = (
        arranged(t, layout, groups) for t in group_quantized(rotated(x, cos, sin, positions, how, x.dtype), quant)
    )
    scales = poisoned(wanted_scales.shape, torch.float32)
    got = poisoned(wanted.shape, quant.dtype)
    run(x, cos, sin, positions, how, got, layout=layout, groups=groups, rounded=x.dtype, quant=quant, scales=scales)
    assert torch.equal(scales, wanted_scales)
    assert same_bytes(got, wanted)


@interpreted
def test_group_fp8_carries_a_nan_into_its_scale_as_eager_does() -> None:
    x, cos, sin, positions = operands((1, 2, 2, 24), 4, torch.float16)
    x[0, 1, 1, 3] = float("nan")
    how, quant = rotary(), GroupFp8(torch.float8_e4m3fn, 8, 1e-4, False)
    scales = torch.zeros(1, 2, 2, 3)
    run(x, cos, sin, positions, how, poisoned(x.shape, quant.dtype), rounded=x.dtype, quant=quant, scales=scales)
    assert torch.equal(scales.isnan(), group_quantized(x, quant)[1].isnan())


@interpreted
def test_positions_wrap_when_negative_and_read_nan_outside_of_the_table() -> None:
    x, cos, sin, _ = operands((1, 4, 2, 24), 4)
    how = rotary()
    positions = torch.tensor([[-1, 18, 19, 10**9]])
    got = run(x, cos, sin, positions, how, poisoned(x.shape, x.dtype))
    assert torch.equal(got[:, :2], rotated(x[:, :2], cos, sin, positions[:, :2], how, x.dtype))
    assert got[:, 2:, :, 16:].isnan().all()
    assert torch.equal(got[..., :16], x[..., :16])


@interpreted
def test_zero_tokens_launch_nothing() -> None:
    _, cos, sin, _ = operands((1, 1, 1, 24), 4)
    empty = torch.empty(1, 0, 3, 24)
    assert run(empty, cos, sin, torch.empty(0, dtype=torch.int64), rotary(), empty.clone()).shape == empty.shape
