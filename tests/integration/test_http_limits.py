"""Limits of HTTP: concurrent connections, sizes, invalid bodies, and requests of other sites."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from memwal.ingest.service.ops.http_connections import HEADERS, LINE_BYTES
from memwal.ingest.service.ops.http_server import other_name, other_site
from memwal.ingest.service.ops.live_server import DATA, FILES, QUERY_BYTES
from tests.page_site import Site

HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"


@pytest.fixture
def served(site: Callable[..., Site], open_small: Callable[..., Any], made: Any) -> Site:
    """Serve the pages of a small table."""
    table = open_small()
    table.put(made.rows(range(3)))
    return site(table)


def sent(site: Site, data: bytes, silence: float = 30.0, *, body: bool = True) -> bytes:
    """Return the server's answer to `data`: one whole answer with anything that follows at once, or all data within
    `silence` seconds. `body`: whether the answer has a body.
    """
    with socket.create_connection(("127.0.0.1", site.port), timeout=silence) as connection:
        with suppress(OSError):  # the server may reject it before all of it was sent
            connection.sendall(data)
        answer = b""
        while not (is_whole(answer) if body else b"\r\n\r\n" in answer):
            try:
                found = connection.recv(1 << 16)
            except (ConnectionError, TimeoutError):
                break
            if not found:
                break
            answer += found
        return answer


def is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    return length is not None and len(body) >= int(length[1])


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def refused(site: Site) -> dict[str, int]:
    return dict(site.guard.refused.counts("http"))


def is_healthy(site: Site) -> bool:
    return site.ask("GET", "/health/livez")[0] == 200 and site.query(limit=5)[0] == 200


# ---- requests of other sites ----------------------------------------------------------------------------------------


def paths(site: Site) -> set[str]:
    """Return every path that the server answers."""
    return {path for _, path in site.routes()}


def test_without_a_token_every_page_but_livez_wants_our_own_name(served: Site, site: Callable[..., Site]) -> None:
    assert {"/metrics", "/status", "/health/readyz", "/", "/page/page.js", *DATA} <= paths(served)
    assert len(paths(served)) == len(FILES) + len(DATA) + 4 + len(served.pages.acts())
    for path in paths(served):
        method = "POST" if path == "/query" else "GET"
        answer, _, told = served.ask(method, path, {} if method == "POST" else None, Host="evil.example:9464")
        assert answer == (200 if path == "/health/livez" else 403), path
        if answer == 403:
            assert told["error"]["message"] == (
                "asked by the name 'evil.example'; without daemon.token only IP addresses and localhost are taken"
            )
    assert refused(served)["site"] == len(paths(served)) - 1
    assert status(sent(served, b"GET /status HTTP/1.0\r\n\r\n")) == 200, "no browser leaves Host out"
    guarded = site(token="secret")
    assert guarded.ask("GET", "/status", Host="memwal.example", Authorization="Bearer secret")[0] == 200


@pytest.mark.parametrize("path", sorted(DATA))
def test_what_a_browser_says_of_another_site_is_believed(served: Site, path: str) -> None:
    method, body = ("POST", {"limit": 1}) if path == "/query" else ("GET", None)
    answer, _, told = served.ask(method, path, body, Sec_Fetch_Site="cross-site")
    assert (answer, told["error"]["message"].startswith("a page of another site asked 127.0.0.1")) == (403, True)
    if path != "/live/events":
        for said in ("same-origin", "none"):
            assert served.ask(method, path, body, Sec_Fetch_Site=said)[0] == 200


def test_names_that_are_ours() -> None:
    for ours in ("localhost:1", "127.0.0.1:1", "[::1]:1", "[::1]", "memwal.example:1", "10.0.0.7", ""):
        assert other_name(ours, "memwal.example") is None, ours
    for other in ("evil.example", "localhost.evil.example:1", "[::", "memwal.example.evil:1", "127.0.0.1.evil.example"):
        assert other_name(other, "memwal.example") is not None, other
    assert other_site({"Host": "a:1", "Origin": "http://a:1"}) is other_site({"Host": "a:1"}) is None
    for origin in ("null", "http://b:1", "http://a:2", "http://[", "x" * 9999):
        assert len(other_site({"Host": "a:1", "Origin": origin}) or "") in range(1, 300)


# ---- connections ----------------------------------------------------------------------------------------------------


def test_one_connection_too_many_is_told_so_and_the_next_is_served(
    site: Callable[..., Site], wait_until: Callable[..., Any]
) -> None:
    pages = site(connections_max=3)
    with ExitStack() as open_ones:
        held = [open_ones.enter_context(socket.create_connection(("127.0.0.1", pages.port))) for _ in range(3)]
        for each in held:
            each.sendall(b"GET /health/livez HTTP/1.1\r\n" + HOST + b"\r\n")
            assert b'"alive": true' in each.recv(4096)
        answer = sent(pages, b"GET /health/livez HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (status(answer), b"Retry-After: 1\r\n" in answer) == (503, True)
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"] == {
            "kind": "UNAVAILABLE",
            "message": "3 connections are open already; close one, or ask again later",
        }
        assert refused(pages)["busy"] == 1
        held[0].close()
        wait_until(lambda: status(sent(pages, b"GET /health/livez HTTP/1.1\r\n" + HOST + b"\r\n")) == 200)


def test_one_that_is_turned_away_and_keeps_still_is_closed(site: Callable[..., Site]) -> None:
    pages = site(connections_max=1)
    with ExitStack() as open_ones:
        first, still = (
            open_ones.enter_context(socket.create_connection(("127.0.0.1", pages.port), timeout=30)) for _ in range(2)
        )
        assert status(still.recv(4096)) == 503
        with suppress(ConnectionError):
            assert still.recv(4096) == b""
        first.sendall(b"GET /health/livez HTTP/1.1\r\n" + HOST + b"\r\n")
        assert status(first.recv(4096)) == 200


def test_one_that_takes_nothing_of_a_large_answer_is_cut_off(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    monkeypatch.setattr("memwal.ingest.service.ops.http_connections.TAKE", 0.2)
    monkeypatch.setattr("memwal.ingest.service.ops.metrics.Scrape.text", lambda _: b"x" * (64 << 20))
    pages = site(connections_max=1)
    with socket.create_connection(("127.0.0.1", pages.port)) as reader:
        reader.sendall(b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n")
        livez = b"GET /health/livez HTTP/1.1\r\n" + HOST + b"\r\n"
        wait_until(lambda: status(sent(pages, livez)) == 503)
        wait_until(lambda: status(sent(pages, livez)) == 200)


# ---- sizes and bodies -----------------------------------------------------------------------------------------------

LONG = b"x" * (LINE_BYTES + 1)
GET, POST = b"GET /status HTTP/1.1\r\n" + HOST, b"POST /query HTTP/1.1\r\n" + HOST + JSON
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN: dict[str, tuple[bytes, int, str]] = {
    "request line": (b"GET /" + LONG + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431, "size"),
    "header": (GET + b"X: " + LONG + b"\r\n\r\n", 431, "size"),
    "name of a header": (GET + LONG + b": x\r\n\r\n", 431, "size"),
    "headers": (GET + b"X: x\r\n" * (HEADERS + 1) + b"\r\n", 431, "size"),
    "body": (POST + b"Content-Length: %d\r\n\r\n" % (QUERY_BYTES + 1) + b" " * QUERY_BYTES, 413, "size"),
    "body of a page": (GET + b"Content-Length: 99999999999\r\n\r\n", 413, "size"),
    "body in chunks": (POST + CHUNKED + (b"400\r\n" + b" " * 1024 + b"\r\n") * 20, 413, "size"),
    "no length": (POST + b"\r\n", 411, "invalid"),
    "longer than its length": (POST + b'Content-Length: 2\r\n\r\n{}{"limit": 5}\r\n\r\n', 400, "invalid"),
    "garbage in place of a chunk": (POST + CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", 400, "invalid"),
    "a length that is no number": (POST + b"Content-Length: x\r\n\r\n{}", 400, "invalid"),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n{}", 400, "invalid"),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "invalid"),
    "compressed": (POST + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00", 400, "invalid"),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid"),
    "no method of the page": (b"PUT /status HTTP/1.1\r\n" + HOST + b"\r\n", 405, "invalid"),
    "no method of HTTP": (b"BREW /status HTTP/1.1\r\n" + HOST + b"\r\n", 400, "invalid"),
    "no such path": (b"GET /../../etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", 404, "invalid"),
}


def test_what_is_too_large_or_broken_is_refused_and_counted(
    served: Site, capfd: pytest.CaptureFixture[str], wait_until: Callable[..., Any]
) -> None:
    for name, (data, wanted, why) in BROKEN.items():
        before = refused(served)
        answer = sent(served, data)
        assert status(answer) == wanted, (name, answer[:500])
        wait_until(lambda why=why, before=before: refused(served)[why] == before[why] + 1)
        for told in (b"Traceback", b".py", b"aiohttp"):
            assert told not in answer, name
    assert is_healthy(served)
    assert "Traceback" not in capfd.readouterr().err


def test_a_body_that_ends_early_is_given_up(served: Site) -> None:
    begun = b"POST /query HTTP/1.1\r\n" + HOST + JSON + b'Content-Length: 100\r\n\r\n{"limit"'
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(begun)
        connection.shutdown(socket.SHUT_WR)
        assert status(connection.recv(4096)) in (0, 400)
    assert is_healthy(served)


def test_a_scrape_tells_what_was_refused(served: Site) -> None:
    served.ask("GET", "/nothing")
    text = served.ask("GET", "/metrics")[2]
    assert 'memwal_refused_requests_total{over="http",reason="invalid"} 1.0' in text
    assert 'memwal_refused_requests_total{over="flight",reason="token"} 0.0' in text


# ---- random requests ------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["GET", "POST", "HEAD", "PUT", "PRI", "OPTIONS", "CONNECT", "TRACE", "", "get", "\x00"])
PATHS = st.sampled_from(
    ["/", "/query", "/live", "/live/events?x", "/status", "/metrics", "//", "*", "http://[", "/%00", "/page/../x", "?#"]
)
NAMES = st.sampled_from(
    ["Host", "Content-Length", "Transfer-Encoding", "Content-Type", "Expect", "Upgrade", "Connection", "Authorization",
     "Origin", "Sec-Fetch-Site", "Range", "Cookie", "Content-Encoding", ""]
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        ["localhost", "5", "chunked", "application/json", "100-continue", "websocket", "upgrade", "Bearer x", "null",
         "cross-site", "bytes=0-", "gzip", "99999999999999999999", "h2c"]
    ),
    st.text(max_size=40),
)  # fmt: skip
BODIES = st.one_of(
    st.binary(max_size=200), st.sampled_from([b"{}", b"5\r\nhello\r\n0\r\n\r\n", b'{"filter": "id = 1"}', b"[" * 3000])
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Draw bytes that resemble a request."""
    line = " ".join((draw(WORDS), draw(PATHS), draw(st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "", "X"]))))
    headers = [f"{name}: {value}" for name, value in draw(st.lists(st.tuples(NAMES, VALUES), max_size=5))]
    end = draw(st.sampled_from(["\r\n", "\n", "\r"]))
    return end.join([line, *headers, "", ""]).encode("utf-8", "surrogatepass") + draw(BODIES)


@given(st.one_of(requests(), st.binary(max_size=300)))
@example(b"GET /live HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n\x00" * 3)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_request_breaks_the_server_or_shows_its_inside(served: Site, data: bytes) -> None:
    if b"/live/events" in data:  # an endless stream
        data = data.replace(b"GET /live/events", b"GET /live/event")
    answer = sent(served, data, 0.05)
    assert status(answer) not in (500, 502), answer
    for told in (b"Traceback", b".py", b"site-packages"):
        assert told not in answer.replace(data, b"")
    assert served.ask("GET", "/health/livez")[0] == 200
