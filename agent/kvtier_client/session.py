"""A session: rows and queries of one request go out as frames, outputs and receipts come back.

It exists between the wire and a model adapter: identity, deadlines, receipts, times of the first and last
token. It keeps no row and knows no model.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from kvtier.local.frames import VERSION as LOCAL_VERSION
from kvtier.local.receipts import step_and_layer
from kvtier.v1 import attention_pb2, common_pb2, evidence_pb2
from kvtier_client.client import AttentionClient
from kvtier_client.edits import EditTarget, SessionEdits, fork
from kvtier_client.errors import KvtierError, from_detail
from kvtier_client.grpcwire import FRAME_OVERHEAD, MAX_MESSAGE_BYTES
from kvtier_client.localwire import receipt_of
from kvtier_client.pipe import AttendPipe, Part, deadline_ms_of
from kvtier_client.rowevidence import LayerGiven, RowEvidence, kinds_of, needs_of, weight_parts
from kvtier_client.wire import Answer, WireName
from kvtier_core.errors import Reason
from kvtier_core.receipts import SelectionFacts
from kvtier_core.rowevidence import Need

Arm = Literal["baseline", "candidate"]
_ARMS: dict[str, attention_pb2.Arm] = {
    "baseline": attention_pb2.ARM_BASELINE,
    "candidate": attention_pb2.ARM_CANDIDATE,
}
_MAX_RECEIPTS = 65_536


@dataclass(frozen=True)
class Geometry:
    """Of the model; rows and queries are float32."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class SessionRequest:
    """What a session is opened with. score_scale multiplies q.k; max_tokens bounds the context, for
    admission; a forced arm needs `probe`. gives: what this engine can send besides rows, of which the agent
    asks for what the session's selector needs; hidden_size: of a hidden state, 0 without any. fixed_context:
    rows [0, n) do not change, 0: those of the first step; None: nothing is said."""

    namespace: str
    name: str
    tenant: str
    model_fingerprint: str
    geometry: Geometry
    score_scale: float
    session_root_id: str
    max_tokens: int
    uid: str = ""
    request_class: str = ""
    probe: bool = False
    forced_arm: Arm | None = None
    traceparent: str = ""
    gives: frozenset[Need] = frozenset()
    hidden_size: int = 0
    fixed_context: int | None = None


@dataclass(frozen=True)
class StepReceipt:
    """What the agent says about one answer. `exactness`: EXACT, APPROXIMATE,
    EXACT_OVER_APPROXIMATE_HISTORY or EXACT_OVER_EDITED_HISTORY; `estimated_omitted_mass` is NaN without an
    estimator; `position_epoch`: of the session when it answered; `promised_bytes`: of bytes_by_tier, those
    that were on their way before the frame came; `shared_bytes_by_tier`: of bytes_by_tier, those that were
    read for another frame; `selection`: what a selector answered for the frame, None: none did."""

    step: int
    layer: int
    exactness: str
    arm: str
    manifest_digest: str
    support_digest: str
    frontier: int
    rows_attended: int
    bytes_by_tier: Mapping[str, int]
    plan: tuple[str, ...]
    simulated: bool
    stall_seconds: float
    producer_digest: str
    estimated_omitted_mass: float
    fallback: str
    plan_kind: str
    hidden_transfer_seconds: float
    exposed_transfer_seconds: float
    peak_buffer_bytes: int
    promised_bytes: int
    position_epoch: int
    selection: SelectionFacts | None = None
    shared_bytes_by_tier: Mapping[str, int] = field(default_factory=dict)


class AttentionSession(SessionEdits):
    """One open session and its stream. Use as a context manager, or call `close`.

    deadline_seconds: of each frame, at the agent; the client waits grace_seconds longer, so that the
    agent's typed answer wins over its own.
    Not thread-safe. When the stream is lost, an attend goes on over another one. When it fails all the same
    half-way through a step, the session's layers disagree about the frontier: `failure` is set and every
    later attend raises it.
    """

    def __init__(
        self,
        client: AttentionClient,
        request: SessionRequest,
        *,
        deadline_seconds: float = 30.0,
        grace_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        piped: bool = True,
        opened: attention_pb2.OpenSessionResponse | None = None,
    ) -> None:
        """piped: with a pipe of its own; without, a batch carries its frames. opened: by a fork, for this
        object to hold."""
        self._client = client
        self.request = request
        if deadline_seconds <= 0 or grace_seconds < 0:
            raise KvtierError(Reason.BAD_ARGUMENT, f"a deadline of {deadline_seconds} + {grace_seconds} s")
        self._deadline = deadline_seconds
        self._grace = grace_seconds
        self._lone_terms = deadline_ms_of(deadline_seconds), deadline_seconds + grace_seconds
        self._clock = clock
        g = request.geometry
        self._opened = opened or client.open_session(
            attention_pb2.OpenSessionRequest(
                cache=common_pb2.CacheRef(namespace=request.namespace, name=request.name, uid=request.uid),
                model_fingerprint=request.model_fingerprint,
                geometry=attention_pb2.Geometry(
                    layers=g.layers,
                    query_heads=g.query_heads,
                    kv_heads=g.kv_heads,
                    head_dim=g.head_dim,
                    dtype="float32",
                ),
                score_scale=request.score_scale,
                tenant=request.tenant,
                request_class=request.request_class,
                session_root_id=request.session_root_id,
                probe=request.probe,
                forced_arm=_ARMS[request.forced_arm] if request.forced_arm else attention_pb2.ARM_UNSPECIFIED,
                max_tokens=request.max_tokens,
                traceparent=request.traceparent,
                local_channel_version=0 if client.transport == "grpc" else LOCAL_VERSION,
                gives=kinds_of(request.gives, request.fixed_context is not None),
                hidden_size=request.hidden_size,
                fixed_context_tokens=request.fixed_context or 0,
            )
        )
        self.asked = needs_of(self._opened.evidence)
        self.asked_layers = frozenset(self._opened.evidence.layers)
        self._assigned_at = clock()
        self._first_token: float | None = None
        self._last_token: float | None = None
        self.output_tokens = 0
        self.failure: KvtierError | None = None
        # Grows with each edit; a frame that was sent before one is refused.
        self.position_epoch = 1
        self._closed = False
        # Undecoded: what holds the receipt, or the record that it came in.
        self._receipts: deque[Answer | bytes] = deque(maxlen=_MAX_RECEIPTS)
        self._note_receipt = self._receipts.append
        try:
            self.block = self._block_tokens()
            self._pipe: AttendPipe | None = None
            if piped:
                self._pipe = AttendPipe(client, (self,), client.transport, self.block_bytes)
        except BaseException:
            # Nobody else knows it: the agent would keep its chunks until it has been idle for long.
            with contextlib.suppress(KvtierError):
                client.close_session(self._opened.session_id, self._opened.generation, request.tenant)
            raise

    @property
    def opened(self) -> attention_pb2.OpenSessionResponse:
        return self._opened

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def transport(self) -> WireName:
        """What carries its frames now; a batch has the answer for its own."""
        return self.pipe.transport

    @property
    def why_grpc(self) -> str:
        """Why it is not the local channel; empty when it is."""
        return self.pipe.why_grpc

    @property
    def pipe(self) -> AttendPipe:
        if self._pipe is None:
            raise KvtierError(Reason.BAD_ARGUMENT, "a batch carries this session's frames")
        return self._pipe

    @property
    def block_bytes(self) -> int:
        """Of the tensors of a full block."""
        g = self.request.geometry
        return 4 * self.block * (g.query_heads + 2 * g.kv_heads) * g.head_dim

    @property
    def candidate_refused(self) -> KvtierError | None:
        """Why no candidate answers this session although its grant covers it; None: nothing is lacking."""
        opened = self._opened
        return from_detail(opened.candidate_refused) if opened.HasField("candidate_refused") else None

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and head dim of its rows."""
        g = self.request.geometry
        return g.query_heads, g.kv_heads, g.head_dim

    @property
    def arm(self) -> Arm:
        return "candidate" if self._opened.arm == attention_pb2.ARM_CANDIDATE else "baseline"

    def attend(
        self,
        step: int,
        layer: int,
        position: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        committed: int,
        next_layer_follows: bool = False,
        evidence: RowEvidence | None = None,
    ) -> Tensor:
        """Hands over new rows and attends their queries; blocks of them if there are many.

        q [N, Hq, d], k, v [N, Hk, d] float32, of positions [position, position + N). Rows below
        `committed` are final. next_layer_follows: a promise that the next layer's rows of these positions
        come next. evidence: what `asked` names. Returns [N, Hq, d]. Raises KvtierError.
        """
        if evidence is None and self._pipe is not None and self.failure is None and not self._closed:
            lone = self._pipe.lone
            if lone is not None:
                follows, terms, noted = next_layer_follows, self._lone_terms, self._note_receipt
                out = lone.attend(step, layer, position, q, k, v, committed, follows, *terms, noted)
                if isinstance(out, Tensor):
                    return out
                if out is not None:
                    self.failure = out
                    raise out
        part = self.part(step, layer, position, q, k, v, committed, next_layer_follows, evidence)
        return self.attend_part(part)

    def attend_part(self, part: Part) -> Tensor:
        """As `attend`, of what `part` made."""
        try:
            self.pipe.attend((part,), self._deadline, self._grace, note)
        except KvtierError as error:
            self.failure = error
            raise
        if part.failure is not None:
            self.failure = part.failure
            raise part.failure
        assert part.out is not None
        return part.out

    def part(
        self,
        step: int,
        layer: int,
        position: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        committed: int,
        next_layer_follows: bool = False,
        evidence: RowEvidence | None = None,
    ) -> Part:
        """What `attend` sends, for a pipe that several sessions share. Raises what ended the session."""
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise KvtierError(Reason.SESSION_UNKNOWN, "the session is closed")
        if not q.dtype == k.dtype == v.dtype == torch.float32:
            raise KvtierError(Reason.UNSUPPORTED, f"{q.dtype} queries and {k.dtype} rows: float32 is held")
        if not q.shape[0]:
            raise KvtierError(Reason.FRAME_INVALID, "no query")
        n = q.shape[0]
        heads, kv_heads, width = self.heads
        for name, x, count in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
            # The agent slices by its own geometry: rows of another would be read as something else.
            if x.shape != (n, count, width):
                message = f"{name} is {tuple(x.shape)}, the session's rows are {(n, count, width)}"
                raise KvtierError(Reason.GEOMETRY_MISMATCH, message)
        return Part(self, step, layer, position, q, k, v, committed, self.block, next_layer_follows, evidence)

    def give_weights(self, layers: Sequence[LayerGiven]) -> int:
        """Of the layers that `asked_layers` names; bytes that travelled, since what the agent has from
        another session is only named. Raises KvtierError."""
        send = partial(weight_parts, opened=self._opened, tenant=self.tenant)
        named = send(layers, fingerprint=self.request.model_fingerprint, with_data=False)
        missing = set(self._client.give_weights(named, self._deadline).missing)
        sent = 0
        for one in layers:
            if one.layer in missing:
                parts = send([one], fingerprint=self.request.model_fingerprint, with_data=True)
                self._client.give_weights(parts, self._deadline)
                sent += one.shape.size_bytes
        return sent

    def note(self, answer: Answer) -> None:
        """Keeps the receipt of an answer, undecoded."""
        self._receipts.append(answer)

    def fork(self) -> AttentionSession:
        """Another session of the same rows, which goes on by itself. Close both."""
        version = 0 if self._client.transport == "grpc" else LOCAL_VERSION
        target = self._edit_target()
        opened, edited = fork(
            self._client, target, traceparent=self.request.traceparent, local_channel_version=version
        )
        child = AttentionSession(
            self._client,
            self.request,
            deadline_seconds=self._deadline,
            grace_seconds=self._grace,
            clock=self._clock,
            opened=opened,
        )
        child.position_epoch = edited.position_epoch
        return child

    def _edit_target(self) -> EditTarget:
        if self._closed:
            raise KvtierError(Reason.SESSION_UNKNOWN, "the session is closed")
        return EditTarget(self._opened, self.tenant, self.position_epoch, self._deadline)

    def _editor(self) -> AttentionClient:
        return self._client

    def _go_on(self) -> None:
        if self._pipe is not None:
            self._pipe.renew()

    def token_done(self) -> None:
        """Called once per forward pass, when its last layer is answered: one output token each."""
        now = self._clock()
        self._first_token = self._first_token if self._first_token is not None else now
        self._last_token = now
        self.output_tokens += 1

    def take_receipts(self) -> list[StepReceipt]:
        """Receipts since the last call, oldest first; only the newest 65,536 are kept."""
        taken = list(self._receipts)
        self._receipts.clear()
        return [_step_receipt(answer) for answer in taken]

    def report_outcome(
        self,
        *,
        cancelled: bool = False,
        probe_gate: str = "",
        probe_set_digest: str = "",
        prompt_digest: str = "",
        difference: float | None = None,
    ) -> attention_pb2.ReportOutcomeResponse:
        """Latency and tokens of this request, in seconds since it was assigned; for a probe also the pair
        score(exact) - score(candidate), or `missing` when `difference` is None and a gate is named."""
        report = attention_pb2.ReportOutcomeRequest(
            session_id=self._opened.session_id,
            generation=self._opened.generation,
            tenant=self.request.tenant,
            output_tokens=self.output_tokens,
            first_token_seconds=self._since(self._first_token),
            last_token_seconds=self._since(self._last_token),
            cancelled=cancelled,
        )
        if probe_gate:
            report.probe.CopyFrom(
                evidence_pb2.ProbePair(
                    gate=probe_gate,
                    probe_set_digest=probe_set_digest,
                    prompt_digest=prompt_digest,
                    difference=difference or 0.0,
                    missing=difference is None,
                )
            )
        return self._client.report_outcome(report)

    def close(self) -> int:
        """Ends stream and session; returns the rows released. Idempotent. A session the agent no longer
        knows is closed already."""
        if self._closed:
            return 0
        self._closed = True
        if self._pipe is not None:
            self._pipe.close()
        try:
            o = self._opened
            return self._client.close_session(o.session_id, o.generation, self.request.tenant).rows_released
        except KvtierError as error:
            if error.reason in (Reason.SESSION_UNKNOWN, Reason.GENERATION_STALE):
                return 0
            raise

    def __enter__(self) -> AttentionSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except KvtierError:
            # What ended the block matters more than an agent that is gone with its sessions.
            if error is None:
                raise

    def _since(self, at: float | None) -> float:
        return 0.0 if at is None else at - self._assigned_at

    def _block_tokens(self) -> int:
        """Queries a frame: what the agent asks for, less where that would exceed a message. Where a block
        ends changes no bit of an answer."""
        g = self.request.geometry
        heads = max(g.query_heads + 2 * g.kv_heads, 1)
        fits = (MAX_MESSAGE_BYTES - FRAME_OVERHEAD) // (heads * g.head_dim * 4)
        wanted = self._opened.query_block_tokens or fits
        if fits < 1:
            raise KvtierError(
                Reason.GEOMETRY_MISMATCH, "one token does not fit a message", {"heads": str(heads)}
            )
        return min(wanted, fits)


def note(part: Part, answer: Answer) -> None:
    """Hands an answer to its part's session."""
    sender = part.sender
    assert isinstance(sender, AttentionSession)
    sender.note(answer)


def _step_receipt(answer: Answer | bytes) -> StepReceipt:
    if isinstance(answer, bytes):
        (step, layer), r = step_and_layer(answer), receipt_of(answer)
    else:
        step, layer, r = answer.step, answer.layer, answer.receipt()
    return StepReceipt(
        step=step,
        layer=layer,
        exactness=attention_pb2.ExactnessClass.Name(r.exactness),
        arm="candidate" if r.arm == attention_pb2.ARM_CANDIDATE else "baseline",
        manifest_digest=r.manifest_digest,
        support_digest=r.support_digest,
        frontier=r.frontier,
        rows_attended=r.rows_attended,
        bytes_by_tier=dict(r.bytes_by_tier),
        plan=tuple(r.plan),
        simulated=r.simulated,
        stall_seconds=r.stall_seconds,
        producer_digest=r.producer_digest,
        estimated_omitted_mass=r.estimated_omitted_mass,
        fallback=r.fallback,
        plan_kind=r.plan_kind,
        hidden_transfer_seconds=r.hidden_transfer_seconds,
        exposed_transfer_seconds=r.exposed_transfer_seconds,
        peak_buffer_bytes=r.peak_buffer_bytes,
        promised_bytes=r.promised_bytes,
        position_epoch=r.position_epoch,
        selection=_selection(r.selection) if r.HasField("selection") else None,
        shared_bytes_by_tier=dict(r.shared_bytes_by_tier),
    )


def _selection(told: attention_pb2.SelectionReceipt) -> SelectionFacts:
    return SelectionFacts(**{one.name: getattr(told, one.name) for one in fields(SelectionFacts)})


def new_session_root() -> str:
    """A random root id, for a request that continues no other."""
    return uuid.uuid4().hex
