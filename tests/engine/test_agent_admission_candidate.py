"""A real agent and a candidate whose transfers have other bounds: its sessions share blocks of their engine
under these, start from what the baseline's published, and an adoption keeps blocks and bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.v1 import common_pb2
from kvtier_crds.manifest import Admission, AdmissionPolicy
from tests.engine.agent_process import Agent, detail_of, running_agent
from tests.engine.test_agent_blocks_sessions import CHUNK, MANIFEST, NEW, client_of, followed_by

pytestmark = pytest.mark.timeout(300)

LINK = 4 << 20
BOUNDS = Admission(link_bytes=LINK, queue=33, policy=AdmissionPolicy.EARLIEST_DEADLINE)
CANDIDATE = MANIFEST.admitting(BOUNDS)
HOUR_MS = 3_600_000
BEGINS = 3 * CHUNK


def bounds(agent: Agent) -> tuple[str, int, int, str]:
    """The baseline's digest and what its transfers may take."""
    [cache] = agent.state().caches
    said = cache.admission
    return cache.baseline_digest, said.link_bytes, said.queue, said.policy


def highest(agent: Agent) -> int:
    [cache] = agent.state().caches
    return cache.highest_fence


def test_bounds_are_proved_shared_returned_from_and_adopted(tmp_path: Path, tiny_model: Any) -> None:
    first, second = followed_by(7, 8, 9), followed_by(20, 21)
    with running_agent(folder=tmp_path) as agent, client_of(agent, tiny_model) as client:
        agent.apply_baseline(MANIFEST)
        want = tiny_model.generate(second, **NEW)
        client.answer(first, start=True, publish=True)

        request = agent.grant(MANIFEST, CANDIDATE, ttl_ms=HOUR_MS)
        proof = agent.prove(request.fence.value)
        assert (proof.baseline_digest, proof.candidate_digest) == (MANIFEST.digest(), CANDIDATE.digest())
        for _ in range(2):
            rows, out = client.answer(second, start=True)
            assert (rows, out.tolist()) == (BEGINS, want.tolist())
        assert bounds(agent)[:2] == (MANIFEST.digest(), 0), "the baseline's own are as they were"

        proof = agent.revoke()
        assert (proof.baseline_digest, proof.candidate_digest) == (MANIFEST.digest(), "")
        rows, out = client.answer(second, start=True)
        assert (rows, out.tolist()) == (BEGINS, want.tolist())

        agent.grant(MANIFEST, CANDIDATE, stage="Full", ttl_ms=HOUR_MS)
        assert client.answer(second, start=True)[0] == BEGINS
        assert agent.apply_baseline(CANDIDATE).running_digest == CANDIDATE.digest()
        assert bounds(agent) == (CANDIDATE.digest(), LINK, 33, "earliestDeadline")
        rows, out = client.answer(second, start=True)
        assert (rows, out.tolist()) == (BEGINS, want.tolist()), "its blocks stay with the engine"
        agent.kill()
    with running_agent(folder=tmp_path) as agent:
        assert bounds(agent) == (CANDIDATE.digest(), LINK, 33, "earliestDeadline")


def test_what_is_deleted_is_deleted_in_both_and_bounds_below_a_block_are_refused(
    tmp_path: Path, tiny_model: Any
) -> None:
    prompt = followed_by(7, 8, 9)
    with running_agent(folder=tmp_path) as agent, client_of(agent, tiny_model) as client:
        agent.apply_baseline(MANIFEST)
        client.answer(prompt, start=True, publish=True)
        before = highest(agent)
        with pytest.raises(grpc.RpcError) as refused:
            agent.grant(MANIFEST, MANIFEST.admitting(BOUNDS.model_copy(update={"link_bytes": 8})))
        assert common_pb2.Reason.Name(detail_of(refused.value).reason) == "STAGING_TOO_SMALL"
        assert highest(agent) == before, "no fence was spent"

        agent.grant(MANIFEST, CANDIDATE, ttl_ms=HOUR_MS)
        assert client.answer(prompt, start=True)[0] == BEGINS
        client.blocks.delete_tenant()
        assert client.answer(prompt, start=True)[0] == 0
        client.answer(prompt, start=True, publish=True)
        assert client.answer(prompt, start=True)[0] == BEGINS
