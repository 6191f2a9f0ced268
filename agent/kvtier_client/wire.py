"""What a session sends and gets, whatever carries it: frames of tensors, answers, and the wires' contract.

It exists so that blocks, order and reconnecting are written once. It must not know how bytes travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from kvtier.local.frames import evidence_place
from kvtier.v1 import attention_pb2
from kvtier_client.errors import KvtierError
from kvtier_client.rowevidence import RowEvidence

if TYPE_CHECKING:
    from kvtier_client.loneframes import LoneFrames

# Messages ahead of their answers.
MAX_OUTSTANDING = 4
WireName = Literal["grpc", "local"]


class Sender(Protocol):
    """The session of a frame, as far as a wire needs it."""

    @property
    def opened(self) -> attention_pb2.OpenSessionResponse: ...

    @property
    def tenant(self) -> str: ...

    @property
    def position_epoch(self) -> int: ...

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and head dim of its rows."""


# Neither frozen: they are made for every layer of every token, and a frozen one costs three times as much.
@dataclass(slots=True)
class Frame:
    """One layer of one step of one session. q [N, Hq, d], k, v [N, Hk, d] float32, of positions
    [position, position + N). Rows below `committed` are final.
    next_layer_follows: a promise that the next layer of this step comes next, with rows to the same position.
    """

    sender: Sender
    step: int
    layer: int
    position: int
    q: Tensor
    k: Tensor
    v: Tensor
    committed: int
    deadline_ms: int
    next_layer_follows: bool = False
    evidence: RowEvidence | None = None

    @property
    def size(self) -> int:
        """Bytes of its tensors, as they lie one behind the other."""
        rows = 4 * (self.q.numel() + self.k.numel() + self.v.numel())
        if self.evidence is None:
            return rows
        return evidence_place(rows, self.evidence.hidden_bytes) + 8 * self.evidence.surprisals


@dataclass(slots=True)
class Answer:
    """out [N, Hq, d] float32, this process's own. receipt: decoded when somebody asks."""

    step: int
    layer: int
    out: Tensor
    receipt: Callable[[], attention_pb2.Receipt]


class Wire(Protocol):
    """Carries messages of frames; each is answered by one message, in order. One engine thread drives it.

    After a DEADLINE or a failed connection it is broken; `lost` says that the connection went away, so that
    another wire may ask again what was not answered.
    """

    name: WireName

    @property
    def lone(self) -> LoneFrames | None:
        """A way of their own for decode frames of the only session."""

    @property
    def lost(self) -> bool: ...

    @property
    def left_behind(self) -> bool:
        """Whether answers are due on a wire that works."""

    @property
    def max_frames(self) -> int:
        """Of a message."""

    @property
    def max_message_bytes(self) -> int:
        """Of a message's tensors."""

    def has_room(self, frames: Sequence[Frame]) -> bool:
        """Whether `send` would take them now; always true when nothing is outstanding and the message is
        within its bounds."""

    def send(self, frames: Sequence[Frame]) -> None:
        """Raises what broke the wire, or QUEUE_FULL."""

    def receive(self, timeout: float) -> list[Answer | KvtierError]:
        """The answers to the oldest message. A refused frame is its KvtierError and leaves the wire usable;
        a wait over `timeout` seconds raises DEADLINE and breaks it."""

    def close(self) -> None:
        """Never raises, and waits a few seconds at most."""
