"""A few elements of a tensor, and their comparison with what they were: notices writes that no counter shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rope_fusion._torch import reinterpret_tensor

SAMPLES = 256  # elements per tensor, about


@dataclass(frozen=True)
class Sampling:
    """Which elements of a tensor of one shape are looked at."""

    step: int
    size: tuple[int, ...]
    dense: bool

    @staticmethod
    def of(tensor: Tensor) -> Sampling:
        """Elements spread over all of `tensor`."""
        count = tensor.numel()
        # An odd step does not stay in one column of a matrix whose row length is a power of two.
        step = max(1, count // SAMPLES) | 1
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Sampling(step, (-(-count // step),), bool(count) and extent == count)

    def take(self, tensor: Tensor) -> Tensor:
        """The elements, 1-D: a view where the tensor has no gaps."""
        if self.dense:
            return reinterpret_tensor(tensor, self.size, (self.step,), 0)
        return tensor.reshape(-1)[:: self.step]


def bits_of(tensor: Tensor) -> Tensor:
    """The same elements as integers, so that NaN equals NaN and −0 differs from 0."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


@dataclass(frozen=True)
class _Group:
    """Tensors of one device and dtype, compared together."""

    places: tuple[int, ...]
    samplings: tuple[Sampling, ...]
    expected: Tensor

    def now(self, tensors: Sequence[Tensor]) -> Tensor:
        """The bits of the elements as they are now."""
        samples = [sampling.take(tensors[place]) for place, sampling in zip(self.places, self.samplings, strict=True)]
        return bits_of(torch.cat(samples))


class SampledCheck:
    """Compares a few elements of every source with what they were when the values were derived.

    On a GPU the comparison is started in one call and looked at in a later one, so that no call waits for it.

    Args:
        expected: place among the sources → the elements as they were.
        sources: the tensors now.
    """

    def __init__(self, expected: Mapping[int, Tensor], sources: Sequence[Tensor]) -> None:
        self._expected = dict(expected)
        self._samplings = {place: Sampling.of(sources[place]) for place in expected}
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, values in sorted(self._expected.items()):
            kinds.setdefault((values.device, values.dtype), []).append(place)
        self._groups = [
            _Group(
                tuple(places),
                tuple(self._samplings[place] for place in places),
                bits_of(torch.cat([self._expected[place] for place in places])),
            )
            for places in kinds.values()
        ]
        self._on_gpu = any(group.expected.is_cuda for group in self._groups)
        self._started: tuple[list[Tensor], list[torch.cuda.Event]] | None = None

    @property
    def pending(self) -> bool:
        """Whether a comparison was started whose result has not been looked at."""
        return self._started is not None

    def start(self, sources: Sequence[Tensor]) -> None:
        """Enqueue the comparison; does nothing while a CUDA graph is being captured or one is under way."""
        if self._started is not None or self._capturing():
            return
        verdicts, events = [], []
        with torch.no_grad():
            for group in self._groups:
                verdict = (group.now(sources) != group.expected).any()
                if verdict.is_cuda:
                    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
                    verdict = host.copy_(verdict, non_blocking=True)
                    events.append(torch.cuda.current_stream(group.expected.device).record_event())
                verdicts.append(verdict)
        self._started = verdicts, events

    def differs(self) -> bool:
        """Whether a finished comparison found a difference; False while it is still running."""
        started = self._started
        if started is None or self._capturing():
            return False
        verdicts, events = started
        if not all(event.query() for event in events):
            return False
        self._started = None
        return any(bool(verdict) for verdict in verdicts)

    def changed(self, sources: Sequence[Tensor]) -> list[int]:
        """Which sources differ now; waits for the device."""
        with torch.no_grad():
            return [
                place
                for place, expected in self._expected.items()
                if not torch.equal(bits_of(self._samplings[place].take(sources[place])), bits_of(expected))
            ]

    def _capturing(self) -> bool:
        """Whether a CUDA graph is being captured: nothing may be asked of events then."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()
