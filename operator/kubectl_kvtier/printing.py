"""Where and how a command's results are written.

It must not know any command.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

_CLEAR = "\x1b[H\x1b[2J"
# All but tabs, line ends and the colours of verdicts.
_CONTROL = re.compile(r"(?!\x1b\[(?:0|3[123])m)[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Control characters escaped: whoever may write an event or a status must not steer the terminal of those
    who read it."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@dataclass(frozen=True, slots=True)
class Out:
    """clock: seconds since the epoch."""

    stream: TextIO
    as_json: bool
    clock: Callable[[], float]

    @property
    def terminal(self) -> bool:
        """Whether a person looks at it, on what can be drawn over."""
        return self.stream.isatty() and not self.as_json and os.environ.get("TERM") != "dumb"

    @property
    def colour(self) -> bool:
        return self.terminal and not os.environ.get("NO_COLOR")

    def clear(self) -> None:
        """Of a terminal; of what is kept, nothing."""
        if self.terminal:
            print(_CLEAR, end="", file=self.stream)

    def lines(self, lines: Sequence[str]) -> None:
        print(printable("\n".join(lines)), file=self.stream, flush=True)

    def write(self, facts: Any, lines: Sequence[str]) -> None:
        self.lines([json.dumps(facts, indent=2)] if self.as_json else lines)

    def tell(self, lines: Sequence[str]) -> None:
        """Of what goes on meanwhile: for people only."""
        if lines and not self.as_json:
            self.lines(lines)
