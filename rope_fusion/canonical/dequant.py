"""Recognises what a program does to a stored table in every step: dequantise a weight, or cast a whole cos/sin cache.

The recogniser is semantic. It follows single elements of the result backwards through whatever moves, casts and
multiplies them, down to the element of the codes and the element of each scale that they come from, and then asks how
these elements lie to each other: `scale[i, j]` goes with `codes[i // R, j // K]` whether the program expanded the scale
with `repeat_interleave`, a view and a broadcast, an index or a slice assignment. The elements followed are every index of
every dim along two lines, and a few thousand drawn at random.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.fx import Graph, Node

from rope_fusion.canonical.static_values import (
    CASTS,
    MOVEMENTS,
    StaticValues,
    aten,
    is_matrix_product,
    is_opaque,
    prims,
    root_of,
    tensor_of,
)

Coordinates = np.ndarray  # int64 [dims, elements]: where each followed element lies in a tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_CODES = frozenset(
    {torch.int8, torch.uint8, torch.int16, torch.int32}
    | {getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")}
)
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
_SUMS = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar})
_PASTES = frozenset({aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default})
_ARITHMETIC = _PRODUCTS | _SUMS | _PASTES | CASTS
_WALKED = _ARITHMETIC | MOVEMENTS | {aten.index.Tensor, aten.index_select.default}
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
        codes: the quantised weight, a placeholder (or, where the program unpacks it, the unpacked node).
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


class Unrecognised(Exception):
    """The value is no dequantisation; the message says what stood in the way."""


# ------------------------------------------------------------------------------------------------ finding


def find_dequantisations(graph: Graph, static: StaticValues) -> Findings:
    """Every dequantisation of a static weight whose result Inductor would build in memory, in graph order."""
    findings = Findings()
    known: dict[str, _Shape | str] = {}
    for placeholder in graph.nodes:
        value = tensor_of(placeholder) if placeholder.op == "placeholder" else None
        if value is None or value.dtype not in _CODES or value.dim() < 2:
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
    """Every cast of a static floating-point table that an opaque operator reads, so that Inductor must build it whole."""
    casts = []
    for node in graph.nodes:
        if node not in static.derived or node.target not in CASTS:
            continue
        before, after = tensor_of(_input(node)), tensor_of(node)
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
        if any(user.target in _PRODUCTS and user not in static and _reaches_product(user) for user in users):
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
    form = _Follower(static).follow(top, _elements(value.shape))
    if form.codes is None:
        raise Unrecognised("no element comes from quantised codes")
    codes, where = form.codes.node, form.codes.at
    shape = tuple(_tensor(codes).shape)
    flat = np.ravel_multi_index(tuple(where), shape)
    elements = np.ravel_multi_index(tuple(_elements(value.shape)), tuple(value.shape))
    if len(np.unique(flat)) != len(np.unique(elements)):
        raise Unrecognised("elements of the weight are used more than once")
    position = {node: index for index, node in enumerate(nodes)}
    scales = tuple(
        (position[factor.leaf.node], _block(factor.leaf, where, shape), factor.divides) for factor in form.factors
    )
    zero = form.zero
    if isinstance(zero, _Leaf):
        _block(zero, where, shape)
    return _Shape(
        codes=position[codes],
        scales=scales,
        zero=position[zero.node] if isinstance(zero, _Leaf) else zero,
        zero_is_node=isinstance(zero, _Leaf),
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


def _block(leaf: _Leaf, codes: Coordinates, shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many neighbouring codes, per dim, share an element of `leaf`; raises where they do not lie in such blocks."""
    sizes = tuple(_tensor(leaf.node).shape)
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


def _flat_groups(leaf: _Leaf, codes: Coordinates, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Blocks of a scale that is stored flat: groups of neighbours within the rows of the weight."""
    sizes = tuple(_tensor(leaf.node).shape)
    elements = int(np.prod(shape))
    count = int(np.prod(sizes)) if sizes else 1
    if max(sizes, default=1) != count or count <= max(shape) or elements % count or shape[-1] % (elements // count):
        return None
    width = elements // count
    if not np.array_equal(np.ravel_multi_index(tuple(codes), shape) // width, leaf.at.sum(axis=0)):
        return None
    return (*(1 for _ in shape[:-1]), width)


@dataclass(frozen=True)
class _Leaf:
    """Elements `at` of the tensor that `node` stands for."""

    node: Node
    at: Coordinates


@dataclass(frozen=True)
class _Factor:
    leaf: _Leaf
    divides: bool


@dataclass(frozen=True)
class _Form:
    """What the followed elements are: ``(codes - zero) * constant * factors``, without codes a product of factors."""

    codes: _Leaf | None = None
    zero: _Leaf | float | None = None
    constant: float = 1.0
    factors: tuple[_Factor, ...] = ()


class _Follower:
    """Follows elements of a static value backwards to where they come from."""

    def __init__(self, static: StaticValues) -> None:
        self._static = static

    def follow(self, node: Node, at: Coordinates) -> _Form:
        """The form of the elements `at` ``[dims, n]`` of `node`; raises `Unrecognised`."""
        if node.target in CASTS:
            return self._cast(node, at)
        if node.target in _PRODUCTS:
            return self._product(node, at)
        if node.target in _SUMS:
            return self._sum(node, at)
        if node.target in _PASTES:
            return self._paste(node, at)
        if node.target in (aten.cat.default, aten.stack.default):
            return self._joined(node, at)
        if node.target is aten.reciprocal.default:
            form = self.follow(_input(node), at)
            return self._quotient(_Form(), form)
        moved = self._moved(node, at)
        if moved is not None:
            return self.follow(*moved)
        return self._leaf(node, at)

    def _leaf(self, node: Node, at: Coordinates) -> _Form:
        values = self._static.constant(node)
        if values is not None:
            picked = values[tuple(at)] if values.ndim else values
            if picked.size and (picked == picked.flat[0]).all():
                return _Form(constant=float(picked.flat[0]))
            raise Unrecognised("it is combined with constants that vary")
        value = _tensor(node)
        if value.dtype in _CODES:
            return _Form(codes=_Leaf(node, at))
        if value.dtype.is_floating_point:
            return _Form(factors=(_Factor(_Leaf(node, at), False),))
        raise Unrecognised(f"{node.name} is {value.dtype}, neither codes nor a scale")

    def _cast(self, node: Node, at: Coordinates) -> _Form:
        source = _input(node)
        before, after = _tensor(source).dtype, _tensor(node).dtype
        if after.is_floating_point and before.is_floating_point and before not in _CODES:
            return self.follow(source, at)  # between floats (E8M0 included): rounding, not another value
        if after in _CODES and before not in _CODES:
            return _Form(codes=_Leaf(node, at))
        return self.follow(source, at)

    def _product(self, node: Node, at: Coordinates) -> _Form:
        left, right = (self._operand(node, index, at) for index in (0, 1))
        if node.target in (aten.div.Tensor, aten.div.Scalar):
            return self._quotient(left, right)
        if left.codes is not None and right.codes is not None:
            # A scale may be stored as codes too (UE8M0 bytes are not: they are exponents). The smaller one is the scale.
            left, right = (left, right) if _size(left) >= _size(right) else (right, left)
            right = _as_scale(right)
        elif right.codes is not None:
            left, right = right, left
        if right.zero is not None:
            raise Unrecognised("a scale has a zero point of its own")
        return replace(left, constant=left.constant * right.constant, factors=left.factors + right.factors)

    def _quotient(self, left: _Form, right: _Form) -> _Form:
        right = _as_scale(right) if right.codes is not None else right
        if right.constant == 0.0:
            raise Unrecognised("it divides by zero")
        turned = tuple(_Factor(factor.leaf, not factor.divides) for factor in right.factors)
        return replace(left, constant=left.constant / right.constant, factors=left.factors + turned)

    def _sum(self, node: Node, at: Coordinates) -> _Form:
        left, right = (self._operand(node, index, at) for index in (0, 1))
        alpha = float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
        sign = alpha if node.target in (aten.sub.Tensor, aten.sub.Scalar) else -alpha
        if left.codes is None or (right.codes is not None and _size(right) > _size(left)):
            if sign > 0:
                raise Unrecognised("the codes are subtracted")
            left, right = right, left
        if left.codes is None:
            raise Unrecognised("a sum that holds no codes")
        if left.factors or left.constant != 1.0 or left.zero is not None:
            raise Unrecognised("something is added after the scale")
        if right.codes is not None:
            right = _as_scale(right)
        if not right.factors:
            return replace(left, zero=sign * right.constant)
        if len(right.factors) == 1 and right.constant * sign == 1.0 and not right.factors[0].divides:
            return replace(left, zero=right.factors[0].leaf)
        raise Unrecognised("the zero point is itself computed")

    def _operand(self, node: Node, index: int, at: Coordinates) -> _Form:
        operand = node.args[index]
        if not isinstance(operand, Node):
            return _Form(constant=float(operand))  # type: ignore[arg-type]
        sizes = np.array(_tensor(operand).shape, dtype=np.int64)
        own = at[len(at) - len(sizes) :]
        return self.follow(operand, np.where(sizes[:, None] == 1, 0, own))

    def _paste(self, node: Node, at: Coordinates) -> _Form:
        """A slice assignment, functionalised: part of the elements come from the pasted value, the others from below."""
        base, source = node.args[0], node.args[1]
        assert isinstance(base, Node) and isinstance(source, Node)
        if node.target is aten.copy.default:
            sizes = np.array(_tensor(source).shape, dtype=np.int64)
            return self.follow(source, np.where(sizes[:, None] == 1, 0, at[len(at) - len(sizes) :]))
        dim = _number(node, 2, "dim", 0) % len(at)
        if node.target is aten.select_scatter.default:
            start = _number(node, 3, "index", 0) % _tensor(base).shape[dim]
            inside = at[dim] == start
            moved = np.delete(at[:, inside], dim, axis=0)
        else:
            start, step = _start(node, 3, _tensor(base).shape[dim]), _number(node, 5, "step", 1)
            place = (at[dim] - start) // step
            inside = (at[dim] >= start) & ((at[dim] - start) % step == 0) & (place < _tensor(source).shape[dim])
            moved = at[:, inside].copy()
            moved[dim] = place[inside]
        return self._merge([(inside, source, moved), (~inside, base, at[:, ~inside])], at.shape[1])

    def _joined(self, node: Node, at: Coordinates) -> _Form:
        parts = node.args[0]
        assert isinstance(parts, list | tuple)
        dim = _number(node, 1, "dim", 0) % len(at)
        pieces = []
        begin = 0
        for index, part in enumerate(parts):
            assert isinstance(part, Node)
            if node.target is aten.stack.default:
                inside = at[dim] == index
                pieces.append((inside, part, np.delete(at[:, inside], dim, axis=0)))
                continue
            width = _tensor(part).shape[dim]
            inside = (at[dim] >= begin) & (at[dim] < begin + width)
            moved = at[:, inside].copy()
            moved[dim] -= begin
            pieces.append((inside, part, moved))
            begin += width
        return self._merge(pieces, at.shape[1])

    def _merge(self, pieces: Iterable[tuple[np.ndarray, Node, Coordinates]], count: int) -> _Form:
        """One form of elements that come from several places, which must agree in everything but the coordinates."""
        forms = [(inside, self.follow(node, at)) for inside, node, at in pieces if inside.any()]
        first = forms[0][1]
        if len(forms) == 1:
            return first
        for _, form in forms[1:]:
            if _kind(form) != _kind(first):
                raise Unrecognised("parts of it are computed in different ways")

        def joined(leaves: list[_Leaf]) -> _Leaf:
            at = np.zeros((len(leaves[0].at), count), np.int64)
            for (inside, _), leaf in zip(forms, leaves, strict=True):
                at[:, inside] = leaf.at
            return _Leaf(leaves[0].node, at)

        codes = None if first.codes is None else joined([form.codes for _, form in forms if form.codes is not None])
        zero = first.zero
        if isinstance(zero, _Leaf):
            zero = joined([form.zero for _, form in forms if isinstance(form.zero, _Leaf)])
        factors = tuple(
            _Factor(joined([form.factors[index].leaf for _, form in forms]), factor.divides)
            for index, factor in enumerate(first.factors)
        )
        return _Form(codes, zero, first.constant, factors)

    def _moved(self, node: Node, at: Coordinates) -> tuple[Node, Coordinates] | None:
        """Where the elements lie in the one input that `node` only rearranges; None where it does something else."""
        move = _MOVES.get(node.target)
        if move is not None:
            return move(node, at)
        if node.target is aten.index.Tensor:
            return self._indexed(node, at)
        if node.target is aten.index_select.default:
            return self._selected(node, at)
        return None

    def _indexed(self, node: Node, at: Coordinates) -> tuple[Node, Coordinates] | None:
        source, indices = node.args
        assert isinstance(source, Node) and isinstance(indices, list | tuple)
        shape = _tensor(source).shape
        used = [dim for dim, index in enumerate(indices) if index is not None]
        values = [
            self._static.constant(index) if isinstance(index, Node) else None for index in indices if index is not None
        ]
        if any(value is None or value.dtype == np.bool_ for value in values):
            return None
        if used != list(range(used[0], used[-1] + 1)):
            return None
        wide = np.broadcast_arrays(*[value for value in values if value is not None])
        extra = wide[0].ndim - len(used)
        picked = at[used[0] : used[0] + wide[0].ndim]
        rows = [value[tuple(picked)] % shape[dim] for value, dim in zip(wide, used, strict=True)]
        before, after = at[: used[0]], at[used[-1] + 1 + extra :]
        return source, np.concatenate([before, np.array(rows, np.int64).reshape(len(used), -1), after])

    def _selected(self, node: Node, at: Coordinates) -> tuple[Node, Coordinates] | None:
        source, dim, index = node.args
        assert isinstance(source, Node) and isinstance(dim, int) and isinstance(index, Node)
        values = self._static.constant(index)
        if values is None:
            return None
        moved = at.copy()
        moved[dim % len(at)] = values[at[dim % len(at)]]
        return source, moved


def _kind(form: _Form) -> tuple[object, ...]:
    zero = form.zero.node if isinstance(form.zero, _Leaf) else form.zero
    codes = None if form.codes is None else form.codes.node
    return codes, zero, form.constant, tuple((factor.leaf.node, factor.divides) for factor in form.factors)


def _size(form: _Form) -> int:
    return _tensor(form.codes.node).numel() if form.codes is not None else 0


def _as_scale(form: _Form) -> _Form:
    """A scale that is stored in few bits (E4M3 scales): its codes are its values."""
    if form.codes is None or form.zero is not None:
        raise Unrecognised("a scale has a zero point of its own")
    return _Form(constant=form.constant, factors=(_Factor(form.codes, False), *form.factors))


# ------------------------------------------------------------------------------------------------- moving


def _tensor(node: Node) -> torch.Tensor:
    value = tensor_of(node)
    if value is None:
        raise Unrecognised(f"{node.name} has no single known shape")
    return value


def _input(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _number(node: Node, position: int, name: str, default: int) -> int:
    value = node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
    return default if value is None else int(value)  # type: ignore[call-overload, no-any-return]


def _start(node: Node, position: int, size: int) -> int:
    start = _number(node, position, "start", 0)
    return min(max(start + size if start < 0 else start, 0), size)


def _reshaped(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    source = _input(node)
    if not len(at):
        return source, np.zeros((_tensor(source).dim(), at.shape[1]), np.int64)
    flat = np.ravel_multi_index(tuple(at), tuple(_tensor(node).shape))
    shape = tuple(_tensor(source).shape)
    if not shape:
        return source, np.zeros((0, at.shape[1]), np.int64)
    return source, np.array(np.unravel_index(flat, shape), np.int64).reshape(len(shape), -1)


def _same(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    return _input(node), at


def _bits(node: Node, at: Coordinates) -> tuple[Node, Coordinates] | None:
    source = _input(node)
    return (source, at) if _tensor(source).dtype.itemsize == _tensor(node).dtype.itemsize == 1 else None


def _permuted(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    order = node.args[1]
    assert isinstance(order, list | tuple)
    moved = np.empty_like(at)
    for new, old in enumerate(order):
        moved[int(old)] = at[new]  # type: ignore[call-overload]
    return _input(node), moved


def _transposed(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    first, second = _number(node, 1, "dim0", 0), _number(node, 2, "dim1", 1)
    moved = at.copy()
    moved[[first, second]] = at[[second, first]]
    return _input(node), moved


def _turned(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    return _input(node), at[::-1]


def _expanded(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    source = _input(node)
    sizes = np.array(_tensor(source).shape, dtype=np.int64)
    return source, np.where(sizes[:, None] == 1, 0, at[len(at) - len(sizes) :])


def _sliced(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    source = _input(node)
    dim = _number(node, 1, "dim", 0)
    moved = at.copy()
    moved[dim] = _start(node, 2, _tensor(source).shape[dim]) + at[dim] * _number(node, 4, "step", 1)
    return source, moved


def _chosen(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    source = _input(node)
    shape = _tensor(source).shape
    dim = _number(node, 1, "dim", 0) % len(shape)
    return source, np.insert(at, dim, _number(node, 2, "index", 0) % shape[dim], axis=0)


def _repeated(node: Node, at: Coordinates) -> tuple[Node, Coordinates]:
    source = _input(node)
    sizes = np.array(_tensor(source).shape, dtype=np.int64)
    return source, at[len(at) - len(sizes) :] % sizes[:, None]


def _part(node: Node, at: Coordinates) -> tuple[Node, Coordinates] | None:
    """An item of a split or an unbind."""
    split, index = node.args
    if not isinstance(split, Node) or not isinstance(index, int):
        return None
    source = _input(split)
    if split.target is aten.unbind.int:
        return source, np.insert(at, _number(split, 1, "dim", 0) % _tensor(source).dim(), index, axis=0)
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    dim = _number(split, 2, "dim", 0)
    moved = at.copy()
    moved[dim] += sum(part.shape[dim] for part in split.meta["val"][:index])
    return source, moved


def _interleaved(node: Node, at: Coordinates) -> tuple[Node, Coordinates] | None:
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    source = _input(node)
    moved = at.copy()
    if dim is None or not isinstance(node.args[1], int):
        return None
    moved[int(dim)] //= node.args[1]  # type: ignore[call-overload]
    return source, moved


_MOVES: dict[object, Callable[[Node, Coordinates], tuple[Node, Coordinates] | None]] = {
    aten._unsafe_view.default: _reshaped,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.detach.default: _same,
    aten.expand.default: _expanded,
    aten.permute.default: _permuted,
    aten.repeat.default: _repeated,
    aten.repeat_interleave.self_int: _interleaved,
    aten.reshape.default: _reshaped,
    aten.select.int: _chosen,
    aten.slice.Tensor: _sliced,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.t.default: _turned,
    aten.transpose.int: _transposed,
    aten.unsqueeze.default: _reshaped,
    aten.view.default: _reshaped,
    aten.view.dtype: _bits,
    operator.getitem: _part,
    prims.device_put.default: _same,
}
