"""Whose indexes are counted together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Name:
    """One selector of one cache. cache: what tells one cache's from another's."""

    cache: str
    family: str
    selector_digest: str
