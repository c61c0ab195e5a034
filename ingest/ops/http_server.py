"""The HTTP server of `memwal serve` and `memwal run`: /metrics, /health/livez, /health/readyz, /status and
the page at /.

One thread with an event loop answers requests. Each page is rendered in a thread of its own, one rendering at a time
per path: requests that arrive meanwhile get the same answer, or a 503 if it takes too long (storage hangs). So slow
readers, many readers or a page that hangs delay neither the threads that write rows nor other pages.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from memwal.ingest.errors import Invalid
from memwal.ingest.ops.answers import IS_BRIEF, Shared, response
from memwal.ingest.ops.live import Live
from memwal.ingest.ops.live_server import PATHS, QUERY_BYTES, LiveServer
from memwal.ingest.ops.pages import Page, Render
from memwal.ingest.rpc.guard import REFUSED, Guard
from memwal.ingest.settings.endpoints import url_host

OPEN = frozenset({"/health/livez", *PATHS})
"""Paths that need no token: they only show that the process runs, or are files of the page, without data."""
BRIEF = frozenset({"/health/readyz"})
"""Paths that answer a caller without a token by their status alone: probes of Kubernetes cannot send a secret, and the
reasons name regions and storage. Such a caller does not make this process ask storage more often than `BRIEF_AGE` of
`answers`."""
PROBES = frozenset({"/health/livez", *BRIEF})
"""Paths that need no client certificate where the others do: probes of Kubernetes cannot present one."""
_NO_CERTIFICATE = "no client certificate; present one that a CA of daemon.tls_client_ca signed"
_END = 5.0
_IDLE = 15.0
"""Seconds for which a connection without requests is kept: each takes a descriptor."""


class HttpServer:
    """Serves the paths of `pages` by GET.

    Thread safety. `close` from any thread; pages are rendered in threads of the server. Errors. If a page raises, the
    answer has the error's kind and message: status 503 for UNAVAILABLE, else 500.
    """

    def __init__(
        self,
        host: str,
        port: int,
        pages: Mapping[str, Render],
        guard: Guard,
        *,
        setting: str,
        live: Live | None = None,
    ) -> None:
        """Listen. `port` 0: any free port; `setting` names the port in errors. `live`: what the page at / shows, which
        is served with it; it must be started. Raises: Invalid if the port is in use.
        """
        self._guard = guard
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(
            self._application(pages, live, host),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=0.1,
            keepalive_timeout=_IDLE,
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        try:
            self.port = self._run(self._listen(host, port))
        except OSError as error:
            self.close()
            raise Invalid(
                f"{setting}: cannot listen on {host}:{port} ({error.strerror}); choose another port, or 0"
            ) from None
        self.url = f"{guard.scheme('http', 'https')}://{url_host(host)}:{self.port}"

    def close(self) -> None:
        """Stop listening; answers in progress are cut off."""
        with suppress(TimeoutError):
            self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END)

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(_END)

    def _application(self, pages: Mapping[str, Render], live: Live | None, host: str) -> web.Application:
        application = web.Application(middlewares=[self._guarded], client_max_size=QUERY_BYTES)
        for path, render in pages.items():
            application.router.add_get(path, Shared(path, render).answer)
        if live is not None:
            LiveServer(live, host, has_token=bool(self._guard.token)).add_to(application)
        return application

    async def _listen(self, host: str, port: int) -> int:
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=self._guard.context)
        await site.start()
        return int(self._runner.addresses[0][1])

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._guard.client_ca and request.path not in PROBES and not _has_certificate(request):
            return response(Page.of({"error": _NO_CERTIFICATE}, 403))
        given = request.headers.get("Authorization")
        admitted = self._guard.admits(given)
        request[IS_BRIEF] = not admitted and given is None and request.path in BRIEF
        if not (admitted or request[IS_BRIEF] or request.path in OPEN):
            return response(Page.of({"error": REFUSED}, 401), {"WWW-Authenticate": "Bearer"})
        try:
            return await handler(request)
        except web.HTTPException as error:
            return response(Page.of({"error": error.reason}, error.status))


def _has_certificate(request: web.Request) -> bool:
    """Whether the caller presented a certificate; TLS has checked it then."""
    return bool(request.transport is not None and request.transport.get_extra_info("peercert"))
