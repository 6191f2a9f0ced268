"""`python -m kvtier_eval` is `kvtier-eval`."""

from __future__ import annotations

import sys

from kvtier_eval.cli import main

if __name__ == "__main__":
    sys.exit(main())
