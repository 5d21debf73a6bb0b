"""Derived tensors: what depends only on parameters and buffers is computed once, not in every call.

`hoisting_compile` stands between `compile_fx` and `compile_fx_inner`. It takes known derivations (dequantised weights,
casts of whole cos/sin caches) out of the graph, hands their values in as further static inputs, and returns a function
that makes sure before each call that they are fresh. docs/derived.md says what that covers.

==============  =====================================================================
`hoisting`      what the backend calls, and `invalidate`
`inputs`        what the backend knows of a graph's inputs
`plan`          candidates, the budget, and how to take values out of a graph
`selection`     which candidates are taken: obstacles and the catalogue's patterns
`lifting`       casts of varying parts of a table
`prologue`      what runs before each call
`samples`       the sampled comparison of sources
`store`         the values themselves: sharing, freshness, lifetime
==============  =====================================================================
"""

from rope_fusion.derived.hoisting import hoisting_compile, invalidate
from rope_fusion.derived.inputs import InputInfo, describe_inputs

__all__ = ["InputInfo", "describe_inputs", "hoisting_compile", "invalidate"]
