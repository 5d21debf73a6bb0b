"""Random programs: whatever their spelling, the pass leaves their values as they are."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trust.choices import HypothesisChoices
from trust.differential import capture, check_captured
from trust.programs import draw_program

from rope_fusion.options import Options

FP32 = Options(kernels="reference", strict=True)
EXACT = Options(kernels="reference", strict=True, numerics="exact")

PROGRAMS = 250  # a figure of docs/reliability.md


@settings(
    max_examples=PROGRAMS, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(st.data())
def test_random_programs_keep_their_values(data: Any) -> None:
    program = draw_program(HypothesisChoices(data))
    if not program.runs():
        return
    calls = capture(program)
    check_captured(calls, FP32)
    check_captured(calls, EXACT, exact=True)
