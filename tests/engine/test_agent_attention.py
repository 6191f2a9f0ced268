"""A real agent process, engine side: exact answers through three tiers, blocks, and every typed refusal."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.v1 import attention_pb2, blocks_pb2, common_pb2, control_pb2
from kvtier_agent.boottime import boottime_ns
from kvtier_crds.manifest import Geometry, RuntimeManifest
from tests.engine.agent_process import (
    CACHE,
    Agent,
    baseline_manifest,
    detail_of,
    quest_candidate,
    running_agent,
    until,
)
from tests.engine.attention_driver import CALL_SECONDS, Driver, Engine, named, wire_geometry

pytestmark = pytest.mark.timeout(600)

# Two layers, chunks of 256 rows of 2 x 2 x 64 float32: 262,144 bytes of payload a chunk. Budgets hold four
# open or sealed chunks in each of the fast tiers, so 2,000 tokens reach the nvme tier.
CHUNK_BYTES = 256 * 2 * 2 * 64 * 4
SMALL = {"gpu-sim": 4 * CHUNK_BYTES, "dram": 4 * CHUNK_BYTES, "nvme": 64 * CHUNK_BYTES}


@pytest.fixture(scope="module")
def manifest() -> RuntimeManifest:
    return baseline_manifest(budgets=SMALL)


@pytest.fixture(scope="module")
def agent(manifest: RuntimeManifest) -> Iterator[Agent]:
    with running_agent() as started:
        started.apply_baseline(manifest)
        yield started


@pytest.fixture
def engine(agent: Agent) -> Iterator[Engine]:
    with Engine(agent.socket_path) as connected:
        yield connected


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return common_pb2.Reason.Name(detail_of(refused.value).reason)


def reading(engine: Engine, request: blocks_pb2.ReadBlockRequest) -> Callable[[], Any]:
    return lambda: list(engine.blocks.Read(request, timeout=CALL_SECONDS))


def test_exact_attention_through_three_tiers(agent: Agent, engine: Engine, manifest: RuntimeManifest) -> None:
    session = engine.open(manifest)
    assert session.opened.arm == attention_pb2.ARM_BASELINE
    assert session.opened.manifest_digest == manifest.digest() == session.opened.baseline_digest
    session.forward(1500)
    tiers: set[str] = set()
    for _ in range(4):
        for layer in range(2):
            frame = session.frame(layer, 1, session.frontier)
            session.send(frame)
            answer = session.receive()
            session.note(layer, frame)
            error = np.abs(session.output(answer) - session.expected(frame)).max()
            assert error < 2e-5
            assert answer.receipt.exactness == attention_pb2.EXACT
            assert answer.receipt.simulated
            assert answer.receipt.rows_attended == answer.receipt.frontier
            tiers |= set(answer.receipt.bytes_by_tier)
        session.step += 1
    assert tiers == {"gpu-sim", "dram", "nvme"}
    state = {tier.tier_class: tier for tier in agent.state().tiers}
    assert state["gpu-sim"].simulated
    assert not state["dram"].simulated
    assert session.close() == 1504


def test_prefill_answers_equal_the_reference(engine: Engine, manifest: RuntimeManifest) -> None:
    session = engine.open(manifest)
    frame = session.frame(0, 200, 0)
    session.send(frame)
    answer = session.receive()
    session.note(0, frame)
    assert np.abs(session.output(answer) - session.expected(frame)).max() < 2e-5
    session.close()


def test_a_replayed_frame_gets_the_same_bytes(engine: Engine, manifest: RuntimeManifest) -> None:
    session = engine.open(manifest)
    session.forward(300)
    frame = session.frame(0, 1, 300)
    session.send(frame)
    first = session.receive()
    session.end_stream()
    again = Driver(engine, session.geometry, session.opened, session.tenant)
    again.send(frame)
    assert again.receive().out == first.out
    again.close()


def test_blocks_are_listed_and_read_back_verified(engine: Engine, manifest: RuntimeManifest) -> None:
    session = engine.open(manifest)
    session.forward(600)
    # Committed by the next step: published blocks are of committed rows only.
    session.send(session.frame(0, 1, 600, committed_frontier=600))
    session.receive()
    request = blocks_pb2.ListBlocksRequest(
        session_id=session.opened.session_id,
        session_generation=session.opened.generation,
        tenant=session.tenant,
        boot_id=session.opened.boot_id,
        limit=3,
    )
    page = engine.blocks.List(request, timeout=CALL_SECONDS)
    assert len(page.blocks) == 3
    assert page.more
    request.offset, request.limit = 3, 0
    rest = engine.blocks.List(request, timeout=CALL_SECONDS)
    assert not rest.more
    assert len(rest.blocks) == 1
    for info in [*page.blocks, *rest.blocks]:
        read = blocks_pb2.ReadBlockRequest(
            ref=info.ref, tenant=session.tenant, boot_id=session.opened.boot_id
        )
        parts = list(engine.blocks.Read(read, timeout=CALL_SECONDS))
        data = b"".join(part.data for part in parts)
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert len(data) == info.bytes
        assert parts[-1].checksum == info.checksum
        rows = np.frombuffer(data, dtype=np.float32).reshape(2, 2, 256, 64)
        first = info.ref.chunk * 256
        keys = np.concatenate(session.keys[info.ref.layer])[first : first + 256]
        assert np.array_equal(rows[0].transpose(1, 0, 2), keys)
        assert info.producer_digest == manifest.digest()
        stale = blocks_pb2.ReadBlockRequest(
            ref=info.ref, tenant=session.tenant, boot_id=session.opened.boot_id
        )
        stale.ref.generation += 7
        assert refusal(reading(engine, stale)) == "GENERATION_STALE"
        stranger = blocks_pb2.ReadBlockRequest(ref=info.ref, tenant="gamma", boot_id=session.opened.boot_id)
        assert refusal(reading(engine, stranger)) == "TENANT_MISMATCH"
    session.close()


def test_describe_by_name_only(engine: Engine, manifest: RuntimeManifest) -> None:
    answer = engine.attention.DescribeCache(
        attention_pb2.DescribeCacheRequest(cache=named()), timeout=CALL_SECONDS
    )
    assert answer.cache.uid == "cache-uid-1"
    assert answer.baseline_digest == manifest.digest()
    assert (answer.stage, answer.candidate_digest) == ("Off", "")
    assert answer.chunk_tokens == 256


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"model_fingerprint": "sha256:" + "0" * 64}, "MODEL_MISMATCH", id="other-model"),
        pytest.param({"tenant": ""}, "TENANT_MISMATCH", id="no-tenant"),
        pytest.param(
            {"cache": common_pb2.CacheRef(namespace="serving", name="no")}, "CACHE_UNKNOWN", id="cache"
        ),
        pytest.param(
            {"cache": common_pb2.CacheRef(namespace="serving", name="chat", uid="recreated")},
            "CACHE_UNKNOWN",
            id="recreated-cache",
        ),
        pytest.param({"score_scale": float("nan")}, "BAD_ARGUMENT", id="scale"),
        pytest.param({"max_tokens": 0}, "BAD_ARGUMENT", id="no-tokens"),
        pytest.param({"max_tokens": 10_000_000}, "NO_DESTINATION_CAPACITY", id="more-than-all-tiers"),
        pytest.param({"forced_arm": attention_pb2.ARM_CANDIDATE}, "BAD_ARGUMENT", id="forced-without-probe"),
        pytest.param(
            {"forced_arm": attention_pb2.ARM_CANDIDATE, "probe": True}, "NO_CANDIDATE", id="probe-no-grant"
        ),
    ],
)
def test_open_refused(
    engine: Engine, manifest: RuntimeManifest, changes: dict[str, Any], reason: str
) -> None:
    assert refusal(lambda: engine.open(manifest, **changes)) == reason


@pytest.mark.parametrize("field", ["layers", "query_heads", "kv_heads", "head_dim", "dtype"])
def test_geometry_refused_by_field(engine: Engine, manifest: RuntimeManifest, field: str) -> None:
    own: Geometry = manifest.model.geometry
    other = "float16" if field == "dtype" else getattr(own, field) * 2
    with pytest.raises(grpc.RpcError) as refused:
        engine.open(manifest, geometry=wire_geometry(own, **{field: other}))
    detail = detail_of(refused.value)
    assert common_pb2.Reason.Name(detail.reason) == "GEOMETRY_MISMATCH"
    assert f"geometry.{field}" in detail.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"tenant": "gamma"}, "TENANT_MISMATCH", id="other-tenant"),
        pytest.param({"generation": 99}, "GENERATION_STALE", id="generation"),
        pytest.param({"boot_id": "earlier"}, "BOOT_ID_MISMATCH", id="boot-id"),
        pytest.param({"session_id": "nobody"}, "SESSION_UNKNOWN", id="unknown-session"),
        pytest.param({"first_row_position": 9, "first_query_position": 9}, "FRONTIER_MISMATCH", id="gap"),
        pytest.param({"k": b"123"}, "FRAME_INVALID", id="torn-k"),
        pytest.param({"q": b""}, "FRAME_INVALID", id="no-query"),
        pytest.param({"layer": 2}, "FRAME_INVALID", id="layer"),
        pytest.param({"layer": 1}, "STEP_ORDER", id="layer-order"),
        pytest.param({"step": 5}, "STEP_ORDER", id="step-order"),
    ],
)
def test_frame_refused_and_session_unchanged(
    engine: Engine, manifest: RuntimeManifest, changes: dict[str, Any], reason: str
) -> None:
    session = engine.open(manifest)
    session.forward(5)
    session.send(session.frame(**{"layer": 0, "tokens": 1, "first": 5, **changes}))
    answer = session.receive()
    assert common_pb2.Reason.Name(answer.error.reason) == reason
    assert not answer.out
    good = session.frame(0, 1, 5)
    session.send(good)
    answer = session.receive()
    session.note(0, good)
    assert not answer.HasField("error")
    assert np.abs(session.output(answer) - session.expected(good)).max() < 2e-5
    session.close()


def test_answers_keep_the_order_of_pipelined_frames(engine: Engine, manifest: RuntimeManifest) -> None:
    session = engine.open(manifest)
    session.forward(2)
    frames = [session.frame(0, 1, 2 + i) for i in range(40)]
    for frame in frames:
        session.send(frame)
    answers = [session.receive() for _ in frames]
    assert [a.sequence for a in answers] == [f.sequence for f in frames]
    assert not [a.error for a in answers if a.HasField("error")]
    session.close()


def test_frames_beyond_the_stream_bound_are_refused_in_place(
    engine: Engine, manifest: RuntimeManifest
) -> None:
    session = engine.open(manifest)
    session.forward(1500)
    flood = [session.frame(0, 64, 1500 + 64 * i) for i in range(120)]
    for frame in flood:
        session.send(frame)
    answers = [session.receive() for _ in flood]
    assert [a.sequence for a in answers] == [f.sequence for f in flood]
    reasons = {common_pb2.Reason.Name(a.error.reason) for a in answers if a.HasField("error")}
    assert "QUEUE_FULL" in reasons
    assert not answers[0].HasField("error")
    first = next(a for a in answers if common_pb2.Reason.Name(a.error.reason) == "QUEUE_FULL")
    assert first.error.retry_after_ms > 0
    session.close()


def test_a_frame_that_waited_past_its_deadline_is_refused(engine: Engine, manifest: RuntimeManifest) -> None:
    session = engine.open(manifest)
    session.forward(1500)
    # The slow frame is computed first; the second waits behind it for far longer than a millisecond, unless
    # this process was held up between the two: then it has not waited, and another one does.
    for first in range(1500, 1500 + 8 * 257, 257):
        slow, late = session.frame(0, 256, first), session.frame(0, 1, first + 256, deadline_ms=1)
        session.send(slow)
        session.send(late)
        assert not session.receive().HasField("error")
        answer = session.receive()
        if answer.HasField("error"):
            break
    assert common_pb2.Reason.Name(answer.error.reason) == "DEADLINE"
    session.close()


def test_one_stream_a_session(engine: Engine, manifest: RuntimeManifest) -> None:
    session = engine.open(manifest)
    session.forward(1)
    second = Driver(engine, session.geometry, session.opened, session.tenant)
    second.send(second.frame(0, 1, 1))
    assert "another open stream" in second.receive().error.message
    second.end_stream()
    session.close()


def test_outcome_without_a_grant_is_not_counted(engine: Engine, manifest: RuntimeManifest) -> None:
    session = engine.open(manifest)
    session.forward(4)
    session.close()
    answer = engine.attention.ReportOutcome(
        attention_pb2.ReportOutcomeRequest(
            session_id=session.opened.session_id,
            generation=session.opened.generation,
            tenant=session.tenant,
            output_tokens=5,
            first_token_seconds=0.1,
            last_token_seconds=0.5,
        ),
        timeout=CALL_SECONDS,
    )
    assert not answer.counted
    assert "no candidate" in answer.why_not


def test_the_socket_is_private(agent: Agent) -> None:
    path = Path(agent.socket_path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


def test_support_digest_is_not_the_hash_of_nothing(engine: Engine, manifest: RuntimeManifest) -> None:
    session = engine.open(manifest)
    [answer, _] = session.forward(3)
    assert answer.receipt.support_digest
    assert answer.receipt.support_digest != f"sha256:{hashlib.sha256(b'').hexdigest()}"
    session.close()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing inside, whatever arrives for it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        state = Path(f"/proc/{pid}/stat")
        until(lambda: state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_an_agent_stopped_past_its_lease_serves_no_step_of_the_candidate_when_it_goes_on(
    agent: Agent, engine: Engine, manifest: RuntimeManifest
) -> None:
    """What arrived meanwhile is answered by what is permitted now: a step exactly, a renewal not at all."""
    ttl_ms = 3_000
    candidate = quest_candidate(manifest)
    agent.grant(manifest, candidate)
    session = engine.open(manifest)
    session.forward(600)
    assert {a.receipt.exactness for a in session.forward(1)} == {attention_pb2.APPROXIMATE}
    held = agent.grant(manifest, candidate, ttl_ms=ttl_ms)
    with stopped(agent.process.pid):
        ended = boottime_ns() + ttl_ms * 1_000_000
        frame = session.frame(0, 1, session.frontier)
        session.send(frame)
        item = control_pb2.RenewItem(cache=CACHE, fence=held.fence, digest=held.digest, ttl_ms=ttl_ms)
        renewal = control_pb2.RenewRequest(boot_id=agent.boot_id, items=[item])
        renewing = agent.control.Renew.future(renewal, timeout=CALL_SECONDS)
        until(lambda: boottime_ns() > ended)
    answer = session.receive()
    session.note(0, frame)
    assert answer.receipt.exactness == attention_pb2.EXACT_OVER_APPROXIMATE_HISTORY
    assert answer.receipt.fallback == "LeaseExpired"
    assert np.abs(session.output(answer) - session.expected(frame)).max() < 2e-5
    [result] = renewing.result().results
    assert common_pb2.Reason.Name(result.error.reason) == "LEASE_EXPIRED"
    cache = agent.state().caches[0]
    assert not cache.HasField("candidate")
    assert (cache.returned_reason, cache.returned_fence) == ("LeaseExpired", held.fence.value)
    session.close()
    agent.revoke()


def test_a_renewal_that_waited_in_a_stopped_agents_socket_counts_from_when_it_was_sent(
    agent: Agent, manifest: RuntimeManifest
) -> None:
    """Its lease ends when its operator believes that it does, though nobody could take the renewal back."""
    ttl_ms = 60_000
    held = agent.grant(manifest, quest_candidate(manifest), ttl_ms=ttl_ms)
    stamp = agent.state().stamp_ns
    assert 0 < stamp <= boottime_ns()
    with stopped(agent.process.pid):
        sent = boottime_ns()
        item = control_pb2.RenewItem(cache=CACHE, fence=held.fence, digest=held.digest, ttl_ms=ttl_ms)
        renewal = control_pb2.RenewRequest(boot_id=agent.boot_id, items=[item], sent_ns=sent)
        renewing = agent.control.Renew.future(renewal, timeout=CALL_SECONDS)
        until(lambda: boottime_ns() > sent + 1_000_000_000)
    answer = renewing.result()
    [result] = answer.results
    assert result.renewed
    # Milliseconds are rounded down, and the stamp is the later reading of the same clock.
    ends = answer.stamp_ns + result.remaining_ms * 1_000_000
    assert result.remaining_ms <= ttl_ms - 1_000 and ends >= sent + (ttl_ms - 1) * 1_000_000
    agent.revoke()
