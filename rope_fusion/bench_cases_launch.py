"""What one call of the compiled prologue costs the host, outside of CUDA graphs: by plain Inductor and with the fused operator.

GPT-OSS with FP8 q and KV, in the direct spelling. Calls are enqueued one after the other without waiting for the GPU; both compiled
functions check the same guards. "x * 2" is one operator of eager torch in the same run: hosts differ, and so does one from run to run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate

from rope_fusion import bench_cases_prologue
from rope_fusion.bench_programs import compiled
from rope_fusion.bench_timing import enqueue_times_us, fp8_suits, needs_gpu

skipped = needs_gpu


@dataclass(frozen=True)
class Measurement:
    """Microseconds of the host per call."""

    case: str
    tokens: int
    inductor: float
    rope_fusion: float
    one_operator: float

    @property
    def ratio(self) -> float:
        """At most 1: the fused operator costs the host no more than the kernels that it replaces."""
        return self.rope_fusion / self.inductor


def benchmark(device: str, quick: bool = False) -> list[Measurement]:
    """Measure with 1 and 64 tokens, few enough that the GPU keeps up."""
    shapes = bench_cases_prologue.SHAPES if device.startswith("cuda") else bench_cases_prologue.REHEARSED
    shape = next(shape for shape in shapes if fp8_suits(device) or not shape.kv_fp8)
    return [_measure(shape, tokens, device) for tokens in ((1,) if quick else (1, 64))]


def _measure(shape: bench_cases_prologue.Shape, tokens: int, device: str) -> Measurement:
    call = bench_cases_prologue.make(shape, tokens, device)
    x = torch.randn(64, 64, device=device)
    torch.compiler.reset()
    with torch.no_grad():
        functions = [functools.partial(compiled(call, device, with_us), *call.arguments) for with_us in (False, True)]
        plain, fused, one = enqueue_times_us([*functions, lambda: x * 2], device)
    return Measurement(shape.name, tokens, plain, fused, one)


def table(found: Sequence[Measurement]) -> str:
    """One row per number of tokens."""
    rows = [(m.case, m.tokens, m.inductor, m.rope_fusion, m.ratio, m.one_operator) for m in found]
    headers = ("case", "tokens", "Inductor", "rope_fusion", "rope_fusion / Inductor", "x * 2")
    return "µs of the host per call\n\n" + tabulate(rows, headers, floatfmt=".2f")
