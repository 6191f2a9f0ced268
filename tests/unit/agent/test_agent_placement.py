"""A manifest's placement policy on a real engine of the agent: steps follow it, and answers do not change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvtier_agent.config import TierConfig
from kvtier_agent.core_engine import CoreEngine
from kvtier_agent.engine_port import FrameInput, FrameMode, SessionTerms
from kvtier_agent.tierdirs import NodeTiers
from kvtier_core.errors import CoreError, Reason
from kvtier_crds.canonical import Parameters, Scalar
from kvtier_crds.manifest import Placement, TierRole
from tests.engine.agent_process import baseline_manifest, default_tiers

EXACT = FrameMode(publish_candidate=False, compare=False, candidate=None, may_publish=lambda: False)
MODEL = baseline_manifest().model.geometry
CHUNK = baseline_manifest().chunk_tokens
TOKENS = 6 * CHUNK
# 8 chunks of a layer, and all that two layers need.
BUDGETS = {"gpu-sim": 2 << 20, "dram": 16 << 20, "nvme": 0}

FLEX_GEN: dict[str, Scalar] = {
    "promptTokens": TOKENS,
    "outputTokens": 16,
    "batchSequences": 1,
    "maxBatches": 2,
    "gridSteps": 4,
    "attention": "host",
    "weights.bytesPerLayer": 1 << 20,
    "weights.gpuPercent": 100,
    "weights.cpuPercent": 0,
    "weights.diskPercent": 0,
    "activations.bytesPerToken": 1024,
    "activations.gpuPercent": 100,
    "activations.cpuPercent": 0,
    "activations.diskPercent": 0,
    "linear.prefillSecondsPerToken": "0.0001",
    "linear.decodeSecondsPerSequence": "0.0001",
    "engineMemory.gpu": 1 << 30,
    "engineMemory.cpu": 0,
    "engineMemory.disk": 0,
}
WHOLE: dict[str, Scalar] = {
    "contextTokens": TOKENS,
    "linear.00": "64:0.001",
    "gpuAttention.00": "100000:0.01",
}
POLICIES: dict[str, tuple[Placement, str]] = {
    "recency": (Placement(policy="recency"), "supportPartition"),
    "flexGen": (Placement(policy="flexGen", parameters=Parameters(FLEX_GEN)), "supportPartition"),
    "headGroups": (
        Placement(policy="headGroups", parameters=Parameters({"stagingBytes": 16 << 20})),
        "headGroups",
    ),
    "wholeRequest": (Placement(policy="wholeRequest", parameters=Parameters(WHOLE)), "requestOnCpu"),
}


class Answered:
    """One session's prefill and a token over all rows of layer 0, under a placement policy."""

    def __init__(self, folder: Path, placement: Placement) -> None:
        configs = [TierConfig.parse(json.dumps(tier)) for tier in default_tiers(folder)]
        tiers = NodeTiers(configs, "uid-a")
        manifest = baseline_manifest(budgets=BUDGETS)
        resident = tuple(tier.model_copy(update={"role": TierRole.RESIDENT}) for tier in manifest.tiers)
        manifest = manifest.model_copy(update={"placement": placement, "tiers": resident})
        try:
            engine = CoreEngine(manifest, tiers.for_manifest(manifest))
            try:
                self._run(engine)
            finally:
                engine.close()
        finally:
            tiers.close()

    def _run(self, engine: CoreEngine) -> None:
        session = engine.open_session(SessionTerms("alpha", 0.125, TOKENS + 1, None))
        random = np.random.default_rng(3)
        for first, rows in [*((first, CHUNK) for first in range(0, TOKENS, CHUNK)), (TOKENS, 1)]:
            k, v, q = (
                random.standard_normal((rows, heads, MODEL.head_dim), dtype=np.float32).tobytes()
                for heads in (MODEL.kv_heads, MODEL.kv_heads, MODEL.query_heads)
            )
            frame = FrameInput(session.session_id, session.generation, 0, 0, first, k, v, first, q, 0, None)
            answer = engine.step(frame, EXACT)
        self.out, self.kind = answer.out, answer.receipt.plan_kind
        plan = engine.plan()
        assert plan is not None
        self.plan = plan


@pytest.mark.parametrize(("placement", "kind"), POLICIES.values(), ids=POLICIES.keys())
def test_steps_run_by_the_policys_plan_and_answer_as_under_recency(
    tmp_path: Path, placement: Placement, kind: str
) -> None:
    found = Answered(tmp_path / "policy", placement)
    assert found.kind == kind
    assert found.plan.policy == placement.policy and found.plan.schedule is not None
    assert found.out == Answered(tmp_path / "recency", Placement(policy="recency")).out


def test_an_unknown_policy_builds_no_engine(tmp_path: Path) -> None:
    with pytest.raises(CoreError) as error:
        Answered(tmp_path, Placement(policy="random"))
    assert error.value.reason is Reason.MANIFEST_INVALID
