"""Caches that a compiled graph knows only by the name of a layer, and who resolves such names.

An engine that keeps its KV caches in a context of its own (vLLM: the forward context) gives operators the name of a layer instead of
tensors. A *cache provider* turns the name into tensors when the fused operator runs:

    rope_fusion.engines.register_cache_provider("vllm", provider)

The name is that of the namespace of the engine's operators. `rope_fusion.vllm` registers the provider for vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheBinding:
    """Where one layer stores K and V in one call.

    Attributes:
        k_cache: the whole cache tensor of K, or of both where ``v_cache`` is None.
        v_cache: the whole cache tensor of V, or None.
        slots: [tokens or fewer] int32 or int64; negative slots store nothing.
        k_layout: layout string of K in ``k_cache`` (docs/architecture.md).
        v_layout: layout string of V in ``v_cache``, or in ``k_cache``.
        fp8: what an FP8 cache holds (it may be typed uint8); None stores by a plain cast.
        k_scale: one float32 element; the stored value is ``k / k_scale``. Likewise ``v_scale``.
    """

    k_cache: Tensor
    v_cache: Tensor | None
    slots: Tensor
    k_layout: str
    v_layout: str
    fp8: torch.dtype | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


Store = Callable[[Tensor, Tensor], None]


class CacheProvider(Protocol):
    """What an engine must answer. ``layer`` is what its operators are given: a str, or an opaque object that holds one."""

    def binding(self, layer: Any) -> CacheBinding | Store | None:
        """At run time: the layer's caches and slots; None when this call stores nothing (a profiling run).

        Where a cache is laid out in a way that no layout string describes, a function that stores the rotated k and v,
        [tokens, heads, dim] each, itself.
        """

    def refusal(self, layer: Any) -> str | None:
        """At compile time: why `binding` will not do for this layer, or None."""

    def engine_fuses(self, layer: Any) -> bool:
        """At compile time: whether the engine's own fused operator serves this layer; it is preferred then."""


class _Registry:
    """Providers by name. A compiled graph finds its provider by name alone, so there is one registry in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._providers: dict[str, CacheProvider] = {}

    def register(self, name: str, provider: CacheProvider) -> None:
        for method in ("binding", "refusal", "engine_fuses"):
            if not callable(getattr(provider, method, None)):
                raise TypeError(f"a cache provider needs a method {method}(layer), got {type(provider).__name__}")
        with self._lock:
            self._providers[name] = provider

    def remove(self, name: str) -> None:
        with self._lock:
            self._providers.pop(name, None)

    def find(self, name: str) -> CacheProvider | None:
        return self._providers.get(name)

    def names(self) -> list[str]:
        return sorted(self._providers)


_REGISTRY = _Registry()


def register_cache_provider(name: str, provider: CacheProvider) -> None:
    """Let `provider` resolve the layer names in operators of the namespace `name`; it replaces an earlier one."""
    _REGISTRY.register(name, provider)


def remove_cache_provider(name: str) -> None:
    """Forget the provider of `name`; graphs that were fused with it fail when they run."""
    _REGISTRY.remove(name)


def cache_provider(name: str) -> CacheProvider | None:
    """The provider registered for `name`, or None."""
    return _REGISTRY.find(name)


def cache_providers() -> list[str]:
    """Names that have a provider."""
    return _REGISTRY.names()


def bind(name: str, layer: Any) -> CacheBinding | Store | None:
    """What the provider `name` says about `layer` now."""
    provider = _REGISTRY.find(name)
    if provider is None:
        raise RuntimeError(
            f"no cache provider is registered for {name!r}, but a graph was fused with one; "
            f"call rope_fusion.engines.register_cache_provider({name!r}, ...) before running it"
        )
    return provider.binding(layer)
