"""Placement policies on a real engine: rows lie and steps run as a policy says, and no bit of an answer
changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from kvtier_core.engine import CacheEngine
from kvtier_core.placements.preference import PlacementPreference, PlanKind, TierShare
from tests.unit.core.builders import (
    CHUNK,
    KV_HEADS,
    LAYERS,
    SLOT,
    Driver,
    Rows,
    TierBudget,
    cpu,
    engine,
    gpu,
    nvme,
)

TIERS = (gpu(8), cpu(24), nvme(24))
ROWS = Rows.random(8 * CHUNK + 3, seed=5)
PREFILL = 8 * CHUNK


def shares(*parts: float) -> PlacementPreference:
    return PlacementPreference(
        "flexGen",
        prefer=PlanKind.SUPPORT_PARTITION,
        shares=tuple(TierShare(tier, part) for tier, part in enumerate(parts)),
    )


WHOLE = PlacementPreference(
    "wholeRequest",
    frozenset({PlanKind.REQUEST_ON_CPU, PlanKind.ALL_ROWS_MOVED}),
    PlanKind.REQUEST_ON_CPU,
    whole=True,
)
HEADS = PlacementPreference("headGroups", prefer=PlanKind.HEAD_GROUPS, group_heads=1, staging_bytes=1 << 20)


def places(built: CacheEngine, driver: Driver) -> Counter[str]:
    """Sealed chunks of layer 0 by tier."""
    handle = driver.handle
    found = built.list_chunks(handle.session_id, handle.generation)
    return Counter(chunk.tier_class for chunk in found if chunk.layer == 0 and chunk.sealed)


def played(
    folder: Path, preference: PlacementPreference | None, tiers: tuple[TierBudget, ...] = TIERS
) -> tuple[torch.Tensor, Counter[str], set[str]]:
    with engine(folder, tiers) as built:
        if preference is not None:
            built.prefer(preference)
        driver = Driver.open(built, ROWS)
        out = driver.play(PREFILL, 3, block=CHUNK)
        kinds = {answer.receipt.plan_kind for answer in driver.answers[-LAYERS:]}
        found = places(built, driver)
        driver.close()
    return out, found, kinds


def test_by_recency_the_newest_chunks_fill_the_fastest_tier(tmp_path: Path) -> None:
    _, found, _ = played(tmp_path, None)
    # 8 slots: one open chunk of each of two layers, three sealed ones of each.
    assert found == {"hbm": 3, "ram": 5}


CASES = {
    "shares": (shares(0.25, 0.5, 0.25), {"hbm": 2, "ram": 4, "flash": 2}, {"supportPartition"}),
    "all on disk": (shares(0.0, 0.0, 1.0), {"flash": 8}, {"supportPartition"}),
    "a share that does not fit goes down": (shares(1.0), {"hbm": 3, "ram": 5}, {"supportPartition"}),
    "whole in host memory": (WHOLE, {"ram": 8}, {"requestOnCpu"}),
}


@pytest.mark.parametrize(("preference", "where", "kinds"), CASES.values(), ids=CASES.keys())
def test_chunks_lie_where_the_policy_says_and_the_bits_are_those_of_recency(
    tmp_path: Path, preference: PlacementPreference, where: dict[str, int], kinds: set[str]
) -> None:
    out, found, ran = played(tmp_path, preference)
    assert found == where
    assert ran == kinds
    assert torch.equal(out, played(tmp_path / "again", None)[0])


def test_head_groups_move_host_rows_in_slices_and_the_bits_are_the_same(tmp_path: Path) -> None:
    tiers = (gpu(8), cpu(24))
    out, found, kinds = played(tmp_path, HEADS, tiers)
    assert found["ram"] > 0
    assert kinds == {"headGroups"}
    assert torch.equal(out, played(tmp_path, None, tiers)[0])


# One KV head's rows of the five chunks in host memory, twice.
SLICES = 2 * 5 * SLOT // KV_HEADS


@pytest.mark.parametrize(
    ("staging", "heads"), [(2 * SLICES, 2), (2 * SLICES - 1, 1), (SLICES, 1), (SLICES - 1, None)]
)
def test_grouping_adapts_to_the_staging_that_the_policy_declares(
    tmp_path: Path, staging: int, heads: int | None
) -> None:
    with engine(tmp_path, (gpu(8), cpu(24))) as built:
        built.prefer(PlacementPreference("headGroups", prefer=PlanKind.HEAD_GROUPS, staging_bytes=staging))
        driver = Driver.open(built, ROWS)
        driver.play(PREFILL, 1, block=CHUNK)
        decision = built.inspect_plan(driver.handle.session_id, driver.handle.generation, 0)
        assert decision.chosen is not None
        if heads is None:
            assert decision.why()["headGroups"] == "STAGING_TOO_SMALL"
            assert decision.chosen.kind is not PlanKind.HEAD_GROUPS
        else:
            assert (decision.chosen.kind, decision.chosen.group_heads) == (PlanKind.HEAD_GROUPS, heads)
        driver.close()


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_rows_on_storage_are_answered_with_the_staging_that_is_left_for_slices(
    tmp_path: Path, blocks: int
) -> None:
    """Slices are of host memory only: what lies beyond it is streamed, through as few buffers as the policy
    allows."""
    tiers = (gpu(LAYERS + 1), nvme(24))
    want = played(tmp_path / "want", None, tiers)[0]
    with engine(tmp_path, tiers) as built:
        staging = blocks * SLOT
        built.prefer(PlacementPreference("headGroups", prefer=PlanKind.HEAD_GROUPS, staging_bytes=staging))
        driver = Driver.open(built, ROWS)
        assert torch.equal(driver.play(PREFILL, 3, block=CHUNK), want)
        peaks = {answer.receipt.peak_buffer_bytes for answer in driver.answers[-3 * LAYERS :]}
        assert max(peaks) == blocks * built._plans.buffers.block_bytes
        driver.close()


def test_a_short_request_lies_whole_on_the_first_tier_and_the_next_one_beside_it(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS) as built:
        built.prefer(WHOLE)
        short = Rows.random(3 * CHUNK + 2, seed=1)
        first, second = Driver.open(built, short), Driver.open(built, short)
        outs = [driver.play(3 * CHUNK, 2, block=CHUNK) for driver in (first, second)]
        assert places(built, first) == {"hbm": 3}
        assert places(built, second) == {"ram": 3}
        assert torch.equal(*outs)
        first.close()
        third = Driver.open(built, short)
        third.play(3 * CHUNK, 1, block=CHUNK)
        assert places(built, third) == {"hbm": 3}, "what the first one had is free again"
        for driver in (second, third):
            driver.close()
