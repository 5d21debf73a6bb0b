"""Step one of the pass: emit canonical operators for what the recognisers found, and remember how to take them back."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import guard_or_false

from rope_fusion._torch import REINPLACES_THROUGH_VIEWS
from rope_fusion.canonical.attributes import (
    ArrangeAttributes,
    GroupQuantAttributes,
    KvWriteAttributes,
    LayerWriteAttributes,
    QuantAttributes,
    RotaryAttributes,
)
from rope_fusion.canonical.cache_in_place import is_already_in_place
from rope_fusion.canonical.cache_views import climb
from rope_fusion.canonical.cos_sin import CosSinOperands, cos_sin_operands
from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.fp8_groups import unmoved_source
from rope_fusion.canonical.layout import (
    CANONICAL_ROLES,
    VIEW_TARGETS,
    Atom,
    Dims,
    atoms_of,
    equal,
    is_one,
    rotary_roles,
    through_view,
    view_path,
)
from rope_fusion.canonical.operators import (
    arrange,
    kv_write,
    kv_write_by_layer,
    quantize_fp8,
    quantize_group_fp8,
    rotary_qk,
)
from rope_fusion.canonical.records import CacheWrite, Fp8Quantisation, GroupQuantisation, LayerWrite, Rotation
from rope_fusion.canonical.values import ValueNumbering

aten = torch.ops.aten
prims = torch.ops.prims

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Findings:
    """What the recognisers returned for one graph."""

    rotations: list[Rotation]
    quantisations: list[Fp8Quantisation]
    writes: list[CacheWrite]
    layer_writes: list[LayerWrite] = field(default_factory=list)
    group_quantisations: list[GroupQuantisation] = field(default_factory=list)


@dataclass
class Canonicalised:
    """What was emitted: for each node that took over a value, whose value that was and the operator that it reads."""

    origin: dict[Node, tuple[Node, Node]] = field(default_factory=dict)
    near_misses: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Oriented:
    """A rotation whose dims' roles are known."""

    rotation: Rotation
    roles: str
    batch: Any
    sequence: Any
    exact: bool

    @property
    def attributes(self) -> RotaryAttributes:
        r = self.rotation
        out_dtype = r.out.meta["val"].dtype
        return RotaryAttributes(
            rotary_dim=r.rotary_dim,
            start=r.start,
            interleaved=r.interleaved,
            inverse=r.inverse != r.sin.negated,
            halves_out=r.halves_out,
            out_dtype=out_dtype,
            math_dtype=r.math_dtype if r.math_dtype is not None else torch.float32,
            exact=self.exact,
        )


def name_of(node: Node) -> str:
    """A node for a sentence: its name and, where known, the module it came from."""
    stack = node.meta.get("nn_module_stack")
    if stack:
        path = str(next(reversed(stack.values()))[0])
        return f"{node.name} (in {path})"
    return node.name


class Canonicaliser:
    """Emits canonical operators into one graph. See `run`."""

    def __init__(self, graph: Graph, emitter: Emitter, findings: Findings, exact: bool) -> None:
        self._graph = graph
        self._emit = emitter
        self._findings = replace(findings, rotations=[_narrowed(r, findings) for r in findings.rotations])
        self._exact = exact
        self._numbering = ValueNumbering(graph)
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        # as the graph was, because emitting moves users to new nodes
        self._users = {node: tuple(node.users) for node in graph.nodes}
        self._result = Canonicalised()
        self._taken: set[Node] = set()  # outs of rotations and nodes of writes that are emitted
        self._canonical_of: dict[Node, tuple[Node, str]] = {}  # rotation out -> (canonical 4-D value, roles)
        self._read_by: dict[Node, list[Node]] = {}  # rotation out -> what the operator that computes it reads
        self._quantised = self._static_quantisations()
        self._quantised_by_groups = self._quantisations_by_groups()
        self._write_of: dict[Node, CacheWrite | LayerWrite] = {}  # rotation out -> the write that stores it
        # read before emission moves users: the views that lead from the whole cache to the part a write goes into
        self._views_of = {w.node: climb(w.node.args[0])[1] for w in findings.writes if w.call is None}  # type: ignore[arg-type]
        self._new_cache: dict[Node, Node] = {}  # result of an emitted write -> the canonical value of the whole cache

    def run(self, rotations: bool) -> Canonicalised:
        """Emit `kv_write` for every cache write and, if `rotations`, `rotary_qk`, `quantize_fp8` and `quantize_group_fp8`."""
        oriented = self._orient() if rotations else {}
        write_of = self._write_of
        writes: list[CacheWrite | LayerWrite] = [*self._findings.writes, *self._findings.layer_writes]
        for write in writes:
            source = self._rotation_of_value(write, oriented)
            if source is not None:
                write_of[source] = write
        if rotations:
            self._emit_layers(oriented, write_of)
            self._emit_remaining(oriented)
        self._emit_writes({out: write for out, write in write_of.items() if isinstance(write, CacheWrite)})
        self._emit_layer_writes({out: write for out, write in write_of.items() if isinstance(write, LayerWrite)})
        return self._result

    # rotations

    def _orient(self) -> dict[Node, _Oriented]:
        oriented = {}
        for rotation in self._findings.rotations:
            x, cos, sin = (node.meta["val"] for node in (rotation.x, rotation.cos.node, rotation.sin.node))
            sentence = self._rotation_refusal(rotation)
            roles = rotary_roles(x.shape, cos.shape, sin.shape)
            if sentence is None and roles is None:
                sentence = "its cos and sin differ by head, or it has more than four dims"
            if sentence is not None:
                self._result.near_misses.append(f"rotation {name_of(rotation.out)} was left alone: {sentence}")
                continue
            assert roles is not None
            sizes = dict(zip(roles, x.shape, strict=True))
            oriented[rotation.out] = _Oriented(rotation, roles, sizes.get("b", 1), sizes.get("s", 1), self._exact)
        return oriented

    def _rotation_refusal(self, rotation: Rotation) -> str | None:
        x, out = rotation.x.meta["val"], rotation.out.meta["val"]
        dtypes = {x.dtype, out.dtype}
        if not dtypes.issubset(FLOAT_DTYPES) or (len(dtypes) == 2 and torch.float32 not in dtypes):
            return (
                f"it takes {x.dtype} to {out.dtype}; "
                "the fused operators take float32, bfloat16 or float16 to the same dtype, to float32 or from it"
            )
        if self._exact and out.dtype != x.dtype and x.dtype != torch.float32:
            return f"Inductor has removed the rounding of its result to {x.dtype}, which exact numerics must reproduce"
        if rotation.cos.negated:
            return "its cos is negated"
        if self._exact and rotation.math_dtype is None:
            return (
                "its multiplications and additions have different dtypes, or are made by one operator (a complex product, "
                "addcmul) that each device rounds in its own way, which exact numerics cannot reproduce"
            )
        return None

    def _rotation_of_value(self, write: CacheWrite | LayerWrite, oriented: dict[Node, _Oriented]) -> Node | None:
        """The rotation whose whole output, rearranged, is what `write` stores."""
        if isinstance(write, CacheWrite) and not self._reproducible(write.quantisation):
            return None
        node = write.value
        for _ in range(16):
            if node in oriented:
                return node if self._layouts_meet(oriented[node], write) else None
            if node.op != "call_function" or node.target not in VIEW_TARGETS or not isinstance(node.args[0], Node):
                return None
            node = node.args[0]
        return None

    def _layouts_meet(self, oriented: _Oriented, write: CacheWrite | LayerWrite) -> bool:
        """Whether the rearrangement from the rotation's output to the stored value names the dims as the write does."""
        out = oriented.rotation.out
        path = view_path(out, write.value)
        if path is None:
            return False
        dims: Dims | None = atoms_of(out.meta["val"].shape, oriented.roles)
        for step in path:
            dims = through_view(step, dims) if dims is not None else None
        if dims is None:
            return False
        expected = {"t": "bs", "b": "b", "s": "s", "h": "h", "d": "d", "(hd)": "hd"}
        sizes = dict(zip(oriented.roles, out.meta["val"].shape, strict=True))
        present = {role for role, size in sizes.items() if not is_one(size)}
        for token, dim in zip(write.value_axes.split(), dims, strict=True):
            wanted = [role for role in expected[token] if role in present]
            if [atom.name for atom in dim] != wanted:
                return False
        return True

    def _emit_layers(self, oriented: dict[Node, _Oriented], write_of: Mapping[Node, CacheWrite | LayerWrite]) -> None:
        """One `rotary_qk` per rotated k that is written to a cache, with the q that shares its cos and sin."""
        for k_out in sorted(write_of, key=self._order.__getitem__):
            partner = self._partner(oriented[k_out], [o for o in oriented.values() if o.rotation.out not in write_of])
            if partner is None:
                self._result.near_misses.append(
                    f"rotation of k at {name_of(k_out)} is written to the cache, "
                    "but no rotation of a q shares its cos and sin"
                )
                continue
            self._emit_rotary(partner, oriented[k_out])

    def _emit_remaining(self, oriented: dict[Node, _Oriented]) -> None:
        left = [o for o in oriented.values() if o.rotation.out not in self._taken]
        for q in [o for o in left if o.rotation.out in self._quantised]:
            if q.rotation.out in self._taken:
                continue
            others = [o for o in left if o is not q and not self._is_quantised(o)]
            self._emit_rotary(q, self._partner(q, others))
        for single in left:
            if single.rotation.out not in self._taken:
                self._emit_rotary(single, None)

    def _partner(self, anchor: _Oriented, others: Iterable[_Oriented]) -> _Oriented | None:
        """The nearest free rotation in the graph that can share an operator with `anchor`."""
        at = self._order[anchor.rotation.out]
        candidates = [o for o in others if o.rotation.out not in self._taken and self._share_operator(anchor, o)]
        candidates.sort(key=lambda o: abs(self._order[o.rotation.out] - at))
        for candidate in candidates[:2]:
            outs = [anchor.rotation.out, candidate.rotation.out]
            inputs = [n for r in (anchor.rotation, candidate.rotation) for n in (r.x, r.cos.node, r.sin.node)]
            if not self._reaches(outs, inputs):
                return candidate
        return None

    def _share_operator(self, a: _Oriented, b: _Oriented) -> bool:
        ra, rb = a.rotation, b.rotation
        return (
            self._shared_attributes(a, b) is not None
            and ra.x.meta["val"].dtype == rb.x.meta["val"].dtype
            and ra.full_width == rb.full_width
            and ra.width == rb.width
            and (ra.cos.offset, ra.cos.part, ra.sin.offset, ra.sin.part)
            == (rb.cos.offset, rb.cos.part, rb.sin.offset, rb.sin.part)
            and equal(a.batch, b.batch)
            and equal(a.sequence, b.sequence)
            and self._numbering.same(ra.cos.node, rb.cos.node)
            and self._numbering.same(ra.sin.node, rb.sin.node)
        )

    def _shared_attributes(self, a: _Oriented, b: _Oriented) -> RotaryAttributes | None:
        """Attributes under which both can be computed.

        One may end in float32 (Inductor removes a rounding that a conversion back follows) and the other not: then
        neither is rounded in the operator, if rounding later, on the way into the cache or to other readers, gives the
        same.
        """
        ours, theirs = a.attributes, b.attributes
        if ours == theirs:
            return ours
        wide = replace(ours, out_dtype=torch.float32)
        if wide != replace(theirs, out_dtype=torch.float32):
            return None
        return wide if self._may_round_later(a) and self._may_round_later(b) else None

    def _may_round_later(self, member: _Oriented) -> bool:
        out = member.rotation.out
        dtype = out.meta["val"].dtype
        if dtype == torch.float32:
            return True
        write = self._write_of.get(out)
        if self._is_quantised(member) or isinstance(write, LayerWrite):
            return False
        return write is None or (write.quantisation is None and write.base.meta["val"].dtype == dtype)

    def _emit_rotary(self, q: _Oriented, k: _Oriented | None) -> None:
        operands = self._operands(q)
        cos_dtypes = {node.meta["val"].dtype for node in (operands.cos, operands.sin)}
        x_dtype = q.rotation.x.meta["val"].dtype
        if len(cos_dtypes) != 1 or not cos_dtypes <= {torch.float32, x_dtype}:
            names = ", ".join(sorted(str(dtype) for dtype in cos_dtypes))
            self._result.near_misses.append(
                f"rotation {name_of(q.rotation.out)} was left alone: its cos and sin are {names}, "
                f"the fused operators take float32 or the dtype of the rotated tensor ({x_dtype})"
            )
            return
        members = [member for member in (q, k) if member is not None]
        read = [n for m in members for n in (m.rotation.x, m.rotation.cos.node, m.rotation.sin.node)]
        attributes = q.attributes if k is None else self._shared_attributes(q, k)
        assert attributes is not None  # partners share an operator
        attributes = replace(
            attributes,
            inverse=attributes.inverse != operands.sin_negated,
            overwritable=all(self._overwritable(member.rotation, attributes.out_dtype) for member in members),
        )
        views = [
            self._emit.to_canonical(
                self._emit.columns(member.rotation.x, member.rotation.x_offset, member.rotation.width), member.roles
            )
            for member in members
        ]
        node = self._emit.call(
            rotary_qk,
            views[0],
            views[1] if k is not None else None,
            operands.cos,
            operands.sin,
            operands.positions,
            attributes.encode(),
        )
        outputs = [self._emit.call(operator.getitem, node, index) for index in range(2)]
        for member, output in zip(members, outputs, strict=False):
            out = member.rotation.out
            quantisations = [q for q in self._quantised.get(out, ()) if q.out not in self._taken]
            paths = [_value_path(out, quantisation) for quantisation in quantisations]
            value = self._emit.from_canonical(output, member.roles)
            if out.meta["val"].dtype != attributes.out_dtype:
                value = self._emit.call(prims.convert_element_type.default, value, out.meta["val"].dtype)
            self._take_over(out, value, node)
            self._canonical_of[out] = (output, member.roles)
            self._read_by[out] = read
            for quantisation, path in zip(quantisations, paths, strict=True):
                self._emit_quantisation(quantisation, path, output, member.roles)
            if k is None:
                for by_groups in self._quantised_by_groups.get(out, ()):
                    self._emit_quantisation_by_groups(by_groups, output, member)
                if not self._is_quantised(member):
                    self._emit_arrangement(output, member)

    def _overwritable(self, rotation: Rotation, out_dtype: torch.dtype) -> bool:
        """Whether the result may take the memory of x: it is laid out alike, and nothing but the rotation reads that."""
        x, out = rotation.x.meta["val"], rotation.out.meta["val"]
        if x.dtype != out_dtype or rotation.x_offset or not equal(rotation.width, x.shape[-1]):
            return False
        if not all(equal(a, b) for a, b in zip(x.stride(), out.stride(), strict=True)):
            return False
        aliases = self._nodes_of_storage.get(x.untyped_storage()._cdata, ())
        if any(node.meta["val"].dtype != x.dtype for node in aliases):  # Inductor cannot write through a view of bits
            return False
        own = rotation.nodes.union(aliases)
        return all(
            node is rotation.out or (node.op == "call_function" and own.issuperset(self._users.get(node, ())))
            for node in own
        )

    @functools.cached_property
    def _nodes_of_storage(self) -> dict[int, list[Node]]:
        """The graph's nodes that share memory, by their storage."""
        found: dict[int, list[Node]] = {}
        for node in self._order:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and not value.is_sparse:
                found.setdefault(value.untyped_storage()._cdata, []).append(node)
        return found

    def _operands(self, oriented: _Oriented) -> CosSinOperands:
        return cos_sin_operands(
            self._emit, oriented.rotation, oriented.roles, self._numbering, keep_rounding=self._exact
        )

    # quantisation of q

    def _static_quantisations(self) -> dict[Node, list[Fp8Quantisation]]:
        """Static quantisations of whole rotation outputs, by that output."""
        outs = {rotation.out for rotation in self._findings.rotations}
        stored = {write.quantisation.out for write in self._findings.writes if write.quantisation is not None}
        grouped: dict[Node, list[Fp8Quantisation]] = {}
        for quantisation in self._findings.quantisations:
            if quantisation.out in stored or not self._scalar_scale(quantisation):
                continue
            if not self._reproducible(quantisation):
                continue
            node = quantisation.x
            for _ in range(16):
                if node in outs:
                    grouped.setdefault(node, []).append(quantisation)
                    break
                if node.op != "call_function" or node.target not in VIEW_TARGETS or not isinstance(node.args[0], Node):
                    break
                node = node.args[0]
        return grouped

    def _reproducible(self, quantisation: Fp8Quantisation | None) -> bool:
        """Whether the fused operators, which scale in float32, round as the program does where that is asked for."""
        if not self._exact or quantisation is None or quantisation.scale_dtype == torch.float32:
            return True
        self._result.near_misses.append(
            f"quantisation {name_of(quantisation.out)} was left alone: it scales in {quantisation.scale_dtype}, "
            "which exact numerics would have to reproduce and the fused operators do in float32"
        )
        return False

    @staticmethod
    def _scalar_scale(quantisation: Fp8Quantisation) -> bool:
        return not isinstance(quantisation.scale, Node) or all(is_one(d) for d in quantisation.scale.meta["val"].shape)

    def _emit_quantisation(self, quantisation: Fp8Quantisation, path: list[Node], output: Node, roles: str) -> None:
        scale, value = self._scale(quantisation)
        attributes = QuantAttributes(quantisation.dtype, quantisation.scale_multiplies, value)
        q8 = self._emit.call(quantize_fp8, output, scale, attributes.encode())
        views = [step for step in path if step.target in VIEW_TARGETS]
        self._take_over(quantisation.out, self._emit.replay(views, self._emit.from_canonical(q8, roles)), q8)

    # quantisation by groups

    def _is_quantised(self, member: _Oriented) -> bool:
        return member.rotation.out in self._quantised or member.rotation.out in self._quantised_by_groups

    def _quantisations_by_groups(self) -> dict[Node, list[GroupQuantisation]]:
        """Quantisations of whole rotation outputs whose groups lie within heads, by that output."""
        widths = {rotation.out: rotation.width for rotation in self._findings.rotations}
        found: dict[Node, list[GroupQuantisation]] = {}
        for quantisation in self._findings.group_quantisations:
            out = unmoved_source(quantisation.x, widths)
            if out is None:
                continue
            sentence = None
            if widths[out] % quantisation.size:
                sentence = f"its groups of {quantisation.size} elements do not divide the heads of {widths[out]}"
            elif self._exact and quantisation.inexact is not None:
                sentence = f"{quantisation.inexact}, which exact numerics cannot reproduce"
            elif any(sum(not isinstance(d, int) for d in n.meta["val"].shape) > 1 for n in _results(quantisation)):
                sentence = "its values or scales have more than one symbolic dim"
            if sentence is None:
                found.setdefault(out, []).append(quantisation)
            else:
                self._result.near_misses.append(
                    f"quantisation by groups {name_of(quantisation.out)} was left alone: {sentence}"
                )
        return found

    def _emit_quantisation_by_groups(self, quantisation: GroupQuantisation, output: Node, member: _Oriented) -> None:
        attributes = GroupQuantAttributes(
            quantisation.dtype, quantisation.size, quantisation.min_amax, quantisation.power_of_two
        )
        node = self._emit.call(quantize_group_fp8, output, attributes.encode())
        parts = [self._emit.call(operator.getitem, node, index) for index in range(2)]
        for old, part in zip(_results(quantisation), parts, strict=True):
            self._take_over(old, self._shaped_like(old, self._emit.from_canonical(part, member.roles)), node)

    def _shaped_like(self, old: Node, value: Node) -> Node:
        """`value` with the sizes of `old`, of which one may be symbolic."""
        # that one is what is left: the others are not zero, so that it is known without a token too
        sizes = [size if isinstance(size, int) else -1 for size in old.meta["val"].shape]
        return self._emit.call(aten.reshape.default, value, sizes)

    # the copy that follows

    def _emit_arrangement(self, output: Node, member: _Oriented) -> None:
        """`arrange` for the contiguous copy of a rotation's result in another order, if nothing else reads that."""
        path = self._path_to_copy(member.rotation.out)
        if not path or sum(not isinstance(size, int) for size in path[-1].meta["val"].shape) > 1:
            return
        place = _arrangement(member, path)
        if place is not None:
            node = self._emit.call(arrange, output, place.encode())
            self._take_over(path[-1], self._shaped_like(path[-1], node), node)

    def _path_to_copy(self, out: Node) -> list[Node]:
        """The views that lead from `out` to a contiguous copy, which comes last, when each is the only reader."""
        path: list[Node] = []
        node = out
        while len(self._users[node]) == 1 and len(path) < 16:
            (node,) = self._users[node]
            if node.target not in VIEW_TARGETS:
                break
            path.append(node)
            if node.target is aten.clone.default:
                return path if node.kwargs.get("memory_format") is torch.contiguous_format else []
        return []

    def _scale(self, quantisation: Fp8Quantisation | None) -> tuple[Node | None, float]:
        """Scale tensor (one or more elements, flat) or number."""
        if quantisation is None:
            return None, 1.0
        if not isinstance(quantisation.scale, Node):
            return None, float(quantisation.scale)
        return quantisation.scale, 1.0

    # cache writes

    def _emit_writes(self, write_of: dict[Node, CacheWrite]) -> None:
        k_writes = {write.node: out for out, write in write_of.items() if out in self._canonical_of}
        writes = self._findings.writes
        for write in sorted(writes, key=lambda w: (w.node not in k_writes, self._order[w.node])):
            if write.node in self._taken:
                continue
            if write.old_value_read:
                self._result.near_misses.append(
                    f"the cache write {name_of(write.node)} was left alone: "
                    "what it overwrites is also read as it was before"
                )
                continue
            out = k_writes.get(write.node)
            partner = self._write_partner(write, k_writes, self._read_by[out]) if out is not None else None
            if write.call is not None and partner is None:
                continue  # an engine's write is in place already; there is nothing to gain without the rotation
            if out is not None and partner is None:
                continue  # canonicalised as a plain write in the round without rotations
            self._emit_write(write, partner, out)

    def _write_partner(
        self, k_write: CacheWrite, k_writes: dict[Node, Node], read: Sequence[Node]
    ) -> CacheWrite | None:
        """The nearest unrotated write at the same slots: V's. `read` is what the operator that rotates k reads."""
        at = self._order[k_write.node]
        candidates = [
            w
            for w in self._findings.writes
            if w is not k_write and w.node not in self._taken and w.node not in k_writes and self._pairs(k_write, w)
        ]
        candidates.sort(key=lambda w: abs(self._order[w.node] - at))
        for candidate in candidates[:2]:
            outs = [k_write.node, k_write.result, candidate.node, candidate.result]
            firsts = [k_write, candidate]
            if k_write.base is candidate.base:
                if k_write.layout == candidate.layout:  # both into the same half: the later one counts
                    continue
                first, second = sorted((k_write, candidate), key=lambda w: self._order[w.node])
                if second.previous is not first.result or not self._only_leads_to(first.result, second):
                    continue
                outs, firsts = [second.node, second.result], [first]
            if (
                candidate.old_value_read
                or not self._one_slot_each(k_write)
                or any(write.previous is not write.base for write in firsts)
            ):
                continue
            # a q may be rotated with k that is computed from the cache of V
            inputs = [*read, k_write.value, candidate.value, *self._slot_nodes(k_write)]
            if not self._reaches(outs, inputs):
                return candidate
        return None

    def _only_leads_to(self, result: Node, write: CacheWrite) -> bool:
        """Whether the whole cache after one write is used for nothing but the next write into it."""

        def within(user: Node) -> bool:
            if user in write.nodes:
                return True
            parts = self._users[user]
            return user.target is aten.unbind.int and bool(parts) and all(map(within, parts))

        return all(map(within, self._users[result]))

    def _pairs(self, a: CacheWrite, b: CacheWrite) -> bool:
        def same(x: Node | int | None, y: Node | int | None) -> bool:
            if isinstance(x, Node) and isinstance(y, Node):
                return self._numbering.same(x, y)
            return x == y

        if a.call is not None or b.call is not None:
            return a.call is b.call
        if not same(a.slots, b.slots) or not same(a.slot_offsets, b.slot_offsets):
            return False
        if _without_selects(a.layout) != _without_selects(b.layout):
            return False
        if b.value.meta["val"].dtype not in FLOAT_DTYPES:  # the fused operator would convert it, not store it
            return False
        if (a.quantisation is None) != (b.quantisation is None):
            return False
        if a.quantisation is not None and b.quantisation is not None:
            first, second = a.quantisation, b.quantisation
            if (first.dtype, first.scale_multiplies) != (second.dtype, second.scale_multiplies):
                return False
        if a.base.meta["val"].dtype != b.base.meta["val"].dtype:
            return False
        first_rows, second_rows = (math.prod(w.value.meta["val"].shape[:-1]) for w in (a, b))
        # Rows that go to the same slots are as many, or the program fails; dims marked dynamic one by one do not say so, and a
        # guard does, as Inductor sets them for its own operators.
        return equal(first_rows, second_rows) or guard_or_false(first_rows == second_rows)

    @staticmethod
    def _one_slot_each(write: CacheWrite) -> bool:
        """Whether slots and places within blocks, where both are given, need no broadcasting against each other."""
        if write.slot_offsets is None or not isinstance(write.slots, Node):
            return True
        shapes = [node.meta["val"].shape for node in (write.slots, write.slot_offsets)]
        return len(shapes[0]) == len(shapes[1]) and all(map(equal, *shapes))

    @staticmethod
    def _slot_nodes(write: CacheWrite) -> list[Node]:
        return [node for node in (write.slots, write.slot_offsets) if isinstance(node, Node)]

    def _emit_write(self, k_write: CacheWrite, v_write: CacheWrite | None, k_out: Node | None) -> None:
        if k_out is not None:
            k, _ = self._canonical_of[k_out]
            v = self._value(v_write.value, v_write.value_axes, v_write, k) if v_write is not None else None
            quantisation = k_write.quantisation
        else:  # as the program made it: quantised and cast
            stored = k_write.stored if k_write.stored is not None else k_write.value
            k, v, quantisation = (
                self._value(stored, k_write.stored_axes or k_write.value_axes, k_write, None),
                None,
                None,
            )
        joint = v_write is not None and v_write.base is k_write.base
        slots, offsets = self._slots(k_write)
        k_scale, k_value = self._scale(quantisation)
        v_scale, v_value = self._scale(v_write.quantisation if v_write is not None else None)
        attributes = KvWriteAttributes(
            k_layout=k_write.layout,
            v_layout=v_write.layout if v_write is not None else k_write.layout,
            skip_negative_slots=k_write.call is not None,
            kv_fp8=quantisation.dtype if quantisation is not None else None,
            scale_multiplies=quantisation.scale_multiplies if quantisation is not None else False,
            k_scale_value=k_value,
            v_scale_value=v_value,
            in_place_already=self._in_place_already([w for w in (k_write, v_write) if w is not None]),
        )
        node = self._emit.call(
            kv_write,
            k_write.base if v_write is not None else self._cache_before(k_write),
            v_write.base if v_write is not None and not joint else None,
            k,
            v,
            slots,
            offsets,
            k_scale,
            v_scale,
            attributes.encode(),
        )
        outputs = [self._emit.call(operator.getitem, node, index) for index in range(2)]
        if joint:
            assert v_write is not None
            first, last = sorted((k_write, v_write), key=lambda w: self._order[w.node])
            self._finish_write(first, outputs[0], node, whole=False)
            self._finish_write(last, outputs[0], node)
        else:
            self._finish_write(k_write, outputs[0], node)
            if v_write is not None:
                self._finish_write(v_write, outputs[1], node)

    def _emit_layer_writes(self, write_of: Mapping[Node, LayerWrite]) -> None:
        for out, write in write_of.items():
            if out not in self._canonical_of:
                continue
            k, _ = self._canonical_of[out]
            v = self._emit.to_canonical(write.v, "shd")
            attributes = LayerWriteAttributes(write.node.name, write.provider, write.fused_by_engine)
            done = self._emit.call(kv_write_by_layer, k, v, attributes.encode())
            self._take_over(write.node, done, done)

    def _in_place_already(self, writes: Sequence[CacheWrite]) -> bool:
        return all(write.call is not None or is_already_in_place(write, REINPLACES_THROUGH_VIEWS) for write in writes)

    def _finish_write(self, write: CacheWrite, new_cache: Node, canonical: Node, whole: bool = True) -> None:
        """Readers of the written cache, whole or through the view that was written, read the new whole cache."""
        if write.node is not write.result:
            start = self._seen_as(new_cache, write.previous)
            written = self._emit.replay(self._views_of[write.node], start)
            if written is new_cache:  # each node takes over one value, or restoring could not tell them apart
                written = self._emit.call(aten.alias.default, new_cache)
            self._take_over(write.node, written, canonical)
        if whole:
            self._take_over(write.result, self._seen_as(new_cache, write.result), canonical)
            self._new_cache[write.result] = new_cache
        self._taken.add(write.node)

    def _cache_before(self, write: CacheWrite) -> Node:
        """The whole cache that a write goes into, in the dtype in which the graph receives it."""
        return self._new_cache.get(write.previous) or self._seen_as(write.previous, write.base)

    def _seen_as(self, node: Node, like: Node) -> Node:
        """`node` in the dtype of `like`, bit by bit: between two writes a cache may be seen as bytes."""
        dtype = like.meta["val"].dtype
        return node if node.meta["val"].dtype == dtype else self._emit.call(aten.view.dtype, node, dtype)

    def _value(self, node: Node, axes: str, write: CacheWrite, like: Node | None) -> Node:
        """A stored tensor as [batch, sequence, heads, dim], with the batch and sequence of `like`."""
        tokens = axes.split()
        if "(hd)" in tokens:
            at = tokens.index("(hd)")
            heads = self._heads(write, like)
            width = self._size(node, at)
            if isinstance(heads, int) and isinstance(width, int):
                dim: int | Node = width // heads
            else:
                dim = self._emit.call(operator.floordiv, width, heads)
            sizes = [self._size(node, index) for index in range(len(tokens))]
            sizes[at : at + 1] = [heads, dim]
            node = self._emit.call(aten.reshape.default, node, sizes)
            tokens[at : at + 1] = ["h", "d"]
        roles = "".join("s" if token == "t" else token for token in tokens)
        node = self._emit.to_canonical(node, roles)
        if like is None or "t" not in tokens or is_one(like.meta["val"].shape[0]):
            return node
        # no -1, which has no meaning where a size is zero
        sizes = [self._size(like, 0), self._size(like, 1), self._size(node, 2), self._size(node, 3)]
        return self._emit.call(aten.reshape.default, node, sizes)

    def _size(self, node: Node, dim: int) -> int | Node:
        """A size as an argument of an operator."""
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self._emit.call(aten.sym_size.int, node, dim)

    def _heads(self, write: CacheWrite, like: Node | None) -> int | Node:
        """Heads of a tensor that holds heads and dim in one; 1 where the cache does not tell them apart either."""
        if like is not None:
            return self._size(like, 2)
        tokens = write.layout.split()
        return self._size(write.base, tokens.index("h")) if "h" in tokens else 1

    def _slots(self, write: CacheWrite) -> tuple[Node, Node | None]:
        """Slots, and places within blocks where they are given separately, as tensors of one dim or more."""
        start = write.slots
        if isinstance(start, Node) and isinstance(start.meta["val"], torch.Tensor):
            if start.meta["val"].dim() == 0:
                start = self._emit.call(aten.unsqueeze.default, start, 0)
            return start, write.slot_offsets
        value = write.value.meta["val"]
        axes = write.value_axes.split()
        along = [axis for axis in ("s", "t") if axis in axes]
        length = self._size(write.value, axes.index(along[0])) if along else 1
        settings = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
        return self._emit.call(prims.iota.default, length, start=start, step=1, **settings), None

    def _reaches(self, sources: Sequence[Node], targets: Sequence[Node]) -> bool:
        """Whether a target depends on a source's value; only nodes between them in the graph's order are walked."""
        wanted = set(targets)
        bound = max((self._order[node] for node in targets), default=-1)
        stack = [user for node in sources for user in self._users[node]]
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in wanted:
                return True
            if node in seen or self._order[node] > bound:
                continue
            seen.add(node)
            stack.extend(self._users[node])
        return False

    def _take_over(self, old: Node, new: Node, canonical: Node) -> None:
        """Users of `old` read `new`, a view of an output of `canonical`, from here on; `restore` undoes it."""
        added = set()
        stack = [new]
        while stack:
            node = stack.pop()
            if node not in self._order and node not in added:
                added.add(node)
                stack.extend(node.all_input_nodes)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in added and user in self._order)
        self._result.origin[new] = (old, canonical)
        self._taken.add(old)


def restore(graph: Graph, result: Canonicalised, originals: Container[Node]) -> set[Node]:
    """Give back the values whose canonical operators no pattern replaced, and erase those operators.

    Returns:
        the original nodes whose values a pattern took over.
    """
    alive = set(graph.nodes)
    replaced = set()
    for new, (old, canonical) in result.origin.items():
        if canonical in alive:
            new.replace_all_uses_with(old)
        else:
            replaced.add(old)
    for node in reversed(list(graph.nodes)):
        if node not in originals and not node.users:
            graph.erase_node(node)
    return replaced


def _narrowed(rotation: Rotation, findings: Findings) -> Rotation:
    """The rotation with the conversion of its float32 result to a narrower dtype, where nothing reads it before.

    Quantisations and cache writes are recognised by the value before such a conversion, so theirs stay as they are.
    """
    out = rotation.out
    users = list(out.users)
    if len(users) != 1 or users[0].target is not prims.convert_element_type.default:
        return rotation
    narrow = users[0]
    dtypes = [node.meta["val"].dtype for node in (rotation.x, out, narrow)]
    if dtypes[:2] != [torch.float32] * 2 or dtypes[2] not in (torch.bfloat16, torch.float16):
        return rotation
    writes: list[CacheWrite | LayerWrite] = [*findings.writes, *findings.layer_writes]
    for node in (*(q.x for q in findings.quantisations), *(write.value for write in writes)):
        for _ in range(16):
            if node in (out, narrow):
                return rotation
            if node.op != "call_function" or node.target not in VIEW_TARGETS or not isinstance(node.args[0], Node):
                break
            node = node.args[0]
    return replace(rotation, out=narrow, nodes=rotation.nodes | {narrow})


def _results(quantisation: GroupQuantisation) -> tuple[Node, Node]:
    return quantisation.out, quantisation.scale


def _arrangement(member: _Oriented, path: Sequence[Node]) -> ArrangeAttributes | None:
    """How the last node of `path`, which is contiguous, lies in memory; None unless only whole dims, heads in groups
    perhaps, change places."""
    shape = member.rotation.out.meta["val"].shape
    heads = dict(zip(member.roles, shape, strict=True)).get("h", 1)
    if not isinstance(heads, int):
        return None
    mentioned = {size for step in path for size in step.meta["val"].shape if isinstance(size, int) and size > 1}
    for groups in [1, *sorted(size for size in mentioned if heads % size == 0)]:
        split = tuple(atom for atom in (Atom(groups, "g"), Atom(heads // groups, "h")) if atom.size != 1)
        whole = atoms_of(shape, member.roles)
        dims: Dims | None = tuple(split if role == "h" else dim for role, dim in zip(member.roles, whole, strict=True))
        for step in path:
            dims = through_view(step, dims) if dims is not None else None
        if dims is None:
            continue
        order = [str(atom.name) for dim in dims for atom in dim if atom.name != "d"]
        if not dims[-1] or dims[-1][-1].name != "d":
            return None
        wanted = "bsgh" if groups > 1 else "bsh"
        layout = [*(token for token in wanted if token not in order), *order, "d"]  # dims of size 1 lie anywhere
        return ArrangeAttributes(" ".join(layout), groups)
    return None


def _value_path(out: Node, quantisation: Fp8Quantisation) -> list[Node]:
    """Nodes after the rotation's output up to the FP8 tensor, along the quantised value."""
    rotated = view_path(out, quantisation.x)
    assert rotated is not None  # grouped by exactly this

    def along(node: Node) -> list[Node] | None:
        if node is quantisation.x:
            return []
        for source in node.all_input_nodes:
            if source is quantisation.x or source in quantisation.nodes:
                path = along(source)
                if path is not None:
                    return [*path, node]
        return None

    path = along(quantisation.out)
    assert path is not None
    return rotated + path


def _without_selects(layout: str) -> str:
    return " ".join("#" if token.isdigit() else token for token in layout.split())


__all__ = ["CANONICAL_ROLES", "Canonicalised", "Canonicaliser", "Findings", "name_of", "restore"]
