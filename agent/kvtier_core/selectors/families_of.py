"""The families of one cache, each made once for what a session's engine sends.

Why it exists: a family is made from a manifest's text, which takes longer than a step. It must not know
sessions.
"""

from __future__ import annotations

from kvtier_core.rowevidence import Need
from kvtier_core.selectors.base import SelectorFamily, build_family
from kvtier_core.selectors.lifecycle.works import IndexWorks
from kvtier_crds.manifest import Geometry, Selector

ANYTHING = frozenset(Need)
"""Of an engine that sends whatever any family needs."""

_MOST = 64


class Families:
    """Threads may ask at once: a family made twice is the same one, what counts is its digest."""

    def __init__(
        self, geometry: Geometry, page_tokens: int, works: IndexWorks | None = None, cache: str = ""
    ) -> None:
        """works: where the families' indexes are built; cache: whose they are."""
        self._geometry = geometry
        self._page_tokens = page_tokens
        self._works = works
        self._cache = cache
        self._made: dict[tuple[str, frozenset[Need]], SelectorFamily] = {}

    def of(self, selector: Selector, given: frozenset[Need]) -> SelectorFamily:
        """The family that runs for sessions whose engine sends `given`. MANIFEST_INVALID; UNSUPPORTED with
        what is missing."""
        key = (selector.model_dump_json(by_alias=True), given)
        found = self._made.get(key)
        if found is None:
            found = build_family(
                selector,
                page_tokens=self._page_tokens,
                query_heads=self._geometry.query_heads,
                kv_heads=self._geometry.kv_heads,
                head_dim=self._geometry.head_dim,
                given=given,
                works=self._works,
                cache=self._cache,
            )
            if len(self._made) >= _MOST:
                self._made = {}
            self._made[key] = found
        return found
