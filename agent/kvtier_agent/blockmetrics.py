"""Metrics of shared blocks: what calls asked and got, and what the stores count of themselves.

Why it exists: an operator sees hits, stalls, lack of room and deletions that do not end without asking each
cache. Labels are closed sets and this node's tier classes; never tenants, keys or caches. Calls count as they
end; the stores' own numbers are read when somebody scrapes. It must not know the wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as Count
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvtier_agent.blockhost import BlockHost
from kvtier_agent.quickmetrics import ChildOf
from kvtier_core.blockstore.admitting import UNLIMITED
from kvtier_core.blockstore.outcomes import PutOutcome, Stored

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OVERDUE_SECONDS = 60.0
Hosts = Callable[[], Iterable[BlockHost]]


class BlockMetrics:
    """Counted by calls. Reasons are the closed set of the wire."""

    def __init__(self, registry: CollectorRegistry) -> None:
        lookups = Count(
            "kvtier_agent_block_lookups",
            "Lookups by what they found: all, some or none of their blocks",
            ["found"],
            registry=registry,
        )
        self._lookups = ChildOf(lookups.labels)
        looked_up = Count(
            "kvtier_agent_block_lookup_blocks",
            "Blocks of lookups by outcome: hit, miss",
            ["outcome"],
            registry=registry,
        )
        self._looked_up = ChildOf(looked_up.labels)
        stored = Count(
            "kvtier_agent_block_store_blocks",
            "Blocks of store calls by outcome, and for refusals by reason",
            ["outcome", "reason"],
            registry=registry,
        )
        self._stored = ChildOf(stored.labels)
        self._stored_bytes = Count(
            "kvtier_agent_block_store_bytes", "Bytes received by store calls", registry=registry
        )
        self._store_seconds = Histogram(
            "kvtier_agent_block_store_duration_seconds",
            "Duration of store calls, waits for room and for the client included",
            buckets=_SECONDS,
            registry=registry,
        )
        self._loaded = Count("kvtier_agent_block_load_blocks", "Blocks sent by load calls", registry=registry)
        self._loaded_bytes = Count(
            "kvtier_agent_block_load_bytes", "Bytes sent by load calls", registry=registry
        )
        self._load_seconds = Histogram(
            "kvtier_agent_block_load_duration_seconds",
            "Duration of load calls, waits for the client included",
            buckets=_SECONDS,
            registry=registry,
        )
        self.load_wait_seconds = Histogram(
            "kvtier_agent_block_load_wait_seconds",
            "From a load call to its first block",
            buckets=_SECONDS,
            registry=registry,
        )
        refusals = Count(
            "kvtier_agent_block_load_refusals",
            "Load calls that ended before their last block, by reason",
            ["reason"],
            registry=registry,
        )
        self.load_refusals = ChildOf(refusals.labels)
        self.deletions_requested = Count(
            "kvtier_agent_block_deletions_requested", "Orders to delete", registry=registry
        )

    def looked_up(self, found: int, asked: int) -> None:
        self._lookups["all" if found == asked else "some" if found else "none",].inc()
        self._looked_up["hit",].inc(found)
        self._looked_up["miss",].inc(asked - found)

    def stored(self, outcomes: Sequence[Stored], received_bytes: int, seconds: float) -> None:
        for (outcome, reason), count in Counter(_label(each) for each in outcomes).items():
            self._stored[outcome, reason].inc(count)
        self._stored_bytes.inc(received_bytes)
        self._store_seconds.observe(seconds)

    def loaded(self, blocks: int, sent_bytes: int, seconds: float) -> None:
        self._loaded.inc(blocks)
        self._loaded_bytes.inc(sent_bytes)
        self._load_seconds.observe(seconds)


def _label(stored: Stored) -> tuple[str, str]:
    published = stored.outcome in (PutOutcome.STORED, PutOutcome.EXISTED)
    return stored.outcome.value, "" if published else stored.reason.value


class StoreCollector(Collector):
    """What the stores of this agent count, summed over its caches, read at each scrape. `clock`: seconds, the
    stores'."""

    def __init__(self, registry: CollectorRegistry, hosts: Hosts, clock: Callable[[], float]) -> None:
        self._hosts = hosts
        self._clock = clock
        self._since: dict[tuple[int, int], float] = {}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        hosts = list(self._hosts())
        yield self._moved(hosts)
        yield from self._credits(hosts)
        yield from self._coalescing(hosts)
        yield from self._tiers(hosts)
        yield from self._through(hosts)
        yield from self._deletions(hosts)

    def _moved(self, hosts: Sequence[BlockHost]) -> Metric:
        family = CounterMetricFamily(
            "kvtier_agent_block_moved_bytes",
            "Payload bytes moved between tiers and published, by source and destination class",
            labels=["source", "destination"],
        )
        total: Counter[tuple[str, str]] = Counter()
        for host in hosts:
            total.update(dict(host.store.moves.moved_bytes))
        for (source, destination), size in total.items():
            family.add_metric([source, destination], size)
        return family

    def _credits(self, hosts: Sequence[BlockHost]) -> Iterator[Metric]:
        free = GaugeMetricFamily(
            "kvtier_agent_block_credits_free", "Free credits by resource", labels=["resource"]
        )
        granted = GaugeMetricFamily(
            "kvtier_agent_block_credits_granted", "Credits held by work under way", labels=["resource"]
        )
        refused = CounterMetricFamily(
            "kvtier_agent_block_credits_refused", "Acquisitions that a resource stopped", labels=["resource"]
        )
        totals: dict[str, list[int]] = {}
        twice = 0
        for host in hosts:
            twice += host.store.ledger.double_releases
            for resource, use in host.store.ledger.use().items():
                if use.total >= UNLIMITED:
                    continue
                row = totals.setdefault(resource.label, [0, 0, 0])
                for at, value in enumerate((use.free, use.granted, use.refused)):
                    row[at] += value
        for label, (one, two, three) in totals.items():
            free.add_metric([label], one)
            granted.add_metric([label], two)
            refused.add_metric([label], three)
        yield from (free, granted, refused)
        yield CounterMetricFamily(
            "kvtier_agent_block_credits_released_twice", "Releases of what was released: 0", value=twice
        )

    def _coalescing(self, hosts: Sequence[BlockHost]) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "kvtier_agent_block_reads",
            "Reads of blocks by kind: from memory, on a backend, joined to one in flight, kept apart",
            labels=["kind"],
        )
        kinds: Counter[str] = Counter()
        saved = 0
        for host in hosts:
            reads, counts = host.store.reads, host.store.reads.flights.counts
            kinds.update(
                memory=reads.hits,
                backend=reads.fetched,
                retried=reads.retried,
                joined=counts["joined"],
                separate=counts["separate"],
                orphaned=counts["orphaned"],
                late=counts["late"],
            )
            saved += counts["joined"] * host.block_bytes
        for kind, count in kinds.items():
            family.add_metric([kind], count)
        yield family
        yield CounterMetricFamily(
            "kvtier_agent_block_reads_saved_bytes", "Bytes not read since a read was joined", value=saved
        )

    def _tiers(self, hosts: Sequence[BlockHost]) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "kvtier_agent_block_tier_blocks", "Copies of blocks by tier class", labels=["tier_class"]
        )
        evicted = CounterMetricFamily(
            "kvtier_agent_block_evictions",
            "Evictions by tier class and kind: demoted, dropped, lost (a last copy), refused",
            labels=["tier_class", "kind"],
        )
        held: Counter[str] = Counter()
        gone: Counter[tuple[str, str]] = Counter()
        for host in hosts:
            store = host.store
            names = [tier.name for tier in store.parts.tiers]
            for name, count in zip(names, store.directory.replicas.counts, strict=False):
                held[name] += count
            for (tier, kind), count in list(store.reclaim.evictor.counts.items()):
                gone[names[tier], kind] += count
        for name, count in held.items():
            blocks.add_metric([name], count)
        for (name, kind), count in gone.items():
            evicted.add_metric([name, kind], count)
        yield from (blocks, evicted)
        yield GaugeMetricFamily(
            "kvtier_agent_block_pins", "Pins by id that are held", value=sum(len(host.pins) for host in hosts)
        )

    def _through(self, hosts: Sequence[BlockHost]) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "kvtier_agent_block_durable_waiting",
            "Blocks whose writers wait until they are durable",
            value=sum(len(host.store.through) for host in hosts),
        )
        ended = CounterMetricFamily(
            "kvtier_agent_block_durable_blocks",
            "Blocks that were to be durable before their answer, by outcome: durable, or why not",
            labels=["outcome"],
        )
        total: Counter[str] = Counter()
        for host in hosts:
            total.update(dict(host.store.through.counts))
        for outcome, count in total.items():
            if outcome != "asked":
                ended.add_metric([outcome], count)
        yield from (waiting, ended)
        kept = GaugeMetricFamily("kvtier_agent_block_kept_blocks", "Blocks that may not be lost")
        limit = GaugeMetricFamily("kvtier_agent_block_kept_limit_blocks", "As many of them as may be stored")
        kept.add_metric([], sum(host.store.directory.kept for host in hosts))
        limit.add_metric([], sum(host.store.kept_limit for host in hosts))
        yield from (kept, limit)

    def _deletions(self, hosts: Sequence[BlockHost]) -> Iterator[Metric]:
        now = self._clock()
        open_now = {
            (at, each.number) for at, host in enumerate(hosts) for each in host.store.deletions.open()
        }
        self._since = {key: self._since.get(key, now) for key in open_now}
        late = sum(now - since >= _OVERDUE_SECONDS for since in self._since.values())
        yield GaugeMetricFamily(
            "kvtier_agent_block_deletions_open",
            "Deletions that have begun and not ended",
            value=len(open_now),
        )
        yield GaugeMetricFamily(
            "kvtier_agent_block_deletions_overdue", "Of these, begun over a minute ago", value=late
        )
