"""What the process tells and asks the evidence windows, without knowing how counts are kept.

Kept apart so that servicers are tested without statistics. It knows no wire message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvtier_core.release.enforcement import ServedArm
from kvtier_evidence.window import WindowKey


@dataclass(frozen=True)
class GateTerms:
    """A gate's metric and limit in this stage; `quantile` in percent, 0 where it has no meaning."""

    name: str
    metric: str
    quantile: float
    limit: str


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
    stall_seconds: float = 0.0

    def with_stall(self, seconds: float) -> Outcome:
        return replace(self, stall_seconds=seconds)

    @property
    def decode_seconds(self) -> float:
        """Wall time from the first to the last token."""
        return self.last_token_seconds - self.first_token_seconds

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds; None when fewer than two tokens were made (the request leaves both arms)."""
        return None if self.output_tokens < 2 else self.decode_seconds / (self.output_tokens - 1)

    @property
    def exposed_stall_fraction(self) -> float | None:
        """Exposed transfer stall over decode wall time, in [0, 1]; None without a decode."""
        if self.output_tokens < 2 or self.decode_seconds <= 0:
            return None
        return min(1.0, max(0.0, self.stall_seconds / self.decode_seconds))


class EvidencePort(Protocol):
    """The windows of one cache. Every call is cheap and made on the event loop."""

    def open(self, window: WindowKey, gates: Sequence[GateTerms], settle_ms: int, warmup_ms: int) -> None:
        """Starts counting in a window, or goes on in it; the previous one stays readable."""

    def assigned(self, window: WindowKey, unit: str, arm: ServedArm, sampled: bool) -> None: ...

    def step_error(self, window: WindowKey, unit: str, error: float) -> None: ...

    def outcome(self, window: WindowKey, unit: str, outcome: Outcome) -> None: ...

    def probe(self, window: WindowKey, result: ProbeResult) -> None: ...

    def zero_tolerance(self, window: WindowKey, counter: str) -> None: ...

    def read(self, window: WindowKey, epoch: str, ack_seq: int) -> Any:
        """The reply for a reader at (epoch, ack_seq); raises WINDOW_UNKNOWN."""
