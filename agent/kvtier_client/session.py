"""A session: rows and queries of one request go out as frames, outputs and receipts come back.

It exists between the wire and a model adapter: tensors to bytes, blocks of queries, deadlines, times of
the first and last token. It keeps no row and knows no model.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from kvtier.v1 import attention_pb2, common_pb2, evidence_pb2
from kvtier_client.client import MAX_MESSAGE_BYTES, AttentionClient
from kvtier_client.errors import KvtierError
from kvtier_client.stream import MAX_OUTSTANDING
from kvtier_core.errors import Reason

Arm = Literal["baseline", "candidate"]
_ARMS: dict[str, attention_pb2.Arm] = {
    "baseline": attention_pb2.ARM_BASELINE,
    "candidate": attention_pb2.ARM_CANDIDATE,
}
_FRAME_OVERHEAD = 64 * 1024
_MAX_RECEIPTS = 65_536
# How often one attend goes on over a new stream when its own is lost.
RECONNECTS = 2


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
    admission; a forced arm needs `probe`."""

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


@dataclass(frozen=True)
class StepReceipt:
    """What the agent says about one answer. `exactness`: EXACT, APPROXIMATE or
    EXACT_OVER_APPROXIMATE_HISTORY; `estimated_omitted_mass` is NaN without an estimator."""

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


class AttentionSession:
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
    ) -> None:
        self._client = client
        self.request = request
        if deadline_seconds <= 0 or grace_seconds < 0:
            raise KvtierError(Reason.BAD_ARGUMENT, f"a deadline of {deadline_seconds} + {grace_seconds} s")
        self._deadline = deadline_seconds
        self._grace = grace_seconds
        self._clock = clock
        g = request.geometry
        self._opened = client.open_session(
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
            )
        )
        self._assigned_at = clock()
        self._first_token: float | None = None
        self._last_token: float | None = None
        self.output_tokens = 0
        self.failure: KvtierError | None = None
        self._closed = False
        self._reconnects_left = 0
        self._receipts: deque[StepReceipt] = deque(maxlen=_MAX_RECEIPTS)
        try:
            self.block = self._block_tokens()
            self._stream = client.attend()
        except BaseException:
            # Nobody else knows it: the agent would keep its chunks until it has been idle for long.
            with contextlib.suppress(KvtierError):
                client.close_session(self._opened.session_id, self._opened.generation, request.tenant)
            raise

    @property
    def opened(self) -> attention_pb2.OpenSessionResponse:
        return self._opened

    @property
    def arm(self) -> Arm:
        return "candidate" if self._opened.arm == attention_pb2.ARM_CANDIDATE else "baseline"

    def attend(
        self, step: int, layer: int, position: int, q: Tensor, k: Tensor, v: Tensor, committed: int
    ) -> Tensor:
        """Hands over new rows and attends their queries; blocks of them if there are many.

        q [N, Hq, d], k, v [N, Hk, d] float32, of positions [position, position + N). Rows below
        `committed` are final. Returns [N, Hq, d]. Raises KvtierError.
        """
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise KvtierError(Reason.SESSION_UNKNOWN, "the session is closed")
        n = q.shape[0]
        out = torch.empty(q.shape, dtype=torch.float32)
        blocks = [(lo, min(n, lo + self.block)) for lo in range(0, n, self.block)]
        waiting: deque[tuple[int, int, attention_pb2.AttendFrame]] = deque()
        self._reconnects_left = RECONNECTS
        try:
            for lo, hi in blocks:
                if len(waiting) == MAX_OUTSTANDING:
                    self._collect(out, waiting)
                frame = self._frame(step, layer, position + lo, q[lo:hi], k[lo:hi], v[lo:hi], committed)
                self._stream.send(frame)
                waiting.append((lo, hi, frame))
            while waiting:
                self._collect(out, waiting)
        except KvtierError as error:
            self.failure = error
            raise
        return out

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
        return taken

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
        self._stream.close()
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
        fits = (MAX_MESSAGE_BYTES - _FRAME_OVERHEAD) // (heads * g.head_dim * 4)
        wanted = self._opened.query_block_tokens or fits
        if fits < 1:
            raise KvtierError(
                Reason.GEOMETRY_MISMATCH, "one token does not fit a message", {"heads": str(heads)}
            )
        return min(wanted, fits)

    def _frame(
        self, step: int, layer: int, position: int, q: Tensor, k: Tensor, v: Tensor, committed: int
    ) -> attention_pb2.AttendFrame:
        o = self._opened
        return attention_pb2.AttendFrame(
            session_id=o.session_id,
            generation=o.generation,
            boot_id=o.boot_id,
            tenant=self.request.tenant,
            step=step,
            layer=layer,
            first_row_position=position,
            k=_to_bytes(k),
            v=_to_bytes(v),
            first_query_position=position,
            q=_to_bytes(q),
            committed_frontier=committed,
            deadline_ms=max(1, int(self._deadline * 1000)),
        )

    def _receive(self, frames: Sequence[attention_pb2.AttendFrame]) -> attention_pb2.AttendAnswer:
        """The answer to the first of the frames that wait. When the stream is lost they are asked again on
        another one: the agent knows rows that it has by their bytes, and takes each once."""
        while True:
            try:
                return self._stream.receive(self._deadline + self._grace)
            except KvtierError:
                if not self._stream.lost or self._reconnects_left == 0:
                    raise
                self._reconnects_left -= 1
                self._stream.close()
                self._stream = self._client.attend()
                for frame in frames:
                    again = attention_pb2.AttendFrame()
                    again.CopyFrom(frame)
                    self._stream.send(again)

    def _collect(self, out: Tensor, waiting: deque[tuple[int, int, attention_pb2.AttendFrame]]) -> None:
        answer = self._receive([frame for _, _, frame in waiting])
        lo, hi, _ = waiting.popleft()
        part = out[lo:hi]
        if len(answer.out) != part.numel() * 4:
            raise KvtierError(
                Reason.FRAME_INVALID, f"{len(answer.out)} bytes of output, {part.numel() * 4} were due"
            )
        part.copy_(torch.frombuffer(bytearray(answer.out), dtype=torch.float32).view(part.shape))
        r = answer.receipt
        self._receipts.append(
            StepReceipt(
                step=answer.step,
                layer=answer.layer,
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
            )
        )


def new_session_root() -> str:
    """A random root id, for a request that continues no other."""
    return uuid.uuid4().hex


def _to_bytes(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()
