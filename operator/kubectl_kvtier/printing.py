"""Where and how a command's results are written.

It must not know any command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Out:
    """clock: seconds since the epoch."""

    stream: TextIO
    as_json: bool
    clock: Callable[[], float]

    def lines(self, lines: Sequence[str]) -> None:
        print("\n".join(lines), file=self.stream, flush=True)

    def write(self, facts: Any, lines: Sequence[str]) -> None:
        self.lines([json.dumps(facts, indent=2)] if self.as_json else lines)

    def tell(self, lines: Sequence[str]) -> None:
        """Of what goes on meanwhile: for people only."""
        if lines and not self.as_json:
            self.lines(lines)
