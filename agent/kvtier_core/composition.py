"""The parts of one engine over one set of tiers, put together: one directory, one ledger, one metadata lock.

Why it exists: who shares what with whom is decided once, when an engine is built, and in one place. It must
not know which sessions there are, nor what becomes of the parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from kvtier_core.assembly import LiveTier, Node
from kvtier_core.credits import PINNED, STAGING, CreditLedger, Grant, Ledger
from kvtier_core.errors import CoreError, Reason
from kvtier_core.hotunits import HotUnits, UnitGrid
from kvtier_core.lanes import Lanes
from kvtier_core.layout import ChunkLayout
from kvtier_core.placement import Placement
from kvtier_core.planner import PlanTerms
from kvtier_core.planning.facts import Rates
from kvtier_core.resident import ResidentDecode
from kvtier_core.selectors.lifecycle.works import IndexWorks
from kvtier_core.sessionchunks import SessionChunks
from kvtier_core.sessions import RowStore, Session
from kvtier_core.sharing import SharedBlocks, directory_of, ledger_of, let_go, recoveries
from kvtier_core.stats import Statistics
from kvtier_core.step import StepRunner
from kvtier_core.stepplans import StepPlans, contract_terms, held_bytes
from kvtier_crds.manifest import RuntimeManifest


@dataclass(frozen=True)
class Parts:
    """What an engine is made of. shared: blocks, or None with `no_blocks` saying why. credits: all there are,
    of which `ledger` is the rows' part and `own` what the engine itself takes for good."""

    store: RowStore
    credits: Ledger
    ledger: CreditLedger
    own: Grant
    shared: SharedBlocks | None
    no_blocks: CoreError | None
    plans: StepPlans
    lanes: Lanes
    runner: StepRunner
    chunks: SessionChunks
    resident: ResidentDecode
    statistics: Statistics


def compose(
    manifest: RuntimeManifest,
    layout: ChunkLayout,
    live: Sequence[LiveTier],
    node: Node,
    *,
    reader: Executor | None,
    rates: Rates,
    plan_terms: PlanTerms,
    works: IndexWorks,
    moved: Callable[[Session, int], object],
) -> Parts:
    """Over tiers that stay the caller's. works: whose memory hot units are in. moved: told of each session's
    line that has moved, under the metadata lock."""
    assert node.clock is not None
    geometry = manifest.model.geometry
    tiers = [item.tier for item in live]
    metadata = threading.RLock()
    staging = held_bytes(layout)
    directory = directory_of(tiers)
    credits = ledger_of(tiers, staging, node.clock)
    ledger = CreditLedger([tier.slots.capacity for tier in tiers], credits)
    store = RowStore(layout, tiers, ledger, directory, metadata)
    roles = [item.role for item in live]
    store.placement = Placement(tiers, roles, ledger, directory, store.transactions, metadata)
    store.moved = moved
    shared, no_blocks = None, None
    try:
        shared = SharedBlocks(
            tiers,
            store.placement.homes,
            node.clock,
            directory,
            credits,
            metadata,
            node.files,
            spare=geometry.layers,
        )
        store.placement.blocks = shared
    except CoreError as error:
        if error.reason is not Reason.TIER_INCAPABLE:
            raise
        no_blocks = error
        let_go(tiers)
    # What the engine itself takes for good; credits of the block store's recovery would not outlive this.
    own = credits.acquire({STAGING: staging, PINNED: sum(tier.pinned_bytes for tier in tiers)})
    plans = StepPlans(
        store,
        node.clock,
        reader,
        query_heads=geometry.query_heads,
        rates=rates,
        terms=contract_terms(manifest.contract, plan_terms),
        hot=HotUnits(UnitGrid(layout), works.reserve, works.give_back),
    )
    runner = StepRunner(store, plans, manifest.digest())
    resident = ResidentDecode(
        store,
        node.clock,
        geometry.query_heads,
        runner.baseline_digest,
        runner.digest_of,
        plans,
    )
    return Parts(
        store=store,
        credits=credits,
        ledger=ledger,
        own=own,
        shared=shared,
        no_blocks=no_blocks,
        plans=plans,
        lanes=Lanes(plans, store.placement),
        runner=runner,
        chunks=SessionChunks(store, runner.digest_of),
        resident=resident,
        statistics=Statistics(live, store, credits, shared, staging, recoveries(tiers)),
    )
