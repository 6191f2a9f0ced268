"""The operator's rights, no more and no less: what the whole cluster suite made it ask, against the chart.

Runs last, and only when the whole suite runs (tests/conftest.py sees to that): a part of it proves nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.kvtier_localplane import Cluster
from tests.cluster.kvtier_localplane.audit import read_grants, report

RBAC = sorted((Path(__file__).resolve().parents[2] / "charts" / "kvtier" / "rbac").glob("*.yaml"))
OPERATOR, NAMESPACE = "kvtier-operator", "kvtier-system"


@pytest.mark.whole_suite
def test_the_operator_has_every_right_it_needs_and_no_other(control_plane: Cluster) -> None:
    assert control_plane.audit_log is not None, "another's API server keeps its audit log to itself"
    grants = read_grants(RBAC, service_account=OPERATOR, namespace=NAMESPACE)
    found = report(control_plane.audit_log, grants, service_account=OPERATOR, namespace=NAMESPACE)
    assert found.used, "no operator ran in this suite"
    assert found.explain() == ""
