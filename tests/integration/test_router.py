"""One client of two daemons: its answers are those of one table, wherever the regions are and while they move.

The daemons are two tables of this process, each with half of the regions, behind real Flight services.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.cli import status as cli_status
from memwal.ingest.cli.command import Call
from memwal.ingest.cli.open import open_for_reading
from memwal.ingest.engine.api import filter_writes
from memwal.ingest.engine.region.writer import RegionWriter
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.engine.table.writes import TableWrites
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.daemon.peers import Place
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.settings.load import load
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.source.columns import BUCKET
from tests import append_rows
from tests.conftest import SmallConfig, WaitUntil
from tests.messages import raises
from tests.opened import open_table
from tests.routed import placed, shuffled

LEVELS = ("committed", "flushed", "durable", "latest")
REGIONS = 4


class Pair:
    """Two owners of one table, and a method that moves its regions between them."""

    def __init__(self, config: Path, ends: ExitStack) -> None:
        settings = load(config, {})
        self.tables: list[Table] = [ends.enter_context(open_table(settings, {}, claim=False)) for _ in range(2)]
        self.places = [Place() for _ in self.tables]
        self.services = [
            FlightService(OneTable(table), "grpc://127.0.0.1:0", place)
            for table, place in zip(self.tables, self.places, strict=True)
        ]
        self.endpoints = [f"grpc://127.0.0.1:{service.port}" for service in self.services]
        for place, endpoint in zip(self.places, self.endpoints, strict=True):
            place.endpoint, place.endpoints = endpoint, self.endpoints
        for service in self.services:
            ends.callback(service.shutdown)
        self.regions = self.tables[0].base.regions
        for bucket, region in enumerate(self.regions):
            self.tables[bucket % 2].acquire(region)

    def owner(self, bucket: int) -> int:
        """Return the index of the region's owner."""
        return next(at for at, table in enumerate(self.tables) if str(self.regions[bucket]) in table.regions.epochs)

    def move(self, bucket: int) -> None:
        """Hand a region over to the other owner."""
        owner = self.owner(bucket)
        self.tables[owner].release(self.regions[bucket])
        self.tables[1 - owner].acquire(self.regions[bucket])


@pytest.fixture
def pair(small_config: SmallConfig, ends: ExitStack) -> Callable[..., tuple[Pair, RemoteTable]]:
    """Make two owners of the small table, and a client that knows only the endpoint of the first one."""

    def make(**table: str) -> tuple[Pair, RemoteTable]:
        both = Pair(small_config(table=table, regions={"count": REGIONS}), ends)
        return both, ends.enter_context(memwal.connect(both.endpoints[0]))

    return make


@pytest.fixture
def append_only(tmp_path: Path, ends: ExitStack) -> tuple[Pair, RemoteTable]:
    """Make the same for a table without a key."""
    uri, indexed = str(tmp_path / "rows.lance"), {"indexes": append_rows.INDEXES}
    config = append_rows.configured(tmp_path, uri, regions={"count": REGIONS}, table=indexed)
    both = Pair(config, ends)
    return both, ends.enter_context(memwal.connect(both.endpoints[0]))


def ordered(rows: pa.Table) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=str)


def same_answers(client: Any, oracle: Any, made: Any, level: str) -> None:
    """Compare every read, with and without filter, columns and limit."""
    assert client.count(level=level) == oracle.count(level=level)
    assert client.count("price < 300", level=level) == oracle.count("price < 300", level=level)
    assert client.facets("name", "price < 300", level=level).equals(oracle.facets("name", "price < 300", level=level))
    assert ordered(client.scan(level=level).read_all()) == ordered(oracle.scan(level=level).read_all())
    some = client.scan(["name", "id"], "price >= 200", 7, level=level).read_all()
    assert some.column_names == ["name", "id"]
    assert some.num_rows == min(7, oracle.count("price >= 200", level=level))
    keys = [3, 140, 3, 999, *range(60, 20, -3), 1]
    assert client.get(keys, level=level).equals(oracle.get(keys, level=level))
    assert client.get(keys, ["vector", "name"], level=level).equals(oracle.get(keys, ["vector", "name"], level=level))
    assert client.get([], level=level).num_rows == 0
    for filter in (None, "price > 400"):
        query = made.row(7_000)["vector"]
        near, exact = (t.search("vector", query, 9, filter, ["id"], level=level) for t in (client, oracle))
        assert near.equals(exact)
        found, wanted = (t.match("body", "harbor copper", 500, filter, ["id"], level=level) for t in (client, oracle))
        assert found.schema == wanted.schema
        assert ordered(found) == ordered(wanted)
        best = client.match("body", "harbor copper", 6, filter, ["id"], level=level).column("_score").to_pylist()
        assert best == wanted.column("_score").to_pylist()[:6]


@pytest.mark.parametrize("upsert", ["replace", "merge", "insert"])
def test_two_daemons_answer_as_one_table_would(
    upsert: str, pair: Callable[..., Any], made: Any, tmp_path: Path, small_config: SmallConfig
) -> None:
    _, client = pair(upsert=upsert)
    alone = small_config(
        "alone.toml", table={"uri": str(tmp_path / "oracle.lance"), "upsert": upsert}, regions={"count": REGIONS}
    )
    with open_table(load(alone, {}), {}) as oracle:
        steps: Sequence[Callable[[Any], Any]] = (
            lambda table: table.put(made.table(range(150))),
            lambda table: table.flush(),
            lambda table: table.commit(),
            lambda table: table.put(made.table([5, *range(40, 70)], 1), token="loader:1"),
            lambda table: table.delete([7, 41, 12_345]),
            lambda table: table.flush(),
            lambda table: table.put(made.rows([*range(60, 80), 150, 7], 2), durable=False),
            lambda table: table.put(pa.table({"id": [3, 61], "price": [1, 2]})) if upsert == "merge" else None,
            lambda table: table.put(made.table([5], 3), token="loader:1"),
            lambda table: table.delete([0, 64]),
            lambda table: table.delete(filter="price < 100 OR id = 60", token="cleaner:1"),
            lambda table: table.delete(filter="price < 200", token="cleaner:1"),
            lambda table: table.delete(filter="id BETWEEN 20 AND 25"),
            lambda table: table.delete(filter="price < 0"),
        )
        for step in steps:
            ours, theirs = step(client), step(oracle)
            if isinstance(theirs, type(oracle.put([]))):
                assert (ours.rows, ours.applied, ours.skipped) == (theirs.rows, theirs.applied, theirs.skipped)
                assert set(ours.positions) == set(theirs.positions)
        for level in LEVELS:
            same_answers(client, oracle, made, level)
        report = client.commit()
        assert report.ssts == oracle.commit().ssts
        status, theirs = client.status(), oracle.status()
        assert [region["bucket"] for region in status["regions"]] == list(range(REGIONS))
        assert (status["rows"], status["base_version"]) == (theirs["rows"], status["base_version"])


@pytest.mark.parametrize("sole", [False, True])
def test_a_get_proves_the_regions_of_its_keys_alone(
    sole: bool, pair: Callable[..., Any], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, client = pair()
    for bucket in (1, 3) if sole else ():
        both.move(bucket)
    rows = made.table(range(40))
    client.put(rows)
    proven, unproven = list[Any](), RegionWriter.unproven

    def noted(writer: RegionWriter, **how: bool) -> Any:
        proven.append(writer.region)
        return unproven(writer, **how)

    monkeypatch.setattr(RegionWriter, "unproven", noted)
    buckets = both.tables[0].base.route(rows)
    for keys in ([0], [17], [3, 5, 8, 13]):
        proven.clear()
        assert client.get(keys).column("id").to_pylist() == keys
        assert sorted(proven) == sorted({both.regions[buckets[key]] for key in keys})
    assert (client.router.sole is not None) == sole


def test_rows_without_a_key_are_each_there_once(append_only: tuple[Pair, RemoteTable]) -> None:
    _, client = append_only
    numbers = [*range(60), *range(30), None, None]
    assert client.put(append_rows.rows(numbers), token="loader:1").rows == len(numbers)
    assert not client.put(append_rows.rows(numbers), token="loader:1").applied
    client.flush()
    client.commit()
    client.put(append_rows.rows(range(50, 80)))
    assert append_rows.counted(client) == Counter([*numbers, *range(50, 80)])
    assert client.search("vector", [5.0] * append_rows.WIDTH, 2, columns=["n"]).column("n").to_pylist() == [5, 5]
    with raises(memwal.Invalid):
        client.delete([1])


@pytest.mark.parametrize(
    "bad",
    [lambda row: row | {"id": None}, lambda row: row | {"vector": [1.0] * 3}],
)
def test_no_daemon_writes_its_part_where_a_row_of_another_part_is_refused(
    bad: Callable[[dict[str, Any]], dict[str, Any]], pair: Callable[..., Any], made: Any
) -> None:
    _, client = pair()
    rows = made.rows(range(40))
    rows[17] = bad(rows[17])
    with raises(memwal.Invalid):
        client.put(rows)
    assert client.count() == 0


def test_equal_keys_of_one_put_are_settled_before_it_is_split(pair: Callable[..., Any], made: Any) -> None:
    _, client = pair(on_duplicate="fail")
    with raises(memwal.Invalid):
        client.put(made.rows([*range(40), 3]))
    assert client.count() == 0


@pytest.fixture
def moving(pair: Callable[..., Any], append_only: tuple[Pair, RemoteTable]) -> Any:
    return {"keyed": pair, "append-only": lambda: append_only}


class Busy:
    """Threads that each repeat a step until `end`."""

    def __init__(self, done: Counter[str], steps: Mapping[str, Callable[[int], None]]) -> None:
        """`done`: counts the steps by name."""
        self._done, self.problems, self._stop = done, list[BaseException](), threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=each) for each in steps.items()]
        self._names = tuple(steps)
        for thread in self._threads:
            thread.start()

    def all_did(self, least: int) -> bool:
        """Return whether each step was done at least `least` times, or one failed."""
        return bool(self.problems) or all(self._done[name] >= least for name in self._names)

    def end(self) -> None:
        """Stop the threads. Raises: AssertionError if a thread failed."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert self.problems == []

    def _repeat(self, name: str, step: Callable[[int], None]) -> None:
        try:
            while not self._stop.is_set():
                step(self._done[name])
                self._done[name] += 1
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            self.problems.append(error)


@pytest.mark.parametrize("kind", ["keyed", "append-only"])
def test_regions_that_move_are_not_noticed(kind: str, moving: Any, made: Any, wait_until: WaitUntil) -> None:
    """Several threads put with tokens, stream and read, while every region moves repeatedly."""
    both, client = moving[kind]()
    rows_of = made.table if kind == "keyed" else append_rows.rows
    number = rows_of([1]).column_names[0]

    def put(at: int) -> None:
        client.put(rows_of(range(at * 10, at * 10 + 10)), token=("puts", at), durable=at % 3 > 0)

    def stream(at: int) -> None:
        rows = rows_of(range(1_000_000 + at * 10, 1_000_000 + at * 10 + 10))
        buckets = both.tables[0].base.route(rows)
        for bucket in range(REGIONS):
            part = rows.filter(pa.array(buckets == bucket))
            opened = client.open_stream(both.regions[bucket], memwal.Token("spark", at))
            for batch in part.to_batches(max_chunksize=2):
                opened.write(batch)
            assert opened.finish().applied

    def read(_: int) -> None:
        before = done["put"] * 10
        assert client.count(f"{number} < 1000000") >= before

    done = Counter[str]()
    busy = Busy(done, {"put": put, "stream": stream, "read": read})
    for round in range(8):
        wait_until(lambda least=round * 2: busy.all_did(least))
        both.move(round % REGIONS)
    wait_until(lambda: busy.all_did(18))
    busy.end()
    expected = {*range(done["put"] * 10), *range(1_000_000, 1_000_000 + done["stream"] * 10)}
    found = Counter(client.scan([number]).read_all().column(0).to_pylist())
    assert found == Counter(dict.fromkeys(expected, 1))


def test_a_put_without_a_token_goes_after_its_region(pair: Callable[..., Any], made: Any) -> None:
    """A daemon that rejects a put wrote nothing, so a retry at the next daemon cannot double a row."""
    both, client = pair()
    for bucket in range(REGIONS):
        both.move(bucket)
        assert client.put(made.rows(range(bucket * 30, bucket * 30 + 30))).rows == 30
        assert client.delete([bucket * 30]).rows == 1
    assert client.count() == REGIONS * 29


def test_a_delete_by_filter_goes_after_its_regions(
    pair: Callable[..., Any], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions change their owners before every piece, and the last ones when the token is recorded."""
    both, client = pair()
    monkeypatch.setattr(filter_writes, "PIECE", 16)
    client.put(made.rows(range(100)))
    piece, record, moved = TableWrites.piece, TableWrites.record, list[str]()

    def moving(step: Callable[..., Any], name: str) -> Callable[..., Any]:
        def after_a_move(self: TableWrites, *given: Any, **how: Any) -> Any:
            if moved.count(name) < (5 if name == "piece" else 1):
                moved.append(name)
                for bucket in range(REGIONS):
                    both.move(bucket)
            return step(self, *given, **how)

        return after_a_move

    monkeypatch.setattr(TableWrites, "piece", moving(piece, "piece"))
    monkeypatch.setattr(TableWrites, "record", moving(record, "record"))
    receipt = client.delete(filter="id >= 10", token="cleaner:1")
    # If a piece's answer is lost with its owner, the piece counts as skipped when it is sent again.
    assert (receipt.rows + receipt.skipped, set(receipt.positions)) == (90, {str(region) for region in both.regions})
    assert moved.count("record") == 1
    assert sorted(client.scan(["id"]).read_all()["id"].to_pylist()) == list(range(10))
    client.put(made.rows(range(10, 20)))
    assert client.delete(filter="id >= 10", token="cleaner:1").applied is False
    assert client.count() == 20


@pytest.mark.parametrize(("when", "counted"), [("before", 90), ("after", 51)])
def test_a_delete_by_filter_whose_daemon_is_lost_goes_on_by_its_token(
    when: str, counted: int, pair: Callable[..., Any], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`after`: the daemon has logged its piece and never answers; the retry finds these rows deleted."""
    both, client = pair()
    client.put(made.rows(range(100)))
    piece, lost = TableWrites.piece, list[int]()

    def losing(self: TableWrites, *given: Any, **how: Any) -> Any:
        first = self is both.tables[0].writes and not lost
        done = piece(self, *given, **how) if when == "after" or not first else None
        if first:
            lost.append(0 if done is None else done.regions and sum(each.applied for each in done.regions.values()))
            for bucket in (0, 2):
                both.tables[1].acquire(both.regions[bucket])
            raise memwal.UnknownOutcome("the daemon was lost before it answered")
        return done

    monkeypatch.setattr(TableWrites, "piece", losing)
    receipt = client.delete(filter="id >= 10", token="cleaner:1")
    assert (receipt.rows, receipt.skipped) == (90 - lost[0], lost[0])
    assert receipt.rows == counted
    assert sorted(client.scan(["id"]).read_all()["id"].to_pylist()) == list(range(10))
    assert client.router.sole is not None


def test_a_region_that_is_let_go_in_the_middle_of_a_put_costs_no_token(
    append_only: tuple[Pair, RemoteTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One region of the daemon has written its rows when the next one is lost: only the rest is sent again."""
    both, _ = append_only
    both.move(1)
    both.move(3)
    with memwal.connect(both.endpoints[0]) as client:
        assert client.router.sole is not None
        real, submitted = RegionWriter.submit, list[RegionWriter]()

        def submit(writer: RegionWriter, *args: Any) -> None:
            if submitted and not both.tables[1].regions.has(submitted[0]) and writer is not submitted[0]:
                monkeypatch.setattr(RegionWriter, "submit", real)
                both.move(writer.bucket)
            submitted.append(writer)
            real(writer, *args)

        monkeypatch.setattr(RegionWriter, "submit", submit)
        receipt = client.put(append_rows.rows(range(100)))
        assert (receipt.rows, receipt.applied, len(receipt.positions)) == (100, True, REGIONS)
        assert append_rows.counted(client) == Counter(range(100))
        assert {both.owner(bucket) for bucket in range(REGIONS)} == {0, 1}


def test_endpoints_that_are_down_do_no_harm(pair: Callable[..., Any], made: Any) -> None:
    both, _ = pair()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        for location in (f"{dead},{both.endpoints[1]}", [both.endpoints[0], dead]):
            with memwal.connect(location) as client:
                client.put(made.rows(range(40)))
                assert client.count() == 40
                assert len(client.status()["regions"]) == REGIONS
        with pytest.raises(memwal.Unavailable) as refused:  # names the daemon that was asked last
            memwal.connect([dead, dead.replace("grpc://127.0.0.1", "grpc://localhost")])
        assert refused.value.details["reason"] == "lost"


def test_a_lost_daemon_costs_a_resend(pair: Callable[..., Any], made: Any) -> None:
    """The other daemon takes its regions over, while a put and a stream wait for them."""
    both, client = pair()
    client.put(made.rows(range(20)))
    rows = made.table(range(100, 200))
    mine = rows.filter(pa.array(both.tables[0].base.route(rows) == 0)).to_batches()[0]
    both.services[0].shutdown()
    both.tables[0].close()
    receipts: list[Any] = []
    putting = threading.Thread(target=lambda: receipts.append(client.put(made.rows(range(20, 60)), token="a:1")))
    putting.start()
    for region in both.regions:
        both.tables[1].acquire(region)
    stream = client.open_stream(both.regions[0], memwal.Token("spark", 0), timeout=60)
    stream.write(mine)
    assert stream.finish().rows == mine.num_rows
    putting.join(60)
    assert receipts[0].rows == 40
    assert client.count() == 60 + mine.num_rows
    assert client.router.sole is not None


def test_columns_that_somebody_adds_reach_both_daemons(pair: Callable[..., Any], made: Any, uri: str) -> None:
    import lance

    _, client = pair()
    client.put(made.rows(range(20)))
    lance.dataset(uri).add_columns(pa.field("grade", pa.int64()))
    client.put([row | {"grade": 7} for row in made.rows(range(10, 30))])
    assert client.count("grade = 7") == 20
    assert client.count("grade is null") == 10


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "3", True])
def test_a_timeout_that_is_none_is_refused(pair: Callable[..., Any], made: Any, timeout: Any) -> None:
    both, client = pair()
    for call in (
        lambda: client.put(made.table(range(2)), timeout=timeout),
        lambda: client.delete([1], timeout=timeout),
        lambda: client.delete(filter="id = 1", timeout=timeout),
        lambda: client.open_stream(both.regions[0], memwal.Token("spark", 0), timeout=timeout),
    ):
        with raises(memwal.Invalid):
            call()
    assert client.count() == 0


@pytest.mark.parametrize("timeout", [10**400, float("inf"), 1e300, np.int64(90), np.float32(90)])
def test_a_timeout_may_be_as_long_as_anybody_likes(pair: Callable[..., Any], made: Any, timeout: Any) -> None:
    _, client = pair()
    assert client.put(made.table(range(8)), timeout=timeout).applied
    assert client.delete([1], timeout=timeout).applied
    assert client.delete(filter="id < 4", timeout=timeout).rows == 3
    assert client.count() == 4


def test_bytes_in_flight_are_bounded(pair: Callable[..., Any], made: Any) -> None:
    """Puts larger than the whole limit run one after the other, and none fails."""
    both, _ = pair()
    with memwal.connect(both.endpoints, in_flight_max=1) as client:
        threads = [
            threading.Thread(target=client.put, args=(made.rows(range(at, at + 10)),), kwargs={"timeout": each})
            for each, at in zip([None, float("inf")] * 5, range(0, 100, 10), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert client.count() == 100


def test_a_spark_task_follows_its_regions(pair: Callable[..., Any], made: Any, uri: str) -> None:
    """Every region moves while its rows are in flight, and again before its ack; all rows arrive exactly once."""
    both, client = pair()
    rows = shuffled(RouteTask(uri, ())(iter([placed(made.table(range(200)))])))

    def arriving() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(pa.table(rows).to_batches(max_chunksize=10)):
            yield batch
            both.move(batch[BUCKET][-1].as_py())
            if number % 3 == 0:
                both.move(batch[BUCKET][-1].as_py())

    for applied in (True, False):
        send = SendTask(both.endpoints[0], both.regions, "query", 0, 120.0, in_flight_max=1)
        receipts = [row for batch in send(arriving()) for row in batch.to_pylist()]
        assert sorted(receipt["region"] for receipt in receipts) == sorted(map(str, both.regions))
        assert [receipt["applied"] for receipt in receipts] == [applied] * REGIONS
        assert sum(receipt["rows"] for receipt in receipts) == 200
    assert ordered(client.scan().read_all()) == ordered(made.table(range(200)))


def test_commands_find_all_owners(
    pair: Callable[..., Any], made: Any, small_config: SmallConfig, ends: ExitStack
) -> None:
    """Commands find owners by the notes on storage, or by the configured endpoints; unless all regions have owners,
    they read storage.
    """
    both, client = pair()
    client.put(made.rows(range(40)), durable=False)
    configured = load(small_config("named.toml", daemon={"endpoints": [both.endpoints[1]]}), {})
    bare = load(small_config("bare.toml"), {})
    assert isinstance(open_for_reading(Call(bare, {})), StoredTable)
    for table, endpoint in zip(both.tables, both.endpoints, strict=True):
        table.announce(endpoint)
    for settings in (configured, bare):
        found = open_for_reading(Call(settings, {}))
        assert isinstance(found, RemoteTable)
        assert found.count() == 40
        owners = {region["owner"] for region in cli_status.current(Call(settings, {}))["regions"]}
        assert owners == set(both.endpoints)
        found.close()
    both.tables[0].release(both.regions[0])
    assert isinstance(open_for_reading(Call(bare, {})), StoredTable)
