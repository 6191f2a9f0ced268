"""Shapes, widths and heads of a cache's rows, and what a payload of them must weigh (specification A.6).

Why it exists: K and V may differ in width and dtype, and query heads share KV heads, so "512 bytes" and
"head 2" mean nothing without these. It must not know who made the rows. Formulas: specification C.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason
from kvtier_crds.manifest import Dtype, Geometry


@dataclass(frozen=True, slots=True)
class TensorContract:
    """key_bytes, value_bytes: of one scalar. query_to_kv: the KV head of each query head."""

    layers: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    key_bytes: int
    value_bytes: int
    query_to_kv: tuple[int, ...]
    codec: str
    layout: str

    @property
    def row_bytes(self) -> int:
        """K and V of one token in one layer, all KV heads (F3)."""
        return self.kv_heads * (self.key_dim * self.key_bytes + self.value_dim * self.value_bytes)

    def payload_bytes(self, tokens: int, layers: int | None = None) -> int:
        """Of `tokens` rows in `layers` layers, by default all (F2)."""
        return (self.layers if layers is None else layers) * tokens * self.row_bytes


@lru_cache(maxsize=64)
def grouped_map(query_heads: int, kv_heads: int) -> tuple[int, ...]:
    """The usual map: neighbouring query heads share a KV head (A.6)."""
    return tuple(head // (query_heads // kv_heads) for head in range(query_heads))


SCALAR_BYTES = {Dtype.FLOAT32: 4, Dtype.FLOAT16: 2, Dtype.BFLOAT16: 2}


def tensor_contract(
    geometry: Geometry, *, layers: tuple[int, int], kv_heads: tuple[int, int], codec: str, layout: str
) -> TensorContract:
    """The contract of dense blocks of half-open ranges of a model's layers and KV heads, in its dtype."""
    width = SCALAR_BYTES[geometry.dtype]
    group = geometry.query_heads // geometry.kv_heads
    low, high = kv_heads
    return TensorContract(
        layers=layers[1] - layers[0],
        query_heads=(high - low) * group,
        kv_heads=high - low,
        key_dim=geometry.head_dim,
        value_dim=geometry.head_dim,
        key_bytes=width,
        value_bytes=width,
        query_to_kv=grouped_map((high - low) * group, high - low),
        codec=codec,
        layout=layout,
    )


def check_payload(contract: TensorContract, tokens: int, length: int, layers: int | None = None) -> None:
    """PAYLOAD_GEOMETRY unless `length` bytes are `tokens` rows of K and of V."""
    wanted = contract.payload_bytes(tokens, layers)
    if length != wanted:
        raise CoreError(
            Reason.PAYLOAD_GEOMETRY,
            f"{tokens} rows are {wanted} bytes, not {length}",
            {"wanted": wanted, "length": length},
        )


def check_heads(contract: TensorContract, query_head: int | None, kv_head: int | None) -> None:
    """HEAD_AMBIGUOUS when one of the two is not named though they differ; HEAD_MAPPING_MISMATCH when they do
    not belong together."""
    if query_head is None or kv_head is None:
        if contract.query_heads != contract.kv_heads or (query_head is None and kv_head is None):
            raise CoreError(Reason.HEAD_AMBIGUOUS, "a receipt names its query head and its KV head")
        query_head = kv_head = kv_head if query_head is None else query_head
    inside = query_head is not None and 0 <= query_head < len(contract.query_to_kv)
    if not inside or contract.query_to_kv[query_head or 0] != kv_head:
        raise CoreError(
            Reason.HEAD_MAPPING_MISMATCH, f"query head {query_head} does not read KV head {kv_head}"
        )


def check_positions(positions: NDArray[np.int64], frontier: int) -> None:
    """CANDIDATE_OUT_OF_RANGE for a row at or beyond the frontier (or below 0), then DUPLICATE_POSITION."""
    if not len(positions):
        return
    # Almost always ascending: then one pass tells both.
    steps = np.diff(positions)
    ascending = bool((steps > 0).all())
    lowest, highest = (positions[0], positions[-1]) if ascending else (positions.min(), positions.max())
    if lowest < 0 or highest >= frontier:
        raise CoreError(
            Reason.CANDIDATE_OUT_OF_RANGE,
            f"row {int(highest if highest >= frontier else lowest)} is outside [0, {frontier})",
            {"frontier": frontier},
        )
    if not ascending and len(np.unique(positions)) != len(positions):
        raise CoreError(Reason.DUPLICATE_POSITION, "a row twice would change the denominator")


def check_selected(positions: NDArray[np.int64], frontier: int) -> None:
    """As `check_positions`, of a list that a selector chose: it ascends, which is how it is cut by chunk, so
    that DUPLICATE_POSITION is also a list that does not."""
    check_positions(positions, frontier)
    if len(positions) > 1 and not bool((np.diff(positions) > 0).all()):
        raise CoreError(Reason.DUPLICATE_POSITION, "rows are chosen twice, or not in order")


def check_support(required: NDArray[np.int64], frontier: int) -> None:
    """An exact move takes every legal row [0, frontier) once: CANDIDATE_OUT_OF_RANGE, DUPLICATE_POSITION,
    SUPPORT_GAP."""
    check_positions(required, frontier)
    if len(required) != frontier:
        raise CoreError(
            Reason.SUPPORT_GAP,
            f"{frontier - len(required)} of {frontier} rows are missing",
            {"missing": frontier - len(required)},
        )


def check_cover(blocks: Iterable[tuple[int, int]], block_tokens: int, frontier: int) -> None:
    """BLOCK_COVERAGE unless the half-open ranges are whole blocks, each once, that cover [0, frontier)."""
    spans = sorted(blocks)
    wanted = -(-frontier // block_tokens)
    for index, (first, last) in enumerate(spans):
        if first != index * block_tokens or last - first != block_tokens:
            raise CoreError(
                Reason.BLOCK_COVERAGE,
                f"rows [{first}, {last}) are not block {index} of {block_tokens} tokens",
            )
    if len(spans) != wanted:
        raise CoreError(
            Reason.BLOCK_COVERAGE,
            f"{len(spans)} blocks of {block_tokens} tokens do not cover {frontier} rows",
        )
