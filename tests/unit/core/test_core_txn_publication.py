"""Publication of units: together or not at all, in order, and by who owns the generation (B.2, B.5, G.6)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier_core.transactions.publication import (
    Evidence,
    Publications,
    Unit,
    UnitState,
    reclaim_reason,
)
from kvtier_core.transactions.reasons import MoveReason, MoveRefused

WHOLE = Evidence(b"i" * 32, 512, "kv-f32", 7, b"s" * 32, (0, 256))
PARTS = {"rows": WHOLE, "sidecar": dataclasses.replace(WHOLE, length=64, checksum=8)}


def refused(reason: MoveReason, call: Callable[[], object]) -> MoveRefused:
    with pytest.raises(MoveRefused) as error:
        call()
    assert error.value.code is reason
    return error.value


def written(publications: Publications, name: str = "prefix", *needs: Unit) -> Unit:
    unit = publications.reserve(name, PARTS, needs)
    for member, evidence in PARTS.items():
        publications.write(unit, unit.generation, member, evidence)
    return unit


def published(publications: Publications, name: str = "prefix", *needs: Unit) -> Unit:
    unit = written(publications, name, *needs)
    publications.validate(unit, unit.generation)
    publications.publish(unit, unit.generation)
    return unit


def test_nothing_is_visible_before_it_is_published() -> None:
    publications = Publications()
    unit = publications.reserve("prefix", PARTS)
    for member, evidence in PARTS.items():
        assert publications.visible("prefix") is None
        publications.write(unit, unit.generation, member, evidence)
    publications.validate(unit, unit.generation)
    assert publications.visible("prefix") is None
    publications.publish(unit, unit.generation)
    assert publications.visible("prefix") is unit


@pytest.mark.parametrize("missing", list(PARTS))
def test_sglang_31108_a_prefix_is_as_long_as_its_shortest_part(missing: str) -> None:
    """Rows without their sidecar, or the other way round, are not published."""
    publications = Publications()
    unit = publications.reserve("prefix", PARTS)
    for member, evidence in PARTS.items():
        if member != missing:
            publications.write(unit, unit.generation, member, evidence)
    error = refused(MoveReason.VALIDATION_FAILED, lambda: publications.validate(unit, unit.generation))
    assert (error.facts["field"], error.facts["member"]) == ("coverage", missing)
    refused(MoveReason.GENERATION_NOT_OWNED, lambda: publications.publish(unit, unit.generation))
    assert publications.visible("prefix") is None
    publications.write(unit, unit.generation, missing, PARTS[missing])
    publications.validate(unit, unit.generation)


FIELDS: list[tuple[str, object]] = [
    ("identity", b"j" * 32),
    ("length", 511),
    ("layout", "other"),
    ("checksum", 6),
    ("source", b"t" * 32),
    ("coverage", (0, 255)),
]


@pytest.mark.parametrize(("name", "value"), FIELDS, ids=[name for name, _ in FIELDS])
def test_validation_names_the_field(name: str, value: object) -> None:
    publications = Publications()
    unit = written(publications)
    bad = dataclasses.replace(PARTS["rows"], **{name: value})  # type: ignore[arg-type]
    publications.write(unit, unit.generation, "rows", bad)
    error = refused(MoveReason.VALIDATION_FAILED, lambda: publications.validate(unit, unit.generation))
    assert error.facts["field"] == name and unit.state is UnitState.WRITTEN_UNPUBLISHED


def test_fields_are_compared_in_order() -> None:
    publications = Publications()
    unit = written(publications)
    for count in range(len(FIELDS), 0, -1):
        wrong = dict(FIELDS[-count:])
        bad = dataclasses.replace(PARTS["rows"], **wrong)  # type: ignore[arg-type]
        publications.write(unit, unit.generation, "rows", bad)
        error = refused(MoveReason.VALIDATION_FAILED, lambda: publications.validate(unit, unit.generation))
        assert error.facts["field"] == FIELDS[-count][0]


def test_a_writer_of_another_generation_owns_nothing() -> None:
    publications = Publications()
    stale, unit = publications.reserve("prefix", PARTS), written(publications)
    for call in (
        lambda: publications.write(unit, stale.generation, "rows", WHOLE),
        lambda: publications.validate(unit, stale.generation),
        lambda: publications.publish(unit, unit.generation),
    ):
        refused(MoveReason.GENERATION_NOT_OWNED, call)
    assert (
        refused(
            MoveReason.VALIDATION_FAILED, lambda: publications.write(unit, unit.generation, "other", WHOLE)
        ).facts["field"]
        == "member"
    )


def test_what_it_needs_is_published_first() -> None:
    publications = Publications()
    rows = written(publications, "rows")
    index = written(publications, "index", rows)
    publications.validate(index, index.generation)
    publish = lambda: publications.publish(index, index.generation)  # noqa: E731
    assert refused(MoveReason.DEPENDENCY_UNPUBLISHED, publish).facts["needs"] == "rows"
    publications.validate(rows, rows.generation)
    publications.publish(rows, rows.generation)
    publications.tombstone(rows)
    refused(MoveReason.DEPENDENCY_UNPUBLISHED, publish)
    again = published(publications, "rows")
    other = written(publications, "index", again)
    publications.validate(other, other.generation)
    publications.publish(other, other.generation)


def test_the_newer_publication_wins_whatever_the_order() -> None:
    publications = Publications()
    old, new = written(publications), written(publications)
    for unit in (old, new):
        publications.validate(unit, unit.generation)
    publications.publish(new, new.generation)
    refused(MoveReason.GENERATION_NOT_OWNED, lambda: publications.publish(old, old.generation))
    assert publications.visible("prefix") is new
    latest = published(publications)
    assert (new.state, publications.visible("prefix")) == (UnitState.TOMBSTONED, latest)


@pytest.mark.parametrize(
    ("leases", "lookups", "tombstoned", "receipt"),
    list(itertools.product((0, 1), (0, 1), (False, True), (False, True))),
)
def test_garbage_collection_guards_in_order(
    leases: int, lookups: int, tombstoned: bool, receipt: bool
) -> None:
    publications = Publications()
    unit = published(publications)
    unit.leases, unit.lookups = leases, lookups
    if tombstoned:
        publications.tombstone(unit)
    expected = next(
        reason
        for wrong, reason in (
            (leases, MoveReason.LEASES_HELD),
            (lookups, MoveReason.LOOKUP_IN_FLIGHT),
            (not tombstoned, MoveReason.NO_TOMBSTONE),
            (not receipt, MoveReason.NO_DELETE_RECEIPT),
            (True, MoveReason.READY),
        )
        if wrong
    )
    assert reclaim_reason(leases, lookups, tombstoned, receipt) is expected
    if expected is MoveReason.READY:
        publications.reclaim(unit, receipt=receipt)
        publications.tombstone(unit)
        assert unit.state is UnitState.RECLAIMED
    else:
        refused(expected, lambda: publications.reclaim(unit, receipt=receipt))


class UnitMachine(RuleBasedStateMachine):
    """Any writers in any order: what is visible is whole, of one generation, and never older than before."""

    def __init__(self) -> None:
        super().__init__()
        self.publications = Publications()
        self.units: list[Unit] = []
        self.best = {"a": 0, "b": 0}

    @rule(name=st.sampled_from(["a", "b"]))
    def reserve(self, name: str) -> None:
        self.units.append(self.publications.reserve(name, PARTS))

    @rule(
        data=st.data(),
        step=st.sampled_from(["write", "spoil", "validate", "publish", "tombstone", "reclaim"]),
        member=st.sampled_from(sorted(PARTS)),
    )
    def act(self, data: st.DataObject, step: str, member: str) -> None:
        if not self.units:
            return
        unit = data.draw(st.sampled_from(self.units))
        generation = data.draw(st.sampled_from([unit.generation, self.units[0].generation]))
        before = unit.state
        try:
            if step in ("write", "spoil"):
                evidence = PARTS[member] if step == "write" else dataclasses.replace(WHOLE, checksum=0)
                self.publications.write(unit, generation, member, evidence)
            elif step == "validate":
                self.publications.validate(unit, generation)
            elif step == "publish":
                self.publications.publish(unit, generation)
                self.best[unit.name] = unit.generation
            elif step == "tombstone":
                self.publications.tombstone(unit)
            else:
                self.publications.reclaim(unit, receipt=True)
        except MoveRefused:
            assert unit.state is before

    @invariant()
    def whole(self) -> None:
        for name, best in self.best.items():
            unit = self.publications.visible(name)
            if unit is not None:
                assert unit.state is UnitState.PUBLISHED and unit.found == PARTS
                assert unit.generation == best
        seen = [unit for unit in self.units if unit.state is UnitState.PUBLISHED]
        assert len(seen) <= 2 and all(self.publications.visible(unit.name) is unit for unit in seen)


TestUnits = UnitMachine.TestCase
TestUnits.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
