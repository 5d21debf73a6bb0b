"""The one door to private torch: what differs between torch 2.11 and 2.15, and what has no public name.

Importing this module imports torch's Inductor (seconds); `import rope_fusion` does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

try:
    from torch._dynamo.utils import counters, detect_fake_mode
    from torch._guards import TracingContext
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
    from torch._inductor import config as inductor_config
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.ir import FallbackKernel, IRNode, TensorBox
    from torch._inductor.lowering import add_needs_realized_inputs, fallback_handler, register_lowering
    from torch._inductor.pattern_matcher import (
        CallFunction,
        KeywordArg,
        Match,
        MultiOutputPattern,
        PatternExpr,
        PatternMatcherPass,
        fwd_only,
        register_replacement,
        stable_topological_sort,
    )
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Generated code allocates by it.
    empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
except (ImportError, AttributeError) as missing:
    raise ImportError(
        f"rope_fusion works with torch 2.11 to 2.15; this is torch {torch.__version__}, which lacks a name that it needs "
        f"({missing}). Install another torch, or a newer rope_fusion"
    ) from missing

try:
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass
except ImportError:  # torch 2.11: Inductor knows no such passes, so none but our own can be one

    class CustomInferenceAwareGraphPass(CustomGraphPass):  # type: ignore[no-redef]
        """A graph pass that is also told whether the graph is an inference graph."""


# Whether Inductor performs an index_put through reshapes of a graph input in place (seen: 2.13 does, 2.11 does not).
REINPLACES_THROUGH_VIEWS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def _register_opaque_type() -> str | None:
    """The name in schemas of a type that stands for every opaque object; schemas do not tell opaque types apart."""
    try:
        from torch._library import opaque_object
    except ImportError:  # no operator can take an opaque object then
        return None
    newer = hasattr(opaque_object, "register_custom_class")  # torch 2.14 warns of the older names
    base = importlib.import_module("torch._custom_class_base" if newer else "torch._opaque_base")
    register = getattr(opaque_object, "register_custom_class" if newer else "register_opaque_type")
    bases = (base.CustomClassBase if newer else base.OpaqueBase,)
    argument = type("OpaqueArgument", bases, {"__module__": __name__})
    register(argument, typ="symbolic" if newer else "reference")
    return opaque_object.get_opaque_type_name(argument)


OPAQUE_TYPE = _register_opaque_type()


def lower_to_kernel(kernel: type[FallbackKernel], operator: torch._ops.OpOverload, *arguments: Any) -> Any:
    """What a lowering returns that leaves a call of `operator` in the generated code, as a node of class `kernel`."""

    def wrapped(x: Any) -> Any:
        if not isinstance(x, IRNode):
            return x
        return x.wrap_for_lowering() if hasattr(x, "wrap_for_lowering") else TensorBox.create(x)

    return pytree.tree_map(wrapped, kernel.create(operator, *arguments))


def call_in_generated_code(kernel: FallbackKernel, wrapper: Any, name: str, lines: Iterable[str]) -> None:
    """Let `kernel` call `name`, which `lines` define, where the generated code is plain Python; else its operator."""
    if V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False) or getattr(wrapper, "parent_wrapper", None):
        return
    for line in lines:
        wrapper.add_import_once(line)
    kernel.set_python_kernel_name(name)


__all__ = [
    "OPAQUE_TYPE",
    "REINPLACES_THROUGH_VIEWS",
    "CallFunction",
    "CustomGraphPass",
    "CustomInferenceAwareGraphPass",
    "FakeTensorMode",
    "FallbackKernel",
    "KeywordArg",
    "Match",
    "MultiOutputPattern",
    "PatternExpr",
    "PatternMatcherPass",
    "TracingContext",
    "add_needs_realized_inputs",
    "auto_functionalized",
    "auto_functionalized_v2",
    "call_in_generated_code",
    "counters",
    "detect_fake_mode",
    "empty_strided_cuda",
    "fallback_handler",
    "fwd_only",
    "inductor_config",
    "lower_to_kernel",
    "register_lowering",
    "register_replacement",
    "stable_topological_sort",
]
