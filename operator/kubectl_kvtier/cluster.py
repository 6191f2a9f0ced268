"""The API server behind the port, by the client that the operator uses. Every request has a deadline.

It must not know what a command makes of an object.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import quote

import aiohttp

from kubectl_kvtier.kubeconfig import load
from kubectl_kvtier.outcomes import Exit, Failure, Forbidden, Unavailable
from kubectl_kvtier.ports import Api, Changed, Json, Objects, of_metadata
from kvtier_crds.models.common import GROUP, VERSION
from kvtier_operator.execlogin import ExecLogin, LoginError

Query = list[tuple[str, str]]
LIST_PAGE = 500
WATCH_SECONDS = 60
PAUSE_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
"""How long a watch waits for an API server that has gone: it is started again in less."""
CLOSE_SECONDS = 5.0
CLUSTER_SCOPED = ("kvnodes", "tierclasses")
CACHE_UID_LABEL = "kvtier.dev/cache-uid"
JSON_PATCH = "application/json-patch+json"
UNAUTHORIZED = 401
LATER = (429, 500, 502, 503, 504)


class ClusterApi:
    """Api over a real API server."""

    def __init__(
        self, transport: Any, namespace: str, seconds: float, login: ExecLogin | None = None
    ) -> None:
        """login: the program that says who asks, where the kubeconfig names one."""
        self._transport = transport
        self._namespace = namespace
        self._seconds = seconds
        self._login = login

    @property
    def namespace(self) -> str:
        return self._namespace

    async def get(self, plural: str, name: str) -> Json:
        return await self._request("GET", _object(plural, self._namespace, name))

    async def list(self, plural: str, *, everywhere: bool = False) -> Objects:
        return await self._all(_collection(plural, "" if everywhere else self._namespace), [])

    async def revisions(self, cache_uid: str) -> Objects:
        path = f"/apis/apps/v1/namespaces/{self._namespace}/controllerrevisions"
        return await self._all(path, [("labelSelector", f"{CACHE_UID_LABEL}={cache_uid}")])

    async def events(self, kind: str, name: str) -> Objects:
        path = f"/apis/events.k8s.io/v1/namespaces/{self._namespace}/events"
        selector = f"regarding.kind={kind},regarding.name={name}"
        return await self._all(path, [("fieldSelector", selector)])

    async def patch(
        self, plural: str, name: str, operations: Objects, *, namespace: str = "", dry_run: bool = False
    ) -> Json:
        return await self._request(
            "PATCH",
            _object(plural, namespace or self._namespace, name),
            query=[("fieldManager", "kubectl-kvtier"), *([("dryRun", "All")] if dry_run else [])],
            body=operations,
        )

    async def delete(self, plural: str, name: str, *, uid: str, namespace: str = "") -> None:
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        await self._request("DELETE", _object(plural, namespace or self._namespace, name), body=options)

    async def follow(self, plural: str, name: str) -> AsyncIterator[Json]:
        # A watch ends every minute: what it begins again with has often been seen.
        seen = ""
        silent: float | None = None
        while True:
            try:
                found = await self.get(plural, name)
                silent, version = None, of_metadata(found, "resourceVersion")
                if version != seen:
                    seen = version
                    yield found
                async for event in self._watch(plural, name, version):
                    if event.get("type") == "DELETED":
                        raise Failure(Exit.NOT_FOUND, f"{plural} {self._namespace}/{name} was deleted")
                    if event.get("type") not in ("ADDED", "MODIFIED"):
                        # Its version is too old, say; a server that goes on saying so is not asked without
                        # end.
                        await asyncio.sleep(PAUSE_SECONDS)
                        break
                    seen = of_metadata(event["object"], "resourceVersion")
                    yield event["object"]
            except Unavailable:
                now = time.monotonic()
                silent = now if silent is None else silent
                if not seen or now - silent > PATIENCE_SECONDS:
                    raise
                await asyncio.sleep(PAUSE_SECONDS)

    async def _watch(self, plural: str, name: str, version: str) -> AsyncIterator[Json]:
        """Events until the watch ends, at the latest after WATCH_SECONDS. One that breaks has ended, too: the
        next request tells whether the server is there."""
        query = [
            ("watch", "true"),
            ("fieldSelector", f"metadata.name={name}"),
            ("resourceVersion", version),
            ("timeoutSeconds", str(WATCH_SECONDS)),
        ]
        response = await self._send(
            "GET", _collection(plural, self._namespace), query, None, WATCH_SECONDS + self._seconds
        )
        rest = b""
        try:
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _parsed(line)
        except (aiohttp.ClientError, TimeoutError, OSError):
            await asyncio.sleep(PAUSE_SECONDS)

    async def _all(self, path: str, query: Query) -> Objects:
        found: Objects = []
        resume = ""
        while True:
            more = [("continue", resume)] if resume else []
            page = await self._request("GET", path, query=[*query, ("limit", str(LIST_PAGE)), *more])
            items, metadata = page.get("items"), page.get("metadata")
            if not isinstance(items, list) or not isinstance(metadata, dict):
                raise Failure(Exit.FAILED, f"{path}: this is no API server, it answered no list")
            found += items
            resume = metadata.get("continue") or ""
            if not resume:
                return found

    async def _request(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Any = None,
    ) -> Json:
        response = await self._send(method, path, query or [], body, self._seconds)
        with _answering():
            return _parsed(await response.read())

    async def _send(self, method: str, path: str, query: Query, body: Any, seconds: float) -> Any:
        raw = await self._once(method, path, query, body, seconds)
        if raw.status == UNAUTHORIZED and self._login is not None:
            # What the server did not let in has done nothing: it is sent again, once, by who asks now.
            self._login.forget()
            raw.release()
            raw = await self._once(method, path, query, body, seconds)
        if raw.status >= 300:
            with _answering():
                raise _failure(raw.status, await raw.read(), path)
        return raw

    async def _once(self, method: str, path: str, query: Query, body: Any, seconds: float) -> Any:
        content = JSON_PATCH if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json", "Content-Type": content}
        with _answering():
            _, url, headers, payload, _ = await self._transport.param_serialize(
                method=method,
                resource_path=path,
                query_params=query,
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._transport.call_api(method, url, headers, payload, _request_timeout=seconds)
            return response.response


@contextmanager
def _answering() -> Iterator[None]:
    """An answer that does not come, or breaks off, is a failure with a word."""
    try:
        yield
    except LoginError as error:
        raise Failure(Exit.FAILED, f"not logged in: {error}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Unavailable(f"no answer from the API server: {str(error) or 'timed out'}") from error


def _parsed(body: bytes) -> Json:
    try:
        found = json.loads(body)
    except ValueError as error:
        shown = body[:80].decode("utf-8", "replace")
        raise Failure(Exit.FAILED, f"this is no API server, it answered {shown!r}") from error
    if not isinstance(found, dict):
        raise Failure(Exit.FAILED, f"this is no API server, it answered {type(found).__name__}")
    return found


@asynccontextmanager
async def connect(
    *, kubeconfig: str | None, context: str | None, namespace: str | None, seconds: float
) -> AsyncIterator[Api]:
    """As kubectl would: its kubeconfig and context, or the pod's service account where there is none."""
    found = await load(kubeconfig, context)
    transport = found.client()
    try:
        yield ClusterApi(transport, namespace or found.namespace, seconds, found.login)
    finally:
        if found.login is not None:
            await found.login.close()
        # A watch that nobody reads any more must not hold the command back.
        with suppress(TimeoutError):
            await asyncio.wait_for(transport.close(), CLOSE_SECONDS)


def _collection(plural: str, namespace: str) -> str:
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace and plural not in CLUSTER_SCOPED else ""
    return f"/apis/{GROUP}/{VERSION}{inside}/{plural}"


def _object(plural: str, namespace: str, name: str) -> str:
    """Of one object. An empty name would be the collection."""
    if not name or "/" in name:
        raise Failure(Exit.USAGE, f"{name!r} is no name of an object: lower-case letters, digits, - and .")
    return f"{_collection(plural, namespace)}/{quote(name, safe='')}"


def _failure(status: int, body: bytes, path: str) -> Exception:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = {}
    message = str(answer.get("message") or body[:300].decode("utf-8", "replace"))
    details = answer.get("details") or {}
    if status == 404 and not details.get("name") and f"/apis/{GROUP}/" in path:
        # Of an object that is missing the server names it; of a kind it has nothing to name.
        return Failure(Exit.FAILED, f"this cluster does not serve {GROUP}/{VERSION}: are its CRDs installed?")
    if status == 404:
        return Failure(Exit.NOT_FOUND, message)
    if status == 403:
        return Forbidden(message)
    # A failed `test` of a JSON patch is a 422 that names no object.
    if status == 409 or (status == 422 and not (details.get("kind") or details.get("causes"))):
        return Changed(message)
    if status in LATER:
        return Unavailable(f"{path}: {message}")
    return Failure(Exit.FAILED, f"{path}: {message}")
