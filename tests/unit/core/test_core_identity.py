"""Digests: worked vectors of the specification, and that nothing but meaning enters them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvtier_core.identity import (
    chunk_digest,
    digest,
    full_support_digest,
    replica_digest,
    row_digest,
    selected_support_digest,
    source_binding,
    tenancy_name,
)
from tests.unit.core.builders import gpu, manifest

ROW = {
    "model": "m0",
    "adapter": "a0",
    "cache_abi": "abi0",
    "layer": 1,
    "kv_head": 1,
    "position": 3,
    "position_contract": "pos0",
    "cache_generation": 23,
    "publication_generation": 11,
    "tenant": "t0",
}


def test_va01_the_reference_row_has_its_published_digest() -> None:
    assert row_digest(**ROW).hex() == "8f15f90a9ffaa9c0411b17d9d234ce879faf1010c7a990939b4a1bf0de51f5dc"


@pytest.mark.parametrize("field", sorted(ROW))
def test_va02_each_field_of_a_row_changes_its_digest(field: str) -> None:
    value = ROW[field]
    changed = {**ROW, field: value + 1 if isinstance(value, int) else value + "x"}
    assert row_digest(**changed) != row_digest(**ROW)


def test_va03_the_encoding_is_typed_and_delimited() -> None:
    assert digest("t", [("x", "ab"), ("y", "c")]) != digest("t", [("x", "a"), ("y", "bc")])
    assert digest("t", [("x", "1")]) != digest("t", [("x", 1)])
    assert digest("t", [("x", b"1")]) != digest("t", [("x", "1")])
    assert digest("t", [("x", [1])]) != digest("t", [("x", 1)])
    with pytest.raises(TypeError):
        digest("t", [("x", True)])


def test_va04_a_move_changes_the_replica_and_not_the_chunk() -> None:
    chunk = digest("chunk", [("any", 1)])

    def replica(tier: str, allocation: int, generation: int, codec: str) -> bytes:
        return replica_digest(
            chunk,
            tier=tier,
            allocation_generation=allocation,
            replica_generation=generation,
            authority_epoch=5,
            codec=codec,
            layout="lay0",
            payload=bytes(32),
        )

    host = replica("host", 40, 17, "fp16")
    assert host != replica("gpu", 85, 18, "fp16")
    assert host != replica("host", 40, 17, "fp8")
    assert host == replica("host", 40, 17, "fp16")


def test_va05_a_source_binds_its_frontier_tenant_session_and_model() -> None:
    base = manifest([gpu(8)])

    def bound(**changes: object) -> bytes:
        fields = {"tenant": "a", "session_id": "s", "request_generation": 1, "cache_generation": 1}
        return source_binding(base, **{**fields, **changes}).digest()  # type: ignore[arg-type]

    source = source_binding(base, tenant="a", session_id="s", request_generation=1, cache_generation=1)
    variants = [
        source.at(8).digest(),
        source.at(9).digest(),
        bound(tenant="b"),
        bound(session_id="t"),
        bound(request_generation=2),
        bound(cache_generation=2),
        # The separator is part of the name: moving a letter across it is another tenant.
        bound(tenant="as", session_id=""),
    ]
    assert len({*variants, source.digest()}) == len(variants) + 1
    assert len(source.__slots__) == 14


def test_chunks_of_two_tenants_never_share_an_identity() -> None:
    base = manifest([gpu(8)])
    sources = [
        source_binding(base, tenant=t, session_id=s, request_generation=1, cache_generation=1)
        for t in ("a", "b")
        for s in ("x", "y")
    ]
    digests = {chunk_digest(source, 0, 2, 0, 32) for source in sources}
    assert len(digests) == 4
    assert chunk_digest(sources[0], 1, 2, 0, 32) not in digests


def test_support_digests_name_positions_per_kv_head() -> None:
    full = np.arange(5, dtype=np.int64)
    some = np.array([0, 3], dtype=np.int64)
    assert selected_support_digest(5, [full, full]) == full_support_digest(5)
    assert full_support_digest(5) != full_support_digest(6)
    assert selected_support_digest(5, [full, some]) != selected_support_digest(5, [some, full])
    expected = digest("support", [("scope", "all"), ("positions", [0, 1, 2, 3, 4])])
    assert full_support_digest(5) == f"sha256:{expected.hex()}"
    assert len(expected) == hashlib.sha256().digest_size


NAMES = ["", "a", "1:a", "a1:", "\x1f", "a\x1fb"]


def test_no_two_paths_of_tenants_and_sessions_share_a_name() -> None:
    paths = [(tenant, session) for tenant in NAMES for session in NAMES]
    assert len({tenancy_name("ns", "uid", *path) for path in paths}) == len(paths)
    assert tenancy_name("a", "bc") != tenancy_name("ab", "c")
