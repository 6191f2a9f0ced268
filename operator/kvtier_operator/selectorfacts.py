"""What each selector family, and each variant of one, is: the table behind KVSelector's status.

Why it exists: the operator must say what a family promises without the engine core, which knows it and needs
torch; a test holds the two together. Measured facts stand here too, each with the page that has the numbers.
It must not know a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_operator.ports import JsonObject


@dataclass(frozen=True)
class FamilyFacts:
    """What one family of selectors is. `guarantee` speaks of the attention mass that it leaves out; `needs`
    is what it must see; `appendable`: its index follows new rows without being rebuilt; `estimates`: it says
    how much it leaves out, so that a gate can be kept.

    Source: the families of the retrieval specification, section D.0 and the paragraphs of each.
    """

    guarantee: str
    needs: tuple[str, ...]
    appendable: bool
    estimates: bool = False


FAMILIES: dict[str, FamilyFacts] = {
    "sparq": FamilyFacts("heuristic", ("query",), True),
    "quest": FamilyFacts("upperBound", ("query",), True),
    "infinigen": FamilyFacts("heuristic", ("prefillQueries", "previousHiddenState", "weights"), True),
    "pqcache": FamilyFacts("heuristic", ("query",), True),
    "retrievalAttention": FamilyFacts("heuristic", ("query", "prefillQueries"), False),
    "squeezedAttention": FamilyFacts("heuristic", ("query",), False, estimates=True),
    "magicPig": FamilyFacts("sampled", ("query",), True),
    "infLlm": FamilyFacts("heuristic", ("query", "prefillQueries"), True),
    "emLlm": FamilyFacts("heuristic", ("query", "prefillQueries", "surprisal"), True),
    "clusterKv": FamilyFacts("heuristic", ("query",), True),
    "certifiedScan": FamilyFacts("upperBound", ("query",), True, estimates=True),
}

VARIANTS: dict[tuple[str, str], FamilyFacts] = {
    ("retrievalAttention", "retroInfer"): FamilyFacts("estimate", ("query",), True, estimates=True),
}
"""Variants that are not what their family is; every other one is (SparQ's llamaCpp and sparF among them: what
they read or correct differs, what is promised does not)."""

TIMED_ROWS = 8192
TIMED_SOURCE = "docs/benchmarks/selectors.md"
TIMES_DENSE: dict[str, str] = {
    "certifiedScan": "8.3",
    "clusterKv": "5.1",
    "emLlm": "2.1",
    "infLlm": "1.2",
    "infinigen": "6.1",
    "magicPig": "21.8",
    "pqcache": "4.6",
    "quest": "1.5",
    "quest, evaluation": "1.3",
    "retrievalAttention": "12.5",
    "retroInfer": "3.4",
    "sparq": "6.2",
    "sparq, llamaCpp": "5.8",
    "sparq, sparF": "6.2",
    "squeezedAttention": "2.1",
}
"""Selecting and attending on a CPU, as a multiple of dense decode over TIMED_ROWS rows: the last column of
the table in TIMED_SOURCE, by its names."""
_TIMED_AS = {("retrievalAttention", "retroInfer"): "retroInfer"}


def variant_of(spec: JsonObject) -> str:
    """Of a KVSelector's spec; empty where the family has none or none is given."""
    return str((spec.get(spec["family"]) or {}).get("variant") or "")


def facts_of(spec: JsonObject) -> FamilyFacts | None:
    """None: a family of another version."""
    family = spec["family"]
    return VARIANTS.get((family, variant_of(spec)), FAMILIES.get(family))


def named(spec: JsonObject) -> str:
    """The family, and its variant where that is another promise."""
    family, variant = spec["family"], variant_of(spec)
    return f"{family} ({variant})" if (family, variant) in VARIANTS else family


def slower(spec: JsonObject) -> str:
    """The sentence for a selector that is slower than dense attention; empty for another."""
    family, variant = spec["family"], variant_of(spec)
    label = _TIMED_AS.get((family, variant), f"{family}, {variant}")
    times = TIMES_DENSE.get(label) or TIMES_DENSE.get(family, "")
    if not times or float(times) <= 1.0:
        return ""
    return (
        f"slower than dense attention on CPUs: {times} times its time over {TIMED_ROWS:,} resident rows, see "
        f"{TIMED_SOURCE}"
    )
