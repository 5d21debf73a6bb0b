"""On a GPU: fused steps under CUDA graphs: recorded by Inductor, captured by hand, replayed with other inputs and weights.

    PYTHONPATH=. python3 tests/gpu_check_cuda_graphs.py

After every replay the result and the caches are compared with those of eager code that was given the same. Takes about a minute and
exits with 1 when something is not as it should be. `--device cpu` calls the compiled functions instead of replaying them.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from blocks import FP8, Stack, cos_sin_table, rope_half
from engine_standins import register

import rope_fusion
import rope_fusion.backend
from rope_fusion._torch import counters

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, DIM, BLOCKS, PAGE, ROWS = 2, 256, 8, 2, 64, 16, 16, 128
SLOTS = BLOCKS * PAGE
TOKENS = 8
ON_GPU = True  # what `--device cpu` changes

Step = Callable[..., Any]


class Wrong(Exception):
    """A check failed; the sentence says how."""


def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


# ------------------------------------------------------------------------------------------------ the models


class QuantisedLinear(nn.Module):
    """FP8 codes and a scale per row: a derived tensor holds the dequantised weight."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        weight = source.weight.detach().float()
        scale = weight.abs().amax(1, keepdim=True) / 448
        self.weight = nn.Parameter((weight / scale).to(FP8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight.float() * self.scale).to(x.dtype))


class EngineStack(nn.Module):
    """Layers in vLLM's operators: packed projection, RoPE in place, static FP8 q, an FP8 cache, negative slots skipped."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
        self.sizes = sizes
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, sum(sizes), dtype=torch.bfloat16) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(sizes[0], HIDDEN, dtype=torch.bfloat16) for _ in range(LAYERS))
        self.register_buffer("scale", torch.tensor([0.05]))
        for layer in range(LAYERS):
            self.register_buffer(f"cache_{layer}", torch.zeros(2, BLOCKS, PAGE, KV_HEADS, DIM, dtype=torch.uint8))

    def forward(self, x: Tensor, table: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        for layer in range(LAYERS):
            q, k, v = self.qkv[layer](x).split(self.sizes, -1)
            torch.ops._C.rotary_embedding(positions, q, k, DIM, table, True)
            q8 = torch.empty(q.shape, dtype=FP8, device=q.device)
            torch.ops._C.static_scaled_fp8_quant(q8, q, self.scale)
            k, v = (part.view(-1, KV_HEADS, DIM) for part in (k, v))
            keys, values = self.get_buffer(f"cache_{layer}").unbind(0)
            torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, keys, values, slots, "fp8", self.scale, self.scale)
            x = x + self.out[layer](q8.to(x.dtype)) * 1e-2
        return x


class Inverse(nn.Module):
    """What attention output goes through in some models: rotated back by the conjugate angles."""

    def forward(self, x: Tensor, table: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        heads = x.view(-1, 4, HIDDEN // 4)
        cos, sin = table[positions].chunk(2, -1)
        return rope_half(heads, cos, -sin).flatten(1) * 2


def stack(**block: Any) -> nn.Module:
    sizes: dict[str, Any] = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "dim": DIM, "blocks": BLOCKS, "page": PAGE}
    return Stack(LAYERS, hidden=HIDDEN, **sizes, **block).to(device())


def dequantised_stack() -> nn.Module:
    model = stack()
    for layer in model.get_submodule("layers").children():
        layer.qkv = QuantisedLinear(layer.get_submodule("qkv"))  # type: ignore[arg-type]
    return model


# ------------------------------------------------------------------------------------------------ the tools


def inputs(
    seed: int, tokens: int = TOKENS, slots: int | None = None, padded: int = 0, engine: bool = False
) -> list[Tensor]:
    """x, table, positions, slots; the last `padded` slots are -1."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(SLOTS, generator=generator)[: tokens if slots is None else slots]
    if padded:
        chosen[-padded:] = -1
    x = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    table = cos_sin_table(ROWS, DIM)
    positions = torch.randint(0, ROWS, (tokens,), generator=generator)
    return [t.to(device()) for t in (x, table.to(torch.bfloat16) if engine else table, positions, chosen)]


def compiled(model: Callable[..., Any], mode: str | None = None, **options: Any) -> Step:
    torch.compiler.reset()
    counters.clear()
    named: dict[str, Any] = {f"rope_fusion.{name}": value for name, value in options.items()}
    named |= {"rope_fusion.strict": True, "rope_fusion.kernels": "auto" if ON_GPU else "reference"}
    if mode:
        named["rope_fusion.mode"] = mode
    result: Step = torch.compile(model, backend="rope_fusion", options=named, dynamic=False, fullgraph=True)
    return result


class Captured:
    """A step captured by hand: `replay` copies new inputs into those that the graph reads."""

    def __init__(self, step: Step, given: Sequence[Tensor], pool: Any = None) -> None:
        self._step, self._given = step, [t.clone() for t in given]
        step(*self._given)
        if not ON_GPU:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(*self._given)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._out = step(*self._given)

    def replay(self, given: Sequence[Tensor]) -> Tensor:
        for into, value in zip(self._given, given, strict=True):
            into.copy_(value)
        if not ON_GPU:
            return self._step(*self._given)
        self._graph.replay()
        return self._out.clone()


def caches(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_buffers() if "cache" in name}


def compare(model: nn.Module, eager: nn.Module, got: Tensor, expected: Tensor, where: str) -> float:
    """Raises `Wrong`; returns the largest difference of the result, whose values are of the order of one.

    q, k and v pass through FP8, where rounding may take a value to its neighbour: 2^-3 relative. Attention averages over tokens, and
    what is added to x is small, so that a few bf16 steps are left in the result. A cache element that is not written stays as it was.
    """
    error = float((got.float() - expected.float()).abs().max())
    if not error <= 2**-4:
        raise Wrong(f"{where}: the result is {error:.3g} off")
    for (name, ours), theirs in zip(caches(model).items(), caches(eager).values(), strict=True):
        ours, theirs = (t.view(FP8) if t.dtype == torch.uint8 else t for t in (ours, theirs))
        touched = (theirs.float() != 0).any(-1) | (ours.float() != 0).any(-1)
        if not torch.equal(touched, (theirs.float() != 0).any(-1)):
            raise Wrong(f"{where}: {name} was written elsewhere than by eager code")
        # One FP8 step up or down; in later layers also what the result before them is off, in units of scales of 0.03 and more.
        atol = 0.05 if "0" in name else 2**-4 / (0.03 if ours.dtype == FP8 else 1)
        if not torch.allclose(ours.float(), theirs.float(), rtol=0.26, atol=atol):
            raise Wrong(f"{where}: {name} differs by {float((ours.float() - theirs.float()).abs().max()):.3g}")
    return error


def follow(model: nn.Module, step: Step, many: Sequence[Sequence[Tensor]], eager: nn.Module) -> float:
    """Give `step` and eager code the same calls; the largest difference."""
    worst = 0.0
    for index, given in enumerate(many):
        copies = [t.clone() for t in given]
        expected = eager(*copies)
        worst = max(worst, compare(model, eager, step(*given).clone(), expected, f"call {index}"))
    return worst


def forget(*models: nn.Module) -> None:
    """Empty caches: what a warm-up has written is not what is compared."""
    for model in models:
        for cache in caches(model).values():
            (cache.view(torch.uint8) if cache.element_size() == 1 else cache).zero_()


def expect_hits(report: Any, hits: dict[str, int]) -> None:
    if report.hits != hits:
        raise Wrong(f"hits {report.hits}, expected {hits}\n{report.table()}")


def expect_recorded(what: Callable[[], Any]) -> None:
    """Inductor replays a graph of its own in this call, and has skipped none."""
    if not ON_GPU:
        return
    if skipped := counters["inductor"]["cudagraph_skips"]:
        raise Wrong(f"Inductor left CUDA graphs out {skipped} times")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        what()
        torch.cuda.synchronize()
    if not any("cudaGraphLaunch" in event.name for event in profiled.events()):
        raise Wrong("no CUDA graph was launched")


# ------------------------------------------------------------------------------------------------ the checks

FUSED = {"rope_static_q_fp8_kv": LAYERS}


def reduce_overhead(by_option: bool, **block: Any) -> float:
    model = stack(**block)
    eager = copy.deepcopy(model)
    with rope_fusion.record() as report:
        if by_option:
            step = compiled(model, "reduce-overhead")
        else:
            torch.compiler.reset()
            counters.clear()
            step = torch.compile(
                model, backend="rope_fusion", mode="reduce-overhead", dynamic=False
            )  # as users write it
        worst = follow(model, step, [inputs(seed) for seed in range(6)], eager)
    if ON_GPU or by_option:  # on a CPU only the reference operators fuse, which is an option
        expect_hits(report, {"rope_static_q_fp8_kv" if block.get("quantise_q", True) else "rope_kv": LAYERS})
    expect_recorded(lambda: step(*inputs(6)))
    return worst


def captured(model: nn.Module, hits: dict[str, int], many: Sequence[Sequence[Tensor]], **options: Any) -> float:
    """Captured at the first of many inputs, replayed with each."""
    eager = copy.deepcopy(model)
    with rope_fusion.record() as report:
        graph = Captured(compiled(model, **options), many[0])
    expect_hits(report, hits)
    forget(model, eager)
    return follow(model, lambda *given: graph.replay(given), many, eager)


def other_slots_and_positions() -> float:
    return captured(stack(), FUSED, [inputs(seed) for seed in range(8)])


def padded_batches() -> float:
    """Slots of -1, none to all of them."""
    many = [inputs(seed, padded=padded, engine=True) for seed, padded in enumerate((0, 3, 8, 1, 7, 0))]
    return captured(EngineStack().to(device()), FUSED, many)


def slots_shorter_than_tokens() -> float:
    many = [inputs(seed, slots=5, padded=padded, engine=True) for seed, padded in enumerate((0, 2, 5, 0))]
    return captured(EngineStack().to(device()), FUSED, many)


def padded_batches_recorded() -> float:
    model = EngineStack().to(device())
    eager = copy.deepcopy(model)
    with rope_fusion.record() as report:
        step = compiled(model, "reduce-overhead")
        many = [inputs(seed, padded=padded, engine=True) for seed, padded in enumerate((0, 3, 8, 1, 7))]
        worst = follow(model, step, many, eager)
    expect_hits(report, FUSED)
    expect_recorded(lambda: step(*inputs(6, engine=True)))
    return worst


def batch_sizes_in_one_pool() -> float:
    """As engines do: the largest first, all in one memory pool, replayed in any order."""
    model = EngineStack().to(device())
    eager = copy.deepcopy(model)
    step = compiled(model)
    pool = torch.cuda.graph_pool_handle() if ON_GPU else None
    graphs = {size: Captured(step, inputs(size, size, engine=True), pool) for size in (8, 4, 1)}
    forget(model, eager)
    worst = 0.0
    for seed, size in enumerate((1, 8, 4, 4, 1, 8)):
        given = inputs(seed, size, padded=min(seed, size - 1), engine=True)
        expected = eager(*(t.clone() for t in given))
        worst = max(worst, compare(model, eager, graphs[size].replay(given), expected, f"{size} tokens"))
    return worst


def with_bounds_checked() -> float:
    return captured(stack(), FUSED, [inputs(seed) for seed in range(3)], check_bounds=True)


def self_checked_before() -> float:
    """The first call compares both ways; what is captured afterwards is the compiled graph alone."""
    return captured(stack(), FUSED, [inputs(seed) for seed in range(3)], verify="first")


def inverse_rotation() -> float:
    return captured(Inverse(), {"inverse_rope": 1}, [inputs(seed, tokens=256) for seed in range(4)])


def updates(model: Any) -> Iterator[Callable[[Any], object]]:
    """Ways of writing a quantised weight in place; each is applied to the compiled model and to its eager copy."""
    codes = [torch.randn_like(layer.qkv.weight.float()).mul_(20).to(FP8) for layer in model.layers]
    yield lambda m: m.layers[0].qkv.weight.copy_(codes[0])
    yield lambda m: m.layers[1].qkv.scale.mul_(0.5)
    state = {name: value.clone() for name, value in model.state_dict().items() if "qkv" in name}
    state["layers.1.qkv.weight"] = codes[1]
    yield lambda m: m.load_state_dict(state, strict=False)


def weights_written_in_place(mode: str | None) -> float:
    model = dequantised_stack()
    eager = copy.deepcopy(model)
    worst = 0.0
    with rope_fusion.record() as report:
        step = compiled(model, mode)
        if mode is None:
            graph = Captured(step, inputs(0))
            run: Step = lambda *given: graph.replay(given)  # noqa: E731
        else:
            run = step
            follow(model, run, [inputs(seed) for seed in range(3)], eager)
    expect_hits(report, {**FUSED, "weight_dequant": LAYERS})
    forget(model, eager)
    for number, update in enumerate(updates(eager)):
        update(model)
        update(eager)
        if mode is None:
            rope_fusion.invalidate(model)  # a replay does not pass through Python
        worst = max(worst, follow(model, run, [inputs(10 * number + seed) for seed in range(3)], eager))
    if mode is not None:
        expect_recorded(lambda: step(*inputs(6)))
    return worst


CHECKS: dict[str, Callable[[], float]] = {
    'mode="reduce-overhead", FP8': lambda: reduce_overhead(False),
    "rope_fusion.mode, bf16": lambda: reduce_overhead(True, quantise_q=False, fp8_cache=False),
    "captured, other slots and positions": other_slots_and_positions,
    "captured, padded with slot -1": padded_batches,
    "captured, fewer slots than tokens": slots_shorter_than_tokens,
    "reduce-overhead, padded with slot -1": padded_batches_recorded,
    "captured, three batch sizes in one pool": batch_sizes_in_one_pool,
    "captured, weights written in place": lambda: weights_written_in_place(None),
    "reduce-overhead, weights written in place": lambda: weights_written_in_place("reduce-overhead"),
    "captured, bounds checked": with_bounds_checked,
    "captured after a self-check": self_checked_before,
    "captured, inverse rotation": inverse_rotation,
}


def main() -> int:
    global ON_GPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    ON_GPU = parser.parse_args().device == "cuda"
    if ON_GPU and not torch.cuda.is_available():
        print("skipped: this check needs a CUDA or ROCm device")
        return 0
    register()
    print(f"device: {torch.cuda.get_device_name() if ON_GPU else 'CPU, nothing captured'}, torch {torch.__version__}")
    rows, failed = [], 0
    for name, check in CHECKS.items():
        torch.manual_seed(0)
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                worst, verdict = f"{check():.2g}", "ok"
        except Exception as error:
            failed += 1
            worst, verdict = (
                "",
                f"FAILED: {error}" if isinstance(error, Wrong) else "FAILED\n" + traceback.format_exc()[-1500:],
            )
        rows.append([name, worst, f"{time.perf_counter() - begin:.1f}", verdict])
        print(f"{verdict.splitlines()[0]}  {name}", file=sys.stderr, flush=True)
    print(tabulate(rows, headers=["check", "|out - eager|", "s", ""]))
    print(f"{failed} of {len(rows)} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
