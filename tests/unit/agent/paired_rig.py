"""Two small real engines behind one PairedEngine, and sessions that know what one engine would answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from kvtier_agent.core_engine import answered, step_mode, step_request
from kvtier_agent.engine_port import (
    FrameInput,
    FrameMode,
    FrameResult,
    SessionHandle,
    SessionTerms,
    TierReport,
)
from kvtier_agent.pairedengine import PairedEngine
from kvtier_core.carrying import Carriage
from kvtier_core.edits.requests import EditAnswer, EditRequest, ForkRequest
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError
from kvtier_core.prefixes import Prefixes
from kvtier_core.receipts import SessionSpec, StepAnswer
from kvtier_core.release.leases import BlastRadius, FenceToken, GrantTerms
from kvtier_crds.manifest import RuntimeManifest
from tests.unit.core.builders import (
    CHUNK,
    LAYERS,
    SCALE,
    Driver,
    Rows,
    TierBudget,
    Unsynced,
    cpu,
    engine,
    gpu,
    manifest,
    nvme,
)

ROOMY = (gpu(64), cpu(64))
TIGHT = (gpu(4 * LAYERS), cpu(2), nvme(64))
TOKENS = 3 * CHUNK
EXACT = FrameMode(False, False, None, lambda: False)


class SmallEngine:
    """As much of EnginePort as sessions need, over a core engine. refusal: raised by the next calls that open
    or step."""

    def __init__(self, core: CacheEngine) -> None:
        self.core = core
        self.refusal: CoreError | None = None
        self.spoil = False

    @property
    def carriage(self) -> Carriage:
        return self.core.carriage

    @property
    def prefixes(self) -> Prefixes:
        return self.core.prefixes

    def open_session(self, terms: SessionTerms) -> SessionHandle:
        if self.refusal is not None:
            raise self.refusal
        selector = None if terms.candidate is None else terms.candidate.selector
        spec = SessionSpec(terms.tenant, terms.score_scale, terms.max_tokens, selector)
        if terms.session_id:
            spec = SessionSpec(terms.tenant, terms.score_scale, terms.max_tokens, session_id=terms.session_id)
        handle = self.core.open_session(spec)
        return SessionHandle(handle.session_id, handle.generation)

    def close_session(self, session_id: str, generation: int) -> int:
        return self.core.close_session(session_id, generation)

    def step(self, frame: FrameInput, mode: FrameMode) -> FrameResult:
        if self.refusal is not None:
            raise self.refusal
        request = step_request(frame, self.core._manifest.model.geometry)
        result = answered(self.core.step(request, step_mode(mode)))
        if self.spoil:
            result.out = bytes(4) + result.out[4:]
        return result

    def step_many(self, frames: Sequence[tuple[FrameInput, FrameMode]]) -> list[FrameResult | CoreError]:
        made: list[FrameResult | CoreError] = []
        for frame, mode in frames:
            try:
                made.append(self.step(frame, mode))
            except CoreError as error:
                made.append(error)
        return made

    def edit_session(self, request: EditRequest) -> EditAnswer:
        return self.core.edit_session(request)

    def fork_session(self, request: ForkRequest) -> SessionHandle:
        handle = self.core.fork_session(request)
        return SessionHandle(handle.session_id, handle.generation)

    def live_manifest(self) -> RuntimeManifest:
        return self.core.live_manifest()

    def tiers(self) -> list[TierReport]:
        return [
            TierReport(one.class_name, one.medium, True, one.capacity_bytes, one.used_bytes)
            for one in self.core.stats().tiers
        ]

    @property
    def used(self) -> int:
        return sum(one.used_bytes for one in self.core.stats().tiers)

    def close(self) -> None:
        self.core.stop()


@dataclass
class Played:
    """A session of the pair beside one of a third engine, fed with the same rows."""

    rig: PairedRig
    handle: SessionHandle
    reference: Driver
    served: bool = False
    compared: bool = False

    def frame(self, layer: int, first: int, last: int) -> FrameInput:
        rows = self.reference.rows
        return FrameInput(
            self.handle.session_id,
            self.handle.generation,
            self.reference.step,
            layer,
            first,
            rows.k[layer, first:last].numpy().tobytes(),
            rows.v[layer, first:last].numpy().tobytes(),
            first,
            rows.q[layer, first:last].numpy().tobytes(),
            0 if self.reference.step == 0 else self.reference.position,
        )

    def mode(self, permitted: bool = True) -> FrameMode:
        if not permitted or not (self.served or self.compared):
            return EXACT
        return FrameMode(self.served, self.compared, self.rig.terms, lambda: True)

    def forward(self, tokens: int = 1, permitted: bool = True) -> list[FrameResult]:
        """One step; asserts that every answer has the bits of one engine alone."""
        mode, first = self.mode(permitted), self.reference.position
        frames = [self.frame(layer, first, first + tokens) for layer in range(LAYERS)]
        results = [self.rig.paired.step(frame, mode) for frame in frames]
        self.check(results, tokens)
        return results

    def check(self, results: Sequence[FrameResult], tokens: int = 1) -> None:
        before = len(self.reference.answers)
        self.reference.forward(tokens, block=tokens)
        expected: list[StepAnswer] = self.reference.answers[before:]
        assert [one.out for one in results] == [one.out.numpy().tobytes() for one in expected]

    def close(self) -> None:
        self.rig.paired.close_session(self.handle.session_id, self.handle.generation)
        self.reference.close()


@dataclass
class PairedRig:
    running: SmallEngine
    beside: SmallEngine
    alone: CacheEngine
    paired: PairedEngine
    terms: GrantTerms
    sessions: list[Played] = field(default_factory=list)

    def open(self, *, serves: bool = False, compared: bool = False, **changes: Any) -> Played:
        candidate = self.terms if serves or compared else None
        fields = {"candidate": candidate, "serves": serves, "compared": compared, **changes}
        handle = self.paired.open_session(SessionTerms("team-a", SCALE, TOKENS, **fields))
        rows = Rows.random(TOKENS, seed=len(self.sessions))
        played = Played(self, handle, Driver.open(self.alone, rows), serves, compared)
        self.sessions.append(played)
        return played

    @property
    def digests(self) -> tuple[str, str]:
        """Of the two engines, whichever is the baseline's now."""
        return self.running.live_manifest().digest(), self.beside.live_manifest().digest()


def ran(results: Sequence[FrameResult]) -> set[tuple[str, bool, str]]:
    """Manifest, whether it was the candidate's answer, and fallback."""
    return {(one.receipt.manifest_digest, one.from_candidate, one.receipt.fallback) for one in results}


def own_terms(baseline: str, candidate: str) -> GrantTerms:
    return GrantTerms(
        fence=FenceToken(2, "rollout", 1, "Canary", 0),
        candidate_digest=candidate,
        baseline_digest=baseline,
        ttl_ms=60_000,
        traffic_fraction=Decimal(1),
        sample_fraction=Decimal(0),
        blast_radius=BlastRadius(),
        selector=None,
        own=True,
    )


@contextmanager
def paired_rig(
    folder: Path, running: Sequence[TierBudget] = ROOMY, beside: Sequence[TierBudget] = TIGHT
) -> Iterator[PairedRig]:
    with ExitStack() as stack:
        made = []
        for name, tiers in (("running", running), ("beside", beside), ("alone", ROOMY)):
            (folder / name).mkdir(parents=True)
            names = partial("{}-{}".format, name)
            made.append(
                stack.enter_context(engine(folder / name, tiers, files=Unsynced(), session_name=names))
            )
        # An engine that lived longer has given more numbers away.
        Driver.open(made[1], Rows.random(1)).close()
        one, other = SmallEngine(made[0]), SmallEngine(made[1])
        digests = manifest(running).digest(), manifest(beside).digest()
        paired = PairedEngine(one)  # type: ignore[arg-type]
        paired.attach(other, digests[1], "second")  # type: ignore[arg-type]
        yield PairedRig(one, other, made[2], paired, own_terms(*digests))
