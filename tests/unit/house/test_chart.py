"""The chart fits the code: values exist, flags are known, the RBAC names what the code names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import yaml

from kvtier_operator import health
from kvtier_operator.cli import parser
from kvtier_operator.election import LEASE_NAME
from kvtier_operator.ports import LEASE_PREFIX
from tests.cluster.kvtier_localplane.audit import Grant, read_grants

CHART = Path(__file__).resolve().parents[3] / "charts" / "kvtier"
RBAC = sorted((CHART / "rbac").glob("*.yaml"))


def _operator_grants() -> tuple[Grant, ...]:
    return read_grants(RBAC, service_account="kvtier-operator", namespace="kvtier-system")


def _used_values() -> set[str]:
    used: set[str] = set()
    for template in (CHART / "templates").glob("*.yaml"):
        used |= set(re.findall(r"\.Values((?:\.\w+)+)", template.read_text()))
    assert used
    return used


def test_templates_use_values_that_exist() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in sorted(_used_values()):
        here: Any = values
        for name in path.strip(".").split("."):
            assert name in here, f"values.yaml has no {path}"
            here = here[name]


def _paths(values: Any, above: str = "") -> list[str]:
    if not isinstance(values, dict) or not values:
        return [above]
    return [path for name, value in values.items() for path in _paths(value, f"{above}.{name}")]


def test_every_value_is_read_by_a_template() -> None:
    """One that is written down and that nobody reads would change nothing, and not say so."""
    used = _used_values()
    paths = _paths(yaml.safe_load((CHART / "values.yaml").read_text()))
    assert len(paths) > 12
    unread = [path for path in paths if not any(f"{path}.".startswith(f"{one}.") for one in used)]
    assert unread == []


def test_the_deployment_passes_flags_that_the_operator_knows() -> None:
    template = (CHART / "templates" / "operator.yaml").read_text()
    passed = set(re.findall(r"- (--[a-z-]+)=", template))
    options = {one for action in parser()._actions for one in action.option_strings}
    required = {action.option_strings[0] for action in parser()._actions if action.required}
    assert passed <= options
    assert required <= passed


def test_the_deployment_asks_what_the_operator_serves() -> None:
    template = (CHART / "templates" / "operator.yaml").read_text()
    probes = dict(re.findall(r"(\w+)Probe:\s+httpGet: \{path: (/\w+), port: liveness\}", template))
    assert probes == {"liveness": "/healthz", "readiness": "/readyz"}
    served = set(re.findall(r'web\.get\("(/\w+)"', inspect.getsource(health)))
    assert set(probes.values()) <= served


def test_the_lease_of_the_operator_is_the_one_it_may_update() -> None:
    updates = [grant for grant in _operator_grants() if grant.resource == "leases" and grant.verb == "update"]
    assert updates == [Grant("update", "coordination.k8s.io", "leases", LEASE_NAME, "kvtier-system")]


def test_an_agent_may_do_what_its_registration_does_and_no_more() -> None:
    documents = list(yaml.safe_load_all((CHART / "rbac" / "agent.yaml").read_text()))
    given = {
        (role["metadata"]["name"], verb, resource)
        for role in documents
        if role["kind"] == "ClusterRole"
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert given == {
        # Server-side apply of an object that may not be there yet.
        ("kvtier-agent", "create", "leases"),
        ("kvtier-agent", "patch", "leases"),
        ("kvtier-agent-node", "create", "kvnodes"),
        ("kvtier-agent-node", "patch", "kvnodes"),
        ("kvtier-agent-node", "patch", "kvnodes/status"),
        # Whether somebody deleted it.
        ("kvtier-agent-node", "get", "kvnodes"),
    }


def test_the_lease_policy_names_the_agents_leases() -> None:
    assert (
        f"object.metadata.name == '{LEASE_PREFIX}' + node" in (CHART / "rbac" / "policies.yaml").read_text()
    )


def test_the_operator_has_no_wide_or_dangerous_right() -> None:
    for grant in _operator_grants():
        assert "*" not in (grant.verb, grant.group, grant.resource)
        assert grant.resource not in ("secrets", "pods", "pods/exec", "serviceaccounts/token")
        assert grant.verb not in ("escalate", "impersonate", "deletecollection")
    binds = [grant for grant in _operator_grants() if grant.verb == "bind"]
    assert [(grant.resource, grant.name) for grant in binds] == [("clusterroles", "kvtier-agent")]
