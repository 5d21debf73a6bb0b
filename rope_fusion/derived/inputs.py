"""What the backend knows of the inputs of a captured graph: their names and what stands against deriving from them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class InputInfo:
    """What is known of one input of a captured graph before it is traced further. Holds the tensor weakly."""

    name: str
    requires_grad: bool = False
    is_inference: bool = False
    tensor: weakref.ref[Tensor] | None = None


def describe_inputs(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[InputInfo, ...]:
    """Note what a backend sees of its inputs; `hoisting_compile` takes it as `inputs`."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return tuple(_describe(node, example) for node, example in zip(placeholders, example_inputs, strict=False))


def _describe(node: Node, example: Any) -> InputInfo:
    source = getattr(node.meta.get("grapharg"), "source", None)
    text = getattr(source, "name", "")
    name = attribute_path(text() if callable(text) else text) or node.name
    if not isinstance(example, Tensor):
        return InputInfo(name)
    return InputInfo(name, example.requires_grad, example.is_inference(), weakref.ref(example))


def attribute_path(source: str) -> str:
    """``L['self']._modules['layers']._modules['0']._parameters['weight']`` → ``layers.0.weight``."""
    return ".".join(re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", source))


def info_of(node: Node, inputs: Sequence[InputInfo]) -> InputInfo:
    """What is known of the input that AOTAutograd made this placeholder from.

    A tensor subclass arrives as its inner tensors, each a placeholder: only its name and flags are known of these.
    """
    description: Any = node.meta.get("desc")
    parts: list[str] = []
    while hasattr(description, "base"):
        parts.insert(0, str(getattr(description, "attr", "")))
        description = description.base
    index = getattr(description, "idx", None)
    if not isinstance(index, int) or index >= len(inputs):
        return InputInfo(getattr(description, "target", node.name))
    info = inputs[index]
    return replace(info, name=".".join([info.name, *filter(None, parts)]), tensor=None) if parts else info
