"""Block sources and tokens that several tests of block keys share."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from kvtier_core.blockkey import EXACT, BlockSource, branch_source, chain_keys, namespace_digest
from kvtier_core.identity import SourceBinding

CANDIDATE = "sha256:" + "c" * 64
CONTENT = bytes([9]) * 32


def binding(**changes: object) -> SourceBinding:
    """A shared binding whose digests are recognisable bytes."""
    fields: dict[str, object] = {
        "logical_cache_abi_sha256": bytes([1]) * 32,
        "cache_layout_manifest_sha256": bytes([2]) * 32,
        "visibility_policy_manifest_sha256": bytes([3]) * 32,
        "model_artifact_sha256": "sha256:" + "4" * 64,
        "checkpoint_generation": "step-1",
        "adapter_set_sha256": bytes([5]) * 32,
        "position_contract_sha256": bytes([6]) * 32,
        "rope_config_sha256": bytes([7]) * 32,
        "tenant_namespace": "7:serving3:uid6:team-a0:",
        "namespace_generation": 0,
        "request_generation": 0,
        "cache_generation": 1,
        "publication_generation": 1,
        "committed_frontier": 0,
    }
    return SourceBinding(**{**fields, **changes})  # type: ignore[arg-type]


def source(**changes: object) -> BlockSource:
    """A shared exact source of blocks of 4 tokens. Changes of the binding go by its fields' names."""
    names = {field.name for field in dataclasses.fields(SourceBinding)}
    inner = {name: value for name, value in changes.items() if name in names}
    fields: dict[str, object] = {
        "binding": binding(**inner),
        "dtype": "float32",
        "codec": "identity",
        "layout": "kv-head-major-f32/1",
        "producer": EXACT,
        "layers": (0, 2),
        "kv_heads": (0, 2),
        "block_tokens": 4,
    }
    outer = {name: value for name, value in changes.items() if name not in names}
    return BlockSource(**{**fields, **outer})  # type: ignore[arg-type]


def tokens(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def computed() -> dict[str, str]:
    """What the golden vectors name, as this process computes it."""
    shared = source()
    draft = branch_source(shared, "draft-1", 7)
    chain = chain_keys(shared, tokens(*range(12)))
    first = tokens(*range(4))
    return {
        "seal": shared.seal().hex(),
        "namespace": namespace_digest(shared).hex(),
        "block 0": chain[0].tobytes().hex(),
        "block 1": chain[1].tobytes().hex(),
        "block 2": chain[2].tobytes().hex(),
        "block 0 with content": chain_keys(shared, first, content=[CONTENT])[0].tobytes().hex(),
        "branch seal": draft.seal().hex(),
        "branch block 0": chain_keys(draft, first)[0].tobytes().hex(),
    }
