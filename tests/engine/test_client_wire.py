"""The client against a reference agent: typed refusals, deadlines, bounds, closing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.v1 import common_pb2
from kvtier_client.client import AttentionClient, declared_fingerprint
from kvtier_client.errors import KvtierError, from_detail
from kvtier_client.session import AttentionSession, Geometry, SessionRequest
from kvtier_core.errors import Reason
from tests.engine.fake_agent import FINGERPRINT, FakeAgent, Refusal, until


def request(**change: Any) -> SessionRequest:
    fields: dict[str, Any] = {
        "namespace": "serving",
        "name": "cache",
        "tenant": "alpha",
        "model_fingerprint": FINGERPRINT,
        "geometry": Geometry(layers=2, query_heads=6, kv_heads=2, head_dim=64),
        "score_scale": 0.125,
        "session_root_id": "root",
        "max_tokens": 4096,
    }
    return SessionRequest(**(fields | change))


def rows(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, h, 64, generator=g) for h in (6, 2, 2))  # type: ignore[return-value]


def test_a_session_opens_attends_reports_and_closes(client: AttentionClient, agent: FakeAgent) -> None:
    now = [100.0]
    with AttentionSession(client, request(), clock=lambda: now[0]) as session:
        q, k, v = rows(5)
        out = session.attend(1, 0, 0, q, k, v, 0)
        assert out.shape == (5, 6, 64)
        torch.testing.assert_close(out[0], v[0].repeat_interleave(3, 0))  # one row: its own value
        for now[0] in (101.5, 102.0, 104.25):
            session.token_done()
        assert session.report_outcome().counted
        (receipt,) = session.take_receipts()
        assert (receipt.exactness, receipt.frontier, receipt.plan) == ("EXACT", 5, ("cpu:partial",))
        assert session.take_receipts() == []
    (report,) = agent.outcomes
    assert (report.first_token_seconds, report.last_token_seconds, report.output_tokens) == (1.5, 4.25, 3)
    assert not report.HasField("probe")
    assert len(agent.closed) == 1
    assert session.close() == 0


def test_probe_pairs_travel(client: AttentionClient, agent: FakeAgent) -> None:
    with AttentionSession(client, request(probe=True, forced_arm="candidate")) as session:
        assert session.arm == "candidate"
        session.report_outcome(probe_gate="quality", prompt_digest="p", difference=-0.25)
        session.report_outcome(probe_gate="quality", prompt_digest="p")
    first, second = (o.probe for o in agent.outcomes)
    assert (first.gate, first.difference, first.missing) == ("quality", -0.25, False)
    assert second.missing


def test_the_declared_fingerprint_is_read(client: AttentionClient) -> None:
    assert declared_fingerprint(client, "serving", "cache") == FINGERPRINT


def test_a_refused_call_is_typed_with_facts(client: AttentionClient) -> None:
    with pytest.raises(KvtierError, match="another model") as caught:
        AttentionSession(client, request(model_fingerprint="sha256:other"))
    assert caught.value.reason is Reason.MODEL_MISMATCH
    assert caught.value.facts == {"by": "fake"}
    assert caught.value.status == "FAILED_PRECONDITION"


def test_an_agent_that_is_not_there_is_draining(socket_path: Path) -> None:
    with AttentionClient(socket_path, timeout=1.0) as nobody, pytest.raises(KvtierError) as caught:
        nobody.describe_cache("serving", "cache")
    assert caught.value.reason in (Reason.DRAINING, Reason.DEADLINE)


def test_a_deadline_must_be_in_the_future(client: AttentionClient) -> None:
    with pytest.raises(KvtierError, match="deadline of 0"):
        AttentionSession(client, request(), deadline_seconds=0)


def test_a_relative_socket_path_is_refused() -> None:
    with pytest.raises(KvtierError, match="not absolute"):
        AttentionClient("engine.sock")


def test_reasons_of_a_newer_agent_read_internal() -> None:
    error = from_detail(common_pb2.ErrorDetail(reason=99, message="new"))
    assert error.reason is Reason.INTERNAL
    assert error.facts["unknown_reason"] == "99"


def test_a_refused_frame_raises_its_reason_and_ends_the_session(
    client: AttentionClient, agent: FakeAgent
) -> None:
    def refuse(frame: Any, answer: Any) -> Any:
        raise Refusal(common_pb2.NO_DESTINATION_CAPACITY, "all tiers full", None)  # type: ignore[arg-type]

    with AttentionSession(client, request()) as session:
        session.attend(1, 0, 0, *rows(3), 0)
        agent.misbehave = refuse
        with pytest.raises(KvtierError, match="all tiers full") as caught:
            session.attend(1, 1, 0, *rows(3), 0)
        assert caught.value.reason is Reason.NO_DESTINATION_CAPACITY
        agent.misbehave = lambda frame, answer: answer
        with pytest.raises(KvtierError, match="all tiers full"):
            session.attend(1, 1, 0, *rows(3), 0)


@pytest.mark.parametrize(
    ("which", "shape"),
    [
        pytest.param("v", (3, 2, 32), id="values-of-another-width"),
        pytest.param("k", (3, 4, 32), id="as-many-numbers-otherwise"),
        pytest.param("q", (3, 2, 64), id="queries-of-fewer-heads"),
        pytest.param("k", (2, 2, 64), id="a-row-short"),
        pytest.param("q", (3, 384), id="flat"),
    ],
)
def test_tensors_of_another_geometry_are_refused_by_name_before_anything_is_sent(
    client: AttentionClient, agent: FakeAgent, which: str, shape: tuple[int, ...]
) -> None:
    """Over the local channel the agent would slice other tensors out of them."""
    q, k, v = rows(3)
    given = {"q": q, "k": k, "v": v} | {which: torch.zeros(shape)}
    with AttentionSession(client, request()) as session:
        with pytest.raises(KvtierError, match=rf"{which} is \({shape[0]}, ") as caught:
            session.attend(1, 0, 0, given["q"], given["k"], given["v"], 0)
        assert caught.value.reason is Reason.GEOMETRY_MISMATCH
        assert all(not one.frames for one in agent.sessions.values())
        session.attend(1, 0, 0, q, k, v, 0)


def test_a_late_answer_is_a_deadline(client: AttentionClient, agent: FakeAgent) -> None:
    release = threading.Event()

    def hang(frame: Any, answer: Any) -> Any:
        until(release)
        return answer

    agent.misbehave = hang
    session = AttentionSession(client, request(), deadline_seconds=0.05, grace_seconds=0.05)
    try:
        with pytest.raises(KvtierError) as caught:
            session.attend(1, 0, 0, *rows(1), 0)
        assert caught.value.reason is Reason.DEADLINE
        assert session.failure is caught.value
    finally:
        release.set()
        session.close()


MISBEHAVIOUR = [
    pytest.param({"sequence": 7}, Reason.IDENTITY_MISMATCH, id="wrong-sequence"),
    pytest.param({"out": b"\0" * 8}, Reason.FRAME_INVALID, id="short-output"),
]


@pytest.mark.parametrize(("change", "reason"), MISBEHAVIOUR)
def test_an_answer_that_is_not_ours_is_refused(
    client: AttentionClient, agent: FakeAgent, change: dict[str, Any], reason: Reason
) -> None:
    def lie(frame: Any, answer: Any) -> Any:
        for name, value in change.items():
            setattr(answer, name, value)
        return answer

    agent.misbehave = lie
    with AttentionSession(client, request()) as session:
        with pytest.raises(KvtierError) as caught:
            session.attend(1, 0, 0, *rows(2), 0)
        assert caught.value.reason is reason


def test_a_stream_that_fails_raises_its_cause(client: AttentionClient, agent: FakeAgent) -> None:
    def explode(frame: Any, answer: Any) -> Any:
        raise RuntimeError("servicer bug")

    agent.misbehave = explode
    with AttentionSession(client, request()) as session, pytest.raises(KvtierError) as caught:
        session.attend(1, 0, 0, *rows(2), 0)
    assert caught.value.reason is Reason.INTERNAL


def test_frames_stay_under_the_message_limit_and_blocks_change_no_bit(
    client: AttentionClient, agent: FakeAgent
) -> None:
    q, k, v = rows(700)
    with AttentionSession(client, request()) as session:
        whole = session.attend(1, 0, 0, q, k, v, 0)
        (frames,) = (s.frames for s in agent.sessions.values())
        assert [(have, new) for _, _, have, new, _ in frames] == [(0, 256), (256, 256), (512, 188)]
    agent.block = 100
    with AttentionSession(client, request()) as session:
        assert torch.equal(session.attend(1, 0, 0, q, k, v, 0), whole)
    wide = Geometry(layers=1, query_heads=128, kv_heads=128, head_dim=128)
    with AttentionSession(client, request(geometry=wide)) as session:
        assert session.block < 100
        assert session.block * (128 * 3) * 128 * 4 <= 4 * 1024 * 1024 - 64 * 1024


def test_a_close_that_fails_is_loud_unless_something_failed_before(
    client: AttentionClient, agent: FakeAgent
) -> None:
    agent.refuse_close = True
    with pytest.raises(KvtierError, match="cannot close"), AttentionSession(client, request()):
        pass
    with pytest.raises(ZeroDivisionError), AttentionSession(client, request()):
        raise ZeroDivisionError


def test_a_session_that_cannot_begin_is_closed_again(client: AttentionClient, agent: FakeAgent) -> None:
    wide = Geometry(layers=1, query_heads=6, kv_heads=2, head_dim=1 << 17)
    with pytest.raises(KvtierError, match="does not fit") as refused:
        AttentionSession(client, request(geometry=wide))
    assert refused.value.reason is Reason.GEOMETRY_MISMATCH
    assert len(agent.closed) == 1


def test_a_closed_client_refuses(socket_path: Path) -> None:
    gone = AttentionClient(socket_path)
    gone.close()
    with pytest.raises(KvtierError, match="closed"):
        gone.describe_cache("serving", "cache")
    with pytest.raises(KvtierError, match="closed"):
        gone.attend()


def test_a_closed_session_refuses_and_closing_twice_is_quiet(
    client: AttentionClient, agent: FakeAgent
) -> None:
    session = AttentionSession(client, request())
    agent.sessions.clear()  # as if the agent had restarted
    assert session.close() == 0
    assert session.close() == 0
    with pytest.raises(KvtierError, match="closed"):
        session.attend(1, 0, 0, *rows(1), 0)
