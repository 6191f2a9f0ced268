"""Waiting on a condition with a deadline: the only way that tests and the demo wait for anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
INTERVAL_S = 0.05


class EventuallyError(AssertionError):
    """The condition did not come true in time; the message holds the last value or error."""


def eventually(
    fn: Callable[[], T],
    timeout: float,
    *,
    what: str = "",
    retry_on: tuple[type[Exception], ...] = (AssertionError,),
    on_failure: Callable[[], str] | None = None,
    interval: float = INTERVAL_S,
) -> T:
    """Calls fn until it returns something true, and returns that.

    An exception of `retry_on` counts as "not yet"; any other ends the wait at once. After `timeout` seconds
    raises EventuallyError with the last outcome and what `on_failure` has to say (objects, events, logs).
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            value = fn()
            if value:
                return value
            last = f"last value: {value!r}"
        except retry_on as error:
            last = f"last error: {type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            raise EventuallyError(_explain(what or _name(fn), timeout, last, on_failure))
        time.sleep(interval)


async def eventually_async(
    fn: Callable[[], Awaitable[T]],
    timeout: float,  # noqa: ASYNC109 - the deadline of the whole loop
    *,
    what: str = "",
    retry_on: tuple[type[Exception], ...] = (AssertionError,),
    on_failure: Callable[[], str] | None = None,
    interval: float = INTERVAL_S,
) -> T:
    """The same for a coroutine function; other tasks run while it waits."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            value = await fn()
            if value:
                return value
            last = f"last value: {value!r}"
        except retry_on as error:
            last = f"last error: {type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            raise EventuallyError(_explain(what or _name(fn), timeout, last, on_failure))
        await asyncio.sleep(interval)


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__name__", repr(fn))


def _explain(what: str, timeout: float, last: str, on_failure: Callable[[], str] | None) -> str:
    text = f"{what}: not within {timeout:g} s; {last}"
    return f"{text}\n{on_failure()}" if on_failure else text
