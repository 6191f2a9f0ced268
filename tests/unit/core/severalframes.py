"""Decode frames of several sessions over `rowsdouble`'s rows: what they have in common are the same copies,
and what they do not are copies of their own with the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvtier_core.appends import Append, LayerState
from kvtier_core.directory import logical_id
from kvtier_core.folding import Query
from kvtier_core.streamedframe import Asked, StreamedLayer
from kvtier_kernels.state import LogitFrame
from tests.unit.core.rowsdouble import GPU, LAYERS, LAYOUT, QUERY_HEADS, SCALE, World, world


@dataclass(frozen=True)
class Member:
    """A session of `chunks` chunks, `rows` of the last one seen. common: as many leading chunks are the
    first set's copies, the others those of set `own`."""

    chunks: int
    rows: int = 64
    common: int = 99
    own: int = 0
    deadline: float | None = None


def rows_thrice(made: World) -> None:
    """Makes each layer of the world a set of copies of the first one's rows."""
    count = len(made.store.lines)
    for line in range(count, LAYERS * count):
        identities, chunk = made.store._identities, line % count
        identities[line] = dataclasses.replace(identities[line], logical=logical_id(1, 0, chunk))


def copies(member: Member, count: int) -> list[int]:
    """Lines of a member in a world of `count` chunks."""
    return [(0 if at < member.common else member.own) * count + at for at in range(member.chunks)]


def frame_of(made: World, member: Member, number: int) -> tuple[Append, Query]:
    """Its session is named after its number, and its query is of that seed."""
    lines = copies(member, len(made.store.lines))
    visible = (member.chunks - 1) * LAYOUT.chunk_tokens + member.rows
    session = dataclasses.replace(
        made.append.session,
        session_id=f"m{number}",
        layers=[LayerState(open_tier=GPU, frontier=visible, lines=lines)],
    )
    none = made.append.k[:0]
    generator = torch.Generator().manual_seed(number)
    q = torch.randn(1, QUERY_HEADS, LAYOUT.head_dim, generator=generator)
    query = Query(q, visible - 1, LogitFrame(SCALE), member.deadline)
    return Append(session, 0, visible, none, none), query


def kept_of(made: World, append: Append, query: Query) -> StreamedLayer | None:
    """None where nothing of the frame lies near storage, or its last chunk does."""
    plan = made.plans.of_decode(append, query.first_position + 1)
    return made.plans.streamed.keep(plan, append.session, SCALE)


def asked_of(
    made: World, members: Sequence[Member], follow: Callable[[], object] = lambda: None
) -> list[Asked]:
    found = []
    for number, member in enumerate(members):
        append, query = frame_of(made, member, number)
        kept = kept_of(made, append, query)
        assert kept is not None, "this frame is none that is kept"
        found.append(Asked(kept, append, query, 0, follow))
    return found


def alone(member: Member, number: int) -> torch.Tensor:
    """The answer of the same rows, all in one place, in a world of their own."""
    made = world([GPU] * member.chunks, last=member.rows)
    try:
        _, query = frame_of(made, dataclasses.replace(member, common=99), number)
        query = dataclasses.replace(query, deadline=None)
        with torch.inference_mode():
            return made.plans.exact(made.append, query, made.visible, step=0).attended.out
    finally:
        made.close()
