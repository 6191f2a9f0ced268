"""What an agent's flags mean for the cache it builds: what outlives it, and under which keys."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier_agent.config import TierConfig
from kvtier_agent.core_engine import CoreEngine, build_engine
from kvtier_agent.keyfiles import KeyDirectory
from kvtier_agent.tierdirs import NodeTier
from kvtier_core.errors import CoreError, Reason
from tests.unit.core.builders import LAYERS, cpu, gpu, manifest, nvme

TIERS = [gpu(LAYERS), cpu(2), nvme(16)]
NAMESPACE = hashlib.sha256(b"team-a/1").digest()
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(6)]


def node_tiers(folder: Path, persistence: str) -> list[NodeTier]:
    folder.mkdir(exist_ok=True)
    flash = f'"device":{{"path":"{folder}"}},"persistence":"{persistence}"'
    texts = [
        '{"className":"hbm","medium":"gpu","capacity":"1Mi"}',
        '{"className":"ram","medium":"cpu","capacity":"1Mi"}',
        f'{{"className":"flash","medium":"nvme","capacity":"4Mi",{flash}}}',
    ]
    configs = [TierConfig.parse(text) for text in texts]
    return [NodeTier(config, folder if config.path else None, "") for config in configs]


def fill(built: CoreEngine) -> int:
    """Stores blocks until some lie on flash; returns how many a restart keeps."""
    shared = built.shared()
    deadline = time.monotonic() + 120
    bodies = [bytes([number]) * shared.store.parts.block_bytes for number in range(len(KEYS))]
    shared.driver.put(KEYS, bodies, namespace=NAMESPACE, deadline=deadline)
    (flash,) = shared.store.parts.storage
    memory = shared.store.parts.tiers[shared.store.parts.home].slots
    # Relief of a full tier goes on in the store's thread until one slot of two is free.
    assert shared.driver.wait_until(lambda: memory.used < 2 and not shared.store.moves.open_moves(), deadline)
    return len(shared.store.directory.lines_in(flash))


def found(built: CoreEngine) -> int:
    lookup = built.shared().store.lookup
    rows = [np.frombuffer(key, dtype=np.uint8).reshape(1, 32) for key in KEYS]
    return sum(len(lookup(row, NAMESPACE)) for row in rows)


@pytest.mark.parametrize(("persistence", "keeps"), [("process", False), ("node", True), ("durable", True)])
def test_a_tier_class_says_what_a_restart_keeps(
    tmp_path: Path, persistence: str, keeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = build_engine(manifest(TIERS), node_tiers(tmp_path / "kv", persistence))
    stored = fill(first)
    assert stored
    first.close()
    second = build_engine(manifest(TIERS), node_tiers(tmp_path / "kv", persistence))
    try:
        assert found(second) == (stored if keeps else 0)
        told = [
            line for line in caplog.messages if f"{stored} blocks of earlier processes are served" in line
        ]
        assert len(told) == keeps
    finally:
        second.close()
    with pytest.raises(CoreError) as refused:
        second.shared()
    assert refused.value.reason is Reason.DRAINING


def test_a_key_folder_encrypts_what_lies_on_flash(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "k1").write_bytes(bytes(range(32)))
    (folder / "CURRENT").write_text("k1\n")
    keys = KeyDirectory(folder)
    first = build_engine(manifest(TIERS), node_tiers(tmp_path / "kv", "node"), keys=lambda name: keys)
    stored = fill(first)
    first.close()
    (store,) = (tmp_path / "kv").glob("*.blocks")
    assert not any(bytes([number]) * 64 in store.read_bytes() for number in range(1, len(KEYS)))
    second = build_engine(manifest(TIERS), node_tiers(tmp_path / "kv", "node"), keys=lambda name: keys)
    try:
        assert found(second) == stored
    finally:
        second.close()


def test_what_an_agent_has_loaded_is_not_looked_through_again_for_garbage() -> None:
    # In a process of its own: what is frozen stays so.
    told = "prepare_process(); print(gc.get_freeze_count(), len(gc.get_objects()), torch.get_num_threads())"
    script = f"import gc, torch; from kvtier_agent.core_engine import prepare_process; {told}"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    frozen, followed, threads = map(int, ran.stdout.split())
    assert frozen > 50_000
    assert followed < frozen // 10
    assert threads == 1
