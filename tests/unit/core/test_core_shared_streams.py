"""Frames of one call that want the same blocks of storage: read once, each answered as if it were alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core import sharedstreams, streaming
from kvtier_core.errors import CoreError, Reason
from kvtier_core.neardata import NearProducer
from kvtier_core.sharedstreams import alike
from kvtier_core.stepplans import WINDOW, Tried
from kvtier_core.streamedframe import Asked, Streamed
from tests.unit.core.rowsdouble import CPU, GPU, LAYERS, LAYOUT, NVME, World, world
from tests.unit.core.severalframes import Member, alone, asked_of, copies, frame_of, kept_of, rows_thrice
from tests.unit.core.tierdoubles import Read

BLOCK = LAYOUT.payload_bytes
WHERE = [NVME, CPU, NVME, NVME, GPU]


@contextmanager
def opened(where: Sequence[int] = WHERE) -> Iterator[World]:
    made = world(where)
    rows_thrice(made)
    try:
        yield made
    finally:
        made.close()


def attend(made: World, asked: Sequence[Asked]) -> list[Streamed | Tried | CoreError]:
    with torch.inference_mode():
        return made.plans.streamed_together(asked)


def outs(found: Sequence[object]) -> list[torch.Tensor]:
    assert all(isinstance(one, Streamed) for one in found), found
    return [one.out for one in found if isinstance(one, Streamed)]


def check_bits(found: Sequence[object], members: Sequence[Member]) -> None:
    for number, (out, member) in enumerate(zip(outs(found), members, strict=True)):
        assert torch.equal(out, alone(member, number)), number


def all_back(made: World) -> None:
    while made.store.storage.poll():
        pass
    assert made.plans.buffers.available == made.plans.buffers.limit
    assert not made.store.directory.readers.any()


MEMBERS = st.builds(
    Member,
    chunks=st.integers(2, 8),
    rows=st.integers(1, 64),
    common=st.integers(0, 8),
    own=st.integers(0, LAYERS - 1),
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([GPU, CPU, NVME, NVME]), min_size=8, max_size=8),
    st.lists(MEMBERS, min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.randoms(use_true_random=False),
)
def test_any_partition_any_sharing_and_any_company_give_the_bits_of_a_frame_alone(
    where: list[int], members: list[Member], promised: set[int], random: object
) -> None:
    """Whatever comes in whatever order, and twice: what is read is each copy that somebody wants, once, and
    receipts say so together."""

    def any_of(reads: Sequence[Read]) -> None:
        read = random.choice(list(reads))  # type: ignore[attr-defined]
        read.end()
        if random.random() < 0.3:  # type: ignore[attr-defined]
            read.sink.done(0, None)
            read.sink.drained(0)

    with opened(where) as made:
        storage = made.store.storage
        storage.pick = any_of
        members = [one for one in members if kept_of(made, *frame_of(made, one, 0)) is not None]
        asked = asked_of(made, members)
        for number in promised & set(range(len(asked))):
            made.plans.promise(asked[number].append.session, 0, 0)
        before = len(storage.reads)
        found = attend(made, asked)
        check_bits(found, members)
        wanted = [line for one in members for line in copies(one, 8) if where[line % 8] == NVME]
        assert sorted(read.item.ref.slot for read in storage.reads) == sorted(set(wanted))
        answered = [one for one in found if isinstance(one, Streamed)]
        attended = sum(len(one.kept.blocks) for one in asked) * BLOCK
        shared = sum(one.shared.get("flash", 0) for one in answered)
        assert attended - shared == len(storage.reads) * BLOCK
        assert sum(one.promised_bytes for one in answered) >= before * BLOCK
        all_back(made)


def test_no_more_blocks_are_held_for_many_frames_than_for_one() -> None:
    with opened([NVME] * 11 + [GPU]) as made:
        members = [Member(12, rows=9 + number) for number in range(6)]
        most: list[int] = []

        def watched(reads: Sequence[Read]) -> None:
            most.append(made.plans.buffers.limit - made.plans.buffers.available)
            reads[0].end()

        made.store.storage.pick = watched
        found = attend(made, asked_of(made, members))
        check_bits(found, members)
        assert 2 <= max(most) <= WINDOW
        assert {one.peak_buffer_bytes for one in found if isinstance(one, Streamed)} == {
            WINDOW * made.plans.buffers.block_bytes
        }
        assert len(made.store.storage.reads) == 11
        all_back(made)


def test_the_first_frame_that_attends_a_block_has_read_it_and_the_others_say_that_it_was_shared() -> None:
    members = [Member(5), Member(5, rows=3), Member(5, common=3, own=1)]
    with opened() as made:
        found = attend(made, asked_of(made, members))
        check_bits(found, members)
        shared = [one.shared for one in found if isinstance(one, Streamed)]
        assert shared == [{}, {"flash": 3 * BLOCK}, {"flash": 2 * BLOCK}]


def test_rows_are_held_as_long_as_their_frame_reads_and_no_longer() -> None:
    """The second frame is over when the common blocks have come."""
    members = [Member(5), Member(2)]
    with opened([NVME, CPU, NVME, NVME, GPU]) as made:
        readers, seen = made.store.directory.readers, []

        def watched(reads: Sequence[Read]) -> None:
            seen.append(readers[:5].tolist())
            reads[0].end()

        made.store.storage.pick = watched
        check_bits(attend(made, asked_of(made, members)), members)
        assert seen == [[2, 0, 1, 1, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 0]]
        all_back(made)


REASONS = [Reason.CHECKSUM_MISMATCH, Reason.STORAGE_UNAVAILABLE, Reason.SHORT_COPY, Reason.KEY_UNAVAILABLE]


@pytest.mark.parametrize("reason", REASONS, ids=str)
@pytest.mark.parametrize("lost", ["everybody's", "one's"])
def test_a_block_that_is_lost_costs_those_frames_that_want_it_and_no_other(lost: str, reason: Reason) -> None:
    members = [Member(5), Member(5, common=3, own=1), Member(5, rows=7)]
    line = 0 if lost == "everybody's" else 5 + 3
    with opened() as made:

        def losing(reads: Sequence[Read]) -> None:
            read = reads[0]
            read.end(CoreError(reason, "a fault of this double") if read.item.ref.slot == line else None)

        made.store.storage.pick = losing
        asked = asked_of(made, members)
        found = attend(made, asked)
        for number, (member, one) in enumerate(zip(members, found, strict=True)):
            if line not in copies(member, 5):
                assert isinstance(one, Streamed)
                assert torch.equal(one.out, alone(member, number))
            elif reason is Reason.KEY_UNAVAILABLE:
                assert isinstance(one, CoreError) and one.reason is reason
                assert one.facts["attempted"] == f"supportPartition:{reason.value}"
            else:
                assert isinstance(one, Tried) and one.error.reason is reason
        assert len(made.store.storage.reads) == 4
        all_back(made)
        made.store.storage.pick = lambda reads: reads[0].end()
        check_bits(attend(made, asked), members)


def test_a_promised_block_that_was_lost_is_read_again_once_for_all() -> None:
    members = [Member(5), Member(5, rows=2), Member(5, rows=7)]
    with opened() as made:
        asked = asked_of(made, members)
        for one in asked:
            made.plans.promise(one.append.session, 0, 0)
        storage = made.store.storage
        assert len(storage.reads) == 3
        storage.reads[1].end(CoreError(Reason.TRANSFER_FAILED, "a fault of this double"))
        found = attend(made, asked)
        check_bits(found, members)
        assert len(storage.reads) == 4
        assert [one.promised_bytes for one in found if isinstance(one, Streamed)] == [2 * BLOCK] * 3
        all_back(made)


def test_a_frame_whose_deadline_comes_is_late_alone_and_what_it_alone_wants_is_not_read() -> None:
    members = [Member(5), Member(12, common=1, own=1, deadline=100.5), Member(5, rows=9, deadline=900.0)]
    with opened([NVME] * 4 + [GPU] + [NVME] * 6 + [GPU]) as made:

        def slow(reads: Sequence[Read]) -> None:
            made.clock.now += 0.3
            reads[0].end()

        made.store.storage.pick = slow
        asked = asked_of(made, members)
        found = attend(made, asked)
        assert isinstance(found[1], CoreError) and found[1].reason is Reason.DEADLINE
        assert found[1].facts["attempted"] == "supportPartition:DEADLINE"
        for number in (0, 2):
            one = found[number]
            assert isinstance(one, Streamed)
            assert torch.equal(one.out, alone(members[number], number))
        # A window of them had begun.
        assert len(made.store.storage.reads) < 4 + 9
        assert made.clock.now < 102.0
        all_back(made)


def test_a_slow_block_of_one_frame_keeps_no_other_waiting() -> None:
    """Its own end is its deadline's."""
    members = [Member(12, common=1, own=1, deadline=103.0), Member(12)]
    with opened([NVME] * 11 + [GPU]) as made:

        def stuck(reads: Sequence[Read]) -> None:
            going = [read for read in reads if read.item.ref.slot != 12 + 3]
            if going:
                going[0].end()
            else:
                made.clock.now += 1.0

        made.store.storage.pick = stuck
        found = attend(made, asked_of(made, members))
        assert isinstance(found[0], CoreError) and found[0].reason is Reason.DEADLINE
        assert isinstance(found[1], Streamed)
        assert torch.equal(found[1].out, alone(members[1], 1))
        assert made.plans.buffers.limit - made.plans.buffers.available == 1
        made.store.storage.pick = lambda reads: reads[0].end()
        all_back(made)


def test_storage_that_hangs_is_unavailable_for_those_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "READ_TIMEOUT_SECONDS", 2 * streaming.POLL_SECONDS)
    members = [Member(5), Member(5, rows=3)]
    with opened() as made:
        made.store.storage.pick = lambda reads: None
        for one in attend(made, asked_of(made, members)):
            assert isinstance(one, Tried) and one.error.reason is Reason.STORAGE_UNAVAILABLE
        assert not made.store.directory.readers.any()
        made.store.storage.pick = lambda reads: reads[0].end()
        all_back(made)


def test_what_cannot_be_begun_together_is_answered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [Member(5), Member(5, rows=3)]
    with opened() as made:
        storage, begin = made.store.storage, made.store.storage.submit_read
        refusals = [Reason.STORAGE_UNAVAILABLE]

        def refusing(*given: object) -> None:
            if refusals:
                raise CoreError(refusals.pop(), "a fault of this double")
            begin(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(storage, "submit_read", refusing)
        check_bits(attend(made, asked_of(made, members)), members)
        assert len(storage.reads) == 6
        all_back(made)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [("left out", Reason.SUPPORT_GAP), ("twice", Reason.SUPPORT_OVERLAP), ("another", None)],
)
def test_a_frame_that_lacks_rows_or_has_them_twice_is_refused_alone(
    wrong: str, reason: Reason | None
) -> None:
    """Of chunks in memory (their groups), and of blocks that come."""
    members = [Member(5), Member(5, rows=3), Member(5, rows=5)]
    with opened() as made:
        asked = asked_of(made, members)
        kept = asked[1].kept
        if wrong == "another":
            # What storage gave is of another chunk than the one asked for.
            other = dataclasses.replace(kept.blocks[1], identity=made.store.identity_of(3, 1))
            blocks = (kept.blocks[0], other, kept.blocks[2])
            kept = dataclasses.replace(
                kept, blocks=blocks, copies=tuple(sharedstreams.copy_of(one) for one in blocks)
            )
        else:
            groups = list(kept.groups)
            groups[1:2] = [] if wrong == "left out" else [groups[1], groups[1]]
            kept = dataclasses.replace(kept, groups=tuple(groups))
        asked[1] = dataclasses.replace(asked[1], kept=kept)
        found = attend(made, asked)
        assert isinstance(found[1], Tried)
        if reason is not None:
            assert found[1].error.reason is reason
        for number in (0, 2):
            one = found[number]
            assert isinstance(one, Streamed)
            assert torch.equal(one.out, alone(members[number], number))
        all_back(made)


def test_a_state_that_is_not_what_its_receipt_says_is_refused_to_its_frame_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = NearProducer.receipt

    def tampered(producer: NearProducer, *given: object) -> object:
        receipt = real(producer, *given)  # type: ignore[arg-type]
        return dataclasses.replace(receipt, checksum=7) if producer.request_id == "m1" else receipt

    monkeypatch.setattr(NearProducer, "receipt", tampered)
    members = [Member(5), Member(5, rows=3)]
    with opened() as made:
        found = attend(made, asked_of(made, members))
        assert isinstance(found[1], Tried) and found[1].error.reason is Reason.CHECKSUM_MISMATCH
        assert isinstance(found[0], Streamed)
        assert torch.equal(found[0].out, alone(members[0], 0))
        all_back(made)


def test_frames_that_wait_begin_in_turn_what_follows() -> None:
    with opened() as made:
        asked, begun = asked_of(made, [Member(5), Member(5, rows=3)]), list[int]()
        asked = [
            dataclasses.replace(one, follow=lambda number=number: begun.append(number))
            for number, one in enumerate(asked)
        ]
        outs(attend(made, asked))
        assert begun[:2] == [0, 1]


def test_frames_are_together_when_they_want_a_block_in_common_and_their_states_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened([NVME] * 4 + [GPU]) as made:
        own = [Member(5, common=0, own=1), Member(5, common=2, own=2), Member(5, common=0, own=2)]
        members = [Member(5), *own]
        asked = asked_of(made, members)
        assert alike(asked) == [[0, 2, 3], [1]]
        assert alike([]) == []
        monkeypatch.setattr(sharedstreams, "MOST_STATES", 2 * asked[0].kept.states.least)
        assert alike(asked) == [[0, 2], [3], [1]]
        check_bits(attend(made, asked), members)
        all_back(made)
