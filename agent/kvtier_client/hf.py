"""Hugging Face transformers over kvtier: an attention function, a mask function and a cache without rows.

It exists so that an unchanged model decodes with every K/V row held by the agent, one session for each
sequence of a batch. It keeps lengths only; what it cannot do exactly (beams, other masks) it refuses with a
typed error. It must not know tiers or selectors.

    attach(model)
    with KvtierCache(client, namespace=..., name=..., config=model.config, ...) as cache, torch.no_grad():
        model.generate(ids, cache=cache, do_sample=False)
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from kvtier.v1 import attention_pb2
from kvtier_client.batch import AttentionBatch
from kvtier_client.cacheevidence import CacheEvidence
from kvtier_client.client import AttentionClient
from kvtier_client.errors import KvtierError
from kvtier_client.hfedits import CacheEdits
from kvtier_client.hfevidence import ModelEvidence
from kvtier_client.hflayer import KvtierLayer, kvtier_attention, kvtier_mask, refuse
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
from kvtier_core.rowevidence import Need

ATTENTION_NAME = "kvtier"


class Attachment:
    """A model that attends through kvtier; `detach`, or leaving the block, gives back what it had. evidence:
    what the model can tell selectors, for a KvtierCache; made when it is asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._before = model.config._attn_implementation
        AttentionInterface.register(ATTENTION_NAME, kvtier_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, kvtier_mask)
        model.set_attn_implementation(ATTENTION_NAME)

    @functools.cached_property
    def evidence(self) -> ModelEvidence:
        return ModelEvidence(self._model)

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
    that the model can take. evidence: of the model (`Attachment.evidence`), for selectors that need more than
    queries; hooks are in the model only while a session's selector asks for what they tell. fixed_context:
    rows [0, n) that no edit changes, 0: those of the first pass; None: nothing is said, and selectors of
    fixed contexts do not run. Other arguments as in SessionRequest. deadline_seconds: of each frame. Close
    it, or use it as a context manager.
    """

    _evidence: CacheEvidence | None

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
        evidence: ModelEvidence | None = None,
        fixed_context: int | None = 0,
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
        gives = frozenset([Need.PREFILL_QUERIES]) if evidence is None else evidence.gives
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
                gives=gives,
                hidden_size=0 if evidence is None else evidence.stated_size,
                fixed_context=fixed_context,
            )
            for root in roots
        ]
        if batch_size == 1:
            one = AttentionSession(client, requests[0], deadline_seconds=deadline_seconds, clock=clock)
            self._hold([one], None, geometry)
        else:
            batch = AttentionBatch(client, requests, deadline_seconds=deadline_seconds, clock=clock)
            self._hold(batch.sessions, batch, geometry)
        if evidence is not None and any(session.asked for session in self.sessions):
            self._evidence = CacheEvidence(evidence, self.sessions)
            try:
                self._evidence.start(self, model_fingerprint)
            except BaseException:
                # The sessions are open, and nobody else knows them.
                with contextlib.suppress(KvtierError):
                    self.close()
                raise

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
        self._evidence = None
        self._lengths = [KvtierLayer(self, i) for i in range(geometry.layers)]
        Cache.__init__(self, layers=list(self._lengths))

    def _forked(self, session: AttentionSession) -> Self:
        child = type(self).__new__(type(self))
        child._hold([session], None, self.geometry)
        child.step, child.committed, child.pads = self.step, list(self.committed), list(self.pads)
        for layer, own in zip(child._lengths, self._lengths, strict=True):
            layer.stand_at(own.get_seq_length())
        if self._evidence is not None:
            child._evidence = self._evidence.fork(session)
            child._evidence.watch(child)
        return child

    def _length(self) -> int:
        return self._lengths[0].get_seq_length()

    def _stand_at(self, length: int) -> None:
        for layer in self._lengths:
            layer.stand_at(length)
        self.committed = [length - pad for pad in self.pads]
        self._next_layer = 0
        if self._evidence is not None:
            self._evidence.stand_at(self.committed)

    @property
    def score_scale(self) -> float:
        return self.sessions[0].request.score_scale

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
        if self._evidence is not None:
            self._evidence.stop(self)
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
        refuse("a cache cannot be reset: close it and open another")

    def attend(self, layer: int, seen: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer of a pass over `seen` earlier positions, padding included. query [B, Hq, N, d], key,
        value [B, Hk, N, d] of N new ones; returns [B, N, Hq, d], zeros where a query is padding."""
        self._begin_layer(layer)
        if self._batch is None and not self.pads[0]:
            if query.shape[2] == 1:
                # As below for one row, in half the calls: a decode step finds nothing of them in a cache.
                q, k, v = (x.reshape(1, x.shape[1], x.shape[3]) for x in (query, key, value))
            else:
                q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            follows = layer + 1 < self.geometry.layers
            evidence = None
            if self._evidence is not None:
                evidence = self._evidence.of(0, layer, seen, 0, q.shape[0])
            out = self.session.attend(self.step, layer, seen, q, k, v, self.committed[0], follows, evidence)
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
            evidence = None
            if self._evidence is not None:
                evidence = self._evidence.of(index, layer, position, skip, q.shape[0])
            parts.append(session.part(self.step, layer, position, q, k, v, committed, follows, evidence))
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
            refuse("padding that is not the first pass's: the same attention_mask, grown by what is new")

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
