"""The definitions against a real API server: what it accepts, what it refuses and in which words.

A control plane of its own: the shared one carries admission policies under which only agents write KVNodes,
and objects of other tests with the names of the examples.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_crds.models import KINDS
from tests.cluster.crds_statuses import STATUSES, condition
from tests.cluster.kvtier_localplane import Cluster, LocalControlPlane, eventually
from tests.unit.crds.crds_samples import BY_KIND, CRDS, EXAMPLES, INVALID, documents, example, examples

pytestmark = pytest.mark.timeout(600)

NAMESPACE = "serving"
INVALID_FILES = sorted(INVALID.glob("*.yaml"))


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """A fresh API server with our definitions established and one example of each kind applied."""
    with LocalControlPlane() as plane:
        cluster: Cluster = plane.cluster
        cluster.apply_files(sorted(CRDS.glob("*.yaml")))
        cluster.ensure_namespace(NAMESPACE)
        for path in sorted(EXAMPLES.glob("*.yaml")):
            cluster.kubectl("apply", "--server-side", "--validate=strict", "-f", str(path))
        yield cluster


def _apply(cluster: Cluster, document: dict[str, Any], *options: str) -> tuple[int, str]:
    """Server-side apply of one object as kubectl's user would; (exit status, what it says)."""
    done = cluster.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--validate=strict", "-f", "-", *options),
        input=json.dumps(document),
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _dry(cluster: Cluster, document: dict[str, Any]) -> tuple[int, str]:
    return _apply(cluster, document, "--dry-run=server")


def _set(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the value at a dotted path; list items by index."""
    changed = copy.deepcopy(document)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    cursor: Any = changed
    for key in parents:
        cursor = cursor[key]
    cursor[last] = value
    return changed


@pytest.mark.parametrize("kind", [kind.PLURAL for kind in KINDS])
def test_definitions_are_established_without_complaint(server: Cluster, kind: str) -> None:
    conditions = server.get("crd", f"{kind}.kvtier.dev")["status"]["conditions"]
    by_type = {one["type"]: one["status"] for one in conditions}
    assert by_type["Established"] == "True"
    assert by_type["NamesAccepted"] == "True"
    assert by_type.get("NonStructuralSchema", "False") == "False"


def test_one_category_lists_all_kinds(server: Cluster) -> None:
    listed = server.kubectl("get", "kvtier", "--all-namespaces", "-o", "name").stdout.split()
    assert {one.split(".")[0] for one in listed} == {kind.KIND.lower() for kind in KINDS}
    assert len(listed) == len(examples())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.SHORT)
def test_short_names_and_columns(server: Cluster, kind: Any) -> None:
    header, first, *_ = server.kubectl("get", kind.SHORT, "-n", NAMESPACE, "-o", "wide").stdout.splitlines()
    assert header.split() == ["NAME", *(column.name.upper() for column in kind.COLUMNS)]
    assert first
    narrow = server.kubectl("get", kind.SHORT, "-n", NAMESPACE).stdout.splitlines()[0].split()
    assert narrow == ["NAME", *(column.name.upper() for column in kind.COLUMNS if not column.wide)]


@pytest.mark.parametrize("path", INVALID_FILES, ids=lambda path: path.stem)
def test_invalid_objects_are_refused_in_the_expected_words(server: Cluster, path: Path) -> None:
    expected = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# expect: ")
    (document,) = documents(path)
    document["metadata"]["name"] += "" if len(document["metadata"]["name"]) > 40 else "-new"
    if document["kind"] == "KVNode" and document["spec"]["nodeName"] == "node-a":
        document["spec"]["nodeName"] = "node-a-new"
    status, said = _dry(server, document)
    assert status != 0, "accepted"
    assert expected in said
    assert "CEL" not in said
    assert "evaluating rule" not in said


def test_the_same_file_is_refused_as_a_user_would_apply_it(server: Cluster) -> None:
    """Without any of the test's own changes, and client-side too."""
    path = INVALID / "kvrollout-no-quality-gate.yaml"
    for option in ("--server-side=true", "--server-side=false"):
        done = server.kubectl("apply", option, "-f", str(path), check=False)
        assert done.returncode != 0
        assert "spec.gates must hold a task-quality gate (metric taskScoreDrop)" in done.stderr


def test_unknown_fields_are_refused_when_strict(server: Cluster) -> None:
    status, said = _dry(server, _set(example("KVCache", "chat"), "spec.pagetokens", 16))
    assert status != 0
    assert 'unknown field "spec.pagetokens"' in said or ".spec.pagetokens: field not declared" in said


IMMUTABLE = [
    (
        "TierClass",
        "cpu-dram",
        "spec.capabilities.alignmentBytes",
        128,
        "spec is immutable: create a new TierClass",
    ),
    ("TierClass", "nvme-local", "spec.limits.queueDepth", 8, "spec is immutable: create a new TierClass"),
    ("KVSelector", "quest-64", "spec.budget.tokens", 128, "spec is immutable: create a new KVSelector"),
    ("KVSelector", "quest-64", "spec.seed", 1, "spec is immutable: create a new KVSelector"),
    ("KVCache", "chat", "spec.model.checkpoint", "other", "spec.model is immutable"),
    ("KVCache", "chat", "spec.model.rope.theta", "10000", "spec.model is immutable"),
    (
        "KVCache",
        "chat",
        "spec.model.adapters",
        [{"name": "a", "digest": "sha256:" + "0" * 64}],
        "spec.model is immutable",
    ),
    ("KVCache", "chat", "spec.poolRef.name", "other", "spec.poolRef is immutable"),
    ("KVCache", "chat", "spec.keySecretRef", {"name": "keys"}, "spec.keySecretRef is immutable"),
    ("KVRollout", "quest-on-chat", "spec.cacheRef.name", "other", "spec.cacheRef is immutable"),
    ("KVRollout", "quest-on-chat", "spec.leaseTTL", "30s", "spec.leaseTTL may only grow"),
]


@pytest.mark.parametrize(
    ("kind", "name", "path", "value", "message"), IMMUTABLE, ids=[row[2] for row in IMMUTABLE]
)
def test_what_is_immutable_stays(
    server: Cluster, kind: str, name: str, path: str, value: Any, message: str
) -> None:
    status, said = _dry(server, _set(example(kind, name), path, value))
    assert status != 0
    assert message in said


OLDER = (
    "agentpool-name-with-dot",
    "kvrollout-canary-over-full",
    "kvrollout-gate-external-shadow",
    "kvrollout-gate-named-median",
    "kvrollout-gate-named-stall",
    "kvrollout-gate-named-tail",
    "kvrollout-gate-stage-absent",
    "kvrollout-ramp-over-full",
)
OLDER_NAMESPACE = "older"


def _before_younger_rules(node: Any) -> Any:
    """A definition without the rules that objects may be older than."""
    if isinstance(node, list):
        kept = [one for one in node if not (isinstance(one, dict) and one.get("optionalOldSelf"))]
        return [_before_younger_rules(one) for one in kept]
    if isinstance(node, dict):
        return {name: _before_younger_rules(value) for name, value in node.items()}
    return node


@pytest.fixture(scope="module")
def older(server: Cluster) -> Iterator[dict[str, dict[str, Any]]]:
    """Objects that were stored before the rules which they break, by the name of their file."""
    server.ensure_namespace(OLDER_NAMESPACE)
    definitions = [CRDS / f"kvtier.dev_{plural}.yaml" for plural in ("agentpools", "kvrollouts")]
    for path in definitions:
        server.apply(_before_younger_rules(documents(path)[0]))
    stored = {}
    for file in OLDER:
        (document,) = documents(INVALID / f"{file}.yaml")
        name = "older.pool" if document["kind"] == "AgentPool" else file
        document["metadata"] = {
            "name": name,
            "namespace": OLDER_NAMESPACE,
            "finalizers": ["kvtier.dev/older"],
        }
        # The server goes by the definition that it had for a moment still.
        eventually(lambda made=document: _apply(server, made)[0] == 0, 60, what=f"{file} is stored")
        stored[file] = document
    server.apply_files(definitions)
    for file, document in stored.items():
        fresh = _set(document, "metadata.name", f"{document['metadata']['name']}-2")
        eventually(lambda made=fresh: _dry(server, made)[0] != 0, 60, what=f"{file} is refused")
    yield stored
    for document in stored.values():
        where = document["kind"].lower(), document["metadata"]["name"], "-n", OLDER_NAMESPACE
        server.kubectl("delete", *where, "--wait=false")
        server.kubectl("patch", *where, "--type=merge", "-p", '{"metadata": {"finalizers": null}}')


@pytest.mark.parametrize("file", OLDER)
def test_an_object_that_is_older_than_a_rule_goes_on(
    server: Cluster, older: dict[str, dict[str, Any]], file: str
) -> None:
    """Its status is written, it is aborted, its finalizer goes; only what the rule speaks of is refused."""
    document = older[file]
    rollout = document["kind"] == "KVRollout"
    where = document["kind"].lower(), document["metadata"]["name"], "-n", OLDER_NAMESPACE
    abort = {"intent": {"seq": 1, "verb": "Abort", "attempt": 1}}
    for body, options in (
        ({"status": {"observedGeneration": 1}}, ("--subresource=status",)),
        ({"spec": abort if rollout else {"image": "kvtier/agent:0.2.0"}}, ()),
        ({"metadata": {"finalizers": ["kvtier.dev/another"]}}, ()),
    ):
        patched = ("patch", *where, "--type=merge", "-p", json.dumps(body), *options)
        done = server.kubectl(*patched, check=False)
        assert done.returncode == 0, (body, done.stderr)
    if rollout:
        status, said = _dry(server, _set(document, "spec.stages.0.minSamples", 2001))
        assert status != 0
        first = (INVALID / f"{file}.yaml").read_text(encoding="utf-8").splitlines()[0]
        assert first.removeprefix("# expect: ") in said


EDITABLE = [
    ("KVCache", "chat", "spec.tiers.0.budget", "96Mi"),
    ("KVCache", "chat", "spec.selectorRef", {"name": "quest-64"}),
    ("KVCache", "chat", "spec.contract.allowedFallbacks", ["degrade"]),
    ("KVCache", "chat", "spec.suspend", True),
    ("AgentPool", "default", "spec.image", "kvtier/agent:0.2.0"),
    ("AgentPool", "default", "spec.tiers.2.device", {"cudaIndex": 3}),
    ("AgentPool", "default", "spec.keySecretRefs", [{"name": "keys"}, {"name": "other-keys"}]),
    ("KVNode", "node-a", "spec.address", "[fd00::7]:7443"),
    ("KVRollout", "quest-on-chat", "spec.gates.0.max", "50m"),
    ("KVRollout", "quest-on-chat", "spec.gates.0.quantile", "99.9"),
    ("KVRollout", "quest-on-chat", "spec.candidate", {"fromCacheSpec": True}),
    ("KVRollout", "quest-on-chat", "spec.candidate.selectorRef.name", "quest-128"),
    ("KVRollout", "quest-on-chat", "spec.stages.2.steps", ["0.05", "10%", "0.98"]),
    ("KVRollout", "quest-on-chat", "spec.stages.3.holdback", 0),
    ("KVRollout", "quest-on-chat", "spec.leaseTTL", "1m30s"),
]


@pytest.mark.parametrize(("kind", "name", "path", "value"), EDITABLE, ids=[row[2] for row in EDITABLE])
def test_what_may_change_does(server: Cluster, kind: str, name: str, path: str, value: Any) -> None:
    status, said = _dry(server, _set(example(kind, name), path, value))
    assert status == 0, said


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ({"name": "errors", "metric": "external", "query": "sum(errors)", "max": "1%", "canFail": True}, ""),
        ({"name": "p", "metric": "external", "query": "q", "max": 3, "inference": "PointThreshold"}, ""),
        ({"name": "fallbacks", "metric": "illegalFallbacks", "max": 0}, ""),
        ({"name": "fallbacks", "metric": "illegalFallbacks", "max": "0%"}, ""),
        ({"name": "stall-2", "metric": "exposedStallFraction", "max": "999m", "minSamples": 30}, ""),
        (
            {
                "name": "probe-tail",
                "metric": "tpotRatio",
                "quantile": 75,
                "max": 2,
                "scope": "ProbeSet",
                "probeRef": {"name": "golden"},
            },
            "",
        ),
        ({"name": "stall-2", "metric": "exposedStallFraction", "max": "1000m"}, "less than 1"),
    ],
    ids=["counter", "point", "zero", "zero-percent", "milli", "probes", "one"],
)
def test_gates_beyond_the_example(server: Cluster, gate: dict[str, Any], words: str) -> None:
    document = example("KVRollout", "quest-on-chat")
    document["spec"]["gates"].append(gate)
    status, said = _dry(server, document)
    assert (status != 0) == bool(words), said
    assert words in said


def test_an_exact_candidate_needs_no_gates(server: Cluster) -> None:
    document = _set(
        example("KVRollout", "quest-on-chat"), "spec.candidate", {"overrides": {"admission": {"queue": 4}}}
    )
    del document["spec"]["gates"]
    document["metadata"]["name"] = "more-queue"
    status, said = _dry(server, document)
    assert status == 0, said


def _intent(seq: int, verb: str) -> dict[str, Any]:
    return {"seq": seq, "verb": verb, "attempt": 1, "expectedStage": "Canary", "expectedStep": 0}


@pytest.fixture(scope="module")
def paused(server: Cluster) -> dict[str, Any]:
    document = example("KVRollout", "quest-on-chat")
    document["metadata"]["name"] = "with-intent"
    document["spec"]["intent"] = _intent(4, "Pause")
    status, said = _apply(server, document)
    assert status == 0, said
    return document


class TestIntents:
    """Transition rules need an object that holds an intent."""

    @pytest.mark.parametrize(
        ("seq", "verb", "refused"),
        [
            (4, "Pause", False),
            (5, "Resume", False),
            (4, "Resume", True),
            (3, "Pause", True),
            (3, "Abort", True),
        ],
        ids=["repeat", "next", "same-seq", "old-file", "old-abort"],
    )
    def test_seq_grows(
        self, server: Cluster, paused: dict[str, Any], seq: int, verb: str, refused: bool
    ) -> None:
        status, said = _dry(server, _set(paused, "spec.intent", _intent(seq, verb)))
        assert (status != 0) == refused, said
        assert not refused or "spec.intent.seq must grow with every change of spec.intent" in said

    def test_it_cannot_be_removed(self, server: Cluster, paused: dict[str, Any]) -> None:
        patch = json.dumps([{"op": "remove", "path": "/spec/intent"}])
        done = server.kubectl(
            *("patch", "kvr", "with-intent", "-n", NAMESPACE, "--type=json", "-p", patch), check=False
        )
        assert done.returncode != 0
        assert "spec.intent cannot be removed" in done.stderr

    def test_an_abort_may_leave_out_where(self, server: Cluster, paused: dict[str, Any]) -> None:
        abort = {"seq": 9, "verb": "Abort", "attempt": 1}
        assert _dry(server, _set(paused, "spec.intent", abort))[0] == 0

    def test_other_edits_keep_an_old_intent(self, server: Cluster, paused: dict[str, Any]) -> None:
        assert _dry(server, _set(paused, "spec.leaseTTL", "2m"))[0] == 0


def test_defaults_of_the_server_equal_those_of_the_models(server: Cluster) -> None:
    """Objects with nothing but what is required, as served, read the same as the models read them bare."""
    bare = {
        "KVCache": ("bare", {"poolRef", "model", "tiers"}),
        "KVRollout": ("bare", {"cacheRef", "candidate", "stages", "gates"}),
        "KVSelector": ("bare", {"family", "quest", "budget"}),
        "AgentPool": ("bare", {"image", "tiers"}),
        "TierClass": ("bare", {"medium", "capabilities"}),
    }
    originals = {"KVCache": "chat", "KVRollout": "quest-on-chat", "KVSelector": "quest-64"}
    originals |= {"AgentPool": "default", "TierClass": "cpu-dram"}
    for kind, (name, kept) in bare.items():
        document = example(kind, originals[kind])
        document["metadata"]["name"] = name
        document["spec"] = {field: document["spec"][field] for field in kept}
        for tier in document["spec"].get("tiers", []):
            tier.pop("role", None)
            tier.pop("reserve", None)
        for gate in document["spec"].get("gates", []):
            if gate["metric"] != "taskScoreDrop":
                gate.pop("scope", None)
        document["spec"].get("budget", {}).pop("capPolicy", None)
        for switch in ("dmaSource", "dmaDestination", "kernelReadable", "partialAttention"):
            document["spec"].get("capabilities", {}).pop(switch, None)
        status, said = _apply(server, document)
        assert status == 0, said
        served = server.get(BY_KIND[kind].PLURAL, name, "-n", NAMESPACE)
        model = BY_KIND[kind]
        assert served["spec"] != document["spec"], f"{kind}: the server filled in nothing"
        as_served = model.model_validate(served).model_dump()["spec"]
        assert as_served == model.model_validate(document).model_dump()["spec"], kind


def _patch_status(cluster: Cluster, kind: str, name: str, status: dict[str, Any]) -> tuple[int, str]:
    done = cluster.kubectl(
        *("patch", kind, name, "-n", NAMESPACE, "--subresource=status", "--type=merge"),
        *("-p", json.dumps({"status": status})),
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("short", STATUSES)
def test_a_status_is_kept_whole_and_shown_in_columns(server: Cluster, short: str) -> None:
    name, status, shown = STATUSES[short]
    before = server.get(short, name, "-n", NAMESPACE)
    code, said = _patch_status(server, short, name, status)
    assert code == 0, said
    after = server.get(short, name, "-n", NAMESPACE)
    assert after["status"] == status
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    row = server.kubectl("get", short, name, "-n", NAMESPACE, "--no-headers").stdout.split()
    assert [column for column in shown if column not in row] == []


def test_the_status_subresource_keeps_out_of_the_spec_and_back(server: Cluster) -> None:
    patch = json.dumps({"spec": {"suspend": True}, "status": {"fence": 18}})
    server.kubectl(
        "patch", "kvc", "chat", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", patch
    )
    found = server.get("kvc", "chat", "-n", NAMESPACE)
    assert found["spec"].get("suspend", False) is False
    assert found["status"]["fence"] == 18
    server.kubectl(
        "patch", "kvc", "chat", "-n", NAMESPACE, "--type=merge", "-p", json.dumps({"status": {"fence": 1}})
    )
    assert server.get("kvc", "chat", "-n", NAMESPACE)["status"]["fence"] == 18


def test_the_order_of_tiers_is_the_one_applied(server: Cluster) -> None:
    document = example("KVCache", "chat")
    document["metadata"]["name"] = "reordered"
    first, second, third = document["spec"]["tiers"]
    second["role"] = third["role"] = "resident"
    for order in ([first, second, third], [first, third, second], [third, first, second]):
        document["spec"]["tiers"] = order
        assert _apply(server, document)[0] == 0
        served = server.get("kvc", "reordered", "-n", NAMESPACE)["spec"]["tiers"]
        assert [tier["tierClassName"] for tier in served] == [tier["tierClassName"] for tier in order]


def test_conditions_are_a_map(server: Cluster) -> None:
    two = [condition("Ready", "True", "A"), condition("Ready", "False", "B")]
    code, said = _patch_status(server, "kvc", "chat", {"conditions": two})
    assert code != 0
    assert "Duplicate value" in said


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": "Sideways"}, "status.phase: Unsupported value"),
        ({"rollback": {"cause": "Boredom"}}, "status.rollback.cause: Unsupported value"),
        ({"fence": -1}, "fence in body should be greater than or equal to 0"),
        ({"resumes": 4}, "resumes in body should be less than or equal to 3"),
    ],
    ids=["phase", "cause", "fence", "resumes"],
)
def test_a_status_outside_its_words_is_refused(server: Cluster, status: dict[str, Any], words: str) -> None:
    code, said = _patch_status(server, "kvr", "quest-on-chat", status)
    assert code != 0
    assert words in said


def test_waiting_for_a_condition_works(server: Cluster) -> None:
    _patch_status(
        server, "kvr", "quest-on-chat", {"conditions": [condition("BaselineRestored", "True", "Proved")]}
    )
    done = server.kubectl(
        *("wait", "--for=condition=BaselineRestored", "kvr/quest-on-chat", "-n", NAMESPACE, "--timeout=60s"),
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_checked_in_files_are_what_the_server_serves(server: Cluster) -> None:
    """No field of a schema was dropped or changed on the way in."""
    for path in sorted(CRDS.glob("kvtier.dev_*.yaml")):
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
        served = server.get("crd", written["metadata"]["name"])["spec"]["versions"][0]
        assert served["schema"] == written["spec"]["versions"][0]["schema"], path.name
