"""Reads the agents' evidence of the open window and has it judged: from RPC replies to one Look.

What is kept here is a cache of what agents hold; after a restart everything is read from 0 again. A reader
belongs to one window: another key begins another. It must not know what a verdict leads to.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvtier.v1 import control_pb2 as control
from kvtier_evidence.carry import Carry
from kvtier_evidence.collector import cohort_seconds
from kvtier_evidence.design import Estimate
from kvtier_evidence.external import ExternalReading
from kvtier_evidence.gatespec import GateSpec
from kvtier_evidence.judge import GateResult, Terms, judge
from kvtier_evidence.measure import estimates, pair_thresholds, references
from kvtier_evidence.metrics import ABSOLUTE_SUFFIX, Kind
from kvtier_evidence.reader import Applied, WindowReader
from kvtier_evidence.window import WindowCounts, WindowKey
from kvtier_operator.external.query import parse_query
from kvtier_operator.external.source import ExternalSource
from kvtier_operator.ports import AgentError, Agents, AgentTarget, AgentUnreachable, Clock
from kvtier_operator.rollout.beatreads import Answer, BeatReads
from kvtier_operator.rollout.carrystatus import as_printed
from kvtier_operator.rollout.evidencewire import delta_of, key_message
from kvtier_operator.rollout.inputs import GateVerdict, Look
from kvtier_operator.rollout.moves import current_step, tick_seconds
from kvtier_operator.rollout.readings import Reading
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import DesignEffect, RolloutState
from kvtier_operator.rollout.vocabulary import Verdict

_log = logging.getLogger(__name__)

READ_ROUNDS = 2
ASKED_SHARE, MIN_ASKED_SECONDS = 0.4, 1.0
"""Of the interval, how old evidence of a beat may be as its look comes; what is older is asked for anew."""
MAX_FEEDS = 4096
MAX_DETAIL = 200
MIN_RATE_SECONDS = 30.0


@dataclass(frozen=True)
class _Judged:
    """given: all that the rest is a function of. Kept for each rollout, so it is what a look says and no
    more."""

    given: tuple[object, ...]
    verdicts: tuple[GateVerdict, ...]
    carry: Carry
    failed: str
    effects: tuple[DesignEffect, ...]
    thresholds: tuple[tuple[str, str], ...]


@dataclass
class _Open:
    """The reader of one rollout's window, and how its counts were judged last."""

    reader: WindowReader
    judged: _Judged | None = None


class LookSource(Protocol):
    """Where looks come from."""

    async def look(self, reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look: ...

    def expect(self, uid: str, reading: Reading | None, due_at: float) -> None:
        """What the next look will ask, and when (seconds since the epoch); None: nobody knows yet."""

    def forget(self, uid: str) -> None: ...


class EvidenceFeed:
    """Implements LookSource. One reader per rollout uid. Not thread-safe; calls for one uid never overlap."""

    def __init__(
        self,
        agents: Agents,
        clock: Clock,
        external: ExternalSource | None = None,
        beats: BeatReads | None = None,
    ) -> None:
        """Without `external` every gate on a metric of another system is unreadable; without `beats` each
        look asks for its own evidence."""
        self._agents = agents
        self._clock = clock
        self._external = external
        self._beats = beats
        self._open: dict[str, _Open] = {}
        self._judging = asyncio.Lock()

    def expect(self, uid: str, reading: Reading | None, due_at: float) -> None:
        if self._beats is None:
            return
        known = self._open.get(uid)
        if reading is None or known is None or known.reader.key != reading.key:
            # The first look at a window begins its reader.
            self._beats.forget(uid)
        else:
            self._beats.expect(reading, due_at, self._ask)

    def forget(self, uid: str) -> None:
        self._open.pop(uid, None)
        if self._beats is not None:
            self._beats.forget(uid)
        if self._external is not None:
            self._external.forget(uid)

    async def look(self, reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        """Reads every node once (twice after a rebuild), where nobody has on this beat, and judges what is
        merged."""
        step = current_step(state, spec)
        gates = spec.gates_of(step)
        opened = self._opened(reading.key, spec)
        reader = opened.reader
        expected = [node.name for node in reading.nodes]
        interval = tick_seconds(spec)
        asked = self._asked(reading, state, interval)
        for _ in range(0 if reading.unopened else READ_ROUNDS):
            answers = await asyncio.gather(
                *(asked.get(node) or self._read(reader, reading, node) for node in reading.nodes)
            )
            if Applied.REBUILD not in answers:
                break
            asked = {}
        evidence = reader.evidence(expected, now=self._clock.monotonic(), interval=interval)
        external = await self._read_external(reading.key, gates, state, now, interval)
        evidence = replace(evidence, external=external)
        terms = Terms(
            fraction=float(step.traffic),
            share=max(1, state.shares),
            planned_cells=max(1, spec.cells),
            false_promotion=float(spec.alpha_promotion),
            false_rollback=float(spec.alpha_rollback),
            estimates=known_effects(state),
            references=known_references(state),
        )
        # Of a window in which nothing has been counted since, the judgement is what it was.
        given = (reader.version, evidence.complete, evidence.error, expected, gates, terms, state.carry)
        judged = opened.judged
        if judged is None or external or judged.given != given:
            # One at a time, and the loop turns in between: all looks of a pool have their answers at the same
            # moment, and each step of what somebody waits for would wait until all of them are judged.
            async with self._judging:
                await asyncio.sleep(0)
                judgement = judge(gates, evidence, terms, state.carry)
                judged = _Judged(
                    given,
                    _verdicts(judgement.results, gates, external),
                    as_printed(judgement.carry, state.carry),
                    judgement.failed.gate if judgement.failed else "",
                    effects_of(gates, evidence.merged, float(step.traffic), external),
                    thresholds_of(spec, evidence.merged, gates),
                )
            opened.judged = None if external else judged
        return Look(
            opening_fence=reading.key.opening_fence,
            at=now,
            verdicts=judged.verdicts,
            carry=judged.carry,
            failed=judged.failed,
            requests_per_second=_rate(reader, state, now),
            effects=judged.effects,
            unread=evidence.error_agents,
            pair_thresholds=judged.thresholds,
        )

    async def _read_external(
        self, key: WindowKey, gates: Sequence[GateSpec], state: RolloutState, now: float, interval: float
    ) -> Mapping[str, ExternalReading]:
        asked = [(gate, parse_query(gate.external.query)) for gate in gates if gate.external is not None]
        if not asked or self._external is None or state.window is None:
            return {}
        found = await self._external.read(
            key, asked, opened_at=state.window.opened_at, now=now, interval=interval
        )
        for name, one in sorted(found.items()):
            if one.error is not None:
                told = {"gate": name, "error": one.detail[:MAX_DETAIL]}
                _log.warning("a gate's source cannot be read", extra=told)
        return found

    def _opened(self, key: WindowKey, spec: RolloutSpec) -> _Open:
        known = self._open.get(key.rollout_uid)
        if known is not None and known.reader.key == key:
            return known
        while len(self._open) >= MAX_FEEDS:
            self.forget(next(iter(self._open)))
        fresh = _Open(
            WindowReader(
                key,
                opened_at=self._clock.monotonic(),
                cohort=cohort_seconds(spec.settle),
                settle=spec.settle,
            )
        )
        self._open[key.rollout_uid] = fresh
        return fresh

    def _asked(
        self, reading: Reading, state: RolloutState, interval: float
    ) -> Mapping[AgentTarget, asyncio.Task[Answer]]:
        """What was asked on the beat that this look is of."""
        if self._beats is None or state.schedule is None:
            return {}
        return self._beats.take(
            reading, state.schedule.due_at, max(MIN_ASKED_SECONDS, interval * ASKED_SHARE)
        )

    async def _ask(self, reading: Reading, node: AgentTarget) -> Answer:
        """Before the look, of the window that is open then."""
        opened = self._open.get(reading.key.rollout_uid)
        if opened is None or opened.reader.key != reading.key:
            return None
        return await self._read(opened.reader, reading, node)

    async def _read(self, reader: WindowReader, reading: Reading, node: AgentTarget) -> Answer:
        """None when the agent could not be read: the reader sees by the clock that it was not."""
        position = reader.position(node.name)
        request = control.ReadEvidenceRequest(
            cache=reading.cache,
            fence=reading.fence,
            window=key_message(reading.key),
            epoch=position.epoch,
            ack_seq=position.ack_seq,
        )
        try:
            reply = await self._agents.read_evidence(node, request)
            delta = delta_of(reply)
        except (AgentError, AgentUnreachable, ValueError):
            return None
        return reader.apply(node.name, delta, now=self._clock.monotonic(), asked=position)


def _rate(reader: WindowReader, state: RolloutState, now: float) -> float:
    """Over the window so far; 0 while it is too young to tell."""
    age = now - state.window.opened_at if state.window is not None else 0.0
    return reader.assigned / age if age >= MIN_RATE_SECONDS else 0.0


def known_effects(state: RolloutState) -> dict[str, Estimate]:
    """Design effects that the open window is judged by, as its status holds them."""
    effects = state.window.effects if state.window is not None else ()
    return {one.gate: Estimate(float(one.k), one.blocks, float(one.mean_block)) for one in effects}


def known_references(state: RolloutState) -> dict[str, float]:
    """What absolute limits in Full are multiples of, as the open window's status holds it."""
    told = state.window.pair_thresholds if state.window is not None else ()
    return {name: float(value) for name, value in told if name.endswith(ABSOLUTE_SUFFIX)}


def effects_of(
    gates: Sequence[GateSpec],
    closing: WindowCounts,
    fraction: float,
    external: Mapping[str, ExternalReading] | None = None,
) -> tuple[DesignEffect, ...]:
    """What this window has measured for the next ones, never for itself; sorted by gate."""
    found = estimates(gates, closing, fraction, external)
    return tuple(
        DesignEffect(gate, f"{one.k_hat:.6g}", one.blocks, f"{one.mean_block:.6g}")
        for gate, one in sorted(found.items())
    )


def thresholds_of(
    spec: RolloutSpec, closing: WindowCounts, here: Sequence[GateSpec]
) -> tuple[tuple[str, str], ...]:
    """What this window says to the next of any step: (gate, baseline's quantile as printed), sorted; of an
    absolute guard the bound that its limit is a multiple of. A window that is judged by that says none: a
    candidate that slows its neighbours would move its own limit."""
    found = pair_thresholds(spec.ratio_gates, closing)
    if all(gate.metric.kind is not Kind.REFERENCE for gate in here):
        found |= references(spec.ratio_gates, closing)
    return tuple(sorted((name, f"{value:.9g}") for name, value in found.items()))


def _verdicts(
    results: Sequence[GateResult], gates: Sequence[GateSpec], external: Mapping[str, ExternalReading]
) -> tuple[GateVerdict, ...]:
    details = {name: one.detail[:MAX_DETAIL] for name, one in external.items() if one.error is not None}
    metrics: Mapping[str, str] = {gate.name: gate.metric.name for gate in gates}
    return tuple(
        GateVerdict(
            name=result.name,
            verdict=Verdict(result.verdict),
            reason=sys.intern(str(result.reason)),
            required=result.required,
            metric=metrics.get(result.name, result.name),
            # As the status that says the same has them.
            value=sys.intern(result.value_text),
            bound=sys.intern(result.bound_text),
            limit=sys.intern(result.limit_text),
            n=result.n,
            expected_n=result.expected_n or 0,
            k=sys.intern(result.k_text),
            basis=sys.intern(str(result.basis)),
            detail=details.get(result.name, ""),
        )
        for result in results
    )
