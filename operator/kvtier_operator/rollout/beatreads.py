"""Evidence is asked for on the beat itself, of all looks of a pool that fall on it, and kept until they come.

A look waits for its turn behind others. If each asked for its own evidence, that would be as late as the
look, and an agent would be asked as often as workers become free. So whoever ends a look says what the next
one will ask, and when; at that moment all is asked at once. A look takes only what was asked for the very
moment that it is due at, and only while it is young. It must not judge, nor know what an answer means.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import TypeVar

from kvtier_evidence.reader import Applied
from kvtier_operator.agents.recent import ask_for_all
from kvtier_operator.ports import Agents, AgentTarget, Clock, Leader, NotLeader
from kvtier_operator.rollout.readings import Reading

MAX_EXPECTED = 4096
MAX_WAIT_SECONDS = 1.0
"""The wall clock may be set, and is looked at again so often."""
SHARED_FROM = 2
"""Looks at one agent that fall on one moment, from which on it is asked for all of them. One alone asks for
itself: after its agents' states, so that from the first answer to the last nothing else is waited for."""


T = TypeVar("T")
Answer = Applied | None
"""None: the agent could not be read."""
Ask = Callable[[Reading, AgentTarget], Coroutine[None, None, Answer]]


@dataclass(frozen=True, slots=True)
class _Expected:
    due_at: float
    reading: Reading
    ask: Ask


@dataclass(frozen=True, slots=True)
class _Asked:
    """at: on the monotonic clock."""

    due_at: float
    at: float
    reading: Reading
    answers: dict[AgentTarget, asyncio.Task[Answer]] = field(default_factory=dict)


class BeatReads:
    """One per operator; `run` until cancelled. In the operator's loop only. due_at: seconds since the
    epoch."""

    def __init__(
        self, agents: Agents, leader: Leader, clock: Clock, *, shared_from: int = SHARED_FROM
    ) -> None:
        self._agents = agents
        self._shared_from = shared_from
        self._leader = leader
        self._clock = clock
        self._expected: dict[str, _Expected] = {}
        # By moment, whoever was expected then, each once; some of them are expected at another by now.
        self._moments: dict[float, dict[str, None]] = {}
        self._order: list[float] = []
        self._asked: dict[str, _Asked] = {}
        self._states: set[asyncio.Task[None]] = set()
        self._sooner = asyncio.Event()

    def __len__(self) -> int:
        """Looks that are expected, and answers that are kept for one."""
        return len(self._expected) + len(self._asked)

    def expect(self, reading: Reading, due_at: float, ask: Ask) -> None:
        """What the next look of this rollout will ask, and when; in the place of what it said before. One
        that finds no room asks for itself."""
        uid = reading.key.rollout_uid
        before = self._expected.get(uid)
        if before is None and len(self._expected) >= MAX_EXPECTED:
            return
        self._expected[uid] = _Expected(due_at, reading, ask)
        if before is not None and before.due_at == due_at:
            return
        if due_at not in self._moments:
            self._moments[due_at] = {}
            heapq.heappush(self._order, due_at)
            if self._order[0] == due_at:
                self._sooner.set()
        self._moments[due_at][uid] = None

    def forget(self, uid: str) -> None:
        self._expected.pop(uid, None)
        self._drop(uid)

    def take(
        self, reading: Reading, due_at: float, max_age: float
    ) -> Mapping[AgentTarget, asyncio.Task[Answer]]:
        """What was asked for the look that is due at this moment, by agent, answered or not; once. Nothing
        where that was under another fence or of another window, or longer than `max_age` seconds ago."""
        uid = reading.key.rollout_uid
        expected = self._expected.get(uid)
        if expected is not None and expected.due_at == due_at:
            # The look was faster: all others of that moment are asked with it.
            self.tick()
        found = self._asked.get(uid)
        if found is None:
            return {}
        same = (found.due_at, found.reading.key, found.reading.fence, found.reading.cache) == (
            due_at,
            reading.key,
            reading.fence,
            reading.cache,
        )
        if not same or self._clock.monotonic() - found.at > max_age:
            self._drop(uid)
            return {}
        return self._asked.pop(uid).answers

    async def run(self) -> None:
        try:
            while True:
                self._sooner.clear()
                seconds = self.tick()
                # Not wait_for: in Python 3.11 it may swallow a cancellation that comes with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._sooner.wait()
        finally:
            for uid in list(self._asked):
                self._drop(uid)
            for task in self._states:
                task.cancel()

    def tick(self) -> float:
        """Asks what is due; returns the seconds until it should be called again."""
        now = self._clock.now().timestamp()
        due = []
        while self._order and self._order[0] <= now:
            moment = heapq.heappop(self._order)
            for uid in self._moments.pop(moment):
                expected = self._expected.get(uid)
                if expected is not None and expected.due_at == moment:
                    due.append(self._expected.pop(uid))
        if due and self._leads():
            self._ask(due)
        return min(MAX_WAIT_SECONDS, max(0.0, self._order[0] - now)) if self._order else MAX_WAIT_SECONDS

    def _ask(self, due: list[_Expected]) -> None:
        at = self._clock.monotonic()
        looks = Counter(node for one in due for node in one.reading.nodes)
        shared = {node for node, count in looks.items() if count >= self._shared_from}
        for node in shared:
            task = _begun(ask_for_all(self._agents, node), f"beat-state-{node.name}")
            self._states.add(task)
            task.add_done_callback(self._states.discard)
        for one in due:
            if shared.isdisjoint(one.reading.nodes):
                continue
            uid = one.reading.key.rollout_uid
            self._drop(uid)
            asked = self._asked[uid] = _Asked(one.due_at, at, one.reading)
            for node in one.reading.nodes:
                answer = _begun(one.ask(one.reading, node), f"beat-evidence-{node.name}")
                # Of one that nobody takes nobody hears.
                answer.add_done_callback(_heard)
                asked.answers[node] = answer

    def _leads(self) -> bool:
        try:
            self._leader.check()
        except NotLeader:
            return False
        return True

    def _drop(self, uid: str) -> None:
        asked = self._asked.pop(uid, None)
        if asked is not None:
            for task in asked.answers.values():
                task.cancel()


def _begun(asking: Coroutine[None, None, T], name: str) -> asyncio.Task[T]:
    """In no look's trace: the one that was faster than the beat has others' evidence asked, too."""
    return asyncio.create_task(asking, name=name, context=Context())


def _heard(task: asyncio.Task[Answer]) -> None:
    if not task.cancelled():
        task.exception()
