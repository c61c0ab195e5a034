"""The page at / over HTTP: its files, /live, /live/events and /query.

The files contain no data and need no token. Everything else is data as JSON, which the page requests with the token.

While /live/events has readers, one message a second is rendered for all of them, in a thread that only reads memory.
A reader that receives nothing for some seconds is disconnected, and reconnects, so the server keeps neither messages
nor a thread for it. One query runs at a time, with a time limit.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from importlib.resources import files

from aiohttp import web

from memwal.ingest.caller import Caller
from memwal.ingest.errors import Invalid
from memwal.ingest.service.ops.actions import GRANT
from memwal.ingest.service.ops.answers import PATIENCE, SERVER, TABLE, Shared, in_a_thread, refusal, response
from memwal.ingest.service.ops.live import Live, Parts
from memwal.ingest.service.ops.pages import Page

READERS = 8
"""Maximum concurrent readers of /live/events."""
TICK = 1.0
QUERY_BYTES = 16 << 10
QUERY_SECONDS = 10.0
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = (
    *("index.html", "page.css", "page.js", "tiles.js", "regions.js", "lists.js", "draw.js", "query.js", "text.js"),
    *("tables.js", "icon.svg", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css"),
)
PATHS = {"/": "index.html"} | {f"/page/{name}": name for name in FILES if name != "index.html"}
"""The files of the page, by path."""
DATA = frozenset({"/live", "/live/events", "/query"})
"""Paths that only this process's own page may request from a browser."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_OF_FILES = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_OF_EVENTS = {
    "Content-Type": "text/event-stream",
    "Server": SERVER,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Accel-Buffering": "no",
}


class LiveServer:
    """The handlers of the page. Runs on one event loop."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._ticks: dict[str | None, _Ticks] = {}
        self._message = Shared("/live", lambda: Page.of(live.message()), lambda name: Page.of(live.of(name).message()))
        self._asking: asyncio.Future[Page] | None = None

    def add_to(self, application: web.Application) -> None:
        """Add the paths of the page."""
        router = application.router
        application.on_shutdown.append(self._stop)
        folder = files("memwal.ingest.service.ops") / "page"
        for path, name in PATHS.items():
            page = Page((folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]])
            router.add_get(path, partial(_file, page))
        router.add_get("/live", self._message.answer)
        router.add_get("/live/events", self._events, allow_head=False)
        router.add_post("/query", self._query)
        if (parts := self._live.parts) is not None:
            router.add_get("/tables", partial(self._tables, parts))

    @property
    def readers(self) -> int:
        """The number of readers of /live/events."""
        return sum(ticks.readers for ticks in self._ticks.values())

    async def _stop(self, _: web.Application) -> None:
        for ticks in self._ticks.values():
            ticks.stop()

    async def _tables(self, parts: Parts, request: web.Request) -> web.StreamResponse:
        asked, grant = dict(request.query), request[GRANT]
        assert grant is not None
        return response(await asyncio.wrap_future(in_a_thread(lambda: Page.of(parts.listed(asked, grant.covers)))))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.readers >= READERS:
            return refusal(503, f"{READERS} pages are open already; close one, or read /live", "5", "busy")
        name = request.query.get(TABLE)
        try:
            live = self._live.of(name)
        except Invalid as error:
            return refusal(400, error.message)
        self._ticks = {each: ticks for each, ticks in self._ticks.items() if ticks.readers}
        ticks = self._ticks.setdefault(name, _Ticks(live))
        stream = web.StreamResponse(headers=_OF_EVENTS)
        ticks.readers += 1
        try:
            first = await ticks.rendered(0)
            await stream.prepare(request)
            while True:
                await asyncio.wait_for(stream.write(first), PATIENCE)
                first = await ticks.next()
        except (ConnectionError, TimeoutError):  # gone, or not reading: drop its buffered data
            if request.transport is not None:
                request.transport.abort()
        finally:
            ticks.readers -= 1
        return stream

    async def _query(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/json":
            return refusal(415, "send the query as JSON, with Content-Type: application/json")
        if request.content_length is None and "Transfer-Encoding" not in request.headers:
            return refusal(411, "send the length of the query, as Content-Length")
        try:
            asked = json.loads(await asyncio.wait_for(request.read(), PATIENCE))
        except (ValueError, RecursionError):
            return refusal(400, "the query is not JSON")
        except TimeoutError:
            return refusal(408, f"the query did not arrive within {PATIENCE:g} s")
        if not isinstance(asked, dict):
            return refusal(400, 'the query is not a JSON object; write {"filter": "…"}')
        if self._asking is not None and not self._asking.done():
            return refusal(429, "another query is running; this process answers one at a time", "1")
        try:
            live = self._live.of(request.query.get(TABLE))
        except Invalid as error:
            return refusal(400, error.message)
        caller, ask = Caller(), partial(live.source.ask, asked)
        self._asking = asyncio.wrap_future(in_a_thread(partial(caller.run, ask)))
        try:
            return response(await asyncio.wait_for(asyncio.shield(self._asking), QUERY_SECONDS))
        except TimeoutError:
            caller.leave()
            text = f"no answer within {QUERY_SECONDS:g} s; ask for less: a filter on an indexed column, fewer rows"
            return refusal(504, text)


class _Ticks:
    """Renders a message with the newest data for all readers, each second while there are readers. Runs on one event
    loop."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.readers = 0
        self._next: asyncio.Future[bytes] | None = None
        self._running: asyncio.Task[None] | None = None

    async def next(self) -> bytes:
        """Return the next message, as an event."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)

    async def rendered(self, since: int) -> bytes:
        """Return the message since a sample, as an event."""
        page = await asyncio.wrap_future(in_a_thread(lambda: Page.of(self._live.message(since))))
        return b"data: " + page.body + b"\n"  # the body ends a line, and an empty line ends an event

    def stop(self) -> None:
        """Stop rendering messages."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        while self.readers:
            since = self._live.newest
            await asyncio.sleep(TICK)
            event = await self.rendered(since)
            waiting, self._next = self._next, None
            if waiting is not None:
                waiting.set_result(event)


async def _file(page: Page, _: web.Request) -> web.StreamResponse:
    return response(page, _OF_FILES)
