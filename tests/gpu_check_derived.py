"""On a GPU: derived tensors take their kernels out of the step, stay fresh under CUDA graphs, and cost next to nothing.

    PYTHONPATH=. python3 tests/gpu_check_derived.py

Prints one line per check and exits with 1 when something is not as it should be. It takes about four minutes.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import rope_fusion
import rope_fusion.backend
from rope_fusion.derived.store import process_store

LAYERS = 36
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
DEVICE = torch.device("cuda")
Step = Callable[..., Tensor]


# ------------------------------------------------------------------------------------------------ the models


@torch.library.custom_op("rope_fusion_gpu_check::rotary", mutates_args=())
def opaque_rotary(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """A rotary operator [tokens, heads * dim] that Inductor cannot look into, as engines have."""
    cos, sin = table[positions].chunk(2, -1)
    first, second = x.unflatten(-1, (-1, 64)).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(1)


@opaque_rotary.register_fake
def _(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    return torch.empty_like(x)


class Layer(nn.Module):
    """A decoder layer's linears around a rotary operator that wants the table in bf16."""

    def __init__(self, hidden: int, table: Tensor) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, hidden, bias=False, dtype=BF16)
        self.out = nn.Linear(hidden, hidden, bias=False, dtype=BF16)
        self.register_buffer("table", table)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.out(opaque_rotary(self.qkv(x), positions, self.table.to(x.dtype)))


class Decoder(nn.Module):
    def __init__(self, layers: int = LAYERS, hidden: int = 2880, rows: int = 131072) -> None:
        super().__init__()
        self.hidden = hidden
        angles = torch.arange(rows)[:, None] / 150000 ** (torch.arange(0, 64, 2) / 64)
        table = torch.cat([angles.cos(), angles.sin()], -1)
        self.layers = nn.ModuleList(Layer(hidden, table) for _ in range(layers))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions)
        return x


class GroupedProjection(nn.Module):
    """FP8 codes [G, R, K] with 128 × 128 blocks, as in DeepSeek-V4's o-projection; o is [tokens, G, K]."""

    def __init__(self, groups: int = 8, rank: int = 1024, width: int = 4096) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(groups, rank, width).mul_(0.05).to(FP8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(groups, rank // 128, width // 128) + 0.5, requires_grad=False)

    def forward(self, o: Tensor) -> Tensor:
        groups, rank, width = self.weight.shape
        blocks = self.weight.float().view(groups, rank // 128, 128, width // 128, 128)
        weight = (blocks * self.scale[:, :, None, :, None]).view(groups, rank, width).to(o.dtype)
        return torch.einsum("tgk,grk->tgr", o, weight)


class QuantisedLinear(nn.Module):
    def __init__(self, size: int = 256) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size).mul_(0.05).to(FP8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(size, 1) + 0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight.float() * self.scale).to(x.dtype))


# ------------------------------------------------------------------------------------------------ the tools


def compiled(model: Callable[..., Any], mode: str | None = None, dynamic: bool | None = None, **options: Any) -> Step:
    torch._dynamo.reset()
    named: dict[str, Any] = {f"rope_fusion.{name}": value for name, value in options.items()}
    if mode:
        named["rope_fusion.mode"] = mode
    result: Step = torch.compile(model, backend="rope_fusion", options=named, dynamic=dynamic)
    return result


def kernels_of(step: Callable[[], object]) -> Counter[str]:
    """Device kernels of one call, by name."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return Counter(event.name for event in profiled.events() if event.device_type == DeviceType.CUDA)


def triton_kernels(step: Callable[[], object]) -> int:
    """How many kernels of a step Inductor generated itself; casts and dequantisation are such."""
    return sum(count for name, count in kernels_of(step).items() if name.startswith("triton_"))


def milliseconds(step: Callable[[], object], repeat: int = 200) -> float:
    """Median wall time of a call, the device's work included."""
    for _ in range(10):
        step()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def close(got: Tensor, expected: Tensor) -> bool:
    """bf16 products summed in another order: 2^-8 relative, some of it accumulated."""
    bound = 0.02 * float(expected.float().abs().max())
    return bool((got.float() - expected.float()).abs().max() <= bound)


def say(good: bool, text: str) -> bool:
    print(f"{'ok  ' if good else 'FAIL'} {text}", flush=True)
    return good


# ------------------------------------------------------------------------------------------------ the checks


def check_casts_leave_the_step(mode: str | None, shared: bool) -> bool:
    """Inductor makes 36 casts of one table in one kernel, with 36 results; of a table per layer, in 36 kernels."""
    torch.manual_seed(0)
    with DEVICE if shared else torch.device("cpu"):
        model = Decoder().to(DEVICE)  # moving gives every layer a table of its own
    x, positions = torch.randn(16, model.hidden, device=DEVICE, dtype=BF16), torch.arange(16, device=DEVICE)
    tables = list(model.buffers())
    casts_of = lambda step: sum(n for name, n in kernels_of(step).items() if "triton" in name and "_to_copy" in name)  # noqa: E731
    with torch.no_grad():
        torch._dynamo.reset()
        plain = torch.compile(model, mode=mode)
        expected = plain(x, positions).clone()  # not eager: over 36 layers its own rounding is 2 % off Inductor's
        before, plain_ms = casts_of(lambda: plain(x, positions)), milliseconds(lambda: plain(x, positions), 50)
        with rope_fusion.record() as report:
            ours = compiled(model, mode)
            ours(x, positions)
        after, ours_ms = casts_of(lambda: ours(x, positions)), milliseconds(lambda: ours(x, positions), 50)
        right = close(ours(x, positions), expected)
        for table in tables:
            table.mul_(0.5)
        fresh = close(ours(x, positions), plain(x, positions))
    hits = report.hits.get("cos_sin_cast", 0)
    good = right and fresh and hits == LAYERS and after == 0 and before >= (1 if shared else LAYERS)
    return say(
        good,
        f"opaque rotary, {len(tables)} table(s), {mode}: kernels with a cast {before} → {after}, hits {hits}, fresh {fresh}, "
        f"right {right}, step {plain_ms:.3f} → {ours_ms:.3f} ms",
    )


def check_projection(mode: str | None) -> bool:
    torch.manual_seed(0)
    model = [GroupedProjection().to(DEVICE) for _ in range(4)]
    o = torch.randn(16, 8, 4096, device=DEVICE, dtype=BF16)

    def step(o: Tensor) -> Tensor:
        return torch.stack([layer(o) for layer in model])

    with torch.no_grad():
        torch._dynamo.reset()
        plain = torch.compile(step, mode=mode)
        before, plain_ms = triton_kernels(lambda: plain(o)), milliseconds(lambda: plain(o), 50)
        ours = compiled(step, mode)
        after, ours_ms = triton_kernels(lambda: ours(o)), milliseconds(lambda: ours(o), 50)
        right = close(ours(o), step(o))
        model[1].scale.mul_(3)
        model[2].weight.copy_(model[0].weight)
        fresh = close(ours(o), step(o))
    fewer = before - after
    return say(
        right and fresh and fewer >= 4,
        f"grouped projection, {mode}: generated kernels {before} → {after} (4 dequantisations), fresh {fresh}, "
        f"right {right}, step {plain_ms:.3f} → {ours_ms:.3f} ms",
    )


def check_captured_graph() -> bool:
    """A graph that the user captured replays without us: `invalidate`, or any compiled call, refreshes in place."""
    torch.manual_seed(0)
    model, x = QuantisedLinear().to(DEVICE), torch.randn(8, 256, device=DEVICE, dtype=BF16)
    with torch.no_grad():
        step = compiled(model)
        step(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(x)
        results = []
        for update, refresh in (
            (lambda: model.weight.copy_(torch.randn(256, 256, device=DEVICE)), lambda: step(x)),
            (lambda: model.scale.mul_(2), lambda: rope_fusion.invalidate(model)),
            (
                lambda: model.weight.data.copy_(torch.randn(256, 256, device=DEVICE)),
                lambda: rope_fusion.invalidate(model),
            ),
        ):
            update()
            refresh()
            graph.replay()
            results.append(close(out, model(x)))
    return say(all(results), f"captured CUDA graph after in-place updates: right {results}")


def check_capture_without_warm_up() -> bool:
    """Captured before anything was derived, the graph computes it in every replay: slow, never stale."""
    torch.manual_seed(0)
    model, x = QuantisedLinear().to(DEVICE), torch.randn(8, 256, device=DEVICE, dtype=BF16)
    other = QuantisedLinear().to(DEVICE)

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = compiled(call)
        step(other, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(model, x)
        graph.replay()
        first = close(out, model(x))
        model.scale.mul_(2)
        graph.replay()
        second = close(out, model(x))
    warned = any("being captured" in str(warning.message) for warning in caught)
    return say(first and second and warned, f"capture without warm-up: right {first}, fresh {second}, warned {warned}")


def replace_parameter(model: QuantisedLinear) -> None:
    model.weight = nn.Parameter(torch.randn(256, 256, device=DEVICE).to(FP8), requires_grad=False)


def assign_data(model: QuantisedLinear) -> None:
    model.weight.data = torch.randn(256, 256, device=DEVICE).to(FP8)


def load_state(model: QuantisedLinear) -> None:
    model.load_state_dict(QuantisedLinear().to(DEVICE).state_dict())


def merge(model: QuantisedLinear) -> None:
    model.weight.copy_(model.weight.float() + torch.randn(256, 2, device=DEVICE) @ torch.randn(2, 256, device=DEVICE))


def move(model: QuantisedLinear) -> None:
    model.cpu()
    model.scale.mul_(2)
    model.to(DEVICE)


def copy_into_data(model: QuantisedLinear) -> None:
    model.weight.data.copy_(torch.randn(256, 256, device=DEVICE))


SEEN: list[Callable[[QuantisedLinear], Any]] = [
    lambda model: model.weight.copy_(torch.randn(256, 256, device=DEVICE)),
    lambda model: model.scale.mul_(3),
    load_state,
    replace_parameter,
    assign_data,
    merge,
    move,
]


def check_freshness(mode: str | None, dynamic: bool) -> bool:
    torch.manual_seed(0)
    results = []
    with torch.no_grad():
        for update in SEEN:
            model = QuantisedLinear().to(DEVICE)
            step = compiled(model, mode, dynamic)
            for tokens in (8, 5) if dynamic else (8, 8):
                step(torch.randn(tokens, 256, device=DEVICE, dtype=BF16))
            good = True
            for _ in range(3):
                update(model)
                for _ in range(3):  # under CUDA graphs: warm-up, recording, replay
                    x = torch.randn(8, 256, device=DEVICE, dtype=BF16)
                    good &= close(step(x).clone(), model(x))
            results.append(good)
    return say(all(results), f"freshness, mode {mode}, dynamic {dynamic}: {results}")


def check_sampled(mode: str | None) -> bool:
    torch.manual_seed(0)
    model, x = QuantisedLinear().to(DEVICE), torch.randn(8, 256, device=DEVICE, dtype=BF16)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = compiled(model, mode, freshness_interval=4)
        for _ in range(5):
            step(x)
        copy_into_data(model)
        calls = 0
        while calls < 20 and not close(step(x).clone(), model(x)):
            calls += 1
            torch.cuda.synchronize()
        named = any("weight was written" in str(warning.message) for warning in caught)
    return say(calls <= 6 and named, f"sampled check, mode {mode}: noticed after {calls} calls, named {named}")


def check_cost(mode: str | None) -> bool:
    """72 derived weights (144 sources): what the sampled check adds to a decode step, which CUDA graphs make device-bound.

    Other processes only ever make a call slower, and for a while: the three variants take turns in short blocks, each in every place of
    the order, and the fastest block of each counts. A block of 64 calls has two checks in it, wherever it begins.

    The cost is estimated twice: from a check in every 32nd call, and as a 32nd of what a check in every call adds, of which less can
    hide behind the device's work. Without noise the second is the larger one, but noise weighs 32 times as much in the first. The lower
    one is held to a hundredth, so that a disturbed variant does not decide.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[QuantisedLinear(2048) for _ in range(72)]).to(DEVICE)
    x = torch.randn(16, 2048, device=DEVICE, dtype=BF16)
    with torch.no_grad():
        torch._dynamo.reset()
        steps = {interval: _step_of(model, mode, interval) for interval in (0, 32, 1)}
        blocks = in_turns({interval: functools.partial(step, x) for interval, step in steps.items()})
        torch._dynamo.reset()
        plain = torch.compile(model, mode=mode)
        plain_ms = milliseconds(lambda: plain(x), 50)
    best = {interval: min(times) for interval, times in blocks.items()}
    share = best[32] / best[0] - 1
    alone = (best[1] - best[0]) / 32 / best[0]
    spread = statistics.median(blocks[0]) / best[0] - 1
    return say(
        min(share, alone) < 0.01,
        f"cost of the sampled check, mode {mode}: {share:.2%} of a step, by the one made in every call {alone:.2%} "
        f"({best[0]:.3f} → {best[32]:.3f} ms; in every call {best[1]:.3f} ms; plain Inductor {plain_ms:.3f} ms; "
        f"the median block without a check takes {spread:.1%} more than the fastest)",
    )


def in_turns(variants: dict[int, Callable[[], object]], rounds: int = 30, calls: int = 64) -> dict[int, list[float]]:
    """Milliseconds per call of each variant in each round, the device's work included."""
    times: dict[int, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for call in variants.values():
        for _ in range(calls):  # compiled, and recorded under CUDA graphs
            call()
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            call = variants[name]
            for _ in range(8):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / calls * 1e3)
    return times


def _step_of(model: nn.Module, mode: str | None, interval: int) -> Step:
    """Compiled by a function of its own, so that several live side by side."""
    options: dict[str, Any] = {"rope_fusion.freshness_interval": interval}
    if mode:
        options["rope_fusion.mode"] = mode

    def step(x: Tensor) -> Tensor:
        return model(x)

    step.__code__ = step.__code__.replace(co_name=f"step_{interval}")
    return torch.compile(step, backend="rope_fusion", options=options)


class Stored(nn.Module):
    """A weight of any codes and scales: FP8 of both vendors, E8M0 blocks, INT8."""

    weight: Tensor
    scale: Tensor

    def __init__(self, codes: torch.dtype, scales: torch.dtype, block: int) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("weight", torch.randn(256, 256).mul_(3).to(codes))
        self.register_buffer("scale", (torch.rand(256 // block, 256 // block) + 0.5).to(scales))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.float().repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return F.linear(x, (self.weight.float() * scale).to(x.dtype))


def check_kinds() -> bool:
    """Inductor's matcher passes over dtypes that this GPU's Triton lacks; the derivations do not."""
    results = {}
    x = torch.randn(8, 256, device=DEVICE, dtype=BF16)
    kinds = [
        (FP8, torch.float32),
        (FP8, torch.float8_e8m0fnu),
        (torch.float8_e5m2, torch.float32),
        (torch.float8_e4m3fnuz, torch.float32),
        (torch.int8, torch.bfloat16),
    ]
    with torch.no_grad():
        for codes, scales in kinds:
            model = Stored(codes, scales, 32).to(DEVICE)
            with rope_fusion.record() as report:
                step = compiled(model)
                right = close(step(x), model(x))
            model.weight.copy_(model.weight.float().neg())
            fresh = close(step(x), model(x))
            results[f"{codes} × {scales}"] = right and fresh and report.hits == {"weight_dequant": 1}
    return say(all(results.values()), f"codes and scales: {results}")


def check_table_from_the_cpu(mode: str | None) -> bool:
    """A table that stays on the CPU, and is brought to the device and dtype of the activations in every call."""

    class Rotary(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.rand(4096, 64))

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return opaque_rotary(x, positions, self.table.to(x.device, x.dtype))

    model, positions = Rotary(), torch.arange(16, device=DEVICE)
    x = torch.randn(16, 256, device=DEVICE, dtype=BF16)
    with torch.no_grad():
        with rope_fusion.record() as report:
            step = compiled(model, mode)
            right = close(step(x, positions).clone(), model(x, positions))
        copies = sum(n for name, n in kernels_of(lambda: step(x, positions)).items() if "HtoD" in name)
        model.table.mul_(2)
        fresh = close(step(x, positions).clone(), model(x, positions))
    hits = report.hits.get("cos_sin_cast", 0)
    return say(
        right and fresh and hits == 1 and copies == 0,
        f"table from the CPU, mode {mode}: right {right}, fresh {fresh}, hits {hits}, copies to the device {copies}",
    )


def check_threads() -> bool:
    """Two threads on streams of their own: a refresh by one is finished before the other reads it."""
    torch.manual_seed(0)
    model = QuantisedLinear(4096).to(DEVICE)
    x = torch.randn(8, 4096, device=DEVICE, dtype=BF16)
    wrong = []
    with torch.no_grad():
        step = compiled(model, freshness_interval=0)
        step(x)

        def work(barrier: threading.Barrier, expected: Tensor) -> None:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                if not close(step(x), expected):
                    wrong.append(1)

        for value in range(1, 20):
            model.scale.fill_(value)
            expected = model(x)
            torch.cuda.synchronize()
            barrier = threading.Barrier(2)
            threads = [threading.Thread(target=work, args=(barrier, expected)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            torch.cuda.synchronize()
    return say(not wrong, f"threads on their own streams: {len(wrong)} torn reads of 38")


def check_memory() -> bool:
    """Nothing is left after the compiled function and the model are gone."""
    torch._dynamo.reset()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = torch.randn(8, 256, device=DEVICE, dtype=BF16)
    with torch.no_grad():
        for _ in range(10):
            model = QuantisedLinear().to(DEVICE)
            compiled(model)(x)
            del model
    torch._dynamo.reset()
    del x
    gc.collect()
    left = torch.cuda.memory_allocated() - before
    return say(left <= 1 << 20 and not process_store().live_bytes(torch.device("cuda:0")), f"memory left: {left} bytes")


def main() -> int:
    results = [
        *(check_casts_leave_the_step(mode, one) for mode in (None, "reduce-overhead") for one in (True, False)),
        *(check_projection(mode) for mode in (None, "reduce-overhead")),
        check_captured_graph(),
        check_capture_without_warm_up(),
        *(check_freshness(mode, dynamic) for mode in (None, "reduce-overhead") for dynamic in (False, True)),
        *(check_sampled(mode) for mode in (None, "reduce-overhead")),
        *(check_cost(mode) for mode in (None, "reduce-overhead")),
        check_kinds(),
        *(check_table_from_the_cpu(mode) for mode in (None, "reduce-overhead")),
        check_threads(),
        check_memory(),
    ]
    print("all as expected" if all(results) else "FAILED")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
