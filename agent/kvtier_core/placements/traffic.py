"""What attention over one layer moves, by where it is computed: F27 to F31 of specification C.1.

Why it exists: a placement that leaves out the factor of K and V, the row that is appended, the states of all
but one producer or the fixed cost of sending looks better than it is. Statements are held against the shapes
that they come from. Pure: sizes are bytes, times seconds. It must not know tiers or plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier_core.cost import KvGeometry
from kvtier_core.exact_placements import PlacementReason, PlacementRefused
from kvtier_core.units import BytesPerSecond

STATE_BYTES = 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One decode step of one layer. sequences: B; tokens: T, of each. activation_bytes: of one scalar of Q
    and O. d_v is d_h; a state's scalars are fp32."""

    geometry: KvGeometry
    sequences: int
    tokens: int
    activation_bytes: int

    def __post_init__(self) -> None:
        if min(self.sequences, self.activation_bytes) < 1 or self.tokens < 0:
            raise PlacementRefused(PlacementReason.COST_MODEL, f"{self} is no step")

    @property
    def kv(self) -> int:
        """F27: M_KV = B * T * H_kv * d_h * (b_K + b_V)."""
        return self.sequences * self.tokens * self.geometry.row.value

    @property
    def append(self) -> int:
        """F27: M_append, one row of K and V a sequence."""
        return self.sequences * self.geometry.row.value

    @property
    def move(self) -> int:
        """F27: all history and the new row."""
        return self.kv + self.append

    @property
    def query(self) -> int:
        """F28: M_Q = B * H_q * d_h * b_a; M_O is the same."""
        return self.sequences * self.geometry.query_heads * self.geometry.head_dim * self.activation_bytes

    @property
    def near(self) -> int:
        """F28: M_near = M_Q + M_append + M_O."""
        return 2 * self.query + self.append

    @property
    def state(self) -> int:
        """F29: one producer's (m, l, u) = B * H_q * (2 + d_v) * b_s."""
        return self.sequences * self.geometry.query_heads * (2 + self.geometry.head_dim) * STATE_BYTES

    def returned(self, producers: int) -> int:
        """F29: one state for each producer."""
        return producers * self.state

    def slice(self, heads: int) -> int:
        """F31: M_stage(g)."""
        return self.sequences * self.geometry.head_group(self.tokens, heads)


@dataclass(frozen=True, slots=True)
class NearLink:
    """Both ways to where rows lie: fixed seconds and bandwidth of each."""

    send_fixed: float
    send: BytesPerSecond
    return_fixed: float
    back: BytesPerSecond

    def seconds(self, shape: AttentionShape) -> float:
        """F30: t_near,xfer; the time of attention itself is not in it."""
        sent = self.send_fixed + self.send.seconds(shape.query + shape.append)
        return sent + self.return_fixed + self.back.seconds(shape.query)


@dataclass(frozen=True, slots=True)
class TrafficStatement:
    """What a plan or a receipt says of one layer. producers: of partial states; returned: bytes of all of
    them."""

    kv: int
    append: int
    moved: int
    near: int
    producers: int
    returned: int
    near_seconds: float


def state_traffic(shape: AttentionShape, link: NearLink, producers: int) -> TrafficStatement:
    return TrafficStatement(
        shape.kv,
        shape.append,
        shape.move,
        shape.near,
        producers,
        shape.returned(producers),
        link.seconds(shape),
    )


def check_traffic(shape: AttentionShape, link: NearLink, stated: TrafficStatement) -> None:
    """TRAFFIC_MISMATCH naming the first ledger that does not follow from the shape, then TIME_MODEL."""
    right = state_traffic(shape, link, stated.producers)
    for name in ("kv", "append", "moved", "near", "returned"):
        if getattr(stated, name) != getattr(right, name):
            raise PlacementRefused(
                PlacementReason.TRAFFIC_MISMATCH,
                f"{name}: {getattr(stated, name)} bytes stated, {getattr(right, name)} move",
            )
    if not math.isclose(stated.near_seconds, right.near_seconds, rel_tol=1e-9):
        raise PlacementRefused(
            PlacementReason.TIME_MODEL,
            f"near transfer of {stated.near_seconds} s stated, {right.near_seconds} s with both fixed costs",
        )
