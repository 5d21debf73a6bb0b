"""The same pass inside plain Inductor, beside a pass of one's own."""

import torch
from torch import Tensor
from torch.fx import Graph

import rope_fusion


def store(cache: Tensor, k: Tensor, slots: Tensor) -> Tensor:
    """Write ``k [tokens, heads, dim]`` into one half of ``cache [2, blocks, block, heads, dim]`` and read both."""
    cache[0].flatten(0, 1)[slots] = k
    return cache.amax()


def count_nodes(graph: Graph) -> None:
    """A pass of one's own; it runs before rope_fusion's."""
    print(f"a graph of {len(graph.nodes)} nodes")


def main() -> None:
    """Compile with both passes and print the hits."""
    options = rope_fusion.inductor_options({"post_grad_custom_pre_pass": count_nodes}, numerics="exact")
    cache, k, slots = torch.zeros(2, 8, 16, 2, 64), torch.randn(3, 2, 64), torch.tensor([5, 17, 100])
    with rope_fusion.record() as report:
        torch.compile(store, options=options)(cache, k, slots)
    assert torch.equal(cache[0].flatten(0, 1)[slots], k)
    print("hits:", report.hits)


if __name__ == "__main__":
    main()
