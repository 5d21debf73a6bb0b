"""The post-grad graph that Inductor would hand to the pass, without generating code, and the values of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx
from torch.fx import Graph, GraphModule, Interpreter, Node


@dataclass
class Captured:
    """A graph and the inputs that it was first called with, as they were before the call."""

    module: GraphModule
    inputs: list[Any]

    @property
    def graph(self) -> Graph:
        return self.module.graph

    def values(self) -> dict[Node, Any]:
        """The value of every node; the copies back into the inputs are left out, so these keep their first values."""
        recorder = _Recorder(self.module)
        recorder.run(*[x.clone() if isinstance(x, Tensor) else x for x in self.inputs])
        return recorder.values

    def run(self) -> tuple[list[Any], Any]:
        """The inputs after a call, and what the graph returns."""
        self.module.recompile()
        inputs = [x.clone() if isinstance(x, Tensor) else x for x in self.inputs]
        return inputs, self.module(*inputs)


class _Recorder(Interpreter):
    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        is_copy_back = n.target is torch.ops.aten.copy_.default
        self.values[n] = self.values[n.args[1]] if is_copy_back else super().run_node(n)  # type: ignore[index]
        return self.values[n]


def captured(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> Captured:
    """Compile and call `function` up to the point where the pass runs; its graph is then executed as it is."""
    found: list[Captured] = []

    def inner(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        compile_fx.view_to_reshape(gm)

        def call(*inputs: Any) -> Any:
            found.append(Captured(gm, [x.clone() if isinstance(x, Tensor) else x for x in inputs]))
            return gm(*inputs)

        return make_boxed_func(call)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(gm, inputs, inner_compile=inner)  # type: ignore[arg-type]

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    (only,) = found
    return only
