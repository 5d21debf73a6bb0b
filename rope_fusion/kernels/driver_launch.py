"""Launch of a compiled Triton kernel through the CUDA driver.

Triton's own launch parses every parameter in every call, constants included, which for a kernel of a hundred parameters costs
the host more than the launch itself. Here they are laid out once; a launch writes the addresses and calls the driver.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton

Runner = Callable[[Sequence[int]], None]

ALIGNMENT = 16  # bytes; Triton compiles one kernel for addresses that are multiples of it, and others for the rest
SLOT = 8  # bytes for a parameter, of which it takes the first
SPARE = 4  # slots of zeros behind the parameters, where Triton's kernels expect the addresses of scratch memory, unused here
WARP = 32  # threads
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
FORMATS = {"i1": "<q", "i8": "<q", "i16": "<q", "i32": "<q", "i64": "<q", "u32": "<Q", "u64": "<Q", "fp32": "<f4x"}


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL | None:
    """The CUDA driver's library, None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def run_on_device(run: Callable[[Any], None], call: Any) -> None:
    """``run(call)`` with ``call.device``, that of its tensors, as the current one."""
    device = call.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            run(call)
    else:
        run(call)


def runner_of(compiled: Any, grid: tuple[int, int, int], device: int, values: dict[str, Any]) -> Runner:
    """What launches `compiled`, given the addresses of the tensors that are there, in the order of its parameters.

    Args:
        compiled: as a launch of a ``triton.jit`` function returns it.
        device: index of the CUDA device, which must be the current one in every launch.
        values: all parameters by name, in order; those that are the address of a tensor are ``...``, absent tensors None.
    """
    by_triton = compiled[grid]  # loads the kernel
    driver = _driver()
    types = compiled.src.signature
    passed = {name: value for name, value in values.items() if types[name] != "constexpr"}
    metadata = compiled.metadata
    hooks = [triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook]
    plain = (
        driver is not None
        and not (metadata.global_scratch_size or metadata.profile_scratch_size)
        and not (metadata.launch_pdl or metadata.launch_cooperative_grid)
        and metadata.num_ctas == 1
        and not any(getattr(hook, "calls", hook) for hook in hooks)  # profilers of Triton's
        and all(
            types[name].startswith("*") if value is ... else types[name] in FORMATS for name, value in passed.items()
        )
        and sum(value is ... for value in values.values()) == sum(value is ... for value in passed.values())
    )
    if not plain:
        return lambda addresses: _by_triton(by_triton, values, addresses)
    return _DriverLaunch(driver, compiled, grid, device, {name: (types[name], value) for name, value in passed.items()})


def _by_triton(run: Callable[..., None], values: dict[str, Any], addresses: Sequence[int]) -> None:
    following = iter(addresses)
    run(*[next(following) if value is ... else value for value in values.values()])


class _DriverLaunch:
    """A kernel with its grid and its parameters laid out in memory."""

    def __init__(
        self, driver: Any, compiled: Any, grid: tuple[int, int, int], device: int, passed: dict[str, tuple[str, Any]]
    ) -> None:
        self._driver = driver
        self._kernel = compiled  # keeps what the handle stands for loaded
        self._device = device
        self._stream = triton.runtime.driver.active.get_current_stream
        self._pointers = sum(value is ... for _, value in passed.values())
        self._slots = (ctypes.c_uint64 * (len(passed) + SPARE))()
        for index, (kind, value) in enumerate(passed.values()):
            if value is not ...:
                raw = struct.pack(FORMATS[kind], value)
                self._slots[index] = int.from_bytes(raw, "little")
        base = ctypes.addressof(self._slots)
        self._parameters = (ctypes.c_void_p * len(self._slots))(*[base + SLOT * i for i in range(len(self._slots))])
        threads = compiled.metadata.num_warps * WARP
        self._launch = driver.cuLaunchKernel
        self._head = (ctypes.c_void_p(compiled.function), *map(ctypes.c_uint, (*grid, threads, 1, 1)))
        self._shared = ctypes.c_uint(compiled.metadata.shared)
        self._context = ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(self._context))
        self._lock = threading.Lock()  # the driver copies the parameters during the call, in which other threads run

    def __call__(self, addresses: Sequence[int]) -> None:
        status = self._try(addresses)
        if status == INVALID_CONTEXT:  # a thread that has not called the CUDA runtime yet has none
            self._driver.cuCtxSetCurrent(self._context)
            status = self._try(addresses)
        if status:
            raise RuntimeError(f"the CUDA driver refused a launch of {self._kernel.name}: {self._error(status)}")

    def _try(self, addresses: Sequence[int]) -> int:
        stream = ctypes.c_void_p(self._stream(self._device))
        with self._lock:
            self._slots[: self._pointers] = addresses  # type: ignore[call-overload]
            return self._launch(*self._head, self._shared, stream, self._parameters, None)

    def _error(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(status, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} ({status})"
