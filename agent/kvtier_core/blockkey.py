"""The name of a keyed block: everything that shaped its bytes, chained over the tokens before it.

Why it exists: whoever finds a block by its key believes its bytes, so two blocks that could differ in one bit
must differ in their keys. A key is therefore complete by construction: a source that does not state a field
is refused when it is built, not when it is looked up. It must not know directories, tiers or requests.

    seal  = digest("block_source", hash version, binding at frontier 0, dtype, codec, layout, producer,
            layers, kv_heads, block_tokens, branch)
    key i = digest("block", seal, key i-1 (the first: 32 zero bytes), first position, frontier, content,
            tokens as big-endian uint32)

`digest` is the typed encoding of specification A.4; the fields of the binding are A.5. The frontier of a
block is the position after its last row. No process seed enters, so keys are equal in all processes and
releases.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import SourceBinding, digest, encode_domain, encode_header

HASH_VERSION = 1
EXACT = "exact"
KEY_BYTES = 32
MAX_TOKEN = 2**32 - 1
_NOTHING = bytes(KEY_BYTES)
_CANDIDATE = re.compile(r"sha256:[0-9a-f]{64}")
_LAST_POSITION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class BlockSource:
    """What all blocks of one source have in common.

    binding: who made the rows; its frontier is left out here, since each block seals its own.
    request_generation is 0 for shared blocks and names the request of a branch. dtype, codec, layout: of the
    payload. producer: EXACT, or `sha256:<hex>` of the candidate whose approximate answers are in the rows'
    history; such rows are always a branch's. layers, kv_heads: half-open ranges. branch: empty for committed
    rows that every request of the namespace may find, else the path of private branches.

    IDENTITY_INCOMPLETE names the field that is not stated (fact `field`); BAD_ARGUMENT one that makes no
    sense, UNSUPPORTED another hash version.
    """

    binding: SourceBinding
    dtype: str
    codec: str
    layout: str
    producer: str
    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    block_tokens: int
    branch: tuple[str, ...] = ()
    hash_version: int = HASH_VERSION

    def __post_init__(self) -> None:
        for each in fields(self.binding):
            _stated(each.name, getattr(self.binding, each.name))
        for name in ("dtype", "codec", "layout", "producer"):
            _stated(name, getattr(self, name))
        if self.hash_version != HASH_VERSION:
            raise CoreError(Reason.UNSUPPORTED, f"hash_version {self.hash_version} is not {HASH_VERSION}")
        if self.producer != EXACT and not _CANDIDATE.fullmatch(self.producer):
            raise CoreError(
                Reason.BAD_ARGUMENT, f"producer {self.producer!r} is neither {EXACT} nor a digest"
            )
        for name in ("layers", "kv_heads"):
            low, high = getattr(self, name)
            if not 0 <= low < high:
                raise CoreError(Reason.BAD_ARGUMENT, f"{name} [{low}, {high}) is no range")
        if self.block_tokens <= 0:
            raise CoreError(Reason.BAD_ARGUMENT, f"block_tokens {self.block_tokens} must be above 0")
        if not all(self.branch):
            raise incomplete("branch")
        if self.branch and not self.binding.request_generation:
            raise incomplete("request_generation")
        if not self.branch and self.binding.request_generation:
            raise CoreError(
                Reason.BAD_ARGUMENT, "request_generation of shared blocks is 0: no request owns them"
            )
        if not self.branch and self.producer != EXACT:
            # Rows of an approximate history are their session's, and no one else may ever find them.
            raise incomplete("branch")

    def seal(self) -> bytes:
        """32 bytes over all fields; equal seals mean equal sources."""
        return _seal(self)

    def block_binding(self, block: int) -> SourceBinding:
        """The source binding of one block: its 14 fields with the block's own frontier."""
        return self.binding.at((block + 1) * self.block_tokens)


def incomplete(field: str) -> CoreError:
    """The refusal of an identity that leaves a field out."""
    return CoreError(
        Reason.IDENTITY_INCOMPLETE,
        f"the identity of a block needs {field}, which is not stated",
        {"field": field},
    )


def _stated(name: str, value: str | bytes | int) -> None:
    if isinstance(value, bytes):
        if len(value) != KEY_BYTES or value == _NOTHING:
            raise incomplete(name)
    elif isinstance(value, str):
        if not value:
            raise incomplete(name)
    elif value < 0:
        raise incomplete(name)


@lru_cache(maxsize=1024)
def _seal(source: BlockSource) -> bytes:
    return digest(
        "block_source",
        [
            ("hash_version", source.hash_version),
            ("binding", source.binding.at(0).digest()),
            ("dtype", source.dtype),
            ("codec", source.codec),
            ("layout", source.layout),
            ("producer", source.producer),
            ("layers", source.layers),
            ("kv_heads", source.kv_heads),
            ("block_tokens", source.block_tokens),
            ("branch", digest("branch", [("part", part) for part in source.branch])),
        ],
    )


def namespace_digest(source: BlockSource) -> bytes:
    """Whose the blocks are: what quotas, deletion, arenas and keys of encryption go by. Branches of a tenant
    are in their tenant's namespace; a re-created namespace (another generation) is another one."""
    return tenancy_digest(source.binding.tenant_namespace, source.binding.namespace_generation)


def tenancy_digest(tenant_namespace: str, namespace_generation: int) -> bytes:
    """The namespace of a tenant, for who names no source: its whole deletion, and people who ask."""
    return digest(
        "namespace",
        [("tenant_namespace", tenant_namespace), ("namespace_generation", namespace_generation)],
    )


def chain_keys(
    source: BlockSource,
    tokens: NDArray[np.int64] | NDArray[np.uint32],
    *,
    content: Sequence[bytes] | None = None,
    parent: bytes | None = None,
    first_block: int = 0,
) -> NDArray[np.uint8]:
    """Keys uint8 [n, 32] of the n whole blocks of `tokens` [t]; tokens after the last whole block have none.

    content: per block 32 bytes that name its inputs other than tokens (images, embeddings), b"" for none.
    parent: key of the block before `first_block`; needed exactly when first_block > 0. BAD_ARGUMENT.
    """
    count, size = _blocks(source, tokens, first_block)
    if (parent is None) != (first_block == 0):
        raise CoreError(Reason.BAD_ARGUMENT, "parent is needed for first_block above 0, and only then")
    if parent is not None and len(parent) != KEY_BYTES:
        raise CoreError(Reason.BAD_ARGUMENT, f"parent has {len(parent)} bytes, a key has {KEY_BYTES}")
    if count == 0:
        return np.zeros((0, KEY_BYTES), dtype=np.uint8)
    messages, at = _messages(source, tokens[: count * size], _contents(content, count), first_block)
    width = messages.shape[1]
    flat = messages.reshape(-1).data
    sha256 = hashlib.sha256
    key = parent or _NOTHING
    keys = []
    for start in range(0, count * width, width):
        flat[start + at : start + at + KEY_BYTES] = key
        key = sha256(flat[start : start + width]).digest()
        keys.append(key)
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(count, KEY_BYTES)


def _blocks(source: BlockSource, tokens: NDArray[np.generic], first_block: int) -> tuple[int, int]:
    if tokens.ndim != 1 or tokens.dtype not in (np.dtype(np.int64), np.dtype(np.uint32)):
        raise CoreError(
            Reason.BAD_ARGUMENT, f"tokens are int64 or uint32 [t], not {tokens.dtype} {list(tokens.shape)}"
        )
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= MAX_TOKEN:
        raise CoreError(
            Reason.BAD_ARGUMENT, f"a token is in [0, {MAX_TOKEN}]; what is no token goes into content"
        )
    count = len(tokens) // source.block_tokens
    if first_block < 0 or (first_block + count) * source.block_tokens > _LAST_POSITION:
        raise CoreError(Reason.BAD_ARGUMENT, f"first_block {first_block} is no block")
    return count, source.block_tokens


def _contents(content: Sequence[bytes] | None, count: int) -> NDArray[np.uint8]:
    if content is None:
        return np.zeros((count, KEY_BYTES), dtype=np.uint8)
    if len(content) < count:
        raise CoreError(Reason.BAD_ARGUMENT, f"content names {len(content)} of {count} blocks")
    named = [item or _NOTHING for item in content[:count]]
    if any(len(item) != KEY_BYTES for item in named) or any(item == _NOTHING for item in content[:count]):
        raise CoreError(Reason.BAD_ARGUMENT, "content is a digest of 32 bytes, or b'' for none")
    return np.frombuffer(b"".join(named), dtype=np.uint8).reshape(count, KEY_BYTES)


def _messages(
    source: BlockSource, tokens: NDArray[np.generic], content: NDArray[np.uint8], first_block: int
) -> tuple[NDArray[np.uint8], int]:
    """The encoded fields of each block [n, width], the parent's 32 bytes blank; and where those are."""
    count, size = len(content), source.block_tokens
    first = np.arange(first_block, first_block + count, dtype=np.int64) * size
    parts: list[bytes | NDArray[np.uint8]] = [
        encode_domain("block", 6) + encode_header("seal", b"B", KEY_BYTES) + source.seal(),
        encode_header("parent", b"B", KEY_BYTES),
        np.zeros((count, KEY_BYTES), dtype=np.uint8),
        encode_header("first", b"I", 8),
        first.astype(">i8").view(np.uint8).reshape(count, 8),
        encode_header("frontier", b"I", 8),
        (first + size).astype(">i8").view(np.uint8).reshape(count, 8),
        encode_header("content", b"B", KEY_BYTES),
        content,
        encode_header("tokens", b"B", 4 * size),
        tokens.astype(">u4").view(np.uint8).reshape(count, 4 * size),
    ]
    widths = [len(part) if isinstance(part, bytes) else part.shape[1] for part in parts]
    messages = np.empty((count, sum(widths)), dtype=np.uint8)
    at = 0
    for part, width in zip(parts, widths, strict=True):
        messages[:, at : at + width] = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part
        at += width
    return messages, widths[0] + widths[1]


# Rows that are not committed.


def branch_source(source: BlockSource, branch_id: str, request_generation: int | None = None) -> BlockSource:
    """The source of rows that only this branch may find (specification B.11). request_generation: of the
    request that speculates; needed unless `source` is a branch already. IDENTITY_INCOMPLETE."""
    generation = source.binding.request_generation if request_generation is None else request_generation
    binding = replace(source.binding, request_generation=generation)
    return replace(source, binding=binding, branch=(*source.branch, branch_id))


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a branch's blocks. old, new: uint8 [n, 32], the same block before and after its commit.
    dropped: uint8 [m, 32], blocks with a row that was not committed; their bytes are nobody's.
    source: that of the new keys."""

    source: BlockSource
    old: NDArray[np.uint8]
    new: NDArray[np.uint8]
    dropped: NDArray[np.uint8]


def accept(
    branch: BlockSource,
    tokens: NDArray[np.int64] | NDArray[np.uint32],
    *,
    committed_frontier: int,
    content: Sequence[bytes] | None = None,
    parent: bytes | None = None,
    first_block: int = 0,
) -> Settled:
    """Renames a branch's whole blocks that end at or below the committed frontier; the others are dropped.

    tokens, content, parent, first_block: as given to `chain_keys` for the branch. IDENTITY_MISMATCH for rows
    of a candidate that would become everyone's, BAD_ARGUMENT where there is no branch.
    """
    if not branch.branch:
        raise CoreError(Reason.BAD_ARGUMENT, "these rows are committed: there is no branch to accept")
    path = branch.branch[:-1]
    if not path and branch.producer != EXACT:
        raise CoreError(Reason.IDENTITY_MISMATCH, f"rows of candidate {branch.producer} stay their session's")
    generation = branch.binding.request_generation if path else 0
    target = replace(branch, binding=replace(branch.binding, request_generation=generation), branch=path)
    old = chain_keys(branch, tokens, content=content, parent=parent, first_block=first_block)
    kept = max(0, min(len(old), committed_frontier // branch.block_tokens - first_block))
    new = chain_keys(
        target, tokens[: kept * branch.block_tokens], content=content, parent=parent, first_block=first_block
    )
    return Settled(target, old[:kept], new, old[kept:])


def check_committed(source: BlockSource, frontier: int, committed_frontier: int) -> None:
    """UNCOMMITTED_ROWS when a shared block that ends at `frontier` holds a row beyond the commit boundary."""
    if not source.branch and frontier > committed_frontier:
        raise CoreError(
            Reason.UNCOMMITTED_ROWS,
            f"rows up to {frontier} are committed only up to {committed_frontier}: they are a branch's",
            {"committed_frontier": committed_frontier},
        )
