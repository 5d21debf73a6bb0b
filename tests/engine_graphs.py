"""Programs in engine operators, and a compile step that fuses them without generating code.

`compiled(f, *args)` runs Dynamo, AOTAutograd and all of Inductor's post-grad passes (ours as the custom pre-pass), then executes the
resulting graph node by node. What a test compares is therefore the graph that Inductor would have lowered.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor
from torch._inductor import compile_fx, config
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule

from rope_fusion._torch import detect_fake_mode
from rope_fusion.canonical.graph_views import VIEWS
from rope_fusion.fusion_pass import FusionPass
from rope_fusion.graph_text import graph_to_text
from rope_fusion.options import make_options
from rope_fusion.report import GraphReport

FUSED = "rope_fusion.rope_qkv.default"


@dataclass
class Compiled:
    """One compiled and executed program: outputs, report, and the graph around the pass and after all passes."""

    outputs: Any
    report: GraphReport
    before: str
    after: str
    lowered: Graph

    @property
    def hits(self) -> dict[str, int]:
        return self.report.hits

    def count(self, target: str) -> int:
        """How many nodes of the final graph call `target`, functionalised calls included."""
        operators = [
            node.args[0] if node.args and isinstance(node.args[0], torch._ops.OpOverload) else node.target
            for node in self.lowered.nodes
        ]
        return sum(target in str(operator) for operator in operators)

    def calls(self) -> list[str]:
        return [str(node.target) for node in self.lowered.nodes if node.op == "call_function"]


def compiled(
    function: Callable[..., Any],
    *args: Any,
    v2: bool = True,
    dynamic: bool | None = False,
    transform: Callable[[Graph], None] | None = None,
    **options: Any,
) -> Compiled:
    """Compile and call `function`; `transform` may change the graph before the pass sees it."""
    reports: list[GraphReport] = []
    texts: list[str] = []
    graphs: list[Graph] = []
    settings = {"kernels": "reference", "strict": True, **options}
    fusion = FusionPass(make_options(settings), reports.append)

    def run_pass(graph: Graph) -> None:
        if transform is not None:
            transform(graph)
        texts.append(graph_to_text(graph))
        fusion(graph)
        graph.lint()
        texts.append(graph_to_text(graph))

    def inner(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        fake_mode = detect_fake_mode([node.meta["val"] for node in gm.graph.nodes if "val" in node.meta])
        compile_fx.view_to_reshape(gm)
        with V.set_fake_mode(fake_mode), config.patch(post_grad_custom_pre_pass=run_pass):
            compile_fx._recursive_post_grad_passes(gm, is_inference=True)
        graphs.append(gm.graph)
        gm.recompile()
        return make_boxed_func(gm.forward)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(gm, inputs, inner_compile=inner)

    torch.compiler.reset()
    with torch.no_grad(), config.patch(enable_auto_functionalized_v2=v2):
        outputs = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (report,) = reports
    return Compiled(outputs, report, texts[0], texts[1], graphs[0])


@dataclass
class Run:
    """Outputs of a program and the tensors it was given, after the call."""

    outputs: list[Tensor]
    inputs: list[Tensor]


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def check(
    function: Callable[..., Any],
    args: Sequence[Any],
    hits: dict[str, int],
    *,
    atol: float | None = None,
    held: Iterable[torch.dtype] = repeat(torch.float8_e4m3fn),
    **settings: Any,
) -> Compiled:
    """Compile `function`, compare outputs and mutated arguments with eager, and expect exactly these hits.

    Rotated values are compared with `atol`, by default one and a half bf16 steps at the magnitudes that occur (|x| < 16): the
    engine's kernel rounds each product and sum, ours rounds once. FP8 values: see `close_in_fp8`; `held` are the dtypes in tensors of
    bytes, one after another.
    """
    eager_args = copy.deepcopy(list(args))
    expected = tensors(function(*eager_args)) + tensors(eager_args)
    own_args = copy.deepcopy(list(args))
    result = compiled(function, *own_args, **settings)
    assert result.hits == hits, (result.hits, result.report)
    got = tensors(result.outputs) + tensors(own_args)
    assert len(got) == len(expected)
    dtypes = iter(held)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        close(ours, theirs, atol, next(dtypes) if ours.dtype == torch.uint8 else ours.dtype)
    return result


def close(ours: Tensor, theirs: Tensor, atol: float | None, held: torch.dtype = torch.float8_e4m3fn) -> None:
    """Compare with what the engine's operators give; `held` is the dtype whose bits a cache of bytes holds."""
    if ours.dtype == torch.uint8:
        ours, theirs = ours.view(held), theirs.view(held)
    if ours.element_size() == 1 and ours.is_floating_point():
        close_in_fp8(ours, theirs)
    elif ours.is_floating_point():
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.13 if atol is None else atol)
    else:
        torch.testing.assert_close(ours, theirs)


def close_in_fp8(ours: Tensor, theirs: Tensor) -> None:
    """FP8 values, x / scale, of elements that were rotated in bf16 (or more precisely) and rounded to bf16.

    With u = 2^-8, half a step of bf16: the engine's kernel rounds both products of an element, a * cos and b * sin. Together that moves
    their sum by u * (|a cos| + |b sin|) at most, which is no more than u times the length of the pair (a, b), and so of the rotated
    pair: sqrt(2) * u times the largest element. Where the products cancel, that is many times the sum itself. Each side then rounds its
    sum to bf16, u of it each, and its quotient to FP8: h = half a step of FP8 relative, or half of the least FP8 number, each. The
    largest element is known after its own rounding, h less at most.
    """
    info = torch.finfo(ours.dtype)
    u, h = torch.finfo(torch.bfloat16).eps / 2, info.eps / 2
    ours, theirs = ours.float(), theirs.float()
    largest = float(theirs.abs().max()) / (1 - h) if theirs.numel() else 0.0
    before = 2**0.5 * u * largest
    # A difference d = before + 2 u |t| + h (|ours| + |t|), where |ours| is |t| + d at most. cos and sin are rounded, too: their squares
    # add up to 1 + 2 u at most; the product with the reciprocal scale is of fp32. The last factor covers both.
    rtol, atol = (2 * u / (1 - h) + 2 * h) / (1 - h), (before + info.smallest_normal * info.eps) / (1 - h)
    torch.testing.assert_close(ours, theirs, rtol=rtol * (1 + 2 * u), atol=atol * (1 + 2 * u))


def in_place(graph: Graph) -> None:
    """Turn v1 calls into the in-place operators that they stand for, as an engine's own last pass does.

    Every mutated argument must be a view of what is scattered or copied into afterwards, so that the scatters can go.
    """
    from rope_fusion._torch import auto_functionalized

    for node in list(graph.nodes):
        if node.target is not auto_functionalized:
            continue
        target = node.args[0]
        written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        with graph.inserting_before(node):
            graph.call_function(target, (), dict(node.kwargs)).meta["val"] = None
        for user in list(node.users):
            assert user.target is operator.getitem
            value = node.kwargs[written[user.args[1] - 1]]
            _without_scatters(graph, user, value)
            graph.erase_node(user)
        graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and _viewed_from(node.args[1]) is node.args[0]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def merge_reshapes(graph: Graph) -> None:
    """As vLLM's NoOpEliminationPass, before our pass."""
    reshapes = (torch.ops.aten.reshape.default, torch.ops.aten.view.default)
    for node in graph.nodes:
        if node.target in reshapes and node.args[0].target in reshapes:
            node.update_arg(0, node.args[0].args[0])
    graph.eliminate_dead_code()


def _viewed_from(node: Any) -> Any:
    while node.target in VIEWS:
        node = node.args[0]
    return node


def _without_scatters(graph: Graph, value: Any, storage: Any) -> None:
    """Drop what writes `value`, seen through views or not, back to the base that `storage` is a view of."""
    scatters = (torch.ops.aten.slice_scatter.default, torch.ops.aten.select_scatter.default)
    seen = [value]
    while seen:
        for user in list((view := seen.pop()).users):
            if user.target in scatters and user.args[1] is view:
                user.replace_all_uses_with(user.args[0])
                graph.erase_node(user)
            elif user.target in VIEWS:
                seen.append(user)
    value.replace_all_uses_with(storage)
