"""Sessions without frames: as long as their cache lets them live, their rows where it wants them, and whoever
comes too late hears why."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from kvtier.v1 import control_pb2
from kvtier_agent import idlesessions
from kvtier_agent.admission_wire import admission_message, admission_of, admission_terms, admission_text
from kvtier_agent.blockhost import BlockHost
from kvtier_agent.cachehost import CacheHost
from kvtier_core.admission import UNDECLARED, AdmissionTerms, Idle, IdleTerms
from kvtier_core.errors import CoreError, Reason
from tests.engine.agent_process import baseline_manifest
from tests.unit.agent.agent_fakes import Bench, frame
from tests.unit.agent.test_agent_node import open_session

# The bench's agent takes a session for idle after 5 s.
IDLE = 5.0
TTL = 60.0


def terms(idle: Idle, ttl: float = TTL) -> AdmissionTerms:
    return AdmissionTerms(sessions=IdleTerms(idle, ttl))


async def bench_of(folder: Path, declared: AdmissionTerms) -> Bench:
    bench = Bench(folder)
    await bench.node.apply_baseline(
        bench.command(), bench.baseline.canonical(), bench.baseline.digest(), "", declared
    )
    return bench


@pytest.mark.parametrize(
    ("declared", "lives"),
    [
        (UNDECLARED, IDLE),
        (terms(Idle.DROP), IDLE),
        (terms(Idle.DROP, 2.0), 2.0),
        (terms(Idle.KEEP), TTL),
        (terms(Idle.DEMOTE), TTL),
        (terms(Idle.KEEP, 2.0), 2.0),
    ],
    ids=["undeclared", "drop", "drop-sooner", "keep", "demote", "keep-sooner"],
)
async def test_a_session_lives_as_long_as_its_cache_says(
    tmp_path: Path, declared: AdmissionTerms, lives: float
) -> None:
    bench = await bench_of(tmp_path, declared)
    session = await open_session(bench)
    name, generation = session.handle.session_id, session.handle.generation
    bench.clock.advance(lives - 0.1)
    assert await bench.node.expire_idle_sessions() == 0
    assert bench.node.session(name, generation, session.tenant) is session
    bench.clock.advance(0.2)
    assert await bench.node.expire_idle_sessions() == 1
    with pytest.raises(CoreError) as late:
        bench.node.session(name, generation, session.tenant)
    assert (late.value.reason, late.value.facts) == (Reason.SESSION_UNKNOWN, {"ended": "idle"})
    assert f"no frame for {lives:g} s" in late.value.message
    with pytest.raises(CoreError) as other:
        bench.node.session(name, generation, "another tenant")
    assert other.value.reason is Reason.TENANT_MISMATCH
    await bench.close()


async def test_sessions_live_on_while_another_engine_becomes_the_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the engine's adoption and the moment at which its cache's terms are told to it."""
    bench = await bench_of(tmp_path, terms(Idle.KEEP))
    session = await open_session(bench)
    bench.candidate = baseline_manifest(budgets={"dram": 96 << 20})
    await bench.grant(gates=())
    bench.clock.advance(IDLE + 1)
    ended: list[int] = []
    admit = CacheHost.admit

    def slow(host: CacheHost, declared: AdmissionTerms) -> None:
        ended.append(len(idlesessions.over([host], IDLE)))
        admit(host, declared)

    monkeypatch.setattr(CacheHost, "admit", slow)
    await bench.node.apply_baseline(
        bench.command(), bench.candidate.canonical(), bench.candidate.digest(), "", terms(Idle.KEEP)
    )
    assert session.host.baseline_digest == bench.candidate.digest()
    assert ended == [0]
    session.check_open()
    await bench.close()


class Told:
    """A block host whose store remembers the terms that it was told."""

    def __init__(self) -> None:
        self.store = self
        self.terms: list[AdmissionTerms] = []

    def admit(self, declared: AdmissionTerms) -> None:
        self.terms.append(declared)


async def test_another_store_is_told_the_terms_also_when_they_are_those_of_the_former_one(
    tmp_path: Path,
) -> None:
    bench = await bench_of(tmp_path, terms(Idle.KEEP))
    host, store = bench.node.caches["cache-uid-1"], Told()
    host.blocks = cast(BlockHost, store)
    for _ in range(2):
        host.admit(terms(Idle.KEEP))
    assert store.terms == [terms(Idle.KEEP)]
    host.admit(UNDECLARED)
    assert store.terms == [terms(Idle.KEEP), UNDECLARED]
    host.blocks = None
    await bench.close()


async def test_a_frame_that_comes_when_its_session_has_been_ended_is_refused_though_it_is_not_closed_yet(
    tmp_path: Path,
) -> None:
    """Or it would be answered, and the next one not."""
    bench = await bench_of(tmp_path, terms(Idle.DROP))
    session = await open_session(bench)
    bench.clock.advance(IDLE + 0.1)
    assert idlesessions.over(bench.node.caches.values(), IDLE) == [session]
    assert session.handle.session_id in session.host.sessions
    with pytest.raises(CoreError) as late:
        await session.host.frames.attend(session, frame(session.handle.session_id, 1), 1)
    assert (late.value.reason, late.value.facts) == (Reason.SESSION_UNKNOWN, {"ended": "idle"})
    with pytest.raises(CoreError):
        bench.node.session(session.handle.session_id, session.handle.generation, session.tenant)
    assert not session.frames_running and idlesessions.over(bench.node.caches.values(), IDLE) == [session]
    await bench.close()


@pytest.mark.parametrize("what", ["running", "just-answered"])
async def test_a_session_whose_frame_has_begun_is_not_ended(tmp_path: Path, what: str) -> None:
    bench = await bench_of(tmp_path, terms(Idle.DROP))
    session = await open_session(bench)
    bench.clock.advance(IDLE + 0.1)
    session.begin_frame()
    if what == "just-answered":
        session.host.used(session)
        session.end_frame()
    assert await bench.node.expire_idle_sessions() == 0
    session.check_open()
    if what == "running":
        session.end_frame()
        assert await bench.node.expire_idle_sessions() == 1
    await bench.close()


async def test_a_session_that_its_engine_closed_was_not_ended_by_the_agent(tmp_path: Path) -> None:
    bench = await bench_of(tmp_path, terms(Idle.KEEP))
    session = await open_session(bench)
    await session.host.close_session(session)
    with pytest.raises(CoreError) as unknown:
        bench.node.session(session.handle.session_id, session.handle.generation, session.tenant)
    assert (unknown.value.reason, unknown.value.facts) == (Reason.SESSION_UNKNOWN, {})
    await bench.close()


class Moves:
    """What an engine moves down: `left` chunks of each session."""

    def __init__(self, bench: Bench, left: int) -> None:
        self.left: dict[str, int] = {}
        self.asked: list[str] = []
        self._each = left
        bench.engine.demote_session = self  # type: ignore[attr-defined]

    def __call__(self, session_id: str, generation: int, most: int) -> int:
        self.asked.append(session_id)
        left = self.left.setdefault(session_id, self._each)
        moved = min(left, most)
        self.left[session_id] = left - moved
        return moved


async def test_rows_of_an_idle_session_move_down_once_until_it_is_used_again(tmp_path: Path) -> None:
    bench = await bench_of(tmp_path, terms(Idle.DEMOTE))
    engine = Moves(bench, idlesessions.MOST_CHUNKS + 3)
    session = await open_session(bench)
    bench.clock.advance(IDLE - 0.1)
    assert await bench.node.demote_idle_sessions() == 0 == len(engine.asked)
    bench.clock.advance(0.2)
    moved = [await bench.node.demote_idle_sessions() for _ in range(4)]
    assert moved == [idlesessions.MOST_CHUNKS, 3, 0, 0]
    assert len(engine.asked) == 3, "there is nothing left to ask for"
    session.host.used(session)
    engine.left.clear()
    assert await bench.node.demote_idle_sessions() == 0
    bench.clock.advance(IDLE + 0.1)
    assert await bench.node.demote_idle_sessions() == idlesessions.MOST_CHUNKS
    await bench.close()


async def test_sessions_whose_rows_cannot_move_keep_no_others_waiting(tmp_path: Path) -> None:
    bench = await bench_of(tmp_path, terms(Idle.DEMOTE))
    engine = Moves(bench, 1)
    sessions = [await open_session(bench) for _ in range(idlesessions.MOST_SESSIONS + 1)]
    failing = {one.handle.session_id for one in sessions[:-1]}

    def demote(session_id: str, generation: int, most: int) -> int:
        if session_id in failing:
            raise CoreError(Reason.STORAGE_UNAVAILABLE, "the device is gone")
        return engine(session_id, generation, most)

    bench.engine.demote_session = demote  # type: ignore[attr-defined]
    bench.clock.advance(IDLE + 0.1)
    assert [await bench.node.demote_idle_sessions() for _ in range(2)] == [0, 1]
    # After its next frame it is tried again.
    failing.clear()
    sessions[0].host.used(sessions[0])
    bench.clock.advance(IDLE + 0.1)
    assert await bench.node.demote_idle_sessions() == 1
    await bench.close()


@pytest.mark.parametrize("declared", [UNDECLARED, terms(Idle.KEEP)], ids=["undeclared", "keep"])
async def test_rows_stay_where_nobody_wants_them_moved(tmp_path: Path, declared: AdmissionTerms) -> None:
    bench = await bench_of(tmp_path, declared)
    engine = Moves(bench, 5)
    await open_session(bench)
    bench.clock.advance(IDLE + 0.1)
    assert await bench.node.demote_idle_sessions() == 0 == len(engine.asked)
    await bench.close()


async def test_an_engine_that_moves_nothing_down_is_asked_for_nothing(tmp_path: Path) -> None:
    bench = await bench_of(tmp_path, terms(Idle.DEMOTE))
    session = await open_session(bench)
    bench.clock.advance(IDLE + 0.1)
    assert await bench.node.demote_idle_sessions() == 0
    assert session.demoted_ns == session.last_used_ns
    await bench.close()


async def test_a_silent_stream_lives_as_long_as_its_sessions_may(tmp_path: Path) -> None:
    bench = await bench_of(tmp_path, terms(Idle.KEEP))
    assert bench.node.longest_idle_seconds == TTL
    await bench.close()
    bench = await bench_of(tmp_path / "undeclared", UNDECLARED)
    assert bench.node.longest_idle_seconds == IDLE
    await bench.close()


@pytest.mark.parametrize("idle", list(Idle), ids=str)
def test_the_terms_survive_the_wire_and_the_record(idle: Idle) -> None:
    declared = terms(idle, 90.5)
    request = control_pb2.ApplyBaselineRequest(admission=admission_message(declared))
    assert admission_terms(request) == declared
    assert admission_of(admission_text(declared)) == declared


@pytest.mark.parametrize(
    ("sessions", "says"),
    [({"idle": "sleep", "ttl_ms": 1}, "sessions.idle 'sleep'"), ({"idle": "keep"}, "sessions.ttl 0")],
    ids=["policy", "ttl"],
)
def test_what_cannot_be_meant_is_refused(sessions: dict[str, Any], says: str) -> None:
    message = control_pb2.CacheAdmission(sessions=control_pb2.CacheSessions(**sessions))
    with pytest.raises(CoreError, match=says) as refused:
        admission_terms(control_pb2.ApplyBaselineRequest(admission=message))
    assert refused.value.reason is Reason.BAD_ARGUMENT
