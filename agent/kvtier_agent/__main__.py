"""`python -m kvtier_agent` is `kvtier-agent`."""

from __future__ import annotations

import sys

from kvtier_agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
