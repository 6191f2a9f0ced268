"""How much of a candidate's false-promotion budget is spent on a cache: the rows of its `digestBudget`. Pure.

There is room for so many digests, and none may win a share back by being forgotten. So the row with the
fewest attempts goes first, and a digest without a row begins where the least of a full list stands: all that
were ever forgotten had no more, and no row is ever lowered.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_operator.ports import JsonObject

MAX_DIGESTS = 32


def spent_shares(rows: Sequence[JsonObject], digest: str) -> int:
    """By whichever rollout, at least."""
    found = next((row for row in rows if row["digest"] == digest), None)
    if found is not None:
        return int(found["attempts"])
    return 0 if len(rows) < MAX_DIGESTS else min(int(row["attempts"]) for row in rows)


def budget_rows(rows: Sequence[JsonObject], digest: str, shares: int) -> list[JsonObject]:
    """With so many shares spent by the digest, whose row is the last; of equals the oldest go first."""
    spent = max(shares, spent_shares(rows, digest))
    kept = [row for row in rows if row["digest"] != digest]
    while len(kept) >= MAX_DIGESTS:
        kept.remove(min(kept, key=lambda row: int(row["attempts"])))
    return [*kept, {"digest": digest, "attempts": spent}]
