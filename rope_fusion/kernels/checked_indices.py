"""``rope_fusion::checked_indices``: indices that are known to lie inside what they index, or an error.

The fused kernels take positions and slots as they come: one outside the table or the cache is undefined behaviour there. This operator
stands before them when ``rope_fusion.check_bounds`` asks for it. On the CPU it raises; on a GPU it is a device-side assertion, which
costs no synchronisation and can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor


def on_cpu(indices: Tensor, low: int, high: int, what: str) -> Tensor:
    """A copy of ``indices`` (any integer dtype and shape), each in ``[low, high)``; else an IndexError that names the first."""
    outside = (indices < low) | (indices >= high)
    if bool(outside.any()):
        place = outside.nonzero()[0].tolist()
        raise IndexError(
            f"rope_fusion.check_bounds: {what} {place} is {int(indices[tuple(place)])}, which lies outside [{low}, {high})"
        )
    return indices.clone()


def on_gpu(indices: Tensor, low: int, high: int, what: str) -> Tensor:
    """The same as a device-side assertion."""
    inside = ((indices >= low) & (indices < high)).all()
    torch._assert_async(inside, f"rope_fusion.check_bounds: {what} outside [{low}, {high})")
    return indices.clone()


LIBRARY = torch.library.Library("rope_fusion", "FRAGMENT")
LIBRARY.define("checked_indices(Tensor indices, SymInt low, SymInt high, str what) -> Tensor")
LIBRARY.impl("checked_indices", on_cpu, "CPU")
LIBRARY.impl("checked_indices", on_gpu, "CUDA")


@torch.library.register_fake("rope_fusion::checked_indices", lib=LIBRARY)
def _fake(indices: Tensor, low: int, high: int, what: str) -> Tensor:
    return torch.empty_like(indices)
