"""Keeps a few child processes alive exactly as long as the process that asked for them.

Runs as a process of its own (``python supervisor.py SPEC``), in its own session, so that Ctrl-C reaches the
parent first. It ends its children and removes their folder as soon as its standard input closes, its parent
is another process than at start, one child ends that is not to be started again, or it is told to stop. Each
child is tied to it by PR_SET_PDEATHSIG, so that not even SIGKILL of the supervisor leaves one behind.

Standard library only. It must not know what the children are.
SPEC is a JSON file: {"parent": pid, "remove": folder, "children": [{"name", "argv", "cwd", "log"}],
"later": [...], "again": [name]}. Those of `later` are started by the first line on standard input, those of
`again` once more whenever they end.
It writes one JSON line per event to standard output: started (with pid) and ended (with rc
and the end of its log).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

POLL_S = 0.25
GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def _tie_to(parent: int, libc: ctypes.CDLL) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _tell(**event: Any) -> None:
    with contextlib.suppress(OSError):
        print(json.dumps(event), flush=True)


def _start(wanted: list[dict[str, Any]], children: list[tuple[str, subprocess.Popen[bytes]]]) -> None:
    """Appends to `children` one by one, so that what has started is known also when the next one fails."""
    libc = ctypes.CDLL(None)
    me = os.getpid()
    for child in wanted:
        with open(child["log"], "ab") as log:
            process = subprocess.Popen(
                child["argv"],
                cwd=child["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: _tie_to(me, libc),
            )
        children.append((child["name"], process))
        _tell(event="started", name=child["name"], pid=process.pid)


def _tail(log: str) -> str:
    with contextlib.suppress(OSError), open(log, "rb") as handle:
        handle.seek(max(0, os.fstat(handle.fileno()).st_size - 4000))
        return handle.read().decode(errors="replace")
    return ""


def _watch(
    parent: int,
    children: list[tuple[str, subprocess.Popen[bytes]]],
    later: list[dict[str, Any]],
    again: dict[str, dict[str, Any]],
    logs: dict[str, str],
    stopping: list[int],
) -> None:
    while not stopping and os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            return
        if readable:
            _start(later, children)
            later = []
        for name, process in list(children):
            if process.poll() is not None and name in again:
                children.remove((name, process))
                _start([again[name]], children)
            elif process.poll() is not None:
                _tell(event="ended", name=name, rc=process.returncode, log=_tail(logs[name]))
                return


def _end(children: list[tuple[str, subprocess.Popen[bytes]]]) -> None:
    """The data is thrown away, so nothing is worth a graceful end: clients first, then their store."""
    for _, process in reversed(children):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    limit = time.monotonic() + GRACE_S
    for _, process in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, limit - time.monotonic()))


def main(path: str) -> int:
    with open(path, encoding="utf-8") as handle:
        spec = json.load(handle)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: stopping.append(signum))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: list[tuple[str, subprocess.Popen[bytes]]] = []
    try:
        _start(spec["children"], children)
        logs = {one["name"]: one["log"] for one in spec["children"] + spec["later"]}
        again = {one["name"]: one for one in spec["children"] if one["name"] in spec.get("again", [])}
        _watch(spec["parent"], children, spec["later"], again, logs, stopping)
    finally:
        _end(children)
        if spec["remove"]:
            shutil.rmtree(spec["remove"], ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
