"""Derived tensors in models as people write them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from derived_harness import FP8, Harness
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def fill(model: nn.Module) -> None:
    """Random values, also in what was made without memory."""
    for parameter in model.parameters():
        if parameter.dtype == FP8:
            parameter.copy_(torch.randn(parameter.shape))
        elif parameter.dtype == torch.float32:
            parameter.copy_(torch.rand(parameter.shape) * 0.05)
        else:
            parameter.normal_(0, 0.05)


@pytest.mark.parametrize("blocks", [(48, 32), None])
def test_every_fp8_linear_of_a_transformers_model_is_derived(blocks, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from transformers.integrations import finegrained_fp8

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    quantisation = transformers.FineGrainedFP8Config(weight_block_size=blocks)
    finegrained_fp8.replace_with_fp8_linear(model, ["lm_head"], quantisation)
    layers = [module for module in model.modules() if isinstance(module, finegrained_fp8.FP8Linear)]
    for layer in layers:
        layer.to_empty(device="cpu")
    fill(model)

    def on_cpu(x, weight, scale, block_size=None, bias=None, *rest, **others):
        """What transformers computes in its backward; its forward needs a GPU kernel."""
        return F.linear(x, finegrained_fp8._dequantize_fp8_weight(weight, scale, block_size, x.dtype), bias)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", on_cpu)
    tokens = torch.tensor([[1, 2, 3, 4]])
    harness = Harness()
    compiled = harness.compile(lambda ids: model(ids, use_cache=False).logits)
    assert torch.equal(compiled(tokens), model(tokens, use_cache=False).logits)
    assert len(layers) == 14
    assert harness.hits == {"weight_dequant": 14}
    layers[3].weight.copy_(torch.randn(layers[3].weight.shape))
    assert torch.equal(compiled(tokens), model(tokens, use_cache=False).logits)


class WeightOnlyInt8Linear(nn.Module):
    """As in gpt-fast: INT8 codes, and a scale per output channel that is applied to the product."""

    weight: Tensor
    scales: Tensor

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (rows, columns), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(rows, dtype=torch.bfloat16) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype)) * self.scales


class WeightOnlyInt4Linear(nn.Module):
    """Unpacked INT4 codes in groups of 32 with a zero point each."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(0, 16, (rows, columns), dtype=torch.uint8))
        self.register_buffer("scales", torch.rand(rows, columns // 32, 1, dtype=torch.bfloat16) * 0.01)
        self.register_buffer("zeros", torch.randint(0, 16, (rows, columns // 32, 1)).to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        groups = self.weight.view(len(self.weight), -1, 32).to(x.dtype)
        return F.linear(x, ((groups - self.zeros) * self.scales).flatten(1))


class FeedForward(nn.Module):
    """The gated feed-forward of a Llama block."""

    def __init__(self, linear: type[nn.Module], dim: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = linear(dim, hidden), linear(dim, hidden), linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


@pytest.mark.parametrize("linear", [WeightOnlyInt8Linear, WeightOnlyInt4Linear])
def test_every_weight_only_linear_of_a_stack_is_derived(linear):
    model, harness = nn.Sequential(*[FeedForward(linear) for _ in range(4)]), Harness()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    compiled = harness.compile(model, dynamic=True)
    assert torch.equal(compiled(x), model(x))
    assert harness.hits == {"weight_dequant": 12}
    model.load_state_dict(nn.Sequential(*[FeedForward(linear) for _ in range(4)]).state_dict())
    assert torch.equal(compiled(x), model(x))


def test_the_grouped_output_projection_of_a_deepseek_layer_is_derived():
    class GroupedProjection(nn.Module):
        """[G, R, K] FP8 codes with 16 × 16 blocks, one matrix per group of heads."""

        def __init__(self, groups: int = 4, rank: int = 32, width: int = 48) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(groups, rank, width).to(FP8), requires_grad=False)
            self.weight_scale_inv = nn.Parameter(torch.rand(groups, rank // 16, width // 16), requires_grad=False)

        def forward(self, o: Tensor) -> Tensor:
            scale = self.weight_scale_inv.repeat_interleave(16, 1).repeat_interleave(16, 2)
            return torch.einsum("tgk,grk->tgr", o, (self.weight.float() * scale).to(o.dtype))

    model, harness = nn.ModuleList([GroupedProjection() for _ in range(3)]), Harness()
    o = torch.randn(5, 4, 48, dtype=torch.bfloat16)

    def call(o: Tensor) -> Tensor:
        return torch.stack([layer(o) for layer in model])

    torch.testing.assert_close(harness.compile(call)(o), call(o), rtol=2e-2, atol=2e-2)  # bf16: bmm sums otherwise
    assert harness.hits == {"weight_dequant": 3}
