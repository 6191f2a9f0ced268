"""Becomes the program in its arguments, tied to the life of the process that started it.

A program of its own and not a function run after fork: forking a process that runs gRPC threads calls
their fork handlers, which abort the child now and then. Run with ``python -I -S``.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the tie was made
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
