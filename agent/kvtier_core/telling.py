"""Telling several callers something, where one of them may fail at hearing it.

Why it exists: a thread that serves many must reach all of them, and must live on, whatever a defect in one of
them does; and the defect must still be seen. It must not know what is told.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable


def tell_each(calls: Iterable[Callable[[], object]]) -> None:
    """All of them, in order; then raises what the first that failed raised."""
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as defect:
            first = first or defect
    if first is not None:
        raise first


def report_defect() -> None:
    """What is being handled, as of a thread that it ends; this one lives on."""
    kind, value, trace = sys.exc_info()
    assert kind is not None
    threading.excepthook(threading.ExceptHookArgs((kind, value, trace, threading.current_thread())))
