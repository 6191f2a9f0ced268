"""The comparison of granted with used rights, on hand-made roles and audit lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kvtier_localplane.audit import Grant, Use, read_grants, report, requests

ACCOUNT, NAMESPACE = "worker", "system"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"

RBAC = """
kind: ClusterRole
metadata: {name: wide}
rules:
- {apiGroups: [kvtier.dev], resources: [kvcaches, kvcaches/status], verbs: [get, patch]}
- {apiGroups: [apps], resources: [daemonsets], verbs: [create, patch]}
- {apiGroups: [rbac.authorization.k8s.io], resources: [clusterroles], resourceNames: [agent], verbs: [bind]}
- {apiGroups: [rbac.authorization.k8s.io], resources: [rolebindings], verbs: [create]}
---
kind: ClusterRoleBinding
metadata: {name: wide}
roleRef: {kind: ClusterRole, name: wide}
subjects: [{kind: ServiceAccount, name: worker, namespace: system}]
---
kind: Role
metadata: {name: own, namespace: system}
rules:
- {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [worker], verbs: [update]}
---
kind: RoleBinding
metadata: {name: own, namespace: system}
roleRef: {kind: Role, name: own}
subjects: [{kind: ServiceAccount, name: worker, namespace: system}]
---
kind: ClusterRoleBinding
metadata: {name: of-somebody-else}
roleRef: {kind: ClusterRole, name: not-here}
subjects: [{kind: ServiceAccount, name: worker, namespace: elsewhere}]
"""


def _event(
    verb: str,
    resource: str,
    *,
    group: str = "kvtier.dev",
    name: str = "chat",
    namespace: str = "serving",
    user: str = USER,
    code: int = 200,
    message: str = "",
) -> dict[str, Any]:
    plain, _, sub = resource.partition("/")
    target = {"resource": plain, "apiGroup": group, "name": name, "namespace": namespace, "subresource": sub}
    return {
        "requestReceivedTimestamp": "2026-01-02T03:04:05.250000Z",
        "user": {"username": user},
        "verb": verb,
        "objectRef": {key: value for key, value in target.items() if value},
        "responseStatus": {"code": code, "message": message},
    }


@pytest.fixture
def grants(tmp_path: Path) -> tuple[Grant, ...]:
    file = tmp_path / "rbac.yaml"
    file.write_text(RBAC)
    return read_grants([file], service_account=ACCOUNT, namespace=NAMESPACE)


def _log(tmp_path: Path, *events: dict[str, Any], tail: str = "") -> Path:
    log = tmp_path / "audit.log"
    log.write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return log


def test_grants_are_flattened_and_confined(grants: tuple[Grant, ...]) -> None:
    assert len(grants) == 9
    assert Grant("update", "coordination.k8s.io", "leases", "worker", NAMESPACE) in grants
    assert Grant("patch", "kvtier.dev", "kvcaches/status") in grants


ALL_USED = (
    _event("get", "kvcaches"),
    _event("patch", "kvcaches"),
    _event("get", "kvcaches/status"),
    _event("patch", "kvcaches/status"),
    _event("patch", "daemonsets", group="apps", code=201),
    _event("create", "rolebindings", group="rbac.authorization.k8s.io"),
    _event("update", "leases", group="coordination.k8s.io", name="worker", namespace=NAMESPACE),
)


def test_nothing_is_left_over_when_all_was_used(tmp_path: Path, grants: tuple[Grant, ...]) -> None:
    found = report(_log(tmp_path, *ALL_USED), grants, service_account=ACCOUNT, namespace=NAMESPACE)
    assert found.explain() == ""


@pytest.mark.parametrize(
    "missing, unused",
    [
        pytest.param(2, "unused: get kvcaches.kvtier.dev/status", id="subresource-is-a-right-of-its-own"),
        pytest.param(4, "unused: create daemonsets.apps\nunused: patch daemonsets.apps", id="apply-creates"),
        pytest.param(
            5,
            "unused: bind clusterroles.rbac.authorization.k8s.io agent\n"
            "unused: create rolebindings.rbac.authorization.k8s.io",
            id="bind-goes-with-a-binding",
        ),
        pytest.param(
            6, "unused: update leases.coordination.k8s.io worker in system", id="one-name-one-place"
        ),
    ],
)
def test_a_right_without_a_request_is_unused(
    tmp_path: Path, grants: tuple[Grant, ...], missing: int, unused: str
) -> None:
    events = [event for index, event in enumerate(ALL_USED) if index != missing]
    found = report(_log(tmp_path, *events), grants, service_account=ACCOUNT, namespace=NAMESPACE)
    assert found.explain() == unused


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(
            _event("update", "leases", group="coordination.k8s.io", name="worker", namespace="serving"),
            id="other-namespace",
        ),
        pytest.param(
            _event("update", "leases", group="coordination.k8s.io", name="x", namespace=NAMESPACE),
            id="other-name",
        ),
        pytest.param(_event("get", "kvcaches", user="kvtier-admin"), id="other-user"),
    ],
)
def test_a_request_beside_the_grant_does_not_use_it(
    tmp_path: Path, grants: tuple[Grant, ...], event: dict[str, Any]
) -> None:
    found = report(_log(tmp_path, event), grants, service_account=ACCOUNT, namespace=NAMESPACE)
    assert found.unused == grants


def test_a_refused_request_is_a_missing_right(tmp_path: Path, grants: tuple[Grant, ...]) -> None:
    refused = _event("delete", "kvrollouts", code=403)
    log = _log(tmp_path, *ALL_USED, refused, tail='{"half": ')
    found = report(log, grants, service_account=ACCOUNT, namespace=NAMESPACE)
    assert found.denied == {Use("delete", "kvtier.dev", "kvrollouts", "chat", "serving")}
    assert found.explain() == "missing: delete kvrollouts.kvtier.dev chat in serving"


def test_a_namespace_that_goes_away_is_no_missing_right(tmp_path: Path, grants: tuple[Grant, ...]) -> None:
    message = "unable to create new content in namespace serving because it is being terminated"
    log = _log(tmp_path, *ALL_USED, _event("create", "events", code=403, message=message))
    assert not report(log, grants, service_account=ACCOUNT, namespace=NAMESPACE).denied


def test_requests_have_their_time_and_subresource(tmp_path: Path) -> None:
    log = _log(tmp_path, _event("patch", "kvcaches/status"), _event("get", "kvcaches", user="other"))
    (only,) = requests(log, USER)
    assert (only.verb, only.resource, only.code) == ("patch", "kvcaches/status", 200)
    assert only.at == 1767323045.25


def test_a_binding_to_an_unknown_role_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rbac.yaml"
    file.write_text(RBAC)
    with pytest.raises(ValueError, match="no ClusterRole not-here"):
        read_grants([file], service_account=ACCOUNT, namespace="elsewhere")
