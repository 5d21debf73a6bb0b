"""A whole cos/sin cache that is cast in every layer of every call is cast once, and again only when it was written."""

from __future__ import annotations

import torch

from rope_fusion.canonical.derivation import (
    cast_table,
    derivable_example,
    derived,
    inputs_can_be_added,
    refuse_obstacle,
)
from rope_fusion.pattern import FusionPattern


def search(table, cast):
    return cast_table(table, cast)


def replacement(table, cast):
    return derived(table, cast)


def refuse(*, cast, **tensors):
    return refuse_obstacle(cast)


def example_inputs():
    return [torch.zeros(32, 16), derivable_example()]


PATTERN = FusionPattern(
    priority=50,
    search=search,
    replacement=replacement,
    example_inputs=example_inputs,
    requires=(inputs_can_be_added,),
    refuse=refuse,
)
