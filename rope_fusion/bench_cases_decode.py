"""Decode steps of whole stacks under CUDA graphs: plain Inductor, with the cache written in two ways, and rope_fusion, given both.

The stacks are those of ``bench_stack``, without embedding and head; every variant has the same weights, caches and attention kernel. Each
sequence has 1024 tokens in its cache.

One layer is compiled, and called for every layer with that layer's weights: regional compilation, which gives the kernels that compiling
the whole stack gives. ``decode_whole`` compiles whole stacks. When everything is timed, a process of its own profiles steps, to say where
the time goes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

import rope_fusion
from rope_fusion.bench_stack import (
    REHEARSED,
    SHAPES,
    Layer,
    Shape,
    forget_new_tokens,
    inputs,
    layer_function,
    make_layers,
    step,
)
from rope_fusion.bench_timing import (
    compile_ahead,
    count_of,
    fp8_suits,
    kernel_times_us,
    launches,
    needs_gpu,
    ours,
    own_processes,
    times_us,
)

BATCHES = (1, 16, 64)
skipped = needs_gpu


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


# What is in the names of kernels; all others belong to the prologue. What addmm copies is its bias or the residual.
PARTS = {
    "matmul": ("nvjet", "cublas", "gemm", "gemv", "cutlass", "Memcpy"),
    "attention": ("_partial", "_merge"),
    "norm, activation": ("rms_norm", "silu"),
}


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
    kernel_us: dict[str, dict[str, float]] = field(default_factory=dict)  # of some variants: by name, of one layer

    def best(self, prefix: str) -> str:
        """The fastest variant whose name begins so."""
        return min((name for name in self.us if name.startswith(prefix)), key=lambda name: self.us[name])

    @property
    def gain(self) -> float | None:
        """The best of plain Inductor over the slowest of ours: whatever the spelling, so much is gained at least."""
        if not self.us:
            return None
        slowest = max(us for name, us in self.us.items() if name.startswith("rope_fusion"))
        return self.us[self.best("Inductor")] / slowest

    @property
    def gain_over_view(self) -> float | None:
        """For a model that writes its cache through a view."""
        view = self.us.get("Inductor, view")
        return None if view is None else view / self.us["rope_fusion, view"]

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """Microseconds of a layer that matrix products, attention, norms and so on, and what stands before attention take."""
        found = {}
        for name, kernels in self.kernel_us.items():
            parts = dict.fromkeys((*PARTS, "prologue"), 0.0)
            for kernel, us in kernels.items():
                known = (part for part, words in PARTS.items() if any(word in kernel for word in words))
                parts[next(known, "prologue")] += us
            found[name] = parts
        return found

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """Of all sequences together, by variant."""
        return {name: self.batch / us * 1e6 for name, us in self.us.items()}


def variants(shape: Shape) -> tuple[Variant, ...]:
    """What is compared for a shape."""
    return ENGINE_OPERATORS if shape.engine else PLAIN_OPERATORS


def compiled_step(
    shape: Shape, variant: Variant, layers: Sequence[Layer], whole: bool, device: str
) -> Callable[..., Tensor]:
    """The step, with one layer compiled or, `whole`, all of them in one graph."""
    how = _how(variant, device)
    function = layer_function(shape, variant.spelling, device)
    if whole:
        return torch.compile(functools.partial(step, function, layers), dynamic=False, **how)
    return functools.partial(step, torch.compile(function, dynamic=False, **how), layers)


def _how(variant: Variant, device: str) -> dict[str, Any]:
    return ours(device) if variant.with_us else {}


def compile_job(job: tuple[Shape, int, Variant, bool], device: str) -> dict[str, int]:
    """Compile one variant, call it, and count its launches: of one layer, or of all together where they are compiled so."""
    shape, batch, variant, whole = job
    register(device)
    layers = make_layers(shape, batch, shape.layers if whole else 1, device)
    x, *shared = inputs(shape, batch, device)
    with torch.no_grad():
        if whole:
            return launches(functools.partial(compiled_step(shape, variant, layers, whole, device), x, *shared))
        function = torch.compile(
            layer_function(shape, variant.spelling, device), dynamic=False, **_how(variant, device)
        )
        return launches(functools.partial(function, x, torch.zeros_like(x), layers[0], *shared))


def profile_job(shape: Shape, batch: int, variant: Variant, device: str) -> dict[str, float]:
    """Microseconds of each kernel in one layer, averaged over the layers of a step."""
    torch.compiler.reset()  # beyond eight compilations of one function in a process Dynamo leaves it to eager
    register(device)
    layers = make_layers(shape, batch, shape.layers, device)
    with torch.no_grad():
        call = compiled_step(shape, variant, layers, False, device)
        found = kernel_times_us(functools.partial(call, *inputs(shape, batch, device)))
    return {name: us / shape.layers for name, us in found.items()}


def _profiled(found: Sequence[Measurement], shapes: Sequence[Shape], device: str) -> list[Measurement]:
    """With the kernels of the best spellings, in a process of its own; the shapes with dense experts show nothing else."""
    with own_processes(1) as pool:

        def kernel_us(one: Measurement, shape: Shape) -> dict[str, dict[str, float]]:
            if not one.us or shape.mlp == 4 * shape.hidden:
                return {}
            best = [variant for variant in variants(shape) if variant.spelling != "view"]
            jobs = {variant.name: pool.submit(profile_job, shape, one.batch, variant, device) for variant in best}
            return {name: job.result() for name, job in jobs.items() if job.exception() is None}

        return [replace(one, kernel_us=kernel_us(one, shape)) for one, shape in zip(found, shapes, strict=True)]


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
        eager = functools.partial(step, layer_function(shape, "engine" if shape.engine else "bytes", device), layers)
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


def _measured(
    shape: Shape, batch: int, device: str, kernels: dict[str, dict[str, int] | None], whole: bool
) -> Measurement:
    try:
        return measure(shape, batch, device, kernels, whole)
    except Exception as error:  # the other shapes' figures shall not be lost with it
        return Measurement(shape.name, batch, {}, {}, {}, wrong=f"{type(error).__name__}: {error}")


def _wrong(error: dict[str, float], hits: dict[str, dict[str, int]]) -> str | None:
    plain = max(value for name, value in error.items() if name.startswith("Inductor"))
    for name, value in error.items():
        # As far from eager as plain Inductor is, or a few steps of bf16: every layer amplifies what another rounding does.
        if not value <= max(2 * plain, 2**-5):  # NaN is wrong as well
            return f"{name}: error {value:.2g}, plain Inductor {plain:.2g}"
    unfused = [name for name, found in hits.items() if not found]
    return f"{', '.join(unfused)}: nothing was fused" if unfused else None


def register(device: str) -> None:
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
    register(device)
    if wanted is None:
        batches = BATCHES[:1] if quick else BATCHES if device.startswith("cuda") else (3,)
        wanted = [(shape, batch) for shape in shapes(device) for batch in batches]
    jobs = [(shape, batch, variant, whole) for shape, batch in wanted for variant in variants(shape)]
    counted = iter(compile_ahead("rope_fusion.bench_cases_decode", jobs, device))
    kernels = [{variant.name: next(counted) for variant in variants(shape)} for shape, _ in wanted]
    found = [
        _measured(shape, batch, device, counts, whole) for (shape, batch), counts in zip(wanted, kernels, strict=True)
    ]
    if not whole and device.startswith("cuda"):
        found = _profiled(found, [shape for shape, _ in wanted], device)
    return found


def table(found: Sequence[Measurement]) -> str:
    """One row per shape and batch size."""
    rows = []
    for m in found:
        if not m.us:
            rows.append((m.model, m.batch, *[""] * 9, f"FAILED: {m.wrong}"))
            continue
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
                ", ".join(f"{name} {n}" for name, n in m.hits[mine].items())
                + (f" WRONG: {m.wrong}" if m.wrong else ""),
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
    steps = "µs per step; hits and kernels are of one layer\n\n" + tabulate(rows, headers, disable_numparse=True)
    return steps + _table_of_shares(found)


def _table_of_shares(found: Sequence[Measurement]) -> str:
    rows = [
        (m.model, m.batch, name, *(f"{us:.2f}" for us in parts.values()), f"{sum(parts.values()):.1f}")
        for m in found
        for name, parts in m.shares.items()
    ]
    headers = ("model", "batch", "variant", *PARTS, "prologue", "all")
    said = "\n\nµs of kernels in one layer, by the profiler\n\n"
    return said + tabulate(rows, headers, disable_numparse=True) if rows else ""


def _us(m: Measurement, *names: str) -> str:
    return next((f"{m.us[name]:.0f}" for name in names if name in m.us), "")
