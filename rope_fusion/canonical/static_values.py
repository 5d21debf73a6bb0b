"""Which values of a graph depend on nothing but parameters, buffers and constants."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
prims = torch.ops.prims

# Nodes whose result shares its input's storage: deriving one of them saves nothing that deriving its input does not.
FREE_VIEWS = frozenset(
    {
        aten.alias.default,
        aten.as_strided.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten.view.dtype,
        operator.getitem,
    }
)

# Nodes that move elements without computing: they may surround a derivation.
MOVEMENTS = FREE_VIEWS | frozenset(
    {
        aten._unsafe_view.default,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.contiguous.default,
        aten.repeat.default,
        aten.reshape.default,
        aten.stack.default,
    }
)

CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype, prims.device_put.default})

_MATRIX_PRODUCTS = frozenset(
    {
        "addbmm",
        "addmm",
        "addmv",
        "baddbmm",
        "bmm",
        "convolution",
        "einsum",
        "linear",
        "matmul",
        "mm",
        "mv",
        "_grouped_mm",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "scaled_dot_product_attention",
    }
)


def is_matrix_product(node: Node) -> bool:
    """Whether Inductor calls a library (or a template) for this node, so that its operands are built in memory."""
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target.namespace == "aten" and node.target._schema.name.removeprefix("aten::") in _MATRIX_PRODUCTS
    )


def is_opaque(node: Node) -> bool:
    """Whether Inductor cannot look into this node: a custom operator, a Triton kernel, a higher-order operator."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in ("aten", "prims")
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def is_pure(node: Node) -> bool:
    """Whether the same arguments always give the same value and nothing else happens."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    unfit = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
    return not node.target._schema.is_mutable and not unfit & set(node.target.tags)


def tensor_of(node: Node) -> torch.Tensor | None:
    """The node's fake tensor, if it stands for one tensor whose sizes are all known numbers."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape):
        return value
    return None


def root_of(node: Node) -> Node:
    """The node whose storage `node` is a view of."""
    while node.op == "call_function" and node.target in FREE_VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def written_placeholders(graph: Graph) -> set[Node]:
    """Placeholders that the graph writes into, directly or through a view."""
    written: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for position, argument in enumerate(node.target._schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
                written.update(root_of(item) for item in _nodes_in(value))
        elif isinstance(node.target, torch._ops.HigherOrderOperator) and "functional" not in node.target.name():
            # Triton kernels and other higher-order operators do not say which of their tensors they write.
            written.update(root_of(item) for item in node.all_input_nodes)
    return {node for node in written if node.op == "placeholder"}


def _nodes_in(value: object) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes_in(item)


@dataclass(frozen=True)
class StaticValues:
    """The nodes of a graph that are pure functions of static placeholders (`derived`) or of nothing (`constants`)."""

    placeholders: frozenset[Node]
    derived: frozenset[Node]
    constants: frozenset[Node]

    @staticmethod
    def of(graph: Graph, placeholders: Iterable[Node]) -> StaticValues:
        """Collect them, given the placeholders whose values persist between calls and are not written by the graph."""
        static = {node for node in placeholders if tensor_of(node) is not None}
        derived: set[Node] = set()
        constants: set[Node] = set()
        for node in graph.nodes:
            if not is_pure(node) or not _known_sizes(node):
                continue
            inputs = node.all_input_nodes
            if all(source in constants for source in inputs):
                constants.add(node)
            elif all(source in static or source in derived or source in constants for source in inputs):
                derived.add(node)
        return StaticValues(frozenset(static), frozenset(derived), frozenset(constants))

    def __contains__(self, node: Node) -> bool:
        return node in self.derived or node in self.placeholders or node in self.constants

    def sources(self, node: Node) -> list[Node]:
        """The static placeholders that `node` is computed from, in graph order."""
        return [item for item in self.slice(node) if item.op == "placeholder"]

    def slice(self, node: Node) -> list[Node]:
        """Every node that `node` is computed from, itself included, in graph order."""
        needed: set[Node] = set()
        waiting = [node]
        while waiting:
            item = waiting.pop()
            if item not in needed:
                needed.add(item)
                waiting.extend(item.all_input_nodes)
        return sorted(needed)

    def constant(self, node: Node) -> np.ndarray | None:
        """The value of a constant node, or None where it is too large to be an index or a factor."""
        value = tensor_of(node)
        if node not in self.constants or value is None or value.numel() > 1 << 20:
            return None
        known: dict[Node, Any] = {}
        # Graphs are compiled under a fake mode, in which not even `numpy()` takes a real tensor.
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            for item in self.slice(node):
                known[item] = _on_cpu(item, known)
            result = known[node]
            assert isinstance(result, torch.Tensor)
            return (result.float() if result.dtype.is_floating_point else result).numpy()


def _known_sizes(node: Node) -> bool:
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(part, torch.Tensor) and all(isinstance(size, int) for size in part.shape) for part in parts)


def _on_cpu(node: Node, known: dict[Node, Any]) -> Any:
    """Run one constant node on the CPU, wherever the program would have made it."""
    arguments, keywords = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda item: known[item])
    if "device" in keywords:
        keywords = {**keywords, "device": torch.device("cpu")}
    if node.target is prims.device_put.default:
        return arguments[0]
    return node.target(*arguments, **keywords)  # type: ignore[operator]
