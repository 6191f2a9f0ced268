"""Lives of the operator, one process each, that end or stop by a signal at a write that is named in advance.

Runs as a process of its own (`python -m tests.cluster.operator_lives`): it imports the operator once and
forks a process for each line on standard input, a JSON object of `Order`'s fields. Each life appends every
external write to its log, before it is sent ("> "), after it was accepted ("< ") or when it has failed
("! "); the log is the counter by which points are found. For each life one JSON line {"pid", "status"} is
written when it has ended. When standard input closes, all of them are killed. It must not know what is
asserted.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import os
import select
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier_operator.app import Operator, Options
from kvtier_operator.election import Timing
from kvtier_operator.ports import Agents, AgentTls, Kind, KubeApi
from kvtier_operator.telemetry import build_telemetry

_PR_SET_PDEATHSIG = 1
API_WRITES = ("apply", "patch_status", "compare_and_swap", "create", "delete", "event")
AGENT_WRITES = ("apply_baseline", "remove_cache", "grant", "renew", "revoke")
QUICK = Timing(duration=6.0, renew=1.0, retry=0.2, margin=2.0)


@dataclass(frozen=True)
class Order:
    """One life. `log`: file of its writes. kill: the write to die at, as `describe` names it with its number,
    empty: none; after: once it was accepted, else before it is sent. stop: SIGSTOP in place of SIGKILL."""

    kubeconfig: str
    namespace: str
    identity: str
    cert: str
    key: str
    ca: str
    log: str
    kill: str = ""
    after: bool = False
    stop: bool = False


class Writes:
    """Numbers each kind of write, tells the log, and ends the process at the chosen one."""

    def __init__(self, log: int, order: Order) -> None:
        self._log = log
        self._order = order
        self._sent: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()

    def through(self, api: KubeApi, agents: Agents) -> tuple[KubeApi, Agents]:
        to_api = {name: functools.partial(describe_api, name) for name in API_WRITES}
        to_agents = {name: functools.partial(describe_agent, name) for name in AGENT_WRITES}
        seen_api: Any = Watched(api, to_api, self)
        seen_agents: Any = Watched(agents, to_agents, self)
        return seen_api, seen_agents

    def sending(self, name: str) -> None:
        self._sent[name] += 1
        self._tell(">", name, self._sent[name], after=False)

    def accepted(self, name: str) -> None:
        self._accepted[name] += 1
        self._tell("<", name, self._accepted[name], after=True)

    def failed(self, name: str) -> None:
        os.write(self._log, f"! {name}\n".encode())

    def _tell(self, sign: str, name: str, number: int, *, after: bool) -> None:
        point = f"{name} #{number}"
        os.write(self._log, f"{sign} {point}\n".encode())
        if point == self._order.kill and after == self._order.after:
            os.kill(os.getpid(), signal.SIGSTOP if self._order.stop else signal.SIGKILL)


class Watched:
    """A client of which some methods are writes."""

    def __init__(self, client: Any, writes: Mapping[str, Callable[..., str]], watch: Writes) -> None:
        self._client = client
        self._writes = writes
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        describe = self._writes.get(name)
        return method if describe is None else self._seen(method, describe)

    def _seen(
        self, method: Callable[..., Awaitable[Any]], describe: Callable[..., str]
    ) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **options: Any) -> Any:
            name = describe(*args, **options)
            self._watch.sending(name)
            try:
                answer = await method(*args, **options)
            except BaseException:
                self._watch.failed(name)
                raise
            self._watch.accepted(name)
            return answer

        return call


def describe_api(method: str, first: Any, *args: Any, subresource: str = "status", **_: Any) -> str:
    """What is written, so that the same step of another run has the same name."""
    if method == "event":
        return f"Event {args[1]}"
    if method in ("apply", "create"):
        return f"{method} {first['kind']}"
    if method != "compare_and_swap":
        return f"{method} {first.kind}"
    values = {op.path: op.value for op in args[0] if op.verb.value != "test"}
    status = values.get("/status")
    if first.kind is Kind.KV_ROLLOUT and status is not None:
        return f"status {status.get('phase')} {status.get('stage')}/{status.get('step', 0)}"
    moved = [name for name in ("fence", "baseline", "approved") if f"/status/{name}" in values]
    return f"swap {first.kind} {subresource or 'object'} {'+'.join(moved)}".rstrip()


def describe_agent(method: str, node: Any, request: Any, **_: Any) -> str:
    stage = f" {request.fence.stage}/{request.fence.step}" if method in ("grant", "revoke") else ""
    return f"{method} {node.name}{stage}"


def live(order: Order) -> int:
    """Runs an operator until SIGTERM, or to the write that ends it."""
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    options = Options(
        kubeconfig=order.kubeconfig,
        namespace=order.namespace,
        identity=order.identity,
        tls=AgentTls(Path(order.cert), Path(order.key), Path(order.ca)),
        election=QUICK,
    )
    telemetry = build_telemetry(otlp_endpoint="", instance=order.identity, version="test")

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await Operator(options, telemetry, through=Writes(log, order).through).run(stop)

    asyncio.run(run())
    return 0


def _born(order: Order, parent: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os._exit(live(order))
    except BaseException as error:
        print(f"operator: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def main() -> int:
    """Until standard input closes."""
    alive: set[int] = set()
    me = os.getpid()
    waiting = b""
    try:
        while True:
            if select.select([0], [], [], 0.05)[0]:
                data = os.read(0, 65536)
                if not data:
                    return 0
                *lines, waiting = (waiting + data).split(b"\n")
                for line in lines:
                    pid = _born(Order(**json.loads(line)), me)
                    alive.add(pid)
                    print(json.dumps({"born": pid}), flush=True)
            for pid in list(alive):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    alive.discard(pid)
                    print(json.dumps({"pid": pid, "status": status}), flush=True)
    finally:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
