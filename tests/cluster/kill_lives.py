"""Operators that a test begins, stops and ends, each a process that dies or stops at a write if told to.

They are forked by one process that has imported the operator. It must not know rollouts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kvtier_localplane import Cluster
from tests.cluster.operator_harness import REPOSITORY, SYSTEM
from tests.cluster.operator_lives import Order

IDENTITY = "killed-and-born"
"""Of all lives: a successor of that name takes the operator's Lease over at once, as a restarted Pod does."""
SUCCESSOR = "waits-for-the-lease"
"""Of another life beside: it has to wait until the Lease of the first has ended."""


@dataclass(frozen=True, order=True)
class Point:
    """A write by name and number, and on which side of it the operator dies."""

    write: str
    after: bool

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.write}"


@dataclass
class Life:
    pid: int
    log: Path
    dead: threading.Event

    def stopped(self) -> bool:
        """Whether it does nothing until it is told to go on."""
        state = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return state == "T"

    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []


class Lives:
    """The process that forks operators."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._folder = folder
        kubeconfig = cluster.service_account_kubeconfig(
            SYSTEM, "kvtier-operator", folder / "lives.kubeconfig", duration_s=6 * 3600
        )
        certificate = cluster.issue_certificate(IDENTITY, folder / "lives-tls")
        self._order = Order(
            kubeconfig=str(kubeconfig),
            namespace=SYSTEM,
            identity=IDENTITY,
            cert=str(certificate.cert_file),
            key=str(certificate.key_file),
            ca=str(certificate.ca_file),
            log="",
        )
        self._count = 0
        self._lives: dict[int, threading.Event] = {}
        self._born: list[int] = []
        self._news = threading.Condition()
        self._errors = (folder / "lives.err").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.operator_lives"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=REPOSITORY,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self, point: Point | None = None, *, stop: bool = False, identity: str = IDENTITY) -> Life:
        """stop: it stops at the point and may go on, else it dies there."""
        self._count += 1
        log = self._folder / f"life-{self._count}.log"
        kill = {} if point is None else {"kill": point.write, "after": point.after, "stop": stop}
        order = dataclasses.replace(self._order, log=str(log), identity=identity, **kill)
        assert self._process.stdin is not None
        with self._news:
            before = len(self._born)
            self._process.stdin.write(json.dumps(dataclasses.asdict(order)) + "\n")
            self._process.stdin.flush()
            assert self._news.wait_for(lambda: len(self._born) > before, 300.0), "no operator was born"
            pid = self._born[-1]
            return Life(pid, log, self._lives[pid])

    def end(self, life: Life) -> None:
        """Kills it where it is."""
        if not life.dead.is_set():
            # It may have ended by itself, and nobody here has been told yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(life.pid, signal.SIGKILL)
        assert life.dead.wait(60.0), "the operator did not die"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120.0)
        self._reader.join(5.0)
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._news:
                if "born" in told:
                    self._lives[told["born"]] = threading.Event()
                    self._born.append(told["born"])
                else:
                    self._lives[told["pid"]].set()
                self._news.notify_all()
