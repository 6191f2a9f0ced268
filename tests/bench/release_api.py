"""The administrator's side of the API server for a bench: create, patch, list, watch. It knows no kind.

kubectl would take as much of the processor as what is measured; this is one connection pool in one loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

Json = dict[str, Any]
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
JSON = "application/json"
APPLY = "application/apply-patch+yaml"
REQUEST_SECONDS = 60.0
AT_ONCE = 16


class ApiFailed(RuntimeError):
    """An answer that is no success."""

    def __init__(self, method: str, path: str, status: int, text: str) -> None:
        super().__init__(f"{method} {path}: {status}: {text[:500]}")
        self.status = status


class Admin:
    """Create it in a running loop; `close` at the end."""

    def __init__(self, url: str, kubeconfig: Path, folder: Path) -> None:
        """kubeconfig: with a client certificate in it, as the local control plane writes it."""
        config = json.loads(kubeconfig.read_text(encoding="utf-8"))
        user, cluster = config["users"][0]["user"], config["clusters"][0]["cluster"]
        certificate, key = folder / "admin.crt", folder / "admin.key"
        certificate.write_bytes(base64.b64decode(user["client-certificate-data"]))
        key.touch(mode=0o600)
        key.write_bytes(base64.b64decode(user["client-key-data"]))
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        context = ssl.create_default_context(cadata=authority)
        context.load_cert_chain(certificate, key)
        self._url = url
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=64))

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str) -> Json:
        return await self._request("GET", path, None, JSON)

    async def items(self, path: str) -> list[Json]:
        return list((await self.get(path))["items"])

    async def create(self, path: str, body: Json) -> Json:
        return await self._request("POST", path, body, JSON)

    async def merge(self, path: str, body: Json) -> Json:
        return await self._request("PATCH", path, body, MERGE)

    async def swap(self, path: str, operations: Sequence[Json]) -> Json:
        """Operations of a JSON patch, tests among them, all or none."""
        return await self._request("PATCH", path, operations, JSON_PATCH)

    async def apply(self, path: str, body: Json) -> Json:
        """Server-side, with force."""
        return await self._request("PATCH", f"{path}?fieldManager=bench&force=true", body, APPLY)

    async def create_all(self, objects: Sequence[tuple[str, Json]]) -> None:
        """(path of the collection, object) each, a few at once."""
        await at_once([lambda p=path, b=body: self.create(p, b) for path, body in objects])  # type: ignore[misc]

    async def watch(self, path: str, seen: Callable[[str, Json, float], None]) -> None:
        """Until cancelled: calls `seen` with type, object and moment (monotonic) for everything that exists
        and then for each change. A broken watch begins again; so does one that is refused, as the first of a
        kind is that was defined just now."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ApiFailed):
                listed = await self.get(path)
                now = time.monotonic()
                for item in listed["items"]:
                    seen("ADDED", item, now)
                async for event in self._events(path, listed["metadata"]["resourceVersion"]):
                    if event["type"] == "ERROR":
                        break
                    seen(event["type"], event["object"], time.monotonic())
            await asyncio.sleep(0.05)

    async def _events(self, path: str, version: str) -> AsyncIterator[Json]:
        query = f"{path}?watch=1&resourceVersion={version}"
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(self._url + query, timeout=timeout) as answer:
            if answer.status != 200:
                raise ApiFailed("GET", query, answer.status, await answer.text())
            rest = b""
            async for part in answer.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line:
                        yield json.loads(line)

    async def _request(
        self, method: str, path: str, body: Json | Sequence[Json] | None, content_type: str
    ) -> Json:
        data = None if body is None else json.dumps(body).encode()
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with self._session.request(
            method, self._url + path, data=data, headers={"Content-Type": content_type}, timeout=timeout
        ) as answer:
            text = await answer.text()
            if not 200 <= answer.status <= 299:
                raise ApiFailed(method, path, answer.status, text)
        found: Json = json.loads(text)
        return found


async def at_once(calls: Sequence[Callable[[], Awaitable[Any]]], limit: int = AT_ONCE) -> list[Any]:
    """Their results in order, at most `limit` running."""
    slots = asyncio.Semaphore(limit)

    async def one(call: Callable[[], Awaitable[Any]]) -> Any:
        async with slots:
            return await call()

    return list(await asyncio.gather(*(one(call) for call in calls)))


async def until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> float:
    """Waits for the condition; returns the seconds it took. Raises TimeoutError with `what` says then."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what()}")
        await asyncio.sleep(0.05)
    return time.monotonic() - started
