"""A family's parameters out of a manifest: typed, complete and within their ranges, or refused by name.

Why it exists: a parameter that is misspelled or out of range must never become a default. It must not know
what the parameters mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import Budget, CapPolicy
from kvtier_crds.manifest import Selector


class Parameters:
    """Reads parameters one by one; `done` refuses those that nobody asked for. All with MANIFEST_INVALID."""

    def __init__(self, selector: Selector) -> None:
        self._family = selector.family
        self._given = dict(selector.parameters)
        self._asked: set[str] = set()

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]; without a default it must be given."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._refuse(name, f"a whole number from {low} to {high}", value)
        return value

    def number(self, name: str, low: float, high: float, default: str | None = None) -> float:
        """A decimal in [low, high], as text or number; as text also in percent ("5%")."""
        value = self._value(name, default)
        text = str(value)
        try:
            number = float(Decimal(text[:-1]) / 100 if text.endswith("%") else Decimal(text))
        except InvalidOperation:
            number = float("nan")
        if isinstance(value, bool) or not low <= number <= high:
            raise self._refuse(name, f"a decimal from {low:g} to {high:g}", value)
        return number

    def choice(self, name: str, legal: Sequence[str], default: str | None = None) -> str:
        value = self._value(name, default)
        if value not in legal:
            raise self._refuse(name, f"one of {', '.join(legal)}", value)
        return str(value)

    def text(self, name: str, longest: int, default: str | None = None) -> str:
        """Text of at most `longest` characters."""
        value = self._value(name, default)
        if not isinstance(value, str) or len(value) > longest:
            raise self._refuse(name, f"text of at most {longest} characters", value)
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._refuse(name, "true or false", value)
        return value

    def done(self) -> None:
        unknown = sorted(set(self._given) - self._asked)
        if unknown:
            legal = ", ".join(sorted(self._asked)) or "none"
            raise CoreError(
                Reason.MANIFEST_INVALID,
                f"{self._family} has no parameters {', '.join(unknown)}; legal: {legal}",
            )

    def _value(self, name: str, default: object) -> object:
        self._asked.add(name)
        value = self._given.get(name, default)
        if value is None:
            raise CoreError(Reason.MANIFEST_INVALID, f"{self._family}.{name} must be given")
        return value

    def _refuse(self, name: str, legal: str, value: object) -> CoreError:
        return CoreError(Reason.MANIFEST_INVALID, f"{self._family}.{name} must be {legal}, not {value!r}")


def budget_of(selector: Selector) -> Budget:
    """The budget that a manifest declares."""
    given = selector.budget
    return Budget(given.tokens, given.bytes, given.units, CapPolicy(given.cap_policy.value))


def digest_of(selector: Selector, *more: object) -> str:
    """Names all that a manifest says of a selector, and `more` that the cache adds (a default page size)."""
    body = selector.model_dump_json(by_alias=True) + "".join(f"|{item}" for item in more)
    return "sha256:" + hashlib.sha256(body.encode()).hexdigest()
