"""What each cache is found to run: digests recomputed from the live objects, beside those that were applied
and granted.

Why it exists: a digest that is repeated says nothing of what has become of an engine since. The questions are
put together on the event loop, answered in a thread, and taken on the loop again, where what was asked of
something else by then is left. It must not know fences, nor what follows from a difference.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier_agent.cachehost import CacheHost
from kvtier_agent.candidateengines import paired
from kvtier_agent.engine_port import EnginePort
from kvtier_agent.manifests import lane_manifest
from kvtier_agent.seats import Slot
from kvtier_core.release.leases import GrantTerms
from kvtier_crds.canonical import sha256_digest
from kvtier_crds.manifest import RuntimeManifest

log = logging.getLogger(__name__)

FRESH_NS = 5_000_000_000
"""For how long what was recomputed is told: several rounds of the house-keeping. An agent that cannot do it
any more says so by saying nothing."""


class Named:
    """The digest of the manifest that was seen last. Manifests are immutable, so the same object has the same
    digest, and so have the same canonical bytes, which leave nothing out."""

    def __init__(self) -> None:
        self._manifest: RuntimeManifest | None = None
        self._data = b""
        self._digest = ""

    def digest(self, manifest: RuntimeManifest) -> str:
        if manifest is not self._manifest:
            data = manifest.canonical()
            if data != self._data:
                self._data, self._digest = data, sha256_digest(data)
            self._manifest = manifest
        return self._digest


@dataclass(frozen=True)
class Question:
    """What to recompute of a cache. beside: the candidate's own engine, None where it has none."""

    host: CacheHost
    standing: int
    engine: EnginePort
    terms: GrantTerms | None
    beside: EnginePort | None
    at_ns: int


@dataclass(frozen=True)
class Running:
    """What was found, and of what. candidate: empty without one; failure: why nothing was found."""

    of: Question
    baseline: str = ""
    candidate: str = ""
    failure: str = ""


class RunningDigests:
    """Of one node. `ask`, `take` and what reads run on the event loop, `answer` in one thread at a time."""

    def __init__(self) -> None:
        self._found: dict[str, Running] = {}
        self._named: dict[str, tuple[CacheHost, Named, Named]] = {}

    @staticmethod
    def ask(host: CacheHost, now_ns: int) -> Question | None:
        """None while the cache's engine takes over another baseline."""
        standing = host.standing
        if standing is None:
            return None
        lease = host.enforcement.lease()
        engine = paired(host)
        terms = None if lease is None else lease.terms
        beside = None if terms is None else candidate_engine(engine.beside, terms)
        return Question(host, standing, engine.running.engine, terms, beside, now_ns)

    def answer(self, question: Question) -> Running:
        """Recomputes; an engine that fails is an answer."""
        host = question.host
        kept = self._named.get(host.name.uid)
        if kept is None or kept[0] is not host:
            kept = self._named[host.name.uid] = (host, Named(), Named())
        try:
            live = question.engine.live_manifest()
            candidate = candidate_manifest(live, question.terms, question.beside)
            second = "" if candidate is None else kept[2].digest(candidate)
            return Running(question, kept[1].digest(live), second)
        except Exception as error:
            log.exception("cache %s: what runs cannot be recomputed", host.name.uid)
            return Running(question, failure=f"{type(error).__name__}: {error}")

    def take(self, found: Running) -> bool:
        """Whether it says another thing of a difference than what was known before."""
        host = found.of.host
        if host.standing != found.of.standing:
            return False
        before = self.difference(host)
        self._found[host.name.uid] = found
        after = self.difference(host)
        if after and after != before:
            log.error("cache %s: %s", host.name.uid, after)
        return after != before

    def retain(self, hosts: Mapping[str, CacheHost]) -> None:
        """Forgets all others."""
        for known in (self._found, self._named):
            for uid in [uid for uid in list(known) if uid not in hosts]:
                known.pop(uid, None)

    def told(self, host: CacheHost, now_ns: int) -> tuple[str, str]:
        """Digests of what runs as baseline and of what answers under the lease that is held now; each empty
        where that is not known of this moment."""
        found = self._of(host)
        if found is None or now_ns - found.of.at_ns > FRESH_NS:
            return "", ""
        return found.baseline, found.candidate if found.of.terms is _held(host) else ""

    def difference(self, host: CacheHost) -> str:
        """In one sentence, how what runs is not what was applied and granted; empty: it is, for all that is
        known."""
        found = self._of(host)
        if found is None:
            return ""
        if found.failure:
            return f"what runs cannot be recomputed: {found.failure}"
        if found.baseline != host.baseline_digest:
            return f"runs {found.baseline}, and {host.baseline_digest} was applied"
        terms = _held(host)
        if terms is None or terms is not found.of.terms or found.candidate == terms.candidate_digest:
            return ""
        runs = found.candidate or "nothing"
        return f"runs {runs} for the candidate, and {terms.candidate_digest} was granted"

    def _of(self, host: CacheHost) -> Running | None:
        found = self._found.get(host.name.uid)
        current = found is not None and found.of.host is host and found.of.standing == host.standing
        return found if current else None


def candidate_digest(host: CacheHost) -> str:
    """Of the candidate whose lease is held, recomputed now; empty without one."""
    terms, engine = _held(host), paired(host)
    if terms is None:
        return ""
    beside = candidate_engine(engine.beside, terms)
    candidate = candidate_manifest(engine.running.engine.live_manifest(), terms, beside)
    return "" if candidate is None else candidate.digest()


def candidate_engine(beside: Slot | None, terms: GrantTerms) -> EnginePort | None:
    """The engine of its own that answers under these terms; None without one."""
    return beside.engine if terms.own and beside is not None and not beside.retired else None


def candidate_manifest(
    live: RuntimeManifest, terms: GrantTerms | None, beside: EnginePort | None
) -> RuntimeManifest | None:
    """What answers under the terms now; None where nothing does. live: what runs as baseline."""
    if terms is None:
        return None
    if not terms.own:
        return lane_manifest(live, terms)
    return None if beside is None else beside.live_manifest()


def _held(host: CacheHost) -> GrantTerms | None:
    lease = host.enforcement.lease()
    return None if lease is None else lease.terms
