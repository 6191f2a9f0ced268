"""Dashboard and alerts speak of metrics that exist, of all of them, and with labels that they have."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import yaml

from kvtier_operator.app import Operator
from kvtier_operator.controller import Result
from kvtier_operator.rollout.vocabulary import Cause
from kvtier_operator.watch.triggers import RECONCILED

REPOSITORY = Path(__file__).resolve().parents[3]
MONITORING = REPOSITORY / "charts" / "kvtier" / "monitoring"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvtier_monitoring", REPOSITORY / "hack" / "monitoring.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_metric_has_a_panel(generator: ModuleType) -> None:
    board = json.loads((MONITORING / "dashboard.json").read_text())
    text = json.dumps([panel.get("targets") for panel in board["panels"]])
    names = [one for many in generator.families().values() for one in many]
    assert len(names) > 40
    assert [one.name for one in names if one.exposed not in text] == []
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(places) == len(set(places)), "no two panels in one place"


def test_every_alert_is_a_rule(generator: ModuleType) -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [one.name for one in generator.ALERTS]
    for rule in rules:
        text = re.sub(r'"[^"]*"', "", rule["expr"])
        assert all(text.count(a) == text.count(b) for a, b in ("()", "[]", "{}"))
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["annotations"]["summary"].endswith(".")


def test_every_alert_leads_to_what_it_means_and_what_to_do(generator: ModuleType) -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    page = (REPOSITORY / "docs/runbooks/alerts.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert list(sections) == [one.name for one in generator.ALERTS]
    for rule in rules:
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (REPOSITORY / path).exists() and anchor == rule["alert"].lower()
        text = sections[rule["alert"]]
        assert all(part in text for part in ("**Means.** ", "```\nkubectl ", "**Do.** ")), rule["alert"]


def test_what_an_alert_takes_the_increase_of_begins_at_zero(generator: ModuleType) -> None:
    """`increase` and a short window see nothing of a series whose first sample is 1: the first rollback of a
    cause since the operator began, which is the one that counts, would not be told."""
    watched = {
        name for one in generator.ALERTS for name in re.findall(r"increase\((kvtier_\w+)", one.expression)
    }
    assert watched == {"kvtier_operator_rollbacks_total", "kvtier_operator_queue_refused_total"}
    operator = Operator(cast(Any, SimpleNamespace(limits={}, identity="a")), cast(Any, None))
    reconcilers = [cast(Any, SimpleNamespace(kind=kind)) for kind in RECONCILED]
    operator._build(reconcilers, lambda: None, cast(Any, None))
    seen = {
        (sample.name, *sample.labels.values()): sample.value
        for family in operator.metrics.registry.collect()
        for sample in family.samples
    }
    for cause in Cause:
        assert seen["kvtier_operator_rollbacks_total", cause.value] == 0
    for kind in RECONCILED:
        assert seen["kvtier_operator_queue_refused_total", kind.value] == 0


def test_values_that_alerts_look_for_are_values_that_are_emitted(generator: ModuleType) -> None:
    known = {
        "result": {one.value for one in Result},
        "code": {one.name for one in grpc.StatusCode},
    }
    found = [
        (label, value)
        for one in generator.ALERTS
        for label, values in re.findall(r'(\w+)=~"([^"]*)"', one.expression)
        for value in values.split("|")
    ]
    assert len(found) == 4
    assert [one for one in found if one[1] not in known[one[0]]] == []


WRONG: dict[str, tuple[str, str]] = {
    "no such metric": ("kvtier_operator_leaders > 1", "nothing registers kvtier_operator_leaders"),
    "a counter without _total": ("kvtier_agent_plan_failures > 1", "nothing registers"),
    "no such label": ('kvtier_operator_queue_depth{cache="a"} > 1', "no label"),
    "grouped by no such label": ("sum by (node) (kvtier_operator_queue_depth) > 1", "no label"),
    "buckets of a gauge": ("kvtier_operator_queue_depth_bucket > 1", "nothing registers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_alert_on_what_does_not_exist_is_refused(generator: ModuleType, case: str) -> None:
    expression, message = WRONG[case]
    bad: Any = replace(generator.ALERTS[0], expression=expression)
    with pytest.raises(ValueError, match=message):
        generator.check((bad,), generator.families())
