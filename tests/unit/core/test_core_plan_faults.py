"""A tier that slows down in the middle of a step, loses rows, answers late or twice: another exact plan or a
typed fallback, in time, and never other bits; by the general way and by what is kept of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from kvtier_core.admission import Fallback
from kvtier_core.directory import logical_id
from kvtier_core.errors import CoreError, Reason
from kvtier_core.neardata import NearProducer
from kvtier_core.placements.preference import PlacementPreference, PlanKind
from kvtier_core.planner import PlanTerms
from kvtier_core.planning.facts import Rates
from kvtier_core.stepplans import WINDOW, Planned
from kvtier_core.streamedframe import Asked
from tests.unit.core.rowsdouble import CPU, GPU, LAYOUT, NVME, SCALE, World, by_kept, world
from tests.unit.core.tierdoubles import Read

WHERE = [NVME, CPU, NVME, GPU]


@contextmanager
def opened(where: Sequence[int] = WHERE, **options: object) -> Iterator[World]:
    made = world(where, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def attend(made: World, kind: PlanKind | None = None) -> Planned:
    with torch.inference_mode():
        return made.plans.exact(made.append, made.query, made.visible, step=0, forced=kind)


def attend_kept(made: World) -> Planned:
    with torch.inference_mode():
        return by_kept(made)


both_ways = pytest.mark.parametrize("attend", [attend, attend_kept], ids=["general", "kept"])
Attend = Callable[[World], Planned]


@pytest.fixture(scope="module")
def want() -> torch.Tensor:
    with opened([GPU] * 4) as made:
        return attend(made).attended.out


def failing(times: int, reason: Reason) -> Callable[[Sequence[Read]], None]:
    left = [times]

    def pick(reads: Sequence[Read]) -> None:
        if left[0]:
            left[0] -= 1
            reads[0].end(CoreError(reason, "a fault of this double"))
        else:
            reads[0].end()

    return pick


@both_ways
@pytest.mark.parametrize(
    "reason",
    [Reason.CHECKSUM_MISMATCH, Reason.STORAGE_UNAVAILABLE, Reason.IDENTITY_MISMATCH, Reason.SHORT_COPY],
)
def test_rows_lost_once_are_read_by_the_next_plan(want: torch.Tensor, reason: Reason, attend: Attend) -> None:
    with opened() as made:
        made.store.storage.pick = failing(1, reason)
        planned = attend(made)
        assert made.plans.buffers.available == made.plans.buffers.limit
    assert planned.plan.kind is PlanKind.ALL_ROWS_MOVED
    assert planned.failed == (("supportPartition", reason.value),)
    assert planned.plan.lost["supportPartition"] == "FAILED"
    assert torch.equal(planned.attended.out, want)


RECOMPUTE = PlanTerms(
    fallbacks=frozenset({Fallback.RECOMPUTE_EXACT, Fallback.POSTPONE_FOR_EXACT_RETRY}),
    recompute=2.0,
    retry=0.5,
)


@both_ways
@pytest.mark.parametrize(
    ("terms", "slack", "action"),
    [
        pytest.param(PlanTerms(), None, Fallback.REJECT_NO_LEGAL_PATH, id="nothing-allowed"),
        pytest.param(RECOMPUTE, None, Fallback.RECOMPUTE_EXACT, id="recompute"),
        pytest.param(RECOMPUTE, 1.0, Fallback.POSTPONE_FOR_EXACT_RETRY, id="no-time-to-recompute"),
        pytest.param(RECOMPUTE, 0.25, Fallback.REJECT_NO_LEGAL_PATH, id="no-time-at-all"),
    ],
)
def test_rows_lost_for_good_end_in_the_contracts_fallback(
    want: torch.Tensor, terms: PlanTerms, slack: float | None, action: Fallback, attend: Attend
) -> None:
    deadline = None if slack is None else 100.0 + slack
    with opened(terms=terms, deadline=deadline) as made:
        made.store.storage.pick = failing(1 << 20, Reason.STORAGE_UNAVAILABLE)
        with pytest.raises(CoreError) as lost:
            attend(made)
        assert lost.value.reason is Reason.STORAGE_UNAVAILABLE
        assert lost.value.facts["fallback"] == action.value
        assert lost.value.facts["attempted"] == (
            "supportPartition:STORAGE_UNAVAILABLE,allRowsMoved:STORAGE_UNAVAILABLE"
        )
        made.store.storage.pick = lambda reads: reads[0].end()
        assert torch.equal(attend(made).attended.out, want)


@both_ways
def test_a_tier_that_slows_down_ends_the_frame_at_its_deadline_and_a_repeat_gives_the_same_bits(
    want: torch.Tensor, attend: Attend
) -> None:
    with opened(deadline=101.0) as made:

        def slower(reads: Sequence[Read]) -> None:
            made.clock.now += 0.4

        made.store.storage.pick = slower
        with pytest.raises(CoreError) as late:
            attend(made)
        assert late.value.reason is Reason.DEADLINE
        assert late.value.facts["fallback"] == Fallback.REJECT_NO_LEGAL_PATH.value
        assert made.clock.now < 102.0
        waiting = [read for read in made.store.storage.reads if not read.sink.over]
        held = made.plans.buffers.limit - made.plans.buffers.available
        assert held == len(waiting) == 2
    with opened() as made:
        made.store.storage.pick = lambda reads: reads[-1].end()
        assert torch.equal(attend(made).attended.out, want)


@both_ways
def test_bytes_that_come_late_reach_nobody(want: torch.Tensor, attend: Attend) -> None:
    with opened(deadline=101.0) as made:
        late: list[Read] = []

        def expires(reads: Sequence[Read]) -> None:
            made.clock.now = 101.5
            for read in reads:
                late.append(read)
                read.sink.done(0, CoreError(Reason.DEADLINE, "storage did not end in time"))

        made.store.storage.pick = expires
        with pytest.raises(CoreError) as refused:
            attend(made)
        assert refused.value.reason is Reason.DEADLINE
        for read in late:
            read.source = torch.full(LAYOUT.shape, 7.0)
        made.store.storage.pick = lambda reads: reads[0].end()
        again = World(
            made.store,
            made.plans,
            made.append,
            type(made.query)(made.query.q, made.query.first_position, made.query.frame, None),
            made.visible,
            made.clock,
        )
        first = attend(again).attended.out
        for read in late:
            read.land()
            read.sink.drained(0)
        assert torch.equal(first, want)
        assert torch.equal(attend(again).attended.out, want)
        assert made.plans.buffers.available == made.plans.buffers.limit


@pytest.mark.parametrize(
    ("attend", "where", "found"),
    [
        pytest.param(attend, [GPU, NVME], "LATE_RECEIPT", id="general"),
        pytest.param(attend, [NVME, GPU], "DEADLINE", id="general-before-the-next-chunk"),
        pytest.param(attend_kept, [NVME, GPU], "DEADLINE", id="kept"),
    ],
)
def test_a_state_that_is_formed_too_late_is_no_answer_and_no_other_plan_is_begun(
    attend: Attend, where: list[int], found: str
) -> None:
    with opened(where, deadline=101.0) as made:

        def late(reads: Sequence[Read]) -> None:
            reads[0].end()
            made.clock.now = 101.5

        made.store.storage.pick = late
        with pytest.raises(CoreError) as refused:
            attend(made)
        assert refused.value.reason is Reason.DEADLINE
        assert refused.value.facts["attempted"] == f"supportPartition:{found}"
        assert len(made.store.storage.reads) == 1


@both_ways
def test_what_is_answered_twice_counts_once(want: torch.Tensor, attend: Attend) -> None:
    with opened() as made:

        def twice(reads: Sequence[Read]) -> None:
            reads[0].end()
            reads[0].sink.done(0, CoreError(Reason.CHECKSUM_MISMATCH, "and again"))
            reads[0].end()

        made.store.storage.pick = twice
        planned = attend(made)
        assert made.plans.buffers.available == made.plans.buffers.limit
    assert planned.failed == ()
    assert torch.equal(planned.attended.out, want)


def test_a_frame_that_cannot_be_in_time_is_refused_before_anything_is_read() -> None:
    """B.9: predicted_finish > deadline. Storage was measured at one block a second."""
    postpone = PlanTerms(fallbacks=frozenset({Fallback.POSTPONE_FOR_EXACT_RETRY}), retry=0.0)
    with opened(deadline=101.0, rates=Rates(1e-6), terms=postpone) as made:
        made.store.storage.measured.read_bytes_per_second = float(LAYOUT.payload_bytes)
        planner = type(made.plans)(
            made.store, made.clock, None, query_heads=4, rates=Rates(1e-6), terms=postpone
        )
        with pytest.raises(CoreError) as late:
            planner.exact(made.append, made.query, made.visible, step=0)
        assert late.value.reason is Reason.DEADLINE
        assert late.value.facts["supportPartition"] == "DEADLINE"
        assert late.value.facts["fallback"] == Fallback.POSTPONE_FOR_EXACT_RETRY.value
        assert made.store.storage.reads == []


def test_the_policy_of_a_cache_decides_which_plan_runs(want: torch.Tensor) -> None:
    moved = PlacementPreference("flexgen", prefer=PlanKind.ALL_ROWS_MOVED)
    with opened(terms=PlanTerms(preference=moved)) as made:
        planned = attend(made)
    assert planned.plan.kind is PlanKind.ALL_ROWS_MOVED
    assert set(planned.plan.labels) == {"nvme:staged", "cpu:staged", "gpu:partial"}
    assert planned.plan.lost["supportPartition"] == "NOT_PREFERRED"
    assert torch.equal(planned.attended.out, want)


def test_a_decision_is_made_once_for_a_placement() -> None:
    with opened([CPU, GPU]) as made:
        for _ in range(5):
            attend(made)
        assert made.plans.planner.decided == 1
        attend(made, PlanKind.ALL_ROWS_MOVED)
        assert made.plans.planner.decided == 1
        assert made.plans.inspect(made.append.session, 0).why()["requestOnCpu"] == "REQUEST_SPLIT"


# Promises.


def layers(made: World) -> None:
    """One layer more, with chunks of the same rows."""
    found = made.append.session.layers
    lines = made.store.lines_of(len(found))
    found.append(type(found[0])(found[0].open_tier, found[0].frontier, lines))


def test_a_promise_that_is_given_again_goes_on_where_buffers_were_missing(want: torch.Tensor) -> None:
    with opened([NVME] * 3 + [GPU]) as made, torch.inference_mode():
        plans, storage = made.plans, made.store.storage
        kept = plans.streamed.keep(plans.of_decode(made.append, made.visible), made.append.session, SCALE)
        assert kept is not None
        plans.buffers.limit = WINDOW + 2
        for _ in range(2):
            assert plans.promise_kept("r1", 0, 0, kept) == 2 == len(storage.reads)
        plans.buffers.limit = WINDOW + 4
        for _ in range(2):
            assert plans.promise_kept("r1", 0, 0, kept) == 3 == len(storage.reads)
        planned = by_kept(made)
        assert planned.attended.promised_bytes == 3 * LAYOUT.payload_bytes
        assert torch.equal(planned.attended.out, want)
        assert plans.buffers.available == plans.buffers.limit


@both_ways
@pytest.mark.parametrize("promised", [Reason.CHECKSUM_MISMATCH, Reason.TRANSFER_FAILED, None], ids=str)
def test_a_promise_that_fails_costs_its_own_time_only(
    want: torch.Tensor, promised: Reason | None, attend: Attend
) -> None:
    with opened() as made, torch.inference_mode():
        storage, layer = made.store.storage, made.append.session.layers[0]
        assert made.plans.promise(made.append.session, 0, 0) == 2
        assert layer.frontier == made.visible
        for read in storage.reads:
            read.end(promised and CoreError(promised, "a fault of this double"))
        planned = attend(made)
        assert planned.failed == ()
        assert len(storage.reads) == (2 if promised is None else 4)
        assert planned.attended.promised_bytes == (2 * LAYOUT.payload_bytes if promised is None else 0)
        assert torch.equal(planned.attended.out, want)
        assert made.plans.buffers.available == made.plans.buffers.limit


def test_the_next_layers_blocks_come_while_this_one_is_computed(want: torch.Tensor) -> None:
    with opened([NVME] * 4) as made, torch.inference_mode():
        layers(made)
        session, storage = made.append.session, made.store.storage
        options = {"step": 0, "next_layer_follows": True}
        first = made.plans.exact(made.append, made.query, made.visible, **options)  # type: ignore[arg-type]
        assert (first.attended.promised_bytes, len(storage.reads)) == (0, 8)
        made.clock.now += 2.0
        for read in storage.reads[4:]:
            read.end()
        made.clock.now += 1.0
        made.append.layer = 1
        second = made.plans.exact(made.append, made.query, made.visible, step=0)
        assert len(storage.reads) == 8
        assert second.attended.promised_bytes == 4 * LAYOUT.payload_bytes
        assert second.attended.hidden_seconds == 2.0
        assert second.attended.stall_seconds == 0.0
        assert torch.equal(second.attended.out, first.attended.out)
        assert torch.equal(second.attended.out, want)
        assert made.plans.buffers.available == made.plans.buffers.limit
        assert session.session_id == "r1"


def test_what_follows_begins_behind_the_reads_of_a_kept_plan(want: torch.Tensor) -> None:
    """Storage is never without a read while a frame waits for it, and what was promised is used."""
    with opened([NVME] * 3 + [GPU]) as made, torch.inference_mode():
        layers(made)
        session, storage = made.append.session, made.store.storage
        begun: list[int] = []

        def follow() -> None:
            begun.append(len(storage.reads))
            made.plans.promise(session, 0, 1)

        first = by_kept(made, follow=follow)
        assert begun[0] == 3
        assert len(storage.reads) == 6
        for read in storage.reads[3:]:
            read.end()
        made.append.layer = 1
        second = by_kept(made)
        assert len(storage.reads) == 6
        assert second.attended.promised_bytes == 3 * LAYOUT.payload_bytes
        assert torch.equal(first.attended.out, want) and torch.equal(second.attended.out, want)
        assert made.plans.buffers.available == made.plans.buffers.limit


@pytest.mark.parametrize("fails", [False, True], ids=["answered", "refused"])
def test_rows_that_a_kept_plan_reads_from_storage_are_held_meanwhile_and_given_back(fails: bool) -> None:
    with opened() as made:
        readers, seen = made.store.directory.readers, []

        def watched(reads: Sequence[Read]) -> None:
            seen.append(readers[:4].tolist())
            reads[0].end(CoreError(Reason.KEY_UNAVAILABLE, "gone") if fails else None)

        made.store.storage.pick = watched
        if fails:
            with pytest.raises(CoreError) as refused:
                attend_kept(made)
            assert refused.value.reason is Reason.KEY_UNAVAILABLE
        else:
            attend_kept(made)
        assert seen and all(held == [1, 0, 1, 0] for held in seen)
        assert not readers.any()


def test_a_kept_plan_holds_a_window_of_buffers_and_never_all_blocks() -> None:
    with opened([NVME] * 11 + [GPU]) as made:
        most = []

        def watched(reads: Sequence[Read]) -> None:
            most.append(made.plans.buffers.limit - made.plans.buffers.available)
            reads[0].end()

        made.store.storage.pick = watched
        planned = attend_kept(made)
        assert planned.failed == ()
        assert 2 <= max(most) <= WINDOW
        assert planned.attended.peak_buffer_bytes == WINDOW * made.plans.buffers.block_bytes
    with opened([GPU] * 12) as made:
        assert torch.equal(planned.attended.out, attend(made).attended.out)


@pytest.mark.parametrize("reason", [Reason.STORAGE_UNAVAILABLE, Reason.QUEUE_FULL], ids=str)
def test_a_kept_plan_that_cannot_begin_gives_way_to_another_and_keeps_no_buffer(
    want: torch.Tensor, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as made, torch.inference_mode():
        storage, begin = made.store.storage, made.store.storage.submit_read
        made.plans.promise(made.append.session, 0, 0)
        refusals = [reason]

        def refusing(*given: object) -> None:
            if refusals:
                raise CoreError(refusals.pop(), "a fault of this double")
            begin(*given)  # type: ignore[arg-type]

        storage.reads[0].end(CoreError(Reason.TRANSFER_FAILED, "so that it is read again"))
        monkeypatch.setattr(storage, "submit_read", refusing)
        planned = by_kept(made)
        assert planned.failed == (("supportPartition", reason.value),)
        assert torch.equal(planned.attended.out, want)
        for read in storage.reads:
            if not read.sink.over:
                read.end()
        assert made.plans.buffers.available == made.plans.buffers.limit


def test_a_state_that_is_not_what_its_receipt_says_is_no_part_of_an_answer(
    want: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E.5: what a kept plan's states come with is believed field by field, as any receipt is."""
    real = NearProducer.receipt
    changes: dict[Reason, dict[str, object]] = {
        Reason.STATE_SCHEMA_MISMATCH: {"state_schema": "another"},
        Reason.CHECKSUM_MISMATCH: {"checksum": 7},
        Reason.QUERY_IDENTITY_MISMATCH: {"query_sha256": bytes(32)},
        Reason.PARTIAL_RECEIPT_STALE: {"producer_generation": 99},
        Reason.PARTIAL_RECEIPT_INCOMPLETE: {"merge_revision": None},
        Reason.NOT_VISIBLE: {"completed": None},
    }
    for reason, change in changes.items():

        def tampered(producer: NearProducer, *given: object, change: dict[str, object] = change) -> object:
            return dataclasses.replace(real(producer, *given), **change)  # type: ignore[arg-type]

        with opened() as made:
            monkeypatch.setattr(NearProducer, "receipt", tampered)
            planned = attend_kept(made)
            assert planned.failed == (("supportPartition", reason.value),)
            assert torch.equal(planned.attended.out, want)
            assert made.plans.buffers.available == made.plans.buffers.limit


def named(**change: object) -> Callable[[World], object]:
    """The session's rows are of another source by now."""

    def made(world: World) -> None:
        session = world.append.session
        session.source = dataclasses.replace(session.source, **change)  # type: ignore[arg-type]

    return made


OTHERS: list[tuple[str, Callable[[World], object], Reason]] = [
    ("tenant", named(tenant_namespace="another"), Reason.TENANT_MISMATCH),
    (
        "request",
        lambda made: setattr(made.append.session, "session_id", "r2"),
        Reason.QUERY_IDENTITY_MISMATCH,
    ),
    ("request-generation", named(request_generation=99), Reason.REQUEST_STALE),
    ("checkpoint", named(checkpoint_generation="step-99"), Reason.MODEL_MISMATCH),
    ("mask", named(visibility_policy_manifest_sha256=bytes(32)), Reason.MASK_MISMATCH),
    ("positions", named(position_contract_sha256=bytes(32)), Reason.POSITION_CONTRACT_MISMATCH),
    (
        "epoch",
        lambda made: setattr(made.append.session, "position_epoch", 9),
        Reason.POSITION_CONTRACT_MISMATCH,
    ),
    ("cache-generation", named(cache_generation=99), Reason.PARTIAL_RECEIPT_STALE),
    (
        "scale",
        lambda made: setattr(
            made, "query", dataclasses.replace(made.query, frame=made.query.frame._replace(scale=0.5))
        ),
        Reason.SCORE_SCALE_MISMATCH,
    ),
]


@pytest.mark.parametrize(
    ("change", "reason"), [pytest.param(change, reason, id=name) for name, change, reason in OTHERS]
)
def test_a_kept_layer_answers_nothing_but_what_it_was_set_up_for(
    change: Callable[[World], object], reason: Reason
) -> None:
    """Were it not forgotten in time, its receipt would say so: nothing of that is asked of who checks it."""
    with opened() as made, torch.inference_mode():
        plans = made.plans
        kept = plans.streamed.keep(plans.of_decode(made.append, made.visible), made.append.session, SCALE)
        assert kept is not None
        change(made)
        with pytest.raises(CoreError) as refused:
            plans.streamed.attend(Asked(kept, made.append, made.query, 0, lambda: None), None)
        assert refused.value.reason is reason
        while made.store.storage.poll():
            pass
        assert plans.buffers.available == plans.buffers.limit


@both_ways
@pytest.mark.parametrize(
    ("logical", "reason"),
    [
        pytest.param(logical_id(1, 1, 2), Reason.QUERY_IDENTITY_MISMATCH, id="of-another-layer"),
        pytest.param(logical_id(1, 0, 1), Reason.SUPPORT_OVERLAP, id="the-one-before-it"),
        pytest.param(logical_id(1, 0, 0), Reason.DUPLICATE_RECEIPT, id="the-first-again"),
        pytest.param(logical_id(1, 0, 9), Reason.STATE_INVALID, id="behind-the-query"),
    ],
)
def test_a_receipt_says_which_rows_were_read_and_not_which_were_asked_for(
    want: torch.Tensor, logical: int, reason: Reason, attend: Attend
) -> None:
    with opened() as made:
        identities = made.store._identities
        identities[2] = dataclasses.replace(identities[2], logical=logical)
        planned = attend(made)
        assert planned.failed == (("supportPartition", reason.value),)
        assert made.plans.buffers.available == made.plans.buffers.limit


def test_a_layer_may_come_in_several_frames_before_what_it_promised() -> None:
    with opened([NVME] * 4) as made, torch.inference_mode():
        layers(made)
        for _ in range(3):
            made.plans.exact(made.append, made.query, made.visible, step=0, next_layer_follows=True)
        # Four blocks for each frame of the first layer, and four promised ones, once.
        assert len(made.store.storage.reads) == 3 * 4 + 4
        made.append.layer = 1
        last = made.plans.exact(made.append, made.query, made.visible, step=0)
        assert last.attended.promised_bytes == 4 * LAYOUT.payload_bytes
        assert made.plans.buffers.available == made.plans.buffers.limit


@pytest.mark.parametrize("how", ["another layer", "another step", "closed", "no layer follows"])
def test_a_promise_that_is_not_kept_changes_nothing(want: torch.Tensor, how: str) -> None:
    with opened([NVME] * 4) as made, torch.inference_mode():
        if how != "no layer follows":
            layers(made)
        storage = made.store.storage
        made.plans.exact(made.append, made.query, made.visible, step=0, next_layer_follows=True)
        promised = storage.reads[4:]
        assert len(promised) == (0 if how == "no layer follows" else 4)
        if how == "closed":
            made.plans.forget("r1")
        elif how == "another step":
            made.append.layer = 1
            out = made.plans.exact(made.append, made.query, made.visible, step=1).attended.out
            assert torch.equal(out, want)
        else:
            made.append.layer = 0 if how == "no layer follows" else 2
            if how == "another layer":
                layers(made)
            out = made.plans.exact(made.append, made.query, made.visible, step=0).attended.out
            assert torch.equal(out, want)
        for read in promised:
            if not read.sink.over:
                read.end()
        assert made.plans.buffers.available == made.plans.buffers.limit


def test_a_promise_leaves_buffers_to_frames() -> None:
    with opened([NVME] * 8) as made, torch.inference_mode():
        layers(made)
        made.plans.buffers.limit = 12
        made.plans.exact(made.append, made.query, made.visible, step=0, next_layer_follows=True)
        assert made.plans.buffers.available == 8
        made.append.layer = 1
        made.plans.exact(made.append, made.query, made.visible, step=0)
        assert made.plans.buffers.available == 12
