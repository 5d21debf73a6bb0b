"""Decode steps of whole stacks under CUDA graphs: plain Inductor, with the cache written in two ways, and rope_fusion, given both.

The shapes are those of GPT-OSS-20B (24 layers) and Llama-3-8B (32 layers) without embedding and head, with random weights; every variant
has the same weights, caches and attention kernel. Each sequence has 1024 tokens in its cache.

GPT-OSS's four active experts hold 4-bit weights: 4 × 4.25 bits for each weight of an expert, about what one expert's weights take in bf16.
So a token reads as many bytes as from one dense bf16 MLP of an expert's size, 2880, which stands here for the experts. (In a larger batch
more experts are active than four, which is left out.) The shapes named "dense" have the four experts as one MLP of 4 × 2880 in bf16, which
reads four times as much.

"engine" is the same layer in vLLM's operators: rotary_embedding, static_scaled_fp8_quant and reshape_and_cache_flash.

One layer is compiled, and called for every layer with that layer's weights: regional compilation, which gives the kernels that compiling
the whole stack gives, since a layer begins by adding what the previous one left for it. ``decode_whole`` compiles whole stacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

import rope_fusion
from rope_fusion.bench_timing import POISON, compile_ahead, count_of, fp8_suits, launches, needs_gpu, ours, times_us

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
CONTEXT, PAGE, FILLED = 1040, 16, 1024
BATCHES = (1, 16, 64)
skipped = needs_gpu


@dataclass(frozen=True)
class Shape:
    """A decoder stack."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    dim: int
    mlp: int
    fp8: bool = False
    engine: bool = False


SHAPES = (
    Shape("gpt-oss-20b bf16", 24, 2880, 64, 8, 64, 2880),
    Shape("gpt-oss-20b fp8", 24, 2880, 64, 8, 64, 2880, fp8=True),
    Shape("gpt-oss-20b engine fp8", 24, 2880, 64, 8, 64, 2880, fp8=True, engine=True),
    Shape("llama-3-8b bf16", 32, 4096, 32, 8, 128, 14336),
    Shape("gpt-oss-20b dense bf16", 24, 2880, 64, 8, 64, 4 * 2880),
    Shape("gpt-oss-20b dense fp8", 24, 2880, 64, 8, 64, 4 * 2880, fp8=True),
)
REHEARSED = (
    Shape("small bf16", 2, 64, 8, 2, 16, 64),
    Shape("small fp8", 2, 64, 8, 2, 16, 64, fp8=True),
    Shape("small engine fp8", 2, 64, 8, 2, 16, 64, fp8=True, engine=True),
)


class Variant(NamedTuple):
    """A backend and the way in which the cache is written."""

    name: str
    spelling: str  # "view" | "direct" | "engine"
    with_us: bool


PLAIN_OPERATORS = (
    Variant("Inductor, view", "view", False),
    Variant("Inductor, direct", "direct", False),
    Variant("rope_fusion, view", "view", True),
    Variant("rope_fusion, direct", "direct", True),
)
ENGINE_OPERATORS = (Variant("Inductor", "engine", False), Variant("rope_fusion", "engine", True))


class Layer(NamedTuple):
    """One layer's weights, [out, in], and caches, [blocks, PAGE, heads, dim]."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    k_cache: Tensor
    v_cache: Tensor


@dataclass(frozen=True)
class Measurement:
    """Microseconds per step, and launches, by variant."""

    model: str
    batch: int
    us: dict[str, float]
    kernels: dict[str, dict[str, int] | None]  # by name, of one layer; of the step, where whole stacks are compiled
    error: dict[str, float]  # ‖result − eager‖ / ‖eager‖ after all layers
    hits: dict[str, dict[str, int]] = field(default_factory=dict)
    wrong: str | None = None  # what is not as it should be

    def best(self, prefix: str) -> str:
        """The fastest variant whose name begins so."""
        return min((name for name in self.us if name.startswith(prefix)), key=lambda name: self.us[name])

    @property
    def gain(self) -> float:
        """The best of plain Inductor over the slowest of ours: whatever the spelling, so much is gained at least."""
        slowest = max(us for name, us in self.us.items() if name.startswith("rope_fusion"))
        return self.us[self.best("Inductor")] / slowest

    @property
    def gain_over_view(self) -> float | None:
        """For a model that writes its cache through a view."""
        view = self.us.get("Inductor, view")
        return None if view is None else view / self.us["rope_fusion, view"]

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """Of all sequences together, by variant."""
        return {name: self.batch / us * 1e6 for name, us in self.us.items()}


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    """Static FP8."""
    return (x.float() / scale).clamp(-448, 448).to(FP8)


def store(cache: Tensor, x: Tensor, slots: Tensor, spelling: str) -> None:
    """Write x [B, H, D] at its slots."""
    if x.element_size() == 1 and spelling != "direct":  # eager torch cannot index FP8 tensors; Inductor can
        cache, x = cache.view(torch.uint8), x.view(torch.uint8)
    if spelling == "view":
        cache.view(-1, *cache.shape[2:])[slots] = x
    else:
        cache[slots // PAGE, slots % PAGE] = x


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neox pairs, in float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def prologue(
    shape: Shape,
    spelling: str,
    qkv: Tensor,
    layer: Layer,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    scale: Tensor,
) -> Tensor:
    """The q that attention takes, [B, Hq, D]; K and V are in their caches."""
    sizes = [shape.q_heads * shape.dim, shape.kv_heads * shape.dim, shape.kv_heads * shape.dim]
    q, k, v = qkv.split(sizes, -1)
    if spelling == "engine":
        torch.ops._C.rotary_embedding(positions, q, k, shape.dim, table, True)
        q8 = torch.empty(q.shape, dtype=FP8, device=q.device)
        torch.ops._C.static_scaled_fp8_quant(q8, q, scale)
        k, v = (x.view(x.shape[0], -1, shape.dim) for x in (k, v))
        torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, layer.k_cache, layer.v_cache, slots, "fp8", scale, scale)
        return q8.view(q.shape[0], -1, shape.dim)
    q, k, v = (x.view(x.shape[0], -1, shape.dim) for x in (q, k, v))
    cos, sin = (x[:, None] for x in table[positions].chunk(2, -1))
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    if shape.fp8:
        q, k, v = (quantised(x, scale) for x in (q, k, v))
    store(layer.k_cache, k, slots, spelling)
    store(layer.v_cache, v, slots, spelling)
    return q


def layer_function(shape: Shape, spelling: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """One layer: add, norm, packed qkv, RoPE, cache write, attention, MLP."""

    def forward(
        x: Tensor, delta: Tensor, layer: Layer, table: Tensor, positions: Tensor, slots: Tensor, length: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = x + delta
        qkv = linear(rms_norm(x, x.shape[-1:]), layer.qkv)
        q = prologue(shape, spelling, qkv, layer, table, positions, slots, scale)
        attended = torch.ops.rope_fusion_bench.decode_attention(
            q, layer.k_cache, layer.v_cache, length, scale, scale, scale, CONTEXT
        )
        x = x + linear(attended.reshape(x.shape[0], -1), layer.out)
        gate, up = linear(rms_norm(x, x.shape[-1:]), layer.up).chunk(2, -1)
        return x, linear(silu(gate) * up, layer.down)

    return forward


def step(function: Callable[..., tuple[Tensor, Tensor]], layers: Sequence[Layer], x: Tensor, *shared: Tensor) -> Tensor:
    """All layers, by a function for one."""
    delta = torch.zeros_like(x)
    for layer in layers:
        x, delta = function(x, delta, layer, *shared)
    return x + delta


def make_layers(shape: Shape, batch: int, count: int, device: str) -> list[Layer]:
    """Random weights of a size that keeps values near 1, and caches full of random values."""
    generator = torch.Generator(device).manual_seed(0)

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=BF16, generator=generator) * columns**-0.5

    def cache() -> Tensor:
        size = (batch * CONTEXT // PAGE, PAGE, shape.kv_heads, shape.dim)
        return torch.randn(size, device=device, dtype=BF16, generator=generator).to(FP8 if shape.fp8 else BF16)

    width, heads = shape.q_heads * shape.dim, shape.q_heads + 2 * shape.kv_heads
    return [
        Layer(
            weight(heads * shape.dim, shape.hidden),
            weight(shape.hidden, width),
            weight(2 * shape.mlp, shape.hidden),
            weight(shape.hidden, shape.mlp),
            cache(),
            cache(),
        )
        for _ in range(count)
    ]


def inputs(shape: Shape, batch: int, device: str) -> tuple[Tensor, ...]:
    """x, the cos/sin table (in bf16 where engines have it so), positions, slots, length and scale."""
    frequency = 150000.0 ** (-torch.arange(0, shape.dim, 2, device=device) / shape.dim)
    angles = torch.arange(131072 if device.startswith("cuda") else 2 * FILLED, device=device)[:, None] * frequency
    table = torch.cat([angles.cos(), angles.sin()], -1)
    return (
        torch.randn(batch, shape.hidden, device=device).to(BF16),
        table.to(BF16) if shape.engine else table,
        torch.full((batch,), FILLED, device=device),
        torch.arange(batch, device=device) * CONTEXT + FILLED,
        torch.full((1,), FILLED + 1, device=device, dtype=torch.int32),
        torch.full((1,), 0.05 if shape.fp8 else 1.0, device=device),
    )


def forget_new_tokens(layers: Sequence[Layer], slots: Tensor) -> None:
    """NaN where the step is to write, so that a write that is missing shows in its result."""
    for layer in layers:
        for cache in (layer.k_cache, layer.v_cache):
            cache.view(torch.uint8)[slots // PAGE, slots % PAGE] = POISON


def variants(shape: Shape) -> tuple[Variant, ...]:
    """What is compared for a shape."""
    return ENGINE_OPERATORS if shape.engine else PLAIN_OPERATORS


def compiled_step(
    shape: Shape, variant: Variant, layers: Sequence[Layer], whole: bool, device: str
) -> Callable[..., Tensor]:
    """The step, with one layer compiled or, `whole`, all of them in one graph."""
    how = _how(variant, device)
    function = layer_function(shape, variant.spelling)
    if whole:
        return torch.compile(functools.partial(step, function, layers), dynamic=False, **how)
    return functools.partial(step, torch.compile(function, dynamic=False, **how), layers)


def _how(variant: Variant, device: str) -> dict[str, Any]:
    return ours(device) if variant.with_us else {}


def compile_job(job: tuple[Shape, int, Variant, bool], device: str) -> dict[str, int]:
    """Compile one variant, call it, and count its launches: of one layer, or of all together where they are compiled so."""
    shape, batch, variant, whole = job
    _register(device)
    layers = make_layers(shape, batch, shape.layers if whole else 1, device)
    x, *shared = inputs(shape, batch, device)
    with torch.no_grad():
        if whole:
            return launches(functools.partial(compiled_step(shape, variant, layers, whole, device), x, *shared))
        function = torch.compile(layer_function(shape, variant.spelling), dynamic=False, **_how(variant, device))
        return launches(functools.partial(function, x, torch.zeros_like(x), layers[0], *shared))


def measure(
    shape: Shape, batch: int, device: str, kernels: dict[str, dict[str, int] | None], whole: bool
) -> Measurement:
    """Check the variants against eager on fresh random inputs, then time them in turns."""
    layers = make_layers(shape, batch, shape.layers, device)
    arguments = inputs(shape, batch, device)
    slots = arguments[3]
    torch.compiler.reset()
    calls, error, hits = {}, {}, {}
    with torch.no_grad():
        eager = functools.partial(step, layer_function(shape, "engine" if shape.engine else "bytes"), layers)
        forget_new_tokens(layers, slots)
        expected = eager(*arguments).float()
        for variant in variants(shape):
            compiled = compiled_step(shape, variant, layers, whole, device)
            forget_new_tokens(layers, slots)
            with rope_fusion.record() as report:
                got = compiled(*arguments).float()
            error[variant.name] = ((got - expected).norm() / expected.norm()).item()
            if variant.with_us:
                hits[variant.name] = report.hits
            calls[variant.name] = functools.partial(compiled, *arguments)
        times = times_us(list(calls.values()), device, budget_us=100e3)
    return Measurement(
        shape.name, batch, dict(zip(calls, times, strict=True)), kernels, error, hits, _wrong(error, hits)
    )


def _wrong(error: dict[str, float], hits: dict[str, dict[str, int]]) -> str | None:
    plain = max(value for name, value in error.items() if name.startswith("Inductor"))
    for name, value in error.items():
        # As far from eager as plain Inductor is, or a few steps of bf16: every layer amplifies what another rounding does.
        if not value <= max(2 * plain, 2**-5):  # NaN is wrong as well
            return f"{name}: error {value:.2g}, plain Inductor {plain:.2g}"
    unfused = [name for name, found in hits.items() if not found]
    return f"{', '.join(unfused)}: nothing was fused" if unfused else None


def _register(device: str) -> None:
    """Make the attention known, and on a GPU those engine operators that no engine has brought."""
    from rope_fusion import bench_attention  # noqa: F401  (importing it registers the operator)

    if device.startswith("cuda"):
        from rope_fusion.bench_engine_ops import register_missing

        register_missing()


def shapes(device: str) -> list[Shape]:
    """What suits the device; engine operators are left out where there are none."""
    engine = hasattr(torch.ops._C, "rotary_embedding") and hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash")
    found = SHAPES if device.startswith("cuda") else REHEARSED
    return [shape for shape in found if (engine or not shape.engine) and (fp8_suits(device) or not shape.fp8)]


def benchmark(
    device: str, quick: bool = False, wanted: Sequence[tuple[Shape, int]] | None = None, whole: bool = False
) -> list[Measurement]:
    """Measure every shape at every batch size, or those that are `wanted`."""
    _register(device)
    if wanted is None:
        batches = BATCHES[:1] if quick else BATCHES if device.startswith("cuda") else (3,)
        wanted = [(shape, batch) for shape in shapes(device) for batch in batches]
    jobs = [(shape, batch, variant, whole) for shape, batch in wanted for variant in variants(shape)]
    counted = iter(compile_ahead("rope_fusion.bench_cases_decode", jobs, device))
    kernels = [{variant.name: next(counted) for variant in variants(shape)} for shape, _ in wanted]
    return [measure(shape, batch, device, found, whole) for (shape, batch), found in zip(wanted, kernels, strict=True)]


def table(found: Sequence[Measurement]) -> str:
    """One row per shape and batch size."""
    rows = []
    for m in found:
        best, mine = m.best("Inductor"), m.best("rope_fusion")
        rows.append(
            (
                m.model,
                m.batch,
                _us(m, "Inductor, view"),
                _us(m, "Inductor, direct", "Inductor"),
                _us(m, "rope_fusion, view"),
                _us(m, "rope_fusion, direct", "rope_fusion"),
                "" if m.gain_over_view is None else f"{m.gain_over_view:.3f}",
                f"{m.gain:.3f}",
                f"{m.tokens_per_second[best]:.0f} → {m.tokens_per_second[mine]:.0f}",
                "" if m.kernels[best] is None else f"{count_of(m.kernels[best])} → {count_of(m.kernels[mine])}",
                f"{max(m.error.values()):.0e}",
                f"WRONG: {m.wrong}" if m.wrong else ", ".join(f"{name} {n}" for name, n in m.hits[mine].items()),
            )
        )
    headers = (
        "model",
        "batch",
        "Inductor, view",
        "direct",
        "rope_fusion, view",
        "direct",
        "× view",
        "× best",
        "tokens/s",
        "kernels",
        "error",
        "hits",
    )
    return "µs per step; hits are of one layer\n\n" + tabulate(rows, headers, disable_numparse=True)


def _us(m: Measurement, *names: str) -> str:
    return next((f"{m.us[name]:.0f}" for name in names if name in m.us), "")
