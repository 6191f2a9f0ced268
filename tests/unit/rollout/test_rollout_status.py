"""The status is all a restarted operator has: read back is what was written, and the schema keeps it all."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from kvtier_crds.models.rolloutstatus import KVRolloutStatus
from kvtier_evidence.budgets import Cell
from kvtier_evidence.carry import Carry, FailCause, ProbePass
from kvtier_evidence.verdicts import Reason
from kvtier_operator.ports import Kind
from kvtier_operator.rollout.carrystatus import as_printed
from kvtier_operator.rollout.spec import parse_spec
from kvtier_operator.rollout.state import (
    CandidateRef,
    Condition,
    DesignEffect,
    ExcludedAgent,
    GateStatus,
    Holders,
    LastIntent,
    LostAgent,
    ManifestRef,
    Revocation,
    Rollback,
    RolloutState,
    Schedule,
    Window,
)
from kvtier_operator.rollout.status import from_status, to_status
from kvtier_operator.rollout.vocabulary import (
    STATUS_LIMIT_BYTES,
    CandidateClass,
    Cause,
    ConditionType,
    IntentResult,
    Phase,
    Stage,
    Verdict,
)
from kvtier_operator.watch.trimmed import trimmed
from tests.unit.rollout.rollout_world import World, copied

DIGEST = "sha256:" + "a" * 64
OLDER = Revocation("older", 1_800_000_001.0, 60.0, ("node-7", "node-8"), 2)
CARRY = Carry(
    cells=(Cell("output", "Shadow/0/2", 0.05, -1.25), Cell("tail", "Canary/0/3", 0.05, 2.5)),
    failed=FailCause("output", "Canary/0/3", Reason.BOUND_OUTSIDE_LIMIT),
    mismatched=frozenset({"Ramp/0/4"}),
    probe_passes={"quality": ProbePass(DIGEST, DIGEST, "0.01", 0.0, 0.005, 40)},
)


async def reached(stage: str) -> RolloutState:
    world = World()
    if stage == "RolledBack":
        world.feed.gates["output"] = Verdict.FAIL
    await world.until(
        stage if stage in ("RolledBack", "Completed") else "Progressing",
        "" if stage in ("RolledBack", "Completed") else stage,
    )
    return from_status(world.status)


def thresholds(state: RolloutState) -> Window:
    assert state.window is not None
    effects = (DesignEffect("tail", "1.95", 312, "20.5"),)
    return replace(
        state.window,
        effects=effects,
        pair_thresholds=(("tail", "0.0312"), ("tail-median", "1.5e-05")),
        probes=(("broken", "", 0), ("golden", DIGEST, 40)),
    )


@pytest.mark.parametrize("stage", ["Shadow", "Canary", "Ramp", "Full", "Completed", "RolledBack"])
async def test_reading_back_is_writing_again(stage: str) -> None:
    state = await reached(stage)
    rich = replace(state, carry=CARRY, lost=(LostAgent("node-7", 1_800_000_000.5),), revoking=OLDER)
    rich = replace(
        rich,
        excluded=(ExcludedAgent("node-9", "TIER_INCAPABLE", "boot-1"),),
        held_by_all=True,
        excluded_count=11,
    )
    rich = replace(rich, vanished=(LostAgent("node-6", 1_800_000_003.0),), holders=Holders(("node-5",), 7))
    rich = replace(rich, window=thresholds(state), pending_since=1_800_000_002.0)
    for one in (state, rich):
        status = to_status(one)
        assert from_status(status) == one
        assert to_status(from_status(status)) == status


async def test_schema_keeps_every_field() -> None:
    """A structural schema prunes what it does not know, and a restarted operator would miss it."""
    state = replace(await reached("RolledBack"), carry=CARRY, lost=(LostAgent("node-7", 1_800_000_000.5),))
    state = replace(state, revoking=OLDER, overridden=True)
    state = replace(state, vanished=(LostAgent("node-6", 1_800_000_003.0),), holders=Holders(("node-5",), 7))
    state = replace(
        state,
        excluded=(ExcludedAgent("node-9", "TIER_INCAPABLE", "boot-1"),),
        held_by_all=True,
        excluded_count=11,
    )
    assert state.rollback is not None
    state = replace(state, rollback=replace(state.rollback, lease_ttl=100.0))
    state = replace(state, window=thresholds(state), pending_since=1_800_000_002.0)
    gate = GateStatus("x", Verdict.FAIL, "r", "m", "1", "2", "3", 4, 5, "6", "Anytime", 1.8e9, True, True)
    status = to_status(replace(state, gates=(gate,)), deadline_seconds=60)
    kept = KVRolloutStatus.model_validate(status).model_dump(mode="json", by_alias=True)
    assert unknown(status, kept) == []


def unknown(wrote: Any, kept: Any, path: str = "") -> list[str]:
    """Paths that are in `wrote` and not, with the same value, in `kept`."""
    if isinstance(wrote, dict):
        return [
            missing
            for name, value in wrote.items()
            for missing in (
                unknown(value, kept[name], f"{path}.{name}") if name in kept else [f"{path}.{name}"]
            )
        ]
    if isinstance(wrote, list):
        pairs = zip(wrote, kept, strict=True)
        return [missing for a, b in pairs for missing in unknown(a, b, f"{path}[]")]
    return [] if wrote == kept else [f"{path}: {wrote!r} became {kept!r}"]


async def test_largest_status_stays_under_8_kib_and_readable() -> None:
    state = await reached("RolledBack")
    names = tuple(f"node-{'x' * 200}-{index}" for index in range(16))
    gates = tuple(
        replace(state.gates[0], name=f"gate-{'y' * 30}-{index}", value="1" * 20, bound="2" * 20)
        for index in range(30)
    )
    cells = tuple(Cell(f"gate-{'y' * 30}-{index}", "Canary/0/3", 0.05, float(index)) for index in range(64))
    assert state.rollback is not None
    huge = replace(
        state,
        gates=gates,
        carry=replace(CARRY, cells=cells),
        rollback=replace(state.rollback, missing=names, message="m" * 500),
    )
    status = to_status(huge)
    assert len(json.dumps(status, separators=(",", ":"))) < STATUS_LIMIT_BYTES
    back = from_status(status)
    assert (back.phase, back.stage, back.fence) == (state.phase, state.stage, state.fence)
    assert max(cell.log_e for cell in back.carry.cells) == 63.0


@pytest.mark.parametrize("count", [1, 4, 8, 16])
def test_every_list_at_its_longest_stays_under_8_kib(count: int) -> None:
    """Up to as many gates as the schema takes, each with a probe result and evidence of each step."""
    names = [f"g{index:02d}".ljust(40, "x") for index in range(count)]
    node = "n" * 250
    gate = GateStatus(
        "", Verdict.PASS, "BoundInsideLimit", "taskScoreDrop", "0.0123", "0.0345", "0.01", 18000
    )
    gates = [
        replace(gate, name=name, expected_n=18000, k="1.25", basis="ProbeSet", at=1.8e9) for name in names
    ]
    failing = replace(gate, name="tail-median", verdict=Verdict.FAIL, at=1.8e9)
    steps = [f"Ramp/{index}/{index + 3}" for index in range(10)]
    carry = Carry(
        cells=tuple(Cell(name, step, 0.01234567, 1.23456789) for name in names for step in steps),
        failed=FailCause("tail-median", steps[-1], Reason.BOUND_OUTSIDE_LIMIT),
        mismatched=frozenset(steps),
        probe_passes={name: ProbePass(DIGEST, DIGEST, "0.01", 0.0012, 0.0054, 200) for name in names},
    )
    state = RolloutState(
        phase=Phase.ROLLING_BACK,
        stage=Stage.EXACT_BASELINE,
        fence=12,
        baseline=ManifestRef(DIGEST, "r" * 80),
        candidate=CandidateRef(DIGEST, "r" * 80, CandidateClass.APPROXIMATE),
        candidate_hash="a" * 16,
        window=Window(
            12,
            1.8e9,
            "b" * 16,
            2,
            tuple((name, "0.031234567") for name in names),
            tuple(DesignEffect(name, "1.23456", 123456, "123.456") for name in names),
            tuple((name.ljust(253, "x"), DIGEST, 200) for name in names),
        ),
        gates=(*gates, failing),
        carry=carry,
        schedule=Schedule(1.8e9, 1.8e9, 0.1),
        lost=(LostAgent(node, 1.8e9),) * 8,
        holders=Holders((node,) * 16, 40),
        vanished=(LostAgent(node, 1.8e9),) * 8,
        excluded=(ExcludedAgent(node, "NO_DESTINATION_CAPACITY", "b" * 64),) * 8,
        rollback=Rollback(
            Cause.GATE_FAILED, "m" * 300, Stage.RAMP, 9, DIGEST, 1.8e9, gate=names[0], missing=(node,) * 16
        ),
        last_intent=LastIntent(4, "Promote", IntentResult.NOT_APPLICABLE, "m" * 200, 1.8e9),
        shares=3,
        revoking=Revocation("s" * 250, 1.8e9, 3600.0, (node,) * 16, 40),
        started_at=1.8e9,
        traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
        conditions=tuple(
            Condition(str(kind), "False", "NotRolledBack", "m" * 240, 7, 1.8e9) for kind in ConditionType
        ),
    )
    status = to_status(state, deadline_seconds=3600)
    assert len(json.dumps(status, separators=(",", ":"))) < STATUS_LIMIT_BYTES
    back = from_status(status)
    assert to_status(back, deadline_seconds=3600) == status
    assert (back.phase, back.stage, back.fence, back.shares) == (state.phase, state.stage, 12, 3)
    assert back.carry.failed == carry.failed
    assert steps[-1] in back.carry.mismatched
    assert "tail-median" in [kept.name for kept in back.gates]


def test_words_and_printed_numbers_are_one_object_in_all_states() -> None:
    """A thousand states are kept, each with some dozens of the same few, and the read cache has them too."""
    gate = GateStatus("out put", Verdict.PASS, "BoundInside", "a metric", "0.125", "0.25", "0.5", k="1.5")
    progressing = Condition(str(ConditionType.PROGRESSING), "True", "Observing", "", 1, 1_800_000_000.0)
    state = RolloutState(
        Phase.PROGRESSING, Stage.SHADOW, gates=(gate,), conditions=(progressing,), carry=CARRY
    )
    text = json.dumps(to_status(replace(state, holders=Holders(("node-7", "node-8"), 2))))
    one, two = (words(from_status(json.loads(text))) for _ in range(2))
    assert len(one) == 16 and "0.125" in one and "node-7" in one and "Canary/0/3" in one
    assert [id(word) for word in one] == [id(word) for word in two]


@pytest.mark.parametrize("stage", ["Canary", "RolledBack"])
async def test_a_state_is_read_alike_from_the_read_cache_and_from_the_server(stage: str) -> None:
    status = to_status(replace(await reached(stage), carry=CARRY))
    kept = trimmed(Kind.KV_ROLLOUT, {"metadata": {"name": "a"}, "status": status})
    assert from_status(kept["status"]) == from_status(status)


def test_evidence_is_carried_as_it_is_written_and_what_says_the_same_is_the_same() -> None:
    exact = replace(CARRY, cells=(Cell("output", "Shadow/0/2", 1 / 13, -2.0794415416798357), CARRY.cells[1]))
    known = from_status(to_status(RolloutState(Phase.PROGRESSING, Stage.SHADOW, carry=exact))).carry
    assert as_printed(exact, Carry()) == known != exact
    assert as_printed(exact, known) is known
    moved = replace(exact, cells=(exact.cells[0], replace(exact.cells[1], log_e=3.0)))
    found = as_printed(moved, known)
    assert found.cells[0] is known.cells[0]
    assert found.cells[1] == replace(known.cells[1], log_e=3.0)
    endless = replace(exact, cells=(replace(exact.cells[0], log_e=-math.inf),))
    assert as_printed(endless, known).cells[0].log_e == -math.inf


def test_rollouts_that_say_the_same_share_what_they_are_judged_by() -> None:
    raw = copied(World().api.objects[World().rollout]["spec"])
    other = copied(raw) | {"cacheRef": {"name": "another"}, "leaseTTL": "30s"}
    one, two = parse_spec(raw), parse_spec(other)
    assert (one.cache_name, two.cache_name, two.lease_ttl) == ("chat", "another", 30.0)
    assert one.terms is two.terms and one.window_hash != two.window_hash
    assert one.gates_of(one.ladder[1]) is two.gates_of(two.ladder[1])
    printed = copied(raw)
    printed["gates"][0]["max"] += "0"
    assert parse_spec(printed).gates_digest != one.gates_digest, "an equal number, written otherwise"
    fewer = copied(raw)
    fewer["stages"][1]["minSamples"] = 7
    assert parse_spec(fewer).gates_of(parse_spec(fewer).ladder[1]) != one.gates_of(one.ladder[1])


def words(state: RolloutState) -> list[str]:
    """Of gates, conditions, cells and holders."""
    (gate,), (row,) = state.gates, state.conditions
    found = [gate.name, gate.reason, gate.metric, gate.value, gate.bound, gate.limit, gate.k]
    found += [row.type, row.status, row.reason, *state.holders.names]
    return found + [word for cell in state.carry.cells for word in (cell.gate, cell.window)]
