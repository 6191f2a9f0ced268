"""What must not reach an exact answer, what a kept plan or a state's identity must not leave out, and what
must not happen under the metadata lock."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvtier_core import attend, headgroups
from kvtier_core.edits.requests import Truncate
from kvtier_core.errors import CoreError, Reason
from kvtier_core.folding import Fold
from kvtier_core.neardata import reduction_of
from kvtier_core.placements.preference import RECENCY, PlanKind
from kvtier_core.streaming import READ_TIMEOUT_SECONDS
from kvtier_core.tiers.base import BlockIdentity, PoolTier, SlotRef
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.state import AttentionState, FrameMismatch, LogitFrame
from tests.unit.core.builders import CHUNK, LAYERS, Driver, Rows, cpu, engine
from tests.unit.core.editing import edit, fork
from tests.unit.core.rowsdouble import CPU, GPU, NVME, world


def estimated_state(*args: object, **options: object) -> AttentionState:
    return dataclasses.replace(chunk_state(*args, **options), estimated=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        pytest.param([GPU, CPU, NVME], PlanKind.SUPPORT_PARTITION, id="partition"),
        pytest.param([GPU, CPU, NVME], PlanKind.ALL_ROWS_MOVED, id="moved"),
        pytest.param([GPU, CPU], PlanKind.HEAD_GROUPS, id="heads"),
        pytest.param([CPU, CPU], PlanKind.REQUEST_ON_CPU, id="on-cpu"),
    ],
)
@pytest.mark.parametrize("queries", [1, 3])
def test_no_estimated_state_is_in_an_exact_answer(
    where: list[int], kind: PlanKind, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk is not full, so its state is one of its own in every plan."""
    monkeypatch.setattr(attend, "chunk_state", estimated_state)
    monkeypatch.setattr(headgroups, "chunk_state", estimated_state)
    for last in (64, 7) if queries > 1 else (7,):
        built = world(where, last=last, queries=queries)
        try:
            with pytest.raises(CoreError) as refused:
                built.plans.exact(built.append, built.query, built.visible, step=0, forced=kind)
        finally:
            built.close()
        assert refused.value.reason is Reason.UNDECLARED_APPROXIMATION


@pytest.mark.parametrize("at", range(4))
def test_a_fold_with_an_estimated_state_is_estimated(at: int) -> None:
    built = world([CPU] * 4)
    k, v = torch.randn(2, 64, 2, 16), torch.randn(2, 64, 2, 16)
    query = built.query
    states = [
        chunk_state(query.q, k[0], v[0], scale=0.25, q_pos0=255, row_pos0=0, frame=query.frame)
        for _ in range(4)
    ]
    for together in (True, False):
        for mark in (False, True):
            marked = [dataclasses.replace(one, estimated=mark and i == at) for i, one in enumerate(states)]
            fold = Fold(query)
            if together:
                fold.add(marked[0])
                fold.add_all(marked[1:])
            else:
                for one in marked:
                    fold.add(one)
            fold.add_full(torch.zeros(2, 2, 64, 16))
            assert fold.result().estimated is mark
    built.close()


def test_states_of_another_frame_do_not_join_a_fold() -> None:
    built = world([CPU])
    k = torch.randn(64, 2, 16)
    query = built.query
    state = chunk_state(query.q, k, k, scale=0.25, q_pos0=63, row_pos0=0, frame=query.frame)
    fold = Fold(query)
    with pytest.raises(FrameMismatch):
        fold.add_all([state, dataclasses.replace(state, frame=LogitFrame(0.5))])
    built.close()


def test_a_preference_reaches_layers_whose_plan_was_kept(tmp_path: Path) -> None:
    rows = Rows.random(CHUNK + 9)
    with engine(tmp_path, [cpu(16)]) as built:
        driver = Driver.open(built, rows)
        driver.forward(CHUNK + 3)
        driver.forward(1)
        before = driver.answers[-1].receipt.plan_kind
        other = next(
            kind for kind in (PlanKind.REQUEST_ON_CPU, PlanKind.SUPPORT_PARTITION) if kind.value != before
        )
        built.prefer(dataclasses.replace(RECENCY, allowed=frozenset({other})))
        driver.forward(1)
        assert driver.answers[-1].receipt.plan_kind == other.value


def test_states_name_the_position_epoch_of_their_session() -> None:
    built = world([NVME, NVME])
    built.append.session.position_epoch = 5
    plan = built.plans.planner.plan(built.append, built.visible, queries=1)
    reduction = reduction_of(
        [list(plan.reads)], built.append, built.query, built.store.layout, built.store.tiers, 128
    )
    assert reduction.terms.position_epoch == 5
    built.close()


def test_rows_move_beside_the_metadata_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows.random(4 * CHUNK)
    with engine(tmp_path, [cpu(64)]) as built:
        lock = built._store.lock
        moved: list[tuple[str, bool]] = []

        def watched(name: str) -> Callable[..., object]:
            real = getattr(PoolTier, name)

            def move(*args: object) -> object:
                moved.append((name, lock._is_owned()))  # type: ignore[attr-defined]
                return real(*args)

            return move

        for name in ("append", "adopt"):
            monkeypatch.setattr(PoolTier, name, watched(name))
        parent = Driver.open(built, rows)
        parent.forward(2 * CHUNK + 10)
        child = fork(parent)
        edit(parent, Truncate(CHUNK + 5))
        for driver in (parent, child):
            driver.forward(CHUNK)
    assert {name for name, _ in moved} == {"append", "adopt"}
    assert not any(held for _, held in moved)


def test_a_step_below_0_repeats_nothing_after_an_edit(tmp_path: Path) -> None:
    """Between an edit and the next step no step runs, and none is repeated."""
    with engine(tmp_path, [cpu(16)]) as built:
        driver = Driver.open(built, Rows.random(CHUNK))
        driver.forward(9)
        edit(driver, Truncate(6))
        driver.step = -1
        with pytest.raises(CoreError) as refused:
            built.step(driver.request(0, 4, 6, committed_frontier=6))
        assert refused.value.reason is Reason.STEP_ORDER


def test_an_edit_lets_go_of_what_was_kept_of_the_former_rows(tmp_path: Path) -> None:
    """A kept view keeps its memory, also when the tier has given it to somebody else."""
    with engine(tmp_path, [cpu(16)]) as built:
        driver = Driver.open(built, Rows.random(2 * CHUNK))
        driver.forward(CHUNK + 3)
        driver.forward(1)
        [kept] = {one is not None for one in built._contexts[driver.handle.session_id].resident}
        assert kept
        edit(driver, Truncate(5))
        assert built._contexts[driver.handle.session_id].resident == [None] * LAYERS


def test_a_repeats_rows_are_read_by_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float | None] = []
    real = CpuTier.read

    def read(
        tier: CpuTier, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer, deadline: float | None
    ) -> None:
        deadlines.append(deadline)
        real(tier, ref, identity, buffer, deadline)

    with engine(tmp_path, [cpu(16)]) as built:
        driver = Driver.open(built, Rows.random(2 * CHUNK))
        asked = driver.request(0, 0, CHUNK, deadline=1e12)
        built.step(asked)
        monkeypatch.setattr(CpuTier, "read", read)
        assert built.step(asked).repeated
    assert deadlines == [1e12]


def test_a_copy_of_heads_that_hangs_is_no_missed_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame without a deadline misses none; what another plan reads anew may be answered."""
    monkeypatch.setattr(headgroups, "READ_TIMEOUT_SECONDS", 0.01)
    release = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(release.wait, 20)
        built = world([GPU, CPU], executor=executor)
        try:
            with pytest.raises(CoreError) as hung:
                built.plans.exact(
                    built.append, built.query, built.visible, step=0, forced=PlanKind.HEAD_GROUPS
                )
            assert hung.value.reason is Reason.TRANSFER_TIMEOUT
        finally:
            release.set()
            built.close()


def test_a_block_is_read_for_others_within_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's lock is held meanwhile, so storage that hangs would end every session's steps."""
    deadlines: list[float | None] = []
    real = CpuTier.read

    def read(
        tier: CpuTier, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer, deadline: float | None
    ) -> None:
        deadlines.append(deadline)
        real(tier, ref, identity, buffer, deadline)

    with engine(tmp_path, [cpu(16)]) as built:
        driver = Driver.open(built, Rows.random(2 * CHUNK))
        driver.forward(CHUNK)
        driver.forward(1)
        [info] = built.list_chunks(driver.handle.session_id, driver.handle.generation, limit=1)
        monkeypatch.setattr(CpuTier, "read", read)
        built.read_chunk(driver.handle.session_id, driver.handle.generation, 0, 0, info.generation)
        monkeypatch.undo()
        assert deadlines == [built._clock() + READ_TIMEOUT_SECONDS]
