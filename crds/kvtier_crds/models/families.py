"""The parameter block of each selector family: typed and bounded, so that a spec means one thing.

Values follow section D of the retrieval specification; settings reported by papers are never defaults.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvtier_crds.models.common import DecimalString, Fraction, Struct, cel, struct_config


class Family(StrEnum):
    """Each value is also the name of its parameter block."""

    SPARQ = "sparq"
    QUEST = "quest"
    INFINIGEN = "infinigen"
    PQCACHE = "pqcache"
    RETRIEVAL_ATTENTION = "retrievalAttention"
    SQUEEZED_ATTENTION = "squeezedAttention"
    MAGIC_PIG = "magicPig"
    INF_LLM = "infLlm"
    EM_LLM = "emLlm"
    CLUSTER_KV = "clusterKv"
    CERTIFIED_SCAN = "certifiedScan"


class QuestVariant(StrEnum):
    KERNEL = "kernel"
    EVALUATION = "evaluation"


class QuestParameters(Struct):
    """Page boxes: per page the minimum and maximum of each key channel; pages are ranked by the bound
    U = sum of max(q*min, q*max)."""

    page_tokens: Annotated[int, Field(ge=1, le=256)] | None = None
    """Rows of one box; absent: the cache's pageTokens. It must divide the cache's chunkTokens."""
    variant: QuestVariant | None = None
    """Which path of the authors' code. kernel (absent): the last, mutable page is always read and takes one
    slot of the budget. evaluation: it competes like all others, and at least three pages are read."""


class SparqVariant(StrEnum):
    PAPER = "paper"
    LLAMA_CPP = "llamaCpp"
    SPAR_F = "sparF"


class SparqParameters(Struct):
    """Rows ranked by the largest query channels only."""

    dimensions: Annotated[int, Field(ge=1, le=1024)]
    """Channels read of each key (r), at most headDim. Source-reported: 16 to 64 of 128."""
    mean_reallocation: bool = True
    """The mean of V stands for the rows left out, by the share that they hold of the approximate softmax."""
    variant: SparqVariant = SparqVariant.PAPER
    """llamaCpp never reallocates; sparF (InstInfer) reads whole pages of flash that hold a selected row."""


class InfinigenVariant(StrEnum):
    PAPER = "paper"
    ACCURACY_SCRIPT = "accuracyScript"
    SPEED_SCRIPT = "speedScript"


class InfinigenParameters(Struct):
    """Rehearsal of a layer, from the input of the one before it, in a rotated basis. Layer 0 stays exact."""

    partial_dimensions: Annotated[int, Field(ge=1, le=1024)]
    """Channels of the rotated keys that a rehearsal reads."""
    alpha: DecimalString
    """Logits within alpha of the largest are counted."""
    variant: InfinigenVariant | None = None
    """Absent: paper. The authors' two scripts select differently: accuracyScript compares every head with
    head 0's largest logit, speedScript with the head's own, strictly; both take channels by queries alone."""
    cap_share: DecimalString | None = None
    """Most rows read, as a share of the context, besides the budget."""
    skew: bool | None = None
    """Absent: true. False keeps the channels as they are (the paper's ablation)."""
    train_tokens: Annotated[int, Field(ge=1, le=16777216)] | None = None
    """Rows of which basis and channels are made at the earliest; until then every row is read. Absent: 64."""


class PqcacheParameters(Struct):
    """Product quantisation: subspaces must divide headDim."""

    subspaces: Annotated[int, Field(ge=1, le=128)]
    bits: Annotated[int, Field(ge=1, le=12)]
    iterations: Annotated[int, Field(ge=1, le=1000)] = 25
    train_tokens: Annotated[int, Field(ge=1, le=16777216)] | None = None
    """Rows behind the sink of which codebooks are made at the earliest; until then every row is read. Absent:
    one more than a codebook has entries, which is also the least."""


class RetrievalVariant(StrEnum):
    PAPER = "paper"
    RETRO_INFER = "retroInfer"


class RetrievalAttentionParameters(Struct):
    """A key graph built from prefill queries; or RetroInfer's clusters, which are another method."""

    model_config = struct_config(
        cel(
            "self.variant != 'paper' || (has(self.buildNeighbours) && has(self.searchWidth) && "
            "has(self.outDegree))",
            "spec.retrievalAttention.buildNeighbours, searchWidth and outDegree must be given for variant "
            "paper",
        ),
        cel(
            "self.variant == 'paper' || !(has(self.buildNeighbours) || has(self.searchWidth) || "
            "has(self.outDegree) || has(self.sampleQueries))",
            "spec.retrievalAttention.buildNeighbours, searchWidth, outDegree and sampleQueries are of "
            "variant paper only",
        ),
        cel(
            "self.variant != 'retroInfer' || (has(self.tokensPerCluster) && has(self.segmentTokens) && "
            "has(self.estimatedClusters))",
            "spec.retrievalAttention.tokensPerCluster, segmentTokens and estimatedClusters must be given for "
            "variant retroInfer",
        ),
        cel(
            "self.variant == 'retroInfer' || !(has(self.tokensPerCluster) || has(self.segmentTokens) || "
            "has(self.estimatedClusters) || has(self.iterations))",
            "spec.retrievalAttention.tokensPerCluster, segmentTokens, estimatedClusters and iterations are "
            "of variant retroInfer only",
        ),
    )

    variant: RetrievalVariant = RetrievalVariant.PAPER
    build_neighbours: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Keys that each query of the build bridges."""
    search_width: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Keys that a search keeps; at least the budget's rows are."""
    out_degree: Annotated[int, Field(ge=1, le=512)] | None = None
    """Edges of a key."""
    sample_queries: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Queries of the build, the last ones of the rows indexed; absent: 1024."""
    tokens_per_cluster: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Rows of a cluster, on average."""
    segment_tokens: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Rows that are clustered together."""
    estimated_clusters: Annotated[int, Field(ge=0, le=65536)] | None = None
    """Clusters of a KV head that are answered for by their centres, after those that are read."""
    iterations: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Of k-means; absent: 10."""


class ScoreScale(StrEnum):
    SCALED = "scaled"
    UNSCALED = "unscaled"


class SqueezedAttentionParameters(Struct):
    """Offline centroids of a fixed context with a calibrated threshold."""

    model_config = struct_config(
        cel(
            "self.levels == 1 || has(self.coarseThreshold)",
            "spec.squeezedAttention.coarseThreshold must be given with levels 2",
        ),
        cel(
            "!has(self.coarseClusters) || self.coarseClusters <= self.clusters",
            "spec.squeezedAttention.coarseClusters must be at most spec.squeezedAttention.clusters",
        ),
        cel(
            "has(self.calibrationQuantile) == has(self.calibrationDataset)",
            "spec.squeezedAttention.calibrationQuantile and calibrationDataset must be given together",
        ),
    )

    clusters: Annotated[int, Field(ge=1, le=65536)]
    """Of each KV head, at most."""
    threshold: DecimalString
    """A cluster is read when its score is larger; below 1, since scores times rows add up to 1."""
    levels: Annotated[int, Field(ge=1, le=2)] = 1
    coarse_clusters: Annotated[int, Field(ge=1, le=65536)] | None = None
    """With levels 2; absent: a fifth of `clusters`."""
    coarse_threshold: DecimalString | None = None
    iterations: Annotated[int, Field(ge=1, le=1000)] = 300
    score_scale: ScoreScale = ScoreScale.SCALED
    """The factor on q.C that the threshold was calibrated with: the attention's, or 1."""
    calibration_quantile: DecimalString | None = None
    """The share of rows below the threshold in its calibration."""
    calibration_dataset: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Names the data of the calibration."""


class RecallVariant(StrEnum):
    """Where a paper and its code differ, which of the two."""

    PAPER = "paper"
    REFERENCE_CODE = "referenceCode"


class MagicPigParameters(Struct):
    """Importance sampling by hash collisions in at least minTables of `tables` tables."""

    model_config = struct_config(
        cel("self.minTables <= self.tables", "spec.magicPig.minTables must be at most spec.magicPig.tables")
    )

    hash_bits: Annotated[int, Field(ge=1, le=16)]
    """Signs of one code (K). Source-reported: 10."""
    tables: Annotated[int, Field(ge=1, le=1024)]
    """Codes of one key (L); their 2^hashBits buckets take at most 256 MiB a layer. Source-reported: 150."""
    min_tables: Annotated[int, Field(ge=1, le=16)] = 2
    """Codes that must agree for a row to be sampled."""
    mean_tokens: Annotated[int, Field(ge=1, le=1048576)] = 4096
    """Most rows, from the first, that the centre of the keys is taken of."""
    variant: RecallVariant = RecallVariant.PAPER
    """referenceCode adds 1e-4 to each chance, which weighs far rows too low."""


class InfLlmParameters(Struct):
    """Fixed units with representative keys."""

    model_config = struct_config(
        cel(
            "self.representatives <= self.unitTokens",
            "spec.infLlm.representatives must be at most spec.infLlm.unitTokens",
        )
    )

    unit_tokens: Annotated[int, Field(ge=1, le=4096)]
    """Rows of one unit. Source-reported: 128."""
    representatives: Annotated[int, Field(ge=1, le=4096)]
    """Rows, per query head, that stand for their unit when it is scored. Source-reported: 4."""
    influence_tokens: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Following queries that decide what represents a unit; absent: persistentRows.recent, at least 1."""
    variant: RecallVariant = RecallVariant.PAPER
    """Influence of a row: paper, its mean logit; referenceCode, the attention that it receives."""


class EmRefinement(StrEnum):
    NONE = "none"
    MODULARITY = "modularity"
    CONDUCTANCE = "conductance"


class EmLlmParameters(Struct):
    """Events cut where surprise passes mean + gamma * deviation of a trailing window."""

    model_config = struct_config(
        cel(
            "self.minEventTokens <= self.maxEventTokens",
            "spec.emLlm.minEventTokens must be at most spec.emLlm.maxEventTokens",
        )
    )

    window: Annotated[int, Field(ge=2, le=65536)]
    """Surprises before a row that its threshold is taken of, the row itself not among them."""
    gamma: DecimalString
    """Deviations above the mean that make a row the start of an event. Source-reported: 1."""
    refinement: EmRefinement = EmRefinement.NONE
    search_radius: Annotated[int, Field(ge=1, le=64)] | None = None
    """Rows that a boundary may move either way; with refinement it must be given."""
    contiguity_radius: Annotated[int, Field(ge=0, le=64)] = 0
    """Neighbours of a chosen event, before and behind it, that are read too."""
    contiguity_share: Fraction | None = None
    """Share of the budget that is kept for neighbours; absent: 0. Source-reported: 0.3."""
    representatives: Annotated[int, Field(ge=1, le=4096)] = 1
    """Rows, per query head, that stand for their event when it is scored. Source-reported: 4."""
    influence_tokens: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Following queries that decide what represents an event; absent: persistentRows.recent, at least 1."""
    variant: RecallVariant = RecallVariant.PAPER
    """referenceCode: influence is attention received, and an event's score is of the mean of its keys."""
    min_event_tokens: Annotated[int, Field(ge=1, le=65536)] = 1
    max_event_tokens: Annotated[int, Field(ge=1, le=65536)]


class MemberOrder(StrEnum):
    POSITION = "position"
    CENTRALITY = "centrality"


class ClusterKvParameters(Struct):
    """Online cosine K-means; the cluster that crosses the budget is trimmed."""

    model_config = struct_config(
        cel(
            "self.clustersPerSeal <= self.sealTokens",
            "spec.clusterKv.clustersPerSeal must be at most spec.clusterKv.sealTokens",
        )
    )

    tokens_per_cluster: Annotated[int, Field(ge=1, le=4096)]
    """Rows of a cluster of the prefill, on average."""
    seal_tokens: Annotated[int, Field(ge=1, le=65536)]
    """Later rows that wait, always read, until they become clusters together."""
    clusters_per_seal: Annotated[int, Field(ge=1, le=4096)]
    iterations: Annotated[int, Field(ge=1, le=1000)] = 20
    member_order: MemberOrder = MemberOrder.POSITION
    """Which rows of the cluster that crosses the budget stay: the first ones, or those nearest its centre."""


class CertifiedScanParameters(Struct):
    """A scan that reads pages until the omitted mass is provably below a bound."""

    max_omitted_mass: Fraction
