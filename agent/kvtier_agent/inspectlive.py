"""Asks a running agent what its blocks are, where they lie and why.

Why it exists: the same calls that clients have, read as a person reads. It changes nothing. It must not know
the store's insides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from kvtier.v1 import attention_pb2, attention_pb2_grpc, blocks_pb2, blocks_pb2_grpc, common_pb2
from kvtier_agent.errors import ERROR_METADATA_KEY
from kvtier_agent.inspectreport import Report, size, table

READY = "Ready"


def ask(
    socket: Path, namespace: str, name: str, *, tenant: str, key: bytes, limit: int, timeout: float
) -> Report:
    """key: empty, or of the one block that is explained. An agent that does not answer is a report, too."""
    with grpc.insecure_channel(f"unix:{socket.absolute()}") as channel:
        cache = common_pb2.CacheRef(namespace=namespace, name=name)
        try:
            described = attention_pb2_grpc.AttentionStub(channel).DescribeCache(  # type: ignore[no-untyped-call]
                attention_pb2.DescribeCacheRequest(cache=cache), timeout=timeout
            )
            scope = blocks_pb2.BlockScope(
                cache=cache,
                tenant=tenant,
                boot_id=described.boot_id,
                deadline_ms=max(1, int(timeout * 1000)),
            )
            stub = blocks_pb2_grpc.BlocksStub(channel)  # type: ignore[no-untyped-call]
            if key:
                span = blocks_pb2.BlockSpan(keys=[key])
                request = blocks_pb2.ExplainBlockRequest(scope=scope, span=span)
                return _explained(stub.ExplainBlock(request, timeout=timeout))
            inspect = blocks_pb2.InspectBlocksRequest(scope=scope, limit=limit)
            return _inspected(stub.InspectBlocks(inspect, timeout=timeout), f"{namespace}/{name}", tenant)
        except grpc.RpcError as error:
            return _unanswered(error, socket)


def _explained(answer: blocks_pb2.ExplainBlockResponse) -> Report:
    """A block that is not there is an answer and nothing wrong; one that was lost is."""
    facts = _block(answer)
    lines = [f"block {answer.key.hex()}", f"  {answer.state}: {answer.message}"]
    if answer.reason:
        lines.append(f"  reason {common_pb2.Reason.Name(answer.reason)}")
    lines += [f"  {_place(replica)}" for replica in answer.replicas]
    lines += [f"  {name} {value}" for name, value in sorted(answer.facts.items())]
    return Report(answer.state == "lost", facts, "\n".join(lines) + "\n")


def _inspected(answer: blocks_pb2.InspectBlocksResponse, cache: str, tenant: str) -> Report:
    wrong = [tier.tier_class for tier in answer.tiers if tier.condition != READY]
    lines = [
        f"cache {cache}, generation {answer.cache_generation}, agent {answer.boot_id}, "
        f"blocks of {size(answer.block_bytes)}",
        "",
        *table(
            ["TIER", "MEDIUM", "BLOCKS", "READ", "USED", "CAPACITY", "OUTLIVES AGENT", "CONDITION"],
            [
                [
                    tier.tier_class,
                    tier.medium,
                    tier.published_blocks,
                    tier.read_blocks,
                    tier.used_blocks,
                    tier.capacity_blocks,
                    "yes" if tier.persistent else "no",
                    tier.condition,
                ]
                for tier in answer.tiers
            ],
        ),
        "",
        *table(["SINCE THE START", ""], sorted(answer.counters.items())),
    ]
    if tenant:
        lines += ["", f"blocks of tenant {tenant}:" if answer.blocks else f"tenant {tenant} has no blocks"]
        for block in answer.blocks:
            places = "; ".join(_place(replica) for replica in block.replicas) or block.message
            lines.append(f"  {block.key.hex()}  {block.state}  {places}")
        if answer.next:
            lines.append("  ... and more (--limit)")
    facts = {
        "cache": cache,
        "cacheGeneration": answer.cache_generation,
        "bootID": answer.boot_id,
        "blockBytes": answer.block_bytes,
        "tiers": [
            {**MessageToDict(tier, always_print_fields_with_no_presence=True), **_counts(tier)}
            for tier in answer.tiers
        ],
        "counters": dict(sorted(answer.counters.items())),
        "blocks": [_block(block) for block in answer.blocks],
        "more": bool(answer.next),
        "wrong": wrong,
    }
    return Report(bool(wrong), facts, "\n".join(lines) + "\n")


def _counts(tier: blocks_pb2.BlockTierTotals) -> dict[str, int]:
    """As numbers: JSON of protobuf writes 64-bit integers as text."""
    return {
        "capacityBlocks": tier.capacity_blocks,
        "usedBlocks": tier.used_blocks,
        "publishedBlocks": tier.published_blocks,
        "readBlocks": tier.read_blocks,
    }


def _block(block: blocks_pb2.ExplainBlockResponse) -> dict[str, Any]:
    return {
        "key": block.key.hex(),
        "state": block.state,
        "reason": common_pb2.Reason.Name(block.reason) if block.reason else "",
        "message": block.message,
        "replicas": [
            {
                "tierClass": replica.tier_class,
                "slot": replica.slot,
                "slotGeneration": replica.slot_generation,
                "generation": replica.generation,
                "readers": replica.readers,
                "authority": replica.authority,
                "published": replica.published,
            }
            for replica in block.replicas
        ],
        "facts": dict(block.facts),
    }


def _place(replica: blocks_pb2.BlockReplica) -> str:
    notes = [f"{replica.readers} readers"] if replica.readers else []
    notes += ["authority"] if replica.authority else []
    notes += [] if replica.published else ["not published"]
    return (
        f"{replica.tier_class} slot {replica.slot}/{replica.slot_generation} "
        f"generation {replica.generation}" + (f" ({', '.join(notes)})" if notes else "")
    )


def _unanswered(error: grpc.RpcError, socket: Path) -> Report:
    code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
    text = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
    trailing: Any = error.trailing_metadata() if isinstance(error, grpc.Call) else None
    for key, value in trailing or ():
        if key == ERROR_METADATA_KEY:
            detail = common_pb2.ErrorDetail.FromString(value)
            code, text = common_pb2.Reason.Name(detail.reason), detail.message
    message = f"{socket}: {code}: {text}"
    return Report(True, {"error": {"reason": code, "message": text}}, f"{message}\n")
