"""From resources to the manifest: what is taken over, what is filled in, what is refused and naming what."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_crds.compile import CompileError, CompileReason, compile_manifest, compile_model
from kvtier_crds.manifest import (
    Checksum,
    Exactness,
    Fallback,
    Medium,
    RuntimeManifest,
    TierRole,
    model_fingerprint,
)
from kvtier_crds.models import KVSelector, TierClass
from tests.unit.crds.crds_samples import UID, cache, example, selector, tier_classes


def _compile(cache_spec: dict[str, Any] | None = None, chosen: KVSelector | None = None) -> RuntimeManifest:
    return compile_manifest(cache(**(cache_spec or {})), UID, "serving", tier_classes(), chosen)


def test_the_baseline_of_the_example() -> None:
    manifest = _compile().exact()
    assert manifest.device_kind == "simulated"
    assert (manifest.tenancy.namespace, manifest.tenancy.cache_uid) == ("serving", UID)
    assert (manifest.page_tokens, manifest.chunk_tokens) == (16, 256)
    assert [(t.tier_class_name, t.medium, t.role, t.budget_bytes, t.checksum) for t in manifest.tiers] == [
        ("gpu-sim", Medium.GPU, TierRole.RESIDENT, 64 * 2**20, Checksum.XXH3),
        ("cpu-dram", Medium.CPU, TierRole.RESIDENT, 128 * 2**20, Checksum.XXH3),
        ("nvme-local", Medium.NVME, TierRole.BACKING, 2 * 2**30, Checksum.XXH3),
    ]
    assert {tier.codec for tier in manifest.tiers} == {"identity"}
    assert manifest.placement.policy == "recency"
    assert manifest.selector is None
    assert manifest.contract.exactness is Exactness.EXACT
    assert manifest.contract.allowed_fallbacks == (Fallback.WIDEN, Fallback.RECOMPUTE, Fallback.POSTPONE)
    assert RuntimeManifest.parse(manifest.canonical()) == manifest


def test_a_candidate_differs_from_the_baseline_only_by_selector_and_contract() -> None:
    candidate, baseline = _compile(chosen=selector()), _compile().exact()
    assert candidate.selector is not None
    assert candidate.selector.family == "quest"
    assert dict(candidate.selector.parameters) == {"pageTokens": 16}
    assert candidate.selector.budget.tokens == 64
    assert candidate.selector.persistent_rows.sink == 4
    assert candidate.selector.dense_layers == (0, 1)
    assert candidate.exact() == baseline
    assert candidate.digest() != baseline.digest()


def test_quest_takes_its_page_from_the_cache() -> None:
    chosen = selector(quest={}, budget={"tokens": 64})
    manifest = compile_manifest(cache(pageTokens=32), UID, "serving", tier_classes(), chosen)
    assert manifest.selector is not None
    assert manifest.selector.parameters["pageTokens"] == 32


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"budget": {"tokens": 64}}, {"budget": {"tokens": 64, "capPolicy": "truncate"}}),
        ({"denseLayers": [1, 0]}, {"denseLayers": [0, 1]}),
        ({"gate": {"minConfidence": "90%"}}, {"gate": {"minConfidence": "0.9"}}),
        ({"budget": {"bytes": "64Ki"}}, {"budget": {"bytes": 65536}}),
    ],
    ids=["default", "order", "percent", "quantity"],
)
def test_the_same_selector_written_otherwise_has_the_same_digest(
    a: dict[str, Any], b: dict[str, Any]
) -> None:
    assert _compile(chosen=selector(**a)).digest() == _compile(chosen=selector(**b)).digest()


@pytest.mark.parametrize(
    "spec",
    [
        {"poolRef": {"name": "other"}},
        {"suspend": True},
        {"sessions": {"ttl": "2h"}},
        {"admission": {"queue": 7}},
        {"deletion": {"policy": "retain"}},
        {"keySecretRef": {"name": "key"}},
        {"selectorRef": {"name": "quest-64"}},
    ],
    ids=lambda spec: next(iter(spec)),
)
def test_fields_that_shape_no_answer_leave_the_digest(spec: dict[str, Any]) -> None:
    assert _compile(spec).digest() == _compile().digest()


@pytest.mark.parametrize(
    "spec",
    [
        {"pageTokens": 32},
        {"chunkTokens": 512},
        {"tiers": [{"tierClassName": "gpu-sim", "budget": "64Mi"}]},
        {"tiers": [{"tierClassName": "cpu-dram", "budget": "64Mi"}]},
        {"placement": {"policy": "recency", "parameters": {"a": "1"}}},
        {"contract": {"exactness": "approximate", "tolerance": "0.002"}},
        {"contract": {"exactness": "exact"}},
    ],
    ids=["page", "chunk", "tiers", "media", "placement", "tolerance", "exactness"],
)
def test_fields_that_shape_answers_or_placement_move_the_digest(spec: dict[str, Any]) -> None:
    assert _compile(spec).digest() != _compile().digest()


def test_another_namespace_or_uid_is_another_manifest() -> None:
    digests = {
        compile_manifest(cache(), uid, namespace, tier_classes(), None).digest()
        for uid, namespace in ((UID, "serving"), (UID, "other"), (UID[::-1], "serving"))
    }
    assert len(digests) == 3


def test_a_real_gpu_never_shares_a_digest_with_a_simulated_one() -> None:
    classes = tier_classes()
    document = example("TierClass", "gpu-sim")
    document["spec"]["deviceKind"] = "cuda-sm90"
    real = classes | {"gpu-sim": TierClass.model_validate(document)}
    simulated = compile_manifest(cache(), UID, "serving", classes, None)
    assert compile_manifest(cache(), UID, "serving", real, None).digest() != simulated.digest()


def test_the_first_lossless_codec_holds_exact_rows() -> None:
    document = example("TierClass", "gpu-sim")
    document["spec"]["capabilities"]["codecs"] = [
        {"name": "fp8", "lossless": False},
        {"name": "lz4", "lossless": True},
        {"name": "identity", "lossless": True},
    ]
    classes = tier_classes() | {"gpu-sim": TierClass.model_validate(document)}
    assert compile_manifest(cache(), UID, "serving", classes, None).tiers[0].codec == "lz4"


def _refused(*args: Any) -> CompileError:
    with pytest.raises(CompileError) as refused:
        compile_manifest(*args)
    return refused.value


def test_a_missing_tier_class_is_named() -> None:
    classes = tier_classes()
    del classes["nvme-local"], classes["cpu-dram"]
    error = _refused(cache(), UID, "serving", classes, None)
    assert error.reason is CompileReason.TIER_CLASS_MISSING
    assert error.reference == "TierClass cpu-dram"
    assert "cpu-dram, nvme-local" in error.message


def test_a_selector_on_an_exact_cache_is_refused_with_both_names() -> None:
    error = _refused(cache(contract={"exactness": "exact"}), UID, "serving", tier_classes(), selector())
    assert error.reason is CompileReason.CONTRACT_FORBIDS
    assert "quest-64" in error.message
    assert "chat" in error.message


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"denseLayers": [0, 30]}, ["denseLayers", "30", "0 to 29"]),
        ({"quest": {"pageTokens": 24}, "budget": {"tokens": 64}}, ["boxes of 24", "chunkTokens 256"]),
        ({"quest": {}, "budget": {"tokens": 8}}, ["8 rows", "box of 16"]),
        ({"quest": {}, "budget": {"bytes": "23Ki"}}, ["23Ki bytes", "box of 24576"]),
    ],
    ids=["dense-layers", "page", "budget", "bytes"],
)
def test_a_selector_that_does_not_fit_the_cache_is_refused_with_numbers(
    spec: dict[str, Any], words: list[str]
) -> None:
    error = _refused(cache(), UID, "serving", tier_classes(), selector(**spec))
    assert error.reason is CompileReason.SELECTOR_GEOMETRY
    assert all(word in error.message for word in words), error.message


def test_gpu_tiers_of_two_device_kinds_are_refused() -> None:
    document = example("TierClass", "gpu-sim")
    document["metadata"]["name"] = "gpu-real"
    document["spec"]["deviceKind"] = "cuda-sm90"
    classes = tier_classes() | {"gpu-real": TierClass.model_validate(document)}
    both = cache(tiers=[{"tierClassName": name, "budget": "1Mi"} for name in ("gpu-sim", "gpu-real")])
    error = _refused(both, UID, "serving", classes, None)
    assert error.reason is CompileReason.TIER_INCAPABLE
    assert "gpu-real is cuda-sm90" in error.message


def test_a_class_without_a_lossless_codec_is_refused() -> None:
    document = example("TierClass", "gpu-sim")
    document["spec"]["capabilities"]["codecs"] = [{"name": "fp8", "lossless": False}]
    classes = tier_classes() | {"gpu-sim": TierClass.model_validate(document)}
    assert _refused(cache(), UID, "serving", classes, None).reference == "TierClass gpu-sim"


@pytest.mark.parametrize(
    ("family", "block", "expected"),
    [
        (
            "sparq",
            {"dimensions": 16},
            {"dimensions": 16, "meanReallocation": True, "variant": "paper"},
        ),
        ("infinigen", {"partialDimensions": 8, "alpha": "5"}, {"partialDimensions": 8, "alpha": "5"}),
        ("pqcache", {"subspaces": 2, "bits": 6}, {"subspaces": 2, "bits": 6, "iterations": 25}),
        (
            "retrievalAttention",
            {"buildNeighbours": 32, "searchWidth": 64, "outDegree": 16},
            {"variant": "paper", "buildNeighbours": 32, "searchWidth": 64, "outDegree": 16},
        ),
        (
            "squeezedAttention",
            {"clusters": 8, "threshold": "0.15"},
            {
                "clusters": 8,
                "threshold": "0.15",
                "levels": 1,
                "iterations": 300,
                "scoreScale": "scaled",
            },
        ),
        (
            "magicPig",
            {"hashBits": 10, "tables": 150},
            {"hashBits": 10, "tables": 150, "minTables": 2, "meanTokens": 4096, "variant": "paper"},
        ),
        (
            "infLlm",
            {"unitTokens": 128, "representatives": 4},
            {"unitTokens": 128, "representatives": 4, "variant": "paper"},
        ),
        (
            "emLlm",
            {"window": 16, "gamma": "1", "maxEventTokens": 64},
            {
                "window": 16,
                "gamma": "1",
                "refinement": "none",
                "contiguityRadius": 0,
                "minEventTokens": 1,
                "maxEventTokens": 64,
                "representatives": 1,
                "variant": "paper",
            },
        ),
        (
            "clusterKv",
            {"tokensPerCluster": 80, "sealTokens": 320, "clustersPerSeal": 4},
            {
                "tokensPerCluster": 80,
                "sealTokens": 320,
                "clustersPerSeal": 4,
                "iterations": 20,
                "memberOrder": "position",
            },
        ),
        ("certifiedScan", {"maxOmittedMass": "0.01"}, {"maxOmittedMass": "0.01"}),
    ],
)
def test_every_family_compiles_its_own_block(
    family: str, block: dict[str, Any], expected: dict[str, Any]
) -> None:
    document = example("KVSelector", "quest-64")
    del document["spec"]["quest"]
    document["spec"] |= {"family": family, family: block}
    manifest = _compile(chosen=KVSelector.model_validate(document))
    assert manifest.selector is not None
    assert manifest.selector.family == family
    assert dict(manifest.selector.parameters) == expected


def test_a_selector_without_its_block_says_so() -> None:
    document = example("KVSelector", "quest-64")
    del document["spec"]["quest"]
    with pytest.raises(ValueError, match=r"spec\.quest is absent"):
        KVSelector.model_validate(document).spec.parameters()


def test_engines_can_compute_the_fingerprint_from_the_spec() -> None:
    assert model_fingerprint(compile_model(cache().spec.model)) == model_fingerprint(_compile().model)
