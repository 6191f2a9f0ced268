"""Each claim with one wrong field is refused with its own reason, before anything is published.

Catalogues of the specification: N.2 (28, on the fixture of A.13) and N.3 1 to 9; those of the ledger, N.3 10
to 24, stand with the ledger. With them the worked numbers of C2 and the order in which guards speak.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier_core.errors import Reason
from kvtier_core.identity import SourceBinding
from kvtier_core.receiptcheck.contract import (
    TensorContract,
    check_cover,
    check_heads,
    check_payload,
    check_positions,
    check_support,
    grouped_map,
    tensor_contract,
)
from kvtier_core.receiptcheck.copy import copy_reason
from kvtier_core.tiers.slots import BlockIdentity, SlotRef
from kvtier_core.transactions import Completion, LiveView, MoveKind, TxnState, completion_reason
from kvtier_core.transactions.moves import Move
from kvtier_crds.manifest import Dtype, Geometry
from tests.unit.core.fixture_f2 import (
    EPOCH,
    LOSSLESS,
    OTHER,
    ROWS,
    Fixture,
    Published,
    fixture,
    mutate,
    positions,
    refusal,
    rows_of,
)

MiB, KiB = 1 << 20, 1 << 10
VALID = fixture()


def test_the_reference_fixture_passes_every_guard() -> None:
    published: list[Published] = []
    VALID.publish(published)
    assert published == [Published((0, 3, 7))]


# N.2, manifest and trace.

BINDING: list[tuple[int, str, object, Reason]] = [
    (1, "logical_cache_abi_sha256", OTHER, Reason.ABI_MISMATCH),
    (2, "cache_layout_manifest_sha256", OTHER, Reason.CODEC_OR_LAYOUT_MISMATCH),
    (3, "visibility_policy_manifest_sha256", OTHER, Reason.VISIBILITY_POLICY_MISMATCH),
    (4, "model_artifact_sha256", "sha256:" + "9" * 64, Reason.MODEL_MISMATCH),
    (4, "checkpoint_generation", "step-9", Reason.MODEL_MISMATCH),
    (5, "adapter_set_sha256", OTHER, Reason.ADAPTER_MISMATCH),
    (6, "rope_config_sha256", OTHER, Reason.ROPE_MISMATCH),
    (7, "position_contract_sha256", OTHER, Reason.POSITION_CONTRACT_MISMATCH),
    (8, "tenant_namespace", "another", Reason.TENANT_MISMATCH),
    (9, "namespace_generation", -1, Reason.NAMESPACE_STALE),
    (10, "request_generation", 2, Reason.REQUEST_STALE),
    (11, "cache_generation", 22, Reason.STALE_CACHE_GENERATION),
    (12, "publication_generation", 10, Reason.PUBLICATION_STALE),
]
GPU_GONE_HOST_STALE = (dataclasses.replace(VALID.copies[0], epoch=EPOCH - 1), VALID.copies[2])
TRACE: list[tuple[int, str, object, Reason]] = [
    (13, "index.binding.committed_frontier", 7, Reason.INDEX_FRONTIER_LAG),
    (14, "index.selector_generation", 3, Reason.SELECTOR_STALE),
    (15, "lookup.positions", positions(0, 3, 8), Reason.CANDIDATE_OUT_OF_RANGE),
    (16, "operation.query_to_kv", (0, 1, 0, 1), Reason.HEAD_MAPPING_MISMATCH),
    (17, "lookup.kv_head", None, Reason.HEAD_AMBIGUOUS),
    (17, "gather.kv_head", None, Reason.HEAD_AMBIGUOUS),
    (17, "partial.kv_heads", None, Reason.HEAD_AMBIGUOUS),
    (18, "gather.replicas.0.authority_epoch", EPOCH - 1, Reason.STALE_AUTHORITY_EPOCH),
    (18, "live_copy.authority_epoch", EPOCH - 1, Reason.STALE_AUTHORITY_EPOCH),
    (19, "gather.destination_allocation_generation", 84, Reason.RECYCLED_DESTINATION),
    (19, "places.destination_allocation_generation", 86, Reason.RECYCLED_DESTINATION),
    (20, "copied.checksum", VALID.copied.checksum ^ 1, Reason.CHECKSUM_MISMATCH),
    (21, "lookup.semantics", "payload", Reason.CANDIDATE_USED_AS_PAYLOAD),
    (22, "gather.positions", positions(0, 1, 2), Reason.ROW_DIGEST_MISMATCH),
    (23, "gather.visibility_event", None, Reason.NOT_VISIBLE),
    (24, "partial.merge_revision", None, Reason.PARTIAL_RECEIPT_INCOMPLETE),
    (25, "operation.deadline.clock", "", Reason.DEADLINE_UNANCHORED),
    (26, "operation.fallback", "carry_on", Reason.FALLBACK_UNKNOWN),
    (27, "claimed_survivors", 3, Reason.SURVIVAL_VIOLATION),
    (28, "copies", GPU_GONE_HOST_STALE, Reason.SURVIVAL_VIOLATION),
    # Beyond the catalogue: the guards of lookup and gather that it does not name.
    (0, "index.index_generation", 5, Reason.INDEX_STALE),
    (0, "index.binding.committed_frontier", 9, Reason.UNCOMMITTED_ROWS),
    (0, "lookup.query_sha256", OTHER, Reason.QUERY_MISMATCH),
    (0, "lookup.index_generation", 5, Reason.INDEX_STALE),
    (0, "lookup.selector_generation", 3, Reason.SELECTOR_STALE),
    (0, "lookup.source_cache_generation", 22, Reason.STALE_CACHE_GENERATION),
    (0, "lookup.source_committed_frontier", 7, Reason.INDEX_FRONTIER_LAG),
    (0, "lookup.positions", positions(0, 3, 3), Reason.DUPLICATE_POSITION),
    (0, "lookup.kv_head", 0, Reason.HEAD_MAPPING_MISMATCH),
    (0, "gather.query_sha256", OTHER, Reason.QUERY_MISMATCH),
    (0, "gather.layer", 0, Reason.QUERY_MISMATCH),
    (0, "gather.index_generation", 5, Reason.INDEX_STALE),
    (0, "gather.source_cache_generation", 22, Reason.STALE_CACHE_GENERATION),
    (0, "gather.positions", positions(0, 3, 8), Reason.CANDIDATE_OUT_OF_RANGE),
    (0, "gather.positions", positions(0, 7, 7), Reason.DUPLICATE_POSITION),
    (0, "gather.replicas.1.tenant_namespace", "another", Reason.TENANT_MISMATCH),
    (0, "gather.replicas.1.layout", "kv-token-major-f16/1", Reason.CODEC_OR_LAYOUT_MISMATCH),
    (0, "gather.row_digests.2", OTHER, Reason.ROW_DIGEST_MISMATCH),
    (0, "payload_bytes", 256, Reason.PAYLOAD_GEOMETRY),
    (0, "copied.slot_generation", 84, Reason.RECYCLED_DESTINATION),
    (0, "copied.transfer_generation", 400, Reason.TRANSFER_STALE),
    (0, "copied.layout", "kv-token-major-f16/1", Reason.CODEC_OR_LAYOUT_MISMATCH),
    (0, "copied.position_contract_sha256", OTHER, Reason.POSITION_CONTRACT_MISMATCH),
    (0, "copied.tenant_namespace", "another", Reason.TENANT_MISMATCH),
    (0, "copied.block", OTHER, Reason.IDENTITY_MISMATCH),
    (0, "live_copy.request_generation", 4, Reason.REQUEST_STALE),
    (0, "live_copy.cache_generation", 24, Reason.STALE_CACHE_GENERATION),
    (0, "live_copy.owner", 78, Reason.IDENTITY_MISMATCH),
    (0, "live_copy.alive", False, Reason.CANCELLED),
]
CASES = [
    *(pytest.param(f"operation.binding.{name}", v, why, id=f"N.2-{n}-{name}") for n, name, v, why in BINDING),
    *(
        pytest.param(f"index.binding.{name}", v, why, id=f"N.2-{n}-index-{name}")
        for n, name, v, why in BINDING
    ),
    *(pytest.param(path, v, why, id=f"N.2-{n or 'more'}-{path}-{why}") for n, path, v, why in TRACE),
]


@pytest.mark.parametrize(("path", "value", "reason"), CASES)
def test_one_wrong_field_has_one_reason_and_publishes_nothing(
    path: str, value: object, reason: Reason
) -> None:
    mutated: Fixture = mutate(VALID, path, value)
    published: list[Published] = []
    assert refusal(lambda: mutated.publish(published)) is reason
    assert not published


def test_the_catalogue_is_whole() -> None:
    assert {number for number, *_ in [*BINDING, *TRACE]} - {0} == set(range(1, 29))
    changed = {name for _, name, *_ in BINDING} | {"committed_frontier"}
    assert changed == {field.name for field in dataclasses.fields(SourceBinding)}


def test_an_index_that_ends_early_is_legal_with_a_declared_supplement() -> None:
    lagging = mutate(VALID, "index.binding.committed_frontier", 6)
    published: list[Published] = []
    mutate(lagging, "index.supplement", (6, 8)).publish(published)
    assert published
    for short in ((7, 8), (6, 7)):
        gap = mutate(lagging, "index.supplement", short)
        assert refusal(lambda gap=gap: gap.publish(published)) is Reason.INDEX_FRONTIER_LAG  # type: ignore[misc]


# Which of two wrong fields speaks: the specification's order (A.12, B.1 D3 and P3).

GATHER_ORDER = [
    ("gather.query_sha256", OTHER),
    ("gather.index_generation", 5),
    ("gather.source_cache_generation", 22),
    ("gather.positions", positions(0, 3, 8)),
    ("gather.replicas.0.authority_epoch", EPOCH - 1),
    ("gather.replicas.0.tenant_namespace", "another"),
    ("gather.replicas.0.codec", "fp8"),
    ("gather.row_digests.0", OTHER),
    ("gather.destination_allocation_generation", 84),
    ("gather.visibility_event", None),
]
COPY_ORDER = [
    ("live_copy.alive", False),
    ("copied.cache_generation", 22),
    ("copied.slot_generation", 84),
    ("copied.owner", 78),
    ("copied.length", 448),
    ("copied.transfer_generation", 400),
    ("copied.codec", "fp8"),
    ("copied.transport_codec", "fp8"),
    ("copied.checksum", 1),
    ("copied.position_contract_sha256", OTHER),
    ("copied.tenant_namespace", "another"),
    ("copied.request_generation", 2),
    ("live_copy.authority_epoch", EPOCH + 1),
]


@pytest.mark.parametrize("order", [GATHER_ORDER, COPY_ORDER], ids=["gather", "copy"])
def test_of_two_wrong_fields_the_earlier_guard_speaks(order: list[tuple[str, object]]) -> None:
    reasons = [refusal(lambda step=step: mutate(VALID, *step).publish([])) for step in order]  # type: ignore[misc]
    assert len(set(reasons)) == len(order)
    for first in range(len(order)):
        for second in range(first + 1, len(order)):
            both = mutate(mutate(VALID, *order[second]), *order[first])
            assert refusal(lambda both=both: both.publish([])) is reasons[first]  # type: ignore[misc]


def test_b1_01_the_four_published_reasons_of_a_copy_in_order() -> None:
    wrong = [("cache_generation", 22), ("slot_generation", 84), ("owner", 78), ("length", 0)]
    found = []
    for number in range(len(wrong) + 1):
        copied = dataclasses.replace(VALID.copied, **dict(wrong[number:]))  # type: ignore[arg-type]
        found.append(copy_reason(VALID.ordered, copied, VALID.live_copy, epoch=EPOCH, lossless=LOSSLESS))
    assert found == [
        Reason.STALE_CACHE_GENERATION,
        Reason.RECYCLED_DESTINATION,
        Reason.IDENTITY_MISMATCH,
        Reason.SHORT_COPY,
        None,
    ]


def test_the_machine_and_the_receipt_name_the_same_reason_whatever_is_wrong() -> None:
    identity = BlockIdentity(VALID.ordered.block, 77, 18, ROWS, 512, VALID.ordered.checksum)
    order = VALID.ordered
    for wrong in itertools.product((False, True), repeat=6):
        dead, cache, slot, owner, length, transfer = wrong
        move = Move(
            id=order.txn,
            kind=MoveKind.PROMOTE,
            line=0,
            owner=order.owner,
            cache_generation=order.cache_generation,
            epoch=EPOCH,
            source_tier=1,
            source=SlotRef(3, 40),
            tier=0,
            destination=SlotRef(order.slot, order.slot_generation),
            identity=identity,
            credit=0,
            state=TxnState.DEAD if dead else TxnState.COPYING,
            transfer_generation=order.transfer_generation,
        )
        done = Completion(
            txn=order.txn,
            owner=order.owner + owner,
            cache_generation=order.cache_generation - cache,
            slot=order.slot,
            slot_generation=order.slot_generation - slot,
            transfer_generation=order.transfer_generation - transfer,
            bytes=order.length - 64 * length,
        )
        reported = dataclasses.replace(
            order,
            owner=done.owner,
            cache_generation=done.cache_generation,
            slot_generation=done.slot_generation,
            transfer_generation=done.transfer_generation,
            length=done.bytes,
        )
        live = dataclasses.replace(VALID.live_copy, alive=not dead)
        of_machine = completion_reason(move, LiveView(23, 85, 77), done)
        of_receipt = copy_reason(order, reported, live, epoch=EPOCH, lossless=LOSSLESS)
        assert of_machine.value == ("READY" if of_receipt is None else of_receipt.value), wrong


# N.3, exact offload: 4096 rows of 4 layers in blocks of 64.

OFFLOAD = TensorContract(
    layers=4,
    query_heads=32,
    kv_heads=8,
    key_dim=128,
    value_dim=128,
    key_bytes=2,
    value_bytes=2,
    query_to_kv=grouped_map(32, 8),
    codec="identity",
    layout="kv-head-major-f16/1",
)
TOKENS, BLOCK = 4096, 64


@dataclasses.dataclass(frozen=True)
class Offload:
    """What an exact move says it moved. key_value_bytes: of one row as it was counted."""

    fixture: Fixture
    required: NDArray[np.int64]
    block_tokens: int
    row_bytes: int

    def publish(self) -> str:
        self.fixture.publish([])
        check_support(self.required, TOKENS)
        step = self.block_tokens
        check_cover([(at, at + step) for at in range(0, TOKENS - step + 1, step)], BLOCK, TOKENS)
        check_payload(OFFLOAD, BLOCK, self.row_bytes * BLOCK, layers=1)
        return "published"


MOVE = Offload(VALID, np.arange(TOKENS, dtype=np.int64), BLOCK, OFFLOAD.row_bytes)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        pytest.param("fixture.copied.owner", 78, Reason.IDENTITY_MISMATCH, id="N.3-1"),
        pytest.param("fixture.copied.cache_generation", 22, Reason.STALE_CACHE_GENERATION, id="N.3-2"),
        pytest.param("fixture.live_copy.slot_generation", 86, Reason.RECYCLED_DESTINATION, id="N.3-3"),
        pytest.param("fixture.copied.length", 512 - 64, Reason.SHORT_COPY, id="N.3-4"),
        pytest.param("fixture.copied.transport_codec", "fp8-e4m3", Reason.CODEC_NOT_LOSSLESS, id="N.3-5"),
        pytest.param("required", np.delete(MOVE.required, 100), Reason.SUPPORT_GAP, id="N.3-6"),
        pytest.param("required", np.append(MOVE.required, TOKENS), Reason.CANDIDATE_OUT_OF_RANGE, id="N.3-7"),
        pytest.param("block_tokens", 63, Reason.BLOCK_COVERAGE, id="N.3-8"),
        pytest.param("row_bytes", 8 * 128 * 2, Reason.PAYLOAD_GEOMETRY, id="N.3-9"),
    ],
)
def test_an_exact_move_with_one_wrong_field_is_refused(path: str, value: object, reason: Reason) -> None:
    assert MOVE.publish() == "published"
    assert refusal(mutate(MOVE, path, value).publish) is reason


@pytest.mark.parametrize(
    "blocks",
    [[(0, 64)], [(0, 64), (64, 128), (128, 192)], [(0, 64), (0, 64)], [(0, 64), (65, 129)], [(64, 128)]],
    ids=["too few", "too many", "twice", "askew", "not the first"],
)
def test_blocks_that_do_not_cover_are_refused(blocks: list[tuple[int, int]]) -> None:
    check_cover([(64, 128), (0, 64)], 64, 100)
    assert refusal(lambda: check_cover(blocks, 64, 100)) is Reason.BLOCK_COVERAGE


@given(st.lists(st.integers(-2, 12), max_size=8), st.integers(0, 10))
def test_positions_are_judged_as_one_by_one(found: list[int], frontier: int) -> None:
    outside = any(not 0 <= position < frontier for position in found)
    wanted = Reason.CANDIDATE_OUT_OF_RANGE if outside else Reason.DUPLICATE_POSITION
    if outside or len(set(found)) < len(found):
        assert refusal(lambda: check_positions(positions(*found), frontier)) is wanted
    else:
        check_positions(positions(*found), frontier)


# Worked numbers (C2).


def test_c2_01_to_c2_03_and_c2_11_payloads() -> None:
    assert VALID.operation.contract.payload_bytes(ROWS) == 512
    model = mutate(OFFLOAD, "layers", 32)
    assert model.payload_bytes(1) == 128 * KiB
    assert model.payload_bytes(32768) == 4096 * MiB
    assert [model.payload_bytes(count) for count in (1, 128, 4096, 32768)] == [
        128 * KiB,
        16 * MiB,
        512 * MiB,
        4096 * MiB,
    ]


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_a_block_of_some_layers_and_heads_weighs_its_rows(dtype: str, width: int) -> None:
    geometry = Geometry(layers=4, query_heads=8, kv_heads=4, head_dim=16, dtype=Dtype(dtype))
    part = tensor_contract(geometry, layers=(1, 3), kv_heads=(2, 3), codec="identity", layout="l")
    assert (part.layers, part.query_to_kv) == (2, (0, 0))
    check_payload(part, 64, 2 * 64 * 2 * 16 * width)
    for wrong in (2 * 64 * 16 * width, 4 * 64 * 2 * 16 * width):
        assert refusal(lambda wrong=wrong: check_payload(part, 64, wrong)) is Reason.PAYLOAD_GEOMETRY  # type: ignore[misc]


def test_c2_04_the_grouped_map() -> None:
    assert grouped_map(4, 2) == (0, 0, 1, 1)
    check_heads(VALID.operation.contract, 3, 1)
    assert refusal(lambda: check_heads(VALID.operation.contract, 4, 1)) is Reason.HEAD_MAPPING_MISMATCH
    alike = TensorContract(1, 2, 2, 4, 4, 2, 2, (0, 1), "identity", "l")
    check_heads(alike, 1, None)
    assert refusal(lambda: check_heads(alike, None, None)) is Reason.HEAD_AMBIGUOUS


def test_c2_05_to_c2_08_sentinels_and_shapes() -> None:
    assert rows_of(1, 1)[3].tolist() == [110030, 110031, 110032, 110033]
    assert rows_of(1, 1, value=True)[3].tolist() == [610030, 610031, 610032, 610033]
    packed = rows_of(1, 1)[VALID.gather.positions]
    assert packed.shape == (3, 4)
    assert int(packed[1, 0]) % 1000 // 10 == 3
    proxy = np.zeros((2, 2, 8, 2))
    assert (proxy.size, packed.size, 2 + VALID.partial.u[0, 0, 0].size) == (64, 12, 6)
