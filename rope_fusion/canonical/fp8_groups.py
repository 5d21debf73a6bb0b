"""Recogniser of FP8 quantisation by groups, ``view [..., D / size, size]`` with one scale measured on each group.

``scale = clamp(amax(abs(x)), min=eps) / max``, optionally raised to a power of two, then ``clamp(x / scale, ±max).to(fp8)``.
Reshapes and float upcasts may stand anywhere between; what is measured and what is scaled must hold the same elements
in the same order.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from rope_fusion.canonical.fp8 import bound_of, is_conversion_to_fp8, through_clamps
from rope_fusion.canonical.fp8_scale import ORDER_PRESERVING, WALK_LIMIT, NotStatic, constant_of, inverted, is_upcast
from rope_fusion.canonical.layout import equal, is_one
from rope_fusion.canonical.records import GroupQuantisation
from rope_fusion.canonical.values import ValueNumbering

aten = torch.ops.aten


class _NoGroups(Exception):
    """Why a scale that is measured on the scaled tensor is not one per group."""


def find_group_quantisations(graph: Graph) -> tuple[list[GroupQuantisation], list[str], set[Node]]:
    """Quantisations by groups in graph order, a sentence for each that is almost one, and the conversions of both."""
    found: list[GroupQuantisation] = []
    refusals: list[str] = []
    settled: set[Node] = set()
    conversions = [node for node in graph.nodes if is_conversion_to_fp8(node)]
    numbering = ValueNumbering(graph) if conversions else None
    for node in conversions:
        assert numbering is not None
        try:
            quantisation = _quantisation(node, numbering)
        except NotStatic:
            continue  # the recogniser of static quantisation says the same
        except _NoGroups as refused:
            refusals.append(f"the FP8 conversion {node.name} has scales measured on its tensor, but {refused}")
        else:
            if quantisation is None:
                continue
            found.append(quantisation)
        settled.add(node)
    return found, refusals, settled


def unmoved_source(node: Node, wanted: Container[Node]) -> Node | None:
    """The one of `wanted` that holds the elements of `node` in the same order, through reshapes and upcasts."""
    for _ in range(WALK_LIMIT):
        if node in wanted:
            return node
        if not _keeps_elements(node):
            return None
        node = node.args[0]  # type: ignore[assignment]
    return None


def _quantisation(out: Node, numbering: ValueNumbering) -> GroupQuantisation | None:
    """The record of a conversion; None when its scale is not measured on a tensor by `amax` at all."""
    dtype = out.meta["val"].dtype
    limit = torch.finfo(dtype).max
    _, walk = through_clamps(out, limit)
    scaled = walk.node
    if scaled.op != "call_function" or scaled.target not in (aten.div.Tensor, aten.mul.Tensor):
        return None
    x, operand = scaled.args[:2]
    if not isinstance(x, Node) or not isinstance(operand, Node) or not isinstance(operand.meta["val"], Tensor):
        return None
    inexact: str | None = None
    divisor: Node | None = operand
    if scaled.target is aten.mul.Tensor:
        if _amax_of(x) is not None and _amax_of(operand) is None:
            x, operand = operand, x
        divisor = inverted(operand, set())
        inexact = "it multiplies by the reciprocals of its scales"
    if divisor is None or _amax_of(divisor) is None:
        return None
    _check_broadcast(x, operand)
    scale = _without_moves(divisor)
    node, power_of_two = _without_power_of_two(scale)
    if power_of_two:
        inexact = "it rounds its scales to powers of two through log2"
    if node.target is not aten.div.Tensor:
        raise _NoGroups("they are not a clamped amax divided by a number")
    if constant_of(node.args[1]) != limit:
        raise _NoGroups(f"they are not the amax divided by {limit:g}, the largest value of {dtype}")
    dtypes = [scale.meta["val"].dtype, node.meta["val"].dtype, scaled.meta["val"].dtype]
    node = _without_moves(node.args[0])
    dtypes.append(node.meta["val"].dtype)
    if any(held != torch.float32 for held in dtypes):
        raise _NoGroups("they are computed or applied in another dtype than float32")
    bound = _lower_bound(node)
    if bound is None:
        raise _NoGroups("nothing keeps them from being zero: their amax is not clamped from below")
    source, min_amax = bound
    if min_amax <= 0:
        raise _NoGroups(f"their amax may become zero, clamped at {min_amax:g}")
    size = _group_size(_without_moves(source), x, numbering)
    if walk.rounded_to != torch.float32:
        inexact = f"it rounds the scaled values to {walk.rounded_to}"
    return GroupQuantisation(out, x, scale, size, dtype, min_amax, power_of_two, inexact)


def _group_size(amax: Node, x: Node, numbering: ValueNumbering) -> int:
    """Elements per group, when `amax` measures the magnitudes of just those of `x` that a scale is applied to."""
    if amax.op != "call_function" or amax.target is not aten.amax.default:
        raise _NoGroups("they come from something else than an amax")
    measured = amax.args[0]
    assert isinstance(measured, Node)
    value = measured.meta["val"]
    dims = amax.args[1] if len(amax.args) > 1 else amax.kwargs.get("dim", [])
    if [dim % value.dim() for dim in dims] != [value.dim() - 1]:  # type: ignore[union-attr]
        raise _NoGroups("one is shared between groups: their amax is not over the last dim alone")
    magnitude = _without_moves(measured)
    if magnitude.op != "call_function" or magnitude.target is not aten.abs.default:
        raise _NoGroups("their amax is not one of magnitudes")
    if not numbering.same(_without_moves(magnitude.args[0]), _without_moves(x)):
        raise _NoGroups("they are measured on another tensor than the one that is scaled")
    size = value.shape[-1]
    if not isinstance(size, int) or not equal(size, x.meta["val"].shape[-1]):
        raise _NoGroups(f"they are measured on {size} elements each and applied to {x.meta['val'].shape[-1]}")
    return size


def _check_broadcast(x: Node, operand: Node) -> None:
    """Refuse scales that are not spread over the last dim of `x` alone."""
    whole, scales = x.meta["val"].shape, operand.meta["val"].shape
    if len(whole) != len(scales) or not is_one(scales[-1]) or not all(map(equal, whole[:-1], scales[:-1])):
        raise _NoGroups("one is shared between groups: they do not differ in every dim but the last")


def _without_power_of_two(node: Node) -> tuple[Node, bool]:
    """The scale before it was raised to a power of two, and whether it was."""
    power: Any = None
    if node.target is aten.exp2.default:
        power = node.args[0]
    elif node.target is aten.pow.Scalar and node.args[0] == 2:
        power = node.args[1]
    if power is None:
        return node, False
    ceil = _without_moves(power)
    if ceil.target is aten.ceil.default:
        logarithm = _without_moves(ceil.args[0])
        if logarithm.target is aten.log2.default:
            return _without_moves(logarithm.args[0]), True
    raise _NoGroups("they are powers of two, but not the next above amax / max")


def _lower_bound(node: Node) -> tuple[Node, float] | None:
    """What a node clamps from below, and the bound."""
    if node.op != "call_function":
        return None
    if node.target in (aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default):
        source, bound = bound_of(node)
        return None if bound is None else (source, bound)
    return None


def _amax_of(node: Node) -> Node | None:
    """The `amax` that a scale is computed from by elementwise operators, if there is one."""
    for _ in range(WALK_LIMIT):
        if node.op != "call_function":
            return None
        if node.target is aten.amax.default:
            return node
        sources = [arg for arg in node.args if isinstance(arg, Node) and constant_of(arg) is None]
        if len(sources) != 1:
            return None
        node = sources[0]
    return None


def _keeps_elements(node: Node) -> bool:
    return node.op == "call_function" and (node.target in ORDER_PRESERVING or is_upcast(node))


def _without_moves(node: Any) -> Node:
    while _keeps_elements(node):
        node = node.args[0]
    return node
