"""What the process tells and asks the evidence windows, without knowing how counts are kept.

Kept apart so that servicers are tested without statistics. It knows no wire message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier_evidence.delta import Delta
from kvtier_evidence.window import WindowKey


@dataclass(frozen=True)
class GateTerms:
    """A gate's metric and limit in this stage; `quantile` in percent, 0 where it has no meaning.
    `pair_threshold`: the baseline's quantile in an earlier window, in the metric's unit; empty: not known."""

    name: str
    metric: str
    quantile: float
    limit: str
    pair_threshold: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """One probe prompt answered by both arms: score(exact) - score(candidate), in [-1, 1]."""

    gate: str
    probe_set_digest: str
    prompt_digest: str
    difference: float
    missing: bool


@dataclass(frozen=True)
class Outcome:
    """What the engine's process saw of a request; seconds since the request was assigned."""

    output_tokens: int
    first_token_seconds: float
    last_token_seconds: float
    cancelled: bool
    probe: ProbeResult | None = None


class Progress(NamedTuple):
    """Forward passes answered so far, each of which makes one token; seconds since the session was opened."""

    tokens: int
    first_token_seconds: float
    last_token_seconds: float


@dataclass(frozen=True)
class WindowTerms:
    """What a grant says about the evidence of its window; `fraction` is the candidate's share of sessions."""

    key: WindowKey
    gates: Sequence[GateTerms]
    fraction: float
    settle_ms: int
    warmup_ms: int


class FrameEvidence(Protocol):
    """What attention frames tell."""

    def step_error(self, key: WindowKey, unit: str, step: int, error: float) -> None:
        """NaN is a step without a value."""

    def progress(self, key: WindowKey, unit: str, progress: Progress) -> None:
        """What the agent itself sees of a running request: its value if it is still running at settle."""

    def stall(self, key: WindowKey, unit: str, seconds: float) -> None:
        """Adds exposed transfer stall of a decode step."""

    def zero_tolerance(self, key: WindowKey, counter: str) -> None: ...


class EvidencePort(FrameEvidence, Protocol):
    """The windows of one cache. Every call is cheap and made on the event loop."""

    def check(self, terms: WindowTerms) -> None:
        """Whether such a window can be opened, and nothing else. Raises BAD_ARGUMENT naming the gate that
        cannot be collected."""

    def open(self, terms: WindowTerms) -> None:
        """Starts counting in a window, or goes on in it; the previous one stays readable, an earlier one
        goes. Raises as `check`, before anything changed."""

    def assigned(
        self, key: WindowKey, unit: str, *, tenant: str, session_root_id: str, candidate: bool, compared: bool
    ) -> None: ...

    def outcome(self, key: WindowKey, unit: str, outcome: Outcome) -> str:
        """Returns why it was not counted, or an empty text."""

    def ended(self, key: WindowKey, unit: str) -> None:
        """The session ended and nobody will report an outcome."""

    def probe(self, key: WindowKey, result: ProbeResult) -> str:
        """Returns why it was not counted, or an empty text."""

    def read(self, key: WindowKey, epoch: str, ack_seq: int) -> Delta:
        """The reply for a reader at (epoch, ack_seq); raises WINDOW_UNKNOWN."""
