"""What one node serves: its caches, their fences and their durable state. Control's verbs, without the wire.

Order of a mutating command: judge the fence, validate everything, make it durable, act, acknowledge; what
ends a candidate acts first, because ending permission is always safe. Commands of one cache run one at a
time.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from kvtier_agent import idlesessions
from kvtier_agent.admission_wire import admission_of
from kvtier_agent.arriving import Arriving
from kvtier_agent.cachehost import CacheHost, manifest_set_digest
from kvtier_agent.cachesession import CacheName, Session, check_owner
from kvtier_agent.candidateengines import (
    CLOSE_SECONDS,
    BlocksOf,
    CandidateEngines,
    EngineFactory,
    place_for,
    place_of,
)
from kvtier_agent.commands import Command, ProofFacts, proof_facts, record_of
from kvtier_agent.config import Limits
from kvtier_agent.endings import BlockingEnd
from kvtier_agent.engine_port import EngineRunner, TierReport
from kvtier_agent.evidence_port import EvidencePort, WindowTerms
from kvtier_agent.keyedlocks import KeyedLocks
from kvtier_agent.manifests import check_baseline, check_candidate, parse_manifest, placed_terms
from kvtier_agent.nodeends import CacheEnds
from kvtier_agent.nodereports import NodeReports
from kvtier_agent.pairedengine import PairedEngine
from kvtier_agent.running import RunningDigests, candidate_digest
from kvtier_agent.statedir import StateDir
from kvtier_agent.tierdirs import NodeTiers, other_place
from kvtier_core.admission import UNDECLARED, AdmissionTerms
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import CacheEnforcement, LocalReturn, ReturnReason
from kvtier_core.release.fences import CommandKind, FenceBook, FenceRecord, Judgement
from kvtier_core.release.leases import FenceToken, GrantTerms, Lease, since
from kvtier_core.tiers.nvme.datakeys import KeysErased
from kvtier_crds.manifest import RuntimeManifest

T = TypeVar("T")
log = logging.getLogger(__name__)

# How long the house-keeping waits for engines that compute.
REPORT_SECONDS = 5.0
# Why a candidate's session is exact after a baseline was applied under a higher fence.
BASELINE_APPLIED = "BaselineApplied"
# And after a grant of another candidate, until that has its engine.
CANDIDATE_REPLACED = "CandidateReplaced"


class Node:
    """All caches of this agent. Its methods run on the event loop; blocking work goes to threads."""

    def __init__(
        self,
        *,
        name: str,
        state: StateDir,
        tiers: NodeTiers,
        limits: Limits,
        clock: Callable[[], int],
        engine_factory: EngineFactory,
        evidence_factory: Callable[[str], EvidencePort],
        blocks_of: BlocksOf = lambda engine: None,
    ) -> None:
        """blocks_of: the shared blocks of a new engine, asked for on the event loop."""
        self.name = name
        self.boot_id = str(uuid.uuid4())
        self.tiers = tiers
        self.limits = limits
        self.clock = clock
        self.draining = False
        self.caches: dict[str, CacheHost] = {}
        self.faults: dict[str, str] = {}
        self.changed = asyncio.Event()
        self._state = state
        self._engine_factory = engine_factory
        self._evidence_factory = evidence_factory
        self._blocks_of = blocks_of
        self._book = FenceBook(state.fences)
        self._locks = KeyedLocks()
        self.arriving = Arriving()
        self._ends = CacheEnds()
        self._candidates = CandidateEngines(tiers, engine_factory, blocks_of, lambda: clock() / 1e9)
        self._opening = 0
        self._named: tuple[dict[str, str], str] = {}, manifest_set_digest({})
        self._reports = NodeReports(tiers, clock, self.changed.set)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="control")

    # --- start and end ---------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Re-creates every stored cache at its baseline. A cache that cannot be is a fault, not a crash."""
        records = list(self._book.records().values())
        for record in records:
            if not record.baseline_digest:
                continue
            name = CacheName(record.namespace, record.name, record.uid)
            returned = None
            if record.kind is CommandKind.GRANT:
                returned = LocalReturn(ReturnReason.BOOT_RESTART, record.value, record.rollout_uid)
            try:
                manifest = parse_manifest(
                    self._state.load_manifest(record.baseline_digest), record.baseline_digest
                )
                host = await self._build(name, manifest, returned, record.key_secret, record.place)
                self.caches[record.uid] = host
                host.admit(admission_of(record.admission))
            except CoreError as error:
                self.faults[record.uid] = f"{error.reason}: {error.message}"
                log.error("cache %s cannot be restored: %s", record.uid, error)
        await self.refresh_reports()
        await self._in_thread(lambda: self._clean(records))

    def _clean(self, records: Sequence[FenceRecord]) -> None:
        """Files that no cache claims any more. A removed one's fence is kept, so its files are known."""
        self._state.drop_unused_manifests(frozenset(record.baseline_digest for record in records))
        self.tiers.sweep({record.uid for record in records if record.kind is CommandKind.REMOVE})
        for record in records:
            if record.baseline_digest:
                self.tiers.clear(record.uid, other_place(record.place))
        self.tiers.tell_unknown({record.uid for record in records})

    async def close(self, seconds: float) -> Sequence[str]:
        """Closes every engine after its running call; then the state directory may be opened by another.

        Waits at most so long in total; returns the names of what did not end. Then the folders stay locked:
        what goes on may write to them until the process ends.
        """
        for uid, host in self.caches.items():
            self._ends.begin(uid, host)
        threads = {"control threads": self._pool, "report threads": self._reports.pool}
        others = {
            name: BlockingEnd(partial(pool.shutdown, wait=True, cancel_futures=True), f"close {name}")
            for name, pool in threads.items()
        }
        others |= self._candidates.ends()
        left = await self._ends.close(others, seconds)
        if not left:
            self.tiers.close()
            self._state.close()
        return left

    # --- Control ---------------------------------------------------------------------------------------

    async def apply_baseline(
        self,
        command: Command,
        encoded: bytes,
        digest: str,
        key_secret: str = "",
        admission: AdmissionTerms = UNDECLARED,
    ) -> str:
        """Runs the manifest as exact baseline; returns the digest recomputed from what runs.

        What can be refused is refused before the fence is spent. Where only placement, contract or admission
        are others, the sessions go on under them. Then a held candidate ends at once, also under the digest
        that runs: its permission was of a lower fence. A build that fails after the fence was spent is
        repeated by the same command; so is an admission that what runs has no room for.
        """
        uid = command.cache.uid
        async with self._locks.hold(uid):
            self.check_boot(command.boot_id)
            judgement = self._book.judge(uid, command.fence.value, CommandKind.APPLY, command.content)
            manifest = parse_manifest(encoded, digest)
            check_baseline(manifest, command.cache, self.tiers.device_kind())
            host = self.caches.get(uid)
            fresh = host is None or host.baseline_digest != digest or host.key_secret != key_secret
            beside = self._candidates.runs(host, digest, key_secret)
            place = place_for(host, beside, self._book.records().get(uid), judgement)
            if fresh:
                self.tiers.for_manifest(manifest, place)
            if judgement is Judgement.ADVANCE:
                if host is not None and host.enforcement.lease() is not None:
                    host.enforcement.revoke(BASELINE_APPLIED)
                    self.changed.set()
                await self._in_thread(lambda: self._state.save_manifest(digest, encoded))
                record = record_of(command, CommandKind.APPLY, digest, key_secret, admission, place)
                await self._commit(record)
            if host is not None and beside:
                self._candidates.adopt(host, manifest)
            elif host is not None and host.may_become(manifest, key_secret):
                adopting = host.runner.engine
                with host.changing():
                    await self._in_thread(lambda: adopting.adopt(manifest))
                    host.become(manifest)
            elif fresh:
                with self.arriving.expected(command.cache):
                    await self._end(uid)
                    try:
                        host = await self._build(command.cache, manifest, None, key_secret, place)
                    except CoreError as error:
                        self.faults[uid] = f"{error.reason}: {error.message}"
                        self.changed.set()
                        raise
                    self.caches[uid] = host
            assert host is not None
            self.faults.pop(uid, None)
            await self._in_thread(partial(host.admit, admission))
            host.name = command.cache
            await self.refresh_reports()
            self.changed.set()
            log.info("cache %s runs %s under fence %d", uid, digest, command.fence.value)
            return (await self._in_thread(host.runner.engine.live_manifest)).digest()

    async def remove_cache(self, command: Command) -> tuple[int, Sequence[tuple[str, KeysErased]]]:
        """Forgets a cache but not its fence, and overwrites its data keys; returns how many sessions ended
        and the receipts by tier class. STORAGE_UNAVAILABLE while keys are not known to be erased."""
        uid = command.cache.uid
        async with self._locks.hold(uid):
            self.check_boot(command.boot_id)
            judgement = self._book.judge(uid, command.fence.value, CommandKind.REMOVE, command.content)
            if judgement is Judgement.ADVANCE:
                await self._commit(record_of(command, CommandKind.REMOVE, ""))
            self.faults.pop(uid, None)
            ended = await self._end(uid)
            erased = await self._in_thread(lambda: self.tiers.erase_keys(uid))
            await self._in_thread(lambda: self.tiers.sweep({uid}))
            self.changed.set()
            return ended, erased

    async def grant(
        self,
        command: Command,
        terms: GrantTerms,
        candidate: RuntimeManifest,
        window: WindowTerms,
        traceparent: str,
        sent_ns: int = 0,
    ) -> tuple[str, Lease]:
        """Gives the candidate a lease from the command's sending, as far as that is told, or its arrival;
        returns its recomputed digest."""
        received = since(sent_ns, self.clock())
        uid = command.cache.uid
        async with self._locks.hold(uid):
            self.check_boot(command.boot_id)
            judgement = self._book.judge(uid, command.fence.value, CommandKind.GRANT, command.content)
            host = self.host(command.cache)
            if self.draining:
                raise CoreError(Reason.DRAINING, "the agent is draining and takes no candidate")
            running = await self._in_thread(host.runner.engine.live_manifest)
            recomputed = check_candidate(running, candidate, terms, window.key)
            terms = placed_terms(running, candidate, terms)
            host.evidence.check(window)
            spent = judgement is not Judgement.ADVANCE
            if terms.own:
                if not spent and self._candidates.replaces(host, candidate):
                    # No engine goes that a lease is held for, and no lease before what follows it is durable.
                    self._candidates.check(host, candidate, self.caches.values())
                    await self._commit(_unchanged(command, CommandKind.GRANT, host))
                    spent = True
                    host.enforcement.revoke(CANDIDATE_REPLACED)
                    self._candidates.keep_no_more(uid)
                    self.changed.set()
                await self._candidates.prepare(host, candidate, self.caches.values())
            else:
                await self._in_thread(lambda: host.runner.engine.check_candidate(terms))
            if not spent:
                await self._commit(_unchanged(command, CommandKind.GRANT, host))
            lease = host.enforcement.grant(terms, judgement, received)
            self._candidates.keep_no_more(uid)
            host.evidence.open(window)
            host.window = window.key
            host.rollout_traceparent = traceparent
            self.changed.set()
            where = f"{command.fence.stage}/{command.fence.step} fence {command.fence.value}"
            log.info("cache %s: %s granted, %s", uid, recomputed, where)
            return recomputed, lease

    async def renew(
        self, cache: CacheName, fence: FenceToken, digest: str, ttl_ms: int, sent_ns: int = 0
    ) -> Lease:
        """Extends the lease held under exactly this fence. sent_ns: of this clock, 0 when it is not told."""
        received = since(sent_ns, self.clock())
        host = self.host(cache)
        self._book.check_renewal(cache.uid, fence.value)
        return host.enforcement.renew(fence.value, digest, ttl_ms, received)

    async def revoke(self, command: Command, reason: str, nonce: bytes) -> ProofFacts:
        """Ends the candidate now, then makes the fence durable, then proves the baseline."""
        uid = command.cache.uid
        async with self._locks.hold(uid):
            self.check_boot(command.boot_id)
            judgement = self._book.judge(uid, command.fence.value, CommandKind.REVOKE, command.content)
            host = self.host(command.cache)
            host.enforcement.revoke(reason)
            self._candidates.keep_no_more(uid)
            self.changed.set()
            if judgement is Judgement.ADVANCE:
                await self._commit(_unchanged(command, CommandKind.REVOKE, host))
            log.info("candidate of cache %s revoked: %s", uid, reason)
            return await self._proof(host, nonce)

    async def prove(self, cache: CacheName, fence: int, boot_id: str, nonce: bytes) -> ProofFacts:
        if boot_id:
            self.check_boot(boot_id)
        host = self.host(cache)
        self._book.check_read(host.name.uid, fence)
        return await self._proof(host, nonce)

    def check_read(self, cache: CacheName, fence: int) -> CacheHost:
        """The cache, for a reader whose fence is fresh enough."""
        host = self.host(cache)
        self._book.check_read(host.name.uid, fence)
        return host

    def highest_fence(self, uid: str) -> int:
        return self._book.highest(uid)

    # --- what both services look up ------------------------------------------------------------------------

    def host(self, cache: CacheName) -> CacheHost:
        """By uid, or by name where the uid is empty; raises CACHE_UNKNOWN or STORAGE_UNAVAILABLE."""
        if cache.uid:
            found = self.caches.get(cache.uid)
            if found is None and cache.uid in self.faults:
                raise CoreError(Reason.STORAGE_UNAVAILABLE, self.faults[cache.uid])
        else:
            named = (host for host in self.caches.values() if _same_name(host.name, cache))
            found = next(named, None)
        if found is None or not _same_name(found.name, cache):
            message = f"this agent serves no cache {cache.namespace}/{cache.name} {cache.uid}"
            raise CoreError(Reason.CACHE_UNKNOWN, message.rstrip())
        return found

    def session(self, session_id: str, generation: int, tenant: str) -> Session:
        """Raises SESSION_UNKNOWN, GENERATION_STALE or TENANT_MISMATCH."""
        for host in self.caches.values():
            session = host.sessions.get(session_id)
            if session is not None:
                check_owner(session, generation, tenant)
                session.check_open()
                return session
            ended = host.session_for_outcome(session_id)
            if ended is not None and ended.ended:
                check_owner(ended, generation, tenant)
                ended.check_open()
        raise CoreError(Reason.SESSION_UNKNOWN, "this agent holds no such session")

    def session_count(self) -> int:
        return sum(len(host.sessions) for host in self.caches.values())

    @contextmanager
    def session_place(self) -> Iterator[None]:
        """Holds one of the agent's places while a session is being opened; raises QUEUE_FULL."""
        bound = self.limits.max_sessions
        if self.session_count() + self._opening >= bound:
            facts = {"bound": str(bound)}
            raise CoreError(Reason.QUEUE_FULL, f"{bound} sessions are open on this agent", facts)
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1

    def manifest_set_digest(self) -> str:
        """Names all baselines that run here; the empty set has a digest too."""
        baselines = {uid: host.baseline_digest for uid, host in self.caches.items()}
        if self._named[0] != baselines:
            self._named = baselines, manifest_set_digest(baselines)
        return self._named[1]

    def tier_reports(self) -> Sequence[TierReport]:
        """This node's tiers as of the last refresh."""
        return self._reports.tiers

    async def refresh_reports(self, uids: Collection[str] = ()) -> None:
        """Asks what engines, by default all, run, use and measured; no command fails for it, nor waits for it
        for long."""
        await self._reports.refresh(self.caches, REPORT_SECONDS, uids)

    @property
    def running(self) -> RunningDigests:
        """What the caches were found to run at the last refresh."""
        return self._reports.running

    def differences(self) -> dict[str, str]:
        """By cache uid, how what runs is not what was applied and granted."""
        said = {uid: self.running.difference(host) for uid, host in self.caches.items()}
        return {uid: text for uid, text in said.items() if text}

    async def expire_idle_sessions(self) -> int:
        """Closes sessions that had no frame for the time that they live without; returns how many."""
        expired = idlesessions.over(self.caches.values(), self.limits.session_idle_seconds)
        for session in expired:
            session.host.abandon(session)
        if expired:
            # An engine that hangs closes them when it can, and keeps nobody else's from being closed.
            closing = (session.host.close_session(session) for session in expired)
            await asyncio.wait([asyncio.gather(*closing, return_exceptions=True)], timeout=REPORT_SECONDS)
        return len(expired)

    async def demote_idle_sessions(self) -> int:
        """Moves rows of idle sessions down where their cache wants it; returns how many chunks."""
        return await idlesessions.demote(
            self.caches.values(), self.limits.session_idle_seconds, REPORT_SECONDS
        )

    @property
    def longest_idle_seconds(self) -> float:
        """For how long nobody has to say anything: a stream is not older than its sessions may be."""
        idle = self.limits.session_idle_seconds
        return max([idle, *(idlesessions.lasts_seconds(host, idle) for host in self.caches.values())])

    async def tend_candidates(self) -> None:
        """Brings sessions home from engines that no candidate needs any more, and closes those; call it now
        and then."""
        for host in list(self.caches.values()):
            await self._candidates.tend(host, self._locks.hold)

    # --- internal ----------------------------------------------------------------------------------------

    def check_boot(self, boot_id: str) -> None:
        if boot_id != self.boot_id:
            message = f"boot id {boot_id!r} is not {self.boot_id}: the agent restarted or was never seen"
            raise CoreError(Reason.BOOT_ID_MISMATCH, message, {"boot_id": self.boot_id})

    async def _commit(self, record: FenceRecord) -> None:
        await self._in_thread(lambda: self._book.commit(record))

    async def _build(
        self,
        name: CacheName,
        manifest: RuntimeManifest,
        returned: LocalReturn | None,
        key_secret: str,
        place: str,
    ) -> CacheHost:
        tiers = self.tiers.for_manifest(manifest, place)
        engine = await self._in_thread(lambda: self._engine_factory(manifest, tiers, key_secret))
        runner = EngineRunner(PairedEngine(engine, place), name.uid, self.limits.agent_in_flight)
        enforcement = CacheEnforcement(self.clock, returned)
        evidence = self._evidence_factory(self.boot_id)
        blocks = self._blocks_of(engine)
        return CacheHost(name, manifest, runner, enforcement, evidence, self.clock, blocks, key_secret)

    async def _end(self, uid: str) -> int:
        """Ends the cache's engine and its sessions with it. Raises DEADLINE while a running call goes on, of
        the engine or on its blocks; no engine may be built over the same tiers before they have ended."""
        host, ended = self.caches.pop(uid, None), 0
        if host is not None:
            ended = len(host.sessions)
            host.sessions.clear()
            self._ends.begin(uid, host)
        endless = await self._ends.end(uid, self.limits.control_deadline_seconds)
        if not endless and not await self._candidates.ended(uid, CLOSE_SECONDS):
            endless = f"a second engine of cache {uid} does not end"
        if endless:
            self.faults[uid] = f"{Reason.DEADLINE}: {endless}"
            self.changed.set()
            raise CoreError(Reason.DEADLINE, endless)
        return ended

    async def _proof(self, host: CacheHost, nonce: bytes) -> ProofFacts:
        running = (await self._in_thread(host.runner.engine.live_manifest)).digest()
        highest = self._book.highest(host.name.uid)
        in_flight = host.enforcement.in_flight
        return proof_facts(running, candidate_digest(host), in_flight, highest, nonce, self.boot_id)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


def _unchanged(command: Command, kind: CommandKind, host: CacheHost) -> FenceRecord:
    """What a command leaves of a cache's baseline: everything."""
    return record_of(command, kind, host.baseline_digest, host.key_secret, host.admission, place_of(host))


def _same_name(name: CacheName, wanted: CacheName) -> bool:
    return (name.namespace, name.name) == (wanted.namespace, wanted.name)
