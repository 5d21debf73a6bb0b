"""Roles of dims, and view chains as rearrangements of whole dims."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from rope_fusion.canonical.layout import atoms_of, regroup, rotary_roles, through_view

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("x", "cos", "roles"),
    [
        ((7, 4, 16), (7, 1, 8), "shd"),
        ((4, 7, 16), (7, 8), "hsd"),
        ((2, 7, 16), (2, 7, 8), "bsd"),
        ((7, 16), (7, 8), "sd"),
        ((2, 4, 7, 16), (2, 1, 7, 8), "bhsd"),
        ((2, 7, 4, 16), (2, 7, 1, 8), "bshd"),
        ((2, 4, 7, 16), (7, 8), "bhsd"),
        ((2, 7, 4, 16), (7, 1, 8), "bshd"),
        ((2, 4, 1, 16), (2, 1, 1, 8), "bhsd"),  # one token: the dim of size 1 is the sequence
        ((2, 1, 4, 16), (2, 1, 1, 8), "bshd"),
        ((2, 4, 7, 16), (2, 4, 7, 8), None),  # cos differs by head
        ((2, 2, 4, 7, 16), (7, 8), None),
    ],
)
def test_roles_are_read_off_the_broadcast_dims(x, cos, roles):
    assert rotary_roles(x, cos, cos) == roles


def test_regroup_merges_and_splits_whole_dims_and_drops_ones():
    dims = atoms_of((2, 1, 3, 4), "bshd")
    merged = regroup(dims, (2, 12))
    assert merged is not None
    assert [[atom.name for atom in dim] for dim in merged] == [["b"], ["h", "d"]]
    split = regroup(merged, (1, 2, 3, 4))
    assert split is not None
    assert [[atom.name for atom in dim] for dim in split] == [[], ["b"], ["h"], ["d"]]


def test_regroup_refuses_to_cut_a_dim():
    assert regroup(atoms_of((6, 4), "sd"), (3, 8)) is None


def test_a_chain_of_views_is_followed_and_arithmetic_is_not():
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3, 5, 4)
    permuted = graph.call_function(aten.permute.default, (x, [0, 2, 1, 3]))
    permuted.meta["val"] = torch.empty(2, 5, 3, 4)
    flat = graph.call_function(aten.reshape.default, (permuted, [10, 12]))
    flat.meta["val"] = torch.empty(10, 12)
    doubled = graph.call_function(aten.mul.Tensor, (flat, 2))
    doubled.meta["val"] = torch.empty(10, 12)
    before = through_view(permuted, atoms_of((2, 3, 5, 4), "bhsd"))
    assert before is not None
    dims = through_view(flat, before)
    assert dims is not None
    assert [[atom.name for atom in dim] for dim in dims] == [["b", "s"], ["h", "d"]]
    assert through_view(doubled, dims) is None
