"""Small random transformers models: every rotation is found, and StaticCache decoding fuses in every layer.

The graphs are those that Inductor would lower; they are executed without code generation, which would take
most of the time.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._inductor import compile_fx, config
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from rope_fusion._torch import detect_fake_mode
from rope_fusion.fusion_pass import FusionPass
from rope_fusion.options import make_options
from rope_fusion.report import GraphReport

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: no real models to compile")

LAYERS = 2
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "GptOss": {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    "Mistral": {"sliding_window": None},
    "Gemma": {},
    "Phi": {},
    "Glm": {},
    "Cohere": {},
    "GPTNeoX": {},
    "GPTJ": {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
    "DeepseekV3": {
        "head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "n_shared_experts": 1,
    },
}
# DeepSeek-V3 rotates part of q, and concatenates the rotated part of k with the rest before it is cached.
FUSED: dict[str, dict[str, int]] = {
    **{name: {"rope_kv": LAYERS} for name in FAMILIES},
    "DeepseekV3": {"partial_rope": LAYERS},
}
# torch has no grouped matrix product in float64, which the experts of GPT-OSS take
WIDE = {**dict.fromkeys(FAMILIES, torch.float64), "GptOss": torch.float32}


def tiny_model(family: str, dtype: torch.dtype) -> Any:
    settings = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family]})
    settings._attn_implementation = "eager"
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(settings).to(dtype).eval()


def compile_eagerly(model: Any, **options: Any) -> tuple[Any, list[GraphReport]]:
    """The model compiled by all of Inductor's graph passes, ours among them, and executed without code generation."""
    reports: list[GraphReport] = []
    fusion = FusionPass(make_options({"kernels": "reference", "strict": True, **options}), reports.append)

    def inner(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        fake_mode = detect_fake_mode([node.meta["val"] for node in gm.graph.nodes if "val" in node.meta])
        compile_fx.view_to_reshape(gm)
        with V.set_fake_mode(fake_mode), config.patch(post_grad_custom_pre_pass=fusion):
            compile_fx._recursive_post_grad_passes(gm, is_inference=True)
        gm.recompile()
        return make_boxed_func(gm.forward)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(gm, inputs, inner_compile=inner)

    return torch.compile(model, backend=backend), reports


def total_hits(reports: list[GraphReport]) -> dict[str, int]:
    hits: dict[str, int] = {}
    for report in reports:
        for name, count in report.hits.items():
            hits[name] = hits.get(name, 0) + count
    return hits


def decode(step: Any, model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Logits of one token after an eagerly processed prompt, through a StaticCache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    model(prompt, past_key_values=cache, use_cache=True)
    position = torch.tensor([[prompt.shape[1]]])
    return step(torch.tensor([[5]]), past_key_values=cache, use_cache=True, position_ids=position).logits


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_rotation_is_found_and_static_cache_decoding_fuses_in_every_layer(family):
    warnings.simplefilter("ignore")
    model = tiny_model(family, torch.bfloat16)
    wide = copy.deepcopy(model).to(WIDE[family])
    prompt = torch.arange(3, 10)[None]
    with torch.no_grad():
        eager = decode(model, model, prompt)
        true = decode(wide, wide, prompt)
        compiled, reports = compile_eagerly(model)
        ours = decode(compiled, model, prompt)
        assert sum(report.rotations for report in reports) == 2 * LAYERS
        assert total_hits(reports) == FUSED[family]
        # Rounding differs from eager's, and may go either way by as much as eager is off itself.
        slack = (eager - true).abs().max()
        assert (ours - true).abs().max() <= 2 * slack

        torch.compiler.reset()
        compiled, reports = compile_eagerly(model)
        logits = compiled(prompt, use_cache=False).logits
        assert sum(report.rotations for report in reports) == 2 * LAYERS
        assert logits.shape == (1, prompt.shape[1], COMMON["vocab_size"])
