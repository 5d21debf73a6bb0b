"""A weight that is dequantised in every call is dequantised once, and again only when it was written."""

from __future__ import annotations

import torch

from rope_fusion.canonical.derivation import (
    dequantize,
    derivable_example,
    derived,
    inputs_can_be_added,
    refuse_obstacle,
)
from rope_fusion.pattern import FusionPattern


def search(codes, scale, weight):
    return dequantize(codes, scale, weight)


def replacement(codes, scale, weight):
    return derived(codes, weight)


def refuse(*, weight, **tensors):
    return refuse_obstacle(weight)


def example_inputs():
    return [torch.zeros(32, 16, dtype=torch.int8), torch.ones(32, 1), derivable_example()]


PATTERN = FusionPattern(
    priority=60,
    search=search,
    replacement=replacement,
    example_inputs=example_inputs,
    requires=(inputs_can_be_added,),
    refuse=refuse,
)
