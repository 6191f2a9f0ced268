"""Rotary tables that a model's declaration stands for, and turning queries by a whole number of positions.

Why it exists: a row that moves by delta would need its key turned by R(delta); since q.R(delta)k =
(R(-delta)q).k it is enough to turn the query, once per delta. That holds only where a position's angle is the
position times a constant, so what else a model declares is refused. It must not know rows or sessions.
Formulas: selectors_kernels 1.13; frequencies as transformers computes them, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_crds.manifest import Model, PositionContract

PARTIAL = "partial_rotary_factor"


@dataclass(frozen=True, slots=True)
class RopeTable:
    """frequencies: float64 [r / 2], radians per position. The first r dimensions of a head turn: in pairs
    (2i, 2i + 1) when interleaved, else (i, i + r / 2)."""

    frequencies: Tensor
    interleaved: bool

    def turned(self, x: Tensor, delta: int) -> Tensor:
        """R(delta) x for x float32 [..., d]. Angles and products in float64 from the whole delta, rounded
        once. delta 0 is x itself."""
        if not delta:
            return x
        angle = self.frequencies * float(delta)
        cos, sin = torch.cos(angle), torch.sin(angle)
        half = self.frequencies.shape[0]
        head = x[..., : 2 * half].double()
        if self.interleaved:
            even, odd = head[..., 0::2], head[..., 1::2]
        else:
            even, odd = head[..., :half], head[..., half:]
        first, second = even * cos - odd * sin, even * sin + odd * cos
        if self.interleaved:
            turned = torch.stack((first, second), dim=-1).flatten(-2)
        else:
            turned = torch.cat((first, second), dim=-1)
        return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


def rope_table(model: Model) -> RopeTable:
    """The table of a model's rows. POSITION_CONTRACT_MISMATCH when they are stored unrotated; UNSUPPORTED,
    naming the field, when an angle is not its position times a constant."""
    if model.position_contract is not PositionContract.POST_ROPE:
        raise CoreError(
            Reason.POSITION_CONTRACT_MISMATCH,
            f"reposition turns rotated keys; model.positionContract is {model.position_contract.value}, "
            f"legal: {PositionContract.POST_ROPE.value}",
        )
    scaling = model.rope.scaling
    kind = "default" if scaling is None else scaling.type
    make = _TABLES.get(kind)
    if make is None:
        raise CoreError(
            Reason.UNSUPPORTED,
            f"rows under model.rope.scaling.type {kind!r} cannot be repositioned: its angles need not be "
            f"linear in the position; legal: {', '.join(sorted(_TABLES))}",
            {"field": "model.rope.scaling.type"},
        )
    numbers = _Numbers({} if scaling is None else scaling.parameters)
    width = int(model.geometry.head_dim * numbers.get(PARTIAL, 1.0))
    if width % 2 or not 0 < width <= model.geometry.head_dim:
        raise CoreError(
            Reason.UNSUPPORTED,
            f"model.rope.scaling.parameters.{PARTIAL} gives {width} rotary dimensions of "
            f"{model.geometry.head_dim}; legal: an even number above 0",
            {"field": f"model.rope.scaling.parameters.{PARTIAL}"},
        )
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    frequencies = float(model.rope.theta) ** -exponents
    return RopeTable(make(frequencies, numbers, float(model.rope.theta)), model.rope.interleaved)


class _Numbers:
    """Scaling parameters, decimals as text."""

    def __init__(self, parameters: Mapping[str, str | int | bool]) -> None:
        self._parameters = parameters

    def get(self, name: str, default: float | None = None) -> float:
        value = self._parameters.get(name)
        if value is None and default is not None:
            return default
        try:
            number = float(value if value is not None else "missing")
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number <= 0:
            raise CoreError(
                Reason.UNSUPPORTED,
                f"model.rope.scaling.parameters.{name} is {value!r}; legal: a number above 0",
                {"field": f"model.rope.scaling.parameters.{name}"},
            )
        return number

    def flag(self, name: str, default: bool) -> bool:
        value = self._parameters.get(name, default)
        return value if isinstance(value, bool) else str(value).lower() != "false"


def _default(frequencies: Tensor, numbers: _Numbers, theta: float) -> Tensor:
    return frequencies


def _linear(frequencies: Tensor, numbers: _Numbers, theta: float) -> Tensor:
    return frequencies / numbers.get("factor")


def _llama3(frequencies: Tensor, numbers: _Numbers, theta: float) -> Tensor:
    factor, context = numbers.get("factor"), numbers.get("original_max_position_embeddings")
    low, high = numbers.get("low_freq_factor"), numbers.get("high_freq_factor")
    waves = 2 * math.pi / frequencies
    smooth = (context / waves - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(waves > context / low, frequencies / factor, between)
    return torch.where(waves < context / high, frequencies, scaled)


def _yarn(frequencies: Tensor, numbers: _Numbers, theta: float) -> Tensor:
    """Its length is declared, so its frequencies are constants. The factor on cos and sin scales q and k
    alike and stays in them."""
    factor, context = numbers.get("factor"), numbers.get("original_max_position_embeddings")
    half = frequencies.shape[0]
    width = 2 * half

    def dimension(rotations: float) -> float:
        return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(numbers.get("beta_fast", 32.0)), dimension(numbers.get("beta_slow", 1.0))
    if numbers.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low or 0.001
    ramp = torch.clamp((torch.arange(half, dtype=torch.float64) - low) / span, 0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


_TABLES: dict[str, Callable[[Tensor, _Numbers, float], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
