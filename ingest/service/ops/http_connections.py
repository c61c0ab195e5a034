"""Limits of HTTP connections, so that no caller exhausts memory, descriptors or the log.

aiohttp limits the rest: it reads a body only as far as a handler requests it, at most 32 requests ahead, and closes a
connection without a complete request within its keep-alive time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from memwal.ingest.service.ops.answers import SERVER, response
from memwal.ingest.service.ops.pages import Page
from memwal.ingest.service.rpc.guard import Refused, Why

CONNECTIONS = 128
"""Concurrent connections; each uses a descriptor. Further connections get an error and are closed."""
LINE_BYTES = 8190
"""Maximum bytes of a request line, and of a header."""
HEADERS = 64
TAKE = 30.0
"""Seconds within which a client must read some of a pending answer."""
HANDSHAKE = 5.0
"""Seconds for the handshake of TLS."""
_IDLE = 15.0
"""Seconds for which a connection without a complete request is kept."""
_LINGER = 1.0
"""Seconds for which the rest of a rejected body is read and dropped, so that the client receives the answer."""
SIZES: Mapping[str, Any] = {
    "max_line_size": LINE_BYTES,
    "max_field_size": LINE_BYTES,
    "max_headers": HEADERS,
    "keepalive_timeout": _IDLE,
    "lingering_time": _LINGER,
    "auto_decompress": False,  # few bytes could expand to many
}
"""Arguments of aiohttp's protocol."""
_LOG = logging.getLogger("memwal.http")


class Connections:
    """Creates the protocol of each new connection, for `asyncio`'s `create_server`. Runs on one event loop."""

    def __init__(self, server: web.Server, refused: Refused, most: int = CONNECTIONS) -> None:
        self._server, self._refused, self._most = server, refused, most
        self._turned_away = set[_TurnedAway]()
        self._coming: dict[_Connection, float] = {}
        """Connections that are not established yet, with their time: asyncio accepts many at once, and TLS takes a
        while."""

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a connection."""
        now = asyncio.get_running_loop().time()
        self._coming = {each: began for each, began in self._coming.items() if now - began < HANDSHAKE}
        if len(self._server.connections) + len(self._coming) < self._most:
            coming = _Connection(self._server, self._refused, self._made)
            self._coming[coming] = now
            return coming
        self._refused.add("http", "busy")
        return _TurnedAway(self._turned_away, self._most)

    def _made(self, connection: _Connection) -> None:
        self._coming.pop(connection, None)


class _Connection(web.RequestHandler):
    """A connection. Input that is not HTTP is counted and answered in one line, and not logged with a traceback."""

    def __init__(self, server: web.Server, refused: Refused, made: Callable[[_Connection], None]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None, **SIZES)  # type: ignore[arg-type]
        self._refused, self._made = refused, made
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; from now on the server counts the connection."""
        super().connection_made(transport)
        self._made(self)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to unreadable input, or to an error of a handler."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _LOG.error("a page failed", exc_info=exc)
            told = {"kind": "INTERNAL", "message": "the page failed; the log says why"}
        else:
            too_long = isinstance(exc, LineTooLong) or "Too many headers" in str(message)
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if too_long else HTTPStatus.BAD_REQUEST
            why: Why = "size" if too_long else "invalid"
            self._refused.add("http", why)
            told = {"kind": "INVALID", "message": _TOO_LONG if too_long else "not a request of HTTP/1.1"}
        answer = response(Page.of({"error": told}, status))
        answer.force_close()
        return answer

    def pause_writing(self) -> None:
        """Start a timer that disconnects a client that reads nothing for `TAKE` seconds."""
        super().pause_writing()
        if self.transport is not None:
            self._stuck = asyncio.get_running_loop().call_later(TAKE, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read something."""
        super().resume_writing()
        self._forget()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection."""
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()


_TOO_LONG = f"a request line or header is longer than {LINE_BYTES} bytes, or there are more than {HEADERS} headers"


class _TurnedAway(asyncio.Protocol):
    """A connection beyond the limit. It gets an error once its request begins to arrive, and is closed."""

    def __init__(self, kept: set[_TurnedAway], most: int) -> None:
        self._kept, self._most = kept, most
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer, and wait briefly for a request: closing before the request is read would lose the answer."""
        self._transport = cast("asyncio.Transport", transport)
        if len(self._kept) >= self._most:
            self._transport.abort()
            return
        self._kept.add(self)
        self._transport.write(_answer(self._most))
        asyncio.get_running_loop().call_later(_LINGER, self._transport.abort)

    def data_received(self, _: bytes) -> None:
        """Close; the answer is sent first."""
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        """Remove the connection."""
        self._kept.discard(self)


def _answer(most: int) -> bytes:
    text = f"{most} connections are open already; close one, or ask again later"
    body = Page.of({"error": {"kind": "UNAVAILABLE", "message": text}}).body
    head = (
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Server: {SERVER}",
        "Cache-Control: no-store",
        "Retry-After: 1",
        "Connection: close",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*head, "", "")).encode() + body
