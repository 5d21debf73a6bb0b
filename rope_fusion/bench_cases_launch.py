"""What one call of a compiled program costs the host, outside of CUDA graphs: by plain Inductor and with the fused operator.

GPT-OSS with FP8 q and KV, in the direct spelling, and the inverse rotation of an attention output, compiled for that number of tokens and
for any. Calls are enqueued one after the other without waiting for the GPU; both compiled functions check the same guards. "x * 2" is one
operator of eager torch in the same run: hosts differ, and so does one from run to run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate

from rope_fusion import bench_cases_inverse, bench_cases_prologue
from rope_fusion.bench_programs import Call, compiled
from rope_fusion.bench_timing import enqueue_times_us, fp8_suits, needs_gpu

skipped = needs_gpu

DYNAMIC = 48  # tokens where their number is dynamic: no other size of the operands is the same


@dataclass(frozen=True)
class Measurement:
    """Microseconds of the host per call."""

    case: str
    tokens: int
    dynamic: bool
    inductor: float
    rope_fusion: float
    one_operator: float

    @property
    def ratio(self) -> float:
        """At most 1: the fused operator costs the host no more than the kernels that it replaces."""
        return self.rope_fusion / self.inductor


def benchmark(device: str, quick: bool = False) -> list[Measurement]:
    """Measure with 1 and 64 tokens, few enough that the GPU keeps up."""
    rehearsed = not device.startswith("cuda")
    prologues = bench_cases_prologue.REHEARSED if rehearsed else bench_cases_prologue.SHAPES
    prologue = next(shape for shape in prologues if fp8_suits(device) or not shape.kv_fp8)
    inverse = (bench_cases_inverse.REHEARSED if rehearsed else bench_cases_inverse.SHAPES)[0]
    heads = inverse.sizes[-1][1]

    def rotation(tokens: int) -> Call:
        return bench_cases_inverse.make(inverse, tokens, heads, device)

    def whole(tokens: int) -> Call:
        return bench_cases_prologue.make(prologue, tokens, device)

    rotated = f"{inverse.name} × {heads} heads"
    cases = [
        (prologue.name, whole, 1, False),
        (prologue.name, whole, 64, False),
        (rotated, rotation, 64, False),
        (prologue.name, whole, DYNAMIC, True),
        (rotated, rotation, DYNAMIC, True),
    ]
    return [
        _measure(name, make(tokens), tokens, dynamic, device)
        for name, make, tokens, dynamic in (cases[:1] if quick else cases)
    ]


def _measure(name: str, call: Call, tokens: int, dynamic: bool, device: str) -> Measurement:
    x = torch.randn(64, 64, device=device)
    torch.compiler.reset()
    for argument in call.arguments:
        if dynamic and argument.shape[0] == tokens:
            torch._dynamo.mark_dynamic(argument, 0)
    with torch.no_grad():
        functions = [
            functools.partial(compiled(call, device, with_us, None if dynamic else False), *call.arguments)
            for with_us in (False, True)
        ]
        plain, fused, one = enqueue_times_us([*functions, lambda: x * 2], device)
    return Measurement(name, tokens, dynamic, plain, fused, one)


def table(found: Sequence[Measurement]) -> str:
    """One row per number of tokens."""
    rows = [
        (m.case, m.tokens, "any" if m.dynamic else "this", m.inductor, m.rope_fusion, m.ratio, m.one_operator)
        for m in found
    ]
    headers = ("case", "tokens", "number compiled for", "Inductor", "rope_fusion", "rope_fusion / Inductor", "x * 2")
    return "µs of the host per call\n\n" + tabulate(rows, headers, floatfmt=".2f")
