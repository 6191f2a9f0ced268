"""How the operator's connections are made: where to, as whom, and nothing looked for that cannot be there."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvtier_operator import execlogin
from kvtier_operator.execlogin import VERSIONS
from kvtier_operator.kube.access import TOKEN_SECONDS, Access, AccessError, in_cluster, load_access
from kvtier_operator.kube.transport import Transport, connect
from kvtier_operator.watch.kopf_thread import RELOGIN, connection_info

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
PEM = "-----BEGIN CERTIFICATE-----\nnot read here\n-----END CERTIFICATE-----\n"
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def kubeconfig(
    folder: Path, *, user: dict[str, Any], server: str = "https://127.0.0.1:6443/", **cluster: object
) -> str:
    config = {
        "clusters": [
            {"name": "other", "cluster": {"server": "https://elsewhere"}},
            {"name": "c", "cluster": {"server": server, **cluster}},
        ],
        "users": [{"name": "other", "user": {"token": "theirs"}}, {"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def service_account(folder: Path) -> Path:
    (folder / "token").write_text("first\n", encoding="utf-8")
    (folder / "ca.crt").write_text(PEM, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "environment, asked",
    [
        pytest.param({}, False, id="no-proxy"),
        pytest.param({"HTTPS_PROXY": "http://proxy:3128"}, True, id="a-proxy"),
        pytest.param(
            {"https_proxy": "http://proxy:3128", "NO_PROXY": "10.0.0.1"}, True, id="in-small-letters"
        ),
    ],
)
async def test_the_environment_is_asked_only_where_it_names_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], asked: bool
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    transport = await connect(kubeconfig(tmp_path, user={"token": "t"}))
    try:
        assert transport.looks_for_proxies is asked
    finally:
        await transport.close()


@pytest.mark.parametrize(
    "user, value",
    [
        pytest.param({"token": "t", "tokenFile": "absent"}, "Bearer t", id="token-before-its-file"),
        pytest.param({"tokenFile": "token"}, "Bearer first", id="token-file-beside-it"),
        pytest.param({"username": "a", "password": "b:c"}, "Basic YTpiOmM=", id="password"),
        pytest.param({}, "", id="nobody"),
    ],
)
async def test_a_kubeconfig_says_who_asks(tmp_path: Path, user: dict[str, Any], value: str) -> None:
    service_account(tmp_path)
    access = await load_access(kubeconfig(tmp_path, user=user))
    assert (access.server, access.authorization()) == ("https://127.0.0.1:6443", value)


async def test_certificates_lie_in_it_or_beside_it(tmp_path: Path) -> None:
    service_account(tmp_path)
    data = base64.b64encode(PEM.encode()).decode()
    user = {"client-certificate-data": data, "client-key": "ca.crt"}
    path = kubeconfig(tmp_path, user=user, **{"certificate-authority": "ca.crt", "tls-server-name": "api"})
    access = await load_access(path)
    assert (access.certificate, access.key) == (PEM.encode(), tmp_path / "ca.crt")
    assert (access.ca, access.server_name, access.verify) == (tmp_path / "ca.crt", "api", True)
    watching = await connection_info(path)
    assert (watching.certificate_data, watching.private_key_path) == (PEM.encode(), tmp_path / "ca.crt")
    assert (watching.ca_path, watching.insecure, watching.token) == (tmp_path / "ca.crt", False, None)


def logging_in(folder: Path, end: float | None = None, body: str = "") -> dict[str, Any]:
    """A user whose program gives t1, t2, ...; end: of each, seconds since the epoch."""
    credential: dict[str, Any] = {"apiVersion": VERSIONS[0], "status": {"token": "t$n"}}
    if end is not None:
        credential["status"]["expirationTimestamp"] = datetime.fromtimestamp(end, UTC).isoformat()
    counts = 'n=$(($(cat "$0.runs" 2>/dev/null || echo 0) + 1)); echo $n > "$0.runs"\n'
    writes = "cat <<END\n" + json.dumps(credential) + "\nEND\n"
    (folder / "log-in").write_text(counts + (body or writes), encoding="utf-8")
    program = {"apiVersion": VERSIONS[0], "command": "sh", "args": [str(folder / "log-in")]}
    return {"exec": {**program, "interactiveMode": "Never"}}


async def test_another_program_logs_in(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, user=logging_in(tmp_path))
    assert (await load_access(path)).authorization() == "Bearer t1"
    watching = await connection_info(path)
    assert (watching.server, watching.token) == ("https://127.0.0.1:6443", "t2")


async def test_a_program_that_cannot_log_in_is_said_at_once(tmp_path: Path) -> None:
    user = logging_in(tmp_path, body="echo no ticket >&2; exit 3\n")
    with pytest.raises(AccessError, match="ended with status 3: no ticket"):
        await load_access(kubeconfig(tmp_path, user=user))


@pytest.mark.parametrize(
    ("lasts", "earlier"),
    [
        pytest.param(240.0, True, id="shorter-than-a-login"),
        pytest.param(24 * 3600.0, False, id="longer"),
        pytest.param(None, False, id="without-end"),
    ],
)
async def test_watches_log_in_again_before_what_a_program_gave_ends(
    tmp_path: Path, lasts: float | None, earlier: bool
) -> None:
    now = datetime.now(UTC)
    end = None if lasts is None else now.timestamp() + lasts
    watching = await connection_info(kubeconfig(tmp_path, user=logging_in(tmp_path, end)))
    assert watching.expiration is not None
    if earlier and end is not None:
        assert now.timestamp() < watching.expiration.timestamp() < end
    else:
        assert watching.expiration >= now + RELOGIN


async def test_a_program_is_asked_again_at_once_where_its_token_is_refused(
    tmp_path: Path,
    asked: tuple[str, list[dict[str, Any]]],
    status: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execlogin, "PAUSE_SECONDS", 0.0)
    server, seen = asked
    transport = await connect(kubeconfig(tmp_path, user=logging_in(tmp_path), server=server))

    async def ask() -> str:
        await transport.send("GET", "/", query=[], body=None, content_type="x/y", seconds=60)
        return str(seen[-1]["headers"]["Authorization"])

    try:
        assert [await ask() for _ in range(3)] == ["Bearer t1"] * 3
        status[0] = 401
        assert await ask() == "Bearer t1"
        status[0] = 429
        assert [await ask() for _ in range(2)] == ["Bearer t2"] * 2
    finally:
        await transport.close()


async def test_who_was_refused_before_the_login_does_not_end_the_new_one(tmp_path: Path) -> None:
    """Of many requests under one token each is refused, the last of them after another was given."""
    access = await load_access(kubeconfig(tmp_path, user=logging_in(tmp_path)))
    login = access.login
    assert login is not None
    login.forget()
    login._not_before = 0.0
    await login.ready()
    access.refused("Bearer t1")
    login._not_before = 0.0
    await login.ready()
    assert login.held == "Bearer t2"


async def test_a_request_waits_for_a_login_no_longer_than_for_an_answer(tmp_path: Path) -> None:
    """The program is ended as the connection is."""
    gate = tmp_path / "go"
    gate.touch()
    body = f"while [ ! -e {gate} ]; do sleep 0.01; done\n"
    body += "echo '" + json.dumps({"apiVersion": VERSIONS[0], "status": {"token": "t"}}) + "'\n"
    access = await load_access(
        kubeconfig(tmp_path, user=logging_in(tmp_path, body=body), server="http://127.0.0.1:1")
    )
    gate.unlink()
    transport, login = Transport(access), access.login
    assert login is not None
    login.forget()
    login._not_before = 0.0
    try:
        with pytest.raises(TimeoutError):
            await transport.send("GET", "/", query=[], body=None, content_type="x/y", seconds=0.05)
    finally:
        await transport.close()
    assert login._run is None


@pytest.mark.parametrize(
    "text, said",
    [
        pytest.param(None, "No such file", id="no-file"),
        pytest.param("[", "flow", id="no-yaml"),
        pytest.param("{}", "current-context", id="no-context"),
        pytest.param(
            "{current-context: x, contexts: [{name: x, context: {cluster: c}}]}",
            "c in clusters",
            id="no-cluster",
        ),
        pytest.param(
            "{current-context: x, contexts: [{name: x, context: {cluster: c}}],"
            " clusters: [{name: c, cluster: {server: s, certificate-authority: gone}}]}",
            "no file",
            id="no-authority",
        ),
    ],
)
async def test_what_is_missing_is_said(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(AccessError, match=said):
        await load_access(str(path))


def test_in_a_pod_the_token_is_read_again_when_it_may_have_been_renewed(tmp_path: Path) -> None:
    now = [0.0]
    access = in_cluster(IN_A_POD, service_account(tmp_path), lambda: now[0])
    assert (access.server, access.ca) == ("https://10.0.0.1:443", tmp_path / "ca.crt")
    assert access.authorization() == "Bearer first"
    (tmp_path / "token").write_text("second", encoding="utf-8")
    now[0] = TOKEN_SECONDS - 1
    assert access.authorization() == "Bearer first"
    now[0] = TOKEN_SECONDS
    assert access.authorization() == "Bearer second"


async def test_a_token_that_is_refused_is_read_again_at_once(
    tmp_path: Path, asked: tuple[str, list[dict[str, Any]]], status: list[int]
) -> None:
    server, seen = asked
    service_account(tmp_path)
    transport = await connect(kubeconfig(tmp_path, user={"tokenFile": "token"}, server=server))

    async def ask() -> str:
        await transport.send("GET", "/", query=[], body=None, content_type="x/y", seconds=60)
        return str(seen[-1]["headers"]["Authorization"])

    try:
        assert await ask() == "Bearer first"
        (tmp_path / "token").write_text("second", encoding="utf-8")
        assert await ask() == "Bearer first", "a file is not read for each request"
        status[0] = 401
        assert await ask() == "Bearer first"
        status[0] = 429
        assert await ask() == "Bearer second"
    finally:
        await transport.close()


def test_an_address_of_colons_stands_in_brackets(tmp_path: Path) -> None:
    access = in_cluster({**IN_A_POD, "KUBERNETES_SERVICE_HOST": "fd00::1"}, service_account(tmp_path))
    assert access.server == "https://[fd00::1]:443"


@pytest.mark.parametrize("environment, files", [({}, True), (IN_A_POD, False)], ids=["no-pod", "no-files"])
def test_without_a_pod_it_says_so(tmp_path: Path, environment: dict[str, str], files: bool) -> None:
    with pytest.raises(AccessError):
        in_cluster(environment, service_account(tmp_path) if files else tmp_path)


@pytest.fixture
def status() -> list[int]:
    """What the server answers."""
    return [429]


@pytest.fixture
async def asked(status: list[int]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server and what it was asked."""
    seen: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(
            {
                "line": f"{request.method} {request.path}",
                "query": list(request.query.items()),
                "body": await request.text(),
                "headers": request.headers,
            }
        )
        return web.Response(status=status[0], body=b"later", headers={"Retry-After": "3"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}/base", seen
    await runner.cleanup()


async def test_what_is_sent(tmp_path: Path, asked: tuple[str, list[dict[str, Any]]]) -> None:
    server, seen = asked
    transport = await connect(kubeconfig(tmp_path, user={"token": "t"}, server=server))
    query = [("continue", "a+b/c=&d"), ("labelSelector", "kvtier.dev/pool in (a, b)")]
    try:
        answer = await transport.send(
            "PATCH", "/apis/x", query=query, body=[{"op": "test"}], content_type="application/x", seconds=60
        )
        await transport.send("GET", "/apis", query=[], body=None, content_type="application/json", seconds=60)
    finally:
        await transport.close()
    assert (answer.status, answer.data, answer.retry_after) == (429, b"later", "3")
    assert [one["line"] for one in seen] == ["PATCH /base/apis/x", "GET /base/apis"]
    assert [one["query"] for one in seen] == [query, []]
    assert [one["body"] for one in seen] == ['[{"op": "test"}]', ""]
    assert seen[0]["headers"]["Content-Type"] == "application/x"
    assert seen[0]["headers"]["Authorization"] == "Bearer t"


async def test_each_request_says_who_asks_at_its_moment(asked: tuple[str, list[dict[str, Any]]]) -> None:
    server, seen = asked
    values = iter(["Bearer t", "Bearer anew", ""])
    transport = Transport(Access(server, lambda: next(values)))
    try:
        for _ in range(3):
            await transport.send("GET", "/", query=[], body=None, content_type="x/y", seconds=60)
    finally:
        await transport.close()
    assert [one["headers"].get("Authorization") for one in seen] == ["Bearer t", "Bearer anew", None]


async def test_a_server_that_is_not_there_is_an_error_of_the_connection(tmp_path: Path) -> None:
    transport: Transport = await connect(kubeconfig(tmp_path, user={}, server="http://127.0.0.1:1"))
    try:
        with pytest.raises((aiohttp.ClientError, OSError)):
            await transport.send("GET", "/", query=[], body=None, content_type="x/y", seconds=60)
    finally:
        await transport.close()
