"""How far a selector's answers are from full attention's, by exact definitions.

Why it exists: retained mass alone is nearly useless, since sink and recent rows hold most of it and any
choice keeps them. It must not know families, tasks or models.

Per step, layer and query head, with p the dense softmax in float64 over the same K and the same query, R the
rows read, M the persistent rows (the same for every selector), o the dense answer, o' the one given:

    recall@k   |R and top k of p| / k             support    |R and {p > 8/n}| / |{p > 8/n}|
    mass       sum of p over R                     excess     (mass - mass(M)) / (1 - mass(M))
    valueMass  sum of p |v| over R / over all      outError   |o' - o| / |o|
    needle     mass(R and evidence) / mass(evidence), needle heads only
    woError    |Wo (o' - o)| / |residual stream|, one a layer
    certified  the selector's sound bound on mass, where it states one

`excess` leaves out heads with less than 1e-6 beyond M, `support` those without such a row. `bytes` are of K
and V rows beyond M in float32 (of their whole pages, for a family that reads those) and of the index;
`fetched` are the rows' bytes when each layer and KV head keeps the latest rows in a buffer of `hot` rows.
`stability` is the Jaccard index of rows beyond M in steps that follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.selectors.contract import Scope, Selection, Shape, Unit
from kvtier_eval.outcomes import NO_LEDGERS, Ledgers, Measured, Prices, Support, check_ledgers, ledgers
from kvtier_eval.proof import EVERY, Asked, Step, prove_head
from kvtier_eval.statistics import mean, quantile
from kvtier_kernels.state import AttentionState

RECALLS = (8, 32, 128)
SUPPORT = 8.0
NAMES = ("mass", "excess", "outError", "valueMass", "support", "certified", *(f"recall{k}" for k in RECALLS))
ID_BYTES = 8
"""Of the id of a candidate or a unit, as a selection names it."""
_LITTLE = 1e-6


@dataclass(frozen=True, slots=True)
class HeadMetrics:
    """Of one step and layer: float64 [Hq] by name, nan where not defined. wo: of the layer."""

    values: dict[str, NDArray[np.float64]]
    needle: NDArray[np.float64]
    wo: float


def read_mask(selection: Selection, shape: Shape, rows: int) -> Tensor:
    """bool [Hq, rows]: what each query head reads."""
    mask = torch.zeros(shape.query_heads, rows, dtype=torch.bool)
    for head in range(shape.query_heads):
        at = {Scope.LAYER: 0, Scope.KV_HEAD: head // shape.group, Scope.QUERY_HEAD: head}[selection.scope]
        mask[head, torch.from_numpy(selection.positions[at])] = True
    return mask


def persistent_mask(rows: int, sink: int, recent: int) -> Tensor:
    """bool [rows]: the first `sink`, the last `recent`, and the query's own."""
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[:sink] = True
    mask[max(0, rows - max(1, recent)) :] = True
    return mask


def head_metrics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor,
    persistent: Tensor,
    answer: Tensor,
    *,
    scale: float,
    evidence: Tensor,
    certified: Sequence[float] | None,
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64], Tensor, NDArray[np.int64]]:
    """q [Hq, d], k and v [n, Hk, d], read bool [Hq, n], persistent bool [n], answer [Hq, d], evidence bool
    [n]. Returns the values by name, the needle's share, each float64 [Hq], answer - o, float64 [Hq,
    d], and the rows of the first of RECALLS, int64 [Hq, k]."""
    n, kv_heads, _ = k.shape
    grouped = q.double().view(kv_heads, -1, q.shape[-1])
    logits = torch.einsum("hgd,nhd->hgn", grouped, k.double()) * scale
    p = logits.softmax(-1)
    exact = torch.einsum("hgn,nhd->hgd", p, v.double()).flatten(0, 1)
    norms = v.double().norm(dim=-1).T[:, None]
    weighed = (p * norms).flatten(0, 1)
    p = p.flatten(0, 1)
    mass = (p * read).sum(-1)
    base = (p * persistent).sum(-1)
    rest = 1 - base
    delta = answer.double() - exact
    large = p > SUPPORT / n
    nan = torch.tensor(float("nan"), dtype=torch.float64)
    values = {
        "mass": mass,
        "excess": torch.where(rest > _LITTLE, (mass - base) / rest.clamp_min(_LITTLE), nan),
        "valueMass": (weighed * read).sum(-1) / weighed.sum(-1),
        "outError": delta.norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30),
        "support": torch.where(large.any(-1), (large & read).sum(-1) / large.sum(-1).clamp_min(1), nan),
    }
    for count in RECALLS:
        top = p.topk(min(count, n), dim=-1).indices
        values[f"recall{count}"] = read.gather(1, top).double().mean(-1)
    if certified is not None:
        values["certified"] = torch.tensor(list(certified), dtype=torch.float64)
    there = (p * evidence).sum(-1)
    needle = (p * (read & evidence)).sum(-1) / there.clamp_min(1e-300)
    best = p.topk(min(RECALLS[0], n), dim=-1).indices
    found = {name: value.numpy() for name, value in values.items()}
    return found, needle.numpy(), delta, best.numpy()


@dataclass(slots=True)
class Traffic:
    """Bytes of one layer over the steps, and what a buffer of `hot` rows a KV head would have had to
    fetch. page: rows of a page, for a family that reads whole pages of flash. index: bytes of it that were
    read; kept: the ledgers of rows, each by itself, the support without what every query reads."""

    shape: Shape
    hot: int
    page: int = 1
    index: int = 0
    kept: Ledgers = NO_LEDGERS
    jaccard: list[float] = field(default_factory=list)
    _stamp: list[dict[int, int]] = field(default_factory=list)
    _last: list[set[int]] = field(default_factory=list)
    _step: int = 0

    @property
    def rows(self) -> int:
        return self.kept.support

    @property
    def fetched(self) -> int:
        return self.kept.transfer

    def add(self, selection: Selection, persistent: NDArray[np.bool_]) -> None:
        one_row = 2 * self.shape.head_dim * 4
        heads, receipt = self.shape.kv_heads, selection.receipt
        prices = Prices(ID_BYTES, ID_BYTES)
        sets = []
        for head in range(heads):
            rows = selection.rows_of_kv_head(head, self.shape)
            beyond = rows[~persistent[rows]]
            if "pagesRead" in selection.receipt.detail:
                pages = np.unique(beyond // self.page)[:, None] * self.page + np.arange(self.page)
                beyond = pages[pages < len(persistent)]
            sets.append(set(beyond.tolist()))
        self.index += receipt.index_bytes
        self._stamp = self._stamp or [{} for _ in range(heads)]
        for stamp, rows_now in zip(self._stamp, sets, strict=True):
            ids = tuple(selection.units_of_kv_head(head, self.shape).tolist())
            support = Support("unit", ids, ids, (), (), tuple(stamp), tuple(rows_now))
            self.kept = self.kept.plus(ledgers(support, None, prices, one_row, macs=0, setup=0))
            stamp.update(dict.fromkeys(rows_now, self._step))
            for row in sorted(stamp, key=lambda one: (stamp[one], one))[: max(0, len(stamp) - self.hot)]:
                del stamp[row]
        for before, rows_now in zip(self._last, sets, strict=False):
            union = len(before | rows_now)
            if union:
                self.jaccard.append(len(before & rows_now) / union)
        self._last = sets
        self._step += 1


class Collector:
    """Sums over the steps of one prompt under one selector. needle_heads: (layer, query head)."""

    def __init__(
        self,
        layers: int,
        shape: Shape,
        needle_heads: Sequence[tuple[int, int]],
        evidence: Sequence[tuple[int, int]],
        *,
        hot: int,
        page: int = 1,
    ) -> None:
        self._shape = shape
        self._sum = {name: np.zeros((layers, shape.query_heads)) for name in NAMES}
        self._count = {name: np.zeros((layers, shape.query_heads)) for name in NAMES}
        self._needle_heads = frozenset(needle_heads)
        self._evidence = tuple(evidence)
        self._needle: dict[tuple[int, int], list[float]] = {}
        self._wo: list[float] = []
        self._traffic = [Traffic(shape, hot, page) for _ in range(layers)]
        self._page = page
        self._observed = 0
        self.violations = 0
        """Heads whose certified mass was above the true one."""

    def traffic(self, layer: int, selection: Selection, persistent: Tensor) -> None:
        self._traffic[layer].add(selection, persistent.numpy())

    def observe(
        self,
        asked: Asked,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Selection,
        state: AttentionState,
        answer: Tensor,
        persistent: Tensor,
        unit: Unit,
    ) -> Tensor:
        """One step of one layer; returns answer - o, float64 [Hq, d]. asked: of the index, before it
        answered; unit: what it chooses. OutcomeRefused where a head, redone, is another."""
        rows = k.shape[0]
        evidence = torch.zeros(rows, dtype=torch.bool)
        for first, last in self._evidence:
            evidence[first:last] = True
        values, needle, delta, best = head_metrics(
            q,
            k,
            v,
            read_mask(selection, self._shape, rows),
            persistent,
            answer,
            scale=self._shape.scale,
            evidence=evidence,
            certified=selection.certified(state),
        )
        for name, value in values.items():
            there = ~np.isnan(value)
            self._sum[name][layer, there] += value[there]
            self._count[name][layer] += there
        if "certified" in values:
            self.violations += int(np.count_nonzero(values["certified"] > values["mass"] + 1e-9))
        self._observed += 1
        if self._observed % EVERY == 1:
            head = self._observed // EVERY % self._shape.query_heads
            step = Step(layer, q, k, v, selection, persistent.numpy(), unit, self._page)
            prove_head(asked, step, self._shape, head, _stated(values, delta, answer, best, head))
        for at, head in sorted(self._needle_heads):
            if at == layer:
                self._needle.setdefault((at, head), []).append(float(needle[head]))
        return delta

    def residual(self, error: float) -> None:
        self._wo.append(error)

    def result(self) -> dict[str, object]:
        """Means over steps: of all heads, and what the worst of them got. JSON."""
        made: dict[str, object] = {}
        for name in NAMES:
            there = self._count[name] > 0
            heads = (self._sum[name][there] / self._count[name][there]).tolist()
            if heads:
                made[name] = _summary(heads)
        with np.errstate(invalid="ignore"):
            excess = self._sum["excess"] / self._count["excess"]
        made["excessByHead"] = [None if np.isnan(one) else round(float(one), 4) for one in excess.flatten()]
        needles = [mean(values) for values in self._needle.values()]
        if needles:
            made["needle"] = _summary(needles)
        if self._wo:
            made["woError"] = _summary(self._wo)
        jaccard = [one for traffic in self._traffic for one in traffic.jaccard]
        if jaccard:
            made["stability"] = round(mean(jaccard), 4)
        made["indexBytes"] = sum(traffic.index for traffic in self._traffic)
        made["rowBytes"] = sum(traffic.rows for traffic in self._traffic)
        made["fetchedBytes"] = sum(traffic.fetched for traffic in self._traffic)
        total = NO_LEDGERS
        for traffic in self._traffic:
            total = total.plus(traffic.kept)
        published = {**asdict(total), "support": made["rowBytes"], "transfer": made["fetchedBytes"]}
        check_ledgers(total, published)
        made["ledgers"] = published
        made["boundViolations"] = self.violations
        return made


def _stated(
    values: Mapping[str, NDArray[np.float64]],
    delta: Tensor,
    answer: Tensor,
    best: NDArray[np.int64],
    head: int,
) -> Measured:
    """What is counted of one head."""
    mass = float(values["mass"][head])
    error = float(delta[head].norm())
    norm = float((answer[head].double() - delta[head]).norm())
    return Measured(
        top=tuple(sorted(best[head].tolist())),
        recall_support=float(values[f"recall{RECALLS[0]}"][head]),
        retained=mass,
        delta=1.0 - mass,
        error=error,
        norm=norm,
        bound=math.inf,
        relative=float(values["outError"][head]) if norm > 0.0 else None,
    )


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(mean(values), 6),
        "p10": round(quantile(values, 0.1), 6),
        "p90": round(quantile(values, 0.9), 6),
        "min": round(min(values), 6),
        "max": round(max(values), 6),
    }


@dataclass(frozen=True, slots=True)
class TokenMetrics:
    """One entry a step. kl: KL(full || selector), nats. top1: both name the same token first. loss: -ln P of
    the target. matched: leading targets that greedy decoding gives."""

    kl: tuple[float, ...]
    top1: tuple[bool, ...]
    loss: tuple[float, ...]
    matched: int


def token_metrics(full: Tensor, given: Tensor, targets: Sequence[int]) -> TokenMetrics:
    """full, given: ln P float32 [T, vocabulary]."""
    wanted = torch.tensor(list(targets))
    wide, narrow = full.double(), given.double()
    kl = (wide.exp() * (wide - narrow)).sum(-1).clamp_min(0.0)
    best = given.argmax(-1)
    hits = (best == wanted).tolist()
    return TokenMetrics(
        tuple(kl.tolist()),
        tuple((best == full.argmax(-1)).tolist()),
        tuple((-narrow.gather(1, wanted[:, None])[:, 0]).tolist()),
        hits.index(False) if False in hits else len(hits),
    )
