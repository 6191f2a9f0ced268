"""A minimal engine for agent tests: makes rows and queries, drives Attention over a real socket, and knows
the right answer (float64). No model, no adapter."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from kvtier.v1 import attention_pb2, attention_pb2_grpc, blocks_pb2_grpc, common_pb2
from kvtier_crds.manifest import Geometry, RuntimeManifest, model_fingerprint
from tests.engine.agent_process import CACHE

CALL_SECONDS = 30.0
Floats = NDArray[np.float32]


def wire_geometry(geometry: Geometry, **changes: Any) -> attention_pb2.Geometry:
    fields = {
        "layers": geometry.layers,
        "query_heads": geometry.query_heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "dtype": geometry.dtype.value,
        **changes,
    }
    return attention_pb2.Geometry(**fields)


class Engine:
    """Stubs of Attention and Blocks over the engine socket."""

    def __init__(self, socket_path: Path) -> None:
        self.channel = grpc.insecure_channel(f"unix:{socket_path}")
        self._sessions: list[Driver] = []
        self.attention: Any = attention_pb2_grpc.AttentionStub(self.channel)  # type: ignore[no-untyped-call]
        self.blocks: Any = blocks_pb2_grpc.BlocksStub(self.channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        """Also closes the sessions that a failed test left open."""
        for session in self._sessions:
            with contextlib.suppress(grpc.RpcError):
                session.close()
        self.channel.close()

    def open(self, manifest: RuntimeManifest, **changes: Any) -> Driver:
        """A session of the cache; changes override fields of the request."""
        fields: dict[str, Any] = {
            "cache": CACHE,
            "model_fingerprint": model_fingerprint(manifest.model),
            "geometry": wire_geometry(manifest.model.geometry),
            "score_scale": manifest.model.geometry.head_dim**-0.5,
            "tenant": "beta",
            "session_root_id": "root-1",
            "max_tokens": 4096,
            **changes,
        }
        opened = self.attention.OpenSession(attention_pb2.OpenSessionRequest(**fields), timeout=CALL_SECONDS)
        session = Driver(self, manifest.model.geometry, opened, fields["tenant"])
        self._sessions.append(session)
        return session


@dataclass
class Driver:
    """One session: its stream, and all rows it ever sent, so that it can check answers."""

    engine: Engine
    geometry: Geometry
    opened: attention_pb2.OpenSessionResponse
    tenant: str
    step: int = 0
    keys: list[list[Floats]] = field(default_factory=list)
    values: list[list[Floats]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(11)
        self._frames: queue.Queue[attention_pb2.AttendFrame | None] = queue.Queue()
        self.keys = [[] for _ in range(self.geometry.layers)]
        self.values = [[] for _ in range(self.geometry.layers)]
        self._sequence = 0
        self._answers = self.engine.attention.Attend(self._sent())

    def _sent(self) -> Iterator[attention_pb2.AttendFrame]:
        while (frame := self._frames.get(timeout=120)) is not None:
            yield frame

    def send(self, frame: attention_pb2.AttendFrame) -> None:
        self._frames.put(frame)

    def receive(self) -> attention_pb2.AttendAnswer:
        answer: attention_pb2.AttendAnswer = next(self._answers)
        return answer

    @property
    def frontier(self) -> int:
        return sum(len(part) for part in self.keys[-1])

    def frame(self, layer: int, tokens: int, first: int, **changes: Any) -> attention_pb2.AttendFrame:
        """Rows [first, first + tokens) of a layer, and as many queries."""
        g = self.geometry
        k = self._random.standard_normal((tokens, g.kv_heads, g.head_dim), dtype=np.float32)
        v = self._random.standard_normal((tokens, g.kv_heads, g.head_dim), dtype=np.float32)
        q = self._random.standard_normal((tokens, g.query_heads, g.head_dim), dtype=np.float32)
        self._sequence += 1
        fields: dict[str, Any] = {
            "session_id": self.opened.session_id,
            "generation": self.opened.generation,
            "boot_id": self.opened.boot_id,
            "tenant": self.tenant,
            "step": self.step,
            "layer": layer,
            "first_row_position": first,
            "k": k.tobytes(),
            "v": v.tobytes(),
            "first_query_position": first,
            "q": q.tobytes(),
            "committed_frontier": self.frontier,
            "sequence": self._sequence,
            **changes,
        }
        return attention_pb2.AttendFrame(**fields)

    def forward(self, tokens: int) -> list[attention_pb2.AttendAnswer]:
        """One step over all layers, in blocks of at most 256 tokens; asserts that no answer is an error."""
        start = self.frontier
        answers = []
        for layer in range(self.geometry.layers):
            for offset in range(0, tokens, 256):
                count = min(256, tokens - offset)
                frame = self.frame(layer, count, start + offset)
                self.send(frame)
                answer = self.receive()
                assert not answer.HasField("error"), answer.error
                assert answer.sequence == frame.sequence
                self.note(layer, frame)
                answers.append(answer)
        self.step += 1
        return answers

    def note(self, layer: int, frame: attention_pb2.AttendFrame) -> None:
        """Remembers the rows of an accepted frame."""
        shape = (-1, self.geometry.kv_heads, self.geometry.head_dim)
        self.keys[layer].append(np.frombuffer(frame.k, dtype=np.float32).reshape(shape))
        self.values[layer].append(np.frombuffer(frame.v, dtype=np.float32).reshape(shape))

    def expected(self, frame: attention_pb2.AttendFrame) -> NDArray[np.float64]:
        """Exact attention of the frame's queries over all rows noted, in float64."""
        g = self.geometry
        q = np.frombuffer(frame.q, dtype=np.float32).reshape(-1, g.query_heads, g.head_dim).astype(float)
        k = np.concatenate(self.keys[frame.layer]).astype(float)
        v = np.concatenate(self.values[frame.layer]).astype(float)
        k, v = (np.repeat(rows, g.query_heads // g.kv_heads, axis=1) for rows in (k, v))
        scores = np.einsum("qhd,rhd->hqr", q, k) * g.head_dim**-0.5
        reach = frame.first_query_position + np.arange(len(q))
        scores = np.where(np.arange(len(k))[None, None, :] <= reach[None, :, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        answer: NDArray[np.float64] = np.einsum("hqr,rhd->qhd", weights, v)
        return answer

    def output(self, answer: attention_pb2.AttendAnswer) -> Floats:
        shape = (-1, self.geometry.query_heads, self.geometry.head_dim)
        return np.frombuffer(answer.out, dtype=np.float32).reshape(shape)

    def end_stream(self) -> None:
        self._frames.put(None)
        for _ in self._answers:
            pass

    def close(self) -> int:
        """Ends the stream and the session; returns rows released."""
        self.end_stream()
        request = attention_pb2.CloseSessionRequest(
            session_id=self.opened.session_id, generation=self.opened.generation, tenant=self.tenant
        )
        released: int = self.engine.attention.CloseSession(request, timeout=CALL_SECONDS).rows_released
        return released


def named(cache: common_pb2.CacheRef = CACHE) -> common_pb2.CacheRef:
    """The cache as an engine knows it that was told a name only."""
    return common_pb2.CacheRef(namespace=cache.namespace, name=cache.name)
