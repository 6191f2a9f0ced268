"""Orders what operators tell this agent about one cache, across crashes of either side.

A fence is an int64 per cache uid that only grows. The highest accepted one is durable before it is
acknowledged, so that a delayed command of an earlier leader is refused even after a restart. This module
knows no RPC: a command is a kind and a content digest that leaves out nonce, deadline and boot id.
Rules: release.md, "Leases and fencing".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.durable import DamagedFile, OsSyscalls, Syscalls, read_file, replace_file

_UID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class CommandKind(StrEnum):
    APPLY = "Apply"
    GRANT = "Grant"
    REVOKE = "Revoke"
    REMOVE = "Remove"


class Judgement(StrEnum):
    ADVANCE = "Advance"  # a higher number: persist, then act
    REPEAT = "Repeat"  # the same command again: already durable


@dataclass(frozen=True)
class FenceRecord:
    """The last accepted command of one cache uid, and the baseline to serve after a restart."""

    uid: str
    namespace: str
    name: str
    value: int
    kind: CommandKind
    content: str  # sha256 hex of the command without nonce, deadline and boot id
    baseline_digest: str  # empty: the cache is not (or no longer) served here
    rollout_uid: str = ""
    key_secret: str = ""  # names the keys that what is stored is encrypted under; empty: the agent's default
    admission: str = ""  # of transfers, JSON; empty: undeclared
    place: str = ""  # names the folders that the baseline's engine has on storage


class FenceStore(Protocol):
    def load(self) -> tuple[Mapping[str, FenceRecord], frozenset[str]]:
        """All readable records by uid, and the uids whose record is damaged."""

    def save(self, record: FenceRecord) -> None:
        """Returns only when the record is durable; raises OSError otherwise."""


class FileFenceStore:
    """One checksummed JSON file per cache uid in a directory of the state dir."""

    def __init__(self, directory: Path, calls: Syscalls | None = None) -> None:
        self._directory = directory
        self._calls: Syscalls = OsSyscalls() if calls is None else calls

    def load(self) -> tuple[Mapping[str, FenceRecord], frozenset[str]]:
        records: dict[str, FenceRecord] = {}
        damaged: set[str] = set()
        for path in sorted(self._directory.glob("*.fence")):
            try:
                fields = json.loads(read_file(path))
                record = FenceRecord(**{**fields, "kind": CommandKind(fields["kind"])})
            except (DamagedFile, ValueError, TypeError, KeyError):
                damaged.add(path.stem)
                continue
            records[record.uid] = record
        return records, frozenset(damaged)

    def save(self, record: FenceRecord) -> None:
        if not _UID.fullmatch(record.uid):
            raise OSError(f"cache uid {record.uid!r} cannot name a file")
        payload = json.dumps(asdict(record), sort_keys=True).encode()
        replace_file(self._directory, f"{record.uid}.fence", payload, self._calls)


class FenceBook:
    """The fences of all caches of this agent. Not thread-safe: one owner calls it."""

    def __init__(self, store: FenceStore) -> None:
        self._store = store
        records, self._damaged = store.load()
        self._records = dict(records)

    def records(self) -> Mapping[str, FenceRecord]:
        return self._records

    def highest(self, uid: str) -> int:
        """The highest accepted fence of the cache; 0 when none was."""
        record = self._records.get(uid)
        return 0 if record is None else record.value

    def judge(self, uid: str, value: int, kind: CommandKind, content: str) -> Judgement:
        """Raises FENCE_STALE, FENCE_CONFLICT, BAD_ARGUMENT or FENCE_NOT_DURABLE when it must not run."""
        if not _UID.fullmatch(uid):
            raise CoreError(Reason.BAD_ARGUMENT, f"cache.uid {uid!r} is not a uid", {})
        if uid in self._damaged:
            raise CoreError(Reason.FENCE_NOT_DURABLE, f"the stored fence of cache {uid} is damaged", {})
        if value <= 0:
            raise CoreError(Reason.BAD_ARGUMENT, f"fence.value {value} must be positive", {})
        record = self._records.get(uid)
        if record is None or value > record.value:
            return Judgement.ADVANCE
        facts = {"highest_fence": str(record.value)}
        if value < record.value:
            raise CoreError(Reason.FENCE_STALE, f"fence {value} is below {record.value}", facts)
        if (kind, content) != (record.kind, record.content):
            message = f"fence {value} was already used by another command ({record.kind})"
            raise CoreError(Reason.FENCE_CONFLICT, message, facts)
        return Judgement.REPEAT

    def commit(self, record: FenceRecord) -> None:
        """Makes the record durable and current; raises FENCE_NOT_DURABLE and keeps the old one in memory."""
        if record.value <= self.highest(record.uid):
            raise ValueError(f"commit of fence {record.value} at {self.highest(record.uid)}")
        try:
            self._store.save(record)
        except OSError as error:
            message = f"fence {record.value} could not be stored: {error.strerror or error}"
            raise CoreError(Reason.FENCE_NOT_DURABLE, message, {}) from error
        self._records[record.uid] = record

    def check_read(self, uid: str, value: int) -> None:
        """Reads and proofs need a fence at least as high as the highest; raises FENCE_STALE."""
        highest = self.highest(uid)
        if value < highest:
            message = f"fence {value} is below {highest}"
            raise CoreError(Reason.FENCE_STALE, message, {"highest_fence": str(highest)})

    def check_renewal(self, uid: str, value: int) -> None:
        """A renewal carries exactly the fence of the grant, which must still be the last command."""
        record = self._records.get(uid)
        highest = self.highest(uid)
        facts = {"highest_fence": str(highest)}
        if value < highest:
            raise CoreError(Reason.FENCE_STALE, f"fence {value} is below {highest}", facts)
        if record is None or value > highest or record.kind is not CommandKind.GRANT:
            message = f"no grant under fence {value} is the last command (highest is {highest})"
            raise CoreError(Reason.FENCE_CONFLICT, message, facts)
