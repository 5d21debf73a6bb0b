"""Tensors of several devices: no kernel is given an address of another one's memory. The meta device stands for a GPU."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rope_fusion.pattern import FusionPattern

PATTERNS = {
    kind: importlib.import_module(f"rope_fusion.patterns.{name}").PATTERN
    for kind, name in (("prologue", "rope_static_q_fp8_kv"), ("rotation", "inverse_rope_static_fp8"))
}


def arguments_of(pattern: FusionPattern, stays: str | None) -> dict[str, Any]:
    """Example arguments on the meta device, but for one."""
    names = inspect.signature(pattern.search).parameters
    given = dict(zip(names, pattern.example_inputs(), strict=True))
    return {
        name: value.to("meta") if isinstance(value, Tensor) and name != stays else value
        for name, value in given.items()
    }


def tensor_names() -> list[Any]:
    found = []
    for kind, pattern in PATTERNS.items():
        example = dict(zip(inspect.signature(pattern.search).parameters, pattern.example_inputs(), strict=True))
        names = [name for name, value in example.items() if isinstance(value, Tensor) and name not in ("q", "k")]
        found += [pytest.param(kind, name, dims, id=f"{kind}-{name}-{dims}") for name in names for dims in ("as it is", "no dim")
                  if dims == "as it is" or "scale" in name]  # fmt: skip
    return found


@pytest.mark.parametrize(("kind", "stays", "dims"), tensor_names())
def test_a_tensor_of_another_device_is_refused(kind: str, stays: str, dims: str) -> None:
    pattern = PATTERNS[kind]
    arguments = arguments_of(pattern, stays)
    if dims == "no dim":
        arguments[stays] = arguments[stays].reshape(())
    if kind == "rotation":  # which it is, and large enough to pay
        arguments["rotary"] = arguments["rotary"].replace('"inverse": false', '"inverse": true')
        for name in ("q", "k"):
            arguments[name] = arguments[name].repeat(1, 1024, 1, 1)
    assert pattern.refuse(**arguments) == "its tensors are on several devices: cpu, meta"


def rotation_operands() -> tuple[list[Any], dict[str, Any]]:
    table = torch.randn(8, 4)
    options = {
        "interleaved": True, "inverse": True, "halves_out": False, "rotary_dim": 8, "rotary_start": 8,
        "math_dtype": torch.float32, "exact": False, "out_dtype": torch.float32, "fp8_dtype": torch.float8_e4m3fn,
    }  # fmt: skip
    return [torch.randn(1, 3, 2, 16), table, table, torch.arange(3), torch.ones(())], options


@pytest.mark.parametrize("stays", range(1, 5))
def test_the_rotation_operators_name_the_devices(stays: int) -> None:
    tensors, options = rotation_operands()
    moved = [x if place == stays else x.to("meta") for place, x in enumerate(tensors)]
    with pytest.raises(ValueError, match="rotate_fp8 takes tensors of one device, got meta and cpu"):
        _of_operator("rotate_fp8")(*moved, **options)


def _of_operator(name: str) -> Callable[..., Any]:
    from rope_fusion.kernels.rotate import requested

    return lambda *tensors, **options: requested(name, *tensors, **options)


@pytest.mark.parametrize("stays", [5, 8, 10, 11, 12], ids=["positions", "slots", "q_scale", "k_scale", "v_scale"])
def test_the_prologue_kernel_is_not_prepared_for_tensors_of_two_devices(stays: int) -> None:
    pytest.importorskip("triton")
    from test_aot import GPT_OSS

    from rope_fusion.kernels.rope_qkv import Target
    from rope_fusion.kernels.rope_qkv_triton import prepare
    from rope_fusion.kernels.variants import make_call

    call = make_call(GPT_OSS, device="meta")
    arguments = list(call.args)
    arguments[stays] = torch.empty_like(arguments[stays], device="cpu")
    with pytest.raises(ValueError, match="rope_qkv takes tensors of one device, got cpu, meta; move them to meta"):
        prepare(*arguments, **call.encoded, target=Target("cuda", 90))
