"""Perturbed graphs: with one node changed they compute something else, and so must what the pass makes of them."""

from __future__ import annotations

import pytest
from trust.choices import SeededChoices
from trust.differential import capture, check_captured
from trust.mutate import mutate
from trust.programs import draw_program

from rope_fusion.options import Options

# Figures of docs/reliability.md.
SOURCES = 50
PERTURBATIONS_OF_EACH = 36


@pytest.mark.parametrize("seed", range(SOURCES))
def test_perturbed_graphs_keep_their_values(seed: int) -> None:
    """The pass must compute the perturbed program, not what its graph came from."""
    options = Options(kernels="reference", strict=True)
    calls = capture(draw_program(SeededChoices(f"perturbed/{seed}")))
    judged = 0
    for index in range(PERTURBATIONS_OF_EACH):
        choices = SeededChoices(f"perturbed/{seed}/{index}")
        perturbed = mutate(choices.pick(calls), choices)
        if perturbed is None:
            continue
        made, what = perturbed
        try:
            check_captured([made], options)
        except Exception as error:
            error.add_note(f"perturbation {seed}/{index}: {what}")
            raise
        judged += 1
    assert judged, "nothing could be perturbed"
