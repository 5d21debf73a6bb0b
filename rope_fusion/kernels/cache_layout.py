"""KV-cache layouts as short strings, and the one 4-D view that every write goes through.

A layout string names the dims of a cache tensor, einops-like, one token per dim::

    "n p h d"     paged: blocks, places in a block, heads, head dim
    "n h p d"     paged, heads before places
    "1 n p h d"   one buffer for K and V, of which this tensor is part 1 (an integer selects an index)
    "n 0 p h d"   likewise, the parts inside each block
    "p h d"       flat: one block that holds every slot
    "p (hd)"      flat, heads and head dim merged into one dim
    "b h p d"     static: one row of places for each batch entry ("b p h d" likewise)
    "n p d[0:64]" columns 0 to 64 of the last dim, for what shares a row with something else
    "n h d/ p /d" a head dim in two parts, the outer one before the places and the inner one after them

Whatever its layout, a cache is seen as ``[blocks, places, heads, dim]`` (``blocks`` is the batch of a static cache).
How a token finds its block and place is the layout's ``addressing``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch

PLACE = "p"
BLOCK = "n"
BATCH = "b"
HEAD = "h"
DIM = "d"
MERGED = "(hd)"
OUTER, INNER = "d/", "/d"
COLUMNS = re.compile(r"d\[(\d+):(\d+)\]")


@dataclass(frozen=True)
class Geometry:
    """The 4-D strided view ``[blocks, places, heads, dim]`` of a cache, in elements from the cache's first one."""

    blocks: int
    places: int
    heads: int
    dim: int
    block_stride: int
    place_stride: int
    head_stride: int
    dim_stride: int
    offset: int

    @property
    def is_linear(self) -> bool:
        """Whether slot ``s`` lies at ``s * place_stride``: no need to split it into block and place."""
        return self.blocks == 1 or self.block_stride == self.places * self.place_stride


@dataclass(frozen=True)
class CacheLayout:
    """A parsed layout string.

    Args:
        text: the string it was parsed from.
        axes: one token for each dim of the cache tensor: a letter, ``"(hd)"``, ``"d/"``, ``"/d"``, the integer index to
            select there, or the (first, last + 1) columns of a head dim.
    """

    text: str
    axes: tuple[str | int | tuple[int, int], ...]

    @property
    def addressing(self) -> str:
        """``"batch"``: token (b, s) goes to block b, place slots[s]; ``"slot"``: slot = block * places + place."""
        return "batch" if BATCH in self.axes else "slot"

    @property
    def rank(self) -> int:
        """Number of dims of a cache tensor in this layout."""
        return len(self.axes)

    def geometry(self, shape: tuple[int, ...], stride: tuple[int, ...], heads: int) -> Geometry:
        """Where ``[block, place, head, element]`` lies in a cache of this shape and stride; pure integer arithmetic.

        Args:
            shape: sizes of the whole cache tensor.
            stride: its strides in elements.
            heads: number of KV heads, needed where the layout merges heads and dims.
        """
        if len(shape) != len(self.axes):
            raise ValueError(
                f"layout {self.text!r} names {len(self.axes)} dims, but the cache has shape {tuple(shape)}"
            )
        size = {BLOCK: 1, PLACE: 1, HEAD: 1, DIM: 1}
        step = {BLOCK: 0, PLACE: 0, HEAD: 0, DIM: 0}
        offset = 0
        for axis, n, s in zip(self.axes, shape, stride, strict=True):
            if isinstance(axis, int):
                offset += axis * s
            elif isinstance(axis, tuple):
                size[DIM], step[DIM] = axis[1] - axis[0], s
                offset += axis[0] * s
            elif axis in (OUTER, INNER):
                size[DIM] *= n  # two strides, hence none that is one
            elif axis == MERGED:
                size[HEAD], size[DIM] = heads, n // heads
                step[HEAD], step[DIM] = (n // heads) * s, s
            else:
                letter = BLOCK if axis == BATCH else axis
                size[letter], step[letter] = n, s
        return Geometry(
            size[BLOCK], size[PLACE], size[HEAD], size[DIM], step[BLOCK], step[PLACE], step[HEAD], step[DIM], offset
        )

    def view(self, cache: torch.Tensor, heads: int) -> torch.Tensor:
        """``cache`` as a view ``[blocks, places, heads, dim]``, by select, narrow, unflatten, unsqueeze and permute only.

        A head dim in two parts stays two dims: ``[blocks, places, heads, outer, inner]``.
        """
        if cache.dim() != len(self.axes):
            raise ValueError(
                f"layout {self.text!r} names {len(self.axes)} dims, but the cache has shape {tuple(cache.shape)}"
            )
        letters: list[str] = []
        for axis in self.axes:
            dim = len(letters)
            if isinstance(axis, int):
                cache = cache.select(dim, axis)
            elif isinstance(axis, tuple):
                cache = cache.narrow(dim, axis[0], axis[1] - axis[0])
                letters.append(DIM)
            elif axis == MERGED:
                cache = cache.unflatten(dim, (heads, -1))
                letters += [HEAD, DIM]
            else:
                letters.append(BLOCK if axis == BATCH else axis)
        for letter in (BLOCK, HEAD):
            if letter not in letters:
                cache = cache.unsqueeze(0)
                letters.insert(0, letter)
        dims = (OUTER, INNER) if OUTER in letters else (DIM,)
        return cache.permute([letters.index(letter) for letter in (BLOCK, PLACE, HEAD, *dims)])


@lru_cache(maxsize=256)
def parse_layout(text: str) -> CacheLayout:
    """Parse a layout string; no place, a dim twice, or both blocks and batch are errors that say so."""
    axes: list[str | int | tuple[int, int]] = [_axis(token) for token in text.split()]
    letters = [letter for axis in axes for letter in _letters(axis)]
    known = {BLOCK, BATCH, PLACE, HEAD, DIM}
    unknown = [letter for letter in letters if letter not in known]
    if unknown:
        raise ValueError(
            f"cache layout {text!r} holds {unknown[0]!r}; known are n, b, p, h, d, (hd), d[from:to], d/ with /d, and integers"
        )
    if (OUTER in axes) != (INNER in axes):
        raise ValueError(f"cache layout {text!r} names one part of the head dim; d/ and /d go together")
    if len(set(letters)) != len(letters):
        raise ValueError(f"cache layout {text!r} names a dim twice")
    if PLACE not in letters or DIM not in letters:
        raise ValueError(f"cache layout {text!r} must name p (place) and d (head dim)")
    if BLOCK in letters and BATCH in letters:
        raise ValueError(f"cache layout {text!r} names both n (block) and b (batch); a cache is paged or static")
    return CacheLayout(text, tuple(axes))


def _axis(token: str) -> str | int | tuple[int, int]:
    if token.isdigit():
        return int(token)
    if columns := COLUMNS.fullmatch(token):
        return int(columns[1]), int(columns[2])
    return token


def _letters(axis: str | int | tuple[int, int]) -> tuple[str, ...]:
    """The dims that a token names."""
    if isinstance(axis, int):
        return ()
    if isinstance(axis, tuple) or axis == OUTER:
        return (DIM,)
    if axis == INNER:
        return ()
    return (HEAD, DIM) if axis == MERGED else (axis,)
