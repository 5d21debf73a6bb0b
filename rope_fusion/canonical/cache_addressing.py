"""How a write addresses a cache: its layout, the slots, and the roles of the dims of what it stores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from rope_fusion.canonical.cache_values import StoredValue, named
from rope_fusion.canonical.cache_views import REGION_OF, CacheView, Index, region, slice_start
from rope_fusion.canonical.fp8_scale import ORDER_PRESERVING
from rope_fusion.canonical.layout import Atom, Dims, equal, is_one
from rope_fusion.canonical.slot_pairs import SLOT_DTYPES, slots_of_pair
from rope_fusion.canonical.values import ValueNumbering

aten = torch.ops.aten


class NotACacheWrite(Exception):
    """Why a write is none; the message completes "it is none because"."""

    def __init__(self, sentence: str, node: Node | None = None) -> None:
        super().__init__(sentence)
        self.node = node


@dataclass(frozen=True)
class Address:
    """Where and what a write stores, in the terms of `records.CacheWrite`."""

    layout: str
    slots: Node | int
    slot_offsets: Node | None
    stored: StoredValue
    nodes: frozenset[Node]


@dataclass
class _Target:
    """A write whose dims have no names yet.

    Attributes:
        place: cache dim that the slots address.
        block: cache dim of the blocks, where there are any.
        dims: the dims of the region written, as in a `CacheView`; dims over the slots hold an atom named `_TOKEN`.
        selected: cache dims of which the write touches one position only, apart from `place`.
        ranges: cache dims of which it touches a part only, apart from `place`.
        per_row: the slots are [batch, sequence].
        nodes: nodes that belong to the write besides the write itself.
    """

    place: int
    block: int | None
    slots: Node | int
    dims: list[tuple[Atom, ...]]
    value: Node
    selected: Mapping[int, Index]
    ranges: Mapping[int, tuple[Index, Any]]
    slot_offsets: Node | None = None
    per_row: bool = False
    nodes: set[Node] = field(default_factory=set)


_TOKEN = "token"


def address(base: Node, node: Node, view: CacheView, numbering: ValueNumbering) -> Address:
    """The address of the write `node` into the part `view` of `base`; `NotACacheWrite` says why it has none."""
    if node.target is aten.as_strided_scatter.default:
        target = _of_as_strided_scatter(node, view)
    elif node.target in REGION_OF:
        target = _of_region_scatter(node, view)
    elif node.target is aten.scatter.src:
        target = _of_scatter(node, view)
    else:
        target = _of_index_put(node, view, numbering)
    rank = base.meta["val"].dim()
    names = _names(rank, target)
    stored = StoredValue(target.value, _value_dims(rank, target, names))
    layout = " ".join(names[dim] for dim in range(rank))
    return Address(layout, target.slots, target.slot_offsets, stored, frozenset(target.nodes))


# the kinds of writes


def _of_index_put(node: Node, view: CacheView, numbering: ValueNumbering) -> _Target:
    arguments: Any = node.args
    given = dict(zip(("self", "indices", "values", "accumulate"), arguments, strict=False)) | dict(node.kwargs)
    if given.get("accumulate"):
        raise NotACacheWrite("it accumulates")
    indices = {at: index for at, index in enumerate(given["indices"]) if index is not None}
    for index in indices.values():
        if index.meta["val"].dtype not in SLOT_DTYPES:
            raise NotACacheWrite(f"its index {index.name} is {index.meta['val'].dtype}, slots are int32 or int64")
    at = sorted(indices)
    addressed = [view.dims[position] for position in at]
    offsets: Node | None = None
    passed: set[Node] = set()
    if len(at) == 1:
        block, place = _block_and_place(addressed[0], at[0], view)
        slots = indices[at[0]]
    elif len(at) == 2 and all(len(dim) == 1 for dim in addressed):
        block, place = _whole_dim(addressed[0][0]), _whole_dim(addressed[1][0])
        pair = indices[at[0]], indices[at[1]]
        slots, offsets, passed = slots_of_pair(*pair, addressed[1][0].size, numbering)
    else:
        raise NotACacheWrite("its indices do not address blocks and places of the cache")
    rest = [dim for position, dim in enumerate(view.dims) if position not in indices]
    shape = _broadcast([index.meta["val"].shape for index in indices.values()])
    front = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    tokens = [(Atom(size, _TOKEN),) for size in shape]
    dims = [*rest[:front], *tokens, *rest[front:]]
    return _Target(
        place, block, slots, dims, given["values"], view.selected, view.ranges, slot_offsets=offsets, nodes=passed
    )


def _broadcast(shapes: Sequence[Sequence[Any]]) -> list[Any]:
    """The shape of indices together; unlike `torch.broadcast_shapes` it leaves no guard on a symbolic size."""
    rank = max(len(shape) for shape in shapes)
    padded = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    return [next((size for size in sizes if not is_one(size)), 1) for sizes in zip(*padded, strict=True)]


def _of_scatter(node: Node, view: CacheView) -> _Target:
    arguments: Any = node.args
    _, dim, index, value = arguments
    dim %= len(view.dims)
    shape = index.meta["val"].shape
    slots, varying, passed = _expanded_slots(index)
    if any(d not in (0, dim) for d in varying):
        raise NotACacheWrite(f"its index {index.name} is no vector of slots expanded over the other dims")
    sizes = [math.prod(atom.size for atom in atoms) for atoms in view.dims]
    covers = all(equal(shape[d], sizes[d]) for d in range(len(shape)) if d != dim)
    if not covers or not all(map(equal, shape, value.meta["val"].shape)):
        raise NotACacheWrite("its index and source do not cover whole rows of the cache")
    block, place = _block_and_place(view.dims[dim], dim, view)
    dims = [*view.dims[:dim], (Atom(shape[dim], _TOKEN),), *view.dims[dim + 1 :]]
    per_row = 0 in varying and dim != 0
    return _Target(place, block, slots, dims, value, view.selected, view.ranges, per_row=per_row, nodes=passed)


def _expanded_slots(index: Node) -> tuple[Node, list[int], set[Node]]:
    """The vector or matrix that a scatter's index repeats, and the dims of the index along which it varies."""
    passed: set[Node] = set()
    rank = index.meta["val"].dim()
    varying = [d for d in range(rank) if not is_one(index.meta["val"].shape[d])]
    node = index
    while node.op == "call_function" and isinstance(node.args[0], Node):
        source = node.args[0]
        if node.target is aten.expand.default:
            before = source.meta["val"].shape
            lead = rank - len(before)
            varying = [d for d in varying if d >= lead and not is_one(before[d - lead])]
        elif node.target not in ORDER_PRESERVING or node.meta["val"].dim() == max(1, len(varying)):
            break
        passed.add(node)
        node = source
    if node.meta["val"].dim() != max(1, len(varying)) or node.meta["val"].dtype not in SLOT_DTYPES:
        raise NotACacheWrite(f"its index {index.name} is no vector of slots expanded over the other dims")
    return node, varying, passed


def _of_region_scatter(node: Node, view: CacheView) -> _Target:
    arguments: Any = node.args
    value, passed = _copied(arguments[1])
    given: Any = arguments[2] if len(arguments) > 2 else node.kwargs.get("dim", 0)
    dim = given % len(view.dims)
    atoms = view.dims[dim]
    before, after = view.dims[:dim], view.dims[dim + 1 :]
    if node.target is aten.select_scatter.default:
        if len(atoms) != 1:
            raise NotACacheWrite("it replaces one position of several dims seen as one")
        slots = arguments[3]
        block, place, dims = None, _whole_dim(atoms[0]), [*before, *after]
    else:
        length = arguments[1].meta["val"].shape[dim]
        start = slice_start(view, dim, node, arguments[2:], length)
        if start is None:
            raise NotACacheWrite("whether its slice is clamped or has steps depends on the input")
        slots = start
        block, place = _block_and_place(atoms, dim, view)
        dims = [*before, (Atom(length, _TOKEN),), *after]
    return _Target(place, block, slots, dims, value, view.selected, view.ranges, nodes=passed)


def _of_as_strided_scatter(node: Node, view: CacheView) -> _Target:
    arguments: Any = node.args
    value, passed = _copied(arguments[1])
    part = region(view, node, arguments[2:], arguments[1].meta["val"].shape)
    if part is None:
        raise NotACacheWrite("its strides do not run along dims of the cache")
    ranges, selected = dict(part.ranges), dict(part.selected)
    dims = list(part.dims)
    places = [dim for dim in ranges if len(ranges) == 1 or ranges[dim][0] != 0]
    if len(places) == 1 and not selected:
        place = places[0]
        slots, length = ranges.pop(place)
        dims = [(Atom(length, _TOKEN),) if [a.name for a in dim] == [place] else dim for dim in dims]
    elif len(selected) == 1 and not ranges:
        place, slots = selected.popitem()
        if place < len(dims) and not dims[place]:
            dims[place] = (Atom(1, _TOKEN),)
    else:
        raise NotACacheWrite("it replaces a part of several dims")
    return _Target(place, None, slots, dims, value, selected, ranges, nodes=passed)


def _copied(value: Node) -> tuple[Node, set[Node]]:
    """What a slice assignment copies, and the nodes of that copy, which reads only the shape of the slice."""
    if value.op != "call_function" or value.target is not aten.copy.default:
        return value, set()
    destination, source = value.args[0], value.args[1]
    assert isinstance(destination, Node) and isinstance(source, Node)
    return source, {value, destination}


def _block_and_place(atoms: Sequence[Atom], position: int, view: CacheView) -> tuple[int | None, int]:
    """The cache dims that one dim of a view runs over: places, or blocks and places seen as one."""
    if len(atoms) not in (1, 2):
        raise NotACacheWrite("it addresses a dim of size one, or more than two dims seen as one")
    *blocks, place = (_whole_dim(atom) for atom in atoms)
    if blocks:
        return blocks[0], place
    # A view of [1, places, …] addressed without its first dim holds the places of a single block.
    leading = [dim for dim in range(place) if dim not in view.selected]
    present = {atom.name for dim in view.dims for atom in dim}
    absorbed = position == 0 and leading and not present.intersection(leading)
    return (leading[-1] if absorbed else None), place


def _whole_dim(atom: Atom) -> int:
    if not isinstance(atom.name, int):
        raise NotACacheWrite("it addresses a part of a dim of the cache")
    return atom.name


# names


def _names(rank: int, target: _Target) -> dict[int, str]:
    """The layout token of each dim of the cache."""
    names: dict[int, str] = {}
    for dim, index in target.selected.items():
        if not isinstance(index, int):
            raise NotACacheWrite("which part of the cache it goes to is known only at run time")
        names[dim] = str(index)
    free = [dim for dim in range(rank) if dim not in names]
    names[target.place] = "p"
    if target.block is not None:
        names[target.block] = "n"
    elif free[0] != target.place:
        names[free[0]] = "b"
    rest = [dim for dim in free if dim not in names]
    if len(rest) not in (1, 2):
        raise NotACacheWrite(
            f"a slot holds {len(rest)} dims of the cache, not heads and head dim (are whole blocks replaced?)"
        )
    names.update(zip(rest, ("h", "d") if len(rest) == 2 else ("(hd)",), strict=True))
    for dim, (start, _) in target.ranges.items():
        if names[dim] != "b" or not isinstance(start, int) or start != 0:
            raise NotACacheWrite(f"it goes through a slice of the {_MEANING.get(names[dim], 'cache')}")
    if target.per_row and "b" not in names.values():
        raise NotACacheWrite("its slots differ along a dim that is no batch")
    return names


_MEANING = {
    "b": "batch that does not start at its first row",
    "p": "places",
    "n": "blocks",
    "h": "heads",
    "d": "head dim",
}


def _value_dims(rank: int, target: _Target, names: Mapping[int, str]) -> Dims:
    """The dims of the stored tensor, which must fill the region without broadcasting."""
    shape = target.value.meta["val"].shape
    region_dims = _with_roles(rank, target, names)
    missing = len(region_dims) - len(shape)
    sizes = [math.prod(atom.size for atom in dim) for dim in region_dims]
    if missing < 0 or not all(map(is_one, sizes[:missing])) or not all(map(_fills, shape, sizes[missing:])):
        raise NotACacheWrite(f"{target.value.name} is broadcast over what it replaces")
    own = [
        (Atom(size, dim[0].name),) if len(dim) == 1 else dim
        for size, dim in zip(shape, region_dims[missing:], strict=True)
    ]
    dims = named(tuple(own))
    if dims is None:
        raise NotACacheWrite(f"the dims of {target.value.name} are not those of the cache")
    return dims


def _fills(size: Any, whole: Any) -> bool:
    """Whether a dim of the stored tensor is as long as what it replaces, for every input that runs at all."""
    return equal(size, whole) or (not isinstance(size, int) and statically_known_true(size > 1))


def _with_roles(rank: int, target: _Target, names: Mapping[int, str]) -> list[tuple[Atom, ...]]:
    batched = "b" in names.values()
    tokens = sum(any(atom.name == _TOKEN for atom in dim) for dim in target.dims)
    if tokens > (1 if batched else 2):
        raise NotACacheWrite(f"its slots have {tokens} dims")
    roles = iter(["s"] if batched else ["t"] if tokens == 1 else ["b", "s"])

    def role(atom: Atom) -> Atom:
        if atom.name == _TOKEN:
            return Atom(atom.size, next(roles))
        if isinstance(atom.name, tuple):
            dim, part, parts = atom.name
            if names[dim] != "(hd)" or parts != 2:
                raise NotACacheWrite("it goes through a view that splits a dim of the cache")
            return Atom(atom.size, "hd"[part])
        return Atom(atom.size, names[atom.name])  # type: ignore[index]

    dims = [tuple(role(atom) for atom in dim) for dim in target.dims]
    # dims of size one have no atoms in a view; here each takes the name of a cache dim of size one, in order
    held = {atom.name[0] if isinstance(atom.name, tuple) else atom.name for dim in target.dims for atom in dim}
    unseen = iter([names[dim] for dim in range(rank) if dim not in held and names[dim] in ("b", "h", "d", "(hd)")])
    for at, dim in enumerate(dims):
        if not dim and (name := next(unseen, None)) is not None:
            dims[at] = (Atom(1, name),)
    return dims
