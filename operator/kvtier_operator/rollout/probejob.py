"""The Job that scores a rollout's probe set on an agent that holds the candidate, and its account. Pure.

One Job for each attempt, candidate and plan, by a name that they give, so that it is made once whoever makes
it. It has no rights at the API server. It must not know what exists or when a Job is wanted.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_evidence.probeplan import ProbePlan
from kvtier_operator.ports import RUN_DIR, JsonObject
from kvtier_operator.watch.triggers import COMPONENT_LABEL

ROLLOUT_LABEL = "kvtier.dev/rollout-uid"
COMMAND_ANNOTATION = "kvtier.dev/by-hand"
PLAN_FOLDER = "/etc/kvtier/probe"
PLAN_FILE = "plan.json"
MODEL_FOLDER = "/models"
CONTAINER = "probe"
REFUSED_STATUS = 2
"""Exit status of `kvtier-eval probe` for what another try would not mend."""
BACKOFF_LIMIT = 3
KEPT_SECONDS = 3600
MAX_NODES = 16
NAME_ROOM = 40


@dataclass(frozen=True)
class ProbeRun:
    """What one Job is for. gates: that its pairs count for. nodes: Nodes whose agents hold the candidate as
    it is made. config_map, key: where the plan's text is."""

    rollout: JsonObject
    attempt: int
    candidate_digest: str
    cache: str
    gates: tuple[str, ...]
    plan: ProbePlan
    config_map: str
    key: str
    image: str
    nodes: tuple[str, ...]
    tolerations: tuple[JsonObject, ...] = ()

    @property
    def name(self) -> str:
        metadata = self.rollout["metadata"]
        identity = f"{metadata['uid']}/{self.attempt}/{self.candidate_digest}/{self.plan.digest}"
        short = metadata["name"][:NAME_ROOM].rstrip("-.")
        return f"{short}-probe-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"

    @property
    def namespace(self) -> str:
        return str(self.rollout["metadata"]["namespace"])


def probe_objects(run: ProbeRun) -> list[JsonObject]:
    """In the order in which they must exist."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(run)}
    return [{**account, "automountServiceAccountToken": False}, _job(run)]


def command_by_hand(run: ProbeRun) -> str:
    """What a person types on a node of the pool, where the model is at the plan's path."""
    key = run.key.replace(".", "\\.")
    namespace = shlex.quote(run.namespace)
    fetch = (
        f"kubectl get configmap {shlex.quote(run.config_map)} -n {namespace} "
        f"-o jsonpath={shlex.quote('{.data.' + key + '}')} > {PLAN_FILE}"
    )
    arguments = _arguments(run, plan=PLAN_FILE, socket=f"{RUN_DIR}/{_first(run.nodes)}/engine.sock")
    return f"{fetch} && kvtier-eval {shlex.join(arguments)}"


def _first(nodes: Sequence[str]) -> str:
    return nodes[0] if nodes else "NODE"


def _arguments(run: ProbeRun, *, plan: str, socket: str) -> list[str]:
    return [
        "probe",
        f"--plan={plan}",
        f"--plan-digest={run.plan.digest}",
        f"--socket={socket}",
        f"--namespace={run.namespace}",
        f"--cache={run.cache}",
        *(f"--gate={gate}" for gate in run.gates),
        f"--rollout-uid={run.rollout['metadata']['uid']}",
        f"--attempt={run.attempt}",
        f"--candidate={run.candidate_digest}",
    ]


def _job(run: ProbeRun) -> JsonObject:
    metadata = _metadata(run)
    metadata["annotations"] = {COMMAND_ANNOTATION: command_by_hand(run)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": BACKOFF_LIMIT,
            "activeDeadlineSeconds": run.plan.deadline_seconds,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": CONTAINER,
                            "operator": "In",
                            "values": [REFUSED_STATUS],
                        },
                    }
                ]
            },
            "template": {"metadata": {"labels": _labels(run)}, "spec": _pod(run)},
        },
    }


def _pod(run: ProbeRun) -> JsonObject:
    needs, model = run.plan.job, run.plan.model
    claim = model.claim if model is not None else ""
    arguments = _arguments(
        run, plan=f"{PLAN_FOLDER}/{PLAN_FILE}", socket=f"{RUN_DIR}/$(NODE_NAME)/engine.sock"
    )
    if claim:
        arguments.append(f"--model-root={MODEL_FOLDER}")
    mounts: list[JsonObject] = [
        {"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True},
        # A socket is no file: it takes connections on a read-only mount too.
        {"name": "run", "mountPath": RUN_DIR, "readOnly": True},
        {"name": "scratch", "mountPath": "/tmp"},
    ]
    volumes: list[JsonObject] = [
        {
            "name": "plan",
            "configMap": {"name": run.config_map, "items": [{"key": run.key, "path": PLAN_FILE}]},
        },
        {"name": "run", "hostPath": {"path": RUN_DIR, "type": "Directory"}},
        {"name": "scratch", "emptyDir": {}},
    ]
    if claim:
        mounts.append({"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True})
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    asked = {"cpu": needs.cpu, "memory": needs.memory}
    pod: JsonObject = {
        "serviceAccountName": run.name,
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "affinity": {"nodeAffinity": _affinity(run.nodes)},
        "containers": [
            {
                "name": CONTAINER,
                "image": run.image,
                "command": ["kvtier-eval"],
                "args": arguments,
                "env": [
                    {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                    {"name": "HOME", "value": "/tmp"},
                    {"name": "HF_HUB_OFFLINE", "value": "1"},
                ],
                "resources": {"requests": asked, "limits": {"memory": needs.memory}},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if run.tolerations:
        pod["tolerations"] = list(run.tolerations)
    return pod


def _affinity(nodes: Sequence[str]) -> JsonObject:
    """One of the nodes; a field selector takes one value a term, and terms are alternatives."""
    terms = [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        for node in nodes[:MAX_NODES]
    ]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}


def _labels(run: ProbeRun) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "kvtier",
        "app.kubernetes.io/managed-by": "kvtier-operator",
        COMPONENT_LABEL: "probe",
        ROLLOUT_LABEL: run.rollout["metadata"]["uid"],
    }


def _metadata(run: ProbeRun) -> JsonObject:
    owner = run.rollout["metadata"]
    return {
        "name": run.name,
        "namespace": run.namespace,
        "labels": _labels(run),
        "ownerReferences": [
            {
                "apiVersion": run.rollout["apiVersion"],
                "kind": run.rollout["kind"],
                "name": owner["name"],
                "uid": owner["uid"],
                "controller": True,
            }
        ],
    }
