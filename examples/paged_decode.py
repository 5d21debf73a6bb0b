"""A decode step that writes its KV cache through a view, with the report of what rope_fusion did about it."""

import torch
from torch import Tensor

import rope_fusion

BLOCKS, BLOCK, HEADS, DIM = 256, 16, 4, 64


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [tokens, heads, dim]``, first half against second half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def step(q: Tensor, k: Tensor, v: Tensor, angles: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Rotate q and k, store k and v in the joint cache ``[2, blocks, block, heads, dim]``, compare q with block 0."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    k_cache, v_cache = cache.unbind(0)
    k_cache.view(-1, HEADS, DIM)[slots] = rotate(k, cos, sin)
    v_cache.view(-1, HEADS, DIM)[slots] = v
    return torch.einsum("thd,phd->thp", rotate(q, cos, sin), k_cache[0])


def main() -> None:
    """Compare the compiled step with eager, then print the report."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, HEADS, DIM)
    angles = torch.randn(2, DIM // 2)
    slots = torch.tensor([3, 40])
    caches = [torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM) for _ in range(2)]
    expected = step(q, k, v, angles, caches[0], slots)
    with rope_fusion.record() as report:
        result = torch.compile(step, backend="rope_fusion")(q, k, v, angles, caches[1], slots)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(caches[1], caches[0])
    print(report.table())


if __name__ == "__main__":
    main()
