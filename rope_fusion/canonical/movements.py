"""How elements move: what `symbolic.Interpreter` makes of views, slices, concatenations, signs and conversions.

Each function gives the elements of a node from those of its inputs, or raises `Opaque`: then the node becomes a leaf.
All of them keep the leaves' leading dims aligned with the node's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.fx import Node

from rope_fusion.canonical.elements import FLOAT_DTYPES, Elements, Opaque, same_shape, same_sizes, static_size, tensor

if TYPE_CHECKING:
    from rope_fusion.canonical.symbolic import Interpreter

aten = torch.ops.aten
prims = torch.ops.prims

Follow = Callable[["Interpreter", Node, bool], Elements]

_CONVERSIONS = frozenset({prims.convert_element_type.default, aten._to_copy.default})


def _static(*numbers: Any) -> None:
    if not all(number is None or isinstance(number, int) for number in numbers):
        raise Opaque


def _axis(node: Node, dim: int, trailing: int) -> int:
    """Which of the `trailing` last dims of `node` dim `dim` is; negative for a leading dim."""
    rank = tensor(node).dim()
    return dim % rank - (rank - trailing)


def trailing_axis(source: Node, dim: Any, elements: Elements) -> int:
    axis = _axis(source, dim, elements.rank)
    if axis < 0:
        raise Opaque
    return axis


def arguments(node: Node, count: int) -> list[Any]:
    """The first `count` positional arguments, None for those left out."""
    return [*node.args, *(None,) * count][:count]


def _at(axis: int, index: Any) -> tuple[Any, ...]:
    return (*(slice(None),) * axis, index)


def _same(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    return interpreter.read(node.args[0], deep)


def _negate(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    return interpreter.read(node.args[0], deep).negated()


def times_unit(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    """A multiplication or division by 1 or -1; any other number belongs to the leaf that it scales."""
    source, number = arguments(node, 2)
    if isinstance(number, Node) or number not in (1, -1) or tensor(node).dtype != tensor(source).dtype:
        raise Opaque
    elements = interpreter.read(source, deep)
    return elements if number == 1 else elements.negated()


def _slice(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    source, dim, start, end, step = arguments(node, 5)
    elements = interpreter.read(source, deep)
    if step in (None, 1) and same_shape(source, node):
        return elements
    _static(start, end, step)
    axis = trailing_axis(source, dim or 0, elements)
    cut = _at(axis, slice(start, end, step))
    return elements.moved(lambda array: array[cut])


def _select(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    source, dim, index = arguments(node, 3)
    return _taken(source, dim, index, interpreter.read(source, deep))


def _taken(source: Node, dim: Any, index: Any, elements: Elements) -> Elements:
    _static(index)
    axis = trailing_axis(source, dim, elements)
    if elements.rank == 1:
        raise Opaque  # a leading dim would become the last
    return elements.moved(lambda array: array[_at(axis, index)])


def _part(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    """One of the tensors of a split or unbind."""
    bundle, index = node.args
    if not isinstance(bundle, Node) or bundle.target not in SPLITS:
        raise Opaque
    if bundle.target is aten.unbind.int:
        source, dim = arguments(bundle, 2)
        return _taken(source, dim or 0, index, interpreter.read(source, deep))
    source, sizes, dim = arguments(bundle, 3)
    elements = interpreter.read(source, deep)
    axis = trailing_axis(source, dim or 0, elements)
    if not isinstance(index, int):
        raise Opaque
    if isinstance(sizes, (list, tuple)):
        _static(*sizes)
        start = sum(sizes[:index])
        cut = slice(start, start + sizes[index])
    else:
        _static(sizes)
        cut = slice(sizes * index, sizes * (index + 1))
    return elements.moved(lambda array: array[_at(axis, cut)])


SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})


def _unsqueeze(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    source, dim = arguments(node, 2)
    elements = interpreter.read(source, deep)
    rank = tensor(source).dim()
    axis = dim % (rank + 1) - (rank - elements.rank)
    if axis > 0:
        return elements.moved(lambda array: np.expand_dims(array, axis))
    # A leading dim is added: leaves that vary to the left of it would no longer be aligned.
    if elements.rank == 1 or interpreter.leading_vary(elements, -axis):
        raise Opaque
    return elements


def _squeeze(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    source, dims = arguments(node, 2)
    elements = interpreter.read(source, deep)
    axes = sorted(trailing_axis(source, dim, elements) for dim in ([dims] if isinstance(dims, int) else dims))
    if len(axes) >= elements.rank or any(elements.shape[axis] != 1 for axis in axes):
        raise Opaque
    return elements.moved(lambda array: np.squeeze(array, tuple(axes)))


def _expand(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    # Repeating along a leading dim of size 1 is the broadcasting that leading dims allow anyway.
    elements = interpreter.read(node.args[0], deep)
    sizes = tensor(node).shape
    return elements.broadcast([static_size(size) for size in sizes[len(sizes) - elements.rank :]])


def _reshape(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    source = node.args[0]
    elements = interpreter.read(source, deep)
    if same_shape(source, node):
        return elements
    try:
        return _regrouped(interpreter, node, elements)
    except Opaque:
        # columns repeated by unsqueeze and expand, merged into the last dim
        return _regrouped(interpreter, node, _widened(interpreter, source, deep))


def _regrouped(interpreter: Interpreter, node: Node, elements: Elements) -> Elements:
    """`elements` of the input of a reshape as those of its result."""
    before, after = tensor(node.args[0]).shape, tensor(node).shape
    total, product, rank = math.prod(elements.shape), 1, 0
    while rank < len(after) and (product != total or not rank):
        rank += 1
        product *= static_size(after[-rank])
    trailing = tuple(static_size(size) for size in after[len(after) - rank :])
    leading_after = after[: len(after) - rank]
    if product != total or not same_sizes(before[: len(before) - elements.rank], leading_after):
        raise Opaque
    if elements.rank == 1 and rank == 2 and min(trailing) > 1 and trailing[1] != 2:
        # The last dim falls into heads, each a row of its own (and a leaf), or into the two halves of one head.
        if trailing[0] == 2:
            interpreter.met_two = True
        if trailing[0] != 2 or interpreter.choices.halves_of != total:
            raise Opaque
    return elements.moved(lambda array: array.reshape(trailing + array.shape[elements.rank :]))


def _widened(interpreter: Interpreter, node: Any, deep: bool) -> Elements:
    """The elements of `node` with one more trailing dim, where an unsqueeze (and an expand) has just made that dim."""
    source = node.args[0] if isinstance(node, Node) and node.op == "call_function" else None
    if node.target in (aten.clone.default, aten.alias.default, aten.contiguous.default):
        elements = _widened(interpreter, source, deep)
    elif node.target is aten.expand.default:
        elements = _widened(interpreter, source, deep)
        sizes = tensor(node).shape
        elements = elements.broadcast([static_size(size) for size in sizes[len(sizes) - elements.rank :]])
    elif node.target is aten.unsqueeze.default:
        elements = interpreter.read(source, deep)
        rank = tensor(node).dim()
        if node.args[1] % rank != rank - 1 - elements.rank:
            raise Opaque
        elements = elements.moved(lambda array: np.expand_dims(array, 0))
    else:
        raise Opaque
    interpreter.pass_through(node, deep)
    return elements


def _permute(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    source, dims = arguments(node, 2)
    return _reordered(source, dims, interpreter.read(source, deep))


def _transpose(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    source, first, second = arguments(node, 3)
    order = list(range(tensor(source).dim()))
    order[first], order[second] = order[second], order[first]
    return _reordered(source, order, interpreter.read(source, deep))


def _reordered(source: Node, dims: Sequence[int], elements: Elements) -> Elements:
    leading = len(dims) - elements.rank
    order = [dim % len(dims) for dim in dims]
    if order[:leading] != list(range(leading)):
        raise Opaque
    axes = [dim - leading for dim in order[leading:]]
    return elements.moved(lambda array: array.transpose(*axes, *range(elements.rank, array.ndim)))


def _flip(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    source, dims = arguments(node, 2)
    elements = interpreter.read(source, deep)
    axes = tuple(trailing_axis(source, dim, elements) for dim in dims)
    return elements.moved(lambda array: np.flip(array, axes))


def _convert(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    """A conversion between float dtypes.

    Widening is exact, so it is looked through. Narrowing rounds: of a tensor that elements are made of, it makes
    another tensor; of products it is one more rounding, which `dtypes` records; of finished sums it is the rotation's
    own, once.
    """
    if set(node.kwargs) - {"dtype", "memory_format"}:
        raise Opaque
    source = node.args[0]
    elements = interpreter.read(source, deep)
    before, after = tensor(source).dtype, tensor(node).dtype
    if before == after:
        return elements
    if before not in FLOAT_DTYPES or after not in FLOAT_DTYPES:
        raise Opaque
    widens = after.itemsize > before.itemsize
    if not elements.dtypes:
        if not widens:
            raise Opaque
        return elements
    if not elements.has_sums:
        return replace(elements, dtypes=elements.dtypes | {after})
    if elements.rounded or after.itemsize == before.itemsize:
        raise Opaque
    return replace(elements, rounded=True)


def _concatenate(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    sources, dim = arguments(node, 2)
    pieces = [interpreter.read(source, deep) for source in sources]
    rank = max(piece.rank for piece in pieces)
    if _axis(node, dim or 0, rank) == -1:  # a stack just before the last dim
        pieces = _pieces(interpreter, sources, node, deep, _widened)
        rank = max(piece.rank for piece in pieces)
    else:
        pieces = _pieces(interpreter, sources, node, deep)
    pieces = [interpreter.promoted(source, piece, rank) for source, piece in zip(sources, pieces, strict=True)]
    joined = _join(pieces, trailing_axis(node, dim or 0, pieces[0]))
    if not joined.dtypes and len(joined.leaf_numbers()) > 1:
        interpreter.met_join = True
        if interpreter.choices.joins_are_leaves:
            raise Opaque
    return joined


def _read(interpreter: Interpreter, node: Any, deep: bool) -> Elements:
    return interpreter.read(node, deep)


def _pieces(
    interpreter: Interpreter, sources: Sequence[Node], whole: Node, deep: bool, read: Follow = _read
) -> list[Elements]:
    """The elements of tensors that are put together into `whole`.

    Where some pieces hold sums of products and others do not, the others are passed through: they are read as operands,
    so that they are made of the same leaf as the operands of those sums. Beside rounded sums, those that were narrowed
    just before are such operands too.
    """
    if any(tensor(source).dtype != tensor(whole).dtype for source in sources):
        raise Opaque
    pieces = [read(interpreter, source, deep) for source in sources]
    if any(piece.has_sums for piece in pieces):
        for index, piece in enumerate(pieces):
            if piece.dtypes and not piece.has_sums:
                interpreter.met_unfinished = True
            if not piece.has_sums and not interpreter.choices.products_stay:
                pieces[index] = read(interpreter, sources[index], False)
        sums = [piece for piece in pieces if piece.has_sums]
        if all(piece.rounded for piece in sums):
            made_of = {int(number) for piece in sums for number in piece.leaf_numbers()}
            for index, piece in enumerate(pieces):
                if not piece.has_sums and made_of.isdisjoint(map(int, piece.leaf_numbers())):
                    pieces[index] = _before_narrowing(interpreter, sources[index], made_of, read) or piece
    return pieces


def _before_narrowing(interpreter: Interpreter, node: Node, made_of: set[int], read: Follow) -> Elements | None:
    """The elements that a conversion to fewer bits narrows, where they are columns of the given leaves."""
    source = node.args[0] if node.target in _CONVERSIONS else None
    if not isinstance(source, Node) or set(node.kwargs) - {"dtype", "memory_format"}:
        return None
    before, after = tensor(source).dtype, tensor(node).dtype
    if before not in FLOAT_DTYPES or after not in FLOAT_DTYPES or after.itemsize >= before.itemsize:
        return None
    try:
        elements = read(interpreter, source, False)
    except Opaque:
        return None
    if not made_of.issuperset(map(int, elements.leaf_numbers())):
        return None
    interpreter.pass_through(node, False)
    return elements


def _uniform(pieces: Sequence[Elements]) -> list[Elements]:
    if any(piece.imag is not None for piece in pieces):
        raise Opaque
    terms = max(piece.sign.shape[-1] for piece in pieces)
    factors = max(piece.factors.shape[-1] for piece in pieces)
    return [piece.padded(terms, factors) for piece in pieces]


def _join(pieces: Sequence[Elements], axis: int) -> Elements:
    pieces = _uniform(pieces)
    if len({piece.shape[:axis] + piece.shape[axis + 1 :] for piece in pieces}) > 1:
        raise Opaque
    return Elements(
        np.concatenate([piece.sign for piece in pieces], axis),
        np.concatenate([piece.factors for piece in pieces], axis),
        dtypes=frozenset().union(*(piece.dtypes for piece in pieces)),
        rounded=any(piece.rounded for piece in pieces),
    )


def _overwritten(interpreter: Interpreter, node: Node, deep: bool, index: Callable[[Elements], Any]) -> Elements:
    """`node.args[0]` with the elements at `index` replaced by those of `node.args[1]`."""
    base, source = arguments(node, 2)
    old, new = _uniform(_pieces(interpreter, [base, source], node, deep))
    place = index(old)
    sign, factors = old.sign.copy(), old.factors.copy()
    if sign[place].shape != new.sign.shape:
        raise Opaque
    sign[place], factors[place] = new.sign, new.factors
    return Elements(sign, factors, dtypes=old.dtypes | new.dtypes, rounded=old.rounded or new.rounded)


def _slice_scatter(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    base, source, dim, start, end, step = arguments(node, 6)
    if step in (None, 1) and same_shape(base, source):
        if tensor(base).dtype != tensor(source).dtype:
            raise Opaque
        return interpreter.read(source, deep)
    _static(start, end, step)
    return _overwritten(
        interpreter, node, deep, lambda old: _at(trailing_axis(base, dim or 0, old), slice(start, end, step))
    )


def _select_scatter(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    base, _source, dim, index = arguments(node, 4)
    _static(index)
    return _overwritten(interpreter, node, deep, lambda old: _at(trailing_axis(base, dim, old), index))


def _copy(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    target, source = arguments(node, 2)
    if tensor(target).dtype != tensor(source).dtype or not same_shape(target, source):
        raise Opaque
    return interpreter.read(source, deep)


def _as_complex(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    elements = interpreter.read(node.args[0], deep)
    if elements.rank < 2 or elements.shape[-1] != 2 or elements.imag is not None:
        raise Opaque
    last = elements.rank - 1
    real = elements.moved(lambda array: array[_at(last, 0)])
    imag = elements.moved(lambda array: array[_at(last, 1)])
    return replace(real, imag=imag)


def _as_real(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    elements = interpreter.read(node.args[0], deep)
    if elements.imag is None:
        raise Opaque
    axis = elements.rank
    parts = _uniform([replace(elements, imag=None), elements.imag])
    joined = _join([part.moved(lambda array: np.expand_dims(array, axis)) for part in parts], axis)
    return replace(joined, dtypes=elements.dtypes)


def _complex(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    real, imag = interpreter.aligned(node.args[0], node.args[1], deep=False)
    if real.imag is not None or imag.imag is not None:
        raise Opaque
    return replace(real, imag=imag)


def _conjugate(interpreter: Interpreter, node: Node, deep: bool) -> Elements:
    elements = interpreter.read(node.args[0], deep)
    return elements if elements.imag is None else replace(elements, imag=elements.imag.negated())


MOVEMENTS: dict[Any, Follow] = {
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.detach.default: _same,
    aten.neg.default: _negate,
    aten.mul.Tensor: times_unit,
    aten.mul.Scalar: times_unit,
    aten.div.Tensor: times_unit,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    operator.getitem: _part,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.reshape.default: _reshape,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.flip.default: _flip,
    prims.rev.default: _flip,
    aten.cat.default: _concatenate,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.copy.default: _copy,
    prims.convert_element_type.default: _convert,
    aten._to_copy.default: _convert,
    aten.view_as_complex.default: _as_complex,
    aten.view_as_real.default: _as_real,
    aten.complex.default: _complex,
    aten._conj.default: _conjugate,
    aten._conj_physical.default: _conjugate,
}
