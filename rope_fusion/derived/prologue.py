"""What runs before each call of a compiled function that was given derived tensors: hands them over, fresh."""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_fusion.derived.store import Derivation, DerivedStore, DerivedTensor, bits_of, sample, version_of
from rope_fusion.report import RopeFusionWarning

Pointers = tuple[int, ...]
_VERSION = operator.attrgetter("_version")


class Binding:
    """The derived tensors for one set of source tensors. A compiled function called with several models has several."""

    def __init__(self, owner: weakref.ref[Prologue]) -> None:
        self.tensors: list[weakref.ref[Tensor]] = []
        self.entries: list[DerivedTensor | None] = []
        self.values: list[Tensor | None] = []
        self.pointers: Pointers = ()
        self.versions: list[int | None] = []
        self.epoch = -1
        self.unsettled: list[DerivedTensor] = []
        self.complete = False  # every value is kept; otherwise some are computed in each call
        self.check: SampledCheck | None = None
        self.watches: list[weakref.ref[Any]] = []
        self._owner = owner

    def watch(self, sources: Sequence[Tensor]) -> None:
        """Be told when a source's storage or the source itself goes away, without keeping either."""
        me, self_owner = weakref.ref(self), self._owner

        def storage_died(_: object) -> None:
            binding, owner = me(), self_owner()
            if binding is not None and owner is not None:
                owner._forget_address(binding)
                if binding.is_gone():
                    owner._forget(binding)

        def tensor_died(_: object) -> None:
            binding, owner = me(), self_owner()
            if binding is not None and owner is not None and not binding.pointers:
                owner._forget(binding)

        self.watches = [weakref.ref(source.untyped_storage(), storage_died) for source in sources]
        self.tensors = [weakref.ref(source, tensor_died) for source in sources]

    def is_gone(self) -> bool:
        """Whether some source tensor no longer exists."""
        return any(ref() is None for ref in self.tensors)

    def is_of(self, sources: Sequence[Tensor]) -> bool:
        """Whether these are the very tensor objects that it was made for."""
        return all(ref() is source for ref, source in zip(self.tensors, sources, strict=True))


class Prologue:
    """Gives the derived tensors for a call's arguments, computing only what is new or was written since.

    Args:
        derivations: what the compiled function expects after its own arguments, in this order.
        store: where values are shared.
        limits: per device, the most bytes that all derived tensors together may hold.
        interval: every how many calls sources are sampled for uncounted writes; 0 never.
        assume_frozen: whether tensors without a version counter are taken as never written.
    """

    def __init__(
        self,
        derivations: Sequence[Derivation],
        store: DerivedStore,
        limits: Mapping[torch.device, int],
        interval: int,
        assume_frozen: bool,
    ) -> None:
        self.derivations = tuple(derivations)
        self.store = store
        self._limits = dict(limits)
        self._interval = interval
        self._assume_frozen = assume_frozen
        self._positions = sorted({position for item in derivations for position in item.sources})
        index = {position: place for place, position in enumerate(self._positions)}
        self._operands = [tuple(index[position] for position in item.sources) for item in derivations]
        self._names = [_name_of(position, derivations) for position in self._positions]
        self._bindings: dict[Pointers, Binding] = {}
        self._moved: list[Binding] = []
        self._calls = 0
        self._warned: set[str] = set()

    def values(self, args: Sequence[Any]) -> list[Tensor]:
        """The derived tensors for the arguments of one call."""
        sources = [args[position] for position in self._positions]
        binding = self._bindings.get(tuple(map(Tensor.data_ptr, sources)))
        if binding is None or binding.epoch != self.store.epoch or binding.versions != self._versions(sources):
            found = self._bind(sources)
            if found is None:
                return [self._once(index, sources) for index in range(len(self.derivations))]
            binding = found
        if binding.unsettled:
            binding.unsettled = [entry for entry in binding.unsettled if not entry.wait()]
        if self._interval:
            self._calls += 1
            if binding.check is not None and (binding.check.pending or self._calls % self._interval == 0):
                self._sampled_check(binding, sources)
        if binding.complete:
            return binding.values  # type: ignore[return-value]
        return [self._once(index, sources) if value is None else value for index, value in enumerate(binding.values)]

    def _once(self, index: int, sources: Sequence[Tensor]) -> Tensor:
        """A value that is not kept: right, and as slow as the program was before."""
        return self.derivations[index].run([sources[place] for place in self._operands[index]])

    def _bind(self, sources: Sequence[Tensor]) -> Binding | None:
        """The binding for these tensors, with every value fresh; None where nothing may be kept."""
        if not self._assume_frozen and any(source.is_inference() for source in sources):
            self._warn(
                "a tensor made under inference_mode carries no version counter, so what is derived from it is computed "
                "in every call; make it outside inference_mode, or set rope_fusion.assume_frozen"
            )
            return None
        if any(source.is_cuda for source in sources) and torch.cuda.is_current_stream_capturing():
            self._warn(
                "derived tensors were missing or stale while a CUDA graph was being captured, so the graph computes "
                "them in every replay; call the compiled function once before capturing"
            )
            return None
        with self.store.lock:
            pointers = tuple(map(Tensor.data_ptr, sources))
            binding = self._bindings.get(pointers) or next((b for b in self._known() if b.is_of(sources)), None)
            moved = binding is not None and binding.pointers != pointers
            if binding is None:
                binding = Binding(weakref.ref(self))
            elif moved:
                self._forget(binding)
            versions, epoch = self._versions(sources), self.store.epoch
            entries: list[DerivedTensor | None] = []
            for index, derivation in enumerate(self.derivations):
                operands = [sources[place] for place in self._operands[index]]
                limit = self._limits[derivation.device]
                old = binding.entries[index] if binding.entries else None
                if old is not None and moved:
                    entries.append(self.store.follow(old, operands, limit))
                else:
                    entries.append(self.store.obtain(derivation, operands, limit))
            self._fill(binding, sources, pointers, entries)
            # Last: from here on other threads take the binding for fresh without asking for the lock.
            binding.versions, binding.epoch = versions, epoch
            self._bindings[pointers] = binding
            return binding

    def _versions(self, sources: Sequence[Tensor]) -> list[int | None]:
        if self._assume_frozen:
            return list(map(version_of, sources))
        try:
            return list(map(_VERSION, sources))
        except RuntimeError:  # made under inference_mode: no counter
            return []

    def _known(self) -> list[Binding]:
        return [*self._moved, *self._bindings.values()]

    def _fill(
        self,
        binding: Binding,
        sources: Sequence[Tensor],
        pointers: Pointers,
        entries: list[DerivedTensor | None],
    ) -> None:
        binding.entries = entries
        binding.values = [None if entry is None else entry.value for entry in entries]
        binding.complete = None not in entries
        binding.unsettled = [entry for entry in entries if entry is not None and entry.ready is not None]
        binding.check = SampledCheck(self._operands, entries, len(sources)) if self._interval else None
        binding.watch(sources)
        binding.pointers = pointers
        if not binding.complete:
            left = sum(
                derivation.bytes for derivation, entry in zip(self.derivations, entries, strict=True) if not entry
            )
            self._warn(
                f"rope_fusion.derived_budget has no room for {left} bytes more of derived tensors (this compiled "
                "function is called with several sets of weights); they are computed in every call"
            )

    def _forget_address(self, binding: Binding) -> None:
        """A source's storage is gone: its address may come to mean something else."""
        if self._bindings.get(binding.pointers) is binding:
            del self._bindings[binding.pointers]
            self._moved.append(binding)
        binding.pointers = ()

    def _forget(self, binding: Binding) -> None:
        if self._bindings.get(binding.pointers) is binding:
            del self._bindings[binding.pointers]
        if binding in self._moved:
            self._moved.remove(binding)

    def _sampled_check(self, binding: Binding, sources: Sequence[Tensor]) -> None:
        assert binding.check is not None
        if self._calls % self._interval == 0:
            binding.check.start(sources)
        if not binding.check.differs():
            return
        with self.store.lock:
            for place in binding.check.changed(sources):
                self._warn_stale(self._names[place])
                for index, entry in enumerate(binding.entries):
                    if entry is not None and place in self._operands[index]:
                        entry.refresh([sources[operand] for operand in self._operands[index]])
            binding.check = SampledCheck(self._operands, binding.entries, len(sources))
            binding.unsettled = [entry for entry in binding.entries if entry is not None and entry.ready is not None]

    def _warn_stale(self, name: str) -> None:
        warnings.warn(
            f"rope_fusion: {name} was written without its version counter showing it (`.data.copy_`, a NumPy alias, a "
            "foreign kernel). What was derived from it has been computed again, but calls since that write may have "
            f"used the old values, {self._interval} at most. Call rope_fusion.invalidate(model) after such a one.",
            RopeFusionWarning,
            stacklevel=2,
        )

    def _warn(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            warnings.warn(f"rope_fusion: {sentence}", RopeFusionWarning, stacklevel=2)


@dataclass
class _Group:
    """Sources of one device and dtype, compared together."""

    places: list[int]
    expected: Tensor


class SampledCheck:
    """Compares a few elements of every source with what they were when the values were derived.

    On a GPU the comparison is started in one call and looked at in a later one, so that no call waits for it.
    """

    def __init__(self, operands: Sequence[Sequence[int]], entries: Sequence[DerivedTensor | None], count: int) -> None:
        self._expected: dict[int, Tensor] = {}
        for entry, places in zip(entries, operands, strict=True):
            if entry is not None:
                self._expected.update(zip(places, entry.samples, strict=True))
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, values in sorted(self._expected.items()):
            kinds.setdefault((values.device, values.dtype), []).append(place)
        self._groups = [
            _Group(places, bits_of(torch.cat([self._expected[place] for place in places]))) for places in kinds.values()
        ]
        self._verdict: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []

    @property
    def pending(self) -> bool:
        """Whether a comparison was started whose result has not been looked at."""
        return bool(self._verdict)

    def start(self, sources: Sequence[Tensor]) -> None:
        """Enqueue the comparison; does nothing while a CUDA graph is being captured or one is under way."""
        if self._verdict or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        with torch.no_grad():
            for group in self._groups:
                now = bits_of(torch.cat([sample(sources[place]) for place in group.places]))
                verdict = (now != group.expected).any()
                if verdict.is_cuda:
                    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
                    self._verdict.append(host.copy_(verdict, non_blocking=True))
                    self._events.append(torch.cuda.current_stream(verdict.device).record_event())
                else:
                    self._verdict.append(verdict)

    def differs(self) -> bool:
        """Whether a finished comparison found a difference; False while it is still running."""
        if not self._verdict or (self._events and torch.cuda.is_current_stream_capturing()):
            return False
        if not all(event.query() for event in self._events):
            return False
        result = any(bool(verdict) for verdict in self._verdict)
        self._verdict, self._events = [], []
        return result

    def changed(self, sources: Sequence[Tensor]) -> list[int]:
        """Which sources differ now; waits for the device."""
        return [
            place
            for place, expected in self._expected.items()
            if not torch.equal(bits_of(sample(sources[place])), bits_of(expected))
        ]


def _name_of(position: int, derivations: Sequence[Derivation]) -> str:
    return next(
        name
        for derivation in derivations
        for place, name in zip(derivation.sources, derivation.source_names, strict=True)
        if place == position
    )
