"""Elements of a tensor's last dims as signed sums of products, and what is needed to read shapes from an FX graph.

See `symbolic.py` for what they are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from rope_fusion.canonical.layout import equal

MAX_WIDTH = (
    1024  # elements followed per node; a wider last dim (a packed projection) becomes a leaf or is not looked at
)
MAX_TERMS = 2
MAX_DEPTH = 200  # nodes between an element and its leaf; keeps Python's own stack out of danger
NO_FACTOR = -1
_COLUMN_BITS = 20

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPONENT = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Opaque(Exception):
    """A node cannot be followed: it becomes a leaf, or has no elements at all."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor whose columns elements are made of; of a complex one, `part` says which component ("real" or "imag")."""

    node: Node
    part: str


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a node's trailing dims as signed sums of products.

    sign: int8 ``[*trailing, terms]``, 0 where an element has fewer terms.
    factors: int64 ``[*trailing, terms, factors]``: leaf number and column, or NO_FACTOR.
    imag: for a complex node its imaginary components.
    dtypes: the dtypes in which products and sums were computed; None among them stands for an unknown rounding.
    rounded: whether the finished sums were converted to another dtype.
    """

    sign: np.ndarray
    factors: np.ndarray
    imag: Elements | None = None
    dtypes: frozenset[torch.dtype | None] = frozenset()
    rounded: bool = False

    @staticmethod
    def of_leaf(number: int, width: int) -> Elements:
        """Every column of a leaf, in order."""
        factors = (number << _COLUMN_BITS) + np.arange(width, dtype=np.int64)
        return Elements(np.ones((width, 1), np.int8), factors[:, None, None])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sign.shape[:-1]

    @property
    def rank(self) -> int:
        return self.sign.ndim - 1

    @property
    def has_sums(self) -> bool:
        return self.sign.shape[-1] > 1

    def moved(self, change: Callable[[np.ndarray], np.ndarray]) -> Elements:
        """The same elements elsewhere: `change` acts on the trailing axes, which come first in each array."""
        imag = None if self.imag is None else self.imag.moved(change)
        return replace(self, sign=change(self.sign), factors=change(self.factors), imag=imag)

    def negated(self) -> Elements:
        return replace(self, sign=-self.sign, imag=None if self.imag is None else self.imag.negated())

    def broadcast(self, shape: Sequence[int]) -> Elements:
        """Trailing dims of size 1 repeated, new ones of the given sizes put in front."""
        shape = tuple(shape)
        if self.shape == shape:
            return self
        added = (1,) * (len(shape) - self.rank)

        def spread(array: np.ndarray) -> np.ndarray:
            own = array.shape[self.rank :]
            try:
                return np.broadcast_to(array.reshape(added + array.shape), shape + own)
            except ValueError:
                raise Opaque from None

        return self.moved(spread)

    def padded(self, terms: int, factors: int) -> Elements:
        """Room for more terms and factors, so that arrays of different elements can be put together."""
        lack_terms, lack_factors = terms - self.sign.shape[-1], factors - self.factors.shape[-1]
        if not lack_terms and not lack_factors:
            return self
        plain = [(0, 0)] * self.rank
        sign = np.pad(self.sign, [*plain, (0, lack_terms)])
        wider = np.pad(self.factors, [*plain, (0, lack_terms), (0, lack_factors)], constant_values=NO_FACTOR)
        return replace(self, sign=sign, factors=wider)

    def leaf_numbers(self) -> np.ndarray:
        """The numbers of the leaves that occur, ascending."""
        found = np.unique(leaf_numbers(self.factors[self.factors != NO_FACTOR]))
        return found if self.imag is None else np.union1d(found, self.imag.leaf_numbers())


def leaf_numbers(factors: np.ndarray) -> np.ndarray:
    """Leaf number of each factor."""
    return factors >> _COLUMN_BITS


def columns(factors: np.ndarray) -> np.ndarray:
    """Column of each factor."""
    return factors & ((1 << _COLUMN_BITS) - 1)


def tensor(node: Any) -> torch.Tensor:
    """The fake tensor of a node."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        raise Opaque
    return value


def static_size(size: Any) -> int:
    """A size as a number, also where it is symbolic but has only one value."""
    if isinstance(size, int):
        return size
    number = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    if number is None:
        raise Opaque
    return number


def same_sizes(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two shapes are equal for every input."""
    return len(first) == len(second) and all(a is b or equal(a, b) for a, b in zip(first, second, strict=True))


def same_shape(first: Any, second: Any) -> bool:
    return same_sizes(tensor(first).shape, tensor(second).shape)
