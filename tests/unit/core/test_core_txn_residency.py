"""The specification's names of B.1, walked through a demotion, a promotion and a store."""

from __future__ import annotations

import pytest

from kvtier_core.tiers.base import MediumKind
from kvtier_core.transactions.moves import Move, completion_of
from kvtier_core.transactions.reasons import MoveKind, TxnState
from kvtier_core.transactions.residency import Residency, residency
from tests.unit.core.txnbench import CPU, GPU, NVME, BlockBench

G, H, S = MediumKind.GPU, MediumKind.CPU, MediumKind.NVME


def at(bench: BlockBench, move: Move) -> Residency:
    source = bench.tiers[move.source_tier].medium if move.source_tier >= 0 else None
    return residency(move.kind, move.state, source, bench.tiers[move.tier].medium)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ((GPU, CPU), "DEMOTE_RESERVED COPY_OUT COPY_OUT HOST_VALID GPU_RELEASED"),
        ((GPU, NVME), "DEMOTE_RESERVED COPY_OUT COPY_OUT SECONDARY_VALID GPU_RELEASED"),
        ((CPU, NVME), "DEMOTE_RESERVED COPY_OUT COPY_OUT SECONDARY_VALID SECONDARY_VALID"),
        ((CPU, GPU), "PROMOTE_RESERVED COPY_IN GPU_STAGED GPU_VISIBLE GPU_VISIBLE"),
        ((NVME, CPU), "PROMOTE_RESERVED COPY_IN GPU_STAGED HOST_VALID HOST_VALID"),
    ],
    ids=str,
)
def test_a_move_passes_the_states_of_the_specification(path: tuple[int, int], names: str) -> None:
    bench = BlockBench()
    line = bench.put(1, path[0])
    move = bench.begin(line, path[1])
    seen = [at(bench, move)]
    bench.moves.start([move])
    seen.append(at(bench, move))
    item = bench.held(move)
    item.arrive()
    bench.moves.complete(completion_of(move, move.identity.length))
    seen.append(at(bench, move))
    bench.moves.publish(move)
    seen.append(at(bench, move))
    item.drain()
    bench.moves.reap()
    bench.moves.release(move)
    seen.append(at(bench, move))
    assert " ".join(seen) == names


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        (MoveKind.DEMOTE, G, Residency.GPU_VISIBLE),
        (MoveKind.DEMOTE, H, Residency.HOST_VALID),
        (MoveKind.PROMOTE, S, Residency.SECONDARY_VALID),
        (MoveKind.STORE, None, Residency.UNPUBLISHED),
    ],
)
def test_a_dead_move_leaves_the_block_where_it_was(
    kind: MoveKind, source: MediumKind | None, expected: Residency
) -> None:
    assert residency(kind, TxnState.DEAD, source, H) is expected


@pytest.mark.parametrize("state", [TxnState.RESERVED, TxnState.COPYING, TxnState.VALIDATED])
def test_a_store_is_unpublished_until_it_is_published(state: TxnState) -> None:
    assert residency(MoveKind.STORE, state, None, S) is Residency.UNPUBLISHED
    assert residency(MoveKind.STORE, TxnState.PUBLISHED, None, S) is Residency.SECONDARY_VALID
