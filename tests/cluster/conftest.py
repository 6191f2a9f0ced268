"""What only tests against a cluster share: a second control plane, with controllers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster.kvtier_localplane import Cluster


@pytest.fixture(scope="session")
def control_plane_with_controllers(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """An API server with controllers and with kvtier installed, for the whole run; started, and built, by the
    first test that asks for it. Apart from `control_plane`: there, tests play the controllers' part."""
    from tests.cluster.kvtier_localplane import open_cluster
    from tests.cluster.operator_harness import install

    named = request.config.getoption("--kubeconfig")
    with open_cluster(named, controller_manager=True, before_controllers=install) as cluster:
        yield cluster
