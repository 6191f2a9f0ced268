"""The Attention service as a synchronous Python API over a Unix socket, one object per agent.

It exists so that an engine needs no gRPC. It must not know a model, nor keep a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from kvtier.v1 import attention_pb2, attention_pb2_grpc, common_pb2
from kvtier_client.errors import KvtierError, from_rpc
from kvtier_client.pipe import Transport
from kvtier_client.stream import AttendManyStream, AttendStream
from kvtier_core.errors import Reason

_AT_THE_AGENT = 0.9
"""Of the time that this end waits for an edit: the rest is for its answer."""


class AttentionClient:
    """Calls one agent's engine socket. Every call has a deadline; failures are KvtierError.

    socket_path: absolute path of `<run dir>/<node>/engine.sock`. timeout: seconds of a unary call.
    metadata: text pairs for every call, e.g. ("traceparent", ...). transport: of frames. "auto" takes the
    agent's local channel where there is one and says so where there is none, "local" demands it, "grpc"
    never asks for it.
    """

    def __init__(
        self,
        socket_path: Path | str,
        *,
        timeout: float = 10.0,
        metadata: Sequence[tuple[str, str]] = (),
        transport: Transport = "auto",
    ) -> None:
        self.socket_path = Path(socket_path)
        if not self.socket_path.is_absolute():
            raise KvtierError(Reason.BAD_ARGUMENT, f"socket_path {socket_path} is not absolute")
        self.transport: Transport = transport
        self._timeout = timeout
        self._metadata = tuple(metadata)
        self._closed = False
        self._channel = grpc.insecure_channel(f"unix:{self.socket_path}")
        self._stub = attention_pb2_grpc.AttentionStub(self._channel)  # type: ignore[no-untyped-call]

    def describe_cache(self, namespace: str, name: str, uid: str = "") -> attention_pb2.DescribeCacheResponse:
        """What the agent serves for a cache now, the declared model fingerprint included."""
        cache = common_pb2.CacheRef(namespace=namespace, name=name, uid=uid)
        request = attention_pb2.DescribeCacheRequest(cache=cache)
        answer: attention_pb2.DescribeCacheResponse = self._unary(self._stub.DescribeCache, request)
        return answer

    def open_session(self, request: attention_pb2.OpenSessionRequest) -> attention_pb2.OpenSessionResponse:
        answer: attention_pb2.OpenSessionResponse = self._unary(self._stub.OpenSession, request)
        return answer

    def close_session(
        self, session_id: str, generation: int, tenant: str
    ) -> attention_pb2.CloseSessionResponse:
        request = attention_pb2.CloseSessionRequest(
            session_id=session_id, generation=generation, tenant=tenant
        )
        answer: attention_pb2.CloseSessionResponse = self._unary(self._stub.CloseSession, request)
        return answer

    def edit_session(self, request: attention_pb2.EditSessionRequest) -> attention_pb2.EditSessionResponse:
        """See `kvtier_client.edits`. The agent gives up before this end does, which hears then that nothing
        was changed."""
        most = max(1, int(self._timeout * 1000 * _AT_THE_AGENT))
        bounded = attention_pb2.EditSessionRequest()
        bounded.CopyFrom(request)
        bounded.deadline_ms = min(request.deadline_ms or most, most)
        answer: attention_pb2.EditSessionResponse = self._unary(self._stub.EditSession, bounded)
        return answer

    def give_weights(
        self, parts: Iterator[attention_pb2.GiveWeightsRequest], timeout: float
    ) -> attention_pb2.GiveWeightsResponse:
        """See `kvtier_client.rowevidence`. timeout: seconds of the whole call."""
        self._check_open()
        try:
            answer: attention_pb2.GiveWeightsResponse = self._stub.GiveWeights(
                parts, timeout=timeout, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        return answer

    def report_outcome(
        self, request: attention_pb2.ReportOutcomeRequest
    ) -> attention_pb2.ReportOutcomeResponse:
        answer: attention_pb2.ReportOutcomeResponse = self._unary(self._stub.ReportOutcome, request)
        return answer

    def attend(self) -> AttendStream:
        """A new stream; one per session."""
        self._check_open()
        return AttendStream(self._stub, self._metadata)

    def attend_many(self) -> AttendManyStream:
        """A new stream of several sessions' frames."""
        self._check_open()
        return AttendManyStream(self._stub, self._metadata)

    def close(self) -> None:
        """Ends the channel and every stream on it. Idempotent."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> AttentionClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise KvtierError(Reason.BAD_ARGUMENT, "the client is closed")

    def _unary(self, method: Callable[..., Any], request: Any) -> Any:
        self._check_open()
        try:
            return method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc(error) from None


def declared_fingerprint(client: AttentionClient, namespace: str, name: str) -> str:
    """The model fingerprint that the KVCache declares.

    Stating it back proves nothing about the model that runs here: an engine that can compute its own
    should state that, and use this only where the operator of both vouches for the model.
    """
    return client.describe_cache(namespace, name).model_fingerprint
