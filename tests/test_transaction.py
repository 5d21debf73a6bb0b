"""A rolled-back graph is the graph that was, node for node."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, symbolic_trace

from rope_fusion._torch import stable_topological_sort
from rope_fusion.transaction import GraphTransaction


def snapshot(graph: Graph) -> list[tuple[object, ...]]:
    return [
        (id(n), n.name, n.op, n.target, str(n.args), str(n.kwargs), sorted(u.name for u in n.users))
        for n in graph.nodes
    ]


def program(x, y):
    a = x + y
    b = a * 2
    return torch.relu(b) - a


@pytest.fixture
def graph() -> Graph:
    return symbolic_trace(program).graph


def test_roll_back_restores_arguments_order_and_users(graph):
    before = snapshot(graph)
    transaction = GraphTransaction(graph)
    nodes = list(graph.nodes)
    with graph.inserting_after(nodes[-2]):
        late = graph.call_function(operator.mul, (nodes[0], nodes[1]))
    nodes[2].replace_all_uses_with(late, delete_user_cb=lambda user: user is not late)
    stable_topological_sort(graph)
    assert snapshot(graph) != before
    transaction.roll_back()
    assert snapshot(graph) == before
    graph.lint()


def test_roll_back_removes_chains_of_new_nodes_in_any_order(graph):
    before = snapshot(graph)
    transaction = GraphTransaction(graph)
    first = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_before(first):
        a = graph.call_function(operator.neg, (first.args[0],))
    with graph.inserting_before(a):
        b = graph.call_function(operator.neg, (a,))  # before its own input: not sorted yet
    first.args = (b, first.args[1])
    transaction.roll_back()
    assert snapshot(graph) == before
