"""What agents said a moment ago, for those who look at many caches of one agent: asked once, not once each.
Reads of evidence, which nobody shares, go together (`evidencereads`).

An answer counts for a cache only while nothing was told to the agent about that cache since it was asked for,
so nobody sees a time before his own command. One that was asked for a single cache serves those who ask for
that one; one of all caches serves everybody. It must not know what an answer means, but for the boot id: of
an agent that has restarted nothing counts that it said before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Container, Iterator
from dataclasses import dataclass

from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents.evidencereads import READ_SECONDS, EvidenceReads
from kvtier_operator.ports import (
    AgentError,
    Agents,
    AgentTarget,
    AgentUnreachable,
    Clock,
    NotLeader,
)

MAX_TOLD = 65_536
MAX_SINGLE = 16
"""Answers of a single cache that are kept of one agent."""
KEPT_SECONDS = 30.0
"""For how long, at least; nobody asks for one that is nearly as old."""
SAME_MOMENT_SECONDS = 0.5
ALL = ""
"""Stands where a cache's uid would, for all of them."""


@dataclass(frozen=True)
class _Told:
    """What an agent said. `sent`: when it was asked, on the monotonic clock."""

    target: AgentTarget
    sent: float
    state: control.GetStateResponse


@dataclass(frozen=True)
class _Question:
    """One that is under way. `sent`: when it was asked. seconds: for how long an answer is waited for.
    answer: None when its asker was cancelled."""

    target: AgentTarget
    sent: float
    seconds: float | None
    answer: asyncio.Future[_Told | None]


class RecentAgents:
    """Implements `kvtier_operator.ports.Agents` over another one, all of whose commands pass here."""

    def __init__(self, agents: Agents, clock: Clock) -> None:
        self._agents = agents
        self._clock = clock
        self._reads = EvidenceReads(agents, clock)
        # By node, then by the cache asked for; the latest last.
        self._answers: dict[str, dict[str, _Told]] = {}
        self._questions: dict[tuple[str, str], _Question] = {}
        self._told: dict[tuple[str, str], float] = {}
        # Of what was asked before then nobody knows any more what was told since.
        self._forgotten = -1.0

    async def recent_state(
        self,
        node: AgentTarget,
        cache_uid: str,
        max_age_seconds: float,
        *,
        deadline_seconds: float | None = None,
        for_all: bool = False,
    ) -> control.GetStateResponse:
        """As `get_state` of this cache, or an answer to somebody else that is no older and as good for it.
        for_all: others are likely to ask the same agent of other caches, so that one of all is asked for."""
        state, _ = await self.recent_answer(
            node, cache_uid, max_age_seconds, deadline_seconds=deadline_seconds, for_all=for_all
        )
        return state

    async def recent_answer(
        self,
        node: AgentTarget,
        cache_uid: str,
        max_age_seconds: float,
        *,
        deadline_seconds: float | None = None,
        for_all: bool = False,
    ) -> tuple[control.GetStateResponse, float]:
        """The same, and for how many seconds it had been asked for as this was called: 0 where it was asked
        for now."""
        began = self._clock.monotonic()
        told: _Told | None = None
        while told is None:
            told = self._known(node, cache_uid, max_age_seconds)
            if told is None:
                waiting = self._waiting(node, cache_uid, max_age_seconds, deadline_seconds)
                if waiting is None:
                    told = await self._ask(node, ALL if for_all else cache_uid, deadline_seconds)
                else:
                    # Who is cancelled does not take the answer from the others who wait for it.
                    told = await asyncio.shield(waiting.answer)
        return told.state, max(0.0, began - told.sent)

    def _known(self, node: AgentTarget, cache_uid: str, max_age: float) -> _Told | None:
        answers = self._answers.get(node.name)
        if not answers:
            return None
        for asked in (cache_uid, ALL):
            known = answers.get(asked)
            if known is None or known.target != node:
                continue
            if self._good(node, cache_uid, known.sent, max_age):
                return known
        return None

    def _waiting(
        self, node: AgentTarget, cache_uid: str, max_age: float, seconds: float | None
    ) -> _Question | None:
        for asked in (cache_uid, ALL):
            waiting = self._questions.get((node.name, asked))
            if waiting is None or (waiting.target, waiting.seconds) != (node, seconds):
                continue
            if self._good(node, cache_uid, waiting.sent, max_age):
                return waiting
        return None

    def _good(self, node: AgentTarget, cache_uid: str, sent: float, max_age: float) -> bool:
        """Whether what was asked then is as good, for this cache, as what is asked now."""
        young = self._clock.monotonic() - sent <= max_age
        return young and sent > self._told.get((node.name, cache_uid), self._forgotten)

    async def _ask(self, node: AgentTarget, asked: str, seconds: float | None) -> _Told:
        """For all who ask until it is answered. asked: a cache's uid, or ALL."""
        future = asyncio.get_running_loop().create_future()
        key = node.name, asked
        mine = self._questions[key] = _Question(node, self._clock.monotonic(), seconds, future)
        try:
            told = await self._get(node, asked, seconds)
        except Exception as error:
            future.set_exception(error)
            future.exception()  # the asker's own to raise, also where nobody else waits
            raise
        else:
            future.set_result(told)
            return told
        finally:
            if not future.done():
                future.set_result(None)
            if self._questions.get(key) is mine:
                del self._questions[key]

    async def get_state(
        self, node: AgentTarget, cache_uid: str = ALL, *, deadline_seconds: float | None = None
    ) -> control.GetStateResponse:
        return (await self._get(node, cache_uid, deadline_seconds)).state

    async def _get(self, node: AgentTarget, asked: str, seconds: float | None) -> _Told:
        sent = self._clock.monotonic()
        try:
            state = await self._agents.get_state(node, asked, deadline_seconds=seconds)
        except BaseException:
            self._answers.pop(node.name, None)
            raise
        told = _Told(node, sent, state)
        self._keep(node, asked, told)
        return told

    def _keep(self, node: AgentTarget, asked: str, answer: _Told) -> None:
        before = self._answers.get(node.name, {})
        kept = {
            uid: known
            for uid, known in before.items()
            if uid != asked
            and known.state.boot_id == answer.state.boot_id
            and answer.sent - known.sent <= KEPT_SECONDS
        }
        kept[asked] = answer
        single = [uid for uid in kept if uid != ALL]
        if len(single) > MAX_SINGLE:
            del kept[single[0]]
        self._answers[node.name] = kept

    async def apply_baseline(
        self,
        node: AgentTarget,
        request: control.ApplyBaselineRequest,
        *,
        deadline_seconds: float | None = None,
    ) -> control.ApplyBaselineResponse:
        with self._telling(node, request.cache.uid):
            return await self._agents.apply_baseline(node, request, deadline_seconds=deadline_seconds)

    async def remove_cache(
        self, node: AgentTarget, request: control.RemoveCacheRequest, *, deadline_seconds: float | None = None
    ) -> control.RemoveCacheResponse:
        with self._telling(node, request.cache.uid):
            return await self._agents.remove_cache(node, request, deadline_seconds=deadline_seconds)

    async def grant(
        self, node: AgentTarget, request: control.GrantRequest, *, deadline_seconds: float | None = None
    ) -> control.GrantResponse:
        with self._telling(node, request.cache.uid):
            return await self._agents.grant(node, request, deadline_seconds=deadline_seconds)

    async def revoke(
        self, node: AgentTarget, request: control.RevokeRequest, *, deadline_seconds: float | None = None
    ) -> control.RevokeResponse:
        with self._telling(node, request.cache.uid):
            return await self._agents.revoke(node, request, deadline_seconds=deadline_seconds)

    async def renew(
        self, node: AgentTarget, request: control.RenewRequest, *, deadline_seconds: float | None = None
    ) -> control.RenewResponse:
        return await self._agents.renew(node, request, deadline_seconds=deadline_seconds)

    async def prove(
        self, node: AgentTarget, request: control.ProveRequest, *, deadline_seconds: float | None = None
    ) -> control.ProveResponse:
        return await self._agents.prove(node, request, deadline_seconds=deadline_seconds)

    async def read_evidence(
        self,
        node: AgentTarget,
        request: control.ReadEvidenceRequest,
        *,
        deadline_seconds: float | None = None,
    ) -> control.ReadEvidenceResponse:
        seconds = READ_SECONDS if deadline_seconds is None else deadline_seconds
        return await self._reads.read(node, request, seconds)

    async def read_evidence_many(
        self,
        node: AgentTarget,
        request: control.ReadEvidenceManyRequest,
        *,
        deadline_seconds: float | None = None,
    ) -> control.ReadEvidenceManyResponse:
        return await self._agents.read_evidence_many(node, request, deadline_seconds=deadline_seconds)

    def retain(self, names: Container[str]) -> None:
        self._agents.retain(names)
        self._reads.retain(names)
        for name in [name for name in self._answers if name not in names]:
            del self._answers[name]

    async def close(self) -> None:
        await self._reads.close()
        await self._agents.close()

    @contextlib.contextmanager
    def _telling(self, node: AgentTarget, cache_uid: str) -> Iterator[None]:
        """From its beginning until its end, whatever that is, a command may have changed what was said."""
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
            # Also of an answer that is still on its way.
            self._forgotten = self._clock.monotonic()
        self._told[node.name, cache_uid] = self._clock.monotonic()
        try:
            yield
        finally:
            self._told[node.name, cache_uid] = self._clock.monotonic()


async def state_of(
    agents: Agents,
    node: AgentTarget,
    cache_uid: str,
    max_age: float,
    seconds: float | None = None,
    *,
    for_all: bool = False,
) -> control.GetStateResponse:
    """Of an agent for one cache; as it told anybody up to `max_age` seconds ago, where that is remembered.
    seconds: for how long an answer is waited for. for_all: see `recent_state`."""
    if isinstance(agents, RecentAgents):
        return await agents.recent_state(node, cache_uid, max_age, deadline_seconds=seconds, for_all=for_all)
    return await agents.get_state(node, cache_uid, deadline_seconds=seconds)


async def state_and_age(
    agents: Agents,
    node: AgentTarget,
    cache_uid: str,
    max_age: float,
    seconds: float | None = None,
    *,
    for_all: bool = False,
) -> tuple[control.GetStateResponse, float]:
    """The same, and for how many seconds it had been asked for as this was called: 0 where it was asked for
    now."""
    if isinstance(agents, RecentAgents):
        return await agents.recent_answer(node, cache_uid, max_age, deadline_seconds=seconds, for_all=for_all)
    return await agents.get_state(node, cache_uid, deadline_seconds=seconds), 0.0


async def ask_for_all(agents: Agents, node: AgentTarget) -> None:
    """Has an agent's answer of all its caches remembered, for many who are about to ask; where nobody
    remembers, nothing is asked. Who asks for himself hears of a failure."""
    if isinstance(agents, RecentAgents):
        with contextlib.suppress(AgentError, AgentUnreachable, NotLeader):
            await agents.recent_state(node, ALL, SAME_MOMENT_SECONDS, for_all=True)
