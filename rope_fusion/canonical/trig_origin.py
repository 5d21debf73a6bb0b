"""Where a rotation's cos and sin come from, as far as the graph shows it, and whether they belong together.

Elements cannot tell a cosine from a sine: ``x·sin + turned·cos`` is the rotation by another angle. Nor can they tell
that cos and sin are those of the same position. What the graph shows beyond doubt is held against a rotation.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from rope_fusion.canonical.elements import tensor
from rope_fusion.canonical.movements import MOVEMENTS, SPLITS
from rope_fusion.canonical.values import ValueNumbering

aten = torch.ops.aten

_FUNCTIONS = {aten.cos.default: "cos", aten.sin.default: "sin"}
_SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor})
_GATHERS = frozenset({aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.gather.default})
_CUTS = frozenset({aten.slice.Tensor, aten.select.int, operator.getitem})
_LIMIT = 64  # nodes between a rotation and its tables


@dataclass(frozen=True)
class Origin:
    """Where the values of a trigonometric operand come from; nodes are given by their value numbers."""

    source: int  # the table, or the angles where `function` is known
    function: str | None  # "cos" or "sin" where the graph computes it, None for a table
    rows: tuple[Any, ...]  # the gathers and cuts of other dims than the last on the way
    columns: tuple[Any, ...]  # the cuts of the last dim

    @property
    def is_table(self) -> bool:
        """Whether this is certainly no activation: trigonometric, or gathered."""
        return self.function is not None or any(step[0] in _GATHERS for step in self.rows)


def origin_of(node: Node, numbering: ValueNumbering) -> Origin:
    """Follow one operand up to the function or the table that it is taken from."""
    rows: list[Any] = []
    columns: list[Any] = []
    function = None
    for _ in range(_LIMIT):
        if node.op != "call_function":
            break
        source = _single_source(node, numbering)
        if source is None:
            break
        if node.target in _FUNCTIONS:
            function, node = _FUNCTIONS[node.target], source
            break
        if node.target in _GATHERS:
            rows.append((node.target, *(numbering.number(index) for index in node.all_input_nodes[1:])))
        elif node.target in _CUTS:
            dim, cut = _cut(node, numbering)
            (columns if dim % tensor(source).dim() == tensor(source).dim() - 1 else rows).append(cut)
        node = source
    return Origin(numbering.number(node), function, tuple(rows), tuple(columns))


def _single_source(node: Node, numbering: ValueNumbering) -> Node | None:
    """The tensor whose values `node` holds: moved, scaled by a number or turned into their cosine."""
    inputs = node.all_input_nodes
    target = node.target
    if target is operator.getitem:
        return inputs[0].all_input_nodes[0] if inputs[0].target in SPLITS else None
    if target in _GATHERS or target in _CUTS or target in _FUNCTIONS:
        return inputs[0]
    if target in _SCALED:
        return inputs[0] if len(inputs) == 1 else None
    if target in MOVEMENTS and len({numbering.number(source) for source in inputs}) == 1:
        return inputs[0]
    return None


def _cut(node: Node, numbering: ValueNumbering) -> tuple[int, tuple[Any, ...]]:
    """The dim along which a slice, a selection or a part of a split is taken, and which part it is."""
    part = node.target is operator.getitem
    call = node.all_input_nodes[0] if part else node
    sizes_first = call.target in (aten.split.Tensor, aten.split_with_sizes.default)
    dim: Any = (*call.args, 0, 0)[2 if sizes_first else 1]
    which = [*(call.args[1:2] if sizes_first else call.args[2:]), *(node.args[1:] if part else ())]
    frozen = (numbering.number(item) if isinstance(item, Node) else str(item) for item in which)
    return dim, (call.target, dim, *frozen)


def mismatch(cos: Origin, sin: Origin, same_columns: bool) -> str | None:
    """Why the two are certainly not cos and sin of the same angles, if the graph shows it.

    Args:
        same_columns: whether the same columns of the two operands are used.
    """
    if cos.function == "sin" or sin.function == "cos":
        return "a sine stands where its cosine belongs, or the reverse"
    if cos.function is not None and sin.function is not None and cos.source != sin.source:
        return "its cos and sin are those of different angles"
    # one table may hold cos and sin in different rows, but then in the same columns
    stacked = cos.source == sin.source and cos.function is None and same_columns and cos.columns == sin.columns
    if not stacked and cos.rows and sin.rows and cos.rows != sin.rows:
        return "its cos and sin are taken from different rows"
    return None
