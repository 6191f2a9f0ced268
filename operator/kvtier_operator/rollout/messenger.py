"""Sends one grant or revocation and says what the agent is like afterwards.

An agent's refusal is an answer like any other: it comes back in the view, and the machine decides. It must
not decide whether to send.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_operator.ports import AgentError, AgentTarget, AgentUnreachable, Deps, JsonObject
from kvtier_operator.proofs import nonce_digest
from kvtier_operator.rollout.agentwatch import REFUSED
from kvtier_operator.rollout.grants import grant_request, revoke_request
from kvtier_operator.rollout.inputs import AgentView, Grant, Notice, ProofView, Revoke, Rpc
from kvtier_operator.rollout.observe import Memory
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.vocabulary import LEASE_GRACE

_log = logging.getLogger(__name__)

MIN_GRANT_SECONDS, MAX_GRANT_SECONDS = 1.0, 5.0
REVOKE_SECONDS = 5.0
REBOOTED = "BOOT_ID_MISMATCH"


@dataclass(frozen=True)
class Sent:
    """What all messages of one pass have in common."""

    cache: common.CacheRef
    rollout: JsonObject
    state: RolloutState
    spec: RolloutSpec | None
    manifest: bytes
    notices: list[tuple[JsonObject, Notice]]
    """Where to put what people are told of it, afterwards: no other agent waits for an Event."""

    @property
    def uid(self) -> str:
        return str(self.rollout["metadata"]["uid"])


def grant_deadline(lease_ttl: float) -> float:
    """A grant is on its way for at most the grace that expiry allows for, so that a lease begun by a late one
    has ended when it is said to have."""
    return min(MAX_GRANT_SECONDS, max(MIN_GRANT_SECONDS, lease_ttl * (LEASE_GRACE - 1)))


class Messenger:
    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def send(
        self, sent: Sent, rpc: Rpc, target: AgentTarget, view: AgentView, memory: Memory
    ) -> AgentView:
        """Never raises for what an agent may answer; NotLeader passes through. One deadline for all of it: a
        grant that arrives later than the grace would begin a lease that is said to have ended."""
        budget = REVOKE_SECONDS
        if isinstance(rpc, Grant) and sent.spec is not None:
            budget = grant_deadline(sent.spec.lease_ttl)
        until = self._deps.clock.monotonic() + budget
        uid, attempt = sent.uid, sent.state.attempt
        attributes: dict[str, str | int | float | bool] = {
            "kvtier.node": target.name,
            "kvtier.fence": sent.state.fence,
        }
        kind = "grant" if isinstance(rpc, Grant) else "revoke"
        with self._deps.telemetry.span(f"rollout.{kind}", attributes, uid=uid, attempt=attempt):
            try:
                return await self._once(sent, rpc, target, view, memory, budget)
            except AgentError as error:
                if error.reason != REBOOTED or not error.facts.get("boot_id"):
                    return self._refused(sent, rpc, view, memory, error)
                # It restarted since it was looked at; the boot id guards against commands of another life.
                target = replace(target, boot_id=error.facts["boot_id"])
                memory.boots[target.name] = target.boot_id
            except AgentUnreachable as error:
                return self._silent(rpc, view, memory, error)
            left = until - self._deps.clock.monotonic()
            if left <= 0:
                late = AgentUnreachable(target.name, "DEADLINE_EXCEEDED", "it restarted")
                return self._silent(rpc, view, memory, late)
            try:
                return await self._once(sent, rpc, target, view, memory, left)
            except AgentError as error:
                return self._refused(sent, rpc, view, memory, error)
            except AgentUnreachable as error:
                return self._silent(rpc, view, memory, error)

    async def _once(
        self, sent: Sent, rpc: Rpc, target: AgentTarget, view: AgentView, memory: Memory, seconds: float
    ) -> AgentView:
        if isinstance(rpc, Grant):
            return await self._grant(sent, target, view, memory, seconds)
        return await self._revoke(sent, rpc, target, view, memory, seconds)

    async def _grant(
        self, sent: Sent, target: AgentTarget, view: AgentView, memory: Memory, seconds: float
    ) -> AgentView:
        if sent.spec is None:
            return view
        request = grant_request(
            sent.state,
            sent.spec,
            cache=sent.cache,
            rollout_uid=sent.uid,
            manifest=sent.manifest,
            boot_id=target.boot_id,
            nonce=self._deps.nonce(),
        )
        # Noted before it is sent: an answer that is lost may still have granted.
        before = target.name in memory.held
        memory.held.add(target.name)
        try:
            answer = await self._deps.agents.grant(target, request, deadline_seconds=seconds)
        except AgentError as error:
            if error.reason in REFUSED and not before:
                memory.held.discard(target.name)
            raise
        memory.boots[target.name] = answer.boot_id
        return replace(
            view,
            reachable=True,
            boot_id=answer.boot_id,
            granted_fence=sent.state.fence,
            granted_rollout=sent.uid,
            candidate_digest=answer.candidate_digest,
            running_candidate=answer.candidate_digest,
            highest_fence=max(view.highest_fence, sent.state.fence),
            returned_reason="",
            returned_fence=0,
            refusal="",
        )

    async def _revoke(
        self, sent: Sent, rpc: Revoke, target: AgentTarget, view: AgentView, memory: Memory, seconds: float
    ) -> AgentView:
        nonce = self._deps.nonce()
        request = revoke_request(
            sent.state,
            rpc.cause,
            cache=sent.cache,
            rollout_uid=sent.uid,
            boot_id=target.boot_id,
            nonce=nonce,
        )
        answer = await self._deps.agents.revoke(target, request, deadline_seconds=seconds)
        proof = checked(answer.proof, nonce, target.boot_id)
        memory.boots[target.name] = answer.proof.boot_id
        memory.proofs[target.name] = proof
        memory.said.pop(target.name, None)
        if proof.valid and not proof.candidate_digest:
            memory.held.discard(target.name)
        return replace(
            view,
            reachable=True,
            proof=proof,
            granted_fence=0,
            granted_rollout="",
            candidate_digest=proof.candidate_digest,
            highest_fence=max(view.highest_fence, proof.fence),
            returned_reason="",
            returned_fence=0,
            refusal="",
            said="",
        )

    def _refused(self, sent: Sent, rpc: Rpc, view: AgentView, memory: Memory, error: AgentError) -> AgentView:
        highest = int(error.facts.get("highest_fence") or 0)
        _log.info("agent refused", extra={"node": error.node, "reason": error.reason})
        said = f"{error.node}: {error.reason}: {error.message}"
        sent.notices.append((sent.rollout, Notice(True, f"{type(rpc).__name__}Refused", said)))
        return replace(
            _saying(rpc, view, memory, error.reason),
            reachable=True,
            refusal=error.reason,
            refusal_message=error.message[:160],
            highest_fence=max(view.highest_fence, highest),
        )

    def _silent(self, rpc: Rpc, view: AgentView, memory: Memory, error: AgentUnreachable) -> AgentView:
        _log.info("agent unreachable", extra={"node": error.node, "code": error.code})
        return replace(_saying(rpc, view, memory, "no answer"), reachable=False)


def _saying(rpc: Rpc, view: AgentView, memory: Memory, words: str) -> AgentView:
    """Noted of a revocation. Kept until it proves something: a message that came and went between two passes
    would be written again and again."""
    if isinstance(rpc, Grant):
        return view
    memory.said[view.node] = words
    return replace(view, said=words)


def checked(proof: control.Proof, nonce: bytes, boot_id: str) -> ProofView:
    """The proof with the digest over our nonce recomputed."""
    expected = nonce_digest(nonce, proof.baseline_digest, proof.candidate_digest, proof.boot_id)
    return ProofView(
        fence=proof.highest_fence,
        baseline_digest=proof.baseline_digest,
        candidate_digest=proof.candidate_digest,
        in_flight=proof.in_flight_candidate,
        valid=proof.nonce_digest == expected and proof.boot_id == boot_id,
    )
