"""Verifies stores without an agent: each block's header, checksum and, with its key, its decryption.

Why it exists: after a crash, or before a disk is moved, an operator must know whether its bytes are whole,
and which are not. Nothing is changed. It must not know how a store is laid out; the core reads it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kvtier_agent.inspectreport import Report, size, table
from kvtier_agent.keyfiles import KeyDirectory
from kvtier_core.errors import CoreError
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.nvme.datakeys import KEYS_SUFFIX, DataKeys
from kvtier_core.tiers.nvme.verify import SUFFIX, BlockVerdict, StoredBlock, StoreReport, verify_store

_MEANS = {
    BlockVerdict.GOOD: "whole",
    BlockVerdict.SEALED: "whole as far as one sees without its key",
    BlockVerdict.VOLATILE: "not kept: it was never to outlive its process",
    BlockVerdict.ERASED: "deleted",
    BlockVerdict.DAMAGED_HEADER: "its header is torn",
    BlockVerdict.DAMAGED_PAYLOAD: "its bytes are not what its header says",
    BlockVerdict.KEY_DESTROYED: "its key is gone",
    BlockVerdict.NOT_DECRYPTED: "it does not open under its key and header",
    BlockVerdict.OTHER_LAYOUT: "of another layout or version",
    BlockVerdict.MISPLACED: "its header names another slot",
    BlockVerdict.UNREADABLE: "the device does not read it",
}


def verify(place: Path, key_dir: Path | None, limit: int) -> Report:
    """place: a store, or a folder with stores somewhere below. At most `limit` findings of each are
    listed."""
    if not place.exists():
        return _failed(place, "there is no such file or folder")
    paths = sorted(place.rglob(f"*{SUFFIX}")) if place.is_dir() else [place]
    if not paths:
        return _failed(place, f"no store (*{SUFFIX}) lies below it")
    keys = KeyDirectory(key_dir) if key_dir is not None else None
    facts: list[dict[str, Any]] = []
    lines: list[str] = []
    wrong = False
    for path in paths:
        try:
            if keys is not None:
                keys.check()
            own = DataKeys(path.with_suffix(KEYS_SUFFIX), keys, OsFileOps()) if keys is not None else None
            found = verify_store(path, own)
        except CoreError as error:
            wrong = True
            facts.append(
                {"path": str(path), "error": {"reason": error.reason.name, "message": error.message}}
            )
            lines += [f"{path}", f"  {error.reason.name}: {error.message}", ""]
            continue
        wrong = wrong or not found.whole
        facts.append(_facts(found, limit))
        lines += [*_lines(found, limit), ""]
    whole = "something is wrong" if wrong else "all is whole"
    lines.append(f"{len(paths)} store{'s' if len(paths) > 1 else ''}: {whole}")
    return Report(wrong, {"whole": not wrong, "stores": facts}, "\n".join(lines) + "\n")


def _failed(place: Path, why: str) -> Report:
    facts = {"whole": False, "stores": [], "error": {"reason": "STORAGE_UNAVAILABLE", "message": why}}
    return Report(True, facts, f"{place}: {why}\n")


def _bad(found: StoreReport, limit: int) -> list[StoredBlock]:
    return list(found.damaged[:limit])


def _facts(found: StoreReport, limit: int) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "sizeBytes": found.size_bytes,
        "whole": found.whole,
        "superblock": None if found.superblock is None else dataclasses.asdict(found.superblock),
        "emptySlots": found.empty,
        "slots": {verdict.value: count for verdict, count in sorted(found.counts.items())},
        "findings": [
            {
                "slot": block.slot,
                "verdict": block.verdict.value,
                "key": block.key.hex(),
                "namespace": block.namespace.hex(),
                "slotGeneration": block.slot_generation,
                "generation": block.replica_generation,
                "keyReference": block.key_reference,
            }
            for block in _bad(found, limit)
        ],
    }


def _lines(found: StoreReport, limit: int) -> list[str]:
    lines = [f"{found.path}  {size(found.size_bytes)}"]
    block = found.superblock
    if block is None:
        lines.append("  no superblock: both copies are damaged, or it is not kept beyond its process")
        return lines
    end = "closed in order" if block.clean else "not closed in order"
    lines.append(
        f"  epoch {block.epoch}, {end}, {block.capacity} slots of {size(block.stride)}, layout {block.layout}"
    )
    rows = [
        [verdict.value, count, _MEANS[verdict]]
        for verdict, count in sorted(found.counts.items(), key=lambda item: -item[1])
    ]
    lines += [f"  {line}" for line in table(["SLOTS", "", ""], [*rows, ["EMPTY", found.empty, ""]])]
    for one in _bad(found, limit):
        name = f"key {one.key.hex()[:16]}" if one.key else "key unknown"
        lines.append(f"  slot {one.slot}: {one.verdict.value}, {_MEANS[one.verdict]}; {name}")
    return lines
