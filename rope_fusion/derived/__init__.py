"""Derived tensors: what depends only on parameters and buffers is computed once, not in every call.

`hoisting_compile` stands between `compile_fx` and `compile_fx_inner`. It takes known derivations (dequantised weights,
casts of whole cos/sin caches) out of the graph, hands their values in as further static inputs, and returns a function
that makes sure before each call that they are fresh. docs/derived.md says what that covers.

==============  =====================================================================
`hoisting`      what the backend calls, and `invalidate`
`plan`          which values, within which budget, and how to take them out of a graph
`prologue`      what runs before each call
`store`         the values themselves: sharing, freshness, lifetime
==============  =====================================================================
"""

from rope_fusion.derived.hoisting import InputInfo, describe_inputs, hoisting_compile, invalidate

__all__ = ["InputInfo", "describe_inputs", "hoisting_compile", "invalidate"]
