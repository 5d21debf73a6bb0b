"""Derived tensors against plain Inductor and against freezing, which cannot take weight updates."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rope_fusion.report import record

TOKENS = (1, 16, 64, 256)
Step = Callable[[Tensor], Tensor]


class BlockScaledLinear(nn.Module):
    """FP8 codes [rows, columns] with a scale per 128 × 128 block, dequantised in every call."""

    def __init__(self, rows: int, columns: int, block: int = 128) -> None:
        super().__init__()
        self.block = block
        codes = (torch.randn(rows, columns) * 0.05).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(-(-rows // block), -(-columns // block)) + 0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.weight.shape
        scale = self.scale.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)[:rows, :columns]
        return F.linear(x, (self.weight.float() * scale).to(x.dtype))


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step of one model, by how it was compiled, and how the derived one compares.

    Times are the fastest of many. The two comparisons are medians over rounds, whose calls lie close together: what else the
    machine does then falls on all alike.
    """

    layers: int
    size: int
    tokens: int
    inductor: float
    derived: float
    freezing: float
    speedup: float  # against plain Inductor
    against_freezing: float  # 1.0: as fast as freezing; above: slower
    wrong: str | None = None  # what is not as it should be


def benchmark(
    device: str = "cpu", quick: bool = False, tokens: Sequence[int] = TOKENS, layers: int = 8, size: int = 1024
) -> list[Timing]:
    """Time a stack of block-scaled FP8 linears on one thread, the three ways in turn: noise falls on all alike.

    `quick`: for a shorter time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_time_one(count, layers, size, device, 2 if quick else 10) for count in tokens]
    finally:
        torch.set_num_threads(threads)


def _time_one(tokens: int, layers: int, size: int, device: str, seconds: float) -> Timing:
    """Four models: where the weights of one happen to lie in memory is worth a tenth of a step with one token."""
    times: dict[str, list[float]] = {}
    wrong = None
    for _ in range(4):
        model = nn.Sequential(*[BlockScaledLinear(size, size) for _ in range(layers)]).to(device)
        x = torch.randn(tokens, size, dtype=torch.bfloat16, device=device)
        torch._dynamo.reset()
        with torch.no_grad():
            steps = {"inductor": _plain(model), "derived": _derived(model), "freezing": _frozen(model)}
            with torch._inductor.config.patch(freezing=True):
                steps["freezing"](x)
            wrong = wrong or _check(steps, model, x, layers)
            for name, values in _measure(steps, x, seconds / 4).items():
                times.setdefault(name, []).extend(values)
    fastest = {name: min(values) for name, values in times.items()}
    speedup = statistics.median(map(operator.truediv, times["inductor"], times["derived"]))
    against_freezing = statistics.median(map(operator.truediv, times["derived"], times["freezing"]))
    return Timing(layers, size, tokens, **fastest, speedup=speedup, against_freezing=against_freezing, wrong=wrong)


def _check(steps: Mapping[str, Step], model: nn.Module, x: Tensor, layers: int) -> str | None:
    """What is wrong with the derived step: weights that stayed in the graph, or a result further off than Inductor's."""
    with record() as report:
        result = steps["derived"](x)
    hits = report.hits.get("weight_dequant", 0)
    if hits != layers:
        return f"{hits} of {layers} weights are derived"
    expected = model(x)
    error, plain = (float((got - expected).abs().max()) for got in (result, steps["inductor"](x)))
    rounding = float(expected.abs().max()) * 2**-6  # bf16 sums in another order, of eight layers
    return None if error <= max(2 * plain, rounding) else f"error {error:.2g}, plain Inductor {plain:.2g}"


# Each has a function of its own to compile: Dynamo keeps what it compiled by code and backend, which two of them share.


def _plain(model: nn.Module) -> Step:
    @torch.compile
    def step(x: Tensor) -> Tensor:
        return model(x)

    return step


def _derived(model: nn.Module) -> Step:
    @torch.compile(backend="rope_fusion")
    def step(x: Tensor) -> Tensor:
        return model(x)

    return step


def _frozen(model: nn.Module) -> Step:
    """To be called first while `freezing` is set."""

    @torch.compile
    def step(x: Tensor) -> Tensor:
        return model(x)

    return step


def _measure(steps: Mapping[str, Step], x: Tensor, seconds: float) -> dict[str, list[float]]:
    """Per round and step the fastest of three calls, in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = [(name, steps[name]) for name in ("derived", "inductor", "freezing")]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not times["derived"]:
        order.reverse()  # what is compared follows the same neighbours
        for name, step in order:
            for _ in range(2):  # the caches hold what this way of compiling reads, not what the previous one did
                step(x)
            times[name].append(min(_milliseconds(step, x) for _ in range(3)))
    return times


def _milliseconds(step: Step, x: Tensor) -> float:
    _wait(x.device)
    start = time.perf_counter()
    step(x)
    _wait(x.device)
    return (time.perf_counter() - start) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(timings: Sequence[Timing]) -> str:
    """The timings as text."""
    from tabulate import tabulate

    rows = [
        (t.layers, t.size, t.tokens, t.inductor, t.derived, t.freezing, t.speedup, t.against_freezing, t.wrong or "")
        for t in timings
    ]
    headers = (
        "layers",
        "size",
        "tokens",
        "inductor ms",
        "derived ms",
        "freezing ms",
        "speed-up",
        "of freezing",
        "wrong",
    )
    return tabulate(rows, headers, floatfmt=".2f")
