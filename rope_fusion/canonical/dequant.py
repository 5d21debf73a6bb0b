"""Recognises what a program does to a stored table in every step: dequantise a weight, or cast a whole cos/sin cache.

The recogniser is semantic. It follows single elements of the result backwards through whatever moves, casts and
multiplies them, down to the element of the codes and the element of each scale that they come from, and then asks how
these elements lie to each other: `scale[i, j]` goes with `codes[i // R, j // K]` whether the program expanded the scale
with `repeat_interleave`, a view and a broadcast, an index or a slice assignment. The elements followed are every index
of every dim along two lines, and a few thousand drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.fx import Graph, Node

from rope_fusion.canonical.dequant_form import CODES, PASTES, PRODUCTS, SUMS, Follower, Leaf
from rope_fusion.canonical.element_moves import Coordinates, Unrecognised, first_input, known_tensor
from rope_fusion.canonical.static_values import (
    CASTS,
    MOVEMENTS,
    StaticValues,
    aten,
    is_matrix_product,
    is_opaque,
    tensor_of,
)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_ARITHMETIC = PRODUCTS | SUMS | PASTES | CASTS
_UNPACKING = frozenset(
    {
        aten.__and__.Scalar,
        aten.__rshift__.Scalar,
        aten.bitwise_and.Scalar,
        aten.bitwise_and.Tensor,
        aten.bitwise_right_shift.Tensor,
        aten.bitwise_right_shift.Tensor_Scalar,
    }
)
_WALKED = _ARITHMETIC | MOVEMENTS | _UNPACKING | {aten.index.Tensor, aten.index_select.default}
_RANDOM_ELEMENTS = 2048


@dataclass(frozen=True)
class ScaleFactor:
    """One scale of a dequantisation; element `i` of the codes goes with element `i // block` of the scale, per dim."""

    node: Node
    block: tuple[int, ...]  # per dim of the codes: how many share a scale; the dim's size where all do
    divides: bool  # the program divides by it


@dataclass(frozen=True)
class Dequantisation:
    """``out = ((codes - zero) * constant * scales).to(dtype)``, its elements possibly rearranged.

    Attributes:
        out: the last node of the arithmetic; views of it may follow.
        codes: the quantised weight, a placeholder; where the program unpacks it or looks its values up in a table, the
            node with the outcome.
        scales: none for a plain cast whose scale is applied to the product (weight-only INT8 in gpt-fast's spelling).
        zero: the zero point where there is one: a number, or a node that is shaped as a scale may be.
        granularity: "cast", "tensor", "channel" or "block", by the finest scale.
        dtype: of `out`; bf16, fp16 or fp32.
        nodes: everything between the placeholders and `out`, `out` included.
    """

    out: Node
    codes: Node
    scales: tuple[ScaleFactor, ...]
    zero: Node | float | None
    constant: float
    granularity: str
    dtype: torch.dtype
    nodes: frozenset[Node]


@dataclass(frozen=True)
class TableCast:
    """``out = table.to(dtype)`` of a whole floating-point parameter or buffer, or of a fixed part of it."""

    out: Node
    table: Node
    dtype: torch.dtype
    nodes: frozenset[Node]


@dataclass
class Findings:
    """What a graph holds; `refusals` are sentences about what came close, one per place."""

    dequantisations: list[Dequantisation] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------ finding


def find_dequantisations(graph: Graph, static: StaticValues) -> Findings:
    """Every dequantisation of a static weight whose result Inductor would build in memory, in graph order."""
    findings = Findings()
    known: dict[str, _Shape | str] = {}
    for placeholder in graph.nodes:
        value = tensor_of(placeholder) if placeholder.op == "placeholder" else None
        if value is None or value.dtype not in CODES or value.dim() < 2:
            continue
        if placeholder not in static.placeholders:
            if _reaches_product(placeholder):
                findings.refusals.append(
                    f"{placeholder.name} is dequantised, but it is no parameter or buffer that stays"
                )
            continue
        for top in _tops(placeholder, static):
            _classify(top, placeholder, static, known, findings)
    findings.dequantisations = _unique(findings.dequantisations)
    return findings


def find_table_casts(graph: Graph, static: StaticValues) -> list[TableCast]:
    """Every cast of a static floating-point table that an opaque operator reads, so that Inductor builds it whole."""
    casts = []
    for node in graph.nodes:
        if node not in static.derived or node.target not in CASTS:
            continue
        before, after = tensor_of(first_input(node)), tensor_of(node)
        if (
            before is None
            or after is None
            or before.dtype not in (*_FLOATS, torch.float64)
            or after.dtype not in _FLOATS
        ):
            continue
        same = before.dtype == after.dtype and before.device == after.device
        nodes = static.slice(node)
        roots = [item for item in nodes if item.op == "placeholder"]
        moved = all(item.target in MOVEMENTS | CASTS for item in nodes if item.op == "call_function")
        if same or len(roots) != 1 or not moved or not any(is_opaque(user) for user in readers(node)):
            continue
        inner = frozenset(item for item in nodes if item.op == "call_function")
        casts.append(TableCast(node, roots[0], after.dtype, inner))
    return casts


def readers(node: Node) -> list[Node]:
    """The nodes that use `node`, looking through whatever only moves its elements."""
    found, waiting, seen = [], [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "call_function" and user.target in MOVEMENTS:
                waiting.append(user)
            else:
                found.append(user)
    return found


def _tops(placeholder: Node, static: StaticValues) -> list[Node]:
    """The last arithmetic nodes on every path that starts at the codes and stays static."""
    reached, waiting = {placeholder}, [placeholder]
    while waiting:
        for user in waiting.pop().users:
            if user not in reached and user in static.derived and user.target in _WALKED:
                reached.add(user)
                waiting.append(user)
    feeds: set[Node] = set()  # nodes from which further arithmetic is reached
    tops = []
    for node in sorted(reached, reverse=True):
        if node.target in _ARITHMETIC and node not in feeds:
            tops.append(node)
        if node.target in _ARITHMETIC or node in feeds:
            feeds.update(node.all_input_nodes)
    return tops[::-1]


def _classify(
    top: Node, placeholder: Node, static: StaticValues, known: dict[str, _Shape | str], findings: Findings
) -> None:
    value = tensor_of(top)
    if value is None or value.dtype not in _FLOATS:
        return
    users = readers(top)
    if not any(is_matrix_product(user) or is_opaque(user) for user in users):
        if any(user.target in PRODUCTS and user not in static and _reaches_product(user) for user in users):
            findings.refusals.append(f"{placeholder.name} is scaled by a value that depends on the input")
        return
    nodes = static.slice(top)
    key = structure_of(nodes, top)
    if key not in known:
        try:
            known[key] = _analyse(top, nodes, static)
        except Unrecognised as reason:
            known[key] = str(reason)
    shape = known[key]
    if isinstance(shape, str):
        findings.refusals.append(
            f"{placeholder.name} is computed on before its matmul, but is not dequantised: {shape}"
        )
        return
    findings.dequantisations.append(shape.place(top, nodes))


def _reaches_product(node: Node) -> bool:
    """Whether a matrix product or an opaque operator is reached through casts, products and movements alone."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if is_matrix_product(user) or is_opaque(user):
                return True
            if user not in seen and user.target in _WALKED:
                seen.add(user)
                waiting.append(user)
    return False


def _unique(found: Iterable[Dequantisation]) -> list[Dequantisation]:
    """One entry per result, in graph order: a result with two code tensors is found from both."""
    return sorted({item.out: item for item in found}.values(), key=lambda item: item.out)


def structure_of(nodes: Sequence[Node], out: Node) -> str:
    """Text that two computations share exactly if they run the same operators on inputs of the same kinds."""
    names = {node: f"%{index}" for index, node in enumerate(nodes)}
    lines = []
    for node in nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            lines.append(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}")
        else:
            arguments = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda item: _Name(names[item]))
            lines.append(f"{node.target} {arguments}")
    return "\n".join([*lines, names[out]])


class _Name(str):
    """A node's number, printed without quotes so that no string argument looks like it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# ----------------------------------------------------------------------------------------------- analysing


@dataclass(frozen=True)
class _Shape:
    """A dequantisation with the positions of its nodes in the sliced computation, for others of the same structure."""

    codes: int
    scales: tuple[tuple[int, tuple[int, ...], bool], ...]
    zero: int | float | None
    zero_is_node: bool
    constant: float
    granularity: str
    dtype: torch.dtype

    def place(self, top: Node, nodes: Sequence[Node]) -> Dequantisation:
        scales = tuple(ScaleFactor(nodes[index], block, divides) for index, block, divides in self.scales)
        zero = nodes[int(self.zero)] if self.zero_is_node and self.zero is not None else self.zero
        inner = frozenset(node for node in nodes if node.op == "call_function")
        return Dequantisation(top, nodes[self.codes], scales, zero, self.constant, self.granularity, self.dtype, inner)


def _analyse(top: Node, nodes: Sequence[Node], static: StaticValues) -> _Shape:
    value = tensor_of(top)
    assert value is not None
    form = Follower(static).follow(top, _elements(value.shape))
    if form.codes is None:
        raise Unrecognised("no element comes from quantised codes")
    codes, where = form.codes.node, form.codes.at
    shape = tuple(known_tensor(codes).shape)
    flat = np.ravel_multi_index(tuple(where), shape)
    elements = np.ravel_multi_index(tuple(_elements(value.shape)), tuple(value.shape))
    if len(np.unique(flat)) != len(np.unique(elements)):
        raise Unrecognised("elements of the weight are used more than once")
    position = {node: index for index, node in enumerate(nodes)}
    scales = tuple(
        (position[factor.leaf.node], _block(factor.leaf, where, shape), factor.divides) for factor in form.factors
    )
    zero = form.zero
    if isinstance(zero, Leaf):
        _block(zero, where, shape)
    return _Shape(
        codes=position[codes],
        scales=scales,
        zero=position[zero.node] if isinstance(zero, Leaf) else zero,
        zero_is_node=isinstance(zero, Leaf),
        constant=form.constant,
        granularity=_granularity([block for _, block, _ in scales], shape, form.constant),
        dtype=value.dtype,
    )


def _granularity(blocks: Iterable[tuple[int, ...]], shape: tuple[int, ...], constant: float) -> str:
    order = ("cast", "tensor", "channel", "block")
    finest = 0 if constant == 1.0 else 1
    for block in blocks:
        varying = [b for b, size in zip(block, shape, strict=True) if b < size]
        finest = max(finest, 1 if not varying else 2 if varying == [1] else 3)
    return order[finest]


def _elements(shape: Sequence[int]) -> Coordinates:
    """Coordinates of the elements to follow: two lines along every dim, and random ones (always the same)."""
    sizes = np.array(shape, dtype=np.int64)
    random = np.random.default_rng(0)
    parts = [random.integers(0, sizes[:, None], (len(shape), _RANDOM_ELEMENTS))]
    for dim, size in enumerate(shape):
        for corner in (np.zeros(len(shape), np.int64), sizes - 1):
            line = np.repeat(corner[:, None], size, axis=1)
            line[dim] = np.arange(size)
            parts.append(line)
    return np.concatenate(parts, axis=1)


def _block(leaf: Leaf, codes: Coordinates, shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many neighbouring codes, per dim, share an element of `leaf`; raises where they do not lie in such blocks."""
    sizes = tuple(known_tensor(leaf.node).shape)
    block = list(shape)
    flat = _flat_groups(leaf, codes, shape)
    if flat is not None:
        return flat
    taken: set[int] = set()
    for dim, size in enumerate(sizes):
        if size == 1 or not leaf.at[dim].any():
            continue
        for axis, length in enumerate(shape):
            if axis in taken:
                continue
            later = codes[axis][leaf.at[dim] > 0]
            width = int(later.min()) if later.size else length
            if width and np.array_equal(codes[axis] // width, leaf.at[dim]):
                block[axis] = width
                taken.add(axis)
                break
        else:
            raise Unrecognised(
                f"the scale {leaf.node.name} {list(sizes)} does not follow blocks of the weight {list(shape)}"
            )
    return tuple(block)


def _flat_groups(leaf: Leaf, codes: Coordinates, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Blocks of a scale that is stored flat: groups of neighbours within the rows of the weight."""
    sizes = tuple(known_tensor(leaf.node).shape)
    elements = int(np.prod(shape))
    count = int(np.prod(sizes)) if sizes else 1
    if max(sizes, default=1) != count or count <= max(shape) or elements % count or shape[-1] % (elements // count):
        return None
    width = elements // count
    if not np.array_equal(np.ravel_multi_index(tuple(codes), shape) // width, leaf.at.sum(axis=0)):
        return None
    return (*(1 for _ in shape[:-1]), width)
