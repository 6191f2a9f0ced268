"""KVCache: one model's cache: identity, geometry, tiers and budgets, contract, selector, sessions."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvtier_crds.manifest import AdmissionPolicy, Dtype, Exactness, Fallback, PositionContract, TierRole
from kvtier_crds.models.common import (
    AGE,
    ATOMIC_LIST,
    MAX_ATTEMPTS,
    NAME_BECOMES_LABEL,
    SET_LIST,
    Budget,
    Column,
    DecimalString,
    DigestRef,
    DnsName,
    Duration,
    Fraction,
    Int64,
    Json,
    LocalRef,
    Number,
    Quantity,
    Resource,
    Scope,
    Sha256,
    Status,
    Struct,
    Timestamp,
    Token,
    cel,
    condition_path,
    map_list,
    positive_quantity,
    rules,
    struct_config,
)
from kvtier_crds.models.placements import Parameters, Placement
from kvtier_crds.models.stages import BlastRadius


class Adapter(Struct):
    name: Annotated[
        str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    ]
    digest: Sha256


class Geometry(Struct):
    """Rows are [kvHeads, headDim] of dtype per layer, once for K and once for V."""

    model_config = struct_config(
        cel(
            "self.queryHeads % self.kvHeads == 0",
            "spec.model.geometry.queryHeads must be a multiple of spec.model.geometry.kvHeads",
        )
    )

    layers: Annotated[int, Field(ge=1, le=512)]
    query_heads: Annotated[int, Field(ge=1, le=1024)]
    kv_heads: Annotated[int, Field(ge=1, le=1024)]
    head_dim: Annotated[int, Field(ge=2, le=1024, multiple_of=2)]
    dtype: Dtype


class RopeScaling(Struct):
    type: Token
    """As in the model's own configuration: linear, dynamic, yarn, llama3, ..."""
    parameters: Parameters = Field(default={})
    """Numbers as decimal strings."""


class Rope(Struct):
    theta: DecimalString
    scaling: RopeScaling | None = None
    interleaved: bool = False


class Model(Struct):
    """What produces the rows. Immutable: a different model is a different cache."""

    artifact_digest: Sha256
    checkpoint: Annotated[
        str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$")
    ]
    adapters: Annotated[tuple[Adapter, ...], Field(max_length=16, json_schema_extra=map_list("name"))] = ()
    geometry: Geometry
    rope: Rope
    position_contract: PositionContract


class CacheTier(Struct):
    model_config = struct_config(
        cel(
            positive_quantity("self.budget"),
            "spec.tiers[].budget must be greater than 0",
        )
    )

    tier_class_name: DnsName
    budget: Quantity
    """Bytes on each node; one open chunk per layer and session is reserved out of it."""
    role: TierRole = TierRole.RESIDENT


CacheTiers = Annotated[
    tuple[CacheTier, ...],
    Field(
        min_length=1,
        max_length=8,
        json_schema_extra=ATOMIC_LIST
        | rules(
            cel(
                "self.all(t, self.exists_one(u, u.tierClassName == t.tierClassName))",
                "spec.tiers must name each tierClassName once",
            )
        ),
    ),
]
"""Atomic, since its order counts: a merge by key may keep an old order."""


class Contract(Struct):
    """What an answer may be. exactFetch and reject are always allowed and never listed."""

    model_config = struct_config(
        cel(
            "self.exactness == 'approximate' || !has(self.allowedFallbacks) || "
            "!self.allowedFallbacks.exists(f, f == 'degrade')",
            "spec.contract.allowedFallbacks may hold degrade only if spec.contract.exactness is approximate; "
            "legal for exact: widen, recompute, postpone",
        )
    )

    exactness: Exactness = Exactness.EXACT
    allowed_fallbacks: Annotated[tuple[Fallback, ...], Field(max_length=4, json_schema_extra=SET_LIST)] = ()
    tolerance: DecimalString = "0.001"
    """Absolute difference of fp32 logits from the reference."""


class Admission(Struct):
    """Credits of this cache's transfers on each node, of shared blocks; a transfer that finds none waits its
    turn. An edit takes effect without a rollout, since it shapes no answer. Once a rollout has brought bounds
    they are the baseline's, and another rollout changes them."""

    pinned: Quantity | None = None
    """Bytes that may be pinned at once; absent: what the tiers need; less is refused (ADMISSION_PINNED)."""
    staging: Quantity | None = None
    """Bytes of reads in flight and of the engine's buffers; less than one block more than those is refused
    (STAGING_TOO_SMALL)."""
    link: Quantity | None = None
    """Bytes in flight in each direction between memory and storage; at least a block."""
    queue: Annotated[int, Field(ge=1, le=65536)] = 256
    """Requests that may wait for reads; one more is refused (QUEUE_FULL)."""
    policy: AdmissionPolicy = AdmissionPolicy.FIFO
    """Who goes first among requests of one priority: by place in the prefix and arrival; by deadline; by
    deadline and then what most requests wait for."""


class IdlePolicy(StrEnum):
    KEEP = "keep"
    DEMOTE = "demote"
    DROP = "drop"


class InterruptionPolicy(StrEnum):
    PRESERVE = "preserve"
    DROP = "drop"


class Sessions(Struct):
    idle: IdlePolicy = IdlePolicy.DEMOTE
    """What becomes of a session's rows once it is idle, which it is after the agent's --session-idle without
    a frame: they stay, they move to slower tiers as far as there is room, or the session ends."""
    interruption: InterruptionPolicy = InterruptionPolicy.DROP
    """preserve needs a tier whose persistence outlives the process."""
    ttl: Duration = "1h"
    """After so long without a frame a session ends, and what comes for it is refused with SESSION_UNKNOWN."""


class DeletionPolicy(StrEnum):
    DELETE = "delete"
    RETAIN = "retain"


class Deletion(Struct):
    policy: DeletionPolicy = DeletionPolicy.DELETE
    crypto_erase: bool = False
    """Waits for each node's receipt that the cache's data keys, by which alone its blocks on nvme tiers open,
    are overwritten."""


class KVCacheSpec(Struct):
    model_config = struct_config(
        cel(
            "!has(self.selectorRef) || self.contract.exactness == 'approximate'",
            "spec.selectorRef needs spec.contract.exactness approximate",
        ),
        cel(
            "self.chunkTokens % self.pageTokens == 0",
            "spec.chunkTokens must be a multiple of spec.pageTokens",
        ),
        cel(
            "self.tiers[0].role == 'resident'",
            "spec.tiers[0].role must be resident: the first tier, the fastest, holds open chunks",
        ),
        cel(
            "!self.deletion.cryptoErase || has(self.keySecretRef)",
            "spec.deletion.cryptoErase needs spec.keySecretRef: erasing destroys that key",
        ),
        cel(
            "!has(self.placement.headGroups) || !has(self.placement.headGroups.groupHeads) || "
            "self.placement.headGroups.groupHeads <= self.model.geometry.kvHeads",
            "spec.placement.headGroups.groupHeads must be at most spec.model.geometry.kvHeads",
        ),
        cel(
            "has(self.keySecretRef) == has(oldSelf.keySecretRef) && "
            "(!has(self.keySecretRef) || self.keySecretRef.name == oldSelf.keySecretRef.name)",
            "spec.keySecretRef is immutable: rotate keys by the entry CURRENT of the Secret",
        ),
    )

    pool_ref: Annotated[
        LocalRef,
        Field(
            json_schema_extra=rules(
                cel(
                    "self == oldSelf",
                    "spec.poolRef is immutable: the agents of the old pool would keep the rows; "
                    "create a new KVCache",
                )
            )
        ),
    ]
    """Immutable: no agent that holds rows is left behind by an edit."""
    model: Annotated[
        Model,
        Field(
            json_schema_extra=rules(
                cel("self == oldSelf", "spec.model is immutable: a different model is a different KVCache")
            )
        ),
    ]
    page_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    chunk_tokens: Annotated[int, Field(ge=16, le=4096, multiple_of=16)] = 256
    """Rows of one partial state; answers are merged per aligned chunk, so it is part of the numerics."""
    tiers: CacheTiers
    """Fastest first."""
    placement: Placement = Placement()
    selector_ref: LocalRef | None = None
    """Absent: exact."""
    contract: Contract = Contract()
    admission: Admission = Admission()
    sessions: Sessions = Sessions()
    prefill_flop_per_token: DecimalString | None = None
    """Floating point operations of one new token through all layers, as the model's maker states it; about
    twice its number of active parameters. Only status.plan.kappaCrit is made of it, no answer is."""
    key_secret_ref: LocalRef | None = None
    """Keys of encryption at rest: what lies on nvme tiers is encrypted under them. One of the AgentPool's
    spec.keySecretRefs. Immutable; keys are rotated in the Secret."""
    suspend: bool = False
    deletion: Deletion = Deletion()


class BaselineRef(DigestRef):
    """What every node runs."""

    budgets: Annotated[
        tuple[Budget, ...], Field(max_length=8, json_schema_extra=map_list("tierClassName"))
    ] = ()
    """That it runs with, whatever the spec and the rollouts say by now: other caches find no room in them."""


class Approved(DigestRef):
    """An approximate candidate that earned its release; the baseline beside it stays exact."""

    rollout: Annotated[str, Field(max_length=253)] = ""
    blast_radius: BlastRadius | None = None
    holdback: Fraction | None = None
    evidence: Annotated[str, Field(max_length=512)] | None = None
    """Where the evidence is: rollout uid, attempt and the digest of its gates."""
    grant_expires: Timestamp | None = None


class LedgerTier(Struct):
    """Bytes of this cache in one tier, over all serving nodes."""

    tier_class_name: DnsName
    budget: Int64 = 0
    used: Int64 = 0
    pinned: Int64 = 0


class PlanAlternative(Struct):
    """What was weighed beside the plan: seconds as the policy predicts them, absent where nothing could be
    priced; lost: why it is not the plan."""

    name: Annotated[str, Field(max_length=63)]
    lost: Annotated[str, Field(max_length=63)] = ""
    seconds: Number | None = None


class Plan(Struct):
    """What arithmetic says of the spec, from what the nodes measured: of a session that fills the tiers, on
    the node where a token waits longest; inputs name it. Written when a number moves by more than 5 % or the
    schedule changes."""

    kappa_crit: Number | None = None
    """Cached tokens per new one above which moving K/V takes longer than computing it; absent unless
    spec.prefillFlopPerToken is stated."""
    predicted_stall: Number | None = None
    """Seconds per token."""
    schedule: Annotated[str, Field(max_length=63)] | None = None
    """Name of the schedule chosen for rows that lie away from where they are attended; absent when none do or
    no schedule is legal, which inputs give the reason of."""
    policy: Annotated[str, Field(max_length=63)] | None = None
    """The placement policy that decided."""
    considered: Annotated[
        tuple[PlanAlternative, ...], Field(max_length=12, json_schema_extra=ATOMIC_LIST)
    ] = ()
    inputs: Annotated[
        dict[Annotated[str, Field(max_length=63)], Annotated[str, Field(max_length=63)]], Field(max_length=16)
    ] = Field(default={})


class DigestBudget(Struct):
    """Attempts that a candidate digest has spent on this cache, so that retries cannot farm luck."""

    digest: Sha256
    attempts: Annotated[int, Field(ge=0, le=MAX_ATTEMPTS)]


class KVCacheStatus(Status):
    """Conditions: Ready, Feasible, Servable, SpecApplied, BaselineVerified, Degraded."""

    baseline: BaselineRef | None = None
    """Always exact."""
    approved: Approved | None = None
    fence: Int64 | None = None
    """Written by compare-and-swap only."""
    serving_nodes: Annotated[int, Field(ge=0)] | None = None
    """Nodes that have proved the baseline."""
    ledger: Annotated[
        tuple[LedgerTier, ...], Field(max_length=8, json_schema_extra=map_list("tierClassName"))
    ] = ()
    plan: Plan | None = None
    digest_budget: Annotated[
        tuple[DigestBudget, ...], Field(max_length=32, json_schema_extra=map_list("digest"))
    ] = ()


class KVCache(Resource):
    """One model's hierarchical cache on the nodes of one pool."""

    KIND: ClassVar[str] = "KVCache"
    PLURAL: ClassVar[str] = "kvcaches"
    SHORT: ClassVar[str] = "kvc"
    SCOPE: ClassVar[Scope] = Scope.NAMESPACED
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(name="Pool", path=".spec.poolRef.name"),
        Column(name="Exactness", path=".spec.contract.exactness"),
        Column(name="Baseline", path=".status.baseline.short", description="First 12 digits of the digest."),
        Column(name="Approved", path=".status.approved.short"),
        Column(name="Nodes", path=".status.servingNodes", type="integer"),
        Column(name="Ready", path=condition_path("Ready")),
        Column(name="SpecApplied", path=condition_path("SpecApplied", "reason"), wide=True),
        Column(name="Fence", path=".status.fence", type="integer", wide=True),
        AGE,
    )
    ROOT_RULES: ClassVar[tuple[Json, ...]] = (NAME_BECOMES_LABEL,)

    spec: KVCacheSpec
    status: KVCacheStatus | None = None
