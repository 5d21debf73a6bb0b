"""``rope-fusion bench``: runs one of the measurements ``rope_fusion.bench_cases_*``.

Each such module has ``benchmark(device=...)``, which returns a list of dataclasses, and ``table``, which shows it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil

import torch

import rope_fusion

PREFIX = "bench_cases_"


def names() -> list[str]:
    """The measurements there are."""
    modules = (info.name for info in pkgutil.iter_modules(rope_fusion.__path__))
    return sorted(name.removeprefix(PREFIX) for name in modules if name.startswith(PREFIX))


def run(name: str, device: str | None = None, as_json: bool = False) -> str:
    """Measure ``name`` and return its table, or its figures as JSON."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    case = importlib.import_module(f"rope_fusion.{PREFIX}{name}")
    found = case.benchmark(device=device)
    where = torch.cuda.get_device_name() if device.startswith("cuda") else device
    if as_json:
        figures = [dataclasses.asdict(measurement) for measurement in found]
        return json.dumps({"name": name, "torch": torch.__version__, "device": where, "figures": figures}, indent=1)
    return f"torch {torch.__version__} on {where}\n\n{case.table(found)}"
