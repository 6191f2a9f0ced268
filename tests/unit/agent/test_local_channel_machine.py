"""Sessions, tokens and channels in any order: who is attached where, and what a frame is answered then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtier.v1 import attention_pb2, common_pb2
from tests.engine.raw_channel import Ended, RawChannel
from tests.unit.agent.local_channel_rig import Attached, ChannelRig, channel_rig

OFFSET = 4096


@dataclass(eq=False)
class Known:
    """A session as its engine knows it: `spent` tokens attach nothing."""

    opened: attention_pb2.OpenSessionResponse
    token: bytes
    spent: list[bytes] = field(default_factory=list)
    on: Line | None = None
    closed: bool = False


@dataclass(eq=False)
class Line:
    """A channel with its sessions by attachment."""

    channel: Attached
    sessions: list[Known]


class Channels(RuleBasedStateMachine):
    rig: ChannelRig
    sessions: Any = Bundle("sessions")
    lines: Any = Bundle("lines")

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Line] = []
        self.known: list[Known] = []

    @rule(target=sessions)
    def open(self) -> Known:
        opened = self.rig.opened()
        made = Known(opened, opened.local_channel.token)
        self.known.append(made)
        return made

    @rule(target=lines, one=sessions)
    def connect(self, one: Known) -> Any:
        """A free session gets a channel; one that is attached or closed gets its reason."""
        one.opened.local_channel.token = one.token
        try:
            channel = self.rig.channel(one.opened)
        except Ended as ended:
            refused = ended.reason
        else:
            assert not one.closed and one.on is None
            line = Line(channel, [one])
            self._attached(one, line, channel.first.next_token)
            self.live.append(line)
            return line
        assert refused == ("SESSION_UNKNOWN" if one.closed else "BAD_ARGUMENT")
        assert one.closed or one.on is not None
        return multiple()

    @rule(one=sessions, line=lines)
    def attach(self, one: Known, line: Line) -> None:
        """Another session on a channel; a refusal ends the channel and frees all of its sessions."""
        if line not in self.live:
            return
        try:
            attached = line.channel.attach(one.token)
        except Ended as ended:
            refused = ended.reason
        else:
            assert not one.closed and one.on is None
            line.sessions.append(one)
            assert attached.attachment == len(line.sessions) - 1
            self._attached(one, line, attached.next_token)
            return
        assert refused == ("SESSION_UNKNOWN" if one.closed else "BAD_ARGUMENT")
        self._over(line)

    @rule(one=sessions)
    def use_a_spent_token(self, one: Known) -> None:
        if not one.spent:
            return
        with RawChannel(one.opened.local_channel.socket) as thief:
            with pytest.raises(Ended) as caught:
                thief.hello(one.spent[-1])
            assert caught.value.reason == "SESSION_UNKNOWN"

    @rule(line=lines, data=st.data())
    def ask(self, line: Line, data: st.DataObject) -> None:
        """One frame of each of some sessions, some of another generation."""
        if line not in self.live:
            return
        chosen = data.draw(st.lists(st.integers(0, len(line.sessions) - 1), min_size=1, unique=True))
        stale = data.draw(st.sets(st.sampled_from(chosen)))
        frames, wanted = [], []
        for place, index in enumerate(chosen):
            one = line.sessions[index]
            frames.append(
                line.channel.frame(
                    offset=place * OFFSET,
                    attachment=index,
                    generation=one.opened.generation + (index in stale),
                    session_tag=_tag(one),
                )
            )
            right = "GENERATION_STALE" if index in stale else ""
            wanted.append("SESSION_UNKNOWN" if one.closed else right)
        answers = line.channel.ask(*frames)
        assert [_reason(answer) for answer in answers] == wanted

    @rule(one=consumes(sessions))
    def close_session(self, one: Known) -> None:
        session = self.rig.session(one.opened)
        self.rig.run(self.rig.host.close_session(session))
        one.closed = True

    @rule(line=consumes(lines))
    def leave(self, line: Line) -> None:
        if line in self.live:
            self._over(line)

    @rule(line=consumes(lines))
    def send_junk(self, line: Line) -> None:
        if line not in self.live:
            return
        line.channel.send(b"junk")
        with pytest.raises(Ended) as caught:
            line.channel.receive()
        assert caught.value.reason == "FRAME_INVALID"
        self._over(line)

    @invariant()
    def claims_are_those_of_channels_that_live(self) -> None:
        for one in self.known:
            if not one.closed:
                assert self.rig.session(one.opened).streaming == (one.on is not None)

    def teardown(self) -> None:
        for line in list(self.live):
            self._over(line)
        for one in self.known:
            if not one.closed:
                self.close_session(one)
        self.rig.settled(lambda: self.rig.server.open_channels == 0, "the channels' end")
        self.rig.settled(lambda: self.rig.frames.count == 0, "the frames' places")

    def _attached(self, one: Known, line: Line, next_token: bytes) -> None:
        one.spent.append(one.token)
        one.token, one.on = next_token, line

    def _over(self, line: Line) -> None:
        line.channel.close()
        self.live.remove(line)
        for one in line.sessions:
            one.on = None
        free = [self.rig.session(one.opened) for one in line.sessions if not one.closed]
        self.rig.settled(lambda: not any(session.streaming for session in free), "the claims' end")


def _tag(one: Known) -> bytes:
    from kvtier.local.frames import tag

    return tag(one.opened.session_id)


def _reason(answer: attention_pb2.AttendAnswer) -> str:
    return common_pb2.Reason.Name(answer.error.reason) if answer.HasField("error") else ""


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChannelRig]:
    monkeypatch.setattr("kvtier_agent.attendframes.TAKEOVER_SECONDS", 0.01)
    with channel_rig(tmp_path) as made:
        yield made


def test_channels_in_any_order(rig: ChannelRig) -> None:
    class Bound(Channels):
        pass

    Bound.rig = rig
    Bound.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
    Bound.TestCase().runTest()
