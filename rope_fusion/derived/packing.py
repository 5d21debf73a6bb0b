"""Derived weights that only linears on the CPU read: kept in oneDNN's own arrangement, which saves arranging them in every call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from rope_fusion.canonical.cache_views import permutation
from rope_fusion.canonical.static_values import aten, tensor_of
from rope_fusion.kernels.packed_linear import pack_weight, packed_linear, packs

_WORTH_IT = 128 * 128  # elements; a smaller product with one token spends its time on the call (12 µs, mm: 3 µs)


@dataclass(frozen=True)
class Packing:
    """All readers of a weight, which are products that can take it packed.

    Attributes:
        transposed: the value is [K, N]; otherwise it is [N, K], and read through transposing views.
        products: ``mm`` and ``addmm`` nodes.
    """

    transposed: bool
    products: tuple[Node, ...]


def packing_of(weights: Sequence[Node]) -> Packing | None:
    """How the nodes that compute one weight are read, if only by linears on the CPU that gain from packing it."""
    value = tensor_of(weights[0])
    if value is None or value.device.type != "cpu" or value.dim() != 2:
        return None
    if value.numel() < _WORTH_IT or not packs(value.dtype):
        return None
    readers = [user for weight in weights for user in weight.users]
    transposed = not all(reader.target is aten.permute.default and permutation(reader) == [1, 0] for reader in readers)
    operands = list(weights) if transposed else readers
    products: dict[Node, None] = {}
    for operand in operands:
        for product in operand.users:
            if not _is_linear_with(product, operand):
                return None
            products[product] = None
    return Packing(transposed, tuple(products)) if products else None


def _is_linear_with(product: Node, weight: Node) -> bool:
    """``mm(x, weight)`` or ``addmm(bias, x, weight)``, nothing scaled, the bias one row."""
    if product.kwargs:
        return False
    value = weight.meta["val"]
    if product.target is aten.mm.default:
        x, read = product.args
    elif product.target is aten.addmm.default:
        bias, x, read = product.args
        row = tensor_of(bias) if isinstance(bias, Node) else None
        if row is None or row.shape != value.shape[1:] or row.dtype != value.dtype or row.device != value.device:
            return False
    else:
        return False
    return read is weight and x is not weight


def append_packing(graph: Graph, weight: Node, packing: Packing) -> Node:
    """Continue the computation of a weight in `graph` to its packed form."""
    if packing.transposed:
        weight = graph.call_function(aten.permute.default, (weight, [1, 0]))
    return graph.call_function(pack_weight, (weight,))


def stand_in(weight: torch.Tensor, packing: Packing) -> torch.Tensor:
    """What represents a packed weight while compiling: as many rows, and no elements, for generated code has no business with them.

    (Inductor asserts the strides of an input that has elements, and a packed tensor has none.)
    """
    rows = weight.shape[1] if packing.transposed else weight.shape[0]
    return torch.empty(rows, 0, dtype=weight.dtype, device=weight.device)


def read_packed(graph: Graph, packing: Packing, packed: Node) -> None:
    """Let the products read the packed weight."""
    for product in packing.products:
        bias = product.args[0] if product.target is aten.addmm.default else None
        with graph.inserting_before(product):
            new = graph.call_function(packed_linear, (product.args[-2], packed, bias))
        new.meta.update(product.meta)
        product.replace_all_uses_with(new)
