"""Take a picture of the page at / of a daemon that receives rows for a few minutes: `python -m tests.page_picture
FILE`.

It made the picture of `ingest/service/ops/README.md`. It needs Chromium, as the tests of the page do.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

import memwal
from tests.conftest import Made, environment, small_sections, toml
from tests.page_site import chromium

SECONDS = 240
SIZE = {"width": 1120, "height": 1040}


def main(file: str) -> int:
    """Start a daemon, put rows, take the picture meanwhile, end the daemon."""
    with tempfile.TemporaryDirectory(prefix="memwal-") as folder:
        config = Path(folder) / "orders.toml"
        sections = small_sections("orders.lance") | {
            "commit": {"interval": "15s"},
            "regions": {"count": 4},
            "gc": {"interval": "20s"},
        }
        config.write_text(toml(sections | {"daemon": {"http_port": 0}}))
        command = [sys.executable, "-m", "memwal.ingest.cli.app", "serve", config.name]
        daemon = subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True)
        try:
            assert daemon.stdout is not None
            url, endpoint = (daemon.stdout.readline().split()[-1] for _ in range(2))
            ended = threading.Event()
            putting = threading.Thread(target=put_rows, args=(endpoint, ended))
            putting.start()
            ended.wait(SECONDS)
            take(url, file)
            ended.set()
            putting.join()
        finally:
            daemon.terminate()
            daemon.wait(60)
    return 0


def put_rows(endpoint: str, ended: threading.Event) -> None:
    """Put rows at a varying rate, and delete some, until `ended`."""
    made, began, rng = Made(), time.monotonic(), np.random.default_rng(1)
    rows = [made.table(range(first, first + 100)) for first in range(0, 5000, 100)]
    with memwal.connect(endpoint) as table:
        while not ended.wait(0.2):
            wave = 1.5 + np.sin((time.monotonic() - began) / 20)
            for _ in range(rng.poisson(2 * wave)):
                table.put(rows[rng.integers(len(rows))])
            table.delete(rng.integers(0, 5000, rng.poisson(30)).tolist())


def take(url: str, file: str) -> None:
    """Take the picture once the page shows the daemon's data."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium())
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(url)
        page.wait_for_selector("#main:visible")
        page.wait_for_timeout(2500)
        page.screenshot(path=file)
        browser.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
