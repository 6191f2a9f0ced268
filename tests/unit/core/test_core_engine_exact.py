"""Exact attention: right against float64, and bit-equal wherever the rows lie."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ExactnessClass, PublishArm, StepMode
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind
from kvtier_crds.manifest import Checksum
from tests.unit.core.builders import (
    CANDIDATE,
    CHUNK,
    LAYERS,
    Driver,
    Rows,
    TierBudget,
    cpu,
    dense_reference,
    engine,
    gpu,
    manifest,
    nvme,
    quest,
)

TOKENS, DECODE = 4 * CHUNK + 7, 9
PLACEMENTS = {
    "all gpu": [gpu(64)],
    "all cpu": [cpu(64)],
    "all nvme but open chunks": [cpu(LAYERS), nvme(64)],
    "one slot more": [cpu(LAYERS + 1), nvme(64)],
    "three tiers": [gpu(5), cpu(4), nvme(64)],
    "open chunks in two tiers": [gpu(1), cpu(3), nvme(64)],
    "crc32c": [gpu(3), cpu(3, Checksum.NONE), nvme(64, Checksum.CRC32C)],
}


def play(folder: Path, tiers: list[TierBudget], block: int, **options: object) -> torch.Tensor:
    with engine(folder, tiers, **options) as built:  # type: ignore[arg-type]
        driver = Driver.open(built, Rows.random(TOKENS + DECODE))
        out = driver.play(TOKENS, DECODE, block=block)
        assert driver.close() == TOKENS + DECODE
    return out


@pytest.mark.parametrize("tiers", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_placement_cannot_change_a_bit(tmp_path: Path, tiers: list[TierBudget]) -> None:
    everywhere = play(tmp_path / "a", [gpu(64)], block=20)
    here = play(tmp_path / "b", tiers, block=20)
    assert torch.equal(here, everywhere)


def test_proofs_and_grants_wait_for_no_step(tmp_path: Path) -> None:
    begun, release = threading.Event(), threading.Event()

    def blocked() -> bool:
        begun.set()
        return release.wait(120)

    mode = StepMode(PublishArm.CANDIDATE, candidate_digest=CANDIDATE, may_publish=blocked)
    with engine(tmp_path, [gpu(64)]) as built, ThreadPoolExecutor(2) as pool:
        driver = Driver.open(built, Rows.random(1))
        stepping = pool.submit(built.step, driver.request(0, 0, 1), mode)
        try:
            assert begun.wait(120)
            assert pool.submit(built.live_manifest).result(timeout=60) == manifest([gpu(64)])
            pool.submit(built.selectors.check, quest()).result(timeout=60)
            assert not stepping.done()
        finally:
            release.set()
        assert stepping.result(timeout=60).receipt.arm is PublishArm.CANDIDATE


def test_a_step_keeps_nothing_for_gradients(tmp_path: Path) -> None:
    """Its tensors are many and small, and autograd's book-keeping of them was a tenth of a decode frame."""
    with engine(tmp_path, [gpu(2 * LAYERS), nvme(64)]) as built:
        driver = Driver.open(built, Rows.random(CHUNK + 2))
        driver.play(CHUNK, 2)
        assert all(answer.out.is_inference() for answer in driver.answers)


@pytest.mark.parametrize("block", [1, 7, CHUNK, 2 * CHUNK + 9, TOKENS])
def test_the_size_of_frames_cannot_change_a_bit(tmp_path: Path, block: int) -> None:
    """From single rows to frames that fill several chunks at once."""
    assert torch.equal(
        play(tmp_path / "a", [gpu(2), cpu(3), nvme(64)], block), play(tmp_path / "b", [gpu(64)], 20)
    )


def test_reading_ahead_cannot_change_a_bit(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        ahead = play(tmp_path / "a", [cpu(LAYERS), nvme(64)], 20, reader=pool)
    assert torch.equal(ahead, play(tmp_path / "b", [gpu(64)], 20))


def test_answers_are_dense_causal_attention(tmp_path: Path) -> None:
    rows = Rows.random(TOKENS + DECODE)
    with engine(tmp_path, [gpu(3), cpu(3), nvme(64)]) as built:
        out = Driver.open(built, rows).play(TOKENS, DECODE)
    want = dense_reference(rows, TOKENS + DECODE)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=3e-6)


def test_rows_spread_over_all_three_tiers_and_receipts_say_so(tmp_path: Path) -> None:
    with engine(tmp_path, [gpu(4), cpu(2), nvme(64)]) as built:
        driver = Driver.open(built, Rows.random(TOKENS + DECODE))
        driver.play(TOKENS, DECODE)
        receipt = driver.answers[-1].receipt
        assert receipt.exactness is ExactnessClass.EXACT
        assert set(receipt.plan) == {"gpu:partial", "cpu:partial", "nvme:near"}
        assert set(receipt.bytes_by_tier) == {"hbm", "ram", "flash"}
        assert receipt.simulated
        assert receipt.rows_attended == receipt.frontier == TOKENS + DECODE
        assert receipt.manifest_digest == receipt.producer_digest == built.live_manifest().digest()
        stats = {tier.class_name: tier for tier in built.stats().tiers}
        assert stats["hbm"].used_bytes <= stats["hbm"].capacity_bytes
        assert stats["flash"].used_bytes > 0
        assert stats["hbm"].simulated
        assert not stats["ram"].simulated
        driver.close()
        assert [tier.used_bytes for tier in built.stats().tiers] == [0, 0, 0]


def test_newest_rows_are_in_the_fastest_tier(tmp_path: Path) -> None:
    with engine(tmp_path, [gpu(4), cpu(4), nvme(64)]) as built:
        driver = Driver.open(built, Rows.random(8 * CHUNK))
        driver.forward(8 * CHUNK)
        # Committed only when the engine says so; the next step does.
        driver.rows = Rows.random(8 * CHUNK)
        built.step(
            driver.request(
                0,
                8 * CHUNK,
                8 * CHUNK,
                q=driver.rows.q[0, -1:],
                first_query_position=8 * CHUNK - 1,
                committed_frontier=8 * CHUNK,
            )
        )
        order = {"hbm": 0, "ram": 1, "flash": 2}
        for layer in range(LAYERS):
            tiers = [
                order[info.tier_class]
                for info in built.list_chunks(driver.handle.session_id, driver.handle.generation)
                if info.layer == layer
            ]
            assert len(tiers) == 8
            assert tiers == sorted(tiers, reverse=True)
            # Two slots are left beside the open chunks' credits: one for each layer's newest rows.
            assert tiers.count(0) == 1


def test_an_old_chunk_pushes_no_newer_one_down(tmp_path: Path) -> None:
    """A layer's first rows are sealed after another layer's last; they go straight down, at no one's cost."""
    with engine(tmp_path, [gpu(4), nvme(64)]) as built:
        driver = Driver.open(built, Rows.random(8 * CHUNK))
        built.step(driver.request(0, 0, 8 * CHUNK))
        before = built.stats().moved_bytes
        built.step(driver.request(1, 0, CHUNK))
        assert built.stats().moved_bytes == before


def test_a_tier_that_forbids_partial_attention_is_read_through_staging(tmp_path: Path) -> None:
    forbidden = dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.CPU], partial_attention=False)
    everywhere = play(tmp_path / "b", [gpu(64)], 20)
    for name, tiers, plan in (
        ("sealed chunks", [gpu(LAYERS), cpu(64)], {"gpu:partial", "cpu:staged"}),
        ("open chunks too", [cpu(64)], {"cpu:staged"}),
    ):
        with engine(tmp_path / name, tiers, capabilities={"ram": forbidden}) as built:
            driver = Driver.open(built, Rows.random(TOKENS + DECODE))
            assert torch.equal(driver.play(TOKENS, DECODE), everywhere)
            assert set(driver.answers[-1].receipt.plan) == plan


def test_a_tier_that_permits_nothing_has_no_legal_path(tmp_path: Path) -> None:
    closed = dataclasses.replace(
        DEFAULT_CAPABILITY[MediumKind.CPU], partial_attention=False, dma_source=False
    )
    with engine(tmp_path, [cpu(64)], capabilities={"ram": closed}) as built:
        driver = Driver.open(built, Rows.random(4))
        driver.forward(1, q=driver.rows.q[0, :1])
        with pytest.raises(CoreError) as refused:
            driver.forward(1)
    assert refused.value.reason is Reason.NO_LEGAL_PATH


def test_sessions_do_not_see_each_other(tmp_path: Path) -> None:
    """Interleaved sessions in a crowded engine answer as alone."""
    tiers = [gpu(6), cpu(3), nvme(64)]
    alone = []
    for seed in range(2):
        with engine(tmp_path / str(seed), tiers) as built:
            alone.append(Driver.open(built, Rows.random(3 * CHUNK, seed)).play(2 * CHUNK, CHUNK))
    with engine(tmp_path / "both", tiers) as built:
        drivers = [Driver.open(built, Rows.random(3 * CHUNK, seed)) for seed in range(2)]
        parts: list[list[torch.Tensor]] = [[], []]
        for mine, driver in zip(parts, drivers, strict=True):
            mine.append(driver.forward(2 * CHUNK))
        for _ in range(CHUNK):
            for mine, driver in zip(parts, drivers, strict=True):
                mine.append(driver.forward(1))
    for mine, want in zip(parts, alone, strict=True):
        assert torch.equal(torch.cat(mine, dim=1), want)
