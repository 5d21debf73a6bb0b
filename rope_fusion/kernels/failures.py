"""Kernels that did not compile or launch on a device: the eager reference runs in their place, and their patterns stay out from then on.

Gates know what a kernel can do in principle (``unsupported``). What remains is what only the attempt shows: a driver and a Triton that
do not fit each other, no C compiler for Triton's launcher, a device with less shared memory than a variant needs.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rope_fusion.report import RopeFusionWarning

T = TypeVar("T")


class KernelFailures:
    """What failed in this process, by kernel and device; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[tuple[str, torch.device], str] = {}

    def reason(self, kernel: str, device: torch.device) -> str | None:
        """The sentence that says how a kernel failed on a device, or None."""
        return self._reasons.get((kernel, device))

    def of_device(self, device: torch.device) -> str | None:
        """How some kernel failed on a device (one without an index stands for each of its type), or None."""
        with self._lock:
            for (_, failed), sentence in self._reasons.items():
                if failed == device or (device.index is None and failed.type == device.type):
                    return sentence
        return None

    def note(self, kernel: str, device: torch.device, error: BaseException) -> None:
        """Remember a failure, and warn of it once."""
        said = " ".join(str(error).split())[:200]
        sentence = f"the kernel {kernel} failed on {device} with {type(error).__name__}: {said}"
        with self._lock:
            if (kernel, device) in self._reasons:
                return
            self._reasons[kernel, device] = sentence
        warnings.warn(
            f"rope_fusion: {sentence}; its eager reference runs instead, slowly, and what is compiled from now on stays unfused",
            RopeFusionWarning,
            stacklevel=2,
        )

    def clear(self) -> None:
        """Forget everything, so that kernels are tried again."""
        with self._lock:
            self._reasons.clear()


@functools.cache
def process_failures() -> KernelFailures:
    """The failures of this process."""
    return KernelFailures()


def or_reference(kernel: str, run: Callable[..., T], reference: Callable[..., T]) -> Callable[..., T]:
    """`run`, and `reference` with the same arguments once `run` has failed on a device.

    Arguments that no kernel takes (TypeError, ValueError) are the caller's mistake and stay errors.
    """
    failures = process_failures()

    def attempt(x: Tensor, *args: Any, **kwargs: Any) -> T:
        if failures.reason(kernel, x.device) is None:
            try:
                return run(x, *args, **kwargs)
            except (TypeError, ValueError):
                raise
            except Exception as error:
                failures.note(kernel, x.device, error)
        return reference(x, *args, **kwargs)

    return attempt
