"""[selectors_anchor]: figures that an earlier study published of SmolLM2, measured again by `kvtier-eval`.

The study: context 1,024, passkeys, layers 0 and 1 dense, rows 0 to 3 and the last 32 always read, a selection
at each step, KL of full attention and the selector on 7 forced tokens, mass as a mean over heads, 6 prompts.
Here: the same settings over another filler, 24 prompts. What six prompts give by chance is told by drawing
six of ours many times: `low` and `high` hold 95 % of such means, and a published figure within them agrees.

Goes by the results in build/eval/anchor-5-1 (KVTIER_EVAL_OUT names another folder), as many as there are; the
evaluation is run first where there are none, which takes about 20 minutes of a core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier_eval.cli import main
from kvtier_eval.journal import read
from kvtier_eval.plan import Plan
from tests.bench.rows import Row

FOLDER = Path(__file__).resolve().parents[2] / "build" / "eval" / "anchor-5-1"
COMMAND = (
    "run --model smollm2-gguf --tasks passkey --lengths 1024 --budgets 32,64,128,256 "
    "--families sparq,sparq-llamaCpp,quest,quest-evaluation --prompts 24"
)
BUDGETS = (32, 64, 128, 256)
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "oracleRow": {"kl": (0.014, 0.006, 0.003, 0.001), "mass": (0.840, 0.889, 0.934, 0.969)},
    "sparq-llamaCpp": {"kl": (0.015, 0.006, 0.002, 0.001), "mass": (0.827, 0.874, 0.920, 0.959)},
    "quest-evaluation": {"kl": (1.319, 0.664, 0.219, 0.083), "mass": (0.618, 0.680, 0.779, 0.872)},
    "recent": {"kl": (2.37, 2.24, 1.84, 1.82), "mass": (0.552, 0.588, 0.651, 0.716)},
    "random": {"kl": (2.25, 2.11, 1.84, 0.95), "mass": (0.567, 0.586, 0.615, 0.672)},
}
"""By selector, one figure a budget. Its Quest has no slot for the last page, as ours of the evaluation's
path; its SparQ is stated without a mean of V."""
OTHERS = ("sparq", "quest")
"""Measured beside them, without a published figure: the mean of V for what is left out; a slot for the last
page."""
SIX, DRAWS, SEED = 6, 20_000, 1


@dataclass(frozen=True, slots=True)
class Range:
    """mean: of all. low, high: between them lie 95 % of the means of six drawn from them."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """ValueError without values."""
        if not values:
            raise ValueError("no values")
        drawn = np.random.default_rng(SEED).choice(np.array(values), (DRAWS, SIX)).mean(1)
        low, high = np.quantile(drawn, (0.025, 0.975))
        return cls(float(np.mean(values)), float(low), float(high), len(values))


def rows() -> Iterator[Row]:
    out = Path(os.environ.get("KVTIER_EVAL_OUT", FOLDER))
    if not (out / "results.jsonl").exists() and main([*COMMAND.split(), "--out", str(out)]) != 0:
        raise RuntimeError(f"kvtier-eval did not end well in {out}")
    plan = Plan.model_validate_json((out / "plan.json").read_text())
    yield from compared(read(out / "results.jsonl", plan.digest))


def compared(results: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """A row a selector, budget and figure, with the published one beside it, and the range of six."""
    for selector in (*PUBLISHED, *OTHERS):
        for at, budget in enumerate(BUDGETS):
            found = [one for one in results if one["cell"] == f"passkey/1024/{selector}/{budget}"]
            found = [one for one in found if "refused" not in one]
            if not found:
                continue
            values = {
                "kl": [float(np.mean(one["kl"])) for one in found],
                "mass": [float(one["mass"]["mean"]) for one in found],
            }
            for name, unit in (("kl", "nats"), ("mass", "of 1")):
                given = Range.of(values[name])
                label = f"selectors_anchor.b{budget}.{selector.lower().replace('-', '.')}.{name}"
                published = PUBLISHED[selector][name][at] if selector in PUBLISHED else None
                yield Row(
                    label,
                    given.mean,
                    unit,
                    peer=None if published is None else "earlier study",
                    peer_value=published,
                    lower_is_better=name == "kl",
                )
                yield Row(f"{label}.low", given.low, unit)
                yield Row(f"{label}.high", given.high, unit)
            answered = sum(bool(one["answers"]) for one in found)
            label = f"selectors_anchor.b{budget}.{selector.lower().replace('-', '.')}"
            yield Row(f"{label}.answered", answered, f"of {len(found)}")
