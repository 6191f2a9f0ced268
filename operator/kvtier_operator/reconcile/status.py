"""Writes a status only when it says something else than what is there. Thin; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_operator.kube.resources import key_of
from kvtier_operator.ports import JsonObject, KubeApi


async def write_status(api: KubeApi, obj: JsonObject, wanted: JsonObject, owned: Sequence[str]) -> bool:
    """Server-side apply of the status of `obj`, unless all `owned` fields are already as `wanted` says
    (absent included). `wanted` must hold owned fields only. True when something was written."""
    stray = set(wanted) - set(owned)
    if stray:
        raise ValueError(f"status fields that this reconciler does not own: {sorted(stray)}")
    current = obj.get("status") or {}
    if all(current.get(name) == wanted.get(name) for name in owned):
        return False
    await api.patch_status(key_of(obj), wanted, uid=obj["metadata"]["uid"])
    return True
