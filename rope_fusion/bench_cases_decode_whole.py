"""``decode`` with whole stacks compiled in one graph, for one batch size: do its figures hold when no layer is compiled by itself?"""

from __future__ import annotations

from rope_fusion import bench_cases_decode
from rope_fusion.bench_cases_decode import Measurement, table

__all__ = ["benchmark", "skipped", "table"]


def skipped(device: str) -> str:
    """It takes minutes to compile and confirms another measurement."""
    return "whole stacks are compiled in one graph, which takes minutes; it runs when it is named"


def benchmark(device: str, quick: bool = False) -> list[Measurement]:
    """FP8, and without `quick` bf16, at batch 16."""
    batch = 16 if device.startswith("cuda") else 3
    wanted = [(shape, batch) for shape in bench_cases_decode.shapes(device) if not shape.engine]
    wanted = sorted(wanted[:2], key=lambda one: not one[0].fp8)
    return bench_cases_decode.benchmark(device, wanted=wanted[: 1 if quick else 2], whole=True)
