"""The manifest's encoding: one configuration, one byte string, one digest."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvtier_crds.beside import beside, changed_fields, needs_own_engine, needs_rebuilding
from kvtier_crds.canonical import Parameters, canonical_decimal
from kvtier_crds.compile import compile_manifest
from kvtier_crds.manifest import (
    MAX_MANIFEST_BYTES,
    Environment,
    Fallback,
    ManifestError,
    ManifestReason,
    MeasuredTier,
    RuntimeManifest,
    model_fingerprint,
)
from tests.unit.crds.crds_samples import (
    UID,
    bounded_document,
    cache,
    full_document,
    full_manifest,
    selector,
    tier_classes,
)

GOLDEN = Path(__file__).parent / "golden"


def _golden_manifests() -> dict[str, RuntimeManifest]:
    chat, classes = cache(), tier_classes()
    quest = compile_manifest(chat, UID, "serving", classes, selector())
    return {
        "chat-baseline": compile_manifest(chat, UID, "serving", classes, None).exact(),
        "chat-quest-64": quest,
        "every-field": full_manifest(),
        "every-field-2": RuntimeManifest.model_validate(bounded_document()),
    }


@pytest.mark.parametrize("name", ["chat-baseline", "chat-quest-64", "every-field", "every-field-2"])
def test_golden_vectors_have_not_moved(name: str) -> None:
    manifest = _golden_manifests()[name]
    recorded = json.loads((GOLDEN / "digests.json").read_text(encoding="utf-8"))[name]
    data = (GOLDEN / f"{name}.json").read_bytes()
    assert manifest.canonical() == data
    assert manifest.digest() == recorded["digest"] == "sha256:" + hashlib.sha256(data).hexdigest()
    assert model_fingerprint(manifest.model) == recorded["fingerprint"]
    assert RuntimeManifest.parse(data) == manifest


@pytest.mark.parametrize("name", ["chat-baseline", "chat-quest-64", "every-field", "every-field-2"])
def test_golden_bytes_follow_the_written_encoding(name: str) -> None:
    """An encoder of its own, from the docstring alone, so that other languages can follow it."""
    data = (GOLDEN / f"{name}.json").read_bytes()

    def encode(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f'"{key}":{encode(value[key])}' for key in sorted(value)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(encode(item) for item in value) + "]"
        if value is None:
            return "null"
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value) if isinstance(value, int) else f'"{value}"'

    assert encode(json.loads(data)).encode() == data


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _replaced(document: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    cursor: Any = changed
    for key in path[:-1]:
        cursor = cursor[key]
    cursor[path[-1]] = value
    return changed


_OTHER: dict[str, Any] = {
    "numericsVersion": "f32-chunk-merge/9",
    "deviceKind": "simulated",
    "dtype": "bfloat16",
    "positionContract": "preRope",
    "medium": "cpu",
    "role": "staging",
    "checksum": "crc32c",
    "capPolicy": "error",
    "exactness": "exact",
    "layers": 31,
    "queryHeads": 12,
    "kvHeads": 9,
    "pageTokens": 32,
    "chunkTokens": 512,
    "policy": "fifo",
}


def _other_value(path: tuple[str | int, ...], value: Any) -> Any:
    last = str(path[-1])
    if path[-2:-1] == ("parameters",) and last == "pageTokens":
        return 8
    if last in _OTHER:
        return _OTHER[last]
    if path[-2:-1] == ("allowedFallbacks",):
        return "postpone"
    if path[-2:-1] == ("denseLayers",):
        return 9
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str) and value.startswith("sha256:"):
        return "sha256:" + "0f" * 32
    if isinstance(value, str) and value.replace(".", "").isdigit():
        return "3.25"
    return f"{value}x"


_LEAVES = [
    (path, value) for path, value in _leaves(bounded_document()) if value is not None and path != ("schema",)
]
_NEEDS_EXACT_COMPANIONS = {("contract", "exactness")}


@pytest.mark.parametrize(("path", "value"), _LEAVES, ids=[".".join(map(str, path)) for path, _ in _LEAVES])
def test_no_field_changes_without_the_digest(path: tuple[str | int, ...], value: Any) -> None:
    document = _replaced(bounded_document(), path, _other_value(path, value))
    if path in _NEEDS_EXACT_COMPANIONS:
        document["selector"] = None
        document["contract"]["allowedFallbacks"] = []
        before = copy.deepcopy(document)
        before["contract"]["exactness"] = "approximate"
        assert RuntimeManifest.model_validate(document).digest() != (
            RuntimeManifest.model_validate(before).digest()
        )
        return
    before = RuntimeManifest.model_validate(bounded_document())
    assert RuntimeManifest.model_validate(document).digest() != before.digest()


def test_every_field_of_the_models_is_in_the_sample() -> None:
    """So that a new field cannot escape the test above."""
    defs = RuntimeManifest.model_json_schema(by_alias=True)
    names = {name for part in (defs, *defs["$defs"].values()) for name in part.get("properties", {})}
    present = {str(key) for path, _ in _leaves(bounded_document()) for key in path if isinstance(key, str)}
    assert names <= present
    assert json.loads(full_manifest().canonical()) == full_document()
    assert json.loads(RuntimeManifest.model_validate(bounded_document()).canonical()) == bounded_document()


def test_bounds_are_what_the_second_schema_adds_and_nothing_else() -> None:
    bounded = RuntimeManifest.model_validate(bounded_document())
    assert full_manifest().admitting(bounded.admission) == bounded
    assert bounded.admitting(None) == full_manifest()
    assert RuntimeManifest.parse(bounded.canonical()) == bounded
    assert changed_fields(full_manifest(), bounded) == ("admission",)
    assert needs_own_engine(full_manifest(), bounded) and not needs_rebuilding(full_manifest(), bounded)
    assert beside(full_manifest(), bounded) == bounded
    for wrong in (
        full_document() | {"schema": "kvtier.dev/manifest/v2", "admission": None},
        bounded_document() | {"schema": "kvtier.dev/manifest/v1"},
    ):
        with pytest.raises(ValidationError, match="admission is written under"):
            RuntimeManifest.model_validate(wrong)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "rope", "scaling"), None),
        (("model", "adapters"), []),
        (("selector",), None),
        (("selector", "gate"), None),
        (("selector", "denseLayers"), []),
        (("selector", "gate", "minConfidence"), None),
        (("placement", "parameters"), {}),
        (("selector", "budget"), {"tokens": None, "bytes": 64, "units": None, "capPolicy": "truncate"}),
        (("selector", "budget"), {"tokens": None, "bytes": None, "units": 64, "capPolicy": "truncate"}),
        (("contract", "allowedFallbacks"), ["widen"]),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_absence_changes_the_digest_too(path: tuple[str | int, ...], value: Any) -> None:
    changed = RuntimeManifest.model_validate(_replaced(full_document(), path, value))
    assert changed.digest() != full_manifest().digest()


def test_the_order_of_tiers_and_adapters_counts() -> None:
    for key in ("tiers",):
        document = full_document()
        document[key].reverse()
        assert RuntimeManifest.model_validate(document).digest() != full_manifest().digest()
    document = full_document()
    document["model"]["adapters"].reverse()
    assert RuntimeManifest.model_validate(document).digest() != full_manifest().digest()


def test_environment_is_beside_the_manifest() -> None:
    digest = full_manifest().digest()
    environments = [
        Environment(
            image=image, agent_version=version, tiers=(MeasuredTier(tier_class_name="t", simulated=sim),)
        )
        for image, version, sim in (("a:1", "0.1", True), ("b:2", "0.2", False))
    ]
    assert environments[0].canonical() != environments[1].canonical()
    assert full_manifest().digest() == digest
    shared = set(Environment.model_fields) & set(RuntimeManifest.model_fields)
    assert shared == {"tiers"}
    for field in ("image", "agentVersion", "environment"):
        with pytest.raises(ValidationError):
            RuntimeManifest.model_validate(full_document() | {field: "x"})


_names = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
_decimals = st.decimals(min_value=0, max_value=10**6, places=4).map(str)
_scalars = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.text(max_size=8).filter(str.isprintable))


@st.composite
def _documents(draw: st.DrawFn) -> dict[str, Any]:
    """Manifests around the full one: any subset of fields drawn anew."""
    document = full_document()
    page = draw(st.sampled_from([8, 16]))
    heads = draw(st.integers(1, 4))
    document |= {"pageTokens": page, "chunkTokens": page * draw(st.integers(1, 4))}
    document["deviceKind"] = draw(st.sampled_from(["simulated", "cuda-sm90"]))
    document["tenancy"] = {"namespace": draw(_names), "cacheUID": draw(_names)}
    document["model"]["geometry"] |= {"kvHeads": heads, "queryHeads": heads * draw(st.integers(1, 3))}
    document["model"]["rope"]["theta"] = draw(_decimals)
    document["placement"]["parameters"] = draw(st.dictionaries(_names, _scalars, max_size=3))
    document["contract"]["tolerance"] = draw(_decimals)
    document["contract"]["allowedFallbacks"] = draw(
        st.lists(st.sampled_from([f.value for f in Fallback]), max_size=4)
    )
    document["selector"]["denseLayers"] = draw(st.lists(st.integers(0, 29), max_size=4))
    if draw(st.booleans()):
        document["selector"] = None
    return document


@given(_documents())
@settings(max_examples=150, deadline=None)
def test_parse_reads_back_what_canonical_wrote(document: dict[str, Any]) -> None:
    manifest = RuntimeManifest.model_validate(document)
    again = RuntimeManifest.parse(manifest.canonical())
    assert again == manifest
    assert hash(again) == hash(manifest)
    assert again.canonical() == manifest.canonical()


@given(_documents(), _documents())
@settings(max_examples=150, deadline=None)
def test_equal_manifests_and_equal_digests_are_the_same_thing(a: dict[str, Any], b: dict[str, Any]) -> None:
    first, second = RuntimeManifest.model_validate(a), RuntimeManifest.model_validate(b)
    assert (first == second) == (first.digest() == second.digest())


@given(_documents(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_key_order_and_spaces_are_refused(document: dict[str, Any], random: Any) -> None:
    manifest = RuntimeManifest.model_validate(document)
    data = json.loads(manifest.canonical())

    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        keys = list(value)
        random.shuffle(keys)
        return {key: shuffled(value[key]) for key in keys}

    variants = [
        json.dumps(data, sort_keys=True).encode(),
        json.dumps(data, sort_keys=True, indent=1).encode(),
        json.dumps(shuffled(data), separators=(",", ":"), ensure_ascii=False).encode(),
        manifest.canonical() + b"\n",
    ]
    for variant in variants:
        if variant == manifest.canonical():
            continue
        with pytest.raises(ManifestError) as refused:
            RuntimeManifest.parse(variant)
        assert refused.value.reason is ManifestReason.NOT_CANONICAL


def _canonical_with(old: bytes, new: bytes) -> bytes:
    data = full_manifest().canonical()
    assert old in data
    return data.replace(old, new, 1)


REFUSED = {
    "not-json": (b"{", ManifestReason.MALFORMED),
    "not-utf8": (b'{"schema":"\xff"}', ManifestReason.MALFORMED),
    "list": (b"[]", ManifestReason.MALFORMED),
    "number": (b"7", ManifestReason.MALFORMED),
    "nested-too-deep": (b'{"a":' * 20000 + b"1" + b"}" * 20000, ManifestReason.MALFORMED),
    "empty": (b"{}", ManifestReason.UNKNOWN_SCHEMA),
    "newer-schema": (_canonical_with(b"manifest/v1", b"manifest/v3"), ManifestReason.UNKNOWN_SCHEMA),
    "bounds-under-the-first": (
        _canonical_with(b'{"chunkTokens"', b'{"admission":null,"chunkTokens"'),
        ManifestReason.NOT_CANONICAL,
    ),
    "no-bounds-under-the-second": (_canonical_with(b"manifest/v1", b"manifest/v2"), ManifestReason.INVALID),
    "too-large": (b" " * (MAX_MANIFEST_BYTES + 1), ManifestReason.TOO_LARGE),
    "field-missing": (
        _canonical_with(b'"pageTokens":16,"placement"', b'"placement"'),
        ManifestReason.INVALID,
    ),
    "unknown-field": (_canonical_with(b'{"chunkTokens"', b'{"a":1,"chunkTokens"'), ManifestReason.INVALID),
    "integer-as-text": (_canonical_with(b'"layers":30', b'"layers":"30"'), ManifestReason.INVALID),
    "integer-as-float": (_canonical_with(b'"layers":30', b'"layers":30.0'), ManifestReason.INVALID),
    "boolean-as-integer": (
        _canonical_with(b'"interleaved":true', b'"interleaved":1'),
        ManifestReason.INVALID,
    ),
    "integer-as-boolean": (_canonical_with(b'"seed":7', b'"seed":true'), ManifestReason.INVALID),
    "decimal-as-float": (
        _canonical_with(b'"tolerance":"0.001"', b'"tolerance":0.001'),
        ManifestReason.INVALID,
    ),
    "decimal-with-zeros": (
        _canonical_with(b'"tolerance":"0.001"', b'"tolerance":"0.0010"'),
        ManifestReason.NOT_CANONICAL,
    ),
    "decimal-with-exponent": (_canonical_with(b'"0.001"', b'"1e-3"'), ManifestReason.INVALID),
    "default-left-out": (_canonical_with(b',"seed":7', b""), ManifestReason.NOT_CANONICAL),
    "key-twice": (_canonical_with(b'"seed":7', b'"seed":8,"seed":7'), ManifestReason.NOT_CANONICAL),
    "escaped-text": (_canonical_with(b'"quest"', b'"\\u0071uest"'), ManifestReason.NOT_CANONICAL),
    "layers-unsorted": (_canonical_with(b"[0,1]", b"[1,0]"), ManifestReason.NOT_CANONICAL),
    "fallbacks-unsorted": (
        _canonical_with(b'["widen","degrade"]', b'["degrade","widen"]'),
        ManifestReason.NOT_CANONICAL,
    ),
    "tier-twice": (_canonical_with(b'"nvme-local"', b'"gpu-h200"'), ManifestReason.INVALID),
    "no-tiers": (
        json.dumps({**full_document(), "tiers": []}, sort_keys=True, separators=(",", ":")).encode(),
        ManifestReason.INVALID,
    ),
    "heads-uneven": (_canonical_with(b'"kvHeads":3', b'"kvHeads":2'), ManifestReason.INVALID),
    "chunk-uneven": (_canonical_with(b'"chunkTokens":256', b'"chunkTokens":250'), ManifestReason.INVALID),
    "dense-layer-outside": (_canonical_with(b"[0,1]", b"[0,30]"), ManifestReason.INVALID),
    "two-budgets": (_canonical_with(b'"bytes":null', b'"bytes":1'), ManifestReason.INVALID),
    "selector-on-exact": (_canonical_with(b'"approximate"', b'"exact"'), ManifestReason.INVALID),
    "digest-upper-case": (_canonical_with(b"a1a1", b"A1A1"), ManifestReason.INVALID),
    "budget-over-int64": (_canonical_with(b"1099511627776", b"9223372036854775808"), ManifestReason.INVALID),
    "lone-surrogate": (_canonical_with(b'"window":4096', b'"window":"\\ud800"'), ManifestReason.INVALID),
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_bytes_that_are_no_manifest_are_refused_with_a_reason(data: bytes, reason: ManifestReason) -> None:
    with pytest.raises(ManifestError) as refused:
        RuntimeManifest.parse(data)
    assert refused.value.reason is reason
    assert refused.value.message


def test_a_refusal_names_the_field() -> None:
    with pytest.raises(ManifestError, match=r"model\.geometry\.layers"):
        RuntimeManifest.parse(_canonical_with(b'"layers":30', b'"layers":0'))


def test_exact_keeps_everything_but_the_approximation() -> None:
    manifest = full_manifest()
    exact = manifest.exact()
    assert exact.selector is None
    assert exact.contract.exactness == "exact"
    assert exact.contract.allowed_fallbacks == (Fallback.WIDEN,)
    assert exact.exact() == exact
    assert RuntimeManifest.parse(exact.canonical()) == exact
    changed = {"selector", "contract"}
    for name in RuntimeManifest.model_fields:
        assert (getattr(exact, name) == getattr(manifest, name)) == (name not in changed)


def test_the_fingerprint_covers_the_model_block_only() -> None:
    manifest = full_manifest()
    other = RuntimeManifest.model_validate(_replaced(full_document(), ("pageTokens",), 32))
    assert model_fingerprint(other.model) == model_fingerprint(manifest.model)
    for path, value in _LEAVES:
        if path[0] == "model":
            document = _replaced(full_document(), path, _other_value(path, value))
            changed = RuntimeManifest.model_validate(document)
            assert model_fingerprint(changed.model) != model_fingerprint(manifest.model), path


def test_a_manifest_is_immutable_and_copies_whole() -> None:
    manifest = full_manifest()
    with pytest.raises(ValidationError):
        manifest.page_tokens = 32  # type: ignore[misc]
    assert copy.deepcopy(manifest) == manifest
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_parameters_tell_types_apart() -> None:
    assert Parameters({"a": 1}) != Parameters({"a": True})
    assert Parameters({"a": 1}) == Parameters({"a": 1})
    assert hash(Parameters({"a": 1, "b": 2})) == hash(Parameters({"b": 2, "a": 1}))


@pytest.mark.parametrize(
    "items",
    [
        {"a": 1.5},
        {"": 1},
        {"a": None},
        {"ä": 1},
        {"a": 2**63},
        {"a": "x" * 254},
        {str(i): i for i in range(65)},
    ],
    ids=["float", "empty-name", "null", "not-ascii", "over-int64", "long-text", "too-many"],
)
def test_parameters_refuse_what_has_no_canonical_form(items: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="parameter"):
        Parameters(items)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0.0010", "0.001"),
        ("100000.0", "100000"),
        (5, "5"),
        ("0", "0"),
        ("-0", "0"),
        ("-1.50", "-1.5"),
        ("00.1", "0.1"),
    ],
)
def test_decimals_have_one_form(value: Any, text: str) -> None:
    assert canonical_decimal(value) == text


@pytest.mark.parametrize("value", [0.5, True, "1e3", "NaN", "", "-", "1.", ".5", "1_0", "٣", " 1", "1" * 41])
def test_decimals_refuse_other_notations(value: Any) -> None:
    with pytest.raises(ValueError, match=r"decimal|finite"):
        canonical_decimal(value)
