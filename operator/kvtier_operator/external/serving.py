"""Opens the configured sources and closes them: HTTP clients, and the port that takes pushes.

The only place here that listens. It must not know gates.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator

from aiohttp import web

from kvtier_operator.external.config import ExternalOptions, OtlpOptions
from kvtier_operator.external.prometheus import PrometheusProvider
from kvtier_operator.external.query import Source
from kvtier_operator.external.samples import Provider
from kvtier_operator.external.source import ExternalReader


@contextlib.asynccontextmanager
async def sources(options: ExternalOptions | None) -> AsyncIterator[ExternalReader | None]:
    """A reader over all of them; None without options: every external gate is unreadable then."""
    if options is None:
        yield None
        return
    async with contextlib.AsyncExitStack() as stack:
        providers: dict[Source, Provider] = {}
        if options.prometheus is not None:
            prometheus = PrometheusProvider(options.prometheus)
            stack.push_async_callback(prometheus.close)
            providers[Source.PROMETHEUS] = prometheus
        if options.otlp is not None:
            providers[Source.OTLP] = await stack.enter_async_context(_receiving(options.otlp))
        yield ExternalReader(providers, options.pace)


@contextlib.asynccontextmanager
async def _receiving(options: OtlpOptions) -> AsyncIterator[Provider]:
    # Imported here: its messages cost memory that an operator without this port need not hold.
    from kvtier_operator.external.otlp import OtlpReceiver, OtlpStore, token_of

    store = OtlpStore()
    context = None
    if options.cert_file is not None and options.key_file is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(options.cert_file, options.key_file)
    made = OtlpReceiver(store, token_of(options.token_file)).application()
    runner = web.AppRunner(made, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, options.host, options.port, ssl_context=context).start()
        yield store
    finally:
        await runner.cleanup()
        await store.close()
