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
from kvtier_evidence.window import WindowKey
from tests.cluster.fake_agent import AgentState, FakeAgent, FakeControl, Held, Refusal
from tests.release_agents.evidence import Harm, MadeUpWindow, made_up_counts, made_up_window


@dataclass
class RolloutState(AgentState):
    """`probe_digest` is of the probe set that this agent's workload would report."""

    harm: Harm = field(default_factory=Harm)
    probe_digest: str = ""
    leases: dict[tuple[str, str], CacheEnforcement] = field(default_factory=dict)
    windows: dict[WindowKey, MadeUpWindow] = field(default_factory=dict)
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
            return self._evidence(request)

        return await self._answer("ReadEvidence", context, run)

    async def ReadEvidenceMany(self, request: control.ReadEvidenceManyRequest, context: Any) -> Any:
        async def run() -> control.ReadEvidenceManyResponse:
            answer = control.ReadEvidenceManyResponse()
            for item in request.items:
                result = answer.results.add()
                try:
                    result.evidence.CopyFrom(self._evidence(item))
                except Refusal as refusal:
                    result.error.CopyFrom(refusal.detail)
            return answer

        return await self._answer("ReadEvidenceMany", context, run)

    def _evidence(self, request: control.ReadEvidenceRequest) -> control.ReadEvidenceResponse:
        window = self.state.windows.get(window_of(request.window))
        if window is None or self.state.harm.silent:
            raise Refusal("WINDOW_UNKNOWN", "no such window")
        spoiled = self.state.harm.here(window_of(request.window))
        delta = window.read(request.epoch, request.ack_seq, spoiled=spoiled, clock=time.monotonic)
        return delta_message(delta)

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
        counts = made_up_counts(
            request.fence.stage,
            [(gate.name, gate.metric) for gate in request.gates],
            probe_digest=self.state.probe_digest,
            prompts=self.state.harm.prompts,
        )
        self.state.windows[key] = made_up_window(
            self.state.boot_id, counts, settle_seconds=request.settle_ms / 1000, clock=time.monotonic
        )


def _refusal(error: CoreError) -> Refusal:
    return Refusal(error.reason.value, error.message, **dict(error.facts))


class RolloutFakeAgent(FakeAgent):
    """`state` is a RolloutState."""

    servicer = RolloutControl
    state: RolloutState

    def __init__(self, *args: Any, probe_digest: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state = RolloutState(self.state.node, probe_digest=probe_digest)
