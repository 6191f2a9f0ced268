"""Shared blocks as a synchronous Python API: store, look up, load, delete, explain; every byte is verified
here too.

Why it exists: an engine that owns its pool hands payloads over and gets them back, and believes none that it
has not hashed itself. It must not know a model, and computes no key: the agent names blocks, since it adds
what a client must not choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import xxhash

from kvtier.v1 import attention_pb2, attention_pb2_grpc, blocks_pb2, blocks_pb2_grpc, common_pb2
from kvtier_client.blockarrival import Arrival, parse_checksum
from kvtier_client.blockrecords import (
    CacheName,
    Deleted,
    Explained,
    FoundBlock,
    Keys,
    Loaded,
    LoadedBlock,
    Lookup,
    StoredBlock,
    Tokens,
)
from kvtier_client.blocksource import BlockSource
from kvtier_client.errors import KvtierError, from_detail, from_rpc
from kvtier_core.errors import Reason

PART_BYTES = 1 << 20
Payload = bytes | bytearray | memoryview
# What every call is asked with and answers, beside the client.
__all__ = [
    "BlocksClient",
    "CacheName",
    "Deleted",
    "Explained",
    "FoundBlock",
    "Keys",
    "Loaded",
    "LoadedBlock",
    "Lookup",
    "StoredBlock",
]


class BlocksClient:
    """Blocks of one cache for one tenant, through one agent's engine socket.

    socket_path: absolute path of `<run dir>/<node>/engine.sock`. timeout: seconds of a call, at the agent;
    the client waits `grace` longer, so that the agent's typed answer wins. Failures are KvtierError. After
    BOOT_ID_MISMATCH the agent has restarted: `refresh`, and what a restart keeps is found again. Threads may
    share it.
    """

    def __init__(
        self,
        socket_path: Path | str,
        cache: CacheName,
        tenant: str,
        *,
        timeout: float = 10.0,
        grace: float = 1.0,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.cache = cache
        self.tenant = tenant
        self._timeout = timeout
        self._wait = timeout + grace
        self._metadata = tuple(metadata)
        self._channel = grpc.insecure_channel(f"unix:{Path(socket_path)}")
        self._blocks = blocks_pb2_grpc.BlocksStub(self._channel)  # type: ignore[no-untyped-call]
        self._attention = attention_pb2_grpc.AttentionStub(self._channel)  # type: ignore[no-untyped-call]
        self._boot_id = ""
        self._loads = 0
        self._closed = False

    def close(self) -> None:
        """Ends the channel and what runs on it. Idempotent."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> BlocksClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def refresh(self) -> str:
        """Asks which life of the agent this is; returns its boot id."""
        request = attention_pb2.DescribeCacheRequest(cache=self._cache())
        answer: attention_pb2.DescribeCacheResponse = self._unary(self._attention.DescribeCache, request)
        self._boot_id = answer.boot_id
        return self._boot_id

    # Storing.

    def store(
        self,
        source: BlockSource,
        tokens: Tokens,
        payloads: Sequence[Payload],
        *,
        committed_frontier: int,
        first_block: int = 0,
        parent_key: bytes = b"",
        content: Sequence[bytes] = (),
        recompute_seconds: float = 0.0,
        droppable: bool = False,
        durable: bool = False,
    ) -> list[StoredBlock]:
        """Publishes one payload for each whole block of `tokens`, in their order; each is published or
        refused by itself. committed_frontier: rows below it are final; blocks beyond are a branch's
        (UNCOMMITTED_ROWS). recompute_seconds, droppable: what eviction may do with them. durable: answers
        when each is in a tier that outlives the agent, or says of it why it is not
        (`StoredBlock.not_durable`); TIER_INCAPABLE, with nothing stored, where there is no such tier."""
        views = [memoryview(payload).cast("B") for payload in payloads]
        if not views or len({len(view) for view in views}) != 1:
            raise KvtierError(Reason.PAYLOAD_GEOMETRY, "payloads are some, and of one length")
        begin = blocks_pb2.StoreBegin(
            scope=self._scope(source),
            span=_span(tokens, first_block, parent_key, content),
            block_bytes=len(views[0]),
            committed_frontier=committed_frontier,
            recompute_seconds=recompute_seconds,
            droppable=droppable,
            durable=durable,
        )
        answer: blocks_pb2.StoreBlocksResponse = self._unary(self._blocks.StoreBlocks, _parts(begin, views))
        return [_stored(block) for block in answer.blocks]

    # Finding and loading.

    def lookup(
        self,
        source: BlockSource,
        tokens: Tokens,
        *,
        first_block: int = 0,
        parent_key: bytes = b"",
        content: Sequence[bytes] = (),
        pin_seconds: float = 0.0,
    ) -> Lookup:
        """The leading published blocks. With pin_seconds they stay so long, or until a load takes the pin."""
        request = blocks_pb2.LookupBlocksRequest(
            scope=self._scope(source),
            span=_span(tokens, first_block, parent_key, content),
            pin_ms=int(pin_seconds * 1000),
        )
        answer: blocks_pb2.LookupBlocksResponse = self._unary(self._blocks.LookupBlocks, request)
        found = tuple(
            FoundBlock(
                block.key, block.generation, block.tier_class, block.bytes, parse_checksum(block.checksum)
            )
            for block in answer.blocks
        )
        return Lookup(found, answer.pin_id, answer.cache_generation)

    def load(
        self,
        source: BlockSource,
        tokens: Tokens,
        *,
        first_block: int = 0,
        parent_key: bytes = b"",
        content: Sequence[bytes] = (),
        found: Lookup | None = None,
        into: Callable[[int], memoryview] | None = None,
    ) -> Loaded:
        """All leading blocks that there are. found: of an earlier lookup of the same tokens, whose pin is
        given back here; None looks up now. into: where block i goes; None makes memory for it."""
        blocks: list[LoadedBlock] = []
        try:
            for block in self.stream(
                source,
                tokens,
                first_block=first_block,
                parent_key=parent_key,
                content=content,
                found=found,
                into=into,
            ):
                blocks.append(block)
        except KvtierError as error:
            if not blocks:
                raise
            return Loaded(tuple(blocks), error)
        return Loaded(tuple(blocks), None)

    def stream(
        self,
        source: BlockSource,
        tokens: Tokens,
        *,
        first_block: int = 0,
        parent_key: bytes = b"",
        content: Sequence[bytes] = (),
        found: Lookup | None = None,
        into: Callable[[int], memoryview] | None = None,
    ) -> Iterator[LoadedBlock]:
        """As `load`, block by block as each is ready and verified. Leaving the iteration ends the call."""
        span = _span(tokens, first_block, parent_key, content)
        if found is None:
            found = self.lookup(
                source, tokens, first_block=first_block, parent_key=parent_key, content=content
            )
        if not found.blocks:
            return
        count = len(found.blocks)
        del span.content[count:], span.keys[count:]
        span.tokens = span.tokens[: 4 * count * source.block_tokens]
        request = blocks_pb2.LoadBlocksRequest(
            scope=self._scope(source),
            span=span,
            pin_id=found.pin_id,
            # Without a pin a copy may move on, and its bytes are the same elsewhere.
            generations=[block.generation for block in found.blocks] if found.pin_id else (),
        )
        self._loads += 1
        yield from Arrival(self.tenant, source, found, self._loads, into).blocks(
            self._streaming(self._blocks.LoadBlocks, request)
        )

    # Sessions.

    def start_session(
        self, session_id: str, session_generation: int, source: BlockSource, tokens: Tokens
    ) -> int:
        """Lets a session without rows start from the published blocks of `tokens`; how many rows it then has.
        source: names all layers, as of `publish_session`. STEP_ORDER once it has rows, UNSUPPORTED with a
        selector, TENANT_MISMATCH for another tenant's."""
        request = blocks_pb2.StartSessionRequest(
            scope=self._scope(source),
            span=_span(tokens, 0, b"", ()),
            session_id=session_id,
            session_generation=session_generation,
        )
        answer: blocks_pb2.StartSessionResponse = self._unary(self._blocks.StartSession, request)
        return answer.rows

    def publish_session(
        self,
        session_id: str,
        session_generation: int,
        source: BlockSource,
        tokens: Tokens,
        *,
        recompute_seconds: float = 0.0,
        droppable: bool = True,
        durable: bool = False,
    ) -> list[StoredBlock]:
        """Publishes a session's rows of the whole chunks of `tokens`, which are committed and exact, as
        blocks: by chunk and, of each, by layer. They never leave the agent for that. UNCOMMITTED_ROWS after
        approximate answers or edits, NOT_VISIBLE beyond what is committed."""
        request = blocks_pb2.PublishSessionRequest(
            scope=self._scope(source),
            span=_span(tokens, 0, b"", ()),
            session_id=session_id,
            session_generation=session_generation,
            recompute_seconds=recompute_seconds,
            droppable=droppable,
            durable=durable,
        )
        answer: blocks_pb2.PublishSessionResponse = self._unary(self._blocks.PublishSession, request)
        return [_stored(block) for block in answer.blocks]

    # Deleting and looking.

    def delete(
        self, source: BlockSource, tokens: Tokens, *, first_block: int = 0, parent_key: bytes = b""
    ) -> Deleted:
        """Returns when the blocks are unfindable, and gone from every tier unless some are `pending`."""
        span = _span(tokens, first_block, parent_key, ())
        return self._delete(blocks_pb2.DeleteBlocksRequest(scope=self._scope(source), span=span))

    def delete_tenant(self) -> Deleted:
        """All that this tenant has in this cache."""
        request = blocks_pb2.DeleteBlocksRequest(scope=self._scope(None), whole_namespace=True)
        return self._delete(request)

    def _delete(self, request: blocks_pb2.DeleteBlocksRequest) -> Deleted:
        answer: blocks_pb2.DeleteBlocksResponse = self._unary(self._blocks.DeleteBlocks, request)
        durable = tuple(tier.tier_class for tier in answer.tiers if tier.durable)
        return Deleted(answer.tombstoned, answer.pending, durable)

    def explain(self, key: bytes) -> Explained:
        """Where a block of this tenant is, or why it is not there."""
        span = blocks_pb2.BlockSpan(keys=[key])
        request = blocks_pb2.ExplainBlockRequest(scope=self._scope(None), span=span)
        answer: blocks_pb2.ExplainBlockResponse = self._unary(self._blocks.ExplainBlock, request)
        replicas = tuple(
            {name.name: value for name, value in replica.ListFields()} for replica in answer.replicas
        )
        reason = common_pb2.Reason.Name(answer.reason) if answer.reason else ""
        return Explained(answer.key, answer.state, reason, answer.message, replicas, dict(answer.facts))

    # Calling.

    def _cache(self) -> common_pb2.CacheRef:
        return common_pb2.CacheRef(namespace=self.cache.namespace, name=self.cache.name, uid=self.cache.uid)

    def _scope(self, source: BlockSource | None) -> blocks_pb2.BlockScope:
        if not self._boot_id:
            self.refresh()
        return blocks_pb2.BlockScope(
            cache=self._cache(),
            tenant=self.tenant,
            boot_id=self._boot_id,
            deadline_ms=max(1, int(self._timeout * 1000)),
            source=None if source is None else source.message(),
        )

    def _unary(self, method: Callable[..., Any], request: Any) -> Any:
        self._check_open()
        try:
            return method(request, timeout=self._wait, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def _streaming(self, method: Callable[..., Any], request: Any) -> Iterator[blocks_pb2.LoadBlocksPart]:
        self._check_open()
        call = method(request, timeout=self._wait, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise KvtierError(Reason.BAD_ARGUMENT, "the client is closed")


def _stored(block: blocks_pb2.StoredBlock) -> StoredBlock:
    return StoredBlock(
        block.key,
        block.generation,
        block.existed,
        from_detail(block.error) if block.HasField("error") else None,
        block.durable,
        from_detail(block.not_durable) if block.HasField("not_durable") else None,
    )


def _span(
    tokens: Tokens, first_block: int, parent_key: bytes, content: Sequence[bytes]
) -> blocks_pb2.BlockSpan:
    """BAD_ARGUMENT for what is no uint32: such inputs go into `content`."""
    if isinstance(tokens, Keys):
        return blocks_pb2.BlockSpan(
            keys=tokens.keys, first_block=first_block, parent_key=parent_key, content=content
        )
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise KvtierError(Reason.BAD_ARGUMENT, f"tokens are integers [t], not {array.dtype} {array.shape}")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= 2**32 - 1:
        raise KvtierError(Reason.BAD_ARGUMENT, "a token is in [0, 2^32)")
    return blocks_pb2.BlockSpan(
        first_block=first_block,
        parent_key=parent_key,
        tokens=array.astype("<u4").tobytes(),
        content=content,
    )


def _parts(begin: blocks_pb2.StoreBegin, views: Sequence[memoryview]) -> Iterator[blocks_pb2.StoreBlocksPart]:
    yield blocks_pb2.StoreBlocksPart(begin=begin)
    for block, view in enumerate(views):
        checksum = f"xxh3:{xxhash.xxh3_64_intdigest(view):016x}"
        for offset in range(0, len(view), PART_BYTES):
            part = view[offset : offset + PART_BYTES]
            last = offset + len(part) == len(view)
            yield blocks_pb2.StoreBlocksPart(
                block=block,
                offset=offset,
                data=bytes(part),
                last=last,
                checksum=checksum if last else "",
            )
