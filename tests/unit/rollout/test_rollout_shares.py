"""A share of a digest's error budget that is spent stays spent, however many other digests follow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_operator.ports import JsonObject
from kvtier_operator.rollout.shares import MAX_DIGESTS, budget_rows, spent_shares
from tests.unit.rollout.rollout_world import World


def spend(digests: Iterable[str]) -> tuple[list[JsonObject], Counter[str]]:
    """Rows after one share of each in turn, and how many each has spent in truth; sees that none is told to
    have spent fewer."""
    rows: list[JsonObject] = []
    truly: Counter[str] = Counter()
    for digest in digests:
        rows = budget_rows(rows, digest, spent_shares(rows, digest) + 1)
        truly[digest] += 1
        assert len(rows) <= MAX_DIGESTS
        assert rows[-1]["digest"] == digest
        for known, spent in truly.items():
            assert spent_shares(rows, known) >= spent, known
    return rows, truly


@given(st.lists(st.integers(0, 3 * MAX_DIGESTS).map(str), max_size=300))
def test_nothing_is_ever_won_back(digests: list[str]) -> None:
    spend(digests)


@pytest.mark.parametrize("rounds", [1, 3])
def test_as_many_others_as_there_are_rows_win_nothing_back(rounds: int) -> None:
    others = [f"other-{number}" for number in range(MAX_DIGESTS)]
    rows, _ = spend(["first", *others * rounds])
    assert "first" not in {row["digest"] for row in rows}
    assert spent_shares(rows, "first") >= 1


def test_the_one_with_the_fewest_attempts_goes_first_and_of_equals_the_oldest() -> None:
    many = [f"d{number}" for number in range(MAX_DIGESTS)]
    rows, _ = spend([*many, many[0]])
    rows = budget_rows(rows, "new", spent_shares(rows, "new") + 1)
    names = [row["digest"] for row in rows]
    assert many[1] not in names and many[0] in names and names[-1] == "new"


def test_while_there_is_room_a_new_digest_has_spent_nothing() -> None:
    rows, _ = spend([f"d{number}" for number in range(MAX_DIGESTS - 1)] * 2)
    assert spent_shares(rows, "new") == 0


def test_a_row_is_never_lowered() -> None:
    rows = budget_rows([{"digest": "d", "attempts": 7}], "d", 3)
    assert rows == [{"digest": "d", "attempts": 7}]


async def test_a_rollout_on_a_cache_of_many_candidates_begins_where_the_least_of_them_stands() -> None:
    world = World()
    rows = [{"digest": f"sha256:{number:064}", "attempts": 2} for number in range(MAX_DIGESTS)]
    world.cache_status["digestBudget"] = rows
    await world.until("Progressing", "Shadow")
    assert world.status["digestBudget"]["attemptsUsed"] == 3
    assert len(world.cache_status["digestBudget"]) == MAX_DIGESTS
