"""Engine operators on a GPU: every covering case compiled for real, compared with eager, counted; then timed.

    PYTHONPATH=. ROPE_FUSION_VLLM_OPS=/path/to/library.so python tests/gpu_check_engines.py

Without a library the stand-ins of `engine_standins` run on the GPU; only our side is timed then, because theirs means nothing. The
library of a vLLM wheel (``vllm/_C_stable_libtorch.abi3.so``) will do where the installed torch is the one that it was built for.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from engine_cases import COVERING, Case, arguments
from engine_graphs import close, tensors
from engine_standins import REAL_LIBRARY, register

from rope_fusion.backend import rope_fusion
from rope_fusion.report import Report

MADE = register()
REAL = "_C::rotary_embedding" not in MADE
Q_HEADS, KV_HEADS, DIM, PAGE, SLOTS = 64, 8, 64, 16, 65536  # GPT-OSS


def on_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    return [on_gpu(item) for item in value] if isinstance(value, list) else value


def compiled(function: Callable[..., Any], v2: bool, report: Report) -> Callable[..., Any]:
    torch.compiler.reset()
    options: dict[str, Any] = {
        "rope_fusion.report": report,
        "rope_fusion.strict": True,
        "enable_auto_functionalized_v2": v2,
    }
    return torch.compile(function, backend=rope_fusion, options=options, fullgraph=True)


def check(case: Case, v2: bool) -> str | None:
    """None, or what is wrong."""
    given = arguments()
    args = on_gpu([*(given[name] for name in ("x", "positions", "table", "slots", "scale")), case.caches()])
    eager, own = copy.deepcopy(args), copy.deepcopy(args)
    expected = tensors(case.layer(*eager)) + tensors(eager)
    report = Report()
    with torch.no_grad():
        got = tensors(compiled(case.layer, v2, report)(*own)) + tensors(own)
    wanted = {"rope_kv" if case.order == "no quantisation" else "rope_static_q_fp8_kv": 1}
    if report.hits != wanted:
        return f"hits {report.hits}, expected {wanted}\n{report.table()}"
    try:
        for ours, theirs in zip(got, expected, strict=True):
            close(ours.cpu(), theirs.cpu(), None)
    except AssertionError as difference:
        return str(difference).replace("\n", " ")
    return None


def microseconds(function: Callable[[], Any], calls: int = 20, rounds: int = 7) -> float:
    """Device time of one call, replayed from a CUDA graph of many; the best of some rounds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    best = float("inf")
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / calls)
    return best


def time_prologue(tokens: int) -> tuple[float, float]:
    """(engine operators one after another, fused) in µs, static FP8 q and an FP8 cache."""
    sizes = [Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    x = torch.randn(tokens, sum(sizes), dtype=torch.bfloat16, device="cuda")
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    table = torch.randn(4096, DIM, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(SLOTS, device="cuda")[:tokens]
    scale = torch.full((1,), 0.05, device="cuda")
    caches = [torch.zeros(SLOTS // PAGE, PAGE, KV_HEADS, DIM, dtype=torch.uint8, device="cuda") for _ in range(2)]

    def layer(x, positions, table, k_cache, v_cache, slots, scale):
        q, k, v = x.split(sizes, -1)
        torch.ops._C.rotary_embedding(positions, q, k, DIM, table, True)
        q8 = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
        torch.ops._C.static_scaled_fp8_quant(q8, q, scale)
        k, v = (part.view(-1, KV_HEADS, DIM) for part in (k, v))
        torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, k_cache, v_cache, slots, "fp8", scale, scale)
        return q8

    # A model's packed qkv is its own buffer, so ours works on a copy, whose time is taken off again.
    args = (x, positions, table, *caches, slots, scale)
    report = Report()
    ours = compiled(lambda x, *rest: layer(x * 1, *rest), True, report)
    with torch.no_grad():
        ours(*args)
        if report.hits != {"rope_static_q_fp8_kv": 1}:
            raise AssertionError(f"hits {report.hits}\n{report.table()}")
        with_copy = microseconds(lambda: ours(*args))
        copying = microseconds(lambda: x * 1)
    theirs = microseconds(lambda: layer(*args)) if REAL else float("nan")
    return theirs, with_copy - copying


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: this check needs a CUDA or ROCm device")
        return 0
    print(f"device: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"operators: {'the real ones of ' + os.environ[REAL_LIBRARY] if REAL else 'stand-ins'}")
    failed = 0
    for v2 in (True, False):
        for case in COVERING:
            name = f"v{1 + v2} {case.split.__name__} {case.layout.__name__} {case.kind} {case.order}"
            try:
                wrong = check(case, v2)
            except Exception:
                wrong = traceback.format_exc()
            failed += wrong is not None
            print(f"{'ok    ' if wrong is None else 'FAILED'} {name}" + (f": {wrong}" if wrong else ""), flush=True)
    print("tokens, engine operators µs, fused µs")
    for tokens in (1, 16, 256, 4096, 65536):
        theirs, ours = time_prologue(tokens)
        print(f"{tokens:6d}  {theirs:9.1f}  {ours:9.1f}", flush=True)
    print(f"{failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
