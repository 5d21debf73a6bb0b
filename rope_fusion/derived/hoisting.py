"""The compile step that takes derivable values out of a graph, and what users call afterwards."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from rope_fusion.canonical.derivation import dequantize
from rope_fusion.derived import plan
from rope_fusion.derived.inputs import InputInfo, info_of
from rope_fusion.derived.lifting import erase_unread, settle
from rope_fusion.derived.prologue import Prologue
from rope_fusion.derived.selection import Selector, deriving_patterns
from rope_fusion.derived.store import Derivation, DerivedStore, DerivedTensor, equal_valued, process_store
from rope_fusion.options import Options
from rope_fusion.report import DerivedTensor as ReportEntry
from rope_fusion.report import GraphReport, RopeFusionWarning
from rope_fusion.transaction import GraphTransaction

Compiled = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class HoistedFunction:
    """A compiled function whose last inputs are derived tensors.

    It deliberately has no `_fx_graph_cache_key`: AOTAutograd's cache would store the inner function alone, and on a hit
    call it without these inputs. Inductor's own cache, below it, is used as always.
    """

    inner: Compiled
    prologue: Prologue
    _boxed_call = True

    def __call__(self, args: list[Any]) -> Any:
        args.extend(self.prologue.values(args))
        return self.inner(args)


@dataclass(frozen=True)
class UncachedFunction:
    """A compiled function whose graph keeps derivations that another run might take out, so no cache may replay it."""

    inner: Compiled
    _boxed_call = True

    def __call__(self, args: list[Any]) -> Any:
        return self.inner(args)


def hoisting_compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    next_compile: Callable[..., Any],
    options: Options,
    report: GraphReport,
    inputs: Sequence[InputInfo] = (),
    store: DerivedStore | None = None,
    **kwargs: Any,
) -> Any:
    """Compile a graph with its derivable values taken out; wraps ``torch._inductor.compile_fx.compile_fx_inner``.

    Args:
        gm: the graph that AOTAutograd traced, before Inductor's post-grad passes; changed in place.
        example_inputs: its fake inputs.
        next_compile: what compiles the graph, ``compile_fx_inner`` or something around it.
        options: `derived_budget`, `assume_frozen`, `freshness_interval` and `disable` are used.
        report: told about candidates, hits, refusals and the bytes of each derived tensor.
        inputs: what the backend saw (`describe_inputs`): gives names, and lets graphs share a budget exactly.
        store: where values are kept; the process's by default.
        kwargs: those of `compile_fx_inner`, handed on; `static_input_idxs` grows.
    """
    store = store or process_store()
    if kwargs.get("is_backward"):
        return next_compile(gm, example_inputs, **kwargs)
    transaction = GraphTransaction(gm.graph)
    try:
        hoisted = _take_out(gm, options, report, inputs, store, kwargs)
    except Exception as error:
        transaction.roll_back()
        sentence = f"deriving tensors failed with {type(error).__name__}: {error}; the graph was compiled without"
        if options.strict:
            raise
        report.failure(sentence)
        for pattern in report.patterns.values():
            pattern.hits = 0
        report.derived.clear()
        warnings.warn(f"rope_fusion: {sentence}", RopeFusionWarning, stacklevel=2)
        hoisted = _Hoisted()
    if not hoisted.derivations:
        inner = next_compile(gm, example_inputs, **kwargs)
        return UncachedFunction(inner) if hoisted.refused and kwargs.get("is_inference") else inner

    gm.recompile()
    first = len(example_inputs)
    static = kwargs.get("static_input_idxs", ())
    kwargs["static_input_idxs"] = [*static, *range(first, first + len(hoisted.values))]
    inner = next_compile(gm, [*example_inputs, *hoisted.values], **kwargs)
    limits = {item.device: plan.budget_bytes(options.derived_budget, item.device) for item in hoisted.derivations}
    prologue = Prologue(
        hoisted.derivations,
        store,
        limits,
        options.freshness_interval,
        options.assume_frozen,
        functools.partial(_note_duplicates, [entry for entry in report.derived if entry.kept]),
    )
    return HoistedFunction(inner, prologue)


def _note_duplicates(noted: Sequence[ReportEntry], entries: Sequence[DerivedTensor | None]) -> None:
    """Write into the report which derived tensors seem to hold the same values in different memory."""
    kept = [entry for entry in entries if entry is not None]
    for first, *others in equal_valued(kept):
        for entry in noted:
            if entry.name in [other.derivation.name for other in others]:
                entry.reason = f"its sampled values equal those of {first.derivation.name}; one buffer would do"


@dataclass(frozen=True)
class _Hoisted:
    """What was taken out of a graph: how to compute it, and the fake tensors that stand for it."""

    derivations: tuple[Derivation, ...] = ()
    values: tuple[Tensor, ...] = ()
    refused: bool = False  # something could have been taken out


def _take_out(
    gm: GraphModule,
    options: Options,
    report: GraphReport,
    inputs: Sequence[InputInfo],
    store: DerivedStore,
    kwargs: Mapping[str, Any],
) -> _Hoisted:
    graph = gm.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    static = [placeholders[index] for index in kwargs.get("static_input_idxs", ()) if index < len(placeholders)]
    runners = deriving_patterns(options, plan.device_of(graph), report)
    if not runners or not static:
        return _Hoisted()
    finding = plan.find_candidates(graph, static)
    for runner in runners:
        for sentence in finding.near_misses if dequantize in runner.targets else ():
            report.refusal(runner.entry.name, sentence)
    wanted = frozenset[object]().union(*(runner.targets for runner in runners))
    candidates = [candidate for candidate in finding.candidates if candidate.operator in wanted]
    if not candidates:
        settle(graph, finding.lifted, set())
        return _Hoisted()
    infos = {node: info_of(node, inputs) for node in placeholders}
    selector = Selector(graph, infos, options, store, bool(kwargs.get("is_inference")), _stores_inner_functions())
    chosen = selector.choose(candidates, runners, report)
    position = {node: index for index, node in enumerate(placeholders)}
    derivations = tuple(_derivation(candidate, infos, position) for candidate in chosen)
    values = tuple(plan.take_out(graph, chosen))
    taken = {node for candidate in chosen for node in candidate.nodes}
    settle(graph, finding.lifted, taken)
    products = [node for candidate in chosen if candidate.packing for node in candidate.packing.products]
    for node in (*products, *taken):
        erase_unread(graph, node)
    return _Hoisted(derivations, values, refused=not chosen)


def _derivation(candidate: plan.Candidate, infos: Mapping[Node, InputInfo], position: Mapping[Node, int]) -> Derivation:
    """How to compute a candidate once its nodes are gone."""
    value = candidate.nodes[0].meta["val"]
    names = tuple(infos[source].name for source in candidate.sources)
    return Derivation(
        name=names[0],
        structure=candidate.structure,
        compute=plan.computation_of(candidate),
        sources=tuple(position[source] for source in candidate.sources),
        source_names=names,
        shape=tuple(value.shape),
        stride=value.stride(),
        dtype=value.dtype,
        device=value.device,
        packed=candidate.packing is not None,
    )


def _stores_inner_functions() -> bool:
    """Whether torch is set to store the inner compiled function by itself: there is no place for the wrapper then."""
    functorch, dynamo = torch._functorch.config, torch._dynamo.config
    return bool(getattr(functorch, "bundled_autograd_cache", False) or getattr(dynamo, "caching_precompile", False))


def invalidate(target: object) -> None:
    """Compute again, now and in place, everything derived from a module, a tensor or an iterable of them.

    To be called after writes that leave the version counter alone. CUDA graphs that read the derived tensors see the
    new values in their next replay.
    """
    process_store().recompute(tensor.untyped_storage() for tensor in _tensors_in(target))


def _tensors_in(target: object) -> Iterable[Tensor]:
    if isinstance(target, Tensor):
        yield target
    elif isinstance(target, nn.Module):
        yield from target.parameters()
        yield from target.buffers()
    elif isinstance(target, Iterable) and not isinstance(target, str | bytes):  # an str holds strs for ever
        for item in target:
            yield from _tensors_in(item)
    else:
        raise TypeError(
            f"rope_fusion.invalidate takes a module, a tensor or an iterable of them, got {type(target).__name__}"
        )
