"""The values that derivations have computed: kept while somebody uses them, refreshed in place, shared by storage.

A derived tensor lives as long as some compiled function that reads it, and no longer than the tensors it was made from.
Its storage never changes while it lives: whatever recorded its address (a CUDA graph) sees every refresh.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rope_fusion.derived.samples import Sampling, bits_of

Place = tuple[int, int | torch.SymInt, tuple[int, ...], tuple[int, ...], torch.dtype]
Key = tuple[str, tuple[Place, ...]]


@dataclass(frozen=True)
class Derivation:
    """How one derived tensor is computed, without saying from which tensors.

    Attributes:
        name: for people: which weight or table it comes from.
        structure: text that equal computations share.
        compute: the computation, a function of the sources.
        sources: positions of the sources among the compiled function's arguments.
        source_names: for people, one per source.
        shape, stride, dtype, device: of the result, as the compiled code expects it.
        packed: whether it is kept in oneDNN's own arrangement (`derived.packing`), which has no strides.
    """

    name: str
    structure: str
    compute: Callable[..., Tensor]
    sources: tuple[int, ...]
    source_names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    packed: bool = False

    @property
    def bytes(self) -> int:
        """Memory that the result takes (a packed one somewhat more, where its sizes are no multiples of 16)."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def run(self, sources: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
        """Compute the value, into a storage of its own or into that of `into`."""
        with torch.inference_mode(False), torch.no_grad():
            value = self.compute(*[source.detach() for source in sources])
            if self.packed:
                return value if into is None else into.copy_(value)
            taken = {source.untyped_storage().data_ptr() for source in sources}
            fits = value.stride() == self.stride and value.device == self.device
            if into is None and fits and value.untyped_storage().data_ptr() not in taken and not value.is_inference():
                return value
            if into is None:
                into = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
            return into.copy_(value)


def version_of(tensor: Tensor) -> int | None:
    """The counter of in-place writes; None for a tensor that has none (made under inference_mode)."""
    return None if tensor.is_inference() else tensor._version


def place_of(tensor: Tensor) -> Place:
    """Which elements of which storage a tensor is. Valid while the storage lives."""
    return (
        id(tensor.untyped_storage()),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


class DerivedTensor:
    """One derived value with what is needed to tell whether it is fresh. Only `DerivedStore` makes and changes them."""

    def __init__(self, derivation: Derivation, sources: Sequence[Tensor]) -> None:
        self.derivation = derivation
        self.shared_by_storage = False  # bound to tensors that are not the very objects it was made from
        self.ready: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None
        self.value: Tensor = derivation.run(sources)
        self._remember(sources)

    def refresh(self, sources: Sequence[Tensor]) -> None:
        """Compute the value again, into the same storage."""
        self.derivation.run(sources, self.value)
        self._remember(sources)

    def _remember(self, sources: Sequence[Tensor]) -> None:
        self.tensors = [weakref.ref(source) for source in sources]
        self.storages = [weakref.ref(source.untyped_storage()) for source in sources]
        self.pointers = [source.data_ptr() for source in sources]
        self.versions = [version_of(source) for source in sources]
        self.samples = [Sampling.of(source).take(source).clone() for source in sources]
        if self.value.device.type == "cuda":
            self.stream = torch.cuda.current_stream(self.value.device)
            self.ready = self.stream.record_event()

    def made_from(self, sources: Sequence[Tensor]) -> bool:
        """Whether `sources` are views of the very storages that it was made from (ids alone may have been reused)."""
        return all(ref() is t.untyped_storage() for ref, t in zip(self.storages, sources, strict=True))

    def made_from_tensors(self, sources: Sequence[Tensor]) -> bool:
        """Whether `sources` are the very tensor objects that it was made from, wherever their data lies now."""
        return all(ref() is source for ref, source in zip(self.tensors, sources, strict=True))

    def is_fresh(self, sources: Sequence[Tensor]) -> bool:
        """Whether it was computed from these storages and no counted write has happened since.

        An equal address is not enough: ``.data = ...``, done twice, may bring new data to where the old data was.
        """
        counted = self.versions == [version_of(t) for t in sources] and self.pointers == [t.data_ptr() for t in sources]
        return counted and self.made_from(sources)

    def wait(self) -> bool:
        """Order the current stream after the computation; True once there is nothing left to wait for."""
        if self.ready is None or self.stream is None:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        if self.ready.query():
            self.ready = None
            return True
        current = torch.cuda.current_stream(self.value.device)
        if current != self.stream:
            current.wait_event(self.ready)
        return False


class DerivedStore:
    """Every derived tensor of the process, by what it is computed from. It keeps none of them alive."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epoch = 0  # moves on when a value became stale that nobody but its next reader can compute again
        self._entries: weakref.WeakValueDictionary[Key, DerivedTensor] = weakref.WeakValueDictionary()

    def obtain(self, derivation: Derivation, sources: Sequence[Tensor], limit: int) -> DerivedTensor | None:
        """The fresh value of `derivation` for these tensors, computed now unless somebody already has it.

        None where keeping a new one would exceed `limit` bytes on its device.
        """
        with self.lock:
            entry = self.find(derivation.structure, sources)
            if entry is None:
                if self.live_bytes(derivation.device) + derivation.bytes > limit:
                    return None
                entry = DerivedTensor(derivation, sources)
                self._entries[_key(derivation.structure, sources)] = entry
                return entry
            if not entry.made_from_tensors(sources):
                entry.shared_by_storage = True
            if not entry.is_fresh(sources):
                entry.refresh(sources)
            return entry

    def find(self, structure: str, sources: Sequence[Tensor]) -> DerivedTensor | None:
        """The live derived tensor of that computation on those storages, fresh or not."""
        with self.lock:
            entry = self._entries.get(_key(structure, sources))
            return entry if entry is not None and entry.made_from(sources) else None

    def follow(self, entry: DerivedTensor, sources: Sequence[Tensor], limit: int) -> DerivedTensor | None:
        """The value for the same tensor objects after their data moved (``.data = ...``), in the same storage."""
        with self.lock:
            if entry.shared_by_storage or self.find(entry.derivation.structure, sources) is not None:
                return self.obtain(entry.derivation, sources, limit)
            for key in [key for key, other in self._entries.items() if other is entry]:
                del self._entries[key]
            if not entry.is_fresh(sources):
                entry.refresh(sources)
            self._entries[_key(entry.derivation.structure, sources)] = entry
            return entry

    def recompute(self, storages: Iterable[torch.UntypedStorage]) -> int:
        """Compute again, now, everything made from these storages; how many derived tensors that were."""
        wanted = {id(storage) for storage in storages}
        with self.lock:
            count = 0
            for entry in list(self._entries.values()):
                if not any(id(ref()) in wanted for ref in entry.storages if ref() is not None):
                    continue
                sources = [ref() for ref in entry.tensors]
                if any(source is None for source in sources):
                    entry.versions = [-1 for _ in entry.versions]  # no counter is negative
                    self.epoch += 1
                else:
                    entry.refresh([source for source in sources if source is not None])
                count += 1
            return count

    def live_bytes(self, device: torch.device) -> int:
        """Bytes of the live derived tensors on a device."""
        entries = list(self._entries.values())
        return sum(entry.derivation.bytes for entry in entries if entry.value.device == device)

    def entries(self) -> list[DerivedTensor]:
        """The live derived tensors."""
        return list(self._entries.values())


def equal_valued(entries: Iterable[DerivedTensor]) -> list[list[DerivedTensor]]:
    """Groups that hold the same memory several times over: the same computation on sources whose samples are equal.

    They come from different storages, so they are kept apart; one buffer in the model would serve all. Waits for the
    device, to read the samples back.
    """
    alike: dict[str, list[DerivedTensor]] = {}
    for entry in entries:
        if entry not in alike.setdefault(entry.derivation.structure, []):
            alike[entry.derivation.structure].append(entry)
    groups: dict[tuple[object, ...], list[DerivedTensor]] = {}
    for structure, members in alike.items():
        for entry in members if len(members) > 1 else ():
            content = tuple(bytes(bits_of(part).cpu().numpy()) for part in entry.samples)
            groups.setdefault((structure, content), []).append(entry)
    return [group for group in groups.values() if len(group) > 1]


def _key(structure: str, sources: Sequence[Tensor]) -> Key:
    return structure, tuple(place_of(source) for source in sources)


@functools.cache
def process_store() -> DerivedStore:
    """The store of this process.

    It is one per process because its purpose is to be found by others than the compiled function that filled it: by
    ``rope_fusion.invalidate(model)``, and by further graphs, compilations and models that read the same parameters.
    """
    return DerivedStore()
