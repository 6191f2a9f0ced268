"""What another thread does between two steps of a move: no engine goes that is still needed, none goes twice,
and a session starts from blocks of the engine in which it is then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_agent.seats import Slot
from kvtier_core.carrying import Carriage
from kvtier_core.errors import CoreError, Reason
from tests.unit.agent.paired_rig import EXACT, PairedRig, Played, SmallEngine, paired_rig, ran
from tests.unit.core.builders import CHUNK


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[PairedRig]:
    with paired_rig(tmp_path) as made:
        yield made


class Taken:
    """Tries to take the second engine away, in the middle of something. found: what it got."""

    def __init__(self, rig: PairedRig) -> None:
        self.rig = rig
        self.found: list[Slot | None] = []

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            self.found.append(self.rig.paired.detach())
            return function(*args, **named)

        return called


def returns(session: Played) -> None:
    session.forward(permitted=False)


def stops_to_be_compared(session: Played) -> None:
    session.forward(permitted=False)


def settles(session: Played) -> None:
    session.rig.paired.settle()


@pytest.mark.parametrize(
    ("terms", "lets_go"),
    [
        pytest.param({"serves": True}, returns, id="carried-by-its-frame"),
        pytest.param({"serves": True}, settles, id="carried-by-who-empties-it"),
        pytest.param({"compared": True}, stops_to_be_compared, id="no-more-compared"),
        pytest.param({"serves": True}, Played.close, id="closed"),
        pytest.param({"compared": True}, Played.close, id="closed-while-compared"),
    ],
)
def test_an_engine_stays_until_it_has_let_the_last_session_go(
    rig: PairedRig, terms: dict[str, bool], lets_go: Callable[[Played], None]
) -> None:
    """Else it ends under that: the frame, or the close, would be answered that there is no such session."""
    session, taken = rig.open(**terms), Taken(rig)
    session.forward(CHUNK + 7)
    rig.beside.close_session = taken.before(rig.beside.close_session)  # type: ignore[method-assign]
    lets_go(session)
    assert taken.found == [None]
    assert rig.paired.detach() is not None


def test_the_former_baselines_engine_stays_until_its_compared_session_is_the_others(rig: PairedRig) -> None:
    session, taken = rig.open(compared=True), Taken(rig)
    session.forward(CHUNK + 7)
    rig.paired.swap()
    rig.running.close_session = taken.before(rig.running.close_session)  # type: ignore[method-assign]
    assert ran(session.forward(permitted=False)) == {(rig.digests[1], False, "")}
    assert taken.found == [None]
    assert rig.paired.detach() is not None


def test_an_engine_that_is_replaced_while_it_takes_a_session_in_keeps_it(
    rig: PairedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, taken = rig.open(serves=True), Taken(rig)
    session.forward(CHUNK + 7)
    receive = Carriage.receive

    def adopted(carriage: Carriage, *args: Any) -> Any:
        monkeypatch.undo()
        rig.paired.swap()
        return taken.before(receive)(carriage, *args)

    monkeypatch.setattr(Carriage, "receive", adopted)
    session.forward(permitted=False)
    assert taken.found == [None]
    # With its next frame it is in the engine that was adopted.
    assert ran(session.forward(permitted=False)) == {(rig.digests[1], False, "")}
    assert rig.paired.detach() is not None


def test_an_engine_that_is_closed_with_the_baselines_is_not_taken_away_too(
    rig: PairedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[SmallEngine] = []
    for one in (rig.running, rig.beside):
        monkeypatch.setattr(one, "close", lambda one=one: closed.append(one))
    seated_in = rig.paired.seated_in

    def while_it_is_looked_at(slot: Slot) -> int:
        rig.paired.close()
        return seated_in(slot)

    monkeypatch.setattr(rig.paired, "seated_in", while_it_is_looked_at)
    assert rig.paired.detach() is None
    assert closed == [rig.beside, rig.running]


def test_nothing_is_put_beside_an_engine_that_was_closed(rig: PairedRig) -> None:
    slot = rig.paired.detach()
    assert slot is not None
    rig.paired.close()
    with pytest.raises(CoreError) as refused:
        rig.paired.attach(slot.engine, slot.digest, slot.place)
    assert refused.value.reason is Reason.CACHE_UNKNOWN
    assert rig.paired.beside is None


@pytest.mark.parametrize("compared", [False, True], ids=["served", "compared"])
def test_no_session_is_opened_in_an_engine_whose_end_has_begun(rig: PairedRig, compared: bool) -> None:
    """Its permission may be older than that."""
    assert rig.paired.beside is not None
    rig.paired.beside.ending = True
    session = rig.open(serves=True, compared=compared)
    assert {answer.receipt.fallback for answer in session.forward()} == {"NO_CANDIDATE"}
    assert rig.paired.detach() is not None


class TestBlocks:
    """Which engine's blocks a session is given, and where it is then."""

    @staticmethod
    def blocks(engine: SmallEngine) -> Any:
        """None that is there, of that engine."""
        mine = engine.core.blocks.store.directory
        return SimpleNamespace(ready=0, of=lambda directory: directory is mine)

    @staticmethod
    def start(session: Played, blocks: Any) -> int:
        handle = session.handle
        return session.rig.paired.prefixes.start(handle.session_id, handle.generation, blocks)

    @pytest.mark.parametrize(
        ("serves", "blocks", "there"),
        [
            pytest.param(False, "running", "running", id="those-that-it-asked-for-before-the-swap"),
            pytest.param(False, "beside", "beside", id="those-of-the-engine-that-was-adopted"),
            pytest.param(True, "beside", "beside", id="its-own-as-before"),
        ],
    )
    def test_after_an_adoption_a_session_starts_from_blocks_of_either_engine(
        self, rig: PairedRig, serves: bool, blocks: str, there: str
    ) -> None:
        session = rig.open(serves=serves)
        rig.paired.swap()
        assert self.start(session, self.blocks(getattr(rig, blocks))) == 0
        seat = rig.paired._seats[session.handle.session_id]
        assert seat.home.engine is getattr(rig, there)
        session.served = False
        assert ran(session.forward()) == {(rig.digests[1], False, "")}

    def test_one_that_moved_while_they_were_read_is_told_so(self, rig: PairedRig) -> None:
        session = rig.open()
        rig.paired.swap()
        assert rig.paired.settle() == 0
        with pytest.raises(CoreError) as refused:
            self.start(session, self.blocks(rig.running))
        assert refused.value.reason is Reason.NOT_VISIBLE
        assert self.start(session, self.blocks(rig.beside)) == 0

    def test_one_that_was_compared_is_given_those_of_the_adopted_engine(self, rig: PairedRig) -> None:
        """Or rows would be in one of its engines and not in the other."""
        session = rig.open(compared=True)
        rig.paired.swap()
        with pytest.raises(CoreError) as refused:
            self.start(session, self.blocks(rig.running))
        assert refused.value.reason is Reason.NOT_VISIBLE
        assert self.start(session, self.blocks(rig.beside)) == 0
        session.compared = False
        assert ran(session.forward()) == {(rig.digests[1], False, "")}

    def test_one_in_an_engine_whose_end_has_begun_comes_home_for_the_baselines(self, rig: PairedRig) -> None:
        session = rig.open(serves=True)
        assert rig.paired.beside is not None
        rig.paired.beside.ending = True
        assert not rig.paired.beside_alone(session.handle.session_id)
        assert self.start(session, self.blocks(rig.running)) == 0
        assert rig.paired.seated_in(rig.paired.beside) == 0
        session.served = False
        frame = replace(session.frame(0, 0, 3))
        assert rig.paired.step(frame, EXACT).receipt.manifest_digest == rig.digests[0]
