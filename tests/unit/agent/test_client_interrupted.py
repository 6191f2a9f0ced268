"""A call that ends in the middle of its frames, and a wire that fails a batch: what comes next is answered
with its own rows' answer or refused, and never with what was left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.v1 import attention_pb2
from kvtier_agent import attendframes
from kvtier_client.batch import AttentionBatch
from kvtier_client.client import AttentionClient
from kvtier_client.errors import KvtierError
from kvtier_client.grpcwire import GrpcWire
from kvtier_client.localwire import LocalWire
from kvtier_client.pipe import AttendPipe
from kvtier_client.session import Geometry, SessionRequest
from kvtier_client.stream import AttendStream
from kvtier_core.errors import Reason
from tests.engine.fake_agent import FINGERPRINT, FakeAgent, serve
from tests.unit.agent.local_channel_rig import ChannelRig, channel_rig
from tests.unit.agent.local_client_rig import WAYS, Sender, Way, ask, one_pipe, part


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChannelRig]:
    with channel_rig(tmp_path) as made:
        yield made


class Echo:
    """A call of gRPC's: each frame's queries come back as its answer."""

    def __init__(self, frames: Iterator[attention_pb2.AttendFrame], metadata: object) -> None:
        self._frames = frames
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def __iter__(self) -> Iterator[attention_pb2.AttendAnswer]:
        for frame in self._frames:
            if self._cancelled.is_set():
                return
            yield attention_pb2.AttendAnswer(
                sequence=frame.sequence, step=frame.step, layer=frame.layer, out=frame.q
            )


class EchoStreams:
    def attend(self) -> AttendStream:
        return AttendStream(SimpleNamespace(Attend=Echo), ())

    def attend_many(self) -> Any:
        raise AssertionError("one session")


def interrupted_after(call: Any) -> Any:
    """The same call, behind which an interrupt comes."""

    def made(*args: Any) -> None:
        call(*args)
        raise KeyboardInterrupt

    return made


@pytest.mark.parametrize("name", ["send", "_number"])
def test_an_interrupt_around_a_frame_that_goes_over_grpc_leaves_its_answer_to_none_that_follows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(attention_pb2.OpenSessionResponse(session_id="s", generation=1))
    pipe = AttendPipe(EchoStreams(), [sender], "grpc", 1 << 20)
    ask(pipe, part(sender))
    with monkeypatch.context() as patched:
        patched.setattr(AttendStream, name, interrupted_after(getattr(AttendStream, name)))
        with pytest.raises(KeyboardInterrupt):
            ask(pipe, part(sender, seed=1))
    for seed in (2, 3):
        one = part(sender, seed=seed)
        ask(pipe, one)
        assert one.out is not None
        assert torch.equal(one.out, one.q)
    pipe.close()


@WAYS
def test_an_interrupt_behind_a_message_that_has_left_over_a_local_channel_ends_no_session(
    rig: ChannelRig, way: Way
) -> None:
    sender, pipe = one_pipe(rig)
    way(pipe, part(sender))
    wire = pipe.wire
    assert isinstance(wire, LocalWire)
    own = wire.socket
    interrupting: Any = SimpleNamespace(send=interrupted_after(own.send), setsockopt=own.setsockopt)
    wire.socket = interrupting
    with pytest.raises(KeyboardInterrupt):
        way(pipe, part(sender, seed=1))
    wire.socket = own
    for seed in (2, 3):
        one = part(sender, seed=seed)
        way(pipe, one)
        assert one.out is not None
        assert torch.equal(one.out, one.q)
    assert pipe.transport == "local"
    pipe.close()


def test_a_session_that_was_attached_before_another_could_not_be_is_attached_again(
    rig: ChannelRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendframes, "TAKEOVER_SECONDS", 0.01)
    senders = [Sender(rig.opened()), Sender(rig.opened())]
    pipe = AttendPipe(EchoStreams(), senders, "local", 1 << 20)
    pipe.close()
    sessions = [rig.session(sender.opened) for sender in senders]
    rig.settled(lambda: not any(session.streaming for session in sessions), "the channel ends")
    sessions[1].streaming = True
    with pytest.raises(KvtierError) as caught:
        pipe.renew()
    assert caught.value.reason is Reason.BAD_ARGUMENT
    rig.settled(lambda: not sessions[0].streaming, "the first one is free again")
    sessions[1].streaming = False
    pipe.renew()
    parts = [part(sender, seed=seed) for seed, sender in enumerate(senders)]
    ask(pipe, *parts)
    assert all(one.out is not None and torch.equal(one.out, one.q) for one in parts)
    pipe.close()


class Editable(FakeAgent):
    """Takes rows back, too."""

    def EditSession(self, request: Any, context: Any) -> attention_pb2.EditSessionResponse:
        session, to = self.sessions[request.session_id], request.truncate.to
        session.k[:] = [k[:to] for k in session.k]
        session.v[:] = [v[:to] for v in session.v]
        return attention_pb2.EditSessionResponse(
            changed=True, position_epoch=request.position_epoch + 1, next_position=to, rows=to
        )


def test_a_batch_whose_wire_failed_goes_on_when_its_sessions_took_their_rows_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = SessionRequest(
        namespace="serving",
        name="cache",
        tenant="alpha",
        model_fingerprint=FINGERPRINT,
        geometry=Geometry(1, 6, 2, 64),
        score_scale=0.125,
        session_root_id="root",
        max_tokens=64,
    )
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, 64, generator=made) for heads in (6, 2, 2))
    receive = GrpcWire.receive

    def late(wire: GrpcWire, timeout: float) -> Any:
        receive(wire, timeout)
        error = KvtierError(Reason.DEADLINE, "no answer in time")
        wire.stream._break(error)
        raise error

    with (
        serve(Editable(), tmp_path / "engine.sock"),
        AttentionClient(tmp_path / "engine.sock", transport="grpc") as client,
        AttentionBatch(client, [request] * 2, deadline_seconds=60.0) as batch,
    ):

        def attend() -> list[torch.Tensor]:
            return batch.attend([one.part(1, 0, 0, q, k, v, 0) for one in batch.sessions])

        with monkeypatch.context() as patched:
            patched.setattr(GrpcWire, "receive", late)
            with pytest.raises(KvtierError):
                attend()
        for session in batch.sessions:
            assert session.failure is not None
            session.truncate(0)
        first, second = attend()
        assert torch.equal(first, second)
