"""From samples to a reading: each once, none of before the window, and nothing favourable out of a gap."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from aiohttp import web

from kvtier_evidence.carry import Carry
from kvtier_evidence.external import Above, ExternalReading, Form
from kvtier_evidence.gatespec import ExternalTerms, GateSpec
from kvtier_evidence.judge import judge
from kvtier_evidence.metrics import EXTERNAL, METRICS
from kvtier_evidence.verdicts import Basis, Reason, Verdict
from kvtier_operator.external.prometheus import PrometheusOptions, PrometheusProvider
from kvtier_operator.external.query import Source, parse_query
from kvtier_operator.external.reading import GateBook, Pace
from kvtier_operator.external.samples import SourceError
from kvtier_operator.external.source import ExternalReader
from tests.unit.evidence.evidence_builders import Counts, evidence, key, terms
from tests.unit.external.prometheus_fake import FakePrometheus, application, native, serving

OPENED = 1000.0
PACE = Pace(scrape=30.0, lag=15.0)
COUNTERS = "counters(errors; requests)"


def gate(text: str = COUNTERS, limit: str = "0.05", *, point: bool = False) -> GateSpec:
    form = parse_query(text).form
    histogram = form in (Form.CLASSIC_HISTOGRAM, Form.EXPONENTIAL_HISTOGRAM)
    return GateSpec(
        "errors",
        METRICS[EXTERNAL],
        Decimal(limit),
        Decimal(99) if histogram else None,
        min_samples=100,
        design_effect=Decimal(1),
        external=ExternalTerms(form, True, point=point),
    )


async def read(
    fake: FakePrometheus, *nows: float, text: str = COUNTERS, limit: str = "0.05", point: bool = False
) -> ExternalReading:
    """The reading at the last of these times, each of them read."""
    spec = gate(text, limit, point=point)
    book = GateBook(spec, parse_query(text), OPENED, PACE)
    async with serving(application(fake)) as url:
        provider = PrometheusProvider(PrometheusOptions(url))
        for now in nows:
            got = await book.read(provider, now, 10.0)
        await provider.close()
    return got


def counting(errors: dict[float, int], requests: dict[float, int], instance: str = "a:1") -> FakePrometheus:
    fake = FakePrometheus()
    fake.count("errors", list(errors.items()), instance=instance)
    fake.count("requests", list(requests.items()), instance=instance)
    return fake


async def test_only_what_came_since_the_window_opened_and_each_scrape_once() -> None:
    fake = counting(
        {960: 50, 990: 50, 1020: 51, 1050: 52, 1080: 52},
        {960: 9000, 990: 9100, 1020: 9200, 1050: 9300, 1080: 9400},
    )
    got = await read(fake, 1066.0, 1066.0, 1096.0, 1096.0)
    assert got.error is None
    assert got.above == Above(300, 2, 2, True)
    assert (got.blocks.blocks, got.complete, got.basis) == (3, True, Basis.ANYTIME)


async def test_a_restarted_operator_reads_the_window_again() -> None:
    times = range(960, 8000, 30)
    fake = counting({t: t // 300 for t in times}, {t: t for t in times})
    first = await read(fake, *(float(t) for t in range(1010, 8000, 100)), 7995.0)
    again = await read(fake, 7990.0, 7995.0)
    assert first.above is not None and again.above is not None
    assert again.above == first.above
    assert again.complete


async def test_a_reset_starts_from_zero() -> None:
    fake = counting({990: 5, 1020: 6, 1050: 1, 1080: 1}, {990: 100, 1020: 150, 1050: 20, 1080: 60})
    got = await read(fake, 1096.0)
    assert got.above == Above(50 + 60, 2, 2, True)


async def test_a_gap_in_which_a_reset_would_not_show_stays_an_error() -> None:
    fake = counting({990: 5, 1020: 6, 1200: 7}, {990: 100, 1020: 150, 1200: 999})
    got = await read(fake, 1216.0, 1220.0)
    assert got.error is Reason.RESET_UNKNOWN
    assert verdict(got).verdict is Verdict.PROVIDER_ERROR


async def test_a_series_that_ends_while_others_go_on_cannot_be_told_from_a_reset() -> None:
    fake = counting({990: 5, 1020: 6}, {990: 100, 1020: 150, 1050: 200})
    assert (await read(fake, 1066.0)).error is Reason.RESET_UNKNOWN


async def test_a_process_that_is_new_counts_from_its_first_scrape() -> None:
    fake = counting({990: 0, 1020: 0, 1050: 0}, {990: 100, 1020: 150, 1050: 200})
    fake.count("errors", [(1020.0, 70), (1050.0, 71)], instance="b:1")
    fake.count("requests", [(1020.0, 5000), (1050.0, 5040)], instance="b:1")
    assert (await read(fake, 1066.0)).above == Above(140, 1, 1, True)


async def test_units_of_a_process_without_the_bad_counter_are_missing() -> None:
    """Missing is worst: over the limit for Pass, under it for Fail."""
    fake = counting({990: 0, 1020: 0}, {990: 100, 1020: 1100})
    fake.count("requests", [(990.0, 10), (1020.0, 40)], instance="b:1")
    assert (await read(fake, 1036.0)).above == Above(1030, 30, 0, True)


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        pytest.param(COUNTERS, 5000, id="one-of-two"),
        pytest.param(COUNTERS, 0, id="both"),
        pytest.param("exponential(latency)", 0, id="histogram"),
        pytest.param("depth", 0, id="value"),
    ],
)
async def test_a_selector_that_matches_nothing_is_no_data(text: str, requests: int) -> None:
    fake = FakePrometheus(expressions={"depth": {"resultType": "vector", "result": []}})
    if requests:
        fake.count("requests", [(990.0, 100), (1020.0, requests)])
    got = await read(fake, 1036.0, text=text)
    assert (got.above, got.value, got.error) == (None, None, None)
    assert verdict(got, text).reason is Reason.NO_DATA


async def test_stale_samples_are_an_error() -> None:
    fake = counting({990: 0, 1020: 0}, {990: 100, 1020: 1100})
    got = await read(fake, 1036.0, 1200.0)
    assert got.error is Reason.QUERY_FAILED
    assert got.detail == "no sample for longer than two intervals"


async def test_more_bad_than_there_are_is_an_error() -> None:
    fake = counting({990: 0, 1020: 9}, {990: 100, 1020: 105})
    assert (await read(fake, 1036.0)).error is Reason.QUERY_FAILED


LATENCY = "buckets(latency_bucket)"


def buckets(*rows: tuple[float, dict[str, int]]) -> FakePrometheus:
    fake = FakePrometheus()
    for le in rows[0][1]:
        fake.count("latency_bucket", [(at, counts[le]) for at, counts in rows], le=le)
    return fake


async def test_a_classic_histogram_with_the_edge_and_without() -> None:
    fake = buckets(
        (990.0, {"0.1": 10, "0.5": 20, "+Inf": 20}), (1020.0, {"0.1": 900, "0.5": 1015, "+Inf": 1020})
    )
    got = await read(fake, 1036.0, text=LATENCY, limit="0.5")
    assert (got.above, got.basis, got.value) == (Above(1000, 5, 5, True), Basis.ANYTIME, 0.5)
    got = await read(fake, 1036.0, text=LATENCY, limit="0.3")
    assert (got.above, got.basis) == (Above(1000, 110, 5, False), Basis.BRACKET)


async def test_an_exponential_histogram_whose_scale_falls() -> None:
    fake = FakePrometheus()
    fake.count(
        "latency",
        [
            (990.0, native(3, {0: 5})),
            (1020.0, native(3, {0: 900, 8: 5})),
            (1050.0, native(1, {0: 1000, 2: 6})),
        ],
    )
    got = await read(fake, 1066.0, text="exponential(latency)", limit="1.9")
    assert got.above is not None
    assert (got.above.n, got.above.down) == (1001, 6)


async def test_a_point_breaches_once_per_look_and_a_good_value_ends_it() -> None:
    fake = FakePrometheus()
    found = []
    async with serving(application(fake)) as url:
        provider = PrometheusProvider(PrometheusOptions(url))
        book = GateBook(gate("depth", "2"), parse_query("depth"), OPENED, PACE)
        for now, value in ((1010.0, "3"), (1010.0, "3"), (1020.0, "5"), (1030.0, "1"), (1040.0, "9")):
            fake.expressions["depth"] = {"resultType": "scalar", "result": [now, value]}
            found.append((await book.read(provider, now, 10.0)).breaches)
        await provider.close()
    assert found == [1, 1, 2, 0, 1]


async def test_a_declared_point_takes_its_count() -> None:
    fake = FakePrometheus(
        expressions={
            "avg": {"resultType": "scalar", "result": [1010.0, "1.5"]},
            "n": {"resultType": "scalar", "result": [1010.0, "800"]},
        }
    )
    got = await read(fake, 1010.0, text="point(avg; n)", limit="2", point=True)
    assert (got.value, got.count, got.basis) == (1.5, 800, Basis.POINT)


@pytest.mark.parametrize("old", [("avg",), ("n",), ("avg", "n")], ids=["value", "count", "both"])
async def test_a_point_that_nobody_tells_any_more_is_an_error(old: tuple[str, ...]) -> None:
    """What is pushed stays where it is: a source that fell silent must not pass on its last word."""
    times = {name: 1010.0 if name in old else 1100.0 for name in ("avg", "n")}
    fake = FakePrometheus(
        expressions={
            "avg": {"resultType": "scalar", "result": [times["avg"], "1.5"]},
            "n": {"resultType": "scalar", "result": [times["n"], "800"]},
        }
    )
    got = await read(fake, 1100.0, text="point(avg; n)", limit="2", point=True)
    assert got.error is Reason.QUERY_FAILED


def verdict(got: ExternalReading, text: str = COUNTERS) -> Any:
    look = replace(evidence(Counts(), window=key()), external={"errors": got})
    return judge([gate(text)], look, terms(0.5), Carry()).results[0]


async def test_a_good_source_can_pass_and_a_bad_one_fails() -> None:
    good = counting(dict.fromkeys(range(990, 1300, 30), 0), {t: 10 * t for t in range(990, 1300, 30)})
    assert verdict(await read(good, 1296.0)).verdict is Verdict.PASS
    bad = counting({t: 2 * t for t in range(990, 1300, 30)}, {t: 10 * t for t in range(990, 1300, 30)})
    assert verdict(await read(bad, 1296.0)).verdict is Verdict.FAIL


class Failing:
    async def counters(self, selectors: object, since: float, until: float) -> Any:
        raise SourceError("down")

    histograms = counters

    async def point(self, expression: str, at: float) -> Any:
        raise SourceError("down")


@pytest.mark.parametrize("text", [COUNTERS, "exponential(latency)", "depth", "otlp: counters(a; b)"])
async def test_nothing_unreadable_raises_or_passes(text: str) -> None:
    reader = ExternalReader({Source.PROMETHEUS: Failing()}, PACE)
    spec, query = gate(text), parse_query(text)
    got = await reader.read(key(), [(spec, query)], opened_at=OPENED, now=1100.0, interval=10.0)
    assert got["errors"].error is Reason.QUERY_FAILED
    look = replace(evidence(Counts(), window=key()), external=got)
    result = judge([spec], look, terms(0.5), Carry()).results[0]
    assert result.verdict is Verdict.PROVIDER_ERROR


def matrix(*rows: Any) -> dict[str, Any]:
    return {"resultType": "matrix", "result": list(rows)}


HALF_OPEN = {"count": "1", "sum": "1", "buckets": [[0, "1", "+Inf", "1"]]}
MISSHAPEN: dict[str, tuple[str, Any]] = {
    "no rows": (COUNTERS, {"resultType": "matrix"}),
    "a row without labels": (COUNTERS, matrix({})),
    "a sample that is null": (COUNTERS, matrix({"metric": {"instance": "a"}, "values": [[1010.0, None]]})),
    "a bucket without end": (
        "exponential(x)",
        matrix({"metric": {"instance": "a"}, "histograms": [[1010.0, HALF_OPEN]]}),
    ),
    "a count without end": ("point(a; b)", {"resultType": "scalar", "result": [1010.0, "+Inf"]}),
    "a value that is null": ("a", {"resultType": "vector", "result": [{"value": None}]}),
}


@pytest.mark.parametrize("case", MISSHAPEN)
async def test_an_answer_of_another_shape_is_unreadable_and_harms_no_other_gate(case: str) -> None:
    text, data = MISSHAPEN[case]
    fake = FakePrometheus(answer=web.json_response({"status": "success", "data": data}))
    got = await read(fake, 1030.0, text=text, point=text.startswith("point"))
    assert got.error is Reason.QUERY_FAILED


async def test_another_window_begins_other_books() -> None:
    fake = counting({990: 0, 1020: 0, 1050: 1}, {990: 100, 1020: 200, 1050: 300})
    async with serving(application(fake)) as url:
        provider = PrometheusProvider(PrometheusOptions(url))
        reader = ExternalReader({Source.PROMETHEUS: provider}, PACE)
        asked = [(gate(), parse_query(COUNTERS))]
        first = await reader.read(key(fence=3), asked, opened_at=OPENED, now=1066.0, interval=10.0)
        second = await reader.read(key(fence=4), asked, opened_at=1030.0, now=1066.0, interval=10.0)
        reader.forget(key().rollout_uid)
        third = await reader.read(key(fence=4), asked, opened_at=1030.0, now=1066.0, interval=10.0)
        await provider.close()
    assert [one["errors"].above.n for one in (first, second, third)] == [200, 100, 100]  # type: ignore[union-attr]
