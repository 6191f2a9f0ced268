"""Reads files of objects and judges them: one by one as the API server does, then together.

Why it exists: `kubectl kvtier lint` before a commit, with no cluster. Kinds of others pass unread. It must
not print.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kubectl_kvtier.lint.findings import Finding, Severity
from kubectl_kvtier.lint.references import Placed, cross_check
from kubectl_kvtier.lint.rules import broken_rules
from kubectl_kvtier.lint.runnable import cannot_run
from kubectl_kvtier.lint.schema import violations, with_defaults
from kubectl_kvtier.outcomes import Exit, Failure
from kvtier_crds.generate import schema_of
from kvtier_crds.models import KINDS, KVRollout
from kvtier_crds.models.common import API_VERSION, GROUP, Resource

Json = dict[str, Any]
_BY_KIND = {kind.KIND: kind for kind in KINDS}
MAX_NAME = 253
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUFFIXES = (".yaml", ".yml", ".json")


class _Loader(yaml.SafeLoader):
    """As kubectl reads YAML: a date is a string."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read(paths: Sequence[Path]) -> list[tuple[str, Json]]:
    """(where, object) of each document; folders are searched. Failure USAGE for what cannot be read."""
    found = []
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted(one for one in path.rglob("*") if one.suffix in _SUFFIXES)
        for file in files:
            found += parse(str(file), _text(file))
    return found


def parse(name: str, text: str) -> list[tuple[str, Json]]:
    try:
        documents = list(yaml.load_all(text, _Loader))
    except yaml.YAMLError as error:
        raise Failure(Exit.USAGE, f"{name}: no YAML: {error}") from error
    found = []
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict):
            raise Failure(Exit.USAGE, f"{name}: a document must be an object, not {type(document).__name__}")
        items = document.get("items") if document.get("kind") == "List" else None
        for one in items if isinstance(items, list) else [document]:
            if not isinstance(one, dict):
                raise Failure(Exit.USAGE, f"{name}: an item must be an object, not {type(one).__name__}")
            found.append((name, one))
    return found


def lint(documents: Sequence[tuple[str, Json]], default_namespace: str = "default") -> list[Finding]:
    """Errors of each object, then, of those without any, what they say of each other."""
    findings: list[Finding] = []
    sound: list[Placed] = []
    seen: set[tuple[str, str, str]] = set()
    for name, document in documents:
        if not str(document.get("apiVersion", "")).startswith(f"{GROUP}/"):
            continue
        metadata = document.get("metadata")
        told = f"{document.get('kind')}/{metadata.get('name')}" if isinstance(metadata, dict) else "?"
        where = f"{name}: {told}"
        found = list(_one(document, where))
        findings += found
        if found or not isinstance(metadata, dict):
            continue
        key = (document["kind"], str(metadata.get("namespace", "")), str(metadata["name"]))
        if key in seen:
            findings.append(Finding(Severity.ERROR, where, "", "the same object stands in these files twice"))
        seen.add(key)
        try:
            sound.append(Placed(where, _BY_KIND[document["kind"]].model_validate(document)))
        except ValidationError as error:
            for one in error.errors():
                field = ".".join(str(part) for part in one["loc"])
                findings.append(Finding(Severity.ERROR, where, field, f"{field}: {one['msg']}"))
            continue
        if document["kind"] == KVRollout.KIND:
            findings += cannot_run(with_defaults(document, _schema(KVRollout))["spec"], where)
    return [*findings, *cross_check(sound, default_namespace)]


def _one(document: Json, where: str) -> Iterator[Finding]:
    kind = _BY_KIND.get(str(document.get("kind")))
    if document.get("apiVersion") != API_VERSION or kind is None:
        names = ", ".join(sorted(_BY_KIND))
        yield Finding(Severity.ERROR, where, "kind", f"no such kind: {API_VERSION} has {names}")
        return
    metadata = document.get("metadata") or {}
    if not isinstance(metadata, dict):
        yield Finding(Severity.ERROR, where, "metadata", ".metadata: expected map")
        return
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        yield Finding(Severity.ERROR, where, "metadata.name", "metadata.name: Required value")
        return
    if len(name) > MAX_NAME or _NAME.fullmatch(name) is None:
        legal = (
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
            f"and must start and end with an alphanumeric character, at most {MAX_NAME} of them"
        )
        said = f"metadata.name: Invalid value: {json.dumps(name)}: {legal}"
        yield Finding(Severity.ERROR, where, "metadata.name", said)
    schema = _schema(kind)
    filled = with_defaults(document, schema)
    wrong = []
    for part in ("spec", "status"):
        if part in filled:
            wrong += list(violations(filled[part], schema["properties"][part], part))
        elif part in schema["required"]:
            wrong.append((part, f"{part}: Required value"))
    if not wrong:
        wrong = list(broken_rules(filled, schema, ""))
    for field, message in wrong:
        yield Finding(Severity.ERROR, where, field, message)


@cache
def _schema(kind: type[Resource]) -> Json:
    return schema_of(kind)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(Exit.USAGE, f"{file}: {error}") from error
