"""Files judged without a cluster say what a real API server says of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kubectl_kvtier.cli import main
from kubectl_kvtier.lint.files import lint, parse, read
from kubectl_kvtier.lint.findings import Severity
from kubectl_kvtier.outcomes import Exit, Failure
from tests.unit.crds.crds_samples import EXAMPLES, INVALID

INVALID_FILES = sorted(INVALID.glob("*.yaml"))


@pytest.mark.parametrize("path", INVALID_FILES, ids=[path.stem for path in INVALID_FILES])
def test_it_finds_what_the_api_server_refuses_in_its_words(path: Path) -> None:
    """The same files and first lines that tests/cluster holds against a real server."""
    expected = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# expect: ")
    errors = [one.message for one in lint(read([path])) if one.severity is Severity.ERROR]
    assert any(expected in message for message in errors), errors


def test_the_examples_are_clean() -> None:
    assert lint(read([EXAMPLES])) == []


def changed(name: str, before: str, after: str) -> list[str]:
    """Messages for the examples with one of them edited."""
    documents = []
    for path in sorted(EXAMPLES.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if path.name == name:
            assert before in text
            text = text.replace(before, after, 1)
        documents += parse(path.name, text)
    return [f"{one.severity} {one.message}" for one in lint(documents)]


@pytest.mark.parametrize(
    "before,after,said",
    [
        ("name: quest-64", "name: quest-65", "note spec.candidate.selectorRef: KVSelector quest-65"),
        ("cacheRef: {name: chat}", "cacheRef: {name: chit}", "note spec.cacheRef: KVCache chit"),
        ("leaseTTL: 60s", "leaseTLL: 60s", "error .spec.leaseTLL: field not declared in schema"),
        ("kind: KVRollout", "kind: KVRolout", "error no such kind"),
    ],
    ids=["selector", "cache", "misspelt", "kind"],
)
def test_what_stands_between_objects(before: str, after: str, said: str) -> None:
    found = changed("60-kvrollout.yaml", before, after)
    assert any(said in one for one in found), found


def test_a_cache_that_does_not_compile_is_an_error() -> None:
    found = changed("50-kvselector.yaml", "denseLayers: [0, 1]", "denseLayers: [0, 400]")
    assert any("SelectorGeometry" in one for one in found), found


STALL = '  - {name: stall, metric: exposedStallFraction, max: "0.02"}\n'


@pytest.mark.parametrize(
    "gate,said",
    [
        pytest.param(
            "{name: errors, metric: external, max: '1%', query: 'counters(rate(bad[5m]); total)'}",
            "error SpecInvalid: spec.gates[errors].query: counts are read from raw series",
            id="a function where a selector stands",
        ),
        pytest.param(
            "{name: errors, metric: external, max: '1%', query: 'counters(bad; total'}",
            "error SpecInvalid: spec.gates[errors].query: counters( has no end",
            id="no end",
        ),
        pytest.param(
            "{name: errors, metric: external, max: '1', query: 'counters(bad; total)'}",
            "error SpecInvalid: gate errors: max: 1 is not a fraction strictly between 0 and 1",
            id="a share that nothing is over",
        ),
        pytest.param(
            "{name: errors, metric: external, max: '2', query: 'buckets(ttft_bucket)'}",
            "error SpecInvalid: gate errors: external needs a quantile",
            id="buckets without a quantile",
        ),
        pytest.param(
            "{name: errors, metric: external, max: '2', query: 'up', inference: PointThreshold}",
            "error SpecInvalid: spec.gates[errors].inference: PointThreshold takes point(expression; count)",
            id="a point without its count",
        ),
        pytest.param(
            "{name: errors, metric: external, max: '2', query: 'up', perStage: [{stage: Ramp, max: '3'}]}",
            "",
            id="one that can be run",
        ),
    ],
)
def test_what_the_operator_cannot_run_is_an_error_in_its_words(gate: str, said: str) -> None:
    found = changed("60-kvrollout.yaml", STALL, f"{STALL}  - {gate}\n")
    assert [one[: len(said)] for one in found] == ([said] if said else [])


def test_a_limit_of_a_stage_that_is_not_passed_is_a_note() -> None:
    documents = parse("60.yaml", (EXAMPLES / "60-kvrollout.yaml").read_text(encoding="utf-8"))
    spec = documents[0][1]["spec"]
    spec["stages"] = [stage for stage in spec["stages"] if stage["name"] != "Canary"]
    notes = [one for one in lint(documents) if "perStage" in one.field]
    assert [(one.severity, one.field) for one in notes] == [(Severity.NOTE, "spec.gates[tail].perStage")]
    assert "Canary is no stage of this rollout" in notes[0].message


def test_an_object_twice_is_an_error() -> None:
    text = (EXAMPLES / "60-kvrollout.yaml").read_text(encoding="utf-8")
    found = lint(parse("one", f"{text}\n---\n{text}"))
    assert any("twice" in one.message for one in found)


def test_kinds_of_others_pass_and_lists_are_opened() -> None:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"a": 1}}
    assert lint(parse("-", json.dumps({"kind": "List", "items": [config]}))) == []


@pytest.mark.parametrize("text", ["a: [", "- 1", "{kind: List, items: [3]}"], ids=str)
def test_what_is_no_object_is_told(text: str) -> None:
    with pytest.raises(Failure, match="-:") as caught:
        parse("-", text)
    assert caught.value.status is Exit.USAGE


def test_an_object_without_a_name_is_told() -> None:
    found = lint(parse("-", "{kind: KVCache, apiVersion: kvtier.dev/v1alpha1}"))
    assert [one.message for one in found] == ["metadata.name: Required value"]


@pytest.mark.parametrize(
    "metadata", ["[1]", "{name: A_b}", "{name: -a}", "{name: a..b}", f"{{name: {'a' * 254}}}"]
)
def test_a_name_that_the_server_refuses_is_told(metadata: str) -> None:
    found = lint(parse("-", f"{{kind: TierClass, apiVersion: kvtier.dev/v1alpha1, metadata: {metadata}}}"))
    assert any(one.field.startswith("metadata") for one in found), found


def test_a_date_is_a_string_as_kubectl_reads_it() -> None:
    head = "kind: KVSelector, apiVersion: kvtier.dev/v1alpha1, metadata: {name: a}"
    found = lint(parse("-", f"{{{head}, spec: {{family: 2026-01-01}}}}"))
    assert any('spec.family: Unsupported value: "2026-01-01"' in one.message for one in found), found


@pytest.mark.parametrize("text", [None, "", "# a note\n---\n"], ids=["no-file", "empty", "comments"])
def test_a_path_without_objects_is_no_clean_one(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("kind: KVCache", encoding="utf-8")
    if text is not None:
        (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    assert main(["lint", "-f", str(EXAMPLES), "-f", str(tmp_path)]) == Exit.USAGE
    assert f"{tmp_path}: no objects in it" in capsys.readouterr().err


def test_the_command_reads_standard_input_and_ends_with_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (INVALID / "kvrollout-no-gates.yaml").read_text(encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["lint", "-f", "-"]) == Exit.NEGATIVE
    assert "1 objects" in capsys.readouterr().out
    assert main(["lint", "-f", str(EXAMPLES), "-o", "json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out) == []
