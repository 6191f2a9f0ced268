"""InfiniGen: a layer's attention rehearsed from the input of the layer before it (Lee et al., 2024).

Why it exists: the family that chooses before its layer runs, so that rows can be fetched meanwhile. It must
not know tiers or requests. A rehearsal only predicts: its channels are never attended.

Formulas (specification D.3). Per KV head, A = the right singular vectors of the queries of all its query
heads, after RoPE (A A' = I, so (qA).(kA) = q.k). D = the r channels of largest sum over rows of |qA| + |kA|,
one D for queries and keys. At decode, from the input h of layer l - 1 and the weights of layer l:

    q~ = RoPE(norm(h) W + b, position) A,   a_i = t q~_D . (k_i A)_D,   t the factor on q.k

A row passes when a_i >= max a - alpha for some query head of its KV head, the maximum over every row of the
index. Every KV head then reads the same number of rows: the floor of the mean of their counts, at most the
budget and `capShare` of the context; those of the largest a_i - max a over the group. Persistent rows take no
part in counts. e^-alpha bounds a row's weight relative to the best one, not what all others weigh together.

Variants, where the authors' two scripts differ from the paper and from each other; in both, channels are by
queries alone. "accuracyScript": every head is compared with the maximum of query head 0. "speedScript": with
its own, strictly.

Different here: A comes from the first `trainTokens` rows or more (a prefill), not from an offline sample; the
order of its columns changes nothing. RoPE forbids folding A into W; the query is turned instead, which is the
same product. The layer's own norm stands before W (the scripts feed the previous layer's normed input).
`skew: false` is the paper's ablation, A = I.

Needs: prefill queries (A, D), weights and the previous layer's hidden state. Layer 0 has none and stays
exact. Guarantee: heuristic; wrong when decode queries use other channels, or when one flat head shares the
others' count.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rope import RopeTable
from kvtier_core.selectors.contract import (
    Budget,
    Edit,
    EditCost,
    Evidence,
    FamilyFacts,
    Guarantee,
    Index,
    IndexFacts,
    LayerWeights,
    Need,
    NeedsRebuild,
    Query,
    Rows,
    Scope,
    Selection,
    SelectionReceipt,
    Shape,
    Source,
    Unit,
    check_index,
    check_needs,
)
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.growing import Growing, GrowingColumns
from kvtier_core.selectors.picking import Persistent, Picked, best, capped
from kvtier_crds.manifest import PersistentRows, Selector

VARIANTS = ("paper", "accuracyScript", "speedScript")
FACTS = FamilyFacts(
    family="infinigen",
    unit=Unit.ROW,
    scope=Scope.KV_HEAD,
    needs=frozenset([Need.PREFILL_QUERIES, Need.PREVIOUS_HIDDEN_STATE, Need.WEIGHTS]),
    guarantee=Guarantee.HEURISTIC,
    appendable=True,
    edit=EditCost.UNIT,
    fixed_size=False,
)
# A rehearsal is of a query: no row's hidden state is looked at.
_OF_ROWS = FACTS.needs - {Need.PREVIOUS_HIDDEN_STATE}
_STATED = ("alpha", "counts", "equalised", "cap", "columns", "skew", "predictedFrom")
_ORTHOGONAL = 1e-5


@dataclass(frozen=True, slots=True)
class Skew:
    """basis: float32 [Hk, d, d], orthogonal; columns: int64 [Hk, r], ascending, the channels rehearsed. rows:
    that both were made of. Refuses itself: SKEW_NOT_ORTHOGONAL, SELECTOR_GEOMETRY."""

    basis: Tensor
    columns: Tensor
    rows: int

    def __post_init__(self) -> None:
        wide = self.basis.double()
        d = wide.shape[-1]
        error = float((wide @ wide.mT - torch.eye(d, dtype=torch.float64)).abs().max())
        if not error <= _ORTHOGONAL:
            raise CoreError(Reason.SKEW_NOT_ORTHOGONAL, f"A A' is {error:.3g} away from the identity")
        if not 0 <= int(self.columns.min()) <= int(self.columns.max()) < d:
            raise CoreError(Reason.SELECTOR_GEOMETRY, f"channels outside a head dim of {d}")

    @property
    def digest(self) -> str:
        body = self.basis.numpy().tobytes() + self.columns.numpy().tobytes()
        return hashlib.sha256(body).hexdigest()[:16]

    def partial(self, x: Tensor) -> Tensor:
        """Channels of interest [Hk, n, r] of x float32 [Hk, n, d] in the basis."""
        wanted = torch.gather(self.basis, 2, self.columns[:, None].expand(-1, self.basis.shape[1], -1))
        return x @ wanted


@dataclass(frozen=True, slots=True)
class PartialKeys:
    """keys: float32 [Hk, r, n], channels `skew.columns` of the rotated keys of rows [0, covered), made with
    the skew that `made_by` names. waiting_k, waiting_q: float32 entries [Hk, d] and [Hq, d], while there is
    no skew. weights: of the layer that is rehearsed."""

    facts: IndexFacts
    weights: LayerWeights
    skew: Skew | None
    keys: GrowingColumns
    made_by: str
    waiting_k: Growing
    waiting_q: Growing


@dataclass(frozen=True, slots=True)
class _Choice:
    """counts: rows of each KV head over the threshold; equalised: of every head, before the cap."""

    picked: list[Picked]
    counts: list[int]
    equalised: int
    cap: int


@dataclass(frozen=True, slots=True)
class Infinigen:
    """channels: r. alpha: in logits. cap_share: None for no cap besides the budget. train_tokens: rows
    of which the skew is made at the earliest."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    channels: int
    alpha: float
    cap_share: float | None
    skewed: bool
    train_tokens: int
    facts: FamilyFacts

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> Infinigen:
        """MANIFEST_INVALID names the field; SELECTOR_GEOMETRY: more channels than a key has;
        THRESHOLD_INVALID: one above the maximum, which no row passes."""
        parameters = Parameters(selector)
        channels = parameters.integer("partialDimensions", 1, 1024)
        alpha = parameters.number("alpha", -1e9, 1e9)
        variant = parameters.choice("variant", VARIANTS, "paper")
        share = parameters.number("capShare", 0.0, 1.0, "1")
        skewed = parameters.flag("skew", default=True)
        train_tokens = parameters.integer("trainTokens", 1, 1 << 24, 64)
        parameters.done()
        if channels > shape.head_dim:
            raise CoreError(
                Reason.SELECTOR_GEOMETRY,
                f"infinigen.partialDimensions {channels} of a head dim of {shape.head_dim}",
            )
        if alpha < 0:
            raise CoreError(
                Reason.THRESHOLD_INVALID, f"infinigen.alpha {alpha:g} puts the threshold above all"
            )
        budget = budget_of(selector)
        if not (budget.units if budget.units is not None else budget.rows(shape)):
            raise CoreError(Reason.MANIFEST_INVALID, "the budget pays no row")
        return cls(
            digest=digest_of(selector),
            shape=shape,
            budget=budget,
            persistent=selector.persistent_rows,
            dense_layers=frozenset([0, *selector.dense_layers]),
            channels=channels,
            alpha=alpha,
            cap_share=share if "capShare" in selector.parameters else None,
            skewed=skewed,
            train_tokens=train_tokens,
            facts=replace(FACTS, variant=variant),
        )

    def cap(self, rows: int) -> int:
        """The most rows of one KV head beyond the persistent ones, of a context of `rows`."""
        allowed = self.budget.units if self.budget.units is not None else self.budget.rows(self.shape)
        assert allowed is not None
        return allowed if self.cap_share is None else min(allowed, int(self.cap_share * rows))

    def omits(self, rows: int) -> bool:
        """Whether it could: any row that is not persistent may be found not to matter."""
        always = self.persistent.sink + max(1, self.persistent.recent)
        return rows > always and rows >= self.train_tokens

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> PartialKeys:
        check_needs(self, evidence, _OF_ROWS)
        weights = evidence.weights
        assert weights is not None
        if source.layer == 0:
            raise CoreError(Reason.LAYER_DISTANCE, "layer 0 has no layer before it to be rehearsed from")
        heads, d, queries = self.shape.kv_heads, self.shape.head_dim, self.shape.query_heads
        wanted = (weights.norm_weight.shape[0], queries * d)
        if tuple(weights.query.shape) != wanted:
            raise CoreError(
                Reason.SELECTOR_GEOMETRY, f"query weights {tuple(weights.query.shape)} are not {wanted}"
            )
        empty = PartialKeys(
            IndexFacts(self.digest, source, epoch=0, covered=0),
            weights,
            None,
            GrowingColumns((heads, self.channels), np.float32),
            "",
            Growing((heads, d), np.float32),
            Growing((queries, d), np.float32),
        )
        return self.append(empty, k, v, evidence)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> PartialKeys:
        """Prefill queries are needed until there is a skew: UNSUPPORTED, COVERAGE_GAP."""
        own = _own(index)
        if k.shape != v.shape:
            raise CoreError(Reason.ROW_INCOMPLETE, f"{tuple(k.shape)} keys and {tuple(v.shape)} values")
        rows = k.detach().to("cpu").float()
        covered = own.facts.covered + len(rows)
        if own.skew is None:
            check_needs(self, evidence, _OF_ROWS)
            assert evidence.queries is not None
            queries = evidence.queries.detach().to("cpu").float()
            if len(queries) != len(rows):
                raise CoreError(Reason.COVERAGE_GAP, f"queries of {len(queries)} rows with {len(rows)} keys")
            waiting_k, waiting_q = own.waiting_k.plus(rows.numpy()), own.waiting_q.plus(queries.numpy())
            own = replace(own, waiting_k=waiting_k, waiting_q=waiting_q)
            if covered < self.train_tokens:
                return self._made(own, covered)
            rows = waiting_k.tensor.clone()
            skew = self.train(waiting_q.tensor, rows)
            none_k, none_q = waiting_k.first(0), waiting_q.first(0)
            own = replace(own, skew=skew, made_by=skew.digest, waiting_k=none_k, waiting_q=none_q)
        assert own.skew is not None
        columns = own.skew.partial(rows.transpose(0, 1)).transpose(1, 2).numpy()
        return self._made(replace(own, keys=own.keys.plus(columns)), covered)

    def train(self, queries: Tensor, keys: Tensor) -> Skew:
        """The skew of queries [n, Hq, d] and keys [n, Hk, d] of the same rows."""
        heads, d = self.shape.kv_heads, self.shape.head_dim
        grouped = queries.view(len(queries), heads, self.shape.group, d).permute(1, 0, 2, 3)
        grouped = grouped.reshape(heads, -1, d).double()
        basis = torch.eye(d, dtype=torch.float64).repeat(heads, 1, 1)
        if self.skewed:
            # Right singular vectors are the eigenvectors of Q'Q; largest first.
            basis = torch.linalg.eigh(grouped.mT @ grouped).eigenvectors.flip(2)
        evidence = (grouped @ basis).abs().sum(1)
        if self.facts.variant == "paper":
            evidence = evidence + (keys.transpose(0, 1).double() @ basis).abs().sum(1)
        order = torch.argsort(-evidence, dim=1, stable=True)[:, : self.channels]
        return Skew(basis.float().contiguous(), torch.sort(order, dim=1).values, len(queries))

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Rows that are gone are cut; rows that moved are appended anew, with their keys as they are now. The
        skew stays while enough rows do."""
        own = _own(index)
        kept = min(edit.first, own.facts.covered)
        if own.skew is not None and kept < self.train_tokens:
            return NeedsRebuild(
                f"basis and channels were made of {own.skew.rows} rows, {kept} are left and "
                f"{self.train_tokens} are needed to make others"
            )
        facts = replace(own.facts, source=replace(own.facts.source, position_epoch=edit.epoch))
        cut = replace(
            own,
            facts=facts,
            keys=own.keys.first(min(len(own.keys), kept)),
            waiting_k=own.waiting_k.first(min(len(own.waiting_k), kept)),
            waiting_q=own.waiting_q.first(min(len(own.waiting_q), kept)),
        )
        return self._made(cut, kept)

    @staticmethod
    def _made(own: PartialKeys, covered: int) -> PartialKeys:
        skew = "" if own.skew is None else own.made_by
        parts = (
            ("weights", own.weights.digest),
            ("skew", skew),
            ("keys", str(len(own.keys))),
            ("waiting", str(len(own.waiting_k))),
        )
        return replace(own, facts=replace(own.facts, epoch=own.facts.epoch + 1, covered=covered, parts=parts))

    def check(self, own: PartialKeys) -> None:
        """Whether the parts of an index belong together: COVERAGE_GAP, PARTIAL_INDEX, SELECTOR_GEOMETRY,
        SELECTOR_STATE_MIXED (channels of another skew), SELECTOR_STALE (a skew that was not published)."""
        rows = len(own.keys) + len(own.waiting_k)
        if rows != own.facts.covered:
            raise CoreError(
                Reason.COVERAGE_GAP, f"channels of {rows} rows in an index that covers {own.facts.covered}"
            )
        if own.skew is None:
            if len(own.keys):
                raise CoreError(Reason.PARTIAL_INDEX, "channels without the skew that names them")
            return
        if own.skew.columns.shape != own.keys.entries.shape[:2]:
            raise CoreError(
                Reason.SELECTOR_GEOMETRY,
                f"channels {tuple(own.skew.columns.shape)} of queries, {own.keys.entries.shape[:2]} of keys",
            )
        digest = own.skew.digest
        if own.made_by != digest:
            raise CoreError(Reason.SELECTOR_STATE_MIXED, f"keys of skew {own.made_by}, queries of {digest}")
        if dict(own.facts.parts).get("skew") != digest:
            raise CoreError(Reason.SELECTOR_STALE, f"skew {digest} is not the one that was published")

    def rehearsed(self, index: PartialKeys, query: Query) -> Tensor:
        """The query that layer l is expected to ask, float32 [Hk, G, d], in the frame of attended queries.
        UNSUPPORTED without a hidden state, LAYER_DISTANCE with one of another layer, SELECTOR_GEOMETRY."""
        layer = index.facts.source.layer
        if query.hidden is None:
            raise CoreError(
                Reason.UNSUPPORTED,
                f"infinigen needs {Need.PREVIOUS_HIDDEN_STATE} of a query, which this engine does not give",
                {"missing": Need.PREVIOUS_HIDDEN_STATE},
            )
        if query.hidden_layer is not None and query.hidden_layer != layer - 1:
            raise CoreError(
                Reason.LAYER_DISTANCE,
                f"layer {layer} is rehearsed from the input of layer {layer - 1}, not {query.hidden_layer}",
            )
        weights, h = index.weights, query.hidden.to("cpu").float()
        if tuple(h.shape) != (1, weights.query.shape[0]):
            raise CoreError(
                Reason.SELECTOR_GEOMETRY, f"hidden {tuple(h.shape)} is not {(1, weights.query.shape[0])}"
            )
        normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + weights.norm_eps) * weights.norm_weight
        q = (normed @ weights.query.float()).view(self.shape.query_heads, self.shape.head_dim)
        if weights.bias is not None:
            q = q + weights.bias.float().view_as(q)
        if weights.inv_freq is not None:
            position = query.rows - 1 if query.position is None else query.position
            q = RopeTable(weights.inv_freq.double(), weights.interleaved).turned(q, position)
        return q.reshape(self.shape.kv_heads, self.shape.group, self.shape.head_dim)

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        lag = check_index(own, self, query, tail=max(1, self.persistent.recent))
        self.check(own)
        q = self.rehearsed(own, query)
        persistent = Persistent.of(self.persistent, query.rows, own.facts.covered)
        others, heads = persistent.others, self.shape.kv_heads
        omitted: tuple[float, ...] = (0.0,) * self.shape.query_heads
        if own.skew is None:
            nothing = Picked(others, -np.inf, -np.inf, 0)
            choice = _Choice([nothing] * heads, [len(others)] * heads, len(others), len(others))
            positions = (persistent.joined(others)[0],) * heads
        else:
            logits = (own.skew.partial(q) @ own.keys.tensor).numpy() * np.float32(self.shape.scale)
            choice = self._choose(logits, others, query.rows)
            positions = tuple(persistent.joined(one.ids)[0] for one in choice.picked)
            omitted = _omitted(logits, positions)
        counts = tuple(len(one.ids) for one in choice.picked)
        skew = own.skew
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=counts,
            got_rows=counts,
            uncapped=(choice.equalised,) * heads,
            dropped_by_cap=tuple(max(0, choice.equalised - count) for count in counts),
            scanned_units=len(own.keys),
            index_bytes=own.keys.entries.nbytes,
            threshold=tuple(one.threshold for one in choice.picked),
            runner_up=tuple(one.runner_up for one in choice.picked),
            ties=tuple(one.ties for one in choice.picked),
            unindexed=lag,
            omitted_mass=omitted,
            detail={
                "alpha": f"{self.alpha:g}",
                "counts": ",".join(map(str, choice.counts)),
                "equalised": str(choice.equalised),
                "cap": str(choice.cap),
                "columns": ""
                if skew is None
                else ";".join(",".join(map(str, row)) for row in skew.columns.tolist()),
                "skew": "absent" if skew is None else own.made_by,
                "trainedRows": "0" if skew is None else str(skew.rows),
                "predictedFrom": str(own.facts.source.layer - 1),
                "weightBytes": str(own.weights.query.numel() * own.weights.query.element_size()),
            },
        )
        check_receipt(receipt)
        return Selection(self.facts.scope, positions, tuple(one.ids for one in choice.picked), receipt)

    def _choose(self, logits: NDArray[np.float32], others: Rows, rows: int) -> _Choice:
        """logits [Hk, G, n] of the rows of the index. What is not a number passes and is read first."""
        known = np.where(np.isnan(logits), -np.inf, logits)
        top = known.max(axis=2, keepdims=True)
        if self.facts.variant == "accuracyScript":
            top = np.broadcast_to(top[:1, :1], top.shape)
        relative = (logits - top)[:, :, others]
        strict = self.facts.variant == "speedScript"
        passing = relative > -self.alpha if strict else relative >= -self.alpha
        counts = (passing | np.isnan(relative)).any(axis=1).sum(axis=1).tolist()
        equalised = sum(counts) // len(counts)
        cap = self.cap(rows)
        wanted = capped(equalised, cap, self.budget)
        wanted = len(others) if wanted < 0 else wanted
        # NaN stays NaN in a maximum, and comes first.
        return _Choice([best(one, others, wanted) for one in relative.max(axis=1)], counts, equalised, cap)


def check_receipt(receipt: SelectionReceipt) -> None:
    """RECEIPT_INCOMPLETE names what D.3 wants stated and is not."""
    missing = [name for name in _STATED if name not in receipt.detail]
    if missing:
        raise CoreError(Reason.RECEIPT_INCOMPLETE, f"a receipt of infinigen without {', '.join(missing)}")


def _omitted(logits: NDArray[np.float32], positions: tuple[Rows, ...]) -> tuple[float, ...]:
    """The share of the rehearsed softmax on rows of the index that are not read, one a query head."""
    shares: list[float] = []
    for head, rows in enumerate(positions):
        for one in logits[head].astype(np.float64):
            known = np.where(np.isnan(one), -np.inf, one)
            if known.max() == -np.inf:
                shares.append(1.0)
                continue
            weight = np.exp(known - known.max())
            unread = np.ones(len(one), dtype=np.bool_)
            unread[rows[rows < len(one)]] = False
            shares.append(float(weight[unread].sum() / weight.sum()))
    return tuple(shares)


def _own(index: Index) -> PartialKeys:
    if not isinstance(index, PartialKeys):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of InfiniGen")
    return index
