"""What the engines of a node are asked again and again: what they run, what they use, what they measured.

Why it exists: they answer under the lock that a running step holds, so never on the event loop, nor in a
thread that a revocation needs. It must not know commands.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtier_agent.cachehost import CacheHost
from kvtier_agent.engine_port import EnginePort, TierReport
from kvtier_agent.running import Question, Running, RunningDigests
from kvtier_agent.tierdirs import NodeTiers
from kvtier_agent.tiersums import with_engines
from kvtier_core.nodeplan import NodePlan
from kvtier_core.selectors.lifecycle.works import IndexState

log = logging.getLogger(__name__)

Asked = tuple[Sequence[TierReport], NodePlan | None, Sequence[IndexState]]


class NodeReports:
    """`tiers`: this node's as of the last refresh. `pool`: to be shut down by the node."""

    def __init__(
        self, tiers: NodeTiers, clock: Callable[[], int], changed: Callable[[], None] = lambda: None
    ) -> None:
        """clock: nanoseconds. changed: called when what runs differs otherwise than before."""
        self._tiers = tiers
        self._clock = clock
        self._changed = changed
        self._asking: asyncio.Future[list[Asked]] | None = None
        self.running = RunningDigests()
        self.tiers: Sequence[TierReport] = [tier.report() for tier in tiers.all()]
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="reports")

    async def refresh(
        self, caches: Mapping[str, CacheHost], seconds: float, uids: Collection[str] = ()
    ) -> None:
        """Asks the engines of these caches, by default of all, and adds what others said last. One that does
        not answer for so long, or fails, leaves the reports as they were: no command fails for it. What runs
        is said first, since that waits for no step."""
        earlier = self._asking
        if earlier is not None and not (await asyncio.wait([earlier], timeout=seconds))[0]:
            return
        if not uids:
            self.running.retain(caches)
        hosts, now = [host for uid, host in caches.items() if not uids or uid in uids], self._clock()
        questions = [found for host in hosts if (found := self.running.ask(host, now)) is not None]
        loop = asyncio.get_running_loop()
        self._asking = asking = loop.run_in_executor(self.pool, self._ask, loop, questions, hosts)
        if not (await asyncio.wait([asking], timeout=seconds))[0] or asking.cancelled():
            return
        if (failure := asking.exception()) is not None:
            log.error("an engine cannot say what it uses", exc_info=failure)
            return
        for host, (usage, plan, indexes) in zip(hosts, asking.result(), strict=True):
            host.usage, host.plan, host.indexes = usage, plan, indexes
        every = [report for host in caches.values() for report in host.usage]
        self.tiers = [with_engines(tier.report(), every) for tier in self._tiers.all()]

    def _ask(
        self, loop: asyncio.AbstractEventLoop, questions: list[Question], hosts: list[CacheHost]
    ) -> list[Asked]:
        # Told before anything is asked that a step may hold up.
        loop.call_soon_threadsafe(self._take, [self.running.answer(one) for one in questions])
        return [_asked(host.runner.engine) for host in hosts]

    def _take(self, found: list[Running]) -> None:
        otherwise = [self.running.take(one) for one in found]
        if any(otherwise):
            self._changed()


def _asked(engine: EnginePort) -> Asked:
    return engine.tiers(), engine.plan(), engine.indexes()
