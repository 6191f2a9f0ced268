"""A model in the same process as an engine: every K/V row in its tiers, and each step by the plan that a test
names.

The client's cache is used as it is; only what carries its frames is replaced. So one prefill can serve every
plan: sessions are forked, and truncated back after each generation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvtier_client.hf import KvtierCache
from kvtier_client.session import Geometry
from kvtier_core.directory import ChunkState
from kvtier_core.edits.requests import EditAnswer, EditRequest, ForkRequest, Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError
from kvtier_core.receipts import SessionHandle, SessionSpec, StepMode, StepReceipt, StepRequest
from kvtier_core.tiers.base import MediumKind, TierMount
from kvtier_core.transactions import MoveKind, MoveRefused
from kvtier_crds.manifest import (
    Checksum,
    Contract,
    Dtype,
    Exactness,
    Medium,
    Model,
    Placement,
    PositionContract,
    Rope,
    RuntimeManifest,
    Tenancy,
    Tier,
    TierRole,
)
from kvtier_crds.manifest import Geometry as ManifestGeometry
from tests.engine.exactness import CHUNK_BYTES, CHUNK_TOKENS, SLOT_BYTES

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
GEOMETRY = Geometry(LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM)
SCALE = HEAD_DIM**-0.5
BLOCK = 256
_MEDIA = {"hbm": Medium.GPU, "ram": Medium.CPU, "flash": Medium.NVME}


def engine_of(folder: Path, clock: Any, reader: Any = None, **slots: int) -> CacheEngine:
    """An engine of SmolLM2's geometry with `slots` chunks in each of hbm, ram and flash; tiers without a slot
    are left out."""
    tiers = [
        Tier(
            tier_class_name=name,
            medium=_MEDIA[name],
            role=TierRole.BACKING if name == "flash" else TierRole.RESIDENT,
            budget_bytes=count * (SLOT_BYTES if name == "flash" else CHUNK_BYTES),
            codec="identity",
            checksum=Checksum.XXH3,
        )
        for name, count in slots.items()
        if count
    ]
    manifest = RuntimeManifest(
        device_kind="simulated",
        tenancy=Tenancy(namespace="serving", cache_uid="plans"),
        model=Model(
            artifact_digest="sha256:" + "1" * 64,
            checkpoint="smollm2",
            geometry=ManifestGeometry(
                layers=LAYERS,
                query_heads=QUERY_HEADS,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                dtype=Dtype.FLOAT32,
            ),
            rope=Rope(theta="100000"),
            position_contract=PositionContract.POST_ROPE,
        ),
        page_tokens=16,
        chunk_tokens=CHUNK_TOKENS,
        tiers=tuple(tiers),
        placement=Placement(policy="recency"),
        contract=Contract(exactness=Exactness.EXACT, tolerance="0.001"),
    )
    mounts = {
        tier.tier_class_name: TierMount(
            tier.tier_class_name,
            MediumKind(tier.medium.value),
            folder=folder if tier.medium is Medium.NVME else None,
        )
        for tier in tiers
    }
    return CacheEngine(manifest, mounts, clock, reader=reader, probe=False)


class PlannedSession:
    """What the client's cache asks of a session, answered by an engine here. plan: the only exact plan that
    may run; None: the planner's choice."""

    def __init__(self, engine: CacheEngine, handle: SessionHandle) -> None:
        self.engine = engine
        self.handle = handle
        self.request = SimpleNamespace(score_scale=SCALE)
        self.plan: str | None = None
        self.step = -1
        self.receipts: list[StepReceipt] = []

    @classmethod
    def open(cls, engine: CacheEngine, max_tokens: int) -> PlannedSession:
        return cls(engine, engine.open_session(SessionSpec("team-a", SCALE, max_tokens)))

    def fork(self) -> PlannedSession:
        handle = self.engine.fork_session(ForkRequest(self.handle.session_id, self.handle.generation))
        return PlannedSession(self.engine, handle)

    def truncate(self, to: int) -> EditAnswer:
        return self.engine.edit_session(
            EditRequest(self.handle.session_id, self.handle.generation, Truncate(to))
        )

    def close(self) -> int:
        return self.engine.close_session(self.handle.session_id, self.handle.generation)

    def token_done(self) -> None: ...

    @property
    def mode(self) -> StepMode:
        return StepMode(plan=self.plan)

    def frame(
        self,
        layer: int,
        position: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        committed: int,
        follows: bool,
        first_query: int | None = None,
    ) -> StepRequest:
        return StepRequest(
            session_id=self.handle.session_id,
            generation=self.handle.generation,
            step=self.step,
            layer=layer,
            first_row_position=position,
            k=k.contiguous(),
            v=v.contiguous(),
            first_query_position=position if first_query is None else first_query,
            q=q.contiguous(),
            committed_frontier=committed,
            next_layer_follows=follows,
        )

    def attend(
        self,
        step: int,
        layer: int,
        position: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        committed: int,
        follows: bool = False,
        evidence: None = None,
    ) -> Tensor:
        if layer == 0:
            self.step += 1
        parts = []
        for lo in range(0, q.shape[0], BLOCK):
            hi = min(lo + BLOCK, q.shape[0])
            last = hi == q.shape[0]
            request = self.frame(
                layer, position + lo, q[lo:hi], k[lo:hi], v[lo:hi], committed, follows and last
            )
            answer = self.engine.step(request, self.mode)
            self.receipts.append(answer.receipt)
            parts.append(answer.out)
        return torch.cat(parts).clone()

    def part(
        self,
        step: int,
        layer: int,
        position: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        committed: int,
        follows: bool = False,
        evidence: None = None,
    ) -> tuple[PlannedSession, StepRequest]:
        if layer == 0:
            self.step += 1
        return self, self.frame(layer, position, q, k, v, committed, follows)


class PlannedBatch:
    """Frames of several sessions in one call of the engine."""

    def attend(self, parts: Sequence[tuple[PlannedSession, StepRequest]]) -> list[Tensor]:
        engine = parts[0][0].engine
        answers = engine.step_many([request for _, request in parts], [session.mode for session, _ in parts])
        outs = []
        for (session, _), answer in zip(parts, answers, strict=True):
            if isinstance(answer, CoreError):
                raise answer
            session.receipts.append(answer.receipt)
            outs.append(answer.out.clone())
        return outs


class PlannedCache(KvtierCache):
    """The client's cache over such sessions, each with `length` positions already."""

    def __init__(self, sessions: Sequence[PlannedSession], length: int = 0) -> None:
        batch = PlannedBatch() if len(sessions) > 1 else None
        self._hold(list(sessions), batch, GEOMETRY)  # type: ignore[arg-type]
        self._stand_at(length)

    def use(self, plan: str | None) -> None:
        for session in self.sessions:
            session.plan = plan  # type: ignore[attr-defined]

    def receipts(self) -> list[StepReceipt]:
        taken = [receipt for session in self.sessions for receipt in session.receipts]  # type: ignore[attr-defined]
        for session in self.sessions:
            session.receipts.clear()  # type: ignore[attr-defined]
        return taken


def copy_rows(
    source: PlannedSession,
    target: CacheEngine,
    tokens: int,
    max_tokens: int,
    onto: PlannedSession | None = None,
    first: int = 0,
) -> PlannedSession:
    """A session of another engine with rows [0, tokens) of a session here, byte by byte: rows do not depend
    on who attended them, since every plan's answers have the same bits. onto: a session there that has rows
    [0, first)."""
    made = onto or PlannedSession.open(target, max_tokens)
    made.step += 1
    store = source.engine._store
    session = source.engine._sessions[source.handle.session_id]
    for layer, state in enumerate(session.layers):
        for chunk in range(first // CHUNK_TOKENS, -(-tokens // CHUNK_TOKENS)):
            start = chunk * CHUNK_TOKENS
            low, high = max(first, start), min(tokens, start + CHUNK_TOKENS)
            k, v = store.layout.rows(store.read_rows(state.lines[chunk]), high - start)
            q = torch.zeros(1, QUERY_HEADS, HEAD_DIM)
            k, v = k[low - start :], v[low - start :]
            target.step(made.frame(layer, low, q, k, v, 0, False, high - 1))
    return made


def shuffle(engine: CacheEngine, rng: random.Random, count: int) -> int:
    """Promotes and demotes `count` sealed chunks, any chunk to any tier that takes it; returns how many
    went."""
    store = engine._store
    directory = store.directory
    sealed = [
        line
        for session in engine._sessions.values()
        for state in session.layers
        for line in state.lines
        if int(directory.state[line]) == ChunkState.SEALED
    ]
    moved = 0
    for line in rng.sample(sealed, min(count, len(sealed))):
        at = int(directory.tier[line])
        tier = rng.choice([index for index in range(len(store.tiers)) if index != at])
        kind = MoveKind.DEMOTE if tier > at else MoveKind.PROMOTE
        try:
            store.transactions.run(kind, line, tier)
        except MoveRefused:
            continue
        moved += 1
    return moved
