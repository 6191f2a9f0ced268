"""KVCache: compiles the baseline, keeps it on every node of the pool, and says how that stands.

Order of an adoption: ControllerRevision, then status (baseline and fence by compare-and-swap), then agents;
a crash in between leaves something that the next reconcile completes. The fence belongs to whoever swaps it;
the status that is applied here never holds it. Stages, grants and evidence are the rollout's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from kvtier_crds.manifest import ManifestError, RuntimeManifest
from kvtier_crds.models.common import short_digest
from kvtier_crds.quantity import parse_duration
from kvtier_operator.budgets import budget_entries, budgets_of, budgets_of_others, declared_budgets
from kvtier_operator.events import post_changes
from kvtier_operator.feasible import (
    Feasibility,
    admission_of,
    feasibility,
    key_secret,
    unsupported,
)
from kvtier_operator.ports import (
    CACHE_FINALIZER,
    Deps,
    Done,
    EventType,
    JsonObject,
    Kind,
    NodeView,
    NotFound,
    ObjectKey,
    ReconcileOutcome,
    Requeue,
    add_op,
    expect_op,
    remove_op,
)
from kvtier_operator.reconcile.kvcache_nodes import Baseline, CacheNodes, NodeResult, cache_ref
from kvtier_operator.reconcile.kvcache_orphans import ORPHAN_SECONDS, OrphanedApprovals, owns
from kvtier_operator.reconcile.kvcache_plan import (
    OWNED,
    Findings,
    Standing,
    ledger_moved,
    ledger_of,
    status,
)
from kvtier_operator.reconcile.kvcache_refs import Resolved, declared, resolve
from kvtier_operator.reconcile.status import write_status
from kvtier_operator.revisions import (
    Revision,
    RevisionDamaged,
    Role,
    read_revision,
    revision_manifest,
    selector_for,
    undamaged,
)
from kvtier_operator.rollout.beats import AFTER_BEAT_SECONDS, PoolBeats, next_beat
from kvtier_operator.rollout.moves import MAX_TICK, lease_wait

_log = logging.getLogger(__name__)

INITIAL_FENCE = 1
QUIET_SECONDS = 60.0
RETRY_SECONDS = 3.0
AGAIN_SECONDS = 0.05
LEDGER_SECONDS = 60.0
REMOVAL_GRACE = 66.0
FINISHED_PHASES = ("Completed", "RolledBack", "Invalid")
EVENT_CONDITIONS = ("Ready", "Feasible", "SpecApplied", "BaselineVerified", "Degraded")


@dataclass(frozen=True)
class _Adopted:
    """The baseline in force: its manifest, its canonical bytes and the fence that goes with it."""

    manifest: RuntimeManifest
    data: bytes
    fence: int


class KVCacheReconciler:
    kind = Kind.KV_CACHE

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._nodes = CacheNodes(deps)
        self._orphans = OrphanedApprovals(deps)
        self._beats = PoolBeats(deps.store)
        self._ledger_written: dict[str, float] = {}
        # By cache, its baseline's digest and bytes.
        self._revisions: dict[str, tuple[str, bytes]] = {}
        # By cache, the digest whose label was looked at, and the term of leading in which it was.
        self._labelled: dict[str, tuple[str, float | None]] = {}
        self._removal_fence: dict[str, int] = {}
        # Of a cache that is deleted, when this process first saw that, on the monotonic clock.
        self._leaving: dict[str, float] = {}
        self._overtaken: dict[str, int] = {}
        self._uids: dict[ObjectKey, str] = {}

    async def reconcile(self, key: ObjectKey) -> ReconcileOutcome:
        cache = self._deps.store.get(key)
        self._meet(key, "" if cache is None else _uid(cache))
        if cache is None:
            return Done()
        if "deletionTimestamp" in cache["metadata"]:
            return await self._delete(key, cache)
        if CACHE_FINALIZER not in (cache["metadata"].get("finalizers") or []):
            await self._add_finalizer(key, cache)
        if await self._orphans.end(key, cache):
            return Requeue(AGAIN_SECONDS, "its number is its own again")
        resolved = resolve(cache, self._deps.store)
        views = self._views(cache)
        feasible = self._feasible(cache, resolved, views)
        damaged = ""
        adopted: _Adopted | None = None
        try:
            adopted = await self._baseline(key, cache, resolved, feasible, views)
        except RevisionDamaged as error:
            damaged = str(error)
        rollout = self._owned_by_rollout(cache)
        results, fence = await self._converge(key, cache, adopted, views, feasible, rollout=rollout)
        if adopted is not None and fence > adopted.fence and self._overtakes(cache):
            # Told again at once under the number that has just been taken, unless a rollout has it by now.
            rollout, adopted = self._owned_by_rollout(cache), replace(adopted, fence=fence)
            cache = {**cache, "status": {**cache["status"], "fence": fence}}
            results, _ = await self._converge(
                key, cache, adopted, views, feasible, rollout=rollout, again=True
            )
        findings = Findings(
            cache=cache,
            missing=resolved.missing,
            wanted=declared(resolved.wanted, None if adopted is None else adopted.manifest, cache),
            baseline=None if adopted is None else adopted.manifest,
            approved_digest=((cache.get("status") or {}).get("approved") or {}).get("digest", ""),
            feasibility=feasible,
            nodes=tuple(result.finding for result in results),
            damaged=damaged,
        )
        await self._write(cache, findings)
        return self._next(findings)

    # --- the baseline ----------------------------------------------------------------------------------

    async def _baseline(
        self,
        key: ObjectKey,
        cache: JsonObject,
        resolved: Resolved,
        feasible: Feasibility,
        views: list[NodeView],
    ) -> _Adopted | None:
        current = cache.get("status") or {}
        if current.get("baseline"):
            reference = current["baseline"]
            revision = await self._read(key, _uid(cache), reference["revision"], reference["digest"])
            await self._keep_label(cache, revision)
            adopted = _adopted(revision, int(current.get("fence") or INITIAL_FENCE))
            await self._keep_budgets(key, cache, adopted.manifest)
            return adopted
        kept = await self._kept_baseline(cache)
        if kept is not None:
            fence = 1 + max(
                int(current.get("fence") or 0), await self._nodes.highest_fence(views, _uid(cache))
            )
            rebuilt = _adopted(kept, fence)
            await self._swap_in(key, cache, rebuilt.manifest, kept.key.name, fence)
            await self._deps.api.event(
                cache,
                EventType.WARNING,
                "StatusRebuilt",
                f"status.baseline was lost; rebuilt from ControllerRevision {kept.key.name}, fence {fence}",
            )
            return rebuilt
        exact = resolved.exact
        if exact is None or resolved.pool is None or feasible.problems or cache["spec"].get("suspend"):
            return None
        data, digest = exact.canonical(), exact.digest()
        fence = max(INITIAL_FENCE, int(current.get("fence") or 0) + 1)
        manifest = revision_manifest(cache, data, digest, Role.BASELINE, fence)
        revision = read_revision(await self._deps.api.apply(manifest))
        await self._swap_in(key, cache, exact, revision.key.name, fence)
        await self._deps.api.event(
            cache, EventType.NORMAL, "BaselineAdopted", f"{digest} in ControllerRevision {revision.key.name}"
        )
        return _adopted(revision, fence)

    async def _swap_in(
        self, key: ObjectKey, cache: JsonObject, manifest: RuntimeManifest, revision: str, fence: int
    ) -> None:
        """Raises Conflict when the status has gone on since it was read."""
        digest = manifest.digest()
        baseline: JsonObject = {"digest": digest, "short": short_digest(digest), "revision": revision}
        baseline["budgets"] = budget_entries(budgets_of(manifest))
        current = cache.get("status")
        ops = [expect_op("/metadata/uid", _uid(cache))]
        if current is None:
            ops += [expect_op("/status", None), add_op("/status", {"baseline": baseline, "fence": fence})]
        else:
            ops += [
                expect_op("/status/baseline", None),
                expect_op("/status/fence", current.get("fence")),
                add_op("/status/baseline", baseline),
                add_op("/status/fence", fence),
            ]
        await self._deps.api.compare_and_swap(key, ops)

    async def _keep_budgets(self, key: ObjectKey, cache: JsonObject, manifest: RuntimeManifest) -> None:
        """Beside a baseline that an earlier version wrote, where the spec does not say them: the rollout that
        brought them may go. Raises Conflict."""
        reference, budgets = cache["status"]["baseline"], budgets_of(manifest)
        if reference.get("budgets") or dict(budgets) == declared_budgets(cache):
            return
        ops = [
            expect_op("/metadata/uid", _uid(cache)),
            expect_op("/status/baseline/digest", reference["digest"]),
            add_op("/status/baseline/budgets", budget_entries(budgets)),
        ]
        await self._deps.api.compare_and_swap(key, ops)

    async def _kept_baseline(self, cache: JsonObject) -> Revision | None:
        """The newest revision labelled as baseline, when there is one: the status has been lost."""
        objects = await self._deps.api.list_all(
            Kind.CONTROLLER_REVISION, cache["metadata"]["namespace"], selector_for(_uid(cache))
        )
        revisions = [read_revision(obj) for obj in objects]
        baselines = [revision for revision in revisions if revision.role is Role.BASELINE]
        return max(baselines, key=lambda revision: (revision.number, revision.key.name), default=None)

    async def _read(self, key: ObjectKey, uid: str, name: str, digest: str) -> Revision:
        """A cache's revision by name, from memory when its digest was the last: it is immutable."""
        where = ObjectKey(Kind.CONTROLLER_REVISION, key.namespace, name)
        known = self._revisions.get(uid)
        if known is not None and known[0] == digest:
            return Revision(where, digest, Role.BASELINE, 0, known[1])
        try:
            revision = read_revision(await self._deps.api.get(where))
        except NotFound as error:
            raise RevisionDamaged(f"ControllerRevision {name} of status.baseline does not exist") from error
        if revision.digest != digest:
            raise RevisionDamaged(f"ControllerRevision {name} holds {revision.digest}, not {digest}")
        self._revisions[uid] = digest, revision.data
        return revision

    async def _keep_label(self, cache: JsonObject, revision: Revision) -> None:
        """The newest revision labelled baseline is the one that `status.baseline` names, also after a rollout
        has replaced it: the labels are what a lost status is rebuilt from. Looked at once a digest, and
        again in each term: another leader may have labelled others meanwhile."""
        looked_at = revision.digest, self._deps.leader.leading_since()
        if self._labelled.get(_uid(cache)) == looked_at:
            return
        objects = await self._deps.api.list_all(
            Kind.CONTROLLER_REVISION, cache["metadata"]["namespace"], selector_for(_uid(cache))
        )
        known = {found.digest: found for found in undamaged(objects)}
        rivals = [found for found in known.values() if found.role is Role.BASELINE]
        newest = max((found.number for found in rivals if found.digest != revision.digest), default=-1)
        mine = known.get(revision.digest)
        if mine is None or mine.role is not Role.BASELINE or mine.number <= newest:
            number = 1 + max((found.number for found in known.values()), default=0)
            wanted = revision_manifest(cache, revision.data, revision.digest, Role.BASELINE, number)
            await self._deps.api.apply(wanted)
        self._labelled[_uid(cache)] = looked_at

    # --- nodes -------------------------------------------------------------------------------------------

    async def _converge(
        self,
        key: ObjectKey,
        cache: JsonObject,
        adopted: _Adopted | None,
        views: list[NodeView],
        feasible: Feasibility,
        *,
        rollout: bool,
        again: bool = False,
    ) -> tuple[list[NodeResult], int]:
        """What came of it at each node, and the number in force after it. again: a moment after the last."""
        baseline = None
        if adopted is not None and not cache["spec"].get("suspend"):
            baseline = Baseline(
                cache_ref(cache),
                adopted.manifest.digest(),
                adopted.data,
                adopted.fence,
                key_secret(cache),
                admission_of(cache, adopted.manifest),
            )
        results = await self._nodes.converge(views, baseline, uid=_uid(cache), rollout=rollout, again=again)
        fence = 0 if adopted is None else adopted.fence
        refused = [result for result in results if result.fence_refused]
        if refused and adopted is not None and not rollout:
            # No rollout owns the number now, so it may advance.
            highest = max(fence, *(result.highest_fence for result in refused))
            fence = await self._advance_fence(key, cache, highest + 1)
        return results, fence

    def _overtakes(self, cache: JsonObject) -> bool:
        """Agents refused only the number, and a higher one was taken: an edit of what they are told of a
        cache has none of its own. Whether nobody need hear of it: unless it happens twice for one edit."""
        generation = int(cache["metadata"].get("generation") or 1)
        again = self._overtaken.get(_uid(cache)) == generation
        self._overtaken[_uid(cache)] = generation
        return not again

    async def _advance_fence(self, key: ObjectKey, cache: JsonObject, to: int) -> int:
        """This run goes on with the new number, or comes again in a moment: it need not be woken for it."""
        before, asked = (cache.get("status") or {}).get("fence"), self._deps.clock.monotonic()
        moved = await self._deps.api.compare_and_swap(
            key,
            [
                expect_op("/metadata/uid", _uid(cache)),
                expect_op("/status/fence", before),
                add_op("/status/fence", to),
            ],
        )
        self._deps.reads.note(key, moved, asked)
        self._deps.reads.wrote(key, moved, key)
        return to

    def _views(self, cache: JsonObject) -> list[NodeView]:
        return self._deps.fleet.members(cache["metadata"]["namespace"], cache["spec"]["poolRef"]["name"])

    def _feasible(self, cache: JsonObject, resolved: Resolved, views: list[NodeView]) -> Feasibility:
        problems = (*unsupported(cache), *resolved.problems)
        if resolved.exact is None or resolved.pool is None:
            return Feasibility(0, problems)
        store, namespace = self._deps.store, _namespace(cache)
        caches, rollouts = (store.list_all(kind, namespace) for kind in (Kind.KV_CACHE, Kind.KV_ROLLOUT))
        others = budgets_of_others(cache, caches, rollouts)
        found = feasibility(resolved.exact, cache, resolved.pool, views, others)
        return Feasibility(found.nodes, (*problems, *found.problems))

    def _owned_by_rollout(self, cache: JsonObject) -> bool:
        """Whether a grant may be out under the current fence: of an unfinished or an approved rollout."""
        if (cache.get("status") or {}).get("approved"):
            return True
        return any(
            (rollout.get("status") or {}).get("phase", "Pending") not in FINISHED_PHASES
            and (rollout.get("status") or {}).get("fence")
            for rollout in self._rollouts(cache)
        )

    # --- the status --------------------------------------------------------------------------------------

    async def _write(self, cache: JsonObject, findings: Findings) -> None:
        uid, clock = _uid(cache), self._deps.clock
        before = (cache.get("status") or {}).get("ledger") or []
        now = clock.monotonic()
        last = self._ledger_written.get(uid)
        due = last is None or now - last >= LEDGER_SECONDS
        fresh = due and ledger_moved(before, ledger_of(findings))
        wanted = status(findings, clock.now(), fresh_ledger=fresh)
        if await write_status(self._deps.api, cache, wanted, OWNED):
            await post_changes(self._deps.api, cache, wanted["conditions"], EVENT_CONDITIONS)
            if fresh:
                self._ledger_written[uid] = now

    def _next(self, findings: Findings) -> ReconcileOutcome:
        chance = self._deps.randomness()
        settled = (Standing.PROVED, Standing.LOST)
        if findings.baseline is None or all(node.standing in settled for node in findings.nodes):
            # All caches and rollouts of a pool ask the same agents: one answer serves those of one moment.
            cache = findings.cache
            share = self._beats.share(_namespace(cache), cache["spec"]["poolRef"]["name"])
            now = self._deps.clock.now().timestamp()
            beat = next_beat(share, MAX_TICK, now + QUIET_SECONDS * (0.8 + 0.2 * chance))
            return Requeue(beat + AFTER_BEAT_SECONDS - now, "looks again at what agents run")
        return Requeue(RETRY_SECONDS * (0.8 + 0.4 * chance), "not every node has proved the baseline")

    # --- the end -----------------------------------------------------------------------------------------

    async def _add_finalizer(self, key: ObjectKey, cache: JsonObject) -> None:
        present = cache["metadata"].get("finalizers")
        ops = [expect_op("/metadata/uid", _uid(cache)), expect_op("/metadata/finalizers", present)]
        ops.append(add_op("/metadata/finalizers", [*(present or []), CACHE_FINALIZER]))
        await self._deps.api.compare_and_swap(key, ops, subresource="")

    async def _delete(self, key: ObjectKey, cache: JsonObject) -> ReconcileOutcome:
        """A higher fence first, so that nothing of an earlier time is accepted; then every agent forgets the
        cache; then the finalizer. A node that cannot be asked is waited for as long as a lease may last, by
        what this process has waited: the deletion's time is of another machine's clock."""
        finalizers = cache["metadata"].get("finalizers") or []
        uid = _uid(cache)
        if CACHE_FINALIZER not in finalizers:
            return Done()
        since = self._leaving.setdefault(uid, self._deps.clock.monotonic())
        left: dict[str, str] = {}
        erased: dict[str, int] = {}
        crypto_erase = bool((cache["spec"].get("deletion") or {}).get("cryptoErase"))
        if (cache.get("status") or {}).get("baseline"):
            fence = self._removal_fence.get(uid)
            if fence is None:
                views = self._views(cache)
                highest = await self._nodes.highest_fence(views, uid)
                fence = 1 + max(highest, int(cache["status"].get("fence") or 0))
                self._removal_fence[uid] = await self._advance_fence(key, cache, fence)
            left, erased = await self._nodes.remove(
                self._views(cache), cache_ref(cache), fence, receipts=crypto_erase
            )
        if left and self._deps.clock.monotonic() - since < self._removal_grace(cache):
            return Requeue(RETRY_SECONDS, f"not removed on {len(left)} nodes")
        if left:
            names = ", ".join(f"{name} ({reason})" for name, reason in sorted(left.items())[:6])
            await self._deps.api.event(
                cache,
                EventType.WARNING,
                "RemovedWithoutNodes",
                f"not removed on {names}; it will be when they are back",
            )
        if erased:
            names = ", ".join(f"{name} ({count})" for name, count in sorted(erased.items())[:6])
            more = f" and {len(erased) - 6} more" if len(erased) > 6 else ""
            await self._deps.api.event(
                cache, EventType.NORMAL, "KeysErased", f"data keys overwritten, durably: {names}{more}"
            )
        index = finalizers.index(CACHE_FINALIZER)
        try:
            await self._deps.api.compare_and_swap(
                key,
                [
                    expect_op("/metadata/uid", uid),
                    expect_op(f"/metadata/finalizers/{index}", CACHE_FINALIZER),
                    remove_op(f"/metadata/finalizers/{index}"),
                ],
                subresource="",
            )
        except NotFound:
            _log.debug("gone already", extra={"object": str(key)})
        self._forget(uid)
        return Done()

    def _meet(self, key: ObjectKey, uid: str) -> None:
        """Forgets another object that had this name: it may have gone without our finalizer being asked."""
        before = self._uids.pop(key, "")
        if uid:
            self._uids[key] = uid
        if before and before != uid:
            self._forget(before)

    def _forget(self, uid: str) -> None:
        self._nodes.forget(uid)
        self._orphans.forget(uid)
        self._removal_fence.pop(uid, None)
        self._leaving.pop(uid, None)
        self._ledger_written.pop(uid, None)
        self._labelled.pop(uid, None)
        self._revisions.pop(uid, None)
        self._overtaken.pop(uid, None)

    def _rollouts(self, cache: JsonObject) -> list[JsonObject]:
        return self._deps.store.rollouts_of(_namespace(cache), cache["metadata"]["name"])

    def _removal_grace(self, cache: JsonObject) -> float:
        """As long as a lease may last: by the longest TTL that a rollout of this cache declares, and by the
        longest legal one where the rollout of an approval is gone or says none that can be read."""
        rollouts = self._rollouts(cache)
        waits = [REMOVAL_GRACE]
        for rollout in rollouts:
            text = rollout["spec"].get("leaseTTL")
            try:
                waits += [lease_wait(parse_duration(text, "spec.leaseTTL"))] if text else []
            except ValueError:
                waits.append(ORPHAN_SECONDS)
        approved = (cache.get("status") or {}).get("approved")
        if approved and not any(owns(rollout, approved) for rollout in rollouts):
            waits.append(ORPHAN_SECONDS)
        return max(waits)


def _adopted(revision: Revision, fence: int) -> _Adopted:
    try:
        manifest = RuntimeManifest.parse(revision.data)
    except ManifestError as error:
        raise RevisionDamaged(f"ControllerRevision {revision.key.name}: {error}") from error
    return _Adopted(manifest, revision.data, fence)


def _uid(cache: JsonObject) -> str:
    return str(cache["metadata"]["uid"])


def _namespace(cache: JsonObject) -> str:
    return str(cache["metadata"]["namespace"])


__all__ = ["KVCacheReconciler"]
