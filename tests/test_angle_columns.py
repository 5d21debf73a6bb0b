"""Columns read through repeats, joins and negations are the columns that the program computes, value for value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from rope_fusion.canonical.angle_columns import Columns, columns_of


class Recorder(Interpreter):
    """Remembers the value of every node."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.values: dict[Node, Tensor] = {}

    def run_node(self, node: Node) -> Tensor:
        self.values[node] = super().run_node(node)
        return self.values[node]


def read(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Columns, dict[Node, Tensor], Node]:
    module = make_fx(function, tracing_mode="fake")(x)
    recorder = Recorder(module)
    recorder.run(x)
    output = next(iter(module.graph.find_nodes(op="output")))
    (result,) = output.all_input_nodes
    return columns_of(result), recorder.values, result


def assert_true_of_the_values(columns: Columns, values: dict[Node, Tensor], result: Node) -> None:
    source = values[columns.source].reshape(-1, values[columns.source].shape[-1])
    wanted = values[result].reshape(-1, values[result].shape[-1])
    assert torch.equal(
        source[:, torch.from_numpy(columns.index.copy())] * torch.from_numpy(columns.sign.copy()), wanted
    )


READ_THROUGH: list[tuple[Callable[[Tensor], Tensor], list[int], int]] = [
    (lambda x: x.chunk(2, -1)[1][:, None], [4, 5, 6, 7], 1),
    (lambda x: x.split([2, 6], -1)[-1], [2, 3, 4, 5, 6, 7], 1),
    (lambda x: x[:, ::2], [0, 2, 4, 6], 1),
    (lambda x: -x[:, 4:].unsqueeze(1), [4, 5, 6, 7], -1),
    (lambda x: x[:, :2].repeat_interleave(2, -1)[:, None], [0, 0, 1, 1], 1),
    (lambda x: (-x[:, :2]).repeat_interleave(2, -1)[:, None], [0, 0, 1, 1], -1),
    (lambda x: torch.cat((x[:, :2], x[:, :2]), -1)[None], [0, 1, 0, 1], 1),
    (lambda x: torch.cat((x[:, :2, None], x[:, :2, None]), -1).flatten(-2), [0, 0, 1, 1], 1),
    (lambda x: x[:, None, :4].clone().squeeze(1), [0, 1, 2, 3], 1),
]


@pytest.mark.parametrize(("function", "index", "sign"), READ_THROUGH)
def test_moved_repeated_and_negated_columns(function: Callable[[Tensor], Tensor], index: list[int], sign: int) -> None:
    columns, values, result = read(function, torch.randn(3, 8))
    assert_true_of_the_values(columns, values, result)
    assert columns.source.op == "placeholder"
    assert columns.index.tolist() == index
    assert set(columns.sign.tolist()) == {sign}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: torch.cat((x, x * 2), -1),
        lambda x: x.t().clone(),
        lambda x: x.reshape(4, 6),
        lambda x: x.flip(0),
        lambda x: x.repeat(2, 1),
        lambda x: x.sum(0, keepdim=True).expand(3, 8),
    ],
)
def test_rows_that_move_and_values_that_change_are_not_read_through(function: Callable[[Tensor], Tensor]) -> None:
    columns, values, result = read(function, torch.randn(3, 8))
    assert columns.source.op != "placeholder"
    assert np.array_equal(columns.index, np.arange(values[columns.source].shape[-1]))
    if columns.source is not result:
        assert_true_of_the_values(columns, values, result)
