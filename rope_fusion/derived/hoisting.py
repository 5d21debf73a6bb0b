"""The compile step that takes derivable values out of a graph, and what users call afterwards."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from rope_fusion.derived import plan
from rope_fusion.canonical.static_values import written_placeholders
from rope_fusion.derived.prologue import Prologue
from rope_fusion.derived.store import Derivation, DerivedStore, process_store
from rope_fusion.options import Options
from rope_fusion.report import GraphReport

Compiled = Callable[[list[Any]], Any]


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
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    known = [_info(node, inputs) for node in placeholders]
    static = [index for index in kwargs.get("static_input_idxs", ()) if index < len(placeholders)]
    finding = plan.find_candidates(gm.graph, [placeholders[index] for index in static])
    for pattern, sentence in finding.refusals:
        if pattern not in options.disable:
            report.refusal(pattern, sentence)
    candidates = [candidate for candidate in finding.candidates if candidate.pattern not in options.disable]
    if not candidates:
        return next_compile(gm, example_inputs, **kwargs)

    planner = _Planner(gm, placeholders, known, options, report, store)
    chosen = planner.choose(candidates, bool(kwargs.get("is_inference")))
    if not chosen:
        inner = next_compile(gm, example_inputs, **kwargs)
        return UncachedFunction(inner) if kwargs.get("is_inference") else inner

    derivations = [planner.derivation(candidate) for candidate in chosen]
    values = plan.take_out(gm.graph, chosen)
    gm.recompile()
    first = len(example_inputs)
    kwargs["static_input_idxs"] = [*static, *range(first, first + len(values))]
    inner = next_compile(gm, [*example_inputs, *values], **kwargs)
    limits = {item.device: plan.budget_bytes(options.derived_budget, item.device) for item in derivations}
    prologue = Prologue(derivations, store, limits, options.freshness_interval, options.assume_frozen)
    return HoistedFunction(inner, prologue)


def _info(node: Node, inputs: Sequence[InputInfo]) -> InputInfo:
    """What the backend saw of the input that AOTAutograd made this placeholder from."""
    index = getattr(node.meta.get("desc"), "idx", None)
    if isinstance(index, int) and index < len(inputs):
        return inputs[index]
    return InputInfo(node.name)


class _Planner:
    """Decides about the candidates of one graph and writes down why."""

    def __init__(
        self,
        gm: GraphModule,
        placeholders: Sequence[Node],
        known: Sequence[InputInfo],
        options: Options,
        report: GraphReport,
        store: DerivedStore,
    ) -> None:
        self._position = {node: index for index, node in enumerate(placeholders)}
        self._info = dict(zip(placeholders, known, strict=True))
        self._written = written_placeholders(gm.graph)
        self._options, self._report, self._store = options, report, store

    def choose(self, candidates: Sequence[plan.Candidate], is_inference: bool) -> list[plan.Candidate]:
        """The candidates to take out."""
        allowed = []
        for candidate in candidates:
            self._report.candidate(candidate.pattern)
            sentence = self._refusal(candidate, is_inference)
            if sentence is None:
                allowed.append(candidate)
            else:
                self._refuse(candidate, sentence)
        devices = {candidate.nodes[0].meta["val"].device for candidate in allowed}
        limits = {device: plan.budget_bytes(self._options.derived_budget, device) for device in devices}
        free = {device: limit - self._store.live_bytes(device) for device, limit in limits.items()}
        kept = [candidate for candidate in allowed if self._exists(candidate)]
        taken = plan.within_budget(allowed, free, kept)
        chosen = []
        for index, candidate in enumerate(allowed):
            if index in taken:
                chosen.append(candidate)
                for _ in candidate.nodes:
                    self._report.hit(candidate.pattern)
                self._report.derive(self._name(candidate), candidate.bytes)
            else:
                limit = limits[candidate.nodes[0].meta["val"].device]
                self._refuse(candidate, f"rope_fusion.derived_budget ({limit} bytes here) is used up")
        return chosen

    def _refusal(self, candidate: plan.Candidate, is_inference: bool) -> str | None:
        name = self._name(candidate)
        if not is_inference:
            return (
                f"{name}: the graph is compiled for training; compile under torch.no_grad() or torch.inference_mode()"
            )
        if _stores_inner_functions():
            return (
                f"{name}: a cache that stores compiled functions without their wrappers is on (bundled or precompiled)"
            )
        for source in candidate.sources:
            info = self._info[source]
            if source in self._written:
                return f"{info.name} is written by this graph"
            if info.is_inference and not self._options.assume_frozen:
                return (
                    f"{info.name} was made under inference_mode and carries no version counter; make it outside, or "
                    "set rope_fusion.assume_frozen"
                )
        main = candidate.sources[0]
        if self._info[main].requires_grad and main.meta["val"].dtype.itemsize > 1:
            return f"{name} requires grad: what is being trained is not derived; call requires_grad_(False)"
        return None

    def _refuse(self, candidate: plan.Candidate, sentence: str) -> None:
        self._report.refusal(candidate.pattern, sentence)
        self._report.derive(self._name(candidate), candidate.bytes, kept=False, reason=sentence)

    def _name(self, candidate: plan.Candidate) -> str:
        return self._info[candidate.sources[0]].name

    def _exists(self, candidate: plan.Candidate) -> bool:
        """Whether another graph derived the very same value already."""
        references = [self._info[source].tensor for source in candidate.sources]
        tensors = [reference() for reference in references if reference is not None]
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) < len(candidate.sources) or any(type(t) not in (Tensor, nn.Parameter) for t in present):
            return False
        return self._store.find(candidate.structure, present) is not None

    def derivation(self, candidate: plan.Candidate) -> Derivation:
        """How to compute a candidate once its nodes are gone."""
        value = candidate.nodes[0].meta["val"]
        return Derivation(
            pattern=candidate.pattern,
            name=self._name(candidate),
            structure=candidate.structure,
            compute=plan.computation_of(candidate),
            sources=tuple(self._position[source] for source in candidate.sources),
            source_names=tuple(self._info[source].name for source in candidate.sources),
            shape=tuple(value.shape),
            stride=value.stride(),
            dtype=value.dtype,
            device=value.device,
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
    elif isinstance(target, Iterable):
        for item in target:
            yield from _tensors_in(item)
    else:
        raise TypeError(
            f"rope_fusion.invalidate takes a module, a tensor or an iterable of them, got {type(target).__name__}"
        )
