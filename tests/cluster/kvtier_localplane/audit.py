"""Compares the rights that a ServiceAccount has with those that it used, by the API server's audit log.

Rights are flattened into single grants (verb, group, resource, name, namespace), so that a verb that nobody
uses is seen also when its rule is used otherwise. It knows RBAC and the audit format; it must not know what
the ServiceAccount is for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

ANY = "*"


@dataclass(frozen=True, order=True)
class Grant:
    """One verb on one resource. `resource` holds a subresource as in RBAC ("kvcaches/status").

    name: only this object, empty for all. namespace: only there, empty for the whole cluster.
    """

    verb: str
    group: str
    resource: str
    name: str = ""
    namespace: str = ""

    def allows(self, use: Use) -> bool:
        return (
            self.verb in (use.verb, ANY)
            and self.group in (use.group, ANY)
            and self.resource in (use.resource, ANY)
            and self.name in ("", use.name)
            and self.namespace in ("", use.namespace)
        )

    def __str__(self) -> str:
        where = f" in {self.namespace}" if self.namespace else ""
        which = f" {self.name}" if self.name else ""
        return f"{self.verb} {_qualified(self.resource, self.group)}{which}{where}"


@dataclass(frozen=True, order=True)
class Use:
    """One kind of request that was made, with the object's name and namespace where it had one."""

    verb: str
    group: str
    resource: str
    name: str
    namespace: str

    def __str__(self) -> str:
        where = f" in {self.namespace}" if self.namespace else ""
        return f"{self.verb} {_qualified(self.resource, self.group)} {self.name or '(all)'}{where}"


@dataclass(frozen=True)
class Request:
    """One request as the API server saw it. at: Unix seconds at which it came in. code: HTTP status."""

    at: float
    use: Use
    code: int
    message: str = ""

    @property
    def verb(self) -> str:
        return self.use.verb

    @property
    def resource(self) -> str:
        return self.use.resource

    @property
    def refused(self) -> bool:
        """For want of a right: by RBAC, or later, where server-side apply lacks `create` or a role may
        not be bound. A namespace that goes away refuses with the same code, and is no want."""
        return self.code == 403 and "being terminated" not in self.message

    def uses(self) -> Iterator[Use]:
        """Server-side apply of an object that is not there asks for create as well as patch."""
        yield self.use
        if self.verb == "patch" and self.code == 201:
            yield replace(self.use, verb="create")


@dataclass(frozen=True)
class AuditReport:
    """used: asked and allowed. denied: refused for want of a right. unused: granted, but never needed."""

    used: frozenset[Use]
    denied: frozenset[Use]
    unused: tuple[Grant, ...]

    def explain(self) -> str:
        """For an assertion's message: empty when nothing is missing and nothing is left over."""
        lines = [f"missing: {use}" for use in sorted(self.denied)]
        lines += [f"unused: {grant}" for grant in self.unused]
        return "\n".join(lines)


def read_grants(files: Iterable[Path], *, service_account: str, namespace: str) -> tuple[Grant, ...]:
    """Every grant that bindings in these files give to the ServiceAccount by name (not by group), sorted.

    A RoleBinding confines the grants of its role to its namespace. Raises ValueError when a binding names a
    role that is not in the files.
    """
    documents = [one for file in files for one in yaml.safe_load_all(file.read_text()) if one]
    roles = {
        (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]): one for one in documents
    }
    grants: set[Grant] = set()
    for binding in documents:
        if binding["kind"] not in ("ClusterRoleBinding", "RoleBinding"):
            continue
        if not any(_is_subject(one, service_account, namespace) for one in binding.get("subjects") or []):
            continue
        place = binding["metadata"].get("namespace", "") if binding["kind"] == "RoleBinding" else ""
        reference = binding["roleRef"]
        key = (reference["kind"], place if reference["kind"] == "Role" else "", reference["name"])
        if key not in roles:
            raise ValueError(
                f"{binding['kind']} {binding['metadata']['name']}: no {key[0]} {key[2]} in these files"
            )
        for rule in roles[key].get("rules") or []:
            grants |= set(_flatten(rule, place))
    return tuple(sorted(grants))


def requests(audit_log: Path, username: str) -> Iterator[Request]:
    """Every finished request of the user on a resource, in the order of the log.

    A half-written last line is left out; a watch is there twice, when it was accepted and when it ended.
    """
    with audit_log.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return
            event = json.loads(line)
            if event["user"].get("username") == username and "objectRef" in event:
                yield _request(event)


def report(audit_log: Path, grants: Sequence[Grant], *, service_account: str, namespace: str) -> AuditReport:
    """Compares. `bind` and `escalate` are never asked as requests of their own: `bind` counts as used when a
    binding was written, since the API server demanded it then."""
    used: set[Use] = set()
    denied: set[Use] = set()
    for request in requests(audit_log, f"system:serviceaccount:{namespace}:{service_account}"):
        (denied if request.refused else used).update(request.uses())
    implied = {
        Use("bind", use.group, resource, name, "")
        for use in used
        if use.resource in ("rolebindings", "clusterrolebindings")
        and use.verb in ("create", "patch", "update")
        for resource in ("roles", "clusterroles")
        for name in {grant.name for grant in grants if grant.verb == "bind"}
    }
    return AuditReport(
        frozenset(used),
        frozenset(denied),
        tuple(grant for grant in grants if not any(grant.allows(use) for use in used | implied)),
    )


def _request(event: Mapping[str, Any]) -> Request:
    target, status = event["objectRef"], event.get("responseStatus") or {}
    resource = target["resource"]
    if target.get("subresource"):
        resource = f"{resource}/{target['subresource']}"
    use = Use(
        event["verb"],
        target.get("apiGroup", ""),
        resource,
        target.get("name", ""),
        target.get("namespace", ""),
    )
    return Request(
        at=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
        use=use,
        code=int(status.get("code", 0)),
        message=status.get("message", ""),
    )


def _flatten(rule: Mapping[str, Any], namespace: str) -> Iterator[Grant]:
    for group in rule.get("apiGroups") or []:
        for resource in rule.get("resources") or []:
            for verb in rule["verbs"]:
                for name in rule.get("resourceNames") or [""]:
                    yield Grant(verb, group, resource, name, namespace)


def _is_subject(subject: Mapping[str, Any], name: str, namespace: str) -> bool:
    return (
        subject["kind"] == "ServiceAccount"
        and subject["name"] == name
        and subject.get("namespace") == namespace
    )


def _qualified(resource: str, group: str) -> str:
    plain, _, sub = resource.partition("/")
    return f"{plain}.{group}{'/' + sub if sub else ''}" if group else resource
