"""What KVCache, KVNode and KVRollout share about a release: the stages as words, and the blast radius.

It must not know how a rollout moves between stages.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvtier_crds.models.common import SET_LIST, Label, Struct


class StageName(StrEnum):
    """Stages that a spec declares, in the order in which they are passed."""

    SHADOW = "Shadow"
    CANARY = "Canary"
    RAMP = "Ramp"
    FULL = "Full"


class StatusStage(StrEnum):
    """Where a rollout is."""

    OFF = "Off"
    SHADOW = "Shadow"
    CANARY = "Canary"
    RAMP = "Ramp"
    FULL = "Full"
    EXACT_BASELINE = "ExactBaseline"


class BlastRadius(Struct):
    """How far a change may reach. An absent list or number does not narrow it."""

    tenants: Annotated[tuple[Label, ...], Field(max_length=64, json_schema_extra=SET_LIST)] = ()
    request_classes: Annotated[tuple[Label, ...], Field(max_length=16, json_schema_extra=SET_LIST)] = ()
    max_nodes: Annotated[int, Field(ge=1, le=10000)] | None = None
