"""The port to the cluster: what commands read and write there, and nothing else of it.

It must not know how the cluster is reached: lint and completion need none, and load no client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from kubectl_kvtier.outcomes import Exit, Failure

Json = dict[str, Any]
Objects = list[Json]


class Changed(Exception):
    """The object is no longer what the write was meant for."""


def of_metadata(document: Json, name: str) -> str:
    """`metadata.NAME` of an object as a server gave it: its name, uid or resourceVersion, which all that are
    stored have. Failure FAILED, naming what is missing."""
    metadata = document.get("metadata")
    known: Json = metadata if isinstance(metadata, dict) else {}
    value = known.get(name)
    if isinstance(value, str) and value:
        return value
    whose = " ".join(str(one) for one in (document.get("kind"), known.get("name")) if one)
    raise Failure(
        Exit.FAILED, f"{whose or 'an object'} came without metadata.{name}: so no API server stores it"
    )


class Api(Protocol):
    """Objects as the API server gives them. Failure: NOT_FOUND by name, FAILED with the server's words,
    Forbidden for a missing right, Unavailable where another try may be answered."""

    @property
    def namespace(self) -> str:
        """Of the command line, else of the kubeconfig's context."""

    async def get(self, plural: str, name: str) -> Json:
        """An object of ours in `namespace`, or cluster-scoped."""

    async def list(self, plural: str, *, everywhere: bool = False) -> Objects: ...

    async def revisions(self, cache_uid: str) -> Objects: ...

    async def events(self, kind: str, name: str) -> Objects:
        """events.k8s.io/v1, of one object of ours in `namespace`."""

    async def patch(
        self, plural: str, name: str, operations: Objects, *, namespace: str = "", dry_run: bool = False
    ) -> Json:
        """A JSON patch; Changed when one of its tests fails. namespace: of the object, where it is not that
        of the command. dry_run: judged as it would be, and not kept."""

    async def delete(self, plural: str, name: str, *, uid: str, namespace: str = "") -> None:
        """Exactly the object of that uid; Changed when another has its name."""

    def follow(self, plural: str, name: str) -> AsyncIterator[Json]:
        """The object now and at each change, without end. An API server that is away for a while, after
        it has answered once, is waited for; then Unavailable."""
