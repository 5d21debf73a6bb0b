"""Decode steps of whole stacks under CUDA graphs: plain Inductor, with the cache written in two ways, and rope_fusion.

The shapes are those of GPT-OSS-20B (24 layers, its four active experts as one dense MLP) and Llama-3-8B (32 layers), with random
weights; every variant has the same attention kernel.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tabulate import tabulate
from torch import Tensor, nn

import rope_fusion
from rope_fusion.backend import rope_fusion as backend

FP8 = torch.float8_e4m3fn
CONTEXT, PAGE, FILLED = 1040, 16, 1024


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


SHAPES = (
    Shape("gpt-oss-20b bf16", 24, 2880, 64, 8, 64, 4 * 2880),
    Shape("gpt-oss-20b fp8", 24, 2880, 64, 8, 64, 4 * 2880, fp8=True),
    Shape("llama-3-8b bf16", 32, 4096, 32, 8, 128, 14336),
)


MODELS = tuple(shape.name for shape in SHAPES)


@dataclass(frozen=True)
class Measurement:
    """Medians of CUDA-graph replays, in µs per step, and kernels per step."""

    model: str
    batch: int
    inductor_view: float
    inductor_direct: float
    rope_fusion: float
    kernels_direct: int
    kernels_rope_fusion: int
    error: float  # |rope_fusion - Inductor| over |Inductor|, by norms
    hits: dict[str, int] = field(default_factory=dict)


class Layer(nn.Module):
    """Norm, packed qkv, RoPE, cache write, attention, MLP."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, shape: Shape, batch: int, write_view: bool) -> None:
        super().__init__()
        s, self.shape, self.write_view = shape, shape, write_view
        self.qkv = nn.Linear(s.hidden, (s.q_heads + 2 * s.kv_heads) * s.dim, bias=False)
        self.out = nn.Linear(s.q_heads * s.dim, s.hidden, bias=False)
        self.up = nn.Linear(s.hidden, 2 * s.mlp, bias=False)
        self.down = nn.Linear(s.mlp, s.hidden, bias=False)
        for name in ("k_cache", "v_cache"):
            cache = torch.randn(batch * CONTEXT // PAGE, PAGE, s.kv_heads, s.dim)
            self.register_buffer(name, cache.to(FP8 if s.fp8 else torch.bfloat16))

    def store(self, cache: Tensor, x: Tensor, slots: Tensor, scale: Tensor) -> None:
        if self.shape.fp8:
            x = (x.float() / scale).clamp(-448, 448).to(FP8)
        if not self.write_view:
            cache[slots // PAGE, slots % PAGE] = x
        elif self.shape.fp8:
            cache.view(torch.uint8).view(-1, *cache.shape[2:])[slots] = x.view(torch.uint8)
        else:
            cache.view(-1, *cache.shape[2:])[slots] = x

    def forward(
        self, x: Tensor, table: Tensor, positions: Tensor, slots: Tensor, length: Tensor, scale: Tensor
    ) -> Tensor:
        s = self.shape
        sizes = [s.q_heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim]
        normed = nn.functional.rms_norm(x, x.shape[-1:])
        q, k, v = (t.view(t.shape[0], -1, s.dim) for t in self.qkv(normed).split(sizes, -1))
        cos, sin = (t[:, None] for t in table[positions].chunk(2, -1))

        def rotate(t: Tensor) -> Tensor:
            first, second = t.float().chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(t.dtype)

        q, k = rotate(q), rotate(k)
        if s.fp8:
            q = (q.float() / scale).clamp(-448, 448).to(FP8)
        self.store(self.k_cache, k, slots, scale)
        self.store(self.v_cache, v, slots, scale)
        one = scale if s.fp8 else torch.ones_like(scale)
        attended = torch.ops.rope_fusion_bench.decode_attention(
            q, self.k_cache, self.v_cache, length, one, one, one, CONTEXT
        )
        x = x + self.out(attended.reshape(x.shape[0], -1))
        gate, up = self.up(nn.functional.rms_norm(x, x.shape[-1:])).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Stack(nn.Module):
    """All layers; they share table, positions and slots."""

    def __init__(self, shape: Shape, batch: int, write_view: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape, batch, write_view) for _ in range(shape.layers))

    def forward(self, x: Tensor, *shared: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *shared)
        return x

    def write_through_view(self, view: bool) -> None:
        """Choose the spelling of the cache write."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.write_view = view


def make(shape: Shape, batch: int, write_view: bool) -> Stack:
    with torch.device("cuda"):
        torch.manual_seed(0)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Stack(shape, batch, write_view).eval()
        finally:
            torch.set_default_dtype(previous)


def inputs(shape: Shape, batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(1)
    frequency = 150000.0 ** (-torch.arange(0, shape.dim, 2, device="cuda") / shape.dim)
    angles = torch.arange(131072, device="cuda")[:, None] * frequency
    return (
        torch.randn(batch, shape.hidden, device="cuda", dtype=torch.bfloat16, generator=generator),
        torch.cat([angles.cos(), angles.sin()], -1),
        torch.full((batch,), FILLED, device="cuda"),
        torch.arange(batch, device="cuda") * CONTEXT + FILLED,
        torch.full((1,), FILLED + 1, device="cuda", dtype=torch.int32),
        torch.full((1,), 0.05, device="cuda"),
    )


def captured(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A CUDA graph of one step, and the tensor its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def replay_us(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int = 40) -> list[float]:
    """Median µs of a replay of each graph, measured in turns so that all see the same clocks."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, mine in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            for _ in range(3):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            mine.append(start.elapsed_time(end) / 3 * 1e3)
    return [statistics.median(mine) for mine in times]


def kernels_of(graph: torch.cuda.CUDAGraph) -> int:
    """Device kernels, copies and fills of one replay."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiled.events())


def measure(shape: Shape, batch: int) -> Measurement:
    arguments = inputs(shape, batch)
    variants: dict[str, tuple[bool, Callable[[Stack], Callable[..., Tensor]]]] = {
        "inductor_view": (True, lambda model: torch.compile(model, dynamic=False)),
        "inductor_direct": (False, lambda model: torch.compile(model, dynamic=False)),
        "rope_fusion": (
            True,
            lambda model: torch.compile(model, backend=backend, options={"rope_fusion.strict": True}, dynamic=False),
        ),
    }
    graphs, outs, hits = [], [], {}
    model = make(shape, batch, write_view=True)
    with torch.no_grad():
        for write_view, compile_it in variants.values():
            torch.compiler.reset()
            model.write_through_view(write_view)
            compiled = compile_it(model)
            with rope_fusion.record() as report:
                graph, out = captured(functools.partial(compiled, *arguments))
            graphs.append(graph)
            outs.append(out)
            hits = report.hits
        times = replay_us(graphs)
        error = ((outs[2].float() - outs[1].float()).norm() / outs[1].float().norm()).item()
        counts = [kernels_of(graph) for graph in graphs]
    view, direct, fused = times
    return Measurement(shape.name, batch, view, direct, fused, counts[1], counts[2], error, hits)


def benchmark(
    device: str = "cuda", batches: Sequence[int] = (1, 16, 64), models: Sequence[str] = MODELS
) -> list[Measurement]:
    """Measure every shape at every batch size.

    Raises:
        RuntimeError: `device` is no GPU; the models take tens of GB and Triton.
    """
    if not device.startswith("cuda"):
        raise RuntimeError(
            f"the decode benchmark needs a GPU, got {device!r}; `rope-fusion bench writes` runs on the CPU"
        )
    from rope_fusion import bench_attention  # noqa: F401  (registers the attention that the models call)

    return [measure(shape, batch) for shape in SHAPES if shape.name in models for batch in batches]


def table(found: Sequence[Measurement]) -> str:
    """One row per shape and batch size."""
    rows = [
        (
            m.model,
            m.batch,
            f"{m.inductor_view:.0f}",
            f"{m.inductor_direct:.0f}",
            f"{m.rope_fusion:.0f}",
            f"{m.inductor_view / m.rope_fusion:.3f}",
            f"{m.inductor_direct / m.rope_fusion:.3f}",
            f"{m.batch / m.rope_fusion * 1e6:.0f}",
            f"{m.kernels_direct} → {m.kernels_rope_fusion}",
            ", ".join(f"{name} {count}" for name, count in m.hits.items()),
        )
        for m in found
    ]
    headers = (
        "model",
        "batch",
        "Inductor, view µs",
        "direct µs",
        "rope_fusion µs",
        "× view",
        "× direct",
        "tokens/s",
        "kernels",
        "hits",
    )
    return tabulate(rows, headers)
