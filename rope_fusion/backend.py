"""The torch.compile backend, and the same pass for plain Inductor."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import register_backend
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import Graph, GraphModule

from rope_fusion._torch import CustomGraphPass, CustomInferenceAwareGraphPass, inductor_config
from rope_fusion.canonical.derivation import inputs_can_be_added
from rope_fusion.catalog import UnknownPatternError, check_names, load_patterns
from rope_fusion.derived import describe_inputs, hoisting_compile
from rope_fusion.derived.selection import deriving_patterns
from rope_fusion.fusion_pass import FusionPass
from rope_fusion.options import PREFIX, Options, RopeFusionOptionError, make_options, parse
from rope_fusion.report import GraphReport, deliver, publish, publish_and_warn, published, take, warn_unfused
from rope_fusion.verify import verifying_compile

HOOK = "post_grad_custom_pre_pass"


class PassSequence(CustomInferenceAwareGraphPass):
    """Several graph passes as one, for torch versions whose hooks hold a single pass.

    It has an identity for Inductor's caches only if every member has one.
    """

    def __init__(self, passes: Iterable[Callable[..., None]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for member in self.passes:
            if isinstance(member, CustomInferenceAwareGraphPass):
                member(graph, is_inference)
            else:
                member(graph)

    def uuid(self) -> Any | None:
        identities = [member.uuid() if isinstance(member, CustomGraphPass) else None for member in self.passes]
        return None if None in identities else tuple(identities)


class BackendFusionPass(FusionPass):
    """The pass inside the backend, which has derived what it could before: what needs that is not the pass's to report.

    It has an identity of its own, so that an entry of AOTAutograd's cache that plain Inductor wrote, with nothing
    derived, is not taken for ours.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options, self._publish)

    def _publish(self, report: GraphReport) -> None:
        for entry in load_patterns():
            if inputs_can_be_added in entry.pattern.requires:
                report.patterns.pop(entry.name, None)
        publish(report)

    def uuid(self) -> Any | None:
        identity = super().uuid()
        return None if identity is None else ("backend", identity)


def _after(users: Any, ours: FusionPass) -> Any:
    """The user's pass or passes (None, one, or a sequence), then ours unless it is already among them."""
    passes = list(users) if isinstance(users, Sequence) else [] if users is None else [users]
    others = [member for member in passes if not _holds_fusion_pass(member)]
    return PassSequence([*others, ours]) if others else ours


def _holds_fusion_pass(member: Any) -> bool:
    if isinstance(member, PassSequence):
        return any(_holds_fusion_pass(inner) for inner in member.passes)
    return isinstance(member, FusionPass)


def rope_fusion(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """The backend behind ``torch.compile(model, backend="rope_fusion")``: Inductor with our pass.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its (fake) inputs.
        mode: as in ``torch.compile``; ``rope_fusion.mode`` among the options does the same.
        options: keys ``rope_fusion.*`` are ours, every other key is an Inductor setting.
        dynamic: as in ``torch.compile``.
    """
    ours, settings = parse(options)
    check_names(ours.disable)  # a mistake of the user's; what fails later only leaves graphs unfused
    # What plain torch.compile does with mode and options (names, types, modes), in whatever torch version this is.
    patches = torch._TorchCompileInductorWrapper(mode or ours.mode, settings, dynamic).config
    users = patches.get(HOOK, getattr(inductor_config, HOOK))
    fusion = BackendFusionPass(ours)
    patches[HOOK] = _after(users, fusion)
    derived = GraphReport()
    compile_graph: Callable[..., Any] = compile_fx_inner
    if fusion.self_check is not None:
        compile_graph = functools.partial(
            verifying_compile,
            next_compile=compile_fx_inner,
            self_check=fusion.self_check,
            unfused_settings={HOOK: users},
        )
    inner_compile = functools.partial(
        hoisting_compile,
        next_compile=compile_graph,
        options=ours,
        report=derived,
        inputs=describe_inputs(gm, example_inputs),
    )
    before = published()
    try:
        compiled: Any = compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=patches)
        return compiled
    finally:
        graphs = take(before)
        warn_unfused(graphs)
        if not derived.patterns:  # AOTAutograd's cache had the graph, so there was nothing to derive in it
            _ask_deriving_patterns(ours, example_inputs, derived)
        if graphs:
            graphs[0].merge(derived)
        elif derived.derived:
            graphs = [derived]
        deliver(graphs)
        if ours.report is not None:
            ours.report.graphs.extend(graphs)


def _ask_deriving_patterns(options: Options, inputs: Sequence[Any], report: GraphReport) -> None:
    """Note which patterns could derive tensors; a gate that fails is a line of the report."""
    try:
        deriving_patterns(options, _device_of(inputs), report)
    except UnknownPatternError:
        raise
    except Exception as error:
        if options.strict:
            raise
        report.failure(f"asking for patterns that derive tensors failed with {type(error).__name__}: {error}")


def _device_of(inputs: Sequence[Any]) -> torch.device:
    """The first accelerator that holds an input, else the CPU."""
    devices = (value.device for value in inputs if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _reset() -> None:
    """What ``torch.compiler.reset()`` asks of a backend: drop the recorded CUDA graphs, as Inductor does."""
    if (trees := sys.modules.get("torch._inductor.cudagraph_trees")) is not None:
        trees.reset_cudagraph_trees()


rope_fusion.reset = _reset  # type: ignore[attr-defined]


def inductor_options(settings: Mapping[str, Any] | None = None, **rope_fusion_options: Any) -> dict[str, Any]:
    """The options that put the same pass into plain Inductor: ``torch.compile(model, options=inductor_options())``.

    Args:
        settings: further options for Inductor; a pass that they or Inductor's configuration hold now runs before ours.
        rope_fusion_options: options of rope_fusion without their prefix, such as ``numerics="exact"``.

    Derived tensors need the backend; this way there are none.
    """
    for key in settings or ():
        if str(key).startswith(PREFIX):
            name = str(key)[len(PREFIX) :]
            raise RopeFusionOptionError(f"option {key} goes without its prefix here: inductor_options({name}=...)")
    for name, instead in (("report", "use rope_fusion.record()"), ("mode", "give Inductor's settings instead")):
        if rope_fusion_options.get(name) is not None:
            raise RopeFusionOptionError(f'option {PREFIX}{name} needs backend="rope_fusion"; {instead}')
    options = make_options(rope_fusion_options)
    check_names(options.disable)
    if options.verify != "off":
        raise RopeFusionOptionError(f'option {PREFIX}verify needs backend="rope_fusion", which calls what it checks')
    patches = dict(settings or {})
    users = patches.get(HOOK, getattr(inductor_config, HOOK))
    patches[HOOK] = _after(users, FusionPass(options, publish_and_warn))
    return patches


# Without an installed entry point (a checkout on PYTHONPATH) importing this module makes the name known.
if "rope_fusion" not in importlib.metadata.entry_points(group="torch_dynamo_backends").names:
    register_backend(rope_fusion, name="rope_fusion")
