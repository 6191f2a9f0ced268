"""A child process that tells what it does until it ends, or is killed in the middle of it.

For tests of crashes: real processes, without the time that a new interpreter takes. The parent must have no
thread but its own. It must not know what is told.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

Tell = Callable[[str], None]
_END = "end of its own accord"


def forked(play: Callable[[Tell], None]) -> tuple[list[str], bool]:
    """The lines that `play` told in a child, and whether SIGKILL ended it. A child that fails by itself is an
    AssertionError with what it told last."""
    back, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(back)
        _child(play, out)
    os.close(out)
    with os.fdopen(back, "rb") as pipe:
        told = pipe.read().decode().splitlines()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    ended = bool(told) and told[-1] == _END
    assert killed or ended, f"the child failed by itself, status {status}: {told[-20:]}"
    return told[:-1] if ended else told, killed


def _child(play: Callable[[Tell], None], out: int) -> NoReturn:
    try:
        pipe = os.fdopen(out, "w")

        def tell(line: str) -> None:
            assert "\n" not in line
            print(line, file=pipe, flush=True)

        try:
            play(tell)
        except BaseException as error:
            tell(f"failed: {error!r}".replace("\n", " "))
            raise
        tell(_END)
    finally:
        os._exit(3)
