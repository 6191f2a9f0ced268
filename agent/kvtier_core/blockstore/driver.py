"""The one thread that moves a block store on, and the waits that go with it; each wait has a deadline.

Why it exists: the store's machines never block and never run by themselves. In production this thread pumps
them whenever a tier reports; tests and the simulator pump by hand and need no thread. It must not know
blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtier_core.blockstore.lasting import THERE, answered
from kvtier_core.blockstore.outcomes import PutOutcome, Stored
from kvtier_core.blockstore.reads import Fetch
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.deletion import Deletion, DeletionState
from kvtier_core.transactions.reasons import refusal

IDLE_SECONDS = 0.25
CLOSE_SECONDS = 10.0


class Bell:
    """What tiers ring when they have reported. Made before the store, which needs it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)
        self._event.clear()


class Driver:
    """Pumps `store` from `start` to `close`. failure: what ended the thread, if anything did."""

    def __init__(self, store: BlockStore, bell: Bell, clock: Callable[[], float]) -> None:
        self.store = store
        self._bell = bell
        self._clock = clock
        self._stopping = False
        self._turn = threading.Condition()
        self._turns = 0
        self._thread = threading.Thread(target=self._run, name="kvtier-blocks", daemon=True)
        self.failure: BaseException | None = None
        self._listeners: tuple[Callable[[], None], ...] = ()

    @property
    def stopping(self) -> bool:
        """Nothing moves on any more, or soon will not."""
        return self._stopping

    def listen(self, turned: Callable[[], None]) -> None:
        """Calls `turned` after every turn and at the end, from the driver's thread; it must not block or
        raise."""
        self._listeners = (*self._listeners, turned)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._bell.wait(self._patience())
                self.store.pump()
                with self._turn:
                    self._turns += 1
                    self._turn.notify_all()
                self._tell()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            with self._turn:
                self._stopping = True
                self._turn.notify_all()
            self._tell()

    def _tell(self) -> None:
        for turned in self._listeners:
            turned()

    def _patience(self) -> float:
        due = self.store.next_deadline()
        return IDLE_SECONDS if due is None else min(IDLE_SECONDS, max(0.0, due - self._clock()))

    def wait_until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Waits for a condition that pumping may bring about; False at the deadline. DRAINING when the driver
        ended."""
        with self._turn:
            while not done():
                left = deadline - self._clock()
                if left <= 0:
                    return False
                if self._stopping:
                    raise CoreError(Reason.DRAINING, "the block store has stopped")
                self._turn.wait(min(left, IDLE_SECONDS))
            return True

    def wait_for(self, fetch: Fetch, blocks: int, deadline: float) -> int:
        """Waits for the first `blocks` of a fetch; returns how many are ready, fewer at the deadline or when
        the prefix ends before."""
        self.wait_until(lambda: fetch.over or fetch.ready >= blocks, deadline)
        return min(blocks, fetch.ready)

    def wait_deleted(self, deletions: Sequence[Deletion], deadline: float) -> bool:
        """Waits until deletions are done in every tier; False at the deadline, and they go on."""
        self._bell.ring()
        return self.wait_until(lambda: all(each.state is DeletionState.DONE for each in deletions), deadline)

    def put(
        self,
        keys: Sequence[bytes],
        payloads: Sequence[memoryview | bytes],
        *,
        namespace: bytes,
        deadline: float,
        rows: int = 0,
        cost: float = 0.0,
        droppable: bool = False,
        durable: bool = False,
    ) -> list[Stored]:
        """As `BlockStore.put`, but blocks that found no slot while others are leaving wait for one; also for
        others of this call, when they are more than the home tier holds. Once some blocks are dealt with
        there is an outcome for each block, whatever ends the call. durable: waits until a restart keeps them,
        and says of each whether it does (`Stored.durable`) or why not (`reason`, of a block that is stored);
        TIER_INCAPABLE, with nothing stored, where no tier can."""
        if durable:
            self.store.through.check()
        done: dict[int, Stored] = {}
        left = list(range(len(keys)))
        while left:
            turn = self._turns
            try:
                stored = self.store.put(
                    [keys[index] for index in left],
                    [payloads[index] for index in left],
                    namespace=namespace,
                    deadline=deadline,
                    rows=rows,
                    cost=cost,
                    droppable=droppable,
                )
            except CoreError:
                if not done:
                    raise
                # What the round before said of those that are left still holds.
                break
            done.update(zip(left, stored, strict=True))
            progress = any(each.outcome is PutOutcome.STORED for each in stored)
            left = [index for index in left if _worth_waiting(done[index], progress)]
            if left and not progress and not self._next_turn(turn, deadline):
                break
        stored = [done[index] for index in range(len(keys))]
        return self._lasting(keys, stored, namespace, deadline) if durable else stored

    def _lasting(
        self, keys: Sequence[bytes], stored: list[Stored], namespace: bytes, deadline: float
    ) -> list[Stored]:
        there = [at for at, each in enumerate(stored) if each.outcome in THERE]
        try:
            scope = self.store.persist([keys[at] for at in there], namespace=namespace, deadline=deadline)
        except CoreError as error:
            code = refusal(error).code
            for at in there:
                stored[at] = stored[at]._replace(reason=code, message=error.message)
            return stored
        try:
            self.wait_until(lambda: scope.over, deadline)
        except CoreError as error:
            for index in range(len(scope)):
                scope.end(index, refusal(error).code, error.message)
        finally:
            self.store.through_with(scope)
        for index, at in enumerate(there):
            stored[at] = answered(stored[at], scope, index)
        return stored

    def _next_turn(self, seen: int, deadline: float) -> bool:
        """Whether the driver made another turn before the deadline and its own end."""
        try:
            return self.wait_until(lambda: self._turns > seen, deadline)
        except CoreError:
            return False

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Ends the thread. DEADLINE when it does not end."""
        self._stopping = True
        self._bell.ring()
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise CoreError(Reason.DEADLINE, f"the block store did not stop within {seconds} s")


def _worth_waiting(stored: Stored, progress: bool) -> bool:
    """Whether a slot may come: copies leave, or those just stored by this call can."""
    if stored.outcome is not PutOutcome.REFUSED:
        return False
    return stored.reason is MoveReason.CREDIT_PRESSURE or (
        progress and stored.reason is MoveReason.NO_DESTINATION_CAPACITY
    )
