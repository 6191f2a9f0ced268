"""Mutations 3 to 37 of N.5 on the states that an engine merges: one wrong field, one reason, no answer; two
wrong fields, the reason of the earlier check of E.5."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier_core.errors import Reason
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
from tests.unit.core.fixture_f2 import OTHER, refusal

HEADS, KV_HEADS, WIDTH, VISIBLE = 4, 2, 8, 40
SOURCE = binding(request_generation=3)
QUERY, MASK = hashlib.sha256(b"query").digest(), hashlib.sha256(b"causal").digest()
TERMS = StateTerms(
    binding=SOURCE,
    request_id="r1",
    layer=1,
    query_to_kv=(0, 0, 1, 1),
    kv_heads=KV_HEADS,
    value_dim=WIDTH,
    first_query_position=VISIBLE - 1,
    queries=1,
    query_sha256=QUERY,
    mask_sha256=MASK,
    position_epoch=0,
    score_scale=0.5,
    merge_revision="f32-chunk-merge/2",
    producers=(Producer("ram", 2), Producer("flash", 2)),
    visible=VISIBLE,
    deadline=102.0,
)
ONE = HEADS * (2 + WIDTH) * 4


def state(producer: str, *support: tuple[int, int], **changes: object) -> StateReceipt:
    count = max(1, len(support))
    generator = np.random.default_rng(7)
    m = generator.standard_normal((count, 1, HEADS)).astype(np.float32)
    l = 1.0 + generator.random((count, 1, HEADS), dtype=np.float32)
    u = generator.standard_normal((count, 1, HEADS, WIDTH)).astype(np.float32)
    if not support:
        m, l, u = np.full_like(m, -np.inf), np.zeros_like(l), np.zeros_like(u)
    valid = StateReceipt(
        tenant_namespace=SOURCE.tenant_namespace,
        request_id="r1",
        request_generation=3,
        checkpoint_generation=SOURCE.checkpoint_generation,
        layer=1,
        query_heads=(0, HEADS),
        kv_heads=(0, KV_HEADS),
        query_to_kv=(0, 0, 1, 1),
        first_query_position=VISIBLE - 1,
        queries=1,
        query_sha256=QUERY,
        support=support,
        support_sha256=ranges_digest(support),
        mask_sha256=MASK,
        position_contract_sha256=SOURCE.position_contract_sha256,
        position_epoch=0,
        score_scale=0.5,
        state_schema=STATE_SCHEMA,
        m=m,
        l=l,
        u=u,
        producer=producer,
        producer_generation=2,
        merge_revision="f32-chunk-merge/2",
        checksum=states_checksum(m, l, u),
        completed=101.0,
    )
    return dataclasses.replace(valid, **changes)  # type: ignore[arg-type]


RAM, FLASH = state("ram", (16, 32), (32, 40)), state("flash", (0, 16))


def changed(**changes: object) -> StateReceipt:
    return dataclasses.replace(FLASH, **changes)  # type: ignore[arg-type]


def remade(**arrays: object) -> StateReceipt:
    """Other numbers, with the checksum that fits them."""
    made = changed(**arrays)
    return dataclasses.replace(made, checksum=states_checksum(made.m, made.l, made.u))


def with_value(name: str, value: float) -> StateReceipt:
    array = getattr(FLASH, name).copy()
    array.flat[1] = value
    return remade(**{name: array})


def half(name: str) -> StateReceipt:
    return remade(**{name: getattr(FLASH, name).astype(np.float16)})


def merge_all(terms: StateTerms, receipts: Sequence[StateReceipt], returned_bytes: int) -> None:
    """As an engine does: each as it comes, then what all of them must be together."""
    merge = StateMerge(terms)
    for receipt in receipts:
        merge.take(receipt)
    merge.close(returned_bytes)


EDITED = ((0, 8),)
MUTATIONS: list[tuple[int, str, Callable[[], list[StateReceipt]], Reason]] = [
    (4, "d_v", lambda: [RAM, remade(u=FLASH.u[..., :-1])], Reason.STATE_SHAPE),
    (5, "fp16", lambda: [RAM, half("u")], Reason.STATE_SCHEMA_MISMATCH),
    (6, "m missing", lambda: [RAM, remade(m=None)], Reason.NO_NORMALISATION_MASS),
    (7, "l missing", lambda: [RAM, remade(l=None)], Reason.NO_NORMALISATION_MASS),
    (8, "output only", lambda: [RAM, remade(m=None, l=None)], Reason.NO_NORMALISATION_MASS),
    (9, "l is 0", lambda: [RAM, with_value("l", 0.0)], Reason.EMPTY_SUPPORT),
    (10, "l negative", lambda: [RAM, with_value("l", -1.0)], Reason.STATE_INVALID),
    (11, "m NaN", lambda: [RAM, with_value("m", np.nan)], Reason.STATE_INVALID),
    (12, "tenant", lambda: [RAM, changed(tenant_namespace="another")], Reason.TENANT_MISMATCH),
    (13, "request", lambda: [RAM, changed(request_id="r2")], Reason.QUERY_IDENTITY_MISMATCH),
    (14, "request generation", lambda: [RAM, changed(request_generation=4)], Reason.REQUEST_STALE),
    (15, "checkpoint", lambda: [RAM, changed(checkpoint_generation="step-9")], Reason.MODEL_MISMATCH),
    (16, "layer", lambda: [RAM, changed(layer=0)], Reason.QUERY_IDENTITY_MISMATCH),
    (17, "query heads", lambda: [RAM, changed(query_heads=(0, 2))], Reason.QUERY_IDENTITY_MISMATCH),
    (18, "KV heads", lambda: [RAM, changed(kv_heads=(1, 2))], Reason.QUERY_IDENTITY_MISMATCH),
    (18, "KV heads unnamed", lambda: [RAM, changed(kv_heads=None)], Reason.HEAD_AMBIGUOUS),
    (19, "mapping", lambda: [RAM, changed(query_to_kv=(0, 1, 0, 1))], Reason.HEAD_MAPPING_MISMATCH),
    (20, "position", lambda: [RAM, changed(first_query_position=7)], Reason.QUERY_IDENTITY_MISMATCH),
    (20, "query digest", lambda: [RAM, changed(query_sha256=OTHER)], Reason.QUERY_IDENTITY_MISMATCH),
    (21, "mask", lambda: [RAM, changed(mask_sha256=OTHER)], Reason.MASK_MISMATCH),
    (
        22,
        "position schema",
        lambda: [RAM, changed(position_contract_sha256=OTHER)],
        Reason.POSITION_CONTRACT_MISMATCH,
    ),
    (22, "position epoch", lambda: [RAM, changed(position_epoch=1)], Reason.POSITION_CONTRACT_MISMATCH),
    (23, "scale", lambda: [RAM, changed(score_scale=0.25)], Reason.SCORE_SCALE_MISMATCH),
    (24, "schema", lambda: [RAM, changed(state_schema="fp32-u-v1")], Reason.STATE_SCHEMA_MISMATCH),
    (25, "digest", lambda: [RAM, changed(support_sha256=OTHER)], Reason.SUPPORT_DIGEST_MISMATCH),
    (26, "descriptor", lambda: [RAM, changed(support=EDITED)], Reason.SUPPORT_DIGEST_MISMATCH),
    (27, "one row twice", lambda: [RAM, state("flash", (0, 17))], Reason.SUPPORT_OVERLAP),
    (27, "a range inside", lambda: [RAM, state("flash", (20, 24))], Reason.SUPPORT_OVERLAP),
    (28, "twice", lambda: [RAM, FLASH, FLASH], Reason.DUPLICATE_RECEIPT),
    (29, "row missing", lambda: [RAM, state("flash", (0, 15))], Reason.SUPPORT_GAP),
    (30, "producer missing", lambda: [RAM, state("ram", (0, 16))], Reason.RECEIPT_COUNT),
    (
        31,
        "row outside",
        lambda: [state("ram", (16, 32), (32, 41)), FLASH],
        Reason.SUPPORT_OUT_OF_RANGE,
    ),
    (32, "producer's build", lambda: [RAM, changed(producer_generation=1)], Reason.PARTIAL_RECEIPT_STALE),
    (33, "algebra", lambda: [RAM, changed(merge_revision="f32/0")], Reason.PARTIAL_RECEIPT_STALE),
    (33, "no algebra", lambda: [RAM, changed(merge_revision=None)], Reason.PARTIAL_RECEIPT_INCOMPLETE),
    (34, "checksum", lambda: [RAM, changed(checksum=FLASH.checksum ^ 1)], Reason.CHECKSUM_MISMATCH),
    (34, "flipped bit", lambda: [RAM, changed(u=-FLASH.u)], Reason.CHECKSUM_MISMATCH),
    (35, "no event", lambda: [RAM, changed(completed=None)], Reason.NOT_VISIBLE),
    (36, "after the deadline", lambda: [RAM, changed(completed=102.5)], Reason.LATE_RECEIPT),
]


@pytest.mark.parametrize(
    ("receipts", "reason"),
    [pytest.param(make, reason, id=f"{number}-{name}") for number, name, make, reason in MUTATIONS],
)
def test_one_wrong_field_has_one_reason(receipts: Callable[[], list[StateReceipt]], reason: Reason) -> None:
    merge_all(TERMS, [FLASH, RAM], 3 * ONE)
    assert refusal(lambda: merge_all(TERMS, receipts(), 3 * ONE)) is reason


def test_bytes_of_one_producer_are_not_those_of_all() -> None:
    """Mutation 3: P left out of what was returned."""
    assert refusal(lambda: merge_all(TERMS, [FLASH, RAM], ONE)) is Reason.TRAFFIC_MISMATCH


@pytest.mark.parametrize("came", [[FLASH, RAM], [FLASH]], ids=["answered", "given up"])
def test_states_after_the_answer_are_late(came: list[StateReceipt]) -> None:
    """Mutation 37: what closes a merge is the answer, or the end of this plan for it."""
    merge = StateMerge(TERMS)
    for receipt in came:
        merge.take(receipt)
    if len(came) == 2:
        merge.close(3 * ONE)
    else:
        assert refusal(lambda: merge.close(ONE)) is Reason.SUPPORT_GAP
    assert refusal(lambda: merge.take(RAM)) is Reason.LATE_RECEIPT


def test_a_producer_without_rows_declares_it() -> None:
    three = dataclasses.replace(TERMS, producers=(*TERMS.producers, Producer("hbm", 1)))
    declared = state("hbm", producer_generation=1)
    merge_all(three, [declared, FLASH, RAM], 4 * ONE)
    assert refusal(lambda: merge_all(three, [FLASH, RAM], 3 * ONE)) is Reason.RECEIPT_COUNT
    mass = remade(support=(), support_sha256=ranges_digest(()))
    assert refusal(lambda: merge_all(TERMS, [RAM, mass], 3 * ONE)) is Reason.STATE_INVALID
    values = dataclasses.replace(declared, u=np.full_like(declared.u, np.nan))
    values = dataclasses.replace(values, checksum=states_checksum(values.m, values.l, values.u))
    assert refusal(lambda: merge_all(three, [values, FLASH, RAM], 4 * ONE)) is Reason.STATE_INVALID


def test_queries_before_a_chunk_have_nothing_of_it() -> None:
    """A block of a prefill: the first queries stand before the rows of its last chunk."""
    block = dataclasses.replace(TERMS, first_query_position=30, queries=10)

    def receipt(producer: str, *support: tuple[int, int], poisoned: str = "") -> StateReceipt:
        n = len(support)
        m, l = np.zeros((n, 10, HEADS), np.float32), np.ones((n, 10, HEADS), np.float32)
        for at, (first, _) in enumerate(support):
            hidden = first > 30 + np.arange(10)
            m[at, hidden], l[at, hidden] = -np.inf, 0.0
        u = np.zeros((n, 10, HEADS, WIDTH), np.float32)
        last = max(range(n), key=lambda at: support[at])
        if poisoned == "l":
            l[last, 0] = 1.0
        elif poisoned == "u":
            u[last, 0, 1, 2] = np.nan
        elif poisoned == "all":
            m[last, 0], l[last, 0] = 0.0, 1.0
        made = state(producer, *support, m=m, l=l, u=u, first_query_position=30, queries=10)
        return dataclasses.replace(made, checksum=states_checksum(m, l, u))

    flash = receipt("flash", (0, 16))
    merge_all(block, [flash, receipt("ram", (16, 32), (32, 40))], 30 * ONE)
    for what in ("l", "u", "all"):
        for support in (((16, 32), (32, 40)), ((32, 40), (16, 32))):
            leaked = receipt("ram", *support, poisoned=what)
            found = refusal(lambda leaked=leaked: merge_all(block, [flash, leaked], 30 * ONE))  # type: ignore[misc]
            assert found is Reason.STATE_INVALID, (what, support)


def test_receipts_may_arrive_in_any_order_and_in_parts() -> None:
    parts = dataclasses.replace(TERMS, producers=(Producer("ram", 2, 2), Producer("flash", 2)))
    merge_all(parts, [state("ram", (32, 40)), FLASH, state("ram", (16, 32))], 3 * ONE)


def test_the_catalogue_is_whole() -> None:
    apart = {3, 37}
    assert {number for number, *_ in MUTATIONS} | apart == set(range(3, 38))


# The order of checks.

Defect = Callable[[dict[str, object]], object]


def field(**change: object) -> Defect:
    return lambda made: made.update(change)


def of_l(change: Callable[[NDArray[np.float32]], NDArray[np.float32] | None]) -> Defect:
    def made(fields: dict[str, object]) -> None:
        l = fields["l"]
        assert isinstance(l, np.ndarray)
        changed_l = change(l)
        fields["l"] = l if changed_l is None else changed_l

    return made


def shorter_u(fields: dict[str, object]) -> None:
    fields["u"] = FLASH.u[..., :-1]


# In the order of E.5. What a check reads is the only thing that each of these makes wrong.
LADDER: list[tuple[str, Defect, Reason]] = [
    ("no algebra", field(merge_revision=None), Reason.PARTIAL_RECEIPT_INCOMPLETE),
    ("schema", field(state_schema="another"), Reason.STATE_SCHEMA_MISMATCH),
    ("checksum", field(checksum=FLASH.checksum ^ 1), Reason.CHECKSUM_MISMATCH),
    ("tenant", field(tenant_namespace="another"), Reason.TENANT_MISMATCH),
    ("request", field(request_id="r2"), Reason.QUERY_IDENTITY_MISMATCH),
    ("request generation", field(request_generation=4), Reason.REQUEST_STALE),
    ("checkpoint", field(checkpoint_generation="step-9"), Reason.MODEL_MISMATCH),
    ("unnamed heads", field(kv_heads=None), Reason.HEAD_AMBIGUOUS),
    ("layer", field(layer=0), Reason.QUERY_IDENTITY_MISMATCH),
    ("mapping", field(query_to_kv=(0, 1, 0, 1)), Reason.HEAD_MAPPING_MISMATCH),
    ("mask", field(mask_sha256=OTHER), Reason.MASK_MISMATCH),
    ("positions", field(position_contract_sha256=OTHER), Reason.POSITION_CONTRACT_MISMATCH),
    ("scale", field(score_scale=0.25), Reason.SCORE_SCALE_MISMATCH),
    ("support digest", field(support_sha256=OTHER), Reason.SUPPORT_DIGEST_MISMATCH),
    ("no m", field(m=None), Reason.NO_NORMALISATION_MASS),
    ("l of fewer heads", of_l(lambda l: l[..., :-1]), Reason.STATE_SHAPE),
    ("l is 0", of_l(lambda l: l * np.array([0, 1, 1, 1], np.float32)[: l.shape[-1]]), Reason.EMPTY_SUPPORT),
    (
        "l negative",
        of_l(lambda l: l * np.array([1, -1, 1, 1], np.float32)[: l.shape[-1]]),
        Reason.STATE_INVALID,
    ),
    ("u", shorter_u, Reason.STATE_SHAPE),
    ("producer", field(producer_generation=1), Reason.PARTIAL_RECEIPT_STALE),
]


def with_defects(*at: int) -> StateReceipt:
    fields: dict[str, object] = {one.name: getattr(FLASH, one.name) for one in dataclasses.fields(FLASH)}
    wrong_sum = any(LADDER[one][0] == "checksum" for one in at)
    for one in at:
        LADDER[one][1](fields)
    fields["checksum"] = states_checksum(fields["m"], fields["l"], fields["u"]) ^ wrong_sum  # type: ignore[arg-type]
    return StateReceipt(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", range(len(LADDER)), ids=[name for name, *_ in LADDER])
def test_a_receipt_with_two_defects_is_refused_with_the_earlier_one(first: int) -> None:
    name, _, reason = LADDER[first]
    assert refusal(lambda: merge_all(TERMS, [RAM, with_defects(first)], 3 * ONE)) is reason, name
    for second in range(first + 1, len(LADDER)):
        for order in ((first, second), (second, first)):
            receipt = with_defects(*order)
            found = refusal(lambda receipt=receipt: merge_all(TERMS, [RAM, receipt], 3 * ONE))  # type: ignore[misc]
            assert found is reason, (name, LADDER[second][0])


MERGES: list[tuple[str, Callable[[], object], Reason]] = [
    (
        "stale before twice",
        lambda: merge_all(TERMS, [RAM, FLASH, changed(producer_generation=1)], 3 * ONE),
        Reason.PARTIAL_RECEIPT_STALE,
    ),
    (
        "twice before overlap",
        lambda: merge_all(TERMS, [RAM, FLASH, FLASH], 3 * ONE),
        Reason.DUPLICATE_RECEIPT,
    ),
    (
        "overlap before outside",
        lambda: merge_all(TERMS, [RAM, state("flash", (30, 41))], 3 * ONE),
        Reason.SUPPORT_OVERLAP,
    ),
    (
        "outside before gap",
        lambda: merge_all(TERMS, [state("ram", (16, 32), (32, 41))], 2 * ONE),
        Reason.SUPPORT_OUT_OF_RANGE,
    ),
    ("gap before count", lambda: merge_all(TERMS, [RAM], 2 * ONE), Reason.SUPPORT_GAP),
    (
        "empty before count",
        lambda: merge_all(dataclasses.replace(TERMS, visible=0), [], 0),
        Reason.EMPTY_SUPPORT,
    ),
    (
        "count before bytes",
        lambda: merge_all(TERMS, [RAM, state("ram", (0, 16))], ONE),
        Reason.RECEIPT_COUNT,
    ),
    (
        "bytes before event",
        lambda: merge_all(TERMS, [RAM, changed(completed=None)], ONE),
        Reason.TRAFFIC_MISMATCH,
    ),
    (
        "event before lateness",
        lambda: merge_all(
            TERMS, [dataclasses.replace(RAM, completed=103.0), changed(completed=None)], 3 * ONE
        ),
        Reason.NOT_VISIBLE,
    ),
]


@pytest.mark.parametrize(
    ("merge", "reason"), [pytest.param(merge, reason, id=name) for name, merge, reason in MERGES]
)
def test_a_merge_with_two_defects_is_refused_with_the_earlier_one(
    merge: Callable[[], object], reason: Reason
) -> None:
    assert refusal(merge) is reason
