"""The one door to private torch: what differs between torch 2.11 and 2.15, and what has no public name.

Importing this module imports torch's Inductor (seconds); `import rope_fusion` does not.
"""

from __future__ import annotations

import importlib

import torch

try:
    from torch._dynamo.utils import counters, detect_fake_mode
    from torch._guards import TracingContext
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
    from torch._inductor import config as inductor_config
    from torch._inductor.custom_graph_pass import CustomGraphPass
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
    from torch._subclasses.fake_tensor import FakeTensorMode
except ImportError as missing:
    raise ImportError(
        f"rope_fusion works with torch 2.11 to 2.14; this is torch {torch.__version__}, which lacks a name that it needs "
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


__all__ = [
    "OPAQUE_TYPE",
    "REINPLACES_THROUGH_VIEWS",
    "CallFunction",
    "CustomGraphPass",
    "CustomInferenceAwareGraphPass",
    "FakeTensorMode",
    "KeywordArg",
    "Match",
    "MultiOutputPattern",
    "PatternExpr",
    "PatternMatcherPass",
    "TracingContext",
    "add_needs_realized_inputs",
    "auto_functionalized",
    "auto_functionalized_v2",
    "counters",
    "detect_fake_mode",
    "fallback_handler",
    "fwd_only",
    "inductor_config",
    "register_lowering",
    "register_replacement",
    "stable_topological_sort",
]
