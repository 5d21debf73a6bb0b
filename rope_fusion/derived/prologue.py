"""What runs before each call of a compiled function that was given derived tensors: hands them over, fresh."""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rope_fusion.derived.samples import SampledCheck
from rope_fusion.derived.store import Derivation, DerivedStore, DerivedTensor, version_of
from rope_fusion.report import RopeFusionWarning

Pointers = tuple[int, ...]
_CHURN = 32  # refreshes in a row, or nearly so, after which a source counts as one that is always written
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
        self.calls = 0
        self.refreshes = 0
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
        on_first: told about the derived tensors (None: not kept) when there are some for the first time.
    """

    def __init__(
        self,
        derivations: Sequence[Derivation],
        store: DerivedStore,
        limits: Mapping[torch.device, int],
        interval: int,
        assume_frozen: bool,
        on_first: Callable[[Sequence[DerivedTensor | None]], None] | None = None,
    ) -> None:
        self._on_first = on_first
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
        binding.calls += 1
        if binding.check is not None and (binding.check.pending or binding.calls % self._interval == 0):
            self._sampled_check(binding, binding.check, sources)
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
            self._note_churn(binding, versions)
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
            if self._on_first is not None:
                self._on_first(entries)
                self._on_first = None
            return binding

    def _versions(self, sources: Sequence[Tensor]) -> list[int | None]:
        if self._assume_frozen:
            return list(map(version_of, sources))
        try:
            return list(map(_VERSION, sources))
        except RuntimeError:  # made under inference_mode: no counter
            return []

    def _note_churn(self, binding: Binding, versions: Sequence[int | None]) -> None:
        """Say so where a source is written in nearly every call: then deriving from it only costs."""
        if binding.versions == versions:  # another thread was first
            return
        binding.refreshes += 1
        if binding.refreshes == _CHURN and binding.calls < 2 * _CHURN:
            pairs = zip(self._names, binding.versions, versions, strict=False)
            changed = ", ".join(name for name, old, new in pairs if old != new)
            self._warn(
                f"{changed or 'a source'} was written before each of {_CHURN} calls, so what is derived from it is "
                "computed again in each; rope_fusion.disable=[...] leaves a pattern out"
            )

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
        binding.check = self._new_check(entries, sources) if self._interval else None
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

    def _new_check(self, entries: Sequence[DerivedTensor | None], sources: Sequence[Tensor]) -> SampledCheck:
        expected: dict[int, Tensor] = {}
        for entry, places in zip(entries, self._operands, strict=True):
            if entry is not None:
                expected.update(zip(places, entry.samples, strict=True))
        return SampledCheck(expected, sources)

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

    def _sampled_check(self, binding: Binding, check: SampledCheck, sources: Sequence[Tensor]) -> None:
        if binding.calls % self._interval == 0:
            check.start(sources)
        if not check.differs():
            return
        with self.store.lock:
            for place in check.changed(sources):
                self._warn_stale(self._names[place])
                for index, entry in enumerate(binding.entries):
                    if entry is not None and place in self._operands[index]:
                        entry.refresh([sources[operand] for operand in self._operands[index]])
            binding.check = self._new_check(binding.entries, sources)
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


def _name_of(position: int, derivations: Sequence[Derivation]) -> str:
    return next(
        name
        for derivation in derivations
        for place, name in zip(derivation.sources, derivation.source_names, strict=True)
        if place == position
    )
