"""What the process needs of a cache engine, and the thread it runs in.

The servicers code against `EnginePort`, so they are tested with a small fake and know no tensor. Compute
never runs on the event loop: each engine has one thread and a bounded queue. This module knows no RPC.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.endings import BlockingEnd
from kvtier_agent.rowevidence import GIVES_NOTHING, EngineGives, EvidenceAsked, RowEvidence
from kvtier_agent.weightstore import GivenWeights
from kvtier_core.edits.requests import EditAnswer, EditRequest, ForkRequest
from kvtier_core.errors import CoreError, Reason
from kvtier_core.nodeplan import NodePlan
from kvtier_core.receipts import ExactnessClass as ExactnessClass
from kvtier_core.receipts import SelectionFacts, StepReceipt, TierBytes
from kvtier_core.release.leases import GrantTerms
from kvtier_core.selectors.lifecycle.works import IndexState
from kvtier_crds.manifest import RuntimeManifest

T = TypeVar("T")
P = ParamSpec("P")


class Held(Protocol):
    """What lies in an engine's `FrameRoom`; only the engine looks into it."""

    def numel(self) -> int: ...


# Received bytes, or an array or an engine's own memory that nobody else writes to any more.
Payload = bytes | NDArray[np.float32] | Held


@dataclass(slots=True)
class FrameRoom:
    """Memory for one frame of one row and one query: `floats`, to be filled with its k, v and q, one behind
    the other, and the payloads that they are then."""

    floats: NDArray[np.float32]
    k: Payload
    v: Payload
    q: Payload


@dataclass(frozen=True)
class SessionTerms:
    """A new session; its model, geometry and tenant were checked. `candidate` prepares indexes for it, of
    what the engine `gives`; serves: that candidate is its arm; compared: both answers are computed of some of
    its steps. session_id: empty, the engine names it."""

    tenant: str
    score_scale: float
    max_tokens: int
    candidate: GrantTerms | None
    gives: EngineGives = GIVES_NOTHING
    serves: bool = False
    compared: bool = False
    session_id: str = ""


@dataclass(frozen=True)
class SessionHandle:
    """asked: what its engine sends with frames; None: nothing. chunk_tokens: by which its answers are merged
    where that is not what the cache's baseline says; 0: it is."""

    session_id: str
    generation: int
    asked: EvidenceAsked | None = None
    chunk_tokens: int = 0


# What is made for each frame is not frozen: a frozen one of so many fields costs three times as much, and at
# 30 layers a token that is felt. Nobody changes them.
@dataclass(slots=True)
class FrameInput:
    """One layer of one step: float32 k, v [rows, kvHeads, headDim] and q [queries, queryHeads, headDim].
    `deadline`: seconds on time.monotonic, the engine's clock; None: none. `position_epoch`: 0 is not
    stated. promise_later: what the frame begins may wait for the result's `afterwards`, and may then also be
    what nobody has promised."""

    session_id: str
    generation: int
    step: int
    layer: int
    first_row_position: int
    k: Payload
    v: Payload
    first_query_position: int
    q: Payload
    committed_frontier: int
    deadline: float | None = None
    position_epoch: int = 0
    next_layer_follows: bool = False
    evidence: RowEvidence | None = None
    promise_later: bool = False


@dataclass(frozen=True)
class FrameMode:
    """How to compute it. `may_publish` is asked in the engine's thread when a candidate's answer is ready;
    when it says no, the exact answer is published."""

    publish_candidate: bool
    compare: bool
    candidate: GrantTerms | None
    may_publish: Callable[[], bool]


@dataclass(slots=True)
class FrameReceipt:
    """Facts of one answer; field meanings as in the wire's Receipt. Times in seconds, sizes in bytes.
    failed_plans: run for the frame before `plan_kind`, each with why it ended; for telemetry."""

    exactness: ExactnessClass
    manifest_digest: str
    support_digest: str
    frontier: int
    rows_attended: int
    bytes_by_tier: Mapping[str, int]
    plan: Sequence[str]
    simulated: bool
    stall_seconds: float
    producer_digest: str
    estimated_omitted_mass: float
    fallback: str
    snapshot_generation: int
    position_epoch: int = 1
    plan_kind: str = ""
    hidden_seconds: float = 0.0
    peak_buffer_bytes: int = 0
    promised_bytes: int = 0
    failed_plans: Sequence[tuple[str, str]] = ()
    selection: SelectionFacts | None = None
    shared_bytes_by_tier: Mapping[str, int] | None = None


@dataclass(frozen=True)
class FrameComparison:
    """Norms over all heads of the layer, fp32 accumulation: candidate minus exact, and exact."""

    diff_norm: float
    exact_norm: float


@dataclass(slots=True)
class FrameResult:
    """`out`: float32 bytes [queries, queryHeads, headDim]. `from_candidate`: whose answer `out` is. refused:
    what the candidate's own engine refused, where the baseline answers in its place; told once a session.
    afterwards: to be called when the answer has left; raises nothing but defects."""

    out: bytes
    receipt: FrameReceipt | StepReceipt
    comparison: FrameComparison | None
    from_candidate: bool
    refused: CoreError | None = None
    afterwards: Callable[[], None] | None = None


@dataclass(frozen=True)
class TierReport:
    """One tier as this node sees it. Bandwidths in bytes per second, 0: not measured. held: bytes of slots by
    who has them, `TierBytes`."""

    class_name: str
    medium: str
    simulated: bool
    capacity_bytes: int
    used_bytes: int = 0
    pinned_bytes: int = 0
    read_bytes_per_second: float = 0.0
    write_bytes_per_second: float = 0.0
    probes: Mapping[str, str] = field(default_factory=dict)
    condition: str = "Ready"
    held: TierBytes = field(default_factory=TierBytes)


@dataclass(frozen=True)
class BlockFacts:
    layer: int
    chunk: int
    generation: int
    tier_class: str
    rows: int
    size_bytes: int
    checksum: str
    producer_digest: str
    sealed: bool


@runtime_checkable
class DemotesSessions(Protocol):
    """An engine that can move a session's rows down."""

    def demote_session(self, session_id: str, generation: int, most: int) -> int:
        """Moves up to `most` chunks to slower tiers that have room; how many. SESSION_UNKNOWN."""


@runtime_checkable
class MakesRooms(Protocol):
    """An engine that can take a decode frame in memory of its own kind."""

    def room(self) -> FrameRoom | None:
        """For a session that no candidate serves, to be filled for one frame after the other: the engine
        reads it until it has answered. None: it takes arrays."""


class EnginePort(Protocol):
    """One cache on one node. Synchronous, thread-safe, typed refusals (CoreError)."""

    def open_session(self, terms: SessionTerms) -> SessionHandle: ...

    def check_candidate(self, terms: GrantTerms) -> None:
        """Whether this engine can run the candidate's selector and placement at all, and makes ready for the
        latter; raises CoreError."""

    def lacks(self, terms: GrantTerms, gives: EngineGives) -> CoreError | None:
        """Why the candidate cannot answer a session whose engine gives just this: UNSUPPORTED with the fact
        `missing`. Waits for no step."""

    def bind_weights(self, session_id: str, generation: int, layer: int, weights: GivenWeights) -> None:
        """What the session's engine gives of a layer; waits for no step. SESSION_UNKNOWN."""

    def close_session(self, session_id: str, generation: int) -> int:
        """Rows released."""

    def edit_session(self, request: EditRequest) -> EditAnswer:
        """Raises CoreError, and then the session is unchanged."""

    def fork_session(self, request: ForkRequest) -> SessionHandle:
        """Raises CoreError, and then nothing was opened."""

    def step(self, frame: FrameInput, mode: FrameMode) -> FrameResult:
        """Raises CoreError, and then the session is unchanged."""

    def step_many(self, frames: Sequence[tuple[FrameInput, FrameMode]]) -> Sequence[FrameResult | CoreError]:
        """Frames of different sessions that no candidate answers: each one's result or refusal, in their
        order, with the bits of `step`."""

    def adopt(self, manifest: RuntimeManifest) -> None:
        """Runs another baseline, which differs in placement or contract only; sessions go on. UNSUPPORTED,
        MANIFEST_INVALID."""

    def live_manifest(self) -> RuntimeManifest:
        """Rebuilt from the live objects, not from stored bytes."""

    def tiers(self) -> Sequence[TierReport]: ...

    def plan(self) -> NodePlan | None:
        """What arithmetic says of this cache here; waits for no step. None: nothing can be said."""

    def indexes(self) -> Sequence[IndexState]:
        """Of each selector's indexes; waits for no step."""

    def indexes_caught_up(self, session_id: str, generation: int, seconds: float) -> bool:
        """Waits, at most for `seconds`, until a session's indexes are those of its rows; whether they are.
        Holds up no step."""

    def selector_digest(self, terms: GrantTerms) -> str:
        """What names the candidate's selector among `indexes`; empty without one. Waits for no step."""

    def blocks(self, session_id: str, generation: int) -> Sequence[BlockFacts]: ...

    def read_block(
        self, session_id: str, generation: int, layer: int, chunk: int, block_generation: int
    ) -> tuple[BlockFacts, bytes]:
        """Verified bytes of a published chunk."""

    def close(self) -> None: ...


class EngineRunner:
    """Runs one engine's calls in one thread, with at most `max_queued` waiting or running."""

    def __init__(self, engine: EnginePort, name: str, max_queued: int) -> None:
        self.engine = engine
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{name}")
        self._max_queued = max_queued
        self._pending = 0
        self._closing = False
        self._here = 0
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._end = BlockingEnd(self._shut_down, f"close-engine-{name}")

    @property
    def pending(self) -> int:
        return self._pending

    async def call(
        self, function: Callable[[], T], *, bounded: bool = True, over: Callable[[], None] = lambda: None
    ) -> T:
        """Awaits the function's result; raises QUEUE_FULL when `bounded` and the queue is full, CACHE_UNKNOWN
        when the engine closes first.

        If the caller is cancelled while the function runs, the function still finishes. `over` is called when
        it has, from any thread, or when it will not run at all.
        """
        with self._lock:
            if bounded and self._pending >= self._max_queued:
                over()
                raise CoreError(
                    Reason.QUEUE_FULL,
                    f"{self._pending} calls wait for this cache's engine; the bound is {self._max_queued}",
                    {"bound": str(self._max_queued)},
                )
            self._pending += 1
        try:
            future = self._pool.submit(function)
        except RuntimeError as error:
            self._done(None)
            over()
            raise CoreError(Reason.CACHE_UNKNOWN, "the cache was removed", {}) from error
        future.add_done_callback(self._done)
        # Before that of the caller, who finds it over when it has its result.
        future.add_done_callback(lambda _: over())
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                # Not the caller was cancelled: the engine was closed before its turn came.
                raise CoreError(Reason.CACHE_UNKNOWN, "the cache was removed", {}) from None
            raise

    def here(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result, computed in the caller's own thread; the engine orders what comes from
        several. Refuses as `call`, and a close waits for it."""
        with self._lock:
            if self._closing:
                raise CoreError(Reason.CACHE_UNKNOWN, "the cache was removed", {})
            if self._pending >= self._max_queued:
                raise CoreError(
                    Reason.QUEUE_FULL,
                    f"{self._pending} calls wait for this cache's engine; the bound is {self._max_queued}",
                    {"bound": str(self._max_queued)},
                )
            self._pending += 1
            self._here += 1
        try:
            return function(*args, **kwargs)
        finally:
            with self._lock:
                self._pending -= 1
                self._here -= 1
                if self._closing:
                    self._left.notify_all()

    def _done(self, _future: Future[T] | None) -> None:
        with self._lock:
            self._pending -= 1

    async def close(self, seconds: float) -> bool:
        """Waits at most so long for the running call, then closes the engine. Whether that is done; if not,
        it happens when the call ends, and `close` may be called again to wait for it."""
        return await self._end.within(seconds)

    def _shut_down(self) -> None:
        with self._lock:
            self._closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._left:
            self._left.wait_for(lambda: self._here == 0)
        self.engine.close()
