"""Gathers what the machine decides on: objects, agents, evidence, and whose turn it is. Writes nothing.

What is kept between calls is a cache of what can be read again. It must not decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvtier_crds.beside import needs_own_engine
from kvtier_crds.manifest import ManifestError, RuntimeManifest
from kvtier_operator.feasible import room_beside
from kvtier_operator.fleet import in_service
from kvtier_operator.ports import ApiError, Deps, JsonObject, Kind, NodeView, NotFound, ObjectKey
from kvtier_operator.revisions import RevisionDamaged, read_revision
from kvtier_operator.rollout.beats import PoolBeats
from kvtier_operator.rollout.cacheview import cache_view
from kvtier_operator.rollout.candidate import (
    Compiled,
    Sources,
    compile_candidate,
    selector_named,
    shape_fault,
    tier_class_names,
    unread_baseline,
)
from kvtier_operator.rollout.effects import Subject
from kvtier_operator.rollout.evaluation import next_due
from kvtier_operator.rollout.feed import MIN_RATE_SECONDS, LookSource
from kvtier_operator.rollout.gateset import ProbeSet
from kvtier_operator.rollout.holders import gone
from kvtier_operator.rollout.inputs import (
    AgentView,
    CacheView,
    CandidateView,
    Inputs,
    Look,
    Notice,
)
from kvtier_operator.rollout.members import Members
from kvtier_operator.rollout.moments import measured, waits
from kvtier_operator.rollout.moves import is_mine, lease_wait, tick_seconds
from kvtier_operator.rollout.observe import (
    RECENT_SECONDS,
    RECENT_SHARE,
    Memory,
    Observer,
    Pool,
    unasked,
)
from kvtier_operator.rollout.pairs import Pair
from kvtier_operator.rollout.probereads import SHARED_SECONDS
from kvtier_operator.rollout.probing import Probing
from kvtier_operator.rollout.readings import reading_of, unopened
from kvtier_operator.rollout.rivals import busy_with, rivals, rivals_now, superseded_by
from kvtier_operator.rollout.salvage import StatusRead, read_status
from kvtier_operator.rollout.shares import spent_shares
from kvtier_operator.rollout.spec import (
    DEFAULT_DEADLINE,
    DEFAULT_LEASE_TTL,
    MAX_LEASE_TTL,
    RolloutSpec,
)
from kvtier_operator.rollout.specreads import SpecRead, SpecReads, asks_to_end, duration_of, kept_for
from kvtier_operator.rollout.state import ManifestRef, RolloutState, Schedule
from kvtier_operator.rollout.status import read_holders
from kvtier_operator.rollout.vocabulary import Blocker, CandidateClass, Phase, Stage
from kvtier_operator.rollout.waiting import WAIT_SECONDS
from kvtier_operator.store import cache_of


@dataclass
class Run:
    """What one call of `reconcile` has learned between its passes. live: the server itself is read, no longer
    the read cache. known: both objects as it has given them since, for the next pass. vouched: the versions
    that were found in the read cache, while pool and look were taken with them. unasked: nobody was asked
    for the pool. aged: of its answers some are older than `RECENT_SECONDS`; anew: none may from now on.
    probes: by ConfigMap."""

    live: bool = False
    known: Pair | None = None
    vouched: tuple[str, str] | None = None
    pool: Pool | None = None
    unasked: bool = False
    aged: bool = False
    anew: bool = False
    look: Look | None = None
    changed: dict[str, AgentView] = field(default_factory=dict)
    tried: set[tuple[str, int, str]] = field(default_factory=set)
    probes: dict[str, ProbeSet] = field(default_factory=dict)
    notices: list[tuple[JsonObject, Notice]] = field(default_factory=list)
    """Of writes that were made and not yet told, with the object that they are about."""


@dataclass
class Kept:
    """Per rollout, between calls: caches only. state: what the version of its status says."""

    memory: Memory = field(default_factory=Memory)
    state: tuple[str, StatusRead] | None = None
    moved: tuple[RolloutState, RolloutState, bool] | None = None
    """Of two states, whether what they say differs in more than times and texts."""
    schedule: Schedule | None = None
    other_verdict: float | None = None
    """Since when, on the monotonic clock, looks at an approved candidate have another than its status."""
    compiled: tuple[object, Compiled] | None = None
    running: tuple[str, RuntimeManifest] | None = None
    read: SpecRead | None = None
    written_at: float = 0.0
    last_look: Look | None = None
    rate: float = 0.0
    unreadable: str = ""
    waits: dict[float, float] = field(default_factory=dict)
    unrenewed: dict[str, float] = field(default_factory=dict)
    """Silent agents out of service, whom nobody renews: since when, on the monotonic clock."""
    firsts: dict[float, tuple[float, float]] = field(default_factory=dict)
    """Of times that were written down: wall and monotonic time at which this process first read them."""
    probing: Probing = field(default_factory=Probing)


@dataclass(frozen=True)
class Facts:
    subject: Subject
    state: RolloutState
    spec: RolloutSpec | None
    compiled: Compiled
    pool: Pool
    inputs: Inputs
    unreadable: str
    """Why the status cannot be read, of a rollout that is deleted; else empty."""


class Gatherer:
    """One per reconciler; calls for one rollout never overlap."""

    def __init__(self, deps: Deps, feed: LookSource) -> None:
        self._deps = deps
        self._feed = feed
        self._observer = Observer(deps.agents)
        self._specs = SpecReads(deps)
        self._beats = PoolBeats(deps.store)
        self._members = Members(deps)

    async def gather(self, pair: Pair, kept: Kept, run: Run) -> Facts:
        key, rollout, cache = pair.key, pair.rollout, pair.cache
        told = _told(rollout, kept)
        state = told.state
        if kept.schedule is not None and state.schedule is not None:
            state = replace(state, schedule=kept.schedule)
        # Written down; from here on the status remembers them, and for how long.
        kept.memory.held -= {one.node for one in state.vanished}
        subject = Subject(key, rollout, pair.cache_key, cache)
        members = await self._members.of(cache, state)
        compiled = await self._compile(key, cache, rollout, kept, state)
        ref = compiled.view.ref or state.candidate
        exact = None if ref is None else ref.kind is CandidateClass.EXACT
        read = await self._spec(key, rollout, kept, exact, run, state)
        parsed, spec = read.parsed, read.parsed.spec
        pool = await self._pool(members, cache, subject.uid, state, spec, kept, run)
        now, steady = self._deps.clock.now().timestamp(), self._deps.clock.monotonic()
        kept.waits = {since: kept.waits.get(since, steady) for since in waits(state)}
        kept.firsts = {at: kept.firsts.get(at, (now, steady)) for at in measured(state)}
        if run.look is None:
            run.look = await self._look(subject, state, spec, pool, now)
            kept.last_look = run.look or kept.last_look
        inputs = Inputs(
            now=now,
            uid=subject.uid,
            name=key.name,
            generation=int(rollout["metadata"].get("generation") or 0),
            spec=spec,
            spec_error=parsed.error,
            intent=parsed.intent,
            spec_blocker=parsed.blocker,
            unread_probes=read.unread,
            unread_baseline=compiled.unread,
            deleting="deletionTimestamp" in rollout["metadata"],
            cache=self._cache_view(cache),
            busy_with="",
            superseded_by="",
            candidate=self._with_room(compiled, cache, state, members, pool, kept),
            agents=pool.views,
            holders=kept.memory.written | kept.memory.held,
            look=run.look,
            last_look=kept.last_look,
            rate=_known_rate(kept, state),
            probe_trouble=kept.probing.trouble,
            quiet_since=self._quiet_since(now),
            waited={since: steady - first for since, first in kept.waits.items()},
            nows={at: wall + steady - then for at, (wall, then) in kept.firsts.items()},
            ttl=kept_for(rollout),
            lease_ttl=duration_of(rollout, "leaseTTL", DEFAULT_LEASE_TTL, MAX_LEASE_TTL),
            older_ttl=told.lease_ttl,
            cache_named=bool(pair.cache_key.name),
        )
        inputs = await self._with_rivals(inputs, state, rollout)
        return Facts(subject, state, spec, compiled, pool, inputs, told.unreadable)

    async def _spec(
        self,
        key: ObjectKey,
        rollout: JsonObject,
        kept: Kept,
        exact: bool | None,
        run: Run,
        state: RolloutState,
    ) -> SpecRead:
        before = kept.read.parsed.spec if kept.read is not None else None
        kept.read = await self._specs.read(
            key,
            rollout,
            kept.read,
            run.probes,
            state=state,
            exact=exact,
            max_age=max(SHARED_SECONDS, self._max_age(state, before) / 2),
            walks=state.holds_candidate
            and not asks_to_end(rollout, state)
            and not self._overdue(rollout, state, kept),
        )
        return kept.read

    def _overdue(self, rollout: JsonObject, state: RolloutState, kept: Kept) -> bool:
        """Whether it returns whatever evidence says."""
        written, length = (
            state.started_at,
            duration_of(rollout, "progressDeadline", DEFAULT_DEADLINE),
        )
        if state.phase is Phase.COMPLETED:
            written, length = state.grant_expires, 0.0
        now, steady = self._deps.clock.now().timestamp(), self._deps.clock.monotonic()
        wall, then = kept.firsts.get(written, (now, steady))
        return wall + steady - then >= written + length

    def _cache_view(self, cache: JsonObject | None) -> CacheView | None:
        """With where its pool's beats lie."""
        view = cache_view(cache)
        if view is None or cache is None:
            return None
        pool = str((cache["spec"].get("poolRef") or {}).get("name", ""))
        return replace(view, beat=self._beats.share(cache["metadata"]["namespace"], pool))

    async def _compile(
        self,
        key: ObjectKey,
        cache: JsonObject | None,
        rollout: JsonObject,
        kept: Kept,
        state: RolloutState,
    ) -> Compiled:
        """With the manifest itself where it begins: nobody asks for it later, and only its bytes are kept."""
        beginning = state.stage is Stage.OFF
        candidate = (rollout.get("spec") or {}).get("candidate")
        if cache is None or not candidate:
            return Compiled(CandidateView())
        fault = shape_fault(candidate)
        if fault:
            return Compiled(CandidateView(None, Blocker.SPEC_INVALID, fault))
        store = self._deps.store
        name = selector_named(candidate, cache)
        selector = store.get(ObjectKey(Kind.KV_SELECTOR, key.namespace, name)) if name else None
        names = tier_class_names(candidate, cache)
        classes = {name: store.get(ObjectKey(Kind.TIER_CLASS, "", name)) for name in names}
        present = {name: obj for name, obj in classes.items() if obj is not None}
        view = cache_view(cache)
        baseline = view.baseline if view else None
        running: RuntimeManifest | None = None
        unread = ""
        if not candidate.get("selectorRef"):
            running, unread = await self._running(key, baseline, kept)
        if unread:
            return unread_baseline(state, unread)
        # Compiling is milliseconds of validation; its inputs are these versions and nothing else.
        sources = [cache, rollout, *([selector] if selector else []), *present.values()]
        versions = (
            beginning,
            baseline,
            running is None,
            *((obj["metadata"]["uid"], obj["metadata"].get("generation")) for obj in sources),
        )
        if kept.compiled is None or kept.compiled[0] != versions:
            fresh = compile_candidate(candidate, Sources(cache, baseline, running, name, selector, present))
            kept.compiled = versions, fresh if beginning else replace(fresh, manifest=None)
        compiled = kept.compiled[1]
        digest = compiled.view.ref.digest if compiled.view.ref else ""
        rows = (cache.get("status") or {}).get("digestBudget") or []
        prior = spent_shares(rows, digest) if digest else 0
        return replace(compiled, view=replace(compiled.view, prior_shares=prior))

    def _with_room(
        self,
        compiled: Compiled,
        cache: JsonObject | None,
        state: RolloutState,
        members: list[NodeView],
        pool: Pool,
        kept: Kept,
    ) -> CandidateView:
        """Before it starts, whether an engine of its own fits on each node that would hold it. Later it has
        what it needs, or the agent has refused it."""
        wanted, running = compiled.manifest, kept.running
        if state.stage is not Stage.OFF or cache is None or wanted is None or running is None:
            return compiled.view
        if not needs_own_engine(running[1], wanted):
            return compiled.view
        store, namespace = self._deps.store, cache["metadata"]["namespace"]
        owner = store.get(ObjectKey(Kind.AGENT_POOL, namespace, cache["spec"]["poolRef"]["name"]))
        if owner is None:
            return compiled.view
        chosen = {view.node for view in pool.views if view.selected}
        nodes = [view for view in members if view.live and view.target.name in chosen]
        others = store.list_all(Kind.KV_CACHE, namespace)
        rollouts = store.list_all(Kind.KV_ROLLOUT, namespace)
        found = room_beside(wanted, running[1], cache, owner, nodes, others, rollouts)
        return replace(compiled.view, no_room=found.condition().message if found.problems else "")

    async def _running(
        self, key: ObjectKey, baseline: ManifestRef | None, kept: Kept
    ) -> tuple[RuntimeManifest | None, str]:
        """The baseline's manifest, which never changes under its digest; None when there is none that is
        whole, or it cannot be read, and then why."""
        if baseline is None:
            return None, ""
        if kept.running is None or kept.running[0] != baseline.digest:
            where = ObjectKey(Kind.CONTROLLER_REVISION, key.namespace, baseline.revision)
            try:
                revision = read_revision(await self._deps.api.get(where))
                if revision.digest != baseline.digest:
                    return None, ""
                kept.running = baseline.digest, RuntimeManifest.parse(revision.data)
            except (NotFound, RevisionDamaged, ManifestError):
                return None, ""
            except ApiError as error:
                return None, f"ControllerRevision {where.name} cannot be read: {error.status} {error.reason}"
        return kept.running[1], ""

    async def _pool(
        self,
        members: list[NodeView],
        cache: JsonObject | None,
        uid: str,
        state: RolloutState,
        spec: RolloutSpec | None,
        kept: Kept,
        run: Run,
    ) -> Pool:
        if cache is None:
            return Pool((), {})
        # One that has returned holds nothing, and thousands may stay for days: another attempt asks.
        back = state.phase in (Phase.ROLLING_BACK, Phase.ROLLED_BACK) or state.revoking is not None
        if run.unasked and not back:
            run.pool = None
            run.changed.clear()
        if run.pool is None:
            run.unasked = back
            if back:
                run.pool, run.aged = unasked(members, kept.memory), False
            else:
                # Whoever goes on to another step there asks anew, and is not the only one.
                on_a_beat = _waits_off(state) or self._on_a_beat(state, spec)
                max_age = RECENT_SECONDS if run.anew else self._max_age(state, spec)
                run.pool = await self._observer.observe(
                    members,
                    cache_uid=cache["metadata"]["uid"],
                    rollout_uid=uid,
                    state=state,
                    max_nodes=spec.blast_radius.max_nodes if spec else 0,
                    memory=kept.memory,
                    max_age=max_age,
                    on_a_beat=on_a_beat,
                    ended=self._ended(members, state, spec, kept),
                )
                run.aged = run.pool.age > RECENT_SECONDS
        views = tuple(run.changed.get(view.node, view) for view in run.pool.views)
        return Pool(views, run.pool.targets)

    def _ended(
        self, members: list[NodeView], state: RolloutState, spec: RolloutSpec | None, kept: Kept
    ) -> frozenset[str]:
        """Silent agents whose lease cannot last any more, by what this process has waited for them. One that
        is in service is renewed, though it says nothing: its lease does not end before it is not."""
        wait = lease_wait(spec.lease_ttl if spec is not None else MAX_LEASE_TTL)
        steady, led = self._deps.clock.monotonic(), self._deps.leader.leading_since()
        # Another leader may have renewed it since, if it was in service meanwhile.
        least = steady if led is None else led
        silent = {one.node for one in state.lost}
        out = {member.target.name for member in members if not in_service(member)} & silent
        kept.unrenewed = {node: max(least, kept.unrenewed.get(node, steady)) for node in out}
        return frozenset(node for node, since in kept.unrenewed.items() if steady - since >= wait)

    def _on_a_beat(self, state: RolloutState, spec: RolloutSpec | None) -> bool:
        """Whether evidence is due, for which other rollouts of the pool look at the same moment."""
        now = self._deps.clock.now().timestamp()
        return spec is not None and state.schedule is not None and now >= next_due(state, spec, now)

    def _max_age(self, state: RolloutState, spec: RolloutSpec | None) -> float:
        """Of what an agent said to others: see `observe.RECENT_SHARE`."""
        if _waits_off(state):
            return max(RECENT_SECONDS, WAIT_SECONDS * RECENT_SHARE)
        if spec is None or not self._on_a_beat(state, spec):
            return RECENT_SECONDS
        return max(RECENT_SECONDS, tick_seconds(spec) * RECENT_SHARE)

    async def _look(
        self,
        subject: Subject,
        state: RolloutState,
        spec: RolloutSpec | None,
        pool: Pool,
        now: float,
    ) -> Look | None:
        """The evidence, when its tick is due and the two fences agree."""
        if state.stage is Stage.EXACT_BASELINE:
            # Nobody reads its window any more, and it stays for days; another attempt begins another.
            self._feed.forget(subject.uid)
        if spec is None or now < next_due(state, spec, now):
            return None
        reading = reading_of(subject, state, spec, pool)
        if reading is None:
            return None
        if state.schedule is None and unopened(state, subject.uid, pool):
            reading = replace(reading, unopened=True)
        return await self._feed.look(reading, state, spec, now)

    def expect(self, facts: Facts, state: RolloutState) -> None:
        """What the next look will ask, as far as this one knows it. state: as it goes on from here."""
        reading = None
        if facts.spec is not None and state.schedule is not None:
            reading = reading_of(facts.subject, state, facts.spec, facts.pool)
        due_at = state.schedule.due_at if state.schedule is not None else 0.0
        self._feed.expect(facts.subject.uid, reading, due_at)

    def _quiet_since(self, now: float) -> float:
        """Wall time at which this process became leader."""
        since = self._deps.leader.leading_since()
        return now if since is None else now - max(0.0, self._deps.clock.monotonic() - since)

    async def _with_rivals(self, inputs: Inputs, state: RolloutState, rollout: JsonObject) -> Inputs:
        """Before a start, and when something happened to an approval, the server itself is asked; else the
        watch cache will do. So it will for one that waits for another: of a thousand that wait, each would
        list all of them."""
        namespace, cache = rollout["metadata"]["namespace"], cache_of(rollout)
        others = rivals(rollout, self._deps.store.rollouts_of(namespace, cache))
        # While an older candidate is revoked nothing begins, whoever else waits.
        starting = state.stage is Stage.OFF and state.revoking is None and inputs.candidate.ref is not None
        starting = starting and not busy_with(rollout, others)
        if state.phase is Phase.COMPLETED and inputs.cache is not None:
            starting = inputs.cache.fence != state.fence or not is_mine(inputs.cache, inputs)
        if starting:
            others = await rivals_now(self._deps.api, rollout)
        approved = inputs.cache.approved if inputs.cache is not None else None
        uid = approved.rollout_uid if approved is not None else ""
        owner = next((one for one in (rollout, *others) if one["metadata"]["uid"] == uid), None)
        told, least = (owner or {}).get("status") or {}, DEFAULT_LEASE_TTL if owner else MAX_LEASE_TTL
        vanished = [str(row["node"]) for row in told.get("vanished") or []]
        if approved is not None:
            # Its own pass may not have seen yet that they are gone.
            vanished += gone(read_holders(told), approved.rollout_uid, inputs.agents)
        return replace(
            inputs,
            # The longest legal one when it is not there any more.
            approved_ttl=duration_of(owner or {}, "leaseTTL", least, MAX_LEASE_TTL),
            approved_vanished=tuple(dict.fromkeys(vanished)),
            busy_with=busy_with(rollout, others),
            superseded_by=superseded_by(rollout, others, completed=state.phase is Phase.COMPLETED),
        )


def _told(rollout: JsonObject, kept: Kept) -> StatusRead:
    """Parsed once a version."""
    version = str(rollout["metadata"].get("resourceVersion"))
    if kept.state is None or kept.state[0] != version:
        kept.state = version, read_status(rollout)
    return kept.state[1]


def _waits_off(state: RolloutState) -> bool:
    """Whether it was found that it cannot begin: it comes again behind its pool's beats, and asks anew before
    it begins."""
    return state.phase is Phase.PENDING and state.blocker is not Blocker.NONE and state.revoking is None


def _known_rate(kept: Kept, state: RolloutState) -> float:
    """Requests a second. A window that is too young to tell leaves what the one before has told, or each step
    would begin as if nobody knew."""
    look, window = kept.last_look, state.window
    if look is not None:
        mine = window is not None and look.opening_fence == window.opening_fence
        told = mine and window is not None and look.at - window.opened_at >= MIN_RATE_SECONDS
        if told or look.requests_per_second > 0.0:
            kept.rate = look.requests_per_second
    return kept.rate
