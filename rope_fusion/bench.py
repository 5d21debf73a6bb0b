"""``rope-fusion bench``: the machine's own figures, then the measurements ``rope_fusion.bench_cases_*``, in one run.

Each such module has ``benchmark(device=...)``, which returns a list of dataclasses, and ``table``, which shows it. The first
may take ``quick``: fewer sizes. There may be ``skipped(device)``: the sentence that says why it does not run unless it is
named, or None. A dataclass may have a field ``wrong``: what is not as it should be, checked before anything is timed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

import rope_fusion
from rope_fusion.bench_timing import machine, own_caches

PREFIX = "bench_cases_"


@dataclass
class Result:
    """One measurement: its table and figures, why it did not run, or how it failed."""

    name: str
    table: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    skipped: str | None = None
    failed: str | None = None
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether it ran as far as it should, and every result was right."""
        return self.failed is None and not any(figure.get("wrong") for figure in self.figures)

    def text(self) -> str:
        """For people."""
        said = self.table or (f"not run: {self.skipped}" if self.skipped else f"FAILED: {self.failed}")
        return f"== {self.name}\n\n{said}\n"


def names() -> list[str]:
    """The measurements there are."""
    modules = (info.name for info in pkgutil.iter_modules(rope_fusion.__path__))
    return sorted(name.removeprefix(PREFIX) for name in modules if name.startswith(PREFIX))


def default_device() -> str:
    """CUDA where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def run(chosen: Sequence[str], device: str, quick: bool = False) -> Iterator[Result]:
    """Measure what is chosen, or without a choice everything that suits the device; one result after the other."""
    with ExitStack() as stack:
        if device.startswith("cuda"):  # dozens of kernels are compiled, by several processes
            stack.enter_context(own_caches())
        for name in chosen or names():
            yield _run_one(name, device, quick, named=bool(chosen))


def _run_one(name: str, device: str, quick: bool, named: bool) -> Result:
    case = importlib.import_module(f"rope_fusion.{PREFIX}{name}")
    skipped: Callable[[str], str | None] | None = getattr(case, "skipped", None)
    reason = skipped(device) if skipped is not None else None
    if reason is not None and not named:
        return Result(name, skipped=reason)
    begin = time.perf_counter()
    try:
        takes_quick = "quick" in inspect.signature(case.benchmark).parameters
        found = case.benchmark(device=device, **({"quick": quick} if takes_quick else {}))
    except Exception as error:  # the other measurements shall not be lost with it
        return Result(name, failed=f"{type(error).__name__}: {error}")
    finally:
        torch.compiler.reset()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    note = f"\n\nnote: {reason}" if reason else ""
    return Result(
        name, case.table(found) + note, [_figures(one) for one in found], seconds=round(time.perf_counter() - begin, 1)
    )


def _figures(measurement: Any) -> dict[str, Any]:
    """Fields and what is computed from them."""
    computed = [name for name, value in vars(type(measurement)).items() if isinstance(value, property)]
    return {**dataclasses.asdict(measurement), **{name: getattr(measurement, name) for name in computed}}


def as_dict(device: str, results: Sequence[Result]) -> dict[str, Any]:
    """Everything measured, for JSON."""
    return {
        "machine": dataclasses.asdict(machine(device)),
        "rope_fusion": rope_fusion.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "measurements": [
            {
                "name": one.name,
                "figures": one.figures,
                "skipped": one.skipped,
                "failed": one.failed,
                "seconds": one.seconds,
            }
            for one in results
        ],
    }
