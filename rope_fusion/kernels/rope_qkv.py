"""``rope_fusion::rope_qkv``: rotate q and k, quantise q to FP8 and update the KV cache, in one operator.

The eager reference below defines what the operator computes; the Triton kernel beside it (``rope_qkv_triton``) computes
the same in one launch. Importing this module registers the operator and does not import Triton.

Shapes: q ``[B, S, Hq, D]``, k ``[B, S, Hk, D]``, v ``[B, S, Hk, Dv]`` with any strides whose last is 1; cos and sin are
tables ``[P, C]`` gathered at ``positions`` (``[B, S]``, ``[1, S]`` or ``[S]``), or rows ``[B or 1, S or 1, C]``. C is
``rotary_dim / 2``, one column for each pair, or ``rotary_dim``, one for each element. ``out_dtype`` is the dtype of the
rotated q and k, and what a rotated value is rounded to before it is quantised or stored: q's own, or float32, where the
program quantises what it has not rounded. ``result_dtype``, where given, is what q and k are then returned in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from rope_fusion.canonical.attributes import Attributes, KvWriteAttributes, QuantAttributes, RotaryAttributes
from rope_fusion.kernels.cache_layout import parse_layout
from rope_fusion.kernels.failures import or_reference

SCHEMA = """rope_qkv(Tensor q, Tensor? k, Tensor? v, Tensor cos, Tensor sin, Tensor? positions,
    Tensor(a!)? k_cache, Tensor(b!)? v_cache, Tensor? slots, Tensor? slot_offsets,
    Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, *,
    bool interleaved, bool inverse, bool halves_out, int rotary_dim, int rotary_start,
    ScalarType? q_fp8, ScalarType? kv_fp8, float q_scale_value, float k_scale_value, float v_scale_value,
    bool q_scale_multiplies, bool kv_scale_multiplies, str k_layout, str v_layout, bool skip_negative_slots,
    ScalarType math_dtype, ScalarType out_dtype, bool exact,
    bool need_q, bool need_k, ScalarType? result_dtype=None) -> (Tensor q_rot, Tensor k_rot, Tensor q_fp8_out)"""

ENCODED_SCHEMA = """rope_qkv.encoded(Tensor q, Tensor? k, Tensor? v, Tensor cos, Tensor sin, Tensor? positions,
    Tensor(a!)? k_cache, Tensor(b!)? v_cache, Tensor? slots, Tensor? slot_offsets,
    Tensor? q_scale, Tensor? k_scale, Tensor? v_scale,
    str options, bool need_q, bool need_k) -> (Tensor q_rot, Tensor k_rot, Tensor q_fp8_out)"""


@dataclass(frozen=True, kw_only=True)
class PrologueOptions(Attributes):
    """The options of `rope_qkv`, which ``rope_qkv.encoded`` takes in one string.

    The dispatcher converts each argument by itself; for twenty options that costs more than all the rest of a call. So
    graphs hold the readable form, and the code generated from them calls the other (see `prologue`).
    """

    interleaved: bool
    inverse: bool
    halves_out: bool
    rotary_dim: int
    rotary_start: int
    q_fp8: torch.dtype | None
    kv_fp8: torch.dtype | None
    q_scale_value: float
    k_scale_value: float
    v_scale_value: float
    q_scale_multiplies: bool
    kv_scale_multiplies: bool
    k_layout: str
    v_layout: str
    skip_negative_slots: bool
    math_dtype: torch.dtype
    out_dtype: torch.dtype
    exact: bool
    result_dtype: torch.dtype | None = None

    @property
    def returned(self) -> torch.dtype:
        """The dtype of the rotated q and k that the operator returns."""
        return self.result_dtype or self.out_dtype


def several_devices(*tensors: Tensor | None) -> str | None:
    """Why no kernel takes these together: they are on more than one device."""
    devices = {str(t.device) for t in tensors if t is not None}
    return f"its tensors are on several devices: {', '.join(sorted(devices))}" if len(devices) > 1 else None


def options_of(
    rotary: RotaryAttributes, quant: QuantAttributes | None, write: KvWriteAttributes | None
) -> dict[str, Any]:
    """The options of ``rope_qkv`` that do what canonical operators of these attributes do."""
    return {
        "interleaved": rotary.interleaved,
        "inverse": rotary.inverse,
        "halves_out": rotary.halves_out,
        "rotary_dim": rotary.rotary_dim,
        "rotary_start": rotary.start,
        "q_fp8": quant.dtype if quant else None,
        "kv_fp8": write.kv_fp8 if write else None,
        "q_scale_value": quant.scale_value if quant else 1.0,
        "k_scale_value": write.k_scale_value if write else 1.0,
        "v_scale_value": write.v_scale_value if write else 1.0,
        "q_scale_multiplies": quant.multiplies if quant else False,
        "kv_scale_multiplies": write.scale_multiplies if write else False,
        "k_layout": write.k_layout if write else "",
        "v_layout": write.v_layout if write else "",
        "skip_negative_slots": write.skip_negative_slots if write else False,
        "math_dtype": rotary.math_dtype,
        "out_dtype": rotary.out_dtype,
        "exact": rotary.exact,
    }


@lru_cache(maxsize=1024)
def encoded(**options: Any) -> str:
    """Options as the string that ``rope_qkv.encoded`` takes; without the quotes that Inductor would not escape in C++."""
    return PrologueOptions(**options).encode().replace('"', "'")


@lru_cache(maxsize=1024)
def decoded(options: str) -> PrologueOptions:
    """The options behind that string."""
    return PrologueOptions.decode(options.replace("'", '"'))


def rotate_reference(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    inverse: bool,
    halves_out: bool,
    rotary_dim: int,
    rotary_start: int,
    math_dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x`` [..., D] with its rotary slice rotated, in ``out_dtype`` (None: x's) and x's (preserved) layout.

    Every operand is cast to ``math_dtype`` and every multiply and add rounds to it, as the eager spelling of a model
    does; elements outside the slice pass through, bit for bit where the dtype stays. cos and sin broadcast against x's
    leading dims.
    """
    half = rotary_dim // 2
    rotary = x[..., rotary_start : rotary_start + rotary_dim].to(math_dtype)
    cos, sin = cos.to(math_dtype), sin.to(math_dtype)
    if inverse:
        sin = -sin

    def pairs(t: Tensor) -> tuple[Tensor, Tensor]:
        return (t[..., 0::2], t[..., 1::2]) if interleaved else (t[..., :half], t[..., half:])

    one_column_each = cos.shape[-1] == rotary_dim
    cos_first, cos_second = pairs(cos) if one_column_each else (cos, cos)
    sin_first, sin_second = pairs(sin) if one_column_each else (sin, sin)
    first, second = pairs(rotary)
    first, second = first * cos_first - second * sin_first, second * cos_second + first * sin_second

    out = torch.empty_like(x, dtype=out_dtype)
    out[..., :rotary_start] = x[..., :rotary_start]
    out[..., rotary_start + rotary_dim :] = x[..., rotary_start + rotary_dim :]
    target = out[..., rotary_start : rotary_start + rotary_dim]
    if interleaved and not halves_out:
        target[..., 0::2], target[..., 1::2] = first, second
    else:
        target[..., :half], target[..., half:] = first, second
    return out


def quantise_reference(x: Tensor, scale: Tensor | float, dtype: torch.dtype, *, multiply: bool) -> Tensor:
    """``clamp(x / scale, ±max).to(dtype)`` in fp32, or ``x * scale``; a scale for each head meets x [..., H, D]."""
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    if scale.numel() > 1:
        scale = scale.reshape(-1, 1)
    wide = x.to(torch.float32)
    scaled = wide * scale if multiply else wide / scale
    limit = torch.finfo(dtype).max
    out = torch.empty_like(x, dtype=dtype)
    return out.copy_(scaled.clamp(-limit, limit))


def store_reference(
    cache: Tensor,
    layout: str,
    value: Tensor,
    slots: Tensor,
    slot_offsets: Tensor | None,
    *,
    skip_negative_slots: bool,
) -> None:
    """Write ``value`` [B, S, H, D], already in the cache's dtype (or FP8 for a uint8 cache), at its slots."""
    batch, seq, heads, _ = value.shape
    parsed = parse_layout(layout)
    target = parsed.view(cache, heads)
    if value.element_size() == 1:  # index_put has no FP8 kernels on every device; bytes do
        target, value = target.view(torch.uint8), value.view(torch.uint8)
    blocks, places = target.shape[:2]
    rows = value.reshape(batch * seq, *value.shape[2:])
    if parsed.addressing == "batch":
        place = slots.long().expand(batch, seq).reshape(-1)
        block = torch.arange(batch, device=place.device).repeat_interleave(seq)
        valid = place >= 0
    elif slot_offsets is not None:
        block, place = slots.long().reshape(-1), slot_offsets.long().reshape(-1)
        valid = (block >= 0) & (place >= 0)
    else:
        slot = slots.long().reshape(-1)
        valid = slot >= 0
        slot = torch.where(valid, slot, slot + blocks * places)
        block = slot.div(places, rounding_mode="floor")
        place = slot - block * places
        block = torch.where(slot < 0, blocks, block)  # before the first slot: an error, as behind the last
    rows = rows[: place.shape[0]]
    if skip_negative_slots:
        block, place, rows = block[valid], place[valid], rows[valid]
    target[block, place] = rows.reshape(-1, *target.shape[2:])


def reference(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slots: Tensor | None,
    slot_offsets: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    interleaved: bool,
    inverse: bool,
    halves_out: bool,
    rotary_dim: int,
    rotary_start: int,
    q_fp8: torch.dtype | None,
    kv_fp8: torch.dtype | None,
    q_scale_value: float,
    k_scale_value: float,
    v_scale_value: float,
    q_scale_multiplies: bool,
    kv_scale_multiplies: bool,
    k_layout: str,
    v_layout: str,
    skip_negative_slots: bool,
    math_dtype: torch.dtype,
    out_dtype: torch.dtype,
    exact: bool,
    need_q: bool,
    need_k: bool,
    result_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator in plain torch, on any device: what every kernel is tested against.

    ``exact`` computes as the eager program does, in ``math_dtype``; otherwise the arithmetic is fp32, or fp64 where the
    program's is.
    """
    wide = torch.float64 if torch.float64 in (q.dtype, math_dtype) else torch.float32
    if positions is not None:
        cos, sin = cos[positions.long()], sin[positions.long()]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one row for all heads

    def rotated(x: Tensor) -> Tensor:
        return rotate_reference(
            x,
            cos,
            sin,
            interleaved=interleaved,
            inverse=inverse,
            halves_out=halves_out,
            rotary_dim=rotary_dim,
            rotary_start=rotary_start,
            math_dtype=math_dtype if exact else wide,
            out_dtype=out_dtype,
        )

    def store(cache: Tensor, layout: str, x: Tensor, scale: Tensor | float) -> None:
        assert slots is not None
        stored = (
            x.to(cache.dtype) if kv_fp8 is None else quantise_reference(x, scale, kv_fp8, multiply=kv_scale_multiplies)
        )
        store_reference(cache, layout, stored, slots, slot_offsets, skip_negative_slots=skip_negative_slots)

    q_rot = rotated(q)
    k_rot = None if k is None else rotated(k)
    if k_cache is not None and k_rot is not None:
        store(k_cache, k_layout, k_rot, k_scale_value if k_scale is None else k_scale)
    v_target = k_cache if v_cache is None else v_cache  # no cache of its own: V lies in k_cache too, at v_layout
    if v_target is not None and v is not None:
        store(v_target, v_layout, v, v_scale_value if v_scale is None else v_scale)

    if q_fp8 is None:
        q8 = q.new_empty(0)
    else:
        q8 = quantise_reference(
            q_rot, q_scale_value if q_scale is None else q_scale, q_fp8, multiply=q_scale_multiplies
        )
    returned = result_dtype or out_dtype
    return (
        q_rot.to(returned) if need_q else q.new_empty(0, dtype=returned),
        k_rot.to(returned) if need_k and k_rot is not None else q.new_empty(0, dtype=returned),
        q8,
    )


def fake(
    q: Tensor,
    k: Tensor | None,
    *_: object,
    q_fp8: torch.dtype | None,
    out_dtype: torch.dtype,
    need_q: bool,
    need_k: bool,
    result_dtype: torch.dtype | None = None,
    **__: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs as ``empty_like`` of the inputs makes them, or of shape ``(0,)`` where nobody wants them."""
    returned = result_dtype or out_dtype
    return (
        torch.empty_like(q, dtype=returned) if need_q else q.new_empty(0, dtype=returned),
        torch.empty_like(k, dtype=returned) if need_k and k is not None else q.new_empty(0, dtype=returned),
        q.new_empty(0) if q_fp8 is None else torch.empty_like(q, dtype=q_fp8),
    )


def reference_of_encoded(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``rope_qkv.encoded`` on the CPU."""
    *tensors, options, need_q, need_k = arguments
    return reference(*tensors, **vars(decoded(options)), need_q=need_q, need_k=need_k)


def fake_of_encoded(q: Tensor, k: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``rope_qkv.encoded`` on fake tensors."""
    options, need_q, need_k = arguments[-3:]
    return fake(q, k, **vars(decoded(options)), need_q=need_q, need_k=need_k)


def on_gpu(*tensors: Tensor | None, need_q: bool, need_k: bool, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """CUDA and ROCm: the Triton kernel. What it cannot do is an error here; gates ask ``unsupported`` first."""
    return encoded_on_gpu(*tensors, encoded(**options), need_q, need_k)


def encoded_on_gpu(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``rope_qkv.encoded`` on CUDA and ROCm."""
    from rope_fusion.kernels.rope_qkv_triton import launch  # Triton is optional until a GPU tensor arrives

    *tensors, options, need_q, need_k = arguments
    return launch(*tensors, options=options, need_q=need_q, need_k=need_k)


@dataclass(frozen=True)
class Target:
    """What a kernel would be compiled for: ``backend`` "cuda" or "hip", ``arch`` 90 for sm_90, or "gfx942"."""

    backend: str
    arch: int | str


@dataclass(frozen=True)
class Limits:
    """What the Triton kernel can do, as data that gates read."""

    max_head_dim: int = 512
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    math_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    index_dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
    # The oldest CUDA architecture that converts to each FP8 dtype, and the AMD ones that do.
    fp8_cuda: tuple[tuple[torch.dtype, int], ...] = ((torch.float8_e4m3fn, 89), (torch.float8_e5m2, 89))
    fp8_hip: tuple[tuple[torch.dtype, tuple[str, ...]], ...] = (
        (torch.float8_e4m3fn, ("gfx950",)),
        (torch.float8_e5m2, ("gfx950",)),
        (torch.float8_e4m3fnuz, ("gfx942",)),
    )
    oldest_cuda: int = 80


LIMITS = Limits()


@cache
def target_of(device: torch.device) -> Target:
    """The target of a CUDA or ROCm device."""
    if torch.version.hip:
        return Target("hip", torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return Target("cuda", 10 * major + minor)


def fp8_unsupported(target: Target, dtype: torch.dtype, limits: Limits = LIMITS) -> str | None:
    """None if kernels on ``target`` convert to this FP8 dtype, else why not."""
    if target.backend == "cuda":
        oldest = dict(limits.fp8_cuda).get(dtype)
        if oldest is None:
            return f"CUDA devices do not convert to {dtype}"
        if int(target.arch) < oldest:
            return f"converting to {dtype} needs sm_{oldest} or newer, this device is sm_{target.arch}"
        return None
    archs = dict(limits.fp8_hip).get(dtype, ())
    if target.arch not in archs:
        return f"converting to {dtype} is done on {', '.join(archs) or 'no AMD device'}, this device is {target.arch}"
    return None


def unsupported(
    target: Target,
    *,
    q_dtype: torch.dtype,
    cos_dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    v_head_dim: int | None = None,
    math_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    q_fp8: torch.dtype | None = None,
    kv_fp8: torch.dtype | None = None,
    cache_dtypes: Iterable[torch.dtype] = (),
    index_dtypes: Iterable[torch.dtype] = (),
    limits: Limits = LIMITS,
) -> str | None:
    """None if the Triton kernel does this on ``target``, else what stands in the way; gates call it before matching."""
    if target.backend == "cuda" and int(target.arch) < limits.oldest_cuda:
        return f"the fused kernel needs sm_{limits.oldest_cuda} or newer, this device is sm_{target.arch}"
    for what, dtype in (("q", q_dtype), ("cos and sin", cos_dtype)):
        if dtype not in limits.dtypes:
            return f"the fused kernel takes {what} in bf16, fp16 or fp32, got {dtype}"
    if math_dtype not in limits.math_dtypes:
        return f"the fused kernel computes in bf16, fp16, fp32 or fp64, got {math_dtype}"
    if out_dtype not in (None, q_dtype, torch.float32):
        return f"the fused kernel rounds a rotated {q_dtype} to that dtype or leaves it in fp32, got {out_dtype}"
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        return f"rotary_dim must be even and between 2 and head_dim {head_dim}, got {rotary_dim}"
    for what, size in (("head_dim", head_dim), ("the head_dim of v", v_head_dim or 1)):
        if size > limits.max_head_dim:
            return f"the fused kernel takes {what} up to {limits.max_head_dim}, got {size}"
    for dtype in index_dtypes:
        if dtype not in limits.index_dtypes:
            return f"positions and slots must be int32 or int64, got {dtype}"
    for fp8 in (q_fp8, kv_fp8):
        if fp8 is not None and (reason := fp8_unsupported(target, fp8, limits)):
            return reason
    for dtype in cache_dtypes:
        if kv_fp8 is not None:
            if dtype not in (kv_fp8, torch.uint8):
                return f"a {kv_fp8} cache is held as that dtype or as uint8, got {dtype}"
        elif dtype not in limits.dtypes:
            return f"the fused kernel writes caches of bf16, fp16, fp32 or FP8, got {dtype}"
    return None


# Any strides with last stride 1 are taken; only their order must not change, because the outputs copy it (empty_like).
LIBRARY = torch.library.Library("rope_fusion", "FRAGMENT")
for schema in (SCHEMA, ENCODED_SCHEMA):
    LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
LIBRARY.impl("rope_qkv", reference, "CPU")
LIBRARY.impl("rope_qkv", or_reference("rope_qkv", on_gpu, reference), "CUDA")
LIBRARY.impl("rope_qkv.encoded", reference_of_encoded, "CPU")
LIBRARY.impl("rope_qkv.encoded", or_reference("rope_qkv", encoded_on_gpu, reference_of_encoded), "CUDA")
torch.library.register_fake("rope_fusion::rope_qkv", fake, lib=LIBRARY)
torch.library.register_fake("rope_fusion::rope_qkv.encoded", fake_of_encoded, lib=LIBRARY)
