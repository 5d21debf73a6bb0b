"""The cases on a GPU, with the real operators where a library of them is named."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="engine operators are compared on a CUDA or ROCm device")
def test_stand_ins_or_real_operators_on_the_gpu():
    import gpu_check_engines

    assert gpu_check_engines.main() == 0


@pytest.mark.gpu
@pytest.mark.skipif(
    "ROPE_FUSION_VLLM_OPS" not in os.environ,
    reason="name a library of vLLM's operators: ROPE_FUSION_VLLM_OPS=/path/to/_C_stable_libtorch.abi3.so",
)
def test_library_holds_the_operators_that_the_schemas_say():
    from engine_standins import compare_schemas, register, schemas

    made = register()
    assert not [name for name in schemas() if name.startswith("_C") and name in made]
    assert compare_schemas() == []
