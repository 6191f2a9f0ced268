"""One decode frame alone on a local wire: what is the same from layer to layer is made once and kept.

Why it exists: a token asks once for each layer, and between two layers a model's weights go through the
processor's caches, so that what a frame costs is above all how much of this process it touches. It decides
nothing: a frame of any other kind, and a wire that breaks under one, is the general way's (`LocalWire`), with
its refusals. What is due after an answer, its output's memory, is made while the agent computes.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtier.local import frames as wire
from kvtier.local.receipts import ANSWER, LONE_ANSWER, LONE_ANSWER_IS
from kvtier_client.errors import KvtierError
from kvtier_client.localring import FLOAT_BYTES
from kvtier_client.wire import Answer

if TYPE_CHECKING:
    from kvtier_client.localwire import Attached, LocalWire
    from kvtier_client.wire import Sender

_HEAD = wire.HEADER.size
_LEAST = _HEAD + ANSWER.size
_pack, _unpack = wire.LONE_FRAME.pack_into, LONE_ANSWER.unpack_from
# Keeps the interpreter's lock: to let it go and take it again costs more than so small a copy.
_copy = ctypes.cast(
    ctypes.memmove, ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
)
Noted = Callable[[Answer | bytes], object]
"""Is told of an answer's receipt: the answer, or the answer's record as it came."""


class LoneFrames:
    """Of the only session of a wire, which it shares with the general way: nothing else may be on its way."""

    def __init__(self, of: LocalWire, sender: Sender, attached: Attached) -> None:
        self._wire, self._sender = of, sender
        self._generation = attached.generation
        self._index = attached.index
        self._message = bytearray(wire.lone_message(attached.session_tag, attached.boot_tag))
        self._view = memoryview(of.buffer)
        # Of the frames that it knows: none before the first.
        self._query: torch.Size | None = None
        self._row: torch.Size | None = None
        self._span = (0, 0)
        self._row_bytes = self._out_bytes = 0
        self._places = (0, 0, 0)
        self._answer = of.answers.address

    def attend(
        self,
        step: int,
        layer: int,
        position: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        committed: int,
        follows: bool,
        deadline_ms: int,
        timeout: float,
        noted: Noted,
    ) -> Tensor | KvtierError | None:
        """The output [1, Hq, d] of a query and its new row; the frame's refusal; or None: the frame is not of
        this kind, or the wire broke and says so to whoever asks it next. timeout: seconds for the answer."""
        of = self._wire
        if of.waiting or of.broken is not None:
            return None
        if not (q.shape == self._query and k.shape == self._row == v.shape) and not self._learn(q, k, v):
            return None
        shape, float32 = self._query, torch.float32
        assert shape is not None
        if not (
            (q.dtype is k.dtype is v.dtype is float32)
            and (q.is_contiguous() and k.is_contiguous() and v.is_contiguous())
            and (q.is_cpu and k.is_cpu and v.is_cpu)
        ):
            return None
        row_bytes, out_bytes = self._row_bytes, self._out_bytes
        to_k, to_v, to_q = self._places
        _copy(to_k, k.data_ptr(), row_bytes)
        _copy(to_v, v.data_ptr(), row_bytes)
        _copy(to_q, q.data_ptr(), out_bytes)
        if timeout != of.timeout:
            of.set_timeout(timeout)
        of.sequence = sequence = of.sequence + 1
        try:
            _pack(
                self._message,
                wire.LONE_AT,
                time.monotonic_ns(),
                self._index,
                1 if follows else 0,
                0,
                layer,
                1,
                1,
                self._generation,
                step,
                position,
                position,
                committed,
                deadline_ms,
                self._sender.position_epoch,
                sequence,
            )
        except struct.error:
            # A number that has no place in its field; the general way says which.
            return None
        # Before it goes: a call that is interrupted here must be seen to have left its answer behind.
        of.ring.take(*self._span)
        of.waiting.append([(sequence, 0, shape)])
        try:
            of.socket.send(self._message)
        except OSError as error:
            of.not_sent(error)
            return None
        # In the time that the agent needs.
        out = torch.empty(shape, dtype=float32)
        to, view = out.data_ptr(), self._view
        size = of.received()
        if size < _LEAST:
            return self._unusual(size, noted)
        start, length, count, tail, kind, number, length_of_out = _unpack(view)
        if (start, length, count, kind, number, length_of_out) != (
            LONE_ANSWER_IS,
            size,
            1,
            0,
            sequence,
            out_bytes,
        ) or tail != size - _LEAST:
            return self._unusual(size, noted)
        _copy(to, self._answer, out_bytes)
        # Only now: the output was copied from the place that the next frame's will take.
        of.waiting.popleft()
        of.ring.give_back()
        noted(bytes(view[_HEAD:size]))
        return out

    def _unusual(self, size: int, noted: Noted) -> Tensor | KvtierError | None:
        """Of a message that is no plain answer, or of no message: the general way reads it."""
        try:
            (answer,) = self._wire.taken(size)
        except KvtierError:
            # It has broken the wire.
            return None
        if isinstance(answer, KvtierError):
            return answer
        noted(answer)
        return answer.out

    def _learn(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these are of a frame of this kind; what follows from their shapes is kept."""
        heads, kv_heads, width = self._sender.heads
        # The agent slices by its own geometry: rows of another would be read as something else.
        if tuple(q.shape) != (1, heads, width) or not (
            tuple(k.shape) == tuple(v.shape) == (1, kv_heads, width)
        ):
            return False
        row_bytes, out_bytes = FLOAT_BYTES * k.numel(), FLOAT_BYTES * q.numel()
        size = wire.aligned(2 * row_bytes + out_bytes)
        if not out_bytes or size > self._wire.ring.size:
            return False
        at = self._wire.ring.address
        self._query, self._row, self._span = q.shape, k.shape, (0, size)
        self._row_bytes, self._out_bytes = row_bytes, out_bytes
        self._places = at, at + row_bytes, at + 2 * row_bytes
        return True
