"""A reference Attention servicer: rows in RAM, chunks of 256 merged ascending, typed refusals.

It exists so that the client is proved without an agent, and to say what the wire means. It serves one
cache, enforces the order of frames, and can be told to misbehave.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from kvtier.v1 import attention_pb2, attention_pb2_grpc, common_pb2
from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.state import finalize, merge_ascending

CHUNK = 256
FINGERPRINT = "sha256:" + "ab" * 32


@dataclass
class Session:
    request: attention_pb2.OpenSessionRequest
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    step: int = 0
    frames: list[tuple[int, int, int, int, int]] = field(default_factory=list)


class Refusal(Exception):
    def __init__(self, reason: int, message: str, code: grpc.StatusCode) -> None:
        self.detail = common_pb2.ErrorDetail(reason=reason, message=message, facts={"by": "fake"})
        self.code = code


Misbehave = Callable[[attention_pb2.AttendFrame, attention_pb2.AttendAnswer], attention_pb2.AttendAnswer]


class FakeAgent(attention_pb2_grpc.AttentionServicer):
    """`misbehave` may change, delay or refuse each answer; `block` is the query block it asks for; of the
    frames numbered in `lost` (from 1, over all streams) the rows are taken and the stream is cut. `wanted`:
    the evidence that sessions are asked for; `weights`: what came of it, by layer."""

    def __init__(self, block: int = 256) -> None:
        self.block = block
        self.sessions: dict[str, Session] = {}
        self.outcomes: list[attention_pb2.ReportOutcomeRequest] = []
        self.closed: list[str] = []
        self.refuse_close = False
        self.lost: frozenset[int] = frozenset()
        self.streams = 0
        self.received = 0
        self.misbehave: Misbehave = lambda frame, answer: answer
        self.wanted: attention_pb2.EvidenceWanted | None = None
        self.weights: dict[int, tuple[attention_pb2.LayerWeightsHeader, bytes]] = {}

    def DescribeCache(self, request: Any, context: Any) -> attention_pb2.DescribeCacheResponse:
        return attention_pb2.DescribeCacheResponse(cache=request.cache, model_fingerprint=FINGERPRINT)

    def OpenSession(self, request: Any, context: Any) -> attention_pb2.OpenSessionResponse:
        if request.model_fingerprint != FINGERPRINT:
            self._abort(context, common_pb2.MODEL_MISMATCH, "another model", "FAILED_PRECONDITION")
        g = request.geometry
        empty = [torch.empty(0, g.kv_heads, g.head_dim) for _ in range(2 * g.layers)]
        key = uuid.uuid4().hex
        self.sessions[key] = Session(request, empty[: g.layers], empty[g.layers :])
        arm = request.forced_arm or attention_pb2.ARM_BASELINE
        return attention_pb2.OpenSessionResponse(
            session_id=key,
            generation=1,
            boot_id="boot",
            arm=arm,
            query_block_tokens=self.block,
            evidence=self.wanted,
        )

    def GiveWeights(self, parts: Iterator[Any], context: Any) -> attention_pb2.GiveWeightsResponse:
        answer = attention_pb2.GiveWeightsResponse()
        for part in parts:
            if part.HasField("header"):
                header = part.header
                if not header.size_bytes:
                    known = header.layer in self.weights
                    (answer.bound if known else answer.missing).append(header.layer)
                    continue
                self.weights[header.layer] = header, b""
            else:
                held, data = self.weights[header.layer]
                self.weights[header.layer] = held, data + part.data
        return answer

    def Attend(self, frames: Iterator[Any], context: Any) -> Iterator[attention_pb2.AttendAnswer]:
        self.streams += 1
        for frame in frames:
            self.received += 1
            answer = attention_pb2.AttendAnswer(sequence=frame.sequence, step=frame.step, layer=frame.layer)
            try:
                self._attend(frame, answer)
                if self.received in self.lost:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
                yield self.misbehave(frame, answer)
            except Refusal as refusal:
                answer.ClearField("out")
                answer.error.CopyFrom(refusal.detail)
                yield answer

    def AttendMany(self, messages: Iterator[Any], context: Any) -> Iterator[attention_pb2.AttendAnswers]:
        for message in messages:
            answers = [next(self.Attend(iter([frame]), context)) for frame in message.frames]
            yield attention_pb2.AttendAnswers(answers=answers)

    def CloseSession(self, request: Any, context: Any) -> attention_pb2.CloseSessionResponse:
        if self.refuse_close:
            self._abort(context, common_pb2.INTERNAL, "cannot close", "INTERNAL")
        session = self.sessions.pop(request.session_id, None)
        if session is None:
            self._abort(context, common_pb2.SESSION_UNKNOWN, "no such session", "NOT_FOUND")
        self.closed.append(request.session_id)
        return attention_pb2.CloseSessionResponse(rows_released=sum(k.shape[0] for k in session.k))

    def ReportOutcome(self, request: Any, context: Any) -> attention_pb2.ReportOutcomeResponse:
        self.outcomes.append(request)
        return attention_pb2.ReportOutcomeResponse(counted=True)

    def _attend(self, f: attention_pb2.AttendFrame, answer: attention_pb2.AttendAnswer) -> None:
        s = self.sessions[f.session_id]
        g = s.request.geometry
        k, v = (_tensor(x, g.kv_heads, g.head_dim) for x in (f.k, f.v))
        q = _tensor(f.q, g.query_heads, g.head_dim)
        have = s.k[f.layer].shape[0]
        new = slice(f.first_row_position, f.first_row_position + k.shape[0])
        if f.step == s.step and k.shape[0] > 0 and new.stop <= have:
            if not (torch.equal(s.k[f.layer][new], k) and torch.equal(s.v[f.layer][new], v)):
                raise Refusal(common_pb2.FRONTIER_MISMATCH, "other bytes", grpc.StatusCode.ABORTED)
            self._answer(f, answer, q)
            return
        if f.first_row_position != have or f.committed_frontier > have:
            raise Refusal(common_pb2.FRONTIER_MISMATCH, f"rows at {have}", grpc.StatusCode.ABORTED)
        if f.step not in (s.step, s.step + 1) or f.deadline_ms <= 0:
            raise Refusal(common_pb2.STEP_ORDER, f"step {s.step}", grpc.StatusCode.ABORTED)
        s.step = f.step
        s.frames.append((f.step, f.layer, have, k.shape[0], f.committed_frontier))
        s.k[f.layer] = torch.cat([s.k[f.layer], k])
        s.v[f.layer] = torch.cat([s.v[f.layer], v])
        self._answer(f, answer, q)

    def _answer(
        self, f: attention_pb2.AttendFrame, answer: attention_pb2.AttendAnswer, q: torch.Tensor
    ) -> None:
        s = self.sessions[f.session_id]
        keys, values = s.k[f.layer], s.v[f.layer]
        parts = [
            chunk_state(
                q,
                keys[lo : lo + CHUNK],
                values[lo : lo + CHUNK],
                scale=s.request.score_scale,
                q_pos0=f.first_query_position,
                row_pos0=lo,
            )
            for lo in range(0, keys.shape[0], CHUNK)
        ]
        answer.out = finalize(merge_ascending(parts))[0].numpy().tobytes()
        answer.receipt.exactness = attention_pb2.EXACT
        answer.receipt.frontier = keys.shape[0]
        answer.receipt.bytes_by_tier["ram"] = keys.numel() * 8
        answer.receipt.plan.append("cpu:partial")

    def _abort(self, context: Any, reason: int, message: str, code: str) -> None:
        detail = common_pb2.ErrorDetail(reason=reason, message=message, facts={"by": "fake"})
        context.set_trailing_metadata((("kvtier-error-bin", detail.SerializeToString()),))
        context.abort(grpc.StatusCode[code], message)


@contextmanager
def serve(agent: FakeAgent, socket: Path) -> Iterator[FakeAgent]:
    """Serves on a Unix socket until the block ends."""
    pool = ThreadPoolExecutor(8)
    server = grpc.server(pool)
    attention_pb2_grpc.add_AttentionServicer_to_server(agent, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield agent
    finally:
        server.stop(grace=0).wait(5)
        pool.shutdown(wait=True, cancel_futures=True)


def until(event: threading.Event, seconds: float = 20.0) -> None:
    """A bounded wait for servicers that are told to hang."""
    event.wait(seconds)


def _tensor(raw: bytes, heads: int, dim: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.float32).view(-1, heads, dim)
