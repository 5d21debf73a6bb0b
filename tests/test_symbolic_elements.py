"""The symbolic interpreter is right about every node of random programs: its elements, evaluated, give its values.

Where the interpreter stops (what is a leaf) is free; that it is right where it does not stop is what a rotation's
record rests on. So random programs of views, slices, concatenations, scatters, signs, products and sums are traced and
run, and each node is put together again from its leaves' values, all in float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx import Interpreter as FxInterpreter
from torch.fx.experimental.proxy_tensor import make_fx

from rope_fusion.canonical.elements import NO_FACTOR, Elements, Opaque, columns, leaf_numbers
from rope_fusion.canonical.symbolic import Choices, Interpreter, trace_products
from rope_fusion.canonical.values import ValueNumbering

# Shapes that broadcast in many ways: equal leading dims, fewer of them, dims of size 1, pairs and halves of equal size.
SHAPES: Sequence[Sequence[tuple[int, ...]]] = (
    ((2, 3, 8), (2, 3, 8), (3, 8), (3, 4)),
    ((2, 3, 2, 8), (3, 1, 8), (1, 3, 1, 8), (8,), (2, 3, 1, 4)),
    ((2, 2, 4, 4), (2, 2, 4, 4), (2, 4), (2, 1, 4)),
    ((1, 2, 2, 4), (2, 2), (1, 1, 4), (1, 2, 4)),
    ((2, 2, 16), (2, 16), (2, 1, 8), (2, 8)),
)
READINGS = (
    Choices(),
    Choices(halves_of=8),
    Choices(halves_of=4),
    Choices(joins_are_leaves=True),
    Choices(products_stay=True),
)


class _Program:
    """Random operations; those that do not fit the shapes at hand are left out."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        pool = list(inputs)
        for _ in range(14):
            made = self._attempt(self._step, pool)
            if isinstance(made, Tensor) and 0 < made.dim() < 8 and made.numel() <= 20000:
                pool.append(made)
        return pool[len(inputs) :]

    def _attempt(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return operation(*arguments)
        except (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return None

    def _step(self, pool: list[Tensor]) -> Tensor:
        a, b, c, d = (self._random.choice(pool) for _ in range(4))
        width = a.shape[-1]
        steps: tuple[Callable[[], Tensor], ...] = (
            lambda: self._move(a),
            lambda: self._move(self._move(a)),
            lambda: self._move(a) * b,
            lambda: self._move(a) * b + self._move(c) * d,
            lambda: torch.addcmul(self._move(a) * b, c, d, value=self._random.choice([1, -1])),
            lambda: a * b[..., :width] + self._move(_turned(a) * d[..., :width]),
            lambda: self._matrix(a, b),
            lambda: self._complex(a, b, c),
            lambda: torch.cat((self._move(a), b[..., :3]), -1),
        )
        return self._random.choice(steps)()

    def _matrix(self, a: Tensor, b: Tensor) -> Tensor:
        rows = self._split(a) * self._split(b)
        summed = rows.sum(self._random.choice([-1, -2]), keepdim=self._random.random() < 0.3)
        return summed.flatten(-2) if self._random.random() < 0.5 else summed

    def _complex(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        z = torch.view_as_complex(a.reshape(*a.shape[:-1], -1, 2))
        factor = torch.complex(b, c)
        made = torch.view_as_real(z * (factor.conj() if self._random.random() < 0.5 else factor))
        return made.flatten(-2) if self._random.random() < 0.7 else made

    def _move(self, x: Tensor) -> Tensor:
        whole, steps = x, self._random.randrange(3)
        x = self._or_same(self._split, x)
        for _ in range(steps):
            x = self._or_same(self._inner, x)
        return self._or_same(self._close, x, whole) if self._random.random() < 0.7 else x

    def _or_same(self, operation: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
        made = self._attempt(operation, x, *rest)
        return x if made is None else made

    def _split(self, x: Tensor) -> Tensor:
        """Dims made of the last one."""
        n = x.shape[-1]
        ways: tuple[Callable[[], Tensor], ...] = (
            lambda: x.reshape(*x.shape[:-1], n // 2, 2),
            lambda: x.reshape(*x.shape[:-1], 2, n // 2),
            lambda: x.reshape(*x.shape[:-1], n // 2, 1, 2),
            lambda: x.reshape(*x.shape[:-1], n // 4, 2, 2),
            lambda: x.reshape(-1, *x.shape[2:]),
            lambda: x.unsqueeze(self._random.randrange(-3, 0)),
            lambda: torch.stack((x, -x), self._random.choice([-1, -2])),
            lambda: x.unsqueeze(-2).expand(*x.shape[:-1], 2, n).clone().reshape(*x.shape[:-1], 2 * n),
        )
        return self._random.choice(ways)()

    def _inner(self, x: Tensor) -> Tensor:
        """The same or fewer elements elsewhere."""
        last = self._random.choice([-1, -2])
        order = self._random.sample([x.dim() - 1, x.dim() - 2, x.dim() - 3], 3)
        ways: tuple[Callable[[], Tensor], ...] = (
            lambda: x.transpose(-1, -2),
            lambda: x.permute(*range(x.dim() - 3), *order),
            lambda: x.flip(last),
            lambda: -x * 1.0,
            lambda: x.clone(),
            lambda: torch.cat((-x, x), last),
            lambda: x.unsqueeze(self._random.randrange(-4, 0)),
            lambda: x.expand(*(2 if size == 1 else size for size in x.shape)),
            lambda: torch.select_scatter(x, -x.select(-1, -1), -1, 0),
            lambda: torch.slice_scatter(x, -x[..., 1:2], -1, 0, 1),
            lambda: x.squeeze(self._random.choice([-1, -2, -3])),
            lambda: x[..., :: self._random.choice([1, 2])],
            lambda: x[..., self._random.randrange(3) :],
        )
        return self._random.choice(ways)()

    def _close(self, x: Tensor, whole: Tensor) -> Tensor:
        """Back to fewer dims."""
        last = self._random.choice([-1, -2])
        ways: tuple[Callable[[], Tensor], ...] = (
            lambda: x.select(last, 0),
            lambda: self._random.choice(x.unbind(last)),
            lambda: self._random.choice(x.split(2, last)),
            lambda: x.flatten(-2),
            lambda: x.flatten(-3),
            lambda: x.reshape(*whole.shape[:-1], -1),
            lambda: x[..., 0:1].squeeze(-1),
        )
        return self._random.choice(ways)()


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


class _Values(FxInterpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def _evaluated(interpreter: Interpreter, elements: Elements, values: dict[Node, Any], node: Node) -> Tensor:
    """The node's values from those of its leaves, broadcast over leading dims aligned at the right."""
    shape = values[node].shape
    assert shape[len(shape) - elements.rank :] == elements.shape
    total = torch.zeros(shape, dtype=torch.float64)
    for term in range(elements.sign.shape[-1]):
        value = torch.from_numpy(elements.sign[..., term].astype(np.float64)).expand(shape)
        for factors in np.moveaxis(elements.factors[..., term, :], -1, 0):
            value = value * _factor(interpreter, factors, values, shape)
        total = total + value
    return total


def _factor(interpreter: Interpreter, factors: np.ndarray, values: dict[Node, Any], shape: torch.Size) -> Tensor:
    result = torch.ones(shape, dtype=torch.float64)
    leading = len(shape) - factors.ndim
    for number in np.unique(leaf_numbers(factors[factors != NO_FACTOR])):
        leaf = interpreter.leaves[int(number)]
        value = values[leaf.node]
        if value.is_complex():
            value = value.real if leaf.part == "real" else value.imag
        here = (factors != NO_FACTOR) & (leaf_numbers(factors) == number)
        picked = value[..., torch.from_numpy(np.where(here, columns(factors), 0))].to(torch.float64)
        excess = value.dim() - 1 - leading
        assert all(size == 1 for size in value.shape[: max(excess, 0)])
        picked = picked.reshape(picked.shape[max(excess, 0) :] if excess > 0 else (1,) * -excess + picked.shape)
        result = torch.where(torch.from_numpy(here), picked.expand(shape), result)
    return result


def _run(seed: int) -> _Values:
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES[seed % len(SHAPES)]]
    module = make_fx(_Program(seed))(*inputs)
    module.graph.eliminate_dead_code()
    module.recompile()
    run = _Values(module)
    run.run(*inputs)
    return run


def _elements(interpreter: Interpreter, node: Node, deep: bool) -> Elements | None:
    try:
        return interpreter.read(node, deep)
    except Opaque:
        return None


def test_elements_are_the_values_of_their_node():
    looked_into: set[str] = set()
    for seed in range(24):
        run = _run(seed)
        graph = run.graph
        numbering, levels = ValueNumbering(graph), trace_products(graph)
        for choices in READINGS:
            interpreter = Interpreter(numbering, levels, choices)
            for node, deep in product(graph.nodes, (True, False)):
                value = run.values.get(node)
                elements = _elements(interpreter, node, deep)
                if elements is None or not isinstance(value, Tensor):
                    continue
                if any(interpreter.leaves[number].node is not node for number in elements.leaf_numbers()):
                    looked_into.add(str(node.target))
                parts = (elements,) if elements.imag is None else (elements, elements.imag)
                wanted = (value.real, value.imag) if value.is_complex() else (value,)
                for part, values in zip(parts, wanted, strict=True):
                    torch.testing.assert_close(_evaluated(interpreter, part, run.values, node), values)
    # What no program leads through is not checked: a change to the programs must not narrow the test.
    assert len(looked_into) >= 20, sorted(looked_into)
