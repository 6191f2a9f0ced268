"""One decode frame alone on an agent's channel: served or refused as any frame, and when it is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kvtier.local import frames as wire
from kvtier.v1 import attention_pb2, common_pb2
from kvtier_agent.engine_port import FrameInput, FrameRoom
from kvtier_agent.localchannel.channel import Channel
from kvtier_core.errors import CoreError, Reason
from tests.unit.agent.local_channel_rig import (
    QUERY,
    ROW,
    Attached,
    ChannelRig,
    EchoEngine,
    channel_rig,
)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChannelRig]:
    with channel_rig(tmp_path_factory.mktemp("channels")) as made:
        yield made


@dataclass(frozen=True)
class Case:
    """A frame of a session that both ways are asked. before: what happens first; lone: whether a lone frame's
    way takes it."""

    change: dict[str, Any] = field(default_factory=dict)
    before: Callable[[ChannelRig, Attached], None] = lambda rig, channel: None
    sent_seconds_ago: float = 0.0
    lone: bool = False


def _refuses(rig: ChannelRig, channel: Attached) -> None:
    rig.engine.refusal = CoreError(Reason.FRONTIER_MISMATCH, "no", {"frontier": "7"})


def _is_broken(rig: ChannelRig, channel: Attached) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    rig.engine.hook = fail


def _is_closed(rig: ChannelRig, channel: Attached) -> None:
    rig.run(rig.host.close_session(rig.session(channel.opened)))


def _is_ended(rig: ChannelRig, channel: Attached) -> None:
    rig.session(channel.opened).ended = "idle for long"


def _is_full(rig: ChannelRig, channel: Attached) -> None:
    rig.frames._bound = rig.frames.count


# Longer ago than any frame may take.
LATE = 3600.0
CASES = {
    "plain": Case(lone=True),
    "numbers": Case(
        {
            "layer": 1,
            "step": 3,
            "first_row_position": 9,
            "first_query_position": 9,
            "committed_frontier": 8,
            "position_epoch": 2,
            "next_layer_follows": True,
        },
        lone=True,
    ),
    "own-place": Case({"offset": 4096}, lone=True),
    "no-deadline": Case({"deadline_ms": 0}, lone=True),
    "no-rows": Case({"rows": 0}),
    "two-queries": Case({"queries": 2}),
    "extra-bytes": Case({"extra": attention_pb2.AttendFrame().SerializeToString() or b"\x08\x01"}),
    "junk-behind": Case({"extra": b"\xff\xff"}),
    "other-generation": Case({"generation": 77}),
    "other-session": Case({"session_tag": b"\1" * 16}),
    "other-boot": Case({"boot_tag": b"\1" * 16}),
    "no-such-layer": Case({"layer": 2}),
    "negative-layer": Case({"layer": -1}),
    "negative-step": Case({"step": -1}),
    "negative-deadline": Case({"deadline_ms": -1}),
    "late": Case({"deadline_ms": 10}, sent_seconds_ago=LATE),
    "engine-refuses": Case(before=_refuses, lone=True),
    "engine-fails": Case(before=_is_broken, lone=True),
    "closed": Case(before=_is_closed),
    "ended": Case(before=_is_ended, lone=True),
    "full": Case(before=_is_full),
}


def channel_of(rig: ChannelRig, opened: attention_pb2.OpenSessionResponse) -> Channel:
    [found] = [
        one
        for one in rig.server._channels
        if one._attachments and one._attachments[0].session.handle.session_id == opened.session_id
    ]
    return found


@dataclass(frozen=True)
class Asked:
    """frames: what the engine was asked; lone: whether the way of lone frames took it."""

    answer: attention_pb2.AttendAnswer
    out: bytes
    frames: list[FrameInput]
    lone: bool


def asked(rig: ChannelRig, case: Case, lone: bool) -> Asked:
    """lone: the channel has that way."""
    with rig.channel(rig.opened()) as channel:
        served, took = channel_of(rig, channel.opened), []
        if lone:
            assert served._lone is not None
            serve = served._lone_frame

            def watched(*given: Any) -> None:
                took.append(given)
                serve(*given)

            served._lone_frame = watched  # type: ignore[method-assign]
        else:
            served._lone = None
        bound, before = rig.frames._bound, len(rig.engine.frames)
        case.before(rig, channel)
        try:
            record = channel.frame(seed=5, **case.change)
            channel.send(wire.pack_frames([record], time.monotonic_ns() - int(case.sent_seconds_ago * 1e9)))
            [answer] = channel.answer(1)
        finally:
            rig.engine.refusal, rig.engine.hook, rig.frames._bound = None, lambda: None, bound
        out = b"" if answer.HasField("error") else channel.output(record.offset, QUERY)
        if answer.HasField("error"):
            # Without how long it had waited by then, and which session of the two it was.
            message = answer.error.message.partition(" waited ")[0]
            if answer.error.reason == common_pb2.GENERATION_STALE:
                message = message.removesuffix(f" {channel.opened.generation}")
            answer.error.message = message
    rig.settled(lambda: rig.frames.count == 0, "the frames' places")
    return Asked(answer, out, rig.engine.frames[before:], bool(took))


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_a_lone_frame_is_served_as_any(rig: ChannelRig, case: Case) -> None:
    one, other = asked(rig, case, lone=True), asked(rig, case, lone=False)
    assert (one.lone, other.lone) == (case.lone, False)
    assert one.answer == other.answer
    assert one.out == other.out
    for mine, theirs in zip(one.frames, other.frames, strict=True):
        for name in ("step", "layer", "first_row_position", "position_epoch", "evidence"):
            assert getattr(mine, name) == getattr(theirs, name), name
        for name in ("first_query_position", "committed_frontier", "next_layer_follows", "promise_later"):
            assert getattr(mine, name) == getattr(theirs, name), name
        for name in ("k", "v", "q"):
            assert bytes(getattr(mine, name)) == bytes(getattr(theirs, name)), name
        assert mine.deadline is not None


def test_a_refused_frame_is_followed_by_the_next_ones_answer(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        assert channel.works()
        _refuses(rig, channel)
        [answer] = channel.ask(channel.frame())
        assert answer.error.reason == common_pb2.FRONTIER_MISMATCH
        rig.engine.refusal = None
        assert channel.works()
    rig.settled(lambda: rig.frames.count == 0, "the places")


def test_a_second_session_ends_the_way_of_lone_frames(rig: ChannelRig) -> None:
    with rig.channel(rig.opened()) as channel:
        assert channel.works()
        channel.attach(rig.opened().local_channel.token)
        assert channel_of(rig, channel.opened)._lone is None
        assert channel.works()


@pytest.mark.parametrize("epoch", [pytest.param(0, id="no-candidate"), pytest.param(1, id="a-candidates")])
def test_an_engines_room_is_filled_again_only_where_no_candidate_serves(
    rig: ChannelRig, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    rooms: list[FrameRoom] = []

    def room(engine: EchoEngine) -> FrameRoom:
        floats, row = np.zeros((2 * ROW + QUERY) // 4, np.float32), ROW // 4
        rooms.append(FrameRoom(floats, floats[:row], floats[row : 2 * row], floats[2 * row :]))
        return rooms[-1]

    monkeypatch.setattr(EchoEngine, "room", room, raising=False)
    opened = rig.opened()
    session = rig.session(opened)
    session.assignment = replace(session.assignment, epoch=epoch)
    before = len(rig.engine.frames)
    with rig.channel(opened) as channel:
        assert channel.works()
        assert channel.works()
        first, second = rig.engine.frames[before:]
        assert len(rooms) == (epoch == 0)
        assert (first.q is second.q) is (epoch == 0)
        if epoch == 0:
            # Others decide about its frames from here on.
            session.assignment = replace(session.assignment)
            assert channel.works()
            assert rig.engine.frames[-1].q is not second.q
