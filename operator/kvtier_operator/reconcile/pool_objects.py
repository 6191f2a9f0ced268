"""The objects that an AgentPool becomes: DaemonSet, ServiceAccount, Service, RoleBinding. Pure.

All are owned by the pool and applied server-side, so a field that somebody else sets stays theirs. This
module must not know what is alive.
"""

from __future__ import annotations

import json

from kvtier_crds.quantity import parse_bytes, parse_fraction
from kvtier_operator.ports import RUN_DIR, JsonObject
from kvtier_operator.watch.triggers import COMPONENT_LABEL

CONTROL_PORT = 7443
METRICS_PORT = 9464
AGENT_ROLE = "kvtier-agent"

POOL_LABEL = "kvtier.dev/pool"
KEYS_DIR = "/run/kvtier-keys"
TERMINATION_SECONDS = 60
KEPT = ("node", "durable")
OWNER_READS = 0o400


def object_name(pool: JsonObject) -> str:
    """Of all objects of a pool. The admission policy on KVNodes knows the ServiceAccount by this name."""
    return f"kvtier-agent-{pool['metadata']['name']}"


def pool_objects(pool: JsonObject, tier_classes: dict[str, JsonObject], *, hold: bool) -> list[JsonObject]:
    """In the order in which they must exist. `tier_classes` holds every class that the pool names. With
    `hold`, agents are not replaced by a new template, whatever the strategy says."""
    return [
        _service_account(pool),
        _role_binding(pool),
        _service(pool),
        daemon_set(pool, tier_classes, hold=hold),
    ]


def tier_arguments(pool: JsonObject, tier_classes: dict[str, JsonObject]) -> list[str]:
    """`--tier` arguments of the agent, one for each tier of the pool, sizes in bytes."""
    arguments = []
    for tier in pool["spec"]["tiers"]:
        name = tier["tierClassName"]
        spec = tier_classes[name]["spec"]
        fields: JsonObject = {
            "className": name,
            "medium": spec["medium"],
            "capacity": parse_bytes(tier["capacity"], f"spec.tiers[{name}].capacity"),
            "reserve": parse_bytes(tier.get("reserve", 0), f"spec.tiers[{name}].reserve"),
        }
        if spec.get("deviceKind"):
            fields["deviceKind"] = spec["deviceKind"]
        if tier.get("device"):
            fields["device"] = tier["device"]
        fields |= _storage_fields(spec)
        arguments.append(f"--tier={json.dumps(fields, sort_keys=True, separators=(',', ':'))}")
    return arguments


def _storage_fields(spec: JsonObject) -> JsonObject:
    """What an nvme class says beyond its devices, and only what it says: an agent's template is as before
    where a class is."""
    if spec["medium"] != "nvme":
        return {}
    fields: JsonObject = {}
    persistence = spec["capabilities"]["persistence"]
    if persistence in KEPT:
        fields["persistence"] = persistence
    limits = spec.get("limits") or {}
    for name in ("endurance", "queueDepth", "readBytesPerSecond", "writeBytesPerSecond"):
        if limits.get(name):
            fields[name] = limits[name]
    return fields


def _index_arguments(indexes: JsonObject) -> list[str]:
    """Only what the pool says: an agent's template is as before where it says nothing."""
    arguments = []
    if indexes.get("cpuShare") is not None:
        share = parse_fraction(indexes["cpuShare"], "spec.indexes.cpuShare")
        arguments.append(f"--index-cpu-share={share.normalize():f}")
    if indexes.get("memory") is not None:
        arguments.append(f"--index-memory={parse_bytes(indexes['memory'], 'spec.indexes.memory')}")
    return arguments


def daemon_set(pool: JsonObject, tier_classes: dict[str, JsonObject], *, hold: bool) -> JsonObject:
    spec = pool["spec"]
    labels = _labels(pool)
    strategy = "OnDelete" if hold else spec.get("updateStrategy", "OnDelete")
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": _metadata(pool),
        "spec": {
            "selector": {"matchLabels": {COMPONENT_LABEL: "agent", POOL_LABEL: pool["metadata"]["name"]}},
            "updateStrategy": {"type": strategy},
            "template": {"metadata": {"labels": labels}, "spec": _pod(pool, tier_classes)},
        },
    }


def _pod(pool: JsonObject, tier_classes: dict[str, JsonObject]) -> JsonObject:
    spec, metadata = pool["spec"], pool["metadata"]
    state_dir = spec.get("stateDir", "/var/lib/kvtier").rstrip("/")
    endpoint = (spec.get("telemetry") or {}).get("otlpEndpoint")
    paths = sorted(
        {
            tier["device"]["path"].rstrip("/")
            for tier in spec["tiers"]
            if (tier.get("device") or {}).get("path")
        }
    )
    secrets = [reference["name"] for reference in spec.get("keySecretRefs") or []]
    volumes = [("state", state_dir), ("run", RUN_DIR), *((f"tier-{i}", p) for i, p in enumerate(paths))]
    pod: JsonObject = {
        "serviceAccountName": object_name(pool),
        "terminationGracePeriodSeconds": TERMINATION_SECONDS,
        "containers": [
            {
                "name": "agent",
                "image": spec["image"],
                "command": ["kvtier-agent"],
                "args": [
                    "--node-name=$(NODE_NAME)",
                    f"--pool={metadata['namespace']}/{metadata['name']}",
                    f"--state-dir={state_dir}",
                    f"--run-dir={RUN_DIR}",
                    f"--listen=0.0.0.0:{CONTROL_PORT}",
                    f"--advertise=$(POD_IP):{CONTROL_PORT}",
                    f"--tls-cert={state_dir}/tls/tls.crt",
                    f"--tls-key={state_dir}/tls/tls.key",
                    f"--tls-ca={state_dir}/tls/ca.crt",
                    f"--metrics-port={METRICS_PORT}",
                    *([f"--otlp-endpoint={endpoint}"] if endpoint else []),
                    *([f"--key-secrets={KEYS_DIR}"] if secrets else []),
                    *_index_arguments(spec.get("indexes") or {}),
                    *tier_arguments(pool, tier_classes),
                ],
                "env": [
                    {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                ],
                "ports": [
                    {"name": "control", "containerPort": CONTROL_PORT},
                    {"name": "metrics", "containerPort": METRICS_PORT},
                ],
                "volumeMounts": [
                    *({"name": name, "mountPath": path} for name, path in volumes),
                    *(
                        {"name": f"keys-{i}", "mountPath": f"{KEYS_DIR}/{name}", "readOnly": True}
                        for i, name in enumerate(secrets)
                    ),
                ],
            }
        ],
        "volumes": [
            *(
                {"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
                for name, path in volumes
            ),
            *(_key_volume(i, name) for i, name in enumerate(secrets)),
        ],
    }
    resources = {name: value for name, value in (spec.get("resources") or {}).items() if value}
    if resources:
        pod["containers"][0]["resources"] = resources
    if spec.get("nodeSelector"):
        pod["nodeSelector"] = spec["nodeSelector"]
    if spec.get("tolerations"):
        pod["tolerations"] = spec["tolerations"]
    return pod


def _key_volume(number: int, secret: str) -> JsonObject:
    """Optional, so that a Secret that is not there yet stops the caches that name it and not the agent."""
    return {
        "name": f"keys-{number}",
        "secret": {"secretName": secret, "defaultMode": OWNER_READS, "optional": True},
    }


def _service_account(pool: JsonObject) -> JsonObject:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(pool)}


def _role_binding(pool: JsonObject) -> JsonObject:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(pool),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": AGENT_ROLE},
        "subjects": [
            {
                "kind": "ServiceAccount",
                "name": object_name(pool),
                "namespace": pool["metadata"]["namespace"],
            }
        ],
    }


def _service(pool: JsonObject) -> JsonObject:
    """Headless: names the agents; each is addressed on its own."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(pool),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {COMPONENT_LABEL: "agent", POOL_LABEL: pool["metadata"]["name"]},
            "ports": [
                {"name": "control", "port": CONTROL_PORT, "targetPort": "control", "protocol": "TCP"},
                {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics", "protocol": "TCP"},
            ],
        },
    }


def _labels(pool: JsonObject) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "kvtier",
        "app.kubernetes.io/managed-by": "kvtier-operator",
        COMPONENT_LABEL: "agent",
        POOL_LABEL: pool["metadata"]["name"],
    }


def _metadata(pool: JsonObject) -> JsonObject:
    metadata = pool["metadata"]
    return {
        "name": object_name(pool),
        "namespace": metadata["namespace"],
        "labels": _labels(pool),
        "ownerReferences": [
            {
                "apiVersion": pool["apiVersion"],
                "kind": pool["kind"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "controller": True,
            }
        ],
    }
