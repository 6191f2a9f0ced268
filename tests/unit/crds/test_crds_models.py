"""The reading models: tolerant of what they do not know, strict about what they do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from kvtier_crds.generate import schema_of
from kvtier_crds.models import KINDS, KVCache, KVNode, KVRollout, Resource
from kvtier_crds.models.common import Json, short_digest
from kvtier_crds.models.stages import StageName
from tests.unit.crds.crds_samples import BY_KIND, example, examples


@pytest.mark.parametrize("document", examples(), ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_examples_read_and_write_back(document: dict[str, Any]) -> None:
    model = BY_KIND[document["kind"]]
    parsed = model.model_validate(document)
    again = model.model_validate(json.loads(parsed.model_dump_json(by_alias=True, exclude_none=True)))
    assert again == parsed


def test_there_is_an_example_of_every_kind() -> None:
    assert {document["kind"] for document in examples()} == {kind.KIND for kind in KINDS}


def test_unknown_fields_are_ignored_when_reading() -> None:
    document = example("KVCache", "chat")
    document["spec"]["fromTheFuture"] = {"a": 1}
    document["spec"]["model"]["alsoNew"] = True
    document["status"] = {"fence": 3, "newer": []}
    parsed = KVCache.model_validate(document)
    assert parsed.status is not None
    assert parsed.status.fence == 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "tiers"), []),
        (("spec", "tiers", 0, "budget"), "lots"),
        (("spec", "model", "geometry", "dtype"), "fp8"),
        (("spec", "model", "artifactDigest"), "sha256:x"),
        (("spec", "contract", "tolerance"), "1e-3"),
        (("spec", "sessions", "ttl"), "1 hour"),
        (("spec", "pageTokens"), 0),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_values_outside_the_schema_are_refused_when_reading(path: tuple[str | int, ...], value: Any) -> None:
    document = example("KVCache", "chat")
    cursor: Any = document
    for key in path[:-1]:
        cursor = cursor[key]
    cursor[path[-1]] = value
    with pytest.raises(ValidationError):
        KVCache.model_validate(document)


def _defaulted(value: Any, schema: Json) -> Any:
    """What the API server makes of a value: the structural defaulting algorithm."""
    if isinstance(value, dict) and "properties" in schema:
        filled = dict(value)
        for name, child in schema["properties"].items():
            if name not in filled and "default" in child:
                filled[name] = child["default"]
            if name in filled:
                filled[name] = _defaulted(filled[name], child)
        return filled
    if isinstance(value, list) and "items" in schema:
        return [_defaulted(item, schema["items"]) for item in value]
    return value


def _bare(value: Any, schema: Json) -> Any:
    """The value without any field that has a default."""
    if isinstance(value, dict) and "properties" in schema:
        properties = schema["properties"]
        return {
            name: _bare(item, properties.get(name, {}))
            for name, item in value.items()
            if "default" not in properties.get(name, {})
        }
    if isinstance(value, list) and "items" in schema:
        return [_bare(item, schema["items"]) for item in value]
    return value


@pytest.mark.parametrize("document", examples(), ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_schema_defaults_equal_pydantic_defaults(document: dict[str, Any]) -> None:
    model: type[Resource] = BY_KIND[document["kind"]]
    schema = schema_of(model)
    bare = {**document, "spec": _bare(document["spec"], schema["properties"]["spec"])}
    served = {**bare, "spec": _defaulted(bare["spec"], schema["properties"]["spec"])}
    assert model.model_validate(served) == model.model_validate(bare)


def test_conditions_are_found_by_type() -> None:
    document = example("KVNode", "node-a")
    document["status"] = {
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Serving",
                "message": "",
                "lastTransitionTime": "2026-11-29T10:00:00Z",
                "observedGeneration": 2,
            }
        ],
        "tiers": [
            {"class": "gpu-sim", "simulated": True, "probes": {"oDirect": True, "fsyncSeconds": "0.0004"}}
        ],
        "bootID": "b-1",
    }
    status = KVNode.model_validate(document).status
    assert status is not None
    ready = status.condition("Ready")
    assert ready is not None
    assert ready.observed_generation == 2
    assert status.condition("Draining") is None
    assert status.tiers[0].class_name == "gpu-sim"
    assert status.tiers[0].probes is not None
    assert status.tiers[0].probes.o_direct is True
    assert status.boot_id == "b-1"


def test_rollout_defaults_are_those_of_the_contract() -> None:
    document = example("KVRollout", "quest-on-chat")
    keep = ("cacheRef", "candidate", "stages", "gates")
    document["spec"] = {name: document["spec"][name] for name in keep}
    spec = KVRollout.model_validate(document).spec
    assert (spec.lease_ttl, spec.progress_deadline, spec.ttl_after_finished) == ("60s", "72h", "720h")
    assert (spec.evidence.settle, spec.evidence.warmup) == ("120s", "60s")
    assert (spec.error_budget.false_promotion, spec.error_budget.false_rollback) == ("0.05", "0.01")
    assert (spec.on_lease_expired, spec.on_insufficient) == ("Resume", "Hold")
    canary = spec.stage(StageName.CANARY)
    assert canary is not None
    assert canary.traffic_fraction == "5%"


def test_short_digest_is_twelve_hex_digits() -> None:
    assert short_digest("sha256:" + "0123456789abcdef" * 4) == "0123456789ab"
