"""Tokens per second of SmolLM2 with every row behind an agent, beside DynamicCache in the same run.

One thread on both sides, float32; the gpu tier is simulated, so its bandwidth is a memcpy's.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.rows import Row
from tests.engine.exactness import prompts, reference, spread_and_resident
from tests.engine.smollm2 import load_smollm2

LENGTHS = [200, 1000, 2000]
NEW_TOKENS = 32
REPEATS = 2
PEER = "DynamicCache"


def rows() -> Iterator[Row]:
    model, tokenizer = load_smollm2()
    with spread_and_resident() as (spread, resident):
        for length, ids in zip(LENGTHS, prompts(tokenizer, LENGTHS), strict=True):
            runs = [
                (
                    reference(model, ids, NEW_TOKENS),
                    spread.generate(model, ids, NEW_TOKENS),
                    resident.generate(model, ids, NEW_TOKENS),
                )
                for _ in range(REPEATS)
            ]
            want, tiers, one = zip(*runs, strict=True)
            peer = max(g.tokens_per_second for g in want)
            for name, made in (("three_tiers", tiers), ("one_tier", one)):
                yield Row(
                    f"engine.decode.n{length}.{name}",
                    max(g.tokens_per_second for g in made),
                    "tokens/s",
                    peer=PEER,
                    peer_value=peer,
                )
            yield Row(
                f"engine.first_token.n{length}.three_tiers",
                min(g.first_seconds for g in tiers),
                "s",
                peer=PEER,
                peer_value=min(g.first_seconds for g in want),
                lower_is_better=True,
            )
