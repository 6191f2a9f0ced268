"""Where each kind lives in the API: group, version, plural, scope. A table, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_operator.ports import GROUP, VERSION, JsonObject, Kind, ObjectKey


@dataclass(frozen=True)
class Resource:
    """One row: how a kind is addressed. `group` is empty for the core API."""

    kind: Kind
    group: str
    version: str
    plural: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def collection_path(self, namespace: str) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{place}/{self.plural}"

    def object_path(self, namespace: str, name: str) -> str:
        if self.namespaced and not namespace:
            raise ValueError(f"{self.kind} {name!r} needs a namespace")
        return f"{self.collection_path(namespace)}/{name}"


RESOURCES: dict[Kind, Resource] = {
    resource.kind: resource
    for resource in (
        Resource(Kind.TIER_CLASS, GROUP, VERSION, "tierclasses", False),
        Resource(Kind.AGENT_POOL, GROUP, VERSION, "agentpools", True),
        Resource(Kind.KV_NODE, GROUP, VERSION, "kvnodes", False),
        Resource(Kind.KV_CACHE, GROUP, VERSION, "kvcaches", True),
        Resource(Kind.KV_SELECTOR, GROUP, VERSION, "kvselectors", True),
        Resource(Kind.KV_ROLLOUT, GROUP, VERSION, "kvrollouts", True),
        Resource(Kind.NODE, "", "v1", "nodes", False),
        Resource(Kind.LEASE, "coordination.k8s.io", "v1", "leases", True),
        Resource(Kind.CONFIG_MAP, "", "v1", "configmaps", True),
        Resource(Kind.CONTROLLER_REVISION, "apps", "v1", "controllerrevisions", True),
        Resource(Kind.DAEMON_SET, "apps", "v1", "daemonsets", True),
        Resource(Kind.SERVICE, "", "v1", "services", True),
        Resource(Kind.SERVICE_ACCOUNT, "", "v1", "serviceaccounts", True),
        Resource(Kind.ROLE_BINDING, "rbac.authorization.k8s.io", "v1", "rolebindings", True),
        Resource(Kind.JOB, "batch", "v1", "jobs", True),
        Resource(Kind.EVENT, "events.k8s.io", "v1", "events", True),
    )
}


def key_of(manifest: JsonObject) -> ObjectKey:
    """The key of an object as it came from, or goes to, the API server."""
    metadata = manifest["metadata"]
    return ObjectKey(Kind(manifest["kind"]), metadata.get("namespace", ""), metadata["name"])


def version_of(obj: JsonObject) -> tuple[str, str]:
    """Its uid and resource version: two objects of one key that share both are equal."""
    metadata = obj["metadata"]
    return str(metadata.get("uid")), str(metadata.get("resourceVersion"))
