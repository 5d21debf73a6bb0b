"""Views of interleaved pairs that an engine merged with the view after them, as two views again.

Interleaved RoPE ends in ``stack((first, second), -1).flatten(-2)``. Where a program then merges the heads, an engine that merges
consecutive reshapes (vLLM's NoOpEliminationPass) leaves [..., heads, pairs, 2] -> [..., heads * pairs * 2], and no node holds rotated
heads any more.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.graph_views import size_arguments

aten = torch.ops.aten

RESHAPES = (aten.reshape.default, aten.view.default)


def separate_pair_views(graph: Graph, emitter: Emitter) -> None:
    """Give every such reshape the view [..., heads, pairs * 2] to read."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in RESHAPES:
            continue
        pairs = node.args[0]
        if not isinstance(pairs, Node) or pairs.target is not aten.cat.default:
            continue
        shape, merged = pairs.meta["val"].shape, node.meta["val"].shape
        if len(shape) < 3 or not isinstance(shape[-2], int) or shape[-1] != 2:
            continue
        width = 2 * shape[-2]
        if not isinstance(merged[-1], int) or not width or merged[-1] <= width or merged[-1] % width:
            continue
        sizes = size_arguments(emitter, [*shape[:-2], width], pairs)
        if sizes is not None:
            node.update_arg(0, emitter.call(node.target, pairs, sizes))
