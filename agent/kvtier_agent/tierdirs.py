"""The devices behind this node's tiers: claimed once, exclusively, and reported when they cannot be used.

An nvme tier uses `<path>/<node uid>/` under a lock, so two agents on one machine never share files. A folder
that cannot be written does not stop the agent: its condition says so and caches that need it are refused.

The write budget of a tier is the node's, not a cache's: flash wears by what all of them write. A drive is
taken to be as large as the filesystem of its folder.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier_agent.config import SIMULATED_DEVICE_KIND, ConfigError, Medium, TierConfig
from kvtier_agent.engine_port import TierReport
from kvtier_agent.statedir import DirectoryLock
from kvtier_core.blockstore.keptnotes import KEPT_SUFFIX
from kvtier_core.errors import CoreError, Reason
from kvtier_core.sharing import JOURNAL_SUFFIX
from kvtier_core.tiers.fileops import FileOps, OsFileOps
from kvtier_core.tiers.nvme import sweep_orphans
from kvtier_core.tiers.nvme.datakeys import KEYS_SUFFIX, KeysErased, erase_data_keys
from kvtier_core.tiers.nvme.endurance import WriteBudget, bytes_per_day, daily_budget
from kvtier_core.tiers.nvme.pace import Pace
from kvtier_core.tiers.nvme.verify import SUFFIX, store_path
from kvtier_crds.manifest import RuntimeManifest

log = logging.getLogger(__name__)

READY = "Ready"
# Where a cache's engine keeps its files, below the node's folder of a tier: two engines of one cache have two
# places, and which of them is the baseline's is in its fence record.
FIRST, SECOND = "", "second"
PLACES = (FIRST, SECOND)
# A condition that came and went with each block would be written to the API server as often.
PACED_SECONDS = 300.0
PACED = f"{Reason.WRITE_BUDGET}: writes were put off: the endurance of its class is used up for now"


@dataclass(frozen=True)
class NodeTier:
    """A claimed tier. `directory` is this agent's own; `fault` is empty when the tier can be used. `budget`:
    of bytes written, None where the class states no endurance. `pace`: of bytes a second, for all caches
    together; None where the class states none."""

    config: TierConfig
    directory: Path | None
    fault: str
    budget: WriteBudget | None = None
    pace: Pace | None = None

    @property
    def usable_bytes(self) -> int:
        return max(0, self.config.capacity_bytes - self.config.reserve_bytes)

    def report(self) -> TierReport:
        return TierReport(
            class_name=self.config.class_name,
            medium=self.config.medium.value,
            simulated=self.config.simulated,
            capacity_bytes=self.config.capacity_bytes,
            condition=self.fault or (PACED if self.paced else READY),
        )

    @property
    def paced(self) -> bool:
        """Whether its budget put a write off in the last minutes."""
        return self.budget is not None and self.budget.refused_within(PACED_SECONDS)


def drive_bytes(folder: Path) -> int:
    """Of the filesystem that a folder is on."""
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize


class NodeTiers:
    """All tiers of this node, by class name."""

    def __init__(
        self,
        configs: Sequence[TierConfig],
        node_uid: str,
        clock: Callable[[], float] = time.monotonic,
        drive_bytes: Callable[[Path], int] = drive_bytes,
        files: FileOps | None = None,
    ) -> None:
        """Raises ConfigError when another agent holds a tier's folder. clock: seconds, of budgets. files: of
        keys."""
        self._clock = clock
        self._files = files or OsFileOps()
        self._drive_bytes = drive_bytes
        self._locks: list[DirectoryLock] = []
        self._by_name = {config.class_name: self._claim(config, node_uid) for config in configs}

    def all(self) -> Sequence[NodeTier]:
        return tuple(self._by_name.values())

    def for_manifest(self, manifest: RuntimeManifest, place: str = FIRST) -> Sequence[NodeTier]:
        """The manifest's tiers in its order, with their folders of that place; raises TIER_INCAPABLE,
        NUMERICS_MISMATCH, STORAGE_UNAVAILABLE or NO_DESTINATION_CAPACITY naming the tier class."""
        chosen = []
        for wanted in manifest.tiers:
            name = wanted.tier_class_name
            tier = self._by_name.get(name)
            if tier is None:
                message = f"this node has no tier of class {name}; it has {sorted(self._by_name)}"
                raise CoreError(Reason.TIER_INCAPABLE, message, {"tier_class": name})
            if tier.config.medium.value != wanted.medium.value:
                message = f"tier class {name} is {tier.config.medium.value} here, not {wanted.medium.value}"
                raise CoreError(Reason.TIER_INCAPABLE, message, {"tier_class": name})
            if wanted.medium.value == Medium.GPU.value and tier.config.device_kind != manifest.device_kind:
                message = f"deviceKind {manifest.device_kind} is not {tier.config.device_kind} of {name}"
                raise CoreError(Reason.NUMERICS_MISMATCH, message, {"tier_class": name})
            if tier.fault:
                raise CoreError(
                    Reason.STORAGE_UNAVAILABLE, f"tier {name}: {tier.fault}", {"tier_class": name}
                )
            if wanted.budget_bytes > tier.usable_bytes:
                message = f"budget {wanted.budget_bytes} of tier {name} is over its {tier.usable_bytes} bytes"
                raise CoreError(Reason.NO_DESTINATION_CAPACITY, message, {"tier_class": name})
            chosen.append(_placed(tier, place))
        return tuple(chosen)

    def check_room(self, wanted: RuntimeManifest, others: Sequence[RuntimeManifest]) -> None:
        """Whether its budgets fit beside those of others that run here. NO_DESTINATION_CAPACITY with the
        numbers of the first class that is short."""
        for tier in wanted.tiers:
            name = tier.tier_class_name
            taken = sum(
                one.budget_bytes for each in others for one in each.tiers if one.tier_class_name == name
            )
            have = self._by_name[name].usable_bytes
            if tier.budget_bytes + taken > have:
                message = (
                    f"tier {name} has {have} bytes, {taken} are promised to what runs and "
                    f"{tier.budget_bytes} more are needed"
                )
                raise CoreError(Reason.NO_DESTINATION_CAPACITY, message, {"tier_class": name})

    def device_kind(self) -> str:
        """Of the gpu tier; `simulated` when there is none."""
        for tier in self._by_name.values():
            if tier.config.medium is Medium.GPU:
                return tier.config.device_kind
        return SIMULATED_DEVICE_KIND

    def device_kind_of(self, class_name: str) -> str:
        """Empty for media that have no device kind."""
        tier = self._by_name.get(class_name)
        return "" if tier is None else tier.config.device_kind

    def sweep(self, removed: Collection[str]) -> None:
        """Removes what caches left on nvme tiers that were removed from this node; given by uid. What another
        process holds, or a call that hangs, is left for the next start. Their keys are erased before, in case
        a process ended between the two. Raises nothing."""
        for uid in removed:
            try:
                self.erase_keys(uid)
            except CoreError as error:
                log.warning("keys of the removed cache %s are not erased yet: %s", uid, error)
        for folder, name in self._folders():
            _sweep(name, folder, removed)

    def clear(self, uid: str, place: str) -> None:
        """Removes what a cache's engine left in the folders of a place, its keys first. Raises nothing."""
        for folder, name in self._folders(place):
            try:
                erase_data_keys(store_path(folder, uid).with_suffix(KEYS_SUFFIX), self._files)
            except CoreError as error:
                log.warning("tier %s: keys of cache %s are not erased yet: %s", name, uid, error)
            _sweep(name, folder, {uid})

    def _folders(self, *places: str) -> Iterator[tuple[Path, str]]:
        """With their class; of all places when none is named. The second place may never have been made."""
        for tier in self._by_name.values():
            for place in places or PLACES:
                if tier.directory is not None:
                    folder = tier.directory / place
                    if place == FIRST or folder.is_dir():
                        yield folder, tier.config.class_name

    def erase_keys(self, uid: str) -> list[tuple[str, KeysErased]]:
        """Overwrites a removed cache's data keys, durably, on each nvme tier that has or had some; class
        names and receipts. Its store must be closed. STORAGE_UNAVAILABLE: not all are known to be erased, ask
        again."""
        found: list[tuple[str, KeysErased]] = []
        for folder, name in self._folders():
            erased = erase_data_keys(store_path(folder, uid).with_suffix(KEYS_SUFFIX), self._files)
            if erased is not None:
                found.append((name, erased))
        return found

    def tell_unknown(self, known: Collection[str]) -> None:
        """Says which stores belong to no cache of these uids. They are left: the state that knew them may be
        lost."""
        for folder, name in self._folders():
            ours = {store_path(folder, uid) for uid in known}
            unknown = sorted(path.name for path in _stores(folder) - ours)
            if unknown:
                listed = ", ".join(unknown)
                log.warning("tier %s: stores of caches that this agent does not know: %s", name, listed)

    def close(self) -> None:
        for lock in self._locks:
            lock.release()

    def _claim(self, config: TierConfig, node_uid: str) -> NodeTier:
        if config.path is None:
            return NodeTier(config, None, "")
        directory = config.path / node_uid
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._locks.append(DirectoryLock(directory))
            _probe_write(directory)
            rate = self._bytes_per_day(config, directory)
        except BlockingIOError as error:
            raise ConfigError(f"--tier {config.class_name}: another agent holds {directory}") from error
        except OSError as error:
            return NodeTier(config, None, f"StorageUnavailable: {directory}: {error.strerror or error}")
        if rate == 0:
            return NodeTier(config, None, "EnduranceZero: the endurance of its class allows no write at all")
        budget = None if rate is None else daily_budget(rate, self._clock)
        pace = None
        if config.read_rate is not None or config.write_rate is not None:
            pace = Pace(config.read_rate, config.write_rate, self._clock)
        return NodeTier(config, directory, "", budget, pace)

    def _bytes_per_day(self, config: TierConfig, directory: Path) -> int | None:
        rated, share = config.drive_writes_per_day, config.write_share
        return None if rated is None else bytes_per_day(self._drive_bytes(directory), rated, share)


def _placed(tier: NodeTier, place: str) -> NodeTier:
    """STORAGE_UNAVAILABLE when the place's folder cannot be made."""
    if tier.directory is None or place == FIRST:
        return tier
    directory = tier.directory / place
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CoreError(Reason.STORAGE_UNAVAILABLE, f"{directory}: {error.strerror or error}") from error
    return replace(tier, directory=directory)


def other_place(place: str) -> str:
    return SECOND if place == FIRST else FIRST


def _stores(folder: Path) -> set[Path]:
    return set(folder.glob(f"*{SUFFIX}"))


def _sweep(name: str, folder: Path, removed: Collection[str]) -> None:
    gone = {store_path(folder, uid) for uid in removed}
    try:
        report = sweep_orphans(folder, _stores(folder) - gone, beside=(JOURNAL_SUFFIX, KEPT_SUFFIX))
    except OSError as error:
        log.warning("tier %s: %s cannot be swept: %s", name, folder, error.strerror or error)
        return
    for files, what in (
        (report.removed, "removed"),
        (report.locked, "in use, left"),
        (report.failed, "left"),
    ):
        if files:
            log.info("tier %s: files of caches that were removed: %s: %s", name, what, ", ".join(files))


def _probe_write(directory: Path) -> None:
    """Raises OSError when a file cannot be written and synced here."""
    path = directory / ".probe"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"kvtier")
        os.fsync(fd)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
