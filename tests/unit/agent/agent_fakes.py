"""A cache engine without tensors, a clock that tests move, and a node over both."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtier_agent.cachehost import CacheHost
from kvtier_agent.candidateengines import BlocksOf
from kvtier_agent.commands import Command
from kvtier_agent.config import Limits, TierConfig
from kvtier_agent.convert import cache_name
from kvtier_agent.engine_port import (
    BlockFacts,
    ExactnessClass,
    FrameComparison,
    FrameInput,
    FrameMode,
    FrameReceipt,
    FrameResult,
    SessionHandle,
    SessionTerms,
    TierReport,
)
from kvtier_agent.evidence_port import GateTerms, WindowTerms
from kvtier_agent.evidence_windows import EvidenceWindows
from kvtier_agent.node import Node
from kvtier_agent.rowevidence import EngineGives, EvidenceAsked
from kvtier_agent.statedir import StateDir
from kvtier_agent.tierdirs import NodeTier, NodeTiers
from kvtier_agent.weightstore import GivenWeights
from kvtier_core.edits.requests import EditAnswer, EditRequest, ForkRequest
from kvtier_core.errors import CoreError
from kvtier_core.nodeplan import NodePlan
from kvtier_core.receipts import SelectionFacts
from kvtier_core.release.durable import Syscalls
from kvtier_core.release.leases import BlastRadius, FenceToken, GrantTerms
from kvtier_core.selectors.lifecycle.works import IndexState
from kvtier_crds.manifest import RuntimeManifest
from kvtier_evidence.window import WindowKey
from tests.engine.agent_process import CACHE, baseline_manifest, default_tiers, quest_candidate

MS = 1_000_000
SECONDS = 1_000 * MS
NAME = CACHE


class FakeClock:
    """CLOCK_BOOTTIME that tests move."""

    def __init__(self) -> None:
        self.now = 50 * SECONDS

    def __call__(self) -> int:
        return self.now

    def seconds(self) -> float:
        return self.now / SECONDS

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * SECONDS)


SELECTION = SelectionFacts(
    *("f", "", "estimate", "d", "i"),
    *(1, 8, 0, 8, 0, 0, 1, 8, 1, 0, 1, 1),
    *(0.0, 0.0, 0, 0),
    *(0.1, 1.0, float("nan"), 0, 0.2, float("nan"), False),
)


class FakeEngine:
    """Answers every frame; `hook` runs where an engine would compute, `refusal` is raised there."""

    def __init__(self, manifest: RuntimeManifest) -> None:
        self.manifest = manifest
        self.opened: list[SessionTerms] = []
        self.edits: list[EditRequest | ForkRequest] = []
        self.frames: list[FrameInput] = []
        self.modes: list[FrameMode] = []
        self.hook: Callable[[], None] = lambda: None
        self.refusal: CoreError | None = None
        self.lacking: CoreError | None = None
        self.asked: EvidenceAsked | None = None
        self.weights: dict[tuple[str, int], GivenWeights] = {}
        self.comparison = FrameComparison(0.02, 1.0)
        self.approximate_without_leave = False
        self.selection: SelectionFacts | None = None
        self.used = 0
        self.planned: NodePlan | None = None
        self.indexed: Sequence[IndexState] = ()
        self.closed = False
        self.threads: set[str] = set()

    def open_session(self, terms: SessionTerms) -> SessionHandle:
        if self.refusal is not None:
            raise self.refusal
        self.opened.append(terms)
        return SessionHandle(f"session-{len(self.opened)}", len(self.opened), self.asked)

    def check_candidate(self, terms: GrantTerms) -> None:
        if self.refusal is not None:
            raise self.refusal

    def lacks(self, terms: GrantTerms, gives: EngineGives) -> CoreError | None:
        return self.lacking

    def bind_weights(self, session_id: str, generation: int, layer: int, weights: GivenWeights) -> None:
        self.weights[session_id, layer] = weights

    def close_session(self, session_id: str, generation: int) -> int:
        return 3

    def edit_session(self, request: EditRequest) -> EditAnswer:
        self.edits.append(request)
        if self.refusal is not None:
            raise self.refusal
        return EditAnswer(True, 2, 7, 5, 4)

    def fork_session(self, request: ForkRequest) -> SessionHandle:
        self.edits.append(request)
        if self.refusal is not None:
            raise self.refusal
        return SessionHandle(f"{request.session_id}-child", request.generation + 1)

    def step(self, frame: FrameInput, mode: FrameMode) -> FrameResult:
        self.threads.add(threading.current_thread().name)
        self.frames.append(frame)
        self.modes.append(mode)
        self.hook()
        if self.refusal is not None:
            raise self.refusal
        from_candidate = mode.publish_candidate and mode.may_publish()
        approximate = from_candidate or self.approximate_without_leave
        receipt = FrameReceipt(
            exactness=ExactnessClass.APPROXIMATE if approximate else ExactnessClass.EXACT,
            manifest_digest="sha256:m",
            support_digest="sha256:s",
            frontier=1,
            rows_attended=1,
            bytes_by_tier={"dram": 64},
            plan=("cpu:partial",),
            simulated=True,
            stall_seconds=0.25,
            producer_digest="sha256:p",
            estimated_omitted_mass=float("nan"),
            selection=self.selection,
            fallback="",
            snapshot_generation=1,
        )
        return FrameResult(b"", receipt, self.comparison if mode.compare else None, from_candidate)

    def step_many(self, frames: Sequence[tuple[FrameInput, FrameMode]]) -> Sequence[FrameResult | CoreError]:
        results: list[FrameResult | CoreError] = []
        for one, mode in frames:
            try:
                results.append(self.step(one, mode))
            except CoreError as error:
                results.append(error)
        return results

    def adopt(self, manifest: RuntimeManifest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.manifest = manifest

    def live_manifest(self) -> RuntimeManifest:
        return self.manifest

    def tiers(self) -> Sequence[TierReport]:
        return [TierReport("dram", "cpu", False, 1 << 28, self.used, 0)]

    def plan(self) -> NodePlan | None:
        return self.planned

    def indexes(self) -> Sequence[IndexState]:
        return self.indexed

    def indexes_caught_up(self, session_id: str, generation: int, seconds: float) -> bool:
        return True

    def selector_digest(self, terms: GrantTerms) -> str:
        return "" if terms.selector is None else "sha256:selector"

    def blocks(self, session_id: str, generation: int) -> Sequence[BlockFacts]:
        return []

    def read_block(
        self, session_id: str, generation: int, layer: int, chunk: int, block_generation: int
    ) -> tuple[BlockFacts, bytes]:
        raise AssertionError("these tests do not ask for it")

    def close(self) -> None:
        self.closed = True


class Bench:
    """A Node over fake engines in a folder, with commands whose fences grow."""

    def __init__(
        self,
        folder: Path,
        clock: FakeClock | None = None,
        blocks_of: BlocksOf = lambda engine: None,
        baseline: RuntimeManifest | None = None,
        calls: Syscalls | None = None,
    ) -> None:
        """calls: of what is made durable; the real ones by default."""
        self.clock = clock or FakeClock()
        self.engines: list[FakeEngine] = []
        self.engines_made: Callable[[RuntimeManifest], FakeEngine] = FakeEngine
        self.key_secrets: list[str] = []
        self.baseline = baseline or baseline_manifest()
        self.candidate = quest_candidate(self.baseline)
        self.fence = 0
        self.build_refusal: CoreError | None = None
        configs = [TierConfig.parse(json.dumps(tier)) for tier in default_tiers(folder / "nvme")]
        self.node = Node(
            name="node-a",
            state=StateDir(folder / "state", calls),
            tiers=NodeTiers(configs, "uid-a"),
            limits=Limits(session_idle_seconds=5.0),
            clock=self.clock,
            engine_factory=self._engine,
            evidence_factory=lambda epoch: EvidenceWindows(epoch, self.clock.seconds),
            blocks_of=blocks_of,
        )

    def _engine(
        self, manifest: RuntimeManifest, tiers: Sequence[NodeTier], key_secret: str = ""
    ) -> FakeEngine:
        if self.build_refusal is not None:
            raise self.build_refusal
        engine = self.engines_made(manifest)
        self.key_secrets.append(key_secret)
        self.engines.append(engine)
        return engine

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def command(self, content: str = "", *, fence: int | None = None, stage: str = "Off") -> Command:
        self.fence = self.fence + 1 if fence is None else fence
        token = FenceToken(self.fence, "rollout", 1, stage, 0)
        return Command(cache_name(NAME), token, self.node.boot_id, content or f"content-{self.fence}")

    async def apply(self) -> str:
        return await self.node.apply_baseline(
            self.command(), self.baseline.canonical(), self.baseline.digest()
        )

    async def grant(
        self,
        *,
        traffic: str = "1",
        sample: str = "0",
        stage: str = "Canary",
        ttl_ms: int = 60_000,
        gates: Sequence[GateTerms] = (GateTerms("output", "outputRelativeError", 75.0, "0.05"),),
        settle_ms: int = 1000,
        sent_ns: int = 0,
        listed: bool = True,
    ) -> WindowKey:
        """listed: steps may do what the candidate's contract lists."""
        command = self.command(stage=stage)
        terms = GrantTerms(
            fence=command.fence,
            candidate_digest=self.candidate.digest(),
            baseline_digest=self.baseline.digest(),
            ttl_ms=ttl_ms,
            traffic_fraction=Decimal(traffic),
            sample_fraction=Decimal(sample),
            blast_radius=BlastRadius(),
            selector=self.candidate.selector,
            fallbacks=frozenset(self.candidate.contract.allowed_fallbacks if listed else ()),
        )
        key = WindowKey(
            "rollout", 1, stage, 0, terms.candidate_digest, terms.baseline_digest, "sha256:g", self.fence
        )
        window = WindowTerms(key, gates, float(traffic), settle_ms, 0)
        await self.node.grant(command, terms, self.candidate, window, "", sent_ns)
        return key

    async def close(self) -> None:
        assert not await self.node.close(10)


def frame(session_id: str, step: int, layer: int = 0) -> FrameInput:
    """Of a session that a FakeEngine opened: its generation is its number."""
    number = session_id.rpartition("-")[2]
    return FrameInput(session_id, int(number), step, layer, 0, b"", b"", 0, b"", 0)


class CacheBlocks(SimpleNamespace):
    """As much of a CacheHost as concerns its blocks."""

    all_blocks = CacheHost.all_blocks

    def __init__(self, blocks: Any = None, beside: Any = None, former: Any = None, **more: Any) -> None:
        super().__init__(blocks=blocks, blocks_beside=beside, blocks_former=former, deletions=0, **more)
