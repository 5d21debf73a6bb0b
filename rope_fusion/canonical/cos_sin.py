"""Where a rotation's cos and sin come from: a table gathered by positions, or rows computed in the graph."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from rope_fusion.canonical.angle_columns import angle_roles, narrow_angles
from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.layout import VIEW_TARGETS, equal, is_one
from rope_fusion.canonical.records import CosSin, Rotation
from rope_fusion.canonical.values import ValueNumbering

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class CosSinOperands:
    """cos and sin as the canonical operator takes them: [P, C] tables with positions, else [B or 1, S or 1, C] rows."""

    cos: Node
    sin: Node
    positions: Node | None
    sin_negated: bool = False  # the program's sin is the negative of this one


@dataclass(frozen=True)
class _Gather:
    table: Node
    positions: Node
    offset: int


def is_downcast(node: Node) -> bool:
    """A rounding of a float tensor to fewer bits."""
    if node.op != "call_function" or node.target not in (prims.convert_element_type.default, aten._to_copy.default):
        return False
    source = node.args[0]
    if not isinstance(source, Node):
        return False
    before, after = source.meta["val"], node.meta["val"]
    return (
        before.dtype.is_floating_point and before.dtype.itemsize > after.dtype.itemsize and before.dtype.itemsize <= 4
    )


def cos_sin_operands(
    emitter: Emitter, rotation: Rotation, roles: str, numbering: ValueNumbering, keep_rounding: bool
) -> CosSinOperands:
    """Emit what the fused operator reads.

    With `keep_rounding` (exact numerics) a cos/sin that the program rounded is passed rounded; otherwise the table is
    passed in the precision that it was made in, which is never further from the true value.
    """
    width = rotation.rotary_dim if rotation.full_width else rotation.rotary_dim // 2
    cos, sin = rotation.cos, rotation.sin
    narrow = narrow_angles(rotation, keep_rounding)
    if narrow is not None:
        cos, sin = (CosSin(angle.node, angle.offset) for angle in narrow)
        width = narrow[0].width
    negated = narrow is not None and narrow[1].negated
    cos_gather, sin_gather = (_gather(operand, keep_rounding) for operand in (cos, sin))
    if cos_gather is not None and sin_gather is not None and numbering.same(cos_gather.positions, sin_gather.positions):
        positions = _positions(emitter, rotation, roles, cos_gather.positions)
        if positions is not None:
            cos_table = emitter.columns(cos_gather.table, cos_gather.offset, width)
            sin_table = emitter.columns(sin_gather.table, sin_gather.offset, width)
            return CosSinOperands(cos_table, sin_table, positions, negated)
    cos_rows, sin_rows = (
        _rows(emitter, operand, angle_roles(original.node, operand.node, roles), width, keep_rounding)
        for operand, original in ((cos, rotation.cos), (sin, rotation.sin))
    )
    return CosSinOperands(cos_rows, sin_rows, None, negated)


def _gather(operand: CosSin, keep_rounding: bool) -> _Gather | None:
    """The table lookup that `operand` is a view of, with nothing but views and (default numerics) roundings around it."""
    if operand.node.meta["val"].is_complex():
        return None
    node, offset = operand.node, operand.offset
    for _ in range(16):
        if node.op != "call_function":
            return None
        source = node.args[0] if node.args else None
        if (
            node.target is aten.index.Tensor
            or node.target is aten.index_select.default
            or node.target is aten.embedding.default
        ):
            return _lookup(node, offset, keep_rounding)
        if not isinstance(source, Node):
            return None
        if node.target is operator.getitem:
            step = _split_offset(node)
            if step is None:
                return None
            assert isinstance(source.args[0], Node)
            node, offset = source.args[0], offset + step
        elif node.target is aten.slice.Tensor:
            step = _slice_offset(node)
            if step is None:
                return None
            node, offset = source, offset + step
        elif node.target in VIEW_TARGETS:
            if not _keeps_order(source, node):
                return None
            node = source
        elif not keep_rounding and is_downcast(node):
            node = source
        else:
            return None
    return None


def _lookup(node: Node, offset: int, keep_rounding: bool) -> _Gather | None:
    table = node.args[0]
    assert isinstance(table, Node)
    if table.meta["val"].dim() != 2 or table.meta["val"].stride(1) != 1:
        return None
    if node.target is aten.index.Tensor:
        indices = node.args[1]
        if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not isinstance(indices[0], Node):
            return None
        positions = indices[0]
    elif node.target is aten.index_select.default:
        if node.args[1] not in (0, -2) or not isinstance(node.args[2], Node):
            return None
        positions = node.args[2]
    else:
        if not isinstance(node.args[1], Node) or (len(node.args) > 2 and node.args[2] not in (-1, None)):
            return None
        positions = node.args[1]
    if positions.meta["val"].dtype not in (torch.int32, torch.int64):
        return None
    if not keep_rounding and is_downcast(table):
        source = table.args[0]
        assert isinstance(source, Node)
        table = source
    return _Gather(table, positions, offset)


def _keeps_order(source: Node, view: Node) -> bool:
    """Whether a view leaves the last dim alone and only adds or drops size-1 dims before it."""
    before, after = source.meta["val"].shape, view.meta["val"].shape
    if not equal(before[-1], after[-1]):
        return False
    if view.target in (aten.permute.default, aten.transpose.int):
        return False
    kept_before = [size for size in before[:-1] if not is_one(size)]
    kept_after = [size for size in after[:-1] if not is_one(size)]
    return len(kept_before) == len(kept_after) and all(map(equal, kept_before, kept_after))


def _slice_offset(node: Node) -> int | None:
    """First column of a step-1 slice of the last dim."""
    source, dim, start, _end, step = (*node.args, *(None,) * 5)[:5]
    assert isinstance(source, Node)
    rank = source.meta["val"].dim()
    if (dim or 0) % rank != rank - 1 or step not in (None, 1):
        return None
    width = source.meta["val"].shape[-1]
    start = 0 if start is None else start
    if not isinstance(start, int) or not isinstance(width, int):
        return None
    return start + width if start < 0 else start


def _split_offset(node: Node) -> int | None:
    """First column of the part of a split of the last dim that `getitem` takes."""
    split, index = node.args
    if not isinstance(split, Node) or not isinstance(index, int) or split.op != "call_function":
        return None
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    source, sizes, dim = (*split.args, 0)[:3]
    assert isinstance(source, Node)
    rank = source.meta["val"].dim()
    if dim % rank != rank - 1:
        return None
    if index < 0:
        index += len(split.meta["val"])
    if isinstance(sizes, int):
        return sizes * index
    if isinstance(sizes, (list, tuple)) and all(isinstance(size, int) for size in sizes):
        return sum(sizes[:index])
    return None


def _positions(emitter: Emitter, rotation: Rotation, roles: str, positions: Node) -> Node | None:
    """Positions as [S] or [B or 1, S], or None when they do not map onto batch and sequence."""
    shape = positions.meta["val"].shape
    cos_shape = rotation.cos.node.meta["val"].shape
    x_shape = rotation.x.meta["val"].shape
    sizes = dict(zip(roles, x_shape, strict=True))
    cos_roles = roles[-len(cos_shape) :]
    varying = [role for role, size in zip(cos_roles[:-1], cos_shape[:-1], strict=True) if not is_one(size)]
    kept = [size for size in shape if not is_one(size)]
    if len(kept) != len(varying) or not all(equal(size, sizes[role]) for size, role in zip(kept, varying, strict=True)):
        return None
    sequence = sizes["s"]
    if "s" not in varying and not is_one(sequence):
        return None  # one row for all tokens of a longer sequence
    if len(shape) == 1:
        return emitter.call(aten.unsqueeze.default, positions, 1) if varying == ["b"] else positions
    if len(shape) == 2 and (is_one(shape[0]) or "b" in varying):
        return positions
    return None


def _rows(emitter: Emitter, operand: CosSin, roles: str, width: int, keep_rounding: bool) -> Node:
    """cos or sin rows as [B or 1, S or 1, width], contiguous in the last dim."""
    node = operand.node
    if node.meta["val"].is_complex():
        pairs = emitter.call(aten.view_as_real.default, node)
        node = emitter.call(aten.select.int, pairs, -1, 0 if operand.part == "real" else 1)
        node = emitter.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    elif not keep_rounding:
        node = _before_rounding(emitter, node)
    node = emitter.columns(node, operand.offset, width)
    for at in reversed(range(len(roles))):
        if roles[at] == ".":
            node = emitter.call(aten.squeeze.dim, node, at)
    for at, role in enumerate("bs"):
        if role not in roles:
            node = emitter.call(aten.unsqueeze.default, node, at)
    return node


def _before_rounding(emitter: Emitter, node: Node) -> Node:
    """The same rows before the program rounded them, where only size-1 dims were added since."""
    path: list[Node] = []
    current = node
    while current.op == "call_function" and current.target in VIEW_TARGETS and isinstance(current.args[0], Node):
        path.append(current)
        current = current.args[0]
    if not is_downcast(current):
        return node
    source = current.args[0]
    assert isinstance(source, Node)
    return emitter.replay(reversed(path), source)
