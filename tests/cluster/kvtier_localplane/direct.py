"""What kubectl's `get -o json` and `apply --server-side` do, over one kept connection.

A wait asks twenty times a second; with a kubectl process for each question a test spends more of the machine
on asking than on what it waits for. So plain reads and applies go to the API server from here: the same
requests, answers and errors, by the same credentials. Whatever is asked otherwise is kubectl's (`Cluster`
decides), and so is everything on a cluster that is not ours. It must not know our resources.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from .pki import write_private

DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_SELECTORS = {"-l": "labelSelector", "--selector": "labelSelector", "--field-selector": "fieldSelector"}


class RefusedError(Exception):
    """The API server, or the way to it, refused; the message is as kubectl prints it."""


@dataclass(frozen=True)
class Resource:
    """One kind of object. path: of its group and version, as "/apis/apps/v1"."""

    path: str
    plural: str
    kind: str
    namespaced: bool
    names: frozenset[str]

    def url(self, namespace: str, name: str = "", **query: str) -> str:
        """Of one object, or of all; namespace: empty for the whole cluster."""
        parts = [self.path]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace)]
        parts += [self.plural, *([quote(name)] if name else [])]
        return "/".join(parts) + (f"?{urlencode(query)}" if query else "")


@dataclass(frozen=True)
class Question:
    """A `kubectl get` that can be asked from here. kinds: as typed. name: of one object, or empty."""

    kinds: tuple[str, ...]
    name: str
    namespace: str
    selectors: tuple[tuple[str, str], ...]


def parse(words: Sequence[str]) -> Question | None:
    """The arguments after `get`; None when kubectl has to be asked."""
    plain: list[str] = []
    namespace = "default"
    selectors: list[tuple[str, str]] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if word in ("-A", "--all-namespaces"):
            namespace = ""
        elif word in ("-n", "--namespace", *_SELECTORS) and pending:
            value = pending.pop(0)
            if word in _SELECTORS:
                selectors.append((_SELECTORS[word], value))
            else:
                namespace = value
        elif word.startswith("-"):
            return None
        else:
            plain.append(word)
    if len(plain) == 1 and plain[0].count("/") == 1:
        plain = plain[0].split("/")
    if len(plain) not in (1, 2) or any("/" in word for word in plain):
        return None
    kinds, name = tuple(plain[0].split(",")), "".join(plain[1:])
    if name and (len(kinds) > 1 or selectors or "," in name):
        return None
    return Question(kinds, name, namespace, tuple(selectors))


class Direct:
    """One user of one API server. Thread-safe: each thread has a connection of its own."""

    def __init__(self, server: str, user: Mapping[str, str], ca_file: Path, folder: Path) -> None:
        """user: the fields of a kubeconfig's user. folder: private, for what TLS reads from files."""
        self._address = urlsplit(server).netloc
        self._headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        self._tls = ssl.create_default_context(cafile=str(ca_file))
        if "client-key-data" in user:
            pair = folder / "direct.pem"
            texts = (user["client-certificate-data"], user["client-key-data"])
            write_private(pair, b"".join(base64.b64decode(text) for text in texts))
            self._tls.load_cert_chain(pair)
        self._own = threading.local()
        self._lock = threading.Lock()
        self._resources: list[Resource] = []

    def get(self, question: Question, timeout: float) -> Any | None:
        """The object, or a v1 List; None for a kind that is not there. Raises RefusedError."""
        found = [self._find(kind, timeout) for kind in question.kinds]
        if None in found:
            return None
        resources = [one for one in found if one is not None]
        if question.name:
            return _shown(self._ask("GET", resources[0].url(question.namespace, question.name), timeout))
        items: list[Any] = []
        for resource in resources:
            query = dict(question.selectors)
            answer = self._ask("GET", resource.url(question.namespace, **query), timeout)
            kind = {"apiVersion": answer["apiVersion"], "kind": resource.kind}
            items += [_shown({**kind, **item}) for item in answer["items"]]
        return {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": items}

    def apply(
        self, manifest: Mapping[str, Any], timeout: float, *, manager: str, force: bool, subresource: str = ""
    ) -> Any | None:
        """Server-side apply of one object, unknown fields refused; None for a kind that is not there."""
        group, _, version = str(manifest["apiVersion"]).rpartition("/")
        path = f"/apis/{group}/{version}" if group else f"/api/{version}"
        resource = self._find_kind(path, manifest["kind"], timeout)
        if resource is None:
            return None
        metadata = manifest["metadata"]
        url = resource.url(metadata.get("namespace", "default"), metadata["name"])
        query = {"fieldManager": manager, "force": str(force).lower(), "fieldValidation": "Strict"}
        where = f"{url}/{subresource}" if subresource else url
        return self._ask("PATCH", f"{where}?{urlencode(query)}", timeout, json.dumps(manifest))

    # --- what there is -------------------------------------------------------

    def _find(self, name: str, timeout: float) -> Resource | None:
        """As kubectl looks a word up: any of a resource's names, the first group that has it."""
        return self._discovered(lambda one: name.lower() in one.names, timeout)

    def _find_kind(self, path: str, kind: str, timeout: float) -> Resource | None:
        return self._discovered(lambda one: (one.path, one.kind) == (path, kind), timeout)

    def _discovered(self, wanted: Any, timeout: float) -> Resource | None:
        """Asks what there is when the thing is not known yet: kinds are installed while tests run."""
        with self._lock:
            for asked in (False, True):
                if asked:
                    self._resources = [
                        one
                        for path in ("/api", "/apis")
                        for one in _resources(self._ask("GET", path, timeout, accept=DISCOVERY))
                    ]
                for one in self._resources:
                    if wanted(one):
                        return one
        return None

    # --- the wire --------------------------------------------------------------

    def _ask(
        self, method: str, url: str, timeout: float, body: str = "", accept: str = "application/json"
    ) -> Any:
        headers = {**self._headers, "Accept": accept}
        if body:
            headers["Content-Type"] = "application/apply-patch+yaml"
        until = time.monotonic() + timeout
        status, answer, again = self._send(method, url, timeout, body, headers)
        # As kubectl: a server that says when to come again, as one whose kind is new does, is asked again.
        while again and (status == 429 or status >= 500) and time.monotonic() < until:
            time.sleep(float(again))
            status, answer, again = self._send(method, url, timeout, body, headers)
        try:
            found = json.loads(answer)
        except ValueError as error:
            raise RefusedError(f"{method} {url}: {status}: {answer[:200]!r}") from error
        if status >= 400:
            raise RefusedError(f"Error from server ({found.get('reason')}): {found.get('message')}")
        return found

    def _send(
        self, method: str, url: str, timeout: float, body: str, headers: Mapping[str, str]
    ) -> tuple[int, bytes, str]:
        """Status, body and Retry-After. Twice where a kept connection turns out to be closed: reads and
        applies may be repeated."""
        for last in (False, True):
            kept: http.client.HTTPSConnection | None = getattr(self._own, "connection", None)
            connection = kept or http.client.HTTPSConnection(self._address, context=self._tls)
            connection.timeout = timeout
            if connection.sock is not None:
                connection.sock.settimeout(timeout)
            try:
                connection.request(method, url, body or None, dict(headers))
                response = connection.getresponse()
                answer = response.status, response.read(), response.headers.get("Retry-After", "")
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self._own.connection = None
                if last or kept is None:
                    raise RefusedError(f"{method} {url}: {type(error).__name__}: {error}") from error
                continue
            self._own.connection = connection
            return answer
        raise AssertionError("unreachable: the second attempt returns or raises")


def _shown(made: dict[str, Any]) -> dict[str, Any]:
    """Without what kubectl shows only when it is asked to."""
    made["metadata"].pop("managedFields", None)
    return made


def _resources(document: Mapping[str, Any]) -> list[Resource]:
    """Of each group its versions in the server's order, so the preferred one is found first by name."""
    found = []
    for group in document["items"]:
        name = group["metadata"].get("name", "")
        for version in group["versions"]:
            path = f"/apis/{name}/{version['version']}" if name else f"/api/{version['version']}"
            for one in version.get("resources", []):
                plural, singular = one["resource"], one.get("singularResource", "")
                names = {plural, singular, one["responseKind"]["kind"].lower(), *one.get("shortNames", [])}
                if name:
                    names |= {f"{plural}.{name}", f"{singular}.{name}"}
                namespaced = one["scope"] == "Namespaced"
                kind = one["responseKind"]["kind"]
                found.append(Resource(path, plural, kind, namespaced, frozenset(names)))
    return found
