"""Plans of a real engine: forced, inspected, preferred, promised; with what receipts say of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvtier_core.edits.requests import EditRequest, Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.placements.preference import PlanKind
from kvtier_core.planning.facts import Rates
from kvtier_core.receipts import StepMode
from kvtier_core.tiers.staging import block_bytes
from tests.unit.core.builders import CHUNK, LAYERS, SLOT, Driver, Rows, TierBudget, cpu, engine, gpu, nvme

TOKENS, DECODE = 4 * CHUNK + 7, 3
SPREAD = [gpu(LAYERS), cpu(3), nvme(64)]
MEMORY = [gpu(LAYERS + 1), cpu(64)]
PLANS = [
    pytest.param(
        SPREAD, PlanKind.SUPPORT_PARTITION, {"gpu:partial", "cpu:partial", "nvme:near"}, id="partition"
    ),
    pytest.param(SPREAD, PlanKind.ALL_ROWS_MOVED, {"gpu:partial", "cpu:staged", "nvme:staged"}, id="moved"),
    pytest.param(MEMORY, PlanKind.HEAD_GROUPS, {"gpu:partial", "cpu:sliced"}, id="heads"),
    pytest.param([cpu(64)], PlanKind.REQUEST_ON_CPU, {"cpu:partial"}, id="on-cpu"),
]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows.random(TOKENS + DECODE)


@pytest.fixture(scope="module")
def want(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    with engine(tmp_path_factory.mktemp("all"), [gpu(64)]) as built:
        return Driver.open(built, rows).play(TOKENS, DECODE)


@pytest.mark.parametrize("ahead", [False, True], ids=["inline", "ahead"])
@pytest.mark.parametrize(("tiers", "kind", "labels"), PLANS)
def test_a_prefill_and_a_decode_by_a_forced_plan_have_the_same_bits(
    tmp_path: Path,
    rows: Rows,
    want: torch.Tensor,
    tiers: list[TierBudget],
    kind: PlanKind,
    labels: set[str],
    ahead: bool,
) -> None:
    mode = StepMode(plan=kind.value)
    with ThreadPoolExecutor(1) as pool, engine(tmp_path, tiers, reader=pool if ahead else None) as built:
        driver = Driver.open(built, rows)
        outs = [driver.forward(TOKENS, mode)]
        outs += [driver.forward(1, mode) for _ in range(DECODE)]
        receipts = [answer.receipt for answer in driver.answers]
    assert torch.equal(torch.cat(outs, dim=1), want)
    assert {receipt.plan_kind for receipt in receipts} == {kind.value}
    assert set(receipts[-1].plan) == labels
    assert receipts[-1].failed_plans == ()
    bound = 2 * TOKENS // CHUNK * SLOT + 8 * block_bytes(built.layout)
    assert max(receipt.peak_buffer_bytes for receipt in receipts) <= bound


def test_a_plan_that_is_none_or_not_legal_is_refused(tmp_path: Path, rows: Rows) -> None:
    with engine(tmp_path, SPREAD) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        for name, reason in (("fast", Reason.BAD_ARGUMENT), ("headGroups", Reason.NO_LEGAL_PATH)):
            with pytest.raises(CoreError) as refused:
                driver.forward(1, StepMode(plan=name))
            assert refused.value.reason is reason
        assert refused.value.facts["headGroups"] == "TIER_INCAPABLE"
        assert refused.value.facts["fallback"] == "REJECT_NO_LEGAL_PATH"
        driver.forward(1)


def test_why_plans_lost_can_be_looked_up(tmp_path: Path, rows: Rows) -> None:
    with engine(tmp_path, SPREAD, rates=Rates(1e-6)) as built:
        handle = Driver.open(built, rows).handle
        with pytest.raises(CoreError) as empty:
            built.inspect_plan(handle.session_id, handle.generation, 0)
        assert empty.value.reason is Reason.NOT_VISIBLE
    with engine(tmp_path / "b", MEMORY, rates=Rates(1e-6)) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        decision = built.inspect_plan(driver.handle.session_id, driver.handle.generation, LAYERS - 1)
        assert decision.chosen is not None
        assert decision.chosen.kind is PlanKind.SUPPORT_PARTITION
        assert decision.chosen.seconds == pytest.approx(1e-6 * 5 * CHUNK)
        assert decision.why() == {
            "requestOnCpu": "REQUEST_SPLIT",
            "allRowsMoved": "UNMEASURED",
            "headGroups": "UNMEASURED",
            "selectedSupport": "UNDECLARED_APPROXIMATION",
        }


def decoded(built: CacheEngine, driver: Driver, promise: bool) -> torch.Tensor:
    """One token; layers but the last promise the next."""
    outs = []
    first = driver.position
    for layer in range(LAYERS):
        request = driver.request(layer, first, first + 1, next_layer_follows=promise and layer + 1 < LAYERS)
        answer = built.step(request)
        driver.answers.append(answer)
        outs.append(answer.out)
    driver.position, driver.step = first + 1, driver.step + 1
    return torch.stack(outs)


@pytest.mark.parametrize("how", ["kept", "edited", "closed"])
def test_a_promise_brings_blocks_before_their_frame_and_changes_no_bit(
    tmp_path: Path, rows: Rows, want: torch.Tensor, how: str
) -> None:
    with engine(tmp_path, [cpu(LAYERS), nvme(64)]) as built:
        driver = Driver.open(built, rows)
        driver.forward(TOKENS)
        out = decoded(built, driver, promise=True)
        assert torch.equal(out, want[:, TOKENS : TOKENS + 1])
        receipt = driver.answers[-1].receipt
        assert receipt.promised_bytes == receipt.bytes_by_tier["flash"] == 4 * SLOT
        assert driver.answers[-2].receipt.promised_bytes == 0
        if how == "kept":
            again = decoded(built, driver, promise=True)
            assert torch.equal(again, want[:, TOKENS + 1 : TOKENS + 2])
            return
        # A promise is open when the session changes or ends.
        request = driver.request(0, driver.position, driver.position + 1, next_layer_follows=True)
        built.step(request)
        if how == "edited":
            handle = driver.handle
            built.edit_session(EditRequest(handle.session_id, handle.generation, Truncate(TOKENS)))
            driver.position, driver.step = TOKENS, driver.step + 1
            assert torch.equal(decoded(built, driver, promise=True), want[:, TOKENS : TOKENS + 1])
        driver.close()
        assert [tier.used_bytes for tier in built.stats().tiers] == [0, 0]
