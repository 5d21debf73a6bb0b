"""Which dimension of a tensor is the batch, the sequence, the heads; and when two view chains reach the same layout.

Canonical activations are `[batch, sequence, heads, dim]`. A *role string* names the dims of a program's tensor in its own
order, e.g. ``"bhsd"`` (Hugging Face), ``"shd"`` (packed tokens), ``"bsd"`` (no heads).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
prims = torch.ops.prims

CANONICAL_ROLES = "bshd"


def equal(first: Any, second: Any) -> bool:
    """Whether two sizes are equal for every input that the guards let through."""
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    return statically_known_true(first == second)


def is_one(size: Any) -> bool:
    return equal(size, 1)


def rotary_roles(x_shape: Sequence[Any], cos_shape: Sequence[Any], sin_shape: Sequence[Any]) -> str | None:
    """Role string of a rotated tensor, read off the dims over which cos and sin are broadcast.

    Where both candidate dims are broadcast (one token, say) either reading gives the same values, so one is chosen.
    None when cos or sin differ by head, or the tensor has more than four dims.
    """
    rank = len(x_shape)
    varies = [
        any(
            _size_at(shape, dim, rank) is not None and not is_one(_size_at(shape, dim, rank))
            for shape in (cos_shape, sin_shape)
        )
        for dim in range(rank - 1)
    ]
    if rank == 2:
        return "sd"
    if rank == 3:
        if all(varies):
            return "bsd"
        if varies[0]:
            return "shd"
        if varies[1]:
            return "hsd"
        return "hsd" if is_one(x_shape[1]) and not is_one(x_shape[0]) else "shd"
    if rank == 4:
        if varies[1] and varies[2]:
            return None
        if varies[1]:
            return "bshd"
        if varies[2]:
            return "bhsd"
        return "bshd" if is_one(x_shape[1]) and not is_one(x_shape[2]) else "bhsd"
    return None


def _size_at(shape: Sequence[Any], dim: int, rank: int) -> Any:
    """Size of `shape` at `dim` of the rank it is broadcast to; None where it has no such dim."""
    index = dim - (rank - len(shape))
    return shape[index] if index >= 0 else None


@dataclass(frozen=True)
class Atom:
    """An indivisible run of elements; a dim is a sequence of them, size-1 dims are empty."""

    size: Any
    name: object


Dims = tuple[tuple[Atom, ...], ...]


def atoms_of(shape: Sequence[Any], names: Sequence[object]) -> Dims:
    """One atom per dim of size other than one."""
    return tuple(() if is_one(size) else (Atom(size, name),) for size, name in zip(shape, names, strict=True))


def regroup(dims: Dims, shape: Sequence[Any]) -> Dims | None:
    """The dims of a reshape to `shape`, or None when an atom would be cut."""
    pending = [atom for dim in dims for atom in dim]
    grouped: list[tuple[Atom, ...]] = []
    for size in shape:
        if is_one(size):
            grouped.append(())
            continue
        taken: list[Atom] = []
        product: Any = 1
        while pending and not (taken and equal(product, size)):
            taken.append(pending.pop(0))
            product = math.prod(atom.size for atom in taken)
        if not equal(product, size):
            return None
        grouped.append(tuple(taken))
    return None if pending else tuple(grouped)


def through_view(node: Node, dims: Dims) -> Dims | None:
    """The dims of `node`, a view of a tensor of dims `dims`; None where the node is no pure rearrangement."""
    if node.op != "call_function":
        return None
    shape = node.meta["val"].shape
    target = node.target
    if target in (aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return regroup(dims, shape)
    if target is aten.permute.default:
        return tuple(dims[d] for d in node.args[1])  # type: ignore[union-attr, index]
    if target is aten.transpose.int:
        order = list(range(len(dims)))
        first, second = node.args[1], node.args[2]
        order[first], order[second] = order[second], order[first]  # type: ignore[index]
        return tuple(dims[d] for d in order)
    if target is aten.unsqueeze.default:
        at: Any = node.args[1] % (len(dims) + 1)  # type: ignore[operator]
        return (*dims[:at], (), *dims[at:])
    if target in (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default):
        return regroup(dims, shape)
    if target in (aten.clone.default, aten.alias.default, aten.contiguous.default):
        return dims
    return None


VIEW_TARGETS = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.clone.default,
        aten.alias.default,
        aten.contiguous.default,
    }
)


def view_path(start: Node, end: Node, through: frozenset[Any] = VIEW_TARGETS, limit: int = 16) -> list[Node] | None:
    """The nodes after `start` up to and including `end`, when `end` is reached by `through` targets alone."""
    path: list[Node] = []
    node = end
    while node is not start:
        if len(path) == limit or node.op != "call_function" or node.target not in through:
            return None
        path.append(node)
        source = node.args[0]
        if not isinstance(source, Node):
            return None
        node = source
    return path[::-1]
