"""How generated code calls our operators on a GPU: without the dispatcher and without views, which cost more than the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_fusion._torch import empty_strided_cuda
from rope_fusion.kernels import rope_qkv_triton, rotate, rotate_triton
from rope_fusion.kernels.driver_launch import ALIGNMENT, Runner
from rope_fusion.kernels.failures import process_failures

MOST_SIZES = 1024  # that a call site keeps launches for
Repeat = Callable[[Sequence[Tensor], Sequence[int]], Any]


class Launched(NamedTuple):
    """A call that was made."""

    outputs: tuple[Tensor, ...]  # what the operator returns
    inputs: tuple[int, ...]  # what the kernel takes before them, as positions among the operator's arguments
    runner: Runner | None  # launches the same kernel again; None where there is no such way


class Launcher:
    """One call site.

    Args:
        operator: does the same through the dispatcher; asked where a launch fails, and says so.
        launch: makes a call, or gives None where the operator is to be asked.
    """

    def __init__(self, operator: Callable[..., Any], launch: Callable[..., Launched | None]) -> None:
        self._operator = operator
        self._launch = launch
        self._repeats: dict[tuple[int, ...], Repeat] = {}

    def __call__(
        self,
        bases: Sequence[Tensor],
        offsets: Sequence[int],
        sizes: tuple[int, ...],
        arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    ) -> Any:
        """Results as the operator's.

        Args:
            bases, offsets: the tensor arguments: each begins so many bytes behind the start of a base.
            sizes: all that shapes and strides of the tensor arguments depend on.
            arguments: those of the operator; called where the site has seen no such call yet.
        """
        try:
            repeat = self._repeats.get(sizes)
            if repeat is not None and (results := repeat(bases, offsets)) is not NotImplemented:
                return results
        except Exception:  # the operator tries again; if it fails too, it says so and computes by its reference
            pass
        given, named = arguments()
        try:
            launched = self._launch(*given, **named)
        except Exception:
            launched = None
        if launched is None:
            return self._operator(*given, **named)
        if launched.runner is not None:
            if len(self._repeats) >= MOST_SIZES:
                self._repeats.clear()
            self._repeats[sizes] = _repeated(launched, launched.runner, given)
        return rotate.results_of(launched.outputs)


def _repeated(launched: Launched, runner: Runner, given: Sequence[Any]) -> Repeat:
    """The same call for other tensors of the same layouts on the same device; NotImplemented where one is aligned less."""
    tensors = [position for position, x in enumerate(given) if isinstance(x, Tensor)]
    inputs = [tensors.index(position) for position in launched.inputs]
    # An output that nobody wants holds no memory; the first one stands for all.
    outputs = [out for out in launched.outputs if out.numel()]
    kinds = [(tuple(out.shape), out.stride(), out.dtype) for out in outputs]
    count = iter(range(len(outputs)))
    results_from = [next(count) if out.numel() else out for out in launched.outputs]
    pointers = [*[given[position] for position in launched.inputs], *outputs]
    aligned = [i for i, x in enumerate(pointers) if x.data_ptr() % ALIGNMENT == 0]
    all_aligned, all_wanted = len(aligned) == len(pointers), len(outputs) == len(launched.outputs)

    def repeat(bases: Sequence[Tensor], offsets: Sequence[int]) -> Any:
        addresses = [bases[i].data_ptr() + offsets[i] for i in inputs]
        results = [empty_strided_cuda(*kind) for kind in kinds]
        addresses += [out.data_ptr() for out in results]
        if functools.reduce(or_, addresses if all_aligned else [addresses[i] for i in aligned], 0) % ALIGNMENT:
            return NotImplemented
        runner(addresses)
        if not all_wanted:
            results = [results[x] if isinstance(x, int) else x for x in results_from]
        return rotate.results_of(tuple(results))

    return repeat


def call_site(name: str, overload: str) -> Launcher:
    """A call site of ``torch.ops.rope_fusion.<name>.<overload>``."""
    operator = getattr(getattr(torch.ops.rope_fusion, name), overload)
    return Launcher(operator, _launch_prologue if name == "rope_qkv" else functools.partial(_launch_rotation, name))


def _launch_prologue(*arguments: Any) -> Launched | None:
    if process_failures().reason("rope_qkv", arguments[0].device) is not None:
        return None
    *tensors, options, need_q, need_k = arguments
    call = rope_qkv_triton.prepare(*tensors, options=options, need_q=need_q, need_k=need_k)
    rope_qkv_triton.run(call)
    inputs = tuple(source for source in call.plan.sources if source is not None)
    return Launched(call.outputs, inputs, rope_qkv_triton.runner_of_call(call))


def _launch_rotation(name: str, *tensors: Tensor | None, **options: Any) -> Launched | None:
    request = rotate.requested(name, *tensors, **options)  # type: ignore[arg-type]
    made = rotate.prepared(request, *tensors)  # type: ignore[arg-type]
    if made is None:
        return None
    outputs, call = made
    rotate_triton.run(call)
    given = [position for position, x in enumerate(call.pointers[: len(tensors)]) if x is not None]
    inputs = (*given, *[0] * (request.out_dtype is None))  # in place the output is x
    return Launched(outputs, inputs, rotate_triton.runner_of_call(call))
