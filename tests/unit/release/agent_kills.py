"""SIGKILL of an agent's node before, in the middle of and after each call by which it makes a fence durable.

Real processes and real files; the points are counted, not chosen. Each life that is killed is followed by one
that is asked what it holds, is sent older commands and then the interrupted command twice, as an operator
would repeat it, and goes on to the end. `make soak ARGS=--fences` prints a JSON line for each try, and last
whether agents that are wrong would have been found. It must not know how the node orders its writes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvtier_agent.convert import cache_name
from kvtier_core.errors import CoreError
from kvtier_core.release.durable import OsSyscalls
from kvtier_core.release.fences import FileFenceStore
from kvtier_crds.manifest import RuntimeManifest
from tests.engine.agent_process import baseline_manifest, quest_candidate
from tests.forking import Tell, forked
from tests.unit.agent.agent_fakes import NAME, Bench

UID = NAME.uid


class How(StrEnum):
    BEFORE = "before"
    HALF = "half"
    """Of a write: half of its bytes are there."""
    AFTER = "after"


@dataclass(frozen=True)
class Point:
    """at: number of the call in this life, from 0. call: its name, which is not looked at."""

    at: int
    how: How
    call: str = ""


class Counted(OsSyscalls):
    """The real calls, counted, until the one at which the process dies."""

    def __init__(self, point: Point | None = None) -> None:
        self.names: list[str] = []
        self._point = point

    def open(self, path: str, flags: int, mode: int) -> int:
        return self._at("open", lambda: super(Counted, self).open(path, flags, mode))

    def write(self, fd: int, data: bytes) -> int:
        half = self._dies(How.HALF)
        if half:
            os.write(fd, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return self._at("write", lambda: super(Counted, self).write(fd, data))

    def fsync(self, fd: int) -> None:
        self._at("fsync", lambda: super(Counted, self).fsync(fd))

    def close(self, fd: int) -> None:
        self._at("close", lambda: super(Counted, self).close(fd))

    def rename(self, source: str, target: str) -> None:
        self._at("rename", lambda: super(Counted, self).rename(source, target))

    def _dies(self, how: How) -> bool:
        return self._point is not None and (self._point.at, self._point.how) == (len(self.names), how)

    def _at(self, name: str, call: Callable[[], Any]) -> Any:
        if self._dies(How.BEFORE):
            os.kill(os.getpid(), signal.SIGKILL)
        answer = call()
        if self._dies(How.AFTER):
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)
        return answer


@dataclass(frozen=True)
class Step:
    """A command as an operator sends it, and what an agent holds once it was accepted. fence: 0 for a
    renewal, which makes nothing durable."""

    verb: str
    fence: int
    baseline: str
    candidate: bool


def _script() -> tuple[Step, ...]:
    """Every kind of command, each after each that may come before it."""
    return (
        Step("apply", 1, "a", False),
        Step("grant", 2, "a", True),
        Step("renew", 0, "a", True),
        Step("grant", 2, "a", True),
        Step("revoke", 3, "a", False),
        Step("grant", 4, "a", True),
        Step("apply", 5, "b", False),
        Step("grant", 6, "b", True),
        Step("grant", 7, "b", True),
        Step("remove", 8, "", False),
        Step("apply", 9, "a", False),
        Step("grant", 10, "a", True),
        Step("revoke", 11, "a", False),
    )


SCRIPT = _script()


@dataclass(frozen=True)
class Found:
    """What a life holds, before it is told anything."""

    fence: int
    baseline: str
    candidate: str
    returned: str
    returned_fence: int
    faults: tuple[str, ...]


class Life:
    """One process over the folder. `tell` hears of each command before it is sent and after it was
    acknowledged."""

    def __init__(self, folder: Path, tell: Tell, point: Point | None) -> None:
        first = baseline_manifest()
        self._baselines: dict[str, RuntimeManifest] = {"a": first, "b": baseline_manifest(chunk_tokens=128)}
        self.calls = Counted(point)
        self._tell = tell
        tell("opening")
        self.bench = Bench(folder, calls=self.calls)

    async def restore(self) -> None:
        await self.bench.node.restore()

    def found(self) -> Found:
        node = self.bench.node
        host = node.caches.get(UID)
        digests = {one.digest(): name for name, one in self._baselines.items()}
        lease = None if host is None else host.enforcement.lease()
        returned = None if host is None else host.enforcement.returned
        return Found(
            node.highest_fence(UID),
            "" if host is None else digests.get(host.baseline_digest, host.baseline_digest),
            "" if lease is None else lease.terms.candidate_digest,
            "" if returned is None else returned.reason.value,
            0 if returned is None else returned.fence,
            tuple(node.faults.values()),
        )

    async def send(self, number: int) -> None:
        step = SCRIPT[number]
        self._tell(f"sending {number}")
        await self.command(step, step.fence)
        self._tell(f"acknowledged {number}")

    async def command(self, step: Step, fence: int) -> None:
        bench = self.bench
        if step.baseline:
            bench.baseline = self._baselines[step.baseline]
            bench.candidate = quest_candidate(bench.baseline)
        if step.verb == "renew":
            token = bench.command(fence=bench.fence, stage="Canary").fence
            await bench.node.renew(cache_name(NAME), token, bench.candidate.digest(), 60_000)
            return
        bench.fence = fence - 1
        if step.verb == "apply":
            digest = await bench.apply()
            assert digest == bench.baseline.digest()
        elif step.verb == "grant":
            await bench.grant()
        elif step.verb == "revoke":
            proof = await bench.node.revoke(bench.command(stage="ExactBaseline"), "GateFailed", b"nonce")
            assert (proof.candidate_digest, proof.highest_fence) == ("", fence)
        else:
            await bench.node.remove_cache(bench.command())

    async def refusals(self, below: int) -> list[str]:
        """What older commands, and a proof asked for under an older fence, are answered."""
        reasons = []
        for verb in ("apply", "grant", "revoke", "remove"):
            reasons.append(await _refused(self.command(Step(verb, below, "a", False), below)))
        node = self.bench.node
        if UID in node.caches:
            reasons.append(await _refused(node.prove(cache_name(NAME), below, node.boot_id, b"n")))
        return reasons


async def _refused(call: Any) -> str:
    try:
        await call
    except CoreError as error:
        return error.reason.value
    return "accepted"


def right() -> None:
    """The agent as it is."""


Mistake = Callable[[], None]


def first_life(folder: Path, point: Point | None, mistake: Mistake = right) -> tuple[list[str], bool]:
    """The whole script from nothing, to its end or to the point."""

    async def play(tell: Tell) -> None:
        mistake()
        life = Life(folder, tell, point)
        await life.restore()
        for number in range(len(SCRIPT)):
            await life.send(number)
        tell(json.dumps({"calls": life.calls.names, "found": asdict(life.found())}))

    return forked(lambda tell: asyncio.run(play(tell)))


def next_life(
    folder: Path, begins: int, point: Point | None, mistake: Mistake = right
) -> tuple[list[str], bool]:
    """Says what it holds, refuses what is older, takes the interrupted command twice, and goes on."""

    async def play(tell: Tell) -> None:
        mistake()
        life = Life(folder, tell, point)
        await life.restore()
        found = life.found()
        tell(json.dumps({"found": asdict(found)}))
        if found.fence > 1:
            tell(json.dumps({"stale": await life.refusals(found.fence - 1)}))
        for number in (begins, begins, *range(begins + 1, len(SCRIPT))):
            await life.send(number)
        tell(json.dumps({"calls": life.calls.names, "found": asdict(life.found())}))

    return forked(lambda tell: asyncio.run(play(tell)))


def outstanding(told: Sequence[str]) -> tuple[int, int]:
    """Of a life: the highest fence that was acknowledged, and the number of the command to repeat."""
    highest, begins = 0, 0
    for line in told:
        word, _, number = line.partition(" ")
        if word == "acknowledged":
            highest, begins = max(highest, SCRIPT[int(number)].fence), int(number) + 1
        elif word == "sending":
            begins = int(number)
    # A lease does not outlive its process, so a renewal that was interrupted is not what comes next.
    while 0 < begins < len(SCRIPT) and SCRIPT[begins].verb == "renew":
        begins -= 1
    return highest, begins


def problems_of(told: Sequence[str], acknowledged: int, begins: int) -> list[str]:
    """What is wrong with a life that followed one in which that fence was acknowledged and that command was
    interrupted. Empty: nothing."""
    said = [json.loads(line) for line in told if line.startswith("{")]
    if not said:
        return ["it said nothing"]
    found = Found(**{**said[0]["found"], "faults": tuple(said[0]["found"]["faults"])})
    problems = []
    if found.fence < acknowledged:
        problems.append(f"fence {acknowledged} was acknowledged and {found.fence} is held")
    if found.fence > max(acknowledged, SCRIPT[begins].fence):
        problems.append(f"fence {found.fence} is held, which nobody sent")
    if found.candidate:
        problems.append("a candidate is held that nobody granted to this process")
    if found.faults:
        problems.append(f"faults: {found.faults}")
    last = next((step for step in SCRIPT if 0 < step.fence == found.fence), None)
    running = "" if last is None else last.baseline
    if found.baseline != running:
        problems.append(f"baseline {found.baseline!r} runs, {running!r} is what fence {found.fence} left")
    granted = last is not None and last.verb == "grant"
    returned = ("BootRestart", found.fence) if granted else ("", 0)
    if (found.returned, found.returned_fence) != returned:
        problems.append(f"it says {found.returned!r} under {found.returned_fence}, not {returned}")
    for stale in (one["stale"] for one in said if "stale" in one):
        if set(stale) != {"FENCE_STALE"}:
            problems.append(f"older commands were answered {stale}")
    return problems


def points_of(names: Sequence[str]) -> list[Point]:
    """Every call before and after, and each write half way."""
    found = []
    for at, name in enumerate(names):
        found += [Point(at, how, name) for how in How if how is not How.HALF or name == "write"]
    return found


def end_of(told: Sequence[str]) -> dict[str, Any]:
    last: dict[str, Any] = json.loads(told[-1])
    return last


def try_point(
    folder: Path, points: Sequence[Point], undisturbed: dict[str, Any], mistake: Mistake = right
) -> dict[str, Any]:
    """Lives that are killed at the points one after the other, and one that is not. What is wrong is in
    `problems`."""
    told, killed = first_life(folder, points[0], mistake)
    problems = [] if killed else ["the point was never reached"]
    acknowledged, begins = outstanding(told)
    for point in (*points[1:], None):
        if not killed:
            break
        told, killed = next_life(folder, begins, point, mistake)
        if not killed or any(line.startswith("{") for line in told):
            problems += problems_of(told, acknowledged, begins)
        further, after = outstanding(told)
        acknowledged, begins = max(acknowledged, further), max(begins, after)
    if end_of(told)["found"] != undisturbed["found"]:
        problems.append(f"it ended with {end_of(told)['found']}")
    return {"points": [asdict(point) for point in points], "problems": problems}


def acknowledging_too_early() -> None:
    """A store that loses what it was asked for, as one that acknowledged before it wrote would."""
    FileFenceStore.save = lambda self, record: None  # type: ignore[method-assign]


def one_behind() -> None:
    """A store that gives back the fence before the last, as one that did not wait for the rename would."""
    original = FileFenceStore.load

    def load(self: FileFenceStore) -> Any:
        records, damaged = original(self)
        return {uid: replace(one, value=one.value - 1) for uid, one in records.items()}, damaged

    FileFenceStore.load = load  # type: ignore[method-assign]


MISTAKES = {"acknowledging-too-early": acknowledging_too_early, "one-behind": one_behind}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="each n-th point only")
    parser.add_argument("--pairs", type=int, default=500, help="pairs of points, the second in the next life")
    parser.add_argument("--seed", type=int, default=1, help="of the pairs")
    options = parser.parse_args(argv)
    chance = random.Random(options.seed)
    bad, unseen = 0, []
    with tempfile.TemporaryDirectory(prefix="kvtier-fences-") as base:
        told, killed = first_life(Path(base, "undisturbed"), None)
        assert not killed
        undisturbed = end_of(told)
        points = points_of(undisturbed["calls"])
        tries = [(point,) for point in points[:: options.every]]
        tries += [(chance.choice(points), chance.choice(points)) for _ in range(options.pairs)]
        for number, chosen in enumerate(tries):
            row = try_point(Path(base, str(number)), chosen, undisturbed)
            bad += bool(row["problems"])
            print(json.dumps(row), flush=True)
        for name, mistake in MISTAKES.items():
            if not try_point(Path(base, name), (Point(20, How.BEFORE),), undisturbed, mistake)["problems"]:
                unseen.append(name)
    counts = {"calls": len(undisturbed["calls"]), "points": len(points), "tried": len(tries), "bad": bad}
    print(json.dumps({**counts, "unseenMistakes": unseen}))
    return 1 if bad or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
