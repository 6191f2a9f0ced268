"""What all six kinds share: base models, the scalar types of the API, and how a model carries its CEL rules.

Why it exists: a field type here is one pydantic annotation and one structural schema at once, so the server
and a reader refuse the same values. It must not know any kind.

Reading models ignore unknown fields (a newer server may send more) and are frozen. Rules that only the server
enforces (CEL) are attached as `x-kubernetes-validations` and do not run here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

from kvtier_crds.quantity import (
    DECIMAL_PATTERN,
    DURATION_PATTERN,
    FRACTION_PATTERN,
    LIMIT_PATTERN,
    QUANTITY_PATTERN,
    parse_bytes,
    parse_decimal,
    parse_duration_ms,
    parse_fraction,
    parse_limit,
)

GROUP = "kvtier.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "kvtier"

Json = dict[str, Any]


def cel(rule: str, message: str, *, field_path: str = "", message_expression: str = "") -> Json:
    """One `x-kubernetes-validations` entry; `message` names the field and the legal values."""
    entry: Json = {"rule": rule, "message": message}
    if field_path:
        entry["fieldPath"] = field_path
    if message_expression:
        entry["messageExpression"] = message_expression
    return entry


def when_changed(entry: Json, same: str = "") -> Json:
    """A rule that objects may be older than: whoever leaves alone what it speaks of, and writes a status, a
    finalizer or an intent, is not refused. same: CEL over `self` and `oldSelf.value()`, whether that is left
    alone; empty where it can never change.

    The rule comes before the comparison: nearly every object keeps it, and every write of one, a status too,
    would pay for a comparison in which the API server wraps all that is compared, field by field."""
    kept, rule = "oldSelf.hasValue()", f"({entry['rule']})"
    either = f"{rule} || ({kept} && {same})" if same else f"{kept} || {rule}"
    return {**entry, "rule": either, "optionalOldSelf": True}


def rules(*entries: Json) -> Json:
    """The schema extra that carries CEL rules, for a Field or a model's config."""
    return {"x-kubernetes-validations": list(entries)}


def positive_quantity(field: str) -> str:
    """CEL: the quantity is greater than 0; what is no quantity at all is left to its pattern."""
    return f"(!isQuantity(string({field})) || quantity(string({field})).isGreaterThan(quantity('0')))"


def map_list(*keys: str) -> Json:
    """The schema extra of a list whose items are keyed: no two with equal keys, merged by key."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


SET_LIST: Json = {"x-kubernetes-list-type": "set"}
ATOMIC_LIST: Json = {"x-kubernetes-list-type": "atomic"}
ATOMIC_OBJECT: Json = {"x-kubernetes-map-type": "atomic"}
"""Of an object that one writer always writes whole: the server keeps one owner of all of it, and not
the owner of each field, which takes as much room and time as the fields."""


def struct_config(*entries: Json) -> ConfigDict:
    """Model config with CEL rules on the object itself."""
    return ConfigDict(
        extra="ignore",
        frozen=True,
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
        json_schema_extra=rules(*entries) if entries else None,
    )


class Struct(BaseModel):
    """Base of every object inside a spec or status."""

    model_config = struct_config()


def _checked(parse: Callable[[Any, str], object]) -> AfterValidator:
    def check(value: Any) -> Any:
        parse(value, "value")
        return value

    return AfterValidator(check)


def _int_or_string(
    pattern: str, length: int, minimum: int = 0, maximum: int | None = None, *entries: Json
) -> WithJsonSchema:
    schema: Json = {
        "x-kubernetes-int-or-string": True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "pattern": pattern,
        "maxLength": length,
        "minimum": minimum,
    }
    if maximum is not None:
        schema["maximum"] = maximum
    return WithJsonSchema(schema | (rules(*entries) if entries else {}))


def _text(pattern: str, length: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "minLength": 1, "maxLength": length})


_FITS = cel(
    "!isQuantity(string(self)) || quantity(string(self)).isLessThan(quantity('1E'))",
    "a quantity must be less than 1E (10^18)",
)
Quantity = Annotated[int | str, _checked(parse_bytes), _int_or_string(QUANTITY_PATTERN, 32, 0, None, _FITS)]
"""Bytes (or bytes per second): 1073741824 or "1Gi"."""
Fraction = Annotated[int | str, _checked(parse_fraction), _int_or_string(FRACTION_PATTERN, 16, 0, 1)]
"""A share from 0 to 1: "5%" or "0.05"."""
Limit = Annotated[int | str, _checked(parse_limit), _int_or_string(LIMIT_PATTERN, 20, 0, 999_999)]
"""A gate's limit: "0.05", "5%" or "50m"."""
Percent = Annotated[int | str, _checked(parse_decimal), _int_or_string(DECIMAL_PATTERN, 16, 0, 100)]
"""A number of percent without the sign: 99 or "99.9"."""
Duration = Annotated[str, _checked(parse_duration_ms), _text(DURATION_PATTERN, 36)]
"""A Go duration: "30s", "1h30m"."""
DecimalString = Annotated[str, _checked(parse_decimal), _text(DECIMAL_PATTERN, 40)]
"""A non-negative decimal as a string: "0.001"."""

DnsName = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
]
Label = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
]
Token = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z][A-Za-z0-9-]{0,62}$")]
FormatName = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$")
]
"""A codec or layout with its version: "identity", "kv-head-major-f32/1"."""
Sha256 = Annotated[str, Field(min_length=71, max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]
Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Int64 = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
MAX_ATTEMPTS = 1_000_000_000
"""Each edit of a candidate begins one: two writers who do not agree make thousands in a day."""
Number = Annotated[str, Field(max_length=32)]
"""A printed decimal in a status; may carry a sign or an exponent, is never computed with by the server."""


class LocalRef(Struct):
    """Names an object of the same namespace."""

    name: DnsName


class NamespacedRef(Struct):
    namespace: DnsName
    name: DnsName


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Struct):
    """metav1.Condition."""

    type: Annotated[str, Field(max_length=316, pattern=r"^[A-Za-z]([A-Za-z0-9]*)$")]
    status: ConditionStatus
    observed_generation: Int64 | None = None
    last_transition_time: Timestamp
    reason: Annotated[
        str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    message: Annotated[str, Field(max_length=2048)] = ""


Conditions = Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=map_list("type"))]


class Status(Struct):
    """Base of every status."""

    observed_generation: Int64 | None = None
    """The generation of the spec that this status speaks of."""
    conditions: Conditions = ()

    def condition(self, type_: str) -> Condition | None:
        """The condition of that type, if it was ever set."""
        return next((condition for condition in self.conditions if condition.type == type_), None)


class DigestRef(Struct):
    """A manifest by digest. `short` (12 hex digits) exists for printer columns, which cannot cut a string."""

    digest: Sha256
    short: Annotated[str, Field(max_length=12)] = ""
    revision: Annotated[str, Field(max_length=253)] = ""
    """The ControllerRevision that holds its canonical bytes."""


class Budget(Struct):
    """Of one kind of memory, on each node."""

    tier_class_name: DnsName
    bytes: Int64


def short_digest(digest: str) -> str:
    """The 12 hex digits shown in columns."""
    return digest.removeprefix("sha256:")[:12]


class ObjectMeta(Struct):
    """The part of metadata that readers use; the server's own schema governs it."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()


class Scope(StrEnum):
    CLUSTER = "Cluster"
    NAMESPACED = "Namespaced"


class Column(BaseModel):
    """A printer column. Priority 1 shows only with `-o wide`."""

    model_config = ConfigDict(frozen=True)

    name: str
    path: str
    type: Literal["string", "integer", "boolean", "date"] = "string"
    wide: bool = False
    description: str = ""


AGE = Column(name="Age", path=".metadata.creationTimestamp", type="date")


def condition_path(type_: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{type_}")].{field}'


NAME_BECOMES_LABEL = cel(
    "self.metadata.name.size() <= 52",
    "metadata.name must have at most 52 characters: it becomes a label value and the prefix of other names",
)


class Resource(Struct):
    """Base of the six kinds. Subclasses add `spec` and `status` and the class variables below."""

    KIND: ClassVar[str]
    PLURAL: ClassVar[str]
    SHORT: ClassVar[str]
    SCOPE: ClassVar[Scope]
    COLUMNS: ClassVar[tuple[Column, ...]]
    SELECTABLE: ClassVar[tuple[str, ...]] = ()
    """Paths that lists and watches may be narrowed by, as `--field-selector` names them."""
    ROOT_RULES: ClassVar[tuple[Json, ...]] = ()

    api_version: str = API_VERSION
    kind: str = ""
    metadata: ObjectMeta
