"""Whether one engine can answer by two manifests at once: the baseline that it runs and a candidate.

Why it exists: the operator refuses a candidate before any agent hears of it, an agent refuses one that it is
granted all the same, and both must draw the line at the same place. Pure; it must not know what an engine or
a rollout is.
"""

from __future__ import annotations

from kvtier_crds.manifest import RuntimeManifest

BESIDE = frozenset({"selector", "contract", "placement"})
"""Fields of which each session may have its own. Rows, tiers and numerics are one for all sessions."""


def changed_fields(old: RuntimeManifest, new: RuntimeManifest) -> tuple[str, ...]:
    """Names of the manifest's top-level fields that differ, sorted."""
    before, after = old.model_dump(by_alias=True), new.model_dump(by_alias=True)
    return tuple(sorted(name for name in after if before.get(name) != after[name]))


def needs_own_engine(running: RuntimeManifest, candidate: RuntimeManifest) -> str:
    """The sentence for a person, naming the fields; empty when one engine can answer by both."""
    fields = [name for name in changed_fields(running, candidate) if name not in BESIDE]
    if not fields:
        return ""
    return (
        f"{', '.join(fields)} cannot change beside the running baseline: all sessions of a cache share its "
        f"rows and tiers; a rollout may change {', '.join(sorted(BESIDE))}"
    )
