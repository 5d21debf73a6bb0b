"""`FusionPattern`: one rewrite, as a value.

A pattern file holds a `search` function over canonical operators, a `replacement` function of the same arguments, example
inputs to trace them with, the gates it needs, and a `refuse` function that says, given the fake tensors and attributes of a
match by argument name, why this match must stay as it is. The file's name is the pattern's name; the first line of its
docstring is its summary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rope_fusion.capability import Gate, GateContext


def never_refuse(**arguments: Any) -> str | None:
    """The refusal of a pattern that takes every match."""
    return None


@dataclass(frozen=True)
class FusionPattern:
    """A search/replacement pair over canonical operators.

    Attributes:
        priority: patterns run from the highest to the lowest; the more a pattern fuses, the higher.
        search: function of tensors and attribute strings; its outputs are every value the rest of the graph may use.
        replacement: function of the same arguments that returns the same outputs; traced with the match's own fake tensors.
        example_inputs: builds arguments for tracing `search`; strings stand for attributes, None is not allowed.
        requires: gates, asked once per graph.
        refuse: called for every match with the arguments by name (fake tensors, numbers, strings, None); a sentence refuses.
    """

    priority: int
    search: Callable[..., Any]
    replacement: Callable[..., Any]
    example_inputs: Callable[[], Sequence[Any]]
    requires: tuple[Gate, ...] = ()
    refuse: Callable[..., str | None] = never_refuse

    def verdict(self, context: GateContext) -> str | None:
        """None when every gate is open, else the first shut gate's sentence."""
        for gate in self.requires:
            if (sentence := gate(context)) is not None:
                return sentence
        return None
