"""Rows, queries and manifests that the families' tests share."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier_core.selectors.contract import Shape, Source
from kvtier_crds.manifest import Selector

SMALL = Shape(query_heads=6, kv_heads=2, head_dim=16, scale=0.25)
SOURCE = Source(b"s" * 32, layer=1)


def selector(family: str, parameters: dict[str, Any], budget: dict[str, Any], **more: Any) -> Selector:
    """A manifest's selector; `more` as in the manifest (persistentRows, seed, gate)."""
    body = {"family": family, "parameters": parameters, "budget": {"capPolicy": "truncate"} | budget} | more
    return Selector.model_validate_json(json.dumps(body))


def rows_of(seed: int, count: int, shape: Shape = SMALL, *, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """k, v float32 [count, Hk, d]; a few rows of each head are much larger than the others."""
    random = np.random.default_rng(seed)
    size = (count, shape.kv_heads, shape.head_dim)
    loud = np.where(random.random((count, shape.kv_heads, 1)) < 0.05, 6.0, 1.0)
    k = random.standard_normal(size) * loud * spread
    return torch.from_numpy(k.astype(np.float32)), torch.from_numpy(
        random.standard_normal(size).astype(np.float32)
    )


def query_of(seed: int, shape: Shape = SMALL, *, spread: float = 1.0) -> Tensor:
    """float32 [1, Hq, d]."""
    random = np.random.default_rng(seed)
    q = random.standard_normal((1, shape.query_heads, shape.head_dim)) * spread
    return torch.from_numpy(q.astype(np.float32))


def logits_of(q: Tensor, k: Tensor, shape: Shape = SMALL) -> np.ndarray[Any, np.dtype[np.float64]]:
    """float64 [Hq, n] by the definition."""
    heads = [h // shape.group for h in range(shape.query_heads)]
    wide, keys = q[0].double().numpy(), k.double().numpy()
    return np.stack([keys[:, head] @ wide[h] for h, head in enumerate(heads)]) * shape.scale
