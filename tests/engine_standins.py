"""Stand-ins for inference engines' operators: exact schemas, plain torch bodies, registered only where the real ones are absent.

`register()` returns the names that stand-ins were made for. The bodies follow the engines' kernels: rotations round each product and sum
to the cache's dtype where that is the query's (and compute in float32 otherwise), quantisation multiplies by the reciprocal of the
scale, negative slots are skipped, and slots may be fewer than tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

FP8_KINDS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
REAL_LIBRARY = "ROPE_FUSION_VLLM_OPS"

# One schema a line; an indented line goes on.
SCHEMAS = {
    "_C": """
rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox,
    int rope_dim_offset=0, bool inverse=False) -> ()
static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()
dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()
""",
    "_C_cache_ops": """
reshape_and_cache(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping,
    str kv_cache_dtype, Tensor k_scale, Tensor v_scale, bool interleaved_v=False) -> ()
reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping,
    str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()
concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor scale,
    bool skip_scale=False) -> ()
""",
    "vllm": """
unified_kv_cache_update(Tensor key, Tensor value, str layer_name) -> Tensor
unified_attention_with_output(Tensor query, Tensor key, Tensor value, Tensor! output, str layer_name,
    Tensor? output_scale=None, Tensor!? output_block_scale=None, Tensor? kv_cache_dummy_dep=None) -> ()
fused_rope_and_unified_kv_cache_update(Tensor! query, Tensor! key, Tensor value, Tensor positions,
    Tensor cos_sin_cache, bool is_neox, str layer_name) -> Tensor
flashinfer_rotary_embedding(Tensor positions, Tensor(a1!) query, Tensor(a2!) key, SymInt head_size,
    Tensor cos_sin_cache, bool is_neox) -> ()
""",
    "sgl_kernel": """
rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox) -> ()
apply_rope_pos_ids_cos_sin_cache(Tensor q, Tensor k, Tensor! q_rope, Tensor! k_rope, Tensor cos_sin_cache,
    Tensor pos_ids, bool interleave, bool enable_pdl, Tensor? v, Tensor!? k_buffer, Tensor!? v_buffer,
    Tensor? kv_cache_loc) -> ()
""",
    "sglang": """
rotary_embedding_with_key(Tensor positions, Tensor(a1!) query, Tensor(a2!) key, SymInt head_size, Tensor cos_sin_cache,
    bool is_neox=True) -> ()
rotary_embedding_without_key(Tensor positions, Tensor(a1!) query, SymInt head_size, Tensor cos_sin_cache,
    bool is_neox=True) -> ()
apply_rope_inplace(Tensor(a0!) q, Tensor(a1!) k, Tensor cos_sin_cache, Tensor positions, *, bool is_neox,
    SymInt rope_dim=0) -> ()
store_cache(Tensor k, Tensor v, Tensor(a2!) k_cache, Tensor(a3!) v_cache, Tensor indices, *, SymInt row_bytes=0,
    SymInt v_row_bytes=0, SymInt num_split=0, SymInt size_limit=0, SymInt reserved_skip_index=0) -> ()
""",
    "flashinfer": """
apply_rope_pos_ids_cos_sin_cache(Tensor q, Tensor k, Tensor(a!) q_rope, Tensor(b!) k_rope, Tensor cos_sin_cache,
    Tensor pos_ids, bool interleave) -> ()
""",
}


def rotated(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool, inverse: bool = False) -> Tensor:
    """x [..., R] rotated by cos and sin [..., R / 2], as the engines' kernels do."""
    math = x.dtype if cos.dtype == x.dtype else torch.float32
    cos, sin, wide = cos.to(math), sin.to(math), x.to(math)
    if inverse:
        sin = -sin
    first, second = wide.chunk(2, -1) if is_neox else (wide[..., 0::2], wide[..., 1::2])
    out_first, out_second = first * cos - second * sin, second * cos + first * sin
    if is_neox:
        return torch.cat((out_first, out_second), -1).to(x.dtype)
    return torch.stack((out_first, out_second), -1).flatten(-2).to(x.dtype)


def rotate_in_place(
    positions: Tensor, x: Tensor, head_size: int, table: Tensor, is_neox: bool, start: int = 0, inverse: bool = False
) -> None:
    """The rotary part of every head of x ([T, H * D] or [T, H, D] or more dims, any strides), in place."""
    width = table.shape[-1]
    rows = table[positions.flatten()]
    cos, sin = rows.chunk(2, -1)
    lead = positions.shape
    heads = x.unflatten(-1, (-1, head_size)) if x.dim() == len(lead) + 1 else x
    cos, sin = cos.reshape(*lead, 1, width // 2), sin.reshape(*lead, 1, width // 2)
    part = heads[..., start : start + width]
    part.copy_(rotated(part, cos, sin, is_neox, inverse))


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    for x in (query, key):
        if x is not None:
            rotate_in_place(positions, x, head_size, cos_sin_cache, is_neox, rope_dim_offset, inverse)


def to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype, reciprocal: bool) -> Tensor:
    wide = x.float() * scale.float().reciprocal() if reciprocal else x.float() / scale.float()
    limit = torch.finfo(dtype).max
    return wide.clamp(-limit, limit).to(dtype)


def static_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor, group_shape: list[int] | None = None) -> None:
    result.copy_(to_fp8(input, scale, result.dtype, reciprocal=True))


def dynamic_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    scale.copy_(input.abs().max().float() / torch.finfo(result.dtype).max)
    result.copy_(to_fp8(input, scale, result.dtype, reciprocal=True))


def stored(value: Tensor, cache: Tensor, kind: str, scale: Tensor) -> Tensor:
    """`value` as the bytes or numbers that `cache` holds."""
    if kind == "auto":
        return value.to(cache.dtype)
    return to_fp8(value, scale, FP8_KINDS[kind], reciprocal=False).view(cache.dtype)


def as_bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    places = key_cache.shape[1]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for source, target, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        rows = as_bytes(stored(source[: slot_mapping.shape[0]][kept], target, kv_cache_dtype, scale))
        as_bytes(target)[slots // places, slots % places] = rows


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
    interleaved_v: bool = False,
) -> None:
    """key_cache [blocks, heads, dim / x, places, x], value_cache [blocks, heads, dim, places]."""
    if interleaved_v:
        raise NotImplementedError("the stand-in stores V uninterleaved")
    places, x = key_cache.shape[3:]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    keys = as_bytes(stored(key[: slot_mapping.shape[0]][kept], key_cache, kv_cache_dtype, k_scale))
    values = as_bytes(stored(value[: slot_mapping.shape[0]][kept], value_cache, kv_cache_dtype, v_scale))
    as_bytes(key_cache)[slots // places, :, :, slots % places] = keys.unflatten(-1, (-1, x))
    as_bytes(value_cache)[slots // places, :, :, slots % places] = values


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
    skip_scale: bool = False,
) -> None:
    places = kv_cache.shape[1]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    joined = torch.cat((kv_c, k_pe.flatten(1)), -1)[: slot_mapping.shape[0]][kept]
    as_bytes(kv_cache)[slots // places, slots % places] = as_bytes(stored(joined, kv_cache, kv_cache_dtype, scale))


def apply_rope_pos_ids_cos_sin_cache(
    q: Tensor,
    k: Tensor,
    q_rope: Tensor,
    k_rope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    interleave: bool,
) -> None:
    for x, out in ((q, q_rope), (k, k_rope)):
        if out is not x:
            out.copy_(x)
        rotate_in_place(pos_ids, out, x.shape[-1], cos_sin_cache, not interleave)


def sgl_apply_rope_pos_ids_cos_sin_cache(
    q: Tensor,
    k: Tensor,
    q_rope: Tensor,
    k_rope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    interleave: bool,
    enable_pdl: bool,
    v: Tensor | None,
    k_buffer: Tensor | None,
    v_buffer: Tensor | None,
    kv_cache_loc: Tensor | None,
) -> None:
    apply_rope_pos_ids_cos_sin_cache(q, k, q_rope, k_rope, cos_sin_cache, pos_ids, interleave)
    if k_buffer is not None:
        assert v is not None and v_buffer is not None and kv_cache_loc is not None
        k_buffer[kv_cache_loc] = k_rope.reshape(-1, *k_buffer.shape[1:])
        v_buffer[kv_cache_loc] = v.reshape(-1, *v_buffer.shape[1:])


def rotary_embedding_without_key(
    positions: Tensor, query: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    rotary_embedding(positions, query, None, head_size, cos_sin_cache, is_neox)


def apply_rope_inplace(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, *, is_neox: bool, rope_dim: int = 0
) -> None:
    assert rope_dim in (0, cos_sin_cache.shape[-1])
    rotary_embedding(positions, q, k, q.shape[-1], cos_sin_cache, is_neox)


def store_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    *,
    row_bytes: int = 0,
    v_row_bytes: int = 0,
    num_split: int = 0,
    size_limit: int = 0,
    reserved_skip_index: int = 0,
) -> None:
    """The caches are [slots, heads * dim]."""
    kept = indices != reserved_skip_index
    for value, target in ((k, k_cache), (v, v_cache)):
        as_bytes(target)[indices[kept]] = as_bytes(value[kept])


BODIES: dict[str, Callable[..., object]] = {
    "_C::rotary_embedding": rotary_embedding,
    "_C::static_scaled_fp8_quant": static_scaled_fp8_quant,
    "_C::dynamic_scaled_fp8_quant": dynamic_scaled_fp8_quant,
    "_C_cache_ops::reshape_and_cache": reshape_and_cache,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
    "_C_cache_ops::concat_and_cache_mla": concat_and_cache_mla,
    "sgl_kernel::rotary_embedding": rotary_embedding,
    "sgl_kernel::apply_rope_pos_ids_cos_sin_cache": sgl_apply_rope_pos_ids_cos_sin_cache,
    "sglang::rotary_embedding_with_key": rotary_embedding,
    "sglang::rotary_embedding_without_key": rotary_embedding_without_key,
    "sglang::apply_rope_inplace": apply_rope_inplace,
    "sglang::store_cache": store_cache,
    "vllm::flashinfer_rotary_embedding": rotary_embedding,
    "flashinfer::apply_rope_pos_ids_cos_sin_cache": apply_rope_pos_ids_cos_sin_cache,
}


def schemas() -> dict[str, str]:
    """Operator -> schema without its name."""
    lines = {ns: text.replace("\n    ", " ").strip().split("\n") for ns, text in SCHEMAS.items()}
    return {f"{ns}::{line.split('(')[0]}": line[line.index("(") :] for ns, own in lines.items() for line in own}


def compare_schemas(names: Iterable[str] = ()) -> list[str]:
    """Where an operator that is registered has another schema than is assumed here; by default of all that exist."""
    differences = []
    for name, assumed in schemas().items():
        packet = getattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1], None)
        if packet is None or (names and name not in names):
            continue
        registered = str(packet.default._schema).partition("(")
        if _plain("".join(registered[1:])) != _plain(assumed):
            differences.append(f"{name} is registered as {''.join(registered[1:])}, not {assumed}")
    return differences


def _plain(schema: str) -> str:
    """Without the names of alias sets, which are made up where a schema gives none."""
    return re.sub(r"\((?:\$?\w+)!(?: -> )?\)", "!", schema)


def _tells_nothing(*_: object, **__: object) -> None:
    """What compiling sees of an engine's operators: no sizes are compared, unlike in the bodies here."""


@cache
def register() -> frozenset[str]:
    """Load the real library if `ROPE_FUSION_VLLM_OPS` names one; define what is still missing, and return its names."""
    path = os.environ.get(REAL_LIBRARY)
    if path:
        torch.ops.load_library(path)
    made = set()
    libraries = {namespace: torch.library.Library(namespace, "FRAGMENT") for namespace in SCHEMAS}
    _KEPT.extend(libraries.values())
    for name, schema in schemas().items():
        namespace, operator = name.split("::")
        if hasattr(getattr(torch.ops, namespace), operator):
            if name in BODIES and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
                libraries[namespace].impl(operator, BODIES[name], "CPU")  # the real one runs on GPUs only
            continue
        libraries[namespace].define(operator + schema)
        if name in BODIES:
            libraries[namespace].impl(operator, BODIES[name], "CompositeExplicitAutograd")
            torch.library.register_fake(name, _tells_nothing, lib=libraries[namespace])
        made.add(name)
    return frozenset(made)


_KEPT: list[torch.library.Library] = []  # an operator lives as long as its Library
