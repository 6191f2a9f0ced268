"""Requests to the API server: one pool of connections, who asks, and a deadline for each.

It must not know what is asked for, nor what an answer means.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.request import getproxies_environment

import aiohttp

from kvtier_operator.kube.access import Access, load_access

CONNECTIONS = 32
UNAUTHORIZED = 401
USER_AGENT = "kvtier-operator"


@dataclass(frozen=True)
class Answer:
    """retry_after: the header, where the server sent it."""

    status: int
    data: bytes
    retry_after: str | None


class Transport:
    """Made within the loop that uses it; whoever made it closes it."""

    def __init__(self, access: Access) -> None:
        self._access = access
        # aiohttp would have threads look for a proxy and a ~/.netrc at each request: two thirds of its cost.
        self.looks_for_proxies = bool(getproxies_environment())
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, ssl=access.ssl_context()),
            trust_env=self.looks_for_proxies,
            headers={"User-Agent": USER_AGENT},
        )

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]],
        body: Any,
        accept: str = "application/json",
        content_type: str,
        seconds: float,
    ) -> Answer:
        """body: sent as JSON; None for none. Raises TimeoutError, aiohttp.ClientError or OSError."""
        headers = {"Accept": accept, "Content-Type": content_type}
        if authorization := self._access.authorization():
            headers["Authorization"] = authorization
        async with self._session.request(
            method,
            self._access.server + path,
            params=list(query),
            data=None if body is None else json.dumps(body),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=seconds),
            proxy=self._access.proxy,
            server_hostname=self._access.server_name,
        ) as response:
            if response.status == UNAUTHORIZED:
                self._access.refused()
            return Answer(response.status, await response.read(), response.headers.get("Retry-After"))

    async def close(self) -> None:
        await self._session.close()


async def connect(kubeconfig: str | None) -> Transport:
    return Transport(await load_access(kubeconfig))
