"""Programs in engine operators: how qkv is split, how caches lie, in which order things happen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from engine_graphs import in_place
from engine_standins import register
from torch import Tensor

register()

TOKENS, Q_HEADS, KV_HEADS, DIM, BLOCKS, PAGE, ROWS = 6, 4, 2, 16, 5, 4, 32
SIZES = [Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
FP8 = torch.float8_e4m3fn


def table(rotary_dim: int = DIM, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    angles = torch.outer(torch.arange(ROWS).float(), 1.0 / 100 ** (torch.arange(0, rotary_dim, 2) / rotary_dim))
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def arguments(**changed: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    cache = torch.zeros(BLOCKS, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16)
    given: dict[str, Any] = {
        "x": torch.randn(TOKENS, sum(SIZES), dtype=torch.bfloat16),
        "positions": torch.tensor([3, 4, 5, 0, 1, 7]),
        "table": table(),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "slots": torch.tensor([17, 2, 3, -1, 8, 11]),
        "scale": torch.tensor([0.05]),
    }
    return {**given, **changed}


def split_columns(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three views of one packed buffer, [T, heads * dim]."""
    return (x * 2).split(SIZES, -1)


def split_heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three views of one packed buffer, [T, heads, dim]."""
    return (x * 2).view(x.shape[0], -1, DIM).split([Q_HEADS, KV_HEADS, KV_HEADS], 1)


def slices(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    packed = x * 2
    q, k = SIZES[0], SIZES[1]
    return packed[:, :q], packed[:, q : q + k], packed[:, q + k :]


def chunks_of_heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads are viewed after the split."""
    q, k, v = (x * 2).split(SIZES, -1)
    return tuple(part.view(part.shape[0], -1, DIM) for part in (q, k, v))


def separate(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three buffers of their own."""
    return tuple(part * 2 for part in x.split(SIZES, -1))


SPLITS = [split_columns, split_heads, slices, chunks_of_heads, separate]
FORMS = ["v2", "v1", "raw"]


def form_settings(form: str) -> dict[str, Any]:
    return {"v2": form == "v2", "transform": in_place if form == "raw" else None}


def rotate(positions: Tensor, q: Tensor, k: Tensor | None, table: Tensor, is_neox: bool = True) -> None:
    torch.ops._C.rotary_embedding(positions, q, k, DIM, table, is_neox)


def quantised(q: Tensor, scale: Tensor) -> Tensor:
    q8 = torch.empty(q.shape, dtype=FP8, device=q.device)
    torch.ops._C.static_scaled_fp8_quant(q8, q, scale)
    return q8


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, kind: str, scale: Tensor) -> None:
    k, v = (part.view(part.shape[0], KV_HEADS, DIM) for part in (k, v))
    torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, k_cache, v_cache, slots, kind, scale, scale)


# Layouts: a name, the shape of what the graph receives, and the key and value caches in it.


def apart(caches: list[Tensor]) -> tuple[Tensor, Tensor]:
    return caches[0], caches[1]


def heads_first(caches: list[Tensor]) -> tuple[Tensor, Tensor]:
    return caches[0].transpose(1, 2), caches[1].transpose(1, 2)


def joint_first(caches: list[Tensor]) -> tuple[Tensor, Tensor]:
    k, v = caches[0].unbind(0)
    return k, v


def joint_second(caches: list[Tensor]) -> tuple[Tensor, Tensor]:
    return caches[0][:, 0], caches[0][:, 1]


def joint_last(caches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """vLLM 0.33: [blocks, heads, places, 2 * dim]."""
    k, v = caches[0].transpose(1, 2).split(DIM, -1)
    return k, v


LAYOUTS: dict[Callable[[list[Tensor]], tuple[Tensor, Tensor]], list[tuple[int, ...]]] = {
    apart: [(BLOCKS, PAGE, KV_HEADS, DIM)] * 2,
    heads_first: [(BLOCKS, KV_HEADS, PAGE, DIM)] * 2,
    joint_first: [(2, BLOCKS, PAGE, KV_HEADS, DIM)],
    joint_second: [(BLOCKS, 2, PAGE, KV_HEADS, DIM)],
    joint_last: [(BLOCKS, KV_HEADS, PAGE, 2 * DIM)],
}
KINDS = {
    "auto": torch.bfloat16,
    "fp8": torch.uint8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.uint8,
}


def held_by(kind: str) -> torch.dtype:
    """The dtype whose bits a cache of bytes holds."""
    return torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn


ORDERS = ("quantise first", "store first", "no quantisation")


def latent_layer(kind: str) -> Callable[..., Tensor]:
    """DeepSeek's: q's and k's rotary parts are interleaved, k_pe has one head, and a row of the cache holds kv_c and k_pe."""

    def layer(q, kv, positions, table, cache, slots, scale):
        q_pe = (q * 2)[..., 32:]
        kv_c, k_pe = (kv * 2).split([32, DIM], -1)
        k_pe = k_pe.unsqueeze(1)
        rotate(positions, q_pe, k_pe, table, is_neox=False)
        torch.ops._C_cache_ops.concat_and_cache_mla(kv_c, k_pe.squeeze(1), cache, slots, kind, scale)
        return q_pe * 2

    return layer


@dataclass(frozen=True)
class Case:
    """One layer's spelling."""

    split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    layout: Callable[[list[Tensor]], tuple[Tensor, Tensor]]
    kind: str
    order: str

    def caches(self) -> list[Tensor]:
        return [
            torch.zeros(shape, dtype=torch.uint8).view(KINDS[self.kind])
            if KINDS[self.kind].itemsize == 1
            else torch.zeros(shape, dtype=KINDS[self.kind])
            for shape in LAYOUTS[self.layout]
        ]

    def layer(self, x: Tensor, positions: Tensor, table: Tensor, slots: Tensor, scale: Tensor, caches: list[Tensor]):
        q, k, v = self.split(x)
        rotate(positions, q, k, table)
        outputs = []
        if self.order == "quantise first":
            outputs.append(quantised(q.reshape(q.shape[0], -1), scale))
        store(k, v, *self.layout(caches), slots, self.kind, scale)
        if self.order == "store first":
            outputs.append(quantised(q.reshape(q.shape[0], -1), scale))
        if self.order == "no quantisation":
            outputs.append(q * 2)
        return outputs


ALL = [Case(*values) for values in itertools.product(SPLITS, LAYOUTS, KINDS, ORDERS)]


def pairs(case: Case) -> set[tuple[Any, ...]]:
    """Every two properties of a case."""
    return set(itertools.combinations((case.split, case.layout, case.kind, case.order), 2))


def covering(cases: list[Case]) -> list[Case]:
    """Few cases in which every two properties meet, chosen greedily."""
    left = set().union(*map(pairs, cases))
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


COVERING = covering(ALL)


def decode_step(
    hidden: Tensor,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    scale: Tensor,
    qkv_weights: list[Tensor],
    out_weights: list[Tensor],
    caches: list[Tensor],
) -> Tensor:
    """A decode step in vLLM's operators: one packed projection, RoPE, static FP8 q and an FP8 cache in each layer.

    Attention itself is left out; what it would read (q8, and the caches through `caches`) is there.
    """
    for qkv, out, cache in zip(qkv_weights, out_weights, caches, strict=True):
        q, k, v = (hidden @ qkv).split(SIZES, -1)
        rotate(positions, q, k, table)
        q8 = quantised(q, scale)
        k_cache, v_cache = cache.unbind(0)
        store(k, v, k_cache, v_cache, slots, "fp8", scale)
        hidden = hidden + q8.to(hidden.dtype) @ out
    return hidden


def decode_arguments(layers: int = 4) -> list[Any]:
    """Arguments of `decode_step`; the caches are uint8, [2, blocks, places, heads, dim]."""
    given = arguments()
    width = SIZES[0]
    return [
        torch.randn(TOKENS, width, dtype=torch.bfloat16),
        *(given[name] for name in ("positions", "table", "slots", "scale")),
        [torch.randn(width, sum(SIZES), dtype=torch.bfloat16) * 0.1 for _ in range(layers)],
        [torch.randn(width, width, dtype=torch.bfloat16) * 1e-5 for _ in range(layers)],
        [torch.zeros(2, BLOCKS, PAGE, KV_HEADS, DIM, dtype=torch.uint8) for _ in range(layers)],
    ]
