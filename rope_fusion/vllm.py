"""rope_fusion inside vLLM: a plugin that adds the pass, and the cache provider that finds a layer's KV cache.

vLLM loads every installed plugin of the group ``vllm.general_plugins`` in each of its processes. This one does nothing unless the
environment variable ``ROPE_FUSION_VLLM`` is ``1``; then it adds our pass after vLLM's own fusions and before the step that makes the
graph in-place again. ``ROPE_FUSION_VLLM_OPTIONS`` may hold options of rope_fusion as JSON, such as ``{"max_tokens": 256}``.

A version of vLLM whose pass manager or forward context is not the known one is left as it is.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rope_fusion.engines import CacheBinding, register_cache_provider

SWITCH = "ROPE_FUSION_VLLM"
OPTIONS = "ROPE_FUSION_VLLM_OPTIONS"

logger = logging.getLogger(__name__)

# Where vLLM keeps its pass manager and the base class of its passes, newest first.
PASS_MANAGERS = (
    ("vllm.compilation.passes.pass_manager", "vllm.compilation.passes.inductor_pass"),
    ("vllm.compilation.pass_manager", "vllm.compilation.inductor_pass"),
)

# Attention implementations that write K and V to a paged cache as `reshape_and_cache_flash` does.
IMPLEMENTATIONS = ("FlashAttentionImpl", "FlashInferImpl", "FlexAttentionImpl", "TritonAttentionImpl")
FP8_KINDS = ("fp8", "fp8_e4m3", "fp8_e5m2")
PLAIN_KINDS = ("auto", "bfloat16", "float16", "float32", "half", "float")


def register() -> None:
    """The entry point: turn the plugin on where the environment asks for it; never raises."""
    if os.environ.get(SWITCH, "0").strip() not in ("1", "true", "on"):
        return
    try:
        install(json.loads(os.environ.get(OPTIONS) or "{}"))
    except Exception as error:
        logger.info("rope_fusion leaves vLLM as it is: %s: %s", type(error).__name__, error)


def install(options: Mapping[str, Any] | None = None) -> None:
    """Add the pass to every pass manager that vLLM configures from now on, and the cache provider.

    Args:
        options: options of rope_fusion, without prefix.

    Raises:
        RuntimeError: this vLLM is not one that we know.
    """
    from rope_fusion.fusion_pass import FusionPass  # imports Inductor, hence not at the top
    from rope_fusion.options import make_options
    from rope_fusion.report import GraphReport, publish

    manager, base = _interface()
    config = importlib.import_module("vllm.config").VllmConfig
    if not callable(getattr(config, "compute_hash", None)):
        raise RuntimeError("its VllmConfig has no compute_hash, so stale compiled graphs could be taken from its cache")

    def log_and_publish(report: GraphReport) -> None:
        publish(report)
        logger.info("rope_fusion in vLLM: %s", report.hits or "nothing to fuse")

    fusion = FusionPass(make_options(options or {}), log_and_publish)

    class RopeFusionPass(base):  # type: ignore[misc, valid-type]
        """Our pass as one of vLLM's."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            fusion(graph)

        def uuid(self) -> Any:
            return fusion.uuid()

    def configure(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.add(RopeFusionPass())

    def compute_hash(original: Callable[..., str], self: Any, *args: Any, **kwargs: Any) -> str:
        text = f"{original(self, *args, **kwargs)} {fusion.uuid()}"
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    _wrap(manager, "configure", configure)
    _wrap(config, "compute_hash", compute_hash)
    register_cache_provider("vllm", VllmCacheProvider())


def _interface() -> tuple[type, type]:
    """vLLM's PostGradPassManager and InductorPass, once they are seen to be what we build on."""
    for manager_module, pass_module in PASS_MANAGERS:
        try:
            manager = importlib.import_module(manager_module).PostGradPassManager
            base = importlib.import_module(pass_module).InductorPass
        except (ImportError, AttributeError):
            continue
        for owner, methods in ((manager, ("configure", "add", "uuid")), (base, ("uuid", "is_applicable_for_range"))):
            missing = [method for method in methods if not callable(getattr(owner, method, None))]
            if missing:
                raise RuntimeError(f"its {owner.__name__} has no {missing[0]}")
        return manager, base
    raise RuntimeError("its pass manager is not where it is known to be")


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around(original, self, ...)`; a method that we wrapped before is wrapped anew, not twice."""
    present = getattr(owner, name)
    original = getattr(present, "rope_fusion_original", present)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    wrapped.rope_fusion_original = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


class VllmCacheProvider:
    """Finds a layer's KV cache and slots in vLLM's forward context."""

    def binding(self, layer: Any) -> CacheBinding | Callable[[Tensor, Tensor], None] | None:
        name = _name(layer)
        context = _forward_context()
        attention = context.no_compile_layers[name]
        slots = context.slot_mapping.get(name)
        if slots is None:
            return None
        cache = attention.kv_cache
        if not isinstance(cache, Tensor):  # one for each stage of a pipeline
            cache = cache[context.virtual_engine]
        layouts = _layouts(attention, cache)
        if layouts is None:
            return _store_through_engine(layer)
        kind = attention.kv_cache_dtype
        fp8 = _fp8_dtype(kind) if kind in FP8_KINDS else None
        return CacheBinding(
            k_cache=cache,
            v_cache=None,
            slots=slots,
            k_layout=layouts[0],
            v_layout=layouts[1],
            fp8=fp8,
            k_scale=attention._k_scale if fp8 else None,
            v_scale=attention._v_scale if fp8 else None,
        )

    def refusal(self, layer: Any) -> str | None:
        layers = _layers()
        attention = layers.get(_name(layer))
        if attention is None:
            return f"vLLM has no attention layer {_name(layer)!r}"
        implementation = attention.impl
        kind = type(implementation).__name__
        if kind not in IMPLEMENTATIONS:
            return f"how {kind} lays out its cache is not known; {', '.join(IMPLEMENTATIONS)} are"
        dtype = attention.kv_cache_dtype
        if dtype not in (*FP8_KINDS, *PLAIN_KINDS):
            return f"a cache of kv_cache_dtype={dtype!r} is not known"
        if getattr(implementation, "_is_per_token_head_quant", False):
            return "its cache holds one scale for each token and head"
        if "encoder" in str(getattr(implementation, "attn_type", "")).lower().replace("decoder", ""):
            return "an encoder's attention stores nothing"
        return None

    def engine_fuses(self, layer: Any) -> bool:
        """A graph may be used for several layers, so all of them must be served."""
        implementations = [attention.impl for attention in _layers().values() if hasattr(attention, "impl")]
        supported = [getattr(i, "fused_rope_kvcache_supported", None) for i in implementations]
        return bool(supported) and all(probe is not None and bool(probe()) for probe in supported)


def _name(layer: Any) -> str:
    return layer if isinstance(layer, str) else str(layer.value)


def _forward_context() -> Any:
    return importlib.import_module("vllm.forward_context").get_forward_context()


def _layers() -> Mapping[str, Any]:
    """Attention layers by name; at compile time the forward context is that of vLLM's profiling run."""
    try:
        return _forward_context().no_compile_layers
    except Exception:
        config = importlib.import_module("vllm.config").get_current_vllm_config()
        return config.compilation_config.static_forward_context


def _fp8_dtype(kind: str) -> torch.dtype:
    if kind == "fp8_e5m2":
        return torch.float8_e5m2
    return importlib.import_module("vllm.platforms").current_platform.fp8_dtype()


def _layouts(attention: Any, cache: Tensor) -> tuple[str, str] | None:
    """Layout strings of K and V in a layer's cache tensor; None where its shape is not one that vLLM gives caches."""
    heads, dim = attention.num_kv_heads, attention.head_size
    v_dim = getattr(attention, "head_size_v", dim)
    if cache.dim() == 4 and cache.shape[1] == heads and cache.shape[3] == dim + v_dim:
        return f"n h p d[0:{dim}]", f"n h p d[{dim}:{dim + v_dim}]"
    if cache.dim() == 5 and dim == v_dim and tuple(cache.shape[3:]) == (heads, dim):
        return _parted(attention)
    return None


def _parted(attention: Any) -> tuple[str, str] | None:
    """Older caches, with a dim of two for K and V: the backend says which, asked for sizes that cannot be mistaken."""
    shape_of = getattr(getattr(attention, "attn_backend", None), "get_kv_cache_shape", None)
    if shape_of is None:
        return None
    names = {1009: "n", 4096: "p", 1013: "h", 1024: "d"}
    shape = tuple(shape_of(*names))
    if sorted(shape) != sorted((2, *names)):
        return None
    k, v = (" ".join(str(part) if size == 2 else names[size] for size in shape) for part in (0, 1))
    return k, v


def _store_through_engine(layer: Any) -> Callable[[Tensor, Tensor], None]:
    """For a cache whose layout is not known: vLLM's own operator stores the rotated k and v."""

    def store(k: Tensor, v: Tensor) -> None:
        torch.ops.vllm.unified_kv_cache_update(k, v, layer)

    return store
