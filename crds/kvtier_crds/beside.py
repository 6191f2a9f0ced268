"""What a candidate may change beside the running baseline, and whether it needs an engine of its own.

Why it exists: the operator refuses a candidate before any agent hears of it, an agent refuses one that it is
granted all the same, and both must draw the line at the same place. Pure; it must not know what an engine or
a rollout is.
"""

from __future__ import annotations

from kvtier_crds.manifest import RuntimeManifest

BESIDE = frozenset({"selector", "contract", "placement"})
"""Fields of which each session may have its own in one engine. Rows, tiers and numerics are one for all."""

OWN_ENGINE = frozenset({"tiers", "page_tokens", "chunk_tokens", "admission"})
"""Fields that an engine is built for, or whose bounds all of its sessions pay from; a candidate that changes
one has an engine beside the baseline's."""

# The version of the words follows from what is said.
_SCHEMA = frozenset({"manifest_schema"})
# What an engine that runs can take over once it is for all of its sessions.
_IN_PLACE = frozenset({"admission"})


def changed_fields(old: RuntimeManifest, new: RuntimeManifest) -> tuple[str, ...]:
    """Names of the manifest's top-level fields that differ, sorted, as the documents write them."""
    return tuple(sorted(_written(name) for name in _changed(old, new)))


def needs_own_engine(running: RuntimeManifest, candidate: RuntimeManifest) -> bool:
    """Whether one engine cannot answer by both."""
    return bool(_changed(running, candidate) - BESIDE)


def needs_rebuilding(running: RuntimeManifest, wanted: RuntimeManifest) -> bool:
    """Whether an engine that runs cannot go on by the wanted manifest, for all of its sessions."""
    return bool(_changed(running, wanted) - BESIDE - _IN_PLACE)


def needs_new_cache(running: RuntimeManifest, candidate: RuntimeManifest) -> str:
    """The sentence for a person why the candidate cannot stand beside the baseline at all; empty when it
    can."""
    fields = _changed(running, candidate) - BESIDE - OWN_ENGINE
    if fields:
        legal = ", ".join(sorted(_written(name) for name in BESIDE | OWN_ENGINE))
        named = ", ".join(sorted(_written(name) for name in fields))
        return (
            f"{named} cannot change beside the running baseline, only in a new KVCache; a rollout may change "
            f"{legal}"
        )
    if candidate.selector is not None and needs_own_engine(running, candidate):
        return (
            "a selector is judged against the baseline's own engine: bring the other changes by a rollout of "
            "their own first"
        )
    return ""


def beside(running: RuntimeManifest, candidate: RuntimeManifest) -> RuntimeManifest:
    """What would run: the baseline with everything that a candidate may change taken from it."""
    taken = BESIDE | OWN_ENGINE | _SCHEMA
    return running.model_copy(update={name: getattr(candidate, name) for name in taken})


def _changed(old: RuntimeManifest, new: RuntimeManifest) -> frozenset[str]:
    before, after = old.model_dump(), new.model_dump()
    return frozenset(name for name in after if before[name] != after[name]) - _SCHEMA


def _written(name: str) -> str:
    return RuntimeManifest.model_fields[name].alias or name
