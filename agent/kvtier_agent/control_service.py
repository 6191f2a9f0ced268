"""Control on the wire: converts, calls the node, converts back. It decides nothing."""

from __future__ import annotations

import asyncio
import logging
from importlib.metadata import version

from kvtier.v1 import control_pb2, control_pb2_grpc
from kvtier_agent import convert, evidence_convert
from kvtier_agent.admission_wire import admission_message, admission_terms
from kvtier_agent.commands import Command, ProofFacts
from kvtier_agent.errors import to_detail
from kvtier_agent.manifests import parse_manifest
from kvtier_agent.node import Node
from kvtier_agent.plan_report import plan_message
from kvtier_agent.rpc import RpcScope, ServicerContext, metadata_of
from kvtier_core.errors import CoreError, Reason
from kvtier_crds.manifest import NUMERICS_VERSION

AGENT_VERSION = version("kvtier")
log = logging.getLogger(__name__)
_MAX_RENEWALS = 1024
_MAX_READS = 256
_ENOUGH_BYTES = 1 << 20


class ControlService(control_pb2_grpc.ControlServicer):
    """Operator to agent."""

    def __init__(self, node: Node, scope: RpcScope) -> None:
        self._node = node
        self._scope = scope

    async def GetState(
        self, request: control_pb2.GetStateRequest, context: ServicerContext
    ) -> control_pb2.GetStateResponse:
        return await self._scope.run("Control.GetState", context, self._get_state(request))

    async def ApplyBaseline(
        self, request: control_pb2.ApplyBaselineRequest, context: ServicerContext
    ) -> control_pb2.ApplyBaselineResponse:
        return await self._scope.run("Control.ApplyBaseline", context, self._apply(request), finish=True)

    async def RemoveCache(
        self, request: control_pb2.RemoveCacheRequest, context: ServicerContext
    ) -> control_pb2.RemoveCacheResponse:
        return await self._scope.run("Control.RemoveCache", context, self._remove(request), finish=True)

    async def Grant(
        self, request: control_pb2.GrantRequest, context: ServicerContext
    ) -> control_pb2.GrantResponse:
        traceparent = metadata_of(context).get("traceparent", "")
        return await self._scope.run("Control.Grant", context, self._grant(request, traceparent), finish=True)

    async def Renew(
        self, request: control_pb2.RenewRequest, context: ServicerContext
    ) -> control_pb2.RenewResponse:
        return await self._scope.run("Control.Renew", context, self._renew(request))

    async def Revoke(
        self, request: control_pb2.RevokeRequest, context: ServicerContext
    ) -> control_pb2.RevokeResponse:
        return await self._scope.run("Control.Revoke", context, self._revoke(request), finish=True)

    async def Prove(
        self, request: control_pb2.ProveRequest, context: ServicerContext
    ) -> control_pb2.ProveResponse:
        return await self._scope.run("Control.Prove", context, self._prove(request))

    async def ReadEvidence(
        self, request: control_pb2.ReadEvidenceRequest, context: ServicerContext
    ) -> control_pb2.ReadEvidenceResponse:
        return await self._scope.run("Control.ReadEvidence", context, self._read_evidence(request))

    async def ReadEvidenceMany(
        self, request: control_pb2.ReadEvidenceManyRequest, context: ServicerContext
    ) -> control_pb2.ReadEvidenceManyResponse:
        return await self._scope.run("Control.ReadEvidenceMany", context, self._read_many(request))

    async def _get_state(self, request: control_pb2.GetStateRequest) -> control_pb2.GetStateResponse:
        node = self._node
        wanted = frozenset(request.cache_uids)
        await node.refresh_reports(wanted)
        answer = control_pb2.GetStateResponse(
            node=node.name,
            boot_id=node.boot_id,
            agent_version=AGENT_VERSION,
            numerics_version=NUMERICS_VERSION,
            manifest_set_digest=node.manifest_set_digest(),
            draining=node.draining,
            tiers=[convert.tier_state(report) for report in node.tier_reports()],
            stamp_ns=node.clock(),
        )
        told = sorted(wanted & node.caches.keys()) if wanted else sorted(node.caches)
        for uid in told:
            host = node.caches[uid]
            running, candidate = node.running.told(host, answer.stamp_ns)
            state = control_pb2.CacheState(
                cache=convert.cache_ref(host.name),
                highest_fence=node.highest_fence(uid),
                baseline_digest=host.baseline_digest,
                running_digest=running,
                sessions=len(host.sessions),
                admission=admission_message(host.admission),
            )
            for used in host.usage:
                state.used_by_tier[used.class_name] = used.used_bytes
                state.pinned_by_tier[used.class_name] = used.pinned_bytes
            if host.plan is not None:
                state.plan.CopyFrom(plan_message(host.plan))
            lease = host.enforcement.lease()
            held = "" if lease is None else host.runner.engine.selector_digest(lease.terms)
            state.indexes.extend(convert.index_states(host.indexes, held))
            if lease is not None:
                state.candidate.digest = lease.terms.candidate_digest
                state.candidate.running_digest = candidate
                state.candidate.fence.CopyFrom(convert.fence_message(lease.terms.fence))
                state.candidate.remaining_ms = lease.remaining_ms(node.clock())
            returned = host.enforcement.returned
            if returned is not None:
                state.returned_reason = returned.reason.value
                state.returned_fence = returned.fence
                state.returned_rollout_uid = returned.rollout_uid
            answer.caches.append(state)
        return answer

    async def _apply(self, request: control_pb2.ApplyBaselineRequest) -> control_pb2.ApplyBaselineResponse:
        command = _command(request)
        running = await self._node.apply_baseline(
            command, request.manifest, request.digest, request.key_secret, admission_terms(request)
        )
        return control_pb2.ApplyBaselineResponse(running_digest=running, boot_id=self._node.boot_id)

    async def _remove(self, request: control_pb2.RemoveCacheRequest) -> control_pb2.RemoveCacheResponse:
        ended, erased = await self._node.remove_cache(_command(request))
        return control_pb2.RemoveCacheResponse(
            sessions_ended=ended,
            key_erasures=[
                control_pb2.KeyErasure(tier_class=name, file=one.file, keys=one.keys) for name, one in erased
            ],
        )

    async def _grant(self, request: control_pb2.GrantRequest, traceparent: str) -> control_pb2.GrantResponse:
        candidate = parse_manifest(request.manifest, request.digest)
        terms = convert.grant_terms(request, candidate)
        window = convert.window_terms(request, terms)
        digest, lease = await self._node.grant(
            _command(request), terms, candidate, window, traceparent, request.sent_ns
        )
        now = self._node.clock()
        return control_pb2.GrantResponse(
            candidate_digest=digest,
            boot_id=self._node.boot_id,
            remaining_ms=lease.remaining_ms(now),
            stamp_ns=now,
        )

    async def _renew(self, request: control_pb2.RenewRequest) -> control_pb2.RenewResponse:
        if len(request.items) > _MAX_RENEWALS:
            raise CoreError(Reason.BAD_ARGUMENT, f"items: at most {_MAX_RENEWALS} a call")
        self._node.check_boot(request.boot_id)
        answer = control_pb2.RenewResponse(boot_id=self._node.boot_id)
        for item in request.items:
            result = answer.results.add(cache=item.cache)
            try:
                lease = await self._node.renew(
                    convert.cache_name(item.cache),
                    convert.fence_token(item.fence),
                    item.digest,
                    item.ttl_ms,
                    sent_ns=request.sent_ns,
                )
            except CoreError as error:
                result.error.CopyFrom(to_detail(error))
                continue
            result.renewed = True
            result.remaining_ms = lease.remaining_ms(self._node.clock())
        answer.stamp_ns = self._node.clock()
        return answer

    async def _revoke(self, request: control_pb2.RevokeRequest) -> control_pb2.RevokeResponse:
        proof = await self._node.revoke(_command(request), request.reason, request.nonce)
        return control_pb2.RevokeResponse(proof=self._proof(proof))

    async def _prove(self, request: control_pb2.ProveRequest) -> control_pb2.ProveResponse:
        proof = await self._node.prove(
            convert.cache_name(request.cache), request.fence.value, request.boot_id, request.nonce
        )
        return control_pb2.ProveResponse(proof=self._proof(proof))

    async def _read_many(
        self, request: control_pb2.ReadEvidenceManyRequest
    ) -> control_pb2.ReadEvidenceManyResponse:
        """Stops before its answer is too large for the caller's side of a channel, but never at the first."""
        if len(request.items) > _MAX_READS:
            raise CoreError(Reason.BAD_ARGUMENT, f"items: at most {_MAX_READS} a call")
        answer = control_pb2.ReadEvidenceManyResponse()
        size = 0
        for item in request.items:
            result = answer.results.add()
            try:
                result.evidence.CopyFrom(await self._read_evidence(item))
            except CoreError as error:
                result.error.CopyFrom(to_detail(error))
            except Exception:
                log.exception("an item of Control.ReadEvidenceMany failed")
                failed = CoreError(Reason.INTERNAL, "internal failure; the agent's log has the details")
                result.error.CopyFrom(to_detail(failed))
            size += result.ByteSize()
            if size > _ENOUGH_BYTES and len(answer.results) > 1:
                del answer.results[-1]
                break
            # Engines wait for the same loop, and the deadline is seen only where something waits.
            await asyncio.sleep(0)
        return answer

    async def _read_evidence(
        self, request: control_pb2.ReadEvidenceRequest
    ) -> control_pb2.ReadEvidenceResponse:
        host = self._node.check_read(convert.cache_name(request.cache), request.fence.value)
        delta = host.evidence.read(convert.window_of(request.window), request.epoch, request.ack_seq)
        return evidence_convert.delta_message(delta)

    def _proof(self, facts: ProofFacts) -> control_pb2.Proof:
        return control_pb2.Proof(
            node=self._node.name,
            boot_id=self._node.boot_id,
            baseline_digest=facts.baseline_digest,
            candidate_digest=facts.candidate_digest,
            in_flight_candidate=facts.in_flight_candidate,
            highest_fence=facts.highest_fence,
            nonce_digest=facts.nonce_digest,
        )


def _command(
    request: control_pb2.ApplyBaselineRequest
    | control_pb2.RemoveCacheRequest
    | control_pb2.GrantRequest
    | control_pb2.RevokeRequest,
) -> Command:
    return Command(
        convert.cache_name(request.cache),
        convert.fence_token(request.fence),
        request.boot_id,
        convert.command_content(request),
    )
