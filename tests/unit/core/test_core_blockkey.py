"""Block keys: golden vectors, an independent encoder, no process seed, and that every field counts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier_core.blockkey import (
    EXACT,
    HASH_VERSION,
    BlockSource,
    accept,
    branch_source,
    chain_keys,
    check_committed,
    namespace_digest,
)
from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import SourceBinding
from tests.unit.core.blockkey_cases import CANDIDATE, CONTENT, binding, computed, source, tokens

# Of hash version 1. A change here renames every stored block: it needs a new hash version.
GOLDEN = {
    "seal": "0c3118bf4c12eaacbf7b3e71f09c21eac14a3203d36579a475760e988ae5c2fa",
    "namespace": "e04498cf9ee480b0905a778e55ce1d0057af73b3c8e75e00d63e6d22d27428f8",
    "block 0": "a2c62537998fc6a40732fb94a7fc31da99cb57c2a05e29d46b60796eeb46501d",
    "block 1": "36db7cc80e8405e81b3838441c1d950a8d1fb49b372bafea9d094815fe116564",
    "block 2": "1300df0462266f6bef5480e26091ee43d158e602c5298cf4fcdc1f5840b191f3",
    "block 0 with content": "90fc90ea0ee6b80af31aa5983f853caf433df64b5cbc108ceba998b1f3558275",
    "branch seal": "94344c25387ddf61276f61a90aa08535a880767a58c25b6562fd2f6abc33c416",
    "branch block 0": "c0fb84a37294df8e3972bf093c27ea6c76c6665b0ad7bd517c26cf656bf05a2d",
}


def reference(domain: str, fields: list[tuple[str, object]]) -> bytes:
    """The encoding of specification A.4 once more, from its text alone."""
    out = b"M55/1" + struct.pack(">H", len(domain)) + domain.encode() + struct.pack(">H", len(fields))
    for name, value in fields:
        if isinstance(value, str):
            kind, payload = b"S", value.encode()
        elif isinstance(value, int):
            kind, payload = b"I", struct.pack(">q", value)
        elif isinstance(value, bytes):
            kind, payload = b"B", value
        else:
            kind, payload = b"L", b"".join(struct.pack(">q", item) for item in value)  # type: ignore[attr-defined]
        out += struct.pack(">H", len(name)) + name.encode() + kind + struct.pack(">I", len(payload)) + payload
    return hashlib.sha256(out).digest()


def reference_keys(
    of: BlockSource, ids: list[int], first_block: int = 0, parent: bytes = bytes(32)
) -> list[bytes]:
    fields = [(name, getattr(of.binding, name)) for name in SourceBinding.__slots__[:-1]]
    seal = reference(
        "block_source",
        [
            ("hash_version", 1),
            ("binding", reference("source", [*fields, ("committed_frontier", 0)])),
            ("dtype", of.dtype),
            ("codec", of.codec),
            ("layout", of.layout),
            ("producer", of.producer),
            ("layers", list(of.layers)),
            ("kv_heads", list(of.kv_heads)),
            ("block_tokens", of.block_tokens),
            ("branch", reference("branch", [("part", part) for part in of.branch])),
        ],
    )
    keys = []
    for at in range(0, len(ids) - of.block_tokens + 1, of.block_tokens):
        position = first_block * of.block_tokens + at
        block = b"".join(struct.pack(">I", token) for token in ids[at : at + of.block_tokens])
        named = [
            ("seal", seal),
            ("parent", parent),
            ("first", position),
            ("frontier", position + of.block_tokens),
        ]
        parent = reference("block", [*named, ("content", bytes(32)), ("tokens", block)])
        keys.append(parent)
    return keys


def as_bytes(keys: NDArray[np.uint8]) -> list[bytes]:
    return [key.tobytes() for key in keys]


def test_golden_vectors() -> None:
    assert computed() == GOLDEN


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_case_22_another_process_with_another_hash_seed_finds_the_same_keys(seed: str) -> None:
    root = Path(__file__).parents[3]
    code = "from tests.unit.core.blockkey_cases import computed; print(sorted(computed().items()))"
    path = os.pathsep.join(str(root / part) for part in (".", "agent", "crds", "proto", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    assert done.stdout.strip() == str(sorted(GOLDEN.items()))


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from([np.int64, np.uint32]),
)
def test_keys_are_those_of_the_reference_encoder(
    ids: list[int], size: int, first_block: int, kind: type[np.generic]
) -> None:
    shared = source(block_tokens=size)
    parent = CONTENT if first_block else None
    keys = chain_keys(shared, np.array(ids, dtype=kind), parent=parent, first_block=first_block)  # type: ignore[arg-type]
    assert as_bytes(keys) == reference_keys(shared, ids, first_block, parent or bytes(32))


# What changes when a field does.

CHANGES: dict[str, object] = {
    "logical_cache_abi_sha256": bytes([0x11]) * 32,
    "cache_layout_manifest_sha256": bytes([0x12]) * 32,
    "visibility_policy_manifest_sha256": bytes([0x13]) * 32,
    "model_artifact_sha256": "sha256:" + "5" * 64,
    "checkpoint_generation": "step-2",
    "adapter_set_sha256": bytes([0x15]) * 32,
    "position_contract_sha256": bytes([0x16]) * 32,
    "rope_config_sha256": bytes([0x17]) * 32,
    "tenant_namespace": "7:serving3:uid6:team-b0:",
    "namespace_generation": 1,
    "cache_generation": 2,
    "publication_generation": 2,
    "dtype": "bfloat16",
    "codec": "fp8-e4m3",
    "layout": "kv-token-major-f32/1",
    "layers": (0, 3),
    "kv_heads": (0, 1),
    "block_tokens": 2,
}
# Sealed per block, or only of a branch, or fixed by the version: each has a test of its own below.
ELSEWHERE = {"binding", "committed_frontier", "request_generation", "producer", "branch", "hash_version"}


def test_every_field_of_a_source_is_in_a_test() -> None:
    names = {field.name for kind in (BlockSource, SourceBinding) for field in dataclasses.fields(kind)}
    assert names == set(CHANGES) | ELSEWHERE


@pytest.mark.parametrize("field", sorted(CHANGES))
def test_no_field_changes_without_the_key(field: str) -> None:
    ids = tokens(*range(8))
    before, after = chain_keys(source(), ids), chain_keys(source(**{field: CHANGES[field]}), ids)
    assert not set(as_bytes(before)) & set(as_bytes(after))


def test_sources_that_differ_in_any_field_never_share_a_key() -> None:
    ids = tokens(*[5] * 24)
    sources = [source(), *(source(**{name: value}) for name, value in CHANGES.items())]
    sources += [branch_source(source(), "draft", 3), branch_source(source(), "draft", 4)]
    sources += [
        branch_source(source(), "other", 3),
        branch_source(branch_source(source(), "draft", 3), "inner"),
    ]
    sources.append(dataclasses.replace(branch_source(source(), "draft", 3), producer=CANDIDATE))
    keys = [key for each in sources for key in as_bytes(chain_keys(each, ids))]
    assert len(set(keys)) == len(keys)


NAMES = st.text("ab:", min_size=1, max_size=3)
SOURCES = st.builds(
    lambda dtype, codec, layout, tenant, checkpoint, layers, branch: source(
        dtype=dtype,
        codec=codec,
        layout=layout,
        tenant_namespace=tenant,
        checkpoint_generation=checkpoint,
        layers=(0, layers),
        branch=tuple(branch),
        request_generation=len(branch),
    ),
    NAMES,
    NAMES,
    NAMES,
    NAMES,
    NAMES,
    st.integers(1, 3),
    st.lists(NAMES, max_size=2),
)


@given(SOURCES, SOURCES)
def test_two_sources_share_keys_exactly_when_they_are_equal(one: BlockSource, two: BlockSource) -> None:
    ids = tokens(1, 2, 3, 4)
    assert (as_bytes(chain_keys(one, ids)) == as_bytes(chain_keys(two, ids))) is (one == two)


def test_equal_tokens_at_other_positions_are_other_blocks() -> None:
    shared = source()
    ids = tokens(*[7] * 16)
    chain = as_bytes(chain_keys(shared, ids))
    moved = chain_keys(shared, ids[:4], parent=chain[0], first_block=2)
    assert len(set(chain)) == 4
    assert moved[0].tobytes() not in chain


def test_content_that_is_no_token_enters_the_key_and_those_after_it() -> None:
    ids = tokens(*range(12))
    plain = as_bytes(chain_keys(source(), ids))
    named = as_bytes(chain_keys(source(), ids, content=[b"", CONTENT, b""]))
    other = as_bytes(chain_keys(source(), ids, content=[b"", bytes([8]) * 32, b""]))
    assert plain[0] == named[0] == other[0]
    assert len({*plain[1:], *named[1:], *other[1:]}) == 6


# Chains.


@given(st.data())
def test_a_change_at_a_token_changes_all_keys_from_its_block_on_and_none_before(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    ids = data.draw(st.lists(st.integers(0, 50), min_size=size, max_size=30))
    at = data.draw(st.integers(0, len(ids) - 1))
    shared = source(block_tokens=size)
    changed = list(ids)
    changed[at] += 1
    before, after = as_bytes(chain_keys(shared, tokens(*ids))), as_bytes(chain_keys(shared, tokens(*changed)))
    kept = at // size
    assert before[:kept] == after[:kept]
    assert not set(before[kept:]) & set(after[kept:])


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=12), st.integers(0, 7))
def test_a_prefix_has_the_same_keys_and_a_chain_can_go_on_from_its_last(
    ids: list[int], more: list[int], blocks: int
) -> None:
    shared = source()
    whole = as_bytes(chain_keys(shared, tokens(*ids, *more)))
    assert as_bytes(chain_keys(shared, tokens(*ids))) == whole[: len(ids) // 4]
    done = min(blocks, len(whole))
    rest = tokens(*[*ids, *more][4 * done :])
    parent = whole[done - 1] if done else None
    assert as_bytes(chain_keys(shared, rest, parent=parent, first_block=done)) == whole[done:]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tokens": np.zeros((2, 4), np.int64)}, "[2, 4]"),
        ({"tokens": np.zeros(4, np.float32)}, "float32"),
        ({"tokens": tokens(0, 1, -1, 3)}, "content"),
        ({"tokens": tokens(0, 1, 2**32, 3)}, "content"),
        ({"first_block": 1}, "parent"),
        ({"parent": bytes(32)}, "parent"),
        ({"parent": b"short", "first_block": 1}, "5 bytes"),
        ({"first_block": -1, "parent": bytes(32)}, "-1"),
        ({"first_block": 2**61, "parent": bytes(32)}, "first_block"),
        ({"content": []}, "0 of 1"),
        ({"content": [b"x"]}, "32 bytes"),
        ({"content": [bytes(32)]}, "32 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_chain_is_refused(arguments: dict[str, object], text: str) -> None:
    given_tokens = arguments.get("tokens", tokens(0, 1, 2, 3))
    rest = {name: value for name, value in arguments.items() if name != "tokens"}
    with pytest.raises(CoreError) as refused:
        chain_keys(source(), given_tokens, **rest)  # type: ignore[arg-type]
    assert refused.value.reason is Reason.BAD_ARGUMENT
    assert text in refused.value.message


def test_tokens_without_a_whole_block_have_no_key() -> None:
    assert chain_keys(source(), tokens(1, 2, 3)).shape == (0, 32)
    assert chain_keys(source(), tokens()).shape == (0, 32)
    assert chain_keys(source(), tokens(1, 2, 3, 4, 5)).shape == (1, 32)


# Sources.

NOTHING_BY_KIND: dict[type, object] = {str: "", bytes: bytes(32), int: -1}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SourceBinding)])
def test_a_binding_that_leaves_a_field_out_is_refused_by_its_name(field: str) -> None:
    nothing = NOTHING_BY_KIND[type(getattr(binding(), field))]
    with pytest.raises(CoreError) as refused:
        source(**{field: nothing})
    assert refused.value.reason is Reason.IDENTITY_INCOMPLETE
    assert refused.value.facts == {"field": field}


@pytest.mark.parametrize("field", ["dtype", "codec", "layout", "producer"])
def test_a_source_that_leaves_a_field_out_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(CoreError) as refused:
        source(**{field: ""})
    assert refused.value.facts == {"field": field}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hash_version": HASH_VERSION + 1}, Reason.UNSUPPORTED),
        ({"producer": "sha256:short"}, Reason.BAD_ARGUMENT),
        ({"layers": (2, 2)}, Reason.BAD_ARGUMENT),
        ({"kv_heads": (-1, 2)}, Reason.BAD_ARGUMENT),
        ({"block_tokens": 0}, Reason.BAD_ARGUMENT),
        ({"request_generation": 4}, Reason.BAD_ARGUMENT),
        ({"branch": ("draft",)}, Reason.IDENTITY_INCOMPLETE),
        ({"branch": ("",), "request_generation": 4}, Reason.IDENTITY_INCOMPLETE),
        ({"producer": CANDIDATE}, Reason.IDENTITY_INCOMPLETE),
    ],
)
def test_a_source_that_makes_no_sense_is_refused(changes: dict[str, object], reason: Reason) -> None:
    with pytest.raises(CoreError) as refused:
        source(**changes)
    assert refused.value.reason is reason


def test_the_frontier_of_a_binding_is_sealed_by_the_block_and_not_by_the_source() -> None:
    assert source(committed_frontier=8).seal() == source().seal()
    assert source().block_binding(2).committed_frontier == 12
    assert source().block_binding(2).digest() != source().block_binding(1).digest()


def test_a_namespace_is_its_tenant_and_generation_and_nothing_else() -> None:
    of = namespace_digest
    assert of(source()) == of(source(dtype="float16")) == of(branch_source(source(), "draft", 3))
    assert len({of(source()), of(source(tenant_namespace="t")), of(source(namespace_generation=1))}) == 3


# Branches (specification B.11).


def test_rows_of_a_branch_are_found_by_that_branch_only() -> None:
    shared = source()
    ids = tokens(*range(12))
    committed = chain_keys(shared, ids[:4])
    parent = committed[0].tobytes()
    views = [branch_source(shared, name, request) for name, request in (("a", 1), ("b", 1), ("a", 2))]
    keys = [as_bytes(chain_keys(view, ids[4:], parent=parent, first_block=1)) for view in [shared, *views]]
    assert len({key for chain in keys for key in chain}) == 8


@pytest.mark.parametrize(
    ("committed", "kept"),
    [(0, 0), (4, 0), (7, 0), (8, 1), (11, 1), (12, 2), (99, 2)],
    ids=lambda value: str(value),
)
def test_a_branch_becomes_everyones_up_to_the_commit_and_the_rest_is_dropped(
    committed: int, kept: int
) -> None:
    shared = source()
    ids = tokens(*range(12))
    chain = as_bytes(chain_keys(shared, ids))
    draft = branch_source(shared, "draft", 5)
    private = as_bytes(chain_keys(draft, ids[4:], parent=chain[0], first_block=1))
    settled = accept(draft, ids[4:], committed_frontier=committed, parent=chain[0], first_block=1)
    assert settled.source == shared
    assert as_bytes(settled.old) == private[:kept]
    assert as_bytes(settled.new) == chain[1 : 1 + kept]
    assert as_bytes(settled.dropped) == private[kept:]


def test_a_branch_of_a_branch_is_accepted_into_it() -> None:
    ids = tokens(*range(8))
    outer = branch_source(source(), "session-1", 5)
    inner = branch_source(outer, "draft")
    settled = accept(inner, ids, committed_frontier=8)
    assert settled.source == outer
    assert as_bytes(settled.new) == as_bytes(chain_keys(outer, ids))


def test_rows_of_a_candidate_stay_their_sessions() -> None:
    ids = tokens(*range(8))
    session = dataclasses.replace(branch_source(source(), "session-1", 5), producer=CANDIDATE)
    draft = branch_source(session, "draft")
    assert accept(draft, ids, committed_frontier=8).source == session
    with pytest.raises(CoreError) as refused:
        accept(session, ids, committed_frontier=8)
    assert refused.value.reason is Reason.IDENTITY_MISMATCH
    exact = branch_source(source(), "session-1", 5)
    assert exact.producer == EXACT
    assert not set(as_bytes(chain_keys(exact, ids))) & set(as_bytes(chain_keys(session, ids)))


def test_committed_rows_have_no_branch_to_accept() -> None:
    with pytest.raises(CoreError) as refused:
        accept(source(), tokens(*range(8)), committed_frontier=8)
    assert refused.value.reason is Reason.BAD_ARGUMENT


def test_a_shared_block_beyond_the_commit_boundary_is_refused() -> None:
    check_committed(source(), 8, 8)
    check_committed(branch_source(source(), "draft", 5), 12, 8)
    with pytest.raises(CoreError) as refused:
        check_committed(source(), 12, 8)
    assert refused.value.reason is Reason.UNCOMMITTED_ROWS
