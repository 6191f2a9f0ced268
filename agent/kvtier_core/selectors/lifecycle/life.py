"""One layer's index of one session, from its first rows to its end: what is there, what is due, what not.

Why it exists: a build takes longer than a step, so that rows come, queries ask and sessions end while it
runs. Here is the whole state that this needs, without a thread or a lock: whoever uses it holds one. A
finished index is published by one assignment of an immutable handle, or not at all. It must not know queues,
budgets or how long anything takes.

A family that learns from the prompt (codebooks, clusters, a graph) is built over all rows before the first
decode step that could leave rows out, however they were cut into frames and steps: it is built when a step's
rows are complete, and again if more came before such a step. Any other family is built from its first rows
on. Later rows are appended by whole blocks; those behind the last block are read by every query until their
turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import Evidence, LayerWeights, Need, joined
from kvtier_core.selectors.contract import Edit, Family, Index, NeedsRebuild, Source
from kvtier_core.selectors.lifecycle.memory import buffers, row_bytes


class Kind(StrEnum):
    BUILD = "build"
    APPEND = "append"


class Stage(StrEnum):
    """READY: an index is published (rows behind it may wait). BUILDING: none is, yet."""

    BUILDING = "building"
    READY = "ready"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Block:
    """Rows k, v [n, Hk, d] at [first, first + n) and what the engine gave with them."""

    first: int
    k: Tensor
    v: Tensor
    evidence: Evidence

    @property
    def last(self) -> int:
        return self.first + int(self.k.shape[0])

    @property
    def size(self) -> int:
        return row_bytes(self.k, self.v, self.evidence)

    def cut(self, first: int, last: int) -> Block:
        """Its rows inside [first, last), views of the same memory."""
        low, high = max(first, self.first) - self.first, min(last, self.last) - self.first
        if (low, high) == (0, self.last - self.first):
            return self
        return Block(self.first + low, self.k[low:high], self.v[low:high], self.evidence.cut(low, high))


@dataclass(frozen=True, slots=True)
class Published:
    """An index that queries may read, immutable. buffers: bytes of its arrays, by buffer."""

    index: Index
    buffers: Mapping[int, int]

    @property
    def epoch(self) -> int:
        return self.index.facts.epoch

    @property
    def covered(self) -> int:
        return self.index.facts.covered


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Rows [first, last) to build from, or to append to `base`."""

    life: LayerLife
    kind: Kind
    first: int
    last: int
    blocks: tuple[Block, ...]
    base: Published | None

    def run(self) -> Index:
        """The index over rows [0, last). What the family refuses."""
        with torch.inference_mode():
            return self._run()

    def _run(self) -> Index:
        family = self.life.family
        inside = [one for one in self.blocks if one.first < self.last and one.last > self.first]
        rows = [block.cut(self.first, self.last) for block in inside]
        k, v = torch.cat([one.k for one in rows]), torch.cat([one.v for one in rows])
        evidence = replace(joined([one.evidence for one in rows]), weights=self.life.weights)
        if self.base is None:
            return family.build(self.life.source, k, v, evidence)
        return family.append(self.base.index, k, v, evidence)


@dataclass(slots=True, eq=False)
class LayerLife:
    """block: rows of one append. arrived: rows that came. prompt: of them, those that a learning family is
    built over; final once `decoding`. learnt: rows that the published index was built over. waiting_bytes: of
    all blocks in `waiting`. retired: former indexes that a query still reads, by the count of `leases` of
    their epoch. wanted_at: since when queries ask for more than is published; None: they do not."""

    family: Family
    source: Source
    block: int
    arrived: int = 0
    prompt: int = 0
    learnt: int = 0
    decoding: bool = False
    weights: LayerWeights | None = None
    waiting: deque[Block] = field(default_factory=deque)
    waiting_bytes: int = 0
    published: Published | None = None
    running: Job | None = None
    refused: CoreError | None = None
    closed: bool = False
    failures: int = 0
    retired: list[Published] = field(default_factory=list)
    leases: dict[int, int] = field(default_factory=dict)
    wanted_at: float | None = None

    @property
    def covered(self) -> int:
        return 0 if self.published is None else self.published.covered

    @property
    def stage(self) -> Stage:
        if self.refused is not None:
            return Stage.REFUSED
        return Stage.BUILDING if self.published is None else Stage.READY

    @property
    def ended(self) -> bool:
        """Nothing is built any more."""
        return self.closed or self.refused is not None

    @property
    def _learns(self) -> bool:
        """Whether an index over all of the prompt is still to be built."""
        return not self.family.facts.incremental and (not self.decoding or self.prompt > self.learnt)

    # What happens to it.

    def arrive(self, block: Block) -> None:
        """SUPPORT_GAP unless the rows follow those that came."""
        if block.first != self.arrived:
            raise CoreError(
                Reason.SUPPORT_GAP,
                f"the index has rows [0, {self.arrived}), these start at {block.first}",
                {"covered": self.arrived, "first": block.first},
            )
        self.arrived = block.last
        if not self.ended and (self._learns or self.family.facts.appendable):
            self.waiting.append(block)
            self.waiting_bytes += block.size

    def forked(self, digest: bytes) -> LayerLife:
        """Of a session of the same rows under another source: it has learnt what this one has, and goes on by
        itself. Indexes and rows are shared, since neither ever changes."""
        source = replace(self.source, digest=digest)
        made = LayerLife(
            self.family,
            source,
            self.block,
            arrived=self.arrived,
            prompt=self.prompt,
            learnt=self.learnt,
            decoding=self.decoding,
            weights=self.weights,
            waiting=deque(self.waiting),
            waiting_bytes=self.waiting_bytes,
            refused=self.refused,
        )
        if self.published is not None:
            index = self.published.index
            own: Index = replace(index, facts=replace(index.facts, source=source))  # type: ignore[type-var]
            made.published = Published(own, self.published.buffers)
        return made

    def truncated(self, digest: bytes, rows: int) -> LayerLife | None:
        """As `forked`, of the first `rows` rows; None where what was learnt is of rows that are gone, or rows
        that were let go would have to be learnt anew."""
        made = self.forked(digest)
        if rows < self.learnt and not self.family.facts.incremental:
            return None
        made.arrived = min(self.arrived, rows)
        made.waiting = deque(one.cut(one.first, rows) for one in self.waiting if one.first < rows)
        made.waiting_bytes = sum(one.size for one in made.waiting)
        if rows < self.prompt:
            made.prompt, made.decoding = rows, False
        if not rows:
            made.published, made.learnt = None, 0
        if made.published is not None and made.covered > rows:
            edit = Edit(rows, made.source.position_epoch, truncated=True)
            cut = self.family.edit(made.published.index, edit)
            if isinstance(cut, NeedsRebuild) or cut.facts.covered != rows:
                return None
            made.published = Published(cut, buffers(cut))
        return made

    def end_rows(self) -> None:
        """All rows of a step are here."""
        if not self.decoding and self.family.omits(self.arrived + 1):
            self.prompt = self.arrived

    def decode(self) -> None:
        """A decode step asks: what came until now is the prompt."""
        if not self.decoding:
            self.prompt = self.arrived
            self.decoding = True
            # All of it may have been learnt already, and then nothing is published that would let go of it.
            self.trim()

    def refuse(self, error: CoreError) -> None:
        """For good. What runs is in vain."""
        if self.refused is None:
            self.refused = error
        self._let_go()

    def close(self) -> None:
        self.closed = True
        self._let_go()

    def _let_go(self) -> None:
        self.waiting.clear()
        self.waiting_bytes = 0
        self.running = None
        if self.published is not None:
            former, self.published = self.published, None
            self._retire(former)

    # Building.

    def due(self) -> Kind | None:
        """What can be done now; None: nothing, or something is being done."""
        facts = self.family.facts
        if self.ended or self.running is not None or not self.arrived:
            return None
        if Need.WEIGHTS in facts.needs and self.weights is None:
            return None
        if self._learns:
            return Kind.BUILD if self.prompt > self.learnt else None
        if self._whole <= self.covered:
            return None
        if self.published is None:
            return Kind.BUILD
        return Kind.APPEND if facts.appendable else None

    @property
    def _whole(self) -> int:
        """Rows of whole blocks: however rows are cut into frames, an index ends where a block does."""
        return self.arrived // self.block * self.block

    def start(self) -> Job:
        """Begins what is due, of rows that stay here until they are published."""
        kind = self.due()
        assert kind is not None
        if kind is Kind.BUILD:
            last = self.prompt if self._learns else self._whole
            self.running = Job(self, kind, 0, last, tuple(self.waiting), None)
        else:
            self.running = Job(self, kind, self.covered, self._whole, tuple(self.waiting), self.published)
        return self.running

    def checked(self, job: Job, index: Index) -> Index:
        """The index under an epoch that nobody has seen. COVERAGE_GAP, IDENTITY_MISMATCH or SELECTOR_STALE:
        it is not what the job was to make; INDEX_STALE: its epoch is none after the published one."""
        facts = index.facts
        if facts.covered != job.last:
            raise CoreError(
                Reason.COVERAGE_GAP, f"an index of rows [0, {facts.covered}), not [0, {job.last})"
            )
        if facts.source != self.source:
            raise CoreError(Reason.IDENTITY_MISMATCH, "an index of other rows than it was built from")
        if facts.selector_digest != self.family.digest:
            raise CoreError(Reason.SELECTOR_STALE, "an index of another selector than its builder")
        before = 0 if self.published is None else self.published.epoch
        if facts.epoch > before:
            return index
        if job.kind is Kind.APPEND:
            raise CoreError(Reason.INDEX_STALE, f"an append made epoch {facts.epoch} after {before}")
        # A second build begins to count anew, and no two indexes of a layer may share an epoch.
        again: Index = replace(index, facts=replace(facts, epoch=before + 1))  # type: ignore[type-var]
        return again

    def publish(self, job: Job, made: Published) -> None:
        """One assignment makes the index visible; what nobody reads any more is let go."""
        former, self.published = self.published, made
        self.running = None
        self.failures = 0
        if job.kind is Kind.BUILD:
            self.learnt = job.last
        if former is not None:
            self._retire(former)
        self.trim()

    def trim(self) -> None:
        """Lets go of rows that no build needs any more."""
        if self._learns:
            return
        done = self.covered if self.family.facts.appendable else self.arrived
        while self.waiting and self.waiting[0].last <= done:
            self.waiting_bytes -= self.waiting.popleft().size

    def failed(self, job: Job) -> None:
        """The job ended without an index. What is published and what waits is as it was."""
        if self.running is job:
            self.running = None
            self.failures += 1

    # Reading.

    def lease(self) -> Published:
        """The published index, kept until `release`. DEPENDENCY_UNPUBLISHED, or why there is none."""
        if self.refused is not None:
            # A new one: who raises it adds its traceback.
            raise CoreError(self.refused.reason, self.refused.message, self.refused.facts)
        if self.published is None:
            raise CoreError(
                Reason.DEPENDENCY_UNPUBLISHED, f"no index of layer {self.source.layer} is published yet"
            )
        epoch = self.published.epoch
        self.leases[epoch] = self.leases.get(epoch, 0) + 1
        return self.published

    def release(self, held: Published) -> None:
        """Ends one lease of it."""
        left = self.leases[held.epoch] - 1
        if left:
            self.leases[held.epoch] = left
            return
        del self.leases[held.epoch]
        self.retired = [one for one in self.retired if one is not held]

    def _retire(self, former: Published) -> None:
        if self.leases.get(former.epoch):
            self.retired.append(former)

    def uncovered(self, most: int | None = None) -> Tensor | None:
        """A copy of the keys [n, Hk, d] of the rows behind the published index; None without one, when they
        are gone, or when there are more than `most`."""
        covered = self.covered
        if most is not None and self.arrived - covered > most:
            return None
        rows = [block.cut(covered, self.arrived) for block in self.waiting if block.last > covered]
        if self.published is None or not rows or rows[0].first != self.covered:
            return None
        return torch.cat([one.k for one in rows])

    @property
    def held(self) -> dict[int, int]:
        """Bytes by buffer of all indexes that somebody may read."""
        found: dict[int, int] = {}
        for one in (*self.retired, *(() if self.published is None else (self.published,))):
            found.update(one.buffers)
        return found
