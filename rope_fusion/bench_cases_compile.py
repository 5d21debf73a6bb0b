"""How long a stack takes to compile, whole and cold, without the pass and with it, and how long of that the pass itself takes.

Each compilation runs in a process of its own with empty caches, after one of a single layer, so that imports and what is set up once in a
process (patterns are traced when first needed) are not counted: "first" is what the pass took there. The layers are those of ``decode``
with an FP8 cache, and small, since sizes matter little here; on a CPU the fused operators are the reference ones.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from tabulate import tabulate

import rope_fusion
from rope_fusion import bench_stack as stack
from rope_fusion.bench_cases_decode import register
from rope_fusion.bench_timing import fp8_suits, ours, own_caches, own_processes

LAYERS = 32
SHAPE = stack.Shape("", LAYERS, 128, 8, 2, 64, 128)
BATCH = 4


@dataclass(frozen=True)
class Compiled:
    """One cold compilation."""

    seconds: float
    pass_seconds: float = 0.0
    first_pass_seconds: float = 0.0
    hits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """Seconds for a whole stack."""

    layers: int
    inductor: float
    rope_fusion: float
    of_it_pass: float
    first: float  # the pass, in the first compilation of a process, of one layer
    hits: dict[str, int]
    wrong: str | None = None  # what is not as it should be

    @property
    def share(self) -> float:
        """The pass over what plain Inductor takes."""
        return self.of_it_pass / self.inductor


def benchmark(device: str, quick: bool = False) -> list[Measurement]:
    """Compile with and without the pass."""
    layers = LAYERS // 4 if quick else LAYERS
    plain, fused = (_in_own_process(layers, with_us, device) for with_us in (False, True))
    wrong = None if sum(fused.hits.values()) == layers else f"fused in {sum(fused.hits.values())} of {layers} layers"
    return [
        Measurement(
            layers,
            plain.seconds,
            fused.seconds,
            fused.pass_seconds,
            fused.first_pass_seconds,
            fused.hits,
            wrong,
        )
    ]


def _in_own_process(layers: int, with_us: bool, device: str) -> Compiled:
    with own_caches(), own_processes(1) as pool:
        return pool.submit(_compile, layers, with_us, device).result()


def _compile(layers: int, with_us: bool, device: str) -> Compiled:
    register(device)
    _, first = _timed(1, with_us, device)
    seconds, report = _timed(layers, with_us, device)
    return Compiled(seconds, _pass_seconds(report), _pass_seconds(first), report.hits)


def _timed(layers: int, with_us: bool, device: str) -> tuple[float, rope_fusion.Report]:
    # one layer has sizes of its own, so that its kernels are not found again
    shape = replace(SHAPE, layers=layers, hidden=64 if layers == 1 else 128, fp8=fp8_suits(device))
    weights = stack.make_layers(shape, BATCH, layers, device)
    arguments = stack.inputs(shape, BATCH, device)
    function = functools.partial(stack.step, stack.layer_function(shape, "direct", device), weights)
    torch.compiler.reset()
    with torch.no_grad(), rope_fusion.record() as report:
        begin = time.perf_counter()
        torch.compile(function, dynamic=False, **(ours(device) if with_us else {}))(*arguments)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - begin, report


def _pass_seconds(report: rope_fusion.Report) -> float:
    return sum(graph.pass_ms for graph in report.graphs) / 1e3


def table(found: Sequence[Measurement]) -> str:
    """One row per stack."""
    rows = [
        (
            m.layers,
            m.inductor,
            m.rope_fusion,
            m.of_it_pass,
            f"{m.share:.1%}",
            m.first,
            f"WRONG: {m.wrong}" if m.wrong else ", ".join(f"{name} {count}" for name, count in m.hits.items()),
        )
        for m in found
    ]
    headers = ("layers", "Inductor", "rope_fusion", "of it the pass", "pass / Inductor", "first pass", "hits")
    return "seconds to compile, cold\n\n" + tabulate(rows, headers, floatfmt=".2f")
