"""What a placement policy asks of whoever plans a step and of whoever places a chunk.

Why it exists: a policy decides once, from declared and measured numbers, and a step must pay nothing to obey
it. It must not know which policy speaks: `policy` is a name for receipts and statuses.

A policy chooses among exact plans only, so no preference can change an answer (specification E.1, E.7). A
plan that `allowed` leaves out lost with reason PLACEMENT_POLICY; when no plan is left the request's own
fallback decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

POLICY_FORBIDS = "PLACEMENT_POLICY"
"""Why a plan lost that the cache's placement policy does not allow."""


class PlanKind(StrEnum):
    """The exact contracts of E.1: all rows move; slices of KV heads move in turn; the whole request is
    attended where its rows lie; each tier's rows are attended there and the states merged."""

    ALL_ROWS_MOVED = "allRowsMoved"
    HEAD_GROUPS = "headGroups"
    REQUEST_ON_CPU = "requestOnCpu"
    SUPPORT_PARTITION = "supportPartition"


@dataclass(frozen=True, slots=True)
class TierShare:
    """share: part of a session's rows, 0 to 1, whose home is tier `tier` of the manifest's order."""

    tier: int
    share: float


@dataclass(frozen=True, slots=True)
class PlacementPreference:
    """allowed: plans that may run. prefer: the one taken whenever it is legal and in time, whatever another
    would cost; None: the least declared cost decides. group_heads: KV heads of one staged slice; None: the
    planner's choice. staging_bytes: what one step may stage at once; None: what credits allow. shares: homes
    of a session's rows; empty: the newest in the fastest tier that has room. whole: a session's rows all in
    one tier instead."""

    policy: str
    allowed: frozenset[PlanKind] = frozenset(PlanKind)
    prefer: PlanKind | None = None
    group_heads: int | None = None
    staging_bytes: int | None = None
    shares: tuple[TierShare, ...] = ()
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.allowed:
            raise ValueError("a policy allows at least one plan")
        if self.prefer is not None and self.prefer not in self.allowed:
            raise ValueError("a policy prefers a plan that it allows")
        if self.group_heads is not None and self.group_heads < 1:
            raise ValueError("a slice has at least one KV head")
        if self.staging_bytes is not None and self.staging_bytes < 0:
            raise ValueError("staging is never negative")
        if self.whole and self.shares:
            raise ValueError("a session is whole or shared out")
        total = sum(share.share for share in self.shares)
        if self.shares and (min(share.share for share in self.shares) < 0.0 or abs(total - 1.0) > 1e-9):
            raise ValueError("shares are parts of one whole")

    def lost(self, kind: PlanKind) -> str:
        """POLICY_FORBIDS, or nothing when the plan may run."""
        return "" if kind in self.allowed else POLICY_FORBIDS


RECENCY = PlacementPreference("recency")
"""No preference: any exact plan, rows by recency."""
