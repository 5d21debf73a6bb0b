"""Small programs compiled by plain Inductor and by rope_fusion: checked against eager first, then timed beside their floor."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import rope_fusion
from rope_fusion.bench_timing import (
    POISON,
    as_bytes,
    compile_ahead,
    count_of,
    launches,
    machine,
    ours,
    poison,
    times_us,
)
from rope_fusion.report import RopeFusionWarning

EAGER_TOKENS = 256  # beyond, eager is measured by nobody
# The share of FP8 values that may differ from the rounding-exact reference: a fused multiply-add in Inductor's or our code turns a rounding
# about once in a million.
MISMATCH = 1e-5


@dataclass
class Call:
    """A program with fresh random operands.

    Args:
        program: what is compiled; returns a tensor or a tuple of tensors.
        eager: the same in operators that eager torch has for these dtypes.
        unrounded: likewise, without the rounding of a value to bf16 that is widened again at once. Inductor of torch 2.11 removes such a
            pair before any pass of ours sees it, that of 2.13 does not; whatever is compiled agrees with one of the two references.
        arguments: the operands; floats are random, caches full of NaN where nothing was written.
        written: which arguments the program writes.
        moved: bytes that any implementation must read and write.
    """

    program: Callable[..., Any]
    eager: Callable[..., Any]
    arguments: tuple[Tensor, ...]
    written: tuple[int, ...]
    moved: int
    unrounded: Callable[..., Any] | None = None

    def results(self, function: Callable[..., Any]) -> list[Tensor]:
        """What `function` returns and writes, on copies of what it writes."""
        arguments = list(self.arguments)
        for at in self.written:
            arguments[at] = arguments[at].clone()
        out = function(*arguments)
        return [*((out,) if isinstance(out, Tensor) else out), *(arguments[at] for at in self.written)]


@dataclass(frozen=True)
class Program:
    """One row: what to run, and at how many tokens."""

    case: str
    tokens: int
    make: Callable[[str], Call]  # device → operands


@dataclass(frozen=True)
class Measurement:
    """Microseconds per call, kernels per call, and how far the results are from eager's."""

    case: str
    tokens: int
    eager_us: float | None
    inductor_us: float
    rope_fusion_us: float
    floor_us: float
    kernels_inductor: int | None
    kernels_rope_fusion: int | None
    fp8_mismatch: float | None  # share of FP8 values of ours that differ from the reference's
    fp8_mismatch_inductor: float | None  # and of plain Inductor's, which divides with less precision than eager
    error: float  # ‖result − eager‖ / ‖eager‖ of the other results, the largest
    hits: dict[str, int] = field(default_factory=dict)
    wrong: str | None = None  # what is not as it should be

    @property
    def gain(self) -> float:
        """Plain Inductor's time over ours."""
        return self.inductor_us / self.rope_fusion_us

    @property
    def over_floor(self) -> float:
        """Our time over the floor."""
        return self.rope_fusion_us / self.floor_us


def compile_job(job: tuple[Program, bool], device: str) -> dict[str, int]:
    """Compile a program for one backend, call it, and count its launches."""
    program, with_us = job
    call = program.make(device)
    with torch.no_grad():
        return launches(functools.partial(compiled(call, device, with_us), *call.arguments))


def compiled(call: Call, device: str, with_us: bool, dynamic: bool | None = False) -> Callable[..., Any]:
    """The program by plain Inductor or by rope_fusion; `dynamic` as of ``torch.compile``."""
    return torch.compile(call.program, dynamic=dynamic, **(ours(device) if with_us else {}))


def measure(programs: Sequence[Program], device: str) -> list[Measurement]:
    """Measure each program; what is wrong is noted with its figures."""
    jobs = [(program, with_us) for program in programs for with_us in (False, True)]
    counts = [count_of(found) for found in compile_ahead(__name__, jobs, device)]
    with torch.no_grad():
        return [
            _measure(program, device, plain, fused)
            for program, plain, fused in zip(programs, counts[::2], counts[1::2], strict=True)
        ]


def _measure(program: Program, device: str, kernels_inductor: int | None, kernels_ours: int | None) -> Measurement:
    call = program.make(device)
    torch.compiler.reset()
    plain = compiled(call, device, with_us=False)
    with rope_fusion.record() as report, warnings.catch_warnings():
        warnings.simplefilter("ignore", RopeFusionWarning)  # that nothing was fused stands in the table
        fused = compiled(call, device, with_us=True)
        references = [call.results(function) for function in (call.eager, call.unrounded) if function is not None]
        poison(references[0])
        got = call.results(fused)
    mismatch, error = min((_differences(got, one) for one in references), key=_order)
    plain_mismatch, plain_error = min((_differences(call.results(plain), one) for one in references), key=_order)
    run = [functools.partial(function, *call.arguments) for function in (plain, fused, call.eager)]
    with_eager = program.tokens <= EAGER_TOKENS
    times = times_us(run if with_eager else run[:2], device)
    wrong = None
    if not error <= 1.5 * plain_error + 2**-9:  # one rounding to bf16 more than Inductor's; NaN is wrong as well
        wrong = f"error {error:.2g}, plain Inductor {plain_error:.2g}"
    elif mismatch is not None and not mismatch <= 1.5 * (plain_mismatch or 0.0) + MISMATCH:
        wrong = f"{mismatch:.2g} of the FP8 values differ, of plain Inductor's {plain_mismatch:.2g}"
    return Measurement(
        program.case,
        program.tokens,
        times[2] if with_eager else None,
        times[0],
        times[1],
        machine(device).floor_us(call.moved),
        kernels_inductor,
        kernels_ours,
        mismatch,
        plain_mismatch,
        error,
        report.hits,
        wrong,
    )


def _order(differences: tuple[float | None, float]) -> tuple[bool, float, float]:
    """Of several comparisons the one without NaN and with the fewest FP8 values that differ."""
    mismatch, error = differences
    return math.isnan(error), mismatch or 0.0, error


def _differences(got: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float | None, float]:
    """Share of FP8 values that differ, and the largest relative error of the others; NaN where one side alone has NaN."""
    compared = differing = 0
    error = 0.0
    for mine, theirs in zip(got, expected, strict=True):
        if mine.element_size() == 1:
            compared += int((as_bytes(theirs) != POISON).sum())
            differing += int((as_bytes(mine) != as_bytes(theirs)).sum())
        else:
            nan = theirs.isnan()
            if not torch.equal(mine.isnan(), nan):
                error = float("nan")
                continue
            wide, exact = (x.float().masked_fill(nan, 0.0) for x in (mine, theirs))
            error = max(error, ((wide - exact).norm() / exact.norm().clamp(min=1e-30)).item())
    return (differing / compared if compared else None), error


def table(found: Sequence[Measurement]) -> str:
    """One row per program."""
    rows = [
        (
            m.case,
            m.tokens,
            m.eager_us,
            m.inductor_us,
            m.rope_fusion_us,
            m.floor_us,
            f"{m.gain:.2f}",
            f"{m.over_floor:.2f}",
            "" if m.kernels_inductor is None else f"{m.kernels_inductor} → {m.kernels_rope_fusion}",
            "" if m.fp8_mismatch is None else f"{m.fp8_mismatch_inductor:.0e} → {m.fp8_mismatch:.0e}",
            f"{m.error:.0e}",
            (", ".join(m.hits) or "not fused") + (f" WRONG: {m.wrong}" if m.wrong else ""),
        )
        for m in found
    ]
    headers = (
        "case",
        "tokens",
        "eager",
        "Inductor",
        "rope_fusion",
        "floor",
        "Inductor / ours",
        "ours / floor",
        "kernels",
        "FP8 that differ",
        "error",
        "by",
    )
    return "µs per call\n\n" + tabulate(rows, headers, floatfmt=".2f", disable_numparse=[6, 7, 9, 10])
