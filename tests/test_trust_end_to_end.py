"""A few random programs through the whole of Inductor: fused, plain, and in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor.exc import InductorError
from trust.choices import SeededChoices
from trust.differential import capture, check_captured, compare, in_double
from trust.programs import Program, draw_program

import rope_fusion
from rope_fusion.options import Options

PROGRAMS = 12


def fusing_programs() -> Iterator[Program]:
    """Programs of a seed that fuse something, of one length and not many lines, for the C++ compiler's sake."""
    for index in itertools.count():
        program = draw_program(SeededChoices(f"end to end/{index}"))
        if program.other_sequence is not None or len(program.lines) > 32 or not program.runs():
            continue
        if check_captured(capture(program), Options(kernels="reference", strict=True)).hits:
            yield program


def run(program: Program, **how: Any) -> list[torch.Tensor]:
    """Outputs of the compiled program, and its arguments afterwards."""
    torch.compiler.reset()
    arguments = program.arguments(program.sequence, seed=1)
    with torch.no_grad():
        outputs = torch.compile(program.function(), **how)(*arguments)
    return [*outputs, *arguments]


@pytest.mark.slow
def test_fused_programs_are_no_further_from_float64_than_inductors() -> None:
    options = {"rope_fusion.kernels": "reference", "rope_fusion.strict": True}
    compared = 0
    for program in fusing_programs():
        try:
            plain = run(program)
        except InductorError:  # Inductor's CPU code knows no selection between FP8 values
            continue
        with rope_fusion.record() as report:
            fused = run(program, backend="rope_fusion", options=options)
        assert report.hits, program.describe()
        names = [*program.outputs, *(f"{item.name} afterwards" for item in program.inputs)]
        for name, reference, value, true in zip(names, plain, fused, in_double(program), strict=True):
            if reference.dtype == torch.uint8:  # bytes that hold FP8
                reference, value = reference.view(torch.float8_e4m3fn), value.view(torch.float8_e4m3fn)
            compare(f"{name}\n{program.describe()}\n", reference, value, true, coarsest=program.coarsest)
        compared += 1
        if compared == PROGRAMS:
            break
