"""The scale of an FP8 quantisation: which operand it is, how far it extends, and whether it is static."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from rope_fusion.canonical.layout import equal, is_one

aten = torch.ops.aten
prims = torch.ops.prims

CONVERSIONS = frozenset({prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype})
ORDER_PRESERVING = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.clone.default,
        aten.alias.default,
    }
)
WALK_LIMIT = 32


class NotStatic(Exception):
    """Why a conversion is no static quantisation; the message completes "it is none because"."""


def is_float_cast(node: Node) -> bool:
    if node.target not in CONVERSIONS:
        return False
    source = node.args[0]
    dtypes = {node.meta["val"].dtype, source.meta["val"].dtype} if isinstance(source, Node) else set()
    return dtypes <= {torch.float32, torch.bfloat16, torch.float16}


def constant_of(value: Any) -> float | None:
    """The number that an argument certainly is, through tensors filled with one."""
    for _ in range(WALK_LIMIT):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, Node) or value.op != "call_function":
            return None
        if value.target in (aten.full.default, aten.full_like.default):
            value = value.args[1]
        elif value.target is aten.scalar_tensor.default or (
            value.target in ORDER_PRESERVING or value.target is aten.expand.default or is_upcast(value)
        ):
            value = value.args[0]
        else:
            return None
    return None


def is_upcast(node: Node) -> bool:
    """Whether a float cast keeps every value."""
    if not is_float_cast(node):
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    return before == after or after == torch.float32


def without_upcast(node: Node, passed: set[Node]) -> Node:
    while node.op == "call_function" and is_upcast(node):
        passed.add(node)
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def scale_operand(node: Node) -> tuple[Node, Node | float, bool] | None:
    """``(x, scale, multiplies)`` where `node` multiplies or divides a whole tensor by something smaller, else None."""
    if node.op != "call_function" or node.target not in (
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.mul.Scalar,
        aten.div.Scalar,
    ):
        return None
    multiplies = node.target in (aten.mul.Tensor, aten.mul.Scalar)
    first, second = node.args[0], node.args[1]
    whole = math.prod(node.meta["val"].shape)

    def is_whole(argument: Any) -> bool:
        if not isinstance(argument, Node):
            return False
        source = _without_expand(argument, set())
        return equal(math.prod(source.meta["val"].shape), whole) and not is_one(whole)

    if multiplies and is_whole(second) and not is_whole(first):
        first, second = second, first
    if not is_whole(first) or is_whole(second) or not isinstance(first, Node):
        return None
    if isinstance(second, Node) and not isinstance(second.meta["val"], Tensor):
        return None
    return first, second if isinstance(second, Node) else float(second), multiplies  # type: ignore[arg-type]


def _without_expand(node: Node, passed: set[Node]) -> Node:
    """The tensor that views and broadcasts of one small tensor come from."""
    while node.op == "call_function" and (
        node.target in ORDER_PRESERVING or node.target is aten.expand.default or is_upcast(node)
    ):
        passed.add(node)
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def scale_extent(operand: Node | float, x: Node, scaled: Node, passed: set[Node]) -> tuple[int | None, Node | float]:
    """The dim of x along which the scale varies (None: one element), and the scale without views."""
    if not isinstance(operand, Node):
        return None, operand
    source = _without_expand(operand, passed)
    if all(is_one(size) for size in source.meta["val"].shape):
        return None, source
    rank = scaled.meta["val"].dim()
    sizes = list(operand.meta["val"].shape)
    if operand.target is aten.expand.default:
        sizes = list(operand.args[0].meta["val"].shape)  # type: ignore[union-attr]
    varying = [dim for dim in range(-len(sizes), 0) if not is_one(sizes[dim])]
    if len(varying) != 1 or varying[0] == -1:
        raise NotStatic(f"its scale {operand.name} has a value per channel or per element, not one or one per head")
    axis = varying[0]
    head = _head_axis(x)
    token_like = not isinstance(sizes[axis], int) or rank + axis == 0 or (head is not None and axis != head)
    if axis not in (-2, -3) or token_like:
        raise NotStatic(f"its scale {operand.name} has a value per token, which is no static scale")
    return axis, source


def _head_axis(x: Node) -> int | None:
    """Which dim of x (from the end) holds the heads, where the graph tells: a last dim was split into heads and dim."""
    axis: int | None = None  # position looked for while walking up, counted from the end; -2 once the split is met
    order: list[int] | None = None
    node = x
    for _ in range(WALK_LIMIT):
        if node.op != "call_function" or not node.args:
            return None
        source = node.args[0]
        if isinstance(source, (list, tuple)) and source:
            source = source[0]
        if not isinstance(source, Node) or not isinstance(node.meta.get("val"), Tensor):
            return None
        value, before = node.meta["val"], source.meta.get("val")
        if not isinstance(before, Tensor):
            return None
        if node.target is aten.permute.default:
            dims = [d % value.dim() for d in node.args[1]]  # type: ignore[union-attr]
            order = dims if order is None else [dims[d] for d in order]
        elif node.target in ORDER_PRESERVING and before.dim() != value.dim():
            splits = before.dim() == value.dim() - 1 and not is_one(value.shape[-2])
            if splits and equal(before.shape[-1], value.shape[-1] * value.shape[-2]):
                axis = value.dim() - 2
                axis = axis if order is None else order.index(axis)
                return axis - value.dim()
            return None
        elif before.dim() != value.dim():
            return None
        node = source
    return axis


def inverted(scale: Node, passed: set[Node]) -> Node | None:
    """``s`` where `scale` is ``1 / s``."""
    node = _without_expand(scale, passed)
    if node.op == "call_function" and node.target is aten.mul.Tensor and constant_of(node.args[1]) == 1.0:
        passed.add(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "call_function":
        return None
    source: Any = None
    if node.target is aten.reciprocal.default:
        source = node.args[0]
    elif node.target is aten.div.Tensor and constant_of(node.args[0]) == 1.0:
        source = node.args[1]
    elif node.target is aten.pow.Tensor_Scalar and node.args[1] == -1:
        source = node.args[0]
    if not isinstance(source, Node):
        return None
    passed.add(node)
    return _without_expand(source, passed)


def check_static(scale: Node, x: Node) -> None:
    """Refuse a scale that is computed from the tensor it scales.

    A scale and the tensor may share small tensors (another scale, say); a larger tensor that leads to both means that
    the scale is measured on the activations.
    """
    size = math.prod(scale.meta["val"].shape)
    larger = {
        node
        for node in _ancestors(scale)
        if isinstance(node.meta.get("val"), Tensor)
        and not statically_known_true(math.prod(node.meta["val"].shape) <= size)
    }
    if larger and not larger.isdisjoint(_ancestors(x)):
        raise NotStatic(f"its scale {scale.name} is computed from the tensor that it scales ({x.name})")


def _ancestors(node: Node) -> set[Node]:
    """`node` and all that it is computed from."""
    seen = {node}
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return seen
