"""A layer's weights, evidence and hidden states for InfiniGen's tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvtier_core.selectors.contract import Evidence, LayerWeights, Query, Shape
from kvtier_core.selectors.families.infinigen import Infinigen
from tests.unit.selectors.selector_cases import SMALL, SOURCE, rows_of, selector

_WIDTH = 24


def family(
    tokens: int = 6,
    shape: Shape = SMALL,
    sink: int = 2,
    recent: int = 3,
    policy: str = "truncate",
    **more: Any,
) -> Infinigen:
    declared = selector(
        "infinigen",
        {"partialDimensions": 5, "alpha": "3", "trainTokens": 4} | more,
        {"tokens": tokens, "capPolicy": policy},
        persistentRows={"sink": sink, "recent": recent},
    )
    return Infinigen.from_manifest(declared, shape, 16)


@dataclass(frozen=True)
class Case:
    k: torch.Tensor
    v: torch.Tensor
    evidence: Evidence
    hidden: torch.Tensor

    def query(self, rows: int | None = None, **more: Any) -> Query:
        q = torch.full((1, SMALL.query_heads, SMALL.head_dim), torch.nan)
        return Query(q, len(self.k) if rows is None else rows, SOURCE, hidden=self.hidden, **more)

    def part(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, Evidence]:
        assert self.evidence.queries is not None
        some = replace(self.evidence, queries=self.evidence.queries[first:end])
        return self.k[first:end], self.v[first:end], some


def case(seed: int, rows: int, *, rope: str = "halves", bias: bool = True, spread: float = 1.0) -> Case:
    random = np.random.default_rng(seed)
    heads, d = SMALL.query_heads, SMALL.head_dim

    def normal(*size: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(size).astype(np.float32))

    k, v = rows_of(seed, rows)
    weights = LayerWeights(
        query=normal(_WIDTH, heads * d) * spread / math.sqrt(_WIDTH),
        bias=normal(heads * d) * 0.1 if bias else None,
        norm_weight=1 + 0.1 * normal(_WIDTH),
        norm_eps=1e-5,
        inv_freq=None if rope == "none" else 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8),
        interleaved=rope == "interleaved",
    )
    # Queries of a prefill lie near few directions, or there would be nothing to skew.
    queries = (normal(rows, heads, 3) @ normal(3, d)) + 0.2 * normal(rows, heads, d)
    return Case(
        k, v, Evidence(queries=queries, hidden=normal(rows, _WIDTH), weights=weights), normal(1, _WIDTH)
    )
