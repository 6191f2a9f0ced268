"""Many reads of evidence in one call: each is answered as if it had been asked for alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier.v1 import common_pb2, control_pb2, evidence_pb2
from kvtier_agent import control_service
from kvtier_agent.control_service import ControlService
from kvtier_agent.errors import ERROR_METADATA_KEY
from kvtier_agent.evidence_windows import EvidenceWindows
from kvtier_agent.rpc import RpcScope
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_evidence.window import WindowKey
from tests.unit.agent.agent_fakes import NAME, Bench


class Call:
    """A gRPC context whose refusal is an exception."""

    class Refused(Exception):
        def __init__(self, detail: common_pb2.ErrorDetail) -> None:
            self.detail = detail

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: Any, details: str, trailing: tuple[tuple[str, bytes], ...]) -> None:
        raise Call.Refused(common_pb2.ErrorDetail.FromString(dict(trailing)[ERROR_METADATA_KEY]))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.apply()
    yield made
    await made.close()


def service(bench: Bench, seconds: float = 30.0) -> ControlService:
    telemetry = Telemetry("node-a", "serving/pool", bench.node.boot_id, "0", [])
    return ControlService(bench.node, RpcScope(telemetry, Metrics(CollectorRegistry()), seconds))


def item(bench: Bench, key: WindowKey, **changed: Any) -> control_pb2.ReadEvidenceRequest:
    window = evidence_pb2.WindowKey(
        rollout_uid=key.rollout_uid,
        attempt=key.attempt,
        stage=key.stage,
        step=key.step,
        candidate_digest=key.candidate_digest,
        baseline_digest=key.baseline_digest,
        gates_digest=key.gates_digest,
        opening_fence=key.opening_fence,
    )
    fields: dict[str, Any] = {"cache": NAME, "fence": common_pb2.Fence(value=bench.fence), "window": window}
    return control_pb2.ReadEvidenceRequest(**{**fields, **changed})


async def many(
    served: ControlService, items: list[control_pb2.ReadEvidenceRequest]
) -> list[control_pb2.ReadEvidenceResult]:
    request = control_pb2.ReadEvidenceManyRequest(items=items)
    answer = await served.ReadEvidenceMany(request, Call())  # type: ignore[arg-type]
    return list(answer.results)


async def alone(
    served: ControlService, one: control_pb2.ReadEvidenceRequest
) -> control_pb2.ReadEvidenceResult:
    try:
        evidence = await served.ReadEvidence(one, Call())  # type: ignore[arg-type]
    except Call.Refused as refused:
        return control_pb2.ReadEvidenceResult(error=refused.detail)
    return control_pb2.ReadEvidenceResult(evidence=evidence)


async def items_of_all_kinds(bench: Bench) -> list[control_pb2.ReadEvidenceRequest]:
    before = await bench.grant(stage="Shadow", traffic="0")
    key = await bench.grant()
    good = item(bench, key)
    return [
        item(bench, key, cache=common_pb2.CacheRef(namespace="serving", name="no", uid="no")),
        good,
        item(bench, key, fence=common_pb2.Fence(value=bench.fence - 1)),
        item(bench, before),
        item(bench, key, window=evidence_pb2.WindowKey(rollout_uid="another")),
        item(bench, key, epoch=bench.node.boot_id, ack_seq=0),
        item(bench, key, fence=common_pb2.Fence(value=bench.fence + 1)),
        good,
    ]


def reasons(results: list[control_pb2.ReadEvidenceResult]) -> list[str]:
    return [
        common_pb2.Reason.Name(one.error.reason) if one.WhichOneof("answer") == "error" else ""
        for one in results
    ]


async def test_each_item_is_judged_as_a_lone_one_is(bench: Bench) -> None:
    items, served = await items_of_all_kinds(bench), service(bench)
    results = await many(served, items)
    assert results == [await alone(served, one) for one in items]
    assert reasons(results) == ["CACHE_UNKNOWN", "", "FENCE_STALE", "", "WINDOW_UNKNOWN", "", "", ""]
    assert {one.evidence.epoch for one in results if one.HasField("evidence")} == {bench.node.boot_id}


async def test_a_defect_at_one_item_harms_no_other_and_tells_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = await bench.grant()
    read = EvidenceWindows.read

    def broken(self: EvidenceWindows, wanted: WindowKey, epoch: str, ack_seq: int) -> Any:
        if wanted.rollout_uid == "broken":
            raise ZeroDivisionError("a secret")
        return read(self, wanted, epoch, ack_seq)

    monkeypatch.setattr(EvidenceWindows, "read", broken)
    bad = item(bench, key, window=evidence_pb2.WindowKey(rollout_uid="broken"))
    results = await many(service(bench), [item(bench, key), bad, item(bench, key)])
    assert reasons(results) == ["", "INTERNAL", ""]
    assert "secret" not in results[1].error.message
    assert "ZeroDivisionError: a secret" in caplog.text


@pytest.mark.parametrize(("items", "refused"), [(0, False), (256, False), (257, True)])
async def test_items_are_bounded(bench: Bench, items: int, refused: bool) -> None:
    key = await bench.grant()
    asked = many(service(bench), [item(bench, key)] * items)
    if not refused:
        assert reasons(await asked) == [""] * items
        return
    with pytest.raises(Call.Refused) as caught:
        await asked
    assert common_pb2.Reason.Name(caught.value.detail.reason) == "BAD_ARGUMENT"


@pytest.mark.parametrize(
    ("room", "answered"), [(0, 1), (1, 1), (2, 2), (9, 4)], ids=["none", "one", "two", "all"]
)
async def test_an_answer_that_would_be_too_large_ends_early_but_never_before_the_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, room: int, answered: int
) -> None:
    """The rest is as it was: it can be asked for again."""
    key, served = await bench.grant(), service(bench)
    items = [item(bench, key)] * 4
    [one] = await many(served, items[:1])
    monkeypatch.setattr(control_service, "_ENOUGH_BYTES", room * one.ByteSize())
    assert await many(served, items) == [one] * answered


async def test_what_waits_for_the_loop_runs_between_items_and_the_deadline_is_kept(bench: Bench) -> None:
    items = [item(bench, await bench.grant())] * 100
    turns = 0

    async def engine() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(engine())
    await many(service(bench), items)
    assert turns >= len(items) - 1
    with pytest.raises(Call.Refused) as caught:
        await many(service(bench, seconds=0.0), items)
    assert common_pb2.Reason.Name(caught.value.detail.reason) == "DEADLINE"
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
