"""Layouts of engines' caches: columns of a row, and a head dim in two parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from rope_fusion.kernels.cache_layout import parse_layout
from rope_fusion.kernels.rope_qkv import store_reference

SLOTS = torch.tensor([7, -1, 2, 0])
HEADS, DIM, BLOCKS, PAGE = 2, 8, 3, 4

LAYOUTS = {
    "n h p d[0:8]": ((BLOCKS, HEADS, PAGE, 2 * DIM), lambda cache: cache[..., :DIM].transpose(1, 2)),
    "n h p d[8:16]": ((BLOCKS, HEADS, PAGE, 2 * DIM), lambda cache: cache[..., DIM:].transpose(1, 2)),
    "n h d p": ((BLOCKS, HEADS, DIM, PAGE), lambda cache: cache.permute(0, 3, 1, 2)),
    "n h d/ p /d": ((BLOCKS, HEADS, DIM // 4, PAGE, 4), lambda cache: cache.permute(0, 3, 1, 2, 4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_stored_where_the_layout_says(layout):
    shape, rows_of = LAYOUTS[layout]
    cache, value = torch.zeros(shape), torch.randn(1, len(SLOTS), HEADS, DIM)
    store_reference(cache, layout, value, SLOTS, None, skip_negative_slots=True)
    rows = rows_of(cache).reshape(BLOCKS * PAGE, HEADS, DIM)
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            assert torch.equal(rows[slot], value[0, token])
    assert cache.count_nonzero() == 3 * HEADS * DIM


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "/" not in layout])
def test_geometry_and_view_name_the_same_elements(layout):
    shape, _ = LAYOUTS[layout]
    cache = torch.arange(torch.Size(shape).numel()).view(shape)
    g = parse_layout(layout).geometry(shape, cache.stride(), HEADS)
    sizes, strides = (g.blocks, g.places, g.heads, g.dim), (g.block_stride, g.place_stride, g.head_stride, g.dim_stride)
    assert torch.equal(parse_layout(layout).view(cache, HEADS), cache.as_strided(sizes, strides, g.offset))


def test_head_dim_in_two_parts_has_no_stride():
    shape, _ = LAYOUTS["n h d/ p /d"]
    geometry = parse_layout("n h d/ p /d").geometry(shape, torch.zeros(shape).stride(), HEADS)
    assert (geometry.dim, geometry.dim_stride) == (DIM, 0)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("n h d/ p", "d/ and /d go together"),
        ("n h p /d", "d/ and /d go together"),
        ("n p d[0:4] d", "names a dim twice"),
        ("n p d[0:4", "holds 'd[0:4'"),
    ],
)
def test_malformed_layouts_are_refused_with_a_sentence(layout, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_layout(layout)


# The kernel, in Triton's interpreter, which is chosen when Triton is imported: in a process of its own.

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's own process")
def test_kernel_writes_columns_of_a_row_in_the_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
def test_interpreted_kernel_agrees_with_the_reference(monkeypatch):
    from interpreter import exact_arithmetic

    from rope_fusion.kernels.rope_qkv import encoded, reference
    from rope_fusion.kernels.rope_qkv_triton import LaunchParameters, launch
    from rope_fusion.kernels.variants import plain_options

    exact_arithmetic(monkeypatch)
    q, k, v = (torch.randn(1, len(SLOTS), heads, DIM) for heads in (4, HEADS, HEADS))
    cos, sin = torch.randn(5, DIM // 2), torch.randn(5, DIM // 2)
    options = plain_options(DIM, k_layout="n h p d[0:8]", v_layout="n h p d[8:16]")

    def stored(run: str) -> tuple[Tensor, Tensor]:
        cache = torch.zeros(BLOCKS, HEADS, PAGE, 2 * DIM)
        args = (q, k, v, cos, sin, torch.tensor([0, 4, 2, 1]), cache, None, SLOTS, None, None, None, None)
        if run == "reference":
            q_rot, _, _ = reference(*args, **options, need_q=True, need_k=False)
        else:
            tile = LaunchParameters(4, 2, 2, 1, 2, warps=1)
            q_rot, _, _ = launch(*args, options=encoded(**options), need_q=True, need_k=False, parameters=tile)
        return q_rot, cache

    for ours, theirs in zip(stored("kernel"), stored("reference"), strict=True):
        torch.testing.assert_close(ours, theirs)
