"""SmolLM2 through a real agent with tiers smaller than the context: DynamicCache's tokens, and the same bits
wherever the rows lie. The full table of 20 prompts is the bench suite `exactness`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.exactness import (
    TOLERANCE,
    Generation,
    Tiers,
    compare,
    kept_references,
    prompts,
    reference,
    spread_and_resident,
)
from tests.engine.smollm2 import load_smollm2

pytestmark = pytest.mark.timeout(600)

NEW_TOKENS = 16
LENGTHS = [50, 300, 700, 1100]
# Which tiers hold rows of a prompt: open chunks are in the gpu tier, sealed ones go down as it fills.
TIERS_READ = {
    50: {"gpu-sim"},
    300: {"gpu-sim", "dram"},
    700: {"gpu-sim", "dram", "nvme"},
    1100: {"gpu-sim", "dram", "nvme"},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_smollm2()[0]


@pytest.fixture(scope="module")
def ids() -> dict[int, torch.Tensor]:
    return dict(zip(LENGTHS, prompts(load_smollm2()[1], LENGTHS), strict=True))


@pytest.fixture(scope="module")
def caches() -> Iterator[tuple[Tiers, Tiers]]:
    with spread_and_resident() as both:
        yield both


@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_tokens_equal_dynamic_cache_and_bits_equal_another_placement(
    model: Any, ids: dict[int, torch.Tensor], caches: tuple[Tiers, Tiers], length: int
) -> None:
    prompt = ids[length]
    [want] = kept_references(
        "exact-decode", [prompt], NEW_TOKENS, lambda: {length: reference(model, prompt, NEW_TOKENS)}
    ).values()
    spread, resident = caches
    got = spread.generate(model, prompt, NEW_TOKENS)
    verdict = compare(want, got)
    assert verdict.holds, verdict
    assert verdict.largest_logit_difference < TOLERANCE or not verdict.equal
    assert got.exactness == {"EXACT"}
    assert set(got.bytes_by_tier) == TIERS_READ[length]
    other = resident.generate(model, prompt, NEW_TOKENS)
    assert set(other.bytes_by_tier) == {"gpu-sim"}
    assert torch.equal(other.logits, got.logits)


def test_the_comparison_itself_can_fail() -> None:
    logits = torch.zeros(3, 5)
    logits[:, 1], logits[:, 2] = 1.0, 0.9
    want = Generation([1, 1, 1], logits, 0.0, 1.0)
    off = compare(want, Generation([1, 2, 1], logits, 0.0, 1.0))
    assert (off.first_difference, off.holds) == (1, False)
    assert off.gap == pytest.approx(0.1)
    logits[1, 2] = 1.0 - TOLERANCE
    assert compare(want, Generation([1, 2, 1], logits, 0.0, 1.0)).holds
    assert compare(want, want).equal
