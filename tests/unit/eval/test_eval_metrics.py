"""Metrics against the specification's toy (F.5) and against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtier_core.selectors.contract import (
    Budget,
    Guarantee,
    Scope,
    Selection,
    SelectionReceipt,
    Shape,
    Source,
)
from kvtier_eval.metrics import Traffic, head_metrics, persistent_mask, token_metrics

LOGITS = [2.0, 1.6, 0.4, -0.5, 1.8, 0.0, -1.0, -0.2]
VALUES = [[1, 0], [0, 1], [1, 1], [-1, 0.5], [0.5, -1], [0, -0.5], [2, 0], [-0.5, 0.25]]
ROWS = len(LOGITS)


def _mask(rows: list[int]) -> torch.Tensor:
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[rows] = True
    return mask


def _toy(
    rows: list[int],
) -> tuple[dict[str, np.ndarray], np.ndarray, torch.Tensor, np.ndarray]:
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    v = torch.tensor(VALUES, dtype=torch.float64)
    p = logits[rows].softmax(0)
    return head_metrics(
        torch.tensor([[1.0, 0.0]], dtype=torch.float64),
        torch.stack([logits, torch.zeros(ROWS, dtype=torch.float64)], dim=1)[:, None],
        v[:, None],
        _mask(rows)[None],
        _mask([0]),
        (p @ v[rows])[None],
        scale=1.0,
        evidence=_mask([1]),
        certified=None,
    )


@pytest.mark.parametrize(
    "rows, omitted, error",
    [
        pytest.param([0, 1, 5], 0.411639, 0.318648, id="rows"),
        pytest.param([0, 1, 4, 5], 0.144861, 0.103035, id="pages"),
        pytest.param([0, 2, 3, 4, 6, 7], 0.262518, 0.317605, id="clusters"),
        pytest.param(list(range(8)), 0.0, 0.0, id="dense"),
    ],
)
def test_the_toy_of_the_specification(rows: list[int], omitted: float, error: float) -> None:
    values, needle, delta, _ = _toy(rows)
    assert 1 - values["mass"][0] == pytest.approx(omitted, abs=5e-7)
    assert float(delta.norm()) == pytest.approx(error, abs=5e-7)
    assert needle[0] == (1.0 if 1 in rows else 0.0)


def test_excess_is_what_lies_beyond_the_persistent_rows() -> None:
    p = torch.tensor(LOGITS, dtype=torch.float64).softmax(0).numpy()
    values, _, _, _ = _toy([0, 1, 5])
    assert values["excess"][0] == pytest.approx((p[1] + p[5]) / (1 - p[0]))
    assert _toy([0])[0]["excess"][0] == pytest.approx(0.0)
    assert _toy(list(range(8)))[0]["excess"][0] == pytest.approx(1.0)


def test_recall_and_value_mass_count_what_they_say() -> None:
    p = torch.tensor(LOGITS, dtype=torch.float64).softmax(0).numpy()
    norms = np.linalg.norm(np.array(VALUES, dtype=float), axis=1)
    values, _, _, _ = _toy([0, 1, 5])
    assert values["recall8"][0] == pytest.approx(3 / 8)
    assert values["valueMass"][0] == pytest.approx((p * norms)[[0, 1, 5]].sum() / (p * norms).sum())
    assert np.isnan(values["support"][0]), "no row has eight times an even share"


def test_support_counts_the_rows_that_stand_out() -> None:
    n = 64
    logits = torch.zeros(n, dtype=torch.float64)
    logits[[5, 40]] = 5.0
    read = torch.zeros(1, n, dtype=torch.bool)
    read[0, [5, 6, 7]] = True
    values, _, _, _ = head_metrics(
        torch.tensor([[1.0]]),
        logits[:, None, None],
        torch.ones(n, 1, 1),
        read,
        torch.zeros(n, dtype=torch.bool),
        torch.ones(1, 1),
        scale=1.0,
        evidence=torch.zeros(n, dtype=torch.bool),
        certified=None,
    )
    assert values["support"][0] == pytest.approx(0.5)


def test_divergence_is_from_full_attention_to_the_other() -> None:
    full = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    given = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    got = token_metrics(full, given, [0, 1])
    assert got.kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2), 0.0), abs=1e-7)
    assert got.top1 == (False, True) and got.matched == 0
    assert got.loss == pytest.approx((np.log(4), -np.log(0.8)), abs=1e-7)


@pytest.mark.parametrize(
    "rows, sink, recent, kept",
    [(10, 2, 3, [0, 1, 7, 8, 9]), (10, 0, 0, [9]), (3, 4, 4, [0, 1, 2])],
)
def test_persistent_rows_are_the_first_the_last_and_the_own(
    rows: int, sink: int, recent: int, kept: list[int]
) -> None:
    assert persistent_mask(rows, sink, recent).nonzero().flatten().tolist() == kept


def _selection(rows: list[int]) -> Selection:
    receipt = SelectionReceipt(
        "test", "", "", "", 0, Source(b"", 0), Guarantee.HEURISTIC, Scope.LAYER, Budget(tokens=4),
        (0,), (0,), (0,), (0,), 0, 10, (0.0,), (0.0,), (0,), 0,
    )  # fmt: skip
    return Selection(Scope.LAYER, (np.array(rows),), (np.array(rows),), receipt)


def test_a_buffer_keeps_the_latest_rows() -> None:
    shape = Shape(1, 1, 4, 1.0)
    traffic = Traffic(shape, hot=3)
    none = np.zeros(10, dtype=np.bool_)
    none[0] = True
    for rows in ([0, 1, 2], [0, 2, 3], [0, 4, 5], [0, 3, 4]):
        traffic.add(_selection(rows), none)
    row = 2 * 4 * 4
    assert traffic.rows == 8 * row, "row 0 is persistent and counted nowhere"
    # 1 2 | 3 | 4 5, which leaves 3 4 5 | nothing new
    assert traffic.fetched == 5 * row
    assert traffic.jaccard == pytest.approx([1 / 3, 0.0, 1 / 3])
    assert traffic.index == 40
