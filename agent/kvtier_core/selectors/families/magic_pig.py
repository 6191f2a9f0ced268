"""MagicPIG: rows sampled by hash collisions and weighted by the chance of it (Chen et al., 2024).

Why it exists: the family that samples instead of ranking, so that what it leaves out is not always the same
and not treated as absent. It must not know tiers, V or requests.

Formulas (specification D.7). Keys are centred, k' = k - mu, with one mean mu a KV head for every row; queries
are not. `tables` codes of `hashBits` signs each come from random planes. A query head samples row i when at
least `minTables` codes of k'_i and q agree. With w = 1 - angle(q, k'_i) / pi and r = w^hashBits,

    u_i = P(binomial(tables, r) >= minTables)     (minTables 2: 1 - (1-r)^L - L r (1-r)^(L-1))

and the answer is softmax(s_i - ln u_i) V over sampled and persistent rows, u = 1 for the latter. Attention
runs on keys as they are, for all rows alike, so the centre cancels in it and only hashing is centred.

Variants: "paper", -ln u; "referenceCode", -ln(u + 1e-4), which weighs far rows too low.

The mean is of the first min(meanTokens, largest power of two within the covered rows) rows, so an index that
grew is the index that is built at once; when the mean changes every row is hashed anew, under a new epoch.
A cap keeps a uniform part of the sample, drawn with the query's seed, and divides by its share: the sums over
u stay what they were on average. The published algorithm has no cap.

Guarantee: sampled. Consistent in the number of tables. Its ratio is biased for any finite sample, and with
planes drawn once for all queries, as here, nothing is unbiased for one query. Wrong when a key of large norm
lies at a middling angle: rarely sampled, it holds the mass. GQA: each query head hashes and samples for
itself, over tables of its KV head.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import (
    Budget,
    CapPolicy,
    Edit,
    EditCost,
    Evidence,
    FamilyFacts,
    Guarantee,
    Index,
    IndexFacts,
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
)
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.growing import Growing
from kvtier_core.selectors.picking import Persistent, capped
from kvtier_crds.manifest import PersistentRows, Selector
from kvtier_kernels.ops.lsh import lsh_collide_torch, lsh_hash_torch, lsh_tables

VARIANTS = ("paper", "referenceCode")
FACTS = FamilyFacts(
    family="magicPig",
    unit=Unit.ROW,
    scope=Scope.QUERY_HEAD,
    needs=frozenset([Need.QUERY]),
    guarantee=Guarantee.SAMPLED,
    appendable=True,
    edit=EditCost.UNIT,
    randomised=True,
    fixed_size=False,
    key_frame="centred",
)
ESTIMATOR = "selfNormalisedImportance"
MAX_TABLE_BYTES = 1 << 28
_CODE_FLOOR = 1e-4
_LEAST_STEP = 64


@dataclass(frozen=True, slots=True)
class Projector:
    """planes: float32 [d, tables * bits], drawn once. generation: names how they were drawn."""

    generation: str
    planes: Tensor

    @classmethod
    def drawn(cls, seed: int, layer: int, d: int, bits: int, tables: int) -> Projector:
        generation = f"normal:{seed}:{layer}:{d}:{bits}:{tables}"
        start = int.from_bytes(hashlib.sha256(generation.encode()).digest()[:7], "big")
        random = torch.Generator().manual_seed(start)
        return cls(generation, torch.randn(d, tables * bits, generator=random))


@dataclass(frozen=True, slots=True)
class ProbabilityContract:
    """What every u depends on; no part of it may change without hashing all rows anew."""

    projector: str
    bits: int
    tables: int
    min_tables: int
    mean: str


@dataclass(frozen=True, slots=True)
class HashedKeys:
    """keys, centred: float32 entries [Hk, d]; codes: uint16 entries [Hk, tables]; of rows [0, covered).
    mean: float32 [Hk, d]. buckets: starts, ends, content of lsh_tables over the first `tabled` rows; the few
    behind them are searched by their codes."""

    facts: IndexFacts
    contract: ProbabilityContract
    projector: Projector
    mean: Tensor
    keys: Growing
    centred: Growing
    codes: Growing
    tabled: int
    buckets: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Sample:
    """One query head's: rows ascending and ln u of each."""

    rows: Rows
    log_u: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MagicPig:
    """bits, tables, min_tables: of hashing. mean_rows: most rows that the centre is taken of. seed: of the
    planes."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    bits: int
    tables: int
    min_tables: int
    mean_rows: int
    allowed: int
    seed: int
    facts: FamilyFacts

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> MagicPig:
        """MANIFEST_INVALID names the field; COLLISION_RULE: more tables must agree than there are."""
        parameters = Parameters(selector)
        bits = parameters.integer("hashBits", 1, 16)
        tables = parameters.integer("tables", 1, 1024)
        min_tables = parameters.integer("minTables", 1, 16, 2)
        mean_rows = parameters.integer("meanTokens", 1, 1 << 20, 4096)
        variant = parameters.choice("variant", VARIANTS, "paper")
        parameters.done()
        if min_tables > tables:
            raise CoreError(
                Reason.COLLISION_RULE, f"magicPig.minTables {min_tables} of magicPig.tables {tables}"
            )
        size = 8 * shape.kv_heads * tables << bits
        if size > MAX_TABLE_BYTES:
            raise CoreError(
                Reason.MANIFEST_INVALID,
                f"magicPig.tables {tables} of 2^{bits} buckets take {size} bytes a layer, "
                f"at most {MAX_TABLE_BYTES}",
            )
        budget = budget_of(selector)
        allowed = budget.units if budget.units is not None else budget.rows(shape)
        if not allowed:
            raise CoreError(Reason.MANIFEST_INVALID, "the budget pays no row")
        return cls(
            digest=digest_of(selector),
            shape=shape,
            budget=budget,
            persistent=selector.persistent_rows,
            dense_layers=frozenset(selector.dense_layers),
            bits=bits,
            tables=tables,
            min_tables=min_tables,
            mean_rows=mean_rows,
            allowed=allowed,
            seed=selector.seed,
            facts=replace(FACTS, variant="" if variant == "paper" else variant),
        )

    def omits(self, rows: int) -> bool:
        """Whether it could: any row that is not persistent may go without a collision."""
        return rows > self.persistent.sink + max(1, self.persistent.recent)

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> HashedKeys:
        heads, d = self.shape.kv_heads, self.shape.head_dim
        projector = Projector.drawn(self.seed, source.layer, d, self.bits, self.tables)
        mean = torch.zeros(heads, d)
        empty = HashedKeys(
            IndexFacts(self.digest, source, epoch=0, covered=0, seed=self.seed),
            self._contract(projector, mean),
            projector,
            mean,
            Growing((heads, d), np.float32),
            Growing((heads, d), np.float32),
            Growing((heads, self.tables), np.uint16),
            0,
            self._tables(np.empty((0, heads, self.tables), np.uint16)),
        )
        return self.append(empty, k, v, evidence)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> HashedKeys:
        own = _own(index)
        self._check(own)
        keys = own.keys.plus(k.detach().to("cpu").float().numpy())
        return self._over(own, keys, own.facts.covered)

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Cut rows go; moved ones are appended anew, with their keys as they are now."""
        own = _own(index)
        self._check(own)
        kept = min(edit.first, own.facts.covered)
        cut = self._over(own, own.keys.first(kept), kept)
        return replace(
            cut, facts=replace(cut.facts, source=replace(cut.facts.source, position_epoch=edit.epoch))
        )

    def _over(self, own: HashedKeys, keys: Growing, hashed: int) -> HashedKeys:
        """The index over `keys`, of which the first `hashed` are in `own` too."""
        covered = len(keys)
        of = _mean_rows(covered, self.mean_rows)
        mean = own.mean
        centred, codes = own.centred.first(hashed), own.codes.first(hashed)
        if of != _mean_rows(own.facts.covered, self.mean_rows):
            mean = keys.tensor[:of].double().mean(0).float() if of else torch.zeros_like(own.mean)
            hashed = 0
            centred = Growing(centred.entries.shape[1:], np.float32)
            codes = Growing(codes.entries.shape[1:], np.uint16)
        fresh = keys.tensor[hashed:] - mean
        if len(fresh):
            centred = centred.plus(fresh.numpy())
            codes = codes.plus(lsh_hash_torch(fresh, own.projector.planes, bits=self.bits).numpy())
        tabled = _tabled(covered)
        same = hashed >= tabled and tabled == own.tabled
        buckets = own.buckets if same else self._tables(codes.entries[:tabled])
        contract = self._contract(own.projector, mean)
        parts = (("contract", repr(contract)), ("codes", str(len(codes))), ("tabled", str(tabled)))
        facts = replace(own.facts, epoch=own.facts.epoch + 1, covered=covered, parts=parts)
        return HashedKeys(facts, contract, own.projector, mean, keys, centred, codes, tabled, buckets)

    def _contract(self, projector: Projector, mean: Tensor) -> ProbabilityContract:
        return ProbabilityContract(
            projector.generation, self.bits, self.tables, self.min_tables, _digest_of(mean)
        )

    def _tables(self, codes: NDArray[np.uint16]) -> tuple[Tensor, Tensor, Tensor]:
        """codes [n, Hk, tables]."""
        stacked = torch.from_numpy(codes.transpose(1, 0, 2).copy()).unsqueeze(0)
        return lsh_tables(stacked, torch.tensor([len(codes)], dtype=torch.int32), bits=self.bits)

    def _check(self, own: HashedKeys) -> None:
        """COLLISION_RULE: sampled by one rule and weighed by another. SELECTOR_STATE_MIXED names the part
        that is of another generation."""
        asked, found = self._contract(own.projector, own.mean), own.contract
        if found.min_tables != asked.min_tables:
            raise CoreError(
                Reason.COLLISION_RULE,
                f"the index weighs rows by {found.min_tables} tables, {asked.min_tables} are asked",
            )
        drawn = f"normal:{self.seed}:{own.facts.source.layer}:{self.shape.head_dim}:{self.bits}:{self.tables}"
        wrong = {
            "hashBits": found.bits != asked.bits,
            "tables": found.tables != asked.tables or own.codes.entries.shape[2] != asked.tables,
            "projector": not found.projector == own.projector.generation == drawn,
            "mean": found.mean != asked.mean,
            "codes": len(own.codes) != own.facts.covered,
            "keys": len(own.centred) != own.facts.covered or len(own.keys) != own.facts.covered,
            "buckets": own.buckets[2].shape[3] != own.tabled or own.tabled > own.facts.covered,
            "contract": bool(own.facts.parts) and dict(own.facts.parts).get("contract") != repr(found),
        }
        mixed = [name for name, there in wrong.items() if there]
        if mixed:
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED,
                f"of another generation than the rest of the index: {', '.join(mixed)}",
            )

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        lag = check_index(own, self, query, tail=max(1, self.persistent.recent))
        self._check(own)
        persistent = Persistent.of(self.persistent, query.rows, own.facts.covered)
        q = query.q.to("cpu").float()
        looked, samples = self._sampled(own, q, persistent)
        found = [self._kept(sample, query, head, persistent) for head, sample in enumerate(samples)]
        static = persistent.rows
        positions, weights = [], []
        for sample in found:
            rows = np.concatenate([static, sample.rows])
            order = np.argsort(rows, kind="stable")
            corrected = np.concatenate([np.zeros(len(static)), self._correction(sample.log_u)])
            positions.append(rows[order])
            weights.append(corrected[order].astype(np.float32))
        counts = tuple(len(sample.rows) for sample in found)
        wanted = tuple(len(sample.rows) for sample in samples)
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=counts,
            got_rows=counts,
            uncapped=wanted,
            dropped_by_cap=tuple(max(0, asked - got) for asked, got in zip(wanted, counts, strict=True)),
            scanned_units=own.facts.covered,
            index_bytes=looked + 4 * self.shape.head_dim * sum(wanted),
            threshold=(float(self.min_tables),) * len(counts),
            runner_up=(float(self.min_tables - 1),) * len(counts),
            ties=(0,) * len(counts),
            unindexed=lag,
            seed=self.seed,
            detail={
                "estimator": ESTIMATOR,
                "hashBits": str(self.bits),
                "tables": str(self.tables),
                "minTables": str(self.min_tables),
                "projector": own.contract.projector,
                "mean": own.contract.mean,
                "minU": ",".join(f"{_least(sample):.6g}" for sample in found),
                "static": str(len(static)),
                "drawSeed": str(query.seed),
            },
        )
        selection = Selection(
            self.facts.scope,
            tuple(positions),
            tuple(sample.rows for sample in found),
            receipt,
            log_weight=tuple(weights),
        )
        check_sample(selection, static)
        return selection

    def _correction(self, log_u: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.facts.variant == "referenceCode":
            return np.asarray(-np.log(np.exp(log_u) + _CODE_FLOOR))
        return -log_u

    def _sampled(self, own: HashedKeys, q: Tensor, persistent: Persistent) -> tuple[int, list[_Sample]]:
        """Bytes of tables read, and what each query head finds among rows that are not persistent."""
        codes = lsh_hash_torch(q, own.projector.planes, bits=self.bits)
        covered, tabled = own.facts.covered, own.tabled
        parts: list[list[_Sample]] = []
        looked = q.shape[1] * self.tables * 10
        owner = torch.arange(q.shape[1]) // self.shape.group
        for first, last in ((0, tabled), (tabled, covered)):
            if first == last:
                continue
            buckets = own.buckets if last == tabled else self._tables(own.codes.entries[first:last])
            starts, ends, content = buckets
            keys = own.centred.tensor[first:last].permute(1, 0, 2).unsqueeze(0)
            hit = lsh_collide_torch(
                q, codes, keys, starts, ends, content, min_hits=self.min_tables, cap=last - first
            )
            bounds, ids, log_u = hit.indptr.tolist(), hit.ids.numpy(), hit.log_p.double().numpy()
            lists = [slice(bounds[h], bounds[h + 1]) for h in range(q.shape[1])]
            parts.append([_Sample(ids[one].astype(np.int64) + first, log_u[one]) for one in lists])
            bucket = (0, owner[:, None], torch.arange(self.tables), codes[0].long())
            looked += 4 * int((ends[bucket] - starts[bucket]).sum())
        samples = []
        for head in range(q.shape[1]):
            rows = np.concatenate([np.empty(0, np.int64), *(part[head].rows for part in parts)])
            log_u = np.concatenate([np.empty(0), *(part[head].log_u for part in parts)])
            free = ~persistent.mask[rows]
            samples.append(_Sample(rows[free], log_u[free]))
        return looked, samples

    def _kept(self, sample: _Sample, query: Query, head: int, persistent: Persistent) -> _Sample:
        """What the cap leaves: a uniform part with its share in u, or by policy every row."""
        total = len(sample.rows)
        count = capped(total, self.allowed, self.budget)
        if count == total:
            return sample
        if self.budget.cap_policy is CapPolicy.DENSE:
            others = persistent.others
            return _Sample(others, np.zeros(len(others)))
        random = np.random.default_rng([self.seed, query.seed, query.source.layer, head, query.rows])
        at = np.sort(random.choice(total, size=count, replace=False))
        return _Sample(sample.rows[at], sample.log_u[at] + math.log(count / total))


def check_sample(selection: Selection, static: Rows) -> None:
    """Whether `selection` is a weighted sample that attention may use. ESTIMATOR_CONTRACT: no weights, or not
    one a row. ZERO_PROBABILITY: a row that cannot have been sampled. PROBABILITY_RANGE: a u that is no
    probability, or not 1 for a row of `static`. UNDECLARED_APPROXIMATION: it claims another guarantee."""
    if selection.receipt.guarantee is not Guarantee.SAMPLED:
        raise CoreError(Reason.UNDECLARED_APPROXIMATION, "a sample is answered as something else")
    if selection.receipt.detail.get("estimator") != ESTIMATOR:
        raise CoreError(Reason.ESTIMATOR_CONTRACT, "a sample without its estimator's name")
    if selection.log_weight is None or len(selection.log_weight) != len(selection.positions):
        raise CoreError(Reason.ESTIMATOR_CONTRACT, "sampled rows without weights")
    least = 0.0 if selection.receipt.variant == "" else -math.log1p(_CODE_FLOOR) - 1e-6
    for rows, weights in zip(selection.positions, selection.log_weight, strict=True):
        if len(weights) != len(rows):
            raise CoreError(Reason.ESTIMATOR_CONTRACT, f"{len(weights)} weights for {len(rows)} rows")
        if np.isposinf(weights).any():
            raise CoreError(
                Reason.ZERO_PROBABILITY, f"row {int(rows[np.isposinf(weights)][0])} cannot have been sampled"
            )
        if not (weights >= least).all():
            raise CoreError(Reason.PROBABILITY_RANGE, "a chance of being sampled is above 1 or unknown")
        if weights[np.isin(rows, static)].any():
            raise CoreError(Reason.PROBABILITY_RANGE, "a row that is always read has a weight")


def _own(index: Index) -> HashedKeys:
    if not isinstance(index, HashedKeys):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of MagicPIG")
    return index


def _mean_rows(covered: int, most: int) -> int:
    return min(most, 1 << (covered.bit_length() - 1)) if covered else 0


def _tabled(covered: int) -> int:
    """How many rows are in buckets: all but less than a quarter, sorted anew a few times a doubling."""
    step = max(_LEAST_STEP, (1 << covered.bit_length()) >> 3)
    return covered // step * step


def _digest_of(mean: Tensor) -> str:
    return hashlib.sha256(mean.numpy().tobytes()).hexdigest()[:32]


def _least(sample: _Sample) -> float:
    return float(np.exp(sample.log_u.min(initial=0.0)))
