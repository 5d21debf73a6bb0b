"""Engine operators on a GPU: the whole product of cases fused, counted and compared with eager; then timed.

    PYTHONPATH=. ROPE_FUSION_VLLM_OPS=/path/to/library.so python tests/gpu_check_engines.py

Without a library the operators are the Triton stand-ins of `rope_fusion.bench_engine_ops`, and those of `engine_standins` for the rest.
The library of a vLLM wheel will do, if it was built for the installed torch or against the stable ABI
(``vllm/_C_stable_libtorch.abi3.so``).

Every case is compiled through all of Inductor's passes over graphs and run node by node, in each form; a covering set of cases runs as
the code that Inductor generates. With ``--device cpu`` the fused operator is its reference, and nothing is timed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_fusion.bench_engine_ops import register_missing

if torch.cuda.is_available() and not os.environ.get("ROPE_FUSION_VLLM_OPS"):
    register_missing()

from engine_cases import (
    ALL,
    BLOCKS,
    COVERING,
    DIM,
    FORMS,
    FP8,
    KINDS,
    LAYOUTS,
    ORDERS,
    PAGE,
    TOKENS,
    Case,
    arguments,
    form_settings,
    held_by,
    latent_layer,
    quantised,
    rotate,
    separate,
    split_columns,
    split_heads,
    store,
)
from engine_cases import KV_HEADS as CASE_KV_HEADS
from engine_cases import Q_HEADS as CASE_Q_HEADS
from engine_cases import table as case_table
from engine_graphs import FUSED, close, tensors
from engine_graphs import compiled as compiled_graph
from engine_standins import REAL_LIBRARY, compare_schemas, register
from tabulate import tabulate

from rope_fusion.backend import rope_fusion
from rope_fusion.report import Report

MADE = register()
REAL = bool(os.environ.get(REAL_LIBRARY))
HIDDEN, Q_HEADS, KV_HEADS, HEAD, BLOCK, SLOTS, LAYERS = 2880, 64, 8, 64, 16, 65536, 4  # GPT-OSS, and how many layers
SIZES = [Q_HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]


@dataclass
class Outcome:
    """One program's cases."""

    form: str
    what: str
    cases: int
    expected: int  # hits
    hits: int
    equal: int  # cases whose outputs and mutated arguments agree with eager
    trouble: str = ""

    @property
    def good(self) -> bool:
        return self.hits == self.expected and self.equal == self.cases and not self.trouble


def on(device: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [on(device, item) for item in value] if isinstance(value, (list, tuple)) else value


def copies(values: Sequence[Tensor]) -> list[Tensor]:
    return [copied(x) for x in values]


def compare(
    form: str,
    what: str,
    parts: Sequence[Callable[..., Any]],
    args: list[list[Any]],
    hits: dict[str, int],
    device: str,
    kind: str,
) -> Outcome:
    """Compile all parts, each with arguments of its own, as one program; node by node. Their caches are of one kind."""

    def program(args: list[list[Any]]) -> list[Any]:
        return [part(*own) for part, own in zip(parts, args, strict=True)]

    outcome = Outcome(form, what, len(parts), sum(hits.values()), 0, 0)
    try:
        eager = on(device, args)
        own = copy.deepcopy(eager)
        expected = program(eager)
        kernels = "reference" if device == "cpu" else "auto"
        result = compiled_graph(program, own, kernels=kernels, **form_settings(form))
        outcome.hits = sum(result.hits.values())
        if result.hits != hits or result.count(FUSED) != sum(hits.values()):
            outcome.trouble = f"hits {result.hits}, not {hits}: {result.report.near_misses}"
        for index in range(len(parts)):
            trouble = difference((result.outputs[index], own[index]), (expected[index], eager[index]), kind)
            outcome.equal += not trouble
            outcome.trouble += trouble
    except torch.AcceleratorError:
        raise RuntimeError(
            f"{form} {what}\n{traceback.format_exc()}"
        ) from None  # nothing runs in this process any more
    except Exception:
        outcome.trouble += traceback.format_exc(limit=-4)
    return outcome


def difference(ours: Any, theirs: Any, kind: str) -> str:
    try:
        for one, other in zip(tensors(ours), tensors(theirs), strict=True):
            close(one.cpu(), other.cpu(), None, held_by(kind))
    except AssertionError as error:
        return str(error).replace("\n", " ") + "\n"
    return ""


def what_of(case: Case) -> str:
    return f"{case.layout.__name__} {case.kind} {case.order}"


def check_product(layout: Callable[..., Any], kind: str, device: str) -> list[Outcome]:
    """Every split of the packed buffer, in every form and order."""
    given = arguments()
    shared = [given[name] for name in ("x", "positions", "table", "slots", "scale")]
    outcomes = []
    for form, order in itertools.product(FORMS, ORDERS):
        cases = [case for case in ALL if (case.layout, case.kind, case.order) == (layout, kind, order)]
        name = "rope_kv" if order == "no quantisation" else "rope_static_q_fp8_kv"
        args = [[*shared, case.caches()] for case in cases]
        outcomes.append(
            compare(form, what_of(cases[0]), [case.layer for case in cases], args, {name: len(cases)}, device, kind)
        )
    return outcomes


# Operators and arguments beside those of the product.


def variation(rotary_dim: int = DIM, start: int = 0, **options: Any) -> Callable[..., Any]:
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = separate(x) if rotary_dim == DIM else split_heads(x)
        torch.ops._C.rotary_embedding(positions, q, k, DIM, table, True, start, **options)
        q8 = quantised(q.reshape(TOKENS, -1), scale)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q8

    return layer


def interleaved(x, positions, table, k_cache, v_cache, slots, scale):
    q, k, v = split_columns(x)
    rotate(positions, q, k, table, is_neox=False)
    store(k, v, k_cache, v_cache, slots, "auto", scale)
    return q * 1


def blocked(kind: str) -> Callable[..., Any]:
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_heads(x)
        rotate(positions, q, k, table)
        torch.ops._C_cache_ops.reshape_and_cache(k, v, k_cache, v_cache, slots, kind, scale, scale)
        return q.reshape(-1, DIM)

    return layer


def programs(device: str) -> Iterator[tuple[str, Callable[..., Any], list[Any], dict[str, int]]]:
    """Name, program, arguments, hits."""
    given = arguments()
    static, plain = {"rope_static_q_fp8_kv": 1}, {"rope_kv": 1}
    yield "float32 table", variation(), list(arguments(table=case_table(dtype=torch.float32)).values()), static
    yield "inverse", variation(inverse=True), list(given.values()), static
    yield "8 of 16, from 4 on", variation(8, 4), list(arguments(table=case_table(8)).values()), static
    yield "interleaved", interleaved, list(given.values()), plain
    yield "slots fewer than tokens", variation(), list(arguments(slots=torch.tensor([17, 2, 3])).values()), static
    for kind in ("auto", "fp8"):
        dtype = torch.bfloat16 if kind == "auto" else torch.uint8
        piece = 16 // dtype.itemsize
        k_cache = torch.zeros(BLOCKS, CASE_KV_HEADS, DIM // piece, PAGE, piece, dtype=dtype)
        v_cache = torch.zeros(BLOCKS, CASE_KV_HEADS, DIM, PAGE, dtype=dtype)
        caches = {"k_cache": k_cache, "v_cache": v_cache}
        on_cpu_only = plain if device == "cpu" else {}
        yield f"reshape_and_cache {kind}", blocked(kind), list(arguments(**caches).values()), on_cpu_only
        q = torch.randn(TOKENS, CASE_Q_HEADS, 48, dtype=torch.bfloat16)
        kv = torch.randn(TOKENS, 48, dtype=torch.bfloat16)
        cache = torch.zeros(BLOCKS, PAGE, 48, dtype=dtype)
        rest = [given["positions"], given["table"], cache, given["slots"], given["scale"]]
        yield f"concat_and_cache_mla {kind}", latent_layer(kind), [q, kv, *rest], plain


def check_programs(device: str) -> list[Outcome]:
    return [
        compare(form, name, [program], [args], hits, device, "fp8")
        for form in FORMS
        for name, program, args, hits in programs(device)
    ]


def check_generated(v2: bool, device: str) -> list[Outcome]:
    """The covering set as one program, as Inductor generates code for it."""
    given = arguments()
    shared = [given[name] for name in ("x", "positions", "table", "slots", "scale")]
    quant = sum(case.order != "no quantisation" for case in COVERING)
    outcome = Outcome(f"v{1 + v2}", "generated code", len(COVERING), len(COVERING), 0, 0)
    report = Report()

    def program(x, positions, table, slots, scale, all_caches):
        return [
            case.layer(x, positions, table, slots, scale, own) for case, own in zip(COVERING, all_caches, strict=True)
        ]

    try:
        eager = on(device, [*shared, [case.caches() for case in COVERING]])
        own = copy.deepcopy(eager)
        with torch.no_grad():
            got = compiled(program, v2, report, "reference" if device == "cpu" else "auto")(*own)
        outcome.hits = sum(report.hits.values())
        if report.hits != {"rope_static_q_fp8_kv": quant, "rope_kv": len(COVERING) - quant}:
            outcome.trouble = f"hits {report.hits}"
        expected = program(*eager)
        for index in range(len(COVERING)):
            kind = COVERING[index].kind
            trouble = difference((got[index], own[-1][index]), (expected[index], eager[-1][index]), kind)
            outcome.equal += not trouble
            outcome.trouble += trouble
    except Exception:
        outcome.trouble += traceback.format_exc(limit=-4)
    return [outcome]


def compiled(function: Callable[..., Any], v2: bool, report: Report, kernels: str = "auto") -> Callable[..., Any]:
    torch.compiler.reset()
    options: dict[str, Any] = {
        "rope_fusion.report": report,
        "rope_fusion.strict": True,
        "rope_fusion.kernels": kernels,
        "enable_auto_functionalized_v2": v2,
    }
    return torch.compile(function, backend=rope_fusion, options=options, fullgraph=True)


def check_all(device: str, processes: int) -> int:
    """Print what was found; how many programs are not as they should be."""
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # of the workers, so that an error is raised where it occurs
    context = multiprocessing.get_context("spawn")
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(check_generated, v2, device) for v2 in (True, False)]
        futures += [pool.submit(check_product, *which, device) for which in itertools.product(LAYOUTS, KINDS)]
        futures.append(pool.submit(check_programs, device))
        for future in futures:
            try:
                outcomes += future.result()
            except Exception as error:
                outcomes.append(Outcome("", "a process", 1, 0, 0, 0, str(error)))
    del os.environ["CUDA_LAUNCH_BLOCKING"]

    def counts(chosen: list[Outcome]) -> list[int]:
        return [sum(getattr(o, name) for o in chosen) for name in ("cases", "expected", "hits", "equal")]

    product = [o for o in outcomes if o.what in set(map(what_of, ALL))]
    print("form and kind of cache; for each layout: cases, hits, equal ones")
    cells = [
        [f"{form} {kind}"]
        + [
            "{0} {2} {3}".format(
                *counts([o for o in product if o.form == form and o.what.startswith(f"{layout.__name__} {kind} ")])
            )
            for layout in LAYOUTS
        ]
        for form, kind in itertools.product(FORMS, KINDS)
    ]
    print(tabulate(cells, ["", *(layout.__name__ for layout in LAYOUTS)]))
    for order in ORDERS:
        print(f"{order}: {counts([o for o in product if o.what.endswith(order)])}")
    others = sorted((o for o in outcomes if o not in product), key=lambda o: o.what)
    lines = [
        [what, *counts(own), "ok" if all(o.good for o in own) else "FAILED"]
        for what, group in itertools.groupby(others, lambda o: o.what)
        for own in [list(group)]
    ]
    print(tabulate(lines, ["in all forms", "cases", "hits expected", "hits", "equal", ""]), flush=True)
    total = [sum(getattr(o, name) for o in product) for name in ("cases", "hits", "equal")]
    bad = [o for o in outcomes if not o.good]
    print(
        f"product: {total[0]} cases, {total[1]} hits, {total[2]} equal; {len(bad)} of {len(outcomes)} programs failed"
    )
    for outcome in bad[:6]:
        print(f"\n{outcome.form} {outcome.what}: {outcome.trouble[:400]}\n…\n{outcome.trouble[-2500:]}", flush=True)
    return len(bad)


# Times.


@torch.library.custom_op("rope_fusion_check::copied", mutates_args=())
def copied(x: Tensor) -> Tensor:
    """A packed buffer as a projection leaves it: one of its own that nothing fuses into."""
    return x.clone()


@copied.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def prologue(packed: Tensor, positions: Tensor, table: Tensor, slots: Tensor, scale: Tensor, cache: Tensor) -> Tensor:
    """The engine operators of one layer; vLLM's rotary layer casts its whole float32 table to the query's dtype."""
    q, k, v = packed.split(SIZES, -1)
    torch.ops._C.rotary_embedding(positions, q, k, HEAD, table.to(q.dtype), True)
    q8 = torch.empty(q.shape, dtype=FP8, device=q.device)
    torch.ops._C.static_scaled_fp8_quant(q8, q, scale)
    k_cache, v_cache = cache.unbind(0)
    k, v = (part.view(-1, KV_HEADS, HEAD) for part in (k, v))
    torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, k_cache, v_cache, slots, "fp8", scale, scale)
    return q8


def prologues(xs: list[Tensor], positions: Tensor, table: Tensor, slots: Tensor, scale: Tensor, caches: list[Tensor]):
    """The engine operators of some layers, each on a copy of a packed buffer."""
    return [prologue(copied(x), positions, table, slots, scale, cache) for x, cache in zip(xs, caches, strict=True)]


def decode(x, positions, table, slots, scale, qkv_weights, out_weights, caches):
    """Layers without attention and MLP: projection, engine operators, projection."""
    for qkv, out, cache in zip(qkv_weights, out_weights, caches, strict=True):
        q8 = prologue(x @ qkv, positions, table, slots, scale, cache)
        x = x + q8.to(x.dtype) @ out
    return x


def graph_of(function: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph


def microseconds(functions: Sequence[Callable[[], Any]], calls: int = 5, rounds: int = 15) -> list[float]:
    """Device time of one layer, replayed from CUDA graphs in turns; the median of some rounds."""
    graphs = [graph_of(function, calls) for function in functions]
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for graph, own in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            own.append(start.elapsed_time(end) * 1e3 / calls / LAYERS)
    return [sorted(own)[rounds // 2] for own in times]


def kernels(function: Callable[[], Any]) -> list[str]:
    """Names of the kernels, copies and fills on the device, of all layers."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    graph = graph_of(function, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA]


def time_all(
    decode_tokens: Sequence[int] = (1, 64, 256, 2048), tokens: Sequence[int] = (1, 64, 256, 2048, 65536)
) -> None:
    """Operators in place, as an engine runs them; plain Inductor; rope_fusion: µs per layer."""
    torch.manual_seed(0)
    wide_table = torch.randn(131072, HEAD, device="cuda")
    table = wide_table.bfloat16()
    scale = torch.full((1,), 0.05, device="cuda")
    caches = [
        torch.zeros(2, SLOTS // BLOCK, BLOCK, KV_HEADS, HEAD, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)
    ]
    weights = [
        [torch.randn(shape, dtype=torch.bfloat16, device="cuda") / shape[0] ** 0.5 for _ in range(LAYERS)]
        for shape in ((HIDDEN, sum(SIZES)), (SIZES[0], HIDDEN))
    ]

    def shared(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        positions = torch.randint(0, 131072, (count,), device="cuda")
        slots = torch.randperm(SLOTS, device="cuda")[:count]
        for index in (positions, slots):
            dynamic(index)
        return positions, table, slots, scale

    def dynamic(x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            torch._dynamo.mark_dynamic(x, 0)
        return x

    def measured(function: Callable[..., Any], counts: Sequence[int], args_of: Callable[[int], tuple[Any, ...]]) -> Any:
        report = Report()
        ours = compiled(function, True, report)
        plain = torch.compile(lambda *args: function(*args), options={"enable_auto_functionalized_v2": True})
        for count in counts:
            args = args_of(count)
            variants = [functools.partial(variant, *args) for variant in (function, plain, ours)]
            with torch.no_grad():
                yield count, args, variants, report

    def decode_args(count: int) -> tuple[Any, ...]:
        x = dynamic(torch.randn(count, HIDDEN, dtype=torch.bfloat16, device="cuda"))
        return (x, *shared(count), *weights, caches)

    def prologue_args(count: int) -> tuple[Any, ...]:
        xs = [dynamic(torch.randn(count, sum(SIZES), dtype=torch.bfloat16, device="cuda")) for _ in range(LAYERS)]
        return (xs, *shared(count), caches)

    def cast_args(count: int) -> tuple[Any, ...]:
        x, positions, _, *rest = decode_args(count)
        return (x, positions, wide_table, *rest)

    columns = ["in place µs", "Inductor µs", "rope_fusion µs"]
    headers = [
        "tokens",
        *columns,
        "in place / ours",
        "Inductor / ours",
        "kernels: in place",
        "Inductor",
        "ours",
        "hits",
    ]

    def row(count: int, times: Sequence[float], variants: Sequence[Callable[[], Any]], report: Report) -> list[Any]:
        ratios = [times[0] / times[2], times[1] / times[2]]
        return [count, *times, *ratios, *(len(kernels(variant)) / LAYERS for variant in variants), str(report.hits)]

    for what, args_of in (("", decode_args), (", and a float32 table that is cast in every step", cast_args)):
        rows = [
            row(count, microseconds(variants), variants, report)
            for count, _, variants, report in measured(decode, decode_tokens, args_of)
        ]
        print(f"\na layer with its two projections, in a graph of four{what}")
        print(tabulate(rows, headers, floatfmt=".2f"), flush=True)
    rows = []
    for count, args, variants, report in measured(prologues, tokens, prologue_args):
        *times, copying = microseconds([*variants, functools.partial(copies, args[0])])
        rows.append(row(count, [own - copying for own in times], variants, report))
        if count == 64:
            names = [sorted({name[:70] for name in kernels(variant)}) for variant in variants]
    print("\nthe engine operators alone; the kernels count a copy of the packed buffer, the times do not")
    print(tabulate(rows, headers, floatfmt=".2f"), flush=True)
    for what, own in zip(("in place", "Inductor", "rope_fusion"), names, strict=True):
        print(f"kernels of 64 tokens, {what}: {own}")


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--part", choices=["cases", "times", "both"], default="both")
    options = parser.parse_args(list(arguments))
    started = time.perf_counter()
    device = options.device if options.device == "cpu" else torch.cuda.get_device_name()
    print(
        f"{device}, torch {torch.__version__}; operators: {'the real ones of ' + os.environ[REAL_LIBRARY] if REAL else 'stand-ins'}"
    )
    for difference in compare_schemas():
        print(f"schema: {difference}")
    if REAL:
        print(f"not in the library: {', '.join(sorted(name for name in MADE if name.startswith('_C'))) or 'nothing'}")
    failed = check_all(options.device, options.processes) if options.part != "times" else 0
    print(f"{time.perf_counter() - started:.0f} s", flush=True)
    if options.part != "cases" and options.device != "cpu":
        time_all()
    print(f"{time.perf_counter() - started:.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
