"""Reads of evidence that are asked of one agent within a moment go as one call.

Rollouts of one pool look at their evidence at the same moments, each at all agents of the pool; a call costs
either side far more than what it reads. Whoever asks notices nothing of the others: cancelled, late or
refused, each is so for itself. It must not know what is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextvars import Context
from dataclasses import dataclass, field

from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents.errors import agent_error
from kvtier_operator.ports import Agents, AgentTarget, AgentUnreachable, Clock

MOMENT_SECONDS = 0.01
MAX_ITEMS = 64
READ_SECONDS = 5.0
"""For how long an answer is waited for, unless told otherwise. Agents take four times as many items."""


@dataclass(eq=False)
class _Asker:
    """until: on the operator's clock. answer: done when whoever asked has left, too."""

    request: control.ReadEvidenceRequest
    until: float
    answer: asyncio.Future[control.ReadEvidenceResponse]

    def take(self, answer: control.ReadEvidenceResponse) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False)
class _Batch:
    """What goes to one agent together; `task` sends it."""

    node: AgentTarget
    askers: list[_Asker] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> list[_Asker]:
        return [one for one in self.askers if not one.answer.done()]


class EvidenceReads:
    """`read` as `ports.Agents.read_evidence`. Must be used from one event loop."""

    def __init__(self, agents: Agents, clock: Clock) -> None:
        self._agents = agents
        self._clock = clock
        self._open: dict[AgentTarget, _Batch] = {}
        self._batches: set[_Batch] = set()
        self._alone: dict[str, str] = {}

    async def read(
        self, node: AgentTarget, request: control.ReadEvidenceRequest, seconds: float = READ_SECONDS
    ) -> control.ReadEvidenceResponse:
        """seconds: for how long the answer is waited for, the moment included."""
        if self._one_by_one(node):
            return await self._agents.read_evidence(node, request, deadline_seconds=seconds)
        answer = asyncio.get_running_loop().create_future()
        asker = _Asker(request, self._clock.monotonic() + seconds, answer)
        batch = self._join(node, asker)
        try:
            async with asyncio.timeout(seconds):
                return await asker.answer
        except TimeoutError as error:
            self._leave(batch)
            message = f"ReadEvidence not answered within {seconds:.1f} s"
            raise AgentUnreachable(node.name, "DEADLINE_EXCEEDED", message) from error
        except asyncio.CancelledError:
            self._leave(batch)
            raise
        finally:
            if asker.answer.done() and not asker.answer.cancelled():
                # Of an answer that came as its asker was leaving nobody else is to hear.
                asker.answer.exception()

    def retain(self, names: Container[str]) -> None:
        self._alone = {name: boot for name, boot in self._alone.items() if name in names}

    async def close(self) -> None:
        """Whoever still waits is told that the agent cannot be reached."""
        batches = list(self._batches)
        tasks = [batch.task for batch in batches if batch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for batch in batches:
            # Also of one that was cancelled before it had begun.
            self._end(batch, _closed(batch.node))

    def _one_by_one(self, node: AgentTarget) -> bool:
        """Whether this life of the agent has said that it does not know of many reads at once."""
        return self._alone.get(node.name) == node.boot_id

    def _join(self, node: AgentTarget, asker: _Asker) -> _Batch:
        batch = self._open.get(node)
        if batch is None:
            batch = self._open[node] = _Batch(node)
            # In no asker's trace, since it is of all of them.
            task = asyncio.create_task(self._run(batch), name=f"evidence-{node.name}", context=Context())
            batch.task = task
            self._batches.add(batch)
            task.add_done_callback(lambda _: self._batches.discard(batch))
        batch.askers.append(asker)
        if len(batch.askers) >= MAX_ITEMS:
            self._shut(batch)
        return batch

    def _shut(self, batch: _Batch) -> None:
        """Who asks from now on asks in another one."""
        if self._open.get(batch.node) is batch:
            del self._open[batch.node]

    def _leave(self, batch: _Batch) -> None:
        """Nothing is asked, or waited for, on behalf of nobody."""
        if not batch.waiting and batch.task is not None:
            self._shut(batch)
            batch.task.cancel()

    def _end(self, batch: _Batch, failure: Exception) -> None:
        self._shut(batch)
        for asker in batch.askers:
            asker.fail(failure)

    async def _run(self, batch: _Batch) -> None:
        failure: Exception = _closed(batch.node)
        try:
            await self._clock.sleep(MOMENT_SECONDS)
            self._shut(batch)
            await self._send(batch)
        except Exception as error:
            # A lost leadership, a refusal or a defect: each asker's own to raise, as of a read alone.
            failure = error
        finally:
            self._end(batch, failure)

    async def _send(self, batch: _Batch) -> None:
        """Until each has an answer. Every round answers one at least."""
        node, left = batch.node, batch.waiting
        while left:
            if len(left) == 1 or self._one_by_one(node):
                await self._singly(node, left)
                return
            request = control.ReadEvidenceManyRequest(items=[one.request for one in left])
            # As long as the most patient one waits; the others see to themselves.
            seconds = max(one.until for one in left) - self._clock.monotonic()
            try:
                answer = await self._agents.read_evidence_many(node, request, deadline_seconds=seconds)
            except AgentUnreachable as error:
                if error.code != "UNIMPLEMENTED":
                    raise
                self._alone[node.name] = node.boot_id
                continue
            if not answer.results:
                raise AgentUnreachable(node.name, "INTERNAL", f"none of {len(left)} reads was answered")
            for asker, result in zip(left, answer.results, strict=False):
                _tell(node, asker, result)
            left = [one for one in left[len(answer.results) :] if not one.answer.done()]

    async def _singly(self, node: AgentTarget, askers: list[_Asker]) -> None:
        await asyncio.gather(*(self._one(node, asker) for asker in askers))

    async def _one(self, node: AgentTarget, asker: _Asker) -> None:
        seconds = asker.until - self._clock.monotonic()
        try:
            asker.take(await self._agents.read_evidence(node, asker.request, deadline_seconds=seconds))
        except Exception as error:
            asker.fail(error)


def _tell(node: AgentTarget, asker: _Asker, result: control.ReadEvidenceResult) -> None:
    kind = result.WhichOneof("answer")
    if kind == "evidence":
        asker.take(result.evidence)
    elif kind == "error":
        asker.fail(agent_error(node.name, result.error))
    else:
        asker.fail(AgentUnreachable(node.name, "INTERNAL", "a read was answered with nothing"))


def _closed(node: AgentTarget) -> AgentUnreachable:
    message = "ReadEvidence was under way as the operator's client was closed"
    return AgentUnreachable(node.name, "CHANNEL_CLOSED", message)
