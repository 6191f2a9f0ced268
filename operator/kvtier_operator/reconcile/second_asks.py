"""The second question to an agent that did not answer in time: one for all caches that wait for it.

A machine that stood still for some seconds is no outage, so who has proved itself is asked once more before
anybody is told that it cannot be reached. Of a thousand caches each would wait once more for a dead one. It
must not know what an answer means.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from dataclasses import dataclass

from kvtier.v1 import control_pb2 as control
from kvtier_operator.ports import AgentTarget, AgentUnreachable, Deps, Kind, ObjectKey


@dataclass(frozen=True)
class _Question:
    """One that is under way, of all caches. began: on the monotonic clock."""

    target: AgentTarget
    began: float
    answer: asyncio.Task[control.GetStateResponse]


class SecondAsks:
    """One per reconciler. In the operator's loop only."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._questions: dict[str, _Question] = {}
        self._silent: set[str] = set()

    def __len__(self) -> int:
        """Agents that are remembered."""
        return len(self._silent | self._questions.keys())

    def heard(self, node: str) -> None:
        """It has answered, or has ended: the next time it may be asked twice again."""
        self._silent.discard(node)

    async def ask(
        self, target: AgentTarget, since: float, silence: AgentUnreachable
    ) -> control.GetStateResponse:
        """What it says when it is asked once more. since: when it was asked first, on the monotonic clock.
        silence: what came of that; raised where it was asked twice before and has not been heard since."""
        known = self._questions.get(target.name)
        if known is None or known.target != target or known.began < since:
            if target.name in self._silent:
                raise silence
            known = self._begin(target)
        # Who is cancelled does not take the answer from the others who wait for it.
        return await asyncio.shield(known.answer)

    def _begin(self, target: AgentTarget) -> _Question:
        nodes = {node for node in self._silent if self._deps.store.get(ObjectKey(Kind.KV_NODE, "", node))}
        # Those whose KVNode is gone answer nobody any more.
        self._silent = nodes | {target.name}
        # In nobody's trace, since it is asked for many.
        answer = asyncio.create_task(
            self._deps.agents.get_state(target), name=f"second-ask-{target.name}", context=Context()
        )
        question = self._questions[target.name] = _Question(target, self._deps.clock.monotonic(), answer)
        answer.add_done_callback(lambda _: self._end(question))
        return question

    def _end(self, question: _Question) -> None:
        if self._questions.get(question.target.name) is question:
            del self._questions[question.target.name]
        if not question.answer.cancelled():
            question.answer.exception()  # the askers' own to raise, also where all have left
