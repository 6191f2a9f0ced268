"""Kernels run in Triton's interpreter here: it proves what they compute, never how fast they are.

The switch is read when triton is imported, so this suite has a process of its own. With
KVTIER_KERNELS_DEVICE=cuda the same tests of semantics run compiled on that device instead.
"""

from __future__ import annotations

import os
import sys

if os.environ.get("KVTIER_KERNELS_DEVICE", "cpu") == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "triton was imported before TRITON_INTERPRET=1: run tests/kernels in its own process"
        )
    os.environ["TRITON_INTERPRET"] = "1"
