"""What engines give beside rows, on the agent's side: sessions that lack it, and weights kept once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.weights import WeightsShape
from kvtier_agent.cachesession import Session
from kvtier_agent.evidence_port import Outcome
from kvtier_agent.rowevidence import EngineGives, EvidenceAsked, RowEvidence
from kvtier_agent.sessionsevidence import SessionsEvidence, layer_weights
from kvtier_agent.weightstore import GivenWeights, WeightStore, check_shape, checked_weights
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import StepRequest
from kvtier_core.release.enforcement import ServedArm, SessionFacts
from kvtier_core.rowevidence import NO_EVIDENCE, Need
from tests.unit.agent.agent_fakes import Bench, frame

LACKING = CoreError(Reason.UNSUPPORTED, "emLlm needs surprisal", {"missing": "surprisal"})
SHAPE = WeightsShape(4, 6, True, 1e-5, 1, True)
MODEL = "sha256:" + "5" * 64


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.apply()
    yield made
    await made.close()


async def opened(bench: Bench, root: str = "root", **more: object) -> Session:
    host = next(iter(bench.node.caches.values()))
    facts = SessionFacts("beta", "", root, root, **more)  # type: ignore[arg-type]
    return await host.open_session(facts, 0.125, 100, "", EngineGives(frozenset([Need.PREFILL_QUERIES])))


async def test_sessions_that_lack_a_need_are_no_evidence_of_either_arm(bench: Bench) -> None:
    """Half of them would have been the candidate's: to drop only those would make the arms unlike."""
    await bench.grant(traffic="0.5", sample="1")
    bench.engine.lacking = LACKING
    sessions = [await opened(bench, f"root-{number}") for number in range(40)]
    assert {one.assignment.arm for one in sessions} == {ServedArm.BASELINE}
    assert not any(one.counted or one.assignment.sampled or one.window for one in sessions)
    assert not any(terms.candidate for terms in bench.engine.opened)
    told = {one.fallback for one in sessions}
    assert told == {"", "UNSUPPORTED"}
    for one in sessions:
        answer = await one.host.frames.attend(one, frame(one.handle.session_id, 0), 7)
        answer = await one.host.frames.attend(one, frame(one.handle.session_id, 1), 1)
        assert (answer.arm, answer.fallback, answer.compared_error) == (
            ServedArm.BASELINE,
            one.fallback,
            None,
        )
        assert one.host.report_outcome(one, Outcome(1, 0.1, 0.2, False, None)) == (
            "the session is exact: emLlm needs surprisal"
        )
    assert bench.engine.modes and not any(mode.publish_candidate for mode in bench.engine.modes)
    bench.engine.lacking = None
    assert (await opened(bench, "complete")).lacks is None


@pytest.mark.parametrize("arm", [ServedArm.BASELINE, ServedArm.CANDIDATE])
async def test_a_probe_of_the_candidate_is_refused_and_one_of_the_baseline_is_not(
    bench: Bench, arm: ServedArm
) -> None:
    await bench.grant()
    bench.engine.lacking = LACKING
    if arm is ServedArm.BASELINE:
        assert (await opened(bench, probe=True, forced_arm=arm)).lacks is None
        return
    with pytest.raises(CoreError) as refused:
        await opened(bench, probe=True, forced_arm=arm)
    assert refused.value is LACKING
    assert not bench.engine.opened


async def test_without_a_grant_nothing_is_lacking(bench: Bench) -> None:
    bench.engine.lacking = LACKING
    session = await opened(bench)
    assert (session.lacks, session.fallback) == (None, "")


# --- frames ----------------------------------------------------------------------------------------------


def request(first_query: int = 4, queries: int = 2) -> StepRequest:
    rows = torch.zeros(2, 1, 4)
    return StepRequest("s", 1, 0, 3, 4, rows, rows, first_query, torch.ones(queries, 2, 4), 0)


def evidence_of(*needs: Need) -> SessionsEvidence:
    made = SessionsEvidence()
    made.opened("s", EvidenceAsked(frozenset(needs), frozenset([3]), 4))
    return made


def test_a_session_that_asks_for_nothing_gets_the_request_as_it_came() -> None:
    made, asked = SessionsEvidence(), request()
    made.opened("s", None)
    assert made.completed(asked, None) is asked


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        pytest.param(request(), True, id="of-its-rows"),
        pytest.param(request(first_query=5, queries=1), False, id="of-the-last-row"),
        pytest.param(request(first_query=3), False, id="elsewhere"),
    ],
)
def test_queries_are_evidence_where_each_row_has_its_own(asked: StepRequest, given: bool) -> None:
    found = evidence_of(Need.PREFILL_QUERIES).completed(asked, None).evidence
    assert (found.queries is asked.q) is given
    assert given or found.queries is None
    assert evidence_of(Need.SURPRISAL).completed(asked, None).evidence == NO_EVIDENCE


def test_weights_go_with_every_later_frame_of_their_layer_and_to_forks() -> None:
    made = evidence_of(Need.WEIGHTS)
    kept = layer_weights(GivenWeights(SHAPE, "d", numbers()))
    made.bind("s", 3, kept)
    made.forked("s", "child")
    for name in ("s", "child"):
        asked = request()
        found = made.completed(
            StepRequest(name, 1, 0, 3, 4, asked.k, asked.v, 4, asked.q, 0),
            RowEvidence(np.ones((2, 4), np.float32), 2),
        )
        assert found.evidence.weights is kept and found.hidden_layer == 2
        assert found.evidence.hidden is not None and found.evidence.hidden.shape == (2, 4)
        made.closed(name)
    with pytest.raises(CoreError) as refused:
        made.bind("child", 3, kept)
    assert refused.value.reason is Reason.SESSION_UNKNOWN


# --- weights ---------------------------------------------------------------------------------------------


def numbers(seed: int = 0) -> bytearray:
    floats = np.random.default_rng(seed).standard_normal((SHAPE.size_bytes - 8) // 4, dtype=np.float32)
    return bytearray(floats.tobytes() + np.array([0.5]).tobytes())


def given(seed: int = 0) -> GivenWeights:
    data = numbers(seed)
    return checked_weights(SHAPE, SHAPE.digest(MODEL, 1, data), data, MODEL, 1)


def test_tensors_are_views_of_the_bytes_that_all_sessions_share() -> None:
    data = numbers()
    made = layer_weights(GivenWeights(SHAPE, "d", data))
    assert made.digest == "d"
    floats = np.frombuffer(bytes(data[:-8]), np.float32)
    assert made.bias is not None and made.inv_freq is not None
    assert np.array_equal(made.query.numpy(), floats[:24].reshape(4, 6))
    assert np.array_equal(made.bias.numpy(), floats[24:30])
    assert np.array_equal(made.norm_weight.numpy(), floats[30:])
    assert (made.inv_freq.tolist(), made.norm_eps, made.interleaved) == ([0.5], 1e-5, True)
    data[:4] = np.float32(7).tobytes()
    assert float(made.query[0, 0]) == 7
    plain = layer_weights(GivenWeights(WeightsShape(4, 6, False, 0.0, 0, False), "d", bytearray(4 * 28)))
    assert plain.bias is None and plain.inv_freq is None


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((WeightsShape(4, 6, True, 2e-5, 1, True), MODEL, 1), id="norm"),
        pytest.param((WeightsShape(4, 6, True, 1e-5, 1, False), MODEL, 1), id="rotation"),
        pytest.param((SHAPE, "sha256:" + "6" * 64, 1), id="model"),
        pytest.param((SHAPE, MODEL, 2), id="layer"),
        pytest.param((WeightsShape(6, 4, True, 1e-5, 1, True), MODEL, 1), id="widths"),
    ],
)
def test_equal_bytes_of_another_model_layer_or_shape_are_other_weights(
    other: tuple[WeightsShape, str, int],
) -> None:
    shape, model, layer = other
    assert shape.digest(model, layer, numbers()) != SHAPE.digest(MODEL, 1, numbers())


def test_a_cache_keeps_only_so_many_bytes_of_weights() -> None:
    alive = {"one"}
    store = WeightStore(alive.__contains__, max_bytes=2 * SHAPE.size_bytes)
    store.put("a", 1, given())
    store.used("a", 1, "one")
    with store.arriving(SHAPE.size_bytes), pytest.raises(CoreError) as refused:
        store.arriving(SHAPE.size_bytes).__enter__()
    assert refused.value.reason is Reason.NO_DESTINATION_CAPACITY
    assert refused.value.facts["held"] == str(2 * SHAPE.size_bytes)
    # What did not come has given its room back, and so does what no open session uses.
    store.put("b", 2, given(seed=2))
    with store.arriving(SHAPE.size_bytes):
        store.put("a", 2, given(seed=1))
    assert store.held_bytes == 2 * SHAPE.size_bytes
    assert store.held("b", 2, given(seed=2).digest) is None
    assert store.held("a", 1, given().digest) is not None


def test_weights_are_replaced_only_when_no_open_session_uses_them() -> None:
    alive = {"one"}
    store = WeightStore(alive.__contains__)
    first, second = given(), given(seed=1)
    assert store.put("a", 1, first) is first
    store.used("a", 1, "one")
    assert store.put("a", 1, given()) is first
    with pytest.raises(CoreError) as refused:
        store.held("a", 1, second.digest)
    assert refused.value.reason is Reason.MODEL_MISMATCH
    alive.clear()
    assert store.held("a", 1, second.digest) is None
    assert store.put("a", 1, second) is second


def test_what_one_tenant_says_of_a_model_is_no_other_tenants_business() -> None:
    """Bogus weights lock nobody else out, and nobody learns what another gave; equal ones are kept once."""
    store = WeightStore({"bogus", "honest"}.__contains__)
    bogus, honest = given(seed=1), given()
    store.put("a", 1, bogus)
    store.used("a", 1, "bogus")
    assert store.held("b", 1, bogus.digest) is None
    assert store.held("b", 1, honest.digest) is None
    kept = store.put("b", 1, honest)
    store.used("b", 1, "honest")
    assert (store.held("a", 1, bogus.digest), store.held("b", 1, honest.digest)) == (bogus, kept)
    assert store.put("c", 1, given()) is kept
    assert store.held_bytes == 2 * SHAPE.size_bytes


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    alive: set[str] = set()
    store = WeightStore(alive.__contains__)
    for number in range(5000):
        tenant, session = f"tenant-{number}", f"session-{number}"
        alive.add(session)
        store.put(tenant, 0, given())
        store.used(tenant, 0, session)
        if number:
            alive.remove(session)
    assert len(store._layers) <= 2000
    assert store.users("tenant-0", 0) == 1
    assert store.held_bytes == SHAPE.size_bytes


def test_sessions_that_come_and_go_leave_nothing_behind() -> None:
    alive: set[str] = set()
    store = WeightStore(alive.__contains__)
    store.put("a", 1, given())
    for number in range(1000):
        alive.clear()
        alive.add(f"session-{number}")
        store.used("a", 1, f"session-{number}")
    assert store.users("a", 1) <= 128
    with pytest.raises(CoreError):
        store.held("a", 1, "another")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        pytest.param(WeightsShape(0, 6, False, 0.0, 0, False), "hidden_size 0", id="no-width"),
        pytest.param(WeightsShape(70_000, 6, False, 0.0, 0, False), "hidden_size 70000", id="too-wide"),
        pytest.param(WeightsShape(4, 6, False, -1.0, 0, False), "norm_eps -1.0", id="negative-norm"),
        pytest.param(WeightsShape(4, 6, False, float("inf"), 0, False), "norm_eps inf", id="endless-norm"),
        pytest.param(WeightsShape(4, 6, False, 0.0, 5, False), "frequencies 5", id="frequencies"),
        pytest.param(WeightsShape(4, 6, False, 0.0, -1, False), "frequencies -1", id="negative-frequencies"),
    ],
)
def test_a_shape_that_no_layer_has_is_refused_by_name(shape: WeightsShape, words: str) -> None:
    with pytest.raises(CoreError) as refused:
        check_shape(shape, head_dim=8)
    assert refused.value.reason is Reason.SELECTOR_GEOMETRY
    assert words in refused.value.message
