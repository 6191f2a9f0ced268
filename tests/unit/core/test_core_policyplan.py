"""Placement policies from a KVCache's spec to a node's plan: parameters as the operator writes them, what is
refused, and the plan with its numbers and with why everything else lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier_core.computeprobe import ComputeFigures
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.nodeplan import NodePlan, TierFigures, node_plan
from kvtier_core.placements.flexgen import AttentionSite, Split
from kvtier_core.placements.policy import (
    FlexGen,
    HeadGroups,
    Policy,
    Recency,
    WholeRequest,
    check_policy,
    policy_of,
)
from kvtier_core.placements.preference import RECENCY, PlacementPreference, PlanKind, TierShare
from kvtier_core.placements.wholerequest import Curve
from kvtier_core.policyplan import policy_plan, preference_of
from kvtier_core.units import GIB, MIB, BytesPerSecond, FlopPerSecond
from kvtier_crds.canonical import Parameters, Scalar
from kvtier_crds.compile import compile_manifest
from kvtier_crds.manifest import Placement, RuntimeManifest
from kvtier_crds.models import KVCache
from tests.unit.crds.crds_samples import UID, example, tier_classes

LAYERS, QUERY_HEADS = 30, 9
LAYOUT = ChunkLayout(3, 256, 64)
COMPUTE = ComputeFigures(1e-7, FlopPerSecond(5e10))
GPU = TierFigures("gpu", True, 170, True, BytesPerSecond(4.0 * GIB), "gpu", BytesPerSecond(4.0 * GIB))
DRAM = TierFigures("dram", True, 340, True, BytesPerSecond(4.0 * GIB), "cpu", BytesPerSecond(4.0 * GIB))
DISK = TierFigures(
    "disk", False, 5000, True, BytesPerSecond(500.0 * MIB), "nvme", BytesPerSecond(200.0 * MIB)
)
TIERS = (GPU, DRAM, DISK)


def compiled(name: str) -> RuntimeManifest:
    cache = KVCache.model_validate(example("KVCache", name))
    return compile_manifest(cache, UID, "serving", tier_classes(), None)


def policy(name: str) -> Policy:
    return policy_of(compiled(f"chat-{name}").placement)


def planned(chosen: Policy, *tiers: TierFigures) -> NodePlan:
    plan = policy_plan(chosen, LAYERS, QUERY_HEADS, LAYOUT, tiers or TIERS, COMPUTE)
    assert plan is not None
    assert plan.policy == chosen.name
    assert len(plan.inputs) <= 14 and len(plan.considered) <= 12
    assert all(len(text) <= 63 for pair in plan.inputs.items() for text in pair)
    return plan


# From the spec to the policy.


def test_what_the_operator_compiles_is_what_the_core_reads() -> None:
    flex = policy("flexgen")
    assert isinstance(flex, FlexGen)
    assert (flex.prompt, flex.output, flex.batch, flex.max_batches, flex.grid) == (512, 64, 1, 16, 20)
    assert flex.site is AttentionSite.HOST
    assert (flex.engine.weights, flex.engine.memory) == (Split(0.0, 1.0, 0.0), (256 * MIB, GIB, 0))
    assert (flex.engine.prefill_seconds, flex.engine.decode_seconds) == (0.0000944, 0.0004)
    assert policy("headgroups") == HeadGroups(4 * MIB, None, 0.00002)
    assert policy("wholerequest") == WholeRequest(
        512,
        Curve(((1, 0.0004), (64, 0.0022))),
        Curve(((1024, 0.0001), (65536, 0.0061))),
        None,
    )
    assert policy_of(Placement(policy="recency")) == Recency()


def test_equal_parameters_written_otherwise_are_one_manifest_and_others_are_another() -> None:
    document = example("KVCache", "chat-headgroups")
    block = document["spec"]["placement"]["headGroups"]

    def digest(**change: object) -> str:
        document["spec"]["placement"]["headGroups"] = block | change
        return compile_manifest(
            KVCache.model_validate(document), UID, "serving", tier_classes(), None
        ).digest()

    assert digest() == digest(stagingBytes=4 * MIB) == digest(launchSeconds="0.000020")
    assert len({digest(), digest(stagingBytes="5Mi"), digest(groupHeads=1)}) == 3


def changed(name: str, **values: Scalar | None) -> Placement:
    """The example's parameters with some changed; None: without it."""
    found = compiled(f"chat-{name}").placement
    items = {**found.parameters, **{key.replace("__", "."): value for key, value in values.items()}}
    return Placement(
        policy=found.policy,
        parameters=Parameters({key: value for key, value in items.items() if value is not None}),
    )


BAD: dict[str, tuple[Placement, Reason, str]] = {
    "a policy of another version": (Placement(policy="random"), Reason.MANIFEST_INVALID, "random"),
    "missing": (changed("flexgen", promptTokens=None), Reason.MANIFEST_INVALID, "promptTokens"),
    "of another type": (changed("flexgen", gridSteps="20"), Reason.MANIFEST_INVALID, "gridSteps"),
    "a boolean": (changed("flexgen", gridSteps=True), Reason.MANIFEST_INVALID, "gridSteps"),
    "too large": (changed("flexgen", gridSteps=51), Reason.MANIFEST_INVALID, "gridSteps"),
    "negative": (changed("flexgen", engineMemory__cpu=-1), Reason.MANIFEST_INVALID, "engineMemory.cpu"),
    "no site": (changed("flexgen", attention="moon"), Reason.MANIFEST_INVALID, "attention"),
    "not one whole": (changed("flexgen", weights__gpuPercent=99), Reason.MANIFEST_INVALID, "weights"),
    "no decimal": (changed("headgroups", launchSeconds="1e-5"), Reason.MANIFEST_INVALID, "launchSeconds"),
    "no staging": (changed("headgroups", stagingBytes=0), Reason.MANIFEST_INVALID, "stagingBytes"),
    "no point": (changed("wholerequest", linear__00="64"), Reason.MANIFEST_INVALID, "linear.00"),
    "points that fall": (changed("wholerequest", linear__01="1:0.1"), Reason.MANIFEST_INVALID, "ascend"),
}


@pytest.mark.parametrize(("placement", "reason", "names"), BAD.values(), ids=BAD.keys())
def test_a_parameter_that_is_none_is_refused_by_name(
    placement: Placement, reason: Reason, names: str
) -> None:
    with pytest.raises(CoreError) as error:
        policy_of(placement)
    assert error.value.reason is reason
    assert names in error.value.message


def test_a_slice_of_more_heads_than_there_are_is_refused_before_a_cache_is_built() -> None:
    manifest = compiled("chat-headgroups")
    check_policy(changed("headgroups", groupHeads=3), manifest.model.geometry)
    with pytest.raises(CoreError) as error:
        check_policy(changed("headgroups", groupHeads=4), manifest.model.geometry)
    assert error.value.reason is Reason.MANIFEST_INVALID
    assert "4 of 3 KV heads" in error.value.message


# From the policy to the plan.


def test_recency_plans_as_ever_and_tells_why_other_schedules_lost() -> None:
    plan = planned(Recency())
    assert plan == node_plan(LAYERS, QUERY_HEADS, LAYOUT, TIERS, COMPUTE)
    assert plan.preference == RECENCY
    assert plan.schedule is not None
    told = {item.name: item.lost for item in plan.considered}
    assert len(told) == 5 and plan.schedule not in told and all(told.values())


def test_flexgen_plans_a_block_with_its_shares_and_what_bound_it() -> None:
    """Eight batches are the first whose compute (3.6 ms a layer) outlasts the weights' way in (3.3 ms); three
    tenths of their rows are all that the first tier takes."""
    plan = planned(policy("flexgen"))
    assert plan.schedule == "zigzagBlock"
    assert plan.stall == pytest.approx(0.0), "compute bounds each layer, so nothing is exposed"
    assert plan.inputs["kvShares"] == "gpu 0.3, cpu 0.6, disk 0.1"
    assert plan.inputs["blockBatches"] == "8"
    assert plan.inputs["decodeBoundBy"] == "compute 0.003635 s a layer"
    assert plan.inputs["limitedBy"] == "nothing on the grid"
    assert "UNMEASURED" not in plan.inputs["lostPoints"]
    assert {item.name: item.lost for item in plan.considered} == {
        "allOnGpu": "GPU_BUDGET",
        "allOnCpu": "CPU_BUDGET",
        "allOnDisk": "SLOWER",
    }
    assert plan.preference.prefer is PlanKind.SUPPORT_PARTITION
    assert [(share.tier, round(share.share, 9)) for share in plan.preference.shares] == [
        (0, 0.3),
        (1, 0.6),
        (2, 0.1),
    ]


def test_flexgen_says_which_budget_stands_in_the_way() -> None:
    """Moved to the device for every step, rows want the first tier for their staging too."""
    moved = replace(policy("flexgen"), site=AttentionSite.DEVICE)
    plan = planned(moved, replace(GPU, slots=60), replace(DRAM, slots=60), DISK)
    assert plan.inputs["limitedBy"].startswith(("GPU_BUDGET, x", "CPU_BUDGET, x"))
    assert plan.stall is not None and plan.stall > 0.0
    assert plan.preference.prefer is PlanKind.ALL_ROWS_MOVED


def test_flexgen_shares_a_medium_out_to_its_tiers_by_their_size() -> None:
    small = replace(DRAM, name="dram-2", slots=170)
    plan = planned(policy("flexgen"), GPU, DRAM, small)
    shares = {share.tier: share.share for share in plan.preference.shares}
    assert shares[1] == pytest.approx(2 * shares[2])
    assert sum(shares.values()) == pytest.approx(1.0)


def test_head_groups_plan_the_longest_session_whose_slices_fit() -> None:
    """One of three KV heads of 4 MiB staging: 4096 cold rows at most. 340 slots below hold 11 chunks."""
    plan = planned(policy("headgroups"))
    assert plan.schedule == "headStaging"
    assert plan.inputs["coldTokens"] == str(11 * 256)
    assert plan.inputs["contextTokens"] == str((5 + 11) * 256)
    assert plan.inputs["groups"] == "3 of up to 1 KV heads"
    assert plan.stall is not None and plan.stall > 0.0
    told = {item.name: item.lost for item in plan.considered}
    assert told == {
        "1 groups of 3": "STAGING_TOO_SMALL",
        "2 groups of 2": "STAGING_TOO_SMALL",
        "disk": "TIER_INCAPABLE",
    }
    preference = plan.preference
    assert (preference.prefer, preference.staging_bytes) == (PlanKind.HEAD_GROUPS, 4 * MIB)


HEADLESS: dict[str, tuple[HeadGroups, tuple[TierFigures, ...], str]] = {
    "nothing lies away": (HeadGroups(4 * MIB, None, None), (GPU, DISK), "NOTHING_AWAY"),
    "not a chunk of one head fits": (HeadGroups(1000, None, None), TIERS, "STAGING_TOO_SMALL"),
    "a link that nobody measured": (
        HeadGroups(4 * MIB, None, None),
        (GPU, replace(DRAM, read=None)),
        "UNMEASURED",
    ),
}


@pytest.mark.parametrize(("chosen", "tiers", "reason"), HEADLESS.values(), ids=HEADLESS.keys())
def test_head_groups_say_why_there_is_no_schedule(
    chosen: HeadGroups, tiers: tuple[TierFigures, ...], reason: str
) -> None:
    plan = planned(chosen, *tiers)
    assert (plan.schedule, plan.inputs["reason"]) == (None, reason)
    assert (plan.stall is None) == (reason != "NOTHING_AWAY")


def test_whole_requests_plan_an_iteration_of_what_both_sides_hold() -> None:
    """Two chunks a request and layer: 2 on the GPU, 5 on the CPU. Four of those ride along, and the fifth
    hides behind a linear pass of its own."""
    plan = planned(policy("wholerequest"))
    assert (plan.schedule, plan.stall) == ("heterogeneous", pytest.approx(0.0))
    assert plan.inputs["requests"] == "2 on gpu, 5 on cpu"
    assert plan.inputs["subBatches"] == "6 and 1, 0 wait"
    assert plan.inputs["balanced"] == "yes"
    assert plan.inputs["cpuProfile"] == "measured by the agent"
    assert [(item.name, item.lost) for item in plan.considered] == [("gpuOnly", "FEWER_TOKENS_A_SECOND")]
    assert plan.preference.allowed == {PlanKind.REQUEST_ON_CPU, PlanKind.ALL_ROWS_MOVED}
    assert plan.preference.lost(PlanKind.SUPPORT_PARTITION) == "PLACEMENT_POLICY"
    assert plan.preference.lost(PlanKind.REQUEST_ON_CPU) == ""


UNPLANNED: dict[str, tuple[Policy, str]] = {
    "no profile": (WholeRequest(512, None, Curve(((1, 0.1),)), None), "no profile of linear"),
    "beyond the profile": (
        WholeRequest(512, Curve(((1, 0.1),)), Curve(((1, 0.1),)), None),
        "was not measured",
    ),
}


@pytest.mark.parametrize(("chosen", "says"), UNPLANNED.values(), ids=UNPLANNED.keys())
def test_a_policy_without_a_plan_says_so_and_still_states_what_steps_may_do(
    chosen: Policy, says: str
) -> None:
    plan = planned(chosen)
    assert (plan.schedule, plan.stall, plan.inputs["reason"]) == (None, None, "COST_MODEL")
    assert says in plan.inputs["detail"]
    assert plan.preference == preference_of(chosen)


def test_nothing_is_said_where_attention_was_not_measured() -> None:
    unknown = ComputeFigures(None, None)
    for name in ("flexgen", "headgroups", "wholerequest"):
        assert policy_plan(policy(name), LAYERS, QUERY_HEADS, LAYOUT, TIERS, unknown) is None


WRONG_PREFERENCES = {
    "nothing allowed": {"allowed": frozenset()},
    "prefers what it forbids": {
        "allowed": frozenset({PlanKind.HEAD_GROUPS}),
        "prefer": PlanKind.REQUEST_ON_CPU,
    },
    "no head": {"group_heads": 0},
    "negative staging": {"staging_bytes": -1},
    "shares of more than one": {"shares": (TierShare(0, 0.7), TierShare(1, 0.7))},
}


@pytest.mark.parametrize("fields", WRONG_PREFERENCES.values(), ids=WRONG_PREFERENCES.keys())
def test_a_preference_that_contradicts_itself_cannot_be_made(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"policy|slice|staging|shares"):
        PlacementPreference("test", **fields)  # type: ignore[arg-type]
