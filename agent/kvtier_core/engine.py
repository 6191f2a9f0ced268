"""One cache on one node: sessions, their rows in tiers, and attention over them.

Why it exists: the face of the core. Synchronous, thread-safe, without clock, socket or cluster: time, files,
names and the reader's thread come from outside. A refused frame leaves its session as it was.

One lock is held for a whole frame; a second one, of metadata, only while directory, ledger and slots change.
Shared blocks know the second one alone, so they wait for no frame. Order: the frame's, then metadata's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import torch

from kvtier_core.admission import brought
from kvtier_core.appends import session_of
from kvtier_core.assembly import LiveConfiguration, Node, build_tiers, check_manifest, close_tiers
from kvtier_core.carrying import Carriage
from kvtier_core.composition import compose
from kvtier_core.edits.checks import placed
from kvtier_core.edits.requests import EditAnswer, EditRequest, ForkRequest
from kvtier_core.edits.runner import Edits
from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import SourceBinding, source_binding
from kvtier_core.lanes import in_candidates_name
from kvtier_core.layout import ChunkLayout
from kvtier_core.measure import measure
from kvtier_core.placements.preference import PlacementPreference
from kvtier_core.planner import PlanTerms
from kvtier_core.planning.choice import Decision
from kvtier_core.planning.facts import Rates
from kvtier_core.prefixes import Prefixes
from kvtier_core.ragged import answer_many, ended_in_turn
from kvtier_core.receipts import (
    ChunkInfo,
    EngineStats,
    PublishArm,
    SessionHandle,
    SessionSpec,
    StepAnswer,
    StepMode,
    StepRequest,
)
from kvtier_core.resident import ResidentFrame
from kvtier_core.selectors.base import LayerIndex
from kvtier_core.selectors.desk import SelectorDesk
from kvtier_core.selectors.lifecycle.works import IndexWorks
from kvtier_core.sessions import LayerState, Session
from kvtier_core.sharing import SharedBlocks
from kvtier_core.stepcontext import StepContext
from kvtier_core.steporder import check_order, check_shapes
from kvtier_core.stepplans import WINDOW, Tried, measured_rates
from kvtier_core.streaming import READ_TIMEOUT_SECONDS
from kvtier_core.tiers.base import TierMount
from kvtier_core.tiers.fileops import FileOps, OsFileOps
from kvtier_core.tiers.nvme.crypto import KeyProvider
from kvtier_crds.beside import changed_fields, needs_rebuilding
from kvtier_crds.manifest import Fallback, RuntimeManifest

STAGING_BUFFERS = WINDOW
MAX_SESSIONS = 1 << 27
PROMISE_WAIT_SECONDS = 0.05


class CacheEngine:
    """Built from an exact manifest and this node's devices. Raises CoreError and holds nothing then."""

    def __init__(
        self,
        manifest: RuntimeManifest,
        mounts: Mapping[str, TierMount],
        clock: Callable[[], float],
        *,
        files: FileOps | None = None,
        reader: Executor | None = None,
        session_name: Callable[[int], str] | None = None,
        probe: bool = True,
        blocks: bool = False,
        keys: KeyProvider | None = None,
        rates: Rates | None = None,
        plan_terms: PlanTerms | None = None,
        indexes: IndexWorks | None = None,
    ) -> None:
        """mounts: by tier class name; their capability says what outlives the process. clock: monotonic
        seconds. reader: runs staged reads ahead of attention; None reads inline. session_name: from the
        session's number; must not repeat in the process. probe: measure each tier now. blocks: run the
        thread that moves shared blocks on; without it somebody pumps. keys: encrypt storage under them.
        rates: what plans are priced with, None: as measured. plan_terms: declared costs and placement
        preference of plans. indexes: where selectors' indexes are built; None: in the steps' own time."""
        check_manifest(manifest)
        geometry = manifest.model.geometry
        self._lock = threading.RLock()
        self._manifest = manifest
        self._clock = clock
        self._name = session_name or (lambda number: f"{manifest.tenancy.cache_uid}-{number}")
        self.layout = ChunkLayout(geometry.kv_heads, manifest.chunk_tokens, geometry.head_dim)
        node = Node(files or OsFileOps(), clock, keys)
        live = build_tiers(manifest, mounts, self.layout, node)
        self._live = LiveConfiguration(
            tenancy=manifest.tenancy,
            model=manifest.model,
            page_tokens=manifest.page_tokens,
            layout=self.layout,
            tiers=live,
            placement=manifest.placement,
            contract=manifest.contract,
            admission=manifest.admission,
        )
        works, cache = indexes or IndexWorks(clock), manifest.tenancy.cache_uid
        self.selectors = SelectorDesk(geometry, manifest.page_tokens, works, cache)
        self._sessions: dict[str, Session] = {}
        self._contexts: dict[str, StepContext] = {}
        self._opened = 0
        self._stopped = False
        try:
            if probe:
                for item in live:
                    measure(item.tier, clock)
            self._parts = parts = compose(
                manifest,
                self.layout,
                live,
                node,
                reader=reader,
                rates=rates or measured_rates(self.layout, geometry.query_heads, clock if probe else None),
                plan_terms=plan_terms or PlanTerms(),
                works=works,
                moved=self._forget_views,
            )
            if blocks and parts.shared is not None:
                parts.shared.start()
        except BaseException:
            close_tiers(live)
            raise
        self._store, self._plans, self._lanes = parts.store, parts.plans, parts.lanes
        self._runner, self._resident = parts.runner, parts.resident
        mine = self._store, self._lock, self._sessions, self._contexts
        self.prefixes = Prefixes(*mine)
        self.carriage = Carriage(*mine, self._runner, self.open_session, self.close_session)
        producers = self._runner.producer, self._runner.digest_of
        self._edits = Edits(self._store, manifest.model, clock, self._number, *producers)
        try:
            self._bound(manifest)
        except BaseException:
            self.stop()
            raise

    def _bound(self, manifest: RuntimeManifest) -> None:
        """Bounds of transfers that the manifest brings. What `BlockStore.admit` refuses; TIER_INCAPABLE where
        there is nothing that they would bound."""
        if manifest.admission is not None:
            self.blocks.store.admit(brought(manifest.admission))

    # Sessions.

    def prefer(self, preference: PlacementPreference) -> None:
        """What a placement policy asks: of each step from now on, and of rows of sessions opened later."""
        with self._lock:
            self._plans.planner.prefer(preference)
            for session_id, context in self._contexts.items():
                context.forget_views()
                self._plans.forget(session_id)
            self._store.placement.prefer(preference)

    def adopt(self, manifest: RuntimeManifest, preference: PlacementPreference) -> None:
        """Runs another exact manifest over the same tiers: its placement and contract, and its name, from the
        next frame on; sessions go on. Bounds of transfers are those that it brings, or none. UNSUPPORTED when
        anything else differs, MANIFEST_INVALID; what `BlockStore.admit` refuses."""
        check_manifest(manifest)
        running = self.live_manifest()
        if needs_rebuilding(running, manifest):
            fields = ", ".join(changed_fields(running, manifest))
            raise CoreError(Reason.UNSUPPORTED, f"{fields} cannot all change in an engine that runs")
        with self._lock:
            if manifest.admission != running.admission:
                self.blocks.store.admit(brought(manifest.admission))
            self._manifest = manifest
            self._live = replace(
                self._live,
                placement=manifest.placement,
                contract=manifest.contract,
                admission=manifest.admission,
            )
            self._plans.adopt(manifest.contract)
            self._runner.baseline_digest = manifest.digest()
            self._resident.rename(self._runner.baseline_digest)
            self.prefer(preference)

    def prepare_lane(
        self, lane: str, preference: PlacementPreference, allowed: Collection[Fallback] | None = None
    ) -> None:
        """Lets sessions be opened, and steps be answered, by a placement of their own beside the running
        one. allowed: fallbacks of a contract of their own, None: the running one's."""
        with self._lock:
            self._lanes.prepare(lane, preference, allowed)

    def open_session(self, spec: SessionSpec) -> SessionHandle:
        """Reserves one open chunk per layer. NO_DESTINATION_CAPACITY with numbers, BAD_ARGUMENT."""
        with self._lock:
            self._check_running()
            layers = self._manifest.model.geometry.layers
            if not 0.0 < spec.score_scale < float("inf") or spec.max_tokens < 0:
                raise CoreError(Reason.BAD_ARGUMENT, "score_scale must be positive, max_tokens not negative")
            slots = self._store.placement.check_fits(spec.max_tokens, layers, self.layout)
            number = self._next_number()
            session_id = spec.session_id or self._name(number)
            if session_id in self._sessions:
                raise CoreError(Reason.BAD_ARGUMENT, f"session {session_id} exists already")
            family = None if spec.selector is None else self.selectors.family(spec.selector, spec.given)
            homes, grant = self._lanes.reserve(number, session_id, spec.lane, layers, slots)
            self._opened = number
            source = self._source(spec.tenant, session_id, number)
            session = Session(
                number=number,
                session_id=session_id,
                generation=number,
                spec=spec,
                source=source,
                layers=[LayerState(open_tier=home) for home in homes],
                open_grant=grant,
                producers=[(0, self._runner.producer(self._runner.baseline_digest))],
            )
            bound = source.digest()
            unbuilt: Sequence[LayerIndex | None] = [None] * layers
            indexes = unbuilt if family is None else family.indexes(bound, layers, spec.score_scale)
            self._sessions[session_id] = session
            self._contexts[session_id] = StepContext.opened(session, bound, family, list(indexes))
            return SessionHandle(session_id, number)

    def _next_number(self) -> int:
        """One that no session had: it names lines, histories and completions that come late.
        NO_DESTINATION_CAPACITY once all are spent."""
        if self._opened + 1 >= MAX_SESSIONS:
            raise CoreError(Reason.NO_DESTINATION_CAPACITY, f"{MAX_SESSIONS} numbers of sessions are spent")
        return self._opened + 1

    def _number(self) -> int:
        """The same, spent."""
        self._opened = self._next_number()
        return self._opened

    def _source(self, tenant: str, session_id: str, number: int) -> SourceBinding:
        return source_binding(
            self._manifest,
            tenant=tenant,
            session_id=session_id,
            request_generation=number,
            cache_generation=self._store.transactions.cache_generation,
        )

    def demote_session(self, session_id: str, generation: int, most: int) -> int:
        """Moves up to `most` sealed chunks that are the session's alone to slower tiers which have room for
        them; returns how many. SESSION_UNKNOWN, GENERATION_STALE."""
        with self._lock:
            session, store = session_of(self._sessions, session_id, generation), self._store
            self._plans.forget(session_id)
            mine = [line for state in session.layers for line in state.lines if line >= 0]
            alone = [line for line in mine if len(store.owners(line)) == 1]
            return store.placement.send_down(alone, most)

    def close_session(self, session_id: str, generation: int) -> int:
        """Frees what the session holds; returns its rows. SESSION_UNKNOWN, GENERATION_STALE."""
        with self._lock:
            session = session_of(self._sessions, session_id, generation)
            del self._sessions[session_id]
            self._contexts.pop(session_id).close()
            self._plans.forget(session_id)
            self._lanes.leave(session.number, session_id)
            return self._store.drop(session)

    # Edits.

    def edit_session(self, request: EditRequest) -> EditAnswer:
        """Changes a session's history, all or nothing; a frame sees before or after. See `Edits.apply`.
        SESSION_UNKNOWN, GENERATION_STALE."""
        with self._lock, torch.inference_mode():
            self._check_running()
            session = session_of(self._sessions, request.session_id, request.generation)
            self._plans.forget(session.session_id)
            return self._edits.apply(self._contexts[session.session_id], request)

    def fork_session(self, request: ForkRequest) -> SessionHandle:
        """Another session of the same rows: sealed chunks are shared, the open one is copied. See
        `Edits.fork`. SESSION_UNKNOWN, GENERATION_STALE, BAD_ARGUMENT when the child's id is taken."""
        with self._lock, torch.inference_mode():
            self._check_running()
            parent = session_of(self._sessions, request.session_id, request.generation)
            number = self._number()
            session_id = request.child_id or self._name(number)
            if session_id in self._sessions:
                raise CoreError(Reason.BAD_ARGUMENT, f"session {session_id} exists already")
            context = self._contexts[parent.session_id]
            source = self._source(parent.spec.tenant, session_id, number)
            child, indexes = self._edits.fork(context, request, session_id, source, number)
            self._sessions[session_id] = child
            self._contexts[session_id] = context.forked(child, source.digest(), indexes)
            return SessionHandle(session_id, number)

    def _check_running(self) -> None:
        if self._stopped:
            raise CoreError(Reason.DRAINING, "the engine has stopped")

    def indexes_caught_up(self, session_id: str, generation: int, seconds: float) -> bool:
        """Waits, at most for `seconds`, until the indexes of a session are those of its rows, as a decode
        step would find them; whether they are. Holds up no step."""
        context = self._contexts.get(session_id)
        if context is None or context.session.generation != generation:
            return False
        return all(one.caught_up(seconds) for one in context.indexes if one is not None)

    # Steps.

    def step(self, request: StepRequest, mode: StepMode | None = None) -> StepAnswer:
        """Answers one frame. Refusals leave the session unchanged; a byte-identical repeat is answered again.

        SESSION_UNKNOWN, GENERATION_STALE, FRAME_INVALID, STEP_ORDER, FRONTIER_MISMATCH,
        NO_DESTINATION_CAPACITY, STORAGE_UNAVAILABLE, CHECKSUM_MISMATCH, DEADLINE, NO_LEGAL_PATH.
        """
        mode = mode or StepMode()
        # Small tensors: what autograd would track of them costs as much as a tenth of a decode frame.
        with self._lock, torch.inference_mode():
            frame = self._prepared(request, mode)
            if frame is None:
                return self._general(request, mode)
            if frame.layer.streamed is not None:
                return self._streamed(frame, mode)
            return in_candidates_name(self._resident.answer(frame), mode)

    def _forget_views(self, session: Session, line: int) -> None:
        """Views of the place that a chunk has left would keep its memory."""
        context = self._contexts.get(session.session_id)
        if context is not None:
            context.forget_line(line)

    def _prepared(self, request: StepRequest, mode: StepMode) -> ResidentFrame | None:
        """The frame on the short way; None when it is not for that."""
        self._check_running()
        session = session_of(self._sessions, request.session_id, request.generation)
        context = self._contexts[session.session_id]
        if not self._lanes.short(session.session_id, mode):
            if mode.publish is not PublishArm.EXACT or mode.compare or mode.plan is not None:
                return None
            if self._lanes.leave(session.number, session.session_id):
                context.forget_views()
        frame = self._resident.prepare(context, request)
        if frame is not None and frame.layer.streamed is None:
            self._runner.promise_next(context, request)
        return frame

    def _streamed(self, frame: ResidentFrame, mode: StepMode) -> StepAnswer:
        """A frame on the short way with chunks on storage; another plan's when that fails."""
        answer = self._resident.stream(frame, self._following(frame))
        return self._ended(frame, mode, answer)

    def _streamed_all(self, frames: Sequence[tuple[ResidentFrame, StepMode]]) -> list[StepAnswer | CoreError]:
        """As `_streamed`, of frames of different sessions."""
        found = self._resident.stream_all([(frame, self._following(frame)) for frame, _ in frames])
        return ended_in_turn(found, lambda number, one: self._ended(*frames[number], one))

    def _following(self, frame: ResidentFrame) -> Callable[[], None]:
        """Begins what comes next, behind the reads that the frame waits for."""
        request, context = frame.request, self._contexts[frame.request.session_id]
        return lambda: self._runner.promise_next(context, request, True)

    def _ended(self, frame: ResidentFrame, mode: StepMode, answer: StepAnswer | Tried) -> StepAnswer:
        request = frame.request
        if isinstance(answer, Tried):
            return self._general(request, mode, answer)
        self._runner.promise_next(self._contexts[request.session_id], request)
        return in_candidates_name(answer, mode)

    def owes_promise(self, session_id: str) -> bool:
        """Whether `keep_promise` has something to begin."""
        context = self._contexts.get(session_id)
        return context is not None and context.due is not None

    def keep_promise(self, session_id: str, generation: int) -> None:
        """Begins what the last frame of a session promised for later; nothing where that is over, or frames
        of others hold the engine for long: a promise that is not kept changes no answer."""
        if not self._lock.acquire(timeout=PROMISE_WAIT_SECONDS):
            return
        try:
            context = self._contexts.get(session_id)
            if context is not None and context.session.generation == generation and not self._stopped:
                with torch.inference_mode():
                    self._runner.keep_promise(context)
        finally:
            self._lock.release()

    def _prepared_exactly(self, request: StepRequest, mode: StepMode) -> ResidentFrame | None:
        """As `_prepared`, of a frame that the baseline answers."""
        return self._prepared(request, mode) if mode.publish is PublishArm.EXACT else None

    def _general(self, request: StepRequest, mode: StepMode, tried: Tried | None = None) -> StepAnswer:
        geometry = self._manifest.model.geometry
        session = session_of(self._sessions, request.session_id, request.generation)
        check_shapes(
            request,
            query_heads=geometry.query_heads,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
        )
        request = placed(session, request)
        repeat = check_order(session, request)
        family = None if mode.selector is None else self.selectors.family(mode.selector)
        return self._runner.run(self._contexts[session.session_id], request, mode, family, repeat, tried)

    def step_many(
        self, requests: Sequence[StepRequest], modes: Sequence[StepMode | None] | None = None
    ) -> list[StepAnswer | CoreError]:
        """Answers frames of any sessions, in order: each as `step` would after those before it, with the same
        bits. What `step` would raise stands in the frame's place, and harms no other frame.

        modes: one for each frame; None: all exact. BAD_ARGUMENT when they are not as many, for all."""
        wanted = [None] * len(requests) if modes is None else list(modes)
        if len(wanted) != len(requests):
            raise CoreError(Reason.BAD_ARGUMENT, f"{len(wanted)} modes for {len(requests)} frames")
        frames = [(request, mode or StepMode()) for request, mode in zip(requests, wanted, strict=True)]
        with self._lock, torch.inference_mode():
            given = self._prepared_exactly, self._streamed_all, self._general
            return answer_many(frames, self._resident, *given)

    def inspect_plan(self, session_id: str, generation: int, layer: int) -> Decision:
        """How a decode step of the layer would be attended as its rows lie now: every plan with its price, or
        why it lost. SESSION_UNKNOWN, GENERATION_STALE, NOT_VISIBLE."""
        with self._lock:
            session = session_of(self._sessions, session_id, generation)
            if not 0 <= layer < len(session.layers) or not session.layers[layer].frontier:
                raise CoreError(Reason.NOT_VISIBLE, f"layer {layer} has no rows")
            return self._plans.inspect(session, layer)

    # What runs.

    def live_manifest(self) -> RuntimeManifest:
        """The exact manifest that the live objects amount to. They change as a whole, so a proof waits for no
        step."""
        return self._live.manifest()

    def stats(self) -> EngineStats:
        """Bytes by tier as they are now; waits for no step."""
        return self._parts.statistics.read(len(self._sessions))

    @property
    def blocks(self) -> SharedBlocks:
        """The shared blocks: `store` to put, find, fetch and delete, `driver` to wait for it. DRAINING after
        `stop`; TIER_INCAPABLE when no tier's memory can be read by the CPU."""
        self._check_running()
        if self._parts.shared is None:
            assert self._parts.no_blocks is not None
            raise self._parts.no_blocks
        return self._parts.shared

    # Chunks of sessions.

    def list_chunks(
        self, session_id: str, generation: int, *, offset: int = 0, limit: int | None = None
    ) -> list[ChunkInfo]:
        """Published chunks of committed rows, by layer and chunk. SESSION_UNKNOWN, GENERATION_STALE."""
        with self._lock:
            found = self._parts.chunks.all(session_of(self._sessions, session_id, generation))
            return found[offset : None if limit is None else offset + limit]

    def read_chunk(
        self, session_id: str, generation: int, layer: int, chunk: int, chunk_generation: int
    ) -> tuple[ChunkInfo, bytes]:
        """A published chunk's payload, float32 [2, Hk, C, d], verified before a byte leaves.
        NOT_VISIBLE when not listed, GENERATION_STALE when it has moved since, CHECKSUM_MISMATCH, DEADLINE."""
        with self._lock:
            session = session_of(self._sessions, session_id, generation)
            until = self._clock() + READ_TIMEOUT_SECONDS
            return self._parts.chunks.read(session, layer, chunk, chunk_generation, until)

    # Ending.

    def stop(self) -> None:
        """Ends every session and the block store, checks that all credits are accounted for, closes tiers.
        Idempotent. DEADLINE when the store's thread does not end."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            parts = self._parts
            try:
                self._plans.close()
                for session in list(self._sessions.values()):
                    self.close_session(session.session_id, session.generation)
                self.selectors.forget()
                if parts.shared is not None:
                    parts.shared.close()
                with self._store.lock:
                    parts.credits.release(parts.own)
                    parts.ledger.check()
                    if parts.ledger.outstanding():
                        raise AssertionError(f"{parts.ledger.outstanding()} grants of sessions are left")
            finally:
                close_tiers(self._live.tiers)
