"""Which block lives where: arrays of lines, an index of 32-byte keys, replicas by tier."""

from kvtier_core.directory.authority import Directory
from kvtier_core.directory.ids import (
    KEY_BYTES,
    NO_LINE,
    NO_NAMESPACE,
    NO_PRODUCER,
    NO_TIER,
    ChunkState,
    ReplicaState,
    block_id,
    is_block_id,
    logical_id,
    place_of,
    recency_key,
)
from kvtier_core.directory.replicas import Replica, ReplicaTable
from kvtier_core.directory.storing import StoreFacts

__all__ = [
    "KEY_BYTES",
    "NO_LINE",
    "NO_NAMESPACE",
    "NO_PRODUCER",
    "NO_TIER",
    "ChunkState",
    "Directory",
    "Replica",
    "ReplicaState",
    "ReplicaTable",
    "StoreFacts",
    "block_id",
    "is_block_id",
    "logical_id",
    "place_of",
    "recency_key",
]
