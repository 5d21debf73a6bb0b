"""Every usual spelling of a KV-cache write, by plain Inductor and by rope_fusion, against the direct spelling.

The direct spelling is ``cache[slot // block, slot % block] = k``, for as much data.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from rope_fusion.backend import rope_fusion
from rope_fusion.bench_timing import compile_ahead

BLOCK, HEADS, DIM, TOKENS = 16, 8, 64, 4
FP8 = torch.float8_e4m3fn
CALLS = 30
ROLES = ("direct", "inductor", "rope_fusion")

Write = Callable[[Tensor, Tensor, Tensor], None]


def _rows(cache: Tensor) -> Tensor:
    return cache.view(-1, HEADS, DIM)


def _direct(cache: Tensor, k: Tensor, slots: Tensor) -> None:
    cache[slots // BLOCK, slots % BLOCK] = k


def _view(cache: Tensor, k: Tensor, slots: Tensor) -> None:
    _rows(cache)[slots] = k


def _index_copy(cache: Tensor, k: Tensor, slots: Tensor) -> None:
    _rows(cache).index_copy_(0, slots, k)


def _flatten(cache: Tensor, k: Tensor, slots: Tensor) -> None:
    cache.flatten(0, 1)[slots] = k


def _scatter(cache: Tensor, k: Tensor, slots: Tensor) -> None:
    cache.view(-1, HEADS * DIM).scatter_(0, slots[:, None].expand(-1, HEADS * DIM), k.flatten(1))


def _both(write: Write, dim: int) -> Write:
    """``write`` into K and into V, the two halves of a joint cache along ``dim``."""

    def write_both(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        k_cache, v_cache = cache.unbind(dim)
        write(k_cache, k, slots)
        write(v_cache, k + k, slots)

    return write_both


def _direct_both(cache: Tensor, k: Tensor, slots: Tensor) -> None:
    half = torch.zeros_like(slots)  # an int would select first and write through that view
    cache[half, slots // BLOCK, slots % BLOCK] = k
    cache[half + 1, slots // BLOCK, slots % BLOCK] = k + k


def _direct_both_inside(cache: Tensor, k: Tensor, slots: Tensor) -> None:
    half = torch.zeros_like(slots)
    cache[slots // BLOCK, half, slots % BLOCK] = k
    cache[slots // BLOCK, half + 1, slots % BLOCK] = k + k


def _fp8(write: Write) -> Write:
    def write_fp8(cache: Tensor, k: Tensor, slots: Tensor) -> None:
        limit = torch.finfo(FP8).max
        write(cache, k.float().clamp(-limit, limit).to(FP8), slots)

    return write_fp8


@dataclass(frozen=True)
class Spelling:
    """One way to write a cache, and the direct way to write as much."""

    name: str
    write: Write
    direct: Write
    shape: Callable[[int], tuple[int, ...]]  # number of blocks → cache shape
    dtype: torch.dtype = torch.bfloat16


def spellings() -> list[Spelling]:
    """The direct spelling first, then those that models and engines use."""

    def single(blocks: int) -> tuple[int, ...]:
        return blocks, BLOCK, HEADS, DIM

    def joint_first(blocks: int) -> tuple[int, ...]:
        return 2, blocks // 2, BLOCK, HEADS, DIM

    def joint_second(blocks: int) -> tuple[int, ...]:
        return blocks // 2, 2, BLOCK, HEADS, DIM

    return [
        Spelling("cache[block, place] = k", _direct, _direct, single),
        Spelling("cache.view(-1, H, D)[slots] = k", _view, _direct, single),
        Spelling("cache.view(-1, H, D).index_copy_(0, slots, k)", _index_copy, _direct, single),
        Spelling("cache.flatten(0, 1)[slots] = k", _flatten, _direct, single),
        Spelling("cache.view(-1, H * D).scatter_", _scatter, _direct, single),
        Spelling("the view, FP8 cache", _fp8(_view), _fp8(_direct), single, FP8),
        Spelling("[2, blocks, ...].unbind(0), the view", _both(_view, 0), _direct_both, joint_first),
        Spelling("[2, blocks, ...].unbind(0), block and place", _both(_direct, 0), _direct_both, joint_first),
        Spelling("[blocks, 2, ...].unbind(1), block and place", _both(_direct, 1), _direct_both_inside, joint_second),
    ]


@dataclass(frozen=True)
class Measurement:
    """Microseconds per call for one spelling and cache size."""

    spelling: str
    cache_mb: int
    direct_us: float
    inductor_us: float | None  # None: Inductor cannot compile it
    rope_fusion_us: float

    @property
    def ratio(self) -> float:
        """rope_fusion against the direct spelling."""
        return self.rope_fusion_us / self.direct_us


def benchmark(device: str = "cpu", quick: bool = False) -> list[Measurement]:
    """Every spelling at every cache size (`quick`: the smaller one), checked against eager before it is timed."""
    sizes = (1024,) if quick else (1024, 4096)
    jobs = [(spelling.name, role, blocks) for spelling in spellings() for role in ROLES for blocks in sizes]
    compile_ahead(__name__, jobs, device)
    return list(_measure(torch.device(device), sizes))


def compile_job(job: tuple[str, str, int], device: str) -> None:
    """Compile one spelling in one role and call it once."""
    name, role, blocks = job
    spelling = next(spelling for spelling in spellings() if spelling.name == name)
    step, how = _step(spelling, role)
    with torch.no_grad():
        torch.compile(step, dynamic=False, **how)(*_operands(spelling, blocks, torch.device(device)))


def _measure(device: torch.device, sizes: Sequence[int]) -> Iterator[Measurement]:
    for spelling in spellings():
        for blocks in sizes:
            direct, plain, ours = (_time(spelling, role, blocks, device) for role in ROLES)
            assert direct is not None
            assert ours is not None
            size = blocks * BLOCK * HEADS * DIM * spelling.dtype.itemsize
            yield Measurement(spelling.name, round(size / 1e6), direct, plain, ours)


def _step(spelling: Spelling, role: str) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """What is compiled, and how."""
    write = spelling.direct if role == "direct" else spelling.write

    def step(cache: Tensor, k: Tensor, slots: Tensor, some: Tensor) -> Tensor:
        write(cache, k, slots)
        return cache.flatten(0, -4)[some].float().sum()  # the cache is read afterwards, as attention does

    return step, {"backend": rope_fusion} if role == "rope_fusion" else {}


def _operands(spelling: Spelling, blocks: int, device: torch.device) -> tuple[Tensor, ...]:
    """A cache, what is written, where, and which blocks are read."""
    return (
        torch.randn(spelling.shape(blocks), device=device).to(spelling.dtype),
        torch.randn(TOKENS, HEADS, DIM, device=device).to(torch.bfloat16),
        torch.tensor([3, 77, 500, 999], device=device),
        torch.tensor([0, 4, 31], device=device),
    )


def _time(spelling: Spelling, role: str, blocks: int, device: torch.device) -> float | None:
    """Median microseconds of one compiled call (of its kernels on a GPU); None where Inductor has no code for it."""
    cache, *others = _operands(spelling, blocks, device)
    step, how = _step(spelling, role)
    torch.compiler.reset()
    compiled = torch.compile(step, dynamic=False, **how)
    with torch.no_grad():
        written = cache.clone()
        expected = step(written, *others)
        try:
            result = compiled(cache, *others)
        except Exception as error:
            if how or "Float8" not in str(error):
                raise
            return None
        if not torch.equal(cache.view(torch.uint8), written.view(torch.uint8)):
            raise AssertionError(f"{spelling.name}: the compiled write stored something else than eager")
        # a sum of a thousand values, in any order
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-2)
        call = lambda: compiled(cache, *others)  # noqa: E731
        return _device_us(call) if device.type == "cuda" else _wall_us(call)


def _wall_us(call: Callable[[], Any]) -> float:
    taken = []
    for _ in range(CALLS + 3):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e6)
    return statistics.median(taken[3:])


def _device_us(call: Callable[[], Any]) -> float:
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    kernels = [event for event in profiled.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.device_time for event in kernels) / CALLS


def table(measurements: Sequence[Measurement]) -> str:
    """The measurements for people."""
    rows = [
        (
            m.spelling,
            m.cache_mb,
            m.direct_us,
            "no code" if m.inductor_us is None else m.inductor_us,
            m.rope_fusion_us,
            m.ratio,
        )
        for m in measurements
    ]
    headers = ("spelling", "cache MB", "direct", "Inductor", "rope_fusion", "rope_fusion / direct")
    title = f"µs per call; {TOKENS} tokens are written and the cache is read\n\n"
    return title + tabulate(rows, headers, floatfmt=("", "", ".0f", ".0f", ".0f", ".2f"))
