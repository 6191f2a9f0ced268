"""What every suite shares: the cluster option and the lazily started control plane."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.cluster.kvtier_localplane import Cluster

SUITES = ("unit", "kernels", "engine", "cluster", "e2e", "bench")

# Under CI the same examples every time, so that what fails there can be repeated; elsewhere new ones.
# No deadline per example: on a busy machine it would measure the neighbours.
settings.register_profile("kvtier", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("kvtier")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kubeconfig",
        default=None,
        help="run cluster tests on this cluster instead of a local control plane (also: KVTIER_KUBECONFIG)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first folder below tests/ is the suite, and its marker."""
    here = Path(__file__).parent
    for item in items:
        suite = item.path.relative_to(here).parts[0]
        if suite in SUITES:
            item.add_marker(suite)


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One API server for the whole run; started by the first test that asks for it."""
    from tests.cluster.kvtier_localplane import open_cluster

    with open_cluster(request.config.getoption("--kubeconfig")) as cluster:
        yield cluster
