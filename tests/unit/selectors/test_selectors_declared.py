"""What the operator tells of a family is what the family says of itself, and what it accepts is what runs.

They may not import each other, so this holds them together."""

from __future__ import annotations

import pytest

from kvtier_core.selectors.families import registry
from kvtier_crds.models.families import Family
from kvtier_operator.reconcile.kvselector import FAMILIES
from kvtier_operator.selectors import ESTIMATING, IMPLEMENTED
from tests.unit.selectors.selector_cases import SMALL, selector

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


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_the_operator_states_the_familys_own_facts(name: str) -> None:
    facts = registry.make_family(selector(name, PARAMETERS[name], {"tokens": 64}), SMALL, 16).facts
    declared = FAMILIES[name]
    assert facts.family == name
    assert declared.guarantee == facts.guarantee.value
    assert sorted(declared.needs) == sorted(need.value for need in facts.needs)
    assert declared.appendable == facts.appendable
    assert (name in ESTIMATING) == facts.estimates
    assert name in IMPLEMENTED


def test_every_family_is_declared_and_every_made_one_is_tried_here() -> None:
    assert set(FAMILIES) == {family.value for family in Family}
    assert set(PARAMETERS) == set(registry.FAMILIES)
    assert set(IMPLEMENTED) == set(registry.FAMILIES)
