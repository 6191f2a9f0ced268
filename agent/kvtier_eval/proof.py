"""Redoes one query head of a measured step by its definitions, and refuses what the run says of it otherwise.

Why it exists: all heads of a step are measured at once, on tensors, and a slip there is a number like any
other. A head at a time is the same by other arithmetic, from the rows and the query alone. It must not know
families or models. Definitions: specification F.1 to F.3.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.selectors.contract import Scope, Selection, Shape, Source, Unit
from kvtier_eval.outcomes import (
    Dense,
    Measured,
    OutcomeIdentity,
    Support,
    Units,
    check_dense,
    check_identity,
    check_metrics,
    check_support,
    check_units,
    measure,
)

EVERY = 8
"""Of the measured steps and layers, those of which a head is redone: a head costs about what measuring all
heads of them does."""
_ROUNDED = 1e-4
"""What float32 may change of an answer, as a share of the largest value."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a replay asked an index, noted before it heard the answer. q: float32 [Hq, d]; rows: that it
    sees; epoch: of the index."""

    source: Source
    epoch: int
    q: Tensor
    rows: int

    def identity(self, kv_head: int) -> OutcomeIdentity:
        return _identity(self.source, self.epoch, self.q, self.rows, kv_head)


def _identity(source: Source, epoch: int, q: Tensor, rows: int, kv_head: int) -> OutcomeIdentity:
    """A replay has one history a prompt: its source stands for the tenant, its edits for the request's
    generation, and its rows for the cache's."""
    return OutcomeIdentity(
        tenant_namespace=source.digest.hex(),
        request_generation=source.position_epoch,
        cache_generation=rows,
        index_generation=epoch,
        query_sha256=hashlib.sha256(np.ascontiguousarray(q.numpy()).data).digest(),
        layer=source.layer,
        kv_head=kv_head,
        mask_sha256=hashlib.sha256(b"causal/%d" % rows).digest(),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of a measured step: q [Hq, d], k, v [n, Hk, d] float32; persistent: bool [n], rows that every
    selector reads. unit: what the family chooses; page: rows of a page."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    persistent: NDArray[np.bool_]
    unit: Unit
    page: int


def prove_head(asked: Asked, step: Step, shape: Shape, head: int, stated: Measured) -> None:
    """stated: what the run is to count of query head `head`. OutcomeRefused, by the names of N.9, 1 to 15 and
    21 to 38: of another query or index, rows that are none, units that are not their rows, a number that is
    not what its inputs give."""
    kv_head = head // shape.group
    source = replace(step.selection.receipt.source, layer=step.layer)
    came = _identity(source, step.selection.receipt.index_epoch, step.q, len(step.k), kv_head)
    check_identity(asked.identity(kv_head), came)
    dense = _dense(step, shape, head, kv_head)
    rows = asked.rows
    check_dense(dense, rows, shape.head_dim, "float32")
    units, support = _support(step, shape, head)
    check_units(units, rows)
    check_support(units, support, frozenset(range(len(units.members))), rows)
    right = measure(dense, support.rows, len(stated.top))
    largest = float(np.linalg.norm(dense.values, axis=1).max())
    plain = step.selection.log_weight is None and step.selection.remainder is None
    if not plain:
        # Weighed rows, or something in the place of the others: the support alone does not give the answer.
        right = replace(right, error=stated.error, bound=max(right.bound, stated.error))
    stated = replace(stated, bound=right.bound)
    check_metrics(right, stated, units.namespace, within=_ROUNDED * largest)


def _dense(step: Step, shape: Shape, head: int, kv_head: int) -> Dense:
    keys = step.k[:, kv_head].numpy().astype(np.float64)
    width = int(step.k.shape[-1])
    return Dense(
        logits=keys @ step.q[head].numpy().astype(np.float64) * shape.scale,
        values=step.v[:, kv_head].numpy().astype(np.float64),
        dtype=str(step.k.dtype).removeprefix("torch."),
        scalar_bytes=step.k.element_size(),
        row_bytes=2 * width * step.k.element_size(),
    )


def _support(step: Step, shape: Shape, head: int) -> tuple[Units, Support]:
    """Of rows and pages, whose members are known to all; of any other unit its rows are what was chosen."""
    selection, rows = step.selection, len(step.k)
    at = {Scope.LAYER: 0, Scope.KV_HEAD: head // shape.group, Scope.QUERY_HEAD: head}[selection.scope]
    read = selection.positions[at]
    always = step.persistent.copy()
    always[rows - selection.receipt.unindexed :] = True
    ids = read[~always[read]]
    if step.unit is Unit.PAGE:
        # The page that the query stands in may be read beside those that were chosen: all of it, or not.
        open_page = read[read >= (rows - 1) // step.page * step.page]
        always[open_page] |= len(open_page) == 1 + (rows - 1) % step.page
        ids, of = selection.units[at], read // step.page
        first = range(0, rows, step.page)
        units = Units("page", tuple(tuple(range(low, min(low + step.page, rows))) for low in first))
    else:
        ids, of = selection.units[at] if step.unit is Unit.ROW else ids, read
        units = Units("row", tuple((row,) for row in range(rows)))
    chosen = tuple(ids.tolist())
    support = Support(
        namespace=units.namespace,
        candidates=chosen,
        selected=chosen,
        expanded=tuple(read[np.isin(of, ids)].tolist()),
        persistent=tuple(np.flatnonzero(always).tolist()),
        resident=(),
        rows=tuple(read.tolist()),
    )
    return units, support
