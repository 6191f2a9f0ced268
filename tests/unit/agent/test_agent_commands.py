"""Commands that go on without their caller, and who hears how they ended."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from kvtier.v1 import control_pb2
from kvtier_agent.rpc import RpcScope
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_core.errors import CoreError, Reason


class Call:
    """A gRPC context whose refusal is an exception."""

    class Refused(Exception):
        pass

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: Any, details: str, trailing: Any) -> None:
        raise Call.Refused(details)


def scope(seconds: float) -> RpcScope:
    return RpcScope(Telemetry("a", "serving/pool", "boot", "0", []), Metrics(CollectorRegistry()), seconds)


@pytest.mark.parametrize(
    ("error", "level", "told"),
    [
        pytest.param(CoreError(Reason.STORAGE_UNAVAILABLE, "full"), logging.WARNING, "full", id="refused"),
        pytest.param(ZeroDivisionError("a defect"), logging.ERROR, "ZeroDivisionError", id="defect"),
        pytest.param(None, logging.INFO, "ended", id="done"),
    ],
)
@pytest.mark.parametrize("how", ["deadline", "caller-left"])
async def test_what_a_command_ran_into_after_its_caller_left_is_in_the_log(
    how: str, error: Exception | None, level: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, begun = asyncio.Event(), asyncio.Event()

    async def command() -> Message:
        begun.set()
        await go_on.wait()
        if error is not None:
            raise error
        return control_pb2.RemoveCacheResponse()

    rpc = scope(0.01 if how == "deadline" else 30.0)
    caplog.set_level(logging.INFO, "kvtier_agent.rpc")
    calling = asyncio.create_task(
        rpc.run("Control.RemoveCache", Call(), command(), finish=True)  # type: ignore[arg-type]
    )
    async with asyncio.timeout(60):
        await begun.wait()
        if how == "caller-left":
            calling.cancel()
        [ended] = await asyncio.gather(calling, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError if how == "caller-left" else Call.Refused)
        caplog.clear()
        go_on.set()
        assert await rpc.finish(5.0) == 0
        await asyncio.sleep(0)
    [record] = [one for one in caplog.records if one.levelno >= level]
    assert "Control.RemoveCache" in record.getMessage()
    assert told in caplog.text


@pytest.mark.parametrize("ends", ["answered", "refused"])
@pytest.mark.parametrize("how", ["deadline", "caller-left", "caller-waits"])
async def test_what_was_made_for_nobody_is_taken_back(how: str, ends: str) -> None:
    go_on, begun = asyncio.Event(), asyncio.Event()
    answer = control_pb2.RemoveCacheResponse()
    taken: list[Message] = []

    async def command() -> Message:
        begun.set()
        await go_on.wait()
        if ends == "refused":
            raise CoreError(Reason.STORAGE_UNAVAILABLE, "full")
        return answer

    async def unwanted(made: Message) -> None:
        await asyncio.sleep(0)
        taken.append(made)

    rpc = scope(0.01 if how == "deadline" else 30.0)
    calling = asyncio.create_task(
        rpc.run("Attention.OpenSession", Call(), command(), finish=True, unwanted=unwanted)  # type: ignore[arg-type]
    )
    async with asyncio.timeout(60):
        await begun.wait()
        if how == "caller-left":
            calling.cancel()
        if how == "caller-waits":
            go_on.set()
        await asyncio.gather(calling, return_exceptions=True)
        go_on.set()
        assert await rpc.finish(5.0) == 0
    assert [one is answer for one in taken] == [True] * (how != "caller-waits" and ends == "answered")


async def test_what_cannot_be_taken_back_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    go_on = asyncio.Event()

    async def command() -> Message:
        await go_on.wait()
        return control_pb2.RemoveCacheResponse()

    async def unwanted(made: Message) -> None:
        raise CoreError(Reason.CACHE_UNKNOWN, "the cache was removed")

    rpc = scope(0.01)
    caplog.set_level(logging.WARNING, "kvtier_agent.rpc")
    async with asyncio.timeout(60):
        with pytest.raises(Call.Refused):
            await rpc.run("Attention.OpenSession", Call(), command(), finish=True, unwanted=unwanted)  # type: ignore[arg-type]
        go_on.set()
        assert await rpc.finish(5.0) == 0
    assert "made what nobody was told of, and it stays: CACHE_UNKNOWN" in caplog.text
