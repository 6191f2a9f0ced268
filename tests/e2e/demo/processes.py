"""Child processes of the demo: logs in files, ends that are certain.

A child dies with this process (parent-death signal), is stopped by SIGTERM and,
after a deadline, by SIGKILL. Nothing else is ever signalled.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_QUIET = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "GRPC_VERBOSITY": "ERROR"}
_TIED = Path(__file__).with_name("tied.py")


class ChildEnded(RuntimeError):
    """A child ended when it should not have; carries the end of its log."""


class Child:
    """One process whose stdout is JSON lines (events) and whose stderr is a log file."""

    def __init__(
        self, name: str, argv: list[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self.events: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=100_000)
        self._log = open(self.log_path, "ab")  # noqa: SIM115  # closed in stop()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **_QUIET, **(env or {})}
        for variable in ("KUBECONFIG", "TRITON_INTERPRET"):
            environment.pop(variable, None)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_TIED), str(os.getpid()), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, name=f"{name}-stdout", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                self._log.write(line)
                self._log.flush()
                continue
            if isinstance(event, dict):
                self.events.put(event)

    def send(self, **command: Any) -> None:
        """Write one command as a JSON line to the child's stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def wait_for(self, kind: str, timeout: float) -> dict[str, Any]:
        """The next event of a kind; others are dropped. Raises when the child ends or time is up."""
        return self.wait_for_any((kind,), timeout)

    def wait_for_any(self, kinds: tuple[str, ...], timeout: float) -> dict[str, Any]:
        """The next event of one of these kinds; others are dropped."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.name}: no event of {kinds} within {timeout} s\n{self.tail()}")
            try:
                event = self.events.get(timeout=min(left, 0.5))
            except queue.Empty:
                self.require_alive()
                continue
            if event.get("event") in kinds:
                return event

    def require_alive(self) -> None:
        if self.process.poll() is not None:
            raise ChildEnded(f"{self.name} ended with {self.process.returncode}\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        self._log.flush()
        text = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"    {self.name}| {line[:400]}" for line in text[-lines:])

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        self.process.kill()
        self.process.wait(10)

    def stop(self, grace: float = 20.0) -> int:
        """SIGTERM, then SIGKILL after ``grace`` seconds; returns the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self._reader.join(2)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()
        return self.process.returncode


def installed(program: str, *arguments: str) -> list[str]:
    """argv of one of our console scripts, from the environment of this interpreter."""
    return [str(Path(sys.executable).parent / program), *arguments]


def python(*arguments: str) -> list[str]:
    """argv of this interpreter, without the current folder on the module path."""
    return [sys.executable, *arguments]
