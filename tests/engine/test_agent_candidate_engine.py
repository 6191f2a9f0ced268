"""A real agent with two engines of one cache: a candidate with other tiers serves, is compared, comes back in
the middle of a step with its rows, and becomes the baseline, also over a restart."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from kvtier.v1 import attention_pb2, common_pb2
from kvtier_core.tiers.nvme.verify import SUFFIX
from tests.engine.agent_process import Agent, baseline_manifest, detail_of, running_agent, until
from tests.engine.attention_driver import Driver, Engine

pytestmark = pytest.mark.timeout(600)

BASELINE = baseline_manifest()
# So little memory that rows of a prompt lie on storage, too.
CANDIDATE = baseline_manifest(budgets={"gpu-sim": 1 << 20, "dram": 1 << 20, "nvme": 48 << 20})
PROMPT = 1400
# No lease ends while a busy machine takes its time.
HOUR_MS = 3_600_000


def outputs(session: Driver, tokens: int) -> list[bytes]:
    """Of one step. Sessions draw the same rows and queries, so equal bits are equal answers."""
    return [session.output(answer).tobytes() for answer in session.forward(tokens)]


def stores(agent: Agent) -> set[str]:
    """Places in which the cache has a file on storage."""
    found = (agent.folder / "nvme").rglob(f"*{SUFFIX}")
    return {"second" if path.parent.name == "second" else "" for path in found}


def one_layer(session: Driver, layer: int) -> attention_pb2.AttendAnswer:
    """A frame of one token."""
    frame = session.frame(layer, 1, session.frontier)
    session.send(frame)
    answer = session.receive()
    assert not answer.HasField("error"), answer.error
    session.note(layer, frame)
    return answer


def ran(answers: list[attention_pb2.AttendAnswer]) -> set[tuple[str, int]]:
    return {(answer.receipt.manifest_digest, answer.receipt.exactness) for answer in answers}


EXACTLY_BASELINE = (BASELINE.digest(), attention_pb2.EXACT)
EXACTLY_CANDIDATE = (CANDIDATE.digest(), attention_pb2.EXACT)


def test_a_candidate_serves_from_its_own_tiers_and_comes_back_in_the_middle_of_a_step(tmp_path: Path) -> None:
    with running_agent(folder=tmp_path) as agent, Engine(agent.socket_path) as engine:
        agent.apply_baseline(BASELINE)
        plain = engine.open(BASELINE)
        expected = [outputs(plain, tokens) for tokens in (PROMPT, 1)]
        layers = [one_layer(plain, layer) for layer in range(2)]
        assert stores(agent) == {""}

        request = agent.grant(BASELINE, CANDIDATE, ttl_ms=HOUR_MS)
        assert stores(agent) == {"", "second"}
        assert agent.prove(request.fence.value).candidate_digest == CANDIDATE.digest()
        served = engine.open(BASELINE)
        assert served.opened.manifest_digest == CANDIDATE.digest()
        answers = served.forward(PROMPT)
        assert ran(answers) == {EXACTLY_CANDIDATE}
        assert answers[-1].receipt.bytes_by_tier["nvme"] > 0
        assert [served.output(answer).tobytes() for answer in answers] == expected[0]
        assert outputs(served, 1) == expected[1]

        first = one_layer(served, 0)
        proof = agent.revoke()
        second = one_layer(served, 1)
        assert (proof.baseline_digest, proof.candidate_digest) == (BASELINE.digest(), "")
        assert (ran([first]), ran([second])) == ({EXACTLY_CANDIDATE}, {EXACTLY_BASELINE})
        assert second.receipt.fallback == "IntentAbort"
        assert [first.out, second.out] == [answer.out for answer in layers]
        for session in (plain, served):
            session.step += 1
        assert outputs(served, 1) == outputs(plain, 1)
        until(lambda: stores(agent) == {""})

        too_much = baseline_manifest(budgets={"dram": 200 << 20})
        with pytest.raises(grpc.RpcError) as refused:
            agent.grant(BASELINE, too_much)
        detail = detail_of(refused.value)
        assert common_pb2.Reason.Name(detail.reason) == "NO_DESTINATION_CAPACITY"
        assert all(str(size << 20) in detail.message for size in (256, 64, 200)), detail.message


def test_an_adopted_candidate_takes_the_sessions_over_and_is_there_after_a_restart(tmp_path: Path) -> None:
    with running_agent(folder=tmp_path) as agent, Engine(agent.socket_path) as engine:
        agent.apply_baseline(BASELINE)
        plain = engine.open(BASELINE)
        expected = [outputs(plain, PROMPT)]
        agent.grant(BASELINE, CANDIDATE, stage="Full", sample="1", ttl_ms=HOUR_MS)
        # Compared, so it is in both engines.
        served = engine.open(BASELINE)
        assert served.opened.sampled
        assert outputs(served, PROMPT) == expected[0]

        assert agent.apply_baseline(CANDIDATE).running_digest == CANDIDATE.digest()
        both = [plain.forward(1), served.forward(1)]
        assert [ran(answers) for answers in both] == [{EXACTLY_CANDIDATE}] * 2
        assert [answer.out for answer in both[0]] == [answer.out for answer in both[1]]
        until(lambda: stores(agent) == {"second"})
        [cache] = agent.state().caches
        assert (cache.baseline_digest, cache.sessions) == (CANDIDATE.digest(), 2)

        agent.kill()
    with running_agent(folder=tmp_path) as agent, Engine(agent.socket_path) as engine:
        [cache] = agent.state().caches
        assert cache.baseline_digest == CANDIDATE.digest()
        again = engine.open(BASELINE)
        answers = again.forward(PROMPT)
        assert ran(answers) == {EXACTLY_CANDIDATE}
        assert [again.output(answer).tobytes() for answer in answers] == expected[0]
        assert stores(agent) == {"second"}
