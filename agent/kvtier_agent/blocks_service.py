"""Blocks on the wire: published chunks of a session, and the shared blocks of a cache.

Why it exists: the frame of each call (caller, deadline, refusal, measurement) around what serves it. Bytes
were verified before they come here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from kvtier.v1 import blocks_pb2, blocks_pb2_grpc
from kvtier_agent.blockcalls import BlockCalls
from kvtier_agent.blocksessions import BlockSessions
from kvtier_agent.node import Node
from kvtier_agent.rpc import RpcScope, ServicerContext, abort
from kvtier_core.errors import CoreError, Reason

MAX_LIST = 10_000
PART_BYTES = 1 << 20


class BlocksService(blocks_pb2_grpc.BlocksServicer):
    """For engines that own their pools and for other nodes."""

    def __init__(self, node: Node, scope: RpcScope, calls: BlockCalls) -> None:
        self._node = node
        self._scope = scope
        self._calls = calls
        self._sessions = BlockSessions(node, calls)

    async def List(
        self, request: blocks_pb2.ListBlocksRequest, context: ServicerContext
    ) -> blocks_pb2.ListBlocksResponse:
        return await self._scope.run("Blocks.List", context, self._list(request))

    async def Read(
        self, request: blocks_pb2.ReadBlockRequest, context: ServicerContext
    ) -> AsyncIterator[blocks_pb2.BlockPart]:
        """The whole block was read and verified before its first part leaves."""
        seconds = self._node.limits.control_deadline_seconds
        try:
            async with asyncio.timeout(seconds):
                checksum, data = await self._read(request)
        except CoreError as error:
            await abort(context, error)
        except TimeoutError:
            await abort(context, CoreError(Reason.DEADLINE, f"Blocks.Read took over {seconds} s"))
        for offset in range(0, max(1, len(data)), PART_BYTES):
            part = data[offset : offset + PART_BYTES]
            last = offset + len(part) >= len(data)
            yield blocks_pb2.BlockPart(offset=offset, data=part, last=last, checksum=checksum if last else "")

    async def StoreBlocks(
        self, request_iterator: AsyncIterator[blocks_pb2.StoreBlocksPart], context: ServicerContext
    ) -> blocks_pb2.StoreBlocksResponse:
        return await self._scope.run("Blocks.StoreBlocks", context, self._calls.store(request_iterator))

    async def LookupBlocks(
        self, request: blocks_pb2.LookupBlocksRequest, context: ServicerContext
    ) -> blocks_pb2.LookupBlocksResponse:
        return await self._scope.run("Blocks.LookupBlocks", context, self._calls.lookup(request))

    async def LoadBlocks(
        self, request: blocks_pb2.LoadBlocksRequest, context: ServicerContext
    ) -> AsyncIterator[blocks_pb2.LoadBlocksPart]:
        async with aclosing(
            self._scope.stream("Blocks.LoadBlocks", context, self._calls.load(request))
        ) as parts:
            async for part in parts:
                yield part

    async def DeleteBlocks(
        self, request: blocks_pb2.DeleteBlocksRequest, context: ServicerContext
    ) -> blocks_pb2.DeleteBlocksResponse:
        return await self._scope.run("Blocks.DeleteBlocks", context, self._calls.delete(request), finish=True)

    async def ExplainBlock(
        self, request: blocks_pb2.ExplainBlockRequest, context: ServicerContext
    ) -> blocks_pb2.ExplainBlockResponse:
        return await self._scope.run("Blocks.ExplainBlock", context, self._calls.explain(request))

    async def InspectBlocks(
        self, request: blocks_pb2.InspectBlocksRequest, context: ServicerContext
    ) -> blocks_pb2.InspectBlocksResponse:
        return await self._scope.run("Blocks.InspectBlocks", context, self._calls.inspect(request))

    async def StartSession(
        self, request: blocks_pb2.StartSessionRequest, context: ServicerContext
    ) -> blocks_pb2.StartSessionResponse:
        return await self._scope.run(
            "Blocks.StartSession", context, self._sessions.start(request), finish=True
        )

    async def PublishSession(
        self, request: blocks_pb2.PublishSessionRequest, context: ServicerContext
    ) -> blocks_pb2.PublishSessionResponse:
        return await self._scope.run("Blocks.PublishSession", context, self._sessions.publish(request))

    async def _list(self, request: blocks_pb2.ListBlocksRequest) -> blocks_pb2.ListBlocksResponse:
        if not 0 <= request.limit <= MAX_LIST or request.offset < 0:
            raise CoreError(Reason.BAD_ARGUMENT, f"limit must be in [0, {MAX_LIST}] and offset not negative")
        self._node.check_boot(request.boot_id)
        session = self._node.session(request.session_id, request.session_generation, request.tenant)
        runner, handle = session.host.runner, session.handle
        found = await runner.call(lambda: runner.engine.blocks(handle.session_id, handle.generation))
        end = request.offset + (request.limit or MAX_LIST)
        return blocks_pb2.ListBlocksResponse(
            blocks=[
                blocks_pb2.BlockInfo(
                    ref=blocks_pb2.BlockRef(
                        session_id=handle.session_id,
                        session_generation=handle.generation,
                        layer=facts.layer,
                        chunk=facts.chunk,
                        generation=facts.generation,
                    ),
                    tier_class=facts.tier_class,
                    rows=facts.rows,
                    bytes=facts.size_bytes,
                    checksum=facts.checksum,
                    producer_digest=facts.producer_digest,
                    sealed=facts.sealed,
                )
                for facts in found[request.offset : end]
            ],
            more=len(found) > end,
        )

    async def _read(self, request: blocks_pb2.ReadBlockRequest) -> tuple[str, bytes]:
        ref = request.ref
        self._node.check_boot(request.boot_id)
        session = self._node.session(ref.session_id, ref.session_generation, request.tenant)
        runner, handle = session.host.runner, session.handle
        facts, data = await runner.call(
            lambda: runner.engine.read_block(
                handle.session_id, handle.generation, ref.layer, ref.chunk, ref.generation
            )
        )
        return facts.checksum, data
