"""Reading a growing window so that each unit counts once, whatever the network does.

The agent keeps three versions: current, last sent, last acknowledged. Knows counts and sequence numbers;
no transport, no reader's name.

Section 3.3 of the evidence specification.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_evidence.window import WindowCounts


@dataclass(frozen=True, slots=True)
class Delta:
    """One reply. `increments` lead from version `from_seq` to `to_seq` of one life (`epoch`) of an agent."""

    epoch: str
    from_seq: int
    to_seq: int
    full: bool
    increments: WindowCounts
    total_units: int
    """`WindowCounts.total()` of this life at `to_seq`."""
    settled_cohort: int
    """All cohorts below this one are published."""
    assigned_units: int
    """Units assigned in this life, settled or not."""


class DeltaLog:
    """The three versions of one window. `current` is the live object; its owner calls `changed`."""

    def __init__(self, epoch: str, current: WindowCounts) -> None:
        self._epoch = epoch
        self._current = current
        self._seq = 0
        self._sent, self._sent_seq = WindowCounts(), 0
        self._acked, self._acked_seq = WindowCounts(), 0

    @property
    def seq(self) -> int:
        return self._seq

    def changed(self) -> None:
        """A count of the current version moved."""
        self._seq += 1

    def read(self, epoch: str, ack_seq: int, *, settled_cohort: int, assigned_units: int) -> Delta:
        """Increments since `ack_seq` when that is the last sent or acknowledged version; else all, full.

        A version is named by its number within one life, so it does not matter who acknowledged it.
        """
        mine = epoch == self._epoch
        if mine and ack_seq == self._sent_seq:
            self._acked, self._acked_seq = self._sent, self._sent_seq
        full = not mine or ack_seq != self._acked_seq
        if self._sent_seq != self._seq:
            self._sent, self._sent_seq = self._current.copy(), self._seq
        reference = WindowCounts() if full else self._acked
        return Delta(
            epoch=self._epoch,
            from_seq=0 if full else ack_seq,
            to_seq=self._seq,
            full=full,
            increments=self._sent.since(reference),
            total_units=self._sent.total(),
            settled_cohort=settled_cohort,
            assigned_units=assigned_units,
        )
