"""Hugging Face transformers over kvtier: an attention function, a mask function and a cache without rows.

It exists so that an unchanged model decodes with every K/V row held by the agent, one session for each
sequence of a batch. It keeps lengths only; what it cannot do exactly (beams, other masks) it refuses with a
typed error. It must not know tiers or selectors.

    attach(model)
    with KvtierCache(client, namespace=..., name=..., config=model.config, ...) as cache, torch.no_grad():
        model.generate(ids, cache=cache, do_sample=False)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from kvtier.v1 import attention_pb2
from kvtier_client.batch import AttentionBatch
from kvtier_client.client import AttentionClient
from kvtier_client.errors import KvtierError
from kvtier_client.hfedits import CacheEdits
from kvtier_client.session import (
    Arm,
    AttentionSession,
    Geometry,
    SessionRequest,
    StepReceipt,
    new_session_root,
)
from kvtier_client.wire import WireName
from kvtier_core.errors import Reason

ATTENTION_NAME = "kvtier"
# The rows' way from update() to the attention function: transformers hands the key tensor through.
_HANDLE = "_kvtier_layer"
# Padding's way from the mask function to the attention function.
_PADDING = "_kvtier_padding"


class Attachment:
    """A model that attends through kvtier; `detach`, or leaving the block, gives back what it had."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._before = model.config._attn_implementation
        AttentionInterface.register(ATTENTION_NAME, kvtier_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, kvtier_mask)
        model.set_attn_implementation(ATTENTION_NAME)

    def detach(self) -> None:
        self._model.set_attn_implementation(self._before)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attach(model: PreTrainedModel) -> Attachment:
    """Makes `model` attend through the KvtierCache that each call passes as `cache`."""
    return Attachment(model)


def geometry_of(config: Any) -> Geometry:
    """Geometry of a decoder's transformers config."""
    heads = int(config.num_attention_heads)
    return Geometry(
        layers=int(config.num_hidden_layers),
        query_heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
    )


class KvtierCache(CacheEdits, Cache):
    """The cache of a batch: a session of an agent for each sequence. Opens them at once, so a refusal comes
    here.

    config: the model's; model_fingerprint: what this engine runs (see declared_fingerprint). batch_size:
    sequences, whose lengths may differ: padding on the left is never sent. session_root_ids: one a sequence
    (session_root_id: of a batch of one); requests of one conversation share it, and with it their arm.
    max_tokens: prompt and output of a sequence together, which the agent must be able to hold; default: all
    that the model can take. Other arguments as in SessionRequest. deadline_seconds: of each frame. Close it,
    or use it as a context manager.
    """

    def __init__(
        self,
        client: AttentionClient,
        *,
        namespace: str,
        name: str,
        model_fingerprint: str,
        config: Any,
        tenant: str,
        uid: str = "",
        request_class: str = "",
        session_root_id: str | None = None,
        session_root_ids: Sequence[str] | None = None,
        batch_size: int = 1,
        probe: bool = False,
        forced_arm: Arm | None = None,
        max_tokens: int | None = None,
        score_scale: float | None = None,
        traceparent: str = "",
        deadline_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        geometry = geometry_of(config)
        if batch_size < 1:
            raise KvtierError(Reason.BAD_ARGUMENT, f"a batch of {batch_size}")
        roots = session_root_ids or [session_root_id or new_session_root()]
        if session_root_ids is None and batch_size > 1:
            roots = [new_session_root() for _ in range(batch_size)]
        if len(roots) != batch_size or (session_root_id and batch_size > 1):
            raise KvtierError(Reason.BAD_ARGUMENT, f"a batch of {batch_size} needs as many session_root_ids")
        requests = [
            SessionRequest(
                namespace=namespace,
                name=name,
                uid=uid,
                tenant=tenant,
                model_fingerprint=model_fingerprint,
                geometry=geometry,
                score_scale=geometry.head_dim**-0.5 if score_scale is None else score_scale,
                session_root_id=root,
                request_class=request_class,
                probe=probe,
                forced_arm=forced_arm,
                max_tokens=max_tokens or int(config.max_position_embeddings),
                traceparent=traceparent,
            )
            for root in roots
        ]
        if batch_size == 1:
            one = AttentionSession(client, requests[0], deadline_seconds=deadline_seconds, clock=clock)
            self._hold([one], None, geometry)
        else:
            batch = AttentionBatch(client, requests, deadline_seconds=deadline_seconds, clock=clock)
            self._hold(batch.sessions, batch, geometry)

    def _hold(
        self, sessions: list[AttentionSession], batch: AttentionBatch | None, geometry: Geometry
    ) -> None:
        self.sessions = sessions
        self._batch = batch
        self.geometry = geometry
        self.step = 0
        # By sequence: rows that are final, and padding at the left, which the first pass tells.
        self.committed = [0] * len(sessions)
        self.pads = [0] * len(sessions)
        self._next_layer = 0
        self._lengths = [KvtierLayer(self, i) for i in range(geometry.layers)]
        Cache.__init__(self, layers=list(self._lengths))

    def _forked(self, session: AttentionSession) -> Self:
        child = type(self).__new__(type(self))
        child._hold([session], None, self.geometry)
        child.step, child.committed, child.pads = self.step, list(self.committed), list(self.pads)
        for layer, own in zip(child._lengths, self._lengths, strict=True):
            layer.stand_at(own.get_seq_length())
        return child

    def _length(self) -> int:
        return self._lengths[0].get_seq_length()

    def _stand_at(self, length: int) -> None:
        for layer in self._lengths:
            layer.stand_at(length)
        self.committed = [length - pad for pad in self.pads]
        self._next_layer = 0

    @property
    def batch_size(self) -> int:
        return len(self.sessions)

    @property
    def session(self) -> AttentionSession:
        """Of a batch of one."""
        if len(self.sessions) != 1:
            raise KvtierError(Reason.BAD_ARGUMENT, f"a batch of {len(self.sessions)}: see `sessions`")
        return self.sessions[0]

    @property
    def transport(self) -> WireName:
        """What carries the frames: the agent's local channel, or gRPC; both are exact."""
        return self.session.transport if self._batch is None else self._batch.transport

    @property
    def why_grpc(self) -> str:
        """Why it is not the local channel; empty when it is."""
        return self.session.why_grpc if self._batch is None else self._batch.why_grpc

    @property
    def arm(self) -> Arm:
        """Of a batch of one; each of `sessions` has its own."""
        return self.session.arm

    @property
    def opened(self) -> attention_pb2.OpenSessionResponse:
        return self.session.opened

    def take_receipts(self) -> list[StepReceipt]:
        """Since the last call, sequence by sequence, oldest first."""
        return [receipt for session in self.sessions for receipt in session.take_receipts()]

    def report_outcome(
        self,
        *,
        cancelled: bool = False,
        probe_gate: str = "",
        probe_set_digest: str = "",
        prompt_digest: str = "",
        difference: float | None = None,
    ) -> attention_pb2.ReportOutcomeResponse:
        """See AttentionSession.report_outcome; of a batch of one, each of `sessions` reports its own. A
        token's time is when its last layer was answered."""
        return self.session.report_outcome(
            cancelled=cancelled,
            probe_gate=probe_gate,
            probe_set_digest=probe_set_digest,
            prompt_digest=prompt_digest,
            difference=difference,
        )

    def close(self) -> int:
        """Rows released."""
        return self.session.close() if self._batch is None else self._batch.close()

    def __enter__(self) -> KvtierCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except KvtierError:
            # What ended the block matters more than an agent that is gone with its sessions.
            if error is None:
                raise

    def reset(self) -> None:
        _refuse("a cache cannot be reset: close it and open another")

    def attend(self, layer: int, seen: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer of a pass over `seen` earlier positions, padding included. query [B, Hq, N, d], key,
        value [B, Hk, N, d] of N new ones; returns [B, N, Hq, d], zeros where a query is padding."""
        self._begin_layer(layer)
        if self._batch is None and not self.pads[0]:
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            follows = layer + 1 < self.geometry.layers
            out = self.session.attend(self.step, layer, seen, q, k, v, self.committed[0], follows)
            out = out.unsqueeze(0)
        else:
            out = self._attend_ragged(layer, seen, query, key, value)
        self._end_layer(layer, seen + query.shape[2])
        return out

    def _attend_ragged(self, layer: int, seen: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Only what is no padding travels."""
        parts, skips = [], []
        for index, (session, pad) in enumerate(zip(self.sessions, self.pads, strict=True)):
            skip = max(0, pad - seen)
            q, k, v = (x[index, :, skip:].transpose(0, 1) for x in (query, key, value))
            position, committed = max(0, seen - pad), self.committed[index]
            follows = layer + 1 < self.geometry.layers
            parts.append(session.part(self.step, layer, position, q, k, v, committed, follows))
            skips.append(skip)
        if self._batch is None:
            answers = [self.session.attend_part(part) for part in parts]
        else:
            answers = self._batch.attend(parts)
        out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
        for index, (skip, answer) in enumerate(zip(skips, answers, strict=True)):
            out[index, skip:] = answer
        return out

    def take_padding(self, pads: list[int] | None, seen: int) -> None:
        """Of a pass over `seen` earlier positions; None when the model was given no padding."""
        told = pads or [0] * self.batch_size
        if not seen:
            self.pads = told
        elif self.pads != told:
            _refuse("padding that is not the first pass's: the same attention_mask, grown by what is new")

    def _begin_layer(self, layer: int) -> None:
        """Layers of a pass come in order; the first starts a step."""
        if layer != self._next_layer:
            raise KvtierError(
                Reason.STEP_ORDER,
                f"layer {layer} came where layer {self._next_layer} was due: a pass stopped half-way, "
                "and its session cannot go on",
            )
        if layer == 0:
            self.step += 1

    def _end_layer(self, layer: int, length: int) -> None:
        """Commits the frontiers after the last layer. length: positions so far, padding included."""
        self._next_layer = (layer + 1) % self.geometry.layers
        if self._next_layer == 0:
            self.committed = [length - pad for pad in self.pads]
            for session in self.sessions:
                session.token_done()


class KvtierLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The length of one layer. `update` hands new rows on and keeps none."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: KvtierCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._cache = cache
        self._index = index
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the new rows only, marked with this layer; the attention function sends them."""
        g = self._cache.geometry
        if key_states.shape[0] != self._cache.batch_size:
            _refuse(f"a batch of {key_states.shape[0]} in a cache of {self._cache.batch_size}")
        if key_states.dtype != torch.float32:
            _refuse(f"rows of {key_states.dtype}: sessions hold float32")
        if (key_states.shape[1], key_states.shape[3]) != (g.kv_heads, g.head_dim):
            raise KvtierError(
                Reason.GEOMETRY_MISMATCH,
                f"rows of {key_states.shape[1]} heads of {key_states.shape[3]}, the session has "
                f"{g.kv_heads} of {g.head_dim}",
            )
        setattr(key_states, _HANDLE, self)
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, Hq, N, d], key, value [B, Hk, N, d] of N new positions; returns [B, N, Hq, d]."""
        out = self._cache.attend(self._index, self._length, query, key, value)
        self._length += key.shape[2]
        return out

    def expect(
        self, scaling: float | None, position_ids: Tensor | None, pads: list[int] | None, new: int
    ) -> None:
        """Scale and positions are part of what the session was opened for; so is what was padding."""
        scale = self._cache.sessions[0].request.score_scale
        if scaling is not None and scaling != scale:
            raise KvtierError(
                Reason.GEOMETRY_MISMATCH, f"the model scales by {scaling}, the session by {scale}"
            )
        if self._index:
            return
        self._cache.take_padding(pads, self._length)
        if position_ids is not None:
            self._expect_positions(position_ids, new)

    def _expect_positions(self, position_ids: Tensor, new: int) -> None:
        size, seen = self._cache.batch_size, self._length
        pads = self._cache.pads
        if position_ids.shape[-1] == new and position_ids.numel() in (new, size * new):
            rows = position_ids.reshape(-1, new).expand(size, new)
            want = torch.arange(seen, seen + new)
            for row, pad in zip(rows, pads, strict=True):
                skip = max(0, pad - seen)
                if not torch.equal(row[skip:], want[skip:] - pad):
                    break
            else:
                return
        raise KvtierError(
            Reason.POSITION_CONTRACT_MISMATCH,
            f"positions must continue at {seen}, one by one, less each sequence's padding",
        )

    def get_seq_length(self) -> int:
        return self._length

    def stand_at(self, length: int) -> None:
        """After an edit of the cache, which is of all layers at once."""
        self._length = length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The whole context; the agent applies causality."""
        return self._length + query_length, 0

    def reset(self) -> None:
        _refuse("a cache cannot be reset: close it and open another")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        _refuse("beam search needs copies of a session's rows")

    def crop(self, tokens_to_remove: int) -> None:
        _refuse("rows of one layer cannot be taken back: crop the cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        _refuse("copies of a sequence: one sequence per session")

    def batch_select_indices(self, indices: Tensor) -> None:
        _refuse("one sequence per session")

    def offload(self) -> None:
        """Rows are where the agent put them."""

    def prefetch(self) -> None:
        """Rows are where the agent put them."""


def kvtier_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, Hq, N, d], key and value [B, Hk, N, d], new rows only.
    Returns ([B, N, Hq, d], None)."""
    layer = getattr(key, _HANDLE, None)
    if not isinstance(layer, KvtierLayer):
        _refuse("no KvtierCache: pass one as `cache` to the model or to generate")
    pads: list[int] | None = getattr(attention_mask, _PADDING, None)
    if attention_mask is not None and pads is None:
        _refuse("a mask of one's own: only causal attention over the whole context")
    if dropout:
        _refuse("attention dropout")
    if query.requires_grad or key.requires_grad:
        _refuse("gradients: call the model under torch.no_grad()")
    if kwargs.get("sliding_window") is not None or kwargs.get("softcap") is not None:
        _refuse("sliding windows and soft caps")
    layer.expect(scaling, kwargs.get("position_ids"), pads, query.shape[2])
    return layer.attend(query, key, value), None


def kvtier_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask function: which positions are no padding, [B, kv_length]; None when none is padding.
    A mask that would change the answer otherwise is refused.

    It must be registered: transformers gives a model whose attention has no mask function no mask at all,
    so padding would be attended silently.
    """
    if mask_function is not causal_mask_function:
        _refuse("only causal attention over the whole context")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    if attention_mask.shape != (batch_size, kv_length):
        _refuse(f"a mask of {tuple(attention_mask.shape)} over {kv_length} positions of {batch_size}")
    seen = attention_mask.to(torch.bool)
    pads = kv_length - seen.sum(dim=1)
    if not torch.equal(seen, torch.arange(kv_length) >= pads[:, None]) or int(pads.max()) == kv_length:
        _refuse("padding that is not at the left, or nothing but padding")
    padding = seen.clone()
    setattr(padding, _PADDING, [int(pad) for pad in pads])
    return padding


def _refuse(what: str) -> NoReturn:
    raise KvtierError(Reason.UNSUPPORTED, what)
