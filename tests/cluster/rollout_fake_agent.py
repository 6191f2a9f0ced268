"""A fake agent that holds candidates: leases by the production release core, evidence made up by the test.

What its windows have counted is harmless by default, and harmful where a test says so. It must not know the
operator.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from kvtier.v1 import control_pb2 as control
from kvtier_agent.convert import window_of
from kvtier_agent.evidence_convert import delta_message
from kvtier_core.errors import CoreError
from kvtier_core.release.enforcement import CacheEnforcement
from kvtier_core.release.fences import Judgement
from kvtier_core.release.leases import BlastRadius, FenceToken, GrantTerms
from kvtier_evidence import metrics
from kvtier_evidence.collector import cohort_seconds
from kvtier_evidence.delta import DeltaLog
from kvtier_evidence.gates import ONE, Pair
from kvtier_evidence.window import WindowCounts, WindowKey
from tests.cluster.fake_agent import AgentState, FakeAgent, FakeControl, Held, Refusal

UNITS = 900
"""Requests of each arm in a window, all there from its first cohort on."""


@dataclass
class Harm:
    """What goes wrong in the windows of this agent; shared with the test, read at each ReadEvidence."""

    bad_output: bool = False
    stage: str = ""
    """Where the output is bad; empty: everywhere."""
    silent: bool = False
    prompts: tuple[str, ...] = ("a", "b")


@dataclass
class Window:
    counts: WindowCounts
    log: DeltaLog
    opened_at: float
    cohort: float
    harmful: bool


@dataclass
class RolloutState(AgentState):
    """`probe_digest` is of the probe set that this agent's workload would report."""

    harm: Harm = field(default_factory=Harm)
    probe_digest: str = ""
    leases: dict[tuple[str, str], CacheEnforcement] = field(default_factory=dict)
    windows: dict[WindowKey, Window] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)
    stages_of_cache: dict[str, list[str]] = field(default_factory=dict)

    def enforcement(self, uid: str) -> CacheEnforcement:
        """Of this boot: a lease does not survive a restart."""
        key = (uid, self.boot_id)
        if key not in self.leases:
            self.leases[key] = CacheEnforcement(lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        return self.leases[key]

    def candidate(self, uid: str) -> str:
        """Digest of the candidate whose lease is valid now; empty for none."""
        lease = self.enforcement(uid).lease()
        return "" if lease is None else lease.terms.candidate_digest


class RolloutControl(FakeControl):
    """Control with grants. `state` is a RolloutState."""

    state: RolloutState

    async def GetState(self, request: Any, context: Any) -> control.GetStateResponse:
        answer = await super().GetState(request, context)
        for held in answer.caches:
            enforcement = self.state.enforcement(held.cache.uid)
            lease = enforcement.lease()
            if lease is not None:
                token = lease.terms.fence
                held.candidate.digest = lease.terms.candidate_digest
                held.candidate.fence.value = token.value
                held.candidate.fence.rollout_uid = token.rollout_uid
            if enforcement.returned is not None:
                held.returned_reason = enforcement.returned.reason.value
                held.returned_fence = enforcement.returned.fence
        return answer

    async def Grant(self, request: control.GrantRequest, context: Any) -> Any:
        async def run() -> control.GrantResponse:
            received = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            judgement = self._command(request, "Grant")
            token = request.fence
            terms = GrantTerms(
                fence=FenceToken(token.value, token.rollout_uid, token.attempt, token.stage, token.step),
                candidate_digest=request.digest,
                baseline_digest=request.baseline_digest,
                ttl_ms=request.ttl_ms,
                traffic_fraction=Decimal(request.traffic_fraction),
                sample_fraction=Decimal(request.sample_fraction),
                blast_radius=BlastRadius(frozenset(request.blast_radius.tenants)),
                selector=None,
                approved=request.approved,
            )
            lease = self.state.enforcement(request.cache.uid).grant(terms, judgement, received)
            self.state.stages.append(token.stage)
            self.state.stages_of_cache.setdefault(request.cache.uid, []).append(token.stage)
            self._open(request)
            return control.GrantResponse(
                candidate_digest=request.digest,
                boot_id=self.state.boot_id,
                remaining_ms=lease.remaining_ms(received),
            )

        return await self._answer("Grant", context, self._typed(run))

    async def ApplyBaseline(self, request: control.ApplyBaselineRequest, context: Any) -> Any:
        """Another baseline, or a higher fence, ends what was granted before."""
        before = self.state.caches.get(request.cache.uid)
        answer = await super().ApplyBaseline(request, context)
        if before is not None and request.fence.value > before.fence:
            self.state.enforcement(request.cache.uid).revoke("BaselineApplied")
        return answer

    async def Renew(self, request: control.RenewRequest, context: Any) -> Any:
        async def run() -> control.RenewResponse:
            if request.boot_id != self.state.boot_id:
                raise Refusal("BOOT_ID_MISMATCH", "another boot", boot_id=self.state.boot_id)
            answer = control.RenewResponse(boot_id=self.state.boot_id)
            now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            for item in request.items:
                result = answer.results.add(cache=item.cache)
                held = self.state.caches.get(item.cache.uid)
                try:
                    if held is None or (held.fence, held.kind) != (item.fence.value, "Grant"):
                        raise Refusal("FENCE_CONFLICT", "not the last command")
                    self.state.enforcement(item.cache.uid).renew(
                        item.fence.value, item.digest, item.ttl_ms, now
                    )
                    result.renewed = True
                except Refusal as refusal:
                    result.error.CopyFrom(refusal.detail)
                except CoreError as error:
                    result.error.CopyFrom(_refusal(error).detail)
            return answer

        return await self._answer("Renew", context, run)

    async def Revoke(self, request: control.RevokeRequest, context: Any) -> Any:
        async def run() -> control.RevokeResponse:
            self._command(request, "Revoke")
            self.state.enforcement(request.cache.uid).revoke(request.reason)
            held = self.state.caches[request.cache.uid]
            proof = await self._proof(held, request.nonce)
            return control.RevokeResponse(proof=proof)

        return await self._answer("Revoke", context, self._typed(run))

    async def ReadEvidence(self, request: control.ReadEvidenceRequest, context: Any) -> Any:
        async def run() -> control.ReadEvidenceResponse:
            window = self.state.windows.get(window_of(request.window))
            if window is None or self.state.harm.silent:
                raise Refusal("WINDOW_UNKNOWN", "no such window")
            here = self.state.harm.stage in ("", request.window.stage)
            if self.state.harm.bad_output and here and not window.harmful:
                window.harmful = True
                self._spoil(window)
            settled = int((time.monotonic() - window.opened_at) / window.cohort)
            delta = window.log.read(
                request.epoch, request.ack_seq, settled_cohort=settled, assigned_units=2 * UNITS
            )
            return delta_message(delta)

        return await self._answer("ReadEvidence", context, run)

    def _command(self, request: Any, kind: str) -> Judgement:
        """The fence rules of the fake, with the nonce left out of what counts as the same command."""
        bare = type(request)()
        bare.CopyFrom(request)
        bare.nonce = b""
        known = self.state.caches.get(request.cache.uid)
        if known is None:
            raise Refusal("CACHE_UNKNOWN", "no such cache")
        held = self._judge(bare, kind)
        self.state.caches[request.cache.uid] = replace(held, digest=known.digest)
        return Judgement.REPEAT if known.fence == request.fence.value else Judgement.ADVANCE

    async def _proof(self, held: Held, nonce: bytes) -> control.Proof:
        ask = control.ProveRequest(cache=held.ref, nonce=nonce)
        ask.fence.value = held.fence
        answer: control.ProveResponse = await self.Prove(ask, None)
        return answer.proof

    @staticmethod
    def _typed(run: Any) -> Any:
        async def wrapped() -> Any:
            try:
                return await run()
            except CoreError as error:
                raise _refusal(error) from error

        return wrapped

    def _open(self, request: control.GrantRequest) -> None:
        key = window_of(request.window)
        if key in self.state.windows:
            return
        counts = self._counts(request)
        log = DeltaLog(self.state.boot_id, counts)
        log.changed()
        cohort = cohort_seconds(request.settle_ms / 1000)
        self.state.windows[key] = Window(counts, log, time.monotonic(), cohort, harmful=False)

    def _counts(self, request: control.GrantRequest) -> WindowCounts:
        """Two arms of equal size and law: what a harmless candidate at half of the traffic looks like."""
        counts = WindowCounts()
        shadow = request.fence.stage == "Shadow"
        for arm in (metrics.Arm.CANDIDATE, metrics.Arm.BASELINE):
            counts.of(metrics.REQUESTS, arm).histogram.add(1.0, UNITS)
            if not shadow:
                counts.of(metrics.MEASURED, arm).histogram.add(1.0, UNITS)
                counts.of(metrics.EXPOSED_STALL_FRACTION, arm).histogram.add(0.0, UNITS)
                for step in range(9):
                    value = 0.010 + 0.001 * step
                    counts.of(metrics.TPOT_RATIO, arm).histogram.add(value, UNITS // 9)
        counts.of(metrics.OUTPUT_RELATIVE_ERROR, metrics.Arm.CANDIDATE).histogram.add(0.001, UNITS)
        counts.of(metrics.OUTPUT_MISMATCHES, metrics.Arm.CANDIDATE).histogram.add(0.0, UNITS)
        if not shadow:
            counts.sessions_candidate, counts.sessions_total = UNITS, 2 * UNITS
        for gate in request.gates:
            if gate.metric == metrics.TASK_SCORE_DROP:
                for prompt in self.state.harm.prompts:
                    counts.probes[gate.name, self.state.probe_digest, prompt] = Pair.of(0.0)
        return counts

    def _spoil(self, window: Window) -> None:
        """From now on every further compared request is far over the limit of the gate called output."""
        into = window.counts.of(metrics.OUTPUT_RELATIVE_ERROR, metrics.Arm.CANDIDATE)
        into.histogram.add(9.0, UNITS)
        for sums in (into.above_up, into.above_down):
            sums["output"] = sums.get("output", 0) + UNITS * ONE
        window.log.changed()


def _refusal(error: CoreError) -> Refusal:
    return Refusal(error.reason.value, error.message, **dict(error.facts))


class RolloutFakeAgent(FakeAgent):
    """`state` is a RolloutState."""

    servicer = RolloutControl
    state: RolloutState

    def __init__(self, *args: Any, probe_digest: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state = RolloutState(self.state.node, probe_digest=probe_digest)
