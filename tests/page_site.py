"""The page at / of a table in the tests' process, and Chromium to open pages."""

from __future__ import annotations

import http.client
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

MARKUP = "<img src=x onerror=document.title='broken'>"
JSON = {"Content-Type": "application/json"}
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 812}


class Site:
    """The pages of a table in this process, as a daemon serves them."""

    def __init__(self, table: Any = None, token: str = "", guard: Any = None, **options: Any) -> None:
        # Imported here, since every test process loads this module.
        from memwal.ingest.service.daemon.live import DaemonSource
        from memwal.ingest.service.daemon.pages import DaemonPages
        from memwal.ingest.service.daemon.peers import Place
        from memwal.ingest.service.ops.events import RecentEvents
        from memwal.ingest.service.ops.http_server import HttpServer
        from memwal.ingest.service.ops.live import Live
        from memwal.ingest.service.ops.metrics import RefusedCollector, Scrape
        from memwal.ingest.service.ops.storage import StorageCollector, StorageRates
        from memwal.ingest.service.rpc.credentials import Access
        from memwal.ingest.service.rpc.guard import Guard
        from memwal.ingest.settings.sections import CostSettings, DaemonSettings
        from memwal.wal import SystemClock

        self.pages = DaemonPages(Scrape())
        if table is not None:
            self.show(table)
        clock, self.events = SystemClock(), RecentEvents()
        storage = StorageRates(StorageCollector(CostSettings()), CostSettings(), clock)
        self.source = DaemonSource(self.pages, Place("grpc://here:1"), "before", Access(), clock, storage)
        self.live = Live("daemon", self.source, self.events, clock)
        daemon = DaemonSettings(token="env:TOKEN") if token else DaemonSettings()
        self.guard = guard or Guard.of(daemon, {"TOKEN": token})
        self.pages.scrape.add(RefusedCollector(self.guard.refused))
        shown = {"setting": "daemon.http_port", "live": self.live, "acts": self.pages.acts(), **options}
        self.server = HttpServer("127.0.0.1", 0, self.pages.pages(), self.guard, **shown)
        self.port, self.url = self.server.port, self.server.url
        self.live.start()

    def show(self, table: Any) -> None:
        """Show a table from now on."""
        from memwal.ingest.service.daemon.tables import OneTable

        self.pages.shows(OneTable(getattr(table, "_engine", table)))
        self.pages.serves(None)

    def routes(self) -> list[tuple[str, str]]:
        """Return every method and path that the server answers."""
        return [(each.method, str(each.resource.canonical)) for each in self.server.runner.app.router.routes()]

    def close(self) -> None:
        self.live.stop()
        self.server.close()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Mapping[str, str], Any]:
        """Send a request; return status, headers and body, parsed if it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body, sent = json.dumps(body), JSON | sent
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            text = answer.read()
            kind = answer.headers["Content-Type"]
            return answer.status, answer.headers, json.loads(text) if kind == "application/json" else text.decode()
        finally:
            connection.close()

    def query(self, **asked: Any) -> tuple[int, Any]:
        status, _, body = self.ask("POST", "/query", asked)
        return status, body

    def stream(self, **headers: str) -> Iterator[Any]:
        """Yield the messages of /live/events."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/live/events", headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
        try:
            while line := answer.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
                else:
                    assert line == b"\n"
        finally:
            connection.close()


@pytest.fixture
def site() -> Iterator[Callable[..., Site]]:
    """Return a function that serves the pages of a table until the end of the test."""
    opened: list[Site] = []

    def begin(table: Any = None, **options: Any) -> Site:
        opened.append(Site(table, **options))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


# ---- a browser -----------------------------------------------------------------------------------------------------


class Looked:
    """A page of Chromium, with its errors and its requests to other hosts."""

    def __init__(self, page: Any, url: str, pictures: Path) -> None:
        self.page, self.complaints, self._pictures = page, list[str](), pictures
        page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(url) or self.complaints.append(asked.url))
        page.goto(url)

    def text(self, selector: str) -> str:
        """Return the visible text of the first matching element."""
        return str(self.page.locator(selector).first.inner_text())

    def texts(self, selector: str) -> list[str]:
        """Return the visible texts of all matching elements."""
        return list(self.page.locator(selector).all_inner_texts())

    def says(self, state: str, title: str) -> None:
        """Wait until the health of the process is `state`, and its title begins with `title`."""
        looks = f"document.querySelector('#health').dataset.state === {json.dumps(state)}"
        self.until(f"{looks} && document.querySelector('#health-title').textContent.startsWith({json.dumps(title)})")

    def until(self, script: str) -> None:
        """Wait until an expression of the page is true. The page's policy forbids scripts that wait inside it."""
        from tests.conftest import wait_until

        wait_until(lambda: self.page.evaluate(script), every=0.05)

    def fits(self) -> bool:
        """Return whether nothing is wider than the window, and no text wider than its tile; tables of rows may
        scroll."""
        script = """document.documentElement.scrollWidth <= window.innerWidth
            && [...document.querySelectorAll('.tile, figure, #regions, #commits, #events, #health')]
                .every((node) => node.scrollWidth <= Math.max(node.clientWidth, node.parentElement.clientWidth)
                    && node.getBoundingClientRect().right <= window.innerWidth)"""
        return bool(self.page.evaluate(script))

    def picture(self, name: str) -> None:
        """Save a picture of the whole page."""
        self.page.screenshot(path=self._pictures / f"{name}.png", full_page=True)


def chromium() -> str:
    """Return the command of the machine's Chromium."""
    for name in (os.environ.get("CHROMIUM"), *CHROMIUMS):
        if name and (found := shutil.which(name)):
            return found
    raise AssertionError("Chromium is needed for the tests of the page at /: apt-get install chromium, or set CHROMIUM")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Run Chromium without a window until the end of the module: meanwhile this thread has an event loop."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium())
        yield launched
        launched.close()


@pytest.fixture
def look(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Looked]]:
    """Return a function that opens a page, by default on a desktop in light colours. At the end the page must have no
    errors.

    Pictures are kept in MEMWAL_PICTURES.
    """
    opened: list[tuple[Any, Looked, tuple[str, ...]]] = []
    pictures = Path(os.environ.get("MEMWAL_PICTURES") or tmp_path)
    pictures.mkdir(parents=True, exist_ok=True)

    def open_page(
        url: str, *, dark: bool = False, phone: bool = False, script: bool = True, expected: tuple[str, ...] = ()
    ) -> Looked:
        size, scheme = PHONE if phone else DESKTOP, "dark" if dark else "light"
        context = browser.new_context(viewport=size, color_scheme=scheme, java_script_enabled=script)
        looked = Looked(context.new_page(), url, pictures)
        opened.append((context, looked, expected))
        return looked

    yield open_page
    for context, _, _ in opened:
        context.close()
    for _, looked, expected in opened:
        assert [each for each in looked.complaints if not any(part in each for part in expected)] == []
