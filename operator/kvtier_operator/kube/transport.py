"""Requests to the API server: one pool of connections, who asks, and a deadline for each.

It must not know what is asked for, nor what an answer means.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.request import getproxies_environment

import aiohttp

from kvtier_operator.execlogin import ExecLogin
from kvtier_operator.kube.access import Access, load_access

CONNECTIONS = 32
MIN_SECONDS = 0.01
"""Of a request whose login took all of its time; of aiohttp, 0 would be no deadline."""
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
        self._certificate, self._ssl = access.client_certificate(), access.ssl_context()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS),
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
        if self._access.login is not None:
            seconds = await self._logged_in(self._access.login, seconds)
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
            ssl=self._ssl,
            server_hostname=self._access.server_name,
        ) as response:
            if response.status == UNAUTHORIZED:
                self._access.refused(authorization)
            return Answer(response.status, await response.read(), response.headers.get("Retry-After"))

    async def _logged_in(self, login: ExecLogin, seconds: float) -> float:
        """What is left of `seconds` when there is a credential. Another certificate is another context, so
        that no connection of the old one is used."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(seconds):
            await login.ready()
        certificate = self._access.client_certificate()
        if certificate != self._certificate:
            self._certificate, self._ssl = certificate, self._access.ssl_context()
        return max(MIN_SECONDS, seconds - (loop.time() - began))

    async def close(self) -> None:
        if self._access.login is not None:
            await self._access.login.close()
        await self._session.close()


async def connect(kubeconfig: str | None) -> Transport:
    return Transport(await load_access(kubeconfig))
