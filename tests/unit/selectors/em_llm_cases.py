"""Families, evidence and a trace that the tests of EM-LLM share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvtier_core.selectors.contract import Evidence, Shape
from kvtier_core.selectors.families.em_llm import EmLlm
from kvtier_core.selectors.families.segmentation import Boundaries
from tests.unit.selectors.selector_cases import SMALL, selector

TRACE = np.array([1.0, 1.0, 1.1, 4.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0])
RULE = Boundaries(window=3, gamma=1.0, least=1, most=9, metric="none", radius=None)


def family(tokens: int = 16, shape: Shape = SMALL, sink: int = 2, recent: int = 3, **more: Any) -> EmLlm:
    policy = more.pop("policy", "truncate")
    declared = selector(
        "emLlm",
        {"window": 4, "gamma": "0.5", "minEventTokens": 2, "maxEventTokens": 6} | more,
        {"tokens": tokens, "capPolicy": policy},
        persistentRows={"sink": sink, "recent": recent},
    )
    return EmLlm.from_manifest(declared, shape, 16)


def evidence_of(seed: int, rows: int, shape: Shape = SMALL) -> Evidence:
    random = np.random.default_rng(seed + 99)
    q = random.standard_normal((rows, shape.query_heads, shape.head_dim)).astype(np.float32)
    return Evidence(queries=torch.from_numpy(q), surprisal=random.exponential(2.0, rows))


def part(evidence: Evidence, low: int, high: int) -> Evidence:
    assert evidence.queries is not None and evidence.surprisal is not None
    return Evidence(queries=evidence.queries[low:high], surprisal=evidence.surprisal[low:high])
