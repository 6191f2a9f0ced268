"""What a cache's selectors are, what they ask of engines, and how their indexes are.

Why it exists: questions about selectors are asked while steps run, and none of them may wait for one. It must
not know sessions or rows."""

from __future__ import annotations

from kvtier_core.rowevidence import Need
from kvtier_core.selectors.base import SelectorFamily
from kvtier_core.selectors.families_of import ANYTHING, Families
from kvtier_core.selectors.lifecycle.works import IndexState, IndexWorks
from kvtier_core.selectors.wanted import Wanted, wanted_by
from kvtier_crds.manifest import Geometry, Selector


class SelectorDesk:
    """Of one cache; thread-safe. Everything about a selector may be refused with MANIFEST_INVALID."""

    def __init__(self, geometry: Geometry, page_tokens: int, works: IndexWorks, cache: str) -> None:
        self._layers = geometry.layers
        self.works = works
        self._cache = cache
        self._families = Families(geometry, page_tokens, works, cache)

    def family(self, selector: Selector, given: frozenset[Need] = ANYTHING) -> SelectorFamily:
        """The family that runs for sessions whose engine sends `given`. UNSUPPORTED with what is missing."""
        return self._families.of(selector, given)

    def check(self, selector: Selector) -> None:
        """Whether a candidate's selector can run at all, for sessions that give what it needs."""
        self.family(selector)

    def digest(self, selector: Selector) -> str:
        """What names the selector in receipts and of its indexes."""
        return self.family(selector).digest

    def wanted(self, selector: Selector) -> Wanted:
        """What the selector asks of a session's engine."""
        return wanted_by(self.family(selector), self._layers)

    def indexes(self) -> list[IndexState]:
        """Of each selector's indexes."""
        return self.works.states(self._cache)

    def forget(self) -> None:
        """The cache has ended: drops its counts."""
        self.works.forget(self._cache)
