"""A store that was closed is nobody's: whoever closed it may open it again, whatever else goes on."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.core.nvme_files import ScriptedFiles
from tests.unit.core.nvme_store import open_store

PATIENCE = 60.0


class Removing(ScriptedFiles):
    """Removes a file when the test says so, or not at all."""

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__()
        self.error = error
        self.begun, self.go_on = threading.Event(), threading.Event()

    def remove(self, path: Path) -> None:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        super().remove(path)


def test_nobody_has_closed_a_store_while_another_gives_it_back(tmp_path: Path) -> None:
    files = Removing()
    tier = open_store(tmp_path, files=files, persistence="process")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(tier.close, 0.0)
        assert files.begun.wait(PATIENCE)
        second = threads.submit(tier._give_back_when_over)
        try:
            with pytest.raises(TimeoutError):
                second.result(0.05)
        finally:
            files.go_on.set()
        second.result(PATIENCE)
        again = open_store(tmp_path, persistence="process")
        first.result(PATIENCE)
    again.close()


def test_work_that_no_thread_is_left_to_begin_keeps_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable write that is refused at the close leaves its flush to others."""
    tier = open_store(tmp_path)
    drain = tier._pool.drain

    def drained(seconds: float) -> bool:
        over = drain(seconds)
        tier._lead_later()
        return over

    monkeypatch.setattr(tier._pool, "drain", drained)
    tier.close(0.0)
    open_store(tmp_path).close()


def test_a_file_that_cannot_be_removed_is_given_back_all_the_same(tmp_path: Path) -> None:
    files = Removing(OSError(errno.EIO, "a fault of this double"))
    files.go_on.set()
    tier = open_store(tmp_path, files=files, persistence="process")
    with pytest.raises(OSError, match="a fault of this double"):
        tier.close(0.0)
    open_store(tmp_path, persistence="process").close()
