"""pytest fixtures of rope_fusion; importing this loads neither torch nor Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rope_fusion.report import Report, record


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that rewrites expected graphs."""
    parser.getgroup("rope_fusion").addoption(
        "--refresh-graphs",
        action="store_true",
        help="write the graphs that the golden_graph fixture compares with, instead of comparing",
    )


@pytest.fixture
def rope_fusion_report() -> Iterator[Report]:
    """What rope_fusion does with every graph that the test compiles through its backend."""
    with record() as report:
        yield report


@pytest.fixture
def golden_graph(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """``golden_graph(name, graph)`` compares a graph with the text in ``golden/name.txt`` beside the test."""
    from rope_fusion.testing import assert_graph

    folder = Path(request.path).parent / "golden"
    refresh = request.config.getoption("--refresh-graphs")
    return lambda name, graph: assert_graph(folder / f"{name}.txt", graph, refresh)
