"""A vLLM-style decode step of four layers: exact hits, the graphs that the documentation shows, and generated code."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from engine_cases import FORMS, decode_arguments, decode_step, form_settings
from engine_graphs import FUSED, Compiled, check

from rope_fusion.backend import rope_fusion
from rope_fusion.report import Report

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "engines.md"
PINNED = re.findall(r"^torch==([\d.]+)", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.MULTILINE)


def fuse(form: str) -> Compiled:
    # Four layers add up what one FP8 step in q (2^-3 relative) moves; the hidden values are about one.
    return check(decode_step, decode_arguments(), {"rope_static_q_fp8_kv": 4}, atol=0.5, **form_settings(form))


@pytest.mark.parametrize("form", FORMS)
def test_four_layers_give_four_hits_and_no_engine_operator_is_left(form):
    result = fuse(form)
    assert result.count(FUSED) == 4
    assert not any(name in call for call in result.calls() for name in ("_C.", "_C_cache_ops", "clone"))


@pytest.mark.skipif(
    torch.__version__.split("+")[0] not in PINNED, reason=f"graphs are shown as torch {PINNED} makes them"
)
@pytest.mark.parametrize("side", ["before", "after"])
def test_documentation_shows_the_graphs(side, request):
    graph = getattr(fuse("v1"), side)
    section = re.compile(rf"(<!-- graph {side} -->\n```\n)(.*?)(```\n)", re.DOTALL)
    text = DOCUMENT.read_text(encoding="utf-8")
    if request.config.getoption("--refresh-graphs"):
        DOCUMENT.write_text(section.sub(lambda match: match[1] + graph + match[3], text), encoding="utf-8")
        return
    found = section.search(text)
    assert found is not None
    assert found[2] == graph, "write it anew with: pytest tests/test_engine_decode.py --refresh-graphs"


@pytest.mark.slow
@pytest.mark.parametrize("v2", [True, False])
def test_generated_code_updates_the_caches_in_place(v2):
    from torch._inductor.utils import run_and_get_code

    eager, own = decode_arguments(), decode_arguments()
    own = copy.deepcopy(eager)
    expected = decode_step(*eager)
    report = Report()
    options = {
        "rope_fusion.kernels": "reference",
        "rope_fusion.strict": True,
        "rope_fusion.report": report,
        "enable_auto_functionalized_v2": v2,
    }
    compiled = torch.compile(decode_step, backend=rope_fusion, options=options)
    with torch.no_grad():
        got, (code, *_) = run_and_get_code(compiled, *own)
    assert report.hits == {"rope_static_q_fp8_kv": 4}
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.5)  # as in `fuse`
    for ours, theirs in zip(own[-1], eager[-1], strict=True):
        values = [cache.view(torch.float8_e4m3fn).float() for cache in (ours, theirs)]
        torch.testing.assert_close(*values, rtol=0.26, atol=0.05)  # two steps of FP8
    cache_elements = 2 * 5 * 4 * 2 * 16
    assert f"empty_strided_cpu(({cache_elements}" not in code
    assert not re.search(r"empty_strided_cpu\(\(2, 5, 4, 2, 16\)", code), "a cache is copied"


@pytest.mark.slow
@pytest.mark.parametrize("v2", [True, False])
def test_self_check_compares_with_the_engine_operators(v2):
    report = Report()
    options = {
        "rope_fusion.kernels": "reference",
        "rope_fusion.strict": True,
        "rope_fusion.verify": "always",
        "rope_fusion.report": report,
        "enable_auto_functionalized_v2": v2,
    }
    given = decode_arguments(layers=1)
    given[2] = given[2].float()  # with rows in bf16 the engine rounds each product, which the check would count
    with torch.no_grad():
        torch.compile(decode_step, backend=rope_fusion, options=options)(*given)
    assert report.hits == {"rope_static_q_fp8_kv": 1}
