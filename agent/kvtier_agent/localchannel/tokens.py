"""One-time tokens: which session a connection may attach. It knows no socket."""

from __future__ import annotations

import secrets
import threading

from kvtier.local.frames import TOKEN_BYTES
from kvtier_agent.cachesession import Session
from kvtier_core.errors import CoreError, Reason


class TokenBook:
    """One valid token of each session at most; a new one ends the one before. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session_of: dict[bytes, Session] = {}
        self._token_of: dict[str, bytes] = {}

    def mint(self, session: Session) -> bytes:
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._drop_closed()
            old = self._token_of.pop(session.handle.session_id, None)
            if old is not None:
                del self._session_of[old]
            self._token_of[session.handle.session_id] = token
            self._session_of[token] = session
        return token

    def redeem(self, token: bytes, namespace: str) -> Session:
        """The session of the token, which is used up; only in its own namespace. SESSION_UNKNOWN."""
        with self._lock:
            session = self._session_of.get(token)
            if session is not None and session.host.name.namespace == namespace:
                del self._session_of[token]
                del self._token_of[session.handle.session_id]
                if is_open(session):
                    return session
        raise CoreError(Reason.SESSION_UNKNOWN, "the token attaches no session of this namespace")

    def give_back(self, token: bytes, session: Session) -> None:
        """Of an attachment that failed for a while only; not where another token was minted meanwhile."""
        with self._lock:
            name = session.handle.session_id
            if name not in self._token_of and is_open(session):
                self._token_of[name] = token
                self._session_of[token] = session

    def __len__(self) -> int:
        return len(self._token_of)

    def _drop_closed(self) -> None:
        """As many tokens as sessions: what was closed goes when the next one comes."""
        closed = [token for token, session in self._session_of.items() if not is_open(session)]
        for token in closed:
            del self._token_of[self._session_of.pop(token).handle.session_id]


def is_open(session: Session) -> bool:
    """Whether its cache still holds it."""
    return session.host.sessions.get(session.handle.session_id) is session
