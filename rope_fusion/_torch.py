"""The one door to private torch: what differs between torch 2.11 and 2.15, and what has no public name.

Importing this module imports torch's Inductor (seconds); `import rope_fusion` does not.
"""

from __future__ import annotations

import torch
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

try:
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass
except ImportError:  # torch 2.11: Inductor knows no such passes, so none but our own can be one

    class CustomInferenceAwareGraphPass(CustomGraphPass):  # type: ignore[no-redef]
        """A graph pass that is also told whether the graph is an inference graph."""


# Whether Inductor performs an index_put through reshapes of a graph input in place (seen: 2.13 does, 2.11 does not).
REINPLACES_THROUGH_VIEWS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


try:
    from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
    from torch._opaque_base import OpaqueBase
except ImportError:  # no operator can take an opaque object then
    OPAQUE_TYPE: str | None = None
else:

    class OpaqueArgument(OpaqueBase):
        """Names an argument in the schemas of our operators; schemas do not tell opaque types apart, so any will do."""

    register_opaque_type(OpaqueArgument, typ="reference")
    OPAQUE_TYPE = get_opaque_type_name(OpaqueArgument)


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
