"""Declared credits and policies: what they let through at a time, who goes first, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier_core.admission import UNDECLARED, AdmissionPolicy, AdmissionTerms
from kvtier_core.blockstore.admitting import READ, UNLIMITED, WRITE
from kvtier_core.credits import STAGING
from kvtier_core.errors import CoreError, Reason
from kvtier_core.placements.preference import PlacementPreference
from kvtier_core.transactions import MoveReason
from kvtier_crds.manifest import Admission
from kvtier_crds.manifest import AdmissionPolicy as Policy
from tests.unit.core.builders import cpu, engine, keeping, manifest, nvme
from tests.unit.core.storebench import SIZE, StoreBench, content, key

NAMES = tuple("abcdef")


@pytest.fixture
def bench() -> StoreBench:
    """Six blocks that are on disk alone."""
    made = StoreBench(memory=8, storage=16)
    made.on_disk(*NAMES[:4])
    made.on_disk(*NAMES[4:])
    return made


def refused(reason: Reason, bench: StoreBench, terms: AdmissionTerms) -> None:
    with pytest.raises(CoreError) as error:
        bench.store.admit(terms)
    assert error.value.reason is reason


@pytest.mark.parametrize("terms", [AdmissionTerms(link=2 * SIZE), AdmissionTerms(staging=2 * SIZE)], ids=str)
def test_no_more_is_in_flight_than_was_declared_and_the_rest_waits_its_turn(
    bench: StoreBench, terms: AdmissionTerms
) -> None:
    bench.store.admit(terms)
    fetch = bench.fetch(*NAMES)
    for done in range(0, 6, 2):
        assert [held.item.identity.chunk_digest for held in bench.disk.held] == [
            key(name) for name in NAMES[done : done + 2]
        ]
        for held in list(bench.disk.held):
            held.finish()
        bench.store.pump()
    assert [bytes(fetch.body(at)) for at in range(6)] == [content(name) for name in NAMES]
    fetch.close()
    bench.rest()


def test_without_a_declaration_the_window_alone_bounds_reads(bench: StoreBench) -> None:
    bench.store.admit(UNDECLARED)
    with bench.fetch(*NAMES):
        assert len(bench.disk.held) == 6
        bench.settle()
    assert bench.store.ledger.total(READ) == UNLIMITED
    bench.rest()


def test_writes_pay_their_own_link(bench: StoreBench) -> None:
    bench.store.admit(AdmissionTerms(link=SIZE))
    bench.put("m", "n", "o")
    bench.store.reclaim.make_room(0, 8)
    assert sum(held.writes for held in bench.disk.held) == 1
    fetch = bench.fetch("a")
    assert sum(not held.writes for held in bench.disk.held) == 1, "a write keeps no read waiting"
    for _ in range(4):
        bench.settle()
    fetch.close()
    assert bench.store.ledger.available(WRITE) == SIZE
    bench.rest()


def urgent(bench: StoreBench, policy: AdmissionPolicy | None) -> str:
    """In which order reads begin, one at a time: z first, then what others asked for meanwhile, by names."""
    bench.store.admit(AdmissionTerms(link=SIZE, policy=policy))
    scopes = [
        bench.fetch("f", seconds=90),
        bench.fetch("a", seconds=80),
        bench.fetch("b", seconds=20),
        bench.fetch("c", seconds=20),
        bench.fetch("c", seconds=20),
        bench.fetch("d", seconds=90, priority=1),
    ]
    for _ in range(8):
        for held in list(bench.disk.held):
            held.finish()
        bench.store.pump()
    assert all(scope.ready == 1 for scope in scopes)
    for scope in scopes:
        scope.close()
    bench.rest()
    return "".join(next(name for name in NAMES if key(name) == digest) for digest in bench.disk.reads)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (AdmissionPolicy.FIFO, "fdabc"),
        (AdmissionPolicy.EARLIEST_DEADLINE, "fdbca"),
        (AdmissionPolicy.EXACT_DEADLINE_COALESCING, "fdcba"),
        (None, "fdbca"),
    ],
    ids=str,
)
def test_the_policy_says_who_goes_first_among_equals(
    bench: StoreBench, policy: AdmissionPolicy | None, order: str
) -> None:
    assert urgent(bench, policy) == order


def test_requests_beyond_the_queue_are_refused_and_those_before_served(bench: StoreBench) -> None:
    bench.store.admit(AdmissionTerms(queue=2))
    first, second = bench.fetch("a"), bench.fetch("b")
    with bench.fetch("c") as third:
        assert (third.over, third.reason) == (True, MoveReason.QUEUE_FULL)
    bench.settle()
    assert (first.ready, second.ready) == (1, 1)
    with bench.fetch("a") as there:
        assert there.ready == 1, "what is in memory waits for nothing"
    first.close()
    second.close()
    bench.store.admit(UNDECLARED)
    with bench.fetch("c"), bench.fetch("d"), bench.fetch("e") as last:
        assert not last.over
        bench.settle()
    bench.rest()


def test_terms_are_taken_as_a_whole_or_not_at_all(bench: StoreBench) -> None:
    bench.store.admit(AdmissionTerms(link=4 * SIZE))
    fetch = bench.fetch(*NAMES[:4])
    refused(Reason.CREDIT_PRESSURE, bench, AdmissionTerms(link=SIZE, staging=2 * SIZE))
    ledger = bench.store.ledger
    assert (ledger.total(READ), ledger.total(STAGING)) == (4 * SIZE, UNLIMITED)
    bench.settle()
    bench.store.admit(AdmissionTerms(link=SIZE, staging=2 * SIZE))
    assert (ledger.total(READ), ledger.total(WRITE), ledger.total(STAGING)) == (SIZE, SIZE, 2 * SIZE)
    fetch.close()
    bench.rest()


@pytest.mark.parametrize("terms", [AdmissionTerms(link=SIZE - 1), AdmissionTerms(staging=SIZE - 1)], ids=str)
def test_what_lets_not_one_block_through_is_refused(bench: StoreBench, terms: AdmissionTerms) -> None:
    refused(Reason.STAGING_TOO_SMALL, bench, terms)


@pytest.mark.parametrize("name", ["pinned", "staging", "link", "queue"])
def test_terms_of_nothing_are_none(name: str) -> None:
    with pytest.raises(CoreError, match=f"admission.{name} 0"):
        AdmissionTerms(**{name: 0})


def test_an_engine_whose_next_manifest_brings_no_bounds_has_none(tmp_path: Path) -> None:
    tiers = [cpu(8), nvme(8)]
    with engine(tmp_path, tiers, capabilities=keeping()) as built:
        total, preference = built.blocks.store.ledger.total, PlacementPreference("any")
        plain, link = manifest(tiers), 4 << 20
        bounds = Admission(link_bytes=link, queue=5, policy=Policy.EARLIEST_DEADLINE)
        built.adopt(plain.admitting(bounds), preference)
        assert (total(READ), built.live_manifest().admission) == (link, bounds)
        built.adopt(plain, preference)
        assert (total(READ), built.live_manifest().admission) == (UNLIMITED, None)
