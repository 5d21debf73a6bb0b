"""What each element of a tensor's last dims is made of, read from an FX graph without running it.

A rotation can be spelled in dozens of ways, but whatever the spelling, element ``i`` of the result is ``x[i]·cos[c] ±
x[p]·sin[s]``. So instead of matching spellings, the interpreter follows single elements: every element of a node's
last dims is a signed sum of at most two products of at most two *factors*, and a factor is one column of a *leaf*, a
tensor that is not looked into. Views, slices and concatenations move elements, negation turns their signs,
multiplication and addition combine them.

Only the *trailing* dims of a node (its last, or the few that a reshape made of the last) are followed element by
element. The dims before them, the *leading* dims, are carried along: the elements of a node at a leading index are
made of the leaves' columns at the same index, broadcast and aligned at the right as PyTorch does it. Every operation
here keeps that invariant; where it could not, the node becomes a leaf. A leaf is always true of the graph, so where
to stop is a matter of how much is found, never of whether it is right.

Nodes are read in two modes. As an *operand* of a multiplication, a node is followed through movements only: what the
program computed before, a projection with its bias or a normalisation, is the tensor that is being rotated. As a
*value*, products and sums of products are followed as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node

from rope_fusion.canonical.elements import (
    COMPONENT,
    FLOAT_DTYPES,
    Elements,
    Leaf,
    Opaque,
    static_size,
    tensor,
)
from rope_fusion.canonical.layout import is_one
from rope_fusion.canonical.movements import MOVEMENTS, SPLITS, Follow, arguments, times_unit, trailing_axis
from rope_fusion.canonical.values import ValueNumbering

aten = torch.ops.aten

MAX_WIDTH = (
    1024  # elements followed per node; a wider last dim (a packed projection) becomes a leaf or is not looked at
)
MAX_TERMS = 2
MAX_DEPTH = 200  # nodes between an element and its leaf; keeps Python's own stack out of danger

# products and sums of products, found in one walk

PRODUCT, SUM = 1, 2


def trace_products(graph: Graph, covered: frozenset[Node] = frozenset()) -> dict[Node, int]:
    """PRODUCT for nodes made of products of two tensors by movements alone, SUM where such products have been added.

    Everything else holds no rotation and is never interpreted as a value; nor are the `covered` nodes, known already.
    """
    levels: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node in covered:
            continue
        level = 0
        target = node.target
        if target is aten.mul.Tensor and len(node.all_input_nodes) == 2:
            level = SUM if _is_complex(node) else PRODUCT
        elif target in (aten.add.Tensor, aten.sub.Tensor):
            inputs = [levels.get(source, 0) if isinstance(source, Node) else 0 for source in node.args[:2]]
            level = SUM if all(inputs) else 0
        elif target is aten.addcmul.default or target is aten.sum.dim_IntList:
            level = SUM if levels.get(node.args[0], 0) else 0
        elif target in MOVEMENTS or target in SPLITS:
            level = max((levels.get(source, 0) for source in node.all_input_nodes), default=0)
        if level:
            levels[node] = level
    return levels


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


# the interpreter


@dataclass(frozen=True)
class Choices:
    """Where a graph can be read in two ways. Both are right; a rotation may show in only one of them."""

    # a last dim of this size, reshaped to [2, size / 2], falls into the halves of a head; any other into two heads
    halves_of: int | None = None
    # a concatenation of different tensors is a tensor of its own (the x of a rotation); otherwise it is looked through
    joins_are_leaves: bool = False
    # products beside finished sums wait for their other term (`out[i] -= ...`); otherwise they are passed through
    products_stay: bool = False


class Interpreter:
    """Reads nodes of one graph; what was read is kept, so a whole graph costs O(nodes)."""

    def __init__(self, numbering: ValueNumbering, levels: dict[Node, int], choices: Choices) -> None:
        self.choices = choices
        self.met_two = False  # a reshape that `choices.halves_of` decides was read
        self.met_join = False  # a concatenation that `choices.joins_are_leaves` decides was read
        self.met_unfinished = False  # products beside sums, which `choices.products_stay` decides, were read
        self.leaves: list[Leaf] = []
        self._numbering = numbering
        self._levels = levels
        self._leaf_number: dict[tuple[int, str], int] = {}
        self._read: dict[tuple[Node, bool], Elements | None] = {}
        self._stopped: set[tuple[Node, bool]] = set()
        self._passed: set[tuple[Node, bool]] = set()
        self._depth = 0

    def value(self, node: Any) -> Elements:
        """The elements of `node`, products and sums included."""
        return self.read(node, deep=True)

    def operand(self, node: Any) -> Elements:
        """The elements of `node` as one column each of what was computed before."""
        return self.read(node, deep=False)

    def read(self, node: Any, deep: bool) -> Elements:
        if not isinstance(node, Node):
            raise Opaque
        deep = deep and node in self._levels
        key = (node, deep)
        if key not in self._read:
            self._read[key] = self._follow(node, deep)
        elements = self._read[key]
        if elements is None:
            raise Opaque
        return elements

    def pass_through(self, node: Node, deep: bool) -> None:
        """`node`, a leaf by itself, was followed together with its user."""
        self._passed.add((node, deep and node in self._levels))

    def level(self, node: Node) -> int:
        """PRODUCT, SUM or 0: see `trace_products`."""
        return self._levels.get(node, 0)

    def _follow(self, node: Node, deep: bool) -> Elements | None:
        follow = None
        if node.op == "call_function" and self._depth < MAX_DEPTH:
            follow = (ARITHMETIC.get(node.target) if deep else None) or MOVEMENTS.get(node.target)
        if follow is not None:
            self._depth += 1
            try:
                return follow(self, node, deep)
            except Opaque:
                pass
            finally:
                self._depth -= 1
        self._stopped.add((node, deep))
        return self._leaf(node)

    def _leaf(self, node: Node) -> Elements | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return None
        try:
            width = static_size(value.shape[-1])
        except Opaque:
            return None
        if not 1 < width <= MAX_WIDTH:
            return None
        if value.dtype in FLOAT_DTYPES:
            return self._whole(node, "real", width)
        if value.dtype in COMPONENT:
            return replace(self._whole(node, "real", width), imag=self._whole(node, "imag", width))
        return None

    def _whole(self, node: Node, part: str, width: int) -> Elements:
        # Copies of one computation are one leaf: no common subexpressions have been eliminated yet.
        key = (self._numbering.number(node), part)
        if key not in self._leaf_number:
            self._leaf_number[key] = len(self.leaves)
            self.leaves.append(Leaf(node, part))
        return Elements.of_leaf(self._leaf_number[key], width)

    def inner_nodes(self, out: Node, leaves: Iterable[Node]) -> frozenset[Node]:
        """Every node between `out`, which is included, and the given leaves, which are not."""
        stops = {self._numbering.number(leaf) for leaf in leaves}
        found: set[Node] = set()
        unread: set[Node] = set()
        seen: set[tuple[Node, bool]] = set()
        waiting = [(out, True)]
        while waiting:
            node, deep = waiting.pop()
            key = (node, deep and node in self._levels)
            if key not in self._read and key not in self._passed:
                key = (node, False)  # a factor of a sum
            if key in seen or self._numbering.number(node) in stops:
                continue
            seen.add(key)
            followed = (key in self._read and key not in self._stopped) or key in self._passed
            if followed or node.target in SPLITS:
                found.add(node)
                sources = node.all_input_nodes
                inside = key[1] and not (node.target is aten.mul.Tensor and len(sources) == 2)
                waiting.extend((source, inside) for source in sources)
            elif key not in self._read:
                unread.add(node)
        # What an assignment overwrites without reading it is inside too, where it is a view of something inside.
        return frozenset(found | {node for node in unread if found.issuperset(node.all_input_nodes or [node])})

    def leading(self, number: int) -> Sequence[Any]:
        """Sizes of a leaf's leading dims."""
        return tensor(self.leaves[number].node).shape[:-1]

    def leading_vary(self, elements: Elements, right: int) -> bool:
        """Whether some leaf has leading dims, other than of size 1, to the left of the last `right` ones."""
        for number in elements.leaf_numbers():
            sizes = self.leading(int(number))
            if not all(is_one(size) for size in sizes[: max(len(sizes) - right, 0)]):
                return True
        return False

    def promoted(self, node: Node, elements: Elements, rank: int) -> Elements:
        """`elements` of `node` with leading dims of size 1 counted as trailing, up to `rank` trailing dims."""
        extra = rank - elements.rank
        if extra <= 0:
            return elements
        sizes = tensor(node).shape
        gained = sizes[max(len(sizes) - rank, 0) : len(sizes) - elements.rank]
        # Fewer leading dims than before: leaves stay aligned at the right only where they do not vary at all.
        if not all(is_one(size) for size in gained) or self.leading_vary(elements, 0):
            raise Opaque
        return elements.broadcast((1,) * extra + elements.shape)

    def aligned(self, first: Any, second: Any, deep: bool) -> tuple[Elements, Elements]:
        """The operands of an elementwise operation, broadcast to the same trailing dims."""
        a, b = self.read(first, deep), self.read(second, deep)
        a, b = self.promoted(first, a, b.rank), self.promoted(second, b, a.rank)
        try:
            shape = np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            raise Opaque from None
        return a.broadcast(shape), b.broadcast(shape)


# arithmetic


def _product(a: Elements, b: Elements, sign: int = 1) -> Elements:
    """Elementwise product of operands, which have one term of one factor each."""
    return Elements(sign * a.sign * b.sign, np.concatenate([a.factors, b.factors], -1))


def _sum(a: Elements, b: Elements) -> Elements:
    factors = max(a.factors.shape[-1], b.factors.shape[-1])
    a, b = a.padded(a.sign.shape[-1], factors), b.padded(b.sign.shape[-1], factors)
    return Elements(*_compact(np.concatenate([a.sign, b.sign], -1), np.concatenate([a.factors, b.factors], -2)))


def _compact(sign: np.ndarray, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Terms of sign 0 removed; too many terms are none of a rotation."""
    if sign.shape[-1] <= MAX_TERMS:
        return sign, factors
    if (sign != 0).sum(-1).max() > MAX_TERMS:
        raise Opaque
    order = np.argsort(sign == 0, axis=-1, kind="stable")[..., :MAX_TERMS]
    return np.take_along_axis(sign, order, -1), np.take_along_axis(factors, order[..., None], -2)


def _math_dtype(node: Node) -> torch.dtype:
    dtype = tensor(node).dtype
    dtype = COMPONENT.get(dtype, dtype)
    if dtype not in FLOAT_DTYPES:
        raise Opaque
    return dtype


def _multiply(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    first, second = node.args[:2]
    if not isinstance(first, Node) or not isinstance(second, Node):
        return times_unit(interpreter, node, deep)
    dtypes: frozenset[torch.dtype | None] = frozenset({_math_dtype(node)})
    a, b = interpreter.aligned(first, second, deep=False)
    if a.factors.shape[-1] > 1 or b.factors.shape[-1] > 1:
        raise Opaque
    if a.imag is None and b.imag is None:
        return replace(_product(a, b), dtypes=dtypes)
    if a.imag is None or b.imag is None:
        z, r = (a, b) if a.imag is not None else (b, a)
        assert z.imag is not None
        return replace(_product(z, r), imag=_product(z.imag, r), dtypes=dtypes)
    real = _sum(_product(a, b), _product(a.imag, b.imag, -1))
    imag = _sum(_product(a, b.imag), _product(a.imag, b))
    # how the parts of a complex product are rounded is the kernel's affair, and differs between devices
    return replace(real, imag=imag, dtypes=dtypes | {None})


def _add(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    alpha = node.kwargs.get("alpha", 1)
    if interpreter.level(node) != SUM or alpha not in (1, -1):
        raise Opaque
    a, b = interpreter.aligned(node.args[0], node.args[1], deep=True)
    if a.rounded or b.rounded or (a.imag is None) != (b.imag is None):
        raise Opaque
    if (node.target is aten.sub.Tensor) != (alpha == -1):
        b = b.negated()
    total = _sum(a, b)
    if a.imag is not None and b.imag is not None:
        total = replace(total, imag=_sum(a.imag, b.imag))
    return replace(total, dtypes=a.dtypes | b.dtypes | {_math_dtype(node)})


def _add_product(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    """addcmul: whether the product is rounded before it is added is the kernel's affair."""
    added, first, second = node.args[:3]
    factor = node.kwargs.get("value", 1)
    if factor not in (1, -1):
        raise Opaque
    a, b = interpreter.aligned(first, second, deep=False)
    product = _product(a, b, 1 if factor == 1 else -1)
    base = interpreter.value(added)
    if a.imag is not None or b.imag is not None or base.imag is not None or base.rounded:
        raise Opaque
    if base.shape != product.shape:
        raise Opaque
    return replace(_sum(base, product), dtypes=base.dtypes | {_math_dtype(node), None})


def _sum_dim(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    """The sum over a short trailing dim: the rows of a rotation matrix applied by broadcasting."""
    source, dims, keep = arguments(node, 3)
    elements = interpreter.value(source)
    if node.kwargs or dims is None or len(dims) != 1 or elements.imag is not None or elements.rounded:
        raise Opaque
    axis = trailing_axis(source, dims[0], elements)
    if elements.shape[axis] > MAX_TERMS or elements.rank == 1:
        raise Opaque
    sign = np.moveaxis(elements.sign, axis, -2)
    factors = np.moveaxis(elements.factors, axis, -3)
    sign, factors = _compact(
        sign.reshape(*sign.shape[:-2], -1), factors.reshape(*factors.shape[:-3], -1, factors.shape[-1])
    )
    total = Elements(sign, factors, dtypes=elements.dtypes | {_math_dtype(node)})
    return total.moved(lambda array: np.expand_dims(array, axis)) if keep else total


ARITHMETIC: dict[Any, Follow] = {
    aten.mul.Tensor: _multiply,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _add,
    aten.addcmul.default: _add_product,
    aten.sum.dim_IntList: _sum_dim,
}
