"""What every unary call shares: who may call, span, deadline, typed refusal, measurement, a log line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from kvtier_agent.caller import anyone
from kvtier_agent.errors import ERROR_METADATA_KEY, status_of, to_detail
from kvtier_agent.telemetry import Metrics, Telemetry, mark_error
from kvtier_core.errors import CoreError, Reason

R = TypeVar("R", bound=Message)
T = TypeVar("T")
ServicerContext = grpc.aio.ServicerContext[Any, Any]
log = logging.getLogger(__name__)


class RpcScope:
    """Runs a handler's coroutine under the shared rules."""

    def __init__(
        self,
        telemetry: Telemetry,
        metrics: Metrics,
        deadline_seconds: float,
        admit: Callable[[ServicerContext], None] = anyone,
    ) -> None:
        """`admit` raises CoreError for a caller that may not call; then the handler never runs."""
        self._telemetry = telemetry
        self._metrics = metrics
        self._deadline_seconds = deadline_seconds
        self._admit = admit
        self._running: set[asyncio.Task[Any]] = set()

    async def run(
        self,
        method: str,
        context: ServicerContext,
        call: Coroutine[Any, Any, R],
        *,
        finish: bool = False,
        unwanted: Callable[[R], Awaitable[object]] | None = None,
    ) -> R:
        """The call's answer, or the gRPC call aborted with an ErrorDetail.

        With `finish` the call goes on when its caller left or its deadline passed: a command that was made
        durable must also be acted on. unwanted: takes back what such a call made when it ends with an answer
        that nobody can be given any more.
        """
        started = time.monotonic()
        refusal: CoreError | None = None
        answer: R | None = None
        with self._telemetry.rpc(method, metadata_of(context)) as span:
            try:
                self._check_caller(context, call)
                async with asyncio.timeout(self._deadline_seconds):
                    answer = await (self._finished(method, call, unwanted) if finish else call)
            except CoreError as error:
                refusal = error
            except TimeoutError:
                refusal = CoreError(Reason.DEADLINE, f"{method} took over {self._deadline_seconds} s")
            except Exception:
                log.exception("%s failed", method)
                refusal = CoreError(Reason.INTERNAL, "internal failure; the agent's log has the details")
                mark_error(span, "internal")
            code = "OK" if refusal is None else refusal.reason.name
            span.set_attribute("rpc.response.status_code", code)
            self._metrics.rpc_seconds.labels(method, code).observe(time.monotonic() - started)
            if refusal is not None:
                log.info("%s refused: %s", method, refusal)
        if refusal is not None:
            await abort(context, refusal)
        assert answer is not None
        return answer

    async def stream(
        self, method: str, context: ServicerContext, answers: AsyncGenerator[R, None]
    ) -> AsyncGenerator[R, None]:
        """A server stream's answers under the same rules, but for the deadline: it is the call's own, since a
        slow reader holds a stream as long as it likes to. Close it (`aclosing`) when the caller left."""
        started = time.monotonic()
        refusal: CoreError | None = None
        code = Reason.CANCELLED.name
        try:
            self._admit(context)
            async with aclosing(answers):
                async for answer in answers:
                    yield answer
            code = "OK"
        except CoreError as error:
            refusal = error
        except Exception:
            log.exception("%s failed", method)
            refusal = CoreError(Reason.INTERNAL, "internal failure; the agent's log has the details")
        finally:
            code = code if refusal is None else refusal.reason.name
            self._metrics.rpc_seconds.labels(method, code).observe(time.monotonic() - started)
        if refusal is not None:
            log.info("%s refused: %s", method, refusal)
            await abort(context, refusal)

    async def finish(self, seconds: float) -> int:
        """Waits at most so long for the commands that go on without their caller; how many do then."""
        if not self._running:
            return 0
        _, left = await asyncio.wait(set(self._running), timeout=seconds)
        return len(left)

    def _check_caller(self, context: ServicerContext, call: Coroutine[Any, Any, R]) -> None:
        try:
            self._admit(context)
        except CoreError:
            call.close()
            raise

    async def _finished(
        self,
        method: str,
        call: Coroutine[Any, Any, R],
        unwanted: Callable[[R], Awaitable[object]] | None,
    ) -> R:
        task = self._kept(call)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(_tell_end, method))
            if unwanted is not None:
                self._kept(_taken_back(method, task, unwanted))
            raise

    def _kept(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs, whoever waits for it, and `finish` waits too."""
        task = asyncio.ensure_future(call)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


async def _taken_back(method: str, task: asyncio.Task[R], unwanted: Callable[[R], Awaitable[object]]) -> None:
    await asyncio.wait([task])
    if task.cancelled() or task.exception() is not None:
        return
    try:
        await unwanted(task.result())
    except CoreError as error:
        log.warning("%s made what nobody was told of, and it stays: %s", method, error)
    else:
        log.info("%s made what nobody was told of, and it was taken back", method)


def _tell_end(method: str, task: asyncio.Task[Any]) -> None:
    """Of a command that nobody waits for any more: the log is the only place that hears of a failure."""
    if task.cancelled():
        return
    error = task.exception()
    if error is None:
        log.info("%s ended after its caller had left", method)
    elif isinstance(error, CoreError):
        log.warning("%s refused after its caller had left: %s", method, error)
    else:
        log.error("%s failed after its caller had left", method, exc_info=error)


def metadata_of(context: ServicerContext) -> dict[str, str]:
    """Text metadata of a call; binary values are left out."""
    pairs = context.invocation_metadata() or ()
    return {str(key): value for key, value in pairs if isinstance(value, str)}


async def abort(context: ServicerContext, error: CoreError) -> NoReturn:
    """Ends the call with the status of the refusal and the detail as trailing metadata."""
    detail = to_detail(error).SerializeToString()
    await context.abort(
        status_of(error), f"{error.reason}: {error.message}"[:1024], ((ERROR_METADATA_KEY, detail),)
    )
    raise AssertionError("abort returned")
