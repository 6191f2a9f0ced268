"""Kernels run in Triton's interpreter here: it proves what they compute, never how fast they are.

The switch is read when triton is imported, so this suite has a process of its own.
"""

from __future__ import annotations

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("triton was imported before TRITON_INTERPRET=1: run tests/kernels in its own process")
os.environ["TRITON_INTERPRET"] = "1"
