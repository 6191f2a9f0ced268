"""Wire messages to the process's own frozen values and back; decides nothing but well-formedness."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from decimal import Decimal, InvalidOperation
from typing import Protocol

from google.protobuf.message import Message

from kvtier.local.receipts import AnswerPacker
from kvtier.v1 import attention_pb2, common_pb2, control_pb2, evidence_pb2
from kvtier_agent.cachesession import CacheName, FrameAnswer
from kvtier_agent.engine_port import ExactnessClass, FrameInput, FrameReceipt, TierReport
from kvtier_agent.evidence_port import GateTerms, Outcome, ProbeResult, WindowTerms
from kvtier_agent.rowevidence import EvidenceAsked
from kvtier_agent.rowevidence_convert import evidence_input
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import SelectionFacts, StepReceipt
from kvtier_core.release.enforcement import ServedArm
from kvtier_core.release.leases import BlastRadius, FenceToken, GrantTerms
from kvtier_core.selectors.lifecycle.works import IndexState
from kvtier_crds.manifest import RuntimeManifest
from kvtier_evidence.window import WindowKey

_STAGES = frozenset({"Off", "Shadow", "Canary", "Ramp", "Full", "ExactBaseline"})
# Left out of a command's content: they may differ between repeats of one command (release.md).
_NOT_CONTENT = ("nonce", "boot_id", "sent_ns")

_EXACTNESS_NUMBER = {kind: attention_pb2.ExactnessClass.Value(kind.value) for kind in ExactnessClass}
_MOST_INDEXES = 16
_SELECTION = tuple(field.name for field in fields(SelectionFacts))
_NOT_NEGATIVE = (
    *("step", "first_row_position", "first_query_position"),
    *("committed_frontier", "deadline_ms", "position_epoch"),
)

ARM_TO_WIRE = {
    ServedArm.BASELINE: attention_pb2.ARM_BASELINE,
    ServedArm.CANDIDATE: attention_pb2.ARM_CANDIDATE,
}
ARM_FROM_WIRE: Mapping[int, ServedArm | None] = {
    attention_pb2.ARM_UNSPECIFIED: None,
    attention_pb2.ARM_BASELINE: ServedArm.BASELINE,
    attention_pb2.ARM_CANDIDATE: ServedArm.CANDIDATE,
}


def cache_name(ref: common_pb2.CacheRef) -> CacheName:
    return CacheName(ref.namespace, ref.name, ref.uid)


def cache_ref(name: CacheName) -> common_pb2.CacheRef:
    return common_pb2.CacheRef(namespace=name.namespace, name=name.name, uid=name.uid)


def fence_token(fence: common_pb2.Fence) -> FenceToken:
    """Raises BAD_ARGUMENT for an unknown stage or negative numbers."""
    stage = fence.stage or "Off"
    if stage not in _STAGES:
        raise CoreError(Reason.BAD_ARGUMENT, f"fence.stage {stage!r} must be one of {sorted(_STAGES)}")
    if fence.attempt < 0 or fence.step < 0:
        raise CoreError(Reason.BAD_ARGUMENT, "fence.attempt and fence.step must not be negative")
    return FenceToken(fence.value, fence.rollout_uid, fence.attempt, stage, fence.step)


def fence_message(token: FenceToken) -> common_pb2.Fence:
    return common_pb2.Fence(
        value=token.value,
        rollout_uid=token.rollout_uid,
        attempt=token.attempt,
        stage=token.stage,
        step=token.step,
    )


def command_content(message: Message) -> str:
    """sha256 hex of a command's content: deterministic bytes without nonce, deadline and boot id."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name in _NOT_CONTENT:
        if name in copy.DESCRIPTOR.fields_by_name:
            copy.ClearField(name)
    kind = copy.DESCRIPTOR.full_name.encode()
    return hashlib.sha256(kind + b"\0" + copy.SerializeToString(deterministic=True)).hexdigest()


def index_states(states: Sequence[IndexState], held: str) -> list[control_pb2.IndexState]:
    """That of the candidate's selector, whose digest is `held`, first."""
    ordered = sorted(states, key=lambda one: one.name.selector_digest != held)
    return [
        control_pb2.IndexState(
            family=one.name.family,
            selector_digest=one.name.selector_digest,
            of_candidate=one.name.selector_digest == held,
            ready=one.ready,
            building=one.building,
            refused=one.refused,
            hidden_seconds=one.counted.hidden_seconds,
            exposed_seconds=one.counted.exposed_seconds,
            index_bytes=one.index_bytes,
            waiting_bytes=one.waiting_bytes,
            builds=one.counted.builds,
            appends=one.counted.appends,
            failures=one.counted.failures,
            refusals=one.counted.refusals,
        )
        for one in ordered[:_MOST_INDEXES]
    ]


def grant_terms(request: control_pb2.GrantRequest, candidate: RuntimeManifest) -> GrantTerms:
    """Raises BAD_ARGUMENT naming the field."""
    terms = GrantTerms(
        fence=fence_token(request.fence),
        candidate_digest=request.digest,
        baseline_digest=request.baseline_digest,
        ttl_ms=request.ttl_ms,
        traffic_fraction=_decimal("traffic_fraction", request.traffic_fraction),
        sample_fraction=_decimal("sample_fraction", request.sample_fraction),
        blast_radius=BlastRadius(
            frozenset(request.blast_radius.tenants), frozenset(request.blast_radius.request_classes)
        ),
        selector=candidate.selector,
        approved=request.approved,
        fallbacks=frozenset(candidate.contract.allowed_fallbacks),
    )
    terms.check()
    return terms


def window_terms(request: control_pb2.GrantRequest, terms: GrantTerms) -> WindowTerms:
    """Raises BAD_ARGUMENT for times below 0."""
    for name in ("settle_ms", "warmup_ms"):
        if getattr(request, name) < 0:
            raise CoreError(Reason.BAD_ARGUMENT, f"{name} must not be negative")
    return WindowTerms(
        key=window_of(request.window),
        gates=tuple(
            GateTerms(gate.name, gate.metric, gate.quantile, gate.limit, gate.pair_threshold)
            for gate in request.gates
        ),
        fraction=float(terms.traffic_fraction),
        settle_ms=request.settle_ms,
        warmup_ms=request.warmup_ms,
    )


def window_of(key: evidence_pb2.WindowKey) -> WindowKey:
    return WindowKey(
        rollout_uid=key.rollout_uid,
        attempt=key.attempt,
        stage=key.stage,
        step=key.step,
        candidate_digest=key.candidate_digest,
        baseline_digest=key.baseline_digest,
        gates_digest=key.gates_digest,
        opening_fence=key.opening_fence,
    )


def window_key(window: WindowKey) -> evidence_pb2.WindowKey:
    return evidence_pb2.WindowKey(
        rollout_uid=window.rollout_uid,
        attempt=window.attempt,
        stage=window.stage,
        step=window.step,
        candidate_digest=window.candidate_digest,
        baseline_digest=window.baseline_digest,
        gates_digest=window.gates_digest,
        opening_fence=window.opening_fence,
    )


def geometry_message(manifest: RuntimeManifest) -> attention_pb2.Geometry:
    geometry = manifest.model.geometry
    return attention_pb2.Geometry(
        layers=geometry.layers,
        query_heads=geometry.query_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=geometry.dtype.value,
    )


def tier_state(report: TierReport) -> control_pb2.TierState:
    return control_pb2.TierState(
        tier_class=report.class_name,
        medium=report.medium,
        simulated=report.simulated,
        capacity_bytes=report.capacity_bytes,
        used_bytes=report.used_bytes,
        pinned_bytes=report.pinned_bytes,
        read_bytes_per_second=report.read_bytes_per_second,
        write_bytes_per_second=report.write_bytes_per_second,
        probes=dict(report.probes),
        condition=report.condition,
    )


class FrameNumbers(Protocol):
    """What every form of a frame has."""

    @property
    def layer(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def first_row_position(self) -> int: ...
    @property
    def first_query_position(self) -> int: ...
    @property
    def committed_frontier(self) -> int: ...
    @property
    def deadline_ms(self) -> int: ...
    @property
    def position_epoch(self) -> int: ...


def check_frame_numbers(frame: FrameNumbers, manifest: RuntimeManifest) -> None:
    """Raises FRAME_INVALID naming the field that is out of range."""
    layers = manifest.model.geometry.layers
    if not 0 <= frame.layer < layers:
        raise CoreError(Reason.FRAME_INVALID, f"layer {frame.layer} must be in [0, {layers})")
    for name in _NOT_NEGATIVE:
        if getattr(frame, name) < 0:
            raise CoreError(Reason.FRAME_INVALID, f"{name} must not be negative")


def frame_input(
    frame: attention_pb2.AttendFrame,
    manifest: RuntimeManifest,
    deadline: float | None = None,
    asked: EvidenceAsked | None = None,
) -> tuple[FrameInput, int]:
    """The frame and its number of queries; raises FRAME_INVALID naming the field whose length is wrong.
    `deadline`: seconds on the engine's clock, since the frame's own counts from its receipt. asked: what its
    session asks for beside rows."""
    geometry = manifest.model.geometry
    check_frame_numbers(frame, manifest)
    row_bytes = geometry.kv_heads * geometry.head_dim * 4
    query_bytes = geometry.query_heads * geometry.head_dim * 4
    # Each reading of a bytes field copies it, up to megabytes in a prefill.
    k, v, q = frame.k, frame.v, frame.q
    if len(k) != len(v) or len(k) % row_bytes:
        message = f"k has {len(k)} bytes and v {len(v)}; both must be a multiple of {row_bytes}"
        raise CoreError(Reason.FRAME_INVALID, message)
    if len(q) % query_bytes or not q:
        message = f"q has {len(q)} bytes; it must be a positive multiple of {query_bytes}"
        raise CoreError(Reason.FRAME_INVALID, message)
    queries = len(q) // query_bytes
    converted = FrameInput(
        session_id=frame.session_id,
        generation=frame.generation,
        step=frame.step,
        layer=frame.layer,
        first_row_position=frame.first_row_position,
        k=k,
        v=v,
        first_query_position=frame.first_query_position,
        q=q,
        committed_frontier=frame.committed_frontier,
        deadline=deadline,
        position_epoch=frame.position_epoch,
        next_layer_follows=frame.next_layer_follows,
        evidence=evidence_input(frame, queries, asked) if frame.HasField("evidence") else None,
    )
    return converted, queries


def answer_message(frame: attention_pb2.AttendFrame, answer: FrameAnswer) -> attention_pb2.AttendAnswer:
    receipt = answer.result.receipt
    return attention_pb2.AttendAnswer(
        sequence=frame.sequence,
        step=frame.step,
        layer=frame.layer,
        out=answer.result.out,
        receipt=attention_pb2.Receipt(
            exactness=receipt.exactness.value,
            arm=ARM_TO_WIRE[answer.arm],
            manifest_digest=receipt.manifest_digest,
            support_digest=receipt.support_digest,
            frontier=receipt.frontier,
            rows_attended=receipt.rows_attended,
            bytes_by_tier=dict(receipt.bytes_by_tier),
            plan=list(receipt.plan),
            simulated=receipt.simulated,
            stall_seconds=receipt.stall_seconds,
            producer_digest=receipt.producer_digest,
            estimated_omitted_mass=receipt.estimated_omitted_mass,
            fallback=answer.fallback,
            snapshot_generation=receipt.snapshot_generation,
            position_epoch=receipt.position_epoch,
            plan_kind=receipt.plan_kind,
            hidden_transfer_seconds=receipt.hidden_seconds,
            exposed_transfer_seconds=receipt.stall_seconds,
            peak_buffer_bytes=receipt.peak_buffer_bytes,
            promised_bytes=receipt.promised_bytes,
            selection=_selection(receipt.selection),
            shared_bytes_by_tier=receipt.shared_bytes_by_tier,
        ),
    )


def _selection(facts: SelectionFacts | None) -> attention_pb2.SelectionReceipt | None:
    """Names equal the message's."""
    if facts is None:
        return None
    return attention_pb2.SelectionReceipt(**{name: getattr(facts, name) for name in _SELECTION})


def _other_fields(receipt: FrameReceipt | StepReceipt) -> bytes:
    """A serialized Receipt of what the local channel's record has no place for."""
    told = attention_pb2.Receipt(
        selection=_selection(receipt.selection), shared_bytes_by_tier=receipt.shared_bytes_by_tier
    )
    return told.SerializeToString()


def packed_answer(
    packer: AnswerPacker, sequence: int, step: int, layer: int, out_bytes: int, answer: FrameAnswer
) -> bytes:
    """An answer's record on a local channel; its receipt says the same as `answer_message`'s."""
    receipt = answer.result.receipt
    stall = receipt.stall_seconds
    return packer.pack(
        sequence,
        step,
        layer,
        out_bytes,
        _EXACTNESS_NUMBER[receipt.exactness],
        ARM_TO_WIRE[answer.arm],
        receipt.simulated,
        receipt.manifest_digest,
        receipt.support_digest,
        receipt.producer_digest,
        receipt.frontier,
        receipt.rows_attended,
        receipt.snapshot_generation,
        receipt.position_epoch,
        receipt.peak_buffer_bytes,
        receipt.promised_bytes,
        stall,
        receipt.estimated_omitted_mass,
        receipt.hidden_seconds,
        stall,
        receipt.bytes_by_tier,
        tuple(receipt.plan),
        answer.fallback,
        receipt.plan_kind,
        b"" if receipt.selection is None and not receipt.shared_bytes_by_tier else _other_fields(receipt),
    )


def outcome_of(request: attention_pb2.ReportOutcomeRequest) -> Outcome:
    """Raises BAD_ARGUMENT for times that no engine can have seen."""
    first, last = request.first_token_seconds, request.last_token_seconds
    if request.output_tokens < 0 or not (0 <= first < float("inf") and 0 <= last < float("inf")):
        raise CoreError(Reason.BAD_ARGUMENT, "output_tokens and token times must be finite and not negative")
    if request.output_tokens > 0 and last < first:
        raise CoreError(Reason.BAD_ARGUMENT, f"last_token_seconds {last} is before the first token's {first}")
    probe = None
    if request.HasField("probe"):
        pair = request.probe
        if not pair.missing and not -1 <= pair.difference <= 1:
            raise CoreError(Reason.BAD_ARGUMENT, f"probe.difference {pair.difference} must be in [-1, 1]")
        probe = ProbeResult(
            pair.gate, pair.probe_set_digest, pair.prompt_digest, pair.difference, pair.missing
        )
    return Outcome(request.output_tokens, first, last, request.cancelled, probe)


def _decimal(name: str, text: str) -> Decimal:
    try:
        return Decimal(text or "0")
    except InvalidOperation as error:
        raise CoreError(Reason.BAD_ARGUMENT, f"{name} {text!r} is not a decimal") from error
