"""The node over fake engines: order of durable and visible, publication, counters, idle sessions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier_agent.cachesession import Session
from kvtier_agent.engine_port import (
    EngineRunner,
    ExactnessClass,
    FrameComparison,
    FrameInput,
    FrameMode,
    FrameResult,
    TierReport,
)
from kvtier_agent.evidence_port import GateTerms, Outcome
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import ServedArm, SessionFacts
from kvtier_core.release.leases import FenceToken
from kvtier_evidence.gates import ONE
from kvtier_evidence.window import MetricCounts, WindowKey
from tests.unit.agent.agent_fakes import SECONDS, SELECTION, Bench, FakeEngine, frame

EMPTY_SET = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.apply()
    yield made
    await made.close()


async def open_session(bench: Bench, root: str = "root", **more: object) -> Session:
    host = next(iter(bench.node.caches.values()))
    facts = SessionFacts("beta", "", root, root, **more)  # type: ignore[arg-type]
    return await host.open_session(facts, 0.125, 100, "")


async def prefill(session: Session) -> None:
    await session.host.frames.attend(session, frame(session.handle.session_id, 0), 7)


async def test_a_lease_that_ends_while_the_answer_is_computed_publishes_the_exact_one(bench: Bench) -> None:
    await bench.grant(ttl_ms=1000)
    session = await open_session(bench)
    await prefill(session)
    bench.engine.hook = lambda: bench.clock.advance(2)
    answer = await session.host.frames.attend(session, frame(session.handle.session_id, 1), 1)
    assert bench.engine.modes[-1].publish_candidate
    assert answer.arm is ServedArm.BASELINE
    assert answer.fallback == "LeaseExpired"


@pytest.mark.parametrize("ends", ["expired", "revoked"])
async def test_a_candidates_answer_does_not_leave_after_its_permission_though_it_was_ready_before(
    bench: Bench, ends: str
) -> None:
    """The engine may be long about its last write after it has asked; the rows exist by then."""
    await bench.grant(ttl_ms=1000)
    session = await open_session(bench)
    await prefill(session)
    step = bench.engine.step

    def late(wanted: FrameInput, mode: FrameMode) -> FrameResult:
        result = step(wanted, mode)
        if result.from_candidate and ends == "expired":
            bench.clock.advance(2)
        elif result.from_candidate:
            session.host.enforcement.revoke("GateFailed")
        return result

    bench.engine.step = late  # type: ignore[method-assign]
    answer = await session.host.frames.attend(session, frame(session.handle.session_id, 1), 1)
    assert [mode.publish_candidate for mode in bench.engine.modes] == [True, True, False]
    assert bench.engine.frames[-1] == bench.engine.frames[-2]
    assert answer.arm is ServedArm.BASELINE
    assert answer.result.receipt.exactness is ExactnessClass.EXACT
    assert answer.fallback == {"expired": "LeaseExpired", "revoked": "GateFailed"}[ends]


async def test_a_revocation_counts_the_step_that_still_runs(bench: Bench) -> None:
    await bench.grant()
    session = await open_session(bench)
    await prefill(session)
    host = session.host
    seen: list[int] = []
    bench.engine.hook = lambda: seen.append(host.enforcement.in_flight)
    await host.frames.attend(session, frame(session.handle.session_id, 1), 1)
    assert seen == [1]
    proof = await bench.node.revoke(bench.command(), "GateFailed", b"n")
    assert proof.in_flight_candidate == 0
    assert proof.candidate_digest == ""


async def test_a_step_whose_caller_gave_up_is_in_flight_until_the_engine_has_ended_it(bench: Bench) -> None:
    await bench.grant()
    session = await open_session(bench)
    await prefill(session)
    host = session.host
    begun, release = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(120)

    bench.engine.hook = hang
    step = asyncio.create_task(host.frames.attend(session, frame(session.handle.session_id, 1), 1))
    await asyncio.to_thread(begun.wait, 120)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert host.enforcement.in_flight == 1
    release.set()
    # The engine's next call begins when the one before is over.
    await host.runner.call(lambda: None)
    assert host.enforcement.in_flight == 0


async def test_a_step_that_is_not_taken_is_not_in_flight(bench: Bench) -> None:
    await bench.grant()
    session = await open_session(bench)
    await prefill(session)
    host = session.host
    assert await host.runner.close(20)
    with pytest.raises(CoreError) as refused:
        await host.frames.attend(session, frame(session.handle.session_id, 1), 1)
    assert refused.value.reason is Reason.CACHE_UNKNOWN
    assert host.enforcement.in_flight == 0


async def test_a_baseline_under_a_higher_fence_ends_the_candidate_though_its_digest_runs_already(
    bench: Bench,
) -> None:
    await bench.grant(ttl_ms=60_000)
    session = await open_session(bench)
    await prefill(session)
    running = bench.engine
    await bench.apply()
    assert bench.engine is running
    proof = await bench.node.prove(session.host.name, bench.fence, bench.node.boot_id, b"n")
    assert (proof.candidate_digest, proof.in_flight_candidate) == ("", 0)
    assert (proof.baseline_digest, proof.highest_fence) == (bench.baseline.digest(), bench.fence)
    answer = await session.host.frames.attend(session, frame(session.handle.session_id, 1), 1)
    assert not bench.engine.modes[-1].publish_candidate
    assert (answer.arm, answer.fallback) == (ServedArm.BASELINE, "BaselineApplied")
    with pytest.raises(CoreError) as refused:
        await bench.node.renew(session.host.name, FenceToken(2), bench.candidate.digest(), 60_000)
    assert refused.value.reason is Reason.FENCE_STALE


async def test_a_baseline_that_ends_nothing_keeps_the_word_of_an_earlier_return(bench: Bench) -> None:
    await bench.grant(ttl_ms=1000)
    bench.clock.advance(2)
    await bench.apply()
    [host] = bench.node.caches.values()
    assert host.enforcement.returned is not None
    assert (host.enforcement.returned.reason.value, host.enforcement.returned.fence) == ("LeaseExpired", 2)


async def test_a_revocation_waits_for_no_report_of_an_engine_that_hangs(bench: Bench) -> None:
    await bench.grant()
    release, tiers = threading.Event(), bench.engine.tiers

    def hang() -> Sequence[TierReport]:
        release.wait(120)
        return tiers()

    bench.engine.tiers = hang  # type: ignore[method-assign]
    asking = [asyncio.create_task(bench.node.refresh_reports()) for _ in range(3)]
    try:
        async with asyncio.timeout(60):
            proof = await bench.node.revoke(bench.command(), "IntentAbort", b"n")
        assert not any(task.done() for task in asking)
    finally:
        release.set()
        await asyncio.gather(*asking)
    assert proof.candidate_digest == ""


async def test_compute_never_runs_on_the_event_loop(bench: Bench) -> None:
    session = await open_session(bench)
    await prefill(session)
    assert threading.current_thread().name not in bench.engine.threads


async def test_only_sessions_that_need_an_index_are_opened_with_the_candidate(bench: Bench) -> None:
    await open_session(bench)
    assert bench.engine.opened[-1].candidate is None
    await bench.grant(stage="Shadow", traffic="0", sample="1")
    await open_session(bench)
    assert bench.engine.opened[-1].candidate is not None
    await bench.grant(stage="Shadow", traffic="0", sample="0")
    await open_session(bench, "other")
    assert bench.engine.opened[-1].candidate is None


async def test_a_compared_step_counts_once_with_its_largest_layer(bench: Bench) -> None:
    key = await bench.grant(stage="Shadow", traffic="0", sample="1")
    session = await open_session(bench)
    await prefill(session)
    host = session.host
    errors = []
    for layer, diff in enumerate((0.03, 0.01)):
        bench.engine.comparison = FrameComparison(diff, 1.0)
        answer = await host.frames.attend(session, frame(session.handle.session_id, 1, layer), 1)
        errors.append(answer.compared_error)
    assert errors == [None, pytest.approx(0.03)]
    assert host.report_outcome(session, Outcome(2, 0.1, 0.2, False)) == ""
    bench.clock.advance(30)
    [metric] = metrics_of(bench, key, "outputRelativeError")
    assert (metric.histogram.n, metric.histogram.missing) == (1, 0)
    assert metric.above_up == {"output": 0}


async def test_a_compared_step_that_is_sent_again_counts_once(bench: Bench) -> None:
    """0.2 in one step of two that are above the limit of 0.05, whatever is repeated."""
    key = await bench.grant(sample="1")
    session = await open_session(bench)
    await prefill(session)
    handle = session.handle.session_id
    for step, diff, times in ((1, 0.2, 3), (2, 0.01, 1)):
        bench.engine.comparison = FrameComparison(diff, 1.0)
        for _ in range(times):
            for layer in range(2):
                # The first decode step is always compared, others by their hash.
                session.first_decode_step = None
                await session.host.frames.attend(session, frame(handle, step, layer), 1)
    session.host.report_outcome(session, Outcome(2, 0.1, 0.2, False))
    bench.clock.advance(30)
    [counts] = metrics_of(bench, key, "outputRelativeError")
    assert counts.above_down == {"output": ONE // 2}


@pytest.mark.parametrize(
    ("diff", "exact", "missing"),
    [(0.0, 0.0, 0), (0.1, 0.0, 1), (float("nan"), 1.0, 1)],
    ids=["both-zero-is-zero", "only-exact-zero-is-missing", "not-a-number-is-missing"],
)
async def test_degenerate_norms(bench: Bench, diff: float, exact: float, missing: int) -> None:
    key = await bench.grant(stage="Shadow", traffic="0", sample="1")
    session = await open_session(bench)
    await prefill(session)
    bench.engine.comparison = FrameComparison(diff, exact)
    for layer in range(2):
        await session.host.frames.attend(session, frame(session.handle.session_id, 1, layer), 1)
    session.host.report_outcome(session, Outcome(2, 0.1, 0.2, False))
    bench.clock.advance(30)
    [metric] = metrics_of(bench, key, "outputRelativeError")
    assert (metric.histogram.n, metric.histogram.missing) == (1, missing)


@pytest.mark.parametrize(
    ("reason", "counter"),
    [
        (Reason.NO_DESTINATION_CAPACITY, "allocationFailures"),
        (Reason.IDENTITY_MISMATCH, "isolationFailures"),
        (Reason.RECYCLED_DESTINATION, "isolationFailures"),
        (Reason.STALE_CACHE_GENERATION, "replayFailures"),
        (Reason.FRONTIER_MISMATCH, None),
    ],
)
async def test_zero_tolerance_counters(bench: Bench, reason: Reason, counter: str | None) -> None:
    key = await bench.grant()
    session = await open_session(bench)
    bench.engine.refusal = CoreError(reason, "refused")
    with pytest.raises(CoreError):
        await prefill(session)
    assert zero_tolerance(bench, key) == ({} if counter is None else {counter: 1})


async def test_a_baseline_session_moves_no_counter_of_the_candidate(bench: Bench) -> None:
    key = await bench.grant(traffic="0")
    session = await open_session(bench)
    bench.engine.refusal = CoreError(Reason.NO_DESTINATION_CAPACITY, "full")
    with pytest.raises(CoreError):
        await prefill(session)
    assert zero_tolerance(bench, key) == {}


async def test_an_approximate_answer_without_permission_is_an_illegal_fallback(bench: Bench) -> None:
    key = await bench.grant(traffic="0")
    session = await open_session(bench)
    bench.engine.approximate_without_leave = True
    await prefill(session)
    assert zero_tolerance(bench, key) == {"illegalFallbacks": 1}


@pytest.mark.parametrize(
    ("widened", "failed", "counted"),
    [(0, False, 0), (2, False, 1), (0, True, 1)],
    ids=["plain", "widened", "failed"],
)
async def test_a_way_that_the_candidates_contract_does_not_list_is_an_illegal_fallback(
    bench: Bench, widened: int, failed: bool, counted: int
) -> None:
    key = await bench.grant(listed=False)
    session = await open_session(bench)
    bench.engine.selection = replace(SELECTION, widened=widened, failed=failed)
    await prefill(session)
    assert zero_tolerance(bench, key) == ({"illegalFallbacks": counted} if counted else {})


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        pytest.param(False, 0.5, id="still-running-at-settle-takes-what-the-agent-saw"),
        pytest.param(True, 0.25, id="reported-in-time-takes-the-engines-times"),
    ],
)
async def test_time_per_token_of_a_request(bench: Bench, reported: bool, expected: float) -> None:
    key = await bench.grant(gates=(GateTerms("tail", "tpotRatio", 75.0, "2"),), settle_ms=3000)
    session = await open_session(bench)
    host = session.host
    for step in range(4):
        bench.clock.advance(0.5)
        for layer in range(2):
            queries = 7 if step == 0 else 1
            await host.frames.attend(session, frame(session.handle.session_id, step, layer), queries)
    if reported:
        assert host.report_outcome(session, Outcome(5, 1.0, 2.0, False)) == ""
    bench.clock.advance(30)
    [metric] = metrics_of(bench, key, "tpotRatio")
    assert (metric.histogram.n, metric.histogram.missing) == (1, 0)
    [cell] = metric.histogram.bins
    assert 2 ** (cell / 256) < expected <= 2 ** ((cell + 1) / 256)


@pytest.mark.parametrize(
    ("threshold", "blocks"), [("", 0), ("0.4", 1)], ids=["unknown", "of-a-closed-window"]
)
async def test_a_ratio_gates_blocks_are_counted_above_the_threshold_it_was_given(
    bench: Bench, threshold: str, blocks: int
) -> None:
    gates = (GateTerms("tail", "tpotRatio", 75.0, "2", threshold),)
    key = await bench.grant(gates=gates, settle_ms=3000)
    session = await open_session(bench)
    for step in range(4):
        bench.clock.advance(1.0)
        for layer in range(2):
            queries = 7 if step == 0 else 1
            await session.host.frames.attend(session, frame(session.handle.session_id, step, layer), queries)
    bench.clock.advance(30)
    [host] = bench.node.caches.values()
    found = host.evidence.read(key, "", 0).increments.blocks
    # One session is one block of its own, too.
    counted = {"tail": blocks, "tail/session": blocks} if blocks else {}
    assert {name: sums.blocks for name, sums in found.items()} == counted


@pytest.mark.parametrize("threshold", ["fast", "-1", "0", "NaN", "Infinity"])
async def test_a_threshold_that_is_no_time_is_refused_by_name(bench: Bench, threshold: str) -> None:
    with pytest.raises(CoreError, match="tail: pair_threshold") as refused:
        await bench.grant(gates=(GateTerms("tail", "tpotRatio", 75.0, "2", threshold),))
    assert refused.value.reason is Reason.BAD_ARGUMENT


async def test_a_grant_that_is_not_durable_opens_no_window_and_drops_none(
    bench: Bench, tmp_path: Path
) -> None:
    """Two windows are kept: opening a third would drop the one whose tail is still to be read."""
    kept = [await bench.grant(stage="Shadow", traffic="0"), await bench.grant(stage="Canary")]
    (tmp_path / "state" / "fences").rename(tmp_path / "state" / "away")
    with pytest.raises(CoreError) as refused:
        await bench.grant(stage="Ramp")
    assert refused.value.reason is Reason.FENCE_NOT_DURABLE
    [host] = bench.node.caches.values()
    for key in kept:
        host.evidence.read(key, "", 0)
    with pytest.raises(CoreError) as unknown:
        host.evidence.read(replace(kept[1], stage="Ramp", opening_fence=bench.fence), "", 0)
    assert unknown.value.reason is Reason.WINDOW_UNKNOWN
    assert host.window == kept[1]


async def test_a_grant_whose_gates_cannot_be_collected_spends_no_fence(bench: Bench) -> None:
    with pytest.raises(CoreError) as refused:
        await bench.grant(gates=(GateTerms("odd", "noSuchMetric", 75.0, "1"),))
    assert refused.value.reason is Reason.BAD_ARGUMENT
    assert bench.node.highest_fence("cache-uid-1") == bench.fence - 1


@pytest.mark.parametrize("times", [1, 3], ids=["sent-once", "sent-again"])
async def test_stall_is_counted_once_for_a_request_that_is_still_running(bench: Bench, times: int) -> None:
    key = await bench.grant(gates=(GateTerms("stall", "exposedStallFraction", 0.0, "0.9"),), settle_ms=9000)
    session = await open_session(bench)
    for step in range(3):
        bench.clock.advance(1.0)
        for layer in range(2):
            queries = 7 if step == 0 else 1
            for _ in range(times):
                await session.host.frames.attend(
                    session, frame(session.handle.session_id, step, layer), queries
                )
    bench.clock.advance(30)
    [metric] = metrics_of(bench, key, "exposedStallFraction")
    # Two decode steps of two layers with 0.25 s each, over two seconds from first to last token.
    [cell] = metric.histogram.bins
    assert 2 ** (cell / 256) < 0.5 <= 2 ** ((cell + 1) / 256)


async def test_a_failed_build_is_a_fault_that_the_same_command_repairs(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.build_refusal = CoreError(Reason.STORAGE_UNAVAILABLE, "disk full")
    with pytest.raises(CoreError):
        await bench.apply()
    assert "disk full" in next(iter(bench.node.faults.values()))
    bench.build_refusal = None
    again = bench.command("content-1", fence=1)
    digest = bench.baseline.digest()
    assert await bench.node.apply_baseline(again, bench.baseline.canonical(), digest) == digest
    assert not bench.node.faults
    await bench.close()


async def test_restart_restores_every_cache_that_can_be_and_names_the_others(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.apply()
    await bench.grant()
    await bench.close()
    reborn = Bench(tmp_path)
    await reborn.node.restore()
    [host] = reborn.node.caches.values()
    assert host.enforcement.lease() is None
    assert host.enforcement.returned is not None
    assert host.enforcement.returned.fence == 2
    await reborn.close()
    for path in (tmp_path / "state" / "manifests").iterdir():
        path.write_bytes(b"damaged\nbytes")
    broken = Bench(tmp_path)
    await broken.node.restore()
    assert not broken.node.caches
    assert "STORAGE_UNAVAILABLE" in broken.node.faults["cache-uid-1"]
    await broken.close()


async def test_a_baseline_of_other_bytes_replaces_the_engine_and_ends_sessions(bench: Bench) -> None:
    old = bench.engine
    await open_session(bench)
    bench.baseline = bench.baseline.model_copy(update={"page_tokens": 32})
    await bench.apply()
    assert old.closed
    assert bench.engine is not old
    assert bench.node.session_count() == 0


async def test_idle_sessions_end_with_or_without_a_stream_but_not_while_a_frame_runs(bench: Bench) -> None:
    idle, silent, busy = [await open_session(bench, root) for root in ("a", "b", "c")]
    silent.streaming = busy.streaming = True
    begun, release = threading.Event(), threading.Event()
    bench.engine.hook = lambda: begun.set() or (release.wait(120) and None)
    running = asyncio.create_task(prefill(busy))
    await asyncio.to_thread(begun.wait, 120)
    bench.clock.advance(4.9)
    assert await bench.node.expire_idle_sessions() == 0
    bench.clock.advance(0.2)
    expiring = asyncio.create_task(bench.node.expire_idle_sessions())
    release.set()
    async with asyncio.timeout(60):
        assert await expiring == 2
        await running
    assert list(idle.host.sessions) == [busy.handle.session_id]
    bench.clock.advance(5.1)
    assert await bench.node.expire_idle_sessions() == 1
    assert silent.handle.session_id not in silent.host.sessions


async def test_a_session_that_an_engine_cannot_close_now_is_closed_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_agent.node.REPORT_SECONDS", 0.01)
    session = await open_session(bench)
    runner, release = session.host.runner, threading.Event()
    closed: list[str] = []
    bench.engine.close_session = lambda name, _: len(closed.append(name) or closed)  # type: ignore[method-assign, func-returns-value]
    hung = asyncio.create_task(runner.call(lambda: release.wait(120)))
    await asyncio.sleep(0)
    bench.clock.advance(6)
    async with asyncio.timeout(60):
        assert await bench.node.expire_idle_sessions() == 1
        assert not session.host.sessions and not closed
        release.set()
        await hung
        await runner.call(lambda: None)
    assert closed == [session.handle.session_id]


@pytest.mark.parametrize("stage", ["Shadow", "Canary"])
async def test_the_one_query_at_the_end_of_a_later_prefill_is_no_decode(bench: Bench, stage: str) -> None:
    """A next turn's prompt of 257 tokens travels in blocks of 256 and 1."""
    key = await bench.grant(stage=stage, traffic="1" if stage == "Canary" else "0", sample="1")
    session = await open_session(bench)
    handle = session.handle.session_id
    await prefill(session)
    compared = []
    for step, blocks in ((1, ((7, 256), (263, 1))), (2, ((264, 1),))):
        for layer in range(2):
            for first, queries in blocks:
                asked = replace(frame(handle, step, layer), first_query_position=first)
                await session.host.frames.attend(session, asked, queries)
                compared.append(bench.engine.modes[-1].compare)
    assert compared == [False] * 4 + [True] * 2
    session.host.report_outcome(session, Outcome(2, 0.1, 0.2, False))
    bench.clock.advance(30)
    [metric] = metrics_of(bench, key, "outputRelativeError")
    assert (metric.histogram.n, metric.histogram.missing) == (1, 0)


async def test_the_manifest_set_digest_names_the_set(bench: Bench) -> None:
    before = bench.node.manifest_set_digest()
    assert before != EMPTY_SET
    bench.baseline = bench.baseline.model_copy(update={"page_tokens": 32})
    await bench.apply()
    assert bench.node.manifest_set_digest() != before


async def test_a_full_engine_queue_refuses_and_forgets_nothing(bench: Bench) -> None:
    release = threading.Event()
    runner = EngineRunner(FakeEngine(bench.baseline), "x", 2)
    running = [asyncio.create_task(runner.call(release.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(CoreError) as refused:
        await runner.call(lambda: None)
    assert refused.value.reason is Reason.QUEUE_FULL
    closing = asyncio.create_task(runner.call(lambda: "closed", bounded=False))
    release.set()
    assert await asyncio.gather(*running) == [True, True]
    assert await closing == "closed"
    assert await runner.call(lambda: 7) == 7
    assert runner.pending == 0
    await runner.close(10)


def metrics_of(bench: Bench, key: WindowKey, name: str) -> list[MetricCounts]:
    host = next(iter(bench.node.caches.values()))
    counts = host.evidence.read(key, "", 0).increments
    return [values for (metric, _), values in counts.metrics.items() if metric == name]


def zero_tolerance(bench: Bench, key: WindowKey) -> dict[str, int]:
    host = next(iter(bench.node.caches.values()))
    return dict(host.evidence.read(key, "", 0).increments.zero_tolerance)


async def test_a_caches_keys_outlive_grants_revocations_and_restarts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    digest = bench.baseline.digest()
    await bench.node.apply_baseline(bench.command(), bench.baseline.canonical(), digest, "chat-keys")
    await bench.grant()
    await bench.node.revoke(bench.command(), "test", b"nonce")
    await bench.close()
    reborn = Bench(tmp_path)
    await reborn.node.restore()
    await reborn.close()
    assert bench.key_secrets == reborn.key_secrets == ["chat-keys"]


async def test_other_keys_are_another_engine_though_the_manifest_is_the_same(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    digest = bench.baseline.digest()
    for name in ("chat-keys", "chat-keys", "other-keys"):
        await bench.node.apply_baseline(bench.command(name), bench.baseline.canonical(), digest, name)
    assert bench.key_secrets == ["chat-keys", "other-keys"]
    await bench.close()


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        pytest.param(0, 60, id="at-once"),
        pytest.param(20, 40, id="waited-in-a-socket"),
        pytest.param(-5, 60, id="said-to-be-of-the-future"),
        pytest.param(None, 60, id="not-told"),
    ],
)
async def test_a_permission_counts_from_when_it_was_sent_and_never_from_later_than_its_arrival(
    tmp_path: Path, late: int | None, expected: int
) -> None:
    bench = Bench(tmp_path)
    await bench.apply()

    def sent() -> int:
        return 0 if late is None else bench.clock.now - late * SECONDS

    await bench.grant(sent_ns=sent())
    host = next(iter(bench.node.caches.values()))
    for _ in range(2):
        lease = host.enforcement.lease()
        assert lease is not None and lease.remaining_ms(bench.clock.now) == expected * 1000
        bench.clock.advance(30)
        await bench.node.renew(
            host.name, FenceToken(bench.fence), bench.candidate.digest(), 60_000, sent_ns=sent()
        )
    await bench.close()


async def test_a_grant_that_was_on_its_way_for_longer_than_its_lease_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.apply()
    bench.clock.advance(100)
    with pytest.raises(CoreError) as refused:
        await bench.grant(sent_ns=bench.clock.now - 61 * SECONDS)
    assert refused.value.reason is Reason.LEASE_EXPIRED
    await bench.close()
