"""Caches known only by a layer's name: cache providers, the engine's own fused operator, and the plugin for vLLM."""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import (
    BLOCKS,
    DIM,
    KV_HEADS,
    PAGE,
    Q_HEADS,
    arguments,
    form_settings,
    quantised,
    rotate,
    split_columns,
    table,
)
from engine_graphs import compiled, merge_reshapes
from engine_standins import register, reshape_and_cache_flash, rotary_embedding
from torch import Tensor

import rope_fusion.vllm
from rope_fusion._torch import OPAQUE_TYPE
from rope_fusion.engines import CacheBinding, cache_provider, register_cache_provider, remove_cache_provider
from rope_fusion.vllm import VllmCacheProvider

MADE = register()
LAYER = "model.layers.0.self_attn.attn"
OWN = pytest.mark.skipif("vllm::unified_kv_cache_update" not in MADE, reason="the process has vLLM's own operators")


class Engine:
    """An engine in miniature: caches by layer name, outside every graph."""

    def __init__(self) -> None:
        self.hold("auto")
        self.slots: Tensor | None = torch.tensor([17, 2, 3, -1, 8, 11])
        self.scale = torch.tensor(0.05)
        self.fuses = False
        self.refuses: str | None = None
        self.lays_out_strangely = False
        self.calls: list[str] = []

    def hold(self, kind: str) -> None:
        """Caches of a `kv_cache_dtype`."""
        dtype = torch.bfloat16 if kind == "auto" else torch.uint8
        self.kind = kind
        self.caches = [torch.zeros(BLOCKS, PAGE, KV_HEADS, DIM, dtype=dtype) for _ in range(2)]
        self.k_cache, self.v_cache = self.caches

    # what the engine's operators do

    def store(self, key: Tensor, value: Tensor) -> None:
        if self.slots is not None:
            scales = (self.scale, self.scale)
            reshape_and_cache_flash(key, value, self.k_cache, self.v_cache, self.slots, self.kind, *scales)

    # what a cache provider does

    def binding(self, layer: Any) -> Any:
        assert getattr(layer, "value", layer) == LAYER
        self.calls.append("binding")
        if self.slots is None:
            return None
        if self.lays_out_strangely:
            return self.store
        fp8 = None if self.kind == "auto" else torch.float8_e4m3fn
        scale = None if fp8 is None else self.scale
        return CacheBinding(self.k_cache, self.v_cache, self.slots, "n p h d", "n p h d", fp8, scale, scale)

    def refusal(self, layer: Any) -> str | None:
        assert getattr(layer, "value", layer) == LAYER
        return self.refuses

    def engine_fuses(self, layer: Any) -> bool:
        return self.fuses


ENGINES: list[Engine] = []  # the one that the stand-in operators serve now


def unified_kv_cache_update(key: Tensor, value: Tensor, layer_name: Any) -> Tensor:
    ENGINES[-1].calls.append("unified_kv_cache_update")
    ENGINES[-1].store(key, value)
    return key.new_empty(0)


def fused_rope_and_update(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, table: Tensor, is_neox: bool, layer_name: Any
) -> Tensor:
    ENGINES[-1].calls.append("fused_rope_and_unified_kv_cache_update")
    rotary_embedding(positions, query, key, query.shape[-1], table, is_neox)
    ENGINES[-1].store(key, value)
    return key.new_empty(0)


def attention(query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: Any, *_: Any) -> None:
    """Reads the cache, as attention does, so that the order of write and read shows."""
    cache = ENGINES[-1].caches[0]
    output.copy_(query.float() + cache.view(torch.uint8).float().sum() / 1e4)


VLLM = torch.library.Library("vllm", "FRAGMENT")
OPAQUE = torch.library.Library("vllm_opaque", "DEF")
if "vllm::unified_kv_cache_update" in MADE:
    for name, body in (
        ("unified_kv_cache_update", unified_kv_cache_update),
        ("fused_rope_and_unified_kv_cache_update", fused_rope_and_update),
        ("unified_attention_with_output", attention),
    ):
        VLLM.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake("vllm::unified_kv_cache_update", lambda key, value, layer: key.new_empty(0), lib=VLLM)
    torch.library.register_fake(
        "vllm::fused_rope_and_unified_kv_cache_update", lambda query, key, *_: key.new_empty(0), lib=VLLM
    )


@pytest.fixture
def engine() -> Iterator[Engine]:
    ENGINES.append(Engine())
    register_cache_provider("vllm", ENGINES[-1])
    yield ENGINES[-1]
    ENGINES.pop()
    remove_cache_provider("vllm")


def layer(
    x: Tensor, positions: Tensor, table: Tensor, scale: Tensor, name: str = LAYER, quantise: bool = False
) -> Tensor:
    q, k, v = split_columns(x)
    rotate(positions, q, k, table)
    k, v = k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM)
    query = quantised(q, scale) if quantise else q
    done = torch.ops.vllm.unified_kv_cache_update(k, v, name)
    out = torch.empty_like(q)
    torch.ops.vllm.unified_attention_with_output(query, k, v, out, name, None, None, done)
    return out


def quantising(x: Tensor, positions: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    return layer(x, positions, table, scale, quantise=True)


def given() -> list[Tensor]:
    return [arguments()[name] for name in ("x", "positions", "table", "scale")]


def check_layer(engine: Engine, function: Any, hits: dict[str, int], **settings: Any) -> Any:
    """As `check`, and the engine's caches after the compiled call are those after the eager one."""
    function(*copy.deepcopy(given()))
    expected = [cache.clone() for cache in engine.caches]
    before = copy.deepcopy(given())
    for cache in engine.caches:
        cache.zero_()
    engine.calls.clear()
    result = compiled(function, *before, **settings)
    assert result.hits == hits, result.report
    for cache, wanted in zip(engine.caches, expected, strict=True):
        if cache.dtype == torch.uint8:
            cache, wanted = (tensor.view(torch.float8_e4m3fn).float() for tensor in (cache, wanted))
        torch.testing.assert_close(cache, wanted, rtol=0.15, atol=0.05)  # one step of FP8, or of bf16 near one
    return result


@OWN
@pytest.mark.parametrize("form", ["v2", "v1"])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_provider_resolves_the_layer_when_the_operator_runs(engine, form, kind):
    engine.hold(kind)
    result = check_layer(engine, layer, {"rope_kv_by_layer": 1}, **form_settings(form))
    assert engine.calls == ["binding"]
    assert result.count("rope_qkv_by_layer.default") == 1
    assert result.count("unified_kv_cache_update") == 0
    assert f"{LAYER!r}" in result.after


def vllm_rotation(positions: Tensor, x: Tensor, table: Tensor, is_neox: bool) -> Tensor:
    """As vLLM's rotary layer in PyTorch, which it compiles unless its operator is switched on."""
    cos, sin = (part.unsqueeze(-2) for part in table.index_select(0, positions.flatten()).chunk(2, -1))
    heads = x.view(positions.shape[0], -1, DIM)
    turned, passed = heads[..., : table.shape[1]], heads[..., table.shape[1] :]
    first, second = turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)
    return torch.cat((turned, passed), -1).reshape(x.shape)


@OWN
@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("rotary_dim", [DIM, DIM // 2])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rotation_in_pytorch_and_update_by_layer(engine, is_neox, rotary_dim, cast, quantise):
    def mixed(x, positions, _, scale):
        q, k, v = split_columns(x)
        used = angles.to(x.dtype)
        q, k = (vllm_rotation(positions, part, used, is_neox) for part in (q, k))
        query = (q.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn) if quantise else q
        done = torch.ops.vllm.unified_kv_cache_update(k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM), LAYER)
        return query.to(x.dtype) + done.sum()

    angles = table(rotary_dim, torch.float32 if cast else torch.bfloat16)
    name = "rope_static_q_fp8_kv_by_layer" if quantise else "rope_kv_by_layer"
    check_layer(engine, mixed, {name: 1}, v2=False, transform=merge_reshapes)


@OWN
def test_static_query_quantisation_joins(engine):
    result = check_layer(engine, quantising, {"rope_static_q_fp8_kv_by_layer": 1})
    assert result.count("static_scaled_fp8_quant") == 0


@OWN
def test_call_that_stores_nothing_rotates_all_the_same(engine):
    engine.slots = None
    result = check_layer(engine, layer, {"rope_kv_by_layer": 1})
    assert engine.calls == ["binding"]
    assert not engine.caches[0].any()
    assert result.outputs.any()


@OWN
def test_cache_without_a_layout_string_is_stored_to_by_the_engine(engine):
    engine.lays_out_strangely = True
    check_layer(engine, layer, {"rope_kv_by_layer": 1})


@OWN
def test_engine_operator_is_preferred_where_its_probe_says_so(engine):
    engine.fuses = True
    result = check_layer(engine, layer, {"rope_kv_by_layer": 1})
    assert engine.calls == ["fused_rope_and_unified_kv_cache_update"]
    assert result.count("rope_qkv_by_layer") == 0


@OWN
def test_engine_operator_cannot_quantise_so_ours_does(engine):
    engine.fuses = True
    check_layer(engine, quantising, {"rope_static_q_fp8_kv_by_layer": 1})
    assert engine.calls == ["binding"]


@OWN
def test_engine_fusion_is_left_alone_unless_quantisation_joins(engine):
    def fused(x, positions, table, scale, quantise=False):
        q, k, v = (part.view(-1, heads, DIM) for part, heads in zip(split_columns(x), (Q_HEADS, 2, 2), strict=True))
        done = torch.ops.vllm.fused_rope_and_unified_kv_cache_update(q, k, v, positions, table, True, LAYER)
        out = torch.empty(q.shape[0], Q_HEADS * DIM, dtype=x.dtype)
        query = quantised(q.reshape(q.shape[0], -1), scale) if quantise else q.reshape(q.shape[0], -1)
        torch.ops.vllm.unified_attention_with_output(query, k, v, out, LAYER, None, None, done)
        return out

    alone = check_layer(engine, fused, {})
    assert alone.before == alone.after
    assert alone.report.patterns["rope_kv_by_layer"].refusals == {"the engine's own operator does this already": 1}
    joined = check_layer(engine, functools.partial(fused, quantise=True), {"rope_static_q_fp8_kv_by_layer": 1})
    assert joined.count("fused_rope_and_unified_kv_cache_update") == 0


@OWN
def test_without_a_provider_nothing_changes_and_the_report_says_what_to_do(engine):
    remove_cache_provider("vllm")
    result = check_layer(engine, layer, {})
    assert result.before == result.after
    (sentence,) = [s for s in result.report.near_misses if "no cache provider" in s]
    assert "rope_fusion.engines.register_cache_provider" in sentence


@OWN
def test_refusing_provider_is_quoted(engine):
    engine.refuses = "this layer keeps its cache in a drawer"
    result = check_layer(engine, layer, {})
    assert any("keeps its cache in a drawer" in sentence for sentence in result.report.near_misses)


@OWN
def test_update_that_the_engine_keeps_out_of_cuda_graphs_stays_out(engine):
    with torch._inductor.config.patch(custom_should_partition_ops=["vllm::unified_kv_cache_update"]):
        result = check_layer(engine, layer, {"rope_kv_by_layer": 1})
    assert result.count("rope_qkv_by_layer_eager") == 1
    assert torch.Tag.cudagraph_unsafe in torch.ops.rope_fusion.rope_qkv_by_layer_eager.default.tags
    assert torch.Tag.cudagraph_unsafe not in torch.ops.rope_fusion.rope_qkv_by_layer.default.tags


def test_provider_must_answer_every_question():
    with pytest.raises(TypeError, match=r"needs a method refusal\(layer\), got SimpleNamespace"):
        register_cache_provider("half", SimpleNamespace(binding=print))


def test_graph_whose_provider_is_gone_says_what_to_do():
    from rope_fusion.kernels.rope_by_layer import rope_qkv_by_layer

    x = torch.zeros(1, 1, 1, 2)
    with pytest.raises(RuntimeError, match=r"register_cache_provider\('gone', ...\)"):
        rope_qkv_by_layer(x, x, x, x, x, None, None, "layer", "gone", "{}", need_q=True, need_k=True)


# Opaque layer names


@pytest.mark.skipif(OPAQUE_TYPE is None, reason="this torch has no opaque types")
@pytest.mark.parametrize("hoisted", [True, False])
def test_layer_name_as_an_opaque_object(engine, hoisted):
    """vLLM's LayerName: a value that Dynamo lifts to a graph input (hoisted), or one that is baked into the graph."""
    from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
    from torch._opaque_base import OpaqueBase

    class Name(OpaqueBase):
        def __init__(self, value: str) -> None:
            self.value = value

        def __eq__(self, other: object) -> bool:
            return isinstance(other, type(self)) and self.value == other.value

        def __hash__(self) -> int:
            return hash(self.value)

        def __fx_repr__(self) -> tuple[str, dict[str, type]]:
            return f"Name({self.value!r})", {"Name": type(self)}

    Name.__qualname__ = f"Name{hoisted}"
    setattr(sys.modules[__name__], Name.__qualname__, Name)
    register_opaque_type(Name, typ="value", hoist=hoisted)
    operator = f"update_{hoisted}"
    OPAQUE.define(f"{operator}(Tensor key, Tensor value, {get_opaque_type_name(Name)} layer_name) -> Tensor")
    OPAQUE.impl(operator, unified_kv_cache_update, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vllm_opaque::{operator}", lambda key, value, layer: key.new_empty(0), lib=OPAQUE)
    update = getattr(torch.ops.vllm_opaque, operator)

    from rope_fusion.canonical import engine_ops

    def model(x, positions, table, name):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        done = update(k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM), name)
        return q * 2, done * 2

    register_cache_provider("vllm_opaque", engine)
    known = {**engine_ops._KNOWN, f"vllm_opaque::{operator}": engine_ops._KNOWN["vllm::unified_kv_cache_update"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_ops, "_KNOWN", known)
        result = compiled(model, *given()[:3], Name(LAYER))
    remove_cache_provider("vllm_opaque")
    assert result.hits == {"rope_kv_by_layer": 1}
    assert result.count("rope_qkv_by_opaque_layer") == 1
    assert engine.calls == ["binding"]
    assert engine.caches[0].any()


# vLLM


class FlashAttentionImpl:
    """Named as vLLM's, because the provider knows implementations by name."""

    attn_type = "decoder"

    def fused_rope_kvcache_supported(self) -> bool:
        return False


def vllm_layer(cache: Tensor, kind: str = "auto", **changed: Any) -> SimpleNamespace:
    values = {
        "impl": FlashAttentionImpl(),
        "kv_cache": cache,
        "kv_cache_dtype": kind,
        "num_kv_heads": KV_HEADS,
        "head_size": DIM,
        "_k_scale": torch.tensor(0.5),
        "_v_scale": torch.tensor(0.25),
        "attn_backend": SimpleNamespace(),
    }
    return SimpleNamespace(**{**values, **changed})


@pytest.fixture
def forward_context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in of vLLM's forward context, and of the modules that the provider looks into."""
    context = SimpleNamespace(no_compile_layers={}, slot_mapping={LAYER: torch.tensor([1, 2, -1])}, virtual_engine=0)
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.forward_context": {"get_forward_context": lambda: context},
        "vllm.platforms": {"current_platform": SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return context


def shapes_of(order: str) -> Any:
    """A backend that says how it lays out caches."""
    return SimpleNamespace(
        get_kv_cache_shape=lambda n, p, h, d: tuple({"n": n, "p": p, "h": h, "d": d, "2": 2}[axis] for axis in order)
    )


@pytest.mark.parametrize(
    ("shape", "backend", "layouts"),
    [
        ((BLOCKS, KV_HEADS, PAGE, 2 * DIM), None, (f"n h p d[0:{DIM}]", f"n h p d[{DIM}:{2 * DIM}]")),
        ((2, BLOCKS, PAGE, KV_HEADS, DIM), "2nphd", ("0 n p h d", "1 n p h d")),
        ((BLOCKS, 2, PAGE, KV_HEADS, DIM), "n2phd", ("n 0 p h d", "n 1 p h d")),
    ],
)
def test_layouts_of_vllm_caches(forward_context, shape, backend, layouts):
    changed = {} if backend is None else {"attn_backend": shapes_of(backend)}
    cache = torch.zeros(shape, dtype=torch.bfloat16)
    forward_context.no_compile_layers[LAYER] = vllm_layer(cache, **changed)
    binding = VllmCacheProvider().binding(LAYER)
    assert isinstance(binding, CacheBinding)
    assert (binding.k_layout, binding.v_layout) == layouts
    assert binding.k_cache is cache
    assert binding.v_cache is None
    assert binding.slots is forward_context.slot_mapping[LAYER]
    assert binding.fp8 is None


@pytest.mark.parametrize(("kind", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_caches_of_vllm_are_bytes_with_scales(forward_context, kind, dtype):
    cache = torch.zeros(BLOCKS, KV_HEADS, PAGE, 2 * DIM, dtype=torch.uint8)
    attention = forward_context.no_compile_layers[LAYER] = vllm_layer(cache, kind)
    binding = VllmCacheProvider().binding(SimpleNamespace(value=LAYER))
    assert isinstance(binding, CacheBinding)
    assert binding.fp8 == dtype
    assert binding.k_scale is attention._k_scale
    assert binding.v_scale is attention._v_scale


def test_vllm_layer_without_slots_stores_nothing(forward_context):
    forward_context.no_compile_layers[LAYER] = vllm_layer(torch.zeros(0))
    forward_context.slot_mapping = {}
    assert VllmCacheProvider().binding(LAYER) is None


def test_vllm_cache_of_an_unknown_shape_is_stored_to_by_vllm(forward_context):
    forward_context.no_compile_layers[LAYER] = vllm_layer(torch.zeros(3, 3))
    assert callable(VllmCacheProvider().binding(LAYER))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"impl": SimpleNamespace()}, "how SimpleNamespace lays out its cache is not known"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype='nvfp4' is not known"),
    ],
)
def test_vllm_layers_that_are_refused(forward_context, changed, sentence):
    forward_context.no_compile_layers[LAYER] = vllm_layer(torch.zeros(0), **changed)
    said = VllmCacheProvider().refusal(LAYER)
    assert said is not None
    assert sentence in said


def test_vllm_layer_that_is_known_is_not_refused(forward_context):
    forward_context.no_compile_layers[LAYER] = vllm_layer(torch.zeros(0))
    assert VllmCacheProvider().refusal(LAYER) is None
    assert VllmCacheProvider().engine_fuses(LAYER) is False


# The plugin


class PassManager:
    """vLLM's PostGradPassManager as far as the plugin relies on it."""

    def __init__(self) -> None:
        self.passes: list[Any] = []

    def configure(self, config: Any) -> None:
        self.passes = ["vLLM's own"]

    def add(self, member: Any) -> None:
        self.passes.append(member)

    def uuid(self) -> str:
        return "own"


class InductorPass:
    def uuid(self) -> str:
        return "base"

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        return True


@pytest.fixture
def known_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    manager = type("PostGradPassManager", (PassManager,), {"configure": PassManager.configure, "__module__": "vllm"})
    config = type("VllmConfig", (), {"compute_hash": lambda self: "0123456789"})
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"VllmConfig": config},
        "vllm.compilation": {},
        "vllm.compilation.passes": {},
        "vllm.compilation.passes.pass_manager": {"PostGradPassManager": manager},
        "vllm.compilation.passes.inductor_pass": {"InductorPass": InductorPass},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("ROPE_FUSION_VLLM", "1")
    monkeypatch.setenv("ROPE_FUSION_VLLM_OPTIONS", '{"kernels": "reference", "max_tokens": 256}')
    yield SimpleNamespace(manager=manager, config=config)
    remove_cache_provider("vllm")


def test_plugin_adds_the_pass_after_vllms_own_and_changes_its_cache_key(known_vllm):
    rope_fusion.vllm.register()
    rope_fusion.vllm.register()  # vLLM may load a plugin more than once
    manager = known_vllm.manager()
    manager.configure(None)
    own, ours = manager.passes
    assert own == "vLLM's own"
    assert isinstance(ours, InductorPass)
    assert ours.uuid()
    assert known_vllm.config().compute_hash() != "0123456789"
    assert isinstance(cache_provider("vllm"), VllmCacheProvider)


def test_plugin_runs_the_pass_on_vllms_graphs(known_vllm):
    rope_fusion.vllm.register()
    manager = known_vllm.manager()
    manager.configure(None)
    ours = manager.passes[-1]
    engine = Engine()
    ENGINES.append(engine)
    register_cache_provider("vllm", engine)
    try:
        fused: list[str] = []

        def run(graph: torch.fx.Graph) -> None:
            ours(graph)
            fused.extend(str(node.target) for node in graph.nodes)

        compiled(layer, *given(), transform=run, v2=False)
    finally:
        ENGINES.pop()
    assert "rope_fusion.rope_qkv_by_layer.default" in fused


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_plugin_is_off_unless_switched_on(known_vllm, monkeypatch, value):
    monkeypatch.setenv("ROPE_FUSION_VLLM", value)
    rope_fusion.vllm.register()
    manager = known_vllm.manager()
    manager.configure(None)
    assert manager.passes == ["vLLM's own"]


def test_plugin_leaves_an_unknown_vllm_alone_and_raises_nothing(known_vllm, monkeypatch, caplog):
    del known_vllm.config.compute_hash
    with caplog.at_level(logging.INFO, logger="rope_fusion.vllm"):
        rope_fusion.vllm.register()
    manager = known_vllm.manager()
    manager.configure(None)
    assert manager.passes == ["vLLM's own"]
    assert "rope_fusion leaves vLLM as it is" in caplog.text


def test_plugin_without_vllm_raises_nothing(monkeypatch, caplog):
    monkeypatch.setenv("ROPE_FUSION_VLLM", "1")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.INFO, logger="rope_fusion.vllm"):
        rope_fusion.vllm.register()
    assert "its pass manager is not where it is known to be" in caplog.text


def test_plugin_is_an_entry_point_of_vllm():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"rope_fusion": "rope_fusion.vllm:register"}
