"""What an operator does not hold: packages that it does not use, and buffers larger than what comes."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import json
import ssl
import subprocess
import sys

import pytest

from kvtier_operator.footprint import TLS_BUFFER_BYTES, small_tls_buffers

LOADED = """
import json, sys
import kvtier_operator.app, kvtier_operator.cli, kvtier_operator.watch.kopf_thread
from kvtier_operator.telemetry import build_telemetry
telemetry = build_telemetry(otlp_endpoint="", instance="i", version="v")
with telemetry.span("one"):
    telemetry.attempt_root("uid", 1, {})
telemetry.shutdown()
print(json.dumps(sorted(sys.modules)))
"""
UNUSED = (
    "kubernetes",  # 500 modules of models, and what it asks servers with
    "requests",
    "urllib3",
    "oauthlib",
    "opentelemetry.sdk",
    "opentelemetry.exporter",
    "opentelemetry.proto",
    "psutil",
    "numpy",  # 15 MiB with its linear algebra, for counts that Python adds up as fast
    "torch",
)


def test_an_operator_without_a_collector_loads_only_what_it_uses() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = json.loads(done.stdout)
    assert "kopf" in loaded and "aiohttp" in loaded
    found = [name for name in loaded if any(name == one or name.startswith(f"{one}.") for one in UNUSED)]
    assert found == []


async def test_a_connection_holds_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.sslproto.SSLProtocol, "max_size", asyncio.sslproto.SSLProtocol.max_size)
    small_tls_buffers()
    made = asyncio.sslproto.SSLProtocol(
        asyncio.get_running_loop(), asyncio.Protocol(), ssl.create_default_context(), None
    )
    assert len(made.get_buffer(-1)) == TLS_BUFFER_BYTES


HEAPS = """
import ctypes, re, sys, tempfile, threading
from kvtier_operator.footprint import one_heap
if sys.argv[1] == "one" and not one_heap():
    sys.exit("nothing was set")
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
# All at once: a thread that has ended leaves its heap to the next.
together = threading.Barrier(4)
def take():
    together.wait()
    libc.malloc(ctypes.c_size_t(5000))
    together.wait()
threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    out = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, out)
    libc.fclose(out)
    print(len(re.findall("<heap nr", file.read().decode())))
"""


@pytest.mark.parametrize(("how", "fewest", "most"), [("one", 1, 1), ("as it comes", 2, 99)])
def test_all_threads_take_memory_from_one_heap(how: str, fewest: int, most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAPS, how], capture_output=True, text=True, check=True, timeout=60
    )
    assert fewest <= int(done.stdout) <= most


HOLES = """
import asyncio, os
from kvtier_operator.footprint import give_back, one_heap

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

class Enough(Exception):
    pass

async def once(seconds, waited=[]):
    waited.append(seconds)
    if len(waited) > 1:
        raise Enough

one_heap()
blocks = [bytes(20_000) for _ in range(2_000)]
stays = blocks[::50]
del blocks
before = resident()
try:
    asyncio.run(give_back(60.0, once))
except Enough:
    print(before - resident())
"""


def test_what_is_free_between_blocks_that_stay_goes_back_to_the_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) > 30_000_000, "of 40 million bytes that were freed"
