"""Numbers as Kubernetes users write them, parsed exactly or refused with the field's name."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_crds import quantity as q


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (1024, 1024),
        ("1024", 1024),
        ("64Mi", 64 * 2**20),
        ("2Gi", 2 * 2**30),
        ("1G", 10**9),
        ("1k", 1000),
        ("1.5G", 1_500_000_000),
        ("0.5Ki", 512),
        ("0.1Ki", 103),  # rounded up, as Kubernetes does
        ("7Ei", 7 * 2**60),
    ],
)
def test_bytes(value: int | str, expected: int) -> None:
    assert q.parse_bytes(value, "f") == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0", 0), ("0s", 0), ("30s", 30_000), ("1h30m", 5_400_000), ("500ms", 500), ("1h2m3s4ms", 3_723_004)],
)
def test_durations(value: str, expected: int) -> None:
    assert q.parse_duration_ms(value, "f") == expected
    assert q.parse_duration(value, "f") == expected / 1000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0.05", "0.05"),
        ("5%", "0.05"),
        ("50m", "0.050"),
        (0, "0"),
        (2, "2"),
        ("12.5%", "0.125"),
        ("99999m", "99.999"),
    ],
)
def test_limits(value: int | str, expected: str) -> None:
    assert q.parse_limit(value, "f") == Decimal(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("5%", "0.05"), ("0.05", "0.05"), (0, "0"), (1, "1"), ("100%", "1"), ("99.5%", "0.995")],
)
def test_fractions(value: int | str, expected: str) -> None:
    assert q.parse_fraction(value, "f") == Decimal(expected)


PARSERS: dict[str, tuple[Callable[..., Any], str]] = {
    "bytes": (q.parse_bytes, q.QUANTITY_PATTERN),
    "duration": (q.parse_duration_ms, q.DURATION_PATTERN),
    "limit": (q.parse_limit, q.LIMIT_PATTERN),
    "fraction": (q.parse_fraction, q.FRACTION_PATTERN),
    "decimal": (q.parse_decimal, q.DECIMAL_PATTERN),
}
BAD: dict[str, list[Any]] = {
    "bytes": [
        "",
        "1 Gi",
        "-1",
        "1e3",
        "1mi",
        "Gi",
        "1.Gi",
        ".5G",
        "1GiB",
        "10m",
        1.5,
        True,
        "9Ei9",
        "1\n",
        "٣",
    ],
    "duration": ["", "1", "30", "1d", "1.5h", "-1s", "s", "1s1m", "1h1h", "1 s", "30s\n", 30],
    "limit": [
        "",
        "-1",
        "+1",
        "1e-2",
        "nan",
        "0.5m",
        "5 %",
        "01",
        "1000000",
        ".5",
        "5.",
        0.05,
        True,
        "1%m",
        "5%\n",
    ],
    "fraction": ["", "101%", "1.1", 2, "-5%", "5", "0.5m", 0.5, True, "1000%"],
    "decimal": ["", "1e3", "-1", "01", "1.", ".5", "inf", 0.5, True, "1_0"],
}


@pytest.mark.parametrize(
    ("kind", "value"), [(kind, value) for kind, values in BAD.items() for value in values]
)
def test_other_notations_are_refused_naming_the_field(kind: str, value: Any) -> None:
    parse, _ = PARSERS[kind]
    with pytest.raises(q.QuantityError, match=r"spec\.some\.field") as refused:
        parse(value, "spec.some.field")
    assert refused.value.field == "spec.some.field"
    assert refused.value.reason in set(q.QuantityReason)


def test_what_does_not_fit_int64_is_out_of_range() -> None:
    with pytest.raises(q.QuantityError) as refused:
        q.parse_bytes("8Ei", "f")
    assert refused.value.reason is q.QuantityReason.RANGE


@pytest.mark.parametrize("kind", PARSERS)
@given(data=st.data())
def test_what_the_schema_accepts_parses(kind: str, data: st.DataObject) -> None:
    """The server checks only the pattern: nothing it lets through fails later (but bytes over int64)."""
    parse, pattern = PARSERS[kind]
    text = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    if not text.strip() or text.endswith("\n"):
        return
    refused = None
    try:
        parse(text, "f")
    except q.QuantityError as error:
        refused = error.reason
    assert refused is None or (kind, refused) == ("bytes", q.QuantityReason.RANGE)


@given(st.integers(0, 10**12))
def test_a_formatted_duration_reads_back(milliseconds: int) -> None:
    assert q.parse_duration_ms(q.format_duration(milliseconds), "f") == milliseconds
