"""Where random decisions come from: a seeded generator for soak runs, hypothesis for tests that shrink."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices(Protocol):
    """What a generator may ask."""

    def pick(self, options: Sequence[T]) -> T:
        """One of `options`; the first is the plainest."""

    def flag(self, percent: int) -> bool:
        """True in about `percent` of a hundred cases."""


class SeededChoices:
    """The same decisions for the same seed, in every process."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        return options[self._random.randrange(len(options))]

    def flag(self, percent: int) -> bool:
        return self._random.randrange(100) < percent


class HypothesisChoices:
    """Decisions drawn by hypothesis: a failing case shrinks towards first options and no flags."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def pick(self, options: Sequence[T]) -> T:
        return options[self._data.draw(st.integers(0, len(options) - 1))]

    def flag(self, percent: int) -> bool:
        return bool(self._data.draw(st.integers(0, 99)) >= 100 - percent)
