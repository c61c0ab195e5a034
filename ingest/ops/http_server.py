"""The HTTP server of `memwal serve` and `memwal run`: /metrics, /health/livez, /health/readyz, /status.

One thread with an event loop answers requests. Each page is rendered in a thread of its own, one rendering at a time
per path: requests that arrive meanwhile get the same answer, or a 503 if it takes too long (storage hangs). So slow
readers, many readers or a page that hangs delay neither the threads that write rows nor other pages.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from aiohttp import web

from memwal.ingest.errors import Invalid, classify
from memwal.ingest.ops.pages import Page, Render
from memwal.ingest.rpc.guard import REFUSED, Guard
from memwal.ingest.settings.endpoints import url_host

OPEN = frozenset({"/health/livez"})
"""Paths that need no token: they only show that the process runs."""
BRIEF = frozenset({"/health/readyz"})
"""Paths that answer a caller without a token by their status alone: probes of Kubernetes cannot send a secret, and the
reasons name regions and storage. Such a caller does not make this process ask storage more often than `BRIEF_AGE`."""
BRIEF_AGE = 1.0
"""Seconds for which callers without a token get the last answer again."""
PATIENCE = 5.0
"""Seconds that a page may take to render; a health check needs some answer in time."""
_END = 5.0
_BRIEF = web.RequestKey("brief", bool)


class HttpServer:
    """Serves the paths of `pages` by GET.

    Thread safety. `close` from any thread; pages are rendered in threads of the server. Errors. If a page raises, the
    answer has the error's kind and message: status 503 for UNAVAILABLE, else 500.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, Render], guard: Guard, *, setting: str) -> None:
        """Listen. `port` 0: any free port; `setting` names the port in errors. Raises: Invalid if it is in use."""
        self._guard = guard
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(
            self._application(pages), access_log=None, handle_signals=False, shutdown_timeout=0.1
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

    def _application(self, pages: Mapping[str, Render]) -> web.Application:
        application = web.Application(middlewares=[self._guarded], client_max_size=1)
        for path, render in pages.items():
            application.router.add_get(path, _Shared(path, render).answer)
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
        given = request.headers.get("Authorization")
        admitted = self._guard.admits(given)
        request[_BRIEF] = not admitted and given is None and request.path in BRIEF
        if not (admitted or request[_BRIEF] or request.path in OPEN):
            return _response(Page.of({"error": REFUSED}, 401), {"WWW-Authenticate": "Bearer"})
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _response(Page.of({"error": error.reason}, error.status))


class _Shared:
    """One page, rendered once for all requests that wait at the same time. Runs on one event loop."""

    def __init__(self, path: str, render: Render) -> None:
        self._path, self._render = path, render
        self._rendering: asyncio.Future[Page] | None = None
        self._began = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        brief = request[_BRIEF]
        page = await self._page(BRIEF_AGE if brief else 0.0)
        return _response(Page.of({"ready": page.status == 200}, page.status) if brief else page)

    async def _page(self, age_max: float) -> Page:
        """Return the page that is being rendered, or the last one if its rendering began less than `age_max` s ago."""
        now = asyncio.get_running_loop().time()
        if self._rendering is None or (self._rendering.done() and now - self._began >= age_max):
            self._rendering, self._began = asyncio.wrap_future(_in_a_thread(self._render)), now
        try:
            return await asyncio.wait_for(asyncio.shield(self._rendering), PATIENCE)
        except TimeoutError:
            text = f"{self._path} was not rendered within {PATIENCE:g} s; most likely storage does not answer"
            return Page.of({"ready": False, "reasons": [{"reason": "no_answer", "text": text}]}, 503)


def _in_a_thread(render: Render) -> Future[Page]:
    """Render in a daemon thread, not in a pool: a thread that hangs must not keep the process from ending."""
    page: Future[Page] = Future()

    def work() -> None:
        try:
            page.set_result(render())
        except BaseException as error:  # noqa: BLE001 - the client gets the error
            classified = classify(error)
            status = 503 if classified.kind == "UNAVAILABLE" else 500
            page.set_result(Page.of({"error": {"kind": classified.kind, "message": classified.message}}, status))

    threading.Thread(target=work, name="http-page", daemon=True).start()
    return page


def _response(page: Page, headers: Mapping[str, str] | None = None) -> web.Response:
    sent = {"Content-Type": page.content_type, "Cache-Control": "no-store", **(headers or {})}
    return web.Response(body=page.body, status=page.status, headers=sent)
