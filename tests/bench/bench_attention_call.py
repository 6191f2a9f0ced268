"""What an attention call costs beside the attention: one decode query of one layer over about 1k rows.

The same frames go to an agent in a process of its own, over the local channel and over gRPC, and to the same
engine in this process. They take turns of a few dozen steps, so that each is measured as it runs by itself
and what slows the machine down slows down all of them. Overhead is the median over the turns of the
difference between a way's median and the engine's in the same turn; the best turn is the one that others
disturbed least. SmolLM2's heads, one compute thread on each side, float32. Beside it, as a floor: a Unix
socket's echo of as many bytes as a frame's message has, to a process that computes nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier_client.client import AttentionClient
from kvtier_client.pipe import Transport
from kvtier_client.session import AttentionSession, Geometry, SessionRequest
from kvtier_core.engine import CacheEngine
from kvtier_core.receipts import SessionHandle, SessionSpec, StepRequest
from kvtier_core.tiers.base import MediumKind, TierMount
from kvtier_crds.manifest import RuntimeManifest, model_fingerprint
from tests.bench.rows import Row
from tests.engine.agent_process import CACHE, Agent, baseline_manifest, running_agent, tiny_geometry

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 9, 3, 64
ROWS = 1024
# Steps of a turn, of which the first ones are not counted, and turns.
STEPS, WARM, TURNS = 30, 6, 16
GOAL_MICROSECONDS = 60.0
MESSAGE_BYTES = 144
BUDGETS = {"gpu-sim": 64 << 20, "dram": 0, "nvme": 0}
SCALE = HEAD_DIM**-0.5
Step = Callable[[int, int, int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measured:
    """Median seconds of a call in each turn, by name of its way, all of the same length and order."""

    turns: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.turns[name])

    def overheads(self, name: str) -> list[float]:
        """Microseconds above the engine alone, of each turn."""
        pairs = zip(self.turns[name], self.turns["engine"], strict=True)
        return [(call - alone) * 1e6 for call, alone in pairs]


def rows() -> Iterator[Row]:
    measured = measure()
    alone = measured.median("engine") * 1e6
    yield Row("attention_call.engine", alone, "us", lower_is_better=True)
    echo = echo_seconds() * 1e6
    yield Row("attention_call.socket_echo", echo, "us", lower_is_better=True)
    local, grpc = measured.overheads("local"), measured.overheads("grpc")
    for name, of in (("overhead", statistics.median), ("overhead.best_turn", min)):
        yield Row(
            f"attention_call.local.{name}",
            of(local),
            "us",
            goal=GOAL_MICROSECONDS if of is statistics.median else None,
            peer="gRPC stream",
            peer_value=of(grpc),
            lower_is_better=True,
        )
    yield Row(
        "attention_call.local.total",
        measured.median("local") * 1e6,
        "us",
        peer="gRPC stream",
        peer_value=measured.median("grpc") * 1e6,
        lower_is_better=True,
    )


def measure(turns: int = TURNS) -> Measured:
    """Seconds a call by way; asserts that all ways give the same bits."""
    torch.set_num_threads(1)
    manifest = baseline_manifest(tiny_geometry(LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM), budgets=BUDGETS)
    found: dict[str, list[float]] = {"engine": [], "local": [], "grpc": []}
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(running_agent())
        agent.apply_baseline(manifest)
        ways: dict[str, Step] = {
            "engine": stack.enter_context(_engine(manifest)),
            "local": stack.enter_context(_agent(agent, manifest, "local")),
            "grpc": stack.enter_context(_agent(agent, manifest, "grpc")),
        }
        made = torch.Generator().manual_seed(0)
        _turn(ways, found, [_frames(made, 1, 0, ROWS)])
        for made_of in found.values():
            made_of.clear()
        for turn in range(turns):
            first = turn * STEPS
            steps = [_frames(made, 2 + first + i, ROWS + first + i, 1) for i in range(STEPS)]
            _turn(ways, found, steps)
    return Measured(found)


Frame = tuple[int, int, int, Tensor, Tensor, Tensor]


def _frames(made: torch.Generator, step: int, first: int, n: int) -> list[Frame]:
    """One of each layer: step, layer, first position, q, k, v."""
    heads = (QUERY_HEADS, KV_HEADS, KV_HEADS)
    return [
        (step, layer, first, *(torch.randn(n, h, HEAD_DIM, generator=made) for h in heads))  # type: ignore[misc]
        for layer in range(LAYERS)
    ]


def _turn(ways: dict[str, Step], found: dict[str, list[float]], steps: list[list[Frame]]) -> None:
    """The same steps by each way, all of one way's before the next one's."""
    outs: dict[str, list[Tensor]] = {}
    for name, attend in ways.items():
        seconds, answers = [], []
        for frames in steps:
            for frame in frames:
                started = time.perf_counter()
                answers.append(attend(*frame))
                seconds.append(time.perf_counter() - started)
        found[name].append(statistics.median(seconds[WARM * LAYERS :] or seconds))
        outs[name] = answers
    for name, answers in outs.items():
        equal = all(torch.equal(a, b) for a, b in zip(answers, outs["engine"], strict=True))
        assert equal, f"{name} gives other bits"


@contextlib.contextmanager
def _agent(agent: Agent, manifest: RuntimeManifest, transport: Transport) -> Iterator[Step]:
    request = SessionRequest(
        namespace=CACHE.namespace,
        name=CACHE.name,
        tenant="bench",
        model_fingerprint=model_fingerprint(manifest.model),
        geometry=Geometry(LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM),
        score_scale=SCALE,
        session_root_id="bench",
        max_tokens=4096,
    )
    with (
        AttentionClient(agent.socket_path, transport=transport) as client,
        AttentionSession(client, request) as session,
    ):
        assert session.transport == transport
        yield lambda step, layer, first, q, k, v: session.attend(step, layer, first, q, k, v, first)


@contextlib.contextmanager
def _engine(manifest: RuntimeManifest) -> Iterator[Step]:
    """The agent's own engine, here."""
    mounts = {"gpu-sim": TierMount(class_name="gpu-sim", medium=MediumKind.GPU)}
    engine = CacheEngine(manifest, mounts, time.monotonic, probe=False)
    try:
        handle = engine.open_session(SessionSpec(tenant="bench", score_scale=SCALE, max_tokens=4096))
        yield lambda *frame: _step(engine, handle, *frame)
    finally:
        engine.stop()


def _step(
    engine: CacheEngine,
    handle: SessionHandle,
    step: int,
    layer: int,
    first: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """One frame for each block of 256 queries, as a client sends them."""
    outs = []
    for lo in range(0, q.shape[0], 256):
        part = slice(lo, lo + 256)
        request = StepRequest(
            session_id=handle.session_id,
            generation=handle.generation,
            step=step,
            layer=layer,
            first_row_position=first + lo,
            k=k[part],
            v=v[part],
            first_query_position=first + lo,
            q=q[part],
            committed_frontier=first,
            deadline=time.monotonic() + 30.0,
        )
        outs.append(engine.step(request).out)
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def echo_seconds(size: int = MESSAGE_BYTES, repeats: int = 5_000) -> float:
    """Median of a message to another process and back, on a SOCK_SEQPACKET pair."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        ours.close()
        buffer = bytearray(size)
        while theirs.recv_into(buffer):
            theirs.send(buffer)
        os._exit(0)
    theirs.close()
    message, buffer = bytes(size), bytearray(size)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        ours.send(message)
        ours.recv_into(buffer)
        seconds.append(time.perf_counter() - started)
    ours.close()
    os.waitpid(child, 0)
    return statistics.median(seconds)
