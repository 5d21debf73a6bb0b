"""The self-check: at its first call a compiled graph runs both ways, and every value that a fusion took over is compared.

`verifying_compile` stands around `compile_fx_inner`. While the pass rewrites a graph it keeps a copy in which the unfused nodes are still
alive (`BothWays`). The first call (with ``rope_fusion.verify="always"`` every call) interprets that copy on the call's own
arguments: the graph is functional, so both ways write the cache on scratch copies, and the program's state changes once, at the end.
Each place where the program now reads a fused value instead of its own is compared. Later calls run the compiled graph alone.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from rope_fusion._torch import TracingContext, inductor_config, stable_topological_sort
from rope_fusion.canonical.canonicalise import name_of
from rope_fusion.options import Options
from rope_fusion.report import RopeFusionWarning
from rope_fusion.transaction import GraphTransaction

# Eager code rounds after every multiplication and addition and may round cos and sin: about four roundings of half a unit each, of values
# up to 1.4 times the largest element of the row (a rotation mixes two of them). Twice that is let through.
_UNITS = 8


Compiled = Callable[[list[Any]], Any]


class SelfCheckError(RuntimeError):
    """A fused site computed something else than the program does."""


@dataclass(frozen=True)
class Mismatch:
    """The element of one site that is furthest off."""

    site: str
    index: tuple[int, ...]
    unfused: float
    fused: float
    wrong: int
    elements: int

    def __str__(self) -> str:
        return (
            f"{self.site}: element {list(self.index)} is {self.fused!r} fused and {self.unfused!r} unfused "
            f"({self.wrong} of {self.elements} elements differ by more than rounding explains)"
        )


class BothWays:
    """One rewritten graph with its unfused nodes still alive, which compares the two where the program was rewired."""

    def __init__(self, options: Options, graph: Graph, transaction: GraphTransaction) -> None:
        self.options = options
        self.mismatches: list[Mismatch] = []
        copies: dict[Node, Node] = {}
        both = Graph()
        output = both.output(both.graph_copy(graph, copies))
        checked: dict[tuple[Node, Node], Node] = {}
        for user, old, new in transaction.rewired():
            reader = output if user.op == "output" else copies[user]
            if (old, new) not in checked:
                with both.inserting_before(output):
                    checked[old, new] = both.call_function(self._compare, (copies[old], copies[new], name_of(old)))
            reader.replace_input_with(copies[new], checked[old, new])
        stable_topological_sort(both)
        both.eliminate_dead_code()
        self._module = GraphModule(graph.owning_module or torch.nn.Module(), both)
        self.sites = len(checked)

    def run(self, args: Sequence[Any]) -> Any:
        """Compute what the graph computes, comparing on the way; raises `SelfCheckError` unless mismatches fall back."""
        return Interpreter(self._module).run(*args)

    def _compare(self, unfused: Any, fused: Any, site: str) -> Any:
        found = find_mismatch(unfused, fused, site, exact=self.options.numerics == "exact")
        if found is None:
            return fused
        self.mismatches.append(found)
        if self.options.on_mismatch == "raise":
            raise SelfCheckError(
                f"rope_fusion.verify found a wrong fusion at {found}; please report it with the graph that "
                "rope_fusion.dump_dir writes. rope_fusion.disable leaves a pattern out"
            )
        return unfused


class SelfCheck:
    """Hands the graph with both ways in it from the pass to the compile step around it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._latest: BothWays | None = None

    def observe(self, graph: Graph, transaction: GraphTransaction) -> None:
        """Called by the pass with a rewritten graph whose dead nodes are still there."""
        self._latest = BothWays(self.options, graph, transaction)

    def take(self) -> BothWays | None:
        """What was observed since the last call; None where nothing was fused."""
        latest, self._latest = self._latest, None
        return latest


def find_mismatch(unfused: Any, fused: Any, site: str, exact: bool) -> Mismatch | None:
    """The worst element that rounding does not explain, or None; both are tensors of one shape and dtype."""
    if not isinstance(unfused, Tensor) or not unfused.numel():
        return None
    if unfused.dtype.is_complex:
        unfused, fused = torch.view_as_real(unfused.resolve_conj()), torch.view_as_real(fused.resolve_conj())
    before, after = unfused.double(), fused.double()
    distance = (before - after).abs()
    same_special = (torch.isnan(before) & torch.isnan(after)) | (before == after)
    distance = torch.where(same_special, 0.0, distance.nan_to_num(torch.inf, torch.inf))
    if exact or not unfused.dtype.is_floating_point:
        allowed = torch.zeros((), dtype=torch.float64, device=before.device)
    else:
        row = before.nan_to_num(0.0, 0.0, 0.0).abs()
        row = row.amax(-1, keepdim=True) if row.dim() else row
        info = torch.finfo(unfused.dtype)
        # FP8 is rounded once, of a value that differs by little: one unit
        units = 1 if unfused.dtype.itemsize == 1 else _UNITS
        allowed = row.clamp(min=info.tiny) * info.eps * units
    wrong = distance > allowed
    count = int(wrong.sum())
    if not count:
        return None
    flat = int(torch.where(wrong, distance, -1.0).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape)) if distance.dim() else ()
    return Mismatch(site, index, float(before[index]), float(after[index]), count, distance.numel())


class VerifiedFunction:
    """A compiled function that checks itself at its first call, or at every call."""

    _boxed_call = True

    def __init__(self, both_ways: BothWays, fused: Compiled, fallback: Compiled | None) -> None:
        self._both_ways = both_ways
        self._fused = fused
        self._fallback = fallback
        self._settled: Compiled | None = None
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        if self._settled is not None:
            return self._settled(args)
        with self._lock:
            return self._check(args)

    def _check(self, args: list[Any]) -> Any:
        both_ways = self._both_ways
        with torch.no_grad():
            result = both_ways.run(args)
        args.clear()  # boxed: the caller expects its list to be emptied
        if both_ways.options.verify == "first":
            self._settled = self._fused
        if both_ways.mismatches:
            self._settled = self._fallback
            found = "; ".join(map(str, both_ways.mismatches[:3]))
            warnings.warn(
                f"rope_fusion: the self-check found a wrong fusion, so this graph runs unfused from now on: {found}",
                RopeFusionWarning,
                stacklevel=2,
            )
        return result


def verifying_compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    next_compile: Callable[..., Any],
    self_check: SelfCheck,
    unfused_settings: dict[str, Any],
    **kwargs: Any,
) -> Any:
    """Compile a graph so that its first call checks every fused site; wraps ``compile_fx_inner``.

    Args:
        gm: the graph that AOTAutograd traced.
        example_inputs: its fake inputs.
        next_compile: what compiles the graph, with the pass that `self_check` was given to.
        self_check: filled by the pass.
        unfused_settings: Inductor settings without the pass, for the function to fall back to.
        kwargs: those of `compile_fx_inner`.
    """
    fallback = None
    if self_check.options.on_mismatch == "fallback":
        # The strides of the outputs are reported once for each graph, which the second compilation does.
        with inductor_config.patch(unfused_settings), TracingContext.report_output_strides():
            fallback = next_compile(copy_graph(gm), example_inputs, **kwargs)
    fused = next_compile(gm, example_inputs, **kwargs)
    both_ways = self_check.take()
    return fused if both_ways is None else VerifiedFunction(both_ways, fused, fallback)


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy of the graph with its own nodes; parameters and fake values are shared."""
    copies: dict[Node, Node] = {}
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
    made = GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return made
