"""Launches of a decode step of transformers' Llama with a StaticCache, by plain Inductor and by rope_fusion.

Two layers with the sizes of Llama-3-8B and random weights, batch 1, bf16: what a step launches beyond its matrix products, by name in
the JSON. transformers builds the mask and the cos/sin rows in every step, for all layers at once.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import rope_fusion
from rope_fusion.bench_timing import count_of, launches, needs_gpu, ours, own_processes

PROMPT, ROOM = 7, 128
MISSING = "transformers is not installed: pip install transformers"
ERROR = 2**-5  # a few steps of bf16 at the size of the largest logit


@dataclass(frozen=True)
class Measurement:
    """Launches of one step by name (None where nothing is launched), and results against eager's."""

    backend: str
    kernels: dict[str, int] | None
    error: float  # largest difference from eager's logits, over the largest logit
    hits: dict[str, int] = field(default_factory=dict)
    wrong: str | None = None  # what is not as it should be


def skipped(device: str) -> str | None:
    """Without transformers, or without a GPU."""
    return needs_gpu(device) if _installed() else MISSING


def _installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def benchmark(device: str, quick: bool = False) -> list[Measurement]:
    """Count in processes of their own, since a profiler may slow down what its process measures later.

    Raises:
        RuntimeError: transformers is not installed.
    """
    if not _installed():
        raise RuntimeError(MISSING)
    with own_processes(1) as pool:
        return [pool.submit(_measure, with_us, device).result() for with_us in (False, True)]


def _measure(with_us: bool, device: str) -> Measurement:
    from transformers import LlamaConfig, LlamaForCausalLM

    warnings.simplefilter("ignore")  # transformers' are about names
    torch.manual_seed(0)
    sizes = (4096, 14336, 32, 8) if device.startswith("cuda") else (64, 128, 4, 2)
    hidden, mlp, heads, kv_heads = sizes
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2 * ROOM,
    )
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).eval()
    compiled = torch.compile(model, dynamic=False, **(ours(device) if with_us else {}))
    with torch.no_grad():
        expected = _step(model, model, device)()
        call = _step(model, compiled, device)
        with rope_fusion.record() as report:
            got = call()
        error = ((got - expected).abs().max() / expected.abs().max()).item()
        kernels = launches(call) if device.startswith("cuda") else None
    wrong = None if error <= ERROR else f"error {error:.2g}"
    if with_us and not report.hits:
        wrong = "nothing was fused"
    return Measurement("rope_fusion" if with_us else "Inductor", kernels, error, report.hits, wrong)


def _step(model: Any, step: Any, device: str) -> Any:
    """A call of one decode step behind an eagerly processed prompt."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    model(torch.arange(3, 3 + PROMPT, device=device)[None], past_key_values=cache, use_cache=True)
    token, position = (torch.tensor([[number]], device=device) for number in (5, PROMPT))

    def call() -> Tensor:
        return step(token, past_key_values=cache, use_cache=True, position_ids=position).logits.float()

    return call


def table(found: Sequence[Measurement]) -> str:
    """One row per backend."""
    rows = [
        (
            m.backend,
            "" if m.kernels is None else count_of(m.kernels),
            f"{m.error:.0e}",
            f"WRONG: {m.wrong}" if m.wrong else ", ".join(f"{name} {count}" for name, count in m.hits.items()),
        )
        for m in found
    ]
    return "launches per step of two layers\n\n" + tabulate(
        rows, ("backend", "kernels", "error", "hits"), disable_numparse=True
    )
