"""Partial attention states that do not belong to the query, or not together, are refused (E.5)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kvtier_core.errors import Reason
from kvtier_core.receiptcheck.partial import (
    MergeTerms,
    PartialReceipt,
    check_merge,
    check_partial,
    state_checksum,
    support_digest,
)
from tests.unit.core.fixture_f2 import OTHER, fixture, mutate, positions, refusal

VALID = fixture()


# Partial states (E.5).


def partial(producer: str, *support: int, **changes: object) -> PartialReceipt:
    found = positions(*support)
    m, l, u = (1.5, 2.0, np.arange(4, dtype=np.float32))
    if not support:
        m, l, u = -math.inf, 0.0, np.zeros(4, dtype=np.float32)
    fields: dict[str, object] = {
        "producer": producer,
        "producer_generation": 2,
        "support": found,
        "support_sha256": support_digest(found),
        "m": m,
        "l": l,
        "u": u,
        "checksum": state_checksum(m, l, u),
    }
    return dataclasses.replace(VALID.partial, **{**fields, **changes})  # type: ignore[arg-type]


TWO = MergeTerms(
    operation=VALID.operation,
    request_id="r1",
    score_scale=0.5,
    merge_revision="m-l-u/1",
    producers=(("gpu", 2), ("cpu", 2)),
    required=np.arange(8, dtype=np.int64),
)
STATE = (2 + 4) * 4


def remade(**state: object) -> dict[str, object]:
    """Changes of a state with the checksum that fits them."""
    whole = {"m": 1.5, "l": 2.0, "u": np.arange(4, dtype=np.float32), **state}
    return {**state, "checksum": state_checksum(whole["m"], whole["l"], whole["u"])}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state_schema": "fp16-m-l-u-v1"}, Reason.STATE_SCHEMA_MISMATCH),
        ({"checksum": 1}, Reason.CHECKSUM_MISMATCH),
        ({"tenant_namespace": "another"}, Reason.TENANT_MISMATCH),
        ({"request_id": "r2"}, Reason.QUERY_IDENTITY_MISMATCH),
        ({"request_generation": 2}, Reason.REQUEST_STALE),
        ({"checkpoint_generation": "step-9"}, Reason.MODEL_MISMATCH),
        ({"query_head": None}, Reason.HEAD_AMBIGUOUS),
        ({"layer": 0}, Reason.QUERY_IDENTITY_MISMATCH),
        ({"query_head": 3}, Reason.QUERY_IDENTITY_MISMATCH),
        ({"kv_head": 0}, Reason.QUERY_IDENTITY_MISMATCH),
        ({"query_to_kv": (0, 1, 0, 1)}, Reason.HEAD_MAPPING_MISMATCH),
        ({"query_position": 7}, Reason.QUERY_IDENTITY_MISMATCH),
        ({"query_sha256": OTHER}, Reason.QUERY_IDENTITY_MISMATCH),
        ({"mask_sha256": OTHER}, Reason.MASK_MISMATCH),
        ({"position_contract_sha256": OTHER}, Reason.POSITION_CONTRACT_MISMATCH),
        ({"score_scale": 0.25}, Reason.SCORE_SCALE_MISMATCH),
        ({"support": positions(0, 1, 2)}, Reason.SUPPORT_DIGEST_MISMATCH),
        (remade(m=None), Reason.NO_NORMALISATION_MASS),
        (remade(l=None), Reason.NO_NORMALISATION_MASS),
        (remade(l=0.0), Reason.EMPTY_SUPPORT),
        (remade(m=math.inf), Reason.STATE_INVALID),
        (remade(m=math.nan), Reason.STATE_INVALID),
        (remade(l=-2.0), Reason.STATE_INVALID),
        (remade(l=math.nan), Reason.STATE_INVALID),
        (remade(u=np.arange(3, dtype=np.float32)), Reason.STATE_SHAPE),
        (remade(u=np.arange(4, dtype=np.float64)), Reason.STATE_SCHEMA_MISMATCH),
        ({"producer_generation": 1}, Reason.PARTIAL_RECEIPT_STALE),
        ({"producer": "fpga"}, Reason.PARTIAL_RECEIPT_STALE),
        ({"merge_revision": "m-l-u/0"}, Reason.PARTIAL_RECEIPT_STALE),
        ({"merge_revision": None}, Reason.PARTIAL_RECEIPT_INCOMPLETE),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_a_partial_state_with_one_wrong_field_is_refused(changes: dict[str, object], reason: Reason) -> None:
    check_partial(TWO, partial("gpu", 0, 3, 7))
    changed = dataclasses.replace(partial("gpu", 0, 3, 7), **changes)  # type: ignore[arg-type]
    assert refusal(lambda: check_partial(TWO, changed)) is reason


GPU, CPU = partial("gpu", 0, 3, 7), partial("cpu", 1, 2, 4, 5, 6)


@pytest.mark.parametrize(
    ("receipts", "returned", "terms", "reason"),
    [
        ([GPU, GPU, CPU], 3 * STATE, TWO, Reason.DUPLICATE_RECEIPT),
        ([GPU, partial("cpu", 1, 2, 3, 4, 5, 6)], 2 * STATE, TWO, Reason.SUPPORT_OVERLAP),
        ([GPU, partial("cpu", 1, 2, 4, 5)], 2 * STATE, TWO, Reason.SUPPORT_GAP),
        ([GPU], STATE, TWO, Reason.SUPPORT_GAP),
        ([], 0, TWO, Reason.SUPPORT_GAP),
        ([GPU, partial("cpu", 1, 2, 4, 5, 6, 8)], 2 * STATE, TWO, Reason.SUPPORT_OUT_OF_RANGE),
        ([GPU, partial("cpu", 1, 2, 4, 5, 6, completed=None)], 2 * STATE, TWO, Reason.NOT_VISIBLE),
        (
            [GPU, CPU],
            2 * STATE,
            mutate(TWO, "producers", (*TWO.producers, ("nvme", 2))),
            Reason.RECEIPT_COUNT,
        ),
        ([GPU, CPU], STATE, TWO, Reason.TRAFFIC_MISMATCH),
        ([GPU, partial("cpu", 1, 2, 4, 5, 6, completed=102.5)], 2 * STATE, TWO, Reason.LATE_RECEIPT),
        ([GPU, CPU], 2 * STATE, mutate(TWO, "answered", True), Reason.LATE_RECEIPT),
        (
            [partial("gpu"), partial("cpu")],
            2 * STATE,
            mutate(TWO, "required", positions()),
            Reason.EMPTY_SUPPORT,
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Reason) else "",
)
def test_states_that_do_not_make_one_answer_are_refused(
    receipts: list[PartialReceipt], returned: int, terms: MergeTerms, reason: Reason
) -> None:
    check_merge(TWO, [CPU, GPU], 2 * STATE)
    assert refusal(lambda: check_merge(terms, receipts, returned)) is reason


def test_an_empty_partition_is_declared_and_not_left_out() -> None:
    three = mutate(TWO, "producers", (*TWO.producers, ("nvme", 2)))
    check_merge(three, [GPU, CPU, partial("nvme")], 3 * STATE)
    assert refusal(lambda: check_merge(three, [GPU, CPU], 2 * STATE)) is Reason.RECEIPT_COUNT
