"""Perturbed graphs: with one node changed they compute something else, and so must what the pass makes of them."""

from __future__ import annotations

import pytest
import torch
from blocks import GptOssAttention, Stack, stack_inputs
from trust.choices import SeededChoices
from trust.differential import Captured, capture, capture_call, check_captured
from trust.mutate import mutate
from trust.programs import draw_program

from rope_fusion.options import Options

STRICT = Options(kernels="reference", strict=True)

# Figures of docs/reliability.md.
SOURCES = 50
PERTURBATIONS_OF_EACH = 36
PERTURBATIONS_OF_A_BLOCK = 20


def judge(calls: list[Captured], name: str, perturbations: int) -> None:
    """The pass must compute each perturbed graph, not what it came from."""
    judged = 0
    for index in range(perturbations):
        choices = SeededChoices(f"{name}/{index}")
        perturbed = mutate(choices.pick(calls), choices)
        if perturbed is None:
            continue
        made, what = perturbed
        try:
            check_captured([made], STRICT)
        except Exception as error:
            error.add_note(f"perturbation {name}/{index}: {what}")
            raise
        judged += 1
    assert judged, "nothing could be perturbed"


@pytest.mark.parametrize("seed", range(SOURCES))
def test_perturbed_graphs_of_random_programs_keep_their_values(seed: int) -> None:
    judge(capture(draw_program(SeededChoices(f"perturbed/{seed}"))), f"perturbed/{seed}", PERTURBATIONS_OF_EACH)


@pytest.mark.parametrize("quantise_q", [True, False])
@pytest.mark.parametrize("fp8_cache", [True, False])
def test_perturbed_graphs_of_attention_blocks_keep_their_values(quantise_q: bool, fp8_cache: bool) -> None:
    torch.manual_seed(0)
    calls = capture_call(GptOssAttention(quantise_q=quantise_q, fp8_cache=fp8_cache).eval(), *stack_inputs())
    assert check_captured(calls, STRICT).hits
    judge(calls, f"block {quantise_q} {fp8_cache}", PERTURBATIONS_OF_A_BLOCK)


def test_perturbed_graphs_of_two_layers_keep_their_values() -> None:
    torch.manual_seed(0)
    judge(capture_call(Stack(2).eval(), *stack_inputs()), "stack", PERTURBATIONS_OF_A_BLOCK)
