"""The ways in which programs write a cache, and what a record of such a write means, in plain loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from captured import Captured
from torch import Tensor
from torch.fx import Node

from rope_fusion.canonical.records import CacheWrite

FP8 = torch.float8_e4m3fn
HALF = torch.bfloat16
BLOCKS, PAGE, HEADS, DIM = 6, 4, 2, 8
TOKENS = 3


@dataclass(frozen=True)
class Spelling:
    """One way of writing K (and V) at slots or places; `expected` holds layout and axes of each write."""

    write: Callable[[Tensor, Tensor, Tensor, Tensor], object]  # cache, k, v, slots
    shape: Sequence[int]
    expected: Sequence[tuple[str, str]]
    k_shape: Sequence[int] = (TOKENS, HEADS, DIM)
    dtype: torch.dtype = HALF
    slots: Sequence[int] = (9, 2, 17)
    in_place: bool = False  # Inductor needs no help
    through_views: bool = False  # needs none from torch 2.13 on

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        cache = torch.randn(*self.shape, generator=generator).to(self.dtype)
        k, v = (torch.randn(*self.k_shape, generator=generator).to(HALF) for _ in range(2))
        return cache, k, v, torch.tensor(self.slots)


def pairs(slots: Tensor) -> tuple[Tensor, Tensor]:
    return slots // PAGE, slots % PAGE


def to_fp8(x: Tensor) -> Tensor:
    return (x.float() / 0.5).clamp(-448, 448).to(FP8)


def _put(view: Tensor, index: Any, value: Tensor) -> Tensor:
    view[index] = value
    return view


def _joint(parts: Sequence[Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
    first, second = parts
    first[pairs(slots)] = k * 2
    second[pairs(slots)] = v * 3


def _joint_flat(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    cache[0].view(-1, HEADS, DIM)[slots] = k * 2
    cache[1].view(-1, HEADS, DIM)[slots] = v * 3


def _joint_seen_flat(parts: Sequence[Tensor] | Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    first, second = parts
    first[slots] = k * 2
    second[slots] = v * 3


def _assign(
    target: Callable[[Tensor, Tensor], tuple[Tensor, Any]],
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """A write of k * 2 at an index of a view of the cache."""

    def write(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        view, index = target(cache, slots)
        view[index] = k * 2

    return write


PAGED = (BLOCKS, PAGE, HEADS, DIM)
BHSD = (2, HEADS, 16, DIM)
BSHD = (2, 16, HEADS, DIM)
K_BHSD = (2, HEADS, TOKENS, DIM)
K_BSHD = (2, TOKENS, HEADS, DIM)
TOKEN = [("n p h d", "t h d")]

SPELLINGS: dict[str, Spelling] = {
    "view": Spelling(_assign(lambda c, s: (c.view(-1, HEADS, DIM), s)), PAGED, TOKEN, through_views=True),
    "view, index_copy_": Spelling(
        lambda c, k, v, s: c.view(-1, HEADS, DIM).index_copy_(0, s, k * 2), PAGED, TOKEN, through_views=True
    ),
    "flatten": Spelling(_assign(lambda c, s: (c.flatten(0, 1), s)), PAGED, TOKEN, through_views=True),
    "flattened heads": Spelling(
        lambda c, k, v, s: _put(c.view(-1, HEADS * DIM), s, k.reshape(TOKENS, -1) * 2),
        PAGED,
        [("n p h d", "t (hd)")],
        through_views=True,
    ),
    "pair": Spelling(_assign(lambda c, s: (c, pairs(s))), PAGED, TOKEN, in_place=True),
    "pair by shifts": Spelling(_assign(lambda c, s: (c, (s >> 2, s & 3))), PAGED, TOKEN, in_place=True),
    "heads before places": Spelling(
        _assign(lambda c, s: (c, (s // PAGE, slice(None), s % PAGE))),
        (BLOCKS, HEADS, PAGE, DIM),
        [("n h p d", "t h d")],
        in_place=True,
    ),
    "heads before places, transposed": Spelling(
        _assign(lambda c, s: (c.transpose(1, 2), pairs(s))),
        (BLOCKS, HEADS, PAGE, DIM),
        [("n h p d", "t h d")],
        through_views=True,
    ),
    "slots of batch and sequence": Spelling(
        _assign(lambda c, s: (c.view(-1, HEADS, DIM), s.view(3, 2))),
        PAGED,
        [("n p h d", "b s h d")],
        k_shape=(3, 2, HEADS, DIM),
        slots=(9, 2, 17, 0, 23, 5),
        through_views=True,
    ),
    "flat": Spelling(_assign(lambda c, s: (c, s)), (24, HEADS, DIM), [("p h d", "t h d")], in_place=True),
    "flat, merged heads": Spelling(
        lambda c, k, v, s: _put(c, s, k.reshape(TOKENS, -1) * 2),
        (24, HEADS * DIM),
        [("p (hd)", "t (hd)")],
        in_place=True,
    ),
    "flat, heads split by a view": Spelling(
        _assign(lambda c, s: (c.view(-1, HEADS, DIM), s)),
        (24, HEADS * DIM),
        [("p (hd)", "t h d")],
        through_views=True,
    ),
    "flat, slice": Spelling(
        _assign(lambda c, s: (c, slice(4, 7))), (24, HEADS, DIM), [("p h d", "t h d")], in_place=True
    ),
    "paged, flat slice": Spelling(_assign(lambda c, s: (c.view(-1, HEADS, DIM), slice(6, 9))), PAGED, TOKEN),
    "one block": Spelling(
        _assign(lambda c, s: (c.view(-1, HEADS, DIM), s)), (1, 24, HEADS, DIM), TOKEN, through_views=True
    ),
    "joint": Spelling(_joint_flat, (2, *PAGED), [("0 n p h d", "t h d"), ("1 n p h d", "t h d")]),
    "joint, seen flat as a whole": Spelling(
        lambda c, k, v, s: _joint_seen_flat(c.flatten(1, 2), k, v, s),
        (2, *PAGED),
        [("0 n p h d", "t h d"), ("1 n p h d", "t h d")],
    ),
    "joint, seen flat for each write": Spelling(
        lambda c, k, v, s: _joint_seen_flat((c.view(2, -1, HEADS, DIM)[0], c.view(2, -1, HEADS, DIM)[1]), k, v, s),
        (2, *PAGED),
        [("0 n p h d", "t h d"), ("1 n p h d", "t h d")],
    ),
    "joint, pairs": Spelling(
        lambda c, k, v, s: _joint((c[0], c[1]), k, v, s), (2, *PAGED), [("0 n p h d", "t h d"), ("1 n p h d", "t h d")]
    ),
    "joint, unbind": Spelling(
        lambda c, k, v, s: _joint(c.unbind(0), k, v, s), (2, *PAGED), [("0 n p h d", "t h d"), ("1 n p h d", "t h d")]
    ),
    "joint inside blocks": Spelling(
        lambda c, k, v, s: _joint((c[:, 0], c[:, 1]), k, v, s),
        (BLOCKS, 2, PAGE, HEADS, DIM),
        [("n 0 p h d", "t h d"), ("n 1 p h d", "t h d")],
    ),
    "joint, split": Spelling(
        lambda c, k, v, s: _joint([part.squeeze(1) for part in c.split(1, 1)], k, v, s),
        (BLOCKS, 2, PAGE, HEADS, DIM),
        [("n 0 p h d", "t h d"), ("n 1 p h d", "t h d")],
    ),
    "joint, by layer": Spelling(
        lambda c, k, v, s: _joint((c[1, 0], c[1, -1]), k, v, s),
        (3, 2, *PAGED),
        [("1 0 n p h d", "t h d"), ("1 1 n p h d", "t h d")],
    ),
    "static, index_copy_": Spelling(
        lambda c, k, v, s: c.index_copy_(2, s, k * 2),
        BHSD,
        [("b h p d", "b h s d")],
        K_BHSD,
        slots=(5, 0, 11),
        in_place=True,
    ),
    "static, index": Spelling(
        _assign(lambda c, s: (c, (slice(None), slice(None), s))),
        BHSD,
        [("b h p d", "b h s d")],
        K_BHSD,
        slots=(5, 0, 11),
        in_place=True,
    ),
    "static, sequence first": Spelling(
        _assign(lambda c, s: (c, (slice(None), s))),
        BSHD,
        [("b p h d", "b s h d")],
        K_BSHD,
        slots=(5, 0, 11),
        in_place=True,
    ),
    "static, transposed index_copy_": Spelling(
        lambda c, k, v, s: c.transpose(1, 2).index_copy_(1, s, k * 2),
        BHSD,
        [("b h p d", "b s h d")],
        K_BSHD,
        slots=(5, 0, 11),
    ),
    "static, slice": Spelling(
        _assign(lambda c, s: (c, (slice(None), slice(None), slice(5, 8)))),
        BHSD,
        [("b h p d", "b h s d")],
        K_BHSD,
        in_place=True,
    ),
    "static, slice from the end": Spelling(
        _assign(lambda c, s: (c, (slice(None), slice(None), slice(-3, None)))),
        BHSD,
        [("b h p d", "b h s d")],
        K_BHSD,
        in_place=True,
    ),
    "static, slice of one": Spelling(
        _assign(lambda c, s: (c, (slice(None), slice(5, 6)))),
        BSHD,
        [("b p h d", "b s h d")],
        (2, 1, HEADS, DIM),
        in_place=True,
    ),
    "static, leading rows": Spelling(
        _assign(lambda c, s: (c, (slice(0, 2), slice(5, 8)))),
        (3, 16, HEADS, DIM),
        [("b p h d", "b s h d")],
        K_BSHD,
        in_place=True,
    ),
    "static, one row": Spelling(
        _assign(lambda c, s: (c, (1, slice(5, 8)))), BSHD, [("1 p h d", "t h d")], in_place=True
    ),
    "static, position": Spelling(
        _assign(lambda c, s: (c, (slice(None), slice(None), 5))),
        BHSD,
        [("b h p d", "b h d")],
        (2, HEADS, DIM),
        in_place=True,
    ),
    "static, narrow": Spelling(
        lambda c, k, v, s: c.narrow(1, 5, 3).copy_(k * 2), BSHD, [("b p h d", "b s h d")], K_BSHD, in_place=True
    ),
    "static, transposed slice": Spelling(
        _assign(lambda c, s: (c.transpose(1, 2), (slice(None), slice(5, 8)))), BHSD, [("b h p d", "b s h d")], K_BSHD
    ),
    "static, row and place": Spelling(
        _assign(lambda c, s: (c, (torch.arange(2)[:, None], s.view(2, 3)))),
        BSHD,
        [("n p h d", "b s h d")],
        K_BSHD,
        slots=(5, 0, 11, 1, 2, 3),
        in_place=True,
    ),
    "static, latents": Spelling(
        _assign(lambda c, s: (c, (slice(None), s))),
        (2, 16, DIM),
        [("b p (hd)", "b s (hd)")],
        (2, TOKENS, DIM),
        slots=(5, 0, 11),
        in_place=True,
    ),
    "static, joint slices": Spelling(
        lambda c, k, v, s: (
            _put(c[0], (slice(None), slice(5, 8)), k * 2),
            _put(c[1], (slice(None), slice(5, 8)), v * 3),
        ),
        (2, *BSHD),
        [("0 b p h d", "b s h d"), ("1 b p h d", "b s h d")],
        K_BSHD,
    ),
    "as_strided": Spelling(
        lambda c, k, v, s: torch.as_strided(c, (2, HEADS, 3, DIM), c.stride(), 5 * DIM).copy_(k * 2),
        BHSD,
        [("b h p d", "b h s d")],
        K_BHSD,
        in_place=True,
    ),
    "scatter_": Spelling(
        lambda c, k, v, s: c.view(-1, HEADS * DIM).scatter_(
            0, s[:, None].expand(-1, HEADS * DIM), k.reshape(TOKENS, -1) * 2
        ),
        PAGED,
        [("n p h d", "t (hd)")],
    ),
    "static, scatter_": Spelling(
        lambda c, k, v, s: c.scatter_(2, s.view(1, 1, -1, 1).expand(2, HEADS, -1, DIM), k * 2),
        BHSD,
        [("b h p d", "b h s d")],
        K_BHSD,
        slots=(5, 0, 11),
    ),
    "static, scatter_ by row": Spelling(
        lambda c, k, v, s: c.scatter_(2, s.view(2, 3)[:, None, :, None].expand(2, HEADS, -1, DIM), k * 2),
        BHSD,
        [("b h p d", "b h s d")],
        K_BHSD,
        slots=(5, 0, 11, 1, 2, 3),
    ),
    "another float dtype": Spelling(
        lambda c, k, v, s: _put(c.view(-1, HEADS, DIM), s, (k * 2).to(c.dtype)),
        PAGED,
        TOKEN,
        dtype=torch.float32,
        through_views=True,
    ),
    "FP8": Spelling(
        lambda c, k, v, s: _put(c.view(-1, HEADS, DIM), s, to_fp8(k)), PAGED, TOKEN, dtype=FP8, through_views=True
    ),
    "FP8 as bytes": Spelling(
        lambda c, k, v, s: _put(c.view(torch.uint8).view(-1, HEADS, DIM), s, to_fp8(k).view(torch.uint8)),
        PAGED,
        TOKEN,
        dtype=FP8,
        through_views=True,
    ),
    "FP8 in a cache of bytes": Spelling(
        lambda c, k, v, s: _put(c, pairs(s), to_fp8(k).view(torch.uint8)),
        PAGED,
        TOKEN,
        dtype=torch.uint8,
        in_place=True,
    ),
    "FP8 in a joint cache of bytes": Spelling(
        lambda c, k, v, s: (
            _put(c[0].view(FP8), pairs(s), to_fp8(k)),
            _put(c[1].view(FP8), pairs(s), to_fp8(v)),
        ),
        (2, *PAGED),
        [("0 n p h d", "t h d"), ("1 n p h d", "t h d")],
        dtype=torch.uint8,
    ),
}


def program(spelling: Spelling) -> Callable[..., Tensor]:
    """The write, and a read of the whole cache afterwards, through another view."""

    def call(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        spelling.write(cache, k, v, slots)
        if cache.dtype == FP8:
            cache = cache.view(torch.uint8)
        return cache.transpose(-1, -2).float().cos()

    return call


def stored(found: Captured, write: CacheWrite) -> Tensor:
    """The cache after `write`, by its record: one element after the other."""
    values = found.values()
    cache = values[write.previous].clone()
    value = values[write.value]
    quantisation = write.quantisation
    if quantisation is not None:
        scale = quantisation.scale
        assert isinstance(scale, float)
        limit = torch.finfo(quantisation.dtype).max
        value = (value.to(quantisation.scale_dtype) / scale).clamp(-limit, limit).to(quantisation.dtype)
    if cache.dtype.itemsize == 1 and value.dtype.itemsize == 1:
        cache, value = cache.view(torch.uint8), value.view(torch.uint8)
    value = value.to(cache.dtype)
    store(cache, value, write, values)
    return cache.view(values[write.previous].dtype)


def store(cache: Tensor, value: Tensor, write: CacheWrite, values: dict[Node, Tensor]) -> None:
    """The stores that a record stands for, token by token and head by head."""
    layout, axes = write.layout.split(), write.value_axes.split()
    sizes = dict(zip(axes, value.shape, strict=True))
    slots, offsets = (values[x] if isinstance(x, Node) else x for x in (write.slots, write.slot_offsets))
    heads = sizes.get("h", cache.shape[layout.index("h")] if "h" in layout else 1)
    dim = sizes["d"] if "d" in sizes else sizes["(hd)"] // heads
    tokens = {name: sizes.get(name, 1) for name in ("t", "b", "s")}
    for t, b, s, h in itertools.product(*(range(n) for n in (*tokens.values(), heads))):
        source = {"t": t, "b": b, "s": s, "h": h, "d": slice(None), "(hd)": slice(h * dim, (h + 1) * dim)}
        flat = t if "t" in axes else b * tokens["s"] + s

        def at(
            x: Tensor | int | None, of_row: int = s if "b" in layout else flat, row: int = b, column: int = s
        ) -> int:
            assert x is not None
            if isinstance(x, int):
                return x + of_row
            if x.dim() < 2:
                return int(x.reshape(-1)[of_row])
            return int(x[min(row, x.shape[0] - 1), min(column, x.shape[1] - 1)])

        place, block = at(slots), 0
        if offsets is not None:
            block, place = place, at(offsets)
        elif "n" in layout:
            block, place = divmod(place, cache.shape[layout.index("p")])
        target = {"n": block, "p": place, "b": b, "h": h, "d": slice(None), "(hd)": source["(hd)"]}
        if "(hd)" in layout:
            target["(hd)"] = slice(h * dim, (h + 1) * dim)
        index = tuple(int(name) if name.isdigit() else target[name] for name in layout)
        cache[index] = value[tuple(source[name] for name in axes)]  # type: ignore[index]
