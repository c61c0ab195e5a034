"""Tables as streams in a real Spark: `readStream.format("memwal")` and `writeStream.format("memwal")`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.ingest.settings.load import load
from memwal.ingest.spark.session import configuration, start_session
from memwal.wal.layout import STAGED_PREFIX
from tests.conftest import Serve
from tests.integration.test_spark_source import refused
from tests.support.garbage import collect

BY_HAND = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}, "wal": {"read_lease": "0s"}}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    settings = load({"table": {"uri": str(tmp_path_factory.mktemp("unused"))}}, {})
    session = start_session(configuration(settings, 2, once=True))
    memwal.register_spark(session)
    yield session
    session.stop()


def table_of(uri: str, regions: int = 2, **options: Any) -> Any:
    new = {"schema": SCHEMA, "key": "id", "regions": regions} | options
    return memwal.open(uri, settings=BY_HAND, **(new if not Path(uri).exists() else {}))


def rows(*pairs: tuple[int, int]) -> list[dict[str, int]]:
    return [{"id": id, "n": n} for id, n in pairs]


def finished(writer: Any) -> None:
    """Run a query from its checkpoint to its end. Spark ends the query if a new Python process takes longer than ten
    seconds to start, as on a busy machine; then the function starts it again.
    """
    for _ in range(6):
        query = writer.start()
        try:
            assert query.awaitTermination(120)
            return
        except Exception as error:
            if "Python worker failed to connect back" not in str(error):
                raise
        finally:
            query.stop()
    raise AssertionError("the machine is too busy for Spark")


class Reading:
    """A query over the changes of a table, run repeatedly from its checkpoint; it keeps the rows of
    each micro-batch.
    """

    def __init__(self, spark: Any, uri: str, at: Path, **options: Any) -> None:
        self.spark, self.uri, self.checkpoint, self.options = spark, uri, at, {"since": "earliest"} | options
        self.batches: list[tuple[int, list[dict[str, Any]]]] = []

    def run(self) -> list[dict[str, Any]]:
        """Run until everything is read; return the rows of this run."""
        begun = len(self.batches)
        frame = self.spark.readStream.format("memwal").options(**self.options).load(self.uri)
        finished(
            frame.writeStream.foreachBatch(self._keep)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
        )
        return [row for _, batch in self.batches[begun:] for row in batch]

    def _keep(self, frame: Any, number: int) -> None:
        self.batches.append((number, [row.asDict() for row in frame.collect()]))


def plain(changes: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the changes in the order of the log, one region after the other."""
    found = [tuple(row.values()) for row in changes]
    return sorted(found, key=lambda row: (*row[1:4], "post" in row[0]))


def told(uri: str, since: Any = None, **options: Any) -> list[tuple[Any, ...]]:
    return plain(memwal.open(uri, read_only=True).changes(since, **options).read_all().to_pylist())


def resized(uri: str, to: int) -> None:
    flush.resize(uri, None, wal.open_store(uri), to, clock=wal.SystemClock(), ids=wal.SystemIds())


def test_a_query_gets_each_change_once_over_flush_commit_collection_and_resize(
    spark: Any, uri: str, tmp_path: Path
) -> None:
    table = table_of(uri)
    reading = Reading(spark, uri, tmp_path / "checkpoint", images="both")
    table.put(rows(*((id, 0) for id in range(6))))
    assert plain(reading.run()) == told(uri, images="both")
    seen = table.changes_position()
    table.put(rows(*((id, 1) for id in range(4))))
    table.delete([5])
    table.flush()
    table.commit()
    collect(uri, changes=3600.0)
    table.put(rows((0, 2), (9, 0)))
    found = reading.run()
    assert plain(found) == told(uri, seen, images="both")
    assert [row["_change"] for row in found].count("update_preimage") == 5
    seen = table.changes_position()
    table.put(rows((0, 3), (7, 0)))
    table.close()
    resized(uri, 3)
    with table_of(uri) as table:
        table.put(rows((0, 4), (7, 1), (11, 0)))
        found = reading.run()
        assert plain(found) == told(uri, seen, images="both")
        of_key = [(row["_change"], row["n"]) for row in found if row["id"] == 7]
        assert of_key == [("insert", 0), ("update_preimage", 0), ("update_postimage", 1)]
        assert reading.run() == []


def test_a_limit_divides_the_log_and_a_replayed_micro_batch_has_the_same_rows(
    spark: Any, uri: str, tmp_path: Path
) -> None:
    with table_of(uri) as table:
        for n in range(6):
            table.put(rows(*((id, n) for id in range(4))))
        reading = Reading(spark, uri, tmp_path / "checkpoint", max_rows_per_batch=9, columns="n")
        assert plain(reading.run()) == told(uri, columns=["n"])
        assert len(reading.batches) > 2
        assert all(len(batch) <= 9 for _, batch in reading.batches)
        number, before = reading.batches[-1]
        assert forget_last_commit(reading.checkpoint) == number
        table.put(rows((1, 7), (90, 7)))
        table.flush()
        table.commit()
        run = reading.run()
        (replayed, again), *later = reading.batches[-2:]
        assert (replayed, plain(again)) == (number, plain(before))
        assert [row["id"] for _, batch in later for row in batch] == [1, 90]
        assert len(run) == len(before) + 2


def test_what_is_wrong_with_a_stream_is_one_line(spark: Any, uri: str, tmp_path: Path) -> None:
    with table_of(uri) as table:
        table.put(rows((1, 0)))
        reading = Reading(spark, uri, tmp_path / "checkpoint")
        reading.run()
        for n in range(3):
            table.put(rows((1, n)))
            table.flush()
            table.commit()
        collect(uri)
        assert "are no longer kept; the oldest that can be read is" in refused(reading.run)
    frame = spark.readStream.format("memwal").options(since="latest", images="bth")
    assert "images = 'bth': write 'after', or 'both'" in refused(lambda: frame.load(uri))


class Writing:
    """A query from JSON files into a table by name, run repeatedly from its checkpoint."""

    def __init__(self, spark: Any, tmp_path: Path, **options: str) -> None:
        self.spark, self.options = spark, options
        self.landing, self.checkpoint = tmp_path / "landing", tmp_path / "checkpoint"
        self.landing.mkdir()
        self.files = 0

    def land(self, found: list[dict[str, Any]]) -> None:
        path = self.landing / f"{self.files}.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        self.files += 1

    def run(self, partitions: int = 2) -> None:
        frame = self.spark.readStream.schema("id long, n long").json(str(self.landing)).repartition(partitions)
        finished(
            frame.writeStream.format("memwal")
            .options(**self.options)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
        )


def forget_last_commit(checkpoint: Path) -> int:
    """Make Spark repeat the last micro-batch of a query; return its number."""
    last = max(int(each.name) for each in (checkpoint / "commits").iterdir() if each.name.isdigit())
    for name in (str(last), f".{last}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    return last


def staged(uri: str) -> list[str]:
    return wal.open_store(uri).list(STAGED_PREFIX)


def test_a_written_micro_batch_is_applied_once_however_often_and_in_whatever_partitions_it_is_repeated(
    spark: Any, serve: Serve, tmp_path: Path, uri: str
) -> None:
    table_of(uri, key=(), regions=3).close()
    config = tmp_path / "config.toml"
    config.write_text(f'[table]\nuri = "{uri}"\n[commit]\ninterval = "0s"\n')
    serve(config)
    writing = Writing(spark, tmp_path, path=uri)
    writing.land(rows(*((id, 0) for id in range(50))))
    writing.run()
    with memwal.connect(uri) as table:
        assert len(table) == 50
        forget_last_commit(writing.checkpoint)
        writing.run(partitions=3)  # every region has applied the batch
        assert len(table) == 50
        writing.land(rows(*((id, 1) for id in range(40))))
        writing.run(partitions=1)
        assert sorted(table.scan(["id", "n"]).read_all().to_pylist(), key=repr) == sorted(
            rows(*((id, 0) for id in range(50)), *((id, 1) for id in range(40))), key=repr
        )
        assert staged(uri) == []
        writing.land([{"id": 1, "n": 2}, {"n": 3}])
        said = refused(lambda: writing.run(partitions=2))
        assert "column 'id'" in said.splitlines()[0]
        assert "of Spark partition" in said.splitlines()[0]
        assert len(table) == 90
