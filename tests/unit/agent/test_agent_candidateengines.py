"""A node's second engines: built where there is room, proved, adopted, closed, and where their files are."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvtier_agent import candidateengines, node
from kvtier_agent.blockhost import BlockHost
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.cachesession import CacheName
from kvtier_agent.candidateengines import CandidateEngines, paired
from kvtier_agent.config import TierConfig
from kvtier_agent.pairedengine import PairedEngine
from kvtier_agent.tierdirs import NodeTiers
from kvtier_core.admission import UNDECLARED
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import SessionFacts
from kvtier_core.tiers.nvme.tier import store_path
from kvtier_crds.manifest import RuntimeManifest
from tests.engine.agent_process import baseline_manifest, default_tiers, quest_candidate
from tests.unit.agent.agent_fakes import Bench, FakeEngine

MIB = 1 << 20
WAIT_SECONDS = 60.0
OTHER = baseline_manifest(budgets={"dram": 96 * MIB})


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    # A thread closes it, which a busy machine may let begin late.
    monkeypatch.setattr(candidateengines, "TEND_SECONDS", WAIT_SECONDS)
    made = Bench(tmp_path)
    await made.apply()
    yield made
    await made.close()


def engines(bench: Bench) -> list[str]:
    """Digests of those that are not closed."""
    return [one.manifest.digest() for one in bench.engines if not one.closed]


async def granted(bench: Bench, candidate: RuntimeManifest = OTHER) -> FakeEngine:
    bench.candidate = candidate
    await bench.grant(gates=())
    return bench.engines[-1]


async def proved(bench: Bench) -> tuple[str, str]:
    facts = await bench.node.prove(next(iter(bench.node.caches.values())).name, bench.fence, "", b"nonce")
    return facts.baseline_digest, facts.candidate_digest


async def test_a_grant_builds_it_once_and_the_proof_is_recomputed_from_it(bench: Bench) -> None:
    second = await granted(bench)
    await granted(bench)
    assert engines(bench) == [bench.baseline.digest(), OTHER.digest()]
    assert await proved(bench) == (bench.baseline.digest(), OTHER.digest())
    # Were it to run something else meanwhile, the proof would say so.
    second.manifest = baseline_manifest(budgets={"dram": 95 * MIB})
    assert (await proved(bench))[1] == second.manifest.digest()
    second.manifest = OTHER


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_it_is_closed_once_no_lease_is_held_for_it(bench: Bench, how: str) -> None:
    second = await granted(bench)
    await bench.node.tend_candidates()
    assert not second.closed
    if how == "revoked":
        await bench.node.revoke(bench.command(), "IntentAbort", b"nonce")
    else:
        bench.clock.advance(61)
    assert await proved(bench) == (bench.baseline.digest(), "")
    await bench.node.tend_candidates()
    assert engines(bench) == [bench.baseline.digest()]


def slowly(bench: Bench, seconds: int) -> None:
    """Engines that take so long to build."""

    def made(manifest: RuntimeManifest) -> FakeEngine:
        bench.clock.advance(seconds)
        return FakeEngine(manifest)

    bench.engines_made = made


@pytest.mark.parametrize("end", ["repeated", "revoked", "never"])
async def test_one_that_takes_longer_to_build_than_its_lease_waits_for_the_grants_repeat(
    bench: Bench, end: str
) -> None:
    """Or it would be built anew for each repeat, for ever."""
    slowly(bench, 70)
    with pytest.raises(CoreError) as refused:
        await granted(bench)
    assert refused.value.reason is Reason.LEASE_EXPIRED
    await bench.node.tend_candidates()
    assert engines(bench) == [bench.baseline.digest(), OTHER.digest()]
    if end == "repeated":
        await granted(bench)
        await bench.node.tend_candidates()
        assert await proved(bench) == (bench.baseline.digest(), OTHER.digest())
        assert len(bench.engines) == 2
        bench.clock.advance(61)
    elif end == "revoked":
        await bench.node.revoke(bench.command(), "IntentAbort", b"nonce")
    else:
        bench.clock.advance(121)
    await bench.node.tend_candidates()
    assert engines(bench) == [bench.baseline.digest()]


async def test_a_session_in_it_keeps_it_and_the_next_candidate_waits(bench: Bench) -> None:
    """These engines carry nothing, so that sessions stay until they end."""
    second = await granted(bench)
    host = next(iter(bench.node.caches.values()))
    session = await host.open_session(SessionFacts("beta", "", "root", "root"), 0.125, 100, "")
    assert second.opened and not bench.engines[0].opened
    await bench.node.revoke(bench.command(), "IntentAbort", b"nonce")
    await bench.node.tend_candidates()
    assert not second.closed
    with pytest.raises(CoreError) as refused:
        await granted(bench, baseline_manifest(budgets={"dram": 80 * MIB}))
    assert refused.value.reason is Reason.QUEUE_FULL
    await host.close_session(session)
    await granted(bench, baseline_manifest(budgets={"dram": 80 * MIB}))
    assert second.closed and len(engines(bench)) == 2


class Blocks:
    """Shared blocks that take calls until they are told to end, which they do once `ends` is set."""

    def __init__(self) -> None:
        self.ends = self.closed = False
        self.store = SimpleNamespace(admit=lambda _terms: None)
        self.given: list[tuple[float, bool]] = []

    async def close(self, seconds: float, *, removed: bool = True) -> bool:
        self.closed = True
        self.given.append((seconds, removed))
        return self.ends


async def with_blocks(tmp_path: Path) -> tuple[Bench, list[Blocks]]:
    """A cache at its baseline, and the blocks of each engine in the order in which they were made."""
    made: list[Blocks] = []

    def blocks_of(engine: object) -> BlockHost:
        made.append(Blocks())
        return cast(BlockHost, made[-1])

    bench = Bench(tmp_path, blocks_of=blocks_of)
    await bench.apply()
    return bench, made


async def test_one_whose_blocks_have_begun_to_end_is_not_used_again(tmp_path: Path) -> None:
    """Calls on them may outlast one attempt to end them; they refuse new ones from its beginning on."""
    bench, made = await with_blocks(tmp_path)
    second = await granted(bench)
    host = bench.node.caches["cache-uid-1"]
    await bench.node.revoke(bench.command(), "IntentAbort", b"nonce")
    await bench.node.tend_candidates()
    assert made[1].closed and not second.closed
    # Commands of the cache wait meanwhile, and its own sessions go on with the baseline's.
    assert made[1].given == [(candidateengines.TEND_SECONDS, False)]
    with pytest.raises(CoreError) as refused:
        await granted(bench)
    assert refused.value.reason is Reason.QUEUE_FULL
    assert not bench.node._candidates.runs(host, OTHER.digest(), ""), "nor is it adopted"
    for one in made:
        one.ends = True
    assert await granted(bench) is not second
    assert second.closed and cast(Blocks, host.blocks_beside) is made[-1] and not made[-1].closed
    made[-1].ends = True
    await bench.close()


async def test_one_that_finds_no_room_is_refused_with_numbers_before_the_fence_is_spent(bench: Bench) -> None:
    before = bench.node.highest_fence("cache-uid-1")
    with pytest.raises(CoreError) as refused:
        await granted(bench, baseline_manifest(budgets={"dram": 200 * MIB}))
    assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
    assert all(str(size * MIB) in refused.value.message for size in (256, 64, 200))
    assert bench.node.highest_fence("cache-uid-1") == before
    assert engines(bench) == [bench.baseline.digest()]


THIRD = baseline_manifest(budgets={"dram": 80 * MIB})


def leased(bench: Bench) -> str:
    lease = bench.node.caches["cache-uid-1"].enforcement.lease()
    return "" if lease is None else lease.terms.candidate_digest


async def test_no_engine_goes_before_the_lease_that_is_held_for_it_is_replaced_durably(bench: Bench) -> None:
    second = await granted(bench)
    seen: list[tuple[int, str]] = []

    def close() -> None:
        seen.append((bench.node.highest_fence("cache-uid-1"), leased(bench)))
        second.closed = True

    second.close = close  # type: ignore[method-assign]
    assert leased(bench) == OTHER.digest()
    await granted(bench, THIRD)
    assert seen == [(bench.fence, "")]
    assert leased(bench) == THIRD.digest()
    assert engines(bench) == [bench.baseline.digest(), THIRD.digest()]


async def test_a_candidate_that_finds_no_room_leaves_the_one_that_is_held(bench: Bench) -> None:
    second = await granted(bench)
    before = bench.node.highest_fence("cache-uid-1")
    with pytest.raises(CoreError) as refused:
        await granted(bench, baseline_manifest(budgets={"dram": 200 * MIB}))
    assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
    assert (leased(bench), bench.node.highest_fence("cache-uid-1")) == (OTHER.digest(), before)
    assert not second.closed
    # What goes makes room for what comes: 64, 96 and 120 MiB together are more than there is.
    await granted(bench, baseline_manifest(budgets={"dram": 120 * MIB}))


async def test_one_that_cannot_be_built_in_the_place_of_another_is_by_the_grants_repeat(bench: Bench) -> None:
    """The fence is spent by then, and nobody has a lease meanwhile."""
    second = await granted(bench)
    bench.build_refusal = CoreError(Reason.STORAGE_UNAVAILABLE, "a device that hangs")
    with pytest.raises(CoreError) as refused:
        await granted(bench, THIRD)
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
    assert second.closed
    assert (leased(bench), bench.node.highest_fence("cache-uid-1")) == ("", bench.fence)
    assert await proved(bench) == (bench.baseline.digest(), "")
    bench.build_refusal = None
    bench.fence -= 1
    await granted(bench, THIRD)
    assert leased(bench) == THIRD.digest()


async def test_one_that_is_built_while_its_cache_ends_is_closed(bench: Bench) -> None:
    host = bench.node.caches["cache-uid-1"]

    def made(manifest: RuntimeManifest) -> FakeEngine:
        paired(host).close()
        return FakeEngine(manifest)

    bench.engines_made = made
    with pytest.raises(CoreError) as refused:
        await granted(bench)
    assert refused.value.reason is Reason.CACHE_UNKNOWN
    assert len(bench.engines) == 2 and engines(bench) == []


def hosted(uid: str) -> CacheHost:
    runner = SimpleNamespace(engine=PairedEngine(FakeEngine(baseline_manifest())))
    name = CacheName("kvtier", uid, uid)
    told = {"key_secret": "", "admission": UNDECLARED, "blocks_beside": None}
    return cast(CacheHost, SimpleNamespace(name=name, runner=runner, manifest=baseline_manifest(), **told))


async def test_room_is_promised_once_though_engines_of_two_caches_are_built_together(tmp_path: Path) -> None:
    building, go_on = threading.Event(), threading.Event()

    def built(manifest: RuntimeManifest, *_: object) -> FakeEngine:
        building.set()
        assert go_on.wait(WAIT_SECONDS)
        return FakeEngine(manifest)

    configs = [TierConfig.parse(json.dumps(tier)) for tier in default_tiers(tmp_path)]
    tiers = NodeTiers(configs, "uid-a")
    engines = CandidateEngines(tiers, built, lambda engine: None)
    hosts = [hosted("cache-uid-1"), hosted("cache-uid-2")]
    first = asyncio.ensure_future(engines.prepare(hosts[0], OTHER, hosts))
    assert await asyncio.to_thread(building.wait, WAIT_SECONDS)
    go_on.set()
    # Of 256 MiB the two baselines have 64 each.
    with pytest.raises(CoreError) as refused:
        await engines.prepare(hosts[1], OTHER, hosts)
    assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
    await first
    tiers.close()


@pytest.fixture
async def hanging(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[threading.Event]:
    """A second engine that nobody needs any more and that ends when this is set."""
    for module in (candidateengines, node):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 0.0)
    monkeypatch.setattr(candidateengines, "TEND_SECONDS", 0.0)
    second, ends = await granted(bench), threading.Event()

    def close() -> None:
        assert ends.wait(WAIT_SECONDS)
        second.closed = True

    second.close = close  # type: ignore[method-assign]
    await bench.node.revoke(bench.command(), "IntentAbort", b"nonce")
    await bench.node.tend_candidates()
    yield ends
    ends.set()
    assert await bench.node._candidates.ended("cache-uid-1", WAIT_SECONDS)


async def test_no_other_engine_is_built_over_the_place_of_one_that_does_not_end(
    bench: Bench, hanging: threading.Event
) -> None:
    before = len(bench.engines)
    with pytest.raises(CoreError) as refused:
        await granted(bench)
    assert (refused.value.reason, len(bench.engines)) == (Reason.QUEUE_FULL, before)
    hanging.set()
    assert await bench.node._candidates.ended("cache-uid-1", WAIT_SECONDS)
    await granted(bench)
    assert len(bench.engines) == before + 1


async def test_a_node_says_that_a_second_engine_does_not_end_and_keeps_its_folders(
    bench: Bench, hanging: threading.Event
) -> None:
    assert await bench.node.close(0.0) != []
    assert "second engine of cache cache-uid-1" in await bench.node.close(0.0)
    hanging.set()


async def test_one_that_is_taken_out_while_the_agent_stops_ends_with_the_node(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = await granted(bench)
    await bench.node.revoke(bench.command(), "IntentAbort", b"nonce")
    take_out, entered, go_on, taken = (
        bench.node._candidates._taken_out,
        *(threading.Event() for _ in range(3)),
    )

    def slow(host: CacheHost) -> bool:
        entered.set()
        assert go_on.wait(WAIT_SECONDS)
        done = take_out(host)
        taken.set()
        return done

    monkeypatch.setattr(bench.node._candidates, "_taken_out", slow)
    tending = asyncio.ensure_future(bench.node.tend_candidates())
    assert await asyncio.to_thread(entered.wait, WAIT_SECONDS)
    tending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tending
    go_on.set()
    assert await asyncio.to_thread(taken.wait, WAIT_SECONDS)
    assert not await bench.node.close(WAIT_SECONDS)
    assert second.closed


async def test_keys_of_a_removed_cache_are_not_called_erased_while_its_second_engine_goes_on(
    bench: Bench, hanging: threading.Event
) -> None:
    command = bench.command()
    with pytest.raises(CoreError) as refused:
        await bench.node.remove_cache(command)
    assert refused.value.reason is Reason.DEADLINE
    hanging.set()
    assert await bench.node._candidates.ended("cache-uid-1", WAIT_SECONDS)
    await bench.node.remove_cache(command)


async def test_one_that_would_run_another_manifest_is_refused_and_closed(bench: Bench) -> None:
    bench.engines_made = lambda manifest: FakeEngine(baseline_manifest())
    with pytest.raises(CoreError) as refused:
        await granted(bench)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert bench.engines[-1].closed


async def test_a_selector_beside_other_tiers_is_refused(bench: Bench) -> None:
    with pytest.raises(CoreError) as refused:
        await granted(bench, quest_candidate(OTHER))
    assert refused.value.reason is Reason.UNSUPPORTED
    assert "selector" in refused.value.message


async def test_an_adopted_one_is_the_baseline_also_after_a_restart(bench: Bench, tmp_path: Path) -> None:
    second = await granted(bench)
    first = bench.engines[0]
    bench.baseline = OTHER
    assert await bench.apply() == OTHER.digest()
    await bench.node.tend_candidates()
    assert first.closed and not second.closed
    assert paired(next(iter(bench.node.caches.values()))).running.engine is second
    assert await proved(bench) == (OTHER.digest(), "")
    # A later command keeps the place.
    await bench.node.revoke(bench.command(), "Superseded", b"nonce")
    await bench.close()

    again = Bench(tmp_path)
    await again.node.restore()
    host = next(iter(again.node.caches.values()))
    assert (host.baseline_digest, paired(host).running.place) == (OTHER.digest(), "second")
    # The next candidate has the first place.
    again.fence, again.baseline = bench.fence, OTHER
    await granted(again, baseline_manifest())
    assert paired(host).beside is not None and paired(host).beside.place == ""
    await again.close()


async def test_blocks_of_a_former_baseline_are_known_until_its_engine_has_ended(tmp_path: Path) -> None:
    """A deletion must reach them as long as a session may start from them."""
    bench, made = await with_blocks(tmp_path)
    await granted(bench)
    host = bench.node.caches["cache-uid-1"]
    bench.baseline = OTHER
    await bench.apply()
    known: list[object] = [host.blocks, host.blocks_former, host.blocks_beside]
    assert known == [made[1], made[0], None]
    await bench.node.tend_candidates()
    assert made[0].closed and not bench.engines[0].closed and host.blocks_former is not None
    made[0].ends = True
    await bench.node.tend_candidates()
    known = [host.blocks, host.blocks_former]
    assert bench.engines[0].closed and known == [made[1], None]
    made[1].ends = True
    await bench.close()


@pytest.mark.parametrize("again_under", ["the same fence", "a higher fence"])
async def test_a_baseline_whose_engine_is_built_at_the_second_try_keeps_its_place(
    bench: Bench, tmp_path: Path, again_under: str
) -> None:
    """Else the next start would look for its files in the other place, and clear them where they are."""
    await granted(bench)
    bench.baseline = OTHER
    await bench.apply()
    bench.baseline = baseline_manifest(budgets={"dram": 80 * MIB})
    bench.build_refusal = CoreError(Reason.STORAGE_UNAVAILABLE, "full")
    with pytest.raises(CoreError):
        await bench.apply()
    bench.build_refusal = None
    bench.fence -= again_under == "the same fence"
    await bench.apply()
    host = bench.node.caches["cache-uid-1"]
    assert paired(host).running.place == "second"
    await bench.close()

    again = Bench(tmp_path)
    await again.node.restore()
    assert paired(again.node.caches["cache-uid-1"]).running.place == "second"
    await again.close()


async def test_an_agent_that_restarts_before_the_adoption_is_at_the_baseline(
    bench: Bench, tmp_path: Path
) -> None:
    await granted(bench)
    await bench.close()
    again = Bench(tmp_path)
    await again.node.restore()
    host = next(iter(again.node.caches.values()))
    assert (host.baseline_digest, paired(host).beside) == (baseline_manifest().digest(), None)
    returned = host.enforcement.returned
    assert returned is not None and returned.reason.value == "BootRestart"
    await again.close()


def test_what_an_engine_left_in_a_place_is_cleared_and_the_other_place_is_not(tmp_path: Path) -> None:
    configs = [TierConfig.parse(json.dumps(tier)) for tier in default_tiers(tmp_path)]
    tiers = NodeTiers(configs, "uid-a")
    only = baseline_manifest(budgets={"gpu-sim": 0, "dram": 0})
    places = {place: tiers.for_manifest(only, place)[0].directory for place in ("", "second")}
    files = {}
    for place, directory in places.items():
        assert directory is not None
        files[place] = store_path(directory, "cache-uid-1")
        files[place].write_bytes(b"")
    tiers.clear("cache-uid-1", "second")
    assert [path.exists() for path in files.values()] == [True, False]
    tiers.sweep({"cache-uid-1"})
    assert not files[""].exists()
    tiers.close()
