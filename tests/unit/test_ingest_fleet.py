"""The handles of a fleet: at most one of each table is open, whatever is listed or fails in between."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from memwal.ingest.service.daemon.fleet import Fleet
from tests.conftest import PATIENCE
from tests.support.clock import FakeClock


class Opened:
    """Opens tables, which do nothing; each waits until the test lets it go."""

    def __init__(self) -> None:
        self.names, self.begun, self.go = list[str](), threading.Event(), threading.Event()

    def __call__(self, name: str) -> Any:
        self.names.append(name)
        self.begun.set()
        assert self.go.wait(PATIENCE)
        return SimpleNamespace(id=name, closed=False)


def fleet_of(opened: Opened) -> Fleet:
    share: Any = SimpleNamespace(serve=lambda *_: None, leave=lambda _: None)
    return Fleet(dict, lambda name: f"/t/{name}.lance", opened, share, FakeClock(), 300.0)


def test_a_listing_during_the_creation_of_a_table_leads_to_no_second_handle() -> None:
    opened = Opened()
    fleet = fleet_of(opened)
    with ThreadPoolExecutor(2) as threads:
        creating = threads.submit(fleet.create, "orders")
        assert opened.begun.wait(PATIENCE)
        fleet.refresh()  # the prefix does not have the table yet
        using = threads.submit(fleet.opened, "orders")
        opened.go.set()
        creating.result(PATIENCE)
        assert using.result(PATIENCE) is fleet.open()["orders"]
    assert opened.names == ["orders"]


def test_a_table_that_cannot_be_looked_after_stops_nothing() -> None:
    opened = Opened()
    opened.go.set()
    fleet = fleet_of(opened)
    for name in ("orders", "users"):
        fleet.create(name)
    fleet.look()  # these tables have nothing to look after, which is an error of each
    assert sorted(fleet.open()) == ["orders", "users"]
