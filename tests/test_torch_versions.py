"""Differences between torch versions live behind one door, which says so when it cannot open."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_an_unknown_torch_is_refused_in_one_sentence_at_import() -> None:
    program = """
import torch._inductor.compile_fx
import torch._inductor.lowering as lowering
del lowering.add_needs_realized_inputs
torch.__version__ = "3.5.0"
try:
    import rope_fusion.backend
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", "import torch\n" + program], capture_output=True, text=True, check=True
    )
    said = done.stdout.strip()
    assert said.startswith(
        "rope_fusion works with torch 2.11 to 2.15; this is torch 3.5.0, which lacks a name that it needs"
    )
    assert "add_needs_realized_inputs" in said
    assert "\n" not in said


def test_importing_the_package_needs_nothing_private() -> None:
    """`import rope_fusion` works with any torch, so that a wrong one is met where compiling starts."""
    program = "import sys, rope_fusion; assert 'torch._inductor' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_versions_are_compared_in_one_module_only() -> None:
    for file in (ROOT / "rope_fusion").rglob("*.py"):
        if file.name == "_torch.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert "torch.__version__" not in text, f"{file}:{node.lineno}: {text}"
                assert "torch.version.__version__" not in text, f"{file}:{node.lineno}: {text}"
