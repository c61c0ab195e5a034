"""A proxy on loopback between an S3 client and its server that injects faults.

    with FaultProxy(server.endpoint) as proxy:
        proxy.inject(answers(409, "ConditionalRequestConflict"), method="PUT", key="/wal/")
        …  # the client talks to proxy.endpoint
        assert proxy.count("PUT", "/wal/") == 2

Requests are passed on byte by byte, the Host header included, so that signatures stay valid; bodies are not
parsed. HTTP/1.1 with keep-alive towards the client, one connection per request towards the server.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

_LONGEST_HEAD = 2**16
_NO_BODY = {204, 304}


@dataclass(frozen=True)
class Fault:
    """What happens to one request; created by the functions below."""

    name: str
    forwards: bool = True
    """Whether the request reaches the server before any answer."""
    status: int = 0
    """Status to answer instead of the server's; 0: the server's own answer."""
    code: str = ""
    cuts: bool = False
    """The connection is reset instead of an answer."""
    halves: bool = False
    """The first half of the answer arrives, then the connection is closed."""
    hangs: bool = False
    """No answer ever arrives."""
    holds: bool = False
    """The request is kept, and reaches the server when `FaultProxy.release` is called."""
    delay: float = 0.0
    """Seconds to wait before anything else."""
    drops_newest: bool = False
    """A listing omits the object that was written last."""
    then: Callable[[], None] | None = None
    """Called instead of an answer, e.g. to kill the client; the connection is reset afterwards."""


def answers(status: int, code: str) -> Fault:
    """Answer an error; the request never reaches the server."""
    return Fault(f"{status} {code}", forwards=False, status=status, code=code)


def swallows() -> Fault:
    """Answer success; the request never reaches the server."""
    return Fault("swallowed", forwards=False, status=200, code="OK")


def lands_then_answers(status: int, code: str) -> Fault:
    """The server executes the request; the client gets an error."""
    return Fault(f"lands, then {status}", status=status, code=code)


def lands_then_resets() -> Fault:
    """The server executes the request; the connection is reset before the answer."""
    return Fault("lands, then reset", cuts=True)


def lands_then_breaks_off() -> Fault:
    """The server executes the request; its answer breaks off in the middle."""
    return Fault("lands, then breaks off", halves=True)


def lands_then_hangs() -> Fault:
    """The server executes the request; no answer ever arrives."""
    return Fault("lands, then timeout", hangs=True)


def hangs() -> Fault:
    """The request never reaches the server, and no answer ever arrives."""
    return Fault("timeout", forwards=False, hangs=True)


def resets() -> Fault:
    """The connection is reset, and the request never reaches the server."""
    return Fault("reset before landing", forwards=False, cuts=True)


def lands_later() -> Fault:
    """The connection is reset; the request reaches the server at the next `release`."""
    return Fault("reset, lands later", forwards=False, cuts=True, holds=True)


def slow(seconds: float) -> Fault:
    """The request is passed on after `seconds`."""
    return Fault("slow", delay=seconds)


def listing_behind() -> Fault:
    """A listing omits the object that was written last."""
    return Fault("listing behind by one", drops_newest=True)


def kills_before(then: Callable[[], None]) -> Fault:
    """`then` ends the client when its request arrives; the request never reaches the server."""
    return Fault("killed before", forwards=False, then=then)


def kills_after(then: Callable[[], None]) -> Fault:
    """`then` ends the client when the server has executed its request."""
    return Fault("killed after", then=then)


@dataclass(frozen=True)
class Request:
    """One received request."""

    method: str
    """PUT, GET, HEAD, DELETE, POST; LIST for a listing of objects."""
    key: str
    """Key of the object, without the bucket; the prefix of a listing."""
    status: int
    """Status sent to the client; 0: no answer."""
    fault: str
    at: float
    """Arrival, in time.monotonic()."""
    seconds: float
    crc: int
    """CRC-32 of the body, to compare the bodies of two requests."""
    agent: str = ""
    """The client's User-Agent; memwal's own begins with "memwal"."""


@dataclass
class _Rule:
    fault: Fault
    method: str
    key: re.Pattern[str]
    skip: int
    times: int | None
    share: float
    chance: random.Random

    def takes(self, method: str, key: str) -> bool:
        """Return whether this request gets the fault, and count it."""
        if self.times == 0 or (self.method and method != self.method) or not self.key.search(key):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.share < 1 and self.chance.random() >= self.share:
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass(frozen=True)
class _Message:
    """A request or an answer as transmitted."""

    line: str
    headers: dict[str, str]
    """Names in lower case."""
    head: bytes
    body: bytes

    @property
    def status(self) -> int:
        return int(self.line.split()[1])

    @property
    def asked(self) -> tuple[str, str]:
        """(method, key) as in `Request`."""
        method, target, _ = self.line.split(" ", 2)
        url = urlsplit(target)
        _, _, key = unquote(url.path).lstrip("/").partition("/")
        query = parse_qs(url.query, keep_blank_values=True)
        if method == "GET" and "list-type" in query:
            return "LIST", query.get("prefix", [""])[0]
        return method, key


class FaultProxy:
    """The proxy, in its own thread, which runs inside the context.

    Thread safety. Any thread may add rules and read the log while requests run.
    Invariants. The first matching rule decides; a request without a matching rule is passed on unchanged.
    """

    def __init__(self, server: str) -> None:
        """`server`: the endpoint of the server, http://host:port."""
        url = urlsplit(server)
        assert url.hostname
        assert url.port
        self._server = (url.hostname, url.port)
        self._rules: list[_Rule] = []
        self._log: dict[int, Request] = {}
        self._entered = 0
        self._held: list[_Message] = []
        self._written: list[str] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._chance = random.Random(1)
        self.endpoint = ""
        self.latency = 0.0
        """Seconds added to every request, before anything else."""

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(60):
            raise RuntimeError("the fault proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(60)

    def inject(
        self,
        fault: Fault,
        *,
        method: str = "",
        key: str = "",
        skip: int = 0,
        times: int | None = 1,
        share: float = 1.0,
    ) -> None:
        """Inject `fault` into the next `times` requests (None: all) of `method` ("" for any) whose key matches the
        pattern
        `key`, after the first `skip` of them; with `share` into that share of them at random.
        """
        with self._lock:
            self._rules.append(_Rule(fault, method, re.compile(key), skip, times, share, self._chance))

    def heal(self) -> None:
        """Remove every rule."""
        with self._lock:
            self._rules.clear()

    def forget(self) -> None:
        """Empty the log, and drop held requests, which never land."""
        with self._lock:
            self._log.clear()
            self._held.clear()

    def release(self) -> list[int]:
        """Send held requests to the server now; return the server's answers."""
        with self._lock:
            held, self._held = self._held, []
        return [asyncio.run_coroutine_threadsafe(self._ask(each), self._loop).result(30).status for each in held]

    @property
    def requests(self) -> list[Request]:
        """The requests since the start or the last `forget`."""
        with self._lock:
            return list(self._log.values())

    def take(self) -> list[Request]:
        """Return the requests since the start or the last `take` or `forget`, and empty the log, which otherwise
        grows."""
        with self._lock:
            taken, self._log = list(self._log.values()), {}
        return taken

    def count(self, method: str = "", key: str = "") -> int:
        """Count the requests of `method` ("" for any) whose key matches the pattern `key`."""
        return sum(1 for each in self.requests if (not method or each.method == method) and re.search(key, each.key))

    def falls_silent(self, seconds: float, within: float = 90.0) -> bool:
        """Return whether `seconds` pass without a request, at the latest `within` seconds from now; empty the log.

        Work in progress may take long to end on a busy machine, so silence may begin later. A client that keeps sending
        requests is never silent.
        """
        until = time.monotonic() + within
        while time.monotonic() < until:
            self.forget()
            time.sleep(seconds)
            if not self.requests:
                return True
        return False

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        listening = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=_LONGEST_HEAD)
        self.endpoint = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._over.wait()
        listening.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, EOFError, asyncio.CancelledError):
            try:
                while (request := await _read(reader, writer=writer)) is not None:
                    if not await self._handle(request, writer):
                        break
            finally:
                writer.close()

    async def _handle(self, request: _Message, writer: asyncio.StreamWriter) -> bool:
        """Handle one request; return False if its connection is over."""
        began, (method, key) = time.monotonic(), request.asked
        fault = self._fault(method, key)
        agent = request.headers.get("user-agent", "")
        entered = Request(method, key, 0, fault.name, began, 0.0, zlib.crc32(request.body), agent)
        number = self._enter(entered)
        if self.latency or fault.delay:
            await asyncio.sleep(self.latency + fault.delay)
        answer = await self._ask(request) if fault.forwards else None
        if method == "PUT" and answer is not None and answer.status == 200:
            self._written.append(key)
        if fault.holds:
            with self._lock:
                self._held.append(request)
        if fault.hangs:
            await self._over.wait()
        if fault.then is not None:
            await asyncio.to_thread(fault.then)
        if fault.cuts or fault.hangs or fault.then is not None:
            _reset(writer)
            return False
        said = _error(fault, method) if fault.status else self._shown(fault, answer)
        self._enter(replace(entered, status=said.status, seconds=time.monotonic() - began), number)
        whole = said.head + said.body
        writer.write(whole[: len(whole) // 2] if fault.halves else whole)
        await writer.drain()
        return not fault.halves and said.headers.get("connection", "").lower() != "close"

    def _fault(self, method: str, key: str) -> Fault:
        with self._lock:
            return next((rule.fault for rule in self._rules if rule.takes(method, key)), Fault(""))

    def _enter(self, request: Request, number: int | None = None) -> int:
        """Add a line to the log, or complete line `number`, unless it was taken out."""
        with self._lock:
            if number is None:
                self._entered += 1
                number = self._entered
                self._log[number] = request
            elif number in self._log:
                self._log[number] = request
            return number

    async def _ask(self, request: _Message) -> _Message:
        async with _connected(self._server) as (reader, writer):
            writer.write(request.head + request.body)
            await writer.drain()
            answer = await _read(reader, method=request.line.split(" ", 1)[0])
        if answer is None:
            raise ConnectionResetError("the server closed the connection without an answer")
        return answer

    def _shown(self, fault: Fault, answer: _Message | None) -> _Message:
        assert answer is not None
        return _behind(answer, self._written) if fault.drops_newest else answer


# ---- HTTP ----------------------------------------------------------------------------------------------------------


async def _read(
    reader: asyncio.StreamReader, *, writer: asyncio.StreamWriter | None = None, method: str = ""
) -> _Message | None:
    """Return the next request (`writer`: answers 100 Continue), or the answer to a request of `method`; None at the
    end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
    if not method and "100-continue" in headers.get("expect", "").lower():
        assert writer is not None
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        head = _without_header(head, b"expect")  # answered already; not among the signed headers
    message = _Message(line, headers, head, b"")
    if method == "HEAD" or (method and message.status in _NO_BODY):
        return message
    return _Message(line, headers, head, await _body(reader, headers))


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    """Return the body's bytes as transmitted, with chunk sizes and trailers."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    parts = []
    while True:
        parts.append(await reader.readuntil(b"\r\n"))
        size = int(parts[-1].split(b";")[0], 16)
        if not size:
            break
        parts.append(await reader.readexactly(size + 2))
    while parts[-1] != b"\r\n":
        parts.append(await reader.readuntil(b"\r\n"))
    return b"".join(parts)


@asynccontextmanager
async def _connected(server: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*server, limit=_LONGEST_HEAD)
    try:
        yield reader, writer
    finally:
        writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST instead of FIN: the other side sees a reset."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _without_header(head: bytes, name: bytes) -> bytes:
    return b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(name + b":"))


def _error(fault: Fault, method: str) -> _Message:
    """Return an S3 error in the server's format; for 200, the answer to a PUT."""
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{fault.code}</Code>'
        f"<Message>{fault.name}, by the fault proxy</Message></Error>"
    )
    body = b"" if method == "HEAD" or fault.status == 200 else text.encode()
    line = f"HTTP/1.1 {fault.status} {fault.code}"
    more = 'ETag: "0"' if fault.status == 200 else "Content-Type: application/xml"
    head = f"{line}\r\n{more}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return _Message(line, {}, head, body)


def _behind(listing: _Message, written: list[str]) -> _Message:
    """Return the answer to a ListObjectsV2 without its object that was `written` last."""
    body = _unchunked(listing)
    for key in map(str.encode, reversed(written)):
        shown = re.sub(rb"<Contents><Key>" + re.escape(key) + rb"</Key>.*?</Contents>", b"", body, flags=re.DOTALL)
        if shown != body:
            body = shown
            break
    head = _without_header(_without_header(listing.head, b"content-length"), b"transfer-encoding")
    head = head.removesuffix(b"\r\n") + b"Content-Length: %d\r\n\r\n" % len(body)
    return _Message(listing.line, listing.headers, head, body)


def _unchunked(message: _Message) -> bytes:
    if message.headers.get("transfer-encoding", "").lower() != "chunked":
        return message.body
    rest, parts = message.body, []
    while size := int((line := rest.split(b"\r\n", 1)[0]).split(b";")[0], 16):
        start = len(line) + 2
        parts.append(rest[start : start + size])
        rest = rest[start + size + 2 :]
    return b"".join(parts)
