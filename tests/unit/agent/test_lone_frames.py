"""One decode frame alone on a local wire: what any frame would say and get, and when it is left to others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.local.receipts import step_and_layer
from kvtier_client.localwire import receipt_of
from kvtier_client.pipe import AttendPipe, Part
from tests.unit.agent.local_channel_rig import DIM, HEADS, KV_HEADS, SECONDS, ChannelRig, channel_rig
from tests.unit.agent.local_client_rig import NoStreams, Sender, ask_alone, one_pipe, part


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChannelRig]:
    with channel_rig(tmp_path) as made:
        yield made


def test_one_query_goes_alone_and_says_what_any_frame_says(rig: ChannelRig) -> None:
    told: list[Any] = []
    answers = []
    for alone in (True, False):
        sender, pipe = one_pipe(rig)
        sender.position_epoch = 3
        for step in range(3):
            one = part(sender, seed=step, step=step)
            one.layer, one.position, one.committed = 1, 7 + step, 6 + step
            one.next_layer_follows = step == 1
            if alone:
                assert ask_alone(pipe, one, noted=told.append)
            else:
                pipe.attend([one], SECONDS, 1.0, lambda part, answer: answers.append(answer))
            assert one.out is not None
            assert torch.equal(one.out, one.q)
        pipe.close()
    ones, others = rig.engine.frames[:3], rig.engine.frames[3:]
    for one_frame, other in zip(ones, others, strict=True):
        assert bytes(one_frame.k) == bytes(other.k)
        assert bytes(one_frame.v) == bytes(other.v)
        for name in ("step", "layer", "first_row_position", "first_query_position", "committed_frontier"):
            assert getattr(one_frame, name) == getattr(other, name)
        assert one_frame.position_epoch == other.position_epoch == 3
        assert one_frame.next_layer_follows is other.next_layer_follows
    assert [step_and_layer(raw) for raw in told] == [(one.step, one.layer) for one in answers]
    assert [receipt_of(raw) for raw in told] == [one.receipt() for one in answers]


def _two_queries(one: Part) -> None:
    one.q = torch.randn(2, HEADS, DIM)


def _strided(one: Part) -> None:
    one.k = torch.randn(1, DIM, KV_HEADS).transpose(1, 2)


def _no_rows(one: Part) -> None:
    one.k = one.v = torch.zeros(0, KV_HEADS, DIM)


def _narrow(one: Part) -> None:
    one.q, one.k, one.v = (x[..., : DIM // 2].contiguous() for x in (one.q, one.k, one.v))


def _far(one: Part) -> None:
    one.layer = 1 << 40


def _several(one: Part) -> None:
    made = part(one.sender, 3)  # type: ignore[arg-type]
    one.q, one.k, one.v = made.q, made.k, made.v


def _doubles(one: Part) -> None:
    one.q = one.q.double()


@pytest.mark.parametrize(
    "change",
    [_two_queries, _strided, _no_rows, _narrow, _far, _several, _doubles],
    ids=lambda change: change.__name__,
)
def test_a_frame_of_another_kind_is_left_to_the_general_way(
    rig: ChannelRig, change: Callable[[Part], None]
) -> None:
    sender, pipe = one_pipe(rig)
    assert ask_alone(pipe, part(sender, seed=1))
    one = part(sender, seed=2)
    change(one)
    lone = pipe.lone
    assert lone is not None
    numbers = one.step, one.layer, one.position, one.q, one.k, one.v, one.committed, False
    assert lone.attend(*numbers, 1000, SECONDS, lambda told: None) is None
    # Nothing was sent, so the next frame's answer is its own.
    after = part(sender, seed=3)
    assert ask_alone(pipe, after)
    assert after.out is not None
    assert torch.equal(after.out, after.q)
    assert len(rig.engine.frames) == 2
    pipe.close()


def test_a_channel_that_is_lost_under_a_lone_frame_is_replaced(rig: ChannelRig) -> None:
    sender, pipe = one_pipe(rig)
    assert ask_alone(pipe, part(sender))
    told: list[Any] = []
    before, channels = pipe.lone, list(rig.server._channels)
    cut = threading.Event()

    def lose() -> None:
        if not cut.is_set():
            cut.set()
            channels[0]._connection.shutdown(socket.SHUT_RDWR)

    rig.engine.hook = lose
    one = part(sender, seed=4)
    assert not ask_alone(pipe, one)
    assert one.out is not None
    assert torch.equal(one.out, one.q)
    assert pipe.lone is not before
    assert ask_alone(pipe, part(sender, seed=5))
    pipe.close()
    assert before is not None
    closed = part(sender)
    numbers = 0, 0, 0, closed.q, closed.k, closed.v, 0, False
    assert before.attend(*numbers, 1000, SECONDS, told.append) is None
    assert not told


def test_several_sessions_and_grpc_have_no_way_for_lone_frames(rig: ChannelRig) -> None:
    pipe = AttendPipe(NoStreams(), [Sender(rig.opened()) for _ in range(2)], "local", 1 << 20)
    assert pipe.lone is None
    pipe.close()
