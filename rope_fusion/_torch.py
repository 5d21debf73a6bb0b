"""The one door to private torch: what differs between torch 2.11 and 2.15, and what has no public name.

Importing this module imports torch's Inductor (seconds); `import rope_fusion` does not.
"""

from __future__ import annotations

import importlib
import re
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

    # Generated code allocates and makes views by them: a view costs the host a third of what `as_strided` does.
    empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
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


class CallSite(FallbackKernel):
    """A call of one of our operators in generated code, on CUDA through a launcher of its own (`kernels/launcher.py`).

    The generated call is ``site(bases, offsets, sizes, arguments)``: the buffers that the tensor arguments are views of, the bytes
    between the start of each and the view's, the numbers that all shapes depend on, and a function that gives the operator's arguments.
    """

    _at_site = False

    def _suits(self, wrapper: Any) -> bool:
        """Whether the generated code is plain Python and runs the kernel."""
        device = self.get_device()
        elsewhere = (
            V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False) or getattr(wrapper, "parent_wrapper", None)
        )
        return device is not None and device.type == "cuda" and not elsewhere

    def codegen(self, wrapper: Any) -> None:
        if self._suits(wrapper):
            operator: Any = self.op_overload
            _, _, name = operator._schema.name.partition("::")
            site = f"{name}_{self.get_name()}"
            wrapper.add_import_once("from rope_fusion.kernels.launcher import call_site")
            wrapper.add_import_once(f"{site} = call_site({name!r}, {operator._overloadname!r})")
            self.set_python_kernel_name(site)
            self._at_site = True
        super().codegen(wrapper)

    def codegen_args(self) -> list[str]:
        arguments = super().codegen_args()
        if not self._at_site:
            return arguments
        named = ", ".join("'" + argument.replace("=", "': ", 1) for argument in super().codegen_kwargs())
        inputs: Any = self.inputs
        starts = [_start(x.codegen_reference(), x.get_dtype().itemsize) for x in inputs]
        layouts = [x.get_output_spec() for x in inputs]
        symbols = {
            s
            for layout in layouts
            for size in (*layout.size, *layout.stride)
            for s in getattr(size, "free_symbols", ())
        }
        return [
            _tuple_of(base for base, _ in starts),
            _tuple_of(str(offset) for _, offset in starts),
            _tuple_of(sorted(map(str, symbols))),
            f"lambda: ({_tuple_of(arguments)}, {{{named}}})",
        ]

    def codegen_kwargs(self, skip_out: bool = False) -> list[str]:
        return [] if self._at_site else super().codegen_kwargs(skip_out)


def lower_to_call_site(operator: torch._ops.OpOverload, *arguments: Any, **named: Any) -> Any:
    """What a lowering returns that leaves a `CallSite` of `operator` in the generated code."""

    def wrapped(x: Any) -> Any:
        if not isinstance(x, IRNode):
            return x
        # a launcher allocates what the first call returned, so that every further call need not be checked
        x.skip_size_stride_alignment_checks = x.get_device_or_error().type == "cuda"  # type: ignore[attr-defined]
        return x.wrap_for_lowering() if hasattr(x, "wrap_for_lowering") else TensorBox.create(x)

    return pytree.tree_map(wrapped, CallSite.create(operator, *arguments, **named))


def _start(reference: str, itemsize: int) -> tuple[str, int]:
    """The buffer that generated code refers to, and where in it the tensor starts, in bytes; another expression is its own buffer."""
    view = re.fullmatch(r"reinterpret_tensor\((\w+), \([^()]*\), \([^()]*\), (\d+)\)", reference)
    return (reference, 0) if view is None else (view[1], int(view[2]) * itemsize)


def _tuple_of(items: Iterable[str]) -> str:
    return "(" + "".join(f"{item}, " for item in items) + ")"


__all__ = [
    "OPAQUE_TYPE",
    "REINPLACES_THROUGH_VIEWS",
    "CallFunction",
    "CallSite",
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
    "counters",
    "detect_fake_mode",
    "empty_strided_cuda",
    "fallback_handler",
    "fwd_only",
    "inductor_config",
    "lower_to_call_site",
    "register_lowering",
    "register_replacement",
    "reinterpret_tensor",
    "stable_topological_sort",
]
