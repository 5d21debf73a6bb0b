"""Slots that a program splits into a block and a place: ``slot // page`` and ``slot % page`` in their spellings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rope_fusion.canonical.fp8_scale import CONVERSIONS, constant_of
from rope_fusion.canonical.layout import equal
from rope_fusion.canonical.values import ValueNumbering

aten = torch.ops.aten

SLOT_DTYPES = frozenset({torch.int32, torch.int64})
_FLOOR_DIVISIONS = frozenset({aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default})
_REMAINDERS = frozenset({aten.remainder.Scalar, aten.remainder.Tensor})
_RIGHT_SHIFTS = frozenset({aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Scalar})
_MASKS = frozenset({aten.bitwise_and.Scalar, aten.__and__.Scalar})


def slots_of_pair(
    block: Node, offset: Node, size: Any, numbering: ValueNumbering
) -> tuple[Node, Node | None, set[Node]]:
    """Flat slots where block and offset are ``slot // size`` and ``slot % size`` of one tensor, else the pair."""
    first, first_nodes = _without_widening(block)
    second, second_nodes = _without_widening(offset)
    quotient, remainder = _operand_of(first, size, quotient=True), _operand_of(second, size, quotient=False)
    if quotient is not None and remainder is not None:
        slot, other = _without_widening(quotient)[0], _without_widening(remainder)[0]
        if numbering.same(slot, other) and slot.meta["val"].dtype in SLOT_DTYPES:
            return slot, None, {*first_nodes, *second_nodes, first, second}
    return block, offset, set()


def _without_widening(node: Node) -> tuple[Node, set[Node]]:
    """An integer tensor before its casts to wider integers, and those casts."""
    passed: set[Node] = set()
    while node.op == "call_function" and node.target in CONVERSIONS and isinstance(node.args[0], Node):
        before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
        if before not in SLOT_DTYPES or after not in SLOT_DTYPES or before.itemsize > after.itemsize:
            break
        passed.add(node)
        node = node.args[0]
    return node, passed


def _operand_of(node: Node, size: Any, quotient: bool) -> Node | None:
    """``x`` where `node` is ``x // size`` (or ``x % size``), rounding down as indices wrap."""
    if node.op != "call_function" or len(node.args) != 2:
        return None
    operand, by = node.args
    divisor: Any = (
        by.meta["val"] if isinstance(by, Node) and not isinstance(by.meta["val"], Tensor) else constant_of(by)
    )
    if not isinstance(operand, Node) or divisor is None:
        return None
    divisor = int(divisor) if isinstance(divisor, float) else divisor
    if quotient and node.target in _FLOOR_DIVISIONS:
        floors = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
        return operand if floors and equal(divisor, size) else None
    if quotient and node.target in _RIGHT_SHIFTS:
        return operand if isinstance(divisor, int) and divisor >= 0 and equal(1 << divisor, size) else None
    if not quotient and node.target in _REMAINDERS:
        return operand if equal(divisor, size) else None
    if not quotient and node.target in _MASKS:
        power = isinstance(divisor, int) and divisor >= 0 and divisor & (divisor + 1) == 0
        return operand if power and equal(divisor + 1, size) else None
    return None
