"""What a caller gets wrong is refused whole: nothing is stored, and nothing is left over of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.checksums import checksum
from kvtier_core.credits import slots
from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions import MoveReason
from tests.unit.core.storebench import ALPHA, BETA, SIZE, StoreBench, content, key


def put(bench: StoreBench, keys: list[Any], payloads: list[Any], **more: Any) -> None:
    bench.store.put(keys, payloads, namespace=ALPHA, deadline=bench.clock.now + 10, **more)


@pytest.mark.parametrize(
    "call",
    [
        lambda bench: put(bench, [key("a"), key("b")], [content("a")]),
        lambda bench: put(bench, [key("a")], [content("a"), content("b")]),
        lambda bench: put(bench, [key("a"), key("b")], [content("a"), content("b")[1:]]),
        lambda bench: put(bench, [key("a"), key("b")[1:]], [content("a"), content("b")]),
        lambda bench: put(bench, [key("a")], [content("a")], cost=float("nan")),
        lambda bench: put(bench, [key("a")], [content("a")], cost=float("inf")),
        lambda bench: put(bench, [key("a")], [content("a")], cost=-1.0),
        lambda bench: bench.store.pin([key("old"), bytearray(32)], ALPHA, 1e9),
    ],
    ids=[
        "too-few-payloads",
        "too-many-payloads",
        "short-payload",
        "short-key",
        "cost-is-no-number",
        "infinite-cost",
        "negative-cost",
        "pin-by-no-bytes",
    ],
)
def test_a_bad_argument_changes_nothing(call: Callable[[StoreBench], None]) -> None:
    bench = StoreBench()
    bench.put("old")
    with pytest.raises(CoreError) as refused:
        call(bench)
    assert refused.value.reason is Reason.BAD_ARGUMENT
    assert bench.store.pins.held == 0
    assert (bench.found("a"), bench.found("b"), bench.found("old")) == (0, 0, 1)
    assert bench.ram.slots.used == 1 == bench.store.ledger.resident(slots(0))
    assert bench.put("b")[0].outcome is PutOutcome.STORED
    bench.rest()


@pytest.mark.parametrize("named", [0, 1, 3])
def test_checksums_that_are_not_one_a_block_publish_nothing(named: int) -> None:
    """Half of the blocks published and all of their credits given back would be worse than none."""
    bench = StoreBench()
    with bench.reserve("a", "b") as scope:
        for index, name in enumerate("ab"):
            scope.landing(index)[:] = content(name)
        with pytest.raises(CoreError) as refused:
            scope.publish([checksum("xxh3", content("a"))] * named)
    assert refused.value.reason is Reason.BAD_ARGUMENT
    assert bench.found("a") == 0
    assert bench.ram.slots.used == 0 == bench.store.ledger.resident(slots(0))
    bench.rest()


def test_a_block_that_made_way_for_its_neighbour_in_one_call_is_not_said_to_be_there() -> None:
    """Its line is the neighbour's by then."""
    bench = StoreBench(memory=4, storage=4, segment=2 * SIZE)
    bench.on_disk("kept", namespace=BETA)
    # Rows of sessions wait for the rest of it.
    bench.store.ledger.claim(slots(1), 3)
    bench.put("other", namespace=BETA)
    bench.put("b", "b2", droppable=True)
    first, second = bench.put("a", "b", droppable=True)
    assert first.outcome is PutOutcome.STORED
    assert (second.outcome, second.reason) == (PutOutcome.REFUSED, MoveReason.CREDIT_PRESSURE)
    assert (bench.found("a"), bench.found("b"), bench.found("b2")) == (1, 0, 1)
    bench.rest()


def test_a_reservation_that_fails_half_way_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = StoreBench(compiled=False)
    table, directory = bench.ram.slots, bench.store.directory
    begin, count = directory.begin_store, iter(range(10))

    def failing(*arguments: Any) -> int:
        if next(count) == 2:
            raise RuntimeError("the third line")
        return begin(*arguments)

    monkeypatch.setattr(directory, "begin_store", failing)
    with pytest.raises(RuntimeError, match="the third line"):
        bench.reserve("a", "b", "c", "d")
    assert table.used == 0 == bench.store.ledger.resident(slots(0))
    assert bench.store.writes.open_blocks == 0
    assert bench.put("a", "b", "c", "d")[3].outcome is PutOutcome.STORED
    bench.rest()
