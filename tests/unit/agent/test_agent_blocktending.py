"""Shared blocks that nobody looks after but the house-keeping: their pins, and what is told of a failure."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier_agent.blocktending import tend_blocks
from tests.unit.agent.agent_fakes import CacheBlocks


class Blocks:
    def __init__(self, failure: str = "") -> None:
        self.failure = failure
        self.tended = 0

    async def tend(self) -> None:
        self.tended += 1


def node_of(blocks: Blocks | None, beside: Blocks | None, fault: str = "") -> Any:
    host = CacheBlocks(blocks, beside)
    faults = {"uid": fault} if fault else {}
    return cast(Any, SimpleNamespace(caches={"uid": host}, faults=faults, changed=asyncio.Event()))


async def test_pins_of_both_engines_end() -> None:
    blocks, beside = Blocks(), Blocks()
    node = node_of(blocks, beside)
    await tend_blocks(node)
    await tend_blocks(node_of(None, None))
    assert (blocks.tended, beside.tended, node.faults, node.changed.is_set()) == (1, 1, {}, False)


@pytest.mark.parametrize("whose", ["baseline", "candidate"])
async def test_a_store_that_failed_is_told_once_and_not_tended(whose: str) -> None:
    broken, sound = Blocks("lost"), Blocks()
    node = node_of(broken, sound) if whose == "baseline" else node_of(sound, broken)
    await tend_blocks(node)
    assert "lost" in node.faults["uid"] and ("candidate" in node.faults["uid"]) == (whose == "candidate")
    assert node.changed.is_set()
    node.changed.clear()
    await tend_blocks(node)
    assert not node.changed.is_set() and (broken.tended, sound.tended) == (0, 2)


async def test_the_fault_of_a_candidates_store_ends_with_its_engine() -> None:
    """Else the agent would not be Ready until the next baseline is applied."""
    node = node_of(Blocks(), Blocks("lost"))
    await tend_blocks(node)
    node.caches["uid"].blocks_beside = None
    node.changed.clear()
    await tend_blocks(node)
    assert node.faults == {} and node.changed.is_set()


@pytest.mark.parametrize("fault", ["STORAGE_UNAVAILABLE: full", "INTERNAL: the block store failed: lost"])
async def test_another_fault_stays(fault: str) -> None:
    node = node_of(Blocks(), None, fault)
    await tend_blocks(node)
    assert node.faults == {"uid": fault}
