"""A local channel's life: attach, answers in shared memory, ends of every kind, and nothing left behind."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.local import memory
from kvtier.local.frames import tag
from kvtier.v1 import common_pb2
from kvtier_agent.config import Limits
from kvtier_agent.engine_port import FrameInput, FrameMode, FrameResult
from kvtier_agent.evidence_port import EvidencePort
from kvtier_core.errors import CoreError, Reason
from tests.engine.raw_channel import RING, Ended, RawChannel, floats, record
from tests.unit.agent.local_channel_rig import (
    FRAME_BYTES,
    QUERY,
    ROW,
    SECONDS,
    ChannelRig,
    channel_rig,
    open_descriptors,
    packed,
)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChannelRig]:
    with channel_rig(tmp_path) as made:
        yield made


class Told:
    """Evidence that remembers who called it from where."""

    def __init__(self, evidence: EvidencePort) -> None:
        self._evidence = evidence
        self.calls: list[tuple[str, str]] = []
        self.errors: list[float] = []

    def step_error(self, key: object, unit: str, step: int, error: float) -> None:
        self.errors.append(error)
        self.calls.append(("step_error", threading.current_thread().name))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._evidence, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, threading.current_thread().name))
            return method(*args, **options)

        return call


def reason_of(code: int) -> str:
    return common_pb2.Reason.Name(code)


def test_a_frame_is_answered_in_the_agents_ring_with_its_receipt(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        [answer] = channel.ask(channel.frame(offset=128, seed=3, step=4, sequence=9))
        assert (answer.sequence, answer.step, answer.layer) == (9, 4, 0)
        assert channel.output(128, QUERY) == floats(FRAME_BYTES // 4, 3)[2 * ROW :]
        receipt = answer.receipt
        assert (receipt.manifest_digest, receipt.support_digest) == ("sha256:m", "sha256:s")
        assert (receipt.producer_digest, dict(receipt.bytes_by_tier)) == ("sha256:p", {"dram": 64})
        assert (list(receipt.plan), receipt.simulated, receipt.frontier) == (["cpu:partial"], True, 1)
    rig.settled(lambda: rig.frames.count == 0, "the frame's place")


def test_a_promise_and_a_position_epoch_reach_the_engine(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        channel.ask(channel.frame(next_layer_follows=True, position_epoch=3))
        channel.ask(channel.frame())
    seen = [(frame.next_layer_follows, frame.position_epoch) for frame in rig.engine.frames]
    assert seen == [(True, 3), (False, 0)]


@pytest.mark.parametrize("defect", [False, True], ids=["begins", "fails"])
def test_what_was_promised_begins_when_the_answer_has_left_and_costs_none(
    rig: ChannelRig, monkeypatch: pytest.MonkeyPatch, defect: bool
) -> None:
    step, answered, begun = rig.engine.step, threading.Event(), threading.Event()
    seen: list[bool] = []

    def afterwards() -> None:
        seen.append(answered.wait(SECONDS))
        begun.set()
        if defect:
            raise ZeroDivisionError

    def promising(frame: FrameInput, mode: FrameMode) -> FrameResult:
        return replace(step(frame, mode), afterwards=afterwards if frame.next_layer_follows else None)

    monkeypatch.setattr(rig.engine, "step", promising)
    with rig.channel(rig.opened()) as channel:
        [answer] = channel.ask(channel.frame(next_layer_follows=True))
        answered.set()
        assert not answer.HasField("error")
        assert begun.wait(SECONDS)
        assert channel.works()
    assert seen == [True]
    assert [frame.promise_later for frame in rig.engine.frames] == [True] * len(rig.engine.frames)
    rig.settled(lambda: rig.frames.count == 0, "the frames' places")


def test_computing_happens_on_the_channels_own_thread(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as first, rig.channel(rig.opened()) as second:
        assert first.works() and second.works()
    assert len(rig.engine.threads) == 2
    assert all(name.startswith("local-channel-") for name in rig.engine.threads)


def test_sockets_lie_in_a_private_folder_of_the_namespace(rig: ChannelRig) -> None:
    path = Path(rig.opened().local_channel.socket)
    assert path.parent.name == rig.host.name.namespace
    assert [one.stat().st_mode & 0o777 for one in (path, path.parent, path.parent.parent)] == [
        0o600,
        0o700,
        0o700,
    ]


def test_a_path_longer_than_a_sockets_name_may_be_is_served(tmp_path: Path) -> None:
    with channel_rig(tmp_path / ("deep" * 25) / ("folder" * 10)) as rig:
        opened = rig.opened()
        assert len(opened.local_channel.socket) > 108
        with rig.channel(opened) as channel:
            assert channel.works()


def test_what_the_engine_writes_after_it_sent_changes_nothing(rig: ChannelRig) -> None:
    """The engine's process overwrites its ring while the frame is computed."""
    with rig.channel(rig.opened()) as channel:
        frame = channel.frame(seed=1)
        rig.engine.hook = lambda: channel.put(0, b"\xff" * FRAME_BYTES) and None
        [answer] = channel.ask(frame)
        assert not answer.HasField("error")
        [computed] = rig.engine.frames
        assert bytes(computed.k) + bytes(computed.v) == floats(FRAME_BYTES // 4, 1)[: 2 * ROW]
        assert channel.output(0, QUERY) == floats(FRAME_BYTES // 4, 1)[2 * ROW :]


def test_the_answers_ring_cannot_be_written_by_the_engine(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        with pytest.raises(PermissionError):
            mmap.mmap(channel.answers_fd, RING)
        again = os.open(f"/proc/self/fd/{channel.answers_fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(again, RING)
            with pytest.raises(PermissionError):
                os.pwrite(again, b"x", 0)
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(again, 0)
        finally:
            os.close(again)
        assert fcntl.fcntl(channel.answers_fd, memory.F_GET_SEALS) == memory.OWNER_SEALS


def test_a_token_attaches_once_and_the_next_one_attaches_again(rig: ChannelRig) -> None:
    opened = rig.opened()
    with rig.channel(opened) as channel:
        following = channel.first.next_token
        with RawChannel(opened.local_channel.socket) as thief, pytest.raises(Ended) as caught:
            thief.hello(opened.local_channel.token)
        assert caught.value.reason == "SESSION_UNKNOWN"
        assert channel.works()
    opened.local_channel.token = following
    with rig.channel(opened) as channel:
        assert channel.works()


def test_a_dead_peer_is_noticed_and_its_session_is_free_again(rig: ChannelRig) -> None:
    opened = rig.opened()
    session = rig.session(opened)
    with rig.channel(opened):
        assert session.streaming
    rig.settled(lambda: not session.streaming and rig.server.open_channels == 0, "the channel's end")


def test_a_peer_that_dies_while_its_frame_computes_ends_its_channel_alone(rig: ChannelRig) -> None:
    release = threading.Event()
    with rig.channel(rig.opened()) as other:
        victim = rig.channel(rig.opened())
        rig.engine.hook = lambda: release.wait(SECONDS) and None
        victim.send(packed(victim.frame()))
        rig.settled(lambda: rig.frames.count == 1, "the frame's start")
        victim.close()
        rig.engine.hook = lambda: None
        release.set()
        rig.settled(lambda: rig.server.open_channels == 1, "the dead peer's end")
        assert other.works()
        rig.settled(lambda: rig.frames.count == 0, "the frames' places")


def test_several_sessions_share_a_channel_and_the_last_message_is_of_both(rig: ChannelRig) -> None:
    first, second = rig.opened(), rig.opened()
    with rig.channel(first) as channel:
        attached = channel.attach(second.local_channel.token)
        assert attached.attachment == 1
        frames = [
            channel.frame(seed=1),
            channel.frame(
                offset=4096,
                seed=2,
                attachment=1,
                generation=second.generation,
                session_tag=tag(second.session_id),
            ),
        ]
        answers = channel.ask(*frames)
        assert not any(answer.HasField("error") for answer in answers)
        assert channel.output(4096, QUERY) == floats(FRAME_BYTES // 4, 2)[2 * ROW :]
    assert [frame.session_id for frame in rig.engine.frames] == [first.session_id, second.session_id]


def test_an_engine_that_refuses_or_fails_costs_a_frame_and_no_channel(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        rig.engine.refusal = CoreError(Reason.NO_LEGAL_PATH, "no plan", {"tier": "dram"})
        [answer] = channel.ask(channel.frame())
        assert reason_of(answer.error.reason) == "NO_LEGAL_PATH"
        assert dict(answer.error.facts) == {"tier": "dram"}
        rig.engine.refusal = None

        def defect() -> None:
            raise ZeroDivisionError

        rig.engine.hook = defect
        [answer] = channel.ask(channel.frame())
        assert reason_of(answer.error.reason) == "INTERNAL"
        rig.engine.hook = lambda: None
        assert channel.works()
    rig.settled(lambda: rig.frames.count == 0, "the frames' places")


def test_an_agent_without_places_refuses_the_frame_in_its_place(tmp_path: Path) -> None:
    with channel_rig(tmp_path, Limits(agent_in_flight=1)) as rig, rig.channel(rig.opened()) as channel:
        assert rig.frames.enter() is None
        [answer] = channel.ask(channel.frame())
        assert reason_of(answer.error.reason) == "QUEUE_FULL"
        assert answer.error.retry_after_ms > 0
        rig.frames.leave()
        assert channel.works()


def test_an_engine_that_hangs_is_answered_for_and_its_late_answer_is_dropped(
    rig: ChannelRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Called hung 30 ms after the frame was sent, whose own deadline does not pass before it is computed.
    deadline = 60.0
    monkeypatch.setattr("kvtier_agent.attendframes.ENGINE_GRACE_SECONDS", 0.03 - deadline)
    entered, release = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert release.wait(SECONDS)

    with rig.channel(rig.opened()) as channel:
        rig.engine.hook = hang
        [answer] = channel.ask(channel.frame(deadline_ms=int(deadline * 1000), sequence=5))
        assert entered.wait(SECONDS) and not release.is_set()
        assert answer.sequence == 5
        assert reason_of(answer.error.reason) == "DEADLINE"
        assert "does not answer" in answer.error.message
        # Else the next frame is called hung too, when the agent looks while it is computed.
        monkeypatch.setattr("kvtier_agent.attendframes.ENGINE_GRACE_SECONDS", deadline)
        rig.engine.hook = lambda: None
        release.set()
        assert channel.works()


def test_a_frame_without_a_deadline_of_its_own_is_not_called_hung_by_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is as patient as the most patient of its frames, and one that names no deadline has the
    longest."""
    monkeypatch.setattr("kvtier_agent.attendframes.ENGINE_GRACE_SECONDS", 0.0)
    with channel_rig(tmp_path, Limits(frame_deadline_seconds=1000.0)) as rig:
        first, second = rig.opened(), rig.opened()
        with rig.channel(first) as channel:
            attached = channel.attach(second.local_channel.token)
            [running] = rig.server._channels
            seen: list[float] = []
            rig.engine.hook = lambda: seen.append(running._running_until - time.monotonic())
            patient = channel.frame(deadline_ms=0)
            channel.put(4096, floats(FRAME_BYTES // 4, 1))
            hasty = record(second, attached, offset=4096, sequence=2, deadline_ms=50_000)
            answers = channel.ask(patient, hasty)
            assert not any(answer.HasField("error") for answer in answers)
            assert min(seen) > 900.0


def test_a_frame_that_waits_in_the_socket_past_its_deadline_is_refused(rig: ChannelRig) -> None:
    release, opened = threading.Event(), rig.opened()
    began = time.monotonic()
    with rig.channel(opened) as channel:
        # The agent knows the engine's clock as well as the first message was quick.
        unsure = time.monotonic() - began
        rig.engine.hook = lambda: release.wait(SECONDS) and None
        channel.send(packed(channel.frame()))
        rig.settled(lambda: rig.frames.count == 1, "the frame's start")
        channel.send(packed(channel.frame(deadline_ms=1)))
        passed = threading.Event()
        threading.Timer(unsure + 0.02, passed.set).start()
        assert passed.wait(SECONDS)
        release.set()
        [first] = channel.answer()
        [late] = channel.answer()
        assert not first.HasField("error")
        assert reason_of(late.error.reason) == "DEADLINE"


def test_a_silent_channel_ends_and_says_why(tmp_path: Path) -> None:
    with channel_rig(tmp_path, Limits(session_idle_seconds=1.0)) as rig:
        with rig.channel(rig.opened()) as channel, pytest.raises(Ended, match="no frame came") as caught:
            channel.receive()
        assert caught.value.reason == "SESSION_UNKNOWN"


def test_a_drain_ends_channels_after_the_frame_that_computes(rig: ChannelRig) -> None:
    release, closing = threading.Event(), threading.Event()
    path = Path(rig.opened().local_channel.socket)
    with rig.channel(rig.opened()) as channel:

        def compute() -> None:
            closing.set()
            release.wait(SECONDS)

        rig.engine.hook = compute
        channel.send(packed(channel.frame()))
        assert closing.wait(SECONDS)
        threading.Timer(0.05, release.set).start()
        assert rig.run(rig.server.close(SECONDS)) == []
        assert len(channel.answer()) == 1
        with pytest.raises(Ended) as caught:
            channel.receive()
        assert caught.value.reason == "DRAINING"
    assert not path.exists()
    with pytest.raises(OSError, match="No such file"):
        RawChannel(path)


def test_a_thread_that_does_not_end_is_named(rig: ChannelRig) -> None:
    release, started = threading.Event(), threading.Event()
    with rig.channel(rig.opened()) as channel:

        def compute() -> None:
            started.set()
            release.wait(SECONDS)

        rig.engine.hook = compute
        channel.send(packed(channel.frame()))
        assert started.wait(SECONDS)
        left = rig.run(rig.server.close(0.05))
        assert left == ["local-channel-1"]
        release.set()


def test_a_removed_cache_refuses_frames_and_waits_for_the_one_that_computes(rig: ChannelRig) -> None:
    release, started = threading.Event(), threading.Event()
    with rig.channel(rig.opened()) as channel:

        def compute() -> None:
            started.set()
            release.wait(SECONDS)
            assert not rig.engine.closed

        rig.engine.hook = compute
        channel.send(packed(channel.frame()))
        assert started.wait(SECONDS)
        threading.Timer(0.05, release.set).start()
        rig.run(rig.bench.node.remove_cache(rig.bench.command()))
        assert rig.engine.closed
        assert not channel.answer()[0].HasField("error")
        [answer] = channel.ask(channel.frame())
        assert reason_of(answer.error.reason) == "SESSION_UNKNOWN"


def test_a_candidates_session_is_answered_counted_and_compared_as_over_grpc(rig: ChannelRig) -> None:
    rig.run(rig.bench.grant(sample="1"))
    told = Told(rig.host.evidence)
    rig.host.evidence = told
    opened = rig.opened()
    with rig.channel(opened) as channel:
        for step in range(3):
            for layer in range(2):
                [answer] = channel.ask(
                    channel.frame(step=step, layer=layer, first_query_position=step, first_row_position=step)
                )
                assert not answer.HasField("error")
                assert answer.receipt.arm == 2
    assert any(mode.compare for mode in rig.engine.modes)
    assert rig.host.enforcement.in_flight == 0
    # Evidence lives on the event loop; what a channel's thread sees is posted there before its answer leaves,
    # so the loop has told it when it comes to what was asked of it afterwards.
    rig.run(asyncio.sleep(0))
    names = [name for name, _ in told.calls]
    assert names.count("step_error") == len(told.errors) > 0
    assert "assigned" in names
    assert {thread for _, thread in told.calls} == {"agent-loop"}


def test_channels_leave_no_descriptor_and_no_thread(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        assert channel.works()

    def channels() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("local-channel")]

    rig.settled(lambda: rig.server.open_channels == 0 and not channels(), "the first channel's end")
    before, threads = open_descriptors(), threading.active_count()
    for _ in range(20):
        opened = rig.opened()
        with rig.channel(opened) as channel:
            assert channel.works()
        with RawChannel(opened.local_channel.socket) as broken, pytest.raises(Ended):
            broken.hello(b"\0" * 32)
        with RawChannel(opened.local_channel.socket):
            pass
    rig.settled(lambda: rig.server.open_channels == 0 and not channels(), "the last channel's end")
    assert open_descriptors() == before
    assert threading.active_count() == threads


def test_only_so_many_connections_are_taken(tmp_path: Path) -> None:
    with channel_rig(tmp_path, Limits(max_sessions=1)) as rig:
        opened = rig.opened()
        idle = [RawChannel(opened.local_channel.socket) for _ in range(17)]
        try:
            with RawChannel(opened.local_channel.socket) as late, pytest.raises(Ended) as caught:
                late.receive()
            assert caught.value.reason == "QUEUE_FULL"
        finally:
            for one in idle:
                one.close()


def test_a_stale_socket_of_an_earlier_life_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "channels" / "serving"
    folder.mkdir(parents=True)
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(str(folder / "attend.sock"))
    stale.close()
    with channel_rig(tmp_path) as rig, rig.channel(rig.opened()) as channel:
        assert channel.works()
