"""Call sites of generated code: what they are given, and what they give to the kernel. No GPU and no kernel is needed for that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

pytest.importorskip("triton")

from rope_fusion import _torch
from rope_fusion.bench_cases_inverse import inverse, inverse_group, inverse_static
from rope_fusion.kernels import launcher
from rope_fusion.kernels.launcher import Launched, Launcher

BF16 = torch.bfloat16
ROWS, HEADS, DIM, PLACES = 64, 2, 16, 32


# ---- what generated code hands over


class Seen:
    """Launchers that check what they are given, and ask the operator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        monkeypatch.setattr(_torch.CallSite, "_suits", lambda *_: True)
        monkeypatch.setattr(launcher, "call_site", self.site)

    def site(self, name: str, overload: str) -> Callable[..., Any]:
        operator = getattr(getattr(torch.ops.rope_fusion, name), overload)

        def call(
            bases: Sequence[Tensor], offsets: tuple[int, ...], sizes: tuple[int, ...], arguments: Callable[[], Any]
        ) -> Any:
            given, named = arguments()
            tensors = [x for x in given if isinstance(x, Tensor)]
            assert not any(isinstance(x, Tensor) for x in named.values())
            for tensor, base, offset in zip(tensors, bases, offsets, strict=True):
                assert tensor.data_ptr() == base.data_ptr() + offset
            self.calls.append((name, offsets, sizes))
            return operator(*given, **named)

        return call


def store(qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """q, k and v side by side in one buffer, cos and sin in one table."""
    q, k, v = (part.unflatten(-1, (-1, DIM)) for part in qkv.split([2 * HEADS * DIM, HEADS * DIM, HEADS * DIM], -1))
    c, s = (t[:, None] for t in table[positions].chunk(2, -1))

    def turn(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    k_cache[slots], v_cache[slots] = turn(k), v
    return turn(q)


def operands(tokens: int) -> tuple[Tensor, ...]:
    caches = [torch.zeros(PLACES, HEADS, DIM, dtype=BF16) for _ in range(2)]
    return (
        torch.randn(tokens, 4 * HEADS * DIM).to(BF16),
        torch.randn(ROWS, DIM),
        torch.randint(0, ROWS, (tokens,)),
        torch.randperm(PLACES)[:tokens],
        *caches,
    )


def compiled(program: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    options: dict[str, Any] = {"rope_fusion.kernels": "reference", "rope_fusion.strict": True}
    return torch.compile(program, backend="rope_fusion", options=options)


def test_a_prologue_is_handed_buffers_and_where_its_tensors_lie_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    fused = compiled(store)
    for _ in range(2):
        ours, theirs = operands(5), operands(5)
        theirs = (*ours[:4], *theirs[4:])
        torch.testing.assert_close(fused(*ours), store(*theirs), rtol=2**-8, atol=2**-8)  # one step of bf16
        assert torch.equal(ours[5], theirs[5])
    q, k, v = 0, 2 * HEADS * DIM * 2, 3 * HEADS * DIM * 2  # bytes of bf16
    cos, sin = 0, DIM // 2 * 4  # and of fp32
    assert seen.calls == [("rope_qkv", (q, k, v, cos, sin, 0, 0, 0, 0), ())] * 2


def test_sizes_that_vary_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    fused = compiled(store)
    for tokens in (5, 7, 5):
        ours = operands(tokens)
        for x in (ours[0], ours[2], ours[3]):
            torch._dynamo.mark_dynamic(x, 0)
        theirs = (*ours[:4], *operands(tokens)[4:])
        torch.testing.assert_close(fused(*ours), store(*theirs), rtol=2**-8, atol=2**-8)
    assert [set(sizes) for _, _, sizes in seen.calls] == [{5}, {7}, {5}]


@pytest.mark.parametrize("program", [inverse, inverse_static, inverse_group])
def test_a_rotation_is_handed_its_keyword_arguments(
    program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    x, positions, table = torch.randn(6, 8, 512).to(BF16), torch.randint(0, ROWS, (6,)), torch.randn(ROWS, 64)
    wanted = functools.partial(program, start=448)
    got = compiled(wanted)(x, positions, table)
    for mine, eager in zip(
        *[r if isinstance(r, tuple) else (r,) for r in (got, wanted(x, positions, table))], strict=True
    ):
        # one step of bf16, and of FP8 e4m3 where it is quantised
        step = 2**-8 if mine.dtype.itemsize > 1 else 2**-3
        torch.testing.assert_close(mine.float(), eager.float(), rtol=step, atol=step)
    (call,) = seen.calls
    assert call[1:] == ((0, 0, 32 * 4, 0), ())


def test_generated_code_for_a_cpu_calls_the_operator() -> None:
    _, (code,) = run_and_get_code(compiled(store), *operands(5))
    assert code.count("torch.ops.rope_fusion.rope_qkv.encoded(") == 1
    assert "call_site" not in code


# ---- what a launcher does with it


class Kernel:
    """Stands for a compiled kernel: notes the addresses of every further launch."""

    def __init__(self, *, fails: bool = False) -> None:
        self.launched: list[list[int]] = []
        self.first = 0
        self.fails = fails

    def __call__(self, addresses: Sequence[int]) -> None:
        if self.fails:
            raise RuntimeError("no launch")
        self.launched.append(list(addresses))

    def launch(self, x: Tensor, absent: None, y: Tensor) -> Launched:
        """An operator of two tensors, of which the kernel takes the second first; gives one tensor and one that nobody wants."""
        self.first += 1
        out, nothing = torch.empty_like(x), x.new_empty(0)
        return Launched((out, nothing), (2, 0), self)


@pytest.fixture(autouse=True)
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "empty_strided_cuda", lambda *kind: torch.empty_strided(*kind[:2], dtype=kind[2]))


def call(site: Launcher, x: Tensor, y: Tensor, offset: int = 0, sizes: tuple[int, ...] = ()) -> Any:
    view = y[offset // y.itemsize :]
    return site((x, y), (0, offset), sizes, lambda: ((x, None, view), {}))


def operator(*_: Any) -> str:
    return "by the operator"


def test_a_further_call_launches_with_the_addresses_of_its_own_tensors() -> None:
    kernel = Kernel()
    site = Launcher(operator, kernel.launch)
    first = call(site, torch.ones(4, 8), torch.ones(64), 64)
    x, y = torch.ones(4, 8), torch.ones(64)
    out, nothing = call(site, x, y, 64)
    assert kernel.first == 1
    assert kernel.launched == [[y.data_ptr() + 64, x.data_ptr(), out.data_ptr()]]
    assert (out.shape, out.stride(), out.dtype) == (x.shape, x.stride(), x.dtype)
    assert out.data_ptr() != first[0].data_ptr()
    assert nothing.numel() == 0


def test_other_sizes_are_another_call() -> None:
    kernel = Kernel()
    site = Launcher(operator, kernel.launch)
    for tokens in (4, 6, 4, 6):
        x = torch.ones(tokens, 8)
        out, _ = call(site, x, torch.ones(64), sizes=(tokens,))
        assert out.shape == x.shape
    assert (kernel.first, len(kernel.launched)) == (2, 2)


def test_a_tensor_that_is_aligned_less_than_the_first_is_launched_anew() -> None:
    kernel = Kernel()
    site = Launcher(operator, kernel.launch)
    x, y = torch.ones(4, 8), torch.ones(64)
    for offset in (64, 4, 64):
        call(site, x, y, offset)
    # what was compiled for the odd address serves the even one as well
    assert (kernel.first, len(kernel.launched)) == (2, 1)


@pytest.mark.parametrize("results", [1, 0])
def test_results_are_given_as_the_operator_gives_them(results: int) -> None:
    kernel = Kernel()

    def launch(x: Tensor) -> Launched:
        outputs = (torch.empty_like(x),) * results
        return Launched(outputs, (0,) if results else (0, 0), kernel)

    site = Launcher(operator, launch)
    x = torch.ones(4)
    for _ in range(2):
        got = site((x,), (0,), (), lambda: ((x,), {}))
        assert isinstance(got, Tensor) if results else got is None
    assert kernel.launched == [[x.data_ptr(), got.data_ptr() if results else x.data_ptr()]]


def test_where_a_launch_fails_the_operator_is_asked() -> None:
    site = Launcher(operator, Kernel(fails=True).launch)
    x, y = torch.ones(4, 8), torch.ones(64)
    assert call(site, x, y)[0].shape == x.shape, "the first call is not the runner's"
    again = Launcher(operator, lambda *_: None)
    assert call(again, x, y) == "by the operator"

    def broken(*_: Any) -> Launched:
        raise RuntimeError("does not compile")

    assert call(Launcher(operator, broken), x, y) == "by the operator"
    # the second call's launch fails, is made anew, and is as good as the first
    assert call(site, x, y)[0].shape == x.shape


def test_a_call_site_keeps_so_many_sizes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MOST_SIZES", 2)
    kernel = Kernel()
    site = Launcher(operator, kernel.launch)
    for tokens in (1, 2, 3, 3, 1):
        call(site, torch.ones(tokens, 8), torch.ones(64), sizes=(tokens,))
    assert (kernel.first, len(kernel.launched)) == (4, 1)
