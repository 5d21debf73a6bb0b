"""DeepSeek-V4's o-projection: inverse RoPE, then a grouped projection with an FP8 block-scaled weight.

Eager makes about ten small operators of the rotation and rebuilds the bf16 weight in every step. Compiled with
rope_fusion, a step is one rotation kernel and one matrix product: the weight is dequantised once, outside of the step,
until it changes. Every way of running the layer is compared with a plain float64 computation of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import rope_fusion

FP8 = torch.float8_e4m3fn
BLOCK = 128


def rotate_back(o: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate the last ``table.shape[1]`` elements of ``o [tokens, heads, dim]`` back, as the model writes it."""
    rotary = table.shape[1]
    o = o.clone()
    cos, sin = table.index_select(0, positions).chunk(2, -1)
    cos = cos.repeat_interleave(2, -1)[:, None]
    sin = (-sin).repeat_interleave(2, -1)[:, None]
    x = o[..., -rotary:].float()
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return torch.cat([o[..., :-rotary], (x * cos + turned * sin).to(o.dtype)], -1)


class OProjection(nn.Module):
    """Heads in groups, each with a weight ``[rank, heads / groups * dim]`` in FP8 and one scale per 128 × 128 block."""

    table: Tensor

    def __init__(self, heads: int = 16, dim: int = 512, rotary: int = 64, groups: int = 4, rank: int = 256) -> None:
        super().__init__()
        self.groups = groups
        width = heads // groups * dim
        weight = (torch.randn(groups, rank, width) / width**0.5 * 64).to(FP8)
        scale = torch.rand(groups, rank // BLOCK, width // BLOCK) / 64 + 1 / 128
        angle = torch.outer(torch.arange(4096.0), 1e4 ** -(torch.arange(0, rotary, 2) / rotary))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_buffer("table", torch.cat([angle.cos(), angle.sin()], -1))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        scale = self.scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        return (self.weight.float() * scale).to(dtype)

    def forward(self, o: Tensor, positions: Tensor) -> Tensor:
        """``o [tokens, heads, dim]`` -> ``[tokens, groups, rank]``."""
        o = rotate_back(o, positions, self.table)
        grouped = o.view(o.shape[0], self.groups, -1)
        return torch.einsum("tgd,grd->tgr", grouped, self.dequantised(o.dtype))

    def in_float64(self, o: Tensor, positions: Tensor) -> Tensor:
        """The same layer without a rounding."""
        cos, sin = self.table.double()[positions][:, None].chunk(2, -1)
        kept, turned = o.double().split([o.shape[-1] - self.table.shape[1], self.table.shape[1]], -1)
        a, b = turned[..., ::2], turned[..., 1::2]
        o = torch.cat([kept, torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)], -1)
        scale = self.scale.double().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        return torch.einsum("tgd,grd->tgr", o.view(o.shape[0], self.groups, -1), self.weight.double() * scale)


def milliseconds(step: Callable[[], Tensor], repeats: int = 20) -> float:
    """Median time of one step."""
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2] * 1e3


def main() -> None:
    """Print what was fused, then error and time of eager, Inductor and rope_fusion."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = OProjection().to(device)
    o = torch.randn(8, 16, 512, device=device).to(torch.bfloat16)
    positions = torch.randint(0, 4096, (8,), device=device)
    # on a CPU no kernel of ours pays; the reference operators show the same fusion there
    options: dict[str, Any] = {} if device == "cuda" else {"rope_fusion.kernels": "reference"}
    exactly = layer.in_float64(o, positions)
    errors, rows = {}, []
    with torch.no_grad(), rope_fusion.record() as report:
        ways: dict[str, Callable[..., Tensor]] = {
            "eager": layer,
            "Inductor": torch.compile(layer),
            "rope_fusion": torch.compile(layer, backend="rope_fusion", options=options),
        }
        for name, step in ways.items():
            errors[name] = ((step(o, positions).double() - exactly).norm() / exactly.norm()).item()
            rows.append([name, errors[name], milliseconds(lambda step=step: step(o, positions))])  # type: ignore[misc]
    print(report.table())
    print()
    print(tabulate(rows, headers=["", "relative error against float64", "ms per step"], floatfmt=("", ".2e", ".3f")))
    assert report.hits == {"inverse_rope": 1, "weight_dequant": 1}, report.hits
    # the product's sums may be taken in another order; beyond that nothing may be lost
    assert errors["rope_fusion"] <= 1.02 * errors["eager"]


if __name__ == "__main__":
    main()
