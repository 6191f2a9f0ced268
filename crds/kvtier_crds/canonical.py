"""Canonical values and bytes: the part of the manifest's encoding that is independent of its fields.

Why it exists: a digest is only a name if one value has one encoding. It must not know what is encoded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

INT64_MAX = 2**63 - 1

Scalar = str | int | bool


class Parameters(Mapping[str, Scalar]):
    """An immutable, hashable map of names to strings, integers or booleans. At most 64 entries; no floats."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Scalar]) -> None:
        if len(items) > 64:
            raise ValueError("at most 64 parameters")
        for name, value in items.items():
            if not isinstance(name, str) or not name or len(name) > 63 or not name.isascii():
                raise ValueError(f"parameter name {name!r} must be 1 to 63 ASCII characters")
            if not isinstance(value, str | int):
                raise ValueError(f"parameter {name!r} must be a string, integer or boolean, not {value!r}")
            if isinstance(value, int) and abs(value) > INT64_MAX:
                raise ValueError(f"parameter {name!r} does not fit int64")
            if isinstance(value, str) and len(value) > 253:
                raise ValueError(f"parameter {name!r} is longer than 253 characters")
        self._items: dict[str, Scalar] = dict(sorted(items.items()))

    def __getitem__(self, name: str) -> Scalar:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        """Equal values of equal types: 1 and true are encoded differently, so they differ here too."""
        if not isinstance(other, Mapping):
            return NotImplemented
        return _typed(self) == _typed(other)

    def __hash__(self) -> int:
        return hash(_typed(self))

    def __repr__(self) -> str:
        return f"Parameters({self._items!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def build(value: Any) -> Parameters:
            if isinstance(value, Parameters):
                return value
            if not isinstance(value, Mapping):
                raise ValueError("must be an object")
            return cls(value)

        return core_schema.no_info_plain_validator_function(
            build,
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
            json_schema_input_schema=core_schema.dict_schema(
                core_schema.str_schema(),
                core_schema.union_schema(
                    [core_schema.str_schema(), core_schema.int_schema(), core_schema.bool_schema()]
                ),
                max_length=64,
            ),
        )


def canonical_decimal(value: Any) -> str:
    """Plain notation without trailing zeros ("0.001", "100000"). Refuses floats, exponents and NaN."""
    if isinstance(value, bool | float):
        raise ValueError("must be a decimal string, not a float or boolean")
    text = str(value)
    if isinstance(value, str):
        digits = text.removeprefix("-").replace(".", "", 1)
        if not digits.isascii() or not digits.isdigit() or text.endswith(".") or text.lstrip("-")[0] == ".":
            raise ValueError(f"{text!r} is not a plain decimal such as 0.001")
    number = Decimal(text)
    if not number.is_finite():
        raise ValueError(f"{text!r} is not finite")
    if len(text) > 40:
        raise ValueError("a decimal has at most 40 characters")
    plain = format(number, "f")
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    return "0" if plain in ("-0", "") else plain


DecimalText = Annotated[str, BeforeValidator(canonical_decimal), Field(max_length=64)]


def canonical_json(part: BaseModel, without: frozenset[str] = frozenset()) -> bytes:
    """Sorted keys, no spaces, UTF-8, every field present but those of the top level that the schema does not
    know. Raises UnicodeEncodeError on a lone surrogate."""
    document = part.model_dump(mode="json", by_alias=True, exclude=set(without))
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def sha256_digest(data: bytes) -> str:
    """`sha256:<hex>` of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _typed(items: Mapping[str, object]) -> tuple[tuple[str, type, object], ...]:
    return tuple((name, type(value), value) for name, value in sorted(items.items()))
