"""Recognises rotary embeddings by what they compute, not by how they are spelled.

A node is a rotation of ``x`` when its elements, read by the interpreter of `symbolic.py`, are ``x[i]·cos[c] ±
x[p]·sin[s]`` with one of the pairings and one of the two sign patterns of a rotation. `Rotation` says the rest. What
is reported is true of the graph for every input: it may be replaced by one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from rope_fusion.canonical.elements import Elements, Leaf, Opaque, same_sizes, static_size, tensor
from rope_fusion.canonical.movements import MOVEMENTS
from rope_fusion.canonical.records import CosSin, Rotation
from rope_fusion.canonical.rotation_form import Form, forms_of
from rope_fusion.canonical.symbolic import MAX_WIDTH, SUM, Choices, Interpreter, trace_products
from rope_fusion.canonical.trig_origin import Origin, mismatch, origin_of
from rope_fusion.canonical.values import ValueNumbering, is_pure

aten = torch.ops.aten
prims = torch.ops.prims

_CONVERSIONS = frozenset({prims.convert_element_type.default, aten._to_copy.default})

# The operators that can be a rotation's last. Others (a slice, a permutation) only move what an earlier node holds.
_LAST = _CONVERSIONS | frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.addcmul.default,
        aten.sum.dim_IntList,
        aten.cat.default,
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
    }
)


def find_rotations(graph: Graph) -> list[Rotation]:
    """Every rotation of a post-grad graph, in graph order; the graph is not changed.

    Each is reported once, at its last node: after the conversion back to the dtype of x, and after its rotated slice
    and the passed-through elements have been put together. Where an earlier form of the result has users of its own,
    that form is the rotation's `out`. Nodes need ``meta["val"]``.
    """
    return [found.rotation for found in _Survey(graph).rotations()]


def find_in_module(module: GraphModule) -> list[Node]:
    """For each rotation of a graph, in graph order, the first node that holds its complete rotated slice."""
    return [found.first for found in _Survey(module.graph).rotations()]


def explain_near_misses(graph: Graph, rotations: Iterable[Rotation]) -> list[str]:
    """One sentence for each reason for which sums that look like rotations are none.

    Args:
        rotations: what `find_rotations` returned for the graph; what they cover needs no explanation.
    """
    covered = {node for rotation in rotations for node in rotation.nodes}
    return _Survey(graph, covered).near_misses()


@dataclass(frozen=True)
class _Found:
    rotation: Rotation
    first: Node  # the first node that holds the complete rotated slice, before a last conversion or concatenation


class _Survey:
    """One pass over a graph."""

    def __init__(self, graph: Graph, covered: Iterable[Node] = ()) -> None:
        self._graph = graph
        self._levels = trace_products(graph, frozenset(covered))
        self._numbering: ValueNumbering | None = None
        self._interpreters: dict[Choices, Interpreter] = {}
        self._origins: dict[Node, Origin] = {}
        self._proven: dict[Choices, None] = {}  # other readings than the plain one in which rotations were found
        self._misses: dict[Node, str] = {}

    def rotations(self) -> list[_Found]:
        candidates: dict[Node, Rotation] = {}
        for node in self._last_nodes():
            rotation = self._recognise(node)
            if rotation is not None:
                candidates[node] = rotation
        return _outermost(self._graph, candidates)

    def near_misses(self) -> list[str]:
        for node in self._last_nodes():
            self._recognise(node)
        # The last node of a chain speaks for those that lead to it.
        reasons: dict[str, list[Node]] = {}
        for node, reason in self._misses.items():
            if not any(self._misses.get(user) for user in _movement_users(node)):
                reasons.setdefault(reason, []).append(node)
        return [f"{_names(nodes)}: {reason}" for reason, nodes in reasons.items()]

    def _last_nodes(self) -> Iterator[Node]:
        for node in self._graph.nodes:
            if self._levels.get(node) == SUM and node.target in _LAST:
                yield node

    def _recognise(self, node: Node) -> Rotation | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.dtype.is_floating_point:
            return None
        try:
            width = static_size(value.shape[-1])
        except Opaque:
            if node.target in (aten.add.Tensor, aten.sub.Tensor) and _turns_one_tensor(node):
                self._misses[node] = (
                    f"looks like a rotation, but its last dim ({value.shape[-1]}) is symbolic, so its elements cannot be "
                    "followed; compile without dynamic=True, and mark dims that do change with mark_dynamic"
                )
            return None
        if not 2 < width <= MAX_WIDTH:
            return None
        reason = None
        for interpreter in self._readings(width):
            result = self._read(interpreter, node)
            if isinstance(result, Rotation):
                if interpreter.choices != Choices():
                    self._proven[interpreter.choices] = None
                return result
            reason = reason or result
        if reason is not None:
            self._misses[node] = reason
        return None

    def _readings(self, width: int) -> Iterator[Interpreter]:
        """The plain reading of the graph, then those that differ from it, if there is anything to read differently."""
        plain = self._interpreter(Choices())
        yield plain
        others = []
        if plain.met_two:
            others.append(Choices(halves_of=width))
        if plain.met_join:
            others.append(Choices(joins_are_leaves=True))
        if plain.met_unfinished:
            others.append(Choices(products_stay=True))
        # What holds a rotation that was found in another reading is found in that one too.
        for choices in dict.fromkeys([*others, *self._proven]):
            yield self._interpreter(choices)

    def _interpreter(self, choices: Choices) -> Interpreter:
        if choices not in self._interpreters:
            self._interpreters[choices] = Interpreter(self._numbers, self._levels, choices)
        return self._interpreters[choices]

    @property
    def _numbers(self) -> ValueNumbering:
        if self._numbering is None:
            self._numbering = ValueNumbering(self._graph)
        return self._numbering

    def _read(self, interpreter: Interpreter, node: Node) -> Rotation | str | None:
        """The rotation that `node` is, the reason why it is almost one, or None."""
        try:
            elements = interpreter.value(node)
        except Opaque:
            return None
        if elements.rank != 1 or elements.imag is not None or not elements.has_sums or not elements.dtypes:
            return None
        form = forms_of(elements)
        if form is None or isinstance(form, str):
            return form
        best: Rotation | None = None
        reason: str | None = None
        for one in form:
            result = self._checked(interpreter, node, elements, one)
            if isinstance(result, Rotation):
                # x and a joined cos/sin table can change places (complex numbers commute): x is what no table is.
                if best is None or (self._origin(best.x).is_table and not self._origin(result.x).is_table):
                    best = result
            else:
                reason = reason or result
        return best or reason

    def _checked(self, interpreter: Interpreter, out: Node, elements: Elements, form: Form) -> Rotation | str | None:
        """The record of a rotation whose elements are right, when its leading dims, cos and sin are right too."""
        x = interpreter.leaves[form.x]
        cos, sin = interpreter.leaves[form.cos], interpreter.leaves[form.sin]
        if x.part != "real" or tensor(x.node).is_complex():
            return None
        leading = tensor(x.node).shape[:-1]
        out_value = tensor(out)
        if not same_sizes(leading, out_value.shape[:-1]):
            return "has the elements of a rotation, but the rotated tensor is broadcast to the shape of the result"
        if out.target in _CONVERSIONS and out_value.dtype != tensor(x.node).dtype:
            return None  # a conversion to another dtype than x's (a quantisation, say) is no part of the rotation
        padded = [_padded(interpreter.leading(number), len(leading)) for number in (form.cos, form.sin)]
        if padded[0] is None or padded[1] is None:
            return "has the elements of a rotation, but its cos or sin has more dims than the rotated tensor"
        if not same_sizes(padded[0], padded[1]):
            return "has the elements of a rotation, but its cos and sin are broadcast over different dims"
        if cos.node is not sin.node:
            same_columns = form.cos_offset == form.sin_offset
            problem = mismatch(self._origin(cos.node), self._origin(sin.node), same_columns)
            if problem is not None:
                return f"has the elements of a rotation, but {problem}"
        problem = _column_mismatch(form, cos, sin)
        if problem is not None:
            return f"has the elements of a rotation, but {problem}"
        math_dtype = next(iter(elements.dtypes)) if len(elements.dtypes) == 1 else None
        return Rotation(
            out=out,
            x=x.node,
            x_offset=form.x_offset,
            width=elements.shape[0],
            start=form.start,
            rotary_dim=form.rotary_dim,
            cos=CosSin(cos.node, form.cos_offset, cos.part),
            sin=CosSin(sin.node, form.sin_offset, sin.part),
            full_width=form.full_width,
            interleaved=form.interleaved,
            inverse=form.inverse,
            halves_out=form.halves_out,
            math_dtype=math_dtype,
            nodes=interpreter.inner_nodes(out, (x.node, cos.node, sin.node)),
        )

    def _origin(self, node: Node) -> Origin:
        if node not in self._origins:
            self._origins[node] = origin_of(node, self._numbers)
        return self._origins[node]


def _padded(sizes: Sequence[Any], rank: int) -> list[Any] | None:
    """Leading sizes with those of size 1 that broadcasting adds; None where there are too many."""
    if len(sizes) > rank:
        return None
    return [1] * (rank - len(sizes)) + list(sizes)


def _column_mismatch(form: Form, cos: Leaf, sin: Leaf) -> str | None:
    """Why columns are not those of cos and sin of the same angles: in one table they lie apart, in two alike."""
    if cos == sin:
        width = form.rotary_dim if form.full_width else form.rotary_dim // 2
        if abs(form.cos_offset - form.sin_offset) < width:
            return f"its cos and sin share columns of one tensor (from {form.cos_offset} and from {form.sin_offset})"
    elif form.cos_offset != form.sin_offset:
        return f"its cos starts at column {form.cos_offset} of one tensor, its sin at {form.sin_offset} of another"
    return None


# which of the nodes that hold one rotation is its last


def _outermost(graph: Graph, candidates: dict[Node, Rotation]) -> list[_Found]:
    """One of the nodes that hold each rotation: the last, unless an earlier one has users outside of it."""
    found: list[_Found] = []
    settled: set[Node] = set()
    live: set[Node] | None = None
    for node in reversed(candidates):
        if node in settled:
            continue
        rotation = candidates[node]
        earlier = [other for other in candidates if other is not node and other in rotation.nodes]
        outside = {user for other in earlier for user in other.users if user not in rotation.nodes}
        if outside:
            live = live if live is not None else _live_nodes(graph)
            if outside & live:
                continue
        settled.update(earlier)
        found.append(_Found(rotation, earlier[0] if earlier else node))
    return found[::-1]


def _live_nodes(graph: Graph) -> set[Node]:
    """The nodes whose values are read in the end: sliced assignments leave some that are not."""
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or not is_pure(node) or any(user in live for user in node.users):
            live.add(node)
    return live


# near misses


def _names(nodes: Sequence[Node]) -> str:
    more = len(nodes) - 1
    return nodes[0].name if not more else f"{nodes[0].name} and {more} more"


def _movement_users(node: Node) -> list[Node]:
    """The nodes that movements, additions and further movements make of `node`."""
    found: list[Node] = []
    waiting, seen = list(node.users), {node}
    while waiting:
        user = waiting.pop()
        if user in seen or user.op != "call_function" or user.target not in MOVEMENTS:
            continue
        seen.add(user)
        found.append(user)
        waiting.extend(user.users)
    return found


def _turns_one_tensor(node: Node) -> bool:
    """Whether two products are added that share a tensor, of which a part is taken; works on symbolic dims."""
    sources = [_sources(product) for product in node.args[:2] if isinstance(product, Node)]
    if len(sources) != 2:
        return False
    cut = any(step.target in _CUTS for found in sources for step in found)
    return cut and bool(sources[0] & sources[1])


_CUTS = frozenset({aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default})


def _sources(node: Node) -> set[Node]:
    """The nodes reached from a product through its operands' movements."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        step = waiting.pop()
        if step in found:
            continue
        found.add(step)
        follows = step.op == "call_function" and (step.target in MOVEMENTS or step.target in _CUTS)
        if follows and (step is node or step.target is not aten.mul.Tensor):
            waiting.extend(step.all_input_nodes)
    return found
