"""Where a rotation's cos and sin come from, as far as the graph shows it, and whether they belong together.

Elements cannot tell a cosine from a sine: ``x·sin + turned·cos`` is the rotation by another angle. Nor can they tell
that cos and sin are those of the same position. What the graph shows beyond doubt is held against a rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from rope_fusion.canonical.elements import tensor
from rope_fusion.canonical.movements import MOVEMENTS
from rope_fusion.canonical.values import ValueNumbering

aten = torch.ops.aten


@dataclass(frozen=True)
class Origin:
    """Where the values of a trigonometric operand come from; numbers are value numbers."""

    function: str | None  # "cos" or "sin" where the graph computes it, None for a table that it is given
    angle: int | None
    rows: tuple[Any, ...]  # how rows were picked on the way: gathers and slices

    @property
    def is_table(self) -> bool:
        return self.function is not None or bool(self.rows)


_GATHERS = frozenset({aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.gather.default})
_FUNCTIONS = {aten.cos.default: "cos", aten.sin.default: "sin"}
_SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor})


def origin_of(node: Node, numbering: ValueNumbering) -> Origin:
    rows: list[Any] = []
    for _ in range(64):
        if node.op != "call_function":
            break
        if node.target in _FUNCTIONS:
            source = node.args[0]
            assert isinstance(source, Node)
            return Origin(_FUNCTIONS[node.target], numbering.number(source), tuple(rows))
        if node.target in _GATHERS:
            others = node.all_input_nodes[1:]
            rows.append((node.target, tuple(numbering.number(other) for other in others)))
        elif node.target is aten.slice.Tensor and not _is_last_dim(node):
            rows.append((node.target, str(node.args[1:])))
        elif node.target in _SCALED:
            if len(node.all_input_nodes) != 1:
                break
        elif node.target not in MOVEMENTS:
            break
        sources = {numbering.number(source): source for source in node.all_input_nodes}
        if not sources or (len(sources) > 1 and node.target not in _GATHERS):
            break
        node = next(iter(sources.values()))
    return Origin(None, None, tuple(rows))


def _is_last_dim(node: Node) -> bool:
    source, dim = (*node.args, 0)[:2]
    return dim in (-1, tensor(source).dim() - 1)


def mismatch(cos: Origin, sin: Origin) -> str | None:
    """Why the two are certainly not cos and sin of the same angles, if the graph shows it."""
    if cos.function == "sin" or sin.function == "cos":
        return "a sine stands where its cosine belongs, or the reverse"
    if None not in (cos.angle, sin.angle) and cos.angle != sin.angle:
        return "its cos and sin are those of different angles"
    if cos.rows and sin.rows and cos.rows != sin.rows:
        return "its cos and sin are taken from different rows"
    return None
