"""Where each column of a rotation's cos or sin comes from: repeats, negations and joins are read through.

Programs widen a half-width table before they multiply by it (`repeat_interleave`, `cat`, `stack`), negate sin for an
inverse rotation, and put dims of size 1 around both. A kernel needs none of that: it can read the narrow rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from rope_fusion.canonical.layout import equal, is_one
from rope_fusion.canonical.records import Rotation

aten = torch.ops.aten
prims = torch.ops.prims

MAX_DEPTH = 32
_RESHAPES = frozenset({aten.reshape.default, aten.view.default, aten._unsafe_view.default})
_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default})
_CONVERSIONS = frozenset({prims.convert_element_type.default, aten._to_copy.default})
_COPIES = frozenset({aten.clone.default, aten.alias.default, aten.contiguous.default})
_SQUEEZES = frozenset({aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default})


@dataclass(frozen=True)
class Columns:
    """Elements of a node's trailing dims as columns of `source`.

    The leading dims of both hold the same rows in the same order; those of size 1 may differ.
    """

    source: Node
    index: np.ndarray  # column of `source` for each element; the shape of the trailing dims
    sign: np.ndarray  # 1 or -1 for each element

    def moved(self, move: Any) -> Columns:
        return Columns(self.source, move(self.index), move(self.sign))


@dataclass(frozen=True)
class Angle:
    """cos or sin as `width` adjoining columns of `node`, all of one sign."""

    node: Node
    offset: int
    width: int
    negated: bool


def narrow_angles(rotation: Rotation, keep_rounding: bool) -> tuple[Angle, Angle] | None:
    """cos and sin of a rotation, read as early and as narrow as can be; None where the program's own operands are that.

    The two have one width: half of the rotated columns where both elements of every pair share a column. Conversions
    between float32 and the dtype of x are read through where that loses nothing: widening ones, and without
    `keep_rounding` all.
    """
    reader = _Reader(frozenset({torch.float32, rotation.x.meta["val"].dtype}), keep_rounding)
    pairs = _pairs(rotation)
    full, half = [], []
    for operand in (rotation.cos, rotation.sin):
        if operand.node.meta["val"].is_complex() or operand.negated:
            return None
        found = reader.columns_of(operand.node)
        width = rotation.rotary_dim if rotation.full_width else rotation.rotary_dim // 2
        found = found.moved(lambda array, at=operand.offset, width=width: array[at : at + width])
        if abs(int(found.sign.sum())) != width:
            return None
        full.append(_adjoining(found))
        shared = rotation.full_width and np.array_equal(found.index[pairs[0]], found.index[pairs[1]])
        half.append(_adjoining(found.moved(lambda array: array[pairs[0]])) if shared else None)
    for cos, sin in (half, full):
        if cos is None or sin is None or cos.negated:
            continue
        if cos.node.meta["val"].dtype == sin.node.meta["val"].dtype:
            changed = cos.node is not rotation.cos.node or sin.node is not rotation.sin.node
            return (cos, sin) if changed else None
    return None


def _pairs(rotation: Rotation) -> tuple[slice, slice]:
    """Which full-width columns go with the first and which with the second element of each pair, as they come out."""
    if rotation.interleaved and not rotation.halves_out:
        return slice(0, None, 2), slice(1, None, 2)
    half = rotation.rotary_dim // 2
    return slice(0, half), slice(half, None)


def _adjoining(columns: Columns) -> Angle | None:
    first, width = int(columns.index[0]), columns.index.size
    if not np.array_equal(columns.index, np.arange(first, first + width)):
        return None
    return Angle(columns.source, first, width, bool(columns.sign[0] < 0))


def columns_of(node: Node) -> Columns:
    """The columns of `node`'s last dim, read through what only moves, repeats or negates them."""
    return _Reader(frozenset(), keep_rounding=True).columns_of(node)


def _itself(node: Node) -> Columns:
    width = node.meta["val"].shape[-1]
    return Columns(node, np.arange(width), np.ones(width, int))


def _same_rows(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether two lists of leading sizes differ by ones only."""
    left, right = ([size for size in sizes if not is_one(size)] for sizes in (before, after))
    return len(left) == len(right) and all(map(equal, left, right))


@dataclass(frozen=True)
class _Reader:
    dtypes: frozenset[torch.dtype]  # conversions from these may be read through
    keep_rounding: bool

    def columns_of(self, node: Node) -> Columns:
        return self._read(node, 1, 0) or _itself(node)

    def _read(self, node: Node, rank: int, depth: int) -> Columns | None:
        """Elements of the last `rank` dims. A node that cannot be read through is its own source where `rank` is 1."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() < rank:
            return None
        if not all(isinstance(size, int) for size in value.shape[value.dim() - rank :]):
            return None
        found = self._through(node, rank, depth + 1) if node.op == "call_function" and depth < MAX_DEPTH else None
        return found or (_itself(node) if rank == 1 else None)

    def _through(self, node: Node, rank: int, depth: int) -> Columns | None:
        target = node.target
        if target is operator.getitem:
            return self._part(node, rank, depth)
        if target is aten.cat.default:
            return self._joined(node, rank, depth)
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or not isinstance(source.meta.get("val"), torch.Tensor):
            return None
        if target in _COPIES or (target in _CONVERSIONS and self._may_skip(source, node)):
            return self._read(source, rank, depth)
        if target is aten.neg.default:
            found = self._read(source, rank, depth)
            return Columns(found.source, found.index, -found.sign) if found else None
        if target is aten.slice.Tensor:
            given: list[Any] = [*node.args[1:], *[0, None, None, 1][len(node.args) - 1 :]]
            dim, start, end, step = given
            bounds = (start, end, step)
            known = all(isinstance(bound, (int, type(None))) for bound in bounds)
            return self._cut(source, dim, slice(*bounds), rank, depth) if known else None
        if target in _RESHAPES:
            return self._reshaped(source, node, rank, depth)
        before, after = source.meta["val"].shape, node.meta["val"].shape
        rows_kept = _same_rows(before[: len(before) - rank], after[: len(after) - rank])
        if target is aten.expand.default and rows_kept:
            found = self._read(source, rank, depth)
            return found.moved(lambda array: np.broadcast_to(array, tuple(after[-rank:]))) if found else None
        if target is aten.unsqueeze.default:
            axis = int(node.args[1]) % len(after) - (len(after) - rank)  # type: ignore[arg-type]
            if axis < 0:
                return self._read(source, rank, depth)
            found = self._read(source, rank - 1, depth) if rank > 1 else None
            return found.moved(lambda array: np.expand_dims(array, axis)) if found else None
        if target in _SQUEEZES and rows_kept and tuple(before[-rank:]) == tuple(after[-rank:]):
            return self._read(source, rank, depth)
        return None

    def _may_skip(self, source: Node, converted: Node) -> bool:
        before, after = source.meta["val"].dtype, converted.meta["val"].dtype
        if before not in self.dtypes or not after.is_floating_point:
            return False
        return not self.keep_rounding or torch.promote_types(before, after) == after

    def _reshaped(self, source: Node, node: Node, rank: int, depth: int) -> Columns | None:
        before, after = source.meta["val"].shape, node.meta["val"].shape
        trailing = tuple(after[len(after) - rank :])
        total = math.prod(trailing)
        for source_rank in range(1, len(before) + 1):
            sizes = before[len(before) - source_rank :]
            if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) > total:
                return None
            rows_kept = _same_rows(before[: len(before) - source_rank], after[: len(after) - rank])
            if math.prod(sizes) == total and rows_kept:
                found = self._read(source, source_rank, depth)
                return found.moved(lambda array: array.reshape(trailing)) if found else None
        return None

    def _cut(self, source: Node, dim: Any, cut: slice, rank: int, depth: int) -> Columns | None:
        """A slice along one of the trailing dims."""
        dims = source.meta["val"].dim()
        axis = (dim or 0) % dims - (dims - rank)
        found = self._read(source, rank, depth) if axis >= 0 else None
        return found.moved(lambda array: array[(slice(None),) * axis + (cut,)]) if found else None

    def _part(self, node: Node, rank: int, depth: int) -> Columns | None:
        """One part of a split."""
        split, number = node.args
        if not isinstance(split, Node) or split.target not in _SPLITS or not isinstance(number, int):
            return None
        source, sizes, dim = (*split.args, 0)[:3]
        assert isinstance(source, Node)
        number %= len(split.meta["val"])
        if isinstance(sizes, int):
            start, size = sizes * number, sizes
        elif isinstance(sizes, (list, tuple)) and all(isinstance(one, int) for one in sizes):
            start, size = sum(sizes[:number]), sizes[number]
        else:
            return None
        return self._cut(source, dim, slice(start, start + size), rank, depth)

    def _joined(self, node: Node, rank: int, depth: int) -> Columns | None:
        """Parts of one source put together along a trailing dim."""
        sources, dim = (*node.args, 0)[:2]
        dims = node.meta["val"].dim()
        axis = dim % dims - (dims - rank)
        if axis < 0 or not isinstance(sources, (list, tuple)):
            return None
        parts = [part for source in sources if (part := self._read(source, rank, depth)) is not None]
        if len(parts) < len(sources) or any(part.source is not parts[0].source for part in parts):
            return None
        index, sign = ([getattr(part, name) for part in parts] for name in ("index", "sign"))
        return Columns(parts[0].source, np.concatenate(index, axis), np.concatenate(sign, axis))


def angle_roles(original: Node, narrow: Node, roles: str) -> str:
    """Role of each leading dim of `narrow`, ``.`` for one of size 1; `roles` are those of the rotated tensor."""
    shape = original.meta["val"].shape
    kept = [role for role, size in zip(roles[-len(shape) : -1], shape[:-1], strict=True) if not is_one(size)]
    left = iter(kept)
    return "".join("." if is_one(size) else next(left) for size in narrow.meta["val"].shape[:-1])
