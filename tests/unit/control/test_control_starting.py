"""From the start until everything has been listed: what is waited for, in which words, and for how long."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path

import pytest

from kvtier_crds.generate import definition
from kvtier_crds.models import KINDS
from kvtier_operator import starting
from kvtier_operator.app import Operator, Options
from kvtier_operator.kube import client
from kvtier_operator.ports import AgentTls, ApiError, Forbidden, JsonObject, Kind, NotFound
from kvtier_operator.schemas import SHOWN, lacking
from kvtier_operator.starting import PUBLISH_SECONDS, START_SECONDS, TELL_SECONDS, NotStarted, Starting
from kvtier_operator.telemetry import build_telemetry
from kvtier_operator.watch.triggers import WATCHED
from tests.unit.control.control_fakes import FakeClock


def published() -> JsonObject:
    """As an API server says it of the CRDs of this version."""
    return {
        "components": {
            "schemas": {
                f"dev.kvtier.v1alpha1.{kind.KIND}": copy.deepcopy(
                    definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
                )
                for kind in KINDS
            }
        }
    }


class Server:
    """wrong: what a list of a kind fails by."""

    def __init__(self) -> None:
        self.wrong: dict[Kind, ApiError] = {}
        self.schemas: JsonObject | ApiError = published()
        self.asked: list[Kind] = []
        self.told: list[str] = []
        self.clock = FakeClock()
        self.starting = Starting(self._listed, self._published, self._tell, self.clock)

    async def _listed(self, kind: Kind, /) -> None:
        self.asked.append(kind)
        if kind in self.wrong:
            raise self.wrong[kind]

    async def _published(self) -> JsonObject:
        if isinstance(self.schemas, ApiError):
            raise self.schemas
        return self.schemas

    async def _tell(self, message: str) -> None:
        self.told.append(message)


NO_CRD = NotFound(404, "NotFound", "the server could not find the requested resource")
NO_RIGHT = Forbidden(403, "Forbidden", 'nodes is forbidden: User "x" cannot list resource "nodes"')


async def first_words(server: Server) -> str:
    """Of what it waits, after its first try; then all is mended, and it has to start."""
    words: list[str] = []
    sleep = server.clock.sleep

    async def noted(seconds: float) -> None:
        words.append(server.starting.waits_for)
        server.wrong.clear()
        server.schemas = published()
        await sleep(seconds)

    server.clock.sleep = noted  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        await server.starting.run()
    assert server.starting.waits_for == ""
    return words[0] if words else ""


async def test_what_is_missing_is_named_all_at_once_and_waited_for() -> None:
    server = Server()
    server.wrong = {Kind.KV_SELECTOR: NO_CRD, Kind.NODE: NO_RIGHT}
    assert await first_words(server) == (
        "the CRD kvselectors.kvtier.dev, which is not installed or does not serve v1alpha1; "
        'the right to list nodes: nodes is forbidden: User "x" cannot list resource "nodes"'
    )
    assert server.asked == [*WATCHED, *WATCHED]


@pytest.mark.parametrize(
    "error",
    [
        ApiError(0, "Unreachable", "GET /apis: ConnectionRefusedError"),
        ApiError(500, "InternalError", "etcd is away"),
        Forbidden(401, "Unauthorized", "Unauthorized"),
    ],
    ids=str,
)
async def test_a_server_that_does_not_serve_is_asked_no_more_in_that_try(error: ApiError) -> None:
    server = Server()
    server.wrong = dict.fromkeys(WATCHED, error)
    assert str(error) in await first_words(server)
    assert server.asked == [WATCHED[0], *WATCHED]


async def test_who_waits_says_so_where_people_look_and_ends_in_the_end() -> None:
    server = Server()
    server.wrong = {Kind.KV_ROLLOUT: NO_CRD}
    with pytest.raises(NotStarted, match=r"waited 600 s for the CRD kvrollouts\.kvtier\.dev"):
        async with asyncio.timeout(60):
            await server.starting.run()
    assert START_SECONDS <= server.clock.elapsed < START_SECONDS + 10
    assert server.told and server.told[0].startswith("the operator waits for the CRD kvrollouts.kvtier.dev")
    tries = server.asked.count(Kind.KV_ROLLOUT)
    assert tries < START_SECONDS, "no hot loop"
    assert len(server.told) < tries, f"what comes within {TELL_SECONDS:g} s is no news"


async def test_a_list_that_takes_long_is_no_wait() -> None:
    server = Server()

    async def slow(kind: Kind, /) -> None:
        server.clock.advance(START_SECONDS)

    server.starting = Starting(slow, server._published, server._tell, server.clock)
    await server.starting.run()
    assert server.starting.waits_for == ""


# --- CRDs of another version ----------------------------------------------------------------------------


def schema(document: JsonObject, kind: str) -> JsonObject:
    found: JsonObject = document["components"]["schemas"][f"dev.kvtier.v1alpha1.{kind}"]["properties"]
    return found


def test_crds_of_this_version_lack_nothing_and_what_is_newer_does_no_harm() -> None:
    document = published()
    assert lacking(document) == []
    schema(document, "KVCache")["status"]["properties"]["fieldOfTomorrow"] = {"type": "string"}
    schema(document, "KVRollout")["status"]["properties"]["phase"]["enum"].append("PhaseOfTomorrow")
    assert lacking(document) == []


def test_what_an_older_crd_would_prune_or_refuse_is_named() -> None:
    document = published()
    status = schema(document, "KVRollout")["status"]["properties"]
    del status["rollback"]
    status["phase"]["enum"].remove("RollingBack")
    del schema(document, "KVCache")["status"]["properties"]["digestBudget"]["items"]["properties"]["digest"]
    older = "is older than this operator and lacks"
    assert sorted(lacking(document)) == [
        f"kvcaches.kvtier.dev {older} status.digestBudget[].digest",
        f"kvrollouts.kvtier.dev {older} status.phase=RollingBack, status.rollback",
    ]
    schema(document, "KVCache")["status"]["properties"].clear()
    schema(document, "KVCache")["spec"]["properties"].clear()
    assert lacking(document)[0].count(",") == SHOWN - 1 and "more" in lacking(document)[0]


def test_a_kind_that_is_not_published_is_not_judged() -> None:
    assert lacking({}) == []
    assert lacking({"components": {"schemas": {}}}) == []


async def test_crds_that_are_older_are_waited_for() -> None:
    server = Server()
    document = published()
    del schema(document, "KVRollout")["status"]["properties"]["fence"]
    server.schemas = document
    assert await first_words(server) == (
        "newer CRDs: kvrollouts.kvtier.dev is older than this operator and lacks status.fence"
    )


async def test_a_server_that_may_not_be_asked_what_its_crds_are_is_started_with() -> None:
    server = Server()
    server.schemas = NO_RIGHT
    assert await first_words(server) == ""


async def test_a_server_that_publishes_nothing_is_started_with_when_it_has_had_time() -> None:
    server = Server()
    server.schemas = NO_CRD
    async with asyncio.timeout(60):
        await server.starting.run()
    assert PUBLISH_SECONDS <= server.clock.elapsed < PUBLISH_SECONDS + 10


def without_a_kind(document: JsonObject) -> JsonObject:
    found = copy.deepcopy(document)
    del found["components"]["schemas"]["dev.kvtier.v1alpha1.KVRollout"]
    return found


def older_rollouts() -> JsonObject:
    document = published()
    del schema(document, "KVRollout")["status"]["properties"]["fence"]
    return document


async def words_of(server: Server, *answers: JsonObject | ApiError) -> list[str]:
    """Of what it waits after each of these; then the CRDs are as they should be, and it has to start."""
    left, words = [*answers, published()], []
    sleep = server.clock.sleep

    async def noted(seconds: float) -> None:
        words.append(server.starting.waits_for)
        server.schemas = left.pop(0)
        await sleep(seconds)

    server.schemas = left.pop(0)
    server.clock.sleep = noted  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        await server.starting.run()
    assert not left, "it started before"
    return words


@pytest.mark.parametrize("early", [NO_CRD, without_a_kind(older_rollouts())], ids=["nothing", "all but one"])
async def test_older_crds_of_a_server_that_has_just_begun_are_found(early: JsonObject | ApiError) -> None:
    """It serves lists at once, and publishes what it serves some seconds later."""
    first, second = await words_of(Server(), early, older_rollouts())
    assert "publishes of" in first and second.endswith("lacks status.fence")


@pytest.mark.parametrize(
    "answer",
    [NO_CRD, NO_RIGHT, without_a_kind(older_rollouts())],
    ids=["not published", "not allowed", "all but one"],
)
async def test_crds_that_were_older_stay_so_while_the_server_says_nothing(
    monkeypatch: pytest.MonkeyPatch, answer: JsonObject | ApiError
) -> None:
    """Also where it has had its time to publish them."""
    monkeypatch.setattr(starting, "PUBLISH_SECONDS", 0.0)
    first, second = await words_of(Server(), older_rollouts(), answer)
    assert first.endswith("lacks status.fence") and "publishes of" in second


async def test_a_server_that_fails_to_say_what_its_crds_are_is_asked_again() -> None:
    server = Server()
    server.schemas = ApiError(503, "ServiceUnavailable", "later")
    assert await first_words(server) == "the API server: 503 ServiceUnavailable: later"


# --- a signal meanwhile -----------------------------------------------------------------------------------


async def test_who_is_told_to_stop_while_a_list_hangs_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server that takes the request and never answers; its deadline is not what ends the operator."""
    monkeypatch.setattr(client, "REQUEST_SECONDS", 3600.0)
    asked = asyncio.Event()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    telemetry = build_telemetry(otlp_endpoint="", instance="t", version="t")
    tls = AgentTls(Path("none"), Path("none"), Path("none"))
    operator = Operator(Options(str(kubeconfig), "kvtier-system", "t", tls), telemetry)
    stop = asyncio.Event()
    running = asyncio.create_task(operator.run(stop))
    async with asyncio.timeout(60):
        await asyncio.wait({running, asyncio.create_task(asked.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done(), running.exception()
        stop.set()
        await running
    assert not operator.ready.is_set()
    silent.close()


async def test_work_that_does_not_end_when_it_is_cancelled_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "CANCEL_SECONDS", 0.01)
    stop, stubborn = asyncio.Event(), asyncio.Event()
    stop.set()

    async def hangs() -> int:
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue
        return 1

    async with asyncio.timeout(60):
        assert await starting.before(stop, hangs()) is None
    stubborn.set()
