"""An agent that runs out of descriptors or threads refuses connections, and does nothing worse."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from kvtier.v1 import attention_pb2
from kvtier_agent.cachesession import Session
from kvtier_client.errors import KvtierError
from kvtier_client.localwire import LocalWire
from kvtier_core.errors import Reason
from tests.engine.raw_channel import Ended, RawChannel
from tests.unit.agent.local_channel_rig import SECONDS, Attached, channel_rig, open_descriptors


class Exhausted:
    """A listening socket that accepts nothing for want of descriptors until told otherwise."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.empty = True
        self.asked = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.empty:
            self.asked += 1
            raise OSError(errno.EMFILE, "too many open files")
        return self._real.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_connection_that_cannot_be_accepted_leaves_the_loop_time_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on waiting, so the loop would be told of it again and again, and do nothing else."""
    monkeypatch.setattr("kvtier_agent.localchannel.listener.ACCEPT_PAUSE_SECONDS", 1000.0)
    with channel_rig(tmp_path) as rig:
        opened = rig.opened()
        [listener] = rig.server._listeners.values()
        scarce = Exhausted(listener._socket)
        listener._socket = scarce  # type: ignore[assignment]
        with RawChannel(opened.local_channel.socket) as waiting:
            rig.settled(lambda: scarce.asked > 0, "the first refusal")
            turns = itertools.count()
            rig.settled(lambda: next(turns) >= 20, "turns of the loop")
            assert scarce.asked == 1
            scarce.empty = False

            async def free() -> None:
                listener._listen_again()

            rig.run(free())
            waiting.hello(opened.local_channel.token)


def test_a_channel_without_a_thread_is_closed_and_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with channel_rig(tmp_path) as rig:
        opened = rig.opened()
        refused = threading.Event()
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name.startswith("local-channel"):
                refused.set()
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        with RawChannel(opened.local_channel.socket) as channel:
            assert refused.wait(SECONDS)
            with pytest.raises(Ended, match="no thread") as ended:
                channel.receive()
            assert ended.value.reason == "QUEUE_FULL"
        assert rig.server.open_channels == 0
        monkeypatch.undo()
        attached: Attached = rig.channel(opened)
        with attached:
            assert attached.works()


def test_a_claim_that_ends_after_its_channel_gave_up_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody could attach the session again, nor stream it over gRPC."""
    monkeypatch.setattr("kvtier_agent.localchannel.channel._ATTACH_SECONDS", 0.05)
    with channel_rig(tmp_path) as rig:
        opened = rig.opened()
        real, gave_up = rig.desk.claim, threading.Event()

        async def claim(session: Session, by: float) -> None:
            await real(session, by)
            # A loop that is busy just here.
            gave_up.wait(SECONDS)

        monkeypatch.setattr(rig.desk, "claim", claim)
        with pytest.raises(Ended, match="did not attach in time"):
            rig.channel(opened)
        gave_up.set()
        rig.settled(lambda: not rig.session(opened).streaming, "the session's release")


def test_an_engine_without_descriptors_is_told_so_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no KvtierError would end a generation that gRPC can go on with."""
    offer = attention_pb2.LocalChannel(socket="/nowhere/attend.sock", token=b"t" * 32, max_ring_bytes=1 << 20)

    def scarce(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    before = open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr("kvtier_client.localwire.socket.socket", scarce)
        with pytest.raises(KvtierError) as refused:
            LocalWire([], {}, offer, 4096)
    assert refused.value.reason is Reason.NO_STAGING
    assert open_descriptors() == before
