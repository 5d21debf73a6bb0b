"""The oracle: run a graph, the graph that the pass made of it, and the same graph in float64, on the same inputs, and compare.

No code is generated: the post-grad graph is taken from AOTAutograd exactly as Inductor would get it, and interpreted.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import reorder_for_locality, view_to_reshape
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from rope_fusion.fusion_pass import FusionPass
from rope_fusion.options import Options
from rope_fusion.report import GraphReport
from trust.programs import Program

aten = torch.ops.aten

SUMS = frozenset(
    {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.mm.default, aten.bmm.default}
)
BITS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32})
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOATS = (*FP8, torch.bfloat16, torch.float16, torch.float32)


class WrongRewrite(AssertionError):
    """The rewritten graph computes something else."""


@dataclass
class Outcome:
    """What happened to the graphs of one case."""

    hits: dict[str, int] = field(default_factory=dict)
    reports: list[GraphReport] = field(default_factory=list)
    runs: int = 0
    worst: float = 0.0  # the largest error, as a share of what is allowed

    def add(self, report: GraphReport) -> None:
        self.reports.append(report)
        for name, count in report.hits.items():
            self.hits[name] = self.hits.get(name, 0) + count


def clone_all(tensors: Sequence[Any]) -> list[Any]:
    """Copies that share storage where the originals do."""
    storages: dict[int, torch.UntypedStorage] = {}
    out: list[Any] = []
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            out.append(tensor)
            continue
        old = tensor.untyped_storage()
        key = old.data_ptr() or id(old)
        if key not in storages:
            storages[key] = torch.UntypedStorage(old.nbytes())
            storages[key].copy_(old)
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        out.append(made)
    return out


@dataclass
class PowersOfTwo:
    """Scales that a program rounds up to powers of two: where one lies on such a power within rounding, either power may come out.

    There, a run of the program takes the exponents that the fused program took, if they are one of the two.
    """

    coarsest: torch.dtype  # that the program computes in
    taken: dict[str, Tensor] = field(default_factory=dict)  # name of a `ceil` → exponents of the fused program
    places: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # → where the program has such a power, and which

    def look_at(self, name: str, exponent: Tensor) -> None:
        """Note where `exponent`, log2 of a scale, is an integer but for rounding, in the program's own run.

        The largest element of a group, which was rotated, may differ by a unit in its last place (see `compare`), the quotient and its
        bounds by units of fp32, log2 by one in its own last place.
        """
        exponent = exponent.double()
        relative = torch.finfo(self.coarsest).eps + 4 * torch.finfo(torch.float32).eps
        slack = relative / math.log(2) + last_place(exponent, torch.float32)
        self.places[name] = (exponent - exponent.round()).abs() <= slack, exponent.round()

    def apply(self, name: str, value: Tensor) -> Tensor:
        """What the `ceil` gives in this run."""
        where, integer = self.places[name]
        if name not in self.taken:
            return value
        taken = self.taken[name].double().reshape(value.shape)
        either = (taken == integer) | (taken == integer + 1)
        return torch.where(where & either, taken, value.double()).to(value.dtype)


KEEP_ORDER = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    }
)


def exponents_taken(plain: GraphModule, outputs: Sequence[Any]) -> dict[str, Tensor]:
    """Exponents of the powers of two among `outputs`, by the name of the `ceil` that gives them in the unfused program."""
    found: dict[str, Tensor] = {}
    for node, output in zip(_flat(plain.graph.output_node().args[0]), outputs, strict=True):
        while isinstance(node, Node) and node.target in KEEP_ORDER:
            node = node.args[0]
        if not isinstance(node, Node) or not isinstance(output, Tensor):
            continue
        if node.target is aten.exp2.default or (node.target is aten.pow.Scalar and node.args[0] == 2):
            power = node.args[-1]
            if isinstance(power, Node) and power.target is aten.ceil.default:
                found[power.name] = torch.log2(output.double())
    return found


class InOneOrder(Interpreter):
    """Adds numbers up in the order of their dims, however they lie in memory.

    A fused result may lie otherwise than what it replaces, which eager reductions and products would follow.
    """

    def __init__(self, gm: GraphModule, powers: PowersOfTwo | None = None) -> None:
        super().__init__(gm)
        self.powers = powers

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if self.powers is None or n.target is not aten.ceil.default or n.args[0].target is not aten.log2.default:  # type: ignore[union-attr]
            return value
        if n.name not in self.powers.places:
            self.powers.look_at(n.name, self.env[n.args[0]])  # type: ignore[index]
        return self.powers.apply(n.name, value)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in SUMS:
            args = torch.utils._pytree.tree_map_only(Tensor, torch.Tensor.contiguous, args)
        return super().call_function(target, args, kwargs)


class InDouble(InOneOrder):
    """Runs a graph with every float in float64: the value that rounding keeps the program from."""

    def __init__(self, gm: GraphModule, powers: PowersOfTwo | None = None) -> None:
        super().__init__(gm, powers)
        views = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype)
        held = {node.meta["val"].dtype for view in views for node in (view, view.args[0])} - BITS
        held |= {torch.float8_e4m3fn for node in gm.graph.nodes if node.op == "placeholder" and _holds_bytes(node)}
        if len(held) > 1:
            raise Unsupported("bits of one kind of float are taken for another")

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.dtype:
            if not isinstance(args[0], Tensor) or args[0].dtype != torch.float64 or args[1] not in {*FLOATS, *BITS}:
                raise Unsupported("a tensor is reinterpreted bit by bit")
            return args[0]  # a cache seen as bits and back: the value is what counts
        args = torch.utils._pytree.tree_map(_widen, args)
        kwargs = torch.utils._pytree.tree_map(_widen, kwargs)
        return super().call_function(target, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        return _widen(super().fetch_attr(target))


class Unsupported(Exception):
    """This graph cannot be computed in float64."""


def _holds_bytes(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value
    if isinstance(value, Tensor):
        if value.dtype.is_complex and value.dtype != torch.complex128:
            return value.to(torch.complex128)
        if value.dtype.is_floating_point and value.dtype != torch.float64:
            return value.to(torch.float64)
    return value


def as_inductor_gets_it(gm: GraphModule) -> GraphModule:
    """What Inductor does to a graph between AOTAutograd and its custom passes."""
    view_to_reshape(gm)
    gm.graph.eliminate_dead_code()
    reorder_for_locality(gm.graph)
    return gm


def rewrite(gm: GraphModule, options: Options) -> tuple[GraphModule, GraphReport]:
    """A copy of `gm` after the pass; failures of the pass raise."""
    made = copy_graph(gm)
    reports: list[GraphReport] = []
    FusionPass(options, reports.append)(made.graph)
    made.graph.lint()
    return made, reports[0]


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy whose nodes have the same fake values."""
    return copy_with_nodes(gm)[0]


def copy_with_nodes(gm: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A copy, and its node for each node of the original."""
    graph = Graph()
    made: dict[Node, Node] = {}
    result = graph.graph_copy(gm.graph, made)
    graph.output(result)
    for old, new in made.items():
        new.meta = copy.copy(old.meta)
    return GraphModule(gm, graph), made


def compare_on(plain: GraphModule, fused: GraphModule, arguments: Sequence[Any], *, exact: bool = False) -> float:
    """Run both on copies of `arguments`; raises `WrongRewrite`, returns the largest error as a share of what is allowed.

    Where a scale lies on a power of two within rounding and the program rounds it up to one, default numerics allow the next one, too.
    If the scales are outputs, results that differ are compared again, with a run of the program, and in float64, that takes there the
    powers of the fused one: what else depends on these scales must agree with them.
    """
    ours = clone_all(arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a model may draw random numbers
        got = [*_flat(InOneOrder(fused).run(*ours)), *ours]
    coarsest = coarsest_dtype(plain)
    try:
        return _compare_with(plain, PowersOfTwo(coarsest), got, arguments, exact)
    except WrongRewrite as error:
        taken = {} if exact else exponents_taken(plain, got[: len(got) - len(ours)])
        if taken:
            with contextlib.suppress(WrongRewrite):
                return _compare_with(plain, PowersOfTwo(coarsest, taken), got, arguments, exact)
        raise error from None


def _compare_with(
    plain: GraphModule, powers: PowersOfTwo, got: Sequence[Any], arguments: Sequence[Any], exact: bool
) -> float:
    """Compare `got`, the fused outputs and arguments afterwards, with a run of the unfused program."""
    theirs = clone_all(arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = _flat(InOneOrder(plain, powers).run(*theirs))
    expected = [*outputs, *theirs]
    if len(got) != len(expected):
        raise WrongRewrite(f"{len(outputs)} outputs became {len(got) - len(theirs)}")
    true: list[Any] | None = None
    wide = [_widen(_as_fp8(argument)) for argument in clone_all(arguments)]
    if not exact:
        try:
            true = _flat(InDouble(plain, powers).run(*wide)) + wide
        except (Unsupported, RuntimeError, NotImplementedError):
            true = None
    names = [f"output {index}" for index in range(len(outputs))]
    names += [f"input {node.name} afterwards" for node in plain.graph.nodes if node.op == "placeholder"]
    worst = 0.0
    for name, reference, value, exactly in zip(names, expected, got, true or [None] * len(names), strict=True):
        if isinstance(reference, Tensor):
            worst = max(worst, compare(name, _as_fp8(reference), _as_fp8(value), exactly, exact, powers.coarsest))
        elif reference != value:
            raise WrongRewrite(f"{name} is {value}, was {reference}")
    afterwards = slice(len(outputs), None)
    for name, before, reference, value in zip(names[afterwards], arguments, theirs, got[afterwards], strict=True):
        if isinstance(before, Tensor) and before.numel() and not before.dtype.is_complex:
            kept = bitwise(before) == bitwise(reference)
            if kept.dim():  # one element may be given the value that it had; not all of a row
                kept = kept.all(-1, keepdim=True).expand_as(kept)
            if bool((bitwise(value) != bitwise(before))[kept].any()):
                raise WrongRewrite(f"{name} has changed where the program leaves it alone")
    return worst


def _as_fp8(value: Any) -> Any:
    """Programs here use bytes only to hold FP8 values."""
    return value.view(torch.float8_e4m3fn) if isinstance(value, Tensor) and value.dtype == torch.uint8 else value


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def coarsest_dtype(gm: GraphModule) -> torch.dtype:
    """The least precise dtype, FP8 aside, that a graph computes in."""
    values = [node.meta.get("val") for node in gm.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor) and value.dtype.is_floating_point}
    return max(dtypes - set(FP8) or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)


def compare(
    name: str,
    reference: Tensor,
    value: Tensor,
    true: Tensor | None,
    exact: bool = False,
    coarsest: torch.dtype = torch.float32,
) -> float:
    """Compare one fused result with the unfused one and, where known, with its value in float64.

    The rule: nowhere further from the float64 value than 1.05 times the largest error of the unfused program plus one unit in the last
    place of the largest element of its row, because a rotation mixes the elements of a row. The unit is that of the result's dtype or of
    `coarsest`, the least precise one computed in. A result in which nothing was rounded must stay the
    same. Where there is no float64 value, the unfused result stands in for it, and eight units of bf16 are let through. Where
    rounding decides whether a conversion to FP8 overflows, both sides are right (`at_the_edge`).
    """
    if reference.dtype != value.dtype or reference.shape != value.shape:
        raise WrongRewrite(
            f"{name} is {value.dtype} {tuple(value.shape)}, was {reference.dtype} {tuple(reference.shape)}"
        )
    if not reference.numel():
        return 0.0
    if exact or not (reference.dtype.is_floating_point or reference.dtype.is_complex):
        if not same_bits(reference, value):
            raise WrongRewrite(f"{name} differs\n{_first_difference(reference, value, reference)}")
        return 0.0
    if reference.dtype.is_complex:
        reference, value = torch.view_as_real(reference.resolve_conj()), torch.view_as_real(value.resolve_conj())
        true = torch.view_as_real(true.resolve_conj()) if true is not None else None
    dtype = reference.dtype
    reference, value = reference.double(), value.double()
    target = reference if true is None else true.double()
    limit = torch.finfo(dtype).max
    if dtype in FP8:
        if true is not None:
            value = torch.where(at_the_edge(reference, value, target, dtype, coarsest), reference, value)
        target = target.clamp(-limit, limit)
    moved = torch.isnan(reference) != torch.isnan(value)
    if bool(moved.any()):
        raise WrongRewrite(
            f"{name} has NaN elsewhere than before\n{_first_difference(reference, value, target, moved)}"
        )
    finite = torch.isfinite(target) & torch.isfinite(reference)
    if not torch.equal(reference[~finite].nan_to_num(0.5), value[~finite].nan_to_num(0.5)):
        raise WrongRewrite(f"{name} differs where it is not finite")
    zero = torch.zeros((), dtype=torch.float64)
    plain_error = torch.where(finite, (reference - target).abs(), zero)
    error = torch.where(finite, (value - target).abs(), zero)
    rows = torch.where(finite, target, zero).abs()
    unit = max(dtype, coarsest, key=lambda each: torch.finfo(each).eps)
    place = last_place(rows.amax(-1, keepdim=True) if rows.dim() else rows, unit)
    allowed = (1.05 * plain_error.max() + place).expand_as(error)
    if true is None:
        allowed = allowed + 8 * last_place(rows.amax(), torch.bfloat16)
    elif not plain_error.any():
        allowed = torch.zeros_like(error)
    if bool((error > allowed).any()):
        raise WrongRewrite(f"{name} is too far off\n{_first_difference(reference, value, target, error > allowed)}")
    return float((error / allowed).nan_to_num(0.0).max())


def at_the_edge(reference: Tensor, value: Tensor, true: Tensor, dtype: torch.dtype, coarsest: torch.dtype) -> Tensor:
    """Where rounding before a conversion to FP8 decides whether it overflows.

    In torch 2.11 a number that would round to more than the largest one of an FP8 dtype becomes NaN, or infinite, instead of the
    largest. One result is that and the other the largest number, and the float64 value is within one unit in the last place of
    `coarsest`, at the largest element of its row, of where overflow begins: half a step above the largest number.
    """
    largest = torch.finfo(dtype).max
    edge = largest + float(last_place(torch.tensor(largest, dtype=torch.float64), dtype)) / 2
    rows = torch.where(torch.isfinite(true), true, 0.0).abs()
    unit = last_place(rows.amax(-1, keepdim=True) if rows.dim() else rows, coarsest)
    full = true.sign() * largest
    apart = ((reference == full) & ~torch.isfinite(value)) | ((value == full) & ~torch.isfinite(reference))
    return apart & ((true.abs() - edge).abs() <= unit)


def last_place(value: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of `dtype` at each (float64) element."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(value.abs().clamp(min=info.smallest_normal)))
    return torch.exp2(exponent) * info.eps


def bitwise(tensor: Tensor) -> Tensor:
    """The bits of each element as an integer."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equality in which NaN equals NaN and -0 differs from 0."""
    if not first.dtype.is_floating_point:
        return torch.equal(bitwise(first), bitwise(second))
    nan = torch.isnan(first.float())
    same = (bitwise(first) == bitwise(second)) | (nan & torch.isnan(second.float()))
    return bool(same.all())


def _first_difference(reference: Tensor, value: Tensor, true: Tensor, where: Tensor | None = None) -> str:
    where = (reference != value) if where is None else where
    places = where.nonzero()[:3].tolist()
    lines = [f"{int(where.sum())} of {where.numel()} elements, shape {tuple(where.shape)}"]
    for place in places:
        at = tuple(place)
        lines.append(f"  {list(at)}: unfused {reference[at].item()}, fused {value[at].item()}, true {true[at].item()}")
    return "\n".join(lines)


Check = Callable[[GraphModule, Sequence[Any]], None]


def with_graphs(function: Callable[..., Any], on_graph: Check) -> Callable[..., Any]:
    """`function` compiled so that each post-grad graph, with its real arguments, is shown to `on_graph` before it is interpreted."""

    def inner_compile(gm: GraphModule, _example: Any, **_: Any) -> Any:
        as_inductor_gets_it(gm)

        def run(*arguments: Any) -> Any:
            on_graph(gm, arguments)
            return Interpreter(gm).run(*arguments)

        return make_boxed_func(run)

    def backend(gm: GraphModule, example: Sequence[Any]) -> Any:
        return compile_fx(gm, list(example), inner_compile=inner_compile)

    return torch.compile(function, backend=backend, fullgraph=False)


@dataclass
class Captured:
    """A post-grad graph and arguments that it was called with."""

    graph: GraphModule
    arguments: list[Any]

    def copy_arguments(self) -> list[Any]:
        """Arguments that a run may write into."""
        return clone_all(self.arguments)


def capture_call(function: Callable[..., Any], *arguments: Any) -> list[Captured]:
    """Compile a function, call it once without gradients, and keep each graph that ran."""
    found: list[Captured] = []
    torch._dynamo.reset()
    with torch.no_grad():
        with_graphs(function, lambda gm, args: found.append(Captured(gm, clone_all(args))))(*arguments)
    return found


def capture(program: Program, seed: int = 1) -> list[Captured]:
    """Compile and run a program, at both its lengths; one entry for each call of a graph."""
    function = program.function()
    arguments = program.arguments(program.sequence, seed)
    if program.other_sequence is None:
        return capture_call(function, *arguments)
    for item, tensor in zip(program.inputs, arguments, strict=True):
        for dim, size in enumerate(item.shape):
            if size == "S":
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
    found: list[Captured] = []
    torch._dynamo.reset()
    compiled = with_graphs(function, lambda gm, args: found.append(Captured(gm, clone_all(args))))
    with torch.no_grad():
        compiled(*arguments)
        compiled(*program.arguments(program.other_sequence, seed + 1))
    return found


class Doubling(TorchDispatchMode):
    """Eager code computes in float64, whatever it casts to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.view.dtype:
            return torch.ops.aten.alias.default(args[0])  # an FP8 cache seen as bytes
        args, kwargs = torch.utils._pytree.tree_map(_widen, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def in_double(program: Program, seed: int = 1) -> list[Tensor]:
    """Outputs of an eager program in float64, and its arguments afterwards."""
    arguments = [_widen(_as_fp8(argument)) for argument in program.arguments(program.sequence, seed)]
    with torch.no_grad(), Doubling():
        outputs = program.function()(*arguments)
    return [*outputs, *arguments]


def check_captured(captured: Sequence[Captured], options: Options, *, exact: bool = False) -> Outcome:
    """Rewrite each graph once, and compare at every call."""
    outcome = Outcome()
    fused: dict[GraphModule, GraphModule] = {}
    for call in captured:
        if call.graph not in fused:
            fused[call.graph], report = rewrite(call.graph, options)
            outcome.add(report)
        worst = compare_on(call.graph, fused[call.graph], call.arguments, exact=exact)
        outcome.worst = max(outcome.worst, worst)
        outcome.runs += 1
    return outcome


def check_program(program: Program, options: Options, *, exact: bool = False) -> Outcome:
    """Capture, rewrite, run and compare one program, at both its lengths."""
    return check_captured(capture(program), options, exact=exact)


__all__ = [
    "Captured",
    "Outcome",
    "WrongRewrite",
    "capture",
    "capture_call",
    "check_captured",
    "check_program",
    "compare_on",
    "copy_graph",
    "copy_with_nodes",
    "in_double",
    "rewrite",
]
