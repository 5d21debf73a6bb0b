"""The kernel of the fused operator under Triton's interpreter, on the CPU, bit for bit against the reference.

The interpreter is chosen when Triton is imported, so the tests run in a process of their own: collected normally, this
file holds one test that runs it again with TRITON_INTERPRET=1.
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

from rope_fusion.kernels.rope_qkv import reference
from rope_fusion.kernels.variants import FP32, PreparedCall, covering, describe, make_call, plain_options

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
VARIANTS = covering()


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


SMALL = (4, 2, 2, 1, 2)  # tokens, heads and steps of q, of k and v: several and partly filled programs and steps


def launched(call: PreparedCall, tile: tuple[int, int, int, int, int] = SMALL) -> Any:
    from rope_fusion.kernels.rope_qkv_triton import LaunchParameters, launch

    return launch(*call.args, **call.encoded, parameters=LaunchParameters(*tile, warps=1))


def as_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else x


def assert_same_bits(got: Any, want: Any) -> None:
    for name, g, w in zip(("q", "k", "q_fp8", "k_cache", "v_cache"), got, want, strict=False):
        assert g.stride() == w.stride(), name
        assert g.dtype == w.dtype, name
        assert torch.equal(as_bits(g), as_bits(w)), name


@interpreted
@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=lambda i: describe(VARIANTS[i]))
def test_every_variant_gives_the_reference_bits(index: int) -> None:
    call = make_call(VARIANTS[index], seed=index)
    eager, kernel = call.with_own_caches(), call.with_own_caches()
    want = reference(*eager.args, **eager.options)
    got = launched(kernel)
    assert_same_bits((*got, *kernel.caches), (*want, *eager.caches))


@interpreted
@pytest.mark.parametrize("tile", [(1, 1, 1, 1, 1), (16, 8, 1, 4, 1), (8, 2, 4, 4, 3)])
def test_tile_sizes_do_not_change_the_result(tile: tuple[int, int, int, int, int]) -> None:
    call = make_call(next(v for v in VARIANTS if v.writes == "kv" and v.batch_seq == (2, 5)))
    eager, kernel = call.with_own_caches(), call.with_own_caches()
    want = reference(*eager.args, **eager.options)
    got = launched(kernel, tile)
    assert_same_bits((*got, *kernel.caches), (*want, *eager.caches))


@interpreted
def test_no_tokens_launch_nothing() -> None:
    call = make_call(next(v for v in VARIANTS if v.batch_seq == (1, 7) and v.writes == "nothing" and v.needs[0]))
    call.args = [None if t is None else t[:, :0] if i < 3 else t for i, t in enumerate(call.args)]
    q_rot, _, _ = launched(call)
    assert q_rot.shape[1] == 0


@interpreted
def test_slots_and_positions_outside_their_tensors_touch_no_foreign_memory() -> None:
    q = torch.randn(1, 3, 2, 8)
    cos, sin = torch.randn(5, 4), torch.randn(5, 4)
    positions, slots = torch.tensor([5, 2, 4]), torch.tensor([1, 12, 7])  # the table ends at 4, the cache at 11
    guarded = torch.zeros(6, 4, 2, 8)
    options = {**make_call(VARIANTS[0]).options, "rotary_dim": 8, "rotary_start": 0, "q_fp8": None}
    options |= {"kv_fp8": None, "out_dtype": FP32}
    options |= {"k_layout": "n p h d", "skip_negative_slots": True, "need_q": True}
    args = [q, q, None, cos, sin, positions, guarded[:3], None, slots, *[None] * 4]
    q_rot, _, _ = launched(PreparedCall(args, options))
    assert q_rot[0, 0].isnan().all()
    assert not q_rot[0, 1:].isnan().any()
    assert guarded[3:].count_nonzero() == 0
    assert torch.equal(guarded[1, 3], q_rot[0, 2])


@interpreted
@pytest.mark.parametrize("scale", [1.0, 0.05, 49.0, 3.1e-5])
def test_quotients_by_the_reciprocal_clamp_and_keep_nan(scale: float) -> None:
    q = torch.tensor([0.0, -0.0, 1.0, -3.0, 3e38, -3e38, float("inf"), float("nan")]).view(1, 1, 1, 8)
    cos, sin = torch.ones(1, 1, 4), torch.zeros(1, 1, 4)
    call = make_call(VARIANTS[0])
    args: list[Any] = [q[..., [0, 1, 2, 3, 4, 5, 0, 0]], None, None, cos, sin, *[None] * 8]
    options = {**call.options, "rotary_dim": 8, "rotary_start": 0, "interleaved": False, "halves_out": False}
    options |= {"q_fp8": torch.float8_e4m3fn, "kv_fp8": None, "q_scale_value": scale, "q_scale_multiplies": False}
    options |= {"exact": False, "math_dtype": FP32, "out_dtype": FP32}
    for x in (args[0], q):
        args[0] = x
        want = reference(*args, **options)[2]
        got = launched(PreparedCall(args, options))[2]
        assert torch.equal(as_bits(got), as_bits(want))


@pytest.mark.parametrize("q_fp8", [None, torch.float8_e4m3fn])
def test_kernels_for_other_outputs_are_compiled_apart(q_fp8: torch.dtype | None) -> None:
    """A pointer that is None is compiled away: whatever else calls share, their kernels are kept under keys of their own."""
    from rope_fusion.kernels.rope_qkv import Target, encoded
    from rope_fusion.kernels.rope_qkv_triton import plan_of

    options = encoded(**plain_options(16, q_fp8=q_fp8, out_dtype=torch.bfloat16))

    def layout(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        x = torch.empty(shape, dtype=dtype, device="meta")
        return x.shape, x.stride(), x.dtype

    head = layout(1, 6, 2, 16)
    index, cache, table = layout(6, dtype=torch.int64), layout(5, 4, 2, 16), layout(32, 8)
    tensors = (head, head, head, table, table, index, cache, cache, index, None, None, None, None)
    plans = [
        plan_of(options, need_q, need_k, None, Target("cuda", 90), *tensors)
        for need_q in (True, False)
        for need_k in (True, False)
    ]
    assert len({(id(plan.variant), plan.signature) for plan in plans}) == len(plans)
