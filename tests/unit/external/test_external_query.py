"""What a query says of its form: written, never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier_evidence.external import Form
from kvtier_operator.external.config import parse
from kvtier_operator.external.query import Query, QueryError, Source, matchers, parse_query

P, O = Source.PROMETHEUS, Source.OTLP
GOOD: dict[str, Query] = {
    "counters(errors_total; requests_total)": Query(P, Form.COUNTER_PAIR, ("errors_total", "requests_total")),
    ' counters( e{code=~"5..;"} ;t{a="b"}) ': Query(P, Form.COUNTER_PAIR, ('e{code=~"5..;"}', 't{a="b"}')),
    'buckets(latency_bucket{arm="candidate"})': Query(
        P, Form.CLASSIC_HISTOGRAM, ('latency_bucket{arm="candidate"}',)
    ),
    "exponential(latency)": Query(P, Form.EXPONENTIAL_HISTOGRAM, ("latency",)),
    "point(avg(x); sum(y))": Query(P, Form.EXPRESSION, ("avg(x)", "sum(y)")),
    "histogram_quantile(0.99, rate(x[5m]))": Query(
        P, Form.EXPRESSION, ("histogram_quantile(0.99, rate(x[5m]))",)
    ),
    "prometheus: up": Query(P, Form.EXPRESSION, ("up",)),
    'otlp: counters(http.errors; http.requests{service.name="chat"})': Query(
        O, Form.COUNTER_PAIR, ("http.errors", 'http.requests{service.name="chat"}')
    ),
    "otlp: queue.depth": Query(O, Form.GAUGE, ("queue.depth",)),
}


@pytest.mark.parametrize("text", GOOD)
def test_forms(text: str) -> None:
    assert parse_query(text) == GOOD[text]


BAD = {
    "": "empty",
    "counters(a)": "takes 2",
    "counters(a; b; c)": "takes 2",
    "counters(a;)": "takes 2",
    "buckets(a; b)": "takes 1",
    "point(a)": "takes 2",
    "counters(rate(a[5m]); b)": "raw series",
    "counters(increase(a[5m]); sum(b))": "raw series",
    "exponential(a{b='c'}[5m])": "raw series",
    "otlp: rate(a)": "raw series",
    "counters(a; b": "has no end",
    "buckets(a))": "has no end",
    "counters(a; b) > 5": "stands behind it",
    "counters(a;b) / counters(c;d)": "stands behind it",
    "otlp: exponential (a": "has no end",
    'otlp: counters(a{b=~"c"}; d)': "label=",
}


@pytest.mark.parametrize("text", BAD)
def test_refused(text: str) -> None:
    with pytest.raises(QueryError, match=BAD[text]):
        parse_query(text)


def test_matchers() -> None:
    assert matchers('a.b{c="d\\"e", f="g"}') == ("a.b", {"c": 'd"e', "f": "g"})
    assert matchers('{f="g"}') == ("", {"f": "g"})


# ---------------------------------------------------------------- the file of sources

FILE: dict[str, Any] = {
    "prometheus": {"url": "https://p", "caFile": "/ca", "tokenFile": "/t", "timeoutSeconds": 2},
    "otlp": {"tokenFile": "/t", "certFile": "/c", "keyFile": "/k"},
    "scrapeSeconds": 15,
}


def test_a_file_of_sources() -> None:
    got = parse(FILE)
    assert got.prometheus is not None and got.otlp is not None
    assert (got.prometheus.token_file, got.prometheus.timeout_seconds) == (Path("/t"), 2.0)
    assert (got.otlp.port, got.otlp.cert_file) == (4318, Path("/c"))
    assert got.pace.gap == 37.5
    assert parse({}).prometheus is None


WRONG: dict[str, tuple[Any, str]] = {
    "not a mapping": ([], "mapping"),
    "an unknown key": ({"prom": {}}, "unknown"),
    "an unknown key inside": ({"prometheus": {"url": "https://p", "password": "x"}}, "unknown"),
    "no scheme": ({"prometheus": {"url": "p:9090"}}, "neither"),
    "a password in the address": ({"prometheus": {"url": "https://me:hidden@p"}}, "tokenFile"),
    "a token over plain http": ({"prometheus": {"url": "http://p", "tokenFile": "/t"}}, "https"),
    "pushes without a token": ({"otlp": {"certFile": "/c", "keyFile": "/k"}}, "token"),
    "pushes in plain text from anywhere": ({"otlp": {"tokenFile": "/t"}}, "TLS"),
    "a certificate without its key": ({"otlp": {"tokenFile": "/t", "certFile": "/c"}}, "together"),
    "no time": ({"scrapeSeconds": 0}, "over 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_is_refused(case: str) -> None:
    raw, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as refused:
        parse(raw)
    assert "hidden" not in str(refused.value)
