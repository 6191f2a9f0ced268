"""Every plan gives the same bits, wherever rows lie and in whatever order they arrive; no part counts twice
or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.attend import Attended, Attention
from kvtier_core.errors import CoreError, Reason
from kvtier_core.neardata import Ran, Reduction, near_groups, producer_of, query_digest, reduction_of
from kvtier_core.placements.preference import PlanKind
from kvtier_core.planner import ChunkRead, Path
from kvtier_core.stepplans import WINDOW
from tests.unit.core.rowsdouble import CPU, GPU, LAYOUT, NVME, SCALE, World, by_kept, reference, world
from tests.unit.core.tierdoubles import Read

PARTITION, MOVED = PlanKind.SUPPORT_PARTITION, PlanKind.ALL_ROWS_MOVED
HEADS, ON_CPU = PlanKind.HEAD_GROUPS, PlanKind.REQUEST_ON_CPU


@contextmanager
def opened(where: Sequence[int], **options: object) -> Iterator[World]:
    made = world(where, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def attend(made: World, kind: PlanKind | None = None) -> Attended:
    with torch.inference_mode():
        return made.plans.exact(made.append, made.query, made.visible, step=0, forced=kind).attended


def baseline(chunks: int, **options: object) -> torch.Tensor:
    with opened([GPU] * chunks, **options) as made:
        return attend(made).out


def legal(where: Sequence[int], kind: PlanKind) -> bool:
    if kind is ON_CPU:
        return set(where) <= {CPU}
    return kind is not HEADS or NVME not in where


SHAPES = st.fixed_dictionaries(
    {
        "last": st.integers(1, LAYOUT.chunk_tokens),
        "frame_rows": st.just(0),
        "queries": st.sampled_from([1, 5]),
    }
)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([GPU, CPU, NVME]), min_size=1, max_size=7),
    SHAPES,
    st.sampled_from(list(PlanKind)),
    st.randoms(use_true_random=False),
)
def test_any_partition_of_rows_and_any_order_of_arrival_give_the_same_bits(
    where: list[int], shape: dict[str, int], kind: PlanKind, random: object
) -> None:
    shape = {**shape, "queries": min(shape["queries"], shape["last"])}
    want = baseline(len(where), **shape)

    def any_of(reads: Sequence[Read]) -> None:
        read = random.choice(list(reads))  # type: ignore[attr-defined]
        read.end()
        if random.random() < 0.3:  # type: ignore[attr-defined]
            read.sink.done(0, None)
            read.sink.drained(0)

    with opened(where, **shape) as made:
        made.store.storage.pick = any_of
        if not legal(where, kind):
            with pytest.raises(CoreError) as refused:
                attend(made, kind)
            assert refused.value.reason is Reason.NO_LEGAL_PATH
            return
        got = attend(made, kind)
        assert torch.equal(got.out, want)
        assert made.plans.buffers.available == made.plans.buffers.limit
        assert got.peak_buffer_bytes <= max(
            WINDOW * made.plans.buffers.block_bytes, 2 * len(where) * LAYOUT.payload_bytes
        )
    torch.testing.assert_close(got.out.double(), reference(made.visible, shape["queries"]), rtol=0, atol=3e-6)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([GPU, CPU, NVME]), min_size=1, max_size=9),
    st.sampled_from([GPU, CPU]),
    st.integers(1, LAYOUT.chunk_tokens),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_what_is_kept_of_a_plan_gives_the_same_bits_whatever_comes_when(
    full: list[int], last: int, rows: int, promised: bool, random: object
) -> None:
    where = [*full, last]
    want = baseline(len(where), last=rows)

    def any_of(reads: Sequence[Read]) -> None:
        read = random.choice(list(reads))  # type: ignore[attr-defined]
        read.end()
        if random.random() < 0.3:  # type: ignore[attr-defined]
            read.sink.done(0, None)
            read.sink.drained(0)

    with opened(where, last=rows) as made:
        made.store.storage.pick = any_of
        with torch.inference_mode():
            if promised:
                made.plans.promise(made.append.session, 0, 0)
                for read in made.store.storage.reads[:2]:
                    read.end()
            got = by_kept(made)
        assert got.failed == ()
        assert torch.equal(got.attended.out, want)
        assert made.plans.buffers.available == made.plans.buffers.limit


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("frame_rows", [0, 30, 70])
@pytest.mark.parametrize("kind", [PARTITION, MOVED, HEADS])
def test_rows_that_came_with_the_request_are_attended_like_all_others(
    kind: PlanKind, frame_rows: int, queries: int
) -> None:
    """70 rows of the frame fill a chunk and begin another."""
    shape = {"frame_rows": frame_rows, "queries": queries}
    with opened([GPU, CPU], **shape) as made:
        got = attend(made, kind)
    assert torch.equal(got.out, baseline(2, **shape))
    torch.testing.assert_close(got.out.double(), reference(made.visible, queries), rtol=0, atol=3e-6)


@pytest.mark.parametrize("ahead", [False, True], ids=["inline", "ahead"])
@pytest.mark.parametrize("kind", [MOVED, HEADS])
def test_copies_on_another_thread_change_no_bit(kind: PlanKind, ahead: bool) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        opened([CPU, GPU, CPU, CPU], executor=pool if ahead else None) as made,
    ):
        got = attend(made, kind)
    assert torch.equal(got.out, baseline(4))
    assert got.bytes_by_tier == {"hbm": LAYOUT.payload_bytes, "ram": 3 * LAYOUT.payload_bytes}


def test_heads_come_in_slices_of_the_size_that_the_policy_says() -> None:
    with opened([CPU, CPU]) as made:
        plan = made.plans.planner.plan(made.append, made.visible, queries=1, forced=HEADS)
        assert plan.group_heads == 2
        with torch.inference_mode():
            whole = made.plans.attention.exact(plan, made.append, made.query)
            single = made.plans.attention.exact(
                dataclasses.replace(
                    plan,
                    group_heads=1,
                    reads=tuple(dataclasses.replace(read, path=Path.SLICED) for read in plan.reads),
                ),
                made.append,
                made.query,
            )
    assert torch.equal(whole.out, single.out)
    # Two buffers, each the history of one of two heads.
    assert single.peak_buffer_bytes == 2 * LAYOUT.payload_bytes


def test_storage_is_streamed_through_a_window_and_never_held_whole() -> None:
    with opened([NVME] * 12) as made:
        most = 0

        def watched(reads: Sequence[Read]) -> None:
            nonlocal most
            most = max(most, made.plans.buffers.limit - made.plans.buffers.available)
            reads[0].end()

        made.store.storage.pick = watched
        got = attend(made, PARTITION)
        assert 2 <= most <= WINDOW
        assert got.peak_buffer_bytes == WINDOW * made.plans.buffers.block_bytes
        assert made.plans.buffers.bytes <= (WINDOW + 1) * made.plans.buffers.block_bytes
    assert got.receipts == 2
    assert torch.equal(got.out, baseline(12))


def test_several_blocks_are_on_their_way_while_one_is_attended() -> None:
    """Reading, verifying and attending overlap: when a block is handed over, the next ones have begun."""
    with opened([NVME] * 12) as made:
        begun: list[int] = []

        def counting(reads: Sequence[Read]) -> None:
            begun.append(len(made.store.storage.reads))
            reads[0].end()

        made.store.storage.pick = counting
        attend(made, PARTITION)
        assert begun == [8] * 4 + [12] * 8


# No part twice, none left out.


@pytest.mark.parametrize("kind", [PARTITION, MOVED])
@pytest.mark.parametrize("chunk", range(4))
def test_a_plan_without_a_chunk_is_refused_and_one_with_a_chunk_twice_too(kind: PlanKind, chunk: int) -> None:
    with opened([NVME, CPU, NVME, GPU]) as made, torch.inference_mode():
        plan = made.plans.planner.plan(made.append, made.visible, queries=1, forced=kind)
        reads = plan.reads
        short = dataclasses.replace(plan, reads=reads[:chunk] + reads[chunk + 1 :])
        twice = dataclasses.replace(plan, reads=reads[: chunk + 1] + reads[chunk:])
        for broken, reason in ((short, Reason.SUPPORT_GAP), (twice, Reason.SUPPORT_OVERLAP)):
            if broken is short and chunk == 3:
                continue
            with pytest.raises(CoreError) as refused:
                made.plans.attention.exact(broken, made.append, made.query)
            assert refused.value.reason is reason
            if kind is PARTITION:
                with pytest.raises(CoreError) as refused:
                    made.plans.streamed.keep(broken, made.append.session, SCALE)
                assert refused.value.reason is reason


@pytest.mark.parametrize("kind", [PARTITION, MOVED])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_frame_whose_bytes_are_counted_short_is_refused(
    kind: PlanKind, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N.3-10, of an engine that counts K and forgets V."""
    account = Attention._account

    def half(self: Attention, read: ChunkRead, counted: dict[str, int], *more: object) -> int:
        return account(self, read, counted, *more) // 2  # type: ignore[arg-type]

    with opened([NVME, CPU, NVME, NVME], queries=queries) as made:
        attend(made, kind)
        monkeypatch.setattr(Attention, "_account", half)
        with pytest.raises(CoreError) as refused:
            attend(made, kind)
        assert refused.value.reason is Reason.TRAFFIC_MISMATCH


class Reducing:
    """The reduction of a frame of three queries, two chunks of which lie in storage, as `attend` makes it."""

    def __init__(self, made: World) -> None:
        plan = made.plans.planner.plan(made.append, made.visible, queries=3, forced=PARTITION)
        self._made = made
        self.groups = near_groups(plan.reads, 3)
        self.near = [group[0] for group in self.groups if group[0].path is Path.NEAR]
        self._rest = [group[0] for group in self.groups if group[0].path is not Path.NEAR]
        self._producer = producer_of(made.append.session, LAYOUT, made.store.cache_generation)
        self._ran = Ran(query_digest(made.query.q), made.query.first_position, SCALE)

    def begun(self) -> Reduction:
        made = self._made
        reduction = reduction_of(self.groups, made.append, made.query, LAYOUT, made.store.tiers, made.visible)
        for read in self._rest:
            reduction.own(read)
        return reduction

    def take(self, reduction: Reduction, read: ChunkRead, **of_block: int) -> None:
        shape = (1, 3, 4)
        m, l = np.zeros(shape, np.float32), np.ones(shape, np.float32)
        states = m, l, np.zeros((*shape, 16), np.float32)
        block = dataclasses.replace(self._made.store.identity_of(read.line, 1), **of_block)
        receipt = self._producer.receipt("flash", [block], [read.rows], self._ran, states, self._made.clock())
        reduction.take(receipt, [block])


@pytest.mark.parametrize("missing", range(3))
def test_a_state_that_does_not_come_or_comes_twice_gives_no_answer(missing: int) -> None:
    with opened([NVME, NVME, CPU, NVME], queries=3) as made, torch.inference_mode():
        reducing = Reducing(made)
        near = reducing.near
        assert len(near) == 3
        short, whole = reducing.begun(), reducing.begun()
        for at, read in enumerate(near):
            reducing.take(whole, read)
            if at != missing:
                reducing.take(short, read)
        with pytest.raises(CoreError) as gap:
            short.close()
        assert gap.value.reason is Reason.SUPPORT_GAP
        with pytest.raises(CoreError) as twice:
            reducing.take(whole, near[missing])
        assert twice.value.reason is Reason.DUPLICATE_RECEIPT
        with pytest.raises(CoreError) as overlap:
            whole.own(near[missing])
        assert overlap.value.reason is Reason.SUPPORT_OVERLAP
        whole.close()
        for late in (short, whole):
            with pytest.raises(CoreError) as refused:
                reducing.take(late, near[missing])
            assert refused.value.reason is Reason.LATE_RECEIPT


@pytest.mark.parametrize("wrong", ["none", "N.5-1 K or V only", "N.5-2 no new row", "another query"])
def test_what_was_read_sent_and_returned_is_what_such_attention_moves(wrong: str) -> None:
    with opened([NVME, CPU, NVME], queries=3, frame_rows=3) as made, torch.inference_mode():
        reducing = Reducing(made)
        reduction = reducing.begun()
        for read in reducing.near:
            length = LAYOUT.payload_bytes // (2 if wrong.startswith("N.5-1") else 1)
            reducing.take(reduction, read, length=length)
        query, rows = reduction.sent
        if wrong.startswith("N.5-2"):
            reduction.sent = query, 0
        if wrong == "another query":
            reduction.sent = query // 3, rows
        if wrong == "none":
            assert rows > 0
            reduction.close()
            return
        with pytest.raises(CoreError) as refused:
            reduction.close()
        assert refused.value.reason is Reason.TRAFFIC_MISMATCH
