"""Who may hold a rollout's candidate, as its status keeps it: written before a grant is sent, so that a
holder that vanishes while no operator runs is missed by the next one, and by the next rollout of the cache.

A holder is one that a grant was written down for, until it has proved that it let go, or has vanished and is
in `status.vanished`. It must not know what a return to the baseline does about those that are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvtier_operator.rollout.inputs import AgentView
from kvtier_operator.rollout.state import Holders

_UNNAMED = " not named"


def holders_of(names: Collection[str], agents: Sequence[AgentView]) -> Holders:
    """Exactly these; those that have left the pool come first, since they are missed by their names."""
    present = {agent.node for agent in agents}
    return Holders(tuple(sorted(names, key=lambda node: (node in present, node))), len(names))


def with_grants(
    holders: Holders, uid: str, agents: Sequence[AgentView], remembered: Iterable[str], nodes: Iterable[str]
) -> Holders:
    """With `nodes`, which are about to be granted the candidate of rollout `uid`."""
    known = _known(holders, uid, agents, remembered)
    fresh = set(nodes) - known
    named = holders_of(known | fresh, agents)
    return Holders(named.names, max(holders.count, len(known)) + len(fresh))


def without(holders: Holders, nodes: Collection[str]) -> Holders:
    """Without `nodes`, as far as they are named."""
    names = tuple(node for node in holders.names if node not in nodes)
    return Holders(names, holders.count - (len(holders.names) - len(names)))


def gone(
    holders: Holders, uid: str, agents: Sequence[AgentView], remembered: Iterable[str] = ()
) -> tuple[str, ...]:
    """Holders of the candidate of rollout `uid` that are in the pool no more, by name. Where a status could
    not name all, those that are missing by number are one entry, with a text that no node can be called."""
    present = {agent.node for agent in agents}
    named = tuple(sorted((set(holders.names) | set(remembered)) - present))
    rest = holders.count - len(_known(holders, uid, agents, remembered))
    return named if rest <= 0 else (f"{rest}{_UNNAMED}", *named)


def nodes_of(entry: str) -> int:
    """How many nodes an entry of `gone` stands for."""
    return int(entry.removesuffix(_UNNAMED)) if entry.endswith(_UNNAMED) else 1


def _known(
    holders: Holders, uid: str, agents: Sequence[AgentView], remembered: Iterable[str]
) -> frozenset[str]:
    """Every holder whose name is known from somewhere."""
    granted = {agent.node for agent in agents if agent.granted_rollout == uid}
    return frozenset({*holders.names, *remembered, *granted})
