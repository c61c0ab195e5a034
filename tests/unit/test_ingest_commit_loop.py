"""The policy that decides when a table commits by itself, and the loop around it on a test clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from memwal.flush import CommitReport
from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.engine.table.commit_loop import CommitLoop
from memwal.ingest.engine.table.upkeep import Decision, decide
from memwal.ingest.settings.sections import CommitSettings
from memwal.ingest.threads import Periodic
from tests.conftest import PATIENCE, wait_until
from tests.messages import raises
from tests.support.clock import FakeClock

LIMITS = CommitSettings.model_construct(interval=30.0, size_max=1000)
IDLE = Backlog(0, 0, None)


@pytest.mark.parametrize(
    ("regions", "decision"),
    [
        ([], "nothing"),
        ([IDLE, IDLE], "nothing"),
        ([Backlog(0, 0, 29.9)], "nothing"),
        ([IDLE, Backlog(0, 0, 30.0)], "flush"),  # a row still in a memtable
        ([Backlog(1, 10, 30.0)], "flush"),  # in an SST
        ([Backlog(8, 10, 1.0)], "commit"),
        ([Backlog(7, 10, 1.0), Backlog(7, 10, 1.0)], "nothing"),  # the number of SSTs counts per region
        ([Backlog(1, 600, 1.0), Backlog(1, 400, 1.0)], "commit"),  # the bytes count over all regions
        ([Backlog(8, 1000, 31.0)], "flush"),  # a late commit includes the rows of the memtables
    ],
)
def test_the_oldest_row_the_ssts_of_a_region_and_all_bytes_decide(regions: list[Backlog], decision: Decision) -> None:
    assert decide(regions, LIMITS, lead=0.0) == decision


def test_it_begins_early_by_what_flush_and_commit_take() -> None:
    assert decide([Backlog(0, 0, 25.0)], LIMITS, lead=4.9) == "nothing"
    assert decide([Backlog(0, 0, 25.0)], LIMITS, lead=5.0) == "flush"


def test_slow_storage_gets_no_commit_before_half_the_interval() -> None:
    assert decide([Backlog(0, 0, 14.9)], LIMITS, lead=300.0) == "nothing"
    assert decide([Backlog(0, 0, 15.0)], LIMITS, lead=300.0) == "flush"


def test_an_interval_of_0_leaves_it_to_the_user() -> None:
    assert (
        decide([Backlog(99, 10_000, 1e6)], CommitSettings.model_construct(interval=0.0, size_max=1000), lead=0.0)
        == "nothing"
    )


class Region:
    """A region with rows put at times of a clock; flushes and commits take a given time."""

    def __init__(self, interval: float, flush_takes: float = 0.0, commit_takes: float = 0.0) -> None:
        self.clock = FakeClock()
        self.memtable: list[float] = []
        self.ssts: list[list[float]] = []
        self.done: list[str] = []
        self.expired: list[float] = []
        self.latest = 0.0
        """The longest time in seconds that a row stayed out of the base table."""
        self.fails: dict[str, BaseException] = {}
        self._takes = {"flush": flush_takes, "commit": commit_takes}
        self.leads, self.others, self.loading = True, list[Backlog](), False
        self.steps = SimpleNamespace(
            waiting=lambda: [self.waiting()],
            flush=self.flush,
            commit=self.commit,
            maintain=lambda: self.done.append("maintain"),
            expire=lambda paused: None if paused() else self.expired.append(self.clock.monotonic()),
            leads=lambda: self.leads,
            others=lambda: self.others,
            catch_up=lambda: self.done.append("catch up"),
            asked_to_wait=lambda: self.loading,
        )
        self.loop = CommitLoop(self.steps, CommitSettings.model_construct(interval=interval), self.clock)

    def waiting(self) -> Backlog:
        rows = [*self.memtable, *(row for sst in self.ssts for row in sst)]
        now = self.clock.monotonic()
        unflushed = now - min(self.memtable) if self.memtable else None
        return Backlog(len(self.ssts), 0, now - min(rows) if rows else None, unflushed)

    def put(self) -> None:
        self.memtable.append(self.clock.monotonic())

    def flush(self) -> None:
        self._do("flush")
        if self.memtable:
            self.ssts.append(self.memtable)
            self.memtable = []

    def commit(self) -> CommitReport:
        self._do("commit")
        for row in (row for sst in self.ssts for row in sst):
            self.latest = max(self.latest, self.clock.monotonic() - row)
        count, self.ssts = len(self.ssts), []
        return CommitReport(1, {}, 0, 0, 0, count, 0.0)

    def _do(self, what: str) -> None:
        self.done.append(what)
        self.clock.advance(self._takes[what])
        if what in self.fails:
            raise self.fails.pop(what)

    def live(self, seconds: float, every: float, then: Callable[[], None]) -> None:
        """Call `then` every `every` seconds and step the loop every second."""
        for second in range(int(seconds)):
            if every and second % every == 0:
                then()
            self.loop.step()
            self.clock.advance(1.0)


@pytest.mark.parametrize(("flush_takes", "commit_takes"), [(0.0, 0.0), (0.5, 2.0), (4.0, 5.0)])
def test_no_row_stays_out_longer_than_the_interval(flush_takes: float, commit_takes: float) -> None:
    region = Region(30.0, flush_takes, commit_takes)
    region.live(100, every=7, then=region.put)  # the loop learns how long flush and commit take
    region.latest = 0.0
    region.live(1000, every=7, then=region.put)
    assert 20.0 < region.latest <= 30.0 + 1e-6


def test_commits_are_as_rare_as_the_interval_allows() -> None:
    region = Region(30.0)
    region.live(3600, every=10, then=region.put)
    assert 3600 / 30 <= region.done.count("commit") <= 3600 / 30 * 1.4
    assert region.done.count("flush") == region.done.count("maintain") == region.done.count("commit")


def test_an_idle_table_is_left_alone() -> None:
    region = Region(30.0)
    region.put()
    region.live(100, every=0, then=region.put)
    done = len(region.done)
    region.live(1000, every=0, then=region.put)
    assert region.done[:done] == region.done == ["flush", "commit", "maintain"]


def test_expired_rows_are_looked_for_by_who_leads_also_where_nothing_waits() -> None:
    region = Region(30.0)
    region.live(100, every=0, then=region.put)
    looked = len(region.expired)
    assert looked >= 90
    region.leads = False
    region.live(100, every=0, then=region.put)
    assert len(region.expired) == looked


def test_who_does_not_lead_publishes_in_time_and_commits_nothing() -> None:
    region = Region(30.0)
    region.leads = False
    region.put()
    region.live(15, every=0, then=region.put)
    assert set(region.done) == {"catch up"}
    region.live(10, every=0, then=region.put)
    assert region.done.count("flush") == 1
    assert "commit" not in region.done
    assert len(region.ssts) == 1


def test_who_leads_commits_what_waits_with_others() -> None:
    region = Region(30.0)
    region.others = [Backlog(1, 0, 10.0)]
    assert region.loop.step() == "nothing"
    region.others = [Backlog(1, 0, 29.5)]
    assert region.loop.step() == "flush"
    region.others = [Backlog(8, 0, 1.0)]
    assert region.loop.step() == "commit"
    assert region.done.count("commit") == 2


def test_many_ssts_are_committed_at_once_and_the_memtable_is_left_to_fill() -> None:
    region = Region(30.0)
    for _ in range(8):
        region.put()
        region.flush()
    region.put()
    region.done.clear()
    assert region.loop.step() == "commit"
    assert (region.done, len(region.memtable)) == (["commit", "maintain"], 1)


def test_a_region_that_cannot_be_flushed_keeps_nothing_else_from_being_committed() -> None:
    region = Region(30.0)
    region.put()
    region.flush()
    region.put()
    region.clock.advance(30.0)
    region.fails["flush"] = OSError("no answer")
    with raises(OSError):
        region.loop.step()
    assert (region.ssts, len(region.memtable)) == ([], 1)
    region.clock.advance(30.0)
    region.loop.step()
    assert region.memtable == []


def test_on_demand_it_commits_what_is_published_and_maintains() -> None:
    region = Region(0.0)
    region.put()
    region.flush()
    region.clock.advance(1e6)
    assert region.loop.step() == "nothing"
    assert region.loop.commit().ssts == 1
    assert region.done == ["flush", "commit", "maintain"]


class PanicException(BaseException):
    """The exception that pylance raises when its Rust code panics, for example on an empty file."""


def test_a_panic_of_lance_does_not_end_the_loop(wait_until: Callable[..., object]) -> None:
    region = Region(interval=0.05)
    region.ssts.append([region.clock.monotonic() - 60.0])
    region.fails["commit"] = PanicException("called `Option::unwrap()` on a `None` value")
    region.loop.start()
    wait_until(lambda: region.done.count("commit") == 2)
    region.loop.stop()
    assert region.ssts == []


def test_a_panic_of_lance_does_not_end_what_is_done_at_intervals(wait_until: Callable[..., object]) -> None:
    times: list[int] = []

    def panics() -> None:
        times.append(1)
        raise PanicException

    work = Periodic("collection", panics, 0.01)
    work.start()
    wait_until(lambda: len(times) >= 2)
    work.stop()


def test_commits_wait_for_a_load_but_not_for_ever() -> None:
    region = Region(30.0)
    region.loading = True
    region.put()
    for _ in range(299):
        region.clock.advance(1.0)
        assert region.loop.step() == "nothing"
    region.clock.advance(60.0)
    assert region.loop.step() == "flush"
    assert not region.memtable
    assert region.done == ["flush", "commit", "maintain"]
    region.put()
    region.clock.advance(60.0)
    assert region.loop.step() == "nothing"
    region.loop.commit()  # on demand a commit is made at once
    assert region.done[3:] == ["commit", "maintain"]
    region.loading = False
    assert region.loop.step() == "flush"


def test_the_wait_for_a_load_doubles_while_it_asks() -> None:
    region = Region(30.0)
    region.loading = True
    waits = []
    for _ in range(3):
        region.put()
        began = region.clock.monotonic()
        while region.loop.step() == "nothing":
            region.clock.advance(10.0)
        waits.append(region.clock.monotonic() - began)
    assert waits == pytest.approx([300.0, 600.0, 1200.0], abs=31.0)
    region.loading = False
    region.put()
    region.clock.advance(30.0)
    assert region.loop.step() == "flush"
    region.loading = True
    region.put()
    region.clock.advance(30.0)
    assert region.loop.step() == "nothing"
    region.clock.advance(301.0)
    assert region.loop.step() == "flush", "the next load begins with the short wait"


def test_while_commits_are_paused_nothing_is_due_and_a_commit_on_demand_commits() -> None:
    region, paused = Region(10.0), True
    region.loop = CommitLoop(region.steps, CommitSettings.model_construct(interval=10.0), region.clock, lambda: paused)
    region.live(100, every=5, then=region.put)
    assert (region.done, region.expired) == ([], [])
    region.leads = False
    region.live(100, every=5, then=region.put)
    assert set(region.done) == {"catch up"}, "what others commit is learned all the same"
    region.leads, region.ssts, region.memtable = True, [region.memtable], []
    assert region.loop.commit().ssts == 1
    paused = False
    region.put()
    region.latest = 0.0
    region.live(30, every=0, then=region.put)
    assert 0 < region.latest <= 10.0


def test_callers_who_wait_for_a_commit_share_the_next_one() -> None:
    """Otherwise a client that abandons attempts because commits take long would wait behind each of its attempts."""
    region, entered, go_on, asked = Region(60, commit_takes=1.0), threading.Event(), threading.Event(), set[int]()
    commit, monotonic = region.steps.commit, region.clock.monotonic

    def slow_commit() -> CommitReport:
        entered.set()
        assert go_on.wait(PATIENCE)
        report: CommitReport = commit()
        return report

    def noted_monotonic() -> float:
        asked.add(threading.get_ident())
        return monotonic()

    region.steps.commit, region.clock.monotonic = slow_commit, noted_monotonic  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(region.loop.commit)
        assert entered.wait(PATIENCE)
        others = [pool.submit(region.loop.commit) for _ in range(3)]  # the first commit may not include their rows
        wait_until(lambda: len(asked) == 4)
        go_on.set()
        reports = [other.result(PATIENCE) for other in others]
    assert region.done.count("commit") == 2
    assert len({id(report) for report in reports}) == 1
    assert first.result() is not reports[0]


def test_tables_of_a_process_commit_in_turn_and_a_table_that_hangs_holds_up_no_other() -> None:
    turn, goes_on = threading.Semaphore(1), threading.Event()
    first, second = Region(30.0), Region(30.0)
    first.steps.commit = lambda: goes_on.wait(PATIENCE)
    loops = [CommitLoop(each.steps, LIMITS, each.clock, turn=turn) for each in (first, second)]  # type: ignore[arg-type]
    for region in (first, second):
        region.memtable = [0.0]
        region.clock.advance(30.0)
    with ThreadPoolExecutor(1) as threads:
        hangs = threads.submit(loops[0].step)
        wait_until(lambda: not turn.acquire(blocking=False) or turn.release())
        assert loops[1].step() == "nothing"
        second.clock.advance(14.0)
        assert loops[1].step() == "nothing", "it waits for its turn"
        rows, second.memtable = second.memtable, []
        assert loops[1].step() == "nothing"
        second.memtable = rows
        assert loops[1].step() == "nothing", "it began to wait anew, as nothing was due in between"
        second.clock.advance(14.0)
        assert loops[1].step() == "nothing"
        second.clock.advance(1.0)
        assert loops[1].step() == "flush"
        assert second.done == ["flush", "commit", "maintain"]
        goes_on.set()
        assert hangs.result(PATIENCE) == "flush"
    assert turn.acquire(blocking=False)
