"""Parameters as the CUDA driver gets them: read back by a stand-in of it, and against what the compiler says a kernel takes."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from test_aot import SHAPES

from rope_fusion.kernels import driver_launch
from rope_fusion.kernels.aot import compile_call
from rope_fusion.kernels.driver_launch import runner_of
from rope_fusion.kernels.rope_qkv import Target
from rope_fusion.kernels.rope_qkv_triton import prepare, rope_qkv_kernel
from rope_fusion.kernels.variants import make_call

READ = {"i32": "<i", "i64": "<q", "fp32": "<f"}


class Driver:
    """Stands for libcuda: reads what a kernel with parameters of these types would read."""

    def __init__(self, types: list[str]) -> None:
        self.types, self.status, self.context = types, 0, 77
        self.calls: list[dict[str, Any]] = []

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context = context.value
        return 0

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra) -> int:
        values = []
        for kind, address in zip(self.types, parameters, strict=False):
            form = "<Q" if kind.startswith("*") else READ[kind]
            values.append(struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))[0])
        numbers = [x.value for x in (function, gx, gy, gz, bx, by, bz, shared, stream)]
        self.calls.append({"numbers": numbers, "values": values, "spare": len(parameters) - len(self.types)})
        assert extra is None
        return self.status if self.context else driver_launch.INVALID_CONTEXT

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"too many resources requested for launch"
        return 0


def compiled_like(signature: dict[str, str], **metadata: Any) -> Any:
    """What a launch by Triton returns, as far as it is read."""
    plain = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_pdl": False, "launch_cooperative_grid": False}
    made = plain | {"num_ctas": 1, "num_warps": 4, "shared": 48} | metadata
    by_triton: list[tuple[Any, ...]] = []

    class Compiled:
        src = SimpleNamespace(signature=signature)
        function, name = 1 << 40, "kernel"
        launched, metadata = by_triton, SimpleNamespace(**made)

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments: by_triton.append((grid, *arguments))

    return Compiled()


SIGNATURE = {
    "x": "*bf16",
    "absent": "constexpr",
    "out": "*fp8e4nv",
    "scale": "fp32",
    "n": "i32",
    "stride": "i64",
    "BLOCK": "constexpr",
}
VALUES = {"x": ..., "absent": None, "out": ..., "scale": -0.37, "n": -5, "stride": 1 << 35, "BLOCK": 16}
PASSED = [kind for kind in SIGNATURE.values() if kind != "constexpr"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver(PASSED)
    monkeypatch.setattr(driver_launch, "_driver", lambda: stand_in)
    streams = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 1000 + device))
    monkeypatch.setattr(driver_launch.triton.runtime, "driver", streams)
    return stand_in


def test_the_driver_gets_every_parameter_that_is_no_constant(driver: Driver) -> None:
    run = runner_of(compiled_like(SIGNATURE), (3, 2, 1), 5, VALUES)
    for addresses in ([1 << 47, 16], [32, 1 << 46]):
        run(addresses)
        made = driver.calls.pop()
        assert made["values"] == [*addresses, struct.unpack("<f", struct.pack("<f", -0.37))[0], -5, 1 << 35]
        assert made["numbers"] == [1 << 40, 3, 2, 1, 4 * 32, 1, 1, 48, 1005]
        assert made["spare"] >= 2, "Triton's kernels take two addresses of scratch memory after their own parameters"


@pytest.mark.parametrize(
    "metadata",
    [
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"num_ctas": 2},
    ],
    ids=lambda metadata: next(iter(metadata)),
)
def test_triton_launches_what_needs_more_than_parameters(metadata: dict[str, Any], driver: Driver) -> None:
    compiled = compiled_like(SIGNATURE, **metadata)
    runner_of(compiled, (3, 2, 1), 5, VALUES)([64, 32])
    assert compiled.launched == [((3, 2, 1), 64, None, 32, -0.37, -5, 1 << 35, 16)]
    assert not driver.calls


def test_triton_launches_where_there_is_no_driver_or_somebody_watches(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = compiled_like(SIGNATURE)
    with monkeypatch.context() as patched:
        patched.setattr(driver_launch.triton.knobs.runtime, "launch_enter_hook", lambda *_: None)
        runner_of(watched, (1, 1, 1), 0, VALUES)([64, 32])
    monkeypatch.setattr(driver_launch, "_driver", lambda: None)
    without = compiled_like(SIGNATURE)
    runner_of(without, (1, 1, 1), 0, VALUES)([64, 32])
    assert len(watched.launched) == len(without.launched) == 1
    assert not driver.calls


def test_triton_launches_a_kernel_with_a_parameter_of_another_kind(driver: Driver) -> None:
    compiled = compiled_like(SIGNATURE | {"n": "tensordesc<bf16[64]>"})
    runner_of(compiled, (1, 1, 1), 0, VALUES)([64, 32])
    assert len(compiled.launched) == 1
    assert not driver.calls


def test_a_thread_without_a_context_is_given_that_of_the_first_launch(driver: Driver) -> None:
    run = runner_of(compiled_like(SIGNATURE), (1, 1, 1), 0, VALUES)
    driver.context = 0
    run([64, 32])
    assert driver.context == 77
    assert len(driver.calls) == 2


def test_a_refused_launch_is_an_error_that_says_why(driver: Driver) -> None:
    driver.status = 701
    run = runner_of(compiled_like(SIGNATURE), (1, 1, 1), 0, VALUES)
    with pytest.raises(
        RuntimeError, match=r"refused a launch of kernel: too many resources requested for launch \(701\)"
    ):
        run([64, 32])


@pytest.mark.parametrize("name", ["gpt-oss, fp8", "llama", "deepseek, halves out"])
def test_the_compiled_kernel_takes_what_is_laid_out_for_it(name: str) -> None:
    """Sizes and order of the parameters in PTX are those of the types that the signature gives, then two addresses."""
    call = make_call(SHAPES[name], device="meta")
    target = Target("cuda", 90)
    prepared = prepare(*call.args, **call.encoded, target=target)
    made = compile_call(target, prepared)
    signature = made.signature
    names = rope_qkv_kernel.arg_names
    assert list(signature) == names, "parameters are laid out in the order of the signature"
    passed = [kind for kind in signature.values() if kind != "constexpr"]
    widths = [64 if kind.startswith("*") else {"i32": 32, "i64": 64, "fp32": 32}[kind] for kind in passed]
    entry = made.assembly.split(".entry", 1)[1].split(")", 1)[0]
    assert [int(width) for width in re.findall(r"\.param \.[a-z](\d+)", entry)] == [*widths, 64, 64]
    pointers = [x is not None for x in prepared.pointers]
    assert [signature[name] != "constexpr" for name in names[: len(pointers)]] == pointers
