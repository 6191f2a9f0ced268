"""Our end of a peer's process: one command, one answer, each with a deadline."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[3]
COMMAND_SECONDS = 180.0


class PeerError(RuntimeError):
    """What the peer's process answered instead of a measurement."""


class Peer:
    """A peer's process; ends with the `with` block."""

    def __init__(self) -> None:
        python = subprocess.run(
            [ROOT / "hack" / "peers"], check=True, capture_output=True, text=True, timeout=1200
        ).stdout.strip()
        script = Path(__file__).with_name("peer_process.py")
        environment = dict(os.environ, OMP_NUM_THREADS="1", LMCACHE_LOG_LEVEL="ERROR")
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=20)

    def make(self, name: str, kind: str, **arguments: Any) -> dict[str, Any]:
        made: dict[str, Any] = self._ask({"do": "make", "name": name, "kind": kind, "with": arguments})
        return made

    def drop(self, name: str) -> None:
        self._ask({"do": "drop", "name": name})

    def call(self, name: str, do: str, **arguments: Any) -> Any:
        return self._ask({"do": do, "name": name, "with": arguments})

    def _ask(self, command: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(command).encode() + b"\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], COMMAND_SECONDS)
        if not ready:
            raise PeerError(f"no answer to {command['do']} within {COMMAND_SECONDS} s")
        line = stdout.readline()
        if not line:
            raise PeerError(f"the peer's process ended with {self._process.wait(timeout=20)}")
        reply = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply["ok"]
