"""A cache's declared admission on its way: with the baseline, into the store, and over restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.v1 import control_pb2
from kvtier_agent.admission_wire import admission_message, admission_of, admission_terms, admission_text
from kvtier_agent.blockhost import BlockHost
from kvtier_core.admission import UNDECLARED, AdmissionPolicy, AdmissionTerms, brought
from kvtier_core.blockstore.admitting import READ, UNLIMITED
from kvtier_core.blockstore.driver import Bell, Driver
from kvtier_core.errors import CoreError, Reason
from kvtier_crds.manifest import Admission, RuntimeManifest
from kvtier_crds.manifest import AdmissionPolicy as Policy
from tests.unit.agent.agent_fakes import Bench
from tests.unit.core.storebench import SIZE, StoreBench

TERMS = AdmissionTerms(link=2 * SIZE, queue=7, policy=AdmissionPolicy.EARLIEST_DEADLINE)


def bench_of(folder: Path, blocks: StoreBench) -> Bench:
    return Bench(
        folder,
        blocks_of=lambda engine: BlockHost(
            blocks.store, Driver(blocks.store, Bell(), blocks.clock), blocks.clock
        ),
    )


async def apply(bench: Bench, terms: AdmissionTerms, manifest: RuntimeManifest | None = None) -> None:
    wanted = manifest or bench.baseline
    await bench.node.apply_baseline(bench.command(), wanted.canonical(), wanted.digest(), "", terms)


async def test_it_is_acted_on_in_place_and_outlives_grants_and_restarts(tmp_path: Path) -> None:
    blocks = StoreBench()
    bench = bench_of(tmp_path, blocks)
    await apply(bench, UNDECLARED)
    assert blocks.store.ledger.total(READ) == UNLIMITED
    await apply(bench, TERMS)
    assert blocks.store.ledger.total(READ) == 2 * SIZE
    assert len(bench.engines) == 1, "no engine was built for it"
    await bench.grant()
    await bench.node.revoke(bench.command(), "test", b"nonce")
    await bench.close()
    again = StoreBench()
    reborn = bench_of(tmp_path, again)
    reborn.fence = bench.fence
    await reborn.node.restore()
    assert again.store.ledger.total(READ) == 2 * SIZE
    (host,) = reborn.node.caches.values()
    assert host.admission == TERMS
    await apply(reborn, UNDECLARED)
    assert (again.store.ledger.total(READ), host.admission) == (UNLIMITED, UNDECLARED)
    await reborn.close()


async def test_terms_that_let_nothing_through_are_refused_and_the_former_hold(tmp_path: Path) -> None:
    blocks = StoreBench()
    bench = bench_of(tmp_path, blocks)
    await apply(bench, TERMS)
    with pytest.raises(CoreError) as refused:
        await apply(bench, AdmissionTerms(link=SIZE - 1))
    assert refused.value.reason is Reason.STAGING_TOO_SMALL
    (host,) = bench.node.caches.values()
    assert (host.admission, blocks.store.ledger.total(READ)) == (TERMS, 2 * SIZE)
    await bench.close()


async def test_what_is_declared_holds_again_once_a_manifest_has_no_bounds_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = StoreBench()
    bench = bench_of(tmp_path, blocks)
    await apply(bench, TERMS)
    (running,) = bench.engines

    def adopt(manifest: RuntimeManifest) -> None:
        # As an engine does whose manifest has other bounds.
        running.manifest = manifest
        blocks.store.admit(brought(manifest.admission))

    monkeypatch.setattr(running, "adopt", adopt)
    bounds = Admission(link_bytes=2 * SIZE, queue=7, policy=Policy.EARLIEST_DEADLINE)
    for manifest in (bench.baseline.admitting(bounds), bench.baseline):
        await apply(bench, TERMS, manifest)
        assert blocks.store.ledger.total(READ) == 2 * SIZE
    await bench.close()


@pytest.mark.parametrize(
    "terms", [UNDECLARED, TERMS, AdmissionTerms(1, 2, 3, 4, AdmissionPolicy.FIFO)], ids=str
)
def test_the_wire_and_the_record_say_the_same(terms: AdmissionTerms) -> None:
    request = control_pb2.ApplyBaselineRequest(admission=admission_message(terms))
    assert admission_terms(request) == terms == admission_of(admission_text(terms))


def test_without_a_word_nothing_is_declared() -> None:
    assert admission_terms(control_pb2.ApplyBaselineRequest()) == UNDECLARED == admission_of("")


@pytest.mark.parametrize(
    ("said", "words"),
    [({"policy": "lifo"}, "'lifo'; legal: fifo"), ({"link_bytes": -1}, "admission.link -1")],
    ids=["policy", "bytes"],
)
def test_what_cannot_be_meant_is_refused(said: dict[str, object], words: str) -> None:
    request = control_pb2.ApplyBaselineRequest(admission=control_pb2.CacheAdmission(**said))  # type: ignore[arg-type]
    with pytest.raises(CoreError, match=words) as refused:
        admission_terms(request)
    assert refused.value.reason is Reason.BAD_ARGUMENT
