"""The example of each family and of each variant that is another method: accepted, compiled and made."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_core.selectors.contract import Shape
from kvtier_core.selectors.families.registry import make_family
from kvtier_crds.compile import compile_manifest
from kvtier_crds.models.families import Family
from kvtier_crds.models.kvselector import KVSelector
from kvtier_operator.selectorfacts import VARIANTS, variant_of
from kvtier_operator.selectors import refusal
from tests.unit.crds.crds_samples import cache, examples, tier_classes

SELECTORS = [one for one in examples() if one["kind"] == "KVSelector"]
SHAPE = Shape(query_heads=32, kv_heads=8, head_dim=128, scale=128**-0.5)
LONG = 65_536


@pytest.mark.parametrize("document", SELECTORS, ids=lambda one: str(one["metadata"]["name"]))
def test_an_example_is_what_agents_run(document: dict[str, Any]) -> None:
    assert refusal(document["spec"]) is None
    declared = cache(contract={"exactness": "approximate"})
    chosen = KVSelector.model_validate(document)
    manifest = compile_manifest(declared, "uid-1", "serving", tier_classes(), chosen)
    assert manifest.selector is not None
    family = make_family(manifest.selector, SHAPE, manifest.page_tokens)
    assert family.facts.family == document["spec"]["family"]
    assert family.omits(LONG), "it would leave out rows of a long context"


def test_every_family_and_every_method_under_a_variants_name_has_one() -> None:
    shown = {(one["spec"]["family"], variant_of(one["spec"])) for one in SELECTORS}
    assert {family for family, _ in shown} == {family.value for family in Family}
    assert set(VARIANTS) <= shown
    assert {("sparq", "llamaCpp"), ("sparq", "sparF")} <= shown
