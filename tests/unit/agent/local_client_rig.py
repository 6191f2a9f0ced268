"""Asking over a local channel without a session: senders, parts, and both ways of a pipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvtier.v1 import attention_pb2
from kvtier_client.errors import KvtierError
from kvtier_client.loneframes import Noted
from kvtier_client.pipe import AttendPipe, Part, deadline_ms_of
from kvtier_client.wire import Answer
from tests.unit.agent.local_channel_rig import DIM, HEADS, KV_HEADS, SECONDS, ChannelRig


@dataclass(eq=False)
class Sender:
    opened: attention_pb2.OpenSessionResponse
    tenant: str = "beta"
    position_epoch: int = 0
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, DIM)


class NoStreams:
    """Counts what would be gRPC streams."""

    def __init__(self) -> None:
        self.asked = 0

    def attend(self) -> Any:
        self.asked += 1
        return self

    attend_many = attend
    lost = False
    outstanding = 0

    def close(self) -> None:
        pass


def part(sender: Sender, n: int = 1, seed: int = 0, step: int = 0, block: int = 256) -> Part:
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, heads, DIM, generator=made) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return Part(sender, step, 0, 0, q, k, v, 0, block)


def ask(pipe: AttendPipe, *parts: Part, seconds: float = SECONDS) -> None:
    pipe.attend(parts, seconds, 1.0, lambda part, answer: None)


def ask_alone(
    pipe: AttendPipe, one: Part, seconds: float = SECONDS, noted: Noted = lambda told: None
) -> bool:
    """As a session asks; whether the way of lone frames has the answer."""
    lone, milliseconds = pipe.lone, deadline_ms_of(seconds)
    assert lone is not None
    numbers = one.step, one.layer, one.position, one.q, one.k, one.v, one.committed, one.next_layer_follows
    out = lone.attend(*numbers, milliseconds, seconds + 1.0, noted)
    if out is None:

        def tell(_: Part, answer: Answer) -> None:
            noted(answer)

        pipe.attend([one], seconds, 1.0, tell)
    elif isinstance(out, KvtierError):
        one.failure = out
    else:
        one.out = out
    return out is not None


WAYS = pytest.mark.parametrize("way", [pytest.param(ask, id="any"), pytest.param(ask_alone, id="alone")])
Way = Callable[..., object]


def one_pipe(rig: ChannelRig, message_bytes: int = 1 << 20) -> tuple[Sender, AttendPipe]:
    sender = Sender(rig.opened())
    return sender, AttendPipe(NoStreams(), [sender], "local", message_bytes)
