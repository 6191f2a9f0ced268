"""Whose a folder of channels is, and what is left of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.local import frames as wire
from kvtier_agent.cachesession import Session
from kvtier_agent.localchannel import listener
from kvtier_agent.localchannel.listener import ChannelServer
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import SessionFacts
from tests.unit.agent.local_channel_rig import SECONDS, ChannelRig, channel_rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChannelRig]:
    with channel_rig(tmp_path) as made:
        yield made


async def offered(server: ChannelServer, session: Session) -> str:
    return server.offer(session, wire.VERSION).socket


def session_of(rig: ChannelRig) -> Session:
    facts = SessionFacts("beta", "", "root", "root")
    return rig.run(rig.host.open_session(facts, 0.125, 100, ""))


def test_a_second_agent_in_a_folder_takes_no_socket_from_the_first(rig: ChannelRig) -> None:
    opened = rig.opened()
    path = Path(opened.local_channel.socket)
    second = ChannelServer(rig.desk, path.parent.parent)
    session = session_of(rig)
    with rig.channel(opened) as channel:
        for _ in range(2):
            with pytest.raises(CoreError, match="another agent has its channels there") as refused:
                rig.run(offered(second, session))
            assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
        assert channel.works()
        # Its end takes nothing of the first's either.
        assert rig.run(second.close(SECONDS)) == []
        assert path.is_socket()
    with rig.channel(rig.opened()) as channel:
        assert channel.works()


def test_the_folder_is_free_for_the_next_agent_when_the_first_has_ended(rig: ChannelRig) -> None:
    path = Path(rig.opened().local_channel.socket)
    rig.run(rig.server.close(SECONDS))
    assert not path.parent.exists() and path.parent.parent.is_dir()
    rig.server = ChannelServer(rig.desk, path.parent.parent)
    with rig.channel(rig.opened()) as channel:
        assert channel.works()


def test_a_socket_that_a_killed_agent_left_is_replaced(rig: ChannelRig) -> None:
    folder = rig.server._folder / rig.host.name.namespace
    folder.mkdir(parents=True)
    left = folder / wire.SOCKET_NAME
    os.mknod(left, 0o600 | 0o140000)
    with rig.channel(rig.opened()) as channel:
        assert channel.works()


def test_a_folder_that_its_owner_removes_while_it_is_locked_is_made_again(
    rig: ChannelRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the descriptor and the lock the old folder goes: what is locked then is nobody's any more."""
    real = listener.fcntl.flock
    folder = rig.server._folder / rig.host.name.namespace
    removed: list[Path] = []

    def flock(descriptor: int, how: int) -> None:
        if not removed:
            removed.append(folder)
            folder.rmdir()
        real(descriptor, how)

    monkeypatch.setattr(listener.fcntl, "flock", flock)
    with rig.channel(rig.opened()) as channel:
        assert channel.works()
    assert removed == [folder]


def test_a_folder_that_is_refused_leaves_no_descriptor(
    rig: ChannelRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(rig)
    rig.server._folder.mkdir(parents=True)
    (rig.server._folder / rig.host.name.namespace).write_text("a file")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CoreError) as refused:
        rig.run(offered(rig.server, session))
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
    assert len(os.listdir("/proc/self/fd")) == before
