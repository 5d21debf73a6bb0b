"""A forward rotation of part of each head becomes one kernel that copies the rest along."""

from __future__ import annotations

from rope_fusion.canonical.attributes import RotaryAttributes
from rope_fusion.canonical.examples import rotary_example
from rope_fusion.canonical.operators import rotary_qk
from rope_fusion.capability import profitable_kernel
from rope_fusion.kernels.rotation import call_rotation, refuse_rotation, too_small
from rope_fusion.pattern import FusionPattern


def search(q, k, cos, sin, positions, rotary):
    q_rot, k_rot = rotary_qk(q, k, cos, sin, positions, rotary)
    return q_rot, k_rot


def replacement(q, k, cos, sin, positions, rotary):
    q_rot = call_rotation(q, cos, sin, positions, rotary, q)
    return q_rot, call_rotation(k, cos, sin, positions, rotary, q)


def refuse(q, k, cos, sin, positions, rotary):
    rope = RotaryAttributes.decode(rotary)
    if rope.inverse:
        return "the rotation is an inverse one"
    if rope.rotary_dim == q.shape[3]:
        return "the whole head is rotated, which Inductor fuses as well"
    return too_small(q, k) or refuse_rotation(q, k, cos, sin, positions, rotary)


PATTERN = FusionPattern(
    priority=150,
    search=search,
    replacement=replacement,
    example_inputs=rotary_example,
    requires=(profitable_kernel,),
    refuse=refuse,
)
