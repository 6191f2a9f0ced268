"""A client whose stream is lost goes on over another: each row is taken once, each query answered."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch

from kvtier.v1 import attention_pb2, common_pb2
from kvtier_client import stream as stream_module
from kvtier_client.client import AttentionClient
from kvtier_client.errors import KvtierError
from kvtier_client.grpcwire import GrpcWire, frame_message
from kvtier_client.hf import KvtierCache, attach
from kvtier_client.pipe import RECONNECTS
from kvtier_client.session import AttentionSession, Geometry, SessionRequest
from kvtier_client.stream import AttendStream
from kvtier_client.wire import MAX_OUTSTANDING, Frame
from kvtier_core.errors import Reason
from tests.engine.agent_process import CACHE, baseline_manifest, running_agent, tiny_geometry
from tests.engine.fake_agent import FINGERPRINT, FakeAgent, Refusal

pytestmark = pytest.mark.timeout(600)

REQUEST = SessionRequest(
    namespace="serving",
    name="cache",
    tenant="alpha",
    model_fingerprint=FINGERPRINT,
    geometry=Geometry(layers=2, query_heads=6, kv_heads=2, head_dim=64),
    score_scale=0.125,
    session_root_id="root",
    max_tokens=4096,
)


def rows(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, h, 64, generator=g) for h in (6, 2, 2))  # type: ignore[return-value]


def run(client: AttentionClient) -> tuple[list[torch.Tensor], int]:
    """A prefill of 700 rows (three frames a layer) and two decode steps; and how many rows both layers
    released."""
    outs = []
    session = AttentionSession(client, REQUEST)
    have = 0
    for step, n in enumerate((700, 1, 1), start=1):
        outs += [session.attend(step, layer, have, *rows(n, step), have) for layer in range(2)]
        have += n
    return outs, session.close()


@pytest.mark.parametrize(
    "lost", [{1}, {3}, {2, 4}, {7}, {6, 8, 10}], ids=["first", "last-block", "twice", "decode", "thrice"]
)
def test_a_lost_answer_is_asked_again_and_its_rows_are_taken_once(
    client: AttentionClient, agent: FakeAgent, lost: set[int]
) -> None:
    want, released = run(client)
    assert (agent.streams, released) == (1, 2 * 702)
    agent.received, agent.lost = 0, frozenset(lost)
    got, released = run(client)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert released == 2 * 702
    assert agent.streams == 2 + len(lost)


def test_a_stream_that_is_lost_again_and_again_is_given_up(client: AttentionClient, agent: FakeAgent) -> None:
    agent.lost = frozenset(range(1, 100))
    session = AttentionSession(client, REQUEST)
    with pytest.raises(KvtierError, match="the connection broke") as caught:
        session.attend(1, 0, 0, *rows(1), 0)
    assert caught.value.status == "UNAVAILABLE"
    assert session.failure is caught.value
    assert agent.streams == 1 + RECONNECTS
    session.close()


@pytest.mark.parametrize("kind", ["refused", "servicer-bug"])
def test_what_was_answered_is_not_asked_again(client: AttentionClient, agent: FakeAgent, kind: str) -> None:
    def fail(frame: Any, answer: Any) -> Any:
        if kind == "refused":
            raise Refusal(common_pb2.NO_DESTINATION_CAPACITY, "full", None)  # type: ignore[arg-type]
        raise RuntimeError("bug")

    agent.misbehave = fail
    session = AttentionSession(client, REQUEST)
    with pytest.raises(KvtierError):
        session.attend(1, 0, 0, *rows(1), 0)
    assert (agent.streams, agent.received) == (1, 1)
    session.close()


class RacingQueue(queue.Queue[Any]):
    """Full when a thing that ends the stream is put, and empty when the oldest is to give its place: as if
    the other thread had taken it in between. Once."""

    raced = False

    def put_nowait(self, item: Any) -> None:
        ends = item is None or isinstance(item, KvtierError)
        if ends and not self.raced:
            raise queue.Full
        super().put_nowait(item)

    def get_nowait(self) -> Any:
        self.raced = True
        raise queue.Empty


def test_the_end_of_a_stream_arrives_though_the_queue_empties_meanwhile(
    client: AttentionClient, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module.queue, "Queue", RacingQueue)
    agent.lost = frozenset({1})
    session = AttentionSession(client, REQUEST)
    wire = session.pipe.wire
    assert isinstance(wire, GrpcWire)
    stream = wire.stream
    assert isinstance(stream, AttendStream)
    stream.send(frame_message(Frame(session, 1, 0, 0, *rows(1), 0, 10_000)))
    with pytest.raises(KvtierError) as caught:
        stream.receive(10)
    assert caught.value.status == "UNAVAILABLE"
    assert stream.lost
    session.close()


def test_a_real_agent_answers_what_was_lost_in_prefill_and_decode_with_the_same_tokens(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 13th frame's stream is cut by the client right after the frame has left; the agent may have
    computed it or not, and may not have noticed yet when the next stream comes."""
    ids = torch.randint(2, 97, (1, 1000), generator=torch.Generator().manual_seed(0))
    want = tiny_model.generate(ids, max_new_tokens=12, do_sample=False)
    send, sent = AttendStream.send, 0

    def cut(self: AttendStream, frame: attention_pb2.AttendFrame) -> None:
        nonlocal sent
        sent += 1
        send(self, frame)
        if sent % 13 == 0:
            self._call.cancel()

    with running_agent() as started, AttentionClient(started.socket_path, transport="grpc") as real:
        started.apply_baseline(baseline_manifest(tiny_geometry(layers=3)))
        fingerprint = real.describe_cache(CACHE.namespace, CACHE.name).model_fingerprint
        cache = KvtierCache(
            real,
            namespace=CACHE.namespace,
            name=CACHE.name,
            model_fingerprint=fingerprint,
            config=tiny_model.config,
            tenant="alpha",
            max_tokens=2048,
        )
        monkeypatch.setattr(AttendStream, "send", cut)
        with attach(tiny_model):
            got = tiny_model.generate(ids, cache=cache, max_new_tokens=12, do_sample=False)
        assert cache.close() == 1011
    assert sent > 3 * 13 + MAX_OUTSTANDING
    assert torch.equal(got, want)
    assert cache.session.failure is None
    assert Reason.SESSION_UNKNOWN not in {r.fallback for r in cache.take_receipts()}
