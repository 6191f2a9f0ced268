"""An object against the structural schema of its kind, in the API server's words.

Why it exists: the server's schema is generated from the models, so the same schema judges a file offline.
Values are filled with their defaults first, as the server does. It must not know any kind.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

Json = dict[str, Any]
Said = tuple[str, str]
"""Path of the field ("spec.tiers[0].budget") and what the server says of it."""
INT64_LIMIT = 2**63
"""The server reads what no int64 holds as a float."""

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "number": (int, float),
}


def with_defaults(value: Any, schema: Json) -> Any:
    """A copy in which absent fields that have a default hold it."""
    if isinstance(value, dict):
        filled = dict(value)
        for name, child in schema.get("properties", {}).items():
            if name not in filled and "default" in child:
                filled[name] = copy.deepcopy(child["default"])
            if name in filled:
                filled[name] = with_defaults(filled[name], child)
        return filled
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [with_defaults(item, schema["items"]) for item in value]
    return value


def violations(value: Any, schema: Json, path: str) -> Iterator[Said]:
    """Everything in `value` that the schema does not allow."""
    if schema.get("x-kubernetes-int-or-string"):
        yield from _int_or_string(value, schema, path)
        return
    kind = str(schema.get("type", ""))
    wanted = _TYPES.get(kind)
    if wanted is None:
        return
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "boolean"):
        yield path, f".{path}: expected {_article(kind)}, got {json.dumps(value)}"
        return
    if isinstance(value, dict):
        yield from _object(value, schema, path)
    elif isinstance(value, list):
        yield from _array(value, schema, path)
    elif isinstance(value, str):
        yield from _string(value, schema, path)
    elif isinstance(value, int | float) and kind != "boolean":
        yield from _number(value, schema, path)
    yield from _enum(value, schema, path)


def _object(value: Json, schema: Json, path: str) -> Iterator[Said]:
    properties = schema.get("properties")
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}", f"{path}.{name}: Required value"
    if properties:
        for name, child in value.items():
            if name in properties:
                yield from violations(child, properties[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}", f".{path}.{name}: field not declared in schema"
        return
    items = schema.get("additionalProperties")
    if isinstance(items, dict):
        for name, child in value.items():
            yield from violations(child, items, f"{path}.{name}")
    most = schema.get("maxProperties")
    if most is not None and len(value) > most:
        yield path, f"{path}: Too many: {len(value)}: must have at most {most} items"


def _array(value: list[Any], schema: Json, path: str) -> Iterator[Said]:
    least, most = schema.get("minItems"), schema.get("maxItems")
    if least is not None and len(value) < least:
        yield path, f"{path}: Invalid value: {len(value)}: {path} in body should have at least {least} items"
    if most is not None and len(value) > most:
        yield path, f"{path}: Too many: {len(value)}: must have at most {most} items"
    for at, item in enumerate(value):
        yield from violations(item, schema["items"], f"{path}[{at}]")
    yield from _repeats(value, schema, path)


def _repeats(value: list[Any], schema: Json, path: str) -> Iterator[Said]:
    kind = schema.get("x-kubernetes-list-type")
    seen = set()
    for item in value:
        if kind == "map" and isinstance(item, dict):
            pairs = [(key, item.get(key)) for key in schema["x-kubernetes-list-map-keys"]]
            name = "key [" + ",".join(f"{key}={json.dumps(found)}" for key, found in pairs) + "]"
        elif kind == "set":
            name = f"value {json.dumps(item)}"
        else:
            return
        if name in seen:
            yield path, f".{path}: duplicate entries for {name}"
        seen.add(name)


def _string(value: str, schema: Json, path: str) -> Iterator[Said]:
    least, most, pattern = schema.get("minLength"), schema.get("maxLength"), schema.get("pattern")
    if least is not None and len(value) < least:
        yield path, _invalid(path, value, f"should be at least {least} chars long")
    if most is not None and len(value) > most:
        yield path, f"{path}: Too long: may not be more than {most} bytes"
    if pattern is not None and re.search(pattern, value) is None:
        yield path, _invalid(path, value, f"should match '{pattern}'")
    if schema.get("format") == "date-time":
        try:
            datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            yield path, _invalid(path, value, 'must be of type date-time: "' + value + '"')


def _number(value: float, schema: Json, path: str) -> Iterator[Said]:
    if isinstance(value, int) and not -INT64_LIMIT <= value < INT64_LIMIT:
        yield path, f'{path}: Invalid value: "float64": {path} in body must be of type int64: "float64"'
        return
    least, most, step = schema.get("minimum"), schema.get("maximum"), schema.get("multipleOf")
    if least is not None and (value < least or (value == least and schema.get("exclusiveMinimum"))):
        than = "greater than" if schema.get("exclusiveMinimum") else "greater than or equal to"
        yield path, _invalid(path, value, f"should be {than} {least}")
    if most is not None and (value > most or (value == most and schema.get("exclusiveMaximum"))):
        than = "less than" if schema.get("exclusiveMaximum") else "less than or equal to"
        yield path, _invalid(path, value, f"should be {than} {most}")
    if step is not None and value % step:
        yield path, _invalid(path, value, f"should be a multiple of {step}")


def _enum(value: Any, schema: Json, path: str) -> Iterator[Said]:
    legal = schema.get("enum")
    if legal is not None and value not in legal:
        names = ", ".join(json.dumps(one) for one in legal)
        yield path, f"{path}: Unsupported value: {json.dumps(value)}: supported values: {names}"


def _int_or_string(value: Any, schema: Json, path: str) -> Iterator[Said]:
    if isinstance(value, bool) or not isinstance(value, int | str):
        kind = "boolean" if isinstance(value, bool) else "number" if isinstance(value, float) else "object"
        yield path, _invalid(path, value, f'must be of type integer,string: "{kind}"')
    elif isinstance(value, str):
        yield from _string(value, schema, path)
    else:
        yield from _number(value, schema, path)


def _invalid(path: str, value: Any, why: str) -> str:
    return f"{path}: Invalid value: {json.dumps(value)}: {path} in body {why}"


def _article(kind: str) -> str:
    return {"object": "map", "array": "list", "integer": "numeric", "boolean": "boolean"}.get(kind, kind)
