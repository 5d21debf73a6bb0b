"""Calls of ``rope_fusion::rope_qkv`` that cover what it can do: for tests, compilation in CI, and the check on a GPU.

A ``Variant`` names one choice on every axis; ``covering`` picks a small set in which every pair of choices that can go
together does; ``make_call`` turns a variant into arguments with fresh random data.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_fusion.kernels.rope_qkv import encoded

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Variant:
    """One choice on every axis of the operator; ``make_call`` says what each means."""

    dtype: torch.dtype
    angle_dtype: torch.dtype
    angles: str  # "table", "shared table" (one row of positions for all batch entries), "rows", "shared rows"
    full_width: bool
    pairing: str  # "neox", "interleaved", "halves out"
    inverse: bool
    dims: tuple[int, int, int]  # head_dim, rotary_dim, rotary_start
    v_dim: int | None  # None: as head_dim
    heads: tuple[int, int]  # of q, of k and v
    batch_seq: tuple[int, int]
    source: str  # "packed", "contiguous", "transposed"
    layout: str
    paired_slots: bool  # block number and offset apart
    index_dtype: torch.dtype
    slots: str  # "all", "padded" (some negative), "wrapped" (some negative, as Python indexes), "short"
    q_fp8: torch.dtype | None
    cache: str  # "same", "wider", "fp8", "bytes"
    scales: str  # "tensor", "number", "per head"
    multiplies: bool
    needs: tuple[bool, bool]  # need_q, need_k
    wide_out: bool  # rotated values stay in fp32,
    narrow_result: bool  # and are rounded where they are returned
    math: str  # "fp32", "exact fp32", "exact own dtype"
    writes: str  # "kv", "k", "nothing"

    @property
    def joint(self) -> bool:
        """Whether K and V share one buffer."""
        return "0" in self.layout.split()


AXES: dict[str, tuple[Any, ...]] = {
    "dtype": (BF16, FP16, FP32),
    "angle_dtype": (FP32, None),  # None: as dtype
    "angles": ("table", "shared table", "rows", "shared rows"),
    "full_width": (False, True),
    "pairing": ("neox", "interleaved", "halves out"),
    "inverse": (False, True),
    "dims": (
        (64, 64, 0),
        (128, 128, 0),
        (96, 96, 0),
        (80, 80, 0),
        (192, 192, 0),
        (256, 256, 0),
        (64, 32, 0),
        (192, 64, 128),
        (96, 32, 16),
        (80, 20, 0),
    ),
    "v_dim": (None, 48),
    "heads": ((8, 2), (4, 4), (6, 3), (5, 1)),
    "batch_seq": ((1, 7), (3, 1), (2, 5)),
    "source": ("packed", "contiguous", "transposed"),
    "layout": ("n p h d", "n h p d", "0 n p h d", "n 0 p h d", "p h d", "p (hd)", "b h p d", "b p h d"),
    "paired_slots": (False, True),
    "index_dtype": (torch.int64, torch.int32),
    "slots": ("all", "padded", "wrapped", "short"),
    "q_fp8": (E4M3, None, E5M2),
    "cache": ("same", "fp8", "bytes", "wider"),
    "scales": ("tensor", "number", "per head"),
    "multiplies": (False, True),
    "needs": ((False, False), (True, True), (False, True)),
    "wide_out": (False, True),
    "narrow_result": (False, True),
    "math": ("fp32", "exact fp32", "exact own dtype"),
    "writes": ("kv", "k", "nothing"),
}


def is_valid(variant: Variant) -> bool:
    """Whether the choices go together."""
    static = "b" in variant.layout.split()
    if variant.paired_slots and "n" not in variant.layout.split():
        return False
    if variant.slots == "short" and (static or variant.batch_seq == (3, 1)):
        return False
    return not (variant.joint and (variant.v_dim is not None or variant.writes != "kv"))


def covering(
    axes: dict[str, tuple[Any, ...]] = AXES, valid: Callable[[Variant], bool] = is_valid, seed: int = 0
) -> list[Variant]:
    """A small list of variants in which every possible pair of choices occurs; the same for the same arguments."""
    rng = random.Random(seed)
    names = list(axes)

    def make(choice: dict[str, Any]) -> Variant:
        angle_dtype = choice["angle_dtype"] or choice["dtype"]
        return Variant(**{**choice, "angle_dtype": angle_dtype})

    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }

    def pairs_of(indices: dict[str, int]) -> set[Any]:
        return set(itertools.combinations(list(indices.items()), 2)) & open_pairs

    def candidate(seeded: Iterable[tuple[str, int]]) -> dict[str, int]:
        fixed = dict(seeded)
        return {name: fixed.get(name, rng.randrange(len(axes[name]))) for name in names}

    found: list[Variant] = []
    while open_pairs:
        seeds = rng.sample(sorted(open_pairs), min(len(open_pairs), 20))
        candidates = [candidate(pair) for pair in seeds for _ in range(10)]
        possible = [c for c in candidates if valid(make({name: axes[name][i] for name, i in c.items()}))]
        if not possible:
            # These pairs came with no valid company in ten random ones each: what excludes them is the pair itself.
            open_pairs -= set(seeds)
            continue
        best = max(possible, key=lambda c: len(pairs_of(c)))
        open_pairs -= pairs_of(best)
        found.append(make({name: axes[name][i] for name, i in best.items()}))
    return found


def describe(variant: Variant) -> str:
    """A variant in one line, for test names and reports."""
    return ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in vars(variant).items())


@dataclass
class PreparedCall:
    """Arguments of the operator. ``caches`` are those among them that it writes."""

    args: list[Any]
    options: dict[str, Any]

    @property
    def encoded(self) -> dict[str, Any]:
        """The options as ``rope_qkv.encoded`` takes them."""
        needs = {name: self.options[name] for name in ("need_q", "need_k")}
        rest = {name: value for name, value in self.options.items() if name not in needs}
        return {"options": encoded(**rest), **needs}

    @property
    def caches(self) -> list[Tensor]:
        return [cache for cache in self.args[6:8] if cache is not None]

    def with_own_caches(self) -> PreparedCall:
        """The same call on copies of the caches, so that two implementations can be compared."""
        args = [None if t is None else t.clone() if i in (6, 7) else t for i, t in enumerate(self.args)]
        return PreparedCall(args, self.options)


def random_bytes(shape: Sequence[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """A cache that holds anything, so that a write outside its slots shows; bytes are kept from being NaN in FP8."""
    if dtype.itemsize == 1:
        return (
            torch.randint(0, 96, shape, dtype=torch.uint8, generator=generator, device=generator.device)
            .to(device)
            .view(dtype)
        )
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype).to(device)


def plain_options(rotary_dim: int, **changed: Any) -> dict[str, Any]:
    """Options of a neox rotation of the first ``rotary_dim`` elements in fp32, into a paged cache as it is; with changes."""
    return {
        "interleaved": False,
        "inverse": False,
        "halves_out": False,
        "rotary_dim": rotary_dim,
        "rotary_start": 0,
        "q_fp8": None,
        "kv_fp8": None,
        "q_scale_value": 1.0,
        "k_scale_value": 1.0,
        "v_scale_value": 1.0,
        "q_scale_multiplies": False,
        "kv_scale_multiplies": False,
        "k_layout": "n p h d",
        "v_layout": "n p h d",
        "skip_negative_slots": True,
        "math_dtype": FP32,
        "out_dtype": FP32,
        "exact": False,
        **changed,
    }


def make_call(variant: Variant, seed: int = 0, device: torch.device | str = "cpu", places: int = 4) -> PreparedCall:
    """Arguments for ``variant`` with fresh random data; ``places`` is the size of a block of a paged cache."""
    device = torch.device(device)
    source = torch.device("cpu") if device.type == "meta" else device
    generator = torch.Generator(source).manual_seed(seed)
    batch, seq = variant.batch_seq
    tokens = batch * seq
    q_heads, kv_heads = variant.heads
    dim, rotary_dim, rotary_start = variant.dims
    v_dim = variant.v_dim or dim

    def rows(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=source).to(dtype).to(device)

    def states(*shape: int) -> Tensor:  # a few are large enough to saturate FP8
        x = torch.randn(shape, generator=generator, device=source)
        large = torch.rand(shape, generator=generator, device=source) < 0.01
        return torch.where(large, 300 * x, x).to(variant.dtype).to(device)

    if variant.source == "packed":
        qkv = states(batch, seq, (q_heads + kv_heads) * dim + kv_heads * v_dim)
        sizes = (q_heads * dim, kv_heads * dim, kv_heads * v_dim)
        parts = zip(qkv.split(sizes, -1), (q_heads, kv_heads, kv_heads), strict=True)
        q, k, v = (part.unflatten(-1, (h, -1)) for part, h in parts)
    elif variant.source == "contiguous":
        q, k, v = (
            states(batch, seq, q_heads, dim),
            states(batch, seq, kv_heads, dim),
            states(batch, seq, kv_heads, v_dim),
        )
    else:
        q, k, v = (
            states(batch, h, seq, d).transpose(1, 2) for h, d in ((q_heads, dim), (kv_heads, dim), (kv_heads, v_dim))
        )

    columns = rotary_dim if variant.full_width else rotary_dim // 2
    positions = None
    if "table" in variant.angles:
        table = 37
        joined = rows(table, 2 * columns, dtype=variant.angle_dtype)
        cos, sin = joined[:, :columns], joined[:, columns:]
        shape = (seq,) if variant.angles == "shared table" else (batch, seq)
        positions = (
            torch.randint(0, table, shape, generator=generator, device=source).to(variant.index_dtype).to(device)
        )
    else:
        leading = (1, seq) if variant.angles == "shared rows" else (batch, seq)
        cos, sin = (rows(*leading, columns, dtype=variant.angle_dtype) for _ in range(2))

    kv_fp8 = (variant.q_fp8 or E4M3) if variant.cache in ("fp8", "bytes") else None
    cache_dtypes: dict[str, Any] = {
        "same": variant.dtype,
        "wider": FP32 if variant.dtype != FP32 else BF16,
        "fp8": kv_fp8,
        "bytes": torch.uint8,
    }
    cache_dtype = cache_dtypes[variant.cache]
    static = "b" in variant.layout.split()
    blocks = batch if static else 1 if "n" not in variant.layout.split() else tokens // places + 3
    if static:
        places = seq + 9
    elif blocks == 1:
        places = tokens + 9

    k_cache = v_cache = slots = slot_offsets = None
    layouts = (variant.layout, variant.layout.replace("0", "1"))
    if variant.writes != "nothing":
        caches = []
        for width in (dim, v_dim):
            size = {"n": blocks, "b": blocks, "p": places, "h": kv_heads, "d": width, "(hd)": kv_heads * width, "0": 2}
            cache_shape = [size[axis] for axis in variant.layout.split()]
            caches.append(random_bytes(cache_shape, cache_dtype, device, generator))
        k_cache, v_cache = caches
        if variant.joint:
            v_cache = None
        if static:  # places of one batch entry differ
            slots = torch.rand(batch, places, generator=generator, device=source).argsort(1)[:, :seq]
        else:
            slots = torch.randperm(blocks * places, generator=generator, device=source)[:tokens]
        unstored = torch.rand(slots.shape, generator=generator, device=source) < 0.3
        if variant.paired_slots:
            slots, slot_offsets = slots // places, slots % places
        if variant.slots == "padded":
            slots = torch.where(unstored, -1, slots)
        elif variant.slots == "wrapped":
            limit = places if static else blocks if variant.paired_slots else blocks * places
            slots = torch.where(unstored, slots - limit, slots)
        elif variant.slots == "short":
            slots = slots[: tokens // 2]
            slot_offsets = None if slot_offsets is None else slot_offsets[: tokens // 2]
        slots = slots.to(variant.index_dtype).to(device)
        slot_offsets = None if slot_offsets is None else slot_offsets.to(variant.index_dtype).to(device)

    def scale(count: int) -> Tensor | None:
        if variant.scales == "number":
            return None
        return (0.02 + 0.1 * torch.rand(count, generator=generator, device=source)).to(device)

    per_head = kv_heads if variant.scales == "per head" else 1
    args = [
        q,
        k,
        v,
        cos,
        sin,
        positions,
        k_cache,
        v_cache,
        slots,
        slot_offsets,
        scale(1),
        scale(per_head),
        scale(per_head),
    ]
    if variant.writes == "nothing":
        args[2] = None
    elif variant.writes == "k":
        args[2] = args[7] = None
    exact = variant.math != "fp32"
    options = {
        "interleaved": variant.pairing != "neox",
        "inverse": variant.inverse,
        "halves_out": variant.pairing == "halves out",
        "rotary_dim": rotary_dim,
        "rotary_start": rotary_start,
        "q_fp8": variant.q_fp8,
        "kv_fp8": kv_fp8,
        "q_scale_value": 0.05,
        "k_scale_value": 0.07,
        "v_scale_value": 0.03,
        "q_scale_multiplies": variant.multiplies,
        "kv_scale_multiplies": variant.multiplies,
        "k_layout": layouts[0],
        "v_layout": layouts[1],
        "skip_negative_slots": variant.slots != "wrapped",
        "math_dtype": variant.dtype if variant.math == "exact own dtype" else FP32,
        "out_dtype": FP32 if variant.wide_out else variant.dtype,
        "result_dtype": variant.dtype if variant.narrow_result else None,
        "exact": exact,
        "need_q": variant.needs[0],
        "need_k": variant.needs[1],
    }
    return PreparedCall(args, options)
