"""Random programs: whatever their spelling, the pass leaves their values as they are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trust.choices import HypothesisChoices, SeededChoices
from trust.differential import capture, check_captured
from trust.mutate import mutate
from trust.programs import draw_program

from rope_fusion.options import Options

FP32 = Options(kernels="reference", strict=True)
EXACT = Options(kernels="reference", strict=True, numerics="exact")

# The figures of docs/reliability.md: programs, and perturbed graphs, that a run of these tests judges.
PROGRAMS = 250
SOURCES = 50
PERTURBATIONS_OF_EACH = 35


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


@pytest.mark.parametrize("seed", range(SOURCES))
def test_perturbed_graphs_keep_theirs(seed: int) -> None:
    """A graph with one node perturbed is another program: the pass must compute that one, not what the graph came from."""
    calls = capture(draw_program(SeededChoices(f"perturbed/{seed}")))
    for index in range(PERTURBATIONS_OF_EACH):
        choices = SeededChoices(f"perturbed/{seed}/{index}")
        perturbed = mutate(choices.pick(calls), choices)
        if perturbed is None:
            continue
        made, what = perturbed
        try:
            check_captured([made], FP32)
        except Exception as error:
            error.add_note(f"perturbation {seed}/{index}: {what}")
            raise
