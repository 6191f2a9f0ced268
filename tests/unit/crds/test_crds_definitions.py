"""The generated CRDs: current, structural, bounded, and each rule with an object that breaks it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import yaml
from pydantic import Field

from kvtier_crds import docs, generate
from kvtier_crds.cli import main
from kvtier_crds.models import KINDS, Resource
from kvtier_crds.models.common import Column, Json, Scope, Struct
from tests.unit.crds.crds_samples import CRDS, INVALID, ROOT

KIND_IDS = [kind.KIND for kind in KINDS]


def _walk(schema: Json, path: str) -> Iterator[tuple[str, Json]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _walk(child, f"{path}.{name}")
    for nested in ("items", "additionalProperties"):
        if isinstance(schema.get(nested), dict):
            yield from _walk(schema[nested], f"{path}[]")


@functools.cache
def _nodes(kind: type[Resource]) -> list[tuple[str, Json]]:
    return list(_walk(generate.schema_of(kind), kind.KIND))


def test_checked_in_definitions_are_current() -> None:
    assert generate.drifted(CRDS) == []


def test_checked_in_reference_is_current() -> None:
    assert (ROOT / "docs/reference/api.md").read_text(encoding="utf-8") == docs.render()


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_names_and_subresources_follow_the_contract(kind: type[Resource]) -> None:
    text = (CRDS / generate.file_name(kind)).read_text(encoding="utf-8")
    assert text.startswith("# Generated")
    assert "&id0" not in text
    assert not re.search(r"^\s*(- )?[yn]:", text, re.MULTILINE | re.IGNORECASE), (
        "read as a boolean by kubectl"
    )
    spec = yaml.safe_load(text)["spec"]
    assert spec["group"] == "kvtier.dev"
    assert spec["names"]["categories"] == ["kvtier"]
    (version,) = spec["versions"]
    assert version["name"] == "v1alpha1"
    assert version["subresources"] == {"status": {}}
    names = [column["name"] for column in version["additionalPrinterColumns"]]
    assert "Age" in names
    conditions = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert "observedGeneration" in conditions["items"]["properties"]


def test_a_status_that_one_writer_writes_whole_has_one_owner() -> None:
    """Of a KVCache's the fence and what goes with it have another writer than the rest."""
    whole = {
        kind.KIND
        for kind in KINDS
        if generate.schema_of(kind)["properties"]["status"].get("x-kubernetes-map-type") == "atomic"
    }
    assert whole == {"KVNode", "KVRollout"}


@pytest.mark.parametrize(
    ("kind", "scope", "short"),
    [
        ("TierClass", "Cluster", "tc"),
        ("AgentPool", "Namespaced", "ap"),
        ("KVNode", "Cluster", "kvn"),
        ("KVCache", "Namespaced", "kvc"),
        ("KVSelector", "Namespaced", "kvs"),
        ("KVRollout", "Namespaced", "kvr"),
    ],
)
def test_scope_and_short_names(kind: str, scope: str, short: str) -> None:
    found = generate.definition(next(one for one in KINDS if kind == one.KIND))["spec"]
    assert (found["scope"], found["names"]["shortNames"]) == (scope, [short])


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_schemas_are_structural_and_bounded(kind: type[Resource]) -> None:
    for path, node in _nodes(kind):
        int_or_string = node.get("x-kubernetes-int-or-string", False)
        assert int_or_string or "type" in node, path
        for banned in (
            "$ref",
            "oneOf",
            "allOf",
            "not",
            "nullable",
            "title",
            "uniqueItems",
            "prefixItems",
            "const",
        ):
            assert banned not in node, (path, banned)
        assert int_or_string or "anyOf" not in node, path
        assert not ("properties" in node and "additionalProperties" in node), path
        if node.get("type") == "array":
            assert "maxItems" in node, path
            assert node["x-kubernetes-list-type"] in ("map", "set", "atomic"), path
        if node.get("type") == "string" and path.count(".") > 1:
            assert {"maxLength", "enum", "format"} & set(node), path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        assert node.get("default", 0) is not None, path


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_map_lists_have_their_keys_required(kind: type[Resource]) -> None:
    for path, node in _nodes(kind):
        for key in node.get("x-kubernetes-list-map-keys", []):
            assert key in node["items"]["required"], (path, key)


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_a_status_has_no_server_defaults(kind: type[Resource]) -> None:
    status = generate.schema_of(kind)["properties"]["status"]
    assert [path for path, node in _walk(status, "status") if "default" in node] == []


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_columns_point_at_fields_that_exist(kind: type[Resource]) -> None:
    paths = {path.removeprefix(kind.KIND) for path, _ in _nodes(kind)}
    for column in kind.COLUMNS:
        if "conditions" in column.path or column.path.startswith(".metadata"):
            continue
        assert column.path.replace("[*]", "[]") in paths, column


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_what_has_been_left_alone_is_compared_only_where_a_rule_is_broken(kind: type[Resource]) -> None:
    """Each write of an object evaluates all its rules, a status too, and nearly every object keeps them."""
    compared = [
        rule["rule"]
        for _, node in _nodes(kind)
        for rule in node.get("x-kubernetes-validations", [])
        if rule.get("optionalOldSelf") and "oldSelf.value()" in rule["rule"]
    ]
    assert bool(compared) == (kind.KIND == "KVRollout")
    for rule in compared:
        judged, alone = rule.split(" || (oldSelf.hasValue() && ")
        assert "oldSelf" not in judged and "oldSelf.value()" in alone


@functools.cache
def _messages() -> dict[str, str]:
    """Every rule that runs on create, by message; transition rules are tested against the server."""
    found = {}
    for kind in KINDS:
        for path, node in _nodes(kind):
            for rule in node.get("x-kubernetes-validations", []):
                if "oldSelf" not in rule["rule"] or rule.get("optionalOldSelf"):
                    found[rule["message"]] = path
    return found


@functools.cache
def _expectations() -> list[str]:
    return [path.read_text(encoding="utf-8").splitlines()[0] for path in sorted(INVALID.glob("*.yaml"))]


@pytest.mark.parametrize("message", sorted(_messages()))
def test_every_rule_has_an_invalid_object(message: str) -> None:
    expected = [line.removeprefix("# expect: ") for line in _expectations()]
    dynamic = message.split(", the one named by", 1)[0]
    assert any(part in message or dynamic in part for part in expected), (
        f"no crds/invalid file for: {message}"
    )


def test_each_invalid_object_says_what_is_expected() -> None:
    lines = _expectations()
    assert len(lines) >= 40
    assert all(line.startswith("# expect: ") and len(line) > 20 for line in lines)


@pytest.mark.parametrize("message", sorted(_messages()))
def test_messages_name_a_field(message: str) -> None:
    assert message.startswith(("spec.", "spec ", "metadata.name", "the path", "a quantity"))


class _Unbounded(Struct):
    name: str


class _Recursive(Struct):
    children: Annotated[tuple[_Recursive, ...], Field(max_length=2)] = ()


class _Union(Struct):
    value: int | bool = 0


class _Tuple(Struct):
    pair: tuple[int, int] = (0, 0)


class _AnyMap(Struct):
    values: dict[str, Any] = Field(default={}, max_length=4)


class _Unsized(Struct):
    items: tuple[int, ...] = ()


def _kind_of(spec: type[Struct]) -> type[Resource]:
    class Sample(Resource):
        KIND: ClassVar[str] = "Sample"
        PLURAL: ClassVar[str] = "samples"
        SHORT: ClassVar[str] = "s"
        SCOPE: ClassVar[Scope] = Scope.CLUSTER
        COLUMNS: ClassVar[tuple[Column, ...]] = ()

        spec: Any
        status: Struct | None = None

    Sample.__annotations__["spec"] = spec
    return type("Sample", (Sample,), {"__annotations__": {"spec": spec}, "__module__": __name__})


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (_Unbounded, r"spec\.name: needs maxLength"),
        (_Recursive, "recursive model"),
        (_Union, r"spec\.value: a union"),
        (_Tuple, r"spec\.pair"),
        (_AnyMap, r"spec\.values"),
        (_Unsized, r"spec\.items: needs maxItems"),
    ],
)
def test_models_without_a_structural_schema_are_refused(model: type[Struct], where: str) -> None:
    with pytest.raises(generate.UnstructuralModel, match=where):
        generate.schema_of(_kind_of(model))


def test_the_command_writes_checks_and_names_what_drifted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, reference = tmp_path / "crds", tmp_path / "reference" / "api.md"
    assert main(["generate", "--out", str(out), "--check"]) == 1
    assert main(["docs", "--out", str(reference), "--check"]) == 1
    assert main(["generate", "--out", str(out)]) == 0
    assert main(["docs", "--out", str(reference)]) == 0
    assert main(["generate", "--out", str(out), "--check"]) == 0
    assert main(["docs", "--out", str(reference), "--check"]) == 0
    changed = out / "kvtier.dev_kvcaches.yaml"
    changed.write_text(changed.read_text(encoding="utf-8") + "# by hand\n", encoding="utf-8")
    (out / "kvtier.dev_olds.yaml").write_text("old", encoding="utf-8")
    capsys.readouterr()
    assert main(["generate", "--out", str(out), "--check"]) == 1
    told = capsys.readouterr().err
    assert "kvcaches.yaml" in told
    assert "olds.yaml" in told
    assert "kvselectors.yaml" not in told


@pytest.mark.parametrize("argv", [[], ["unknown"], ["generate", "--nope"]], ids=["none", "unknown", "option"])
def test_wrong_usage_exits_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2


def test_the_reference_lists_every_spec_and_status_field() -> None:
    text = docs.render()
    for kind in KINDS:
        for path, _ in _nodes(kind):
            field = path.removeprefix(f"{kind.KIND}.")
            if field.startswith(("spec.", "status.")) and not field.endswith("[]"):
                assert f"`{field}`" in text, field
