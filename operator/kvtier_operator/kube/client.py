"""Typed verbs of the API server.

Every call has a deadline; every write passes the gate and is counted before it is sent, also when it is
refused. This module must not know which objects are worth writing.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import aiohttp

from kvtier_operator.kube.errors import error_for
from kvtier_operator.kube.resources import RESOURCES, key_of, version_of
from kvtier_operator.kube.transport import Transport
from kvtier_operator.ports import (
    FIELD_MANAGER,
    GROUP,
    VERSION,
    AlreadyExists,
    ApiError,
    Clock,
    Conflict,
    EventType,
    JsonObject,
    Kind,
    Known,
    NotFound,
    ObjectKey,
    PatchOp,
)

_log = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0
LIST_PAGE = 100
"""Objects. A page is held as text and as an object at once, and of rollouts one is 20 KiB."""
EVENT_REPEAT_SECONDS = 3600.0
EVENT_MEMORY = 4096
APPLY_PATCH = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""In place of the object, whose version is in its metadata."""
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
SCHEMAS = f"/openapi/v3/apis/{GROUP}/{VERSION}"
MAX_SINGLE = 8
"""Objects of a page that are asked for one by one: as many cost about what the page does."""


class ApiMetrics(Protocol):
    def api_write(self, kind: str, verb: str) -> None: ...

    def api_request(self, verb: str, code: str, seconds: float) -> None: ...


class KubeClient:
    """Implements `kvtier_operator.ports.KubeApi`. `gate` raises NotLeader when writing is not allowed."""

    def __init__(
        self,
        transport: Transport,
        *,
        gate: Callable[[], None],
        metrics: ApiMetrics,
        clock: Clock,
        instance: str,
    ) -> None:
        self._transport = transport
        self._gate = gate
        self._metrics = metrics
        self._clock = clock
        self._instance = instance
        self._posted: OrderedDict[str, float] = OrderedDict()

    async def get(self, key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        if known is not None:
            found = await self._request("GET", self._path(key), accept=METADATA_ONLY)
            if version_of(found) == version_of(known):
                return known
        return await self._request("GET", self._path(key))

    async def list_all(
        self,
        kind: Kind,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        *,
        each: Callable[[JsonObject], JsonObject] = lambda obj: obj,
        known: Known | None = None,
    ) -> list[JsonObject]:
        """each: what is kept of an object that travels, as its page comes."""
        path = RESOURCES[kind].collection_path(namespace)
        objects: list[JsonObject] = []
        query: list[tuple[str, str]] = [("limit", str(LIST_PAGE))]
        if label_selector:
            query.append(("labelSelector", label_selector))
        if field_selector:
            query.append(("fieldSelector", field_selector))
        resume = ""
        while True:
            asked = [*query, *([("continue", resume)] if resume else [])]
            found: list[JsonObject] | None = None
            if known is not None:
                page = await self._request("GET", path, query=asked, accept=METADATA_LIST)
                # Of metadata, a list of nothing has none.
                found = await self._filled(kind, page["items"] or [], known, each)
            if found is None:
                page = await self._request("GET", path, query=asked)
                found = [each(_whole(kind, item)) for item in page["items"]]
            objects += found
            resume = page["metadata"].get("continue") or ""
            if not resume:
                return objects

    async def _filled(
        self, kind: Kind, items: list[JsonObject], known: Known, each: Callable[[JsonObject], JsonObject]
    ) -> list[JsonObject] | None:
        """The objects whose metadata a page holds: those of a known version, the others one by one. None:
        of these there are too many."""
        keys = [
            ObjectKey(kind, item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in items
        ]
        held = [known(key) for key in keys]
        same = [
            obj if obj is not None and version_of(obj) == version_of(item) else None
            for obj, item in zip(held, items, strict=True)
        ]
        if same.count(None) > MAX_SINGLE:
            return None
        found: list[JsonObject] = []
        for key, obj in zip(keys, same, strict=True):
            if obj is not None:
                found.append(obj)
                continue
            # Of some kinds the operator may list all, but get none.
            path = RESOURCES[kind].collection_path(key.namespace)
            one = await self._request("GET", path, query=[("fieldSelector", f"metadata.name={key.name}")])
            found += [each(_whole(kind, item)) for item in one["items"]]
        return found

    async def apply(
        self, manifest: JsonObject, *, manager: str = FIELD_MANAGER, force: bool = True
    ) -> JsonObject:
        key = key_of(manifest)
        return await self._write(
            key.kind,
            "apply",
            "PATCH",
            self._path(key),
            body=manifest,
            content_type=APPLY_PATCH,
            query=[("fieldManager", manager), ("force", "true" if force else "false")],
        )

    async def patch_status(
        self, key: ObjectKey, status: JsonObject, *, uid: str = "", manager: str = FIELD_MANAGER
    ) -> JsonObject:
        if uid:
            # The status subresource takes the metadata of what is stored, so a uid in the patch says nothing.
            self._gate()
            found = (await self.get(key))["metadata"].get("uid", "")
            if found != uid:
                raise Conflict(409, "Conflict", f"{key} is another object now: uid {found}, not {uid}")
        metadata: JsonObject = {"name": key.name}
        if key.namespace:
            metadata["namespace"] = key.namespace
        body = {
            "apiVersion": RESOURCES[key.kind].api_version,
            "kind": key.kind.value,
            "metadata": metadata,
            "status": status,
        }
        return await self._write(
            key.kind,
            "apply-status",
            "PATCH",
            f"{self._path(key)}/status",
            body=body,
            content_type=APPLY_PATCH,
            query=[("fieldManager", manager), ("force", "true")],
        )

    async def compare_and_swap(
        self, key: ObjectKey, ops: Sequence[PatchOp], *, subresource: str = "status"
    ) -> JsonObject:
        path = self._path(key) + (f"/{subresource}" if subresource else "")
        return await self._write(
            key.kind,
            "compare-and-swap",
            "PATCH",
            path,
            body=[op.to_json() for op in ops],
            content_type=JSON_PATCH,
            query=[("fieldManager", f"{FIELD_MANAGER}-cas")],
        )

    async def create(self, manifest: JsonObject) -> JsonObject:
        key = key_of(manifest)
        return await self._write(
            key.kind,
            "create",
            "POST",
            RESOURCES[key.kind].collection_path(key.namespace),
            body=manifest,
            query=[("fieldManager", FIELD_MANAGER)],
        )

    async def replace(self, manifest: JsonObject) -> JsonObject:
        """A PUT; with metadata.resourceVersion it is a compare-and-swap. The election's verb."""
        key = key_of(manifest)
        return await self._write(
            key.kind,
            "replace",
            "PUT",
            self._path(key),
            body=manifest,
            query=[("fieldManager", FIELD_MANAGER)],
        )

    async def delete(self, key: ObjectKey, *, uid: str = "") -> None:
        body: JsonObject = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
        }
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self._write(key.kind, "delete", "DELETE", self._path(key), body=body)
        except NotFound:
            return

    async def schemas(self) -> JsonObject:
        """What the server publishes of our kinds, as OpenAPI v3."""
        return await self._request("GET", SCHEMAS)

    async def event(self, regarding: JsonObject, type: EventType, reason: str, message: str) -> None:
        metadata = regarding["metadata"]
        uid = metadata.get("uid", "")
        now = self._clock.now()
        token = hashlib.sha256(f"{uid}|{reason}|{message}".encode()).hexdigest()[:16]
        last = self._posted.get(token)
        if last is not None and self._clock.monotonic() - last < EVENT_REPEAT_SECONDS:
            return
        self._posted[token] = self._clock.monotonic()
        while len(self._posted) > EVENT_MEMORY:
            self._posted.popitem(last=False)
        # The hour is in the name: a restarted operator posts the same thing once an hour, too.
        name = f"{metadata['name'][:200]}.{token}{int(now.timestamp() // EVENT_REPEAT_SECONDS) % 65536:04x}"
        namespace = metadata.get("namespace") or "default"
        reference = {
            "apiVersion": regarding["apiVersion"],
            "kind": regarding["kind"],
            "name": metadata["name"],
        }
        if uid:
            reference["uid"] = uid
        if metadata.get("namespace"):
            reference["namespace"] = metadata["namespace"]
        body = {
            "apiVersion": RESOURCES[Kind.EVENT].api_version,
            "kind": Kind.EVENT.value,
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "type": type.value,
            "reason": reason,
            "action": "Reconcile",
            "note": message[:1000],
            "reportingController": "kvtier.dev/operator",
            "reportingInstance": self._instance[:120],
            "regarding": reference,
        }
        try:
            await self.create(body)
        except AlreadyExists:
            return
        except ApiError as error:
            _log.warning("event not posted", extra={"reason": reason, "error": str(error)})

    def _path(self, key: ObjectKey) -> str:
        return RESOURCES[key.kind].object_path(key.namespace, key.name)

    async def _write(
        self,
        kind: Kind,
        verb: str,
        method: str,
        path: str,
        *,
        body: Any,
        content_type: str = "application/json",
        query: Sequence[tuple[str, str]] = (),
    ) -> JsonObject:
        self._gate()
        self._metrics.api_write(kind.value, verb)
        return await self._request(method, path, body=body, content_type=content_type, query=query)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        query: Sequence[tuple[str, str]] = (),
    ) -> JsonObject:
        started = self._clock.monotonic()
        code = "none"
        try:
            response = await self._transport.send(
                method,
                path,
                query=query,
                body=body,
                accept=accept,
                content_type=content_type,
                seconds=REQUEST_SECONDS,
            )
            code = str(response.status)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "Unreachable", f"{method} {path}: {type(error).__name__}: {error}") from error
        finally:
            self._metrics.api_request(method, code, self._clock.monotonic() - started)
        if not 200 <= response.status <= 299:
            creating = method == "POST"
            raise error_for(
                response.status, response.data, creating=creating, retry_after=response.retry_after
            )
        answer: JsonObject = json.loads(response.data)
        return answer


def _whole(kind: Kind, item: JsonObject) -> JsonObject:
    """Items of a list carry neither, and callers want whole objects."""
    item.setdefault("apiVersion", RESOURCES[kind].api_version)
    item.setdefault("kind", kind.value)
    return item
