"""Threads, processes that share a cache folder, forks, and two ranks of a tensor-parallel model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import GptOssAttention, cos_sin_table
from torch import Tensor

import rope_fusion
from rope_fusion import backend
from rope_fusion.report import Report

HERE = Path(__file__).resolve().parent
OPTIONS: dict[str, Any] = {"rope_fusion.kernels": "reference", "rope_fusion.strict": True}


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def arguments(tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 64, dtype=torch.bfloat16)
    return x, cos_sin_table(32, 16), torch.arange(tokens), torch.arange(tokens) * 3


@pytest.mark.slow
def test_threads_that_compile_at_once_get_their_own_results() -> None:
    """Eight threads, four programs, each compiled twice.

    The backend is given as a function: torch's own look-up of a name fails when two threads do it for the first time at once.
    """
    expected: dict[int, Tensor] = {}
    found: dict[int, tuple[dict[str, int], Tensor]] = {}
    together = threading.Barrier(8)
    models: dict[int, Any] = {}
    for index in range(8):
        torch.manual_seed(index % 4)
        models[index] = GptOssAttention(quantise_q=index % 2 == 0, fp8_cache=index % 4 < 2).eval()

    def work(index: int) -> None:
        given = arguments(3 + index % 4)
        function = torch.compile(models[index], backend=backend.rope_fusion, options=OPTIONS)
        with torch.no_grad(), rope_fusion.record() as report:
            together.wait(timeout=60)
            result = function(*given)
            expected[index] = models[index](*given)
        found[index] = (report.hits, result)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))
    for index, (hits, result) in found.items():
        # Dynamo gives the second model of a kind the code of the first, if that is ready
        fuses = {"rope_static_q_fp8_kv" if models[index].quantise_q else "rope_kv": 1}
        of_a_kind = [hits, found[(index + 4) % 8][0]]
        assert all(each in ({}, fuses) for each in of_a_kind), index
        assert any(of_a_kind), index
        # q, k and v go through FP8, whose unit is 1/8; attention averages over tokens
        torch.testing.assert_close(result, expected[index], rtol=0.125, atol=0.02)


PROGRAM = """
import json, sys, torch
from test_processes import OPTIONS, arguments
from blocks import GptOssAttention
import rope_fusion
torch.manual_seed(0)
model = GptOssAttention().eval()
with torch.no_grad(), rope_fusion.record() as report:
    result = torch.compile(model, backend="rope_fusion", options=OPTIONS)(*arguments(5))
print(json.dumps([report.hits, result.double().sum().item(), model.k_cache.double().sum().item()]))
"""


@pytest.mark.slow
def test_two_processes_that_compile_at_once_share_a_cache_folder(tmp_path: Path) -> None:
    shared = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TORCHINDUCTOR_FX_GRAPH_CACHE="1")

    def start() -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", PROGRAM], env=shared, **pipes)

    together = [start(), start()]
    answers = [process.communicate(timeout=300) for process in together]
    warm = start().communicate(timeout=300)
    for out, err in [*answers, warm]:
        assert out, err
    lines = {out.splitlines()[-1] for out, _ in [*answers, warm]}
    assert len(lines) == 1
    assert json.loads(lines.pop())[0] == {"rope_static_q_fp8_kv": 1}


FORK = """
import os, sys, torch
from test_processes import OPTIONS, arguments
from blocks import GptOssAttention
import rope_fusion
torch.set_num_threads(1)
torch.manual_seed(0)
model = GptOssAttention().eval()
function = torch.compile(model, backend="rope_fusion", options=OPTIONS)
with torch.no_grad():
    before = function(*arguments(5))
    child = os.fork()
    if child == 0:
        same = torch.equal(function(*arguments(5)), before)  # compiled before the fork
        other = GptOssAttention(quantise_q=False).eval()
        with rope_fusion.record() as report:
            torch.compile(other, backend="rope_fusion", options=OPTIONS)(*arguments(4))
        os._exit(0 if same and report.hits == {"rope_kv": 1} else 3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    same = torch.equal(function(*arguments(5)), before)
sys.exit(status if same else 4)
"""


@pytest.mark.slow
def test_a_fork_after_compiling_runs_and_compiles(tmp_path: Path) -> None:
    """Without Inductor's worker processes, which a forked child cannot reach (plain Inductor waits for ever there too)."""
    command = [sys.executable, "-c", FORK]
    where = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TORCHINDUCTOR_COMPILE_THREADS="1")
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", ["subprocess", "fork"])
def test_inductors_worker_processes_need_nothing_of_ours(method: str, tmp_path: Path) -> None:
    workers = environment(
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
        TORCHINDUCTOR_COMPILE_THREADS="2",
        TORCHINDUCTOR_WORKER_START=method,
    )
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=workers, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])[0] == {"rope_static_q_fp8_kv": 1}


@pytest.mark.slow
def test_two_tensor_parallel_ranks_fuse_alike_and_compute_what_one_process_does(tmp_path: Path) -> None:
    script = str(HERE / "trust" / "tensor_parallel.py")
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    alone.mkdir()
    ranks.mkdir()
    where = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    run: Callable[..., Any] = subprocess.run
    common: dict[str, Any] = {"env": where, "capture_output": True, "text": True, "timeout": 500}
    single = run([sys.executable, script, str(alone)], **common)
    assert single.returncode == 0, single.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    both = run([*torchrun, script, str(ranks)], **common)
    assert both.returncode == 0, both.stderr
    expected = json.loads((alone / "0.json").read_text())
    found = [json.loads((ranks / f"{rank}.json").read_text()) for rank in range(2)]
    assert expected["hits"] == {"rope_static_q_fp8_kv": 2}
    for rank in found:
        assert rank["hits"] == expected["hits"]
        # q goes through FP8: a sum in another order may round one element to the next of its 2^-4 steps
        torch.testing.assert_close(torch.tensor(rank["result"]), torch.tensor(expected["result"]), rtol=1e-2, atol=1e-2)
    for layer in range(2):
        parts = [torch.tensor(rank["caches"][layer]).view(-1, rank["kv_heads"], 8) for rank in found]
        whole = torch.tensor(expected["caches"][layer]).view(-1, 2, 8)
        # fp32 throughout, but the second layer's input carries the first layer's FP8 rounding
        tolerance = 1e-5 if layer == 0 else 1e-2
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=tolerance, atol=tolerance)


def test_a_recording_of_one_thread_does_not_see_another(rope_fusion_report: Report) -> None:
    def work() -> None:
        with torch.no_grad():
            torch.compile(lambda x: x + 1, backend="rope_fusion")(torch.ones(3))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not rope_fusion_report.graphs
