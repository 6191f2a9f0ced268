"""What every suite shares: the cluster option and the lazily started control plane."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.cluster.kvtier_localplane import Cluster

E2E_TIMEOUT_S = 1200
SUITES = ("unit", "kernels", "engine", "cluster", "e2e", "simulation", "bench")

# Under CI the same examples every time, so that what fails there can be repeated; elsewhere new ones.
# No deadline per example, and none for making them: on a busy machine both would measure the neighbours.
settings.register_profile(
    "kvtier",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvtier")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kubeconfig",
        default=None,
        help="run cluster tests on this cluster instead of a local control plane (also: KVTIER_KUBECONFIG)",
    )


def pytest_collection_finish() -> None:
    """What all tests of the process share is not looked through for garbage again and again, so that what one
    test drops, descriptors among it, is found soon. And no test has a distributed tensor; assert_close would
    look for one, and import that for seconds."""
    gc.collect()
    gc.freeze()
    comparison = sys.modules.get("torch.testing._comparison")
    if comparison is not None:
        vars(comparison)["_HAS_DTENSOR"] = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first folder below tests/ is the suite, and its marker."""
    here = Path(__file__).parent
    for item in items:
        suite = item.path.relative_to(here).parts[0]
        if suite in SUITES:
            item.add_marker(suite)
        if suite == "e2e" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
    _place_whole_suite_tests(config, items)


def _place_whole_suite_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that judge what all others of their suite have done come last, and only when all have been asked
    for: whole folders on the command line, and nothing selected among them."""
    late = [item for item in items if item.get_closest_marker("whole_suite")]
    folders = [Path(str(one).partition("::")[0]).resolve() for one in config.args]
    chosen = config.option.keyword or config.option.markexpr or config.option.deselect
    kept = [item for item in late if not chosen and any(folder in item.path.parents for folder in folders)]
    items[:] = [item for item in items if item not in late] + kept
    config.hook.pytest_deselected(items=[item for item in late if item not in kept])


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One API server for the whole run; started by the first test that asks for it."""
    from tests.cluster.kvtier_localplane import open_cluster

    with open_cluster(request.config.getoption("--kubeconfig")) as cluster:
        yield cluster
