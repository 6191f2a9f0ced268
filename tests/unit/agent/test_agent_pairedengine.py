"""Sessions of a cache with two engines: who answers, what is compared, what comes back and when the second
engine is empty. Every answer has the bits of one engine alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier_agent.engine_port import FrameInput, FrameMode, FrameResult, SessionHandle, SessionTerms
from kvtier_core.edits.requests import Drop, EditRequest, ForkRequest
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.prefixes import Prefixes
from kvtier_core.receipts import ExactnessClass
from kvtier_core.tiers.base import MediumKind, TierMount
from tests.unit.agent.paired_rig import (
    EXACT,
    ROOMY,
    PairedRig,
    Played,
    SmallEngine,
    own_terms,
    paired_rig,
    ran,
)
from tests.unit.core.builders import (
    CHUNK,
    LAYERS,
    SCALE,
    FakeClock,
    cpu,
    engine,
    gpu,
    manifest,
    nvme,
    quest,
)
from tests.unit.core.nvme_files import Gate, ScriptedFiles

NO_ROOM = CoreError(Reason.NO_DESTINATION_CAPACITY, "full")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[PairedRig]:
    with paired_rig(tmp_path) as made:
        yield made


def test_a_served_session_is_in_the_candidates_engine_alone(rig: PairedRig) -> None:
    baseline, candidate = rig.digests
    session = rig.open(serves=True)
    assert ran(session.forward(CHUNK + 7) + session.forward()) == {(candidate, True, "")}
    assert rig.running.used == 0
    plain = rig.open()
    assert ran(plain.forward(9)) == {(baseline, False, "")}
    assert rig.paired.seated_in(rig.paired.beside) == 1  # type: ignore[arg-type]


def test_without_permission_it_comes_home_with_its_rows(rig: PairedRig) -> None:
    baseline, _ = rig.digests
    session = rig.open(serves=True)
    session.forward(CHUNK + 7)
    assert ran(session.forward(permitted=False)) == {(baseline, False, "")}
    assert rig.beside.used == 0
    assert rig.paired.detach() is not None
    session.forward(permitted=False)


def test_a_compared_session_is_in_both_and_a_wrong_value_is_seen(rig: PairedRig) -> None:
    baseline, candidate = rig.digests
    shadow, canary = rig.open(compared=True), rig.open(serves=True, compared=True)
    assert ran(shadow.forward(CHUNK + 7)) == {(baseline, False, "")}
    assert ran(canary.forward(5)) == {(candidate, True, "")}
    for session in (shadow, canary):
        compared = [one.comparison for one in session.forward()]
        assert all(one is not None and one.diff_norm == 0.0 < one.exact_norm for one in compared)
    rig.beside.spoil = True
    wrong = [one.comparison for one in shadow.forward()]
    assert all(one is not None and one.diff_norm > 0.0 for one in wrong)


@pytest.mark.parametrize("compared", [False, True], ids=["served", "compared"])
@pytest.mark.parametrize("many", [False, True], ids=["alone", "together"])
def test_one_that_may_be_the_candidates_again_stays_the_baselines_and_says_so(
    rig: PairedRig, compared: bool, many: bool
) -> None:
    """The baseline's answer is neither the candidate's nor a value to compare with itself."""
    session = rig.open(serves=True, compared=compared)
    session.forward(CHUNK + 7)
    session.forward(permitted=False)
    if many:
        first = session.reference.position
        frames = [[(session.frame(layer, first, first + 1), session.mode())] for layer in range(LAYERS)]
        results: list[FrameResult] = [rig.paired.step_many(one)[0] for one in frames]  # type: ignore[misc]
        session.check(results)
    else:
        results = session.forward()
    assert ran(results) == {(rig.digests[0], False, Reason.NO_CANDIDATE.value)}
    assert all(one.refused is None and one.comparison is None for one in results)


@pytest.mark.parametrize("compared", [False, True], ids=["served", "compared"])
def test_what_the_candidates_engine_has_no_room_for_the_baseline_answers(
    rig: PairedRig, compared: bool
) -> None:
    """And it is told once, since it is counted."""
    baseline, _ = rig.digests
    session = rig.open(serves=True, compared=compared)
    session.forward(CHUNK + 7)
    rig.beside.refusal = NO_ROOM
    results = session.forward() + session.forward()
    assert ran(results) == {(baseline, False, NO_ROOM.reason.value)}
    assert [one.refused for one in results] == [NO_ROOM] + [None] * (2 * LAYERS - 1)
    rig.beside.refusal = None
    assert ran(session.forward()) == {(baseline, False, NO_ROOM.reason.value)}
    assert rig.beside.used == 0


@pytest.mark.parametrize("compared", [False, True], ids=["served", "compared"])
def test_a_session_that_finds_no_room_to_open_is_the_baselines(rig: PairedRig, compared: bool) -> None:
    baseline, _ = rig.digests
    rig.beside.refusal = NO_ROOM
    session = rig.open(serves=True, compared=compared)
    results = session.forward(5)
    assert ran(results) == {(baseline, False, NO_ROOM.reason.value)}
    assert [one.refused for one in results] == [NO_ROOM, None]


def test_what_no_engine_could_answer_is_refused_and_the_session_is_where_it_was(rig: PairedRig) -> None:
    session = rig.open(serves=True)
    session.forward(5)
    rig.beside.refusal = CoreError(Reason.DEADLINE, "late")
    with pytest.raises(CoreError) as refused:
        rig.paired.step(session.frame(0, 5, 6), session.mode())
    assert refused.value.reason is Reason.DEADLINE
    rig.beside.refusal = None
    assert ran(session.forward()) == {(rig.digests[1], True, "")}


def test_where_the_baseline_has_no_room_the_return_is_a_typed_refusal_until_it_has(tmp_path: Path) -> None:
    with paired_rig(tmp_path, running=(gpu(3 * LAYERS),), beside=ROOMY) as rig:
        session, other = rig.open(serves=True), rig.open()
        session.forward(CHUNK + 7)
        other.forward(CHUNK + 7)
        with pytest.raises(CoreError) as refused:
            session.forward(permitted=False)
        assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
        other.close()
        assert ran(session.forward(permitted=False)) == {(rig.digests[0], False, "")}


def edited(rig: PairedRig, session: Played) -> None:
    handle = session.handle
    # Nothing is dropped, so that the reference need not be edited too.
    rig.paired.edit_session(EditRequest(handle.session_id, handle.generation, Drop(())))


def forked(rig: PairedRig, session: Played) -> None:
    handle = session.handle
    child = rig.paired.fork_session(ForkRequest(handle.session_id, handle.generation))
    # A child of the same arm is permitted what its parent is, and the baseline's all the same.
    frame = replace(session.frame(0, 5, 6), session_id=child.session_id, generation=child.generation)
    result = rig.paired.step(frame, session.mode())
    assert (result.from_candidate, result.refused) == (False, None)
    rig.paired.close_session(child.session_id, child.generation)


@pytest.mark.parametrize("act", [edited, forked])
@pytest.mark.parametrize("compared", [False, True], ids=["served", "compared"])
def test_an_edited_or_forked_session_is_the_baselines(
    rig: PairedRig, act: Callable[[PairedRig, Played], None], compared: bool
) -> None:
    session = rig.open(serves=True, compared=compared)
    session.forward(5)
    act(rig, session)
    results = session.forward()
    assert ran(results) == {(rig.digests[0], False, "UNSUPPORTED")}
    assert all(one.refused is None and one.comparison is None for one in results)
    assert rig.beside.used == 0


def test_an_adopted_candidate_takes_over_and_the_other_engine_empties(rig: PairedRig) -> None:
    _, candidate = rig.digests
    plain, served, both = rig.open(), rig.open(serves=True), rig.open(serves=True, compared=True)
    for session in (plain, served, both):
        session.forward(CHUNK + 7)
    rig.paired.swap()
    assert rig.paired.live_manifest().digest() == candidate
    assert ran(plain.forward(permitted=False)) == {(candidate, False, "")}
    assert rig.paired.settle() == 0
    assert rig.running.used == 0
    retired = rig.paired.detach()
    assert retired is not None and retired.engine is rig.running and retired.retired
    for session in (plain, served, both):
        assert ran(session.forward(permitted=False)) == {(candidate, False, "")}


def test_a_session_with_a_selector_stays_in_the_engine_that_was_replaced_until_it_ends(
    rig: PairedRig,
) -> None:
    terms = replace(own_terms(*rig.digests), own=False, selector=quest())
    handle = rig.paired.open_session(SessionTerms("team-a", SCALE, 100, terms))
    rig.paired.swap()
    assert rig.paired.settle() == 1
    assert rig.paired.detach() is None
    frame = replace(rig.open().frame(0, 0, 3), session_id=handle.session_id, generation=handle.generation)
    assert rig.paired.step(frame, EXACT).receipt.manifest_digest == rig.digests[0]
    rig.paired.close_session(handle.session_id, handle.generation)
    assert rig.paired.detach() is not None


def test_an_engine_that_is_replaced_while_a_session_is_opened_in_it_is_not_empty(
    rig: PairedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, found = rig.running.open_session, list[object]()
    leaving = threading.Thread(target=lambda: found.append(rig.paired.detach()))

    def slow(terms: SessionTerms) -> SessionHandle:
        handle = opens(terms)
        rig.paired.swap()
        leaving.start()
        # It waits for this session: how long it is given decides nothing.
        leaving.join(0.05)
        return handle

    monkeypatch.setattr(rig.running, "open_session", slow)
    session = rig.open()
    leaving.join()
    assert found == [None]
    assert ran(session.forward()) == {(rig.digests[1], False, "")}


def test_a_session_that_is_never_opened_keeps_nobody_waiting(
    rig: PairedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, hangs, ends = rig.running.open_session, threading.Event(), threading.Event()

    def hanging(terms: SessionTerms) -> SessionHandle:
        hangs.set()
        assert ends.wait(60.0)
        return opens(terms)

    monkeypatch.setattr(rig.running, "open_session", hanging)
    opening = threading.Thread(target=rig.open)
    opening.start()
    try:
        assert hangs.wait(60.0)
        assert rig.paired.detach(0.01) is None
        assert opening.is_alive()
    finally:
        ends.set()
        opening.join()
    assert rig.paired.detach() is not None


def test_frames_of_many_sessions_are_answered_where_each_is(rig: PairedRig) -> None:
    plain, compared, returned = rig.open(), rig.open(compared=True), rig.open(serves=True)
    sessions = [plain, compared, returned]
    for session in sessions:
        session.forward(5)
    frames = [[(one.frame(layer, 5, 6), EXACT) for one in sessions] for layer in range(LAYERS)]
    lost = replace(plain.frame(0, 5, 6), session_id="nobody")
    stale = replace(compared.frame(0, 5, 6), generation=99)
    answers = [rig.paired.step_many(part) for part in frames]
    for index, session in enumerate(sessions):
        session.check([part[index] for part in answers])  # type: ignore[misc]
    refused = rig.paired.step_many([(lost, EXACT), (stale, EXACT)])
    assert [one.reason for one in refused if isinstance(one, CoreError)] == [
        Reason.SESSION_UNKNOWN,
        Reason.GENERATION_STALE,
    ]


def test_bytes_of_both_engines_are_the_caches(rig: PairedRig) -> None:
    before = {one.class_name: one for one in rig.paired.tiers()}
    rig.open().forward(5)
    rig.open(serves=True).forward(5)
    after = {one.class_name: one for one in rig.paired.tiers()}
    assert set(after) == {"hbm", "ram", "flash"}
    moved = sum(after[name].used_bytes - before[name].used_bytes for name in after)
    assert moved == rig.running.used + rig.beside.used > 0


def test_storage_that_hangs_holds_whoever_empties_an_engine_no_longer_than_asked(tmp_path: Path) -> None:
    files, tiers = ScriptedFiles(), (gpu(LAYERS), cpu(2), nvme(64))
    (tmp_path / "slow").mkdir()
    with (
        paired_rig(tmp_path) as rig,
        engine(tmp_path / "slow", tiers, files=files, clock=time.monotonic) as core,
    ):
        assert rig.paired.detach() is not None
        rig.beside, digest = SmallEngine(core), manifest(tiers).digest()
        rig.terms = own_terms(rig.digests[0], digest)
        rig.paired.attach(rig.beside, digest, "second")  # type: ignore[arg-type]
        session = rig.open(serves=True)
        session.forward(2 * CHUNK)
        gate = files.script = Gate("read")
        try:
            assert rig.paired.settle(time.monotonic() + 0.05) == 1
            assert not gate.opened.is_set()
            handle = session.handle
            until = time.monotonic() + 0.05
            for asked in (
                lambda: rig.paired.fork_session(
                    ForkRequest(handle.session_id, handle.generation, deadline=until)
                ),
                lambda: rig.paired.edit_session(
                    EditRequest(handle.session_id, handle.generation, Drop(()), 0, until)
                ),
            ):
                with pytest.raises(CoreError) as late:
                    asked()
                assert late.value.reason is Reason.DEADLINE
        finally:
            gate.opened.set()
        assert rig.paired.settle() == 0


def test_a_step_that_hangs_holds_whoever_empties_an_engine_no_longer_than_asked(
    rig: PairedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = rig.open(serves=True), rig.open(serves=True)
    steps, hangs, ends = rig.beside.step, threading.Event(), threading.Event()

    def hanging(frame: FrameInput, mode: FrameMode) -> FrameResult:
        hangs.set()
        assert ends.wait(60.0)
        return steps(frame, mode)

    monkeypatch.setattr(rig.beside, "step", hanging)
    stepping = threading.Thread(target=rig.paired.step, args=(session.frame(0, 0, 5), session.mode()))
    stepping.start()
    try:
        assert hangs.wait(60.0)
        assert rig.paired.settle(time.monotonic()) == 1, "the other one is home"
        assert stepping.is_alive()
    finally:
        ends.set()
        stepping.join()
    assert rig.paired.settle() == 0
    other.close()


class TestBlocks:
    @pytest.mark.parametrize(
        ("compared", "reason"),
        [
            pytest.param(False, Reason.NOT_VISIBLE, id="only-from-its-own-engines"),
            pytest.param(True, Reason.UNSUPPORTED, id="from-none-in-two-engines"),
        ],
    )
    def test_a_candidates_session_starts_from_no_block_of_the_baselines(
        self, rig: PairedRig, compared: bool, reason: Reason
    ) -> None:
        session = rig.open(serves=True, compared=compared)
        mine = rig.running.core.blocks.store.directory
        blocks = SimpleNamespace(ready=0, of=lambda directory: directory is mine)
        with pytest.raises(CoreError) as refused:
            rig.paired.prefixes.start(session.handle.session_id, session.handle.generation, blocks)  # type: ignore[arg-type]
        assert refused.value.reason is reason

    def test_rows_of_either_engine_become_the_same_blocks(self, rig: PairedRig) -> None:
        def payload(prefixes: Prefixes | object, played: Played) -> bytes:
            handle = played.handle
            return bytes(prefixes.payload(handle.session_id, handle.generation, 0, 0))  # type: ignore[attr-defined]

        served = rig.open(serves=True)
        served.forward(CHUNK)
        # What is published is committed: a later frame says so.
        served.forward()
        reference = rig.alone.prefixes.payload(
            served.reference.handle.session_id, served.reference.handle.generation, 0, 0
        )
        assert payload(rig.paired.prefixes, served) == reference


class TestOtherChunks:
    """A candidate whose answers are the same up to rounding: rows that follow them are nobody's exact run."""

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[PairedRig]:
        other = manifest(ROOMY).model_copy(update={"chunk_tokens": CHUNK // 2})
        mounts = {one.name: TierMount(one.name, MediumKind(one.medium.value), folder=None) for one in ROOMY}
        with paired_rig(tmp_path) as rig:
            assert rig.paired.detach() is not None
            core = CacheEngine(other, mounts, FakeClock(), probe=False)
            rig.beside, rig.terms = SmallEngine(core), own_terms(rig.digests[0], other.digest())
            rig.paired.attach(rig.beside, other.digest(), "second")  # type: ignore[arg-type]
            yield rig
            core.stop()

    def forward(self, session: Played, tokens: int, permitted: bool = True) -> FrameResult:
        """One step; the last layer's answer."""
        first, mode = session.reference.position, session.mode(permitted)
        frames = [session.frame(layer, first, first + tokens) for layer in range(LAYERS)]
        results = [session.rig.paired.step(frame, mode) for frame in frames]
        session.reference.forward(tokens, block=tokens)
        return results[-1]

    def published(self, session: Played) -> bool:
        """Whether a chunk may become a block that others start from."""
        handle = session.handle
        try:
            session.rig.paired.prefixes.payload(handle.session_id, handle.generation, 0, 0)
        except CoreError as error:
            if error.reason is not Reason.UNCOMMITTED_ROWS:
                raise
            return False
        return True

    @pytest.mark.parametrize(
        ("serves", "compared", "told"),
        [(False, True, 0), (True, True, CHUNK // 2), (True, False, CHUNK // 2), (None, False, 0)],
        ids=["shadow", "canary-compared", "canary", "no-candidate"],
    )
    def test_a_client_is_told_by_which_chunks_its_answers_are_merged(
        self, rig: PairedRig, serves: bool | None, compared: bool, told: int
    ) -> None:
        terms = None if serves is None else rig.terms
        opened = rig.paired.open_session(
            SessionTerms("acme", 0.125, 0, terms, serves=bool(serves), compared=compared)
        )
        assert opened.chunk_tokens == told

    def test_a_session_without_room_beside_is_told_of_the_baselines_chunks(self, rig: PairedRig) -> None:
        rig.beside.refusal = CoreError(Reason.NO_DESTINATION_CAPACITY, "full")
        opened = rig.paired.open_session(SessionTerms("acme", 0.125, 0, rig.terms, serves=True))
        both = rig.paired.open_session(SessionTerms("acme", 0.125, 0, rig.terms, serves=True, compared=True))
        assert (opened.chunk_tokens, both.chunk_tokens) == (0, 0)

    @pytest.mark.parametrize("serves", [False, True], ids=["shadow", "canary"])
    def test_the_history_of_an_engine_names_whose_answers_were_published(
        self, rig: PairedRig, serves: bool
    ) -> None:
        session = rig.open(serves=serves, compared=True)
        for tokens in (CHUNK, 1):
            assert self.forward(session, tokens).from_candidate is serves
        assert self.published(session) is not serves
        receipt = self.forward(session, 1, permitted=False).receipt
        over = ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY if serves else ExactnessClass.EXACT
        assert (receipt.exactness, receipt.producer_digest) == (over, rig.digests[serves])

    @pytest.mark.parametrize("serves", [False, True], ids=["shadow", "canary"])
    def test_so_does_that_of_an_engine_that_is_adopted(self, rig: PairedRig, serves: bool) -> None:
        session = rig.open(serves=serves, compared=True)
        for tokens in (CHUNK, 1):
            self.forward(session, tokens)
        rig.paired.swap()
        receipt = self.forward(session, 1, permitted=False).receipt
        assert receipt.manifest_digest == rig.digests[1]
        over = ExactnessClass.EXACT if serves else ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY
        assert (receipt.exactness, receipt.producer_digest) == (over, rig.digests[serves])
        assert self.published(session) is serves


class PairedMachine(RuleBasedStateMachine):
    """Sessions open, go on, lose their permission and end, in any order, while the candidate is adopted and
    its engine emptied. The reference knows one engine."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = RIGS[-1]
        self.open: list[Played] = []
        self.lost: set[str] = set()
        self.swapped = False

    @precondition(lambda self: len(self.open) < 4)
    @rule(serves=st.booleans(), compared=st.booleans())
    def opens(self, serves: bool, compared: bool) -> None:
        self.open.append(self.rig.open(serves=serves, compared=compared))

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 3), tokens=st.integers(1, CHUNK + 3))
    def steps(self, pick: int, tokens: int) -> None:
        session = self.open[pick % len(self.open)]
        left = 3 * CHUNK - session.reference.position
        if left:
            permitted = not self.swapped and session.handle.session_id not in self.lost
            results = session.forward(min(tokens, left), permitted=permitted)
            by = {one.receipt.manifest_digest for one in results if one.from_candidate}
            assert by <= ({self.rig.digests[1]} if permitted else set())

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 3))
    def loses_permission(self, pick: int) -> None:
        self.lost.add(self.open[pick % len(self.open)].handle.session_id)

    @precondition(lambda self: self.lost)
    @rule()
    def regains_permission(self) -> None:
        """As when a narrower grant is widened again."""
        self.lost.clear()

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 3))
    def closes(self, pick: int) -> None:
        self.open.pop(pick % len(self.open)).close()

    @rule()
    def settles(self) -> None:
        """As when no lease is held: whoever is beside comes home."""
        self.lost |= {one.handle.session_id for one in self.open}
        assert self.rig.paired.settle() == 0

    @precondition(lambda self: not self.swapped)
    @rule()
    def adopts(self) -> None:
        self.rig.paired.swap()
        self.swapped = True

    @invariant()
    def nobody_holds_more_than_sessions_do(self) -> None:
        if not self.open:
            assert self.rig.running.used == self.rig.beside.used == 0

    def teardown(self) -> None:
        for session in self.open:
            session.close()
        assert self.rig.running.used == self.rig.beside.used == 0
        if self.swapped:
            self.rig.paired.swap()
            for slot in (self.rig.paired.running, self.rig.paired.beside):
                assert slot is not None
                slot.retired = False


RIGS: list[PairedRig] = []


def test_any_order_of_events_keeps_bits_and_gives_everything_back(rig: PairedRig) -> None:
    RIGS.append(rig)
    try:
        PairedMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
        PairedMachine.TestCase().runTest()
    finally:
        RIGS.pop()
