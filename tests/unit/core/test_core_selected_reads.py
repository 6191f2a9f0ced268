"""A selection reads storage by the pages that it named: the same bits as from whole blocks, whatever lies in
the rest of a buffer, and a receipt that says what left the tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kvtier_core import assembly
from kvtier_core.arrivals import BufferPool
from kvtier_core.errors import CoreError
from kvtier_core.receipts import ExactnessClass, PublishArm, StepMode
from kvtier_core.selectors.lifecycle.memory import IndexMemory
from kvtier_core.selectors.lifecycle.works import IndexWorks
from kvtier_core.tiers.nvme import NvmeOptions, NvmeTier
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.tiers.transfer import TransferItem, TransferSink
from tests.unit.core.builders import CANDIDATE, CHUNK, LAYERS, PAGE, Driver, Rows, cpu, engine, nvme, quest

FLASH = [cpu(LAYERS), nvme(64)]
NAME = FLASH[1].name
TOKENS = 9 * CHUNK + 3
STEPS = 5
BLOCK = 2 * 2 * CHUNK * 16 * 4
NO_MEMORY, MUCH = 1 << 20, 1 << 40


class Counted:
    """What the tier was asked for, and what left the file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranged: bool) -> None:
        self.tiers: list[NvmeTier] = []
        submit = NvmeTier.submit_read

        def ask(tier: NvmeTier, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
            if tier not in self.tiers:
                self.tiers.append(tier)
            # No gap of these small blocks is worth a page.
            tier.measured.seek_bytes = 0
            submit(tier, items if ranged else [replace(item, ranges=None) for item in items], deadline, sink)

        monkeypatch.setattr(NvmeTier, "submit_read", ask)
        # So small blocks are otherwise read whole.
        monkeypatch.setattr(assembly, "NvmeOptions", partial(NvmeOptions, whole_bytes=0))

    @property
    def bytes(self) -> int:
        return sum(tier.counts.read_bytes for tier in self.tiers)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers come full of what would spoil every sum."""
    take = BufferPool.take

    def taken(pool: BufferPool) -> StagingBuffer | None:
        buffer = take(pool)
        if buffer is not None:
            buffer.payload.fill_(torch.nan)
        return buffer

    monkeypatch.setattr(BufferPool, "take", taken)


def answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, ranged: bool, memory: int, tokens: int
) -> tuple[torch.Tensor, list[int], list[int], list[int]]:
    """Outputs; and of each step bytes by receipt, of hot units, and that left the file."""
    with monkeypatch.context() as patched:
        counted = Counted(patched, ranged)
        works = IndexWorks(lambda: 0.0, memory=IndexMemory(memory))
        selector = quest(tokens=tokens, sink=2, recent=5)
        mode = StepMode(PublishArm.CANDIDATE, False, selector, CANDIDATE)
        with engine(folder, FLASH, indexes=works) as built:
            driver = Driver.open(built, Rows.random(TOKENS + STEPS), selector)
            driver.forward(TOKENS)
            outs, told, hot, real = [], [], [], []
            for _ in range(STEPS):
                before = counted.bytes
                outs.append(driver.forward(1, mode))
                receipts = [answer.receipt for answer in driver.answers[-LAYERS:]]
                assert {receipt.exactness for receipt in receipts} == {ExactnessClass.APPROXIMATE}
                told.append(sum(receipt.bytes_by_tier.get(NAME, 0) for receipt in receipts))
                hot.append(sum(receipt.selection.hot_bytes for receipt in receipts if receipt.selection))
                real.append(counted.bytes - before)
    return torch.cat(outs, dim=1), told, hot, real


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("memory", [NO_MEMORY, MUCH], ids=["nothing-kept", "hot"])
@pytest.mark.parametrize("tokens", [4 * PAGE, 20 * PAGE])
def test_the_bits_are_those_of_whole_blocks_and_the_bytes_those_that_left_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, memory: int
) -> None:
    want, whole, _, _ = answers(
        tmp_path / "whole", monkeypatch, ranged=False, memory=NO_MEMORY, tokens=tokens
    )
    out, told, hot, real = answers(tmp_path / "part", monkeypatch, ranged=True, memory=memory, tokens=tokens)
    assert torch.equal(out, want)
    assert not out.isnan().any()
    assert sum(told) < sum(whole)
    # A block that is read whole leaves the file with its header's page.
    assert all(0 <= left - said <= 4096 * (said // BLOCK) for left, said in zip(real, told, strict=True))
    assert (sum(hot) > 0) is (memory == MUCH)


def test_a_segment_that_is_damaged_is_refused_as_its_block_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of every payload is another: whatever is selected of storage is met."""
    selector = quest(tokens=4 * PAGE, sink=2, recent=5)
    mode = StepMode(PublishArm.CANDIDATE, False, selector, CANDIDATE)
    reasons = {}
    for ranged in (True, False):
        with monkeypatch.context() as patched:
            Counted(patched, ranged)
            folder = tmp_path / str(ranged)
            with engine(folder, FLASH) as built:
                driver = Driver.open(built, Rows.random(TOKENS + 1), selector)
                driver.forward(TOKENS)
                (path,) = folder.rglob("*.blocks")
                data = bytearray(path.read_bytes())
                for start in range(0, len(data), 4096 + BLOCK):
                    payload = data[start + 4096 : start + 4096 + BLOCK]
                    data[start + 4096 : start + 4096 + BLOCK] = bytes(byte ^ 1 for byte in payload)
                with path.open("r+b") as file:
                    file.write(data)
                with pytest.raises(CoreError) as refused:
                    driver.forward(1, mode)
                reasons[ranged] = refused.value.reason
    assert reasons[True] is reasons[False]
    assert reasons[True].value == "CHECKSUM_MISMATCH"
