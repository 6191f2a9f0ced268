"""The CEL rules that stand in a schema, run without a server.

Rules over `oldSelf` compare two versions of an object; a file has one, so they are left out, but for those
that can do without (`optionalOldSelf`). Functions of Kubernetes that CEL itself does not have are given here.
It must not know what any rule says.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

from kubectl_kvtier.lint.schema import Json, Said
from kvtier_crds.quantity import INT64_MAX, QuantityError, parse_amount


class RuleBroken(Exception):
    """A rule that cannot be run: a defect of ours and not of the file. Names the rule."""


def broken_rules(value: Any, schema: Json, path: str) -> Iterator[Said]:
    """What the rules on `value` and on everything in it refuse."""
    for rule in schema.get("x-kubernetes-validations") or ():
        alone = "oldSelf" not in rule["rule"] or rule.get("optionalOldSelf", False)
        if alone and not _holds(rule["rule"], value):
            where = path + str(rule.get("fieldPath") or "")
            yield where, f"{where}: Invalid value: {_message(rule, value)}"
    if isinstance(value, dict):
        extra = schema.get("additionalProperties")
        for name, child in value.items():
            inner = (schema.get("properties") or {}).get(name) or (extra if isinstance(extra, dict) else None)
            if inner is not None:
                yield from broken_rules(child, inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from broken_rules(item, schema.get("items") or {}, f"{path}[{at}]")


def _message(rule: Json, value: Any) -> str:
    given = rule.get("messageExpression")
    return str(_run(given, value)) if given else str(rule.get("message") or rule["rule"])


def _holds(rule: str, value: Any) -> bool:
    return bool(_run(rule, value))


def _run(expression: str, value: Any) -> Any:
    found = _program(expression).eval(data={"self": value, "oldSelf": False})
    if found.type() == cel.Type.ERROR:
        raise RuleBroken(f"{expression}: {found.value()}")
    return found.plain_value()


@cache
def _program(expression: str) -> Any:
    try:
        return _environment().compile(expression)
    except RuntimeError as error:
        raise RuleBroken(f"{expression}: {error}") from error


@cache
def _environment() -> Any:
    text, whole, truth = cel.Type.STRING, cel.Type.INT, cel.Type.BOOL
    # A quantity is its bytes: our rules compare amounts of bytes and nothing else. What is more than CEL's
    # integers hold is all the same too much.
    functions = [
        _function(
            "quantity", whole, [text], False, lambda given: min(parse_amount(given, "value"), INT64_MAX)
        ),
        _function("isQuantity", truth, [text], False, _is_quantity),
        _function("isGreaterThan", truth, [whole, whole], True, lambda one, other: one > other),
        _function("isLessThan", truth, [whole, whole], True, lambda one, other: one < other),
        # Of `oldSelf`, which stands for no object.
        _function("hasValue", truth, [truth], True, lambda there: there),
        _function("value", cel.Type.DYN, [truth], True, lambda there: there),
        _function("isSorted", truth, [cel.Type.LIST], True, lambda items: list(items) == sorted(items)),
    ]
    return cel.NewEnv(
        variables={"self": cel.Type.DYN, "oldSelf": truth},
        extensions=[ext_strings.ExtStrings()],
        functions=functions,
    )


def _function(name: str, result: Any, parameters: list[Any], member: bool, run: Any) -> Any:
    return cel.FunctionDecl(name, [cel.Overload(f"k8s_{name}", result, parameters, member, run)])


def _is_quantity(text: str) -> bool:
    try:
        parse_amount(text, "value")
    except QuantityError:
        return False
    return True
