"""The runtime manifest: everything that shapes an answer, in one canonical document with one name.

Why it exists: a baseline, a candidate and an agent's proof are compared by digest alone, so two parties
must encode the same configuration to the same bytes, in any process and any release. It must not know the
cluster, the custom resources it was compiled from, tensors, or what a node measured (that is `Environment`,
which stays beside the manifest and never enters its digest).

Encoding (`kvtier.dev/manifest/v1`): JSON with sorted keys, no spaces, UTF-8; no floats: numbers are integers
and decimals are strings in plain notation without trailing zeros; every field is present, an absent value is
`null`. A digest is always recomputed under the schema that the bytes name. `v2` is `v1` with `admission`, and
is written only where a rollout brought bounds of transfers: so no digest moved when it came to be.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from kvtier_crds.canonical import INT64_MAX, DecimalText, Parameters, canonical_json, sha256_digest

MANIFEST_SCHEMA: Literal["kvtier.dev/manifest/v1"] = "kvtier.dev/manifest/v1"
MANIFEST_SCHEMA_2: Literal["kvtier.dev/manifest/v2"] = "kvtier.dev/manifest/v2"
NUMERICS_VERSION = "f32-chunk-merge/2"
MAX_MANIFEST_BYTES = 256 * 1024
_SINCE_2 = frozenset({"admission"})


class ManifestReason(StrEnum):
    """Why bytes are not a manifest; stable, used in errors and metrics."""

    MALFORMED = "Malformed"
    TOO_LARGE = "TooLarge"
    UNKNOWN_SCHEMA = "UnknownSchema"
    INVALID = "Invalid"
    NOT_CANONICAL = "NotCanonical"


class ManifestError(ValueError):
    """Bytes that are refused as a manifest: `reason` is stable, `message` names the field or rule."""

    def __init__(self, reason: ManifestReason, message: str) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message


class Medium(StrEnum):
    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"
    REMOTE = "remote"


class TierRole(StrEnum):
    RESIDENT = "resident"
    STAGING = "staging"
    BACKING = "backing"


class Checksum(StrEnum):
    NONE = "none"
    CRC32C = "crc32c"
    XXH3 = "xxh3"
    BLAKE3 = "blake3"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class PositionContract(StrEnum):
    POST_ROPE = "postRope"
    PRE_ROPE = "preRope"


class Exactness(StrEnum):
    EXACT = "exact"
    APPROXIMATE = "approximate"


class Fallback(StrEnum):
    """In the order in which they are tried; exactFetch and reject are always allowed and never listed."""

    WIDEN = "widen"
    RECOMPUTE = "recompute"
    POSTPONE = "postpone"
    DEGRADE = "degrade"


class AdmissionPolicy(StrEnum):
    FIFO = "fifo"
    EARLIEST_DEADLINE = "earliestDeadline"
    EXACT_DEADLINE_COALESCING = "exactDeadlineCoalescing"


class CapPolicy(StrEnum):
    TRUNCATE = "truncate"
    ERROR = "error"
    DENSE = "dense"


Sha256 = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?$")]
Count = Annotated[int, Field(ge=0, le=INT64_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT64_MAX)]


class _Part(BaseModel):
    """Frozen, never coerces numbers, and closed: an unknown field is not of this schema."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        hide_input_in_errors=True,
    )


StrictCount = Annotated[Count, Field(strict=True)]
StrictPositive = Annotated[Positive, Field(strict=True)]
StrictBool = Annotated[bool, Field(strict=True)]


class Tenancy(_Part):
    """Derived from the object's namespace and uid; a re-created cache is a different tenant of the bytes."""

    namespace: Name
    cache_uid: Annotated[Name, Field(alias="cacheUID")]


class Adapter(_Part):
    name: Name
    digest: Sha256


class Geometry(_Part):
    """Shapes of K and V: rows are [kvHeads, headDim] per layer; queryHeads is a multiple of kvHeads."""

    layers: StrictPositive
    query_heads: StrictPositive
    kv_heads: StrictPositive
    head_dim: StrictPositive
    dtype: Dtype

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.query_heads % self.kv_heads:
            raise ValueError("geometry.queryHeads must be a multiple of geometry.kvHeads")
        return self


class RopeScaling(_Part):
    """How positions are stretched; `type` as in the model's own configuration, decimals as strings."""

    type: Name
    parameters: Parameters = Parameters({})


class Rope(_Part):
    theta: DecimalText
    scaling: RopeScaling | None = None
    interleaved: StrictBool = False


class Model(_Part):
    """Identity of what produced the rows. `model_fingerprint` names it."""

    artifact_digest: Sha256
    checkpoint: Name
    adapters: Annotated[tuple[Adapter, ...], Field(max_length=16)] = ()
    geometry: Geometry
    rope: Rope
    position_contract: PositionContract


class Tier(_Part):
    """One tier of the cache on each node; the order in the manifest is fastest first."""

    tier_class_name: Name
    medium: Medium
    role: TierRole
    budget_bytes: StrictPositive
    codec: Name
    checksum: Checksum


class Placement(_Part):
    policy: Name
    parameters: Parameters = Parameters({})


class Budget(_Part):
    """What one query may read beyond the persistent rows: exactly one of tokens, bytes, units."""

    tokens: StrictPositive | None = None
    bytes: StrictPositive | None = None
    units: StrictPositive | None = None
    cap_policy: CapPolicy

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for value in (self.tokens, self.bytes, self.units)) != 1:
            raise ValueError("budget needs exactly one of tokens, bytes, units")
        return self


class PersistentRows(_Part):
    """Rows read by every query: the first `sink` and the last `recent` of the sequence."""

    sink: StrictCount = 0
    recent: StrictCount = 0


class SelectorGate(_Part):
    """When an answer is uncertain: omitted mass above, or confidence below; `widenSteps` retries."""

    max_estimated_omitted_mass: DecimalText | None = None
    min_confidence: DecimalText | None = None
    widen_steps: StrictCount = 0


class Selector(_Part):
    family: Name
    parameters: Parameters = Parameters({})
    budget: Budget
    persistent_rows: PersistentRows = PersistentRows()
    dense_layers: Annotated[tuple[StrictCount, ...], Field(max_length=512)] = ()
    seed: StrictCount = 0
    gate: SelectorGate | None = None

    @field_validator("dense_layers", mode="after")
    @classmethod
    def _sorted(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(layers)))


class Contract(_Part):
    """What an answer may be. `tolerance` is an absolute difference of fp32 logits."""

    exactness: Exactness
    allowed_fallbacks: tuple[Fallback, ...] = ()
    tolerance: DecimalText

    @field_validator("allowed_fallbacks", mode="after")
    @classmethod
    def _ordered(cls, fallbacks: tuple[Fallback, ...]) -> tuple[Fallback, ...]:
        return tuple(fallback for fallback in Fallback if fallback in fallbacks)


class Admission(_Part):
    """Bounds of transfers of shared blocks on each node, where a rollout brought them; None: no bound of its
    own. queue: requests that may wait for reads."""

    pinned_bytes: StrictPositive | None = None
    staging_bytes: StrictPositive | None = None
    link_bytes: StrictPositive | None = None
    queue: StrictPositive
    policy: AdmissionPolicy


class RuntimeManifest(_Part):
    """All that shapes an answer: two manifests are equal if and only if their digests are."""

    manifest_schema: Annotated[
        Literal["kvtier.dev/manifest/v1", "kvtier.dev/manifest/v2"], Field(alias="schema")
    ] = MANIFEST_SCHEMA
    numerics_version: Name = NUMERICS_VERSION
    device_kind: Name
    tenancy: Tenancy
    model: Model
    page_tokens: StrictPositive
    chunk_tokens: StrictPositive
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1, max_length=8)]
    placement: Placement
    selector: Selector | None = None
    contract: Contract
    admission: Admission | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.admission is not None) != (self.manifest_schema == MANIFEST_SCHEMA_2):
            raise ValueError(f"admission is written under {MANIFEST_SCHEMA_2}, and that with it only")
        names = [tier.tier_class_name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise ValueError("tiers must name each tier class once")
        if self.chunk_tokens % self.page_tokens:
            raise ValueError("chunkTokens must be a multiple of pageTokens")
        if self.contract.exactness is Exactness.EXACT:
            if self.selector is not None:
                raise ValueError("selector needs contract.exactness approximate")
            if Fallback.DEGRADE in self.contract.allowed_fallbacks:
                raise ValueError("fallback degrade needs contract.exactness approximate")
        if self.selector is not None and any(
            layer >= self.model.geometry.layers for layer in self.selector.dense_layers
        ):
            raise ValueError("selector.denseLayers must be below model.geometry.layers")
        return self

    def canonical(self) -> bytes:
        """The one encoding of this manifest; `parse` accepts exactly these bytes."""
        return canonical_json(self, frozenset() if self.admission is not None else _SINCE_2)

    def digest(self) -> str:
        """`sha256:<hex>` of the canonical bytes."""
        return sha256_digest(self.canonical())

    def admitting(self, admission: Admission | None) -> RuntimeManifest:
        """The same with these bounds of transfers, or with none of its own."""
        schema = MANIFEST_SCHEMA if admission is None else MANIFEST_SCHEMA_2
        return self.model_copy(update={"manifest_schema": schema, "admission": admission})

    def exact(self) -> RuntimeManifest:
        """The exact configuration behind this one: no selector, exactness `exact`, no `degrade`."""
        contract = Contract(
            exactness=Exactness.EXACT,
            allowed_fallbacks=tuple(f for f in self.contract.allowed_fallbacks if f is not Fallback.DEGRADE),
            tolerance=self.contract.tolerance,
        )
        return self.model_copy(update={"selector": None, "contract": contract})

    @classmethod
    def parse(cls, data: bytes) -> RuntimeManifest:
        """The manifest of canonical bytes. Raises `ManifestError`; never repairs, never ignores a field."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise ManifestError(
                ManifestReason.TOO_LARGE, f"{len(data)} bytes, at most {MAX_MANIFEST_BYTES} are read"
            )
        try:
            document = json.loads(data.decode("utf-8"))
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise ManifestError(ManifestReason.MALFORMED, f"not JSON in UTF-8: {error}") from error
        if not isinstance(document, dict):
            raise ManifestError(ManifestReason.MALFORMED, "the document is not an object")
        if document.get("schema") not in (MANIFEST_SCHEMA, MANIFEST_SCHEMA_2):
            raise ManifestError(
                ManifestReason.UNKNOWN_SCHEMA,
                f"schema {document.get('schema')!r}, this version reads {MANIFEST_SCHEMA!r} and "
                f"{MANIFEST_SCHEMA_2!r}",
            )
        try:
            manifest = RuntimeManifest.model_validate(document)
            encoded = manifest.canonical()
        except (ValidationError, UnicodeEncodeError) as error:
            raise ManifestError(ManifestReason.INVALID, _first_error(error)) from error
        if encoded != data:
            raise ManifestError(
                ManifestReason.NOT_CANONICAL,
                "the bytes differ from the canonical encoding (key order, spaces, defaults or decimals)",
            )
        return manifest


class MeasuredTier(_Part):
    """What an agent measured of a tier, beside what its class declares. None: not measured."""

    tier_class_name: Name
    simulated: StrictBool = False
    read_bytes_per_second: StrictCount | None = None
    write_bytes_per_second: StrictCount | None = None
    probes: Parameters = Parameters({})


class Environment(_Part):
    """What ran a manifest without shaping its answers: recorded and compared, never part of the digest."""

    image: Annotated[str, Field(max_length=512)] = ""
    agent_version: Annotated[str, Field(max_length=128)]
    tiers: Annotated[tuple[MeasuredTier, ...], Field(max_length=8)] = ()

    def canonical(self) -> bytes:
        return canonical_json(self)


def model_fingerprint(model: Model) -> str:
    """`sha256:<hex>` over the canonical model block: what an engine must name when it opens a session."""
    return sha256_digest(canonical_json(model))


def _first_error(error: ValidationError | UnicodeEncodeError) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "a string is not valid Unicode"
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "manifest"
    return f"{where}: {first['msg']}"
