"""Which legal path each chunk takes in this step, and why.

Why it exists: a path is legal because a tier's capability record permits it, not because it would work. It
must not know tensors' contents or how a path is run. Specification A.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier_core.appends import NO_LINE, Append, Rows
from kvtier_core.directory import ChunkState
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import Tier

FRAME_TIER = -1


class Path(StrEnum):
    """PARTIAL: a state is formed where the rows are. STAGED: verified into a staging buffer, then attended.
    FRAME: the rows came with this request and are attended from it."""

    PARTIAL = "partial"
    STAGED = "staged"
    FRAME = "frame"


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk of a plan: rows [0, rows) of it are visible. `line` is NO_LINE for FRAME."""

    chunk: int
    rows: int
    line: int
    tier: int
    path: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """Chunks ascending. `labels` name each path once, as receipts do; `why` says what made it legal."""

    reads: tuple[ChunkRead, ...]
    labels: tuple[str, ...]
    why: tuple[str, ...]
    simulated: bool


def legal_path(tier: Tier) -> tuple[Path, str]:
    """The path of a chunk that lies in `tier`. NO_LEGAL_PATH when its record permits none."""
    able = tier.capability
    if able.kernel_readable and able.partial_attention and tier.host_memory:
        return Path.PARTIAL, "kernelReadable and partialAttention"
    if able.dma_source:
        if not able.kernel_readable:
            return Path.STAGED, "not kernelReadable, but dmaSource"
        missing = "not partialAttention" if tier.host_memory else "states are formed by the host here"
        return Path.STAGED, f"{missing}, but dmaSource"
    raise CoreError(
        Reason.NO_LEGAL_PATH,
        f"tier {tier.name} permits neither partial attention nor reads",
        {"tier": tier.name},
    )


def plan_rows(store: Rows, append: Append, visible: int, chunks: Sequence[int] | None = None) -> Plan:
    """Plans rows [0, visible) of the append's layer, or only those of `chunks` (ascending).

    Rows of the append that lie in no chunk yet are read from the frame. NO_LEGAL_PATH.
    """
    size = store.layout.chunk_tokens
    state = append.session.layers[append.layer]
    wanted = range(-(-visible // size)) if chunks is None else chunks
    reads: list[ChunkRead] = []
    labels: dict[str, str] = {}
    simulated = False
    for chunk in wanted:
        rows = min(size, visible - chunk * size)
        line = state.lines[chunk] if chunk < len(state.lines) else NO_LINE
        if line == NO_LINE:
            reads.append(ChunkRead(chunk, rows, NO_LINE, FRAME_TIER, Path.FRAME))
            labels.setdefault("frame:partial", "rows of this request")
            continue
        if int(store.directory.state[line]) not in (ChunkState.OPEN, ChunkState.SEALED):
            raise CoreError(Reason.NOT_VISIBLE, f"chunk {chunk} of layer {append.layer} is not published")
        tier_index = int(store.directory.tier[line])
        tier = store.tiers[tier_index]
        path, why = legal_path(tier)
        reads.append(ChunkRead(chunk, rows, line, tier_index, path))
        labels.setdefault(f"{tier.medium.value}:{path.value}", why)
        simulated = simulated or tier.simulated
    return Plan(
        reads=tuple(reads),
        labels=tuple(labels),
        why=tuple(f"{label}: {why}" for label, why in labels.items()),
        simulated=simulated,
    )
