"""How a command ends: exit statuses fit for scripts, and the errors that lead to them.

It must not know any command.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """NEGATIVE: the command worked and its answer is no (rolled back, refused, different, findings)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    NEGATIVE = 4
    TIMED_OUT = 5


class Failure(Exception):
    """What a person is told, and the exit status."""

    def __init__(self, status: Exit, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(Failure):
    """No answer, or one that says to ask again later; whoever may wait does."""

    def __init__(self, message: str) -> None:
        super().__init__(Exit.FAILED, message)


class Forbidden(Failure):
    """A right is missing; the message is the server's, which names it."""

    def __init__(self, message: str) -> None:
        super().__init__(Exit.FAILED, message)
