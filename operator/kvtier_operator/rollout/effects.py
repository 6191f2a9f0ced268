"""The writes of a rollout, one function each: fence, status, approval, revision, finalizer.

Every write is a compare-and-swap or an idempotent apply, so any of them may be the last before a crash. It
must not decide what is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from kvtier_crds.models.common import short_digest
from kvtier_operator.budgets import budget_entries
from kvtier_operator.ports import (
    ROLLOUT_FINALIZER,
    JsonObject,
    Kind,
    KubeApi,
    NotFound,
    ObjectKey,
    PatchOp,
    add_op,
    expect_op,
    remove_op,
)
from kvtier_operator.revisions import Role, read_revision, revision_manifest, revision_name, selector_for
from kvtier_operator.rollout.grants import evidence_of, plain
from kvtier_operator.rollout.inputs import FenceMove
from kvtier_operator.rollout.shares import budget_rows
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.status import format_stamp, to_status


@dataclass(frozen=True)
class Subject:
    """The two objects a rollout writes, as last read."""

    key: ObjectKey
    rollout: JsonObject
    cache_key: ObjectKey
    cache: JsonObject | None

    @property
    def uid(self) -> str:
        return str(self.rollout["metadata"]["uid"])


async def move_fence(
    api: KubeApi, subject: Subject, move: FenceMove, state: RolloutState, spec: RolloutSpec | None
) -> JsonObject:
    """The KVCache as written. Raises Conflict when the fence or the cache is not what it was."""
    cache = subject.cache
    if cache is None:
        raise ValueError("a fence needs its KVCache")
    status = cache.get("status") or {}
    ops: list[PatchOp] = [expect_op("/metadata/uid", cache["metadata"]["uid"])]
    if not status:
        ops += [expect_op("/status", None), add_op("/status", {})]
    ops += [expect_op("/status/fence", status.get("fence")), add_op("/status/fence", move.new)]
    if move.approve is not None and spec is not None:
        ops.append(add_op("/status/approved", approval(subject, state, spec, move.approve.grant_expires)))
    elif move.clear_approved and status.get("approved"):
        ops.append(remove_op("/status/approved"))
    if move.shares and state.candidate is not None:
        rows = budget_rows(status.get("digestBudget") or [], state.candidate.digest, move.shares)
        ops.append(add_op("/status/digestBudget", rows))
    if move.adopt:
        ops += adoption(state, status)
    return await api.compare_and_swap(subject.cache_key, ops)


def adoption(state: RolloutState, status: JsonObject) -> list[PatchOp]:
    """The exact candidate takes the baseline's place, if that is still the one it was measured against.
    status: of the KVCache, as last read. A candidate that shares the baseline's engine keeps its budgets."""
    if state.candidate is None or state.baseline is None:
        raise ValueError("nothing to adopt")
    digest = state.candidate.digest
    baseline: JsonObject = {
        "digest": digest,
        "short": short_digest(digest),
        "revision": state.candidate.revision,
    }
    budgets = budget_entries(state.candidate.budgets) or (status.get("baseline") or {}).get("budgets")
    if budgets:
        baseline["budgets"] = budgets
    return [
        expect_op("/status/baseline/digest", state.baseline.digest),
        add_op("/status/baseline", baseline),
    ]


def approval(subject: Subject, state: RolloutState, spec: RolloutSpec, expires: float) -> JsonObject:
    """`status.approved` of the KVCache."""
    if state.candidate is None:
        raise ValueError("nothing to approve")
    radius = spec.blast_radius
    limits: JsonObject = {}
    if radius.tenants:
        limits["tenants"] = list(radius.tenants)
    if radius.request_classes:
        limits["requestClasses"] = list(radius.request_classes)
    if radius.max_nodes:
        limits["maxNodes"] = radius.max_nodes
    body: JsonObject = {
        "digest": state.candidate.digest,
        "short": short_digest(state.candidate.digest),
        "revision": state.candidate.revision,
        "rollout": subject.key.name,
        "holdback": plain(Decimal(spec.holdback)),
        "evidence": evidence_of(subject.uid, state, spec),
        "grantExpires": format_stamp(expires),
    }
    return {**body, "blastRadius": limits} if limits else body


async def extend_approval(
    api: KubeApi, subject: Subject, state: RolloutState, spec: RolloutSpec, expires: float
) -> None:
    """Moves the end of the long grant, and says what is approved now; no fence: no permission changes."""
    ops = [
        expect_op("/status/fence", state.fence),
        expect_op("/status/approved/rollout", subject.key.name),
        add_op("/status/approved", approval(subject, state, spec, expires)),
    ]
    await api.compare_and_swap(subject.cache_key, ops)


async def withdraw_approval(api: KubeApi, subject: Subject, state: RolloutState) -> None:
    """Ends this rollout's approval, under the fence that its return to the baseline is written with."""
    ops = [
        expect_op("/status/fence", state.fence),
        expect_op("/status/approved/rollout", subject.key.name),
        remove_op("/status/approved"),
    ]
    await api.compare_and_swap(subject.cache_key, ops)


async def write_status(
    api: KubeApi, subject: Subject, state: RolloutState, deadline_seconds: float
) -> JsonObject:
    """Replaces the status of exactly the object that was read; Conflict when it has changed since."""
    status = to_status(state, deadline_seconds=deadline_seconds)
    version = subject.rollout["metadata"]["resourceVersion"]
    ops = [expect_op("/metadata/resourceVersion", version), add_op("/status", status)]
    return await api.compare_and_swap(subject.key, ops)


async def add_finalizer(api: KubeApi, subject: Subject) -> None:
    present = subject.rollout["metadata"].get("finalizers")
    ops = [
        expect_op("/metadata/uid", subject.uid),
        expect_op("/metadata/finalizers", present),
        add_op("/metadata/finalizers", [*(present or []), ROLLOUT_FINALIZER]),
    ]
    await api.compare_and_swap(subject.key, ops, subresource="")


async def drop_finalizer(api: KubeApi, subject: Subject) -> None:
    """Gone already is success."""
    present = subject.rollout["metadata"].get("finalizers") or []
    if ROLLOUT_FINALIZER not in present:
        return
    index = present.index(ROLLOUT_FINALIZER)
    ops = [
        expect_op("/metadata/uid", subject.uid),
        expect_op(f"/metadata/finalizers/{index}", ROLLOUT_FINALIZER),
        remove_op(f"/metadata/finalizers/{index}"),
    ]
    try:
        await api.compare_and_swap(subject.key, ops, subresource="")
    except NotFound:
        return


async def keep_revision(api: KubeApi, cache: JsonObject, data: bytes, digest: str, role: Role) -> None:
    """The manifest as a ControllerRevision with this role; keeps its number when it is there already."""
    metadata = cache["metadata"]
    key = ObjectKey(Kind.CONTROLLER_REVISION, metadata["namespace"], revision_name(metadata["name"], digest))
    try:
        known = read_revision(await api.get(key))
    except NotFound:
        others = await api.list_all(
            Kind.CONTROLLER_REVISION, metadata["namespace"], selector_for(metadata["uid"])
        )
        number = 1 + max((int(obj.get("revision") or 0) for obj in others), default=0)
    else:
        # A baseline that is a candidate again keeps the role that is its backup.
        if known.role in (role, Role.BASELINE):
            return
        number = known.number
    await api.apply(revision_manifest(cache, data, digest, role, number))
