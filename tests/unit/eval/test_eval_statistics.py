"""Intervals and paired tests against their definitions."""

from __future__ import annotations

import itertools
import math

import pytest

from kvtier_eval.statistics import holm, mcnemar, quantile, wilson


@pytest.mark.parametrize(
    "hits, tries, low, high",
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        pytest.param(81, 263, 0.2553, 0.3662, id="newcombe-81-263"),
        pytest.param(15, 148, 0.0624, 0.1605, id="newcombe-15-148"),
        pytest.param(0, 20, 0.0, 0.1611, id="newcombe-0-20"),
        pytest.param(1, 29, 0.0061, 0.1718, id="newcombe-1-29"),
        pytest.param(29, 29, 0.8830, 1.0, id="all"),
    ],
)
def test_wilson_is_the_published_interval(hits: int, tries: int, low: float, high: float) -> None:
    got = wilson(hits, tries)
    assert (got.low, got.high) == pytest.approx((low, high), abs=6e-5)
    assert got.rate == hits / tries


def test_nothing_tried_says_nothing() -> None:
    got = wilson(0, 0)
    assert (got.low, got.high) == (0.0, 1.0) and math.isnan(got.rate)


@pytest.mark.parametrize("hits, tries, alpha", [(3, 2, 0.05), (-1, 2, 0.05), (1, 2, 0.0), (1, 2, 1.0)])
def test_wilson_refuses_what_is_no_count(hits: int, tries: int, alpha: float) -> None:
    with pytest.raises(ValueError, match=r"hits|\d of|alpha"):
        wilson(hits, tries, alpha)


@pytest.mark.parametrize("b, c", [(0, 0), (5, 0), (0, 5), (3, 3), (9, 2), (1, 12)])
def test_mcnemar_is_the_sum_over_all_signs(b: int, c: int) -> None:
    """Over all 2^(b+c) ways in which discordant pairs may fall: those at least as uneven."""
    first = [True] * b + [False] * c + [True, False]
    second = [False] * b + [True] * c + [True, False]
    got = mcnemar(first, second)
    ways = list(itertools.product([0, 1], repeat=b + c))
    uneven = sum(abs(2 * sum(way) - (b + c)) >= abs(b - c) for way in ways)
    assert (got.only_first, got.only_second) == (b, c)
    assert got.p == pytest.approx(uneven / len(ways))


def test_mcnemar_needs_pairs() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        mcnemar([True], [])


def test_holm_is_stepwise_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03, 0.9]) == pytest.approx((0.04, 0.09, 0.09, 0.9))


@pytest.mark.parametrize("q, value", [(0.0, 1.0), (0.5, 2.5), (0.1, 1.3), (1.0, 4.0)])
def test_quantiles_are_linear_between_order_statistics(q: float, value: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(value)
