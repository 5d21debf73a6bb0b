"""In-place operators in a functional graph, read alike in each of the forms that torch gives them.

Three forms occur. *v1*: ``auto_functionalized(op, **arguments) -> (results…, new values…)``, where the arguments are views and the
program scatters the new values back into their base. *v2*: ``auto_functionalized_v2(op, …, _all_bases=[…])``, where the views are
described by keyword arguments and the new values are those of the bases. *raw*: the operator itself, whose effect the order of
nodes expresses; `functionalise` turns those into v1 first.

`read_calls` returns one `InPlaceCall` for each, with the value of every mutated argument before and after. Readers that reach a new
value through its base (a packed qkv buffer, split again) are made to read the value itself, and readers of other parts of the base
to read the base as it was; `ReadThrough.undo` takes that back where the operator stays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from rope_fusion._torch import auto_functionalized, auto_functionalized_v2, stable_topological_sort
from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.layout import equal, is_one

aten = torch.ops.aten

_SCATTER_OF = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}
_VIEW_OF = {scatter: view for view, scatter in _SCATTER_OF.items()}
SCATTERS = frozenset(_VIEW_OF)

# operators whose result is a view of their first argument; reshape is one where it need not copy
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.as_strided.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})


@dataclass(frozen=True)
class Region:
    """The elements of a tensor that a view of it covers, as a strided view of the contiguous tensor of that shape."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any

    def runs(self) -> list[tuple[Any, Any]]:
        """(size, stride) from the outermost to the innermost, without dims of one element, neighbours merged."""
        merged: list[tuple[Any, Any]] = []
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if is_one(size):
                continue
            if merged and equal(merged[-1][1], size * stride):
                merged[-1] = (merged[-1][0] * size, stride)
            else:
                merged.append((size, stride))
        return merged

    def same(self, other: Region) -> bool:
        """Whether both cover the same elements in the same order, so that one is a reshape of the other."""
        mine, theirs = self.runs(), other.runs()
        return (
            equal(self.offset, other.offset)
            and len(mine) == len(theirs)
            and all(equal(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True))
        )

    def disjoint(self, other: Region) -> bool:
        """Whether they certainly share no element: two windows of the same rows, or one wholly before the other."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        for first, second in ((self, other), (other, self)):
            if statically_known_true(first.offset + first.extent() <= second.offset):
                return True
        rows = {str(stride): stride for region in (self, other) for _, stride in region.runs()[:-1]}
        for row in rows.values():
            windows = [region._window(row) for region in (self, other)]
            if None not in windows:
                (start, end), (other_start, other_end) = windows  # type: ignore[misc]
                if statically_known_true(end <= other_start) or statically_known_true(other_end <= start):
                    return True
        return False

    def extent(self) -> Any:
        """One more than the distance from the first to the last element."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def _window(self, row: Any) -> tuple[Any, Any] | None:
        """First and last column of the region in rows of `row` elements, or None where it is no such window."""
        if not isinstance(row, int) or not isinstance(self.offset, int):
            return None
        inner: list[tuple[Any, int]] = []
        outer: list[tuple[Any, int]] = []
        for size, stride in self.runs():
            if not isinstance(stride, int):
                return None
            (outer if stride % row == 0 else inner).append((size, stride))
        start = self.offset % row
        if not all(isinstance(size, int) for size, _ in inner):
            return None
        end = start + 1 + sum((size - 1) * stride for size, stride in inner)
        return (start, end) if end <= row else None


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
        return _with_defaults(self.target, {**given, **self.before})

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


def written_arguments(target: torch._ops.OpOverload) -> list[str]:
    """Names of the tensors that an operator writes, in the schema's order."""
    return [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def is_raw_call(node: Node, targets: Collection[torch._ops.OpOverload]) -> bool:
    return node.op == "call_function" and node.target in targets and node.target._schema.is_mutable  # type: ignore[union-attr]


def functional_target(node: Node) -> torch._ops.OpOverload | None:
    """The operator that an ``auto_functionalized`` node of either version calls."""
    if node.op == "call_function" and node.target in (auto_functionalized, auto_functionalized_v2):
        target = node.args[0]
        return target if isinstance(target, torch._ops.OpOverload) else None
    return None


def size_arguments(emitter: Emitter, shape: Sequence[Any], value: Node) -> list[Any] | None:
    """Arguments for a reshape of `value` to `shape`; one symbolic size is inferred, further ones are read off `value`."""
    symbolic = [at for at, size in enumerate(shape) if not isinstance(size, int)]
    sizes: list[Any] = list(shape)
    for at in symbolic[1:]:
        dims = [dim for dim, size in enumerate(value.meta["val"].shape) if equal(size, shape[at])]
        if not dims:
            return None
        sizes[at] = emitter.call(aten.sym_size.int, value, dims[0])
    if symbolic:
        sizes[symbolic[0]] = -1
    return sizes


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
                whole = _written_back(self._emit, path, whole, call.after[name])
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
        view: Any = _VIEW_OF[node.target]  # type: ignore[index]
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
        region = self._region_after(patched, _steps(path))
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
        return None if start is None else _replay(self._emit, path, start)

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
        return self._region_after(base, _steps(path[::-1]))

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


def _steps(path: Sequence[Node]) -> list[tuple[Any, ...]]:
    steps: list[tuple[Any, ...]] = []
    for node in path:
        if node.target is operator.getitem:
            split = node.args[0]
            assert isinstance(split, Node)
            steps.append((split.target, split.args[1:], split.kwargs, node.args[1]))
        else:
            steps.append((node.target, node.args[1:], node.kwargs))
    return steps


def region_of(shape: Sequence[Any], steps: Sequence[tuple[Any, ...]], fake_mode: Any) -> Region | None:
    """The region that view steps (target, further arguments, keywords, item) of a tensor of `shape` show; None if one copies."""
    with fake_mode, torch.no_grad():
        tensor = torch.empty(list(shape), device="meta")
        for step in steps:
            target, arguments, keywords, item = (*step, {}, None)[:4] if len(step) == 2 else (*step, None)[:4]
            arguments, keywords = torch.fx.map_arg((tuple(arguments), keywords), lambda node: node.meta["val"])
            result = target(tensor, *arguments, **keywords)
            result = result[item] if item is not None else result
            if result.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
                return None
            tensor = result
        return Region(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


@dataclass
class Functionalised:
    """What `functionalise` did: which functional calls stand for which in-place ones, and why others were left alone."""

    functional: dict[Node, Node] = field(default_factory=dict)  # in-place call -> its functional one
    refusals: list[str] = field(default_factory=list)
    _roots: dict[Node, set[Node]] = field(default_factory=dict)  # in-place call -> tensors that it writes
    _values: list[tuple[Node, Node, Node]] = field(default_factory=list)  # call, value after it, what held it in place
    _copies: dict[Node, Node] = field(default_factory=dict)  # tensor -> the copy back into it

    def give_back(self, graph: Graph, stays: Callable[[Node], bool]) -> None:
        """Let calls that were not fused work in place again, unless a tensor of theirs is also written by one that was."""
        left = {call for call, functional in self.functional.items() if stays(functional)}
        while True:
            fused = {root for call in self.functional if call not in left for root in self._roots[call]}
            shared = {call for call in left if self._roots[call] & fused}
            if not shared:
                break
            left -= shared
        for call, value, held in reversed(self._values):
            if call in left:
                value.replace_all_uses_with(held)
        for call in left:
            for root in self._roots[call]:
                if (copy := self._copies.pop(root, None)) is not None:
                    graph.erase_node(copy)
            del self.functional[call]


class OrderOfEffects:
    """Which nodes stand before and after the in-place calls of a graph that touch the same tensors.

    No edge of the graph expresses that order, so a pass that moves nodes has to compare afterwards.
    """

    def __init__(self, graph: Graph) -> None:
        self._place = {node: at for at, node in enumerate(graph.nodes)}
        self._calls = [node for node in graph.nodes if _works_in_place(node)]

    def broken(self, graph: Graph, replaced: Container[Node] = ()) -> str | None:
        """A sentence if some node now reads a tensor on the other side of an in-place call, else None."""
        calls = [call for call in self._calls if call not in replaced]
        if not calls:
            return None
        alive = {node: at for at, node in enumerate(graph.nodes)}
        live = live_nodes(graph, replaced)
        for call in calls:
            roots = {root_of(node) for node in _written(call)}
            for node in live:
                if node is call or viewed(node) is not None or node.target in SPLITS:
                    continue
                if not any(root_of(source) in roots for source in node.all_input_nodes):
                    continue
                known = node in self._place
                if not known or (self._place[node] < self._place[call]) != (alive[node] < alive[call]):
                    return f"{node.name} reads what {call.name} writes in place, and their order could not be kept"
        return None


def live_nodes(graph: Graph, without: Container[Node] = ()) -> set[Node]:
    """The nodes of a sorted graph that something reads or that have an effect, nodes among `without` not counted."""
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if node not in without and (node in live or node.is_impure()):
            live.update((node, *node.all_input_nodes))
    return live


def _works_in_place(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return (
        node.op == "call_function"
        and schema is not None
        and schema.is_mutable
        and node.target is not aten.copy_.default  # the copy back into an input, which comes last
    )


def _written(node: Node) -> list[Node]:
    arguments = _bind(node)
    names = written_arguments(node.target)  # type: ignore[arg-type]
    return [arguments[name] for name in names if isinstance(arguments.get(name), Node)]


def root_of(node: Any) -> Node:
    """What `node` is a view of, through views of views."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def functionalise(graph: Graph, emitter: Emitter, targets: Collection[torch._ops.OpOverload]) -> Functionalised:
    """Give each in-place call of `targets` a v1 call that computes the same, and make later readers read its values.

    The in-place nodes stay, for the caller to erase (or the transaction to restore). A tensor that some other in-place operator
    writes too is left alone, because only the order of nodes says who reads what.
    """
    return _Functionaliser(graph, emitter, targets).run()


class _Functionaliser:
    def __init__(self, graph: Graph, emitter: Emitter, targets: Collection[torch._ops.OpOverload]) -> None:
        self._graph = graph
        self._emit = emitter
        self._nodes = list(graph.nodes)
        self._calls = [node for node in self._nodes if is_raw_call(node, targets)]
        self._state: dict[Node, Node] = {}  # root -> its value now
        self._maker: dict[Node, Node] = {}  # value of a root -> the call that made it
        self._seen: dict[tuple[Node, Node], Node] = {}
        self._result = Functionalised()

    def run(self) -> Functionalised:
        if not self._calls:
            return self._result
        calls = self._safe_calls()
        roots = {root_of(node) for call in calls for node in _written(call)}
        for node in self._nodes:
            if node in calls:
                self._replace(node)
            elif viewed(node) is None and node.target not in SPLITS:
                self._redirect(node, roots)
        output = next(node for node in self._nodes if node.op == "output")
        for root in roots:
            if root.op in ("placeholder", "get_attr") and self._state.get(root, root) is not root:
                with self._graph.inserting_before(output):
                    copy = self._graph.call_function(aten.copy_.default, (root, self._state[root]))
                    copy.meta["val"] = root.meta["val"]
                    self._result._copies[root] = copy
        return self._result

    def _safe_calls(self) -> list[Node]:
        """The calls none of whose written tensors is written by anything else in place."""
        shared = {}
        for node in self._nodes:
            schema = getattr(node.target, "_schema", None)
            if node.op == "call_function" and schema is not None and schema.is_mutable and node not in self._calls:
                for written in _written(node):
                    shared[root_of(written)] = node
        calls = list(self._calls)
        while True:
            refused = [call for call in calls if any(root_of(w) in shared for w in _written(call))]
            if not refused:
                return calls
            for call in refused:
                tensors = [root_of(w) for w in _written(call)]
                other = next(shared[root] for root in tensors if root in shared)
                self._result.refusals.append(f"{call.name} works in place on a tensor that {other.name} writes too")
                calls.remove(call)
                shared.update(dict.fromkeys(tensors, call))

    def _replace(self, call: Node) -> None:
        target: Any = call.target
        arguments = _with_defaults(target, _bind(call))
        current = torch.fx.map_arg(arguments, self._current)
        functional = self._emit.call(auto_functionalized, target, **current)
        self._result.functional[call] = functional
        self._result._roots[call] = {root_of(node) for node in _written(call)}
        returned = len(target._schema.returns)
        for index, name in enumerate(written_arguments(target)):
            if isinstance(arguments.get(name), Node):
                value = self._emit.call(operator.getitem, functional, max(returned, 1) + index)
                root = root_of(arguments[name])
                self._state[root] = _written_back(
                    self._emit, view_steps(root, arguments[name]), self._current(root), value
                )
                self._maker[self._state[root]] = call
                self._result._values.append((call, self._state[root], root))
        if returned == 1:
            result = self._emit.call(operator.getitem, functional, 0)
            call.replace_all_uses_with(result)
            self._result._values.append((call, result, call))

    def _redirect(self, node: Node, roots: set[Node]) -> None:
        """Make a reader of the written tensors read their values of now."""
        if node.op == "placeholder" or not any(root_of(source) in roots for source in node.all_input_nodes):
            return
        node.args = torch.fx.map_arg(node.args, self._current)
        node.kwargs = torch.fx.map_arg(node.kwargs, self._current)

    def _current(self, node: Node) -> Node:
        root = root_of(node)
        state = self._state.get(root, root)
        if state is root:
            return node
        if node is root:
            return state
        if (node, state) not in self._seen:
            self._seen[node, state] = _replay(self._emit, view_steps(root, node), state)
            self._result._values.append((self._maker[state], self._seen[node, state], node))
        return self._seen[node, state]


def _written_back(emitter: Emitter, path: Sequence[Node], whole: Node, value: Node) -> Node:
    """`whole` with `value` written to the view that `path` makes of it."""
    if not path:
        return value
    step, *rest = path
    if rest:
        value = _written_back(emitter, rest, _replay(emitter, [step], whole), value)
    call, target = emitter.call, step.target
    if target is operator.getitem:
        split, index = step.args
        assert isinstance(split, Node) and isinstance(index, int)
        if split.target is aten.unbind.int:
            dim = split.args[1] if len(split.args) > 1 else 0
            return call(aten.select_scatter.default, whole, value, dim, index)
        sizes, dim = split.args[1], split.args[2] if len(split.args) > 2 else 0
        assert isinstance(dim, int)
        start: Any = sizes * index if isinstance(sizes, int) else sum(sizes[:index])  # type: ignore[index, arg-type]
        return call(aten.slice_scatter.default, whole, value, dim, start, start + step.meta["val"].shape[dim])
    if target in _SCATTER_OF:
        return call(_SCATTER_OF[target], whole, value, *step.args[1:])
    if target is aten.transpose.int:
        return call(target, value, *step.args[1:])
    if target is aten.permute.default:
        order: Any = step.args[1]
        rank = len(order)
        return call(target, value, [[d % rank for d in order].index(d) for d in range(rank)])
    if target is aten.alias.default:
        return value
    return call(aten.reshape.default, value, size_arguments(emitter, whole.meta["val"].shape, whole))


def view_steps(base: Node, view: Node) -> list[Node]:
    """The views that lead from `base` to `view`, without the splits whose parts they take."""
    path = []
    while view is not base:
        path.append(view)
        source = view.args[0]
        assert isinstance(source, Node)
        if view.target is operator.getitem:
            source = source.args[0]
            assert isinstance(source, Node)
        view = source
    return path[::-1]


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


def viewed(node: Node) -> Node | None:
    """The tensor that `node` certainly shares its elements with, or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    if node.target is operator.getitem:
        if source.op == "call_function" and source.target in SPLITS:
            tensor = source.args[0]
            return tensor if isinstance(tensor, Node) else None
        return None
    if node.target not in VIEWS:
        return None
    if node.target is aten.reshape.default:
        mine, theirs = node.meta["val"], source.meta["val"]
        return source if mine.untyped_storage()._cdata == theirs.untyped_storage()._cdata else None
    return source


def _with_defaults(target: torch._ops.OpOverload, arguments: dict[str, Any]) -> dict[str, Any]:
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    return {**defaults, **arguments}


def _bind(node: Node) -> dict[str, Any]:
    """Arguments of a call of an operator by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _replay(emitter: Emitter, path: Sequence[Node], start: Node) -> Node:
    """The views `path` taken of `start` instead."""
    node = start
    for view in path:
        if view.target is operator.getitem:
            split = view.args[0]
            assert isinstance(split, Node)
            parts = emitter.call(split.target, node, *split.args[1:], **split.kwargs)  # type: ignore[arg-type]
            node = emitter.call(operator.getitem, parts, view.args[1])
        else:
            node = emitter.call(view.target, node, *view.args[1:], **view.kwargs)  # type: ignore[arg-type]
    return node
