"""A defect in one frame of a message is that frame's failure; and streams of many sessions wait once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier.local.frames import tag
from kvtier.v1 import attention_pb2, common_pb2
from kvtier_agent.attendframes import FrameCount, FrameDesk
from kvtier_agent.attendstreams import FrameStream
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.cachesession import FrameWork, Session
from kvtier_agent.engine_port import FrameInput, FrameMode, FrameResult
from kvtier_agent.localchannel.frames import FrameServer, Turn
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_core.release.enforcement import SessionFacts
from tests.engine.agent_process import baseline_manifest
from tests.unit.agent.agent_fakes import Bench, FakeEngine
from tests.unit.agent.local_channel_rig import FRAME_BYTES, channel_rig

GEOMETRY = baseline_manifest().model.geometry
ALIGNED = -(-FRAME_BYTES // 64) * 64


class Broken(FakeEngine):
    """Fails for the session of that name, by an exception that is no refusal."""

    broken = ""

    def step(self, frame: FrameInput, mode: FrameMode) -> FrameResult:
        if frame.session_id == self.broken:
            raise ZeroDivisionError("a defect")
        return super().step(frame, mode)


class Stream:
    """AttendMany's handler over sessions of a bench."""

    def __init__(self, bench: Bench, desk: type[FrameDesk] = FrameDesk) -> None:
        self.bench = bench
        self.metrics = Metrics(CollectorRegistry())
        telemetry = Telemetry("node-a", "serving/pool", bench.node.boot_id, "0", [])
        self.frames = FrameCount(64, self.metrics)
        self.desk = desk(bench.node, telemetry, self.metrics, self.frames)

    @property
    def host(self) -> CacheHost:
        return next(iter(self.bench.node.caches.values()))

    async def opened(self, count: int) -> list[Session]:
        return [
            await self.host.open_session(SessionFacts("beta", "", f"r{n}", f"r{n}"), 0.125, 100, "")
            for n in range(count)
        ]

    async def ask(self, sessions: Sequence[Session]) -> list[attention_pb2.AttendAnswer]:
        """One message with a frame of each."""
        frames = [
            attention_pb2.AttendFrame(
                session_id=one.handle.session_id,
                generation=one.handle.generation,
                boot_id=self.bench.node.boot_id,
                tenant="beta",
                q=b"\0" * (GEOMETRY.query_heads * GEOMETRY.head_dim * 4),
            )
            for one in sessions
        ]

        async def incoming() -> AsyncIterator[Sequence[attention_pb2.AttendFrame]]:
            yield frames

        async with asyncio.timeout(30):
            stream = FrameStream(self.desk, many=True).answers(incoming(), None)  # type: ignore[arg-type]
            return [answer async for message in stream for answer in message]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    made.engines_made = Broken
    await made.apply()
    yield made
    await made.close()


def reasons(answers: Sequence[attention_pb2.AttendAnswer]) -> list[str]:
    return [common_pb2.Reason.Name(one.error.reason) if one.HasField("error") else "OK" for one in answers]


class Counted(Session):
    """Its frames may be counted by one thread at a time only: `+=` reads, adds and writes."""

    counted_by: int

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "frames_running" and "_counting" in self.__dict__:
            assert self._counting.locked()
            object.__setattr__(self, "counted_by", getattr(self, "counted_by", 0) + 1)
        super().__setattr__(name, value)


async def test_frames_are_counted_under_a_lock_whatever_brings_them(bench: Bench) -> None:
    stream = Stream(bench)
    made = await stream.opened(2)
    sessions = [Counted(**{one.name: getattr(s, one.name) for one in fields(s) if one.init}) for s in made]
    host = stream.host
    works = [
        FrameWork(
            one,
            FrameInput(one.handle.session_id, one.handle.generation, 0, 0, 0, b"", b"", 0, b"", 0),
            1,
        )
        for one in sessions
    ]
    await host.frames.attend(works[0].session, works[0].frame, 1)
    await host.frames.attend_many(works)
    await asyncio.to_thread(host.frames.attend_now, works, host.evidence)
    await asyncio.to_thread(host.frames.attend_one_now, works[1], host.evidence)
    assert [one.counted_by for one in sessions] == [6, 6]
    assert [one.frames_running for one in sessions] == [0, 0]


async def test_a_defect_in_a_frame_of_a_grpc_message_fails_that_frame_only(bench: Bench) -> None:
    stream = Stream(bench)
    sessions = await stream.opened(3)
    assert isinstance(bench.engine, Broken)
    bench.engine.broken = sessions[1].handle.session_id
    answers = await stream.ask(sessions)
    assert reasons(answers) == ["OK", "INTERNAL", "OK"]
    assert "a defect" not in answers[1].error.message
    assert [one.frames_running for one in sessions] == [0, 0, 0]
    assert [one.step for one in sessions] == [0, None, 0]
    bench.engine.broken = ""
    assert reasons(await stream.ask(sessions)) == ["OK"] * 3


async def test_a_defect_of_a_candidates_frame_fails_that_frame_only(bench: Bench) -> None:
    await bench.grant()
    stream = Stream(bench)
    sessions = await stream.opened(3)
    # A decode step is what a candidate answers; a prefill comes before it.
    for session in sessions:
        session.first_step = session.step = -1
    assert isinstance(bench.engine, Broken)
    bench.engine.broken = sessions[0].handle.session_id
    assert reasons(await stream.ask(sessions)) == ["INTERNAL", "OK", "OK"]
    assert any(mode.publish_candidate for mode in bench.engine.modes)
    assert stream.host.enforcement.in_flight == 0


async def test_a_defect_while_a_frame_is_prepared_or_counted_fails_that_frame_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(bench)
    sessions = await stream.opened(3)
    for name, failing in (("_prepare", 1), ("_settle", 2)):
        real: Callable[..., object] = getattr(stream.host.frames, name)

        def fail(
            one: object,
            *rest: object,
            real: Callable[..., object] = real,
            failing: Session = sessions[failing],
        ) -> object:
            session = one if isinstance(one, Session) else getattr(one, "session")  # noqa: B009
            if session is failing:
                raise ZeroDivisionError("a defect")
            return real(one, *rest)

        monkeypatch.setattr(stream.host.frames, name, fail)
    assert reasons(await stream.ask(sessions)) == ["OK", "INTERNAL", "INTERNAL"]
    assert [one.frames_running for one in sessions] == [0, 0, 0]


def test_a_defect_in_a_frame_of_a_local_message_fails_that_frame_only(tmp_path: Path) -> None:
    with channel_rig(tmp_path) as rig:
        engine = rig.engine
        real = engine.step
        opened = [rig.opened() for _ in range(3)]

        def step(frame: FrameInput, mode: FrameMode) -> FrameResult:
            if frame.session_id == opened[2].session_id:
                raise ZeroDivisionError("a defect")
            return real(frame, mode)

        engine.step = step  # type: ignore[method-assign]
        with rig.channel(opened[0]) as channel:
            for other in opened[1:]:
                channel.attach(other.local_channel.token)
            frames = [
                channel.frame(
                    offset=place * ALIGNED,
                    attachment=place,
                    generation=one.generation,
                    session_tag=tag(one.session_id),
                )
                for place, one in enumerate(opened)
            ]
            answers = channel.ask(*frames)
        assert reasons(answers) == ["OK", "OK", "INTERNAL"]
        rig.settled(lambda: rig.frames.count == 0, "the frames' places")


def test_a_defect_while_a_frame_of_a_local_message_is_read_fails_that_frame_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with channel_rig(tmp_path) as rig:
        opened = [rig.opened() for _ in range(3)]
        real = FrameServer._work

        def work(server: FrameServer, turn: Turn, *rest: Any) -> FrameWork:
            made = real(server, turn, *rest)
            if made.session.handle.session_id == opened[1].session_id:
                raise ZeroDivisionError("a defect")
            return made

        monkeypatch.setattr(FrameServer, "_work", work)
        with rig.channel(opened[0]) as channel:
            for other in opened[1:]:
                channel.attach(other.local_channel.token)
            frames = [
                channel.frame(
                    offset=place * ALIGNED,
                    attachment=place,
                    generation=one.generation,
                    session_tag=tag(one.session_id),
                )
                for place, one in enumerate(opened)
            ]
            assert reasons(channel.ask(*frames)) == ["OK", "INTERNAL", "OK"]
        rig.settled(lambda: rig.frames.count == 0, "the frames' places")


class Noting(FrameDesk):
    """Remembers until when it was to wait for each session."""

    until: list[float]

    async def claim(self, session: Session, until: float) -> None:
        self.until = [*getattr(self, "until", []), until]
        await super().claim(session, until)


async def test_sessions_of_one_message_that_another_stream_holds_have_one_deadline(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_agent.attendframes.TAKEOVER_SECONDS", 0.05)
    stream = Stream(bench, Noting)
    sessions = await stream.opened(4)
    for held in sessions[:3]:
        held.streaming = True
    answers = await stream.ask(sessions)
    # The free one behind them is taken although the time of the others is over.
    assert reasons(answers) == ["BAD_ARGUMENT"] * 3 + ["OK"]
    assert isinstance(stream.desk, Noting)
    assert len(stream.desk.until) == 4 and len(set(stream.desk.until)) == 1
    assert [one.streaming for one in sessions] == [True, True, True, False]


async def test_a_session_whose_other_stream_ends_meanwhile_is_taken(bench: Bench) -> None:
    stream = Stream(bench)
    [session] = await stream.opened(1)
    session.streaming = True
    # Told while the message waits: the loop runs it after the claim has begun.
    monitor = asyncio.get_running_loop()
    monitor.call_soon(stream.desk.release, session)
    assert reasons(await stream.ask([session])) == ["OK"]
