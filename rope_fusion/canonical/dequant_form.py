"""What a static value is, element by element: ``(codes - zero) * constant * scales``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.fx import Node

from rope_fusion.canonical.element_moves import (
    MOVES,
    Coordinates,
    Unrecognised,
    first_input,
    known_tensor,
    number_argument,
    slice_start,
)
from rope_fusion.canonical.static_values import CASTS, StaticValues, aten

CODES = frozenset(
    {torch.int8, torch.uint8, torch.int16, torch.int32}
    | {getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")}
)
PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
SUMS = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar})
PASTES = frozenset({aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default})


@dataclass(frozen=True)
class Leaf:
    """Elements `at` of the tensor that `node` stands for."""

    node: Node
    at: Coordinates


@dataclass(frozen=True)
class Factor:
    leaf: Leaf
    divides: bool


@dataclass(frozen=True)
class Form:
    """What the followed elements are: ``(codes - zero) * constant * factors``, without codes a product of factors."""

    codes: Leaf | None = None
    zero: Leaf | float | None = None
    constant: float = 1.0
    factors: tuple[Factor, ...] = ()


class Follower:
    """Follows elements of a static value backwards to where they come from."""

    def __init__(self, static: StaticValues) -> None:
        self._static = static

    def follow(self, node: Node, at: Coordinates) -> Form:
        """The form of the elements `at` ``[dims, n]`` of `node`; raises `Unrecognised`."""
        if node.target in CASTS:
            return self._cast(node, at)
        if node.target in PRODUCTS:
            return self._product(node, at)
        if node.target in SUMS:
            return self._sum(node, at)
        if node.target in PASTES:
            return self._paste(node, at)
        if node.target in (aten.cat.default, aten.stack.default):
            return self._joined(node, at)
        if node.target is aten.reciprocal.default:
            form = self.follow(first_input(node), at)
            return self._quotient(Form(), form)
        moved = self._moved(node, at)
        if moved is not None:
            return self.follow(*moved)
        if self._is_lookup(node):
            return Form(codes=Leaf(node, at))
        return self._leaf(node, at)

    def _is_lookup(self, node: Node) -> bool:
        """Whether codes are decoded by a table of their values (NF4, FP4)."""
        if node.target is not aten.index.Tensor:
            return False
        table, indices = node.args
        assert isinstance(table, Node) and isinstance(indices, list | tuple)
        value = known_tensor(table)
        return value.dim() == len(indices) == 1 and value.numel() <= 1 << 16

    def _leaf(self, node: Node, at: Coordinates) -> Form:
        values = self._static.constant(node)
        if values is not None:
            picked = values[tuple(at)] if values.ndim else values
            if picked.size and (picked == picked.flat[0]).all():
                return Form(constant=float(picked.flat[0]))
            raise Unrecognised("it is combined with constants that vary")
        value = known_tensor(node)
        if value.dtype in CODES:
            return Form(codes=Leaf(node, at))
        if value.dtype.is_floating_point:
            return Form(factors=(Factor(Leaf(node, at), False),))
        raise Unrecognised(f"{node.name} is {value.dtype}, neither codes nor a scale")

    def _cast(self, node: Node, at: Coordinates) -> Form:
        source = first_input(node)
        before, after = known_tensor(source).dtype, known_tensor(node).dtype
        if after.is_floating_point and before.is_floating_point and before not in CODES:
            return self.follow(source, at)  # between floats (E8M0 included): rounding, not another value
        if after in CODES and before not in CODES:
            return Form(codes=Leaf(node, at))
        try:
            return self.follow(source, at)
        except Unrecognised:
            if before not in CODES:
                raise
            return Form(codes=Leaf(source, at))  # unpacked by the program: what comes out are the codes

    def _product(self, node: Node, at: Coordinates) -> Form:
        left, right = (self._operand(node, index, at) for index in (0, 1))
        if node.target in (aten.div.Tensor, aten.div.Scalar):
            return self._quotient(left, right)
        if left.codes is not None and right.codes is not None:
            # A scale may be stored in few bits too (E4M3 scales). The smaller one is the scale.
            left, right = (left, right) if _size(left) >= _size(right) else (right, left)
            right = _as_scale(right)
        elif right.codes is not None:
            left, right = right, left
        if right.zero is not None:
            raise Unrecognised("a scale has a zero point of its own")
        return replace(left, constant=left.constant * right.constant, factors=left.factors + right.factors)

    def _quotient(self, left: Form, right: Form) -> Form:
        right = _as_scale(right) if right.codes is not None else right
        if right.constant == 0.0:
            raise Unrecognised("it divides by zero")
        turned = tuple(Factor(factor.leaf, not factor.divides) for factor in right.factors)
        return replace(left, constant=left.constant / right.constant, factors=left.factors + turned)

    def _sum(self, node: Node, at: Coordinates) -> Form:
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

    def _operand(self, node: Node, index: int, at: Coordinates) -> Form:
        operand = node.args[index]
        if not isinstance(operand, Node):
            return Form(constant=float(operand))  # type: ignore[arg-type]
        sizes = np.array(known_tensor(operand).shape, dtype=np.int64)
        own = at[len(at) - len(sizes) :]
        return self.follow(operand, np.where(sizes[:, None] == 1, 0, own))

    def _paste(self, node: Node, at: Coordinates) -> Form:
        """A slice assignment, functionalised: some elements come from the pasted value, the others from below."""
        base, source = node.args[0], node.args[1]
        assert isinstance(base, Node) and isinstance(source, Node)
        if node.target is aten.copy.default:
            sizes = np.array(known_tensor(source).shape, dtype=np.int64)
            return self.follow(source, np.where(sizes[:, None] == 1, 0, at[len(at) - len(sizes) :]))
        dim = number_argument(node, 2, "dim", 0) % len(at)
        if node.target is aten.select_scatter.default:
            start = number_argument(node, 3, "index", 0) % known_tensor(base).shape[dim]
            inside = at[dim] == start
            moved = np.delete(at[:, inside], dim, axis=0)
        else:
            start, step = slice_start(node, 3, known_tensor(base).shape[dim]), number_argument(node, 5, "step", 1)
            place = (at[dim] - start) // step
            inside = (at[dim] >= start) & ((at[dim] - start) % step == 0) & (place < known_tensor(source).shape[dim])
            moved = at[:, inside].copy()
            moved[dim] = place[inside]
        return self._merge([(inside, source, moved), (~inside, base, at[:, ~inside])], at.shape[1])

    def _joined(self, node: Node, at: Coordinates) -> Form:
        parts = node.args[0]
        assert isinstance(parts, list | tuple)
        dim = number_argument(node, 1, "dim", 0) % len(at)
        pieces = []
        begin = 0
        for index, part in enumerate(parts):
            assert isinstance(part, Node)
            if node.target is aten.stack.default:
                inside = at[dim] == index
                pieces.append((inside, part, np.delete(at[:, inside], dim, axis=0)))
                continue
            width = known_tensor(part).shape[dim]
            inside = (at[dim] >= begin) & (at[dim] < begin + width)
            moved = at[:, inside].copy()
            moved[dim] -= begin
            pieces.append((inside, part, moved))
            begin += width
        return self._merge(pieces, at.shape[1])

    def _merge(self, pieces: Iterable[tuple[np.ndarray, Node, Coordinates]], count: int) -> Form:
        """One form of elements that come from several places, which must agree in everything but the coordinates."""
        forms = [(inside, self.follow(node, at)) for inside, node, at in pieces if inside.any()]
        first = forms[0][1]
        if len(forms) == 1:
            return first
        for _, form in forms[1:]:
            if _kind(form) != _kind(first):
                raise Unrecognised("parts of it are computed in different ways")

        def joined(leaves: list[Leaf]) -> Leaf:
            at = np.zeros((len(leaves[0].at), count), np.int64)
            for (inside, _), leaf in zip(forms, leaves, strict=True):
                at[:, inside] = leaf.at
            return Leaf(leaves[0].node, at)

        codes = None if first.codes is None else joined([form.codes for _, form in forms if form.codes is not None])
        zero = first.zero
        if isinstance(zero, Leaf):
            zero = joined([form.zero for _, form in forms if isinstance(form.zero, Leaf)])
        factors = tuple(
            Factor(joined([form.factors[index].leaf for _, form in forms]), factor.divides)
            for index, factor in enumerate(first.factors)
        )
        return Form(codes, zero, first.constant, factors)

    def _moved(self, node: Node, at: Coordinates) -> tuple[Node, Coordinates] | None:
        """Where the elements lie in the one input that `node` only rearranges; None where it does something else."""
        move = MOVES.get(node.target)
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
        shape = known_tensor(source).shape
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


def _kind(form: Form) -> tuple[object, ...]:
    zero = form.zero.node if isinstance(form.zero, Leaf) else form.zero
    codes = None if form.codes is None else form.codes.node
    return codes, zero, form.constant, tuple((factor.leaf.node, factor.divides) for factor in form.factors)


def _size(form: Form) -> int:
    return known_tensor(form.codes.node).numel() if form.codes is not None else 0


def _as_scale(form: Form) -> Form:
    """A scale that is stored in few bits (E4M3 scales): its codes are its values."""
    if form.codes is None or form.zero is not None:
        raise Unrecognised("a scale has a zero point of its own")
    return Form(constant=form.constant, factors=(Factor(form.codes, False), *form.factors))
