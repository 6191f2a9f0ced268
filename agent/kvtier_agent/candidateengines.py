"""Second engines of a node's caches: built for a candidate where there is room, adopted, or closed.

Why it exists: an engine owns memory and files, so one beside the baseline's is a matter of budgets, folders
and orderly ends, which neither a lease nor a session knows. It must not judge fences: its caller holds the
cache's lock where a command is carried out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from kvtier_agent.blockhost import BlockHost
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.endings import BlockingEnd
from kvtier_agent.engine_port import EnginePort
from kvtier_agent.pairedengine import PairedEngine
from kvtier_agent.tierdirs import FIRST, NodeTier, NodeTiers, other_place
from kvtier_core.admission import UNDECLARED, brought
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.fences import FenceRecord, Judgement
from kvtier_crds.manifest import RuntimeManifest

EngineFactory = Callable[[RuntimeManifest, Sequence[NodeTier], str], EnginePort]
"""From the manifest, the node's tiers and the name of the cache's keys (empty: the agent's own)."""
BlocksOf = Callable[[EnginePort], BlockHost | None]
log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
TEND_SECONDS = 1.0
# While no command of the cache waits: storage that hangs must not keep other caches from being looked after.
SETTLE_SECONDS = 60.0
# For which an engine waits whose building outlasted the lease that it was built for: its grant is repeated.
KEPT_SECONDS = 120.0


def paired(host: CacheHost) -> PairedEngine:
    """What a host's runner runs."""
    engine = host.runner.engine
    assert isinstance(engine, PairedEngine)
    return engine


def place_of(host: CacheHost) -> str:
    return paired(host).running.place


def place_for(host: CacheHost | None, beside: bool, record: FenceRecord | None, judgement: Judgement) -> str:
    """Where the engine of a baseline that is applied has its files. beside: it is the second one there now.
    A repeat keeps the place that its first call made durable, and a cache whose engine is gone its last."""
    if host is not None and beside:
        return other_place(place_of(host))
    if host is not None and judgement is Judgement.ADVANCE:
        return place_of(host)
    return FIRST if record is None else record.place


@dataclass(frozen=True)
class _Ending:
    """A second engine that nobody reaches any more, while it goes on."""

    host: CacheHost
    place: str
    manifest: RuntimeManifest
    end: BlockingEnd


class CandidateEngines:
    """Of one node; on the event loop."""

    def __init__(
        self,
        tiers: NodeTiers,
        factory: EngineFactory,
        blocks_of: BlocksOf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds."""
        self._tiers = tiers
        self._clock = clock
        self._kept_until: dict[str, float] = {}
        self._factory = factory
        self._blocks_of = blocks_of
        self._building: dict[str, RuntimeManifest] = {}
        self._ending: dict[str, _Ending] = {}

    async def prepare(self, host: CacheHost, candidate: RuntimeManifest, hosts: Iterable[CacheHost]) -> None:
        """Has an engine for it beside the baseline's; again is nothing. TIER_INCAPABLE, STORAGE_UNAVAILABLE,
        NO_DESTINATION_CAPACITY with numbers; QUEUE_FULL while an earlier one has not ended."""
        engines, digest, uid = paired(host), candidate.digest(), host.name.uid
        beside = engines.beside
        if beside is not None and beside.digest == digest and self._serves(host):
            return
        if not await self._closed(host, CLOSE_SECONDS):
            left = 0 if engines.beside is None else engines.seated_in(engines.beside)
            raise CoreError(
                Reason.QUEUE_FULL,
                f"the engine of an earlier manifest has not ended; {left} sessions are in it",
                {"sessions": str(left)},
            )
        place = other_place(engines.running.place)
        tiers = self._tiers.for_manifest(candidate, place)
        self._tiers.check_room(candidate, self._promised(hosts))
        # From here on nobody else is promised the same room; building takes its time.
        self._building[uid] = candidate
        try:
            # What an engine left there that did not end in order is nobody's.
            await asyncio.to_thread(self._tiers.clear, uid, place)
            host.blocks_former = None
            built = await asyncio.to_thread(self._factory, candidate, tiers, host.key_secret)
            if (runs := built.live_manifest().digest()) != digest:
                await asyncio.to_thread(built.close)
                raise CoreError(Reason.UNSUPPORTED, f"an engine for {digest} would run {runs}")
            try:
                blocks = await self._blocks_beside(host, built)
                engines.attach(built, digest, place)
            except BaseException:
                await asyncio.to_thread(built.close)
                raise
            host.blocks_beside = blocks
            self._kept_until[uid] = self._clock() + KEPT_SECONDS
        finally:
            del self._building[uid]
        log.info("cache %s: an engine for candidate %s is there", uid, digest)

    def replaces(self, host: CacheHost, candidate: RuntimeManifest) -> bool:
        """Whether an engine for it takes the place of one that a lease is held for."""
        beside = paired(host).beside
        return beside is not None and beside.digest != candidate.digest() and not self._idle(host)

    def check(self, host: CacheHost, candidate: RuntimeManifest, hosts: Iterable[CacheHost]) -> None:
        """What `prepare` refuses for good, were the second engine gone already."""
        self._tiers.for_manifest(candidate, other_place(place_of(host)))
        self._tiers.check_room(candidate, self._promised(hosts, leaving=host))

    async def _blocks_beside(self, host: CacheHost, built: EnginePort) -> BlockHost | None:
        """What the candidate's own sessions share, under its own bounds, or those of the baseline. What
        `BlockStore.admit` refuses."""
        blocks = self._blocks_of(built)
        terms = brought(built.live_manifest().admission, host.admission)
        if blocks is not None and terms != UNDECLARED:
            await asyncio.to_thread(blocks.store.admit, terms)
        return blocks

    def keep_no_more(self, uid: str) -> None:
        """Its candidate has a lease, or has been told off: from now on the lease decides."""
        self._kept_until.pop(uid, None)

    def _promised(
        self, hosts: Iterable[CacheHost], leaving: CacheHost | None = None
    ) -> list[RuntimeManifest]:
        """What has room on this node now. leaving: whose second engine is about to go."""
        held = [running for one in hosts for running in ([one.manifest] if one is leaving else _running(one))]
        return [*held, *self._building.values(), *(one.manifest for one in self._ending.values())]

    def runs(self, host: CacheHost | None, digest: str, key_secret: str) -> bool:
        """Whether the engine beside the baseline's is of that manifest, to be adopted as it is."""
        if host is None or host.key_secret != key_secret:
            return False
        beside = paired(host).beside
        return beside is not None and beside.digest == digest and self._serves(host)

    def _serves(self, host: CacheHost) -> bool:
        """Whether the second engine is a candidate's and its end has not begun."""
        beside = paired(host).beside
        return beside is not None and not beside.retired and not beside.ending

    def adopt(self, host: CacheHost, manifest: RuntimeManifest) -> None:
        """The second engine is the baseline's now, and its blocks are what all sessions share. Sessions move
        to it, with their rows; blocks that no session of the candidate asked for do not."""
        engines, former = paired(host), host.blocks
        engines.swap()
        host.become(manifest)
        taken, host.blocks_beside = host.blocks_beside, None
        host.blocks = taken or self._blocks_of(engines.running.engine)
        # The new store may have other bounds, whatever those of the former one were. Sessions live on as long
        # as they were promised, also until the terms are told.
        host.admission = replace(UNDECLARED, sessions=host.admission.sessions)
        host.blocks_former = former

    async def tend(self, host: CacheHost, hold: Callable[[str], AbstractAsyncContextManager[None]]) -> None:
        """Closes the second engine once nobody needs it: its sessions are brought home first, which may take
        several calls. hold: the cache's lock."""
        if host.name.uid in self._ending:
            async with hold(host.name.uid):
                await self.ended(host.name.uid, 0.0)
        if not self._idle(host):
            return
        await asyncio.to_thread(paired(host).settle, time.monotonic() + SETTLE_SECONDS)
        async with hold(host.name.uid):
            if self._idle(host):
                # Commands wait for the lock meanwhile, and what is not over is looked at again.
                await self._closed(host, TEND_SECONDS)

    def _idle(self, host: CacheHost) -> bool:
        """Whether there is a second engine that no lease is held for, nor about to be."""
        beside, lease = paired(host).beside, host.enforcement.lease()
        if beside is None:
            return False
        if not beside.retired and self._clock() < self._kept_until.get(host.name.uid, 0.0):
            return False
        return beside.retired or lease is None or lease.terms.candidate_digest != beside.digest

    async def _closed(self, host: CacheHost, seconds: float) -> bool:
        """Whether there is no second engine any more; sessions that cannot move keep it. Waits at most so
        long for each of what must be over before."""
        engines, uid = paired(host), host.name.uid
        if not await self.ended(uid, 0.0):
            return False
        if engines.beside is None:
            return True
        await asyncio.to_thread(engines.settle, time.monotonic() + seconds)
        former = host.blocks_former
        if former is not None and not await former.close(seconds, removed=False):
            return False
        beside = engines.beside
        if beside is None or engines.seated_in(beside):
            return False
        # Also when calls on its blocks outlast this: what refuses calls must never be adopted.
        beside.ending = True
        if not await self._beside_ended(host, seconds):
            return False
        if not await asyncio.to_thread(self._taken_out, host):
            return False
        if not await self.ended(uid, seconds):
            log.warning("cache %s: a second engine does not end; no other is built until it has", uid)
            return False
        return True

    def _taken_out(self, host: CacheHost) -> bool:
        """Whether it is; for a thread. What is taken out is known to be ending, whoever waits for it."""
        uid, slot = host.name.uid, paired(host).detach()
        if slot is None:
            return False
        end = BlockingEnd(slot.engine.close, f"close-second-{uid}")
        self._ending[uid] = _Ending(host, slot.place, slot.engine.live_manifest(), end)
        self._kept_until.pop(uid, None)
        return True

    async def ended(self, uid: str, seconds: float) -> bool:
        """Whether no second engine that was taken out goes on; waits at most so long. Its files go after it.
        Raises what its end raised, once."""
        ending = self._ending.get(uid)
        if ending is None:
            return True
        try:
            if not await ending.end.within(seconds):
                return False
        except Exception:
            self._ending.pop(uid, None)
            raise
        await asyncio.to_thread(self._tiers.clear, uid, ending.place)
        self._ending.pop(uid, None)
        # No other engine was built meanwhile, so these are of the one that has ended.
        ending.host.blocks_former = None
        return True

    def ends(self) -> dict[str, BlockingEnd]:
        """Those that go on, by what they are called."""
        return {f"second engine of cache {uid}": one.end for uid, one in self._ending.items()}

    @staticmethod
    async def _beside_ended(host: CacheHost, seconds: float) -> bool:
        """Whether nothing runs on the candidate's blocks any more; nobody begins anything on them then."""
        beside = host.blocks_beside
        if beside is not None:
            if not await beside.close(seconds, removed=False):
                return False
            host.blocks_beside = None
        return True


def _running(host: CacheHost) -> list[RuntimeManifest]:
    beside = paired(host).beside
    return [host.manifest] + ([] if beside is None else [beside.engine.live_manifest()])
