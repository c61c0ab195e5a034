"""The endpoints behind the page at /: its files, /live, /live/events and /query, without a browser."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.resources import files
from typing import Any

import pytest

import memwal
from memwal.ingest.service.ops.history import OVERLAP
from memwal.ingest.service.ops.live_server import PATHS, QUERY_BYTES, READERS
from tests.conftest import OpenSmall, WaitUntil
from tests.page_site import MARKUP, Site


@pytest.fixture
def served(site: Callable[..., Site], open_small: OpenSmall, made: Any) -> Site:
    """Serve the pages of a small table with twenty rows and two rows whose texts are markup."""
    table = open_small()
    table.put(made.rows(range(20)))
    table.put([made.row(id) | {"name": MARKUP, "body": f"harbor {MARKUP}"} for id in (100, 101)])
    return site(table)


# ---- files ---------------------------------------------------------------------------------------------------------


def test_the_files_of_the_page_need_no_token_and_may_load_nothing_from_elsewhere(site: Callable[..., Site]) -> None:
    pages = site(token="of the daemon")
    for path in PATHS:
        status, headers, text = pages.ask("GET", path)
        assert status == 200
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "'unsafe" not in headers["Content-Security-Policy"]
        if "uplot" not in path and path != "/page/icon.svg":
            assert "://" not in text
            assert "innerHTML" not in text
    for path in ("/live", "/live/events", "/status", "/metrics"):
        assert pages.ask("GET", path)[0] == 401
    assert pages.ask("POST", "/query", {})[0] == 401
    token = "Bearer of the daemon"
    assert pages.ask("GET", "/live", Authorization=token)[0] == 200
    assert next(pages.stream(Authorization=token))["kind"] == "daemon"
    assert pages.ask("GET", "/page/nothing.js", Authorization=token)[0] == 404


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, as defined by WCAG 2."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_texts_can_be_read_in_both_colour_schemes() -> None:
    style = (files("memwal.ingest.service.ops") / "page" / "page.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    for palette in (light, dark):
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", palette))
        for text in ("ink", "muted", "blue", "good", "warn", "bad"):
            for ground in ("page", "surface"):
                assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
        for tone, ground in (("good", "good"), ("warn", "warn"), ("bad", "bad"), ("blue", "busy"), ("ink", "bad")):
            assert contrast(colors[tone], colors[f"{ground}-tint"]) >= 4.5, tone
        assert contrast(colors["orange"], colors["surface"]) >= 3  # a line of a chart


def test_the_library_of_the_charts_is_the_published_one() -> None:
    folder = files("memwal.ingest.service.ops") / "page" / "uplot"
    published = {  # of uplot 1.6.32
        "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    kept = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}
    assert kept == published


# ---- /live ---------------------------------------------------------------------------------------------------------


def test_live_tells_regions_levels_times_and_events(served: Site, wait_until: WaitUntil) -> None:
    wait_until(lambda: served.live.newest >= 3)
    status, headers, told = served.ask("GET", "/live")
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert (told["kind"], told["health"]["state"], told["acks"]["count"] > 0) == ("daemon", "healthy", False)
    assert [each["name"] for each in told["levels"]] == ["latest", "flushed", "committed"]
    assert [each["setting"] for each in told["levels"]] == ["wal.retry_budget", "memtable.age_max", "commit.interval"]
    assert told["levels"][1]["seconds"] > 0
    assert [(each["bucket"], each["state"], each["owner"]) for each in told["regions"]] == [
        (0, "serving", "grpc://here:1"),
        (1, "serving", "grpc://here:1"),
    ]
    assert sum(each["memtable_rows"] for each in told["regions"]) == 22
    assert told["daemons"] == [
        {"endpoint": "grpc://here:1", "here": True, "state": "serving", "answered": 0.0, "waiting": 0}
    ]
    assert told["query"]["key"] == ["id"]
    assert (told["query"]["texts"], told["query"]["vectors"]) == (["body"], ["vector"])
    lists = {name: len(values) for name, values in told["history"].items() if name != "first"}
    assert len(set(lists.values())) == 1


def test_live_before_the_table_is_open_says_that_it_starts(site: Callable[..., Site]) -> None:
    told = site().ask("GET", "/live")[2]
    assert (told["table"], told["health"]["title"], told["query"]) == ("before", "Starting", None)
    assert told["regions"] == told["daemons"] == []


def test_commits_are_listed_with_their_rows(site: Callable[..., Site], open_small: OpenSmall, made: Any) -> None:
    table = open_small()
    table.put(made.rows(range(12)))
    table.flush()
    table.commit()
    (commit,) = site(table).ask("GET", "/live")[2]["commits"]
    assert (commit["rows"], commit["ssts"], commit["seconds"] > 0) == (12, 2, True)


def test_events_come_each_second_and_repeat_only_the_newest_samples(served: Site, made: Any) -> None:
    stream = served.stream()
    first, second, third = (next(stream) for _ in range(3))
    assert first["query"] is not None
    assert (first["whole"], second["whole"]) == (True, False)
    assert second["time"] < third["time"]
    numbers = [each["history"]["first"] + len(each["history"]["time"]) for each in (first, second, third)]
    assert numbers == sorted(numbers)
    assert len(third["history"]["time"]) <= 3 + OVERLAP
    stream.close()


def test_there_are_only_so_many_readers_and_one_that_leaves_makes_room(served: Site, wait_until: WaitUntil) -> None:
    streams = [served.stream() for _ in range(READERS)]
    for stream in streams:
        next(stream)
    status, headers, told = served.ask("GET", "/live/events")
    assert (status, headers["Retry-After"]) == (503, "5")
    assert f"{READERS} pages are open" in told["error"]["message"]
    assert served.ask("GET", "/live")[0] == 200
    streams[0].close()
    wait_until(lambda: _opens(served))
    for stream in streams[1:]:
        stream.close()


def _opens(site: Site) -> bool:
    with suppress(AssertionError):
        stream = site.stream()
        next(stream)
        stream.close()
        return True
    return False


def test_a_reader_that_takes_nothing_is_cut_off(
    site: Callable[..., Site], wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memwal.ingest.service.ops.live_server.PATIENCE", 0.2)
    monkeypatch.setattr("memwal.ingest.service.ops.live_server.TICK", 0.01)
    pages = site()
    show = pages.source.show
    large = "x" * 300_000
    monkeypatch.setattr(pages.source, "show", lambda figures: show(figures) | {"large": large})
    before = threading.active_count()
    with socket.create_connection(("127.0.0.1", pages.port)) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.sendall(b"GET /live/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        server = _server(pages)
        wait_until(lambda: server.readers == 1)
        wait_until(lambda: server.readers == 0)
    wait_until(lambda: threading.active_count() <= before)


def _server(site: Site) -> Any:
    """Return the part of the server that answers readers."""
    router = site.server.runner.app.router
    handlers = [route.handler for route in router.routes() if route.resource.canonical == "/live/events"]
    return handlers[0].__self__


# ---- /query --------------------------------------------------------------------------------------------------------


def test_a_query_by_filter_words_vector_and_both(served: Site) -> None:
    status, told = served.query(filter="id >= 3 and id < 6", limit=10)
    assert (status, told["read"], told["level"]) == (200, "scan", "latest")
    assert told["seconds"] > 0
    assert [column["name"] for column in told["columns"]] == ["id", "name", "price", "body", "vector"]
    assert [column["number"] for column in told["columns"]] == [True, False, True, False, False]
    assert {row[0] for row in told["rows"]} == {"3", "4", "5"}
    assert all(row[4].endswith(", … 8 values]") for row in told["rows"]), "vectors are cut"

    status, told = served.query(words="harbor", words_column="body", filter="id >= 100")
    assert (status, told["read"], {row[0] for row in told["rows"]}) == (200, "match", {"100", "101"})
    assert {row[1] for row in told["rows"]} == {MARKUP}
    status, told = served.query(near="7", near_column="vector", limit=3)
    assert (status, told["read"], len(told["rows"]), told["rows"][0][0]) == (200, "search", 3, "7")
    assert (told["columns"][-1]["name"], told["rows"][0][-1]) == ("_distance", "0.0")
    status, told = served.query(near="7", near_column="vector", words="harbor", words_column="body", limit=3)
    assert (status, told["read"], told["columns"][-1]["name"]) == (200, "hybrid", "_relevance_score")
    status, told = served.query(level="committed")
    assert (status, told["level"], told["rows"]) == (200, "committed", [])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"filter": "id >"}, "filter"),
        ({"filter": "nothing = 3"}, "nothing"),
        ({"words": "harbor", "words_column": "name"}, "name"),
        ({"words": "harbor"}, "words_column is missing"),
        ({"near": "7", "near_column": "nothing"}, "nothing"),
        ({"near": "7", "near_column": "name"}, "holds no vector"),
        ({"near": "5000", "near_column": "vector"}, "no row has the key '5000'"),
        ({"near": "seven", "near_column": "vector"}, "seven"),
        ({"level": "newest"}, "newest"),
        ({"limit": 101}, "write a number from 1 to 100"),
        ({"limit": "all"}, "write a number from 1 to 100"),
        ({"limit": True}, "write a number from 1 to 100"),
        ({"filter": 3}, "filter is a int"),
        ({"sql": "drop table"}, "unknown field 'sql'"),
    ],
)
def test_a_wrong_query_is_told_in_place(served: Site, asked: dict[str, Any], words: str) -> None:
    status, told = served.query(**asked)
    assert (status, told["error"]["kind"]) == (400, "INVALID"), told
    assert words in told["error"]["message"]


def test_only_our_own_page_may_ask_from_a_browser(served: Site, site: Callable[..., Site]) -> None:
    asked: dict[str, Any] = {"limit": 1}
    here = f"127.0.0.1:{served.port}"
    assert served.ask("POST", "/query", asked, Origin=f"http://{here}")[0] == 200
    assert served.ask("POST", "/query", asked, Host=f"localhost:{served.port}")[0] == 200
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{served.port + 1}"):
        for method, path in (("POST", "/query"), ("GET", "/live"), ("GET", "/live/events")):
            status, _, told = served.ask(method, path, asked if method == "POST" else None, Origin=origin)
            assert (status, origin in told["error"]["message"]) == (403, True)
    assert served.ask("GET", "/live", Host="[::")[0] == 403
    named = {"Host": "evil.example", "Origin": "http://evil.example"}  # a foreign name that points to this server
    status, _, told = served.ask("POST", "/query", asked, **named)
    assert (status, "'evil.example'" in told["error"]["message"]) == (403, True)
    guarded = site(token="of the daemon")
    assert guarded.ask("GET", "/live", Host="memwal.example", Authorization="Bearer of the daemon")[0] == 200


def test_a_body_that_is_no_query_is_refused(served: Site) -> None:
    text = {"Content_Type": "text/plain"}
    assert served.ask("POST", "/query", b'{"limit": 1}', **text)[0] == 415
    assert served.ask("POST", "/query", b"limit=1", Content_Type="application/x-www-form-urlencoded")[0] == 415
    assert served.ask("POST", "/query", b"{", Content_Type="application/json")[0] == 400
    assert served.ask("POST", "/query", b"[" * 10_000, Content_Type="application/json")[0] == 400
    assert served.ask("POST", "/query", [1])[0] == 400
    assert served.ask("POST", "/query", {"filter": "x" * QUERY_BYTES})[0] == 413
    assert served.ask("GET", "/query")[0] == 405
    assert served.ask("POST", "/live", {})[0] == 405


def test_one_query_runs_at_a_time_and_not_for_ever(
    served: Site, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    monkeypatch.setattr("memwal.ingest.service.ops.live_server.QUERY_SECONDS", 0.3)
    going, begun = threading.Event(), threading.Event()
    real = served.source.ask

    def slow(request: Mapping[str, Any]) -> Any:
        begun.set()
        going.wait(60)
        return real(request)

    monkeypatch.setattr(served.source, "ask", slow)
    status, told = served.query(limit=1)
    assert (status, "no answer within 0.3 s" in told["error"]["message"]) == (504, True)
    assert begun.is_set()
    status, headers, told = served.ask("POST", "/query", {"limit": 1})
    assert (status, headers["Retry-After"]) == (429, "1")
    going.set()
    wait_until(lambda: served.query(limit=1)[0] == 200)


def test_a_query_before_the_table_is_open_says_so(site: Callable[..., Site]) -> None:
    status, told = site().query(limit=1)
    assert (status, told["error"]["kind"]) == (503, "UNAVAILABLE")


def test_a_table_without_key_or_vectors_can_be_queried(site: Callable[..., Site], tmp_path: Any) -> None:
    import pyarrow as pa

    schema = pa.schema([pa.field("what", pa.string()), pa.field("raw", pa.binary()), pa.field("n", pa.float64())])
    settings = {"commit": {"interval": "0s"}}
    with memwal.open(tmp_path / "plain.lance", schema=schema, key=(), settings=settings) as table:
        table.put([{"what": "x" * 1000, "raw": b"\x00\xff", "n": 1 / 3}, {"what": None, "raw": None, "n": None}])
        pages = site(table)
        assert pages.ask("GET", "/live")[2]["query"]["key"] == []
        status, told = pages.query()
        assert status == 200
        rows = sorted(told["rows"], key=lambda row: row[0] is None)
        assert rows == [["x" * 199 + "…", "00ff", "0.3333333333333333"], [None, None, None]]
        status, told = pages.query(near="1", near_column="what")
        assert (status, told["error"]["kind"]) == (400, "INVALID")
