"""Gates: each answers None (open) or the sentence that says why it is shut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rope_fusion.kernels.failures import process_failures


@dataclass(frozen=True)
class GateContext:
    """What a gate may look at: the device that the graph runs on and the user's choices."""

    device: torch.device
    kernels: str = "auto"  # "auto" | "reference" | "triton"
    numerics: str = "fp32"


Gate = Callable[[GateContext], str | None]


def profitable_kernel(context: GateContext) -> str | None:
    """A device on which our kernels pay: a GPU with Triton, or the reference operators on the user's demand."""
    if context.kernels == "reference":
        return None
    if context.device.type == "cpu":
        return (
            "no kernel of ours pays on cpu, where Inductor's own code is as good; "
            'rope_fusion.kernels="reference" forces the reference operators'
        )
    if context.device.type != "cuda":
        return f"no kernel of ours has been tried on device type {context.device.type!r}"
    return triton_available(context) or process_failures().of_device(context.device)


def triton_available(context: GateContext) -> str | None:
    """Whether Triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error}); install triton to get the fused kernels"
    return None


def fp8_conversion(context: GateContext) -> str | None:
    """Hardware that converts to FP8 in a kernel."""
    if context.kernels == "reference" or context.device.type != "cuda" or torch.version.hip:
        return None
    major, minor = torch.cuda.get_device_capability(context.device)
    if (major, minor) < (8, 9):
        return f"FP8 conversion needs compute capability 8.9 or newer, this device has {major}.{minor}"
    return None
