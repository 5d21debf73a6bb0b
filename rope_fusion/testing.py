"""Help for tests: how often a model fuses, which rotations a graph holds, and expected graphs kept as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from rope_fusion.graph_text import diff, graph_to_text
from rope_fusion.report import Report


def assert_hits(
    model: Callable[..., Any],
    args: Sequence[Any],
    expected: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Report:
    """Compile ``model``, call it once without gradients, and check how often each pattern replaced something.

    Args:
        model: a module or function.
        args: its positional arguments; the call may write into them as the model does.
        expected: pattern name → hits, complete: a pattern that is not named must not have hit.
        options: as for ``torch.compile(options=...)``.
        kwargs: the model's keyword arguments.
        dynamic: as for ``torch.compile``.

    Returns:
        The report, for further checks.

    Everything compiled before in this process is forgotten (``torch.compiler.reset``), so that this call compiles.
    """
    from rope_fusion.backend import rope_fusion

    torch.compiler.reset()
    report = Report()
    compiled = torch.compile(
        model, backend=rope_fusion, options={**(options or {}), "rope_fusion.report": report}, dynamic=dynamic
    )
    with torch.no_grad():
        compiled(*args, **(kwargs or {}))
    wanted = {name: count for name, count in expected.items() if count}
    if report.hits != wanted:
        raise AssertionError(f"expected the hits {wanted}, got {report.hits}\n\n{report.table()}")
    return report


def find_rotations(gm: GraphModule) -> list[dict[str, str]]:
    """Every rotary embedding that the recogniser finds in ``gm``, in graph order.

    Each is ``{"out": name}`` with the first node that holds the complete rotated elements; where part of a head is rotated, what
    is concatenated with them later does not count.
    """
    from rope_fusion.canonical import rotary

    return [{"out": node.name} for node in rotary.find_in_module(gm)]


def assert_graph(file: Path, graph: Graph | GraphModule, refresh: bool = False) -> None:
    """Compare ``graph`` as text with the one kept in ``file``; ``refresh`` writes the file instead."""
    text = graph_to_text(graph.graph if isinstance(graph, GraphModule) else graph)
    if refresh:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    if not file.exists():
        raise AssertionError(f"no expected graph in {file}; write it with: pytest --refresh-graphs")
    if difference := diff(file.read_text(encoding="utf-8"), text, str(file), "this graph"):
        raise AssertionError(
            f"the graph is not the one in {file}; if it should be, write it with: pytest --refresh-graphs\n{difference}"
        )
