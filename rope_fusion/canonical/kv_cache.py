"""Recogniser of KV-cache writes: which part of which cache a functional write replaces, by what and where.

The search starts at the copies that end a graph (``copy_(placeholder, value)``) and goes back through every write that
the value holds. See `cache_views` for how a write and its cache are matched, `records.CacheWrite` for what is claimed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from rope_fusion.canonical.cache_addressing import NotACacheWrite, address
from rope_fusion.canonical.cache_in_place import emit_in_place, is_already_in_place, write_in_place_expression
from rope_fusion.canonical.cache_reads import OldReads, VersionedWrite
from rope_fusion.canonical.cache_values import before_storage
from rope_fusion.canonical.cache_views import (
    REGION_OF,
    CacheView,
    before_step,
    climb,
    region,
    same_view,
    view_along,
    whole,
)
from rope_fusion.canonical.fp8 import find_fp8_quantisations
from rope_fusion.canonical.layout import equal
from rope_fusion.canonical.records import CacheWrite, Fp8Quantisation
from rope_fusion.canonical.values import ValueNumbering

aten = torch.ops.aten

_ELEMENT_WRITES = frozenset({aten.index_put.default, aten._unsafe_index_put.default, aten.scatter.src})


@dataclass(frozen=True)
class LocatedWrite:
    """A write and the view of the whole cache that it goes into."""

    node: Node
    previous: Node
    view: CacheView  # what node.args[0] holds of `previous`
    path: tuple[Node, ...]  # from `node` to the whole cache after the write
    views: tuple[Node, ...]  # view steps from `previous` on

    @property
    def result(self) -> Node:
        return self.path[-1]


def find_cache_writes(graph: Graph, known: Container[Node] = ()) -> tuple[list[CacheWrite], list[str]]:
    """Every write into a cache that the graph receives, in graph order, and a sentence for each that is none.

    Nodes among `known` write what is recorded already.
    """
    quantisations = {found.out: found for found in find_fp8_quantisations(graph)[0]}
    numbering = ValueNumbering(graph)
    located: list[tuple[Node, LocatedWrite]] = []
    refusals: list[str] = []
    seen: set[Node] = set()
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        base, value = copy.args[0], copy.args[1]
        if not isinstance(base, Node) or base.op != "placeholder" or not isinstance(value, Node):
            continue
        if value.meta["val"].dtype == base.meta["val"].dtype:
            chain, sentence = _chain(base, value, seen)
            located += [(base, write) for write in chain if write.node not in known]
            if sentence is not None:
                refusals.append(sentence)
    refusals += _unreturned(graph, seen)
    writes: list[CacheWrite] = []
    for base, write in located:
        try:
            writes.append(_record(base, write, quantisations, numbering))
        except NotACacheWrite as refused:
            refusals.append(f"the write {write.node.name} into {base.name} is no cache write: {refused}")
    order = {node: at for at, node in enumerate(graph.nodes)}
    writes.sort(key=lambda write: order[write.node])
    if not writes:
        return [], refusals
    reads = OldReads(graph, [VersionedWrite(base, write.node, write.path, write.view) for base, write in located])
    independent: list[CacheWrite] = []
    for record in writes:
        if reads.feed(record.node):
            refusals.append(
                f"the write {record.node.name} into {record.base.name} is no cache write: what it stores is computed "
                "from what the cache held before"
            )
        else:
            independent.append(replace(record, old_value_read=reads.beside(record.node)))
    return independent, refusals


def _chain(base: Node, value: Node, seen: set[Node]) -> tuple[list[LocatedWrite], str | None]:
    """The writes that lead from a cache to the value copied back into it, first to last."""
    chain: list[LocatedWrite] = []
    current = value
    try:
        while current is not base:
            found = _descend(current, whole(base), base) if _same_shape(current, base) else None
            if found is None:
                if not chain:
                    return [], None
                raise NotACacheWrite(f"it goes into {current.name}, not into the cache as the graph received it")
            chain.append(found)
            seen.update(found.path)
            current = found.previous
    except NotACacheWrite as refused:
        seen.update(node for write in chain for node in write.path)
        where = refused.node if refused.node is not None else chain[-1].node
        seen.update((where, *where.all_input_nodes))
        return [], f"the write {where.name} into {base.name} is no cache write: {refused}"
    return chain[::-1], None


def _same_shape(node: Node, base: Node) -> bool:
    value, cache = node.meta.get("val"), base.meta["val"]
    return (
        isinstance(value, Tensor)
        and value.dim() == cache.dim()
        and all(equal(a, b) for a, b in zip(value.shape, cache.shape, strict=True))
    )


def _descend(node: Node, view: CacheView, base: Node) -> LocatedWrite | None:
    """The write that makes `node`, the new value of the part `view` of the cache `base`; None where there is none."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    if target in _ELEMENT_WRITES:
        return _locate(node, view, base)
    if target in REGION_OF:
        written = node.args[1]
        inner: LocatedWrite | None = None
        if isinstance(written, Node) and written.meta["val"].dtype == node.meta["val"].dtype:  # else it is converted
            part = region(view, node, node.args[2:], written.meta["val"].shape)
            inner = _descend(written, part, base) if part is not None else None
        outer = _locate(node, view, base)
        if inner is not None and inner.previous is outer.previous:
            return replace(inner, path=(*inner.path, node), views=(*inner.views, *outer.views))
        return outer
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    before = before_step(view, node)
    inner = _descend(source, before, base) if before is not None else None
    return replace(inner, path=(*inner.path, node)) if inner is not None else None


def _locate(node: Node, view: CacheView, base: Node) -> LocatedWrite:
    """A write whose first argument must be `view` of some value of the cache `base`."""
    target = node.args[0]
    assert isinstance(target, Node)
    root, steps = climb(target)
    # Between two writes the cache may have been viewed otherwise, given its own shape back and viewed so again.
    values = [(root, steps), *[(step, steps[at + 1 :]) for at, step in enumerate(steps)]]
    for previous, rest in values:
        old = view_along(previous, rest) if _same_shape(previous, base) else None
        if old is not None and same_view(old, view):
            return LocatedWrite(node, previous, view, (node,), tuple(rest))
    raise NotACacheWrite(f"its first argument {target.name} is not the part of the cache that it replaces", node)


def _unreturned(graph: Graph, seen: set[Node]) -> list[str]:
    """A sentence for each write into a view of an input that nothing copies back."""
    sentences = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _ELEMENT_WRITES or node in seen:
            continue
        root = climb(node.args[0])[0]
        if root.op == "placeholder" and root.meta["val"].dim() > 1 and root.meta["val"].dtype.is_floating_point:
            training = root.name.startswith("primals")  # AOTAutograd's name for inputs of a graph with a backward
            sentences.append(
                f"the write {node.name} into {root.name} is no cache write: nothing copies its result back"
                + (", because the graph was compiled for training; compile under torch.no_grad()" if training else "")
            )
    return sentences


def _record(
    base: Node, write: LocatedWrite, quantisations: Mapping[Node, Fp8Quantisation], numbering: ValueNumbering
) -> CacheWrite:
    dtype = base.meta["val"].dtype
    if not dtype.is_floating_point and dtype not in (torch.uint8, torch.int8):
        raise NotACacheWrite(f"{base.name} holds {dtype}")
    if any(user.target is aten.as_strided.default for node in write.path for user in node.users):
        raise NotACacheWrite("what it makes is read by strides")
    found = address(base, write.node, write.view, numbering)
    for source, into in ((found.stored.node, write.node), (write.node, base)):
        _check_dtypes(source.meta["val"].dtype, into.meta["val"].dtype, values=into is write.node)
    value, quantisation, passed = before_storage(found.stored, dtype, quantisations)
    return CacheWrite(
        node=write.node,
        base=base,
        previous=write.previous,
        result=write.result,
        layout=found.layout,
        value=value.node,
        value_axes=value.axes,
        slots=found.slots,
        slot_offsets=found.slot_offsets,
        quantisation=quantisation,
        stored=found.stored.node,
        stored_axes=found.stored.axes,
        nodes=frozenset({*write.path, *write.views, *found.nodes, *passed}),
    )


def _check_dtypes(source: torch.dtype, into: torch.dtype, values: bool) -> None:
    """Refuse what is neither a conversion between wide floats (of `values`) nor FP8 seen as bytes (of the cache).

    The fused operators convert floats, and take FP8 and bytes for each other bit by bit.
    """
    if source == into:
        return
    if values and source.is_floating_point and into.is_floating_point and min(source.itemsize, into.itemsize) > 1:
        return
    if not values and source.itemsize == into.itemsize == 1 and source.is_floating_point != into.is_floating_point:
        return
    raise NotACacheWrite(f"{source} is {'converted to' if values else 'written into a view of'} {into}")


__all__ = ["emit_in_place", "find_cache_writes", "is_already_in_place", "write_in_place_expression"]
