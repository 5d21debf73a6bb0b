"""rope_fusion: a torch.compile plugin that fuses rotary embeddings, FP8 quantisation and KV-cache writes.

``torch.compile(model, backend="rope_fusion")`` needs no import. What else is public is loaded when first asked for,
because importing torch's Inductor takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rope_fusion._version import __version__

if TYPE_CHECKING:
    from rope_fusion.backend import inductor_options
    from rope_fusion.options import Options, RopeFusionOptionError
    from rope_fusion.report import GraphReport, Report, record

__all__ = [
    "GraphReport",
    "Options",
    "Report",
    "RopeFusionOptionError",
    "__version__",
    "inductor_options",
    "invalidate",
    "record",
]


def invalidate(target: object) -> None:
    """Forget every derived tensor made from ``target`` (a module, a tensor, or an iterable of tensors)."""
    from rope_fusion import derived

    derived.invalidate(target)


def __getattr__(name: str) -> Any:
    homes = {
        "inductor_options": "backend",
        "Options": "options",
        "RopeFusionOptionError": "options",
        "GraphReport": "report",
        "Report": "report",
        "record": "report",
    }
    if name in homes:
        return getattr(importlib.import_module(f"rope_fusion.{homes[name]}"), name)
    raise AttributeError(f"module 'rope_fusion' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
