"""The bench of selectors: every family has its rows, each held against dense decode of the same run."""

from __future__ import annotations

from kvtier_eval.plan import CHOICES
from tests.bench.bench_selectors import BUDGET, Context, measured


def test_every_family_is_timed_beside_dense_decode_of_the_same_rows() -> None:
    names = tuple(CHOICES)
    found = {row.id: row for row in measured(512, names, rounds=1)}
    dense = found["selectors.n512.dense"]
    context = Context.random(512)
    assert len(found) == 2 + 5 * len(names)
    for name in names:
        label = f"selectors.n512.{name.lower().replace('-', '.')}"
        select, answer, index = (found[f"{label}.{part}"] for part in ("select", "answer", "index"))
        assert select.peer_value == answer.peer_value == answer.goal == dense.value > 0
        assert 0 < select.value < answer.value
        assert index.peer_value == (context.k.nbytes + context.v.nbytes) / 1024
        assert (index.value > 0) == (found[f"{label}.floor"].value > 0)
        assert answer.met == (answer.value <= dense.value)
        # A list a query head may fetch up to a group times the budget; the persistent rows come besides.
        assert 4 + 32 < found[f"{label}.read"].value <= 512
    assert found["selectors.n512.sparq.read"].value == BUDGET + 4 + 32
    assert found["selectors.n512.sparq.index"].value * 1024 == 4 * 3 * (512 * 16 + 64)
