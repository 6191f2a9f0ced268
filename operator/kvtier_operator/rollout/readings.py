"""What one look asks the agents: of which window, under which fence, whom. Pure.

It must not ask anybody.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.v1 import common_pb2 as common
from kvtier_evidence.window import WindowKey
from kvtier_operator.ports import AgentTarget, JsonObject
from kvtier_operator.rollout.effects import Subject
from kvtier_operator.rollout.grants import cache_ref, fence_of, window_key
from kvtier_operator.rollout.observe import Pool
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import RolloutState


@dataclass(frozen=True, slots=True)
class Reading:
    """Whom to ask about which window, under which fence. unopened: no agent has been granted under it yet, so
    there is nothing to be read: each would say that it knows no such window."""

    cache: common.CacheRef
    fence: common.Fence
    key: WindowKey
    nodes: tuple[AgentTarget, ...]
    unopened: bool = False


def reading_of(subject: Subject, state: RolloutState, spec: RolloutSpec, pool: Pool) -> Reading | None:
    """None where the two fences do not agree, or no window of this spec is open."""
    cache = subject.cache
    if cache is None or state.window is None or not state.holds_candidate:
        return None
    if (cache.get("status") or {}).get("fence") != state.fence:
        return None
    if state.window.spec_hash != spec.window_hash:
        return None
    lost = {agent.node for agent in state.lost}
    # A holder that fell silent in this very pass is not in the status yet; its evidence is missing too.
    lost |= {view.node for view in pool.views if not view.reachable and view.granted_rollout == subject.uid}
    return Reading(
        cache=reference(cache),
        fence=fence_of(state, subject.uid),
        key=window_key(state, spec, subject.uid),
        nodes=tuple(pool.targets[view.node] for view in pool.views if view.selected or view.node in lost),
    )


def unopened(state: RolloutState, uid: str, pool: Pool) -> bool:
    """Whether all agents have just said that they hold nothing under this window."""
    opened = state.window.opening_fence if state.window is not None else 0
    return all(
        view.reachable and (view.granted_rollout != uid or view.granted_fence < opened) for view in pool.views
    )


def reference(cache: JsonObject) -> common.CacheRef:
    metadata = cache["metadata"]
    return cache_ref(metadata["namespace"], metadata["name"], metadata["uid"])
