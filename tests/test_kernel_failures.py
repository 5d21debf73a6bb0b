"""A kernel that does not compile or launch: the reference gives the result, one warning says why, and gates shut."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rope_fusion.capability import GateContext, profitable_kernel
from rope_fusion.fusion_pass import FusionPass
from rope_fusion.kernels.failures import KernelFailures, or_reference, process_failures
from rope_fusion.options import Options
from rope_fusion.report import RopeFusionWarning

GPU = torch.device("cuda", 0)


class CompilationError(Exception):
    """Stands for Triton's."""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    process_failures().clear()


def test_the_reference_takes_over_and_the_kernel_is_not_tried_again() -> None:
    tries: list[int] = []

    def kernel(x: Tensor, factor: float) -> Tensor:
        tries.append(1)
        raise CompilationError("out of resource: shared memory,\n Required: 300000")

    run = or_reference("triple", kernel, lambda x, factor: x * factor)
    with pytest.warns(
        RopeFusionWarning, match="the kernel triple failed on cpu with CompilationError: out of resource"
    ):
        assert torch.equal(run(torch.ones(2), 3.0), torch.full((2,), 3.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(torch.ones(2), 3.0), torch.full((2,), 3.0))
    assert len(tries) == 1


@pytest.mark.parametrize("error", [ValueError("positions must be int32"), TypeError("unexpected keyword")])
def test_a_callers_mistake_stays_an_error(error: Exception) -> None:
    def kernel(x: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error)):
        or_reference("strict", kernel, lambda x: x)(torch.ones(1))
    assert process_failures().of_device(torch.device("cpu")) is None


def test_a_failure_shuts_the_gates_of_that_device_and_changes_the_identity() -> None:
    pytest.importorskip("triton")
    context = GateContext(GPU)
    assert profitable_kernel(context) is None
    with pytest.warns(RopeFusionWarning):
        process_failures().note("rope_qkv", GPU, RuntimeError("no kernel image is available"))
    assert "no kernel image is available" in str(profitable_kernel(context))
    assert "no kernel image" in str(profitable_kernel(GateContext(torch.device("cuda"))))
    assert profitable_kernel(GateContext(torch.device("cuda", 1))) is None
    assert FusionPass(Options(kernels="reference")).uuid() is not None


def test_threads_that_fail_at_once_warn_once() -> None:
    failures = KernelFailures()
    together = threading.Barrier(8)

    def fail() -> None:
        together.wait()
        failures.note("rotate", GPU, RuntimeError("broken"))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=fail) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caught) == 1
    assert failures.reason("rotate", GPU) == "the kernel rotate failed on cuda:0 with RuntimeError: broken"
