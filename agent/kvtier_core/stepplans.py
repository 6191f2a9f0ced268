"""Exact attention of a frame by the plan that was chosen for it, and by the next one when that fails.

Why it exists: a plan is a prediction and a tier may fail in the middle of it. What is left then is, in this
order: another exact plan that still ends in time, and the fallback that the request's contract names. Both
give either the same bits or no answer. It must not know how plans are priced or run, nor candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier_core.admission import Fallback
from kvtier_core.appends import NO_LINE, Append, Session
from kvtier_core.arrivals import BufferPool
from kvtier_core.attend import Attended, Attention
from kvtier_core.computeprobe import measure_compute
from kvtier_core.errors import CoreError, Reason
from kvtier_core.folding import Query
from kvtier_core.hotunits import HotUnits
from kvtier_core.layout import ChunkLayout
from kvtier_core.placements.preference import PlacementPreference, PlanKind
from kvtier_core.planner import STREAMED, Plan, PlanTerms, StepPlanner
from kvtier_core.planning.choice import Decision, fallback_of
from kvtier_core.planning.facts import Credits, Rates, Terms
from kvtier_core.promises import IdentifiedRows, Promise, Promises
from kvtier_core.sharedstreams import alike
from kvtier_core.streamed import StreamedDecode
from kvtier_core.streamedframe import Asked, Streamed, StreamedLayer
from kvtier_core.tiers.staging import block_bytes
from kvtier_crds.manifest import Contract, Exactness
from kvtier_crds.manifest import Fallback as Allowed

WINDOW = 8
"""Buffers of one frame's stream: some are attended while others are read and verified."""
BUFFER_BYTES = 16 << 20
"""What an engine holds at most for blocks on their way, and as much again for slices of heads."""

AGAIN = frozenset(
    {
        Reason.CHECKSUM_MISMATCH,
        Reason.SHORT_COPY,
        Reason.IDENTITY_MISMATCH,
        Reason.STORAGE_UNAVAILABLE,
        Reason.TRANSFER_FAILED,
        Reason.TRANSFER_TIMEOUT,
        Reason.QUEUE_FULL,
        Reason.NO_STAGING,
        Reason.PARTIAL_RECEIPT_INCOMPLETE,
        Reason.PARTIAL_RECEIPT_STALE,
        Reason.STATE_SCHEMA_MISMATCH,
        Reason.STATE_INVALID,
        Reason.STATE_SHAPE,
        Reason.EMPTY_SUPPORT,
        Reason.NO_NORMALISATION_MASS,
        Reason.QUERY_IDENTITY_MISMATCH,
        Reason.DUPLICATE_RECEIPT,
        Reason.SUPPORT_OVERLAP,
        Reason.SUPPORT_GAP,
        Reason.SUPPORT_OUT_OF_RANGE,
        Reason.RECEIPT_COUNT,
        Reason.TRAFFIC_MISMATCH,
        Reason.LATE_RECEIPT,
        Reason.NOT_VISIBLE,
    }
)
"""What another plan, which reads anew, may not meet."""

_ACTIONS = {
    Allowed.WIDEN: Fallback.WIDEN_SEARCH,
    Allowed.RECOMPUTE: Fallback.RECOMPUTE_EXACT,
    Allowed.POSTPONE: Fallback.POSTPONE_FOR_EXACT_RETRY,
    Allowed.DEGRADE: Fallback.ACCEPT_DECLARED_DEGRADED,
}


def contract_terms(contract: Contract, terms: PlanTerms) -> PlanTerms:
    """`terms` with what a cache's contract allows."""
    return dataclasses.replace(
        terms,
        fallbacks=frozenset(_ACTIONS[one] for one in contract.allowed_fallbacks),
        approximation_allowed=contract.exactness is Exactness.APPROXIMATE,
    )


def buffer_limit(block_bytes: int) -> int:
    """Blocks that BUFFER_BYTES hold; never fewer than two windows."""
    return max(2 * WINDOW, BUFFER_BYTES // block_bytes)


@dataclass(frozen=True, slots=True)
class Planned:
    """failed: plans that were run for the frame before, each with the reason of its end."""

    attended: Attended
    plan: Plan
    failed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan that was run for a frame, and how it ended; another one may still answer the frame."""

    kind: PlanKind
    error: CoreError


def held_bytes(layout: ChunkLayout) -> int:
    """What an engine reserves for blocks on their way and for slices of heads."""
    return 2 * buffer_limit(block_bytes(layout)) * block_bytes(layout)


def measured_rates(layout: ChunkLayout, query_heads: int, clock: Callable[[], float] | None) -> Rates:
    """What this node's processor does, in about 20 ms; unknown without a clock."""
    if clock is None:
        return Rates(None)
    figures = measure_compute(layout, query_heads, clock)
    return Rates(figures.row_seconds, figures.flops)


def plan_named(name: str | None) -> PlanKind | None:
    """BAD_ARGUMENT for what is no plan's name."""
    if name is None:
        return None
    try:
        return PlanKind(name)
    except ValueError as error:
        legal = ", ".join(kind.value for kind in PlanKind)
        raise CoreError(Reason.BAD_ARGUMENT, f"plan {name!r} is none of {legal}") from error


def _no_rows(kv_heads: int, head_dim: int) -> Tensor:
    return torch.empty(0, kv_heads, head_dim)


class StepPlans:
    """Plans, attention and promises of one engine. Its lock is held."""

    def __init__(
        self,
        store: IdentifiedRows,
        clock: Callable[[], float],
        executor: Executor | None,
        *,
        query_heads: int,
        rates: Rates,
        terms: PlanTerms,
        hot: HotUnits | None = None,
    ) -> None:
        """hot: what selections read from storage lately; None: nothing is kept."""
        self._store = store
        self._clock = clock
        self._hot = hot
        pool = BufferPool(store.layout, buffer_limit(block_bytes(store.layout)))
        self.buffers = pool
        self.staging_bytes = pool.limit * pool.block_bytes
        self.attention = Attention(store, clock, executor, pool, WINDOW, hot)
        self.streamed = StreamedDecode(store, clock, executor, pool, WINDOW, query_heads)
        self.planner = StepPlanner(
            store,
            query_heads=query_heads,
            credits=Credits(self.staging_bytes, WINDOW),
            rates=rates,
            terms=terms,
        )
        self._lanes: dict[str, StepPlanner] = {}
        self._lane_of: dict[str, str] = {}
        self._promises = Promises(store, pool, clock, executor, reserve=WINDOW)

    def adopt(self, contract: Contract) -> None:
        """Another contract from the next decision on."""
        self.planner.terms = contract_terms(contract, self.planner.terms)

    def open_lane(
        self, lane: str, preference: PlacementPreference, allowed: Collection[Allowed] | None = None
    ) -> None:
        """A planner of its own for sessions of an exact candidate that is placed otherwise, or whose contract
        allows other fallbacks."""
        planner = self.planner.beside()
        if allowed is not None:
            own = frozenset(_ACTIONS[one] for one in allowed)
            planner.terms = dataclasses.replace(planner.terms, fallbacks=own, approximation_allowed=False)
        planner.prefer(preference)
        self._lanes[lane] = planner

    def close_lane(self, lane: str) -> None:
        """Its sessions are planned as the baseline's from now on."""
        self._lanes.pop(lane, None)

    def join(self, session_id: str, lane: str) -> None:
        self._lane_of[session_id] = lane

    def leave(self, session_id: str) -> bool:
        """Whether the session was in a lane."""
        if self._lane_of.pop(session_id, None) is None:
            return False
        self._promises.forget(session_id)
        return True

    def lane_of(self, session_id: str) -> str:
        """Empty: the baseline's."""
        lane = self._lane_of.get(session_id, "")
        return lane if lane in self._lanes else ""

    def _planner_of(self, session_id: str) -> StepPlanner:
        return self._lanes.get(self._lane_of.get(session_id, ""), self.planner)

    def exact(
        self,
        append: Append,
        query: Query,
        visible: int,
        *,
        step: int,
        forced: PlanKind | None = None,
        next_layer_follows: bool = False,
        lane: str = "",
        tried: Tried | None = None,
    ) -> Planned:
        """Every row [0, visible), by the plans of `lane` (empty: the baseline's). The first plan's own
        refusal when no other is left, with the contract's fallback (`fallback`) and the plans that were tried
        (`attempted`) among its facts. tried: by whoever asked first."""
        session_id, planner = append.session.session_id, self._lanes.get(lane, self.planner)
        with self._promises.taken(session_id, step, append.layer) as promise:
            return self._by_plans(
                append, query, visible, step, forced, next_layer_follows, planner, tried, promise
            )

    def _by_plans(
        self,
        append: Append,
        query: Query,
        visible: int,
        step: int,
        forced: PlanKind | None,
        next_layer_follows: bool,
        planner: StepPlanner,
        tried: Tried | None,
        promise: Promise | None,
    ) -> Planned:
        session = append.session
        failed: dict[PlanKind, Reason] = {}
        first: CoreError | None = None
        if tried is not None:
            first, failed[tried.kind] = tried.error, tried.error.reason
            self._check_time_left(tried.error, query, failed, planner)
        while True:
            try:
                plan = planner.plan(
                    append,
                    visible,
                    queries=int(query.q.shape[0]),
                    slack=self._predicted(query),
                    forced=forced,
                    failed=frozenset(failed),
                )
            except CoreError as error:
                raise self._ended(first or error, query, failed, planner) from error
            busy = any(read.path in STREAMED for read in plan.reads)
            if next_layer_follows and not busy:
                self.promise(session, step, append.layer + 1)
            try:
                attended = self.attention.exact(plan, append, query, promise)
            except CoreError as error:
                first = first or error
                if error.reason not in AGAIN:
                    raise self._ended(first, query, failed | {plan.kind: error.reason}, planner) from error
                failed[plan.kind] = error.reason
                self._check_time_left(error, query, failed, planner)
                continue
            finally:
                if promise is not None:
                    # Another plan reads anew, and may want its buffers.
                    promise.leave()
                    promise = None
            if next_layer_follows and busy:
                self.promise(session, step, append.layer + 1)
            names = tuple((kind.value, reason.value) for kind, reason in failed.items())
            return Planned(attended, plan, names)

    def streamed_exact(self, asked: Asked) -> Streamed | Tried:
        """As `exact`, by what is kept of the layer's plan. Tried: `exact` may still answer by another plan;
        what none may is raised, with the same facts."""
        with self._taken(asked) as promise:
            try:
                return self.streamed.attend(asked, promise)
            except CoreError as error:
                found = self._tried(asked, error)
                if isinstance(found, Tried):
                    return found
                raise found from error

    def streamed_together(self, asked: Sequence[Asked]) -> list[Streamed | Tried | CoreError]:
        """As `streamed_exact`, of frames of different sessions, with what it would raise for one in its
        place; blocks that several of them want are read once."""
        answers: dict[int, Streamed | Tried | CoreError] = {}
        for group in alike(asked):
            if len(group) > 1:
                some = [asked[number] for number in group]
                with ExitStack() as stack:
                    promises = [stack.enter_context(self._taken(one)) for one in some]
                    found = self.streamed.attend_together(some, promises)
                for number, one in zip(group, found, strict=True):
                    if isinstance(one, CoreError):
                        answers[number] = self._tried(asked[number], one)
                    elif one is not None:
                        answers[number] = one
            for number in group:
                if number not in answers:
                    try:
                        answers[number] = self.streamed_exact(asked[number])
                    except CoreError as error:
                        answers[number] = error
        return [answers[number] for number in range(len(asked))]

    def _taken(self, asked: Asked) -> AbstractContextManager[Promise | None]:
        append = asked.append
        return self._promises.taken(append.session.session_id, asked.step, append.layer)

    def _tried(self, asked: Asked, error: CoreError) -> Tried | CoreError:
        """What a frame that ended so may still hope for, or is refused with."""
        kind = asked.kept.kind
        if error.reason in AGAIN:
            return Tried(kind, error)
        return self.late(error, kind, asked.query.deadline, asked.append.session.session_id)

    def _check_time_left(
        self, error: CoreError, query: Query, failed: dict[PlanKind, Reason], planner: StepPlanner
    ) -> None:
        slack = self._slack(query)
        if slack is not None and slack <= 0.0:
            late = CoreError(Reason.DEADLINE, f"no time is left after {error.reason.value}")
            raise self._ended(late, query, failed, planner) from error

    def of_decode(self, append: Append, visible: int) -> Plan:
        """What one query over rows [0, visible) runs by without a deadline. NO_LEGAL_PATH, NOT_VISIBLE."""
        return self._planner_of(append.session.session_id).plan(append, visible, queries=1)

    def promise(self, session: Session, step: int, layer: int) -> int:
        """Starts what a frame of `layer` will stream, as its rows lie now; returns the number of blocks.
        Nothing is refused here: a promise that cannot be kept is none."""
        if layer >= len(session.layers):
            return 0
        state = session.layers[layer]
        if not state.lines or NO_LINE in state.lines:
            return 0
        none = self._store.layout
        empty = _no_rows(none.kv_heads, none.head_dim)
        append = Append(session, layer, state.frontier, empty, empty)
        try:
            plan = self._planner_of(session.session_id).plan(append, state.frontier, queries=1)
        except CoreError:
            return 0
        return self._promises.begin(session.session_id, step, layer, plan.reads)

    def promise_kept(
        self, session_id: str, step: int, layer: int, kept: StreamedLayer, early: bool = False
    ) -> int:
        """As `promise`, of a layer whose rows lie where they lay when that was kept. early: as
        `Promises.begin_blocks`."""
        return self._promises.begin_blocks(session_id, step, layer, kept.blocks, early)

    def promise_further(self, session_id: str, step: int, layer: int, kept: StreamedLayer) -> bool:
        """As `promise_kept`, of a layer behind those that are on their way; see `Promises.further`."""
        return self._promises.further(session_id, step, layer, kept.blocks)

    def forget(self, session_id: str) -> None:
        """Lets go of what was promised to a session that ends or changes."""
        self._promises.forget(session_id)

    def close(self) -> None:
        self._promises.close()
        if self._hot is not None:
            self._hot.close()

    def inspect(self, session: Session, layer: int) -> Decision:
        """How the layer's rows would be attended by one query now: every plan with its price, or why it
        lost."""
        state = session.layers[layer]
        empty = _no_rows(self._store.layout.kv_heads, self._store.layout.head_dim)
        append = Append(session, layer, state.frontier, empty, empty)
        return self.planner.inspect(append, state.frontier)

    def _predicted(self, query: Query) -> float | None:
        """Seconds that a plan may take; None when there is no deadline or nothing to hold against it."""
        return self._slack(query) if self.planner.prices else None

    def _slack(self, query: Query) -> float | None:
        return None if query.deadline is None else query.deadline - self._clock()

    def late(self, error: CoreError, kind: PlanKind, deadline: float | None, session_id: str) -> CoreError:
        """A refusal of a session's frame that was attended by a plan of this kind elsewhere, with the same
        facts as `exact`'s."""
        terms = self._planner_of(session_id).terms
        return self._with_fallback(error, deadline, {kind: error.reason}, terms)

    def _ended(
        self, error: CoreError, query: Query, failed: dict[PlanKind, Reason], planner: StepPlanner
    ) -> CoreError:
        return self._with_fallback(error, query.deadline, failed, planner.terms)

    def _with_fallback(
        self, error: CoreError, deadline: float | None, failed: dict[PlanKind, Reason], terms: PlanTerms
    ) -> CoreError:
        """The refusal, with what the contract does now (B.8). Slack is taken anew."""
        slack = None if deadline is None else deadline - self._clock()
        action = fallback_of(
            Terms(
                slack=slack,
                approximation_allowed=terms.approximation_allowed,
                fallbacks=terms.fallbacks,
                recompute=terms.recompute,
                retry=terms.retry,
            )
        )
        if not failed:
            return error
        facts: dict[str, object] = {
            **error.facts,
            "fallback": action.value,
            "attempted": ",".join(f"{kind.value}:{reason.value}" for kind, reason in failed.items()),
        }
        return CoreError(error.reason, error.message, facts)
