"""`python -m tests.release_agents SPEC`: serves every agent of the file until standard input closes.

SPEC is JSON: {"operator": name, "probeDigest": digest, "agents": [Place...], "reads": [node...]}. It prints
{"event": "ready"} and then answers each line of standard input, a JSON object, by one line:
{"do": "harm", "rollouts": [uid...]} spoils the windows of these from now on, and no others; {"do":
"observed"} tells what was seen so far; {"do": "clear"} forgets that.

Agents that share a process share its collections of garbage, too: one that goes through the objects of 200
of them stops all at once for more than a second, where one of an agent by itself takes milliseconds. So
"clear" collects, and leaves alone from then on what exists; "observed" tells the longest stop since.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from tests.release_agents.agent import Observed, Place, SimulatedAgent
from tests.release_agents.evidence import Harm, Readings

STARTED_AT_ONCE = 16


class Stops:
    """How long collections of garbage stop the process. `longest`: seconds, since it was last set to 0."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._began = 0.0
        gc.callbacks.append(self._seen)

    def _seen(self, phase: str, _: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._began = now
        else:
            self.longest = max(self.longest, now - self._began)

    def begin(self) -> None:
        """What exists is not looked at again."""
        gc.collect()
        gc.freeze()
        self.longest = 0.0


class Host:
    """All agents of this process, and what they share."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.harm = Harm()
        self.stops = Stops()
        self.observed = Observed(Readings(), {}, {})
        reads = set(spec["reads"])
        self.agents = [
            SimulatedAgent(
                Place(**place),
                spec["operator"],
                self.harm,
                spec["probeDigest"],
                self.observed,
                reads=place["node"] in reads,
            )
            for place in spec["agents"]
        ]

    async def start(self) -> None:
        for first in range(0, len(self.agents), STARTED_AT_ONCE):
            await asyncio.gather(*(one.start() for one in self.agents[first : first + STARTED_AT_ONCE]))

    async def close(self) -> list[str]:
        left = await asyncio.gather(*(agent.close() for agent in self.agents))
        return [name for names in left for name in names]

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        observed = self.observed
        match asked["do"]:
            case "harm":
                self.harm.rollouts = frozenset(asked["rollouts"])
                self.harm.bad_output = bool(self.harm.rollouts)
            case "clear":
                observed.readings.by_window.clear()
                observed.readings.first_harm.clear()
                observed.revoked.clear()
                observed.calls.clear()
                self.stops.begin()
            case "observed":
                windows = observed.readings.by_window
                return {
                    "reads": [[uid, label, list(moments)] for (uid, label), moments in windows.items()],
                    "firstHarm": observed.readings.first_harm,
                    "revoked": observed.revoked,
                    "calls": observed.calls,
                    "longestStop": self.stops.longest,
                }
            case other:
                raise ValueError(f"no such thing to do: {other!r}")
        return {"done": asked["do"]}


async def serve(spec: dict[str, Any]) -> int:
    host = Host(spec)
    await host.start()
    _tell({"event": "ready", "agents": len(host.agents)})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        _tell(host.answer(json.loads(line)))
    left = await host.close()
    if left:
        logging.getLogger(__name__).error("did not end: %s", ", ".join(left))
    return 1 if left else 0


def _tell(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    sys.exit(asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
