"""What the tests of derived tensors share: a quantised layer, and a backend that needs no code generation."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import Graph, GraphModule

from rope_fusion._torch import CustomGraphPass
from rope_fusion.derived import describe_inputs, hoisting_compile
from rope_fusion.derived.store import DerivedStore
from rope_fusion.options import Options
from rope_fusion.report import GraphReport

FP8 = torch.float8_e4m3fn
CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


class QuantisedLinear(nn.Module):
    """A block-scaled FP8 linear that dequantises its weight in every call."""

    def __init__(self, rows: int = 32, columns: int = 32, block: int = 16) -> None:
        super().__init__()
        self.block = block
        self.weight = nn.Parameter(torch.randn(rows, columns).to(FP8), requires_grad=False)
        grid = torch.rand(-(-rows // block), -(-columns // block)) + 0.5
        self.scale = nn.Parameter(grid, requires_grad=False)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        scale = self.scale.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return (self.weight.float() * scale).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantised(x.dtype))


def inputs(tokens: int = 4, columns: int = 32) -> Tensor:
    return torch.randn(tokens, columns, dtype=torch.bfloat16)


class Identity(CustomGraphPass):
    """A pass that does nothing but give a compilation an identity of its own in Inductor's caches, as ours does."""

    def __call__(self, graph: Graph) -> None:
        pass

    def uuid(self) -> str:
        return "tests of derived tensors"


class Harness:
    """A backend with derived tensors; without `generate` graphs are run by their eager operators."""

    def __init__(self, *, generate: bool = False, store: DerivedStore | None = None, **options: Any) -> None:
        self.options = Options(**options)
        self.store = store if store is not None else DerivedStore()
        self.reports: list[GraphReport] = []
        self.graphs: list[GraphModule] = []
        self.static_inputs: list[int] = []
        self._generate = generate

    def compile(self, module: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        return torch.compile(module, backend=self.backend, **settings)

    def backend(self, gm: GraphModule, example_inputs: list[Any]) -> Any:
        self.reports.append(GraphReport())
        inner = functools.partial(
            hoisting_compile,
            next_compile=self.compile_inner,
            options=self.options,
            report=self.reports[-1],
            inputs=describe_inputs(gm, example_inputs),
            store=self.store,
        )
        patches = {"post_grad_custom_pre_pass": Identity()}
        return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)

    def compile_inner(self, gm: GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        self.graphs.append(gm)
        self.static_inputs.append(len(kwargs["static_input_idxs"]))
        if self._generate:
            return compile_fx_inner(gm, example_inputs, **kwargs)

        def run(arguments: list[Any]) -> Any:
            return gm(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @property
    def hits(self) -> dict[str, int]:
        return dict(sum((Counter(report.hits) for report in self.reports), Counter()))

    @property
    def refusals(self) -> list[str]:
        return [s for report in self.reports for pattern in report.patterns.values() for s in pattern.refusals]

    def casts_left(self) -> int:
        return sum(node.target in CASTS for graph in self.graphs for node in graph.graph.nodes)
