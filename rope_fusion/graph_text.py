"""FX graphs as text that is the same from run to run, differences of two such texts, and dumps of both.

Names in the text depend on the structure of the graph alone, never on the numbers or addresses that one tracing
happened to give, so texts can be kept as expectations and compared across processes and torch versions.
"""

from __future__ import annotations

import difflib
import operator
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

BEFORE, AFTER, DIFFERENCE = "before.txt", "after.txt", "diff.txt"

_SYMBOL = re.compile(r"\b([a-z]{1,3})(\d+)\b")
_NAME = re.compile(r"%[A-Za-z0-9_]+")
_DEFINITION = re.compile(r"^\s*(%[A-Za-z0-9_]+)")


def graph_to_text(graph: Graph) -> str:
    """One line per node: ``%name: dtype[shape] = target(arguments)``.

    Inputs are ``%in_0``, ``%in_1``, …; other nodes carry their operator's name, counted from 0. Symbols of sizes are
    renamed in the order in which they appear. Strides are shown where a tensor is not contiguous, devices where they
    differ from that of the first tensor.
    """
    return _Printer().text(graph, "")


class _Printer:
    def __init__(self) -> None:
        self._names: dict[Node, str] = {}
        self._counts: Counter[str] = Counter()
        self._symbols: dict[str, str] = {}
        self._device: torch.device | None = None

    def text(self, graph: Graph, indent: str) -> str:
        lines = []
        for node in graph.nodes:
            if node.op == "output":
                lines.append(f"{indent}return {self._value(node.args[0])}\n")
                continue
            kind = self._type(node.meta.get("val"))
            name = self._name(node)
            lines.append(f"{indent}%{name}{': ' if kind else ''}{kind} = {self._expression(node)}\n")
            submodule = _submodule(graph, node)
            if submodule is not None:
                lines.append(self.text(submodule.graph, indent + "    "))
        if self._device is not None and not indent:
            lines.insert(0, f"# tensors are on {self._device} where nothing else is said\n")
        return "".join(lines)

    def _name(self, node: Node) -> str:
        base = "in" if node.op == "placeholder" else re.sub(r"\W", "_", _short(node.target)).strip("_").lower() or "n"
        name = f"{base}_{self._counts[base]}"
        self._counts[base] += 1
        self._names[node] = name
        return name

    def _expression(self, node: Node) -> str:
        if node.op == "placeholder":
            return "input"
        if node.op == "get_attr":
            return f"attribute {node.target}"
        arguments = [self._value(value) for value in node.args]
        arguments += [f"{name}={self._value(value)}" for name, value in node.kwargs.items()]
        return f"{_long(node.target)}({', '.join(arguments)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return f"%{self._names.get(value, 'undefined')}"
        if isinstance(value, tuple):
            return "(" + ", ".join(self._value(item) for item in value) + ("," if len(value) == 1 else "") + ")"
        if isinstance(value, list):
            return "[" + ", ".join(self._value(item) for item in value) + "]"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key!r}: {self._value(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return ":".join("" if part is None else self._value(part) for part in (value.start, value.stop, value.step))
        if isinstance(value, torch.dtype):
            return dtype_name(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._size(value)
        if isinstance(value, str | int | float | bool | complex | None):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return f"constant {self._type(value)}"
        if isinstance(value, torch.device):
            return str(value)
        if callable(value):
            return _long(value)
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))

    def _type(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            if self._device is None:
                self._device = value.device
            text = f"{dtype_name(value.dtype)}[{', '.join(self._size(size) for size in value.shape)}]"
            if value.layout is torch.strided and not _is_contiguous(value):
                text += f" strides ({', '.join(self._size(stride) for stride in value.stride())})"
            return text if value.device == self._device else f"{text} on {value.device}"
        if isinstance(value, torch.SymInt):
            return f"int {self._size(value)}"
        if isinstance(value, tuple | list):
            return "(" + ", ".join(self._type(item) or "?" for item in value) + ")"
        return ""

    def _size(self, size: Any) -> str:
        def renamed(match: re.Match[str]) -> str:
            prefix = match[1]
            used = sum(known.startswith(prefix) for known in self._symbols)
            return self._symbols.setdefault(match[0], f"{prefix}{used}")

        return str(size) if isinstance(size, int | float) else _SYMBOL.sub(renamed, str(size))


def _is_contiguous(value: torch.Tensor) -> bool:
    """By hints, without guards: whether the strides are those of a freshly made tensor."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(size) != "1" and str(stride) != str(expected):
            return False
        expected = expected * size
    return True


def _submodule(graph: Graph, node: Node) -> GraphModule | None:
    """The graph that an operator of higher order is given by a ``get_attr`` node."""
    if node.op != "get_attr" or graph.owning_module is None:
        return None
    found = getattr(graph.owning_module, str(node.target), None)
    return found if isinstance(found, GraphModule) else None


def dtype_name(dtype: torch.dtype) -> str:
    """``bf16``, ``f32``, ``i64``, ``f8_e4m3fn``: the dtype in a few letters."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long) and name[len(long) :][:1].isdigit():
            return short + name[len(long) :]
    return name


def _long(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(target)
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__qualname__
    return f"{module}.{name}" if module not in (None, "_operator", "builtins") else name


def _short(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return _long(target).rsplit(".", 1)[-1]


def diff(a: str, b: str, a_name: str = "before", b_name: str = "after") -> str:
    """Unified difference of two graph texts; empty where they describe the same graph.

    A node that only moved by a few places keeps its old name, so that removing one multiplication does not show up in
    every later line that holds one.
    """
    old, new = a.splitlines(), _renamed(a.splitlines(), b.splitlines())
    lines = difflib.unified_diff(old, new, a_name, b_name, lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _renamed(old: list[str], new: list[str]) -> list[str]:
    """The lines ``new`` with the names that their counterparts among ``old`` have."""
    names: dict[str, str] = {}
    for a, b in _aligned(old, new):
        was, now = _DEFINITION.match(a), _DEFINITION.match(b)
        if was and now:
            names[now[1]] = was[1]
    taken = {match[1] for line in old if (match := _DEFINITION.match(line))} | set(names.values())
    for line in new:
        defined = _DEFINITION.match(line)
        if defined and defined[1] not in names:
            name = defined[1]
            while name in taken:
                name += "_new"
            names[defined[1]] = name
            taken.add(name)
    return [_NAME.sub(lambda match: names.get(match[0], match[0]), line) for line in new]


def _aligned(old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs of lines for the same node: first by operator, arguments and types of both, then by those of the line."""
    matcher = difflib.SequenceMatcher(None, _signatures(old), _signatures(new), autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            yield from zip(old[i:i_end], new[j:j_end], strict=True)
        elif kind == "replace":
            within = difflib.SequenceMatcher(None, _bare(old[i:i_end]), _bare(new[j:j_end]), autojunk=False)
            for a, b, size in within.get_matching_blocks():
                yield from zip(old[i + a : i + a + size], new[j + b : j + b + size], strict=True)


def _bare(lines: list[str]) -> list[str]:
    return [_NAME.sub("%", line) for line in lines]


def _signatures(lines: list[str]) -> list[str]:
    """Each line without names, and the nameless lines that define what it uses."""
    bare = _bare(lines)
    defined = {match[1]: text for line, text in zip(lines, bare, strict=True) if (match := _DEFINITION.match(line))}
    return [
        text + "".join(f"\n{defined.get(name, '')}" for name in _NAME.findall(line))
        for line, text in zip(lines, bare, strict=True)
    ]


def dump_graphs(dump_dir: str | os.PathLike[str], name: str, before: str, after: str) -> Path:
    """Write both texts and their difference into a new numbered folder under ``dump_dir`` and return that folder.

    The folder appears with all its files at once, whatever other processes write beside it; ``name`` cannot lead
    out of ``dump_dir``.
    """
    root = Path(dump_dir)
    root.mkdir(parents=True, exist_ok=True)
    draft = root / f".{uuid.uuid4().hex}"
    draft.mkdir()
    for file, text in ((BEFORE, before), (AFTER, after), (DIFFERENCE, diff(before, after))):
        (draft / file).write_text(text, encoding="utf-8")
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._")[:60] or "graph"
    numbers = (re.match(r"(\d+)-", entry.name) for entry in root.iterdir())
    number = max((int(match[1]) for match in numbers if match), default=-1) + 1
    while True:
        folder = root / f"{number:04d}-{safe}"
        try:
            draft.rename(folder)  # fails where another process took the number and the name first
            return folder
        except OSError:
            if not folder.exists():
                raise
            number += 1
