"""Where engine operators write: the cache that an argument is a view of, its layout, and its value before and after a write."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node

from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.functional import CallReader, InPlaceCall
from rope_fusion.canonical.graph_views import SCATTERS, SPLITS, VIEWS, Region, root_of, view_steps
from rope_fusion.canonical.layout import equal

aten = torch.ops.aten


class Refused(Exception):
    """A call is left alone; the message says why."""


class EngineCaches:
    """The caches of one graph. Nodes that only carry what a write stores are added to `written`."""

    def __init__(self, reader: CallReader, emitter: Emitter, written: set[Node]) -> None:
        self._reader = reader
        self._emit = emitter
        self._written = written

    def place(self, call: InPlaceCall, name: str, axes: str) -> tuple[Node, str]:
        """The whole cache that the argument `name` is a view of, and the layout that the view has in it."""
        view = call.tensor(name)
        if view is None:
            raise Refused(f"it has no {name}")
        base = call.base.get(name)
        path: list[Node] = []
        node = view
        while node is not base and node.op == "call_function":
            source = node.args[0] if node.args else None
            if node.target is operator.getitem and isinstance(source, Node) and source.target in SPLITS:
                path.append(node)
                source = source.args[0]
            elif node.target in VIEWS:
                path.append(node)
            if not isinstance(source, Node) or (base is None and (not path or path[-1] is not node)):
                break
            node = source
        if node.op not in ("placeholder", "get_attr"):
            raise Refused(f"its {name} is no input of the graph, nor a view of one")
        if not path:
            return node, axes
        region = self._reader.region(node, view)
        layout = _layout_in(node.meta["val"], region, axes) if region is not None else None
        if layout is None:
            raise Refused(f"its {name} is a view of {node.name} that no layout describes")
        return node, layout

    def results(self, call: InPlaceCall, bases: dict[str, Node]) -> dict[str, tuple[Node, Node]]:
        """For each written cache the value of its whole base before and after that write."""
        if len({*bases.values()}) < len(bases):
            return self._joint_results(call, bases)
        results = {}
        for name, base in bases.items():
            if call.form == "v2":
                results[name] = (base, call.new_base[name])
            elif call.before[name] is base:
                results[name] = (base, call.after[name])
            else:
                new, scatter = self._written_into(call.after[name], base, call.before[name])
                if scatter is not None and root_of(scatter.args[0]) is not base:
                    raise Refused(f"its {name} is written more than once")
                results[name] = (base, new)
        return results

    def _joint_results(self, call: InPlaceCall, bases: dict[str, Node]) -> dict[str, tuple[Node, Node]]:
        """Likewise for two caches in one buffer. No node need hold the value between the writes: one is made, which nobody reads."""
        first, last = bases
        base = bases[first]
        if len(bases) != 2 or bases[last] is not base:
            raise Refused("its caches overlap in part")
        if call.form == "v2":
            new = call.new_base[last]
        else:
            scatters = {name: self._scatter(call.after[name]) for name in bases}
            if root_of(scatters[first].args[0]) is scatters[last]:
                first, last = last, first
            if root_of(scatters[first].args[0]) is not base or root_of(scatters[last].args[0]) is not scatters[first]:
                raise Refused("its writes to one buffer do not follow one another")
            node = scatters[first]
            while node is not scatters[last]:
                if len(node.users) != 1:
                    raise Refused("its buffer is read between its two writes")
                (node,) = node.users
            new, _ = self._written_into(call.after[last], base, call.before[last])
            self._written.update(scatters.values())
        between = self._emit.call(aten.alias.default, base)
        return {first: (base, between), last: (between, new)}

    @staticmethod
    def _scatter(value: Node) -> Node:
        """The scatter that writes `value`, seen through views, into a larger tensor."""
        node = value
        while len(node.users) == 1:
            (user,) = node.users
            if user.target in SCATTERS and user.args[1] is node:
                return user
            if user.target not in VIEWS:
                break
            node = user
        raise Refused("a view of its cache is read directly after the write")

    @staticmethod
    def _written_into(value: Node, base: Node, view: Node) -> tuple[Node, Node | None]:
        """`base` once `value` is written to `view` of it, by the inverse of each view; and the scatter among those."""
        node, scatter = value, None
        for _ in view_steps(base, view):
            if len(node.users) != 1:
                raise Refused("a view of its cache is read directly after the write")
            (user,) = node.users
            if user.target in SCATTERS and user.args[1] is node:
                scatter = user
            elif user.target not in VIEWS:
                raise Refused("a view of its cache is read directly after the write")
            node = user
        return node, scatter


def _layout_in(base: torch.Tensor, region: Region, axes: str) -> str | None:
    """The layout string of a view whose dims are `axes`, as dims of the base it lies in; None where it is no such view."""
    strides = [math.prod(base.shape[at + 1 :]) for at in range(base.dim())]
    tokens: list[str] = []
    left = dict(zip(axes.split(), zip(region.sizes, region.strides, strict=True), strict=True))
    offset = region.offset
    for size, stride in zip(base.shape, strides, strict=True):
        index = offset // stride
        offset = offset - index * stride
        name = next((n for n, (_, s) in left.items() if equal(s, stride)), None)
        if name is None:
            if not isinstance(index, int):
                return None
            tokens.append(str(index))
            continue
        count, _ = left.pop(name)
        if equal(count, size) and equal(index, 0):
            tokens.append(name)
        elif name == "d" and isinstance(index, int) and isinstance(count, int):
            tokens.append(f"d[{index}:{index + count}]")
        else:
            return None
    return " ".join(tokens) if not left and equal(offset, 0) else None
