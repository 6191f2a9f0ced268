"""Sessions that start from blocks: what a call holds goes back after its step, however the call ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvtier.v1 import blocks_pb2
from kvtier_agent import blocksessions
from kvtier_agent.blockcalls import BlockCalls
from kvtier_agent.blocksessions import BlockSessions
from kvtier_agent.engine_port import EngineRunner
from kvtier_agent.node import Node

WAIT_SECONDS = 60.0


class Scope:
    """A fetch. order: of what happened to it."""

    over = True

    def __init__(self, order: list[str]) -> None:
        self.order = order
        self.closed = threading.Event()

    def close(self) -> None:
        self.order.append("given back")
        self.closed.set()


class Host:
    """Threads and waits of a block host, at once."""

    def __init__(self, scope: Scope) -> None:
        self.store = SimpleNamespace(fetch=lambda keys, **terms: scope)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        yield

    async def run(self, function: Callable[[], Any]) -> Any:
        return function()

    async def until(self, done: Callable[[], bool], deadline: float) -> bool:
        return done()

    def give_back(self, function: Callable[[], None]) -> None:
        function()


async def test_what_a_call_holds_stays_until_its_step_is_over_though_its_caller_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    scope = Scope(order)
    entered, opened = threading.Event(), threading.Event()
    runner = EngineRunner(cast(Any, SimpleNamespace(close=lambda: None)), "s", 8)

    def start(session_id: str, generation: int, fetch: object, asked: bytes) -> int:
        entered.set()
        assert opened.wait(WAIT_SECONDS)
        order.append("started")
        return 4

    caller = SimpleNamespace(namespace=b"n" * 32)
    call = SimpleNamespace(host=Host(scope), source=None, manifest=None, caller=caller, deadline=1.0)
    handle = SimpleNamespace(session_id="s", generation=1)
    session = SimpleNamespace(host=SimpleNamespace(runner=runner, blocks_beside=None), handle=handle)

    class Given(BlockSessions):
        def _of(self, scope: object, session_id: str, generation: int) -> Any:
            return call, session, SimpleNamespace(start=start)

    monkeypatch.setattr(blocksessions, "_keys", lambda *_: np.zeros((1, 32), dtype=np.uint8))
    sessions = Given(cast(Node, SimpleNamespace(boot_id="b")), cast(BlockCalls, None))
    request = blocks_pb2.StartSessionRequest(span=blocks_pb2.BlockSpan(tokens=b"\0" * 4))
    task = asyncio.ensure_future(sessions.start(request))
    assert await asyncio.to_thread(entered.wait, WAIT_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    opened.set()
    assert await asyncio.to_thread(scope.closed.wait, WAIT_SECONDS)
    assert order == ["started", "given back"]
    assert (await sessions.start(request)).rows == 4
    assert order[-1] == "given back"
    assert await runner.close(WAIT_SECONDS)
