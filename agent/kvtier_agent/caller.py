"""Who calls Control: the names of the peer's certificate, as TLS has verified them, against the operator's.

The pool's CA signs agents and operators alike, so a valid certificate alone would let one agent command
another. Knows no method and no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from kvtier_core.errors import CoreError, Reason

COMMON_NAME = "x509_common_name"
ALTERNATIVE_NAME = "x509_subject_alternative_name"
_SHOWN = 3


class Peer(Protocol):
    """The part of a servicer context that says who called."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...


class OperatorOnly:
    """Admits a call whose certificate carries `name` as common name or as DNS name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, peer: Peer) -> None:
        """Raises CALLER_NOT_OPERATOR; also where the connection has no certificate at all."""
        found = peer.auth_context()
        # Other kinds of alternative names stand in the same list; none of them equals a DNS name.
        names = [
            value.decode("utf-8", "replace")
            for key in (COMMON_NAME, ALTERNATIVE_NAME)
            for value in found.get(key, ())
        ]
        if self._name in names:
            return
        shown = ", ".join(repr(one[:253]) for one in dict.fromkeys(names[:_SHOWN])) or "no name"
        raise CoreError(
            Reason.CALLER_NOT_OPERATOR,
            f"the caller's certificate has {shown}; Control answers {self._name!r} (--operator-name)",
        )


def anyone(peer: Peer) -> None:
    """Admits every call; who reaches the socket was decided by its file's mode."""
