"""Whether elements are those of a rotation, and of which one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rope_fusion.canonical.elements import NO_FACTOR, Elements, columns, leaf_numbers


@dataclass(frozen=True)
class Form:
    """A rotation in terms of leaf numbers and columns; see `Rotation`."""

    x: int
    x_offset: int
    start: int
    rotary_dim: int
    cos: int
    cos_offset: int
    sin: int
    sin_offset: int
    full_width: bool
    interleaved: bool
    inverse: bool
    halves_out: bool


@dataclass(frozen=True)
class _Layout:
    """How a rotation of `size` elements pairs them: element i of the result is x[own[i]]·cos ± x[partner[i]]·sin."""

    interleaved: bool
    halves_out: bool
    own: np.ndarray
    partner: np.ndarray
    sign: np.ndarray  # of the sin term
    pair: np.ndarray  # the pair that element i of the result belongs to: its column of a half-width table

    @staticmethod
    def all_of(size: int) -> tuple[_Layout, ...]:
        index, half = np.arange(size), size // 2
        second_half = np.where(index < half, -1, 1)
        swapped = (index + half) % size
        neox = _Layout(False, False, index, swapped, second_half, index % half)
        gptj = _Layout(True, False, index, index ^ 1, np.where(index % 2, 1, -1), index // 2)
        apart = np.concatenate([index[0::2], index[1::2]])
        deepseek = _Layout(True, True, apart, apart[swapped], second_half, index % half)
        return neox, gptj, deepseek


def forms_of(elements: Elements) -> list[Form] | str | None:
    """The rotations that the elements are; a reason why they are almost one; or None."""
    terms = (elements.sign != 0).sum(-1)
    rotated = np.flatnonzero(terms == 2)
    if len(rotated) < 2:
        return None
    sign, factors = elements.sign[rotated], elements.factors[rotated]
    if factors.shape[-1] != 2 or (factors == NO_FACTOR).any():
        return None
    leaf, column = leaf_numbers(factors), columns(factors)
    shared = np.intersect1d(leaf[0, 0], leaf[0, 1])
    forms: list[Form] = []
    reason: str | None = None
    for x in shared:
        is_x = leaf == x
        if not (is_x.sum(-1) == 1).all():
            continue
        terms_of = _Terms.of(sign, is_x, leaf, column)
        if len(rotated) % 2:
            reason = f"looks like a rotation, but of an odd number of elements ({len(rotated)})"
            continue
        if rotated[-1] - rotated[0] + 1 != len(rotated):
            reason = "looks like a rotation, but its rotated elements do not lie together"
            continue
        result = _match(terms_of, int(x))
        if isinstance(result, Form):
            placed = _place(result, elements, terms, rotated)
            if isinstance(placed, Form):
                forms.append(placed)
            else:
                reason = reason or placed
        else:
            reason = reason or result
    return forms or reason


@dataclass(frozen=True)
class _Terms:
    """The two terms of each rotated element, split into x's column and the other factor; arrays are [elements, 2]."""

    sign: np.ndarray
    x: np.ndarray
    other: np.ndarray  # leaf number of the other factor
    column: np.ndarray

    @staticmethod
    def of(sign: np.ndarray, is_x: np.ndarray, leaf: np.ndarray, column: np.ndarray) -> _Terms:
        first = is_x[..., 0]
        return _Terms(
            sign,
            np.where(first, column[..., 0], column[..., 1]),
            np.where(first, leaf[..., 1], leaf[..., 0]),
            np.where(first, column[..., 1], column[..., 0]),
        )


def _match(terms: _Terms, x: int) -> Form | str | None:
    """The rotation of leaf `x` that the terms are, its `x_offset` being the first rotated column and its `start` 0."""
    size = len(terms.sign)
    rows = np.arange(size)
    reason: str | None = None
    for base in sorted({int(column) for column in terms.x[0]}):
        for layout in _Layout.all_of(size):
            is_own = terms.x == (base + layout.own)[:, None]
            if not (is_own.sum(-1) == 1).all():
                continue
            own = is_own.argmax(-1)
            turned = 1 - own
            if not (terms.x[rows, turned] == base + layout.partner).all():
                continue
            cos, sin = terms.other[rows, own], terms.other[rows, turned]
            if (cos != cos[0]).any() or (sin != sin[0]).any():
                reason = reason or "looks like a rotation, but its elements take their cos or sin from several tensors"
                continue
            sin_sign = terms.sign[rows, turned]
            forward, inverse = (sin_sign == layout.sign).all(), (sin_sign == -layout.sign).all()
            if (terms.sign[rows, own] != 1).any() or not (forward or inverse):
                reason = reason or "looks like a rotation, but its signs are not those of one"
                continue
            cos_column, sin_column = terms.column[rows, own], terms.column[rows, turned]
            full_width = _shared_pattern(cos_column, sin_column, layout.pair, rows)
            if full_width is None:
                reason = reason or "looks like a rotation, but the columns of cos and sin do not go with its pairs"
                continue
            return Form(
                x=x,
                x_offset=base,
                start=0,
                rotary_dim=size,
                cos=int(cos[0]),
                cos_offset=int(cos_column[0]),
                sin=int(sin[0]),
                sin_offset=int(sin_column[0]),
                full_width=full_width,
                interleaved=layout.interleaved,
                inverse=not forward,
                halves_out=layout.halves_out,
            )
    return reason


def _shared_pattern(cos: np.ndarray, sin: np.ndarray, pair: np.ndarray, element: np.ndarray) -> bool | None:
    """False when cos and sin have one column per pair, True when one per element, None when neither holds for both."""
    for full_width, pattern in ((False, pair), (True, element)):
        if (cos - cos[0] == pattern).all() and (sin - sin[0] == pattern).all():
            return full_width
    return None


def _place(form: Form, elements: Elements, terms: np.ndarray, rotated: np.ndarray) -> Form | str:
    """The form as part of the whole last dim, when the elements around it are passed through from where x has them."""
    start = int(rotated[0])
    x_offset = form.x_offset - start
    rest = np.setdiff1d(np.arange(len(terms)), rotated)
    sign, factors = elements.sign[rest], elements.factors[rest]
    at = np.argmax(sign != 0, axis=-1)[:, None]
    passed = np.take_along_axis(factors, at[..., None], -2)[:, 0]
    if not (
        (terms[rest] == 1).all()
        and (np.take_along_axis(sign, at, -1) == 1).all()
        and (passed[:, 1:] == NO_FACTOR).all()
        and (leaf_numbers(passed[:, 0]) == form.x).all()
        and (columns(passed[:, 0]) == rest + x_offset).all()
    ):
        return "holds a rotation, but the elements beside it are not those of the rotated tensor"
    return replace(form, x_offset=x_offset, start=start)
