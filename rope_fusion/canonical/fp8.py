"""Recogniser of static FP8 quantisation, ``clamp(x / scale, ±max).to(fp8)``, in every spelling that reaches the graph.

The search starts at each conversion to an FP8 dtype and walks towards ``x``: casts between float dtypes, reshapes, the
two clamps in any order and spelling, then one multiplication or division by the scale. Anything else ends the walk.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from rope_fusion.canonical.fp8_scale import (
    CONVERSIONS,
    ORDER_PRESERVING,
    WALK_LIMIT,
    NotStatic,
    check_static,
    constant_of,
    inverted,
    is_float_cast,
    scale_extent,
    scale_operand,
    without_upcast,
)
from rope_fusion.canonical.records import Fp8Quantisation

aten = torch.ops.aten
prims = torch.ops.prims

FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})
_LOWER_BOUNDS = frozenset({aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default})
_UPPER_BOUNDS = frozenset({aten.clamp_max.default, aten.clamp_max.Tensor, aten.minimum.default})
_CLAMPS = frozenset({aten.clamp.default, aten.clamp.Tensor, aten.hardtanh.default})


def find_fp8_quantisations(graph: Graph, settled: Container[Node] = ()) -> tuple[list[Fp8Quantisation], list[str]]:
    """Every static FP8 quantisation of `graph`, in graph order, and a sentence for each FP8 conversion that is none.

    Args:
        settled: conversions that are something else, of which nothing is said here.
    """
    found: list[Fp8Quantisation] = []
    refusals: list[str] = []
    for node in graph.nodes:
        if node in settled or not is_conversion_to_fp8(node):
            continue
        try:
            found.append(_quantisation(node))
        except NotStatic as refused:
            refusals.append(f"the FP8 conversion {node.name} is no static quantisation: {refused}")
    return found, refusals


def is_conversion_to_fp8(node: Node) -> bool:
    """Whether a node converts a tensor of another dtype to FP8."""
    if node.op != "call_function" or node.target not in CONVERSIONS:
        return False
    source = node.args[0]
    value = node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and value.dtype in FP8_DTYPES
        and isinstance(source, Node)
        and source.meta["val"].dtype not in FP8_DTYPES
    )


@dataclass
class _Walk:
    """Where a walk stands, what it passed, and the narrowest float dtype in which the value was held on the way."""

    node: Node
    nodes: set[Node]
    rounded_to: torch.dtype

    def hold(self, dtype: torch.dtype) -> None:
        if torch.finfo(dtype).bits < torch.finfo(self.rounded_to).bits:
            self.rounded_to = dtype


def _quantisation(out: Node) -> Fp8Quantisation:
    dtype = out.meta["val"].dtype
    limit = torch.finfo(dtype).max
    clamped, walk = through_clamps(out, limit)
    scaled = walk.node
    value = scaled.meta["val"]
    if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
        raise NotStatic(f"what is clamped is {value.dtype}, not a float tensor")
    scale = scale_operand(scaled)
    if scale is None:
        return Fp8Quantisation(
            out=out,
            x=without_upcast(clamped.node, clamped.nodes),
            scale=1.0,
            scale_multiplies=False,
            dtype=dtype,
            scale_dtype=clamped.rounded_to,
            nodes=frozenset(clamped.nodes),
        )
    x, operand, multiplies = scale
    walk.nodes.add(scaled)
    walk.hold(value.dtype)
    x = without_upcast(x, walk.nodes)
    axis, operand = scale_extent(operand, x, scaled, walk.nodes)
    reciprocal = None
    if multiplies and isinstance(operand, Node):
        divisor = inverted(operand, walk.nodes)
        if divisor is not None:
            reciprocal, operand, multiplies = operand, divisor, False
    if isinstance(operand, Node):
        check_static(operand, x)
        constant = constant_of(operand)
        operand = operand if constant is None else constant
    return Fp8Quantisation(
        out=out,
        x=x,
        scale=operand,
        scale_multiplies=multiplies,
        dtype=dtype,
        scale_dtype=walk.rounded_to,
        nodes=frozenset(walk.nodes),
        per_head=axis is not None,
        scale_axis=axis,
        reciprocal=reciprocal,
    )


def through_clamps(out: Node, limit: float) -> tuple[_Walk, _Walk]:
    """The walk up to the value that is clamped to ±limit and converted by `out`, and on through casts and reshapes."""
    node = out.args[0]
    assert isinstance(node, Node)
    walk = _Walk(node, {out}, node.meta["val"].dtype)
    clamped: _Walk | None = None
    lower = upper = False
    for _ in range(WALK_LIMIT):
        node = walk.node
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, Node):
            break
        if node.target in _LOWER_BOUNDS or node.target in _UPPER_BOUNDS:
            source, bound = bound_of(node)
            if bound is None:
                break
            is_lower = node.target in _LOWER_BOUNDS
            _check_bound(bound, -limit if is_lower else limit, out)
            lower, upper = lower or is_lower, upper or not is_lower
        elif node.target in _CLAMPS:
            low, high = (constant_of(bound) for bound in _clamp_bounds(node))
            if low is not None:
                _check_bound(low, -limit, out)
            if high is not None:
                _check_bound(high, limit, out)
            lower, upper = lower or low is not None, upper or high is not None
        elif is_float_cast(node):
            walk.hold(node.meta["val"].dtype)
        elif node.target not in ORDER_PRESERVING:
            break
        walk.nodes.add(node)
        walk.node = source
        if lower and upper and clamped is None:
            clamped = _Walk(source, set(walk.nodes), walk.rounded_to)
    if clamped is None:
        raise NotStatic(
            f"no clamp to ±{limit:g} on both sides comes between it and {walk.node.name}, "
            "and what a conversion makes of larger values differs between dtypes, devices and torch versions"
        )
    return clamped, walk


def bound_of(node: Node) -> tuple[Node, float | None]:
    """The clamped node and the bound; `maximum` and `minimum` take them in either order."""
    first, second = node.args[0], node.args[1]
    bound = constant_of(second)
    if bound is None and node.target in (aten.maximum.default, aten.minimum.default):
        first, bound = second, constant_of(first)
    assert isinstance(first, Node)
    return first, bound


def _clamp_bounds(node: Node) -> tuple[Any, Any]:
    low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
    high = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    return low, high


def _check_bound(bound: float, expected: float, out: Node) -> None:
    if bound != expected:
        dtype = out.meta["val"].dtype
        raise NotStatic(f"it is clamped at {bound:g}, the limit of {dtype} there is {expected:g}")
