"""One rank of a two-layer block, tensor-parallel with DTensor; `tests/test_processes.py` starts two of them with torchrun.

    python -m torch.distributed.run --nproc-per-node 2 tests/trust/tensor_parallel.py FOLDER

Each rank writes what it fused and computed to FOLDER/rank.json. Run alone, without torchrun, it is the single-process model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import rope_fusion

HIDDEN, HEADS, KV_HEADS, DIM, BLOCKS, PAGE, TOKENS = 32, 4, 2, 8, 4, 4, 5


class Attention(nn.Module):
    """RoPE, static FP8 q and a paged cache; `world` says over how many ranks the heads are spread."""

    k_cache: Tensor
    v_cache: Tensor
    scale: Tensor

    def __init__(self, world: int) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * DIM, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        self.heads, self.kv_heads = HEADS // world, KV_HEADS // world
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(BLOCKS, PAGE, self.kv_heads, DIM))
        self.register_buffer("scale", torch.tensor(0.05))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1)

        q = rotate(self.q(x).view(-1, self.heads, DIM))
        k, v = rotate(self.k(x).view(-1, self.kv_heads, DIM)), self.v(x).view(-1, self.kv_heads, DIM)
        q = (q / self.scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * self.scale
        self.k_cache.view(-1, self.kv_heads, DIM)[slots] = k
        self.v_cache.view(-1, self.kv_heads, DIM)[slots] = v
        group = self.heads // self.kv_heads
        keys, values = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        attended = nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values)
        return x + self.out(attended.transpose(0, 1).flatten(1))


def main(folder: Path) -> None:
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights everywhere
    model = nn.ModuleList([Attention(world), Attention(world)]).eval()
    x, positions = torch.randn(TOKENS, HIDDEN), torch.arange(TOKENS)
    angles = torch.outer(positions.float(), 1.0 / 10 ** torch.arange(DIM // 2))
    if world > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (world,))
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q", "k", "v")}
        plan["out"] = RowwiseParallel()
        for layer in model:
            parallelize_module(layer, mesh, plan)

    def forward(x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        for layer in model:
            x = layer(x, cos, sin, slots)
        return x

    options: dict[str, Any] = {"rope_fusion.kernels": "reference", "rope_fusion.strict": True}
    with torch.no_grad(), rope_fusion.record() as report:
        compiled = torch.compile(forward, backend="rope_fusion", options=options)
        result = compiled(x, angles.cos(), angles.sin(), torch.tensor([3, 7, 11, 0, 14]))
    caches = [layer.get_buffer("k_cache").flatten().tolist() for layer in model]
    found = {"hits": report.hits, "result": result.flatten().tolist(), "caches": caches, "kv_heads": KV_HEADS // world}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
