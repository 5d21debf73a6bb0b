"""On a GPU: compiled blocks fuse in every layer and compute what eager computes.

    PYTHONPATH=. python3 tests/gpu_check_fusion.py

Compiles the GPT-OSS-style stack in its variants and every spelling of a cache write through the backend, prints hits,
errors and the device kernels of a step, and exits with 1 when something is not as it should be.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from blocks import Stack, cos_sin_table, stack_inputs

import rope_fusion
import rope_fusion.backend

LAYERS = 3


def kernels_of(step: Callable[[], object]) -> Counter[str]:
    """Device kernels (and copies) of one call, by name."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return Counter(event.name for event in profiled.events() if event.device_type == DeviceType.CUDA)


def compare(name: str, expected: dict[str, int], dynamic: bool = False, **block: object) -> bool:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Stack(LAYERS, hidden=256, q_heads=16, kv_heads=4, dim=64, blocks=64, page=16, **block).cuda()
    inputs = [t.cuda() for t in stack_inputs(17, hidden=256, rows=128, slots=1024, dim=64)]
    inputs[1] = cos_sin_table(128, 64).cuda()
    if dynamic:
        for at in (0, 2, 3):
            torch._dynamo.mark_dynamic(inputs[at], 0)
    eager = copy.deepcopy(model)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        reference = eager(*inputs)
        inductor = torch.compile(plain)
        inductor_out = inductor(*inputs)
        with rope_fusion.record() as report:
            compiled = torch.compile(model, backend="rope_fusion", options={"rope_fusion.strict": True})
            out = compiled(*inputs)
        error = (out.float() - reference.float()).abs().max().item()
        inductor_error = (inductor_out.float() - reference.float()).abs().max().item()
        differing = [
            torch.ne(a.get_buffer("k_cache").float(), b.get_buffer("k_cache").float()).float().mean().item()
            for a, b in zip(model.layers, eager.layers, strict=True)
        ]
        counts = kernels_of(lambda: compiled(*inputs))
        plain_counts = kernels_of(lambda: inductor(*inputs))
    ok = report.hits == expected and error <= 2 * inductor_error + 2**-7 and differing[0] < 1e-3
    print(
        f"{'ok  ' if ok else 'FAIL'} {name}: hits {report.hits}, |out - eager| {error:.4g} (Inductor {inductor_error:.4g}), "
        f"K bytes that differ by layer {[f'{d:.2g}' for d in differing]}, kernels {sum(counts.values())} "
        f"(Inductor {sum(plain_counts.values())})"
    )
    if not ok:
        print(report.table())
    return ok


def check_writes() -> bool:
    """Every spelling of a cache write: right, and no kernel that touches the whole cache."""
    heads, dim, page, blocks = 8, 64, 16, 4096
    fp8 = torch.float8_e4m3fn

    def paged(*before: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(*before, blocks, page, heads, dim, dtype=dtype, device="cuda")

    def read(cache: Tensor, slots: Tensor) -> Tensor:
        return cache.reshape(-1)[:4096].float().sum() + slots.sum()

    def view(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache.view(-1, heads, dim)[slots] = k * 2
        return read(cache, slots)

    def index_copy(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache.view(-1, heads, dim).index_copy_(0, slots, k * 2)
        return read(cache, slots)

    def flatten(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache.flatten(0, 1)[slots] = k * 2
        return read(cache, slots)

    def pair(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache[slots // page, slots % page] = k * 2
        return read(cache, slots)

    def scatter(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache.view(-1, heads * dim).scatter_(0, slots[:, None].expand(-1, heads * dim), k.reshape(4, -1) * 2)
        return read(cache, slots)

    def joint(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache[0].view(-1, heads, dim)[slots] = k * 2
        cache[1].view(-1, heads, dim)[slots] = k * 3
        return read(cache, slots)

    def unbound(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        keys, values = cache.unbind(0)
        keys[slots // page, slots % page] = k * 2
        values[slots // page, slots % page] = k * 3
        return read(cache, slots)

    def inner(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache[:, 0][slots // page, slots % page] = k * 2
        cache[:, 1][slots // page, slots % page] = k * 3
        return read(cache, slots)

    def eight(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache.view(-1, heads, dim)[slots] = (k * 2).float().clamp(-448, 448).to(fp8)
        return read(cache, slots)

    def eight_bytes(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
        cache.view(torch.uint8).view(-1, heads, dim)[slots] = (k * 2).float().clamp(-448, 448).to(fp8).view(torch.uint8)
        return read(cache, slots)

    cases: list[tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Callable[[], Tensor]]] = [
        *((write, paged) for write in (view, index_copy, flatten, pair, scatter)),
        *((write, lambda: paged(2)) for write in (joint, unbound)),
        (inner, lambda: torch.zeros(blocks, 2, page, heads, dim, dtype=torch.bfloat16, device="cuda")),
        *((write, lambda: paged(dtype=fp8)) for write in (eight, eight_bytes)),
    ]
    ok = True
    k = torch.randn(4, heads, dim, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([3, 77, 500, 9999], device="cuda")
    for write, make in cases:
        torch._dynamo.reset()
        mine, plain, eager = make(), make(), make()
        write(eager, k, slots)
        with torch.no_grad(), rope_fusion.record() as report:
            compiled = torch.compile(write, backend="rope_fusion", options={"rope_fusion.strict": True}, dynamic=False)
            compiled(mine, k, slots)
        inductor = torch.compile(write, dynamic=False)
        with torch.no_grad():
            inductor(plain, k, slots)
            same = torch.equal(mine.view(torch.uint8), eager.view(torch.uint8))
            ours, theirs = device_us(compiled, mine, k, slots), device_us(inductor, plain, k, slots)
        good = same and ours < 20  # a clone of a cache of 67 MB takes at least 30 µs
        ok &= good
        print(
            f"{'ok  ' if good else 'FAIL'} write {write.__name__}: equal {same}, hits {report.hits}, "
            f"device {ours:.1f} µs, Inductor {theirs:.1f} µs"
        )
    return ok


def device_us(function: Callable[..., object], *args: object) -> float:
    """Device time of one call, the second."""
    function(*args)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function(*args)
        torch.cuda.synchronize()
    return sum(event.device_time for event in profiled.events() if event.device_type == DeviceType.CUDA)


def main() -> int:
    results = [
        compare("GPT-OSS, FP8 q and cache", {"rope_static_q_fp8_kv": LAYERS}),
        compare("GPT-OSS, FP8 q, bf16 cache", {"rope_static_q_fp8_kv": LAYERS}, fp8_cache=False),
        compare("GPT-OSS, bf16", {"rope_kv": LAYERS}, quantise_q=False, fp8_cache=False),
        compare("GPT-OSS, FP8 cache", {"rope_kv": LAYERS}, quantise_q=False),
        compare("GPT-OSS, dynamic tokens", {"rope_static_q_fp8_kv": LAYERS}, dynamic=True),
        check_writes(),
    ]
    print("all as expected" if all(results) else "FAILED")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
