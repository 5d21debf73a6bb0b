"""``rope-fusion demo``: three small models on the CPU, compiled by plain Inductor and by rope_fusion in one run.

On a CPU no kernel of ours pays, so what makes the difference there is the cache write that Inductor performs in place
instead of cloning the cache. The fused operators are shown by their eager reference, which counts but does not race.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional

from rope_fusion.backend import rope_fusion
from rope_fusion.report import Report

BLOCK = 16  # tokens per block of a paged cache
BATCH = 4
ROUNDS = 60
FP8 = torch.float8_e4m3fn
Cache = Tensor | tuple[Tensor, Tensor]  # [2, blocks, block, heads, dim], or K and V by themselves
FP8_MAX = torch.finfo(FP8).max


def cos_sin_table(positions: int, rotary_dim: int) -> Tensor:
    """cos and sin of every position side by side: ``[positions, rotary_dim]`` in float32."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    angles = torch.arange(positions).float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [tokens, heads, dim]``, first half against second half."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """``x`` in FP8 with a static scale."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, lengths: Tensor) -> Tensor:
    """Attention of one query token per sequence over the blocks that its sequence owns.

    Args:
        q: ``[batch, heads, dim]``.
        k_cache: ``[blocks, block, kv_heads, dim]``, in the dtype of ``q``; ``v_cache`` likewise.
        blocks: ``[batch, blocks_per_sequence]``.
        lengths: ``[batch]``, tokens that each sequence holds.
    """
    k, v = (cache[blocks].flatten(1, 2).transpose(1, 2).to(q.dtype) for cache in (k_cache, v_cache))
    mask = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    out = functional.scaled_dot_product_attention(q[:, :, None], k, v, mask[:, None, None], enable_gqa=True)
    return out[:, :, 0]


class PagedLayer(nn.Module):
    """Attention with packed qkv and a paged cache: K and V in one buffer or in one each, written through a view."""

    q_scale: Tensor
    kv_scale: Tensor

    def __init__(self, heads: int, kv_heads: int, dim: int, fp8: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.fp8 = heads, kv_heads, dim, fp8
        self.norm = nn.RMSNorm(heads * dim)
        self.qkv = nn.Linear(heads * dim, (heads + 2 * kv_heads) * dim)
        self.out = nn.Linear(heads * dim, heads * dim)
        self.register_buffer("q_scale", torch.tensor(0.02))
        self.register_buffer("kv_scale", torch.tensor(0.01))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, slots: Tensor, pages: tuple) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split([n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        q = rotate(q.unflatten(-1, (self.heads, self.dim)), cos, sin)
        k = rotate(k.unflatten(-1, (self.kv_heads, self.dim)), cos, sin)
        v = v.unflatten(-1, (self.kv_heads, self.dim))
        if self.fp8:
            q8, k, v = quantise(q, self.q_scale), quantise(k, self.kv_scale), quantise(v, self.kv_scale)
            q = q8.to(x.dtype) * self.q_scale.to(x.dtype)
        k_cache, v_cache = cache.unbind(0) if isinstance(cache, Tensor) else cache
        k_cache.view(-1, self.kv_heads, self.dim)[slots] = k
        v_cache.view(-1, self.kv_heads, self.dim)[slots] = v
        out = paged_attention(q, k_cache, v_cache, *pages)
        if self.fp8:
            out = out * self.kv_scale.to(x.dtype)
        return x + self.out(out.flatten(-2))


class PagedStack(nn.Module):
    """Layers that share one cos/sin table, between an embedding and a head."""

    cos_sin: Tensor

    def __init__(self, layers: int, heads: int, kv_heads: int, dim: int, fp8: bool, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, heads * dim)
        self.layers = nn.ModuleList([PagedLayer(heads, kv_heads, dim, fp8) for _ in range(layers)])
        self.head = nn.Linear(heads * dim, vocabulary, bias=False)
        self.register_buffer("cos_sin", cos_sin_table(1024, dim))

    def forward(self, tokens: Tensor, positions: Tensor, blocks: Tensor, caches: Sequence[Cache]) -> Tensor:
        cos, sin = self.cos_sin[positions].chunk(2, dim=-1)
        slots = blocks.gather(1, (positions // BLOCK)[:, None])[:, 0] * BLOCK + positions % BLOCK
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cos, sin, cache, slots, (blocks, positions + 1))
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """A model and how it decodes: ``decode(model, dtype)`` yields the logits of one step after the other, endlessly."""

    name: str
    title: str
    model: Callable[[], nn.Module]
    decode: Callable[[Callable[..., Any], torch.dtype], Iterator[Tensor]]
    dtype: torch.dtype = torch.bfloat16


def _paged_case(name: str, title: str, fp8: bool, cache_blocks: int) -> Case:
    heads, kv_heads, dim, layers = 8, 2, 64, 2

    def decode(model: Callable[..., Any], dtype: torch.dtype) -> Iterator[Tensor]:
        blocks = torch.arange(BATCH * 8).view(8, BATCH).t().contiguous()  # sequences own interleaved blocks
        shape = (cache_blocks, BLOCK, kv_heads, dim)
        caches: list[Cache] = [torch.zeros(2, *shape, dtype=dtype) for _ in range(layers)]
        if fp8:  # Inductor has no code for a joint FP8 buffer on the CPU
            caches = [(torch.zeros(shape, dtype=FP8), torch.zeros(shape, dtype=FP8)) for _ in range(layers)]
        for position in range(8 * BLOCK):
            tokens = (torch.arange(BATCH) * 7 + position * 3) % 256
            yield model(tokens, torch.full((BATCH,), position), blocks, caches)

    return Case(name, title, lambda: PagedStack(layers, heads, kv_heads, dim, fp8), decode)


def _llama_case() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )

    def decode(model: Callable[..., Any], dtype: torch.dtype) -> Iterator[Tensor]:
        cache = StaticCache(config=config, max_cache_len=128)
        cache.early_initialization(BATCH, 2, 32, dtype, torch.device("cpu"))
        for position in range(128):
            tokens = ((torch.arange(BATCH) * 7 + position * 3) % 256)[:, None]
            where = torch.full((1, 1), position)
            yield model(input_ids=tokens, position_ids=where, past_key_values=cache, use_cache=True).logits[:, 0]

    return Case("llama", "Hugging Face Llama, random weights, StaticCache", lambda: LlamaForCausalLM(config), decode)


def cases() -> list[Case]:
    """The demo's models; the one from transformers only where transformers is installed."""
    found = [
        _paged_case("gpt_oss", "GPT-OSS-style stack: packed qkv, FP8 q, FP8 paged cache", True, 4096),
        _paged_case("paged", "decode loop over a joint bf16 paged cache", False, 2048),
    ]
    try:
        found.append(_llama_case())
    except ImportError as missing:
        print(f"The Hugging Face Llama is left out: {missing}. Install it with: pip install transformers\n")
    return found


def main(dump_dir: Path | None = None) -> int:
    """Run the demo and print it; graphs before and after the pass go below ``dump_dir`` (default: a new folder)."""
    folder = dump_dir or Path(tempfile.mkdtemp(prefix="rope_fusion_demo_"))
    began = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # on a busy machine several threads wait for each other, and the figures mean nothing
    print(f"torch {torch.__version__}, one thread; compiling takes a few seconds per model\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tables say what ours say, and the others are about names
        summary = [_run(case, folder / case.name) for case in cases()]
    headers = ("model", "plain Inductor", "rope_fusion", "ratio", "eager error", "Inductor's", "ours")
    print("Milliseconds per decode step (median), and largest error against float64, in units of the largest logit:\n")
    print(tabulate(summary, headers, floatfmt=("", ".2f", ".2f", ".2f", ".1e", ".1e", ".1e")))
    print(f"\nGraphs before and after the pass, and their difference: {folder}")
    print(f"The whole demo took {time.perf_counter() - began:.0f} s.")
    return 0


def _run(case: Case, folder: Path) -> tuple[Any, ...]:
    model = _with_parameters_in(case.dtype, case.model().eval())
    precise = _with_parameters_in(torch.float64, copy.deepcopy(model))
    report, reference = Report(), Report()
    ours: dict[str, Any] = {"rope_fusion.report": report, "rope_fusion.dump_dir": str(folder)}
    forced: dict[str, Any] = {
        "rope_fusion.report": reference,
        "rope_fusion.kernels": "reference",
        "rope_fusion.dump_dir": str(folder / "reference"),
    }
    plain = torch.compile(model)
    fused = torch.compile(model, backend=rope_fusion, options=ours)
    shown = torch.compile(model, backend=rope_fusion, options=forced)
    with torch.no_grad():
        truth = _logits(case, precise, torch.float64)
        errors = [_error(_logits(case, variant, case.dtype), truth) for variant in (model, plain, fused)]
        forced_error = _error(_logits(case, shown, case.dtype), truth)
        slow, fast = _race(case, plain, fused)
    print(f"== {case.title}\n\n{report.table()}\n")
    print(f'With rope_fusion.kernels="reference": hits {reference.hits}, error {forced_error:.1e}\n')
    return case.name, slow, fast, slow / fast, *errors


def _with_parameters_in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """``model`` with its parameters cast; buffers (cos/sin tables, scales) stay in float32 as checkpoints have them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _logits(case: Case, model: Callable[..., Any], dtype: torch.dtype, steps: int = 6) -> Tensor:
    return torch.stack([logits.double() for _, logits in zip(range(steps), case.decode(model, dtype), strict=False)])


def _error(logits: Tensor, truth: Tensor) -> float:
    return ((logits - truth).abs().max() / truth.abs().max()).item()


def _race(case: Case, *variants: Callable[..., Any]) -> list[float]:
    """Median step times in milliseconds, taken in turns, so that whatever else the machine does hits all alike."""
    running = [case.decode(variant, case.dtype) for variant in variants]
    times: list[list[float]] = [[] for _ in variants]
    for _ in range(ROUNDS):
        for steps, taken in zip(running, times, strict=True):
            start = time.perf_counter()
            next(steps)
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]
