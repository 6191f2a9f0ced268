"""Orders for many blocks: what they share, and what they leave alone."""

from __future__ import annotations

import pytest

from kvtier_core.transactions.deletion import Deletions, EntryKind
from kvtier_core.transactions.flights import Asker, FlightKey, Ticket
from kvtier_core.transactions.reasons import MoveReason, TxnState
from tests.unit.core.txnbench import CPU, NVME, block_key
from tests.unit.core.txnoffice import SPACE, Office


@pytest.fixture
def office() -> Office:
    return Office()


def test_blocks_of_one_call_share_an_intent_and_a_receipt(office: Office) -> None:
    for name in (1, 2, 3):
        office.bench.put(name, CPU)
    other = office.deletions.delete(block_key(2))
    whole = office.deletions.delete_many([block_key(name) for name in (1, 2, 3, 1, 9)])
    assert whole[0] is other and len(whole) == 2, "what another order has joins it"
    assert whole[1].keys == tuple(block_key(name) for name in (1, 3, 9))
    assert office.deletions.delete_many([block_key(9), block_key(1)]) == [whole[1]]
    assert office.deletions.delete_many([]) == []
    assert not any(office.found(name) for name in (1, 2, 3))
    assert office.pump() == [other, whole[1]]
    assert office.kinds() == [EntryKind.INTENT] * 2 + [EntryKind.RECEIPT] * 2
    assert {item.key for _, item in office.shredder.asked} == {block_key(name) for name in (1, 2, 3, 9)}
    assert not office.deletions.keys
    assert office.bench.at_rest() and office.bench.credits.slots == [0, 0, 0]


def test_one_block_that_is_read_delays_the_receipt_and_not_the_erasure_of_others(office: Office) -> None:
    lines = [office.bench.put(name, CPU) for name in (1, 2)]
    pin = office.pins.hold([lines[0]], CPU)
    (order,) = office.deletions.delete_many([block_key(1), block_key(2)])
    office.pump()
    assert (list(order.lines), list(order.cleared), len(order)) == ([lines[0]], [lines[1]], 2)
    assert office.kinds() == [EntryKind.INTENT]
    asked = len(office.shredder.asked)
    pin.close()
    assert office.pump() == [order]
    assert {item.key for _, item in office.shredder.asked[asked:]} == {block_key(1)}, (
        "nothing is erased twice"
    )
    assert office.bench.at_rest()


def test_a_long_list_of_keys_makes_orders_of_a_batch(office: Office) -> None:
    office.deletions = Deletions(
        office.bench.directory, office.bench.moves, office.shredder, office.paper, ("a", "b", "c"), batch=4
    )
    orders = office.deletions.delete_many([block_key(name) for name in range(10)])
    assert [len(order.keys) for order in orders] == [4, 4, 2]
    assert office.pump() == orders


def test_a_namespace_ends_the_reads_and_moves_of_its_blocks_and_no_others(office: Office) -> None:
    bench = office.bench
    mine = [bench.put(name, NVME, namespace=3) for name in (1, 2, 3)]
    other = bench.put(4, NVME, namespace=4)

    def waiter(number: int, name: int, line: int) -> Ticket:
        key = FlightKey(SPACE, block_key(name), "r", (0, 1), 1, int(bench.directory.epoch[line]), 1, CPU)
        return office.flights.join(Asker(number, 1, SPACE, 0, 10.0), [key], 0.0)

    ends, stays = waiter(1, 2, mine[1]), waiter(2, 4, other)
    going, staying = bench.begin(mine[2], CPU), bench.begin(other, CPU)
    assert len(mine) > len(office.flights)
    order = office.deletions.delete_namespace(SPACE, 3)
    assert order.lines == {line: int(bench.directory.logical[line]) for line in mine}
    assert order.generation == max(bench.directory.tombstone_generation[line] for line in mine)
    assert (ends.over, ends.reason) == (True, MoveReason.TOMBSTONED)
    assert not stays.over
    assert going.state is TxnState.DEAD
    assert staying.state is TxnState.RESERVED
    assert office.pump() == [order]
    assert [office.found(name) for name in (1, 2, 3, 4)] == [False] * 3 + [True]
