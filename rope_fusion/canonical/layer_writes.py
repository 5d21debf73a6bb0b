"""The last step for writes to caches known by a layer's name: put the operator in place that finds the cache when it runs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from rope_fusion._torch import auto_functionalized, inductor_config
from rope_fusion.canonical.attributes import LayerWriteAttributes, QuantAttributes, RotaryAttributes
from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.layout import is_one
from rope_fusion.canonical.operators import fused_by_layer
from rope_fusion.canonical.records import LayerWrite
from rope_fusion.engines import cache_provider
from rope_fusion.kernels.rope_by_layer import by_layer_operator, encoded_options, takes_opaque_layer

aten = torch.ops.aten

ENGINE_FUSED = {"vllm": "fused_rope_and_unified_kv_cache_update"}


def known_layer(layer: Any) -> Any:
    """What a layer argument holds at compile time: the str or opaque object itself, also behind a graph input."""
    value = layer.meta.get("val") if isinstance(layer, Node) else layer
    return getattr(value, "real_obj", value)


def finish_layer_writes(graph: Graph, emitter: Emitter, writes: Mapping[str, LayerWrite]) -> None:
    """Replace what patterns put in place by the engine's fused operator where it serves the layer, else by ours.

    Args:
        graph: the fused graph.
        emitter: adds nodes to it.
        writes: the original writes by the name of their node.
    """
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target is fused_by_layer]:
        *_, layer_text = node.args
        attributes = LayerWriteAttributes.decode(str(layer_text))
        write = writes[attributes.node]
        outputs = _engine_operator(emitter, node, write)
        if outputs is None:
            outputs = _own_operator(emitter, node, write)
        for user in list(node.users):
            assert user.target is operator.getitem and isinstance(user.args[1], int)
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def _own_operator(emitter: Emitter, node: Node, write: LayerWrite) -> list[Node]:
    q, k, v, cos, sin, positions, q_scale, rotary_text, quant_text, _ = node.args
    rotary = RotaryAttributes.decode(str(rotary_text))
    quant = QuantAttributes.decode(str(quant_text)) if quant_text is not None else None
    original: Any = write.operator
    target = by_layer_operator(original, _outside_cuda_graphs(original))
    call = emitter.call(
        target,
        q,
        k,
        v,
        cos,
        sin,
        positions,
        q_scale,
        write.layer,
        write.provider,
        encoded_options(rotary, quant),
        need_q=True,
        need_k=True,
    )
    return [emitter.call(operator.getitem, call, index) for index in range(4)]


def _outside_cuda_graphs(target: torch._ops.OpOverload) -> bool:
    """Whether the engine keeps its cache update out of CUDA graphs, by tag or by the list that partitions Inductor's graphs."""
    listed = getattr(inductor_config, "custom_should_partition_ops", ())
    return torch.Tag.cudagraph_unsafe in target.tags or any(
        name in (target.name(), target._schema.name, str(target)) for name in listed
    )


def _engine_operator(emitter: Emitter, node: Node, write: LayerWrite) -> list[Node] | None:
    """The engine's own fused operator, where it exists, serves the layer and can express the rotation."""
    q, k, v, cos, sin, positions, _, rotary_text, quant_text, _ = node.args
    provider = cache_provider(write.provider)
    packet = getattr(getattr(torch.ops, write.provider), ENGINE_FUSED.get(write.provider, ""), None)
    rotary = RotaryAttributes.decode(str(rotary_text))
    table = _joined_table(cos, sin)
    if packet is None or table is None or quant_text is not None or positions is None:
        return None
    if (
        rotary.inverse
        or rotary.start
        or rotary.halves_out
        or takes_opaque_layer(packet.default) != takes_opaque_layer(write.operator)
    ):
        return None
    if provider is None or not provider.engine_fuses(known_layer(write.layer)):
        return None
    parts = []
    for part in (q, k, v):
        assert isinstance(part, Node)
        if not is_one(part.meta["val"].shape[0]):
            return None
        parts.append(emitter.call(aten.squeeze.dim, part, 0))
    call = emitter.call(
        auto_functionalized,
        packet.default,
        query=parts[0],
        key=parts[1],
        value=parts[2],
        positions=positions,
        cos_sin_cache=table,
        is_neox=not rotary.interleaved,
        layer_name=write.layer,
    )
    done, new_q, new_k = (emitter.call(operator.getitem, call, index) for index in range(3))
    nothing = done
    return [*(emitter.call(aten.unsqueeze.default, new, 0) for new in (new_q, new_k)), nothing, done]


def _joined_table(cos: Any, sin: Any) -> Node | None:
    """The table whose first half of columns is cos and whose second half is sin."""
    if not isinstance(cos, Node) or not isinstance(sin, Node):
        return None
    if cos.target is not aten.slice.Tensor or sin.target is not aten.slice.Tensor or cos.args[0] is not sin.args[0]:
        return None
    table = cos.args[0]
    assert isinstance(table, Node)
    half = table.meta["val"].shape[-1] // 2
    if tuple(cos.args[1:4]) == (1, 0, half) and tuple(sin.args[1:4]) == (1, half, 2 * half):
        return table
    return None
