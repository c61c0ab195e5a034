"""The HTTP server of `memwal serve` and `memwal run`: /metrics, /health/livez, /health/readyz, /status, the page at /
and the actions of operators.

One thread with an event loop answers requests. Each page is rendered in its own thread, one rendering at a time per
path: requests that arrive meanwhile get the same answer, or a 503 if it takes too long (storage hangs). So slow
readers, many readers or a hanging page delay neither the threads that write rows nor other pages.
"""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from memwal.ingest.errors import Invalid
from memwal.ingest.service.ops.actions import GRANT, Actions
from memwal.ingest.service.ops.answers import IS_BRIEF, TABLE, WHY, Shared, refusal, response
from memwal.ingest.service.ops.http_connections import CONNECTIONS, HANDSHAKE, Connections
from memwal.ingest.service.ops.live import Live
from memwal.ingest.service.ops.live_server import DATA, PATHS, QUERY_BYTES, LiveServer
from memwal.ingest.service.ops.pages import Act, OfTable, Page, Render
from memwal.ingest.service.rpc.guard import REFUSED, AccessLog, Guard, Why
from memwal.ingest.settings.endpoints import url_host
from memwal.wal import SystemClock

ALIVE = "/health/livez"
OPEN = frozenset({ALIVE, *PATHS})
"""Paths that need no token: they only show that the process runs, or are files of the page, without data."""
BRIEF = frozenset({"/health/readyz"})
"""Paths that return only their status to a caller without a token: Kubernetes probes cannot send a secret, and the
reasons name regions and storage. These callers cause at most one request to storage per `BRIEF_AGE` of `answers`."""
LISTS = frozenset({"/tables"})
"""Paths that return only what concerns the tables of the caller's token."""
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
        of_tables: Mapping[str, OfTable] | None = None,
        connections_max: int = CONNECTIONS,
    ) -> None:
        """Listen on `host` and `port` (0: any free port).

        `setting`: name of the port in errors. `live`: data of the page at /, which is served with it; it must be
        started. `acts`: see `Actions`. `of_tables`: the pages of one of several tables, by path. `connections_max`:
        concurrent connections. Raises: Invalid if the port is in use.
        """
        self._guard, self._host, self._connections_max = guard, host, connections_max
        self._log = AccessLog(SystemClock())
        self._loop = asyncio.new_event_loop()
        application = web.Application(middlewares=[self._guarded], client_max_size=QUERY_BYTES)
        for path, render in pages.items():
            application.router.add_get(path, Shared(path, render, (of_tables or {}).get(path)).answer)
        if live is not None:
            LiveServer(live).add_to(application)
        Actions(acts or {}).add_to(application)
        self.runner = web.AppRunner(application, handle_signals=False, shutdown_timeout=0.1)
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
        self.url = f"{'https' if guard.context else 'http'}://{url_host(host)}:{self.port}"

    def close(self) -> None:
        """Stop listening; answers in progress are cut off."""
        with suppress(TimeoutError):
            self._run(self._ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END)

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(_END)

    async def _listen(self, host: str, port: int) -> int:
        await self.runner.setup()
        assert self.runner.server is not None
        made = Connections(self.runner.server, self._guard.refused, self._connections_max)
        context = self._guard.context
        handshake = None if context is None else HANDSHAKE
        listening = self._loop.create_server(made, host, port, ssl=context, ssl_handshake_timeout=handshake)
        self._server = await listening
        return int(self._server.sockets[0].getsockname()[1])

    async def _ended(self) -> None:
        if self._server is not None:
            self._server.close()
        await self.runner.cleanup()

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
        presented = request.get_extra_info("peercert")  # TLS has verified it
        if self._guard.client_ca and request.path not in PROBES and not presented:
            return refusal(403, _NO_CERTIFICATE, why="certificate")
        if (foreign := self._foreign(request)) is not None:
            return refusal(403, foreign)
        given = request.headers.get("Authorization")
        grant = self._guard.grant(given)
        admitted, request[GRANT] = grant is not None, grant
        request[IS_BRIEF] = not admitted and given is None and request.path in BRIEF
        if not (admitted or request[IS_BRIEF] or request.path in OPEN):
            return response(Page.of({"error": REFUSED}, 401), {"WWW-Authenticate": "Bearer"})
        if grant is not None and request.path not in (*OPEN, *BRIEF, *LISTS):
            table = request.query.get(TABLE)
            if (refused := self._log.refusal(grant, "read", request.path, str(request.remote), table)) is not None:
                return refusal(403, refused, why="role")
        if (request.content_length or 0) > QUERY_BYTES:  # reject before reading
            return refusal(413, f"the body is longer than {QUERY_BYTES} bytes")
        try:
            return await handler(request)
        except web.HTTPException as error:
            allowed = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            return response(Page.of({"error": error.reason}, error.status), allowed)
        except web.RequestPayloadError:
            return refusal(400, "the body is not as its headers say")

    def _foreign(self, request: web.Request) -> str | None:
        """Return why a request is rejected that a page of another site may have sent through a browser; None
        otherwise."""
        host = request.headers.get("Host", "")  # `request.host` would look up the system's host name without it
        named = None if self._guard.tokens or request.path == ALIVE else other_name(host, self._host)
        asks = request.path in DATA | LISTS or request.method == "POST"
        return named or (other_site(request.headers) if asks else None)


# ---- requests that a page of another site may have sent through a browser -------------------------------------------

# 1. A page of another site sends its own `Origin`, or the browser sends `Sec-Fetch-Site: cross-site`.
# 2. With DNS rebinding the owner of the site makes its name resolve to this process. Then both headers agree with
#    `Host`, and the browser lets the page read the answer. They are detected by the name, unless a token is required.

_SHOWN = 100


def other_name(host: str, own: str) -> str | None:
    """Return why a request without a token is rejected for its `Host` header; None if it is accepted.

    `own`: the configured host. A request without the header does not come from a browser.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return f"{host[:_SHOWN]!r} is not an address"
    if not host or name in ("localhost", own) or _is_address(name):
        return None
    taken = " and localhost" if own == "localhost" or _is_address(own) else f", localhost and {own}"
    return f"asked by the name {name[:_SHOWN]!r}; without daemon.token only IP addresses{taken} are taken"


def other_site(headers: Mapping[str, str]) -> str | None:
    """Return why a request is rejected that a page of another site sent through a browser; None for any other
    request."""
    host, origin = headers.get("Host", ""), headers.get("Origin")
    try:
        site = None if origin is None else urlsplit(origin).netloc
    except ValueError:
        return f"{(origin or '')[:_SHOWN]!r} is not an address"
    if site is not None and site != host:
        return f"a page of {origin[:_SHOWN] if origin else ''} asked {host[:_SHOWN]}; {_ONLY}"
    if headers.get("Sec-Fetch-Site", "").lower() == "cross-site":
        return f"a page of another site asked {host[:_SHOWN]}; {_ONLY}"
    return None


_ONLY = "only the page of this process may ask it from a browser"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
