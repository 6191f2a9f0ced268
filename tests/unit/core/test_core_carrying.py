"""Sessions carried between two engines of a cache: the same bits as if they had stayed, all or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.carrying import CarriedRows
from kvtier_core.edits.requests import Drop, EditRequest
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ExactnessClass, SessionSpec
from kvtier_core.tiers.base import MediumKind, TierMount
from tests.unit.core.builders import (
    CHUNK,
    LAYERS,
    SCALE,
    Driver,
    FakeClock,
    Rows,
    TierBudget,
    Unsynced,
    cpu,
    engine,
    gpu,
    manifest,
    nvme,
    quest,
)

TOKENS = 3 * CHUNK + 17
ROOMY = (gpu(64), cpu(64))
# Most chunks of a sequence lie on storage.
TIGHT = (gpu(LAYERS), cpu(2), nvme(64))


@dataclass
class Two:
    """Two engines of one cache, of other tiers."""

    left: CacheEngine
    right: CacheEngine

    def carry(self, driver: Driver, target: CacheEngine) -> Driver:
        """The driver goes on in the other engine."""
        source, handle = driver.engine, driver.handle
        state = source.carriage.state(handle.session_id, handle.generation)
        rows = source.carriage.rows(handle.session_id, handle.generation)
        moved = target.carriage.receive(state, rows)
        assert driver.close() == driver.position
        return replace(driver, engine=target, handle=moved)


def two(stack: ExitStack, folder: Path, left: Sequence[TierBudget], right: Sequence[TierBudget]) -> Two:
    made = []
    for name, tiers in (("left", left), ("right", right)):
        (folder / name).mkdir()
        made.append(stack.enter_context(engine(folder / name, tiers, files=Unsynced())))
    # Numbers of sessions differ, as they do between engines that live for different times.
    Driver.open(made[1], Rows.random(1)).close()
    return Two(*made)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        yield two(stack, tmp_path, ROOMY, TIGHT)


def used(built: CacheEngine) -> list[int]:
    return [tier.used_bytes for tier in built.stats().tiers]


@settings(max_examples=5, deadline=None)
@given(
    prefill=st.integers(1, 2 * CHUNK + 5),
    block=st.integers(1, 2 * CHUNK),
    moves=st.lists(st.integers(0, 12), min_size=1, max_size=3),
)
def test_answers_keep_their_bits_wherever_a_session_moves(
    tmp_path_factory: pytest.TempPathFactory, prefill: int, block: int, moves: list[int]
) -> None:
    rows = Rows.random(TOKENS)
    with ExitStack() as stack:
        pair = two(stack, tmp_path_factory.mktemp("pair"), ROOMY, TIGHT)
        stays = Driver.open(pair.left, rows)
        moving = Driver.open(pair.left, rows)
        parts = [(stays.forward(prefill, block=block), moving.forward(prefill, block=block))]
        for steps in moves:
            target = pair.right if moving.engine is pair.left else pair.left
            moving = pair.carry(moving, target)
            for _ in range(min(steps, TOKENS - moving.position)):
                parts.append((stays.forward(1), moving.forward(1)))
        assert all(torch.equal(one, other) for one, other in parts)
        assert {answer.receipt.exactness for answer in moving.answers} == {ExactnessClass.EXACT}
        moving.close()
        stays.close()
        assert not any(used(pair.left)) and not any(used(pair.right))


def test_a_step_that_began_in_one_engine_ends_in_the_other(pair: Two) -> None:
    rows = Rows.random(TOKENS)
    stays, moving = Driver.open(pair.left, rows), Driver.open(pair.left, rows)
    for driver in (stays, moving):
        driver.forward(CHUNK + 3)
    first, last = stays.position, stays.position + 1
    expected = [stays.engine.step(stays.request(layer, first, last)).out for layer in range(LAYERS)]
    begun = moving.engine.step(moving.request(0, first, last))
    moved = _half_way(pair, moving)
    again = moved.engine.step(moved.request(0, first, last))
    ended = [moved.engine.step(moved.request(layer, first, last)).out for layer in range(1, LAYERS)]
    assert again.repeated and torch.equal(again.out, begun.out)
    assert all(torch.equal(*both) for both in zip(expected, [begun.out, *ended], strict=True))


def _half_way(pair: Two, driver: Driver) -> Driver:
    source, handle = driver.engine, driver.handle
    state = source.carriage.state(handle.session_id, handle.generation)
    assert state.frontiers == (driver.position + 1,) + (driver.position,) * (LAYERS - 1)
    moved = pair.right.carriage.receive(state, source.carriage.rows(handle.session_id, handle.generation))
    return replace(driver, engine=pair.right, handle=moved)


def test_without_room_nothing_has_moved(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS)
    with ExitStack() as stack:
        pair = two(stack, tmp_path, ROOMY, (gpu(2 * LAYERS),))
        # One that says how long it gets would not even be opened there.
        driver = Driver(pair.left, rows, pair.left.open_session(SessionSpec("team-a", SCALE, 0)))
        driver.forward(TOKENS - 1)
        before = used(pair.right)
        state = pair.left.carriage.state(driver.handle.session_id, driver.handle.generation)
        with pytest.raises(CoreError) as refused:
            pair.right.carriage.receive(
                state, pair.left.carriage.rows(driver.handle.session_id, driver.handle.generation)
            )
        assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
        assert used(pair.right) == before == [0]
        driver.forward(1)


def test_a_source_that_ends_early_is_no_session(pair: Two) -> None:
    driver = Driver.open(pair.left, Rows.random(TOKENS))
    driver.forward(2 * CHUNK)
    handle = driver.handle
    state = pair.left.carriage.state(handle.session_id, handle.generation)
    parts = list(pair.left.carriage.rows(handle.session_id, handle.generation))
    with pytest.raises(CoreError) as refused:
        pair.right.carriage.receive(state, iter(parts[:-1]))
    assert refused.value.reason is Reason.SHORT_COPY
    assert not any(used(pair.right))


def test_sessions_that_are_more_than_their_rows_stay(pair: Two) -> None:
    selecting = Driver.open(pair.left, Rows.random(TOKENS), selector=quest())
    edited = Driver.open(pair.left, Rows.random(TOKENS))
    edited.forward(CHUNK)
    pair.left.edit_session(EditRequest(edited.handle.session_id, edited.handle.generation, Drop(((3, 9),))))
    for driver in (selecting, edited):
        with pytest.raises(CoreError) as refused:
            pair.left.carriage.state(driver.handle.session_id, driver.handle.generation)
        assert refused.value.reason is Reason.UNSUPPORTED


def test_rows_of_another_chunk_size_are_carried_and_their_history_is_named(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS)
    with ExitStack() as stack:
        left = stack.enter_context(engine(tmp_path, ROOMY))
        other = manifest(ROOMY).model_copy(update={"chunk_tokens": CHUNK // 2})
        mounts = {one.name: TierMount(one.name, MediumKind(one.medium.value), folder=None) for one in ROOMY}
        right = CacheEngine(other, mounts, FakeClock(), probe=False)
        stack.callback(right.stop)
        pair = Two(left, right)
        driver = Driver.open(right, rows)
        driver.forward(2 * CHUNK + 5)
        moved = pair.carry(driver, left)
        fresh = Driver.open(left, rows)
        fresh.forward(2 * CHUNK + 5)
        assert torch.equal(moved.forward(1), fresh.forward(1)), "the rows are the same bytes here"
        receipt = moved.answers[-1].receipt
        assert receipt.exactness is ExactnessClass.EXACT_OVER_APPROXIMATE_HISTORY
        assert receipt.producer_digest == other.digest()


def test_parts_are_bounded(pair: Two) -> None:
    driver = Driver.open(pair.left, Rows.random(TOKENS))
    driver.forward(TOKENS)
    parts = list(pair.left.carriage.rows(driver.handle.session_id, driver.handle.generation))
    assert [part.layer for part in parts] == sorted(part.layer for part in parts)
    assert all(isinstance(part, CarriedRows) and part.k.shape == part.v.shape for part in parts)
    whole = torch.cat([part.k for part in parts if part.layer == 0])
    assert torch.equal(whole, driver.rows.k[0, :TOKENS])
