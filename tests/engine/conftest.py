"""Fixtures of the engine suite: a tiny random decoder, a reference agent and a client of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier_client.client import AttentionClient
from tests.engine.agent_process import forked_agents
from tests.engine.fake_agent import FakeAgent, serve
from tests.engine.tinymodel import tiny_llama


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def agents_are_forks() -> Iterator[None]:
    """Of one process that starts with the first of them."""
    with forked_agents():
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    return tiny_llama()


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A short path: a Unix socket's name may hold about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        yield Path(folder) / "engine.sock"


@pytest.fixture
def agent(socket_path: Path) -> Iterator[FakeAgent]:
    with serve(FakeAgent(), socket_path) as running:
        yield running


@pytest.fixture
def client(agent: FakeAgent, socket_path: Path) -> Iterator[AttentionClient]:
    with AttentionClient(socket_path, timeout=10.0) as c:
        yield c
