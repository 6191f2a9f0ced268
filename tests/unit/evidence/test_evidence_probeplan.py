"""A probe plan: its size, the names of its prompts, and what is refused in which words."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_evidence.probeplan import PlanError, given_digest, parse_plan, prompt_digest
from kvtier_evidence.window import MAX_PROBES

GRID: dict[str, Any] = {
    "version": 1,
    "model": {"path": "smollm2-gguf"},
    "tasks": ["passkey", "multiKey"],
    "lengths": [512, 1024],
    "seeds": [1, 2, 3],
    "promptsPerCell": 4,
}


def text(**changes: Any) -> str:
    """The grid with some fields replaced, or removed where None."""
    body = {name: value for name, value in {**GRID, **changes}.items() if value is not None}
    return json.dumps(body)


def test_a_grid_is_every_task_at_every_length_with_every_seed() -> None:
    plan = parse_plan(text())
    names = [name for cell in plan.cells for name in cell.names()]
    assert plan.size == len(names) == len(set(names)) == 2 * 2 * 3 * 4
    assert names[0] == "passkey/512/1/0" and names[-1] == "multiKey/1024/3/3"
    assert plan.digest == "sha256:" + hashlib.sha256(text().encode()).hexdigest()
    assert prompt_digest(names[0]) != prompt_digest(names[1])


def test_the_guides_plan_is_one() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "probes.md").read_text()
    config_map = yaml.safe_load(guide.split("```yaml\n")[1].split("---")[0])
    plan = parse_plan(config_map["data"]["plan.json"])
    assert plan.size == 3 * 2 * 25
    assert plan.model is not None and plan.model.claim == "models"


def test_any_change_of_the_text_is_another_plan() -> None:
    assert parse_plan(text()).digest != parse_plan(text() + " ").digest != parse_plan(text(seeds=[1])).digest


def test_prompts_may_stand_in_the_plan_and_need_no_model() -> None:
    rows = [{"digest": "a"}, {"prompt": "2 + 2 =", "answer": " 4"}]
    plan = parse_plan(json.dumps({"prompts": rows}))
    assert (plan.size, plan.model) == (2, None)
    assert [one.digest for one in plan.prompts] == ["a", given_digest("2 + 2 =", " 4")]


@pytest.mark.parametrize(
    "body, message",
    [
        pytest.param("{", "not JSON", id="json"),
        pytest.param("[]", "a plan is a JSON object", id="array"),
        pytest.param(text(version=2), "version 2; legal: 1", id="version"),
        pytest.param(text(task="passkey"), "task: no such field; legal: version, model, tasks", id="field"),
        pytest.param(text(tasks=None), "tasks: legal: a list of 1 to 64", id="no-tasks"),
        pytest.param(text(tasks=[]), "tasks: legal: a list of 1 to 64", id="empty-tasks"),
        pytest.param(
            text(tasks=["passkey", "dropReposition"]),
            "tasks[1] 'dropReposition'; legal: passkey, multiKey, lastWins, appendedNeedle, twoHop, copySpan",
            id="task",
        ),
        pytest.param(text(tasks=[["passkey"]]), "tasks[0] ['passkey']; legal: passkey", id="task-type"),
        pytest.param(text(tasks=["passkey", "passkey"]), "tasks[1] 'passkey' repeats", id="repeat"),
        pytest.param(text(lengths=[64]), "lengths[0] 64; legal: 128 to 131072", id="length"),
        pytest.param(text(lengths=[512.0]), "lengths[0] 512.0; legal", id="length-float"),
        pytest.param(text(seeds=[-1]), "seeds[0] -1; legal: 0 to 2147483647", id="seed"),
        pytest.param(text(seeds=[True]), "seeds[0] True; legal", id="seed-bool"),
        pytest.param(text(promptsPerCell=0), "promptsPerCell 0; legal: 1 to 8192", id="count"),
        pytest.param(
            text(promptsPerCell=5000), f"60000 prompts; legal: at most {MAX_PROBES}", id="too-many-prompts"
        ),
        pytest.param(text(steps=0), "steps 0; legal: 1 to 512", id="steps"),
        pytest.param(text(deadlineSeconds=10), "deadlineSeconds 10; legal: 60 to 86400", id="deadline"),
        pytest.param(text(model={"path": ""}), "model.path ''", id="no-path"),
        pytest.param(text(model={"path": "../secret"}), "model.path '../secret'", id="path-outside"),
        pytest.param(text(model={"path": "--help"}), "model.path '--help'", id="path-flag"),
        pytest.param(
            text(model={"path": "/m", "claimName": "models"}),
            "relative to the volume",
            id="absolute-in-claim",
        ),
        pytest.param(text(model={"path": "m", "claimName": "A b"}), "model.claimName 'A b'", id="claim"),
        pytest.param(text(model={"path": "m", "digest": "abc"}), "model.digest 'abc'", id="digest"),
        pytest.param(text(model={"hostPath": "/"}), "model: legal: an object of path", id="host-path"),
        pytest.param(text(job={"memory": "much"}), "job.memory 'much'", id="memory"),
        pytest.param(text(job={"gpu": "1"}), "job: legal: an object of cpu and memory", id="job"),
        pytest.param(json.dumps({"prompts": []}), "prompts: legal: a list of at least one", id="no-prompts"),
        pytest.param(json.dumps({"prompts": ["x"]}), "prompts[0]: legal: an object", id="prompt-type"),
        pytest.param(json.dumps({"prompts": [{}]}), "prompts[0]: digest must be given", id="no-digest"),
        pytest.param(
            json.dumps({"prompts": [{"digest": "a"}, {"digest": "a"}]}), "prompts[1].digest a", id="twice"
        ),
        pytest.param(
            json.dumps({"model": {"path": "m"}, "prompts": [{"digest": "a"}]}),
            "prompts[0]: prompt and answer must be given, since the plan names a model",
            id="nothing-to-run",
        ),
        pytest.param(
            json.dumps({"prompts": [{"digest": "a"}], "lengths": [1]}), "lengths: no such field", id="both"
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_is_legal(body: str, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse_plan(body)
    assert message in str(refused.value)
