"""The reference fixture of specification A.13 as live objects, and one pass of every guard over it.

Two layers, four query heads over two KV heads, eight rows; row content names layer, head, position and
channel, so a swapped, re-indexed or wrong-head row shows. Sentinels are no activations: the contract's widths
are FP16's, the arrays hold them as float32.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import SourceBinding, chunk_digest, source_row
from kvtier_core.receiptcheck.binding import check_binding
from kvtier_core.receiptcheck.contract import TensorContract, check_payload, grouped_map
from kvtier_core.receiptcheck.copy import Copy, CopyReceipt, LiveCopy, check_copy, check_survival
from kvtier_core.receiptcheck.query import (
    Deadline,
    GatherReceipt,
    IndexSnapshot,
    LivePlaces,
    LookupReceipt,
    Operation,
    RowReplica,
    check_gather,
    check_index,
    check_lookup,
    check_operation,
)
from kvtier_core.receiptcheck.states import (
    STATE_SCHEMA,
    Producer,
    StateMerge,
    StateReceipt,
    StateTerms,
    ranges_digest,
    states_checksum,
)
from tests.unit.core.blockkey_cases import binding

LAYERS, QUERY_HEADS, KV_HEADS, ROWS, WIDTH = 2, 4, 2, 8, 4
CODEC, LAYOUT = "identity", "kv-head-major-f16/1"
EPOCH = 5
LOSSLESS = frozenset({CODEC})
OTHER = bytes([0xEE]) * 32


def rows_of(layer: int, kv_head: int, value: bool = False) -> NDArray[np.float32]:
    """[8, 4]: 100000 layer + 10000 head + 10 position + channel, V 500000 more."""
    position, channel = np.meshgrid(np.arange(ROWS), np.arange(WIDTH), indexing="ij")
    code = 100_000 * layer + 10_000 * kv_head + 10 * position + channel + 500_000 * value
    return code.astype(np.float32)


def payload() -> bytes:
    """K then V of the whole chunk."""
    return b"".join(
        rows_of(layer, head, value).tobytes()
        for value in (False, True)
        for layer in range(LAYERS)
        for head in range(KV_HEADS)
    )


@dataclass(frozen=True)
class Published:
    """What leaves when every guard has passed."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class Fixture:
    """`live` is the cache's binding now; every other part is a claim."""

    live: SourceBinding
    operation: Operation
    index: IndexSnapshot
    lookup: LookupReceipt
    payload_bytes: int
    ordered: CopyReceipt
    copied: CopyReceipt
    live_copy: LiveCopy
    gather: GatherReceipt
    places: LivePlaces
    copies: tuple[Copy, ...]
    claimed_survivors: int
    terms: StateTerms
    partial: StateReceipt
    returned_bytes: int

    def publish(self, published: list[Published]) -> None:
        """All guards, then the output. Raises CoreError before anything is in `published`."""
        operation = self.operation
        check_operation(operation)
        check_binding(self.live, operation.binding)
        check_index(operation, self.index)
        check_lookup(operation, self.lookup)
        check_payload(operation.contract, ROWS, self.payload_bytes)
        check_copy(self.ordered, self.copied, self.live_copy, epoch=EPOCH, lossless=LOSSLESS)
        check_gather(operation, self.gather, self.places)
        check_survival(self.copies, EPOCH, claimed=self.claimed_survivors)
        merge = StateMerge(self.terms)
        merge.take(self.partial)
        merge.close(self.returned_bytes)
        published.append(Published(tuple(int(row) for row in self.gather.positions)))


def fixture() -> Fixture:
    """The valid one."""
    source = binding(
        cache_generation=23, publication_generation=11, committed_frontier=ROWS, request_generation=3
    )
    contract = TensorContract(
        layers=LAYERS,
        query_heads=QUERY_HEADS,
        kv_heads=KV_HEADS,
        key_dim=WIDTH,
        value_dim=WIDTH,
        key_bytes=2,
        value_bytes=2,
        query_to_kv=grouped_map(QUERY_HEADS, KV_HEADS),
        codec=CODEC,
        layout=LAYOUT,
    )
    query = hashlib.sha256(b"query 2 at 8").digest()
    mask = hashlib.sha256(b"causal").digest()
    operation = Operation(
        binding=source,
        contract=contract,
        query_to_kv=(0, 0, 1, 1),
        layer=1,
        query_head=2,
        kv_head=1,
        position=8,
        query_sha256=query,
        mask_sha256=mask,
        selector_generation=4,
        index_generation=6,
        deadline=Deadline(102.0, "boottime"),
        fallback="exact_promote",
    )
    candidates = np.array([0, 3, 7], dtype=np.int64)
    sealed = checksum("xxh3", payload())
    block = chunk_digest(source, 1, KV_HEADS, 0, ROWS)
    copied = CopyReceipt(
        txn=9,
        block=block,
        owner=77,
        cache_generation=23,
        slot=12,
        slot_generation=85,
        transfer_generation=401,
        request_generation=3,
        length=contract.payload_bytes(ROWS),
        codec=CODEC,
        layout=LAYOUT,
        transport_codec=CODEC,
        checksum=sealed,
        position_contract_sha256=source.position_contract_sha256,
        tenant_namespace=source.tenant_namespace,
    )
    host = Copy(
        kind="replica",
        block=block,
        tier="host",
        allocation_generation=40,
        generation=17,
        epoch=EPOCH,
        codec=CODEC,
        layout=LAYOUT,
        payload_sha256=hashlib.sha256(payload()).digest(),
        tenant_namespace=source.tenant_namespace,
    )
    device = dataclasses.replace(host, tier="gpu", allocation_generation=85, generation=18)
    proxy = dataclasses.replace(host, kind="proxy", payload_sha256=bytes(32))
    replica = {
        generation: RowReplica(generation, EPOCH, source.tenant_namespace, CODEC, LAYOUT)
        for generation in (17, 18)
    }
    heads = (1, 1, QUERY_HEADS)
    m, l = np.full(heads, 1.5, np.float32), np.full(heads, 2.0, np.float32)
    u = np.zeros((*heads, WIDTH), np.float32) + np.arange(WIDTH, dtype=np.float32)
    return Fixture(
        live=source,
        operation=operation,
        index=IndexSnapshot(index_generation=6, selector_generation=4, binding=source),
        lookup=LookupReceipt(
            query_sha256=query,
            index_generation=6,
            selector_generation=4,
            source_cache_generation=23,
            source_committed_frontier=ROWS,
            layer=1,
            query_head=2,
            kv_head=1,
            positions=candidates,
            scores=np.array([3, 2, 1], dtype=np.float32),
        ),
        payload_bytes=512,
        ordered=copied,
        copied=copied,
        live_copy=LiveCopy(
            alive=True,
            cache_generation=23,
            slot_generation=85,
            owner=77,
            request_generation=3,
            authority_epoch=EPOCH,
        ),
        gather=GatherReceipt(
            query_sha256=query,
            index_generation=6,
            source_cache_generation=23,
            layer=1,
            query_head=2,
            kv_head=1,
            positions=candidates,
            row_digests=[source_row(source, 1, 1, int(row)) for row in candidates],
            replicas=[replica[18], replica[17], replica[17]],
            destination_slot=12,
            destination_allocation_generation=85,
            visibility_event=31,
        ),
        places=LivePlaces(authority_epoch=EPOCH, destination_allocation_generation=85),
        copies=(host, device, proxy),
        claimed_survivors=2,
        terms=StateTerms(
            binding=source,
            request_id="r1",
            layer=1,
            query_to_kv=(0, 0, 1, 1),
            kv_heads=KV_HEADS,
            value_dim=WIDTH,
            first_query_position=8,
            queries=1,
            query_sha256=query,
            mask_sha256=mask,
            position_epoch=0,
            score_scale=0.5,
            merge_revision="m-l-u/1",
            producers=(Producer("gpu", 2),),
            visible=ROWS,
            deadline=102.0,
        ),
        partial=StateReceipt(
            tenant_namespace=source.tenant_namespace,
            request_id="r1",
            request_generation=3,
            checkpoint_generation=source.checkpoint_generation,
            layer=1,
            query_heads=(0, QUERY_HEADS),
            kv_heads=(0, KV_HEADS),
            query_to_kv=(0, 0, 1, 1),
            first_query_position=8,
            queries=1,
            query_sha256=query,
            support=((0, ROWS),),
            support_sha256=ranges_digest(((0, ROWS),)),
            mask_sha256=mask,
            position_contract_sha256=source.position_contract_sha256,
            position_epoch=0,
            score_scale=0.5,
            state_schema=STATE_SCHEMA,
            m=m,
            l=l,
            u=u,
            producer="gpu",
            producer_generation=2,
            merge_revision="m-l-u/1",
            checksum=states_checksum(m, l, u),
            completed=101.0,
        ),
        returned_bytes=QUERY_HEADS * (2 + WIDTH) * 4,
    )


def mutate(part: Any, path: str, value: object) -> Any:
    """The same object with exactly one field changed, by its dotted path; a number indexes a sequence."""
    head, _, rest = path.partition(".")
    if head.isdigit():
        items = list(part)
        items[int(head)] = mutate(items[int(head)], rest, value) if rest else value
        return type(part)(items)
    inner = mutate(getattr(part, head), rest, value) if rest else value
    return dataclasses.replace(part, **{head: inner})


def positions(*rows: int) -> NDArray[np.int64]:
    return np.array(rows, dtype=np.int64)


def refusal(action: Callable[[], object]) -> Reason:
    """The reason for which `action` is refused."""
    with pytest.raises(CoreError) as refused:
        action()
    return refused.value.reason
