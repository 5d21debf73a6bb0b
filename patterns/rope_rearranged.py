"""A rotation and the copy that brings its heads into another order, or into groups, become one kernel."""

from __future__ import annotations

from rope_fusion.canonical.attributes import RotaryAttributes
from rope_fusion.canonical.examples import arrange_example, rotary_example
from rope_fusion.canonical.operators import arrange, rotary_qk
from rope_fusion.capability import profitable_kernel
from rope_fusion.kernels.rotation import call_arranged, call_rotation, refuse_rotation, too_small
from rope_fusion.pattern import FusionPattern


def search(q, k, cos, sin, positions, rotary, place):
    q_rot, k_rot = rotary_qk(q, k, cos, sin, positions, rotary)
    return arrange(q_rot, place), q_rot, k_rot


def replacement(q, k, cos, sin, positions, rotary, place):
    # what nobody reads in the first order is dead code
    q_rot = call_rotation(q, cos, sin, positions, rotary, q)
    k_rot = call_rotation(k, cos, sin, positions, rotary, q)
    return call_arranged(q, cos, sin, positions, rotary, place), q_rot, k_rot


def refuse(q, k, cos, sin, positions, rotary, place):
    rope = RotaryAttributes.decode(rotary)
    if not rope.inverse and rope.rotary_dim == q.shape[3]:
        return "the whole head is rotated forward, which Inductor fuses with the copy as well"
    return too_small(q, k) or refuse_rotation(q, k, cos, sin, positions, rotary)


def example_inputs():
    return [*rotary_example(), *arrange_example()]


PATTERN = FusionPattern(
    priority=180,
    search=search,
    replacement=replacement,
    example_inputs=example_inputs,
    requires=(profitable_kernel,),
    refuse=refuse,
)
