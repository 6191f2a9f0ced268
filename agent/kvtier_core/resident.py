"""The short way of a decode frame whose chunks are attended in place or near storage: one query, one new row.

Why it exists: a token costs one such frame for each layer, and the general way (step) spends more time on
planning and book-keeping than on a thousand rows. What stays the same from frame to frame is kept here, under
a stamp of where the chunks lie. It decides nothing: a frame that is unusual in any way, or wrong, is `None`
here and the general way's, with its refusals; so is one whose plan storage fails, with what was tried. It
must not know selectors, candidates or how blocks are brought.

The promises are step's: the row is written beyond the frontier, the answer's receipt is checked before
anything is taken, and what commits cannot fail. The bits are those of one state per chunk, merged ascending.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvtier_core.appends import NO_LINE, Append, LayerState, Session
from kvtier_core.errors import CoreError, Reason
from kvtier_core.folding import Query
from kvtier_core.identity import full_support_digest
from kvtier_core.placements.preference import PlanKind
from kvtier_core.placementstamp import PlacementStamp
from kvtier_core.planner import Path
from kvtier_core.receiptcheck.step import check_step
from kvtier_core.receipts import ExactnessClass, PublishArm, StepAnswer, StepReceipt, StepRequest
from kvtier_core.selectors.base import SelectorFamily
from kvtier_core.sessions import RowStore
from kvtier_core.sharedreads import Place, Sequenced, readings_of
from kvtier_core.stepplans import StepPlans, Tried
from kvtier_core.streamedframe import Asked, Streamed, StreamedLayer
from kvtier_kernels.compiled import library
from kvtier_kernels.ops.chunk_attention.decode import Reading, attend_into, no_rows, reads_in_place
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom, KeptBatch, KeptDecode, OpenRows
from kvtier_kernels.ops.chunk_attention.outputs import outputs
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun, chunk_runs
from kvtier_kernels.state import LogitFrame

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library

_GROUP = 64
"""States that are formed between two looks at the clock."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class ResidentLayer:
    """What frames of one layer have in common. runs: its full chunks; places: where each of them is. payload:
    of the open chunk [2, Hk, C, d]. whole_bytes: payload bytes of the full chunks by tier. clean: the
    frontier from which the open chunk's rows are known to be zero, -1 for not known. decode: what answers a
    frame alone, where kernels are compiled and one look at the clock is enough. together: what answers it
    with others, the first of which it is. resident: every chunk is attended in place. streamed: what answers
    it alone where some come from storage. With neither, all of this is empty."""

    stamp: PlacementStamp
    resident: bool
    places: tuple[Place, ...]
    runs: tuple[ChunkRun, ...]
    open_run: ChunkRun | None
    payload: Tensor | None
    open_tier: str
    whole_bytes: dict[str, int]
    labels: tuple[str, ...]
    simulated: bool
    plan_kind: PlanKind
    clean: int = -1
    decode: KeptDecode | None = None
    streamed: StreamedLayer | None = None
    write: Callable[[Tensor, Tensor, int], None] | None = None
    together: _Together | None = None


@dataclass(slots=True)
class _Together:
    """Of frames of these layers, in this order. It keeps none of them, nor their chunks."""

    layers: tuple[weakref.ref[ResidentLayer], ...]
    batch: KeptBatch

    def of(self, frames: Sequence[ResidentFrame]) -> bool:
        layers = self.layers
        return len(frames) == len(layers) and all(
            layer() is frame.layer for layer, frame in zip(layers, frames, strict=True)
        )


@dataclass(slots=True)
class ResidentFrame:
    """One frame on the short way, its row written beyond the frontier."""

    session: Session
    state: LayerState
    request: StepRequest
    layer: ResidentLayer
    visible: int


class Kept(Protocol):
    """What is kept of a session. family: whose frames, of layers without an index too, bring what selections
    wait for; None: they are rows and nothing else."""

    session: Session
    family: SelectorFamily | None
    resident: list[ResidentLayer | None]


class ResidentDecode:
    """Runs such frames of one engine; the engine's lock is held and inference mode on."""

    def __init__(
        self,
        store: RowStore,
        clock: Callable[[], float],
        query_heads: int,
        baseline_digest: str,
        digest_of: Callable[[int], str],
        plans: StepPlans,
    ) -> None:
        self._store = store
        self._plans = plans
        self._clock = clock
        self._baseline = baseline_digest
        self._digest_of = digest_of
        layout = store.layout
        self._size, self._row_bytes = layout.chunk_tokens, layout.row_bytes
        self._row = (1, layout.kv_heads, layout.head_dim)
        self._query = (1, query_heads, layout.head_dim)
        self._able = reads_in_place(layout.chunk_tokens, layout.head_dim)
        self._shape = query_heads, layout.kv_heads, layout.head_dim, layout.chunk_tokens
        self._room = DecodeRoom(*self._shape)
        # By how many frames they have room for, powers of two.
        self._rooms: dict[int, DecodeRoom] = {}
        self._rows_of = store.directory.cells("rows")
        self._producer_of = store.directory.cells("producer")

    def rename(self, baseline_digest: str) -> None:
        """Receipts are in the name of this baseline from now on."""
        self._baseline = baseline_digest

    def prepare(self, context: Kept, request: StepRequest) -> ResidentFrame | None:
        """Writes the frame's row where nobody looks, if the frame is of the common kind; else None, and
        nothing has happened. NO_LEGAL_PATH, NOT_VISIBLE."""
        session, layers = context.session, context.resident
        if not self._able or context.family is not None or not self._common(session, request):
            return None
        state = session.layers[request.layer]
        kept = layers[request.layer]
        if kept is None or not kept.stamp.holds(state.lines):
            kept = layers[request.layer] = self._keep(session, request, state)
        payload = kept.payload
        if payload is None or not self._in_time(kept, request):
            return None
        at = state.frontier % self._size
        if kept.clean != state.frontier:
            # Of a frame that failed, or rows that were cut off: a weight of 0 hides a finite row only.
            payload[:, :, at:].zero_()
        kept.clean = -1
        if kept.write is not None:
            kept.write(request.k, request.v, at)
        else:
            payload[0, :, at].copy_(request.k[0])
            payload[1, :, at].copy_(request.v[0])
        return ResidentFrame(session, state, request, kept, state.frontier + 1)

    def _common(self, session: Session, request: StepRequest) -> bool:
        """Whether a frame is one new row and its query, in turn, in an open chunk that it does not fill, of
        an exact history, and well-formed."""
        layer, step, layers = request.layer, request.step, session.layers
        last = len(layers) - 1
        if not 0 <= layer <= last:
            return False
        state = layers[layer]
        frontier = state.frontier
        following = step == session.step and layer == session.layer + 1
        following = following or (step == session.step + 1 and layer == 0 and session.layer == last)
        return (
            following
            and request.first_row_position == frontier == request.first_query_position
            and state.open_line != NO_LINE
            and (frontier + 1) % self._size != 0
            and (not layer or frontier < layers[0].frontier)
            and layers[session.layer].frontier == layers[0].frontier
            and session.committed <= request.committed_frontier <= frontier + 1
            and (not session.spec.max_tokens or frontier < session.spec.max_tokens)
            and session.step >= 0
            and len(session.producers) == 1
            and not session.positions.edited
            and request.position_epoch in (0, session.position_epoch)
            and self._plain(request)
        )

    def _plain(self, request: StepRequest) -> bool:
        k, v, q = request.k, request.v, request.q
        return (
            k.shape == self._row == v.shape
            and q.shape == self._query
            and k.dtype == v.dtype == q.dtype == torch.float32
            and k.is_cpu
            and v.is_cpu
            and q.is_cpu
        )

    def _in_time(self, kept: ResidentLayer, request: StepRequest) -> bool:
        """Whether a plan that reads storage may be begun; what is to be done instead others decide."""
        streamed, deadline = kept.streamed, request.deadline
        if streamed is None or streamed.seconds is None or deadline is None:
            return True
        return 0.0 < deadline - self._clock() >= streamed.seconds

    def _keep(self, session: Session, request: StepRequest, state: LayerState) -> ResidentLayer:
        """Plans the layer as any frame is planned, and keeps what comes of it. NO_LEGAL_PATH, NOT_VISIBLE."""
        store = self._store
        append = Append(session, request.layer, state.frontier, request.k, request.v)
        plan = self._plans.of_decode(append, state.frontier + 1)
        stamp = PlacementStamp(store.directory, state.lines)
        reads = plan.reads
        streamed = None
        if any(read.path is not Path.PARTIAL for read in reads):
            streamed = self._plans.streamed.keep(plan, session, session.spec.score_scale)
        resident = all(read.path is Path.PARTIAL for read in reads)
        if reads[-1].line != state.open_line or not (resident or streamed is not None):
            return ResidentLayer(stamp, False, (), (), None, None, "", {}, (), False, plan.kind)
        here = reads if resident else reads[-1:]
        places = [Place(store.tiers[read.tier], store.ref(read.line)) for read in here]
        payloads = [place.memory.view(place.slot) for place in places]
        keys, values = [payload[0] for payload in payloads], [payload[1] for payload in payloads]
        whole: dict[str, int] = {}
        for read in reads[:-1]:
            name = store.tiers[read.tier].name
            whole[name] = whole.get(name, 0) + self._size * self._row_bytes
        runs = tuple(chunk_runs(keys[:-1], values[:-1], _GROUP))
        open_run = chunk_runs(keys[-1:], values[-1:])[0]
        compiled, decode = library(), None
        if compiled is not None and resident and len(reads) <= _GROUP:
            decode = KeptDecode(compiled, self._room, runs, open_run, session.spec.score_scale)
        return ResidentLayer(
            stamp=stamp,
            resident=resident,
            places=tuple(places[:-1]),
            runs=runs,
            open_run=open_run,
            payload=payloads[-1],
            open_tier=store.tiers[reads[-1].tier].name,
            whole_bytes=whole,
            labels=plan.labels,
            simulated=plan.simulated,
            plan_kind=plan.kind,
            decode=decode,
            streamed=streamed,
            write=None if compiled is None else OpenRows(open_run).write,
        )

    def stream(self, frame: ResidentFrame, follow: Callable[[], object]) -> StepAnswer | Tried:
        """Attends a frame some of whose chunks come from storage, and takes the row, or neither. follow,
        Tried and what is raised: as `StepPlans.streamed_exact`."""
        found = self._plans.streamed_exact(_asked(frame, follow))
        return found if isinstance(found, Tried) else self.publish(frame, found.out, found)

    def stream_all(
        self, frames: Sequence[tuple[ResidentFrame, Callable[[], object]]]
    ) -> list[StepAnswer | Tried | CoreError]:
        """As `stream`, of frames of different sessions; a refused one harms no other. Blocks that several of
        them want are read once."""
        answers: list[StepAnswer | Tried | CoreError] = []
        all_found = self._plans.streamed_together([_asked(*one) for one in frames])
        for (frame, _), found in zip(frames, all_found, strict=True):
            try:
                done = self.publish(frame, found.out, found) if isinstance(found, Streamed) else found
                answers.append(done)
            except CoreError as error:
                answers.append(error)
        return answers

    def answer(self, frame: ResidentFrame) -> StepAnswer:
        """Attends and takes the row, or neither. DEADLINE."""
        decode = frame.layer.decode
        if decode is not None:
            if self._is_late(frame):
                raise self._lateness(frame)
            return self.publish(frame, decode.output(frame.request.q, (frame.visible - 1) % self._size + 1))
        answer = self.answer_all([frame])[0]
        if isinstance(answer, CoreError):
            raise answer
        return answer

    def answer_all(self, frames: Sequence[ResidentFrame]) -> list[StepAnswer | CoreError]:
        """Of frames of different sessions; a refused one harms no other."""
        answers: list[StepAnswer | CoreError] = []
        for frame, out in zip(frames, self.attend(frames), strict=True):
            try:
                answers.append(out if isinstance(out, CoreError) else self.publish(frame, out))
            except CoreError as error:
                answers.append(error)
        return answers

    def attend(self, frames: Sequence[ResidentFrame]) -> list[Tensor | CoreError]:
        """The answers [1, Hq, d] of frames of different sessions, or each frame's DEADLINE, looked at between
        groups of chunks. Chunks that several of them share are read once."""
        late: dict[int, CoreError] = {}

        def all_late() -> bool:
            for index, frame in enumerate(frames):
                if index not in late and self._is_late(frame):
                    late[index] = self._lateness(frame)
            return len(late) == len(frames)

        out = None
        if not all_late():
            compiled = library()
            if compiled is None or len(frames) == 1:
                out = self._attended(frames, all_late)
            else:
                batch = self._batch(compiled, frames)
                visible = [(frame.visible - 1) % self._size + 1 for frame in frames]
                out = batch.output([frame.request.q for frame in frames], visible, all_late)
        if out is None:
            return [late[index] for index in range(len(frames))]
        return [late.get(index, out[index : index + 1]) for index in range(len(frames))]

    def _batch(self, compiled: Library, frames: Sequence[ResidentFrame]) -> KeptBatch:
        """Kept with the first frame's layer, for as long as the same come together."""
        first = frames[0].layer
        if first.together is None or not first.together.of(frames):
            size = 1 << (len(frames) - 1).bit_length()
            room = self._rooms.get(size)
            if room is None:
                room = self._rooms[size] = DecodeRoom(*self._shape, queries=size)
            batch = KeptBatch(
                compiled,
                room,
                self._readings(frames),
                [frame.session.spec.score_scale for frame in frames],
                _GROUP,
            )
            first.together = _Together(tuple(weakref.ref(frame.layer) for frame in frames), batch)
        return first.together.batch

    def _attended(self, frames: Sequence[ResidentFrame], over: Callable[[], bool]) -> Tensor | None:
        """By tensor operations, or one frame of many chunks; None when it is `over` between some of them."""
        scaled = self._scaled(frames)
        totals = no_rows(*scaled.shape)
        for number, group in enumerate(groups_of(self._readings(frames))):
            if number and over():
                return None
            attend_into(totals, scaled, group)
        return outputs(totals)

    def _readings(self, frames: Sequence[ResidentFrame]) -> list[Reading]:
        each = [_sequenced(frame, self._size) for frame in frames]
        return readings_of(each, self._size, self._size * self._row_bytes)

    def _scaled(self, frames: Sequence[ResidentFrame]) -> Tensor:
        if len(frames) == 1:
            return frames[0].request.q * frames[0].session.spec.score_scale
        return torch.cat([frame.request.q * frame.session.spec.score_scale for frame in frames])

    def _is_late(self, frame: ResidentFrame) -> bool:
        deadline = frame.request.deadline
        return deadline is not None and self._clock() > deadline

    def _lateness(self, frame: ResidentFrame) -> CoreError:
        error = CoreError(Reason.DEADLINE, "the deadline passed before all chunks were attended")
        session_id = frame.session.session_id
        return self._plans.late(error, frame.layer.plan_kind, frame.request.deadline, session_id)

    def publish(self, frame: ResidentFrame, out: Tensor, found: Streamed | None = None) -> StepAnswer:
        """Checks the receipt and takes the row. Whatever is refused here is refused before anything is
        taken. found: of chunks that came from storage."""
        session, state, request, kept = frame.session, frame.state, frame.request, frame.layer
        visible = frame.visible
        producer = session.producers[0][1]
        read = dict(kept.whole_bytes)
        partial = ((visible - 1) % self._size + 1) * self._row_bytes
        read[kept.open_tier] = read.get(kept.open_tier, 0) + partial
        # By place, in the order of its fields: by name so many cost three times as much.
        receipt = StepReceipt(
            ExactnessClass.EXACT,
            PublishArm.EXACT,
            self._baseline,
            full_support_digest(visible),
            visible,  # the frontier
            visible,  # rows attended
            0,  # and selected
            read,
            kept.labels,
            kept.simulated,
            0.0 if found is None else found.stall_seconds,
            self._digest_of(producer),
            math.nan,  # omitted mass
            "",  # no fallback
            session.snapshot_generation,
            session.position_epoch,
            kept.plan_kind.value,
        )
        if found is not None:
            receipt.hidden_seconds = found.hidden_seconds
            receipt.peak_buffer_bytes, receipt.promised_bytes = found.peak_buffer_bytes, found.promised_bytes
            receipt.shared_bytes_by_tier = found.shared or None
        check_step(receipt, visible=visible, baseline_digest=self._baseline, histories=1)
        # From here on nothing can fail.
        if request.step != session.step:
            self._store.start_step(session)
            session.step_first = request.first_query_position
        with self._store.lock:
            self._rows_of[state.open_line] = (visible - 1) % self._size + 1
            self._producer_of[state.open_line] = producer
        state.frontier = visible
        kept.clean = visible
        session.step, session.layer = request.step, request.layer
        session.committed = max(session.committed, request.committed_frontier)
        session.snapshot_generation += 1
        return StepAnswer(out, receipt)


def _asked(frame: ResidentFrame, follow: Callable[[], object]) -> Asked:
    session, request, kept = frame.session, frame.request, frame.layer
    assert kept.streamed is not None
    first = frame.visible - 1
    append = Append(session, request.layer, first, request.k, request.v)
    query = Query(request.q, first, LogitFrame(session.spec.score_scale), request.deadline)
    return Asked(kept.streamed, append, query, request.step, follow)


def _sequenced(frame: ResidentFrame, size: int) -> Sequenced:
    kept = frame.layer
    assert kept.open_run is not None
    return Sequenced(kept.places, kept.runs, kept.open_run, (frame.visible - 1) % size + 1)


def groups_of(readings: Sequence[Reading]) -> list[list[Reading]]:
    """Readings in order, in groups of about _GROUP states: what is between two looks at the clock."""
    groups: list[list[Reading]] = [[]]
    states = 0
    for reading in readings:
        count = reading.run.count * len(reading.queries)
        if groups[-1] and states + count > _GROUP:
            groups.append([])
            states = 0
        groups[-1].append(reading)
        states += count
    return groups
