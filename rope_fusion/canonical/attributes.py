"""Static attributes of the canonical operators.

A canonical operator has tensor arguments and one string, the encoded attributes, so that a pattern can bind the
whole string as one wildcard instead of one pattern per combination.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound="Attributes")


class Attributes:
    """Base of the attribute records: a stable, readable string form."""

    def encode(self) -> str:
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return json.dumps({name: _to_json(value) for name, value in fields.items()}, sort_keys=True)

    @classmethod
    def decode(cls: type[T], text: str) -> T:
        return cls(**{name: _from_json(value) for name, value in json.loads(text).items()})


def _to_json(value: Any) -> Any:
    return {"dtype": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else value


def _from_json(value: Any) -> Any:
    return getattr(torch, value["dtype"]) if isinstance(value, dict) else value


@dataclass(frozen=True)
class RotaryAttributes(Attributes):
    """How `rotary_qk` rotates: see `records.Rotation`."""

    rotary_dim: int
    start: int
    interleaved: bool
    inverse: bool
    halves_out: bool
    out_dtype: torch.dtype
    math_dtype: torch.dtype
    exact: bool  # reproduce the program's own rounding bit for bit
    overwritable: bool = False  # what is rotated is read by nothing else, and the result lies in memory as it does


@dataclass(frozen=True)
class QuantAttributes(Attributes):
    """How `quantize_fp8` quantises; `scale_value` is used when there is no scale tensor."""

    dtype: torch.dtype
    multiplies: bool
    scale_value: float


@dataclass(frozen=True)
class GroupQuantAttributes(Attributes):
    """How `quantize_group_fp8` quantises: see `records.GroupQuantisation`."""

    dtype: torch.dtype
    size: int
    min_amax: float
    power_of_two: bool


@dataclass(frozen=True)
class ArrangeAttributes(Attributes):
    """How `arrange` lays its tensor out: as `layout` and `groups` of the operator `rope_fusion::rotate`."""

    layout: str  # dims in memory order: b, s, h, d, and g where the heads are in groups
    groups: int


@dataclass(frozen=True)
class KvWriteAttributes(Attributes):
    """Where and how `kv_write` stores: cache layouts as in docs/architecture.md; `kv_fp8` None stores by a plain cast."""

    k_layout: str
    v_layout: str
    skip_negative_slots: bool
    kv_fp8: torch.dtype | None
    scale_multiplies: bool
    k_scale_value: float
    v_scale_value: float
    in_place_already: bool


@dataclass(frozen=True)
class LayerWriteAttributes(Attributes):
    """Which write `kv_write_by_layer` stands for."""

    node: str  # name of the graph's node, by which the layer is found again
    provider: str  # who resolves the layer's name
    fused_by_engine: bool  # the engine's own operator rotates and writes already
