"""Perturbs one node of a captured graph: a sign, a constant, a dim, the operand order, an index, a dtype, an operator, an operand.

A perturbed graph is a program of its own. Whatever the pass makes of it must compute what it computes, not what the graph it came
from does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node, map_arg

from rope_fusion._torch import detect_fake_mode
from trust.choices import Choices
from trust.differential import Captured, copy_with_nodes

aten = torch.ops.aten
prims = torch.ops.prims

TWINS = {
    aten.add.Tensor: aten.sub.Tensor,
    aten.sub.Tensor: aten.add.Tensor,
    aten.mul.Tensor: aten.div.Tensor,
    aten.div.Tensor: aten.mul.Tensor,
    aten.cos.default: aten.sin.default,
    aten.sin.default: aten.cos.default,
    aten.neg.default: aten.abs.default,
    aten.clamp_min.default: aten.clamp_max.default,
    aten.clamp_max.default: aten.clamp_min.default,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def mutate(call: Captured, choices: Choices, tries: int = 40) -> tuple[Captured, str] | None:
    """A copy of a captured graph with one node perturbed, and what was done to it; None where nothing found can run."""
    nodes = [n for n in call.graph.graph.nodes if n.op == "call_function" and n.target is not aten.copy_.default]
    if not nodes:
        return None
    for _ in range(tries):
        if call.graph.meta.get("specialised"):
            return None
        original = choices.pick(nodes)
        options = list(_perturbations(original, choices))
        if not options:
            continue
        target, args, kwargs, what = choices.pick(options)
        made, copies = copy_with_nodes(call.graph)
        node, before = copies[original], str(original.format_node())
        node.target, (node.args, node.kwargs) = target, map_arg((args, kwargs), copies.__getitem__)
        try:
            sensible = refresh(made, node)
        except Specialised:
            call.graph.meta["specialised"] = True
            return None
        if sensible:
            made.graph.eliminate_dead_code()
            perturbed = Captured(made, call.arguments)
            if _runs(perturbed):
                return perturbed, f"{what}: {before}  ->  {node.format_node()}"
    return None


def _runs(call: Captured) -> bool:
    try:
        Interpreter(call.graph).run(*call.copy_arguments())
    except Exception:
        return False
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Fake tensors log every operator that fails; here most failures are perturbations that make no sense."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def refresh(gm: GraphModule, start: Node) -> bool:
    """Compute the fake values of `start` and all that follows; False where that fails or changes what is written to an input.

    Raises:
        Specialised: see there.
    """
    fake_mode = detect_fake_mode([node.meta["val"] for node in gm.graph.nodes if "val" in node.meta])
    assert fake_mode is not None
    shapes = fake_mode.shape_env
    known = dict(shapes.replacements) if shapes is not None else {}
    sensible = _propagate(gm, start, fake_mode)
    if shapes is not None and known != dict(shapes.replacements):
        raise Specialised
    return sensible


def _propagate(gm: GraphModule, start: Node, fake_mode: Any) -> bool:
    changed = {start}
    for node in gm.graph.nodes:
        if node not in changed and not any(source in changed for source in node.all_input_nodes):
            continue
        if node.op == "output":
            continue
        if node.target is aten.copy_.default:
            into, value = node.args[0].meta["val"], node.args[1].meta["val"]
            if not isinstance(value, torch.Tensor) or into.shape != value.shape or into.dtype != value.dtype:
                return False
            continue
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
        try:
            with _quiet(), fake_mode, torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)
        except Exception:
            return False
        changed.add(node)
    return True


class Specialised(Exception):
    """A perturbation fixed a symbolic size, for every graph that shares it; none of them is fit for other sizes any more."""


Perturbation = tuple[Any, tuple[Any, ...], dict[str, Any], str]


def _perturbations(node: Node, choices: Choices) -> Iterator[Perturbation]:
    target, args, kwargs = node.target, node.args, dict(node.kwargs)
    if target in TWINS:
        yield TWINS[target], args, kwargs, "operator"
    if target is aten.index_copy.default and _holds_numbers(node):
        yield aten.index_add.default, args, kwargs, "operator"
    if target is aten.neg.default:
        yield aten.clone.default, args, {}, "sign"
    if len(args) >= 2 and isinstance(args[0], Node) and isinstance(args[1], Node):
        yield target, (args[1], args[0], *args[2:]), kwargs, "operand order"
    for position, value in enumerate(args):
        for changed, what in _changed(value, node, choices):
            yield target, (*args[:position], changed, *args[position + 1 :]), kwargs, what
    for key, value in kwargs.items():
        for changed, what in _changed(value, node, choices):
            yield target, args, {**kwargs, key: changed}, what
    if target is aten.index_put.default and len(args) == 3 and _holds_numbers(node):
        yield target, (*args, True), kwargs, "accumulate"


def _holds_numbers(node: Node) -> bool:
    """Bytes stand for FP8: the sum of two says nothing about what they stand for, and one rounded otherwise may make a NaN of it."""
    return node.meta["val"].dtype != torch.uint8


def _changed(value: Any, node: Node, choices: Choices) -> Iterator[tuple[Any, str]]:
    if isinstance(value, bool):
        yield not value, "flag"
    elif isinstance(value, int):
        yield value + choices.pick((1, -1)), "index"
        yield -value, "sign of an index"
        yield choices.pick((0, 1, 2, 3)), "index"
    elif isinstance(value, float):
        yield value * choices.pick((0.5, 2.0, -1.0, 1.001)), "constant"
    elif isinstance(value, torch.dtype):
        yield choices.pick(DTYPES), "dtype"
    elif isinstance(value, Node):
        likes = [other for other in _earlier(node) if _alike(other, value)]
        if likes:
            yield choices.pick(likes), "operand"
    elif isinstance(value, (list, tuple)) and value:
        position = choices.pick(range(len(value)))
        for changed, what in _changed(value[position], node, choices):
            made = [*value[:position], changed, *value[position + 1 :]]
            yield type(value)(made) if isinstance(value, tuple) else made, what
        if len(value) > 1:
            yield [*value[1:], value[0]], "order"


def _earlier(node: Node) -> Iterator[Node]:
    for other in node.graph.nodes:
        if other is node:
            return
        if other.target not in (aten.empty.memory_format, aten.empty_strided.default):  # holds anything
            yield other


def _alike(other: Node, value: Node) -> bool:
    if other is value:
        return False
    first, second = other.meta.get("val"), value.meta.get("val")
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    # as text, because comparing symbolic sizes would add guards
    return str(first.shape) == str(second.shape) and first.dtype == second.dtype
