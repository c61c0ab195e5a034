"""The HTTP server of `memwal serve` and `memwal run`: /metrics, /health/livez, /health/readyz, /status, the page at /
and the actions of operators.

One thread with an event loop answers requests. Each page is rendered in its own thread, one rendering at a time per
path: requests that arrive meanwhile get the same answer, or a 503 if it takes too long (storage hangs). So slow
readers, many readers or a hanging page delay neither the threads that write rows nor other pages.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from memwal.ingest.errors import Invalid
from memwal.ingest.service.ops.actions import ROLE, Actions
from memwal.ingest.service.ops.answers import IS_BRIEF, WHY, Shared, refusal, response
from memwal.ingest.service.ops.http_connections import CONNECTIONS, HANDSHAKE, Connections
from memwal.ingest.service.ops.live import Live
from memwal.ingest.service.ops.live_server import DATA, PATHS, QUERY_BYTES, LiveServer
from memwal.ingest.service.ops.pages import Act, Page, Render
from memwal.ingest.service.ops.same_site import other_name, other_site
from memwal.ingest.service.rpc.guard import REFUSED, Guard, Why
from memwal.ingest.settings.endpoints import url_host

ALIVE = "/health/livez"
OPEN = frozenset({ALIVE, *PATHS})
"""Paths that need no token: they only show that the process runs, or are files of the page, without data."""
BRIEF = frozenset({"/health/readyz"})
"""Paths that return only their status to a caller without a token: Kubernetes probes cannot send a secret, and the
reasons name regions and storage. These callers cause at most one request to storage per `BRIEF_AGE` of `answers`."""
_WHY: Mapping[int, Why] = {401: "token", 403: "site", 413: "size", 429: "busy", 504: "time"}
"""Reasons by the status of a rejecting answer. Any other status from 400 to 499 means "invalid"."""
PROBES = frozenset({ALIVE, *BRIEF})
"""Paths that never need a client certificate, because Kubernetes probes cannot present one."""
_NO_CERTIFICATE = "no client certificate; present one that a CA of daemon.tls_client_ca signed"
_END = 5.0


class HttpServer:
    """Serves the paths of `pages` by GET, and those of `acts` by POST.

    Thread safety. `close` from any thread; pages are rendered in threads of the server.
    Errors. If a page raises, the answer has the error's kind and message: status 503 for UNAVAILABLE, else 500.
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
        acts: Mapping[str, Act] | None = None,
        connections_max: int = CONNECTIONS,
    ) -> None:
        """Listen on `host` and `port` (0: any free port).

        `setting`: name of the port in errors. `live`: data of the page at /, which is served with it; it must be
        started. `acts`: see `Actions`. `connections_max`: concurrent connections. Raises: Invalid if the port is in
        use.
        """
        self._guard, self._host, self._connections_max = guard, host, connections_max
        self._loop = asyncio.new_event_loop()
        application = self._application(pages, live, acts or {})
        self._runner = web.AppRunner(application, handle_signals=False, shutdown_timeout=0.1)
        self._server: asyncio.Server | None = None
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
            self._run(self._ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END)

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(_END)

    def _application(self, pages: Mapping[str, Render], live: Live | None, acts: Mapping[str, Act]) -> web.Application:
        application = web.Application(middlewares=[self._guarded], client_max_size=QUERY_BYTES)
        for path, render in pages.items():
            application.router.add_get(path, Shared(path, render).answer)
        if live is not None:
            LiveServer(live).add_to(application)
        Actions(acts).add_to(application)
        return application

    async def _listen(self, host: str, port: int) -> int:
        await self._runner.setup()
        assert self._runner.server is not None
        made = Connections(self._runner.server, self._guard.refused, self._connections_max)
        context = self._guard.context
        handshake = None if context is None else HANDSHAKE
        listening = self._loop.create_server(made, host, port, ssl=context, ssl_handshake_timeout=handshake)
        self._server = await listening
        return int(self._server.sockets[0].getsockname()[1])

    async def _ended(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        answer = await self._answered(request, handler)
        status = answer.status
        why = answer.get(WHY) or _WHY.get(status) or ("invalid" if 400 <= status < 500 else None)
        if why is not None:
            self._guard.refused.add("http", why)
        return answer

    async def _answered(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Return the answer to a parsed request, or its rejection."""
        if self._guard.client_ca and request.path not in PROBES and not _has_certificate(request):
            return refusal(403, "INVALID", _NO_CERTIFICATE, why="certificate")
        if (foreign := self._foreign(request)) is not None:
            return refusal(403, "INVALID", foreign)
        given = request.headers.get("Authorization")
        role = self._guard.role(given)
        admitted, request[ROLE] = role is not None, role
        request[IS_BRIEF] = not admitted and given is None and request.path in BRIEF
        if not (admitted or request[IS_BRIEF] or request.path in OPEN):
            return response(Page.of({"error": REFUSED}, 401), {"WWW-Authenticate": "Bearer"})
        if (request.content_length or 0) > QUERY_BYTES:  # reject before reading
            return refusal(413, "INVALID", f"the body is longer than {QUERY_BYTES} bytes")
        try:
            return await handler(request)
        except web.HTTPException as error:
            allowed = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            return response(Page.of({"error": error.reason}, error.status), allowed)
        except web.RequestPayloadError:
            return refusal(400, "INVALID", "the body is not as its headers say")

    def _foreign(self, request: web.Request) -> str | None:
        """Return why a request is rejected that a page of another site may have sent through a browser; None
        otherwise."""
        named = None if self._guard.token or request.path == ALIVE else other_name(_host(request), self._host)
        asks = request.path in DATA or request.method == "POST"
        return named or (other_site(request.headers) if asks else None)


def _has_certificate(request: web.Request) -> bool:
    """Return whether the caller presented a certificate; TLS has verified it."""
    return bool(request.transport is not None and request.transport.get_extra_info("peercert"))


def _host(request: web.Request) -> str:
    """Return the `Host` header. `request.host` would look up the system's host name if the header is missing."""
    return request.headers.get("Host", "")
