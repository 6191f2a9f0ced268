"""KVSelector: one selector family with its parameters, budget and evidence needs. Immutable."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvtier_crds.manifest import CapPolicy
from kvtier_crds.models.common import (
    AGE,
    SET_LIST,
    Column,
    DecimalString,
    DnsName,
    Fraction,
    Int64,
    LocalRef,
    Quantity,
    Resource,
    Scope,
    Status,
    Struct,
    cel,
    condition_path,
    map_list,
    positive_quantity,
    rules,
    struct_config,
)
from kvtier_crds.models.families import (
    CertifiedScanParameters,
    ClusterKvParameters,
    EmLlmParameters,
    Family,
    InfinigenParameters,
    InfLlmParameters,
    MagicPigParameters,
    PqcacheParameters,
    QuestParameters,
    RetrievalAttentionParameters,
    SparqParameters,
    SqueezedAttentionParameters,
)


class SelectorBudget(Struct):
    """What one query may read beyond the persistent rows."""

    model_config = struct_config(
        cel(
            "[has(self.tokens), has(self.bytes), has(self.units)].filter(x, x).size() == 1",
            "spec.budget needs exactly one of tokens, bytes, units",
        ),
        cel(
            f"!has(self.bytes) || {positive_quantity('self.bytes')}",
            "spec.budget.bytes must be greater than 0",
        ),
    )

    tokens: Annotated[int, Field(ge=1, le=16777216)] | None = None
    bytes: Quantity | None = None
    units: Annotated[int, Field(ge=1, le=16777216)] | None = None
    """Of the family's own: pages, clusters, units, events."""
    cap_policy: CapPolicy = CapPolicy.TRUNCATE
    """What happens to a selection over the budget; quest only truncates."""


class PersistentRows(Struct):
    """Rows that every query reads."""

    sink: Annotated[int, Field(ge=0, le=65536)] = 0
    recent: Annotated[int, Field(ge=0, le=65536)] = 0


class SelectorGate(Struct):
    """When an answer is uncertain and takes a fallback before it is published.

    Needs a family with an estimator: certifiedScan, squeezedAttention, and retrievalAttention's retroInfer.
    """

    max_estimated_omitted_mass: Fraction | None = None
    min_confidence: Fraction | None = None
    widen_steps: Annotated[int, Field(ge=0, le=8)] = 0


class Calibration(Struct):
    config_map_ref: LocalRef


def _own_block_rule() -> str:
    return " && ".join(f"(self.family == '{family}') == has(self.{family})" for family in Family)


class KVSelectorSpec(Struct):
    model_config = struct_config(
        cel(
            _own_block_rule(),
            "spec needs exactly one parameter block, the one named by spec.family; legal: "
            + ", ".join(Family),
            message_expression="'spec needs exactly one parameter block, spec.' + self.family + "
            "', as spec.family is ' + self.family",
        ),
        cel(
            "!has(self.quest) || !has(self.quest.pageTokens) || !has(self.budget.tokens) || "
            "self.budget.tokens >= self.quest.pageTokens",
            "spec.budget.tokens must be at least spec.quest.pageTokens: a box is read whole",
        ),
    )

    family: Family
    sparq: SparqParameters | None = None
    quest: QuestParameters | None = None
    infinigen: InfinigenParameters | None = None
    pqcache: PqcacheParameters | None = None
    retrieval_attention: RetrievalAttentionParameters | None = None
    squeezed_attention: SqueezedAttentionParameters | None = None
    magic_pig: MagicPigParameters | None = None
    inf_llm: InfLlmParameters | None = None
    em_llm: EmLlmParameters | None = None
    cluster_kv: ClusterKvParameters | None = None
    certified_scan: CertifiedScanParameters | None = None
    budget: SelectorBudget
    persistent_rows: PersistentRows = PersistentRows()
    dense_layers: Annotated[
        tuple[Annotated[int, Field(ge=0, le=511)], ...], Field(max_length=512, json_schema_extra=SET_LIST)
    ] = ()
    """Layers that stay exact."""
    gate: SelectorGate | None = None
    calibration: Calibration | None = None
    seed: Int64 = 0

    def parameters(self) -> Struct:
        """The block named by `family`. Raises ValueError when it is absent (the server refuses that)."""
        block = next((getattr(self, name) for name in _BLOCKS if _BLOCKS[name] is self.family), None)
        if not isinstance(block, Struct):
            raise ValueError(f"spec.{self.family} is absent, though spec.family is {self.family}")
        return block


_BLOCKS: dict[str, Family] = {
    name: Family(field.alias)
    for name, field in KVSelectorSpec.model_fields.items()
    if field.alias in set(Family)
}


class Guarantee(StrEnum):
    """What a family promises of the rows that it leaves out."""

    EXACT = "exact"
    UPPER_BOUND = "upperBound"
    ESTIMATE = "estimate"
    SAMPLED = "sampled"
    HEURISTIC = "heuristic"


class Need(StrEnum):
    """What a family must see to select."""

    QUERY = "query"
    PREFILL_QUERIES = "prefillQueries"
    PREVIOUS_HIDDEN_STATE = "previousHiddenState"
    WEIGHTS = "weights"
    SURPRISAL = "surprisal"


class CacheIndexes(Struct):
    """Indexes of this selector in one cache, over all agents that hold it as a candidate."""

    cache: DnsName
    agents: Int64 = 0
    """That hold it and could be asked."""
    ready: Int64 = 0
    """Sessions whose every layer has an index."""
    building: Int64 = 0
    """Sessions that are answered exactly until theirs are built."""
    refused: Int64 = 0
    """Sessions that stay exact, for example since their engine does not send what the family needs."""
    hidden_seconds: DecimalString = "0"
    """Of builds that no query waited for, since the agents started."""
    exposed_seconds: DecimalString = "0"
    """In which queries waited, or were answered exactly for want of an index."""
    bytes: Int64 = 0
    """Of indexes and of rows that wait for theirs."""


class KVSelectorStatus(Status):
    """Conditions: Accepted (False, reason NotImplemented, for a field that no agent carries out; True tells
    of a family that is slower than dense attention, too), IndexReady (of `indexes`; Unknown while no agent
    holds it as a candidate, or no session of it is open)."""

    guarantee: Guarantee | None = None
    needs: Annotated[tuple[Need, ...], Field(max_length=5, json_schema_extra=SET_LIST)] = ()
    appendable: bool | None = None
    """Whether its index follows appended rows without being rebuilt."""
    indexes: Annotated[
        tuple[CacheIndexes, ...], Field(max_length=16, json_schema_extra=map_list("cache"))
    ] = ()


class KVSelector(Resource):
    """Which rows an approximate candidate may read. A change is a new object."""

    KIND: ClassVar[str] = "KVSelector"
    PLURAL: ClassVar[str] = "kvselectors"
    SHORT: ClassVar[str] = "kvs"
    SCOPE: ClassVar[Scope] = Scope.NAMESPACED
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(name="Family", path=".spec.family"),
        Column(name="Guarantee", path=".status.guarantee"),
        Column(name="Accepted", path=condition_path("Accepted")),
        Column(name="Index", path=condition_path("IndexReady")),
        Column(name="Seed", path=".spec.seed", type="integer", wide=True),
        AGE,
    )

    spec: Annotated[
        KVSelectorSpec,
        Field(json_schema_extra=rules(cel("self == oldSelf", "spec is immutable: create a new KVSelector"))),
    ]
    status: KVSelectorStatus | None = None
