"""Sessions that start from blocks: what a call holds goes back after its step, however the call ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvtier.v1 import blocks_pb2
from kvtier_agent import blocksessions
from kvtier_agent.arriving import Arriving
from kvtier_agent.blockcalls import BlockCalls, Call
from kvtier_agent.blocksessions import BlockSessions
from kvtier_agent.engine_port import EngineRunner
from kvtier_agent.node import Node
from kvtier_core.errors import CoreError, Reason

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
        self.scope = scope
        self.store = SimpleNamespace(fetch=lambda keys, **terms: scope)
        self.refusal: CoreError | None = None
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        if self.refusal is not None:
            raise self.refusal
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
    sessions = Given(cast(Node, SimpleNamespace(boot_id="b", arriving=Arriving())), cast(BlockCalls, None))
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


class Moving(BlockSessions):
    """A session whose engine is replaced after `at` is asked: then it is given the blocks of `then`."""

    def __init__(self, at: Host, then: Host, start: Callable[..., int]) -> None:
        node = SimpleNamespace(boot_id="b", arriving=Arriving())
        super().__init__(cast(Node, node), cast(BlockCalls, None))
        self.hosts = [at, then]
        self.asked: list[Host] = []
        self.start_session = start

    def _of(self, scope: object, session_id: str, generation: int) -> Any:
        host = self.hosts.pop(0) if len(self.hosts) > 1 else self.hosts[0]
        caller = SimpleNamespace(namespace=b"n" * 32, source=())
        call = SimpleNamespace(host=host, source=None, manifest=None, caller=caller, deadline=1.0)
        handle = SimpleNamespace(session_id="s", generation=1)

        async def at_once(function: Callable[[], int], over: Callable[[], None]) -> int:
            self.asked.append(host)
            try:
                return function()
            finally:
                over()

        runner = SimpleNamespace(call=at_once)
        session = SimpleNamespace(host=SimpleNamespace(runner=runner, blocks_beside=None), handle=handle)
        return call, session, SimpleNamespace(start=self.start_session)


REQUEST = blocks_pb2.StartSessionRequest(span=blocks_pb2.BlockSpan(tokens=b"\0" * 4))


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocksessions, "_keys", lambda *_: np.zeros((1, 32), dtype=np.uint8))


def telling(reason: Reason) -> Callable[..., int]:
    """Refuses once, then starts."""
    refusals = [CoreError(reason, "replaced meanwhile")]

    def start(session_id: str, generation: int, fetch: object, asked: bytes) -> int:
        if refusals:
            raise refusals.pop()
        return 4

    return start


@pytest.mark.usefixtures("no_keys")
@pytest.mark.parametrize("reason", [Reason.NOT_VISIBLE, Reason.CACHE_UNKNOWN])
async def test_where_an_engine_takes_the_place_of_another_its_blocks_are_read(reason: Reason) -> None:
    former, adopted = Host(Scope([])), Host(Scope([]))
    sessions = Moving(former, adopted, telling(reason))
    assert (await sessions.start(REQUEST)).rows == 4
    assert sessions.asked == [former, adopted]
    assert former.scope.closed.is_set() and adopted.scope.closed.is_set()


@pytest.mark.usefixtures("no_keys")
async def test_blocks_that_take_no_calls_any_more_are_left_for_those_in_their_place() -> None:
    former, adopted = Host(Scope([])), Host(Scope([]))
    former.refusal = CoreError(Reason.CACHE_UNKNOWN, "the cache was removed")
    sessions = Moving(former, adopted, lambda *_: 4)
    assert (await sessions.start(REQUEST)).rows == 4
    assert sessions.asked == [adopted]


@pytest.mark.usefixtures("no_keys")
async def test_blocks_that_are_copied_at_the_second_try_have_until_the_calls_own_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who asks for a call's place again is given time as if it had just come."""
    hosts, deadlines, given = [Host(Scope([])), Host(Scope([]))], [1.0, 9.0], list[float]()

    class Given(Moving):
        def _of(self, scope: object, session_id: str, generation: int) -> Any:
            call, session, prefixes = super()._of(scope, session_id, generation)
            return Call(call.host, call.host, call.host, call.caller, deadlines.pop(0)), session, prefixes

    async def brought(keys: object, source: Call, into: object) -> None:
        given.append(source.deadline)

    monkeypatch.setattr(blocksessions, "bring", brought)
    monkeypatch.setattr(
        blocksessions, "call_for", lambda call, _: replace(call, host=cast(Any, hosts.pop(0)))
    )
    common = Host(Scope([]))
    assert (await Given(common, common, telling(Reason.NOT_VISIBLE)).start(REQUEST)).rows == 4
    assert given == [1.0, 1.0]


@pytest.mark.usefixtures("no_keys")
@pytest.mark.parametrize(
    ("reason", "moves", "late"),
    [
        pytest.param(Reason.CACHE_UNKNOWN, False, False, id="no-other-is-there"),
        pytest.param(Reason.STEP_ORDER, True, False, id="for-another-reason"),
        pytest.param(Reason.NOT_VISIBLE, True, True, id="after-its-deadline"),
    ],
)
async def test_what_is_refused_otherwise_is_not_tried_again(reason: Reason, moves: bool, late: bool) -> None:
    former, adopted = Host(Scope([])), Host(Scope([]))
    former.now = 2.0 if late else 0.0
    sessions = Moving(former, adopted if moves else former, telling(reason))
    with pytest.raises(CoreError) as refused:
        await sessions.start(REQUEST)
    assert refused.value.reason is reason
    assert sessions.asked == [former]
