"""Indexes of sessions under arbitrary orders of rows, questions, builds, faults at every point of a build,
reads and ends, against a model that knows only what the rules say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.lifecycle.life import LayerLife, Published, Stage
from kvtier_core.selectors.lifecycle.memory import IndexMemory
from kvtier_core.selectors.lifecycle.told import SessionLives
from kvtier_core.selectors.lifecycle.works import ATTEMPTS, IndexWorks, Name, Point
from tests.unit.selectors.lifecycle_doubles import (
    BLOCK,
    Clock,
    Crash,
    Faults,
    RowFamily,
    RowList,
    Told,
    block_of,
    life_of,
)

LIMIT = 6_000
FAMILIES = {
    "incremental": RowFamily(incremental=True),
    "learning": RowFamily(incremental=False),
    "fixed": RowFamily(incremental=False, appendable=False),
}


@dataclass
class Model:
    """One layer, by the rules alone."""

    kind: str
    arrived: int = 0
    prompt: int = 0
    learnt: int = 0
    decoding: bool = False
    covered: int = 0
    epoch: int = 0
    failures: int = 0
    refused: bool = False
    closed: bool = False
    seen: set[int] = field(default_factory=set)

    @property
    def learns(self) -> bool:
        return self.kind != "incremental" and (not self.decoding or self.prompt > self.learnt)

    def target(self) -> int | None:
        """Rows that the next publication covers; None: nothing is due."""
        if self.refused or self.closed or not self.arrived:
            return None
        if self.learns:
            return self.prompt if self.prompt > self.learnt else None
        whole = self.arrived // BLOCK * BLOCK
        if whole <= self.covered or (self.kind == "fixed" and self.covered):
            return None
        return whole


@dataclass
class Held:
    life: LayerLife
    model: Model
    published: Published
    rows: list[float]


class Lifecycle(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.faults = Clock(), Faults()
        self.memory = IndexMemory(LIMIT)
        self.works = IndexWorks(self.clock, runner=Told(), memory=self.memory, at=self.faults)
        self.open: list[tuple[SessionLives, list[tuple[LayerLife, Model]]]] = []
        self.held: list[Held] = []

    @rule(target=sessions, kind=st.sampled_from(sorted(FAMILIES)), layers=st.integers(1, 2))
    def begin(self, kind: str, layers: int) -> int:
        family = FAMILIES[kind]
        lives = [life_of(family, layer) for layer in range(layers)]
        session = self.works.open(Name("cache", "rows", family.digest), list(lives))
        self.open.append((session, [(life, Model(kind)) for life in lives]))
        return len(self.open) - 1

    @rule(session=sessions, layer=st.integers(0, 1), count=st.integers(1, 9))
    def rows(self, session: int, layer: int, count: int) -> None:
        pairs = self.open[session][1]
        life, model = pairs[layer % len(pairs)]
        self.works.arrive(life, block_of(model.arrived, count))
        model.arrived += count
        self._refusals(session)

    @rule(session=sessions, layer=st.integers(0, 1))
    def step_ends(self, session: int, layer: int) -> None:
        pairs = self.open[session][1]
        life, model = pairs[layer % len(pairs)]
        self.works.end_rows(life)
        if not model.decoding and model.arrived + 1 >= 6:
            model.prompt = model.arrived

    @rule(session=sessions)
    def decode(self, session: int) -> None:
        pairs = self.open[session][1]
        self.works.decode([life for life, _ in pairs])
        for _, model in pairs:
            if not model.decoding:
                model.decoding, model.prompt = True, model.arrived

    @rule(
        fault=st.none() | st.sampled_from(list(Point)),
        error=st.sampled_from([RuntimeError, MemoryError, Crash]),
    )
    def build(self, fault: Point | None, error: type[BaseException]) -> None:
        """Runs a job; a fault at any point of it leaves what was, or what was just published."""
        due = [(life, model) for _, pairs in self.open for life, model in pairs if model.target() is not None]
        targets = {id(life): model.target() for life, model in due}
        if fault is not None:
            self.faults.arm(fault, lambda: error("a fault"))
        try:
            ran = self.works.run_next(unpaced=True)
        except Crash:
            ran = 0.0
        self.faults.at = None
        assert (ran is not None) == bool(due), "a job runs if and only if one is due"
        moved = [
            (life, model)
            for life, model in due
            if life.covered != model.covered or life.learnt != model.learnt or life.failures != model.failures
        ]
        assert len(moved) <= 1
        for life, model in moved:
            if life.failures > model.failures:
                model.failures = life.failures
                assert life.covered == model.covered, "a failure publishes nothing"
                continue
            assert life.covered == targets[id(life)]
            if model.learns:
                model.learnt = life.covered
            elif not model.covered:
                model.learnt = life.learnt
            model.covered, model.failures = life.covered, 0
        for number in range(len(self.open)):
            self._refusals(number)

    @rule(target=leases, session=sessions, layer=st.integers(0, 1))
    def read(self, session: int, layer: int) -> int:
        pairs = self.open[session][1]
        life, model = pairs[layer % len(pairs)]
        if model.closed or model.refused or not model.covered:
            with pytest.raises(CoreError) as refused:
                self.works.take_lease(life)
            wanted = Reason.DEPENDENCY_UNPUBLISHED
            if model.refused:
                assert life.refused is not None
                wanted = life.refused.reason
            assert refused.value.reason is wanted
            return -1
        published, keys = self.works.take_lease(life)
        assert published.covered == model.covered
        index = published.index
        assert isinstance(index, RowList)
        self.held.append(Held(life, model, published, index.rows.entries.tolist()))
        behind = [] if keys is None else keys[:, 0, 0].tolist()
        if model.kind != "fixed" and not model.learns:
            assert behind == list(range(model.covered, model.arrived))
        return len(self.held) - 1

    @rule(lease=consumes(leases))
    def read_ends(self, lease: int) -> None:
        if lease < 0:
            return
        held = self.held[lease]
        index = held.published.index
        assert isinstance(index, RowList)
        assert index.rows.entries.tolist() == held.rows, "what a query reads never changes"
        self.works.end_lease(held.life, held.published)

    @rule(target=sessions, session=sessions)
    def fork(self, session: int) -> int:
        """Of the same rows, with what was learnt of them; from here on each goes its own way."""
        parent, pairs = self.open[session]
        if any(model.closed for _, model in pairs):
            return session
        made = self.works.fork(parent, b"f" * 32)
        models = [replace(model, failures=0, seen=set(model.seen)) for _, model in pairs]
        return self._taken_over(made, models)

    @rule(target=sessions, session=sessions, rows=st.integers(0, 30))
    def truncate(self, session: int, rows: int) -> int:
        """Of fewer rows, and the former session ends; what was learnt of others cannot follow."""
        former, pairs = self.open[session]
        if any(model.closed for _, model in pairs):
            return session
        made = self.works.truncate(former, b"t" * 32, rows)
        undone = any(model.kind != "incremental" and rows < model.learnt for _, model in pairs)
        assert (made is None) == undone
        if made is None:
            return session
        models = []
        for _, one in pairs:
            cut = replace(one, failures=0, seen=set(one.seen), arrived=min(one.arrived, rows))
            cut.covered = min(one.covered, rows)
            if rows < one.prompt:
                cut.prompt, cut.decoding = rows, False
            if not rows:
                cut.learnt = cut.epoch = 0
                cut.seen = set()
            models.append(cut)
        self.end(session)
        return self._taken_over(made, models)

    def _taken_over(self, made: SessionLives, models: list[Model]) -> int:
        self.open.append((made, list(zip(made.lives, models, strict=True))))
        self._refusals(len(self.open) - 1)
        return len(self.open) - 1

    @rule(session=sessions)
    def end(self, session: int) -> None:
        self.works.close(self.open[session][0])
        for _, model in self.open[session][1]:
            model.closed = True

    def _refusals(self, session: int) -> None:
        """A refusal ends all layers of the session and no other's."""
        pairs = self.open[session][1]
        if any(life.refused is not None for life, _ in pairs):
            assert all(life.refused is not None for life, _ in pairs)
            for life, model in pairs:
                assert life.refused is not None
                assert life.refused.reason in (Reason.QUOTA_EXCEEDED, Reason.INTERNAL)
                model.refused = True

    @invariant()
    def indexes_are_whole_and_of_the_first_rows(self) -> None:
        for session, pairs in self.open:
            for life, model in pairs:
                if model.closed or model.refused:
                    assert life.published is None
                    assert not life.waiting
                    continue
                assert life.stage is (Stage.READY if model.covered else Stage.BUILDING)
                assert life.failures < ATTEMPTS
                if life.published is None:
                    continue
                index = life.published.index
                assert isinstance(index, RowList)
                assert index.rows.entries.tolist() == list(range(model.covered))
                assert index.facts.covered == model.covered
                assert life.published.epoch >= model.epoch
                if life.published.epoch != model.epoch:
                    assert life.published.epoch not in model.seen, "an epoch names one index"
                    model.seen.add(life.published.epoch)
                    model.epoch = life.published.epoch
                if model.kind != "incremental" and model.decoding and model.learnt == model.prompt > 0:
                    assert index.built_over == model.prompt, "built over the whole prompt"
            del session

    @invariant()
    def what_is_taken_is_what_is_held(self) -> None:
        held = 0
        for _, pairs in self.open:
            for life, _ in pairs:
                held += sum(life.held.values()) + life.waiting_bytes
                for one in life.retired:
                    assert life.leases.get(one.epoch), "only a query keeps a former index"
        assert self.memory.used == held <= LIMIT

    @precondition(lambda self: not self.held)
    @invariant()
    def nothing_is_left_of_sessions_that_ended(self) -> None:
        if all(model.closed or model.refused for _, pairs in self.open for _, model in pairs):
            assert self.memory.used == 0


Lifecycle.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLifecycle = Lifecycle.TestCase
