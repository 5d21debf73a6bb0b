"""Fixtures of every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch._functorch.config
import torch._inductor.config

pytest_plugins = ["rope_fusion.pytest_plugin"]


@pytest.fixture(autouse=True)
def cold_compilation() -> Iterator[None]:
    """Every test compiles anew: on a hit in Inductor's caches no pass runs. Compiled kernels are still shared."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
