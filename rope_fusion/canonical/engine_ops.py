"""Operators of inference engines (vLLM, SGLang, FlashInfer) as the records that the recognisers of plain PyTorch return.

The operators are known by name; nothing is imported, and one that is not registered in this process occurs in no graph. Each call is
read by `functional`, whatever its form. Where a record needs a value that the graph does not hold as a node of its own (a head view
of a packed q, the gathered rows of a joined cos/sin table) a node is added for it; `EngineFindings.finish` tidies up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from rope_fusion._torch import OPAQUE_TYPE, stable_topological_sort
from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.engine_caches import EngineCaches, Refused
from rope_fusion.canonical.functional import CallReader, InPlaceCall, functional_target
from rope_fusion.canonical.graph_views import live_nodes, size_arguments
from rope_fusion.canonical.in_place import Functionalised, OrderOfEffects, functionalise
from rope_fusion.canonical.layer_writes import known_layer
from rope_fusion.canonical.layout import equal, is_one
from rope_fusion.canonical.records import CacheWrite, CosSin, Fp8Quantisation, LayerWrite, Rotation
from rope_fusion.engines import cache_provider
from rope_fusion.kernels.rope_by_layer import takes_opaque_layer

aten = torch.ops.aten

FP8_KINDS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
INDEX_DTYPES = (torch.int32, torch.int64)
PER_TENSOR = ([-1, -1], [-1])


@dataclass
class EngineFindings:
    """What the engine operators of one graph are, and what was added to the graph to say so."""

    rotations: list[Rotation] = field(default_factory=list)
    quantisations: list[Fp8Quantisation] = field(default_factory=list)
    writes: list[CacheWrite] = field(default_factory=list)
    layer_writes: list[LayerWrite] = field(default_factory=list)
    near_misses: list[str] = field(default_factory=list)
    written: set[Node] = field(default_factory=set)  # nodes that only carry what the recorded writes store
    _outputs: dict[Node, list[Node]] = field(default_factory=dict)  # call -> values that take over what it made
    _reader: CallReader | None = None
    _in_place: Functionalised = field(default_factory=Functionalised)
    _order: OrderOfEffects | None = None

    def finish(self, graph: Graph) -> None:
        """After a fusion: where a call stays, values are read as they were before."""

        def stays(call: Node) -> bool:
            return call not in self._outputs or any(out.users for out in self._outputs[call])

        if self._reader is not None:
            self._reader.read_through.undo(graph, stays)
        self._in_place.give_back(graph, stays)

    def erase_replaced(self, graph: Graph) -> None:
        """Erase the in-place calls that fused ones replace. Not to be taken back, and hence done last.

        Raises:
            RuntimeError: a node has moved to the other side of an in-place call whose tensor it reads.
        """
        if self._order is not None and (sentence := self._order.broken(graph, self._in_place.functional)) is not None:
            raise RuntimeError(sentence)
        for node in self._in_place.functional:
            graph.erase_node(node)


def find_engine_ops(graph: Graph, fake_mode: Any, exact: bool) -> EngineFindings:
    """Read every engine operator of `graph`. Adds nodes, and changes which equal value some nodes read.

    With `exact` numerics, operators whose rounding is not known from outside are left alone.
    """
    targets = {target for node in graph.nodes if (target := _engine_target(node)) is not None}
    if not targets:
        return EngineFindings()
    return _Finder(graph, fake_mode, exact, targets).run()


def _engine_target(node: Node) -> torch._ops.OpOverload | None:
    target = functional_target(node)
    if target is None and node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        target = node.target
    return target if target is not None and target._schema.name in _KNOWN else None


class _Finder:
    def __init__(self, graph: Graph, fake_mode: Any, exact: bool, targets: set[torch._ops.OpOverload]) -> None:
        self._graph = graph
        self._emit = Emitter(graph, fake_mode)
        self._fake_mode = fake_mode
        self._exact = exact
        self._targets = targets
        self._found = EngineFindings()
        self._live: set[Node] = set()
        self._slots_without: dict[tuple[Node, int], Node] = {}

    def run(self) -> EngineFindings:
        mutable = {target for target in self._targets if target._schema.is_mutable}
        self._found._order = OrderOfEffects(self._graph)
        raw = functionalise(self._graph, self._emit, mutable)
        self._found._in_place = raw
        self._found.near_misses += raw.refusals
        reader = self._found._reader = CallReader(self._graph, self._emit, self._fake_mode, mutable)
        self._caches = EngineCaches(reader, self._emit, self._found.written)
        calls = reader.read()
        read_by_value = [call for call in calls if call.target._schema.name not in _CACHE_WRITERS]
        reader.resolve_reads(read_by_value)
        self._live = live_nodes(self._graph)
        for call in calls:
            self._try(call.node, _KNOWN[call.target._schema.name], call)
        for node in list(self._graph.nodes):
            if node.op == "call_function" and node.target in self._targets and node.target not in mutable:
                self._try(node, _Finder.layer_write, node)
        stable_topological_sort(self._graph)
        return self._found

    def _try(self, node: Node, read: Callable[[_Finder, Any], None], call: Any) -> None:
        try:
            read(self, call)
        except Refused as refusal:
            self._found.near_misses.append(f"{node.name} was left alone: {refusal}")

    # rotations

    def rotary_embedding(self, call: InPlaceCall) -> None:
        arguments = call.arguments
        self._rotations(
            call,
            {name: name for name in ("query", "key") if name in call.after},
            positions="positions",
            interleaved=not arguments.get("is_neox", True),
            head_size=arguments["head_size"],
            start=arguments.get("rope_dim_offset", 0),
            inverse=arguments.get("inverse", False),
        )

    def apply_rope(self, call: InPlaceCall) -> None:
        """FlashInfer's and SGLang's rotation of q and k into q_rope and k_rope."""
        arguments = call.arguments
        if arguments.get("k_buffer") is not None:
            raise Refused("it stores k and v itself, so that nothing is left to fuse with it")
        self._rotations(call, {"q": "q_rope", "k": "k_rope"}, positions="pos_ids", interleaved=arguments["interleave"])

    def apply_rope_inplace(self, call: InPlaceCall) -> None:
        """SGLang's rotation of q and k, [tokens, heads, dim] each."""
        arguments = call.arguments
        width, rope_dim = arguments["cos_sin_cache"].meta["val"].shape[-1], arguments.get("rope_dim", 0)
        if rope_dim not in (0, width):
            raise Refused(f"rope_dim={rope_dim} is not the width of its cos/sin cache, {width}")
        self._rotations(call, {"q": "q", "k": "k"}, positions="positions", interleaved=not arguments["is_neox"])

    def fused_rope_update(self, call: InPlaceCall) -> None:
        """vLLM's own fusion: a rotation of q and k and a write of k and v to the layer's cache."""
        arguments = call.arguments
        self._rotations(
            call, {"query": "query", "key": "key"}, positions="positions", interleaved=not arguments["is_neox"]
        )
        done = call.results[0]
        if done is not None:
            key = self._found.rotations[-1].out
            self._layer_write(done, call.target, key, arguments["value"], arguments["layer_name"], True)
            self._output(call.node, done)

    def _rotations(
        self,
        call: InPlaceCall,
        results: dict[str, str],
        *,
        positions: str,
        interleaved: bool,
        head_size: int | None = None,
        start: int = 0,
        inverse: bool = False,
    ) -> None:
        """Each argument named, rotated into the one beside it; its last dim is one head where no `head_size` is given."""
        for name, into in results.items():
            x = call.arguments[name]
            self._rotation(
                call,
                x=x,
                after=call.after[into],
                positions=call.arguments[positions],
                table=call.arguments["cos_sin_cache"],
                interleaved=interleaved,
                head_size=x.meta["val"].shape[-1] if head_size is None else head_size,
                start=start,
                inverse=inverse,
            )

    def _rotation(
        self,
        call: InPlaceCall,
        *,
        x: Node,
        after: Node,
        positions: Node,
        table: Node,
        interleaved: bool,
        head_size: int,
        start: int,
        inverse: bool,
    ) -> None:
        value, rows, places = x.meta["val"], table.meta["val"], positions.meta["val"]
        width = rows.shape[-1]
        if self._exact:
            raise Refused("how an engine's rotation rounds cannot be seen, which exact numerics would need")
        if rows.dim() != 2 or not isinstance(width, int) or width % 2:
            symbolic = "" if isinstance(width, int) else "; mark only tokens as dynamic"
            raise Refused(
                f"its cos/sin cache has shape {tuple(rows.shape)}; [positions, even rotary_dim] is known{symbolic}"
            )
        if not isinstance(head_size, int) or start < 0 or start + width > head_size:
            raise Refused(f"{width} rotated elements from {start} on do not fit heads of {head_size}")
        if places.dtype not in INDEX_DTYPES or places.dim() not in (1, 2):
            raise Refused(f"its positions are {places.dtype} of {places.dim()} dims; int32 or int64 of 1 or 2 is known")
        lead = places.dim()
        if value.dim() not in (lead + 1, lead + 2) or any(map(_differ, value.shape[:lead], places.shape)):
            raise Refused(f"positions {tuple(places.shape)} do not say where the rows of {tuple(value.shape)} stand")
        last = value.shape[-1]
        if not isinstance(last, int) or (last != head_size if value.dim() == lead + 2 else last % head_size):
            raise Refused(f"its last dim {last} does not hold whole heads of {head_size}")
        cos_sin = self._emit.call(aten.index.Tensor, table, [positions])
        cos_sin = self._emit.call(aten.unsqueeze.default, cos_sin, lead)
        heads = self._heads(x, head_size, lead)
        out = self._heads(after, head_size, lead)
        if out is after:
            out = self._emit.call(aten.alias.default, after)
        back = self._reshape(out, after.meta["val"].shape)
        assert self._found._reader is not None
        # What is dead by now keeps the program's own value, which a self-check may want to compare with.
        self._found._reader.read_through.substitute(
            call.node, after, back, lambda user: user not in (out, back) and user in self._live
        )
        same_dtype = rows.dtype == value.dtype
        self._found.rotations.append(
            Rotation(
                out=out,
                x=heads,
                x_offset=0,
                width=head_size,
                start=start,
                rotary_dim=width,
                cos=CosSin(cos_sin, 0),
                sin=CosSin(cos_sin, width // 2),
                full_width=False,
                interleaved=interleaved,
                inverse=inverse,
                halves_out=False,
                math_dtype=value.dtype if same_dtype else torch.float32,
                nodes=frozenset({call.node, out}),
            )
        )
        self._output(call.node, out)

    def _heads(self, x: Node, head_size: int, lead: int) -> Node:
        """x as [..., heads, head_size]."""
        shape = x.meta["val"].shape
        if len(shape) == lead + 2:
            return x
        return self._reshape(x, [*shape[:-1], shape[-1] // head_size, head_size])

    def _reshape(self, x: Node, shape: Sequence[Any]) -> Node:
        sizes = size_arguments(self._emit, shape, x)
        if sizes is None:
            raise Refused(f"the sizes {tuple(shape)} cannot be expressed in the graph")
        return self._emit.call(aten.reshape.default, x, sizes)

    def _output(self, call: Node, out: Node) -> None:
        self._found._outputs.setdefault(call, []).append(out)

    # quantisation

    def static_quantisation(self, call: InPlaceCall) -> None:
        arguments = call.arguments
        x, scale, out = arguments["input"], arguments["scale"], call.after["result"]
        value, result = x.meta["val"], out.meta["val"]
        group = arguments.get("group_shape")
        if group is not None and list(group) not in PER_TENSOR:
            raise Refused(f"it quantises in groups of {list(group)}, not per tensor")
        if not all(is_one(size) for size in scale.meta["val"].shape):
            raise Refused(f"its scale has shape {tuple(scale.meta['val'].shape)}, one element is known")
        if result.dtype not in FP8_DTYPES:
            raise Refused(f"it quantises to {result.dtype}")
        if out.target is not operator.getitem:
            raise Refused("its result is a part of a larger buffer")
        if result.dim() != value.dim() or not all(map(equal, result.shape, value.shape)):
            raise Refused(f"its result {tuple(result.shape)} and input {tuple(value.shape)} differ in shape")
        if self._exact:  # the kernel multiplies by the rounded reciprocal
            scale = self._emit.call(aten.reciprocal.default, scale)
        self._found.quantisations.append(
            Fp8Quantisation(
                out=out,
                x=x,
                scale=scale,
                scale_multiplies=self._exact,
                dtype=result.dtype,
                scale_dtype=torch.float32,
                nodes=frozenset({call.node, out}),
            )
        )
        self._output(call.node, out)

    # cache writes

    def reshape_and_cache_flash(self, call: InPlaceCall) -> None:
        arguments = call.arguments
        self._pair_write(
            call,
            stored={"key_cache": (arguments["key"], "n p h d"), "value_cache": (arguments["value"], "n p h d")},
            scales={"key_cache": arguments["k_scale"], "value_cache": arguments["v_scale"]},
            slots=arguments["slot_mapping"],
            kind=arguments["kv_cache_dtype"],
        )

    def reshape_and_cache(self, call: InPlaceCall) -> None:
        """K in pieces of x elements, [blocks, heads, dim / x, places, x], and V as [blocks, heads, dim, places]."""
        arguments = call.arguments
        if arguments.get("interleaved_v"):
            raise Refused("it stores V interleaved")
        self._pair_write(
            call,
            stored={"key_cache": (arguments["key"], "n h d/ p /d"), "value_cache": (arguments["value"], "n h d p")},
            scales={"key_cache": arguments["k_scale"], "value_cache": arguments["v_scale"]},
            slots=arguments["slot_mapping"],
            kind=arguments["kv_cache_dtype"],
        )

    def store_cache(self, call: InPlaceCall) -> None:
        """SGLang's: all heads of a token are a row, and what goes to one slot, that of padding, is not stored."""
        arguments = call.arguments
        for name in ("k", "v"):
            stored, cache = arguments[name], call.tensor(f"{name}_cache")
            if cache is None or stored.meta["val"].dtype != cache.meta["val"].dtype:
                raise Refused(f"what it stores has another dtype than its {name}_cache, which it takes for bytes")
        self._pair_write(
            call,
            stored={"k_cache": (arguments["k"], "p (hd)"), "v_cache": (arguments["v"], "p (hd)")},
            scales={"k_cache": None, "v_cache": None},
            slots=self._without(arguments["indices"], arguments.get("reserved_skip_index", 0)),
            kind="auto",
        )

    def _without(self, slots: Node, skipped: int) -> Node:
        """Slots with -1, which stores nothing, in the place of one of them; once for all writes to these slots."""
        if skipped < 0:
            return slots
        if (slots, skipped) not in self._slots_without:
            value = slots.meta["val"]
            minus = self._emit.call(aten.full.default, [], -1, dtype=value.dtype, device=value.device, pin_memory=False)
            is_skipped = self._emit.call(aten.eq.Scalar, slots, skipped)
            self._slots_without[slots, skipped] = self._emit.call(aten.where.self, is_skipped, minus, slots)
        return self._slots_without[slots, skipped]

    def concat_and_cache_mla(self, call: InPlaceCall) -> None:
        """One row per token: the compressed kv, then the rotated k. For us V and K of one head, at columns of the row."""
        arguments = call.arguments
        if arguments.get("skip_scale"):
            raise Refused("skip_scale is set")
        kv_c, k_pe = arguments["kv_c"], arguments["k_pe"]
        rank, width = kv_c.meta["val"].shape[-1], k_pe.meta["val"].shape[-1]
        base, layout = self._caches.place(call, "kv_cache", "n p d")
        if "d" not in layout.split() or not isinstance(rank, int) or not isinstance(width, int):
            raise Refused("its kv_cache is a part of wider rows")
        if k_pe.meta["val"].dim() == 3 and not is_one(k_pe.meta["val"].shape[1]):
            raise Refused(f"its k_pe {tuple(k_pe.meta['val'].shape)} has more than one head")
        previous, result = self._caches.results(call, {"kv_cache": base})["kv_cache"]
        between = self._emit.call(aten.alias.default, base)  # the value between both writes, which nobody reads
        for value, columns, before, after in (
            (k_pe, f"d[{rank}:{rank + width}]", previous, between),
            (kv_c, f"d[0:{rank}]", between, result),
        ):
            self._write(
                call,
                base=base,
                previous=before,
                result=after,
                layout=layout.replace("d", columns),
                value=value,
                slots=arguments["slot_mapping"],
                kind=arguments["kv_cache_dtype"],
                scale=arguments["scale"],
            )

    def _pair_write(
        self,
        call: InPlaceCall,
        *,
        stored: dict[str, tuple[Node, str]],
        scales: dict[str, Node | None],
        slots: Node,
        kind: str,
    ) -> None:
        """The write of K and V that one call makes, as two records that only go together."""
        places = {name: self._caches.place(call, name, axes) for name, (_, axes) in stored.items()}
        results = self._caches.results(call, {name: base for name, (base, _) in places.items()})
        for name, (value, _) in stored.items():
            base, layout = places[name]
            previous, result = results[name]
            self._write(
                call,
                base=base,
                previous=previous,
                result=result,
                layout=layout,
                value=value,
                slots=slots,
                kind=kind,
                scale=scales[name],
            )

    def _write(
        self,
        call: InPlaceCall,
        *,
        base: Node,
        previous: Node,
        result: Node,
        layout: str,
        value: Node,
        slots: Node,
        kind: str,
        scale: Node | None,
    ) -> None:
        if slots.meta["val"].dim() != 1 or slots.meta["val"].dtype not in INDEX_DTYPES:
            raise Refused(f"its slots are {slots.meta['val'].dtype} of {slots.meta['val'].dim()} dims")
        axes = {2: "t (hd)", 3: "t h d"}.get(value.meta["val"].dim())
        if axes is None:
            raise Refused(f"what it stores has shape {tuple(value.meta['val'].shape)}")
        self._found.writes.append(
            CacheWrite(
                node=result,
                base=base,
                previous=previous,
                result=result,
                layout=layout,
                value=value,
                value_axes=axes,
                slots=slots,
                slot_offsets=None,
                quantisation=self._cache_quantisation(kind, result, value, scale, base),
                nodes=frozenset({call.node, result}),
                stored=value,
                stored_axes=axes,
                call=call.node,
            )
        )
        self._output(call.node, result)

    def _cache_quantisation(
        self, kind: str, result: Node, value: Node, scale: Node | None, base: Node
    ) -> Fp8Quantisation | None:
        """How the stored value is converted: None for a plain cast."""
        dtype = base.meta["val"].dtype
        if kind == "auto":
            if dtype.itemsize == 1:
                raise Refused(f'its cache is {dtype}, but kv_cache_dtype="auto" does not say what the bytes hold')
            return None
        if kind not in FP8_KINDS:
            raise Refused(f"kv_cache_dtype={kind!r} is not known; auto, {', '.join(FP8_KINDS)} are")
        fp8 = FP8_KINDS[kind]
        if dtype not in (torch.uint8, fp8):
            raise Refused(f"its cache is {dtype}, but kv_cache_dtype={kind!r}")
        if self._exact:
            raise Refused("how an engine's cache write rounds to FP8 cannot be seen, which exact numerics would need")
        assert scale is not None
        scales = scale.meta["val"]
        if scales.dtype != torch.float32 or not all(is_one(size) for size in scales.shape):
            raise Refused(f"a cache scale is {scales.dtype} of shape {tuple(scales.shape)}; one float32 is known")
        return Fp8Quantisation(
            out=result,
            x=value,
            scale=scale,
            scale_multiplies=False,
            dtype=fp8,
            scale_dtype=torch.float32,
            nodes=frozenset(),
        )

    # writes by the name of a layer

    def layer_write(self, node: Node) -> None:
        arguments = dict(zip(("key", "value", "layer_name"), node.args, strict=False)) | dict(node.kwargs)
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        self._layer_write(node, target, arguments["key"], arguments["value"], arguments["layer_name"], False)

    def _layer_write(
        self, node: Node, target: torch._ops.OpOverload, key: Any, value: Any, layer: Any, fused_by_engine: bool
    ) -> None:
        if key.meta["val"].dim() != 3 or value.meta["val"].dim() != 3:
            raise Refused("its key and value are not [tokens, heads, head_size]")
        if takes_opaque_layer(target) and OPAQUE_TYPE is None:
            raise Refused("this torch has no opaque types, in which its layer's name comes")
        name = target._schema.name.split("::")[0]
        provider = cache_provider(name)
        if provider is None:
            raise Refused(
                f"its cache is known only by a layer's name, and no cache provider is registered for {name!r} "
                f"(rope_fusion.engines.register_cache_provider; rope_fusion.vllm has the one for vLLM)"
            )
        if (sentence := provider.refusal(known_layer(layer))) is not None:
            raise Refused(sentence)
        self._found.layer_writes.append(
            LayerWrite(
                node=node,
                value=key,
                v=value,
                layer=layer,
                provider=name,
                operator=target,
                fused_by_engine=fused_by_engine,
            )
        )


def _differ(first: Any, second: Any) -> bool:
    """Whether sizes that an operator takes for the same are known to be others. Often nobody told the compiler that they are the same."""
    return statically_known_true(first != second)


_KNOWN: dict[str, Any] = {
    "_C::rotary_embedding": _Finder.rotary_embedding,
    "sgl_kernel::rotary_embedding": _Finder.rotary_embedding,
    "sglang::rotary_embedding_with_key": _Finder.rotary_embedding,
    "sglang::rotary_embedding_without_key": _Finder.rotary_embedding,
    "sglang::apply_rope_inplace": _Finder.apply_rope_inplace,
    "vllm::flashinfer_rotary_embedding": _Finder.rotary_embedding,
    "flashinfer::apply_rope_pos_ids_cos_sin_cache": _Finder.apply_rope,
    "sgl_kernel::apply_rope_pos_ids_cos_sin_cache": _Finder.apply_rope,
    "vllm::fused_rope_and_unified_kv_cache_update": _Finder.fused_rope_update,
    "_C::static_scaled_fp8_quant": _Finder.static_quantisation,
    "_C_cache_ops::concat_and_cache_mla": _Finder.concat_and_cache_mla,
    "_C_cache_ops::reshape_and_cache": _Finder.reshape_and_cache,
    "_C_cache_ops::reshape_and_cache_flash": _Finder.reshape_and_cache_flash,
    "sglang::store_cache": _Finder.store_cache,
    "vllm::unified_kv_cache_update": _Finder.layer_write,
}
_CACHE_WRITERS = frozenset(name for name in _KNOWN if name.startswith(("_C_cache_ops::", "sglang::store")))
