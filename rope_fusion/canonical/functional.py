"""In-place operators in a functional graph, read alike in each of the forms that torch gives them.

Three forms occur. *v1*: ``auto_functionalized(op, **arguments) -> (results…, new values…)``, where the arguments are views and the
program scatters the new values back into their base. *v2*: ``auto_functionalized_v2(op, …, _all_bases=[…])``, where the views are
described by keyword arguments and the new values are those of the bases. *raw*: the operator itself, whose effect the order of
nodes expresses; `in_place.functionalise` turns those into v1 first.

`CallReader.read` returns one `InPlaceCall` for each, with the value of every mutated argument before and after. Readers that reach a new
value through its base (a packed qkv buffer, split again) are made to read the value itself, and readers of other parts of the base
to read the base as it was; `ReadThrough.undo` takes that back where the operator stays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from rope_fusion._torch import auto_functionalized, auto_functionalized_v2, stable_topological_sort
from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.graph_views import (
    SCATTERS,
    SPLITS,
    VIEW_OF,
    VIEWS,
    Region,
    region_of,
    size_arguments,
    steps_of,
    view_steps,
    written_back,
)
from rope_fusion.canonical.in_place import with_defaults, written_arguments
from rope_fusion.canonical.layout import equal

aten = torch.ops.aten


@dataclass(frozen=True)
class InPlaceCall:
    """One call of an in-place operator.

    ``before`` and ``after`` hold the values of the mutated arguments, of the same shape. ``base`` and ``new_base`` are the tensor that
    the argument is a view of and that tensor's value afterwards, where the call names it (v2).
    """

    node: Node
    target: torch._ops.OpOverload
    form: str  # "v1" | "v2"
    before: dict[str, Any]  # mutated arguments
    after: dict[str, Node]
    base: dict[str, Node]
    new_base: dict[str, Node]
    results: tuple[Node | None, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """Every schema argument by name, as the graph has it now, defaults filled in; mutated tensors as before the call."""
        given = {name: value for name, value in self.node.kwargs.items() if not name.startswith("_")}
        return with_defaults(self.target, {**given, **self.before})

    def tensor(self, name: str) -> Node | None:
        value = self.arguments.get(name)
        return value if isinstance(value, Node) else None


@dataclass(frozen=True)
class _Patch:
    region: Region
    value: Node
    owner: Node


@dataclass
class ReadThrough:
    """Substitutions of one value by an equal one that is read more directly, by the call that made them possible."""

    made: list[tuple[Node, Node, Node, set[Node]]] = field(default_factory=list)  # call, old, new, readers

    def substitute(self, call: Node, old: Node, new: Node, only: Callable[[Node], bool] = lambda user: True) -> None:
        readers = {user for user in old.users if only(user)}
        old.replace_all_uses_with(new, delete_user_cb=readers.__contains__)
        self.made.append((call, old, new, readers))

    def undo(self, graph: Graph, stays: Callable[[Node], bool]) -> None:
        """Give readers back what they read, where the call stays in the graph."""
        alive = set(graph.nodes)
        for call, old, new, readers in reversed(self.made):
            if {call, old, new} <= alive and stays(call):
                present = [user for user in new.users if user in readers]
                if present and not _computed_from(old, present):
                    new.replace_all_uses_with(old, delete_user_cb=readers.__contains__)


def functional_target(node: Node) -> torch._ops.OpOverload | None:
    """The operator that an ``auto_functionalized`` node of either version calls."""
    if node.op == "call_function" and node.target in (auto_functionalized, auto_functionalized_v2):
        target = node.args[0]
        return target if isinstance(target, torch._ops.OpOverload) else None
    return None


class CallReader:
    """Reads the calls of some operators in one graph; see `read`."""

    def __init__(
        self, graph: Graph, emitter: Emitter, fake_mode: Any, targets: Collection[torch._ops.OpOverload]
    ) -> None:
        self._graph = graph
        self._emit = emitter
        self._fake_mode = fake_mode
        self._targets = targets
        self._patches: dict[Node, tuple[Node, list[_Patch]]] = {}  # patched value -> (value before, patches)
        self._extraction: set[Node] = set()  # nodes between a patched value and its patches
        self._regions: dict[str, Region | None] = {}
        self.read_through = ReadThrough()

    def read(self) -> list[InPlaceCall]:
        """Every functional call of the wanted operators, in the graph's order. New nodes describe values that have none yet."""
        calls = []
        for node in list(self._graph.nodes):
            target = functional_target(node)
            if target is not None and target in self._targets:
                v1 = node.target is auto_functionalized
                calls.append(self._read_v1(node, target) if v1 else self._read_v2(node, target))
        return calls

    def _read_v1(self, node: Node, target: torch._ops.OpOverload) -> InPlaceCall:
        arguments = dict(node.kwargs)
        returned = len(target._schema.returns)
        after = {}
        for index, name in enumerate(written_arguments(target)):
            if isinstance(arguments.get(name), Node):
                after[name] = self._item(node, max(returned, 1) + index)
        before = {name: arguments.get(name) for name in written_arguments(target)}
        return InPlaceCall(node, target, "v1", before, after, {}, {}, self._results(node, returned))

    def _read_v2(self, node: Node, target: torch._ops.OpOverload) -> InPlaceCall:
        bases = [base for base in node.kwargs["_all_bases"] if isinstance(base, Node)]  # type: ignore[union-attr]
        returned = len(target._schema.returns)
        new_bases = [self._item(node, max(returned, 1) + index) for index in range(len(bases))]
        before: dict[str, Any] = {}
        after: dict[str, Node] = {}
        base: dict[str, Node] = {}
        new_base: dict[str, Node] = {}
        regions: dict[str, Region] = {}
        for name in written_arguments(target):
            index = node.kwargs.get(f"_{name}_base_index")
            before[name] = None
            if index is None:
                continue
            assert isinstance(index, int)
            base[name], new_base[name] = bases[index], new_bases[index]
            before[name] = self._view_of_v2(node, name, bases[index])
            after[name] = self._view_of_v2(node, name, new_bases[index])
            between = after[name]
            while between is not new_bases[index]:
                self._extraction.add(between)
                between = between.args[0]  # type: ignore[assignment]
            region = self.region(bases[index], before[name])
            if region is not None:
                regions[name] = region
        call = InPlaceCall(node, target, "v2", before, after, base, new_base, self._results(node, returned))
        for old, new in zip(bases, new_bases, strict=True):
            names = [name for name in base if base[name] is old]
            if all(name in regions for name in names) and not any(after[name] is new for name in names):
                self._patches[new] = (old, [_Patch(regions[name], after[name], node) for name in names])
        return call

    def _results(self, node: Node, returned: int) -> tuple[Node | None, ...]:
        items: dict[Any, Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        return tuple(items.get(index) for index in range(returned))

    def _item(self, node: Node, index: int) -> Node:
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == index:
                return user
        return self._emit.call(operator.getitem, node, index)

    def _view_of_v2(self, node: Node, name: str, base: Node) -> Node:
        """The view of `base` that the keyword arguments of a v2 node describe for the argument `name`."""
        kwargs = node.kwargs
        if f"_{name}_slice_dim" in kwargs:
            dim, start, end = (kwargs[f"_{name}_slice_{what}"] for what in ("dim", "start", "end"))
            return self._emit.call(aten.slice.Tensor, base, dim, start, end)
        if f"_{name}_storage_offset" in kwargs:
            size, stride, offset = (kwargs[f"_{name}_{what}"] for what in ("size", "stride", "storage_offset"))
            return self._window(base, size, stride, offset)
        return base

    def _window(self, base: Node, size: Any, stride: Any, offset: Any) -> Node:
        """A strided window of a contiguous base, by reshape and slice where it is a run of columns, else by as_strided."""
        value = base.meta["val"]
        sizes = [dim.meta["val"] if isinstance(dim, Node) else dim for dim in size]
        strides = [dim.meta["val"] if isinstance(dim, Node) else dim for dim in stride]
        runs = Region(tuple(sizes), tuple(strides), offset).runs()
        if value.is_contiguous() and len(runs) == 2 and isinstance(offset, int) and runs[1][1] == 1:
            (_, row), (width, _) = runs
            whole = equal(math.prod(value.shape), runs[0][0] * row)
            if isinstance(row, int) and isinstance(width, int) and whole and offset + width <= row:
                rows = self._emit.call(aten.reshape.default, base, [-1, row])
                columns = self._emit.call(aten.slice.Tensor, rows, 1, offset, offset + width)
                return self._emit.call(aten.reshape.default, columns, list(size))
        return self._emit.call(aten.as_strided.default, base, list(size), list(stride), offset)

    # reading new values directly

    def resolve_reads(self, calls: Sequence[InPlaceCall]) -> None:
        """Make readers of the bases that `calls` write read the values that they wrote, or the base as it was."""
        owners = {call.node for call in calls}
        patches = {new: entry for new, entry in self._patches.items() if entry[1][0].owner in owners}
        for node in list(self._graph.nodes):
            if node.op == "call_function" and node.target in SCATTERS:
                patch = self._scatter_patch(node, owners)
                if patch is not None:
                    patches[node] = (node.args[0], [patch])
        for node in sorted(patches):
            self._resolve_readers(node, patches)
        for call in calls:
            self._rebuild(call)
        stable_topological_sort(self._graph)

    def _rebuild(self, call: InPlaceCall) -> None:
        """Where the new value of a base is read as a whole, let it be the old one with the new parts written to it."""
        for new in dict.fromkeys(call.new_base.values()):
            names = [name for name in call.new_base if call.new_base[name] is new and call.after[name] is not new]
            readers = [user for user in new.users if user not in self._extraction]
            if not names or not readers:
                continue
            whole = call.base[names[0]]
            for name in names:
                path = view_steps(call.base[name], call.before[name])
                whole = written_back(self._emit, path, whole, call.after[name])
            self.read_through.substitute(call.node, new, whole, set(readers).__contains__)

    def _scatter_patch(self, node: Node, owners: set[Node]) -> _Patch | None:
        """What a scatter writes, when it is a value that one of the calls `owners` made."""
        value = node.args[1]
        assert isinstance(value, Node)
        source = value
        while source.op == "call_function" and source.target in VIEWS and isinstance(source.args[0], Node):
            source = source.args[0]
        if source.target is not operator.getitem or source.args[0] not in owners:
            return None
        base = node.args[0]
        assert isinstance(base, Node)
        view: Any = VIEW_OF[node.target]  # type: ignore[index]
        region = self._region_after(base, [(view, node.args[2:])])
        owner = source.args[0]
        assert isinstance(owner, Node)
        return _Patch(region, value, owner) if region is not None else None

    def _resolve_readers(self, patched: Node, patches: dict[Node, tuple[Node, list[_Patch]]]) -> None:
        stack: list[tuple[Node, list[Node]]] = [(patched, [])]
        while stack:
            node, path = stack.pop()
            for user in list(node.users):
                step = self._view_steps(user, node)
                if user in self._extraction or user in patches:
                    continue
                for view in step:
                    new = self._resolved(patched, [*path, view], patches)
                    if new is None:
                        stack.append((view, [*path, view]))
                    elif new is not view:
                        owner = patches[patched][1][0].owner
                        self.read_through.substitute(owner, view, new)

    @staticmethod
    def _view_steps(user: Node, source: Node) -> list[Node]:
        """The views that `user` makes of `source`: itself, or the parts that are taken of a split."""
        if user.op != "call_function" or not user.args or user.args[0] is not source:
            return []
        if user.target in VIEWS:
            return [user]
        if user.target in SPLITS:
            return [part for part in user.users if part.target is operator.getitem]
        return []

    def _resolved(
        self, patched: Node, path: Sequence[Node], patches: dict[Node, tuple[Node, list[_Patch]]]
    ) -> Node | None:
        """The value that the views `path` of `patched` show, read from where it was made; None where parts of it differ in origin."""
        current = patched
        region = self._region_after(patched, steps_of(path))
        if region is None:
            return None
        while current in patches:
            before, written = patches[current]
            for patch in reversed(written):
                if region.same(patch.region):
                    return self._reshaped(patch.value, path[-1])
                if not region.disjoint(patch.region):
                    return None
            current = before
            if (peeled := self._peel_reshapes(current)) in patches:
                current = peeled
        start = self._reshaped(current, patched)
        return None if start is None else self._emit.replay(path, start)

    @staticmethod
    def _peel_reshapes(node: Node) -> Node:
        """A reshape keeps the order of elements, hence their places in the contiguous tensor."""
        while node.target in (aten.reshape.default, aten.view.default) and isinstance(node.args[0], Node):
            node = node.args[0]
        return node

    def _reshaped(self, value: Node, like: Node) -> Node | None:
        """`value` in the shape of `like`."""
        shape = like.meta["val"].shape
        mine = value.meta["val"].shape
        if len(shape) == len(mine) and all(map(equal, shape, mine)):
            return value
        sizes = size_arguments(self._emit, shape, value)
        return None if sizes is None else self._emit.call(aten.reshape.default, value, sizes)

    def region(self, base: Node, view: Node) -> Region | None:
        """Where `view`, made of `base` by views alone, lies in it."""
        path: list[Node] = []
        node = view
        while node is not base:
            path.append(node)
            source = node.args[0]
            if node.target is operator.getitem and isinstance(source, Node) and source.target in SPLITS:
                source = source.args[0]
            elif node.target not in VIEWS:
                return None
            if not isinstance(source, Node):
                return None
            node = source
        return self._region_after(base, steps_of(path[::-1]))

    def _region_after(self, base: Node, steps: Sequence[tuple[Any, ...]]) -> Region | None:
        value = base.meta["val"]
        as_strided = any(step[0] is aten.as_strided.default for step in steps)
        if as_strided and not value.is_contiguous():
            return None
        # Layers repeat their views. Sizes are told apart by their expressions, so symbolic ones are too.
        key = str((tuple(value.shape), torch.fx.map_arg(list(steps), lambda node: str(node.meta["val"]))))
        if key not in self._regions:
            self._regions[key] = region_of(value.shape, steps, self._fake_mode)
        return self._regions[key]


def _computed_from(node: Node, sources: Sequence[Node]) -> bool:
    """Whether `node` is computed from one of `sources`."""
    wanted, seen, stack = set(sources), set(), [node]
    while stack:
        current = stack.pop()
        if current in wanted:
            return True
        if current not in seen:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return False
