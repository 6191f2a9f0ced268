"""What an edit makes of a history: its place in the chain of producers.

Why it exists: after a drop equal tokens no longer imply equal rows, so whatever names rows by what came
before them must name the edits too. It must not know rows or tiers. Encoding: specification systems.md,
D.1.3: each set of operations is one symbol at the point of the stream where it took effect. Here the symbol
is a producer's digest, chained over those before it, and rows are of one stream up to where it differs.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier_core.appends import EditPoint, Session
from kvtier_core.identity import Field, digest
from kvtier_core.positions import PositionView


def edit_digest(before: str, row: int, view: PositionView) -> str:
    """The producer of rows from `row` on, which are computed over `view` after the history `before`."""
    numbers = [
        number for part in view.upto(row) for number in (part.first, part.last, part.stored, part.position)
    ]
    fields: list[tuple[str, Field]] = [
        ("history", before),
        ("row", row),
        ("next_position", view.next_position(row)),
        ("segments", numbers),
    ]
    return "sha256:" + digest("edit", fields).hex()


def record(
    session: Session,
    view: PositionView,
    row: int,
    intern: Callable[[str], int],
    digest_of: Callable[[int], str],
) -> None:
    """Notes that rows from `row` on are computed over `view`. What was edited at the same row is one edit,
    and none when together they changed nothing."""
    former: PositionView | None = session.positions
    while session.edits and session.edits[-1].row >= row:
        point = session.edits.pop()
        session.producers.remove((point.row, point.producer))
        former = point.before if point.row == row else None
    session.positions = view
    if view == former or not view.edited:
        return
    producer = intern(edit_digest(digest_of(session.producers[-1][1]), row, view))
    session.edits.append(EditPoint(row, former, producer))
    session.producers.append((row, producer))
