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
