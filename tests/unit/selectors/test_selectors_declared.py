"""What the operator tells of a family is what the family says of itself, and what it accepts is what runs.

They may not import each other, so this holds them together."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import get_args

import pytest

from kvtier_core.selectors.families import registry
from kvtier_core.selectors.live import LiveFamily
from kvtier_crds.models.families import Family
from kvtier_crds.models.kvselector import KVSelectorSpec
from kvtier_operator.selectorfacts import (
    FAMILIES,
    TIMED_ROWS,
    TIMED_SOURCE,
    TIMES_DENSE,
    VARIANTS,
    facts_of,
    slower,
)
from kvtier_operator.selectors import IMPLEMENTED, refusal
from tests.unit.selectors.selector_cases import SMALL, SOURCE, query_of, rows_of, selector

# Parameters with which each family can be made; what they are does not matter here.
PARAMETERS: dict[str, dict[str, object]] = {
    "certifiedScan": {"maxOmittedMass": "0.1"},
    "clusterKv": {"tokensPerCluster": 8, "sealTokens": 16, "clustersPerSeal": 2},
    "emLlm": {"window": 16, "gamma": "1", "maxEventTokens": 32},
    "infLlm": {"unitTokens": 8, "representatives": 2},
    "infinigen": {"partialDimensions": 4, "alpha": "4"},
    "retrievalAttention": {"buildNeighbours": 8, "searchWidth": 16, "outDegree": 4},
    "magicPig": {"hashBits": 4, "tables": 10},
    "pqcache": {"subspaces": 2, "bits": 2},
    "quest": {"pageTokens": 16},
    "sparq": {"dimensions": 4},
    "squeezedAttention": {"clusters": 4, "threshold": "0.1"},
}


OF_VARIANTS: dict[tuple[str, str], dict[str, object]] = {
    ("retrievalAttention", "retroInfer"): {
        "tokensPerCluster": 4,
        "segmentTokens": 16,
        "estimatedClusters": 2,
    },
}
"""Where a variant takes other parameters than its family."""


def variants(family: str) -> list[str]:
    """Of a family, as the vocabulary has them; an empty one where it has none."""
    block = next(field for field in KVSelectorSpec.model_fields.values() if field.alias == family)
    parameters = next(one for one in get_args(block.annotation) if one is not type(None))
    field = parameters.model_fields.get("variant")
    if field is None:
        return [""]
    kinds = [one for one in (field.annotation, *get_args(field.annotation)) if isinstance(one, type)]
    return [one.value for kind in kinds if issubclass(kind, StrEnum) for one in kind]


CASES = [(family, variant) for family in sorted(PARAMETERS) for variant in variants(family)]


@pytest.mark.parametrize("family, variant", CASES, ids=[f"{one}-{two}".rstrip("-") for one, two in CASES])
def test_the_operator_states_the_facts_of_each_family_and_variant(family: str, variant: str) -> None:
    parameters = dict(OF_VARIANTS.get((family, variant), PARAMETERS[family]))
    if variant:
        parameters["variant"] = variant
    facts = registry.make_family(selector(family, parameters, {"tokens": 64}), SMALL, 16).facts
    spec = {"family": family, family: parameters, "budget": {"tokens": 64}}
    declared = facts_of(spec)
    assert declared is not None
    assert facts.family == family
    assert declared.guarantee == facts.guarantee.value
    assert sorted(declared.needs) == sorted(need.value for need in facts.needs)
    assert declared.appendable == facts.appendable
    assert declared.estimates == facts.estimates
    assert refusal(spec) is None
    gated = refusal({**spec, "gate": {"maxEstimatedOmittedMass": "0.1", "widenSteps": 2}})
    assert (gated is None) == facts.estimates


def test_every_family_is_declared_and_every_made_one_is_tried_here() -> None:
    assert set(FAMILIES) == {family.value for family in Family}
    assert set(PARAMETERS) == set(registry.FAMILIES)
    assert set(IMPLEMENTED) == set(registry.FAMILIES)
    assert set(VARIANTS) <= set(CASES)
    assert {("sparq", "llamaCpp"), ("sparq", "sparF"), ("retrievalAttention", "retroInfer")} <= set(CASES)


def test_what_is_told_of_time_is_what_the_page_has_measured() -> None:
    page = (Path(__file__).parents[3] / TIMED_SOURCE).read_text()
    table = page.split(f"### {TIMED_ROWS:,} rows")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {row[0]: row[-1] for row in rows} == TIMES_DENSE


@pytest.mark.parametrize(
    "family, variant, row",
    [
        ("quest", "", "quest"),
        ("quest", "evaluation", "quest, evaluation"),
        ("sparq", "sparF", "sparq, sparF"),
        ("sparq", "paper", "sparq"),
        ("retrievalAttention", "retroInfer", "retroInfer"),
        ("retrievalAttention", "paper", "retrievalAttention"),
        ("magicPig", "referenceCode", "magicPig"),
        ("fromTheFuture", "", ""),
    ],
)
def test_a_variant_is_told_by_its_own_time(family: str, variant: str, row: str) -> None:
    said = slower({"family": family, family: {"variant": variant}})
    assert (f" {TIMES_DENSE[row]} times " in said) if row else said == ""


def test_a_variant_is_in_the_table_only_if_it_is_another_promise() -> None:
    assert all(facts != FAMILIES[family] for (family, _), facts in VARIANTS.items())


RANDOMISED = ("magicPig", "pqcache", "squeezedAttention")


def test_families_that_draw_are_those_that_say_so() -> None:
    draws = {
        family
        for family, parameters in PARAMETERS.items()
        if registry.make_family(selector(family, parameters, {"tokens": 64}), SMALL, 16).facts.randomised
    }
    assert draws == set(RANDOMISED)


@pytest.mark.parametrize("family", RANDOMISED)
def test_the_seed_that_a_manifest_declares_is_what_a_session_draws_with(family: str) -> None:
    """Through a session's index: the same seed gives the same index and selection, another seed others."""
    k, v = rows_of(4, 64)
    receipts = []
    for seed in (7, 7, 8):
        declared = selector(family, PARAMETERS[family], {"tokens": 16}, seed=seed)
        index = LiveFamily(declared, SMALL, 16).index(b"s" * 32, 1)
        index.append(0, k, v)
        index.decode()
        receipt = index.select(query_of(1), 64, SMALL.scale).receipt
        assert receipt is not None
        assert receipt.seed == seed
        receipts.append(repr(replace(receipt, selector_digest="", index_digest="", seed=0, source=SOURCE)))
    assert receipts[0] == receipts[1] != receipts[2]
