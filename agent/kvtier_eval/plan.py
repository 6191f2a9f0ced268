"""What is going to be measured, written down before anything is: cells, seeds, settings and when to stop.

Why it exists: who chooses cells after seeing results finds what he wants. A plan's digest stands in every
result and in the report; results of another plan are refused. It must not run anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from itertools import product
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from kvtier_core.errors import CoreError
from kvtier_core.selectors.contract import Family, Shape
from kvtier_core.selectors.declared import declared
from kvtier_core.selectors.families.registry import FAMILIES as REGISTERED
from kvtier_core.selectors.families.registry import make_family
from kvtier_eval.baselines import Baseline, Kind
from kvtier_eval.replay import Regime, Setup
from kvtier_eval.tasks import Task
from kvtier_eval.texts import Corpus

SCHEMA = "kvtier.dev/eval/v1"
ENOUGH_PROMPTS = 50
STOP_RULE = (
    "Every prompt of every cell is run once, in order of its index; nothing is looked at before, no prompt "
    "is replaced, and a prompt that full attention does not answer stays. A run that was cut short is "
    "reported as such, with the cells that are not complete."
)
BASELINES = (Kind.FULL, Kind.ORACLE_ROW, Kind.ORACLE_PAGE, Kind.RANDOM, Kind.RECENT, Kind.PERSISTENT_ONLY)
_UNBUDGETED = (Kind.FULL, Kind.PERSISTENT_ONLY)

CHOICES: dict[str, tuple[str, dict[str, object]]] = {
    "certifiedScan": ("certifiedScan", {"maxOmittedMass": "0.01"}),
    "clusterKv": ("clusterKv", {"tokensPerCluster": 16, "sealTokens": 320, "clustersPerSeal": 20}),
    "emLlm": (
        "emLlm",
        {
            "window": 128,
            "gamma": "1",
            "minEventTokens": 8,
            "maxEventTokens": 32,
            "representatives": 4,
            "contiguityRadius": 1,
            "contiguityShare": "0.3",
        },
    ),
    "infLlm": ("infLlm", {"unitTokens": 32, "representatives": 4}),
    "infinigen": ("infinigen", {"partialDimensions": 19, "alpha": "4"}),
    "magicPig": ("magicPig", {"hashBits": 8, "tables": 75, "minTables": 2}),
    "pqcache": ("pqcache", {"subspaces": 2, "bits": 6}),
    "quest": ("quest", {"pageTokens": 16}),
    "quest-evaluation": ("quest", {"pageTokens": 16, "variant": "evaluation"}),
    "retrievalAttention": (
        "retrievalAttention",
        {"buildNeighbours": 16, "searchWidth": 128, "outDegree": 32},
    ),
    "retrievalAttention-retroInfer": (
        "retrievalAttention",
        {
            "variant": "retroInfer",
            "tokensPerCluster": 16,
            "segmentTokens": 8192,
            "estimatedClusters": 15,
        },
    ),
    "sparq": ("sparq", {"dimensions": 16}),
    "sparq-llamaCpp": ("sparq", {"dimensions": 16, "variant": "llamaCpp"}),
    "sparq-sparF": ("sparq", {"dimensions": 16, "variant": "sparF"}),
    "squeezedAttention": ("squeezedAttention", {"clusters": 51, "threshold": "0"}),
}
"""Family and parameters by the name of a selector: every family, and variants that are methods of their own.
For heads of 64 channels and about 1,000 rows, chosen before any result; see the guide for what differs from
published settings and why."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Missing(StrEnum):
    """Why a cell of the grid has no results."""

    NO_FAMILY = "NoFamily"
    REFUSED_PARAMETERS = "RefusedParameters"
    REFUSED_AT_RUN = "RefusedAtRun"
    NOT_FINISHED = "NotFinished"


class SelectorPlan(_Part):
    """One selector without its budget. baseline or (family, parameters)."""

    name: str
    baseline: Kind | None = None
    family: str = ""
    parameters: dict[str, object] = {}


class CellPlan(_Part):
    """budget: rows of a KV head beyond the persistent ones; 0 where the selector has none."""

    task: Task
    length: Annotated[int, Field(ge=64)]
    selector: str
    budget: Annotated[int, Field(ge=0)]

    @property
    def id(self) -> str:
        return f"{self.task}/{self.length}/{self.selector}/{self.budget}"


class NotRun(_Part):
    cell: str
    why: Missing
    detail: str


class Settings(_Part):
    """The same for all cells. prompts: a cell. steps: tokens asked for where a task sets no number itself.
    hot: rows of the simulated buffer of a KV head, as a multiple of the budget. margin: how much of what full
    attention answers a selector may lose and still hold."""

    prompts: Annotated[int, Field(ge=1, le=10_000)]
    steps: Annotated[int, Field(ge=1, le=512)]
    seed: int
    regime: Regime
    sink: Annotated[int, Field(ge=0)] = 4
    recent: Annotated[int, Field(ge=1)] = 32
    dense_layers: tuple[int, ...] = (0, 1)
    page_tokens: Annotated[int, Field(ge=1)] = 16
    append_every: Annotated[int, Field(ge=1)] = 16
    detail_every: Annotated[int, Field(ge=1)] = 4
    hot: Annotated[int, Field(ge=1)] = 2
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.1

    @property
    def setup(self) -> Setup:
        return Setup(self.sink, self.recent, self.regime, self.append_every, self.detail_every)


class Plan(_Part):
    """model_digest: of its weights. corpus_digest: of the filler, which comes with that Python. code_digest:
    of what computes results. quick: gives no verdict, whatever it finds."""

    schema_name: str = SCHEMA
    model: str
    model_digest: str
    corpus_digest: str
    code_digest: str
    python: str
    quick: bool
    settings: Settings
    selectors: tuple[SelectorPlan, ...]
    cells: tuple[CellPlan, ...]
    not_run: tuple[NotRun, ...] = ()
    stop_rule: str = STOP_RULE

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def selector(self, name: str) -> SelectorPlan:
        return next(one for one in self.selectors if one.name == name)


def family_of(selector: SelectorPlan, budget: int, settings: Settings, shape: Shape) -> Family:
    """CoreError when the family is not there or refuses its parameters."""
    if selector.baseline is not None:
        return Baseline(
            selector.baseline,
            shape,
            budget,
            settings.sink,
            settings.recent,
            frozenset(settings.dense_layers),
            settings.page_tokens,
            settings.seed,
        )
    body = _Declaration(
        family=selector.family,
        parameters=selector.parameters,
        budget={"tokens": budget, "capPolicy": "truncate"},
        persistentRows={"sink": settings.sink, "recent": settings.recent},
        denseLayers=settings.dense_layers,
        seed=settings.seed,
    )
    return make_family(declared(body.model_dump_json()), shape, settings.page_tokens)


class _Declaration(_Part):
    """A manifest's selector, by the names of its JSON."""

    family: str
    parameters: dict[str, object]
    budget: dict[str, object]
    persistentRows: dict[str, int]
    denseLayers: tuple[int, ...]
    seed: int


def make_plan(
    *,
    model: str,
    model_digest: str,
    corpus: Corpus,
    code_digest: str,
    shape: Shape,
    settings: Settings,
    tasks: Sequence[Task],
    lengths: Sequence[int],
    budgets: Sequence[int],
    names: Sequence[str],
    quick: bool,
) -> Plan:
    """The whole grid, with every baseline. names: of `CHOICES`. Cells whose family refuses are named as not
    run, with its words."""
    selectors = [SelectorPlan(name=kind.value, baseline=kind) for kind in BASELINES]
    for name in names:
        family, parameters = CHOICES.get(name, (name, {}))
        selectors.append(SelectorPlan(name=name, family=family, parameters=parameters))
    cells: list[CellPlan] = []
    missing: list[NotRun] = []
    for task, length, selector in product(tasks, lengths, selectors):
        for budget in (0,) if selector.baseline in _UNBUDGETED else tuple(budgets):
            cell = CellPlan(task=task, length=length, selector=selector.name, budget=budget)
            try:
                family_of(selector, budget, settings, shape)
            except CoreError as error:
                unknown = selector.family not in REGISTERED
                why = Missing.NO_FAMILY if unknown else Missing.REFUSED_PARAMETERS
                missing.append(NotRun(cell=cell.id, why=why, detail=str(error)))
            else:
                cells.append(cell)
    return Plan(
        model=model,
        model_digest=model_digest,
        corpus_digest=corpus.digest,
        code_digest=code_digest,
        python=corpus.python,
        quick=quick,
        settings=settings,
        selectors=tuple(selectors),
        cells=tuple(cells),
        not_run=tuple(missing),
    )
