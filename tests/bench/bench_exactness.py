"""The table behind "exact means exact": 20 prompts of 50 to 2,000 tokens, 64 new tokens each, through three
tiers smaller than the context, against transformers' DynamicCache; and against all rows in one tier."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.bench.rows import Row
from tests.engine.exactness import TOLERANCE, compare, prompts, reference, spread_and_resident
from tests.engine.smollm2 import load_smollm2

NEW_TOKENS = 64
LENGTHS = [50 + round(i * 1950 / 19) for i in range(20)]
# Placements are compared on these; each costs a third generation.
PLACED = frozenset(LENGTHS[::5])


def rows() -> Iterator[Row]:
    model, tokenizer = load_smollm2()
    equal = holding = placed = 0
    worst = 0.0
    print(f"{'prompt':>7} {'tokens':>7} {'max |dlogit|':>13} {'first diff':>10} {'gap':>9}  tiers read, MB")
    with spread_and_resident() as (spread, resident):
        for length, ids in zip(LENGTHS, prompts(tokenizer, LENGTHS), strict=True):
            want = reference(model, ids, NEW_TOKENS)
            got = spread.generate(model, ids, NEW_TOKENS)
            verdict = compare(want, got)
            equal += verdict.equal
            holding += verdict.holds and got.exactness == {"EXACT"}
            worst = max(worst, verdict.largest_logit_difference)
            first = "-" if verdict.first_difference is None else str(verdict.first_difference)
            gap = "-" if verdict.gap is None else f"{verdict.gap:.2e}"
            read = ", ".join(f"{tier} {size / 1e6:.0f}" for tier, size in sorted(got.bytes_by_tier.items()))
            state = "equal" if verdict.equal else "differ"
            facts = f"{verdict.largest_logit_difference:13.2e} {first:>10} {gap:>9}"
            print(f"{length:7d} {state:>7} {facts}  {read}", flush=True)
            if length in PLACED:
                placed += torch.equal(resident.generate(model, ids, NEW_TOKENS).logits, got.logits)
    total = len(LENGTHS)
    # At most one prompt in twenty may differ, and only at a tie within the tolerance.
    yield Row("exactness.prompts_equal", equal, "prompts", goal=total, floor=total * 19 // 20)
    yield Row("exactness.prompts_holding", holding, "prompts", goal=total, floor=total)
    yield Row("exactness.placements_bit_equal", placed, "prompts", goal=len(PLACED), floor=len(PLACED))
    yield Row("exactness.largest_logit_difference", worst, "logit", goal=TOLERANCE, lower_is_better=True)
