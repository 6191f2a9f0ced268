"""An engine that holds no rows: it says which manifest it runs, and that it can run any candidate.

It opens no session. It must not know fences or leases; those are the node's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

from kvtier_agent.engine_port import (
    BlockFacts,
    FrameInput,
    FrameMode,
    FrameResult,
    SessionHandle,
    SessionTerms,
    TierReport,
)
from kvtier_agent.rowevidence import EngineGives
from kvtier_agent.weightstore import GivenWeights
from kvtier_core.edits.requests import EditAnswer, EditRequest, ForkRequest
from kvtier_core.errors import CoreError, Reason
from kvtier_core.nodeplan import NodePlan
from kvtier_core.release.leases import GrantTerms
from kvtier_core.selectors.lifecycle.works import IndexState
from kvtier_crds.manifest import RuntimeManifest


class EmptyEngine:
    """Implements EnginePort."""

    def __init__(self, manifest: RuntimeManifest) -> None:
        self._manifest = manifest
        self._tiers = tuple(
            TierReport(tier.tier_class_name, tier.medium.value, tier.medium.value == "gpu", tier.budget_bytes)
            for tier in manifest.tiers
        )

    def adopt(self, manifest: RuntimeManifest) -> None:
        self._manifest = manifest

    def live_manifest(self) -> RuntimeManifest:
        return self._manifest

    def check_candidate(self, terms: GrantTerms) -> None:
        """Any will do."""

    def selector_digest(self, terms: GrantTerms) -> str:
        return ""

    def tiers(self) -> Sequence[TierReport]:
        return self._tiers

    def plan(self) -> NodePlan | None:
        return None

    def indexes(self) -> Sequence[IndexState]:
        return ()

    def close(self) -> None:
        """Nothing is held."""

    # Of sessions, of which there are none.

    def open_session(self, terms: SessionTerms) -> SessionHandle:
        _refuse()

    def lacks(self, terms: GrantTerms, gives: EngineGives) -> CoreError | None:
        return None

    def bind_weights(self, session_id: str, generation: int, layer: int, weights: GivenWeights) -> None:
        _refuse()

    def close_session(self, session_id: str, generation: int) -> int:
        _refuse()

    def edit_session(self, request: EditRequest) -> EditAnswer:
        _refuse()

    def fork_session(self, request: ForkRequest) -> SessionHandle:
        _refuse()

    def step(self, frame: FrameInput, mode: FrameMode) -> FrameResult:
        _refuse()

    def step_many(self, frames: Sequence[tuple[FrameInput, FrameMode]]) -> Sequence[FrameResult | CoreError]:
        _refuse()

    def indexes_caught_up(self, session_id: str, generation: int, seconds: float) -> bool:
        return True

    def blocks(self, session_id: str, generation: int) -> Sequence[BlockFacts]:
        return ()

    def read_block(
        self, session_id: str, generation: int, layer: int, chunk: int, block_generation: int
    ) -> tuple[BlockFacts, bytes]:
        _refuse()


def _refuse() -> Never:
    raise CoreError(Reason.UNSUPPORTED, "a simulated agent holds no rows")
