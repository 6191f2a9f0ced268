"""Numbers as Kubernetes users write them: quantities, Go durations, decimal limits and fractions.

Why it exists: the API takes these as strings (or int-or-string) so that no float ever rounds a limit. Each
parser is exact, bounded, and raises `QuantityError` naming the field. The patterns are shared with the CRD
schemas, so that what the server accepts here parses. It must not know which resource a field belongs to.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from enum import StrEnum

INT64_MAX = 2**63 - 1

# Kubernetes quantities without exponents: a byte count has no use for milli or nano.
QUANTITY_PATTERN = r"^[0-9]{1,18}(\.[0-9]{1,9})?(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
# Go durations from milliseconds to hours; no sign, no fraction; too few digits to overflow int64.
DURATION_PATTERN = r"^(0|([0-9]{1,6}h)?([0-9]{1,7}m)?([0-9]{1,8}s)?([0-9]{1,9}ms)?)$"
LIMIT_PATTERN = r"^((0|[1-9][0-9]{0,5})(\.[0-9]{1,9})?%?|(0|[1-9][0-9]{0,5})m)$"
FRACTION_PATTERN = r"^(100(\.0{1,6})?%|[0-9]{1,2}(\.[0-9]{1,6})?%|0(\.[0-9]{1,9})?|1(\.0{1,9})?)$"
DECIMAL_PATTERN = r"^(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?$"

_SUFFIXES = {
    "": 1,
    **{suffix: 1000 ** (power + 1) for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"))},
    **{suffix: 1024 ** (power + 1) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
}
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([kMGTPE]|[KMGTPE]i)?")
_DURATION = re.compile(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,7})m)?(?:([0-9]{1,8})s)?(?:([0-9]{1,9})ms)?")
_LIMIT = re.compile(r"((?:0|[1-9][0-9]{0,5})(?:\.[0-9]{1,9})?)([%m])?")
_FRACTION = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)(%)?")
_DECIMAL = re.compile(r"(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?")


class QuantityReason(StrEnum):
    SYNTAX = "Syntax"
    RANGE = "Range"


class QuantityError(ValueError):
    """A number that cannot be used: `field` names where it stood, `legal` what would do."""

    def __init__(self, reason: QuantityReason, field: str, value: object, legal: str) -> None:
        super().__init__(f"{field}: {value!r} is not {legal}")
        self.reason = reason
        self.field = field
        self.value = value
        self.legal = legal


def parse_bytes(value: int | str, field: str) -> int:
    """Bytes of a quantity (1024, "64Mi", "1.5G"), rounded up as Kubernetes does; 0 to 2^63 - 1."""
    amount = parse_amount(value, field)
    if amount > INT64_MAX:
        raise QuantityError(QuantityReason.RANGE, field, value, "at most 2^63 - 1 bytes")
    return amount


def parse_amount(value: int | str, field: str) -> int:
    """As `parse_bytes`, however many they are."""
    legal = "a quantity of bytes such as 1073741824, 64Mi or 1.5G"
    match = None if isinstance(value, bool | float) else _QUANTITY.fullmatch(str(value))
    if match is None:
        raise QuantityError(QuantityReason.SYNTAX, field, value, legal)
    size = Decimal(match.group(1)) * _SUFFIXES[match.group(2) or ""]
    return int(size.to_integral_value(ROUND_CEILING))


def parse_duration(value: str, field: str) -> float:
    """Seconds of a Go duration ("90s", "1h30m", "500ms", "0")."""
    return parse_duration_ms(value, field) / 1000.0


def parse_duration_ms(value: str, field: str) -> int:
    """Milliseconds of a Go duration; units in falling order, none twice."""
    legal = "a duration such as 30s, 1h30m or 500ms"
    if value == "0":
        return 0
    match = _DURATION.fullmatch(value) if isinstance(value, str) and value else None
    if match is None:
        raise QuantityError(QuantityReason.SYNTAX, field, value, legal)
    hours, minutes, seconds, millis = (int(group or 0) for group in match.groups())
    return ((hours * 60 + minutes) * 60 + seconds) * 1000 + millis


def format_duration(milliseconds: int) -> str:
    """The shortest Go duration that `parse_duration_ms` reads back to the same number."""
    seconds, millis = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "m"), (seconds, "s"), (millis, "ms"))
    return "".join(f"{amount}{unit}" for amount, unit in parts if amount) or "0s"


def parse_limit(value: int | str, field: str) -> Decimal:
    """A gate's limit: "0.05", "5%" (= 0.05), "50m" (= 0.050), 0. `m` only after an integer."""
    legal = 'a decimal such as "0.05", "5%" or "50m" without sign or exponent'
    match = None if isinstance(value, bool | float) else _LIMIT.fullmatch(str(value))
    if match is None or (match.group(2) == "m" and "." in match.group(1)):
        raise QuantityError(QuantityReason.SYNTAX, field, value, legal)
    return Decimal(match.group(1)).scaleb({None: 0, "%": -2, "m": -3}[match.group(2)])


def parse_fraction(value: int | str, field: str) -> Decimal:
    """A share in [0, 1]: "5%" (= 0.05), "0.05", 0, 1."""
    legal = 'a fraction from 0 to 1 such as "5%" or "0.05"'
    match = None if isinstance(value, bool | float) else _FRACTION.fullmatch(str(value))
    if match is None:
        raise QuantityError(QuantityReason.SYNTAX, field, value, legal)
    share = Decimal(match.group(1)).scaleb(-2 if match.group(2) else 0)
    if share > 1:
        raise QuantityError(QuantityReason.RANGE, field, value, legal)
    return share


def parse_decimal(value: int | str, field: str) -> Decimal:
    """A non-negative decimal in plain notation ("0.001", "100000")."""
    if isinstance(value, bool | float) or _DECIMAL.fullmatch(str(value)) is None:
        raise QuantityError(
            QuantityReason.SYNTAX, field, value, 'a plain decimal such as "0.001" or "100000"'
        )
    return Decimal(str(value))
