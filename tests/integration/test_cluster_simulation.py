"""The simulation of everything at once: its judge, some seeds, equal runs for one seed, and planted faults."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.conftest import extent
from tests.messages import raises
from tests.simulation.cluster_planted import FOUND_BY, PLANTED_IN_CLUSTERS, found_in_clusters_by
from tests.simulation.cluster_world import ClusterWorld
from tests.simulation.coverage import MUST_BE_KILLED, Cells, kills, table
from tests.simulation.ledger import Ledger, Op
from tests.simulation.many import results
from tests.simulation.oracle import Wrong
from tests.simulation.world import simulate
from tests.simulation_fixtures import expect_found

SEEDS, MOST = extent(16, 200), 200
"""`make simulate` runs thousands of seeds."""
RARE = (39, 57)
"""Further seeds, which kill processes in the parts that the first ones spare. If a change of the code has changed all
runs, the test searches on until it has killed in every part: record those seeds.
"""


class Books:
    """A ledger of one key. Each read begins when its method is called."""

    def __init__(self) -> None:
        self.ledger = Ledger({})

    def write(self, *, deletes: bool = False, token: int | None = None, durable: bool = True) -> Op:
        named = None if token is None else ("client", token)
        return self.ledger.begin("client", {1: deletes}, named, durable=durable)

    def put(self) -> Op:
        """Record an acknowledged write."""
        op = self.write()
        self.ledger.acked(op)
        return op

    def read(self, shown: Op | None, level: str = "latest", *, stored: bool = False, began: int | None = None) -> None:
        rows = [] if shown is None else [(1, shown.number)]
        began = self.ledger.moment() if began is None else began
        self.ledger.read("a reader", began, rows, [1], level=level, stored=stored)


def test_the_ledger_learns_the_order_of_writes_from_reads() -> None:
    books = Books()
    one, other = books.write(), books.write()
    books.read(one)
    before = books.ledger.moment()
    books.read(other)
    books.read(one, began=before)  # the read began before the other one was shown
    with raises(Wrong):
        books.read(one)


def test_an_acknowledged_write_that_a_reader_did_not_find_never_comes_back() -> None:
    books = Books()
    slow = books.write()
    newer = books.put()
    books.ledger.acked(slow)
    books.read(newer)
    with raises(Wrong):
        books.read(slow)


def test_an_unanswered_delete_excuses_one_gap() -> None:
    books = Books()
    books.put()
    books.write(deletes=True)
    books.read(None)
    books.read(books.put())
    with raises(Wrong):
        books.read(None)


def test_two_unanswered_deletes_excuse_two_gaps() -> None:
    books = Books()
    books.put()
    books.write(deletes=True)
    books.write(deletes=True)
    books.read(None)
    books.read(books.put())
    books.read(None)


def test_an_unanswered_delete_of_an_older_number_excuses_nothing_after_a_newer_one() -> None:
    books = Books()
    books.put()
    books.write(deletes=True, token=1)
    newer = books.write(token=2)
    books.ledger.acked(newer)
    books.read(newer)
    with raises(Wrong):
        books.read(None)


def test_storage_may_show_a_row_before_an_owner_does() -> None:
    books = Books()
    older, unanswered = books.put(), books.write()
    books.read(unanswered, "durable", stored=True)
    books.read(older)
    with raises(Wrong):
        books.read(older, "durable", stored=True)
    books.read(unanswered)
    with raises(Wrong):
        books.read(older)


def test_a_row_without_durability_may_be_lost_until_it_was_read_as_durable() -> None:
    books = Books()
    older, newer = books.put(), books.write(durable=False)
    books.ledger.acked(newer)
    books.read(newer)
    books.read(older)
    books.read(newer, "durable")
    with raises(Wrong):
        books.read(older)


@pytest.mark.timeout(1200)
def test_no_seed_breaks_a_promise_and_processes_are_killed_in_every_part() -> None:
    cells, failed = Cells(), list[str]()

    def spared() -> list[str]:
        return [part for part in MUST_BE_KILLED if not kills(cells, part)]

    for number, seed in enumerate([*range(1, SEEDS + 1), *RARE, *range(SEEDS + 1, MOST + 1)]):
        if number >= SEEDS + len(RARE) and not spared():
            break
        (result,) = results(seed, 1, workers=1, kind="cluster")
        cells.update(result.cells)
        failed += [result.said] if result.said else []
    assert failed == []
    assert spared() == [], table(cells)


@pytest.mark.timeout(600)
def test_one_seed_is_one_run(pool: ProcessPoolExecutor) -> None:
    there = pool.submit(simulate, 4, kind=ClusterWorld)
    assert simulate(4, kind=ClusterWorld) == simulate(4, kind=ClusterWorld) == there.result()


@pytest.mark.parametrize("fault", PLANTED_IN_CLUSTERS)
def test_a_planted_fault_is_found(fault: str) -> None:
    expect_found(fault, found_in_clusters_by, FOUND_BY)
