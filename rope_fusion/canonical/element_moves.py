"""Follows elements backwards through operators that only move them: where in its input does each element come from?"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import torch
from torch.fx import Node

from rope_fusion.canonical.static_values import aten, prims, tensor_of

Coordinates = np.ndarray  # int64 [dims, elements]: where each followed element lies in a tensor


class Unrecognised(Exception):
    """The value is not what the recogniser looks for; the message says what stood in the way."""


def known_tensor(node: Node) -> torch.Tensor:
    value = tensor_of(node)
    if value is None:
        raise Unrecognised(f"{node.name} has no single known shape")
    return value


def first_input(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def number_argument(node: Node, position: int, name: str, default: int) -> int:
    value = node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
    return default if value is None else int(value)  # type: ignore[arg-type]


def slice_start(node: Node, position: int, size: int) -> int:
    start = number_argument(node, position, "start", 0)
    return min(max(start + size if start < 0 else start, 0), size)


def _reshaped(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    source = first_input(node)
    if not len(at):
        return source, np.zeros((known_tensor(source).dim(), at.shape[1]), np.int64)
    flat = np.ravel_multi_index(tuple(at), tuple(known_tensor(node).shape))
    shape = tuple(known_tensor(source).shape)
    if not shape:
        return source, np.zeros((0, at.shape[1]), np.int64)
    return source, np.array(np.unravel_index(flat, shape), np.int64).reshape(len(shape), -1)


def _same(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    return first_input(node), at


def _bits(node: Node, at: Coordinates) -> tuple[Node, Coordinates] | None:
    source = first_input(node)
    return (source, at) if known_tensor(source).dtype.itemsize == known_tensor(node).dtype.itemsize == 1 else None


def _permuted(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    order = node.args[1]
    assert isinstance(order, list | tuple)
    moved = np.empty_like(at)
    for new, old in enumerate(order):
        moved[int(old)] = at[new]
    return first_input(node), moved


def _transposed(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    first, second = number_argument(node, 1, "dim0", 0), number_argument(node, 2, "dim1", 1)
    moved = at.copy()
    moved[[first, second]] = at[[second, first]]
    return first_input(node), moved


def _turned(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    return first_input(node), at[::-1]


def _expanded(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    source = first_input(node)
    sizes = np.array(known_tensor(source).shape, dtype=np.int64)
    return source, np.where(sizes[:, None] == 1, 0, at[len(at) - len(sizes) :])


def _sliced(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    source = first_input(node)
    dim = number_argument(node, 1, "dim", 0)
    moved = at.copy()
    moved[dim] = slice_start(node, 2, known_tensor(source).shape[dim]) + at[dim] * number_argument(node, 4, "step", 1)
    return source, moved


def _chosen(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    source = first_input(node)
    shape = known_tensor(source).shape
    dim = number_argument(node, 1, "dim", 0) % len(shape)
    return source, np.insert(at, dim, number_argument(node, 2, "index", 0) % shape[dim], axis=0)


def _repeated(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    source = first_input(node)
    sizes = np.array(known_tensor(source).shape, dtype=np.int64)
    return source, at[len(at) - len(sizes) :] % sizes[:, None]


def _part(node: Node, at: Coordinates) -> tuple[Node, Coordinates] | None:
    """An item of a split or an unbind."""
    split, index = node.args
    if not isinstance(split, Node) or not isinstance(index, int):
        return None
    source = first_input(split)
    if split.target is aten.unbind.int:
        return source, np.insert(at, number_argument(split, 1, "dim", 0) % known_tensor(source).dim(), index, axis=0)
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    dim = number_argument(split, 2, "dim", 0)
    moved = at.copy()
    moved[dim] += sum(part.shape[dim] for part in split.meta["val"][:index])
    return source, moved


def _interleaved(node: Node, at: Coordinates) -> tuple[Node, Coordinates] | None:
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    source = first_input(node)
    moved = at.copy()
    if dim is None or not isinstance(node.args[1], int):
        return None
    moved[int(dim)] //= node.args[1]  # type: ignore[arg-type]
    return source, moved


MOVES: dict[object, Callable[[Node, Coordinates], tuple[Node, Coordinates] | None]] = {
    aten._unsafe_view.default: _reshaped,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.detach.default: _same,
    aten.expand.default: _expanded,
    aten.permute.default: _permuted,
    aten.repeat.default: _repeated,
    aten.repeat_interleave.self_int: _interleaved,
    aten.reshape.default: _reshaped,
    aten.select.int: _chosen,
    aten.slice.Tensor: _sliced,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.t.default: _turned,
    aten.transpose.int: _transposed,
    aten.unsqueeze.default: _reshaped,
    aten.view.default: _reshaped,
    aten.view.dtype: _bits,
    operator.getitem: _part,
    prims.device_put.default: _same,
}
