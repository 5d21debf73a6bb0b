"""`rope_fusion.check_bounds`, and what the reference does with indices that point nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blocks import GptOssAttention, cos_sin_table
from torch import Tensor
from trust.differential import capture_call, check_captured, rewrite
from trust.programs import BLOCKS, PAGE

from rope_fusion.kernels import rope_qkv  # noqa: F401  (registers the operator)
from rope_fusion.kernels.rope_qkv import store_reference
from rope_fusion.options import Options

CHECKED = Options(kernels="reference", strict=True, check_bounds=True)


def arguments(positions: list[int], slots: list[int]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(len(positions), 64, dtype=torch.bfloat16)
    return x, cos_sin_table(32, 16), torch.tensor(positions), torch.tensor(slots)


@pytest.fixture(scope="module")
def checked() -> Any:
    """A fused block with checks, interpreted; it takes positions and slots."""
    torch.manual_seed(1)
    model = GptOssAttention().eval()  # 8 blocks of 4 places
    (call,) = capture_call(model, *arguments([0, 1, 2], [0, 1, 2]))
    made, report = rewrite(call.graph, CHECKED)
    assert report.hits

    def run(positions: list[int], slots: list[int]) -> Any:
        values = iter((torch.tensor(positions), torch.tensor(slots)))
        given = [next(values) if a.dtype == torch.int64 else a for a in call.copy_arguments()]
        return torch.fx.Interpreter(made).run(*given)

    run.call = call  # type: ignore[attr-defined]
    return run


def test_checked_graph_computes_the_same(checked: Any) -> None:
    check_captured([checked.call], CHECKED)


@pytest.mark.parametrize("position", [32, 1 << 40, -1])
def test_a_position_outside_the_table_is_an_error_that_names_it(checked: Any, position: int) -> None:
    with pytest.raises(IndexError, match=rf"positions of .* \[1\] is {position}, which lies outside \[0, 32\)"):
        checked([3, position, 4], [0, 1, 2])


@pytest.mark.parametrize("slot", [32, 1 << 40, -33])
def test_a_slot_outside_the_cache_is_an_error_that_names_it(checked: Any, slot: int) -> None:
    with pytest.raises(IndexError, match=rf"slots of .* \[2\] is {slot}, which lies outside \[-32, 32\)"):
        checked([3, 4, 5], [0, 1, slot])


def test_the_last_rows_and_wrapped_slots_are_inside(checked: Any) -> None:
    checked([31, 0, 31], [31, -32, -1])


LAYOUTS = {
    "n p h d": (BLOCKS, PAGE, 2, 4),
    "n h p d": (BLOCKS, 2, PAGE, 4),
    "1 n p h d": (2, BLOCKS, PAGE, 2, 4),
    "n 0 p h d": (BLOCKS, 2, PAGE, 2, 4),
    "p h d": (BLOCKS * PAGE, 2, 4),
    "p (hd)": (BLOCKS * PAGE, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("slot", [BLOCKS * PAGE, BLOCKS * PAGE + 7, 1 << 40, -BLOCKS * PAGE - 1, -(1 << 40)])
def test_the_reference_never_writes_outside_the_cache(layout: str, skip: bool, slot: int) -> None:
    """The cache lies between two guards in one storage; they stay as they are."""
    shape = LAYOUTS[layout]
    size = torch.Size(shape).numel()
    storage = torch.full((3 * size,), 7.0)
    cache = storage[size : 2 * size].view(shape)
    cache.zero_()
    value = torch.ones(1, 2, 2, 4)
    try:
        store_reference(cache, layout, value, torch.tensor([1, slot]), None, skip_negative_slots=skip)
    except IndexError:
        assert not (skip and slot < 0), "a negative slot is padding here"
    assert bool((storage[:size] == 7).all())
    assert bool((storage[2 * size :] == 7).all())
    if skip and slot < 0:
        assert int(cache.sum()) == 8  # the other token alone
