"""A prompt's first rows from the agent's blocks: a KvtierCache that starts where another prompt has been.

Why it exists: chats and tools of one tenant begin with the same words, and their rows are computed once. It
must not know a model, rows or keys: the agent names blocks and lends its own slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_client.blockrecords import StoredBlock
from kvtier_client.blocks import BlocksClient
from kvtier_client.blocksource import BlockSource
from kvtier_client.errors import KvtierError
from kvtier_client.hf import KvtierCache
from kvtier_core.errors import Reason


def start_from_blocks(
    cache: KvtierCache, blocks: BlocksClient, source: BlockSource, prompt: Sequence[int]
) -> int:
    """Lets a new cache of one sequence start from what is published of `prompt`; how many tokens the model
    need not compute. At least the last token is left to it, since it has the next one's logits. 0 also where
    other sessions hold all memory that they may by blocks. Call it before the first pass, and pass the whole
    prompt to `generate` as always."""
    size = source.block_tokens
    usable = (len(prompt) - 1) // size * size
    if usable <= 0:
        return 0
    opened = cache.opened
    try:
        rows = blocks.start_session(opened.session_id, opened.generation, source, prompt[:usable])
    except KvtierError as error:
        if error.reason is not Reason.CREDIT_PRESSURE:
            raise
        return 0
    cache.stand_at(rows)
    return rows


def publish_prompt(
    cache: KvtierCache,
    blocks: BlocksClient,
    source: BlockSource,
    prompt: Sequence[int],
    *,
    recompute_seconds: float = 0.0,
    droppable: bool = True,
    durable: bool = False,
) -> list[StoredBlock]:
    """Publishes the whole chunks of a prompt that the model has gone on from, for prompts that begin alike.
    With the default its blocks make room when others need it."""
    size = source.block_tokens
    whole = len(prompt) // size * size
    if not whole:
        return []
    opened = cache.opened
    return blocks.publish_session(
        opened.session_id,
        opened.generation,
        source,
        prompt[:whole],
        recompute_seconds=recompute_seconds,
        droppable=droppable,
        durable=durable,
    )
