"""The real engine behind EnginePort: bytes of frames become tensors here, in the engine's thread, and back.

Conversion only: what may be published is asked by the core through the frame's mode.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from kvtier_agent.config import PROCESS, Medium
from kvtier_agent.engine_port import (
    BlockFacts,
    FrameComparison,
    FrameInput,
    FrameMode,
    FrameResult,
    FrameRoom,
    Payload,
    SessionHandle,
    SessionTerms,
    TierReport,
)
from kvtier_agent.plan_report import reporter_of
from kvtier_agent.rowevidence import EngineGives
from kvtier_agent.sessionsevidence import SessionsEvidence, asked_of, layer_weights
from kvtier_agent.tierdirs import NodeTier
from kvtier_agent.weightstore import GivenWeights
from kvtier_core.carrying import Carriage
from kvtier_core.edits.requests import EditAnswer, EditRequest, ForkRequest
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.nodeplan import NodePlan
from kvtier_core.prefixes import Prefixes
from kvtier_core.receipts import (
    ChunkInfo,
    EngineStats,
    PublishArm,
    SessionSpec,
    StepAnswer,
    StepMode,
    StepRequest,
)
from kvtier_core.release.leases import GrantTerms
from kvtier_core.rowevidence import ONLY_QUERIES
from kvtier_core.selectors.lifecycle.works import IndexState, IndexWorks
from kvtier_core.sharing import SharedBlocks
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind, TierMount
from kvtier_core.tiers.nvme.crypto import KeyProvider
from kvtier_crds.manifest import Geometry, RuntimeManifest

log = logging.getLogger(__name__)

_MEDIUM = {
    Medium.GPU: MediumKind.GPU,
    Medium.CPU: MediumKind.CPU,
    Medium.NVME: MediumKind.NVME,
}


KeySource = Callable[[str], KeyProvider | None]
"""The keys by the name of their Secret, empty for the agent's own. STORAGE_UNAVAILABLE."""


def no_keys(name: str) -> KeyProvider | None:
    """Of an agent that was given none: a cache that names some is refused, never kept in plain text."""
    if name:
        raise CoreError(
            Reason.STORAGE_UNAVAILABLE, f"no keys are mounted on this agent, {name} was asked for"
        )
    return None


def prepare_process() -> None:
    """One compute thread: several agents share a machine, and a split reduction changes bits. What is loaded
    by now stays, and is left out of the collections of garbage, a full one of which goes through a quarter of
    a million objects and stops every call for a tenth of a second."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def build_engine(
    manifest: RuntimeManifest,
    tiers: Sequence[NodeTier],
    key_secret: str = "",
    *,
    keys: KeySource = no_keys,
    indexes: IndexWorks | None = None,
) -> CoreEngine:
    """Builds the exact cache over the node's tiers; raises the core's refusals. keys: finds the keys by
    name that what lies on nvme tiers is encrypted under. indexes: where selectors' indexes are built; None:
    in the steps' own time."""
    return CoreEngine(manifest, tiers, keys=keys(key_secret), indexes=indexes)


class CoreEngine:
    """Implements EnginePort over CacheEngine. `clock`: seconds, the one that frames' deadlines are on."""

    def __init__(
        self,
        manifest: RuntimeManifest,
        tiers: Sequence[NodeTier],
        clock: Callable[[], float] = time.monotonic,
        keys: KeyProvider | None = None,
        indexes: IndexWorks | None = None,
    ) -> None:
        self._geometry = manifest.model.geometry
        self._evidence = SessionsEvidence()
        self._plans = reporter_of(manifest)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="staged-read")
        mounts = {tier.config.class_name: mount_of(tier) for tier in tiers}
        try:
            self._engine = CacheEngine(
                manifest,
                mounts,
                clock,
                reader=self._reader,
                # Random, so that a frame of an earlier life of this agent names no session of this one.
                session_name=lambda number: uuid.uuid4().hex,
                blocks=True,
                keys=keys,
                indexes=indexes,
            )
        except BaseException:
            self._reader.shutdown()
            raise
        stats = self._engine.stats()
        self._engine.prefer(self._plans.preference(stats.tiers))
        for found in stats.recovered:
            log.info("%s", found.message)

    def open_session(self, terms: SessionTerms) -> SessionHandle:
        candidate, gives = terms.candidate, terms.gives
        selector = None if candidate is None else candidate.selector
        spec = SessionSpec(
            tenant=terms.tenant,
            score_scale=terms.score_scale,
            max_tokens=terms.max_tokens,
            session_id=terms.session_id,
            selector=selector,
            candidate_digest=None if candidate is None else candidate.candidate_digest,
            audit=0.0 if candidate is None else float(candidate.sample_fraction),
            given=gives.needs | ONLY_QUERIES,
            fixed_context=gives.fixed_context,
            lane=candidate.lane if candidate is not None and terms.serves else "",
        )
        handle = self._engine.open_session(spec)
        asked = None if selector is None else asked_of(self._engine.selectors.wanted(selector), gives)
        self._evidence.opened(handle.session_id, asked)
        return SessionHandle(handle.session_id, handle.generation, asked)

    @property
    def prefixes(self) -> Prefixes:
        return self._engine.prefixes

    @property
    def carriage(self) -> Carriage:
        return self._engine.carriage

    def demote_session(self, session_id: str, generation: int, most: int) -> int:
        return self._engine.demote_session(session_id, generation, most)

    def close_session(self, session_id: str, generation: int) -> int:
        released = self._engine.close_session(session_id, generation)
        self._evidence.closed(session_id)
        return released

    def edit_session(self, request: EditRequest) -> EditAnswer:
        return self._engine.edit_session(request)

    def fork_session(self, request: ForkRequest) -> SessionHandle:
        handle = self._engine.fork_session(request)
        asked = self._evidence.forked(request.session_id, handle.session_id)
        return SessionHandle(handle.session_id, handle.generation, asked)

    def check_candidate(self, terms: GrantTerms) -> None:
        if terms.selector is not None:
            self._engine.selectors.check(terms.selector)
        if terms.placement is not None:
            preference = self._plans.placed(terms.placement).preference(self._engine.stats().tiers)
            allowed = terms.fallbacks if terms.selector is None else None
            self._engine.prepare_lane(terms.lane, preference, allowed)

    def adopt(self, manifest: RuntimeManifest) -> None:
        plans = self._plans.placed(manifest.placement)
        self._engine.adopt(manifest, plans.preference(self._engine.stats().tiers))
        self._plans = plans

    def lacks(self, terms: GrantTerms, gives: EngineGives) -> CoreError | None:
        if terms.selector is None:
            return None
        wanted = self._engine.selectors.wanted(terms.selector)
        return wanted.refused(gives.needs, gives.fixed_context is not None)

    def bind_weights(self, session_id: str, generation: int, layer: int, weights: GivenWeights) -> None:
        self._evidence.bind(session_id, layer, layer_weights(weights))

    def room(self) -> FrameRoom:
        g = self._geometry
        row, query = g.kv_heads * g.head_dim, g.query_heads * g.head_dim
        floats = np.empty(2 * row + query, np.float32)
        k, v, q = floats[:row], floats[row : 2 * row], floats[2 * row :]
        keys, values = _tensor(k, g.kv_heads, g.head_dim), _tensor(v, g.kv_heads, g.head_dim)
        return FrameRoom(floats, keys, values, _tensor(q, g.query_heads, g.head_dim))

    def step(self, frame: FrameInput, mode: FrameMode) -> FrameResult:
        return self._answered(frame, self._engine.step(self._request(frame), step_mode(mode)))

    def step_many(self, frames: Sequence[tuple[FrameInput, FrameMode]]) -> Sequence[FrameResult | CoreError]:
        requests = [self._request(frame) for frame, _ in frames]
        answers = self._engine.step_many(requests, [step_mode(mode) for _, mode in frames])
        return [
            one if isinstance(one, CoreError) else self._answered(frame, one)
            for (frame, _), one in zip(frames, answers, strict=True)
        ]

    def _answered(self, frame: FrameInput, answer: StepAnswer) -> FrameResult:
        result = answered(answer)
        if frame.promise_later and self._engine.owes_promise(frame.session_id):
            result.afterwards = partial(self._engine.keep_promise, frame.session_id, frame.generation)
        return result

    def _request(self, frame: FrameInput) -> StepRequest:
        request = step_request(frame, self._geometry)
        return self._evidence.completed(request, frame.evidence)

    def shared(self) -> SharedBlocks:
        """The shared blocks' store and its driver, for any thread. TIER_INCAPABLE when no tier of the cache
        is memory that the CPU reads, DRAINING once it was closed."""
        return self._engine.blocks

    def stats(self) -> EngineStats:
        """Byte ledgers; waits for no step."""
        return self._engine.stats()

    def live_manifest(self) -> RuntimeManifest:
        return self._engine.live_manifest()

    def tiers(self) -> Sequence[TierReport]:
        return [
            TierReport(
                class_name=stats.class_name,
                medium=stats.medium,
                simulated=stats.simulated,
                capacity_bytes=stats.capacity_bytes,
                used_bytes=stats.used_bytes,
                pinned_bytes=stats.pinned_bytes,
                read_bytes_per_second=stats.read_bytes_per_second,
                write_bytes_per_second=stats.write_bytes_per_second,
                probes=dict(stats.probes),
                condition=stats.condition,
                held=stats.bytes,
            )
            for stats in self._engine.stats().tiers
        ]

    def plan(self) -> NodePlan | None:
        return self._plans.of(self._engine.stats().tiers)

    def indexes(self) -> Sequence[IndexState]:
        return self._engine.selectors.indexes()

    def indexes_caught_up(self, session_id: str, generation: int, seconds: float) -> bool:
        return self._engine.indexes_caught_up(session_id, generation, seconds)

    def selector_digest(self, terms: GrantTerms) -> str:
        return "" if terms.selector is None else self._engine.selectors.digest(terms.selector)

    def blocks(self, session_id: str, generation: int) -> Sequence[BlockFacts]:
        return [block_facts(info) for info in self._engine.list_chunks(session_id, generation)]

    def read_block(
        self, session_id: str, generation: int, layer: int, chunk: int, block_generation: int
    ) -> tuple[BlockFacts, bytes]:
        info, data = self._engine.read_chunk(session_id, generation, layer, chunk, block_generation)
        return block_facts(info), data

    def close(self) -> None:
        self._engine.stop()
        self._reader.shutdown()


def mount_of(tier: NodeTier) -> TierMount:
    """The core's view of a claimed device; a simulated gpu tier has no index and runs on the CPU device. What
    its TierClass says of persistence comes along: storage then keeps shared blocks over restarts."""
    config = tier.config
    medium = _MEDIUM[config.medium]
    kept = None
    if config.persistence != PROCESS:
        kept = dataclasses.replace(DEFAULT_CAPABILITY[medium], persistence=config.persistence)
    return TierMount(
        class_name=config.class_name,
        medium=medium,
        folder=tier.directory,
        cuda_index=None if config.simulated else config.cuda_index,
        capability=kept,
        budget=tier.budget,
        pace=tier.pace,
        queue_depth=config.queue_depth,
    )


def step_request(frame: FrameInput, geometry: Geometry) -> StepRequest:
    """Copies the frame's bytes into tensors [n, heads, headDim]; lengths were checked by the servicer."""
    k, v, q = frame.k, frame.v, frame.q
    if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor) and isinstance(q, torch.Tensor):
        keys, values, queries = k, v, q
    else:
        row, query = (geometry.kv_heads, geometry.head_dim), (geometry.query_heads, geometry.head_dim)
        keys, values, queries = _tensor(k, *row), _tensor(v, *row), _tensor(q, *query)
    # By place: by name so many fields cost three times as much.
    return StepRequest(
        frame.session_id,
        frame.generation,
        frame.step,
        frame.layer,
        frame.first_row_position,
        keys,
        values,
        frame.first_query_position,
        queries,
        frame.committed_frontier,
        frame.deadline,
        frame.position_epoch,
        frame.next_layer_follows,
        promise_later=frame.promise_later,
    )


_EXACT = StepMode()
_CANDIDATE = PublishArm.CANDIDATE


def step_mode(mode: FrameMode) -> StepMode:
    if mode.candidate is None or not (mode.publish_candidate or mode.compare):
        return _EXACT
    return StepMode(
        publish=PublishArm.CANDIDATE if mode.publish_candidate else PublishArm.EXACT,
        compare=mode.compare,
        selector=mode.candidate.selector,
        candidate_digest=mode.candidate.candidate_digest,
        may_publish=mode.may_publish,
        allowed=mode.candidate.fallbacks,
        lane=mode.candidate.lane,
    )


def answered(answer: StepAnswer) -> FrameResult:
    comparison = None
    if answer.comparison is not None:
        comparison = FrameComparison(answer.comparison.diff_norm, answer.comparison.exact_norm)
    receipt = answer.receipt
    return FrameResult(_bytes(answer.out), receipt, comparison, receipt.arm is _CANDIDATE)


def block_facts(info: ChunkInfo) -> BlockFacts:
    return BlockFacts(
        layer=info.layer,
        chunk=info.chunk,
        generation=info.generation,
        tier_class=info.tier_class,
        rows=info.rows,
        size_bytes=info.bytes,
        checksum=info.checksum,
        producer_digest=info.producer_digest,
        sealed=info.sealed,
    )


def _bytes(out: torch.Tensor) -> bytes:
    """C-contiguous float32, whatever device and strides it has."""
    if out.dtype is not torch.float32 or not out.is_cpu or not out.is_contiguous():
        out = out.to("cpu", torch.float32).contiguous()
    # By its address: a view of it as an array costs several times what such a copy does.
    return ctypes.string_at(out.data_ptr(), 4 * out.numel())


def _tensor(data: Payload, heads: int, dim: int) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data.reshape(-1, heads, dim))
    assert isinstance(data, bytes)
    # A copy: the core keeps rows, and numpy's view of received bytes is read-only and unaligned.
    array = np.frombuffer(data, dtype="<f4").astype(np.float32, copy=True)
    return torch.from_numpy(array).view(-1, heads, dim)
