"""Rows of one layer, each chunk in a tier that a test chooses, behind what plans and attention ask of a
store.

The gpu and cpu tiers are real ones in host memory; storage is `ScriptedTier`, whose reads end in an order
that the test chooses, one at each look at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier_core.appends import Append, LayerState, Session
from kvtier_core.attend import Attended
from kvtier_core.directory import ChunkState, logical_id
from kvtier_core.folding import Query
from kvtier_core.layout import ChunkLayout
from kvtier_core.planner import PlanTerms
from kvtier_core.planning.facts import Rates
from kvtier_core.receipts import SessionSpec
from kvtier_core.stepplans import Planned, StepPlans, Tried
from kvtier_core.streamedframe import Asked
from kvtier_core.tiers.base import BlockIdentity, SlotRef, Tier, seal_checksum
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.gpu import GpuTier
from kvtier_kernels.state import LogitFrame
from tests.unit.core.blockkey_cases import binding
from tests.unit.core.builders import FakeClock
from tests.unit.core.tierdoubles import Read, ScriptedTier

GPU, CPU, NVME = 0, 1, 2
LAYOUT = ChunkLayout(kv_heads=2, chunk_tokens=64, head_dim=16)
QUERY_HEADS = 4
SCALE = 0.25
MAX_CHUNKS, LAYERS = 12, 3


class Storage(ScriptedTier):
    """Ends one read at each poll: `pick` says which of the open ones, and may raise clocks or errors
    meanwhile."""

    def __init__(self) -> None:
        super().__init__(LAYERS * MAX_CHUNKS, layout=LAYOUT)
        self.pick: Callable[[Sequence[Read]], None] = lambda reads: reads[0].end()

    def poll(self) -> int:
        waiting = [read for read in self.reads if not read.sink.over]
        if waiting:
            self.pick(waiting)
        return len(waiting)


class RowsDouble:
    """A store of `where` chunks, `last` rows in the last, the same in each of `LAYERS` layers. sealed: all
    but the last, which is open unless it lies in storage; storage takes no rows of an open chunk, so there it
    is sealed as it is."""

    def __init__(self, k: Tensor, v: Tensor, where: Sequence[int], last: int) -> None:
        self.layout = LAYOUT
        self.cache_generation = binding().cache_generation
        self.storage = Storage()
        self.tiers: list[Tier] = [
            GpuTier("hbm", LAYOUT, LAYERS * MAX_CHUNKS, device=torch.device("cpu")),
            CpuTier("ram", LAYOUT, LAYERS * MAX_CHUNKS),
            self.storage,
        ]
        self._identities: dict[int, BlockIdentity] = {}
        self._refs: dict[int, SlotRef] = {}
        columns: dict[str, list[int]] = {"tier": [], "state": [], "generation": []}
        size = LAYOUT.chunk_tokens
        self.lines = list(range(len(where)))
        for line in range(LAYERS * len(where)):
            layer, chunk = divmod(line, len(where))
            tier = where[chunk]
            rows = last if chunk == len(where) - 1 else size
            lo = chunk * size
            payload = LAYOUT.assemble(k[lo : lo + rows], v[lo : lo + rows])
            columns["tier"].append(tier)
            columns["state"].append(int(ChunkState.SEALED))
            columns["generation"].append(1)
            self._place(line, logical_id(1, layer, chunk), tier, payload)
        self.directory: Any = SimpleNamespace(
            readers=np.zeros(LAYERS * len(where), dtype=np.int64),
            cells=lambda name: columns[name],
            **{name: np.array(values) for name, values in columns.items()},
        )

    def lines_of(self, layer: int) -> list[int]:
        return [layer * len(self.lines) + line for line in self.lines]

    def _place(self, line: int, logical: int, index: int, payload: Tensor) -> None:
        size = LAYOUT.payload_bytes
        identity = BlockIdentity(bytes(32), logical, 1, LAYOUT.chunk_tokens, size, seal_checksum(payload))
        self._identities[line] = identity
        if index == NVME:
            self.storage.payloads[line] = payload
            self._refs[line] = SlotRef(line, 1)
            return
        tier = self.tiers[index]
        ref = tier.reserve(line)
        tier.write(ref, payload, identity)
        tier.validate(ref, identity)
        tier.publish(ref)
        self._refs[line] = ref

    def ref(self, line: int) -> SlotRef:
        return self._refs[line]

    def identity_of(self, line: int, replica_generation: int) -> BlockIdentity:
        return self._identities[line]

    def staging_job(self, line: int) -> Callable[[object], None]:
        raise AssertionError("nothing here reads rows one by one")

    def close(self) -> None:
        for tier in self.tiers[:NVME]:
            tier.close()


@dataclass
class World:
    """One layer's rows, its queries and an engine's plans over them. frame_rows: of the last rows, how many
    come with the request and lie in no chunk yet."""

    store: RowsDouble
    plans: StepPlans
    append: Append
    query: Query
    visible: int
    clock: FakeClock

    def close(self) -> None:
        self.plans.close()
        self.store.close()


def by_kept(made: World, step: int = 0, follow: Callable[[], object] = lambda: None) -> Planned:
    """As `StepPlans.exact`, first by what is kept of the layer's plan, as a frame on the short way is."""
    plans, append, query = made.plans, made.append, made.query
    plan = plans.of_decode(append, made.visible)
    kept = plans.streamed.keep(plan, append.session, SCALE)
    assert kept is not None, "this plan is none that is kept"
    found = plans.streamed_exact(Asked(kept, append, query, step, follow))
    if isinstance(found, Tried):
        return plans.exact(append, query, made.visible, step=step, tried=found)
    seconds = found.stall_seconds, found.stall_seconds + found.hidden_seconds
    attended = Attended(found.out, {}, *seconds, found.peak_buffer_bytes, found.promised_bytes)
    return Planned(attended, plan)


def world(
    where: Sequence[int],
    *,
    last: int = 64,
    frame_rows: int = 0,
    queries: int = 1,
    seed: int = 0,
    deadline: float | None = None,
    terms: PlanTerms | None = None,
    rates: Rates | None = None,
    executor: Executor | None = None,
) -> World:
    """Rows are random but fixed by `seed`: two worlds of the same rows differ only by where they lie."""
    generator = torch.Generator().manual_seed(seed)
    size = LAYOUT.chunk_tokens
    stored = (len(where) - 1) * size + last if where else 0
    visible = stored + frame_rows
    k = torch.randn(MAX_CHUNKS * size, LAYOUT.kv_heads, LAYOUT.head_dim, generator=generator)
    v = torch.randn(MAX_CHUNKS * size, LAYOUT.kv_heads, LAYOUT.head_dim, generator=generator)
    q = torch.randn(queries, QUERY_HEADS, LAYOUT.head_dim, generator=generator)
    store = RowsDouble(k, v, where, last)
    clock = FakeClock()
    session = Session(
        number=1,
        session_id="r1",
        generation=1,
        spec=SessionSpec("team-a", SCALE, 0),
        source=binding(),
        layers=[LayerState(open_tier=GPU, frontier=stored, lines=list(store.lines))],
        open_grant=0,
        producers=[(0, 0)],
    )
    plans = StepPlans(
        store,
        clock,
        executor,
        query_heads=QUERY_HEADS,
        rates=rates or Rates(None),
        terms=terms or PlanTerms(),
    )
    append = Append(session, 0, stored, k[stored:visible], v[stored:visible])
    query = Query(q, visible - queries, LogitFrame(SCALE), deadline)
    return World(store, plans, append, query, visible, clock)


def reference(visible: int, queries: int, seed: int = 0) -> Tensor:
    """Causal attention in float64, obvious and slow: [Nq, Hq, d]."""
    generator = torch.Generator().manual_seed(seed)
    size = LAYOUT.chunk_tokens
    shape = (MAX_CHUNKS * size, LAYOUT.kv_heads, LAYOUT.head_dim)
    k = torch.randn(*shape, generator=generator)[:visible].double()
    v = torch.randn(*shape, generator=generator)[:visible].double()
    q = torch.randn(queries, QUERY_HEADS, LAYOUT.head_dim, generator=generator).double()
    group = QUERY_HEADS // LAYOUT.kv_heads
    out = torch.empty(queries, QUERY_HEADS, LAYOUT.head_dim, dtype=torch.float64)
    for i in range(queries):
        seen = visible - queries + i + 1
        for head in range(QUERY_HEADS):
            logits = SCALE * (k[:seen, head // group] @ q[i, head])
            out[i, head] = logits.softmax(0) @ v[:seen, head // group]
    return out
