"""What K/V costs in bytes and seconds: of formulas F1 to F18 of specification C.1 those that a plan, a ledger
or a vector rests on, and the cached-to-prefill regime.

Why it exists: a plan is chosen by numbers, and each number must name its formula and be wrong in no unit.
Pure: it must not know tiers, sessions or clocks. Sizes are bytes, times seconds; ledgers of different
meaning are never added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from kvtier_core.errors import CoreError, Reason
from kvtier_core.units import (
    BytesPerRow,
    BytesPerSecond,
    BytesPerToken,
    FlopPerSecond,
    FlopPerToken,
    require_bandwidth,
    require_regime_units,
)

DESCRIPTOR_BYTES = 64


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Layers, heads and widths. k_bytes, v_bytes: of one scalar of K and of V, both counted always."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    k_bytes: int
    v_bytes: int

    def __post_init__(self) -> None:
        values = (self.layers, self.query_heads, self.kv_heads, self.head_dim, self.k_bytes, self.v_bytes)
        if min(values) < 1 or self.query_heads % self.kv_heads:
            raise CoreError(Reason.PAYLOAD_GEOMETRY, f"{self} is no geometry")

    @property
    def row(self) -> BytesPerRow:
        """F3: B_row = H_kv * d_h * (b_K + b_V)."""
        return BytesPerRow(self.kv_heads * self.head_dim * (self.k_bytes + self.v_bytes))

    @property
    def token(self) -> BytesPerToken:
        """F2: M_token = L * B_row."""
        return self.row.of_layers(self.layers)

    def payload(self, tokens: int) -> int:
        """F1, F2: all layers' K and V of `tokens`, before blocks, proxies, descriptors and staging."""
        return tokens * self.token.value

    def kv_head_of(self, query_head: int) -> int:
        """The default grouped map h_kv = h_q // (H_q / H_kv). HEAD_MAPPING_MISMATCH outside the heads."""
        if not 0 <= query_head < self.query_heads:
            raise CoreError(Reason.HEAD_MAPPING_MISMATCH, f"query head {query_head} does not exist")
        return query_head // (self.query_heads // self.kv_heads)

    def head_group(self, tokens: int, heads: int) -> int:
        """F31: M_stage(g) = 2 * B * T * g * d_h * b for one layer, with b_K and b_V apart."""
        return tokens * heads * self.head_dim * (self.k_bytes + self.v_bytes)

    def head_groups(self, heads: int) -> int:
        """F31: N_groups = ceil(H_kv / g): it follows KV heads, not query heads."""
        if not 1 <= heads <= self.kv_heads:
            raise CoreError(Reason.PAYLOAD_GEOMETRY, f"{heads} of {self.kv_heads} KV heads are no group")
        return -(-self.kv_heads // heads)


def blocks(tokens: int, block_tokens: int) -> int:
    """Whole transfer blocks that cover `tokens` rows."""
    return -(-tokens // block_tokens)


def logical_bytes(rows: int, row: BytesPerRow) -> int:
    """F4: rows that are needed and not visible yet, one layer."""
    return rows * row.value


def covering_bytes(rows: int, block_tokens: int, row: BytesPerRow) -> int:
    """F5: the physical blocks that cover those rows, one layer; rows are contiguous from a block's start."""
    return blocks(rows, block_tokens) * block_tokens * row.value


def read_amplification(moved: int, logical: int) -> float:
    """F6: A_read >= 1. Overfetch is exact, it is not approximate. READ_AMPLIFICATION below one."""
    if logical <= 0 or moved < logical:
        raise CoreError(
            Reason.READ_AMPLIFICATION, f"{moved} bytes moved cannot cover {logical}", {"moved": moved}
        )
    return moved / logical


def iteration_bytes(per_layer: Sequence[Sequence[int]]) -> int:
    """F7: over the admitted requests, the sum of each one's layers."""
    return sum(sum(layers) for layers in per_layer)


def written_bytes(tokens: int, rows: Sequence[BytesPerRow]) -> int:
    """F8: new rows on their way down, before block rounding."""
    return tokens * sum(row.value for row in rows)


@dataclass(frozen=True, slots=True)
class Traffic:
    """F9, its terms kept apart: payload, 64 B a descriptor and block, protocol."""

    payload: int
    blocks: int
    protocol: int = 0

    @property
    def descriptors(self) -> int:
        return self.blocks * DESCRIPTOR_BYTES

    @property
    def total(self) -> int:
        return self.payload + self.descriptors + self.protocol


def chunked_seconds(stages: Sequence[float], chunks: int) -> float:
    """F13: fill the pipe once, then its slowest stage paces it. Only for fixed chunks, bounded queues,
    independent stages and no blocking at a head of line; otherwise simulate events."""
    if chunks < 1 or not stages:
        raise CoreError(Reason.COST_MODEL, "a pipeline has stages and chunks")
    return sum(stages) + (chunks - 1) * max(stages)


def partial_overlap_seconds(transfer: float, compute: float, eta: float) -> float:
    """T = x + c - eta * min(x, c); eta in [0, 1], measured. COST_MODEL outside."""
    if not 0.0 <= eta <= 1.0:
        raise CoreError(Reason.COST_MODEL, f"an overlap of {eta} is none")
    return transfer + compute - eta * min(transfer, compute)


def variable_staging(layers: Sequence[int]) -> int:
    """F15: the largest two neighbours' cold bytes at once."""
    if len(layers) < 2:
        return sum(layers)
    return max(first + second for first, second in pairwise(layers))


def fixed_staging(layers: Sequence[int]) -> int:
    """F15: two slots, each as large as the largest layer."""
    return 2 * max(layers, default=0)


@dataclass(frozen=True, slots=True)
class GpuPeak:
    """F16: what lies on the device at once; every term is stated, hits above all."""

    persistent_hits: int
    staging: int
    new_rows: int
    descriptors: int
    workspace: int

    @property
    def total(self) -> int:
        return self.persistent_hits + self.staging + self.new_rows + self.descriptors + self.workspace


@dataclass(frozen=True, slots=True)
class HostLedger:
    """F17: host memory by purpose."""

    authoritative: int
    pinned: int = 0
    read_buffers: int = 0
    codec_scratch: int = 0
    write_back: int = 0
    metadata: int = 0

    @property
    def total(self) -> int:
        return (
            self.authoritative
            + self.pinned
            + self.read_buffers
            + self.codec_scratch
            + self.write_back
            + self.metadata
        )


class Regime(StrEnum):
    TRANSFER = "transfer"
    COMPUTE = "compute"


def kappa_crit(
    prefill: FlopPerToken, kv: BytesPerToken, link: BytesPerSecond, compute: FlopPerSecond
) -> float:
    """kappa_crit = (F_pf / B_KV) * (BW / C_eff), dimensionless: cached tokens per new token above which
    moving K/V takes longer than computing. UNIT_MISMATCH for an operand of another unit, a row's bytes
    above all."""
    require_regime_units(prefill, kv, link, compute)
    return (prefill.value / kv.value) * (link.value / compute.value)


def regime(cached: int, new: int, critical: float) -> Regime:
    """A test of the regime, not a prediction of latency: transfer-bound iff K / T > kappa_crit."""
    if cached < 0 or new < 1:
        raise CoreError(Reason.COST_MODEL, f"{cached} cached and {new} new tokens are no request")
    return Regime.TRANSFER if cached / new > critical else Regime.COMPUTE


def ideal_transfer_seconds(cached: int, kv: BytesPerToken, link: BytesPerSecond) -> float:
    """t_xfer = K * B_KV / BW."""
    require_bandwidth(link)
    return link.seconds(cached * kv.value)


def ideal_compute_seconds(new: int, prefill: FlopPerToken, compute: FlopPerSecond) -> float:
    """t_compute = T * F_pf / C_eff."""
    return new * prefill.value / compute.value
