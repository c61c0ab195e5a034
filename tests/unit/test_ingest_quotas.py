"""The limits of one table in a process: `table.memory_max` and `table.put_rate_max`."""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

import memwal
from memwal.ingest.caller import Caller
from memwal.ingest.cli.status import render
from memwal.ingest.engine.region.counters import Meters
from memwal.ingest.engine.region.quotas import BURST, PutRate
from memwal.ingest.service.client.retry import Attempts
from memwal.ingest.service.client.scatter import merged_status
from memwal.ingest.service.daemon.pages import TableCollector
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.service.ops.metrics import Scrape
from memwal.ingest.settings.load import load
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from tests.conftest import wait_until
from tests.messages import raises
from tests.opened import open_table
from tests.routed import placed, shuffled
from tests.support.clock import FakeClock, SeededIds
from tests.support.flushes import flushes_held
from tests.ways import entered

RATE = 1_000
"""Bytes per second."""
FOREVER = 1e9


def rate_of(clock: FakeClock) -> PutRate:
    return PutRate(RATE, clock, Meters(), "t.lance")


# ---- the token bucket ----------------------------------------------------------------------------------------------


def test_a_second_of_the_rate_is_let_in_at_once_and_the_rest_at_the_rate() -> None:
    clock = FakeClock()
    rate = rate_of(clock)
    waited = [round(rate.wait(500, FOREVER), 9) for _ in range(6)]
    assert waited == [0.0, 0.0, 0.0, 0.5, 0.5, 0.5]
    clock.advance(3_600)
    assert [round(rate.wait(500, FOREVER), 9) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5], "an hour saves one second"


@pytest.mark.parametrize("seed", range(20))
def test_no_window_of_time_has_more_bytes_than_the_rate_allows(seed: int) -> None:
    """Invariant (1), for puts from a byte to three seconds' worth, refused ones included."""
    chance, clock = random.Random(seed), FakeClock()
    rate, begun = rate_of(clock), list[tuple[float, int]]()
    refused = 0
    for _ in range(300):
        clock.advance(chance.choice((0.0, 0.0, chance.random(), 5 * chance.random() ** 4)))
        size = chance.choice((1, 10, 200, 1_000, 3_000))
        try:
            rate.wait(size, chance.choice((0.0, 0.5, 2.0)))
            begun.append((clock.monotonic(), size))
        except memwal.Unavailable:
            refused += 1
    assert refused, "the seed never exceeds the rate"
    for first in range(len(begun)):
        total = 0
        for at, size in begun[first:]:
            assert total <= RATE * (at - begun[first][0] + BURST) + 1e-6
            total += size


def test_a_rate_that_is_asked_for_is_reached() -> None:
    clock = FakeClock()
    rate = rate_of(clock)
    for _ in range(1_000):
        rate.wait(100, FOREVER)
    assert clock.monotonic() == pytest.approx(1_000 * 100 / RATE - BURST, abs=0.11)


def test_a_put_larger_than_a_second_is_let_in_and_paid_for_afterwards() -> None:
    rate = rate_of(FakeClock())
    assert rate.wait(10 * RATE, 0.0) == 0.0
    assert rate.wait(1, FOREVER) == pytest.approx(10 - BURST)


def test_a_put_that_cannot_begin_in_time_is_refused_at_once_and_delays_no_other() -> None:
    clock = FakeClock()
    rate = rate_of(clock)
    rate.wait(5 * RATE, 0.0)
    for _ in range(3):
        with raises(memwal.Unavailable) as refused:
            rate.wait(7 * RATE, 3.9)
        assert refused.value.details == {"reason": "busy", "limit": "table.put_rate_max", "retry_after": 4.0}
    assert clock.slept == []
    clock.advance(4.0)
    assert rate.wait(1, 0.0) == 0.0, "after the wait that the refusal names"


def test_writes_without_bytes_never_wait() -> None:
    rate = rate_of(FakeClock())
    rate.wait(50 * RATE, 0.0)
    assert rate.wait(0, 0.0) == 0.0


class HeldClock(FakeClock):
    """A clock on which a sleep blocks its thread until the test has advanced far enough."""

    def __init__(self) -> None:
        super().__init__()
        self._moved = threading.Condition()
        self._until: list[float] = []

    def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        with self._moved:
            self._until.append(until)
            self._moved.wait_for(lambda: self.monotonic() >= until)
            self._until.remove(until)

    def advance(self, seconds: float) -> None:
        with self._moved:
            super().advance(seconds)
            self._moved.notify_all()

    @property
    def sleepers(self) -> int:
        """The number of threads that sleep and are not due; -1 while a thread that is due has not gone on."""
        with self._moved:
            return len(self._until) if all(until > self.monotonic() for until in self._until) else -1


def test_waiting_puts_begin_in_the_order_of_their_arrival_whatever_their_size() -> None:
    clock, begun = HeldClock(), list[int]()
    rate = rate_of(clock)
    rate.wait(2 * RATE, 0.0)
    sizes = [2_000, 200, 1_500, 200, 1_000, 700]

    def put(number: int) -> None:
        rate.wait(sizes[number], FOREVER)
        begun.append(number)

    putting = [threading.Thread(target=put, args=(number,), daemon=True) for number in range(len(sizes))]
    for thread in putting:
        before = clock.sleepers
        thread.start()
        wait_until(lambda before=before: bool(clock.sleepers > before), every=0.001)
    while len(begun) < len(sizes):
        clock.advance(0.1)
        wait_until(lambda: clock.sleepers + len(begun) == len(sizes), every=0.001)
    assert begun == sorted(begun)


def test_a_put_whose_caller_has_left_stops_waiting() -> None:
    clock = FakeClock()
    rate, caller = rate_of(clock), Caller(lambda: clock.monotonic() > 2.0)
    rate.wait(60 * RATE, 0.0)
    with pytest.raises(memwal.Unavailable, match="given up"):
        caller.run(lambda: rate.wait(1, FOREVER))
    assert 2.0 < clock.monotonic() < 3.0


# ---- the rate of a table -------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(time.time())


@pytest.fixture
def limited(small_config: Callable[..., Path], clock: FakeClock) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a table with settings of [table] and without indexes; with a rate, on the test's
    clock."""
    with ExitStack() as ends:

        def opened(*, regions: int = 1, memtable: Any = None, wal: Any = None, **table: Any) -> Any:
            more = {"memtable": memtable or {}, "wal": wal or {}, "regions": {"count": regions}}
            config = small_config(table={"indexes": {}, **table}, **more)
            return ends.enter_context(
                open_table(load(config, {}), {}, clock=clock if "put_rate_max" in table else None)
            )

        yield opened


def test_a_table_lets_puts_in_at_its_rate_and_refuses_those_that_would_wait_too_long(
    limited: Callable[..., Any], made: Any, clock: FakeClock
) -> None:
    rows = made.table(range(100))
    table = limited(put_rate_max=f"{rows.nbytes}B")
    began = clock.monotonic()
    for number in range(4):
        clock.advance(0.01)  # a put of slightly more bytes than the first one still fits into the burst
        table.put(made.table(range(number * 100, number * 100 + 100)))
    assert clock.monotonic() - began == pytest.approx(2.0, abs=0.5)
    for timeout, token in ((0.2, None), (0.2, "loader:1"), (0.01, None)):
        with pytest.raises(memwal.Unavailable) as refused:
            table.put(made.table(range(900, 1_000)), token=token, timeout=timeout)
        assert refused.value.details["limit"] == "table.put_rate_max"
        assert refused.value.details["retry_after"] == pytest.approx(1.0, abs=0.5)
    assert table.count() == 400, "rows of a refused put are not applied"
    assert table.put(made.table(range(900, 1_000)), token="loader:1", timeout=5.0).applied
    assert table.status()["refused_puts"] == {"table.put_rate_max": 3}
    meters = table.regions.context.meters
    assert meters.throttled_puts == 3
    assert meters.throttled_seconds == pytest.approx(3.0, abs=0.5)


def test_which_calls_count(limited: Callable[..., Any], made: Any, clock: FakeClock) -> None:
    """Deletes by key count with their keys; reads, filters, empty writes and flushes do not."""
    table = limited(put_rate_max="10KiB", wal={"put_timeout": "1s"})
    table.put(made.table(range(1_000)))
    busy = clock.monotonic()
    assert table.get([1]).num_rows == 1
    assert table.delete(filter="id < 10").rows == 10
    table.update("id = 20", {"name": "new"})
    table.put([])
    table.flush()
    table.commit()
    assert clock.monotonic() - busy < 1.0
    with pytest.raises(memwal.Unavailable):
        table.delete(range(10, 20), timeout=0.5)
    with pytest.raises(memwal.Unavailable):
        table.put_region(table.base.regions[0], made.table([1]), memwal.Token("query", 1))


def test_a_spark_task_waits_for_the_rate_beyond_its_own_timeout(made: Any, small_config: Any, uri: str) -> None:
    """The stream's timeout is shorter than the wait; only time without an answer counts towards it."""
    rows = made.table(range(200))
    config = small_config(
        regions={"count": 1}, table={"put_rate_max": f"{rows.nbytes // 2}B"}, wal={"put_timeout": "50ms"}
    )
    with ExitStack() as ends:
        table = ends.enter_context(open_table(load(config, {}), {}))
        client = entered("flight", table, ends)
        client.put(rows)
        sent = shuffled(RouteTask(uri, ())(iter([placed(made.table(range(200, 250)))])))
        receipts = list(SendTask(client.endpoint, table.base.regions, "query", 0, 0.5)(iter([sent])))
        assert [row["rows"] for batch in receipts for row in batch.to_pylist()] == [50]
        assert table.status()["refused_puts"]["table.put_rate_max"] >= 1
        assert table.count() == 250


def test_only_streams_wait_for_the_rate_beyond_their_timeout() -> None:
    busy = memwal.Unavailable("later", {"reason": "busy", "limit": "table.put_rate_max", "retry_after": 400.0})
    clock = FakeClock()
    stream = Attempts(clock, SeededIds(), 300.0, repeatable=True, restarts=300.0)
    for _ in range(3):
        assert stream.after(busy, alone=True) is False
    assert clock.monotonic() == 1_200.0
    assert stream.left == 300.0
    with pytest.raises(memwal.Unavailable):
        Attempts(clock, SeededIds(), 300.0, repeatable=True).after(busy, alone=True)


# ---- the memory of a table -----------------------------------------------------------------------------------------


def put_wide(table: Any, made: Any, first: int, number: int = 100) -> None:
    """Put rows of 10 KB each."""
    rows = made.table(range(first, first + number))
    table.put(rows.set_column(3, "body", pa.array(["x" * 10_000] * number)))


def fill(table: Any, made: Any) -> None:
    """Put until a put is refused."""
    for first in range(0, 10_000, 100):
        put_wide(table, made, first)


def test_a_put_waits_for_memory_and_is_refused_by_the_name_of_the_setting(
    limited: Callable[..., Any], made: Any
) -> None:
    table = limited(memory_max="4MiB", wal={"put_timeout": "200ms"}, regions=2)
    with flushes_held():
        with pytest.raises(memwal.MemWalError) as refused:  # one region may have taken its rows
            fill(table, made)
        told, before = table.status()["refused_puts"], table.count()
        meters = table.regions.context.meters.regions().values()
        assert "table.memory_max = 4MiB; raise it" in str(refused.value)
        assert told == {"table.memory_max": sum(meter.refused_puts for meter in meters)}
        assert table.memory.bytes >= 4 << 20
        assert before < 1_000
    put_wide(table, made, 20_000)
    assert table.count() == before + 100
    assert table.memory.bytes < 8 << 20


@pytest.mark.parametrize("memory_max", ["1B", "300KiB"])
def test_puts_go_on_however_low_the_limit_is(limited: Callable[..., Any], made: Any, memory_max: str) -> None:
    table = limited(memory_max=memory_max, regions=3, memtable={"age_max": "1h"})
    for first in range(0, 400, 40):
        put_wide(table, made, first, 40)
    assert table.count() == 400
    assert table.status()["refused_puts"] == {}
    assert sum(len(region["ssts"]) for region in table.status()["regions"]) >= 3
    table.flush()
    assert table.memory.has_room()
    assert table.memory.bytes < table.memory.most, "cached SSTs were dropped"


def test_memtables_are_flushed_early_before_puts_wait(limited: Callable[..., Any], made: Any) -> None:
    """At half of the limit, though each of them is far below memtable.size_max, and puts do not stop."""
    table = limited(memory_max="32MiB", regions=2, memtable={"age_max": "1h"})
    meters = list(table.regions.context.meters.regions().values())
    for first in range(0, 2_000, 100):
        put_wide(table, made, first)
    wait_until(lambda: any(meter.flush_rows for meter in meters), timeout=30)
    assert [meter.waited_puts for meter in meters] == [0, 0]


def test_cached_ssts_give_way_to_memtables(limited: Callable[..., Any], made: Any) -> None:
    table = limited(memory_max="6MiB", regions=1)
    held = []
    for first in range(0, 3_000, 100):
        put_wide(table, made, first)
        held.append(table.memory.bytes)
    assert max(held) < 12 << 20, "one put above the limit; a memtable counts twice while it is published"
    assert table.count() == 3_000


def test_the_limits_are_metrics(limited: Callable[..., Any], made: Any) -> None:
    table = limited(put_rate_max="10KiB", memory_max="1GiB")
    table.put(made.table(range(1_000)))
    for _ in range(2):
        with pytest.raises(memwal.Unavailable):
            table.put(made.table([1]), timeout=0.01)
    scrape = Scrape()
    scrape.add(TableCollector(OneTable(table)))
    text = scrape.text().decode()
    assert 'memwal_refused_puts_total{reason="table.put_rate_max"} 2.0' in text
    assert f"memwal_table_memory_bytes {float(table.memory.bytes)!r}" in text
    assert "memwal_throttled_puts_total 0.0" in text


def test_the_status_adds_up_the_refusals_of_all_daemons(limited: Callable[..., Any], made: Any) -> None:
    status = limited().status()
    refused: tuple[dict[str, int], ...] = (
        {"table.memory_max": 2},
        {},
        {"table.memory_max": 1, "table.put_rate_max": 4_000},
    )
    merged = merged_status([status | {"refused_puts": each} for each in refused])
    assert merged["refused_puts"] == {"table.memory_max": 3, "table.put_rate_max": 4_000}
    printed = io.StringIO()
    Console(file=printed, width=200).print(render(merged))
    assert "3 puts refused by table.memory_max" in printed.getvalue()
    assert "4,000 puts refused by table.put_rate_max" in printed.getvalue()
    older = {name: value for name, value in status.items() if name != "refused_puts"}
    assert "refused_puts" not in merged_status([older]), "a daemon of an older version"


# ---- isolation -----------------------------------------------------------------------------------------------------


def test_a_table_at_its_rate_does_not_slow_another(
    tmp_path: Path, made: Any, record_property: Callable[[str, object], None]
) -> None:
    """Puts into one table take turns with and without eight callers that put into another, which is at its limit."""
    with ExitStack() as ends:
        schema = {"schema": made.schema, "key": "id", "regions": 1}
        calm = ends.enter_context(memwal.open(str(tmp_path / "calm"), **schema))
        settings = {"table": {"put_rate_max": "64KiB"}}
        full = ends.enter_context(memwal.open(str(tmp_path / "full"), settings=settings, **schema))
        rows, stop, running = made.table(range(10)), threading.Event(), threading.Event()

        def load() -> None:
            while not stop.is_set():
                running.wait(60)
                full.put(made.table(range(50)), durable=False, timeout=None)

        callers = [threading.Thread(target=load) for _ in range(8)]

        def end() -> None:
            stop.set()
            running.set()
            for caller in callers:
                caller.join(60)

        ends.callback(end)
        for caller in callers:
            caller.start()
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(20):
            loaded = turn % 2 == 1
            running.set() if loaded else running.clear()
            for _ in range(15):
                began = time.perf_counter()
                calm.put(rows)
                times[loaded].append(time.perf_counter() - began)
        alone, beside = median(times[False]), median(times[True])
        record_property("put_ms_alone", round(alone * 1e3, 3))
        record_property("put_ms_beside_a_table_at_its_limit", round(beside * 1e3, 3))
        assert full.regions.context.meters.throttled_puts > 0
        assert beside < 1.5 * alone + 0.002
