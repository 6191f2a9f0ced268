"""What the frames of one cache carry for its sessions' selectors, taken from the model's passes.

It exists between a model that speaks of batches and sessions that are one sequence each: a surprisal belongs
to a token, and the one of a pass's first token follows from the pass before. It must not know wires.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_client.hfevidence import ModelEvidence, loss_of
from kvtier_client.rowevidence import MAX_SURPRISALS, LayerGiven, RowEvidence
from kvtier_core.rowevidence import Need


class Asking(Protocol):
    """A session, as far as evidence needs it."""

    asked: frozenset[Need]
    asked_layers: frozenset[int]

    @property
    def block_bytes(self) -> int:
        """What one message of it may have."""

    def give_weights(self, layers: Sequence[LayerGiven]) -> int: ...


class _Tokens:
    """The surprisals of one sequence. `known`: of its first rows, float64; the first has none, so that it
    counts as 0. A token whose pass was not seen ends it: what follows is never known."""

    def __init__(self) -> None:
        self.known: NDArray[np.float64] = np.empty(0)
        self.sent = 0
        self.ended = False
        self._ids: Tensor | None = None
        self._states: Tensor | None = None
        self._logits: Tensor | None = None

    def begin(self, source: ModelEvidence, ids: Tensor | None, rows: int) -> None:
        """Tokens int64 [n] of rows [rows, rows + n), whose pass begins."""
        self.settle(source)
        if ids is None or self.ended or rows != len(self.known):
            self.ended = True
            return
        if not rows:
            first = np.zeros(1)
        elif self._logits is not None:
            first = loss_of(self._logits[None], ids[:1])
        elif self._states is not None:
            first = source.losses(self._states[-1:], ids[:1])
        else:
            self.ended = True
            return
        self.known = np.concatenate([self.known, first])
        self._ids, self._states, self._logits = ids, None, None

    def states(self, states: Tensor) -> None:
        """[n, d_model], behind the last layer."""
        self._states = states

    def logits(self, logits: Tensor) -> None:
        """[k, vocabulary] of the last positions of the pass."""
        if not self.ended:
            self._logits = logits[-1].clone()

    def settle(self, source: ModelEvidence) -> None:
        """The surprisals of a pass that is over, but for the one of the token that follows it."""
        ids, states = self._ids, self._states
        if ids is None or states is None or self.ended:
            return
        if len(states) != len(ids):
            self.ended = True
            return
        if len(ids) > 1:
            self.known = np.concatenate([self.known, source.losses(states[:-1], ids[1:])])
        # The whole pass is not kept, only what the next token follows from.
        self._ids, self._states = None, states[-1:].clone()

    def pending(self, most: int) -> RowEvidence | None:
        """What the agent has not got yet, at most so many numbers."""
        part = self.known[self.sent : self.sent + most]
        if not len(part):
            return None
        made = RowEvidence(surprisal=part, surprisal_first=self.sent)
        self.sent += len(part)
        return made

    def cut(self, rows: int) -> None:
        """Rows [rows, ...) are gone."""
        self.ended = self.ended or rows > len(self.known) or rows > 0
        self.known = self.known[:rows]
        self.sent = min(self.sent, rows)
        self._ids = self._states = self._logits = None

    def fork(self) -> _Tokens:
        other = _Tokens()
        other.known, other.sent, other.ended = self.known, self.sent, self.ended
        other._ids, other._states, other._logits = self._ids, self._states, self._logits
        return other


class CacheEvidence:
    """Of the sessions of one cache, in the order of the batch. It watches the model's passes only if one of
    them asks for what passes tell."""

    def __init__(self, source: ModelEvidence, sessions: Sequence[Asking]) -> None:
        self._source = source
        self._sessions = list(sessions)
        self._tokens = [_Tokens() for _ in sessions]
        self._ids: Tensor | None = None
        # Padding at the left of the pass that runs.
        self._skips = [0] * len(self._sessions)
        self.needs = frozenset().union(*(session.asked for session in sessions))

    def start(self, watcher: object, fingerprint: str) -> None:
        """Gives weights where they are asked for, and watches for `watcher`, the object that passes get."""
        for session in self._sessions:
            if Need.WEIGHTS in session.asked:
                layers = sorted(session.asked_layers)
                session.give_weights(self._source.layers_given(fingerprint, layers))
        self.watch(watcher)

    def watch(self, watcher: object) -> None:
        self._source.watch(watcher, self, self.needs)

    def stop(self, watcher: object) -> None:
        """Idempotent."""
        self._source.unwatch(watcher)

    # --- passes ----------------------------------------------------------------------------------------

    def pass_begins(self, ids: Tensor | None) -> None:
        self._ids = ids

    def pass_ends(self, states: Tensor) -> None:
        for index, tokens in enumerate(self._tokens):
            tokens.states(states[index, self._skips[index] :])

    def pass_logits(self, logits: Tensor) -> None:
        for index, tokens in enumerate(self._tokens):
            tokens.logits(logits[index])

    def of(self, index: int, layer: int, rows: int, skip: int, queries: int) -> RowEvidence | None:
        """What goes with a frame of sequence `index`: `queries` of a layer, behind `rows` rows; skip: padding
        before them in this pass. None: nothing is asked for here."""
        session = self._sessions[index]
        late = None
        if Need.SURPRISAL in session.asked:
            tokens = self._tokens[index]
            if layer == 0:
                self._skips[index] = skip
                ids = None if self._ids is None else self._ids[index, skip:]
                tokens.begin(self._source, ids, rows)
            # Half a message: a frame's rows and queries have the other. What is left goes with other layers.
            late = tokens.pending(min(MAX_SURPRISALS, max(1, session.block_bytes // 16)))
        # Of a prefill no state is asked for: nothing is selected there.
        if queries != 1 or Need.PREVIOUS_HIDDEN_STATE not in session.asked:
            return late
        before = self._source.input_of(layer - 1) if layer in session.asked_layers else None
        if before is None:
            return late
        hidden = before[index, skip:].to(torch.float32)
        if late is None:
            return RowEvidence(hidden=hidden, hidden_layer=layer - 1)
        return RowEvidence(hidden, layer - 1, late.surprisal, late.surprisal_first)

    def stand_at(self, lengths: Sequence[int]) -> None:
        """After an edit: rows of each sequence."""
        for tokens, rows in zip(self._tokens, lengths, strict=True):
            tokens.cut(rows)

    def fork(self, session: Asking) -> CacheEvidence:
        """Of a cache of the same rows; of a batch of one."""
        other = CacheEvidence(self._source, [session])
        other._tokens = [self._tokens[0].fork()]
        return other
