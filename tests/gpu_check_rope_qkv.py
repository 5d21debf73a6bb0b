"""On a GPU: is the fused operator right in every variant, and how fast is it?

    PYTHONPATH=. python3 tests/gpu_check_rope_qkv.py [check] [table] [search] [host] [--shapes NAME ...] [--tokens N ...]
    [--seconds S]

check: every variant of a covering set against the reference on the same device, with fresh random data and poisoned
outputs: the same bits in exact mode; in the default mode the FP8 bytes that differ are counted, and floats may differ
in their last bit. table: the shapes of docs/performance.md by CUDA-graph replay, beside the floor (bytes over the
measured copy bandwidth, and an empty kernel). search: the same for a grid of launch parameters. host: what one call
costs the host. Everything measured goes to $OUT/rope_qkv.json where OUT is set.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from rope_fusion.kernels import rope_qkv_triton
from rope_fusion.kernels.rope_qkv import fp8_unsupported, reference, target_of
from rope_fusion.kernels.rope_qkv_triton import LAUNCH_TABLE, LaunchParameters, choose_parameters, launch
from rope_fusion.kernels.variants import (
    BF16,
    E4M3,
    FP32,
    PreparedCall,
    Variant,
    covering,
    describe,
    make_call,
)

DEVICE = torch.device("cuda", 0)
BASE = Variant(
    dtype=BF16,
    angle_dtype=FP32,
    angles="table",
    full_width=False,
    pairing="neox",
    inverse=False,
    dims=(64, 64, 0),
    v_dim=None,
    heads=(64, 8),
    batch_seq=(1, 1),
    source="packed",
    layout="n p h d",
    paired_slots=False,
    index_dtype=torch.int64,
    slots="all",
    q_fp8=E4M3,
    cache="fp8",
    scales="tensor",
    multiplies=False,
    needs=(False, False),
    wide_out=False,
    narrow_result=False,
    math="fp32",
    writes="kv",
)
PLAIN = replace(BASE, q_fp8=None, cache="same", needs=(True, False))
SHAPES = {
    "gptoss-fp8": BASE,
    "gptoss-bf16": replace(BASE, cache="same"),
    "gptoss-plain": PLAIN,
    "llama8b": replace(PLAIN, heads=(32, 8), dims=(128, 128, 0)),
    "llama70b-fp8": replace(BASE, heads=(64, 8), dims=(128, 128, 0)),
    "llama8b-static": replace(
        PLAIN, heads=(32, 8), dims=(128, 128, 0), layout="b h p d", angles="rows", full_width=True, angle_dtype=BF16
    ),
    "d96": replace(PLAIN, heads=(32, 32), dims=(96, 96, 0)),
    "d192": replace(PLAIN, heads=(16, 16), dims=(192, 64, 128), v_dim=128, pairing="halves out"),
    "gptj": replace(PLAIN, heads=(16, 16), dims=(256, 64, 0), pairing="interleaved"),
    "gptoss-hnd": replace(BASE, layout="n h p d"),
    "glm-partial": replace(PLAIN, heads=(32, 2), dims=(128, 64, 0), pairing="interleaved"),
}


def as_bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else x


def poison_new_tensors() -> None:
    """From here on `empty_like` gives tensors full of NaN, so that an output element that nothing wrote shows."""
    original = torch.empty_like

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(*args, **kwargs)
        if out.element_size() == 1:
            out.view(torch.uint8).fill_(255)  # NaN in the FP8 formats of CUDA
        else:
            out.fill_(float("nan"))
        return out

    torch.empty_like = poisoned


def checked_variants(seeds: int) -> list[tuple[Variant, LaunchParameters]]:
    """Covering sets of variants, at sizes whose last program is partly filled, over the rows of the launch table."""
    target = target_of(DEVICE)
    cases: list[tuple[Variant, LaunchParameters]] = []
    for seed in range(seeds):
        for variant in covering(seed=seed):
            if any(fp8 is not None and fp8_unsupported(target, fp8) for fp8 in (variant.q_fp8, E4M3)):
                variant = replace(variant, q_fp8=None, cache="same")
            batch, seq = variant.batch_seq
            variant = replace(variant, batch_seq=(37, 1) if seq == 1 else (batch, 11 * seq))
            tokens = int(min(LAUNCH_TABLE[len(cases) % len(LAUNCH_TABLE)].up_to, 1 << 20))
            cases.append((variant, choose_parameters(tokens, *variant.heads, *variant.dims[:2])))
    return cases


def compile_checked(work: list[tuple[int, int]]) -> None:
    """Fill Triton's cache on disk with kernels of the check; what fails here fails there again, and is reported."""
    cases = checked_variants(work[0][0])
    for _, index in work:
        variant, parameters = cases[index]
        call = make_call(variant, device=DEVICE)
        with contextlib.suppress(Exception):
            launch(*call.args, **call.encoded, parameters=parameters)


def check(seeds: int) -> list[str]:
    """Names of the variants in which the kernel is wrong; the rate of differing FP8 bytes goes to the output."""
    wrong: list[str] = []
    differing: dict[str, int] = {}
    compared: dict[str, int] = {}
    cases = checked_variants(seeds)
    compile_all(compile_checked, [(seeds, index) for index in range(len(cases))])
    original = torch.empty_like
    poison_new_tensors()
    for index, (variant, parameters) in enumerate(cases):
        call = make_call(variant, seed=index, device=DEVICE)
        eager, kernel = call.with_own_caches(), call.with_own_caches()
        try:
            want = reference(*eager.args, **eager.options)
            got = launch(*kernel.args, **kernel.encoded, parameters=parameters)
            torch.cuda.synchronize()
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {str(error)[-300:]}: {describe(variant)}")
            continue
        names = ("q", "k", "q_fp8", "k_cache", "v_cache")
        pairs = zip(names, (*got, *kernel.caches), (*want, *eager.caches), strict=False)
        for name, g, w in pairs:
            if g.stride() != w.stride() or g.dtype != w.dtype:
                wrong.append(f"{name}: layout {g.stride()} {g.dtype} for {w.stride()} {w.dtype}: {describe(variant)}")
            elif g.numel():
                different = int((as_bits(g) != as_bits(w)).sum())
                kind = "exact" if call.options["exact"] else "fp8" if g.element_size() == 1 else "default"
                differing[kind] = differing.get(kind, 0) + different
                compared[kind] = compared.get(kind, 0) + as_bits(g).numel()
                if kind == "default":
                    close = torch.allclose(g.double(), w.double(), rtol=2 * torch.finfo(g.dtype).eps, atol=1e-5)
                    if not close:
                        wrong.append(f"{name}: floats differ by more than a bit: {describe(variant)}")
                elif kind == "exact" and different:
                    wrong.append(f"{name}: {different} of {g.numel()} elements: {describe(variant)}")
                elif kind == "fp8" and different > 1e-3 * g.numel():
                    wrong.append(f"{name}: {different} of {g.numel()} FP8 bytes: {describe(variant)}")
    torch.empty_like = original
    for kind in compared:
        print(f"{kind}: {differing[kind]} of {compared[kind]} bytes differ ({differing[kind] / compared[kind]:.2e})")
    print(f"{len(cases)} variants, {len(wrong)} wrong")
    for line in wrong[:20]:
        print("  WRONG", line)
    return wrong


def graph_microseconds(call: Callable[[], object], guess_us: float) -> float:
    """Microseconds of device time per call: the median over replays of a graph that holds many calls."""
    call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        repeats = int(min(max(3000 / guess_us, 10), 300))
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                call()
        graph.replay()
        times = []
        for _ in range(7):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / repeats)
    return statistics.median(times)


@triton.jit
def _nothing(x):
    pass


def floors() -> tuple[float, float]:
    """Bytes per microsecond of a large copy by a GPU that has left its idle clocks, and an empty kernel in a graph."""
    source = torch.randn(1 << 30, device=DEVICE, dtype=BF16)
    sink = torch.empty_like(source)
    started = time.monotonic()
    while time.monotonic() - started < 1.0:
        sink.copy_(source)
        torch.cuda.synchronize()
    times = []
    for _ in range(20):  # not in a graph, where a copy is a node of another kind
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        sink.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    one = torch.empty(1, device=DEVICE)
    empty = graph_microseconds(lambda: _nothing[(1,)](one), 1)
    many = graph_microseconds(lambda: _nothing[(1500,)](one), 1)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy {4 * source.numel() / statistics.median(times) / 1e6:.2f} TB/s")
    print(f"empty kernel {empty:.2f} us, of 1500 programs {many:.2f}")
    return 2 * source.numel() * 2 / statistics.median(times), empty


@dataclass
class Timed:
    shape: str
    tokens: int
    floor_us: float
    parameters: LaunchParameters
    us: float


def sized(variant: Variant, tokens: int) -> PreparedCall:
    """A call with this many tokens: a batch of single tokens for static caches, else one sequence; 131072 positions."""
    static = "b" in variant.layout.split()
    call = make_call(replace(variant, batch_seq=(tokens, 1) if static else (1, tokens)), device=DEVICE, places=16)
    if call.args[5] is not None:
        columns = variant.dims[1] // (1 if variant.full_width else 2)
        table = torch.randn(131072, 2 * columns, device=DEVICE, dtype=variant.angle_dtype)
        call.args[3], call.args[4] = table[:, :columns], table[:, columns:]
        call.args[5] = torch.randint(0, 131072, call.args[5].shape, device=DEVICE)
    return call


def bytes_moved(call: PreparedCall) -> int:
    """What any implementation must read and write."""
    q, k, v, cos, _, positions, k_cache, v_cache, slots = call.args[:9]
    tokens = q.shape[0] * q.shape[1]
    inputs = sum(t.numel() * t.element_size() for t in (q, k, v, positions, slots) if t is not None)
    angles = 2 * tokens * cos.shape[-1] * cos.element_size()
    outputs = q.numel() * (q.element_size() * int(call.options["need_q"]) + int(call.options["q_fp8"] is not None))
    written = sum(x.numel() * c.element_size() for x, c in ((k, k_cache), (v, v_cache)) if c is not None)
    return inputs + angles + outputs + written


def grid(variant: Variant, tokens: int, full: bool) -> list[LaunchParameters]:
    """Launch parameters worth trying for this many tokens."""
    width = rope_qkv_triton.width_of(*variant.dims[:2])
    found: list[LaunchParameters] = []

    def tile(heads: int, elements: int, steps: int) -> tuple[int, int]:
        block = min(max(elements // width, 1), rope_qkv_triton.next_power_of_2(heads))
        return block, min(steps, -(-heads // block))

    shapes = itertools.product((1, 2, 4, 8), (128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8), (1, 2, 4, 8, 16))

    def worth_trying(block: int, elements: int, steps: int, warps: int) -> bool:
        each = block * elements / (32 * warps)
        if tokens < 64:
            return block == 1 and steps == 1 and (4 <= each <= 8 or (each == 16 and warps > 2))
        if tokens <= 1024:
            return each in (8, 16) and steps <= 2 and block <= 4 and (full or (steps == 1) == (tokens < 256))
        return each == 16 and (
            (steps in (2, 4) and (block, warps) in ((1, 1), (2, 2), (4, 4))) or (block, steps, warps) == (1, 4, 2)
        )

    choices = [shape for shape in shapes if worth_trying(*shape)]
    for block, elements, steps, warps in choices:
        found += [
            LaunchParameters(
                block, *tile(variant.heads[0], elements, steps), *tile(variant.heads[1], elements, steps), warps
            )
        ]
    return list(dict.fromkeys(found))


def compile_timed(work: list[tuple[str, LaunchParameters]]) -> None:
    """Fill Triton's cache on disk: a kernel is the same for any number of tokens."""
    for shape, parameters in work:
        call = sized(SHAPES[shape], 2)
        launch(*call.args, **call.encoded, parameters=parameters)


def compile_all(compile_some: Callable[[list[Any]], None], work: list[Any]) -> None:
    """Share the compilation out to processes, each with its own part of `work`."""
    workers = min(max((os.cpu_count() or 2) - 1, 1), 14, len(work))
    if workers:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.map(compile_some, [work[i::workers] for i in range(workers)])


class Bench:
    """Times calls of the operator at one shape and number of tokens."""

    def __init__(self, shape: str, tokens: int, bandwidth: float, empty: float) -> None:
        self.shape, self.tokens = shape, tokens
        self.call = sized(SHAPES[shape], tokens)
        self.floor = max(bytes_moved(self.call) / bandwidth, empty)

    def measure(self, parameters: LaunchParameters | None = None) -> Timed:
        """With these launch parameters; None takes those of the launch table."""
        shipped = choose_parameters(self.tokens, *SHAPES[self.shape].heads, *SHAPES[self.shape].dims[:2])
        us = graph_microseconds(
            lambda: launch(*self.call.args, **self.call.encoded, parameters=parameters or shipped), self.floor
        )
        return Timed(self.shape, self.tokens, self.floor, parameters or shipped, us)


def table(shapes: list[str], token_counts: list[int], bandwidth: float, empty: float) -> list[Timed]:
    compile_all(
        compile_timed,
        list(
            dict.fromkeys(
                (shape, choose_parameters(tokens, *SHAPES[shape].heads, *SHAPES[shape].dims[:2]))
                for shape in shapes
                for tokens in token_counts
            )
        ),
    )
    print("us (times the floor) at " + ", ".join(map(str, token_counts)) + " tokens")
    timed = []
    for shape in shapes:
        row = [Bench(shape, tokens, bandwidth, empty).measure() for tokens in token_counts]
        print(f"{shape:15}" + "".join(f"{t.us:9.2f} ({t.us / t.floor_us:.2f})" for t in row), flush=True)
        timed += row
    return timed


def search(shapes: list[str], token_counts: list[int], seconds: float, bandwidth: float, empty: float) -> list[Timed]:
    deadline = time.monotonic() + seconds
    grids = {(shape, t): grid(SHAPES[shape], t, shape == shapes[0]) for shape in shapes for t in token_counts}
    compile_all(compile_timed, list(dict.fromkeys((shape, p) for (shape, _), found in grids.items() for p in found)))
    timed: list[Timed] = []
    for (shape, tokens), found in grids.items():
        if time.monotonic() > deadline:
            print("out of time")
            break
        bench = Bench(shape, tokens, bandwidth, empty)
        results = sorted((bench.measure(p) for p in found), key=lambda t: t.us)
        print(f"{shape} T={tokens}: floor {bench.floor:.2f}, shipped {bench.measure().us:.2f}", flush=True)
        print("    " + "  ".join(f"{t.us:.2f} {tuple(t.parameters)}" for t in results[:6]))
        timed += results
    return timed


def fp8_mismatch(shapes: list[str], tokens: int = 4096) -> None:
    """At the timed shapes: how many FP8 bytes differ from the reference, default and exact."""
    for shape in shapes:
        if SHAPES[shape].q_fp8 is None:
            continue
        for math in ("fp32", "exact fp32"):
            call = sized(replace(SHAPES[shape], math=math), tokens)
            eager, kernel = call.with_own_caches(), call.with_own_caches()
            want, got = reference(*eager.args, **eager.options), launch(*kernel.args, **kernel.encoded)
            rates = [
                (as_bits(g) != as_bits(w)).double().mean().item()
                for g, w in zip((got[2], *kernel.caches), (want[2], *eager.caches), strict=True)
            ]
            print(f"{shape} {math}: differing bytes q {rates[0]:.1e}, k {rates[1]:.1e}, v {rates[2]:.1e}")


def plain_prologue(
    qkv: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, scales: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """What "gptoss-fp8" computes, in PyTorch; the caches are bytes, indexed directly."""
    q, k, v = qkv.view(-1, 80, 64).split([64, 8, 8], 1)
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(BF16)

    def quantised(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x.float() / scale).clamp(-448, 448).to(E4M3)

    block, place = slots // 16, slots % 16
    k_cache[block, place] = quantised(rotated(k), scales[1]).view(torch.uint8)
    v_cache[block, place] = quantised(v, scales[2]).view(torch.uint8)
    return quantised(rotated(q), scales[0])


def host() -> None:
    """Host microseconds per call, of the operator and of compiled functions with it and without it."""
    import rope_fusion.kernels.prologue  # noqa: F401  (how Inductor calls the operator)
    from rope_fusion.kernels.rope_qkv_triton import prepare, run

    def spent(fn: Callable[[], object], n: int = 1000) -> float:
        times = []
        for _ in range(5):
            fn()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n // 5):
                fn()
            times.append((time.perf_counter() - start) / (n // 5) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(times)

    call = sized(BASE, 1)
    operator = torch.ops.rope_fusion.rope_qkv
    x = torch.randn(64, 64, device=DEVICE)
    prepared = prepare(*call.args, **call.encoded)
    print(
        f"host us per call: readable {spent(lambda: operator.default(*call.args, **call.options)):.1f}, "
        f"encoded {spent(lambda: operator.encoded(*call.args, **call.encoded)):.1f}, "
        f"of it prepare {spent(lambda: prepare(*call.args, **call.encoded)):.1f}, run {spent(lambda: run(prepared)):.1f}; "
        f"torch mul {spent(lambda: x * 2):.1f}, empty Triton kernel {spent(lambda: _nothing[(1,)](x)):.1f}"
    )
    q, k, v, cos, sin, positions, k_cache, v_cache, slots = call.args[:9]
    qkv = torch.cat([part.flatten(1) for part in (q, k, v)], -1)
    plain_args = (qkv, torch.cat((cos, sin), -1), positions[0], slots, torch.rand(3, device=DEVICE) + 0.1)
    caches = [cache.view(torch.uint8).clone() for cache in (k_cache, v_cache)]

    @torch.compile(dynamic=False)
    def fused(*args: torch.Tensor) -> torch.Tensor:
        return operator.default(*args, **call.options)[2]

    compiled_plain = torch.compile(plain_prologue, dynamic=False)
    eager, compiled = call.with_own_caches(), call.with_own_caches()
    want, got = reference(*eager.args, **eager.options)[2], fused(*compiled.args)
    same = all(
        torch.equal(as_bits(w), as_bits(g)) for w, g in zip((want, *eager.caches), (got, *compiled.caches), strict=True)
    )
    print(
        f"compiled, with the operator {spent(lambda: fused(*call.args)):.1f} (same bits as eager: {same}), "
        f"in plain PyTorch {spent(lambda: compiled_plain(*plain_args, *caches)):.1f}"
    )
    for tokens in (1, 64):
        sized_call = sized(BASE, tokens)
        y = torch.randn(8, 4096, device=DEVICE)

        def both(sized_call: PreparedCall = sized_call, y: torch.Tensor = y) -> None:
            y.mul_(1.0)
            launch(*sized_call.args, **sized_call.encoded)

        alone = graph_microseconds(lambda y=y: y.mul_(1.0), 2)  # type: ignore[misc]
        print(
            f"on the device, after a kernel of another kind, {tokens} tokens: {graph_microseconds(both, 3) - alone:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["check", "table", "host"])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 64, 256, 2048, 16384, 65536])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    record: dict[str, Any] = {}
    if "check" in options.what:
        record["wrong"] = check(options.seeds)
        fp8_mismatch(options.shapes)
    if "host" in options.what:
        host()
    timed: list[Timed] = []
    if {"table", "search"} & set(options.what):
        bandwidth, empty = floors()
        if "table" in options.what:
            timed += table(options.shapes, options.tokens, bandwidth, empty)
        if "search" in options.what:
            timed += search(options.shapes, options.tokens, options.seconds, bandwidth, empty)
        record |= {"bytes_per_us": bandwidth, "empty_us": empty}
        record["timed"] = [vars(t) | {"parameters": t.parameters._asdict()} for t in timed]
    if folder := os.environ.get("OUT"):
        Path(folder, "rope_qkv.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
