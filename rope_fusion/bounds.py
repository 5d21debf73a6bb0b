"""Puts a check before every fused operator whose positions or slots could leave the table or the cache."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from rope_fusion._torch import auto_functionalized
from rope_fusion.canonical.emitter import Emitter
from rope_fusion.kernels import checked_indices  # noqa: F401  (registers the operator)
from rope_fusion.kernels.cache_layout import parse_layout

aten = torch.ops.aten


def check_indices(graph: Graph, emitter: Emitter) -> int:
    """Let the fused operators of `graph` read checked positions and slots; how many arguments are checked."""
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        fused = node.args[0] if node.target is auto_functionalized else node.target
        if not isinstance(fused, torch._ops.OpOverload) or fused.namespace != "rope_fusion":
            continue
        arguments = _named(node, fused)
        for name, high in _limits(arguments, emitter).items():
            indices, low = arguments[name], 0
            if name != "positions":
                low = _lowest(arguments, high, emitter)
            checked = emitter.call(
                torch.ops.rope_fusion.checked_indices.default, indices, low, high, f"{name} of {node.name}"
            )
            _replace(node, fused, name, checked)
            count += 1
    return count


def _named(node: Node, fused: torch._ops.OpOverload) -> dict[str, Any]:
    """The arguments of a call by name."""
    if node.target is auto_functionalized:
        return dict(node.kwargs)
    names = [argument.name for argument in fused._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _replace(node: Node, fused: torch._ops.OpOverload, name: str, value: Node) -> None:
    if name in node.kwargs:
        node.kwargs = {**node.kwargs, name: value}
        return
    position = [argument.name for argument in fused._schema.arguments].index(name)
    node.args = (*node.args[:position], value, *node.args[position + 1 :])


def _limits(arguments: dict[str, Any], emitter: Emitter) -> dict[str, Any]:
    """For each index argument that is given, the first value that lies outside."""
    found: dict[str, Any] = {}
    if isinstance(arguments.get("positions"), Node):
        found["positions"] = _size(emitter, arguments["cos"], 0)
    if not isinstance(arguments.get("slots"), Node) or not isinstance(arguments.get("k_cache"), Node):
        return found
    layout = parse_layout(arguments["k_layout"])
    cache = arguments["k_cache"]
    places = _size(emitter, cache, layout.axes.index("p"))
    blocks = _size(emitter, cache, layout.axes.index("n")) if "n" in layout.axes else 1
    if isinstance(arguments.get("slot_offsets"), Node):
        found["slots"], found["slot_offsets"] = blocks, places
    elif layout.addressing == "batch" or blocks == 1:
        found["slots"] = places
    else:
        found["slots"] = _times(emitter, blocks, places)
    return found


def _lowest(arguments: dict[str, Any], high: Any, emitter: Emitter) -> Any:
    """Negative slots are padding, or count from the end as Python's indices do."""
    if arguments["skip_negative_slots"]:
        return torch.iinfo(torch.int32).min
    return -high if isinstance(high, int) else emitter.call(operator.neg, high)


def _size(emitter: Emitter, tensor: Node, dim: int) -> Any:
    size = tensor.meta["val"].shape[dim]
    return size if isinstance(size, int) else emitter.call(aten.sym_size.int, tensor, dim)


def _times(emitter: Emitter, first: Any, second: Any) -> Any:
    if isinstance(first, int) and isinstance(second, int):
        return first * second
    return emitter.call(operator.mul, first, second)
