"""Engine operators and plain PyTorch in every mixture, order, layout and dtype: each gives exactly one hit per layer."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    ALL,
    BLOCKS,
    COVERING,
    DIM,
    FORMS,
    FP8,
    KV_HEADS,
    LAYOUTS,
    PAGE,
    Q_HEADS,
    SPLITS,
    Case,
    arguments,
    form_settings,
    held_by,
    quantised,
    rotate,
    separate,
    split_columns,
    split_heads,
    store,
    table,
)
from engine_graphs import FUSED, check, compiled, merge_reshapes
from torch import Tensor

from rope_fusion.fusion_pass import FusionPass
from rope_fusion.options import make_options
from rope_fusion.report import GraphReport

LIMIT = torch.finfo(FP8).max


def run(cases: list[Case], form: str) -> None:
    def model(x, positions, table, slots, scale, all_caches):
        return [case.layer(x, positions, table, slots, scale, own) for case, own in zip(cases, all_caches, strict=True)]

    given = arguments()
    args = [given[name] for name in ("x", "positions", "table", "slots", "scale")]
    quant = sum(case.order != "no quantisation" for case in cases)
    hits = {"rope_static_q_fp8_kv": quant, "rope_kv": len(cases) - quant}
    result = check(
        model,
        [*args, [case.caches() for case in cases]],
        {name: count for name, count in hits.items() if count},
        held=[held_by(case.kind) for case in cases for cache in case.caches() if cache.dtype == torch.uint8],
        **form_settings(form),
    )
    assert result.count(FUSED) == len(cases)
    assert not any(name in call for call in result.calls() for name in ("_C.", "_C_cache_ops", "clone"))


@pytest.mark.parametrize("form", FORMS)
def test_one_hit_for_each_layer(form):
    run(COVERING, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("split", SPLITS)
def test_one_hit_for_each_layer_in_full(form, split):
    run([case for case in ALL if case.split is split], form)


# Mixtures


def rope_in_torch(positions: Tensor, q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.view(x.shape[0], -1, DIM).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return turned(q), turned(k)


def quantised_in_torch(q: Tensor, scale: Tensor) -> Tensor:
    return (q.float() / scale).clamp(-LIMIT, LIMIT).to(FP8)


def store_in_torch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    for part, cache in ((k, k_cache), (v, v_cache)):
        cache[slots // PAGE, slots % PAGE] = part.view(part.shape[0], KV_HEADS, DIM)


@pytest.mark.parametrize("form", ["v2", "v1"])
@pytest.mark.parametrize("write", ["engine", "torch"])
@pytest.mark.parametrize("quant", ["engine", "torch", None])
@pytest.mark.parametrize("rope", ["engine", "torch"])
def test_engine_operators_and_plain_torch_meet(rope, quant, write, form):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        if rope == "engine":
            rotate(positions, q, k, table)
        else:
            q, k = rope_in_torch(positions, q, k, table)
        q8 = None
        if quant == "engine":
            q8 = quantised(q.reshape(q.shape[0], -1), scale)
        elif quant == "torch":
            q8 = quantised_in_torch(q, scale)
        if write == "engine":
            store(k, v, k_cache, v_cache, slots, "auto", scale)
        else:
            store_in_torch(k, v, k_cache, v_cache, slots)
        return q * 2 if q8 is None else q8

    given = arguments(slots=torch.tensor([17, 2, 3, 5, 8, 11]))  # PyTorch's writes take no padding
    name = "rope_kv" if quant is None else "rope_static_q_fp8_kv"
    check(layer, list(given.values()), {name: 1}, **form_settings(form))


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_interleaved_pairs_whose_views_were_merged_with_those_of_heads(v2, dynamic):
    def turned(x, cos, sin):
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)

    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        cos, sin = (part.unsqueeze(-2) for part in table[positions].chunk(2, -1))
        q, k = (turned(part.view(part.shape[0], -1, DIM), cos, sin).view(part.shape) for part in (q, k))
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q * 2

    args = list(arguments().values())
    if dynamic:
        for at in (0, 1, 5):
            torch._dynamo.mark_dynamic(args[at], 0)
    check(layer, args, {"rope_kv": 1}, v2=v2, transform=merge_reshapes)


def test_static_query_pattern_outranks_and_each_gate_is_told(monkeypatch):
    from rope_fusion import catalog

    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        q8 = quantised(q, scale)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q8

    def run(*disabled: str) -> Any:
        return compiled(layer, *copy.deepcopy(list(arguments().values())), disable=disabled)

    assert run().hits == {"rope_static_q_fp8_kv": 1}

    shut = "this device has no FP8 operator"
    original = catalog.CatalogEntry.verdict

    def without_fp8(entry: Any, context: Any) -> str | None:
        return shut if "fp8" in entry.name else original(entry, context)

    monkeypatch.setattr(catalog.CatalogEntry, "verdict", without_fp8)
    lesser = run()
    assert lesser.hits == {"rope_kv": 1}
    assert lesser.report.patterns["rope_static_q_fp8_kv"].gate == shut
    assert "_C.static_scaled_fp8_quant" in lesser.after

    monkeypatch.setattr(catalog.CatalogEntry, "verdict", lambda entry, context: shut)
    neither = run()
    assert neither.hits == {}
    assert neither.before == neither.after
    assert {pattern.gate for pattern in neither.report.patterns.values()} == {shut}


# Rotations in detail


@pytest.mark.parametrize("form", FORMS)
def test_key_is_optional(form):
    def layer(x, positions, table, scale):
        q = (x * 2)[:, : Q_HEADS * DIM]
        rotate(positions, q, None, table)
        return quantised(q, scale)

    given = arguments()
    args = [given[name] for name in ("x", "positions", "table", "scale")]
    check(layer, args, {"rope_static_q_fp8": 1}, **form_settings(form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("start", "inverse"), [(0, True), (4, False), (8, True)])
def test_offset_and_inverse_are_kept(form, start, inverse):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        torch.ops._C.rotary_embedding(positions, q, k, DIM, table, True, start, inverse)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q * 2

    given = arguments(table=table(8))
    result = check(layer, list(given.values()), {"rope_kv": 1}, **form_settings(form))
    assert f"inverse={inverse}" in result.after
    assert f"rotary_start={start}" in result.after


@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
def test_dtypes(dtype, rows, indices):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table, is_neox=False)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q * 2

    given = arguments(table=table(8, rows))
    for name in ("x", "k_cache", "v_cache"):
        given[name] = given[name].to(dtype)
    for name in ("positions", "slots"):
        given[name] = given[name].to(indices)
    known = rows in (dtype, torch.float32)
    result = check(layer, list(given.values()), {"rope_kv": 1} if known else {})
    if not known:
        assert any("the fused operator" in sentence for sentence in result.report.near_misses)


def test_positions_of_a_batch():
    def layer(x, positions, table, scale):
        q, k, _ = (x * 2).split([Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        rotate(positions, q, k, table)
        return quantised(q.reshape(-1, q.shape[-1]), scale), k * 2

    given = arguments()
    args = [given["x"].view(2, 3, -1), given["positions"].view(2, 3), given["table"], given["scale"]]
    check(layer, args, {"rope_static_q_fp8": 1})


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_few_tokens(form, tokens):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q * 2

    given = arguments()
    for name in ("x", "positions", "slots"):
        given[name] = given[name][:tokens].clone()
    check(layer, list(given.values()), {"rope_kv": 1}, **form_settings(form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dynamic_number_of_tokens(form, layout):
    def layer(x, positions, table, slots, scale, caches):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        q8 = quantised(q, scale)
        k_cache, v_cache = layout(caches)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q8

    given = arguments()
    args = [given[name] for name in ("x", "positions", "table", "slots", "scale")]
    for at in (0, 1, 3):
        torch._dynamo.mark_dynamic(args[at], 0)
    caches = [torch.zeros(shape, dtype=torch.bfloat16) for shape in LAYOUTS[layout]]
    result = check(layer, [*args, caches], {"rope_static_q_fp8_kv": 1}, **form_settings(form))
    assert "s0" in result.after


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_scales_have_one_element_in_any_shape(form, shape, kind):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        store(k, v, k_cache, v_cache, slots, kind, scale)
        return quantised(q, scale)

    given = arguments(scale=torch.full(shape, 0.05))
    if kind == "fp8":
        given["k_cache"], given["v_cache"] = (torch.zeros(BLOCKS, PAGE, KV_HEADS, DIM).to(torch.uint8) for _ in "kv")
    check(layer, list(given.values()), {"rope_static_q_fp8_kv": 1}, **form_settings(form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_outputs_in_every_order(form, order):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        outputs = (quantised(q, scale), k * 2, k_cache * 2)
        return [outputs[at] for at in order]

    check(layer, list(arguments().values()), {"rope_static_q_fp8_kv": 1}, **form_settings(form))


@pytest.mark.parametrize("form", FORMS)
def test_caches_as_attributes_of_a_module(form):
    class Layer(torch.nn.Module):
        k_cache: Tensor
        v_cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k_cache", arguments()["k_cache"])
            self.register_buffer("v_cache", arguments()["v_cache"])

        def forward(self, x, positions, table, slots, scale):
            q, k, v = split_columns(x)
            rotate(positions, q, k, table)
            store(k, v, self.k_cache, self.v_cache, slots, "auto", scale)
            return q * 2, self.k_cache * 2

    given = arguments()
    args = [given[name] for name in ("x", "positions", "table", "slots", "scale")]
    check(Layer(), args, {"rope_kv": 1}, **form_settings(form))


@pytest.mark.parametrize("v2", [True, False])
def test_caches_as_attributes_of_the_graph(v2):
    """As in graphs that were frozen or exported."""
    captured: list[torch.fx.Graph] = []

    def keep(graph: torch.fx.Graph) -> None:
        captured.append(copy.deepcopy(graph))

    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q * 2

    given = arguments()
    compiled(layer, *given.values(), v2=v2, transform=keep)
    (graph,) = captured
    root = torch.nn.Module()
    names: list[str] = []
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.meta["val"].dim() == 4]:
        names.append(f"cache_{len(names)}")
        root.register_buffer(names[-1], torch.zeros(node.meta["val"].shape, dtype=torch.bfloat16))
        with graph.inserting_after(node):
            attribute = graph.get_attr(names[-1])
        attribute.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    module = torch.fx.GraphModule(root, graph)
    reports: list[GraphReport] = []
    FusionPass(make_options({"kernels": "reference", "strict": True}), reports.append)(module.graph)
    assert reports[0].hits == {"rope_kv": 1}
    module.recompile()
    inputs = [given[name] for name in ("x", "table", "slots", "scale")]  # slots will do as positions
    by_shape = {str(tuple(value.shape)) + str(value.dtype): value for value in inputs}
    placeholders = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    module(*(by_shape[str(tuple(v.shape)) + str(v.dtype)] for v in placeholders))
    assert all(getattr(module, name).any() for name in names)


@pytest.mark.parametrize("form", FORMS)
def test_slots_may_be_fewer_than_tokens(form):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q * 2

    given = arguments(slots=torch.tensor([17, -1, 3]))
    check(layer, list(given.values()), {"rope_kv": 1}, **form_settings(form))


@pytest.mark.parametrize("form", ["v2", "v1"])
def test_cast_of_the_whole_cos_sin_cache_in_each_step_is_gone(form):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table.to(x.dtype))
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q * 2

    given = arguments(table=table(DIM, torch.float32))
    result = check(layer, list(given.values()), {"rope_kv": 1}, **form_settings(form))
    assert "convert_element_type" in result.before
    assert "convert_element_type" not in result.after


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reader", ["whole", "straddling", "values only", "inside q"])
def test_other_readers_of_the_packed_buffer_see_what_they_should(form, reader):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        packed = x * 2
        q, k, v = packed.split([Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        rotate(positions, q, k, table)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        columns = {
            "whole": slice(None),
            "straddling": slice(DIM, -DIM),
            "values only": slice(-KV_HEADS * DIM, None),
            "inside q": slice(DIM, 2 * DIM),
        }[reader]
        return q * 2, packed[:, columns] * 2

    result = check(layer, list(arguments().values()), {"rope_kv": 1}, **form_settings(form))
    assert result.count("_C.rotary_embedding") == 0


# What is left alone


def refused(layer: Callable[..., Any], given: dict[str, Any], sentence: str, **settings: Any) -> None:
    result = check(layer, list(given.values()), {}, **settings)
    assert any(sentence in said for said in result.report.near_misses), result.report.near_misses
    assert result.before == result.after


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group_shape", [None, [-1, -1], [-1]])
def test_group_shape_per_tensor(form, group_shape):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        q8 = torch.empty(q.shape, dtype=FP8)
        torch.ops._C.static_scaled_fp8_quant(q8, q, scale, group_shape)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q8

    check(layer, list(arguments().values()), {"rope_static_q_fp8_kv": 1}, **form_settings(form))


def refused_layer(call: Callable[..., None], **caches: tuple[tuple[int, ...], torch.dtype]) -> list[str]:
    """What is said about a rotation and a `call` that stores; the graph stays as it is."""

    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_heads(x)
        rotate(positions, q, k, table)
        call(k, v, k_cache, v_cache, slots, scale)
        return q * 2

    made = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in caches.items()}
    result = compiled(layer, *copy.deepcopy(list(arguments(**made).values())))
    assert result.hits == {}
    assert result.before == result.after
    return list(result.report.near_misses)


PAGES, BYTES = (BLOCKS, PAGE, KV_HEADS, DIM), torch.uint8
ops = torch.ops


@pytest.mark.parametrize(
    ("call", "caches", "sentence"),
    [
        (
            lambda k, v, kc, vc, slots, s: ops._C_cache_ops.reshape_and_cache_flash(k, v, kc, vc, slots, "auto", s, s),
            {"k_cache": (PAGES, BYTES), "v_cache": (PAGES, BYTES)},
            "does not say what the bytes hold",
        ),
        (
            lambda k, v, kc, vc, slots, s: ops._C_cache_ops.reshape_and_cache_flash(k, v, kc, vc, slots, "nvfp4", s, s),
            {"k_cache": (PAGES, BYTES), "v_cache": (PAGES, BYTES)},
            "kv_cache_dtype='nvfp4' is not known",
        ),
        (
            lambda k, v, kc, vc, slots, s: ops._C_cache_ops.reshape_and_cache_flash(
                k, v, kc, vc, slots, "fp8", s.expand(KV_HEADS), s.expand(KV_HEADS)
            ),
            {"k_cache": (PAGES, BYTES), "v_cache": (PAGES, BYTES)},
            "one float32 is known",
        ),
        (
            lambda k, v, kc, vc, slots, s: ops._C_cache_ops.reshape_and_cache(k, v, kc, vc, slots, "auto", s, s, True),
            {
                "k_cache": ((BLOCKS, KV_HEADS, DIM // 8, PAGE, 8), torch.bfloat16),
                "v_cache": ((BLOCKS, KV_HEADS, DIM, PAGE), torch.bfloat16),
            },
            "it stores V interleaved",
        ),
        (
            lambda k, v, kc, vc, slots, s: ops._C_cache_ops.concat_and_cache_mla(
                v.flatten(1), k[:, :1], kc, slots, "auto", s, True
            ),
            {"k_cache": ((BLOCKS, PAGE, 3 * DIM), torch.bfloat16)},
            "skip_scale is set",
        ),
    ],
    ids=["bytes of what", "unknown kind", "scales by head", "interleaved V", "skip_scale"],
)
def test_writes_that_are_left_alone_and_said(monkeypatch, call, caches, sentence):
    # Only the graph is looked at: what the stand-ins cannot compute need not run.
    monkeypatch.setattr("engine_graphs.make_boxed_func", lambda forward: lambda *args: (args[0],))
    assert any(sentence in miss for miss in refused_layer(call, **caches))


def test_quantisation_in_groups_is_left_alone_and_said():
    def layer(x, scale):
        q8 = torch.empty(x.shape, dtype=FP8)
        torch.ops._C.static_scaled_fp8_quant(q8, x, scale, [1, 64])
        return q8

    given = arguments()
    result = compiled(layer, given["x"], given["scale"])
    assert any("it quantises in groups of [1, 64]" in sentence for sentence in result.report.near_misses)


def test_exact_numerics_leave_engine_rotations_alone_and_say_so():
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q * 2

    refused(layer, arguments(), "which exact numerics would need", numerics="exact")


def test_exact_numerics_multiply_by_the_reciprocal_as_the_engine_does():
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        q, k = rope_in_torch(positions, q, k, table)
        q8 = quantised(q.reshape(q.shape[0], -1), scale)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q8

    args = list(arguments(scale=torch.tensor([0.0371])).values())
    expected = layer(*copy.deepcopy(args))
    result = compiled(layer, *copy.deepcopy(args), numerics="exact")
    assert result.hits == {"rope_static_q_fp8_kv": 1}
    assert torch.equal(result.outputs.view(torch.uint8), expected.view(torch.uint8))


def test_in_place_call_on_a_tensor_that_is_written_elsewhere_is_left_alone_and_said():
    def also_written(graph: torch.fx.Graph) -> None:
        form_settings("raw")["transform"](graph)
        call = next(node for node in graph.nodes if "rotary_embedding" in str(node.target))
        with graph.inserting_after(call):
            add = graph.call_function(torch.ops.aten.add_.Scalar, (call.kwargs["query"], 0))
            add.meta["val"] = call.kwargs["query"].meta["val"]

    def layer(x, positions, table, scale):
        q = x * 2
        rotate(positions, q, None, table)
        return quantised(q, scale)

    given = arguments()
    args = [given["x"][:, : Q_HEADS * DIM].clone(), given["positions"], given["table"], given["scale"]]
    result = compiled(layer, *args, v2=False, transform=also_written)
    assert result.hits == {}
    assert any("works in place on a tensor that" in sentence for sentence in result.report.near_misses)
    assert result.before == result.after


@pytest.mark.parametrize("form", FORMS)
def test_rotation_that_nothing_follows_comes_out_as_it_went_in(form):
    def layer(x, positions, table):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        return q * 2, k * 2, v * 2

    given = arguments()
    result = check(layer, [given["x"], given["positions"], given["table"]], {}, **form_settings(form))
    assert result.before == result.after


@pytest.mark.parametrize("form", FORMS)
def test_layer_that_stays_reads_as_before_beside_one_that_fuses(form):
    def model(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        left = (q * 2, k * 2, v * 2)
        q, k, v = split_columns(x + 1)
        rotate(positions, q, k, table)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return *left, q * 2

    result = check(model, list(arguments().values()), {"rope_kv": 1}, **form_settings(form))
    assert result.count("_C.rotary_embedding") == 1
    untouched = compiled(model, *arguments().values(), max_tokens=0, **form_settings(form))
    assert result.count("clone") <= untouched.count("clone")  # v1 clones what it rotates, with or without us


# Other engines


def test_sglang_rotation():
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        torch.ops.sgl_kernel.rotary_embedding(positions, q, k, DIM, table, True)
        store_in_torch(k, v, k_cache, v_cache, slots)
        return q * 2

    check(layer, list(arguments(slots=torch.tensor([17, 2, 3, 5, 8, 11])).values()), {"rope_kv": 1})


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("engine", ["flashinfer", "sgl_kernel"])
@pytest.mark.parametrize("v2", [True, False])
def test_flashinfer_rotation(engine, in_place, v2):
    def layer(x, positions, table, k_buffer, v_buffer, slots):
        q, k, v = (part.view(part.shape[0], -1, DIM) for part in split_columns(x))
        q_rope, k_rope = (q, k) if in_place else (torch.empty_like(q), torch.empty_like(k))
        if engine == "flashinfer":
            torch.ops.flashinfer.apply_rope_pos_ids_cos_sin_cache(q, k, q_rope, k_rope, table, positions, False)
        else:
            torch.ops.sgl_kernel.apply_rope_pos_ids_cos_sin_cache(
                q, k, q_rope, k_rope, table, positions, False, False, None, None, None, None
            )
        k_buffer[slots], v_buffer[slots] = k_rope, v
        return q_rope * 2

    given = arguments(table=table(DIM, torch.float32), slots=torch.tensor([17, 2, 3, 5, 8, 11]))
    buffers = [torch.zeros(BLOCKS * PAGE, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2)]
    args = [given["x"], given["positions"], given["table"], *buffers, given["slots"]]
    check(layer, args, {"rope_kv": 1}, v2=v2)


def test_sglang_rotation_that_stores_itself_is_left_alone_and_said():
    def layer(x, positions, table, k_buffer, v_buffer, slots):
        q, k, v = (part.view(part.shape[0], -1, DIM) for part in split_columns(x))
        torch.ops.sgl_kernel.apply_rope_pos_ids_cos_sin_cache(
            q, k, q, k, table, positions, False, False, v, k_buffer, v_buffer, slots
        )
        return q * 2

    given = arguments(table=table(DIM, torch.float32), slots=torch.tensor([17, 2, 3, 5, 8, 11]))
    buffers = [torch.zeros(BLOCKS * PAGE, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2)]
    result = check(layer, [given["x"], given["positions"], given["table"], *buffers, given["slots"]], {})
    assert any("it stores k and v itself" in sentence for sentence in result.report.near_misses)


def flat_caches(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.zeros(BLOCKS * PAGE, KV_HEADS * DIM, dtype=dtype) for _ in range(2)]


def sglang_arguments(caches: list[Tensor]) -> list[Any]:
    """Slot 0 is that of padding."""
    given = arguments(table=table(DIM, torch.float32), slots=torch.tensor([17, 0, 3, 5, 0, 11]))
    return [given["x"], given["positions"], given["table"], *caches, given["slots"]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("skipped", [0, 3, -1])
@pytest.mark.parametrize("rotation", ["rotary_embedding_with_key", "apply_rope_inplace", "torch"])
def test_sglang_rotates_and_stores(rotation, skipped, form):
    def layer(x, positions, table, k_cache, v_cache, slots):
        q, k, v = split_columns(x)
        if rotation == "torch":
            q, k = (part.to(x.dtype).flatten(1) for part in rope_in_torch(positions, q, k, table))
        elif rotation == "apply_rope_inplace":
            q, k = (part.view(part.shape[0], -1, DIM) for part in (q, k))
            torch.ops.sglang.apply_rope_inplace(q, k, table, positions, is_neox=True)
        else:
            torch.ops.sglang.rotary_embedding_with_key(positions, q, k, DIM, table)
        options = {} if skipped == 0 else {"reserved_skip_index": skipped}
        torch.ops.sglang.store_cache(k.view(k.shape[0], -1), v, k_cache, v_cache, slots, **options)
        return q * 2

    args = sglang_arguments(flat_caches())
    if skipped == -1:
        args[-1] = torch.tensor([17, 1, 3, 5, 0, 11])  # eager's order of two writes to one slot is nobody's promise
    result = check(layer, args, {"rope_kv": 1}, **form_settings(form))
    assert "k_layout='p (hd)', v_layout='p (hd)'" in result.after


def test_padding_slot_is_found_once_for_all_layers_that_store_to_the_same_slots():
    def layers(x, positions, table, k_cache, v_cache, other_k, other_v, slots):
        for caches in ((k_cache, v_cache), (other_k, other_v)):
            q, k, v = split_columns(x)
            torch.ops.sglang.rotary_embedding_with_key(positions, q, k, DIM, table)
            torch.ops.sglang.store_cache(k, v, *caches, slots)
            x = x + q.sum()
        return x

    args = sglang_arguments([*flat_caches(), *flat_caches()])
    # Sums over 64 elements of each of six rows add to all of x what a rounding does to each of them.
    result = check(layers, args, {"rope_kv": 2}, atol=1.0)
    assert sum("where" in call for call in result.calls()) == 1


def test_sglang_stores_bytes_of_other_dtypes_alone_and_says_so():
    def layer(x, positions, table, k_cache, v_cache, slots):
        q, k, v = split_columns(x)
        torch.ops.sglang.rotary_embedding_with_key(positions, q, k, DIM, table)
        torch.ops.sglang.store_cache(k.to(FP8).view(torch.uint8), v.to(FP8).view(torch.uint8), k_cache, v_cache, slots)
        return q * 2

    result = check(layer, sglang_arguments(flat_caches(torch.uint8)), {})
    assert any("does not say what the bytes hold" in sentence for sentence in result.report.near_misses)


def test_sglang_rotation_of_q_alone():
    def layer(x, positions, table, k_cache, v_cache, slots):
        q, k, v = separate(x)
        torch.ops.sglang.rotary_embedding_without_key(positions, q, DIM, table, False)
        torch.ops.sglang.rotary_embedding_without_key(positions, k, DIM, table, False)
        torch.ops.sglang.store_cache(k, v, k_cache, v_cache, slots)
        return q * 2

    check(layer, sglang_arguments(flat_caches()), {"rope_kv": 1})


@pytest.mark.parametrize("form", FORMS)
def test_flashinfer_rotation_as_vllm_registers_it(form):
    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        torch.ops.vllm.flashinfer_rotary_embedding(positions, q, k, DIM, table, True)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q * 2

    check(layer, list(arguments(table=table(DIM, torch.float32)).values()), {"rope_kv": 1}, **form_settings(form))


def test_no_engine_is_imported():
    program = "import sys, rope_fusion.fusion_pass, rope_fusion.backend, rope_fusion.vllm, rope_fusion.engines; "
    program += "print([name for name in ('vllm', 'sglang', 'sgl_kernel', 'flashinfer') if name in sys.modules])"
    root = str(Path(__file__).parent.parent)
    run = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# Tags


def test_fused_operator_may_be_captured_in_cuda_graphs():
    from rope_fusion.kernels import rope_qkv  # noqa: F401

    tags = torch.ops.rope_fusion.rope_qkv.default.tags
    assert torch.Tag.cudagraph_unsafe not in tags
    assert torch.Tag.data_dependent_output not in tags
    assert torch.Tag.dynamic_output_shape not in tags


def test_graph_is_rolled_back_where_the_order_of_in_place_calls_could_not_be_kept(monkeypatch):
    """The order of nodes is all that says whether a reader of q comes before or after an in-place call."""
    from rope_fusion.canonical import engine_ops, in_place

    order = in_place.OrderOfEffects
    monkeypatch.setattr(order, "broken", lambda self, graph, replaced=(): "x reads what y writes in place")

    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = split_columns(x)
        rotate(positions, q, k, table)
        store(k, v, k_cache, v_cache, slots, "auto", scale)
        return q * 2

    assert engine_ops.OrderOfEffects is order
    result = check(layer, list(arguments().values()), {}, strict=False, **form_settings("raw"))
    assert any("x reads what y writes in place" in sentence for sentence in result.report.failures)
    assert result.before == result.after


def test_moved_reader_of_an_in_place_call_is_noticed():
    from rope_fusion.canonical.in_place import OrderOfEffects

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(torch.ops.aten.view.default, (x, [-1]))
    early = graph.call_function(torch.ops.aten.neg.default, (view,))
    write = graph.call_function(torch.ops.aten.add_.Scalar, (x, 1))
    late = graph.call_function(torch.ops.aten.neg.default, (view,))
    graph.output((early, late))
    order = OrderOfEffects(graph)
    assert order.broken(graph) is None
    late.append(early)
    assert (
        order.broken(graph)
        == f"{early.name} reads what {write.name} writes in place, and their order could not be kept"
    )
