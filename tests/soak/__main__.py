"""A long run of the block store: real threads and files, caches a fourth of the working set, random faults.

Writes build/soak.json; exit status 1 when a claim fails. `--simulation` runs seeds of the simulated store
instead, `--gates` simulated rollouts through the judge, `--machine` the release machine against a reference,
`--kills` an operator that is killed at every write of a rollout, on a real API server, `--fences` an agent
that is killed at every call by which it makes a fence durable."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier_core.blockstore.driver import Bell, Driver
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.credits import slots
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.arena import ArenaOptions
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.nvme import NvmeOptions, NvmeTier
from kvtier_core.transactions.erasing import JournalFile
from tests.cluster.kill_everywhere import main as kills
from tests.simulation.__main__ import main as simulation
from tests.soak.gates.__main__ import main as gates
from tests.soak.measures import Memory
from tests.soak.soakfiles import Rates, SoakFiles
from tests.soak.workload import MAX_TURNS, OPERATIONS, Board, Client, Corpus
from tests.unit.release.agent_kills import main as fences
from tests.unit.rollout.machine_fuzz import main as machine

LAYOUT = ChunkLayout(2, 64, 64)
MEMORY_SLOTS = 128
FLASH_SLOTS = 4 * MEMORY_SLOTS
# Of memory that passes from tenant to tenant together.
SEGMENT_SLOTS = 8
CONVERSATIONS = 4 * (MEMORY_SLOTS + FLASH_SLOTS) // MAX_TURNS
REPORT = Path(__file__).resolve().parents[2] / "build" / "soak.json"
# RSS may not rise by more than this per minute over the last two thirds, nor is a rise below the noise of
# the allocator a leak.
SLOPE_LIMIT = 512 << 10
NOISE = 4 << 20
PROGRESS_SECONDS = 10.0
REST_SECONDS = 60.0


@dataclass(frozen=True)
class Claim:
    name: str
    held: bool
    value: str


class Soak:
    def __init__(self, folder: Path, clients: int, seed: int) -> None:
        clock = time.monotonic
        self.files = SoakFiles(seed, Rates())
        self.bell = Bell()
        able = dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.NVME], persistence="node")
        segment = ArenaOptions(segment_bytes=SEGMENT_SLOTS * LAYOUT.payload_bytes)
        self.ram = CpuTier("ram", LAYOUT, MEMORY_SLOTS, clock=clock, options=segment)
        self.flash = NvmeTier(
            "flash",
            LAYOUT,
            FLASH_SLOTS,
            folder=folder,
            file_key="soak",
            files=self.files,
            capability=able,
            clock=clock,
            options=NvmeOptions(threads=4),
        )
        self.journal = JournalFile(folder, "deletions", self.files)
        self.store = BlockStore(
            [self.ram, self.flash], clock, wake=self.bell.ring, capacity=1 << 16, journal=self.journal
        )
        self.driver = Driver(self.store, self.bell, clock)
        self.corpus = Corpus(CONVERSATIONS, LAYOUT.payload_bytes, seed)
        self.board = Board()
        self.memory = Memory()
        self.over = threading.Event()
        self.threads = [
            threading.Thread(target=self._client(seed + number).run, name=f"client-{number}", daemon=True)
            for number in range(clients)
        ]

    def _client(self, seed: int) -> Client:
        return Client(self.store, self.driver, self.corpus, self.board, seed, self.over)

    def run(self, seconds: float) -> None:
        """Clients at work, a line of progress each 10 s."""
        self.driver.start()
        self.files.begin()
        for thread in self.threads:
            thread.start()
        started = time.monotonic()
        next_line = started + PROGRESS_SECONDS
        while (now := time.monotonic()) - started < seconds:
            self.memory.sample(now)
            if now >= next_line:
                next_line += PROGRESS_SECONDS
                self._progress(now - started)
            if self.driver.failure or self.board.defects:
                break
            self.over.wait(min(1.0, seconds))

    def _progress(self, elapsed: float) -> None:
        counts = self.board.counts
        wanted, served = counts["blocks wanted"], counts["blocks served"]
        print(
            f"{elapsed:7.0f} s  {wanted:9d} blocks wanted, {100 * served / max(1, wanted):5.1f} % served, "
            f"{counts['verified blocks']:9d} verified, {len(self.board.wrong)} wrong, "
            f"{sum(self.files.faults.values()):6d} faults, {self.flash.hung_threads} hung, "
            f"{len(self.store.deletions.open())} deletions open, "
            f"rss {self.memory.samples[-1][1] / 2**20:6.1f} MiB",
            flush=True,
        )

    def drain(self) -> list[Claim]:
        """Everyone leaves, the weather calms: what is held must be what is stored, and in the end nothing."""
        self.over.set()
        for thread in self.threads:
            thread.join(REST_SECONDS)
        self.files.calm()
        claims = [Claim("clients end", not any(thread.is_alive() for thread in self.threads), "joined")]
        claims.append(
            Claim("at rest", self._until(self._at_rest), f"{len(self.store.moves.open_moves())} moves")
        )
        claims.append(self._balanced("credits are the slots that blocks have"))
        with self.store.parts.lock:
            leases = [int(part.leases.array.sum()) for part in self.store.directory.replicas.tiers]
        claims.append(Claim("no lease is left", leases == [0, 0], str(leases)))
        self._empty()
        used = {tier.name: tier.used_bytes for tier in self.store.parts.tiers}
        claims.append(Claim("the ledger of bytes ends at zero", not any(used.values()), str(used)))
        claims.append(self._balanced("credits end at zero"))
        return claims

    def _until(self, done: Callable[[], bool]) -> bool:
        until = time.monotonic() + REST_SECONDS
        return self.driver.failure is None and self.driver.wait_until(done, until)

    def _at_rest(self) -> bool:
        gc.collect()
        store = self.store
        with store.parts.lock:
            idle = not store.moves.open_moves() and not store.reads.flights.flights()
            return idle and not store.deletions.open() and store.ledger.outstanding() == 0

    def _balanced(self, name: str) -> Claim:
        store, facts, held = self.store, [], True
        with store.parts.lock:
            try:
                store.check()
            except AssertionError as broken:
                return Claim(name, False, str(broken))
            for index, tier in enumerate(store.parts.tiers):
                resource = slots(index)
                paid = store.ledger.total(resource) - store.ledger.available(resource)
                copies = store.directory.replicas.counts[index]
                held = held and paid == tier.slots.used == copies
                facts.append(f"{tier.name}: {paid} paid, {tier.slots.used} taken, {copies} copies")
        return Claim(name, held, "; ".join(facts))

    def _empty(self) -> None:
        namespaces = {items[0].namespace for items in self.corpus.items}
        orders = [self.store.delete_namespace(namespace) for namespace in sorted(namespaces)]
        self.driver.wait_deleted(orders, time.monotonic() + REST_SECONDS)

    def close(self) -> None:
        self.driver.close()
        self.flash.close()
        self.journal.close()
        self.ram.close()


def judge(soak: Soak, claims: list[Claim], slope_limit: float) -> dict[str, Any]:
    board, slope = soak.board, soak.memory.slope()
    counts = board.counts.all()
    flat = slope.bytes_per_minute <= slope_limit or slope.rise <= NOISE
    claims += [
        Claim("no wrong byte was served", not board.wrong, "; ".join(board.wrong[:5]) or "none"),
        Claim("no client met a defect", not board.defects, "; ".join(board.defects[:5]) or "none"),
        Claim("the driver lives", soak.driver.failure is None, repr(soak.driver.failure)),
        Claim(
            "memory is flat",
            flat,
            f"{slope.bytes_per_minute / 2**10:.0f} KiB/min over {slope.samples} samples, limit "
            f"{slope_limit / 2**10:.0f} KiB/min above a rise of {NOISE >> 20} MiB",
        ),
        Claim("faults were injected", len(soak.files.faults) > 5, str(sum(soak.files.faults.values()))),
        Claim("blocks were served from flash", soak.store.reads.fetched > 0, str(soak.store.reads.fetched)),
        Claim("blocks were deleted", counts.get("deleted", 0) > 0, str(counts.get("deleted", 0))),
    ]
    return {
        "claims": [dataclasses.asdict(claim) for claim in claims],
        "passed": all(claim.held for claim in claims),
        "latency_seconds": {
            name: {
                "n": len(board.latency[name]),
                "p50": board.latency[name].quantile(0.5),
                "p99": board.latency[name].quantile(0.99),
            }
            for name in OPERATIONS
        },
        "refusals": board.refusals.all(),
        "counts": counts,
        "faults": dict(sorted(soak.files.faults.items())),
        "evictions": {
            f"{soak.store.parts.tiers[tier].name} {what}": count
            for (tier, what), count in sorted(soak.store.reclaim.evictor.counts.items())
        },
        "demotions_failed": soak.store.reclaim.failed,
        "moves": {f"{kind} {reason}": n for (kind, reason), n in sorted(soak.store.moves.counts.items())},
        "rss": dataclasses.asdict(slope),
        "shape": {
            "memory_slots": MEMORY_SLOTS,
            "flash_slots": FLASH_SLOTS,
            "block_bytes": LAYOUT.payload_bytes,
            "working_set_blocks": CONVERSATIONS * MAX_TURNS,
            "clients": len(soak.threads),
        },
    }


def show(report: dict[str, Any]) -> None:
    for name, found in report["latency_seconds"].items():
        p50, p99 = found["p50"] * 1e6, found["p99"] * 1e6
        print(f"{name:12s} n {found['n']:9d}  p50 {p50:9.0f} us  p99 {p99:9.0f} us")
    for title in ("refusals", "faults", "evictions", "demotions_failed", "moves"):
        print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in report[title].items()))
    for claim in report["claims"]:
        print(f"{'held  ' if claim['held'] else 'FAILED'} {claim['name']}: {claim['value']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slope", type=float, default=SLOPE_LIMIT, help="bytes a minute that RSS may rise")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the store lies; default: a temporary one"
    )
    parser.add_argument("--simulation", action="store_true", help="seeds of the simulated store instead")
    parser.add_argument("--gates", action="store_true", help="simulated rollouts through the judge instead")
    parser.add_argument("--machine", action="store_true", help="the release machine in bad luck instead")
    parser.add_argument("--kills", action="store_true", help="SIGKILL at every write of a rollout instead")
    parser.add_argument("--fences", action="store_true", help="SIGKILL at every durable write of an agent")
    options, rest = parser.parse_known_args()
    if options.gates:
        return gates(["--seed", str(options.seed), *rest])
    if options.simulation:
        return simulation(rest)
    if options.machine:
        return machine(["--seed", str(options.seed), *rest])
    if options.kills:
        return kills(rest)
    if options.fences:
        return fences(["--seed", str(options.seed), *rest])
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-", dir=options.folder) as folder:
        soak = Soak(Path(folder), options.clients, options.seed)
        soak.run(options.minutes * 60)
        report = judge(soak, soak.drain(), options.slope)
        soak.close()
    report["minutes"] = options.minutes
    report["seed"] = options.seed
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1))
    show(report)
    print(f"report: {REPORT}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
