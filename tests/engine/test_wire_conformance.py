"""One suite for every way that frames reach an agent: the same bits, receipts, refusals and order.

A real agent process with rows in three tiers; gRPC's Attend and AttendMany, and the local channel with one
session and with several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.v1 import attention_pb2, common_pb2
from kvtier_crds.manifest import RuntimeManifest
from tests.engine.agent_process import Agent, baseline_manifest, running_agent
from tests.engine.attention_driver import CALL_SECONDS, Engine, wire_geometry
from tests.engine.wire_drivers import WIRES, Answer, Frame, Opened, connector

pytestmark = pytest.mark.timeout(600)

CHUNK_BYTES = 256 * 2 * 2 * 64 * 4
SMALL = {"gpu-sim": 8 * CHUNK_BYTES, "dram": 4 * CHUNK_BYTES, "nvme": 64 * CHUNK_BYTES}
PREFILL = 700


@pytest.fixture(scope="module")
def manifest() -> RuntimeManifest:
    return baseline_manifest(budgets=SMALL)


@pytest.fixture(scope="module")
def agent(manifest: RuntimeManifest) -> Iterator[Agent]:
    with running_agent() as started:
        started.apply_baseline(manifest)
        yield started


class Rig:
    """Two sessions of the agent, and the wire under test: both on it, or the first alone."""

    def __init__(self, engine: Engine, manifest: RuntimeManifest, kind: str) -> None:
        self.engine = engine
        self.kind = kind
        self._manifest = manifest
        self._geometry = manifest.model.geometry
        self._rng = np.random.default_rng(5)
        self._sequence = 0
        self.sessions = [self.open() for _ in range(2)]
        self.connect = connector(kind, engine.attention, wire_geometry(self._geometry))
        self.wire = self.connect(self.carried)

    @property
    def several(self) -> bool:
        return self.kind.endswith("many")

    @property
    def carried(self) -> list[Opened]:
        return self.sessions if self.several else self.sessions[:1]

    def open(self) -> Opened:
        request = {
            "cache": {"namespace": "serving", "name": "chat"},
            "model_fingerprint": _fingerprint(self._manifest),
            "geometry": wire_geometry(self._geometry),
            "score_scale": self._geometry.head_dim**-0.5,
            "tenant": "beta",
            "session_root_id": "root",
            "max_tokens": 4096,
            "local_channel_version": 1,
        }
        opened: Opened = self.engine.attention.OpenSession(
            attention_pb2.OpenSessionRequest(**request), timeout=CALL_SECONDS
        )
        return opened

    def frame(self, which: int, layer: int, step: int, first: int, n: int, **change: Any) -> Frame:
        g, opened = self._geometry, self.sessions[which]
        rows = [
            self._rng.standard_normal((n, heads, g.head_dim), dtype=np.float32).tobytes()
            for heads in (g.kv_heads, g.kv_heads, g.query_heads)
        ]
        self._sequence += 1
        fields: dict[str, Any] = {
            "session_id": opened.session_id,
            "generation": opened.generation,
            "boot_id": opened.boot_id,
            "tenant": "beta",
            "step": step,
            "layer": layer,
            "first_row_position": first,
            "k": rows[0],
            "v": rows[1],
            "first_query_position": first,
            "q": rows[2],
            "committed_frontier": 0,
            "deadline_ms": 20_000,
            "sequence": self._sequence,
        }
        return Frame(**{**fields, **change})

    def again(self, frame: Frame, **change: Any) -> Frame:
        """The same rows and queries in another frame."""
        self._sequence += 1
        other = Frame()
        other.CopyFrom(frame)
        for name, value in {**change, "sequence": self._sequence}.items():
            setattr(other, name, value)
        return other

    def cut(self, which: int, to: int, *, anew: bool = False) -> attention_pb2.EditSessionResponse:
        """Edits at the first epoch, however often."""
        opened = self.sessions[which]
        answer: attention_pb2.EditSessionResponse = self.engine.attention.EditSession(
            attention_pb2.EditSessionRequest(
                session_id=opened.session_id,
                generation=opened.generation,
                boot_id=opened.boot_id,
                tenant="beta",
                position_epoch=1,
                truncate=attention_pb2.TruncateEdit(to=to, anew=anew),
            ),
            timeout=CALL_SECONDS,
        )
        return answer

    def ask(self, *frames: Frame) -> list[Answer]:
        self.wire.send(frames)
        return self.wire.receive()

    def prefill(self, n: int = PREFILL) -> list[Answer]:
        """Rows [0, n) of every layer of the sessions that the wire carries, in blocks."""
        answers = []
        for layer in range(self._geometry.layers):
            for lo in range(0, n, 256):
                block = min(256, n - lo)
                frames = [self.frame(i, layer, 0, lo, block) for i in range(len(self.carried))]
                got = self.ask(*frames)
                assert not any(answer.HasField("error") for answer in got), got[0].error
                answers += got
        return answers

    def close(self) -> None:
        """Idempotent."""
        self.wire.close()
        sessions, self.sessions = self.sessions, []
        for opened in sessions:
            self.engine.attention.CloseSession(
                attention_pb2.CloseSessionRequest(
                    session_id=opened.session_id, generation=opened.generation, tenant="beta"
                ),
                timeout=CALL_SECONDS,
            )


def _fingerprint(manifest: RuntimeManifest) -> str:
    from kvtier_crds.manifest import model_fingerprint

    return model_fingerprint(manifest.model)


@pytest.fixture
def rig_of(agent: Agent, manifest: RuntimeManifest) -> Iterator[Callable[[str], Rig]]:
    rigs: list[Rig] = []
    with Engine(agent.socket_path) as engine:

        def made(kind: str) -> Rig:
            rigs.append(Rig(engine, manifest, kind))
            return rigs[-1]

        yield made
        for rig in rigs:
            rig.close()


@pytest.fixture(params=WIRES)
def rig(request: pytest.FixtureRequest, rig_of: Callable[[str], Rig]) -> Rig:
    return rig_of(request.param)


def reason(answer: Answer) -> str:
    return common_pb2.Reason.Name(answer.error.reason) if answer.HasField("error") else ""


def test_every_wire_gives_the_same_bits_and_the_same_receipts(rig_of: Callable[[str], Rig]) -> None:
    seen: dict[str, list[tuple[bytes, attention_pb2.Receipt]]] = {}
    for kind in WIRES:
        rig = rig_of(kind)
        # The same numbers for the first session, whether a second one comes along or not.
        answers = []
        for layer in range(2):
            for step, first, n in ((0, 0, 256), (0, 256, 200)):
                rig._rng = np.random.default_rng([layer, first])
                frames = [rig.frame(i, layer, step, first, n) for i in range(len(rig.carried))]
                answers.append(rig.ask(*frames)[0])
        for step in range(1, 4):
            for layer in range(2):
                rig._rng = np.random.default_rng([layer, step, 7])
                first = 455 + step
                frames = [rig.frame(i, layer, step, first, 1) for i in range(len(rig.carried))]
                answers.append(rig.ask(*frames)[0])
        assert [reason(answer) for answer in answers] == [""] * 10
        for answer in answers:
            # Times are of the run.
            for field in ("stall_seconds", "hidden_transfer_seconds", "exposed_transfer_seconds"):
                answer.receipt.ClearField(field)
        seen[kind] = [(answer.out, answer.receipt) for answer in answers]
        # So that the next one's rows lie where this one's did.
        rig.close()
    for kind in WIRES[1:]:
        for index, (want, got) in enumerate(zip(seen["grpc"], seen[kind], strict=True)):
            assert got[0] == want[0], f"{kind}: other bits in answer {index}"
            assert str(got[1]) == str(want[1]), f"{kind}: another receipt in answer {index}"
    receipt = seen["local"][-1][1]
    assert receipt.frontier == 459
    assert receipt.bytes_by_tier
    assert receipt.support_digest.startswith("sha256:")


STALE = [
    pytest.param({"boot_id": "another-boot"}, "BOOT_ID_MISMATCH", id="boot"),
    pytest.param(
        {"boot_id": "another-boot", "session_id": "nobody"}, "BOOT_ID_MISMATCH", id="boot-of-another-session"
    ),
    pytest.param({"generation": 7_000_000}, "GENERATION_STALE", id="generation"),
    pytest.param({"layer": 2}, "FRAME_INVALID", id="layer"),
    pytest.param({"layer": -1}, "FRAME_INVALID", id="negative-layer"),
    pytest.param({"step": -1}, "FRAME_INVALID", id="negative-step"),
    pytest.param({"committed_frontier": -3}, "FRAME_INVALID", id="negative-frontier"),
    pytest.param({"committed_frontier": 50_000}, "FRONTIER_MISMATCH", id="frontier-ahead"),
    pytest.param({"first_row_position": 3}, "FRONTIER_MISMATCH", id="rows-elsewhere"),
    pytest.param({"step": 9}, "STEP_ORDER", id="step-skipped"),
    pytest.param({"layer": 1}, "STEP_ORDER", id="layer-skipped"),
    pytest.param({"q": b""}, "FRAME_INVALID", id="no-query"),
    pytest.param({"position_epoch": 5}, "POSITION_CONTRACT_MISMATCH", id="position-epoch"),
]


@pytest.mark.parametrize(("change", "wanted"), STALE)
def test_a_frame_that_is_stale_or_wrong_is_refused_and_changes_nothing(
    rig: Rig, change: dict[str, Any], wanted: str
) -> None:
    rig.prefill(20)
    wrong = rig.frame(0, 0, 1, 20, 1)
    for name, value in change.items():
        setattr(wrong, name, value)
    [answer] = rig.ask(wrong)
    assert reason(answer) == wanted
    assert answer.error.message
    assert not answer.out
    [good] = rig.ask(rig.frame(0, 0, 1, 20, 1))
    assert reason(good) == ""
    assert good.receipt.frontier == 21


def test_a_repeat_is_answered_again_and_other_bytes_are_not(rig: Rig) -> None:
    rig.prefill(20)
    frame = rig.frame(0, 0, 1, 20, 1)
    [first] = rig.ask(frame)
    [again] = rig.ask(frame)
    assert (again.out, again.receipt.frontier) == (first.out, 21)
    [other] = rig.ask(rig.frame(0, 0, 1, 20, 1))
    assert reason(other) == "FRONTIER_MISMATCH"


@pytest.mark.parametrize("kind", WIRES)
def test_a_cut_anew_takes_no_row_and_no_frame_of_before_and_begins_a_step(
    rig_of: Callable[[str], Rig], kind: str
) -> None:
    """`TruncateEdit.anew`: what an engine asks for whose frame may still be on its way. Without it such a cut
    asks for nothing."""
    answers = []
    for edited in (False, True):
        rig = rig_of(kind)
        rig.prefill(20)
        before = rig.frame(0, 0, 1, 20, 1, position_epoch=1, committed_frontier=20)
        if not edited:
            answers += rig.ask(before)
            rig.close()
            continue
        assert not rig.cut(0, 20).changed
        first, repeated = rig.cut(0, 20, anew=True), rig.cut(0, 20, anew=True)
        assert first == repeated
        assert (first.changed, first.position_epoch, first.next_position, first.rows) == (True, 2, 20, 20)
        beside = [rig.frame(i, 0, 1, 20, 1, position_epoch=1) for i in range(1, len(rig.carried))]
        refused, *untouched = rig.ask(before, *beside)
        assert reason(refused) == "POSITION_CONTRACT_MISMATCH"
        assert not refused.out
        assert [reason(answer) for answer in untouched] == [""] * len(beside)
        # Of any step, since it begins one.
        answers += rig.ask(rig.again(before, position_epoch=2, step=7))
    plain, anew = answers
    assert [reason(answer) for answer in answers] == ["", ""]
    assert (anew.out, anew.receipt.support_digest) == (plain.out, plain.receipt.support_digest)
    assert (anew.receipt.exactness, anew.receipt.producer_digest) == (
        plain.receipt.exactness,
        plain.receipt.producer_digest,
    )
    assert (anew.receipt.frontier, anew.receipt.position_epoch) == (21, 2)


def test_answers_come_in_the_order_of_frames_that_wait(rig: Rig) -> None:
    rig.prefill(2)
    frames = [rig.frame(0, 0, 1, 2 + i, 1) for i in range(30)]
    for frame in frames:
        rig.wire.send([frame])
    answers = [rig.wire.receive()[0] for _ in frames]
    assert [answer.sequence for answer in answers] == [frame.sequence for frame in frames]
    assert {reason(answer) for answer in answers} == {""}


def test_a_frame_that_waited_past_its_deadline_is_refused(rig: Rig) -> None:
    rig.prefill(PREFILL)
    # Many slow frames before it, whose time counts against it though nobody has looked at it yet; unless this
    # process was held up before it was sent: then it has not waited, and another one does.
    for first in range(PREFILL, PREFILL + 6 * 513, 513):
        slow = [rig.frame(0, 0, 1, first + 128 * i, 128) for i in range(4)]
        late = rig.frame(0, 0, 1, first + 512, 1, deadline_ms=1)
        for frame in (*slow, late):
            rig.wire.send([frame])
        reasons = [reason(rig.wire.receive()[0]) for _ in range(5)]
        assert reasons[:4] == [""] * 4
        if reasons[4]:
            break
    assert reasons[4] == "DEADLINE"


def test_a_session_is_of_one_wire_at_a_time_and_the_next_takes_over(
    rig: Rig, manifest: RuntimeManifest
) -> None:
    rig.prefill(5)
    grpc = connector("grpc", rig.engine.attention, wire_geometry(manifest.model.geometry))
    second = grpc(rig.carried)
    second.send([rig.frame(0, 0, 1, 5, 1)])
    [refused] = second.receive()
    assert "another open stream" in refused.error.message
    second.close()
    rig.wire.close()
    third = rig.wire = grpc(rig.carried)
    third.send([rig.frame(0, 0, 1, 5, 1)])
    assert reason(third.receive()[0]) == ""


def test_a_session_that_was_closed_is_unknown(rig: Rig) -> None:
    rig.prefill(5)
    gone = rig.sessions[0]
    rig.engine.attention.CloseSession(
        attention_pb2.CloseSessionRequest(
            session_id=gone.session_id, generation=gone.generation, tenant="beta"
        ),
        timeout=CALL_SECONDS,
    )
    [answer] = rig.ask(rig.frame(0, 0, 1, 5, 1))
    assert reason(answer) == "SESSION_UNKNOWN"
    # So that the rig can close what it opened.
    rig.sessions[0] = rig.open()


def test_sessions_on_channels_of_their_own_compute_at_once_and_keep_their_bits(
    rig_of: Callable[[str], Rig],
) -> None:
    """Each thread is an engine; the engine of the cache is one."""
    rig = rig_of("local")
    other = rig.connect([rig.sessions[1]])
    wires = [rig.wire, other]
    frames = []
    for which in range(2):
        rig._rng = np.random.default_rng(3)
        made = [rig.frame(which, layer, 0, 0, 200) for layer in range(2)]
        for step in range(1, 12):
            made += [rig.frame(which, layer, step, 199 + step, 1) for layer in range(2)]
        frames.append(made)
    outs: list[list[Answer]] = [[], []]

    def run(which: int) -> None:
        for frame in frames[which]:
            wires[which].send([frame])
            outs[which] += wires[which].receive()

    threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CALL_SECONDS)
    other.close()
    assert [len(made) for made in outs] == [24, 24]
    for first, second in zip(*outs, strict=True):
        assert reason(first) == reason(second) == ""
        assert first.out == second.out


@pytest.fixture(params=[kind for kind in WIRES if kind.endswith("many")])
def many(request: pytest.FixtureRequest, rig_of: Callable[[str], Rig]) -> Rig:
    return rig_of(request.param)


def test_a_frame_that_fails_harms_no_other_of_its_message(many: Rig) -> None:
    many.prefill(20)
    bad, good = many.frame(0, 0, 9, 20, 1), many.frame(1, 0, 1, 20, 1)
    answers = many.ask(bad, good)
    assert [reason(answer) for answer in answers] == ["STEP_ORDER", ""]
    assert [answer.sequence for answer in answers] == [bad.sequence, good.sequence]
    answers = many.ask(many.frame(1, 1, 1, 20, 1), many.frame(0, 0, 1, 20, 1))
    assert [reason(answer) for answer in answers] == ["", ""]


def test_two_frames_of_a_session_in_one_message_are_refused_but_the_first(many: Rig) -> None:
    many.prefill(20)
    answers = many.ask(many.frame(0, 0, 1, 20, 1), many.frame(0, 0, 1, 21, 1))
    assert [reason(answer) for answer in answers] == ["", "BAD_ARGUMENT"]


def test_a_wire_of_one_session_refuses_another(rig_of: Callable[[str], Rig]) -> None:
    rig = rig_of("grpc")
    rig.prefill(5)
    [answer] = rig.ask(rig.frame(1, 0, 0, 0, 1))
    assert "one stream carries one session" in answer.error.message
