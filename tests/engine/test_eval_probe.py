"""`kvtier-eval probe` against a live agent and SmolLM2: pairs become evidence, of this candidate only."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier.v1 import common_pb2, control_pb2, evidence_pb2
from kvtier_client.hf import geometry_of
from kvtier_crds.manifest import RuntimeManifest, Selector
from kvtier_eval import probecli
from kvtier_eval.cli import build_parser
from kvtier_eval.models import SMOLLM2, load
from kvtier_evidence.probeplan import prompt_digest
from kvtier_operator.reconcile.selector_indexes import CacheIndexes, Holding, index_ready
from tests.engine.agent_process import (
    CACHE,
    Agent,
    baseline_manifest,
    quest_candidate,
    running_agent,
    tiny_geometry,
)

PLAN: dict[str, Any] = {
    "model": {"path": SMOLLM2},
    "tasks": ["passkey", "appendedNeedle"],
    "lengths": [256],
    "seeds": [7],
    "promptsPerCell": 1,
}
NAMES = ("passkey/256/7/0", "appendedNeedle/256/7/0")
GATE = control_pb2.GateLimit(name="quality", metric="taskScoreDrop", limit="0.01")


@dataclass(frozen=True)
class Served:
    agent: Agent
    baseline: RuntimeManifest

    def granted(
        self, tokens: int, rollout: str, selector: Selector | None = None
    ) -> control_pb2.GrantRequest:
        candidate = quest_candidate(self.baseline, tokens, sink=0, recent=0)
        if selector is not None:
            candidate = candidate.model_copy(update={"selector": selector})
        return self.agent.grant(
            self.baseline,
            candidate,
            stage="Shadow",
            traffic="0",
            rollout_uid=rollout,
            gates=[GATE],
            ttl_ms=600_000,
        )

    def pairs(self, grant: control_pb2.GrantRequest) -> dict[str, evidence_pb2.ProbePair]:
        """What the window of a grant has, by prompt digest."""
        answer = self.agent.control.ReadEvidence(
            control_pb2.ReadEvidenceRequest(
                cache=CACHE, fence=common_pb2.Fence(value=grant.fence.value), window=grant.window
            ),
            timeout=30,
        )
        return {pair.prompt_digest: pair for pair in answer.increments.probes}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    geometry = geometry_of(load(SMOLLM2).model.config)
    baseline = baseline_manifest(
        tiny_geometry(geometry.layers, geometry.query_heads, geometry.kv_heads, geometry.head_dim)
    )
    with running_agent() as agent:
        agent.apply_baseline(baseline)
        yield Served(agent, baseline)


def probe(served: Served, plan: Path, *more: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, lines of standard output, standard error."""
    arguments = ["probe", "--plan", str(plan), "--socket", str(served.agent.socket_path), "--wait", "0"]
    arguments += ["--namespace", CACHE.namespace, "--cache", CACHE.name, "--gate", "quality", *more]
    parsed: argparse.Namespace = build_parser().parse_args(arguments)
    out, err = io.StringIO(), io.StringIO()
    status = probecli.main(parsed, out=out, err=err)
    return status, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()


def expecting(grant: control_pb2.GrantRequest, *, attempt: int = 1) -> list[str]:
    return ["--rollout-uid", grant.fence.rollout_uid, "--attempt", str(attempt), "--candidate", grant.digest]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(json.dumps(PLAN))
    return path


@pytest.mark.slow
def test_a_ruinous_budget_loses_prompts_that_a_wide_one_keeps(served: Served, plan: Path) -> None:
    """Both run over the same rows; what differs is what the candidate's selector reads."""
    wide = served.granted(4096, "wide")
    status, rows, err = probe(served, plan, *expecting(wide))
    assert (status, err.count("\n")) == (0, 1), err
    assert "no step left rows out" in err
    assert [row["prompt"] for row in rows[:-1]] == list(NAMES)
    exact = [row["exact"] for row in rows[:-1]]
    assert rows[-1]["reported"] == 2
    assert rows[-1]["meanDrop"] == 0.0
    pairs = served.pairs(wide)
    assert set(pairs) == {prompt_digest(name) for name in NAMES}
    assert {pair.probe_set_digest for pair in pairs.values()} == {rows[-1]["plan"]}
    assert all(pair.difference == 0.0 and not pair.missing for pair in pairs.values())

    narrow = served.granted(16, "narrow")
    status, rows, err = probe(served, plan, *expecting(narrow))
    assert (status, err) == (0, "")
    assert [row["exact"] for row in rows[:-1]] == exact, "the exact arm does not know the candidate"
    assert rows[-1]["withRowsLeftOut"] == 2
    assert rows[-1]["meanDrop"] > 0.3
    told = {row["prompt"]: row["exact"] - row["candidate"] for row in rows[:-1]}
    pairs = served.pairs(narrow)
    assert {name: round(pairs[prompt_digest(name)].difference, 4) for name in NAMES} == {
        name: round(value, 4) for name, value in told.items()
    }


OTHERS: dict[str, dict[str, Any]] = {
    "clusterKv": {"tokensPerCluster": 16, "sealTokens": 64, "clustersPerSeal": 4},
    "infinigen": {"partialDimensions": 19, "alpha": "4"},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(OTHERS))
def test_an_index_that_is_built_beside_the_steps_is_waited_for(
    served: Served, tmp_path: Path, family: str
) -> None:
    """Clusters and bases are made of the whole prompt, and an answer of five tokens does not take long;
    infinigen needs the model's weights and hidden states besides."""
    body = {
        "family": family,
        "parameters": OTHERS[family],
        "budget": {"tokens": 96, "capPolicy": "truncate"},
        "persistentRows": {"sink": 4, "recent": 16},
        "denseLayers": [0],
    }
    grant = served.granted(96, family, Selector.model_validate_json(json.dumps(body)))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN, "tasks": ["passkey"]}))
    status, rows, err = probe(served, path, *expecting(grant))
    assert (status, err) == (0, "")
    assert rows[0]["approximateSteps"] > 0
    assert set(served.pairs(grant)) == {prompt_digest(NAMES[0])}
    (held,) = served.agent.state().caches
    (reported,) = [one for one in held.indexes if one.of_candidate]
    assert (reported.family, reported.ready, reported.refused) == (family, 0, 0), "its session is closed"
    assert reported.builds > 0
    assert reported.hidden_seconds + reported.exposed_seconds > 0.0
    told = CacheIndexes("chat")
    told.add(served.agent.state(), Holding("chat", CACHE.uid, ("serving", "pool"), grant.digest))
    assert index_ready([told]).reason == "NoSessions"


@pytest.mark.parametrize(
    "more, status, message",
    [
        pytest.param(["--plan-digest", "sha256:" + "0" * 64], 2, "it was edited", id="edited-plan"),
        pytest.param(["--attempt", "1"], 2, "are given together or not at all", id="half-an-attempt"),
        pytest.param(["--namespace", "nowhere"], 3, "CACHE_UNKNOWN", id="unknown-cache"),
    ],
)
def test_what_it_refuses_is_said(
    served: Served, plan: Path, more: list[str], status: int, message: str
) -> None:
    found, rows, err = probe(served, plan, *more)
    assert (found, rows) == (status, [])
    assert message in err


def test_another_attempt_than_the_agents_is_not_reported_for(served: Served, plan: Path) -> None:
    grant = served.granted(16, "attempts")
    status, rows, err = probe(served, plan, *expecting(grant, attempt=2))
    assert (status, rows) == (3, [])
    assert "the agent holds attempt 1 of attempts" in err
    assert served.pairs(grant) == {}


def test_a_model_of_another_digest_is_refused(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN, "model": {"path": SMOLLM2, "digest": "sha256:" + "0" * 64}}))
    status, rows, err = probe(served, path)
    assert (status, rows) == (2, [])
    assert "the weights here are sha256:" in err


def test_without_a_candidate_it_waits_and_then_says_so(served: Served, plan: Path) -> None:
    served.agent.revoke()
    status, rows, err = probe(served, plan)
    assert (status, rows) == (3, [])
    assert "no candidate after 0 s" in err
