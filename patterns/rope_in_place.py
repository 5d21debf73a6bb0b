"""A rotation of part of each head whose input is not read again turns those elements where they lie."""

from __future__ import annotations

from rope_fusion.canonical.attributes import RotaryAttributes
from rope_fusion.canonical.examples import rotary_example
from rope_fusion.canonical.operators import rotary_qk
from rope_fusion.capability import profitable_kernel
from rope_fusion.kernels.rotation import call_in_place, refuse_rotation
from rope_fusion.pattern import FusionPattern


def search(q, k, cos, sin, positions, rotary):
    q_rot, k_rot = rotary_qk(q, k, cos, sin, positions, rotary)
    return q_rot, k_rot


def replacement(q, k, cos, sin, positions, rotary):
    q_rot = call_in_place(q, cos, sin, positions, rotary, q)
    return q_rot, call_in_place(k, cos, sin, positions, rotary, q)


def refuse(q, k, cos, sin, positions, rotary):
    rope = RotaryAttributes.decode(rotary)
    if rope.rotary_dim == q.shape[3]:
        return "the whole head is rotated, so that a copy moves no more than a rotation in place"
    if not rope.overwritable:
        return "what it rotates is an input or read elsewhere, or its result lies in memory in another order"
    return refuse_rotation(q, k, cos, sin, positions, rotary)


PATTERN = FusionPattern(
    priority=170,
    search=search,
    replacement=replacement,
    example_inputs=rotary_example,
    requires=(profitable_kernel,),
    refuse=refuse,
)
