"""Check and time the rotation kernel on a GPU: `PYTHONPATH=. python tests/gpu_check_rotate.py [part ...]`.

`check` compares every variant with the reference on poisoned outputs. `table` times the inverse rotation of an
attention output against eager, Inductor and the memory floor; `fp8` its quantising forms; `partial` forward partial
rotations; `grid` tries launch parameters. Without a part all are run. All times are medians of CUDA-graph replays in
µs. With $OUT set, rotate.json goes there.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench_cudagraph

from rope_fusion.kernels.rope_qkv import quantise_reference
from rope_fusion.kernels.rotate import GroupFp8, Rotary, StaticFp8, arranged, group_quantized, output_shape, rotated
from rope_fusion.kernels.rotate_triton import Launch, launch, pick_launch

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


def check() -> int:
    """Count of failed comparisons, each of which is printed.

    Every shape, pairing and table width is run; the other choices take turns: each combination is a compilation.
    """
    failures = runs = 0
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    cases = itertools.product(SHAPES, PAIRINGS, (False, True))
    for turn, (shape, (interleaved, halves_out), full) in enumerate(cases):

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
    print(f"check: {runs} comparisons, {failures} failed", flush=True)
    return failures


# ---- timing


def microseconds(function: Callable[..., Any], *args: Any, rep: int = 20, **options: Any) -> float:
    with torch.cuda.stream(torch.cuda.Stream()):
        return do_bench_cudagraph(lambda: function(*args, **options), rep=rep, return_mode="median") * 1e3


def bandwidth() -> float:
    """Bytes per µs of a large copy, reads and writes counted."""
    source = torch.randn(1 << 29, device=DEVICE, dtype=BF16)
    target = torch.empty_like(source)
    return 2 * source.numel() * 2 / microseconds(target.copy_, source)


def by_inductor(function: Callable[..., Any], *args: Any) -> float:
    torch._dynamo.reset()
    compiled = torch.compile(function, dynamic=False)
    compiled(*args)
    return microseconds(compiled, *args)


def record(**row: Any) -> None:
    RESULTS.append(row)
    cells = (f"{key}={value:.2f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items())
    print("  ".join(cells), flush=True)


def joined_table(rows: int, dim: int) -> Tensor:
    angle = torch.arange(rows, device=DEVICE).float()[:, None] / (
        10000 ** (torch.arange(0, dim, 2, device=DEVICE).float() / dim)
    )
    return torch.cat([angle.cos(), angle.sin()], -1)


def inverse_rope(o: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """The o-projection's spelling: clone, index_select, repeat_interleave, neg, stack, cat and casts."""
    dim = table.shape[1]
    o = o.clone()
    cos, sin = table.index_select(0, positions).chunk(2, -1)
    cos = cos.repeat_interleave(2, -1)[:, None]
    sin = (-sin).repeat_interleave(2, -1)[:, None]
    x = o[..., -dim:].float()
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return torch.cat([o[..., :-dim], (x * cos + turned * sin).to(o.dtype)], -1)


SIZES = [(1, 16), (16, 16), (64, 16), (64, 128), (4096, 16), (4096, 128)]


def table(rate: float) -> None:
    width, dim = 512, 64
    cache = joined_table(65536, dim)
    cos, sin = cache.chunk(2, 1)
    how = rotary(width - dim, dim)
    for tokens, heads in SIZES:
        o = torch.randn(tokens, heads, width, device=DEVICE, dtype=BF16)
        x, out = o[None], torch.empty_like(o)[None]
        positions = torch.randint(0, 65536, (tokens,), device=DEVICE)
        launch(x, cos, sin, positions, how, out)
        error = (out[0].float() - inverse_rope(o, positions, cache).float()).abs().max().item()
        trig = tokens * (dim * 4 + 8)
        ours = microseconds(launch, x, cos, sin, positions, how, out)
        compiled = by_inductor(inverse_rope, o, positions, cache)
        floor = (2 * o.numel() * 2 + trig) / rate
        record(
            case="inverse", tokens=tokens, heads=heads,
            eager=microseconds(inverse_rope, o, positions, cache),
            inductor=compiled, ours=ours, again=microseconds(launch, x, cos, sin, positions, how, out),
            floor=floor, over_floor=ours / floor, gain=compiled / ours,
            in_place=microseconds(launch, x, cos, sin, positions, how, x),
            in_place_floor=(2 * tokens * heads * dim * 2 + trig) / rate, error=error,
        )  # fmt: skip


def static_fp8_chain(o: Tensor, positions: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    value = inverse_rope(o, positions, table)
    return (value.float() / scale).clamp(-448, 448).to(FP8)


def group_fp8_chain(o: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    groups = inverse_rope(o, positions, table).float().unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1).clamp(min=1e-4) / 448
    return (groups / scales[..., None]).clamp(-448, 448).to(FP8).flatten(-2), scales


def fp8(rate: float) -> None:
    width, dim = 512, 64
    cache = joined_table(65536, dim)
    cos, sin = cache.chunk(2, 1)
    how = rotary(width - dim, dim)
    scale = torch.tensor([0.02], device=DEVICE)
    for tokens, heads in SIZES:
        o = torch.randn(tokens, heads, width, device=DEVICE, dtype=BF16)
        x, out = o[None], torch.empty_like(o, dtype=FP8)[None]
        scales = torch.empty(1, tokens, heads, width // 128, device=DEVICE)
        positions = torch.randint(0, 65536, (tokens,), device=DEVICE)
        static, group = StaticFp8(FP8, scale, 1.0, False), GroupFp8(FP8, 128, 1e-4, False)
        floor = (3 * o.numel() + tokens * (dim * 4 + 8)) / rate
        record(
            case="fp8", tokens=tokens, heads=heads, floor=floor,
            static_inductor=by_inductor(static_fp8_chain, o, positions, cache, scale),
            static=microseconds(launch, x, cos, sin, positions, how, out, rounded=BF16, quant=static),
            group_inductor=by_inductor(group_fp8_chain, o, positions, cache),
            group=microseconds(launch, x, cos, sin, positions, how, out, rounded=BF16, quant=group, scales=scales),
        )  # fmt: skip


def partial_neox(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, start: int, dim: int) -> Tensor:
    c, s = (torch.cat((t, t), -1)[positions][:, None] for t in (cos, sin))
    part = x[..., start : start + dim].float()
    turned = torch.cat((-part[..., dim // 2 :], part[..., : dim // 2]), -1)
    return torch.cat((x[..., :start], (part * c + turned * s).to(x.dtype), x[..., start + dim :]), -1)


def partial_pairs(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, start: int, dim: int) -> Tensor:
    c, s = (t[positions][:, None] for t in (cos, sin))
    a, b = x[..., start : start + dim].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :start], turned, x[..., start + dim :]), -1)


def partial_halves_out(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, start: int, dim: int) -> Tensor:
    part = x[..., start : start + dim]
    part = part.unflatten(-1, (dim // 2, 2)).transpose(-1, -2).flatten(-2)
    c, s = (torch.cat((t, t), -1)[positions][:, None] for t in (cos, sin))
    turned = torch.cat((-part[..., dim // 2 :], part[..., : dim // 2]), -1)
    return torch.cat((x[..., :start], (part * c + turned * s).to(x.dtype), x[..., start + dim :]), -1)


PARTIAL = {
    "neox 32/128": (partial_neox, 32, 128, 0, 32, {"interleaved": False}),
    "neox 64/96": (partial_neox, 32, 96, 0, 64, {"interleaved": False}),
    "neox 128/128": (partial_neox, 32, 128, 0, 128, {"interleaved": False}),
    "pairs 64/128": (partial_pairs, 32, 128, 0, 64, {}),
    "pairs end 64/192": (partial_pairs, 128, 192, 128, 64, {}),
    "halves 64/192": (partial_halves_out, 128, 192, 128, 64, {"halves_out": True}),
    "neox kv 64/128": (partial_neox, 2, 128, 0, 64, {"interleaved": False}),
}


def partial(rate: float) -> None:
    for name, (function, heads, width, start, dim, changes) in PARTIAL.items():
        cos, sin = joined_table(65536, dim).chunk(2, 1)
        how = rotary(start, dim, inverse=False, **changes)
        for tokens in (1, 64, 4096, 16384):
            x = torch.randn(tokens, heads, width, device=DEVICE, dtype=BF16)
            out = torch.empty_like(x)[None]
            positions = torch.randint(0, 65536, (tokens,), device=DEVICE)
            launch(x[None], cos, sin, positions, how, out)
            error = (out[0].float() - function(x, cos, sin, positions, start, dim).float()).abs().max().item()
            ours = microseconds(launch, x[None], cos, sin, positions, how, out)
            compiled = by_inductor(function, x, cos, sin, positions, start, dim)
            floor = (4 * x.numel() + tokens * (dim * 4 + 8)) / rate
            record(
                case=name, tokens=tokens, heads=heads, inductor=compiled, ours=ours, floor=floor,
                over_floor=ours / floor, gain=compiled / ours, error=error,
            )  # fmt: skip


def grid(rate: float) -> None:
    """The best launch parameters by size: `tile` elements per program and warps, five best of each."""
    cases = {
        "inverse 64/512": ([16, 128], 512, 448, 64, {}),
        "neox 32/128": ([8, 32], 128, 0, 32, {"interleaved": False, "inverse": False}),
    }
    for name, (all_heads, width, start, dim, changes) in cases.items():
        cos, sin = joined_table(65536, dim).chunk(2, 1)
        how = rotary(start, dim, **changes)
        for heads, tokens in itertools.product(all_heads, (1, 16, 64, 256, 1024, 4096)):
            x = torch.randn(1, tokens, heads, width, device=DEVICE, dtype=BF16)
            out = torch.empty_like(x)
            positions = torch.randint(0, 65536, (tokens,), device=DEVICE)
            timed = []
            for tile, warps in itertools.product((128, 256, 512, 1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8)):
                if not (2 <= tile // (warps * 32) <= 64 and width <= tile <= triton.next_power_of_2(x.numel())):
                    continue
                shape = Launch(0, tile, warps)
                timed.append((microseconds(launch, x, cos, sin, positions, how, out, shape=shape, rep=8), tile, warps))
            chosen = pick_launch(x.numel())
            now = next((us for us, tile, warps in timed if (tile, warps) == (chosen.tile, chosen.warps)), float("nan"))
            timed.sort()
            best = " ".join(f"{us:.2f}@{tile}/{warps}" for us, tile, warps in timed[:5])
            RESULTS.append({"case": f"grid {name}", "tokens": tokens, "heads": heads, "timed": timed})
            table_row = f"{now:.2f}@{chosen.tile}/{chosen.warps}"
            print(f"grid {name} {tokens}x{heads} elements={x.numel()} table={table_row}  best {best}", flush=True)


def main(wanted: list[str]) -> int:
    names = wanted or ["check", "table", "fp8", "partial", "grid"]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    failures = check() if "check" in names else 0
    rate = bandwidth()
    empty = microseconds(torch.cuda._sleep, 0)
    record(case="machine", copy_TB_per_s=rate / 1e6, empty_launch_us=empty)
    for name, run in {"table": table, "fp8": fp8, "partial": partial, "grid": grid}.items():
        if name in names:
            run(rate)
    if folder := os.environ.get("OUT"):
        Path(folder, "rotate.json").write_text(json.dumps(RESULTS))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
