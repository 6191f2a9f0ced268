"""The evidence windows of one cache on this node: the current one and the one before it.

A window outlives its lease, so that a reader gets the tail of a revoked candidate; a third window drops the
oldest. Counting itself is `kvtier_evidence.collector`'s. Knows no wire message.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from kvtier_agent.boottime import boottime_ns
from kvtier_agent.evidence_port import GateTerms, Outcome, ProbeResult, Progress, WindowTerms
from kvtier_core.errors import CoreError, Reason
from kvtier_evidence.collector import AttemptProbes, CollectorPlan, Counted, WindowCollector, cohort_seconds
from kvtier_evidence.delta import Delta
from kvtier_evidence.metrics import METRICS
from kvtier_evidence.units import CollectedGate
from kvtier_evidence.window import WindowKey

_KEPT_WINDOWS = 2
_MAX_GATES = 64


def boottime_seconds() -> float:
    return boottime_ns() / 1e9


class EvidenceWindows:
    """Implements EvidencePort. `epoch` is the agent's boot id."""

    def __init__(self, epoch: str, clock: Callable[[], float] = boottime_seconds) -> None:
        self._epoch = epoch
        self._clock = clock
        self._windows: OrderedDict[WindowKey, WindowCollector] = OrderedDict()
        self._attempt: tuple[str, int, str] = ("", 0, "")
        self._probes = AttemptProbes()

    def check(self, terms: WindowTerms) -> None:
        _gates(terms)

    def open(self, terms: WindowTerms) -> None:
        gates = _gates(terms)
        if terms.key in self._windows:
            return
        settle = terms.settle_ms / 1000
        plan = CollectorPlan(
            key=terms.key,
            gates=gates,
            fraction=terms.fraction,
            settle=settle,
            warmup=terms.warmup_ms / 1000,
            cohort=cohort_seconds(settle),
        )
        attempt = (terms.key.rollout_uid, terms.key.attempt, terms.key.candidate_digest)
        if attempt != self._attempt:
            self._attempt, self._probes = attempt, AttemptProbes()
        self._windows[terms.key] = WindowCollector(
            plan, epoch=self._epoch, clock=self._clock, probes=self._probes
        )
        while len(self._windows) > _KEPT_WINDOWS:
            self._windows.popitem(last=False)

    def assigned(
        self, key: WindowKey, unit: str, *, tenant: str, session_root_id: str, candidate: bool, compared: bool
    ) -> None:
        window = self._windows.get(key)
        if window is not None:
            window.assign(
                unit,
                tenant=tenant,
                session_root_id=session_root_id,
                candidate=candidate,
                compared=compared,
            )

    def step_error(self, key: WindowKey, unit: str, step: int, error: float) -> None:
        window = self._windows.get(key)
        if window is not None:
            window.record_step(unit, step, None if math.isnan(error) else error)

    def progress(self, key: WindowKey, unit: str, progress: Progress) -> None:
        window = self._windows.get(key)
        if window is not None:
            window.progress(
                unit,
                tokens=progress.tokens,
                first_token=progress.first_token_seconds,
                last_token=progress.last_token_seconds,
            )

    def stall(self, key: WindowKey, unit: str, seconds: float) -> None:
        window = self._windows.get(key)
        if window is not None:
            window.record_stall(unit, seconds)

    def outcome(self, key: WindowKey, unit: str, outcome: Outcome) -> str:
        window = self._windows.get(key)
        if window is None:
            return "the window of this session is no longer kept"
        if outcome.cancelled and outcome.output_tokens == 0:
            return _why(window.finish(unit))
        return _why(
            window.outcome(
                unit,
                tokens=outcome.output_tokens,
                first_token=outcome.first_token_seconds,
                last_token=outcome.last_token_seconds,
            )
        )

    def ended(self, key: WindowKey, unit: str) -> None:
        window = self._windows.get(key)
        if window is not None:
            window.finish(unit)

    def probe(self, key: WindowKey, result: ProbeResult) -> str:
        window = self._windows.get(key)
        if window is None:
            return "the window of this session is no longer kept"
        difference = None if result.missing else result.difference
        return _why(
            window.record_probe(result.gate, result.probe_set_digest, result.prompt_digest, difference)
        )

    def zero_tolerance(self, key: WindowKey, counter: str) -> None:
        window = self._windows.get(key)
        if window is not None:
            window.record_event(counter)

    def read(self, key: WindowKey, epoch: str, ack_seq: int) -> Delta:
        window = self._windows.get(key)
        if window is None:
            raise CoreError(Reason.WINDOW_UNKNOWN, f"this agent keeps no window {key.label} of that key")
        return window.read(epoch, ack_seq)


def _gates(terms: WindowTerms) -> tuple[CollectedGate, ...]:
    if len(terms.gates) > _MAX_GATES:
        raise CoreError(Reason.BAD_ARGUMENT, f"gates: at most {_MAX_GATES}")
    return tuple(_collected(gate) for gate in terms.gates)


def _collected(gate: GateTerms) -> CollectedGate:
    if gate.metric not in METRICS:
        raise CoreError(Reason.BAD_ARGUMENT, f"gates: {gate.name}: {gate.metric!r} is not a metric")
    limit = _decimal(gate, "limit", gate.limit)
    quantile = Decimal(str(gate.quantile)) if gate.quantile else None
    threshold = None
    if gate.pair_threshold:
        threshold = float(_decimal(gate, "pair_threshold", gate.pair_threshold))
        if not 0 < threshold < math.inf:
            message = f"gates: {gate.name}: pair_threshold {gate.pair_threshold!r} must be above 0"
            raise CoreError(Reason.BAD_ARGUMENT, message)
    return CollectedGate(gate.name, gate.metric, limit, quantile, threshold)


def _decimal(gate: GateTerms, field: str, text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation as error:
        message = f"gates: {gate.name}: {field} {text!r} is not a decimal"
        raise CoreError(Reason.BAD_ARGUMENT, message) from error


def _why(counted: Counted) -> str:
    return "" if counted is Counted.COUNTED else counted.value
