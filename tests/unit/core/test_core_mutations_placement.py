"""N.5, items 1 to 3 and 38 to 48: one wrong statement of a placement has one name.

Items 4 to 37 are of partial receipts and stand with those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtier_core.cost import KvGeometry
from kvtier_core.exact_placements import (
    ComputeSite,
    HeadGroupStaging,
    InStorage,
    OverlapProfile,
    PlacementReason,
    PlacementRefused,
    RequestOnCpu,
)
from kvtier_core.placements.headgroups import HeadInputs, run_step
from kvtier_core.placements.traffic import (
    AttentionShape,
    NearLink,
    TrafficStatement,
    check_near_seconds,
    check_traffic,
)
from kvtier_core.units import BytesPerSecond

GEOMETRY = KvGeometry(layers=4, query_heads=32, kv_heads=8, head_dim=128, k_bytes=2, v_bytes=2)
SHAPE = AttentionShape(GEOMETRY, sequences=1, tokens=4096, activation_bytes=2)
LINK = NearLink(0.02e-3, BytesPerSecond.gb(24), 0.02e-3, BytesPerSecond.gb(24))
TRAFFIC = TrafficStatement(
    SHAPE.kv, SHAPE.append, SHAPE.move, SHAPE.near, producers=2, returned=SHAPE.returned(2)
)
INPUTS = HeadInputs(GEOMETRY, 4096, 4096, 1 << 40, BytesPerSecond.gb(24), 1e-5, 1e-7)
HEADS = run_step(INPUTS, 2).plans[0]
PROFILE = OverlapProfile(linear_0=0.65, linear_1=0.22, cpu_0=0.45, cpu_1=0.55, gpu_0=0.28)
NEO = RequestOnCpu(frozenset({ComputeSite.CPU_FOR_THE_REQUEST}), PROFILE, 4, 4.60, True)
SPARF = InStorage(stated_exact=False, approximation_allowed=True)


def stated(**change: object) -> Callable[[], None]:
    return lambda: check_traffic(SHAPE, replace(TRAFFIC, **change))  # type: ignore[arg-type]


def grouped(at: int, **change: object) -> HeadGroupStaging:
    groups = list(HEADS.groups)
    groups[at] = replace(groups[at], **change)  # type: ignore[arg-type]
    return replace(HEADS, groups=tuple(groups))


def unfixed() -> float:
    return LINK.send_fixed + (SHAPE.query + SHAPE.append) / 24e9 + SHAPE.query / 24e9


MUTATIONS: dict[str, tuple[Callable[[], None], PlacementReason]] = {
    "1 K or V only": (stated(kv=SHAPE.kv // 2), PlacementReason.TRAFFIC_MISMATCH),
    "2 the new row is left out": (
        stated(near=SHAPE.near - SHAPE.append),
        PlacementReason.TRAFFIC_MISMATCH,
    ),
    "3 one state for all producers": (stated(returned=SHAPE.state), PlacementReason.TRAFFIC_MISMATCH),
    "38 groups of query heads": (
        replace(HEADS, groups=HEADS.groups * (GEOMETRY.query_heads // GEOMETRY.kv_heads)).check,
        PlacementReason.GROUP_COUNT,
    ),
    "39 a KV head in no group": (grouped(3, heads=(6,)).check, PlacementReason.GROUP_COVERAGE),
    "40 a buffer reused before its consumer": (
        grouped(2, filled_at=HEADS.groups[0].consumed_at - 1e-9).check,
        PlacementReason.SLOT_REUSE,
    ),
    "41 heads out of order": (
        replace(HEADS, output_order=tuple(reversed(HEADS.output_order))).check,
        PlacementReason.HEAD_ORDER,
    ),
    "42 head groups as CPU attention": (
        replace(HEADS, site=ComputeSite.CPU_FOR_THE_REQUEST).check,
        PlacementReason.PAPER_CLASSIFICATION,
    ),
    "43 a request on two devices": (
        replace(NEO, sides=frozenset({ComputeSite.CPU_FOR_THE_REQUEST, ComputeSite.GPU})).check,
        PlacementReason.PAPER_CLASSIFICATION,
    ),
    "44 stages summed": (replace(NEO, stated_seconds=8.60).check, PlacementReason.TIME_MODEL),
    "45 feasible out of balance": (
        replace(
            NEO,
            profile=(uneven := replace(PROFILE, cpu_1=0.70)),
            stated_seconds=4 * uneven.layer_seconds(),
        ).check,
        PlacementReason.TIME_MODEL,
    ),
    "46 near storage called exact": (
        replace(SPARF, stated_exact=True).check,
        PlacementReason.PLACEMENT_IS_NOT_EXACTNESS,
    ),
    "47 an exact path falls to SparF": (
        replace(SPARF, approximation_allowed=False).check,
        PlacementReason.UNDECLARED_APPROXIMATION,
    ),
    "48 a fixed cost dropped": (
        lambda: check_near_seconds(SHAPE, LINK, 0, unfixed()),
        PlacementReason.TIME_MODEL,
    ),
}


def test_what_was_not_mutated_passes() -> None:
    check_traffic(SHAPE, TRAFFIC)
    check_near_seconds(SHAPE, LINK, 0, LINK.seconds(SHAPE))
    check_near_seconds(SHAPE, LINK, 2, LINK.seconds(SHAPE, 2))
    for plan in run_step(INPUTS, 2).plans:
        plan.check()
    NEO.check()
    SPARF.check()


@pytest.mark.parametrize(("check", "reason"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_each_mutation_has_its_reason(check: Callable[[], None], reason: PlacementReason) -> None:
    with pytest.raises(PlacementRefused) as refused:
        check()
    assert refused.value.reason is reason, refused.value


def test_the_catalogue_is_whole() -> None:
    assert {int(name.split()[0]) for name in MUTATIONS} == {1, 2, 3, *range(38, 49)}
