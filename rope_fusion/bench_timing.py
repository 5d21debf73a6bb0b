"""What the measurements share: the machine's own figures, timing in turns, counting launches, compiling ahead.

On a GPU a call is timed by replaying CUDA graphs that hold it many times, on a CPU by the clock. Calls that are compared are replayed
in turns, so that all see the same clocks and neighbours.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

ROUNDS = 15
POISON = 0xFF  # every byte so: NaN in every format that is used here
GRAPH_CALLS = 300  # at most so many calls in one graph: what a graph costs to record and to start is then a hundredth


@dataclass(frozen=True)
class Machine:
    """The device and its two limits."""

    device: str
    name: str
    torch: str
    triton: str | None
    copy_bytes_per_us: float  # of a large copy, bytes read and written both counted
    empty_launch_us: float  # a kernel that does nothing, in a CUDA graph; on a CPU the smallest call of an operator

    def floor_us(self, moved: int) -> float:
        """The time that no implementation can beat by much: moving `moved` bytes, or being launched."""
        return max(moved / self.copy_bytes_per_us, self.empty_launch_us)

    def sentence(self) -> str:
        """The figures for people."""
        kernel = "empty kernel" if self.device.startswith("cuda") else "smallest operator call"
        triton = f", Triton {self.triton}" if self.triton else ""
        return (
            f"{self.name}, torch {self.torch}{triton}: copy {self.copy_bytes_per_us / 1e6:.3f} TB/s "
            f"(read + written), {kernel} {self.empty_launch_us:.2f} µs"
        )


@functools.cache
def machine(device: str) -> Machine:
    """Measure the device: once in a process, since every floor of a run shall stand on the same figures."""
    on_gpu = device.startswith("cuda")
    source = torch.randn((1 << 30) if on_gpu else (1 << 24), device=device).to(torch.bfloat16)
    target = torch.empty_like(source)
    if on_gpu:
        _warm_up(device)

    def copy() -> None:
        torch.neg(source, out=target)  # a kernel: `copy_` in a graph is a transfer by another engine

    copied = times_us([copy], device, budget_us=100e3)[0]
    moved = 2 * source.numel() * source.element_size()
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    return Machine(device, name, torch.__version__, _triton_version(), moved / copied, _empty_launch_us(device))


def _warm_up(device: str, seconds: float = 1.0) -> None:
    """Keep the GPU busy until its clocks have risen."""
    a = torch.randn(4096, 4096, device=device).to(torch.bfloat16)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize(device)


def _empty_launch_us(device: str) -> float:
    one = torch.zeros(1, device=device)
    if not device.startswith("cuda") or _triton_version() is None:
        return times_us([lambda: one.neg_()], device)[0]
    from rope_fusion.bench_attention import nothing

    return times_us([lambda: nothing[(1,)](one)], device)[0]


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def times_us(
    calls: Sequence[Callable[[], Any]], device: str, budget_us: float = 20e3, rounds: int = ROUNDS
) -> list[float]:
    """Median microseconds of one call of each, in turns. On a GPU they are recorded, and must not wait for it."""
    if not device.startswith("cuda"):
        return _wall_times_us(calls, rounds)
    stream = torch.cuda.Stream()
    graphs = []
    for call in calls:
        once = _replayed_us(recorded(call, 3, stream), 3, stream)
        count = max(1, min(GRAPH_CALLS, int(budget_us / rounds / once)))
        graphs.append((recorded(call, count, stream), count))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for (graph, count), mine in zip(graphs, times, strict=True):
            mine.append(_replayed_us(graph, count, stream))
    return [statistics.median(mine) for mine in times]


def recorded(call: Callable[[], Any], count: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `count` calls."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    return graph


def _replayed_us(graph: torch.cuda.CUDAGraph, count: int, stream: torch.cuda.Stream) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        graph.replay()  # what is timed finds the caches as a replay of its own leaves them
        begin.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def _wall_times_us(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, mine in zip(calls, times, strict=True):
            call()
            begin = time.perf_counter()
            call()
            mine.append((time.perf_counter() - begin) * 1e6)
    return [statistics.median(mine) for mine in times]


def enqueue_times_us(calls: Sequence[Callable[[], Any]], device: str, count: int = 200) -> list[float]:
    """Median microseconds for which one call keeps the host busy; nothing waits for the device in between."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, mine in zip(calls, times, strict=True):
            call()
            _wait(device)
            begin = time.perf_counter()
            for _ in range(count):
                call()
            mine.append((time.perf_counter() - begin) / count * 1e6)
            _wait(device)
    return [statistics.median(mine) for mine in times]


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def launches(call: Callable[[], Any]) -> dict[str, int]:
    """Kernels, copies and fills of one call on a GPU, by name."""
    return dict(Counter(name for name, _ in _profiled(call)))


def kernel_times_us(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of the kernels, copies and fills of one call on a GPU, by name."""
    times: dict[str, float] = {}
    for name, us in _profiled(call):
        times[name] = times.get(name, 0.0) + us
    return times


def _profiled(call: Callable[[], Any]) -> list[tuple[str, float]]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):  # compiles, chooses launch parameters, and warms the clocks
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        call()
        torch.cuda.synchronize()
    events = profiled.events() or ()
    return [(event.name, event.device_time) for event in events if event.device_type == DeviceType.CUDA]


def count_of(kernels: dict[str, int] | None) -> int | None:
    """How many launches these are."""
    return None if kernels is None else sum(kernels.values())


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of x, contiguous."""
    return x.contiguous().view(torch.uint8)


def poison(like: Iterable[Tensor]) -> None:
    """Leave memory that holds NaN for the allocator to hand out, so that an output element that nothing writes shows."""
    shadows = [torch.empty_like(x) for x in like for _ in range(2)]
    for shadow in shadows:
        shadow.view(torch.uint8).fill_(POISON)


def fp8_suits(device: str) -> bool:
    """Whether the device converts to FP8 in a kernel; a CPU does so by software."""
    return (
        not device.startswith("cuda") or bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 9)
    )


def needs_gpu(device: str) -> str | None:
    """Why a measurement of kernels does not run on `device` unless it is asked for by name; None where it suits."""
    if device.startswith("cuda"):
        return None
    return f"it compares kernels for GPUs; named, it is rehearsed on {device} with small shapes and reference operators"


def ours(device: str, **options: Any) -> dict[str, Any]:
    """Arguments that have torch.compile use rope_fusion, by its reference operators where it has no kernels."""
    from rope_fusion.backend import rope_fusion

    if not device.startswith("cuda"):
        options["kernels"] = "reference"
    settings = {"strict": True, **options}
    return {"backend": rope_fusion, "options": {f"rope_fusion.{name}": value for name, value in settings.items()}}


@contextmanager
def own_caches() -> Iterator[None]:
    """Compile into a folder of this run alone: nothing is found there that another run left, and nothing stays."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # Inductor sets the second from the first
    before = {name: os.environ.pop(name, None) for name in names}
    with TemporaryDirectory(prefix="rope_fusion_bench_", ignore_cleanup_errors=True) as folder:
        os.environ[names[0]] = folder
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def compile_ahead(module: str, jobs: Sequence[Any], device: str) -> list[Any]:
    """What ``module.compile_job(job, device)`` returns for each job, from processes that fill the caches on disk; None where it fails.

    On a GPU only, where a measurement compiles dozens of kernels; elsewhere every result is None. What fails here fails again where it
    is timed. Launches are counted here as well, since a profiler may slow down whatever its process runs afterwards.
    """
    if not device.startswith("cuda") or not jobs:
        return [None] * len(jobs)
    workers = min(os.cpu_count() or 1, 16, len(jobs))
    with own_processes(workers, _compile_in_this_process) as pool:
        futures = [pool.submit(_compile_one, module, job, device) for job in jobs]
        wait(futures)
    results = [None if future.exception() else future.result() for future in futures]  # a process may have died
    # Inductor chose its own launch parameters on a crowded GPU: it shall choose again.
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    for file in Path(folder).rglob("*.best_config") if folder else ():
        file.unlink()
    return results


def own_processes(count: int, initializer: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """Fresh processes, which hold nothing that this one compiled."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer)


def _compile_in_this_process() -> None:
    from rope_fusion._torch import inductor_config

    inductor_config.compile_threads = 1
    warnings.simplefilter("ignore")  # whatever matters is said where the same is timed


def _compile_one(module: str, job: Any, device: str) -> Any:
    torch.compiler.reset()  # beyond eight compilations of one function in a process Dynamo leaves it to eager
    with suppress(Exception):
        return importlib.import_module(module).compile_job(job, device)
    return None
