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
    """One step of one layer. sequences: B; tokens: T, of each. activation_bytes: of one scalar of Q and O.
    queries, new_rows: of each sequence, one of each in a decode. d_v is d_h; a state's scalars are fp32."""

    geometry: KvGeometry
    sequences: int
    tokens: int
    activation_bytes: int
    queries: int = 1
    new_rows: int = 1

    def __post_init__(self) -> None:
        if (
            min(self.sequences, self.activation_bytes, self.queries) < 1
            or min(self.tokens, self.new_rows) < 0
        ):
            raise PlacementRefused(PlacementReason.COST_MODEL, f"{self} is no step")

    @property
    def kv(self) -> int:
        """F27: M_KV = B * T * H_kv * d_h * (b_K + b_V)."""
        return self.sequences * self.tokens * self.geometry.row.value

    @property
    def append(self) -> int:
        """F27: M_append, the new rows of K and V."""
        return self.sequences * self.new_rows * self.geometry.row.value

    @property
    def move(self) -> int:
        """F27: all history and the new row."""
        return self.kv + self.append

    @property
    def query(self) -> int:
        """F28: M_Q = B * H_q * d_h * b_a; M_O is the same."""
        return self._scalars * self.geometry.head_dim * self.activation_bytes

    @property
    def near(self) -> int:
        """F28: M_near = M_Q + M_append + M_O."""
        return 2 * self.query + self.append

    @property
    def state(self) -> int:
        """F29: one producer's (m, l, u) = B * H_q * (2 + d_v) * b_s."""
        return self._scalars * (2 + self.geometry.head_dim) * STATE_BYTES

    @property
    def _scalars(self) -> int:
        return self.sequences * self.queries * self.geometry.query_heads

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

    def seconds(self, shape: AttentionShape, producers: int = 0) -> float:
        """F30: t_near,xfer; the time of attention itself is not in it. producers: of partial states, which
        come back (F29) in the answer's place; 0: the answer does."""
        sent = self.send_fixed + self.send.seconds(shape.query + shape.append)
        returned = shape.returned(producers) if producers else shape.query
        return sent + self.return_fixed + self.back.seconds(returned)


@dataclass(frozen=True, slots=True)
class TrafficStatement:
    """What was counted of one layer's step, bytes. kv: of the history near its tier; append: of its new rows;
    moved: what moving both would have been; near: query, new rows and answer. producers: of partial states,
    returned: of all of those."""

    kv: int
    append: int
    moved: int
    near: int
    producers: int
    returned: int


def check_traffic(shape: AttentionShape, stated: TrafficStatement) -> None:
    """TRAFFIC_MISMATCH naming the first count that does not follow from the shape."""
    right = (shape.kv, shape.append, shape.move, shape.near, shape.returned(stated.producers))
    found = (stated.kv, stated.append, stated.moved, stated.near, stated.returned)
    if right == found:
        return
    names = ("kv", "append", "moved", "near", "returned")
    name, one, other = next(it for it in zip(names, found, right, strict=True) if it[1] != it[2])
    raise PlacementRefused(
        PlacementReason.TRAFFIC_MISMATCH, f"{name}: {one} bytes counted, {other} are what moves"
    )


def check_near_seconds(shape: AttentionShape, link: NearLink, producers: int, stated: float) -> None:
    """TIME_MODEL unless `stated` is the transfer of F30. producers: as `NearLink.seconds`."""
    right = link.seconds(shape, producers)
    if not math.isclose(stated, right, rel_tol=1e-9):
        raise PlacementRefused(
            PlacementReason.TIME_MODEL,
            f"near transfer of {stated} s stated, {right} s with both fixed costs",
        )
