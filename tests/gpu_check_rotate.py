"""Check and time the rotation kernel on a GPU: `PYTHONPATH=. python tests/gpu_check_rotate.py [part ...]`.

`check` compares every variant with the reference on poisoned outputs. `table` times the inverse rotation of an
attention output against eager, Inductor and the memory floor; `fp8` its quantising forms; `partial` forward partial
rotations; `early` programmatic dependent launch; `grid` tries launch parameters. Without a part all are run. Checks
and compilation are spread over processes. All times are medians of CUDA-graph replays in µs: calls back to back, or,
where "after", each behind the kernel that wrote x. With $OUT set, rotate.json goes there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from rope_fusion.bench_cases_inverse import (  # as models write them
    halves,
    inverse,
    inverse_group,
    inverse_static,
    neox,
    pairs,
)
from rope_fusion.kernels.rope_qkv import quantise_reference
from rope_fusion.kernels.rotate import GroupFp8, Rotary, StaticFp8, arranged, group_quantized, output_shape, rotated
from rope_fusion.kernels.rotate_triton import Launch, launch, next_power_of_2, pick_launch

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
DEVICE = "cuda"
RESULTS: list[dict[str, Any]] = []


def rotary(start: int, dim: int, **changes: Any) -> Rotary:
    base: dict[str, Any] = {
        "interleaved": True,
        "inverse": True,
        "halves_out": False,
        "rotary_dim": dim,
        "rotary_start": start,
        "math_dtype": torch.float32,
        "exact": False,
    }
    return Rotary(**(base | changes))


def poisoned(shape: Any, dtype: torch.dtype) -> Tensor:
    """Every byte 0xFF: NaN in every format, so an element that nothing wrote stands out."""
    out = torch.empty(tuple(shape), dtype=dtype, device=DEVICE)
    out.view(torch.uint8).fill_(0xFF)
    return out


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


# ---- correctness


SHAPES = [  # batch, sequence, heads, width, start, dim
    (1, 5, 3, 512, 448, 64),
    (2, 7, 16, 192, 128, 64),
    (3, 1, 32, 128, 0, 128),
    (1, 33, 8, 96, 0, 32),
    (1, 9, 6, 80, 16, 40),
    (2, 3, 128, 512, 448, 64),
    (1, 1, 1, 576, 512, 64),
]
PAIRINGS = [(False, False), (True, False), (True, True)]


def check_part(part: int, parts: int) -> tuple[int, int]:
    """Comparisons and failed ones, each of which is printed.

    Every shape, pairing and table width is run; the other choices take turns: each combination is a compilation.
    """
    failures = runs = 0
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    cases = itertools.product(SHAPES, PAIRINGS, (False, True))
    for turn, (shape, (interleaved, halves_out), full) in itertools.islice(enumerate(cases), part, None, parts):

        def expect(condition: bool, *what: Any, case: Any = (turn, shape, interleaved, halves_out, full)) -> None:
            nonlocal failures, runs
            runs += 1
            if not condition:
                failures += 1
                print("FAILED", *what, case, flush=True)

        batch, sequence, heads, width, start, dim = shape
        dtype = (BF16, torch.float16, BF16, torch.float32)[turn % 4]
        exact = turn % 5 in (1, 3)
        how = rotary(
            start, dim, interleaved=interleaved, halves_out=halves_out, inverse=turn % 2 == 0, exact=exact,
            math_dtype=dtype if exact else torch.float32,
        )  # fmt: skip
        packed = torch.randn(batch, heads, sequence, width + 8, device=DEVICE).to(dtype)
        x = packed[..., :width].transpose(1, 2)
        rows = torch.randn(77, 2 * dim, device=DEVICE)
        columns = dim if full else dim // 2
        cos, sin = rows[:, :columns], rows[:, dim : dim + columns]
        positions = torch.randint(0, 77, (batch, sequence), device=DEVICE, dtype=torch.int32)

        eager = rotated(x, cos, sin, positions, how, dtype)
        out = poisoned(x.shape, dtype)
        launch(x, cos, sin, positions, how, out)
        keep = [i for i in range(width) if not start <= i < start + dim]
        expect(torch.equal(bits(out[..., keep]), bits(x[..., keep])), "pass-through bits")
        if exact:
            expect(torch.equal(bits(out), bits(eager)), "exact")
        else:
            exactly = rotated(x.double(), cos.double(), sin.double(), positions, how, torch.float64)
            error = (out.double() - exactly).abs().max().item()
            limit = (eager.double() - exactly).abs().max().item()
            # in fp32 there is no final rounding: a fused multiply-add errs elsewhere than eager, not by much more
            expect(error <= limit * (1.5 if dtype == torch.float32 else 1.0001), "numerics", error, limit)

        in_place = packed.clone()
        view = in_place[..., :width].transpose(1, 2)
        launch(view, cos, sin, positions, how, view)
        expect(torch.equal(bits(view), bits(out)), "in place")
        expect(torch.equal(bits(in_place[..., width:]), bits(packed[..., width:])), "outside of what is in place")

        layout, groups = [("b h s d", 1), ("g b s h d", 2), ("b s g h d", 2)][turn % 3 if heads % 2 == 0 else 0]
        laid = poisoned(output_shape(x, layout, groups, width), dtype)
        launch(x, cos, sin, positions, how, laid, layout=layout, groups=groups)
        expect(torch.equal(bits(laid), bits(arranged(out, layout, groups))), layout)

        by_rows = poisoned(x.shape, dtype)
        launch(x, cos[positions.long()], sin[positions.long()], None, how, by_rows)
        expect(torch.equal(bits(by_rows), bits(out)), "rows")

        multiplies, scale = turn % 2 == 1, torch.tensor([0.37], device=DEVICE)
        static = StaticFp8(FP8, scale if turn % 3 else None, 0.37, multiplies)
        q8 = poisoned(x.shape, FP8)
        launch(x, cos, sin, positions, how, q8, rounded=dtype, quant=static)
        wanted = quantise_reference(out, scale, FP8, multiply=multiplies)
        expect(torch.equal(bits(q8), bits(wanted)), "static fp8", multiplies)

        group = GroupFp8(FP8, 64 if width % 64 == 0 else 16, 1e-4, not exact and turn % 2 == 0)
        q8, scales = poisoned(x.shape, FP8), poisoned((*x.shape[:3], width // group.size), torch.float32)
        launch(x, cos, sin, positions, how, q8, rounded=dtype, quant=group, scales=scales)
        # eager divides by a number on the GPU as exact mode does, and truly on the CPU as the other mode does
        wanted, wanted_scales = group_quantized(out if exact else out.cpu(), group)
        expect(torch.equal(bits(scales), bits(wanted_scales.to(DEVICE))), "scales", group)
        expect(torch.equal(bits(q8), bits(wanted.to(DEVICE))), "group fp8", group)
    return runs, failures


def check() -> int:
    """Count of failed comparisons."""
    parts = min(16, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(parts) as pool:
        results = pool.starmap(check_part, [(part, parts) for part in range(parts)])
    runs, failures = (sum(column) for column in zip(*results, strict=True))
    print(f"check: {runs} comparisons, {failures} failed", flush=True)
    return failures


# ---- timing


def microseconds(call: Callable[[], Any], budget: float = 20e3) -> float:
    """Median time of one call among many in a CUDA graph; `budget` is the µs that the replays may take."""
    stream = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replayed(count: int, replays: int) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                call()
        times = []
        for _ in range(replays):
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / count)
        return statistics.median(times)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        once = replayed(10, 4)
        replays = 12
        return replayed(max(1, min(400, int(budget / replays / once))), replays)


def warm_up(seconds: float) -> None:
    """Keep the GPU busy until its clocks have risen."""
    a = torch.randn(4096, 4096, device=DEVICE, dtype=BF16)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def bandwidth() -> float:
    """Bytes per µs of a large copy on a busy GPU, reads and writes counted."""
    source = torch.randn(1 << 30, device=DEVICE, dtype=BF16)
    target = torch.empty_like(source)
    # a kernel: what a graph makes of `copy_` is a transfer by another engine, at two thirds of the rate
    return 2 * source.numel() * 2 / microseconds(lambda: torch.neg(source, out=target), budget=100e3)


def record(**row: Any) -> None:
    RESULTS.append(row)
    cells = (f"{key}={value:.2f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items())
    print("  ".join(cells), flush=True)


def joined_table(rows: int, dim: int) -> Tensor:
    angle = torch.arange(rows, device=DEVICE).float()[:, None] / (
        10000 ** (torch.arange(0, dim, 2, device=DEVICE).float() / dim)
    )
    return torch.cat([angle.cos(), angle.sin()], -1)


@dataclass(frozen=True)
class Case:
    """A program and the kernel's form that stands for it."""

    heads: int
    width: int
    start: int
    dim: int
    program: Callable[..., Any] = inverse
    form: str = "copy"  # "copy" | "in place" | "static" | "group"
    changes: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass
class Run:
    """Operands of a case for some number of tokens."""

    case: Case
    tokens: int

    def __post_init__(self) -> None:
        case = self.case
        self.x = torch.randn(1, self.tokens, case.heads, case.width, device=DEVICE, dtype=BF16)
        self.table = joined_table(65536, case.dim)
        self.positions = torch.randint(0, 65536, (self.tokens,), device=DEVICE)
        out = torch.empty_like(self.x, dtype=BF16 if case.form in ("copy", "in place") else FP8)
        self.out = self.x if case.form == "in place" else out
        self.options: dict[str, Any] = {}
        if case.form == "static":
            self.options = {"rounded": BF16, "quant": StaticFp8(FP8, torch.full((1,), 0.02, device=DEVICE), 1.0, False)}
        if case.form == "group":
            scales = torch.empty(1, self.tokens, case.heads, case.width // 128, device=DEVICE)
            self.options = {"rounded": BF16, "quant": GroupFp8(FP8, 128, 1e-4, False), "scales": scales}

    def ours(self, shape: Launch | None = None) -> None:
        cos, sin = self.table.chunk(2, 1)
        how = rotary(self.case.start, self.case.dim, **self.case.changes)
        launch(self.x, cos, sin, self.positions, how, self.out, shape=shape, **self.options)

    def program(self) -> Callable[[], Any]:
        return partial(self.case.program, self.x[0], self.positions, self.table, self.case.start)

    def compiled(self) -> Callable[[], Any]:
        torch._dynamo.reset()
        function = torch.compile(self.case.program, dynamic=False)
        return partial(function, self.x[0], self.positions, self.table, self.case.start)

    def after(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """`call` behind a kernel that writes x."""
        source = self.x.clone()

        def both() -> None:
            torch.neg(source, out=self.x)
            call()

        return both

    @property
    def touched(self) -> int:
        """Elements that are read."""
        return self.x.numel() * self.case.dim // self.case.width if self.case.form == "in place" else self.x.numel()

    def floor(self, rate: float) -> float:
        """µs to read and write what must be, at `rate` bytes per µs."""
        written = {"static": 1.0, "group": 1.0 + 4 / 128}.get(self.case.form, 2.0)
        return (self.touched * (2 + written) + self.tokens * (self.case.dim * 4 + 8)) / rate


OUTPUT = Case(16, 512, 448, 64)
WIDE = replace(OUTPUT, heads=128)
PARTIAL = {
    "neox 32/128": Case(32, 128, 0, 32, neox, changes={"interleaved": False, "inverse": False}),
    "neox 64/96": Case(32, 96, 0, 64, neox, changes={"interleaved": False, "inverse": False}),
    "pairs 64/128": Case(32, 128, 0, 64, pairs, changes={"inverse": False}),
    "pairs end 64/192": Case(128, 192, 128, 64, pairs, changes={"inverse": False}),
    "halves 64/192": Case(128, 192, 128, 64, halves, changes={"halves_out": True, "inverse": False}),
    "neox kv 64/128": Case(2, 128, 0, 64, neox, changes={"interleaved": False, "inverse": False}),
}
TABLE = [(OUTPUT, 1), (OUTPUT, 16), (OUTPUT, 64), (WIDE, 1), (WIDE, 64), (OUTPUT, 4096), (WIDE, 4096)]
FP8_TABLE = [
    (replace(case, form=form, program=program), tokens)
    for form, program in (("static", inverse_static), ("group", inverse_group))
    for case, tokens in ((OUTPUT, 1), (OUTPUT, 64), (WIDE, 64), (WIDE, 4096))
]
PARTIAL_TABLE = [(case, tokens) for case in PARTIAL.values() for tokens in (1, 64, 1024, 8192)]
GRID = [
    *[(OUTPUT, tokens) for tokens in (1, 4, 16, 64, 256, 1024, 4096)],
    *[(WIDE, tokens) for tokens in (64, 4096)],
    *[(replace(OUTPUT, form="in place"), tokens) for tokens in (1, 64, 1024, 4096)],
    *[(replace(WIDE, form="in place"), tokens) for tokens in (64, 4096)],
    *[(replace(OUTPUT, form=form), tokens) for form in ("static", "group") for tokens in (16, 4096)],
    *[(PARTIAL["neox 32/128"], tokens) for tokens in (1, 16, 64, 512, 8192)],
]

EARLY = [(OUTPUT, tokens) for tokens in (1, 16, 64, 4096)]


def shapes(case: Case, tokens: int) -> Iterator[Launch]:
    """Program shapes worth trying: 4 to 64 elements per thread, and enough programs where there is work for them."""
    width = next_power_of_2(case.dim if case.form == "in place" else case.width)
    elements = tokens * case.heads * width
    least, most = max(width, min(2048, elements >> 16)), max(1024, elements // 16)
    for tile, warps in itertools.product([1 << bits for bits in range(6, 15)], (1, 2, 4, 8, 16)):
        if least <= tile <= most and 4 <= tile // (32 * warps) <= 64:
            yield Launch(0, tile, warps)


def table(rate: float) -> None:
    for case, tokens in TABLE:
        run, in_place = Run(case, tokens), Run(replace(case, form="in place"), tokens)
        run.ours()
        error = (run.out[0].float() - run.program()().float()).abs().max().item()
        ours, compiled, floor = microseconds(run.ours), microseconds(run.compiled()), run.floor(rate)
        record(
            case="inverse", tokens=tokens, heads=case.heads, eager=microseconds(run.program()), inductor=compiled,
            again=microseconds(run.compiled()), ours=ours, ours_again=microseconds(run.ours), floor=floor,
            over_floor=ours / floor, gain=compiled / ours, in_place=microseconds(in_place.ours),
            in_place_floor=in_place.floor(rate), after_inductor=microseconds(run.after(run.compiled())),
            after_ours=microseconds(run.after(run.ours)), after_in_place=microseconds(in_place.after(in_place.ours)),
            error=error,
        )  # fmt: skip


def fp8(rate: float) -> None:
    for case, tokens in FP8_TABLE:
        run = Run(case, tokens)
        record(
            case=case.form, tokens=tokens, heads=case.heads, inductor=microseconds(run.compiled()),
            ours=microseconds(run.ours), floor=run.floor(rate),
        )  # fmt: skip


def partials(rate: float) -> None:
    names = {id(case): name for name, case in PARTIAL.items()}
    for case, tokens in PARTIAL_TABLE:
        run = Run(case, tokens)
        run.ours()
        error = (run.out[0].float() - run.program()().float()).abs().max().item()
        ours, compiled, floor = microseconds(run.ours), microseconds(run.compiled()), run.floor(rate)
        record(
            case=names[id(case)], tokens=tokens, heads=case.heads, inductor=compiled, ours=ours, floor=floor,
            over_floor=ours / floor, gain=compiled / ours, error=error,
        )  # fmt: skip


def grid(rate: float) -> None:
    """The best program shapes by size."""
    for case, tokens in GRID:
        run = Run(case, tokens)
        timed = sorted(
            (microseconds(partial(run.ours, shape), 8e3), shape.tile, shape.warps) for shape in shapes(case, tokens)
        )
        best = " ".join(f"{us:.2f}@{tile}/{warps}" for us, tile, warps in timed[:6])
        label = f"{case.form} {case.dim}/{case.width}"
        RESULTS.append({"case": f"grid {label}", "tokens": tokens, "heads": case.heads, "timed": timed})
        chosen = pick_launch(run.touched)
        now = next((us for us, tile, warps in timed if (tile, warps) == (chosen.tile, chosen.warps)), float("nan"))
        print(
            f"grid {label} {tokens}x{case.heads} touched=2^{run.touched.bit_length() - 1} floor={run.floor(rate):.2f} "
            f"now={now:.2f}@{chosen.tile}/{chosen.warps} best {best}",
            flush=True,
        )


def early(rate: float) -> None:
    """What a start before the kernel ahead has ended gains, behind calls of its own and behind another kernel."""
    for case, tokens in EARLY:
        run = Run(case, tokens)
        shape = pick_launch(run.touched)
        late, soon = (partial(run.ours, replace(shape, dependent=dependent)) for dependent in (False, True))
        record(
            case="early", tokens=tokens, heads=case.heads, late=microseconds(late), early=microseconds(soon),
            late_behind=microseconds(run.after(late)), early_behind=microseconds(run.after(soon)),
            inductor_behind=microseconds(run.after(run.compiled())),
        )  # fmt: skip


# ---- compilation ahead of the timing


def compile_one(job: tuple[Case, int, str]) -> None:
    """Fill the caches on disk with what one row will run; a failure will show where it is timed."""
    case, tokens, what = job
    with contextlib.suppress(Exception):
        run = Run(case, tokens)
        if what == "inductor":
            run.compiled()()
        elif what == "ours":
            run.ours()
        else:
            wanted = {shape for other, count in GRID if other == case for shape in shapes(case, count)}
            for shape in sorted(wanted, key=lambda shape: (shape.tile, shape.warps))[int(what) :: 6]:
                run.ours(shape)
        torch.cuda.synchronize()


def compile_all(names: list[str]) -> None:
    jobs: list[tuple[Case, int, str]] = []
    for name, rows in {"table": TABLE, "fp8": FP8_TABLE, "partial": PARTIAL_TABLE}.items():
        if name in names:
            jobs += [(*row, what) for row in rows for what in ("inductor", "ours")]
    if "table" in names:
        jobs += [(replace(case, form="in place"), tokens, "ours") for case, tokens in TABLE]
    if "grid" in names:
        jobs += [(case, 64, str(part)) for case in dict.fromkeys(case for case, _ in GRID) for part in range(6)]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    # Inductor chose its own launch parameters on a crowded GPU: it shall choose again
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for file in Path(cache_dir()).rglob("*.best_config"):
        file.unlink()
    print(f"compiled {len(jobs)} rows in {time.perf_counter() - begin:.0f} s", flush=True)


def main(wanted: list[str]) -> int:
    names = wanted or ["check", "table", "fp8", "partial", "early", "grid"]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    if set(names) != {"check"}:
        compile_all(names)
    failures = check() if "check" in names else 0
    warm_up(1.0)
    rate = bandwidth()
    record(case="machine", copy_TB_per_s=rate / 1e6, empty_launch_us=microseconds(partial(torch.cuda._sleep, 0)))
    for name, run in {"table": table, "fp8": fp8, "partial": partials, "early": early, "grid": grid}.items():
        if name in names:
            run(rate)
    if folder := os.environ.get("OUT"):
        Path(folder, "rotate.json").write_text(json.dumps(RESULTS))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
