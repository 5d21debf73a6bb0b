"""Triton's interpreter with the arithmetic of a GPU, so that its results can be compared bit for bit.

By itself the interpreter narrows floats by a routine of its own that truncates to bf16 and mishandles carries, ties and
subnormals of FP8, and rounds twice in a fused multiply-add.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put torch's conversions, and a fused multiply-add that rounds once, into the interpreter."""
    from triton.runtime import interpreter

    from rope_fusion.kernels.rope_qkv_triton import TRITON_DTYPES

    torch_dtypes = {str(triton_dtype): dtype for dtype, triton_dtype in TRITON_DTYPES.items()}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
        value = torch.from_numpy(data.copy().view(f"u{data.dtype.itemsize}")).view(torch_dtypes[str(source)])
        narrow = value.to(torch_dtypes[str(target)])
        return narrow.view(bits[narrow.element_size()]).numpy()

    def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
        exact = np.multiply(x.data, y.data, dtype=np.float64) + z.data  # holds a product of two fp32 numbers exactly
        return interpreter.TensorHandle(exact.astype(np.asarray(z.data).dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
