"""Where engines find local channels: one socket in a folder of its own for each namespace, on the event loop.

It offers a channel to a session that asks, accepts who may attach, and ends all channels in an orderly way.
It must not know what a frame is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from kvtier.local import frames as wire
from kvtier.local.receipts import pack_ended
from kvtier.v1 import attention_pb2
from kvtier_agent.attendframes import FrameDesk
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.cachesession import Session
from kvtier_agent.errors import to_detail
from kvtier_agent.localchannel.channel import Channel
from kvtier_agent.localchannel.evidence import LoopEvidence
from kvtier_agent.localchannel.frames import FrameServer
from kvtier_agent.localchannel.tokens import TokenBook
from kvtier_core.errors import CoreError, Reason

log = logging.getLogger(__name__)
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_BACKLOG = 128
_LOCK_TRIES = 16
# Connections that have not attached yet are counted as channels, so there is room for a few above sessions.
_SPARE_CHANNELS = 16
WATCH_SECONDS = 0.5
# Without descriptors nothing is accepted until some are free.
ACCEPT_PAUSE_SECONDS = 0.5
_PEER = struct.Struct("3i")


class ChannelServer:
    """All local channels of one agent. Methods run on the event loop unless they say otherwise."""

    def __init__(
        self, desk: FrameDesk, folder: Path, allowed_uids: Callable[[], frozenset[int]] | None = None
    ) -> None:
        """folder: made private. allowed_uids: who may attach; by default this process's user and root, who
        could read our memory anyway."""
        self._desk = desk
        self._folder = folder
        self._allowed = allowed_uids or (lambda: frozenset({0, os.geteuid()}))
        self._tokens = TokenBook()
        self._listeners: dict[str, _Listener] = {}
        self._channels: dict[Channel, threading.Thread] = {}
        # What was told of a channel's looking: nanoseconds with a message seen, and in vain.
        self._looked: dict[Channel, tuple[int, int]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._numbered = 0
        self._closed = False

    @property
    def open_channels(self) -> int:
        return len(self._channels)

    def offer(self, session: Session, version: int) -> attention_pb2.LocalChannel:
        """A way to attach the session; CoreError says why there is none."""
        if self._closed:
            raise CoreError(Reason.DRAINING, "the agent is ending")
        if version < wire.VERSION:
            message = f"version {version} is not spoken here, {wire.VERSION} is"
            raise CoreError(Reason.UNSUPPORTED, message)
        namespace = session.host.name.namespace
        listener = self._listeners.get(namespace)
        if listener is None:
            listener = self._listeners[namespace] = self._listen(namespace)
        return attention_pb2.LocalChannel(
            socket=str(listener.path),
            token=self._tokens.mint(session),
            version=wire.VERSION,
            max_ring_bytes=self._desk.node.limits.max_message_bytes,
            max_frames=wire.MAX_FRAMES,
        )

    async def close(self, seconds: float) -> Sequence[str]:
        """Ends every channel after the message that it computes; what does not end in time is named."""
        self._closed = True
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        why = CoreError(Reason.DRAINING, "the agent ends")
        for channel in list(self._channels):
            channel.end(why)
        deadline = time.monotonic() + seconds
        # A thread's end is told on this loop; nothing else wakes it.
        while self._channels and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        return [channel.name for channel in self._channels]

    def _listen(self, namespace: str) -> _Listener:
        if not _NAMESPACE.fullmatch(namespace):
            raise CoreError(Reason.BAD_ARGUMENT, f"namespace {namespace[:80]!r} names no folder")
        try:
            listener = _Listener(self._folder, namespace, lambda one: self._accepted(namespace, one))
        except OSError as error:
            message = f"no local channels in {self._folder / namespace}: {error.strerror}"
            raise CoreError(Reason.STORAGE_UNAVAILABLE, message) from None
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watching())
        return listener

    def _accepted(self, namespace: str, connection: socket.socket) -> None:
        refused = self._refusal(connection)
        if refused is not None:
            self._refuse(connection, namespace, refused)
            return
        loop = asyncio.get_running_loop()
        self._numbered += 1

        def post(call: Callable[[], None]) -> None:
            # A loop that has ended needs to be told nothing.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(call)

        def evidence_of(host: CacheHost) -> LoopEvidence:
            return LoopEvidence(host.evidence, post, self._desk.metrics.evidence_lost.inc)

        office = _Office(self._desk, self._tokens, namespace, loop, post)
        name = f"local-channel-{self._numbered}"
        channel = Channel(connection, office, FrameServer(self._desk, evidence_of), name)

        def live() -> None:
            try:
                channel.run()
            finally:
                post(lambda: self._ended(channel))

        thread = threading.Thread(target=live, name=name, daemon=True)
        self._channels[channel] = thread
        try:
            thread.start()
        except RuntimeError as error:
            del self._channels[channel]
            self._refuse(connection, namespace, CoreError(Reason.QUEUE_FULL, f"no thread for it: {error}"))

    @staticmethod
    def _refuse(connection: socket.socket, namespace: str, why: CoreError) -> None:
        with connection, contextlib.suppress(OSError):
            connection.send(pack_ended(to_detail(why), time.monotonic_ns()), socket.MSG_DONTWAIT)
        log.warning("local channel in %s refused: %s", namespace, why)

    def _ended(self, channel: Channel) -> None:
        self._tell_looking(channel)
        self._looked.pop(channel, None)
        self._channels.pop(channel, None)

    def _tell_looking(self, channel: Channel) -> None:
        seen, wasted = channel.patience.seen, channel.patience.wasted
        seen_before, wasted_before = self._looked.get(channel, (0, 0))
        seconds = self._desk.metrics.channel_look_seconds
        seconds["yes",].inc((seen - seen_before) / 1e9)
        seconds["no",].inc((wasted - wasted_before) / 1e9)
        self._looked[channel] = seen, wasted

    def _refusal(self, connection: socket.socket) -> CoreError | None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, _ = _PEER.unpack(raw)
        if uid not in self._allowed():
            return CoreError(Reason.TENANT_MISMATCH, f"uid {uid} may not attach here")
        bound = self._desk.node.limits.max_sessions + _SPARE_CHANNELS
        if len(self._channels) >= bound:
            return CoreError(Reason.QUEUE_FULL, f"{bound} channels are open", {"bound": str(bound)})
        return None

    async def _watching(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            for channel in list(self._channels):
                channel.answer_hung(now)
                self._tell_looking(channel)


class _Office:
    """Implements ChannelOffice for the channels of one namespace."""

    def __init__(
        self,
        desk: FrameDesk,
        tokens: TokenBook,
        namespace: str,
        loop: asyncio.AbstractEventLoop,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._desk = desk
        self._tokens = tokens
        self._namespace = namespace
        self._loop = loop
        self._post = post

    @property
    def boot_id(self) -> str:
        return self._desk.node.boot_id

    @property
    def idle_seconds(self) -> float:
        return self._desk.node.longest_idle_seconds

    @property
    def frame_seconds(self) -> float:
        return self._desk.node.limits.frame_deadline_seconds

    @property
    def max_ring_bytes(self) -> int:
        return self._desk.node.limits.max_message_bytes

    def attach(self, token: bytes) -> Future[tuple[Session, bytes]]:
        claim = self._claim(token)
        try:
            return asyncio.run_coroutine_threadsafe(claim, self._loop)
        except RuntimeError:
            claim.close()
            raise ConnectionError("the agent has ended") from None

    async def _claim(self, token: bytes) -> tuple[Session, bytes]:
        session = self._tokens.redeem(token, self._namespace)
        try:
            await self._desk.claim(session, self._desk.takeover())
        except CoreError:
            # It came before its other stream had ended; it may come again.
            self._tokens.give_back(token, session)
            raise
        return session, self._tokens.mint(session)

    def release(self, session: Session) -> None:
        self._post(lambda: self._desk.release(session))


class _Listener:
    """A listening socket in a private folder. A path of any length: it is bound by way of its folder."""

    def __init__(self, parent: Path, namespace: str, accepted: Callable[[socket.socket], None]) -> None:
        """OSError, and then nothing is left behind but folders."""
        folder = parent / namespace
        self.path = folder / wire.SOCKET_NAME
        self._accepted = accepted
        self._pause: asyncio.TimerHandle | None = None
        self._held = _locked(folder)
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except BaseException:
            os.close(self._held)
            raise
        try:
            self._socket.setblocking(False)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(self.path.lstat().st_mode):
                    self.path.unlink()
            self._socket.bind(f"/proc/self/fd/{self._held}/{wire.SOCKET_NAME}")
            self.path.chmod(0o600)
            self._socket.listen(_BACKLOG)
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._accept)
        except BaseException:
            self._socket.close()
            os.close(self._held)
            raise

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            log.warning("no connection can be accepted: %s", error)
            # It goes on waiting: told of it at once, the loop would do nothing else.
            self._loop.remove_reader(self._socket.fileno())
            self._pause = self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._listen_again)
            return
        connection.setblocking(True)
        self._accepted(connection)

    def _listen_again(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        # The lock is let go last: until then no other agent can have put a socket there.
        with contextlib.suppress(OSError):
            self.path.unlink()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
        os.close(self._held)


def _locked(folder: Path) -> int:
    """Makes the folder and its parent private and locks it; a descriptor of it that holds the lock. It is the
    folder itself that is locked, so that nothing is left behind in it. OSError: EBUSY when another agent
    holds it."""
    for _ in range(_LOCK_TRIES):
        for one in (folder.parent, folder):
            one.mkdir(mode=0o700, exist_ok=True)
            one.chmod(0o700)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), folder.stat()):
                    return held
        except BlockingIOError:
            os.close(held)
            raise OSError(errno.EBUSY, "another agent has its channels there") from None
        except BaseException:
            os.close(held)
            raise
        # Its owner has removed it between the two calls.
        os.close(held)
    raise OSError(errno.EBUSY, "another agent makes and removes it")
