"""[select] of every family beside dense decode over the same rows, on the CPU, and what its index bytes cost.

SmolLM2's shape, float32, CPU time of one thread. Every family and dense decode take turns in each round, so
that whatever else runs troubles all alike; of each the fastest call counts. Keys are random with some large
ones: times and bytes, nothing of quality. `floor` is the time in which this memory moves the bytes that
receipts say were read of the index. `answer` is the selection with attention over its rows: what stands in
the place of dense decode.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtier_core.selectors.contract import Evidence, Family, Index, LayerWeights, Query, Shape, Source
from kvtier_eval.plan import CHOICES, SelectorPlan, Settings, family_of
from kvtier_eval.replay import Regime, attend_rows
from kvtier_kernels.ops.paged_decode import paged_decode_torch
from kvtier_kernels.state import finalize
from tests.bench.rows import Row
from tests.bench.timing import Floors, threads

ROWS = (1024, 8192)
BUDGET = 256
ROUNDS = 12
QUERIES = 4
D_MODEL = 576
PAGE = 16
LAYER = 2
SHAPE = Shape(query_heads=9, kv_heads=3, head_dim=64, scale=0.125)
SETTINGS = Settings(prompts=1, steps=1, seed=3, regime=Regime.OWN_ROWS)
DENSE = "dense"


def rows() -> Iterator[Row]:
    with threads(1):
        for count in ROWS:
            yield from measured(count, tuple(CHOICES), rounds=ROUNDS)


@dataclass(frozen=True, slots=True)
class Context:
    """One layer: k, v float32 [n, Hk, d] and what an engine gives with them; queries [QUERIES, Hq, d], each
    over all n rows, the last of which no index covers. hidden float32 [QUERIES, d_model]."""

    k: Tensor
    v: Tensor
    evidence: Evidence
    queries: Tensor
    hidden: Tensor

    @classmethod
    def random(cls, count: int) -> Context:
        generator = torch.Generator().manual_seed(count)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        k, v = normal(count, SHAPE.kv_heads, SHAPE.head_dim), normal(count, SHAPE.kv_heads, SHAPE.head_dim)
        k[::37] *= 4.0
        weights = LayerWeights(
            query=normal(D_MODEL, SHAPE.query_heads * SHAPE.head_dim) / math.sqrt(D_MODEL),
            bias=None,
            norm_weight=torch.ones(D_MODEL),
            norm_eps=1e-5,
            inv_freq=1e5 ** (-torch.arange(SHAPE.head_dim // 2) / (SHAPE.head_dim // 2)),
        )
        evidence = Evidence(
            normal(count - 1, SHAPE.query_heads, SHAPE.head_dim),
            normal(count - 1, D_MODEL),
            np.random.default_rng(count).exponential(2.0, count - 1),
            weights,
        )
        queries = normal(QUERIES, SHAPE.query_heads, SHAPE.head_dim)
        return cls(k, v, evidence, queries, normal(QUERIES, D_MODEL))


@dataclass(slots=True)
class Timed:
    """Least seconds of a selection, and of one with attention over its rows. index_bytes: the mean over the
    queries. read: rows of a KV head, persistent ones included."""

    select: float = math.inf
    answer: float = math.inf
    index_bytes: float = 0.0
    read: float = 0.0


def measured(count: int, names: Sequence[str], *, rounds: int) -> Iterator[Row]:
    """Rows of each named selector over `count` rows, and of dense decode."""
    context = Context.random(count)
    made = {name: _made(name, context) for name in names}
    timed = {name: Timed() for name in names}
    dense = _dense(context)
    least = math.inf
    for round_ in range(rounds + 1):
        for at in range(QUERIES):
            started = time.thread_time()
            dense(at)
            if round_:
                least = min(least, time.thread_time() - started)
            for name, (family, index) in made.items():
                _once(family, index, context, at, timed[name], count=bool(round_))
    yield from _rows(count, timed, least, context)


def _made(name: str, context: Context) -> tuple[Family, Index]:
    family_name, parameters = CHOICES[name]
    plan = SelectorPlan(name=name, family=family_name, parameters=parameters)
    family = family_of(plan, BUDGET, SETTINGS, SHAPE)
    source = Source(bytes(32), LAYER)
    return family, family.build(source, context.k[:-1], context.v[:-1], context.evidence)


def _dense(context: Context) -> Callable[[int], object]:
    count = len(context.k)
    k, v = (part.view(count // PAGE, PAGE, SHAPE.kv_heads, SHAPE.head_dim) for part in (context.k, context.v))
    table = torch.arange(count // PAGE, dtype=torch.int32)[None]
    lens = torch.tensor([count], dtype=torch.int32)
    return lambda at: paged_decode_torch(context.queries[at : at + 1], k, v, table, lens, scale=SHAPE.scale)


def _once(family: Family, index: Index, context: Context, at: int, timed: Timed, *, count: bool) -> None:
    rows_ = len(context.k)
    query = Query(
        context.queries[at : at + 1],
        rows_,
        index.facts.source,
        hidden=context.hidden[at : at + 1],
        seed=at,
        tail=context.k[index.facts.covered :],
        hidden_layer=LAYER - 1,
    )
    started = time.thread_time()
    selection = family.select(index, query)
    chosen = time.thread_time()
    state = attend_rows(context.queries[at], context.k, context.v, selection, SHAPE)
    finalize(state if selection.remainder is None else selection.remainder.complete(state))
    ended = time.thread_time()
    if count:
        timed.select = min(timed.select, chosen - started)
        timed.answer = min(timed.answer, ended - started)
        return
    lists = [selection.rows_of_kv_head(head, SHAPE) for head in range(SHAPE.kv_heads)]
    timed.index_bytes += selection.receipt.index_bytes / QUERIES
    timed.read += sum(map(len, lists)) / len(lists) / QUERIES


def _rows(count: int, timed: dict[str, Timed], dense: float, context: Context) -> Iterator[Row]:
    floors = Floors()
    of_dense = context.k.nbytes + context.v.nbytes
    yield Row(f"selectors.n{count}.dense", dense * 1e6, "us", lower_is_better=True)
    yield Row(f"selectors.n{count}.dense.floor", floors.seconds(of_dense) * 1e6, "us", lower_is_better=True)
    for name, one in timed.items():
        label = f"selectors.n{count}.{name.lower().replace('-', '.')}"
        floor = floors.seconds(round(one.index_bytes)) if one.index_bytes else 0.0
        yield _beside(f"{label}.select", one.select * 1e6, "us", dense * 1e6)
        yield Row(f"{label}.floor", floor * 1e6, "us", lower_is_better=True)
        yield _beside(f"{label}.index", one.index_bytes / 1024, "KiB", of_dense / 1024)
        yield _beside(f"{label}.read", one.read, "rows", float(count))
        yield _beside(f"{label}.answer", one.answer * 1e6, "us", dense * 1e6, goal=dense * 1e6)


def _beside(name: str, value: float, unit: str, dense: float, *, goal: float | None = None) -> Row:
    """goal: None where a number is only recorded; an answer slower than dense decode misses it."""
    return Row(name, value, unit, goal=goal, peer=DENSE, peer_value=dense, lower_is_better=True)
