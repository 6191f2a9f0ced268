"""Whose turn it is when several rollouts name one cache: one at a time, the begun one first, then the oldest.

Pure over objects, but for the question who they are now. It must not look at anything but their metadata,
spec and status.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from kvtier_operator.ports import ApiError, JsonObject, Kind, KubeApi
from kvtier_operator.rollout.salvage import has_lost_status
from kvtier_operator.rollout.vocabulary import FINISHED, Phase, Stage
from kvtier_operator.store import cache_of


def rivals(rollout: JsonObject, others: Iterable[JsonObject]) -> list[JsonObject]:
    """The other rollouts of the same cache; all that `busy_with` and `superseded_by` look at."""
    mine = rollout["metadata"]["uid"]
    cache = cache_of(rollout)
    return [other for other in others if cache_of(other) == cache and other["metadata"]["uid"] != mine]


async def rivals_now(api: KubeApi, rollout: JsonObject) -> list[JsonObject]:
    """As the server says. It is asked for those of one cache: a namespace may hold a thousand."""
    namespace, cache = rollout["metadata"]["namespace"], cache_of(rollout)
    try:
        found = await api.list_all(Kind.KV_ROLLOUT, namespace, field_selector=f"spec.cacheRef.name={cache}")
    except ApiError as error:
        if error.status != HTTPStatus.BAD_REQUEST:
            raise
        # The definition is of a version that cannot select by it.
        found = await api.list_all(Kind.KV_ROLLOUT, namespace)
    return rivals(rollout, found)


def busy_with(rollout: JsonObject, others: Iterable[JsonObject]) -> str:
    """Name of the unfinished rollout of the same cache that goes first; empty when it is this one's turn."""
    ahead = [
        other
        for other in rivals(rollout, others)
        if _unfinished(other) and (_begun(other) or _age(other) < _age(rollout))
    ]
    return _name(min(ahead, key=_turn)) if ahead else ""


def superseded_by(rollout: JsonObject, others: Iterable[JsonObject], *, completed: bool) -> str:
    """Name of a begun, unfinished rollout that this one has to yield to: any when it is completed, only an
    older one when two have begun at once."""
    ahead = [
        other
        for other in rivals(rollout, others)
        if _unfinished(other) and _begun(other) and (completed or _age(other) < _age(rollout))
    ]
    return _name(min(ahead, key=_turn)) if ahead else ""


def _name(rollout: JsonObject) -> str:
    return str(rollout["metadata"]["name"])


def _unfinished(rollout: JsonObject) -> bool:
    """A phase that this version does not know is none that leaves the cache free."""
    phase = (rollout.get("status") or {}).get("phase") or Phase.PENDING
    leaving = "deletionTimestamp" in rollout["metadata"]
    return phase not in FINISHED and not (leaving and not _begun(rollout))


def _begun(rollout: JsonObject) -> bool:
    if has_lost_status(rollout):
        return True  # agents may hold its candidate, and it is revoked first
    status = rollout.get("status") or {}
    return (status.get("stage") or Stage.OFF) != Stage.OFF or bool(status.get("revoking"))


def _age(rollout: JsonObject) -> tuple[str, str]:
    metadata = rollout["metadata"]
    return str(metadata.get("creationTimestamp") or ""), str(metadata["uid"])


def _turn(rollout: JsonObject) -> tuple[bool, tuple[str, str]]:
    return not _begun(rollout), _age(rollout)
