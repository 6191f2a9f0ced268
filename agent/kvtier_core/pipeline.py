"""When layers are fetched and computed if copies overlap computation: the recurrence of specification C.1.

Why it exists: a stall that is predicted and one that is measured must mean the same thing, and both are
derived from event times by the same rules. Pure: it must not know clocks, tiers or threads. Times are
seconds from the step's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_core.errors import CoreError, Reason

TWO_SLOTS = 2
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class LayerCost:
    """fetch: seconds of the copy engine for this layer's cold rows; None when all of them are resident."""

    fetch: float | None
    compute: float

    def __post_init__(self) -> None:
        if self.compute < 0.0 or (self.fetch is not None and self.fetch < 0.0):
            raise CoreError(Reason.COST_MODEL, "times are never negative")


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """engine_free: a_l, the copy engine is free after considering this layer. fetch_start: s^F_l, None when
    resident. data_ready: e^F_l, 0 when resident. compute_start: s^C_l; compute_end: e^C_l; stall: s^C_l -
    e^C_{l-1}."""

    engine_free: float
    fetch_start: float | None
    data_ready: float
    compute_start: float
    compute_end: float
    stall: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Layers in order. Service, no-overlap sum, hidden and uncovered transfer are reported apart (C.1)."""

    layers: tuple[LayerTimes, ...]
    slots: int

    @property
    def service(self) -> float:
        return self.layers[-1].compute_end if self.layers else 0.0

    @property
    def stall(self) -> float:
        """Uncovered stall: what computation waited for, over all layers."""
        return sum(layer.stall for layer in self.layers)

    @property
    def fetch(self) -> float:
        return sum(
            layer.data_ready - layer.fetch_start for layer in self.layers if layer.fetch_start is not None
        )

    @property
    def compute(self) -> float:
        return sum(layer.compute_end - layer.compute_start for layer in self.layers)

    @property
    def no_overlap(self) -> float:
        return self.fetch + self.compute

    @property
    def hidden(self) -> float:
        return self.fetch - self.stall


def timeline(layers: Sequence[LayerCost], slots: int = TWO_SLOTS) -> Timeline:
    """The recurrence with one copy engine and `slots` staging slots. A cold layer is fetched once the
    engine is free and its slot's last layer has been computed; a resident layer keeps a_l, it never resets
    it."""
    if slots < 1:
        raise CoreError(Reason.COST_MODEL, "a pipeline has at least one staging slot")
    free, before = 0.0, 0.0
    done: list[LayerTimes] = []
    for index, layer in enumerate(layers):
        start: float | None = None
        ready = 0.0
        if layer.fetch is not None:
            start = max(free, done[index - slots].compute_end if index >= slots else 0.0)
            ready = free = start + layer.fetch
        begin = max(before, ready)
        done.append(LayerTimes(free, start, ready, begin, begin + layer.compute, begin - before))
        before = begin + layer.compute
    return Timeline(tuple(done), slots)


def closed_form(fetch: float, compute: float, layers: int) -> float:
    """F14, constant times and unlimited progress only: F + C + (L - 1) * max(F, C)."""
    return fetch + compute + (layers - 1) * max(fetch, compute)


def check_timeline(times: Timeline) -> None:
    """H.4 on a timeline, predicted or measured. In order of layers:

    SCHEDULE_VIOLATION: a computation before its data, before the one before it, or with a negative stall;
    the engine busy with two layers, or set back at a resident one. SLOT_REUSE: a slot filled before its
    last layer was computed."""
    free, before = 0.0, 0.0
    for index, layer in enumerate(times.layers):
        if layer.stall < -_EPSILON:
            raise _violation(f"layer {index} states a stall of {layer.stall} s")
        if layer.compute_start < layer.data_ready - _EPSILON:
            raise _violation(f"layer {index} was computed before its rows were there")
        if layer.compute_start < before - _EPSILON or layer.compute_end < layer.compute_start - _EPSILON:
            raise _violation(f"layer {index} was computed before the layer in front of it")
        if abs(layer.stall - (layer.compute_start - before)) > _EPSILON:
            raise _violation(f"layer {index} states another stall than its times")
        if layer.engine_free < free - _EPSILON:
            raise _violation(f"the copy engine was set back at layer {index}")
        if layer.fetch_start is not None:
            if index >= times.slots:
                last = times.layers[index - times.slots].compute_end
                if layer.fetch_start < last - _EPSILON:
                    raise CoreError(
                        Reason.SLOT_REUSE,
                        f"layer {index} was fetched into a slot that layer {index - times.slots} still used",
                    )
            if layer.fetch_start < free - _EPSILON:
                raise _violation(f"the copy engine fetched layer {index} before it was free")
        free, before = layer.engine_free, layer.compute_end


def _violation(message: str) -> CoreError:
    return CoreError(Reason.SCHEDULE_VIOLATION, message)
