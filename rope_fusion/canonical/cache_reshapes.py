"""Reshapes of a cache, in terms of the cache dims that each dim runs over (see `cache_views.CacheView`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rope_fusion.canonical.layout import Atom, Dims, equal, is_one


def regrouped_splitting(dims: Dims, shape: Sequence[Any]) -> Dims | None:
    """The dims of a reshape to `shape`; one cache dim may be split into several and put together again."""
    pending = [atom for dim in dims for atom in dim]
    sizes = [size for size in shape if not is_one(size)]
    groups: list[tuple[Atom, ...]] = []
    while sizes:
        size = sizes.pop(0)
        taken: list[Atom] = []
        product: Any = 1
        while pending and not (taken and equal(product, size)) and not _exceeds(product, size):
            taken.append(pending.pop(0))
            product = math.prod(atom.size for atom in taken)
        if equal(product, size) and taken:
            groups.append(_joined(taken))
            continue
        parts = _split(taken, [size, *sizes])
        if parts is None:
            return None
        sizes = sizes[len(parts) - 1 :]
        groups.extend((part,) for part in parts)
    if pending:
        return None
    remaining = iter(groups)
    return tuple(() if is_one(size) else next(remaining) for size in shape)


def _exceeds(product: Any, size: Any) -> bool:
    return isinstance(product, int) and isinstance(size, int) and product > size


def _split(taken: Sequence[Atom], sizes: Sequence[Any]) -> list[Atom] | None:
    """A whole cache dim as the leading `sizes`."""
    if len(taken) != 1 or not isinstance(taken[0].name, int):
        return None
    for count in range(2, len(sizes) + 1):
        if equal(math.prod(sizes[:count]), taken[0].size):
            return [Atom(size, (taken[0].name, part, count)) for part, size in enumerate(sizes[:count])]
    return None


def _joined(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """`atoms` with all parts of a split dim, where they stand together, as that dim again."""
    joined: list[Atom] = []
    for atom in atoms:
        joined.append(atom)
        if isinstance(atom.name, tuple):
            dim, part, parts = atom.name
            tail = [(other.name if isinstance(other.name, tuple) else None) for other in joined[-parts:]]
            if part == parts - 1 and tail == [(dim, index, parts) for index in range(parts)]:
                size = math.prod(other.size for other in joined[-parts:])
                joined[-parts:] = [Atom(size, dim)]
    return tuple(joined)
