"""kopf, without the Kubernetes clients that it would import where they are installed.

It does so to take their objects for its own, which nobody here hands to it; they are 9 MB that stay for as
long as the operator runs. Whoever imports kopf imports it from here. It must not know what kopf is used for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

CLIENTS = ("kubernetes", "kubernetes_asyncio", "pykube")


@contextlib.contextmanager
def _hidden(names: Sequence[str]) -> Iterator[None]:
    """Importing one of them, unless it is loaded, fails as if it were not installed: None in sys.modules says
    so, which is what Python documents for it."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


with _hidden(CLIENTS):
    import kopf

__all__ = ["kopf"]
