"""A directory as a source: files that do not fit are rejected before Spark starts, and a feed lands files in order."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memwal.ingest.errors import Invalid
from memwal.ingest.settings.sections import SourceSettings
from memwal.ingest.spark.schema import readable, spark_schema
from memwal.ingest.spark.source.feed import Feed, feed_files, visible_files
from memwal.ingest.spark.source.files import check_source
from memwal.ingest.values.type_names import SIMPLE, parse_type
from tests.messages import raises
from tests.support.clock import FakeClock

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("name", pa.string()), ("v", pa.list_(pa.float32(), 3))]
)


def write(directory: Path, /, **columns: pa.Array | None) -> Path:
    directory.mkdir(exist_ok=True)
    whole = {"id": pa.array([1]), "name": pa.array(["x"]), "v": pa.array([[1.0, 2.0, 3.0]], SCHEMA.field("v").type)}
    kept = {name: column for name, column in (whole | columns).items() if column is not None}
    pq.write_table(pa.table(kept), directory / "a.parquet")
    return directory


def refused(path: Path, **settings: object) -> str:
    with pytest.raises(Invalid) as raised:
        check_source(SourceSettings(path=str(path), **settings), SCHEMA)  # type: ignore[arg-type]
    assert len(raised.value.lines) == 1
    return str(raised.value)


def test_files_that_fit_pass(tmp_path: Path) -> None:
    check_source(SourceSettings(path=str(write(tmp_path / "in"))), SCHEMA)


def test_nulls_in_the_key_are_told_by_the_footer(tmp_path: Path) -> None:
    line = refused(write(tmp_path / "in", id=pa.array([None], pa.int64())))
    assert "a.parquet" in line
    assert "'id' is null in 1 of" in line


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    assert "source.path" in refused(tmp_path / "nowhere")
    assert "nowhere" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(tmp_path / "file")
    with raises(Invalid):
        check_source(SourceSettings(), SCHEMA)


def test_a_directory_that_the_feed_will_make_need_not_be_there(tmp_path: Path) -> None:
    feed = write(tmp_path / "feed")
    check_source(SourceSettings(path=str(tmp_path / "later"), feed=str(feed)), SCHEMA)
    assert not (tmp_path / "later").exists()


def test_files_of_the_feed_are_checked_too(tmp_path: Path) -> None:
    feed = write(tmp_path / "feed", name=pa.array([1]))
    assert "'name' is int64" in refused(tmp_path / "later", feed=str(feed))


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    write(tmp_path / "in")
    (tmp_path / "in" / "b.parquet").write_text("not parquet")
    assert "b.parquet is no readable Parquet file" in refused(tmp_path / "in")


def test_missing_and_extra_columns_are_named_with_the_nearest(tmp_path: Path) -> None:
    missing = refused(write(tmp_path / "in", name=None, nme=pa.array(["x"])))
    assert "no column 'name'" in missing
    assert "'nme'" in missing
    extra = refused(write(tmp_path / "more", nam=pa.array(["x"])), schema_drift="fail")
    assert "a column 'nam'" in extra
    assert "did you mean 'name'" in extra


def test_where_columns_come_up_files_may_lack_them_and_with_add_have_more(tmp_path: Path) -> None:
    older = write(tmp_path / "older", name=None)
    newer = write(tmp_path / "newer", price=pa.array([1.5]))
    for drift in ("fail", "add"):
        check_source(SourceSettings(path=str(older), schema_drift=drift), SCHEMA)  # type: ignore[arg-type]
        assert "no column 'id'" in refused(write(tmp_path / "keyless", id=None), schema_drift=drift)
    for drift in ("add", "ignore"):
        check_source(SourceSettings(path=str(newer), schema_drift=drift), SCHEMA)  # type: ignore[arg-type]
    assert "'price' that the table does not have" in refused(newer, schema_drift="fail")


def test_wrong_types_name_both(tmp_path: Path) -> None:
    assert "'id' is string, but the table has int64" in refused(write(tmp_path / "a", id=pa.array(["1"])))
    wide = pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))
    message = refused(write(tmp_path / "b", v=wide))
    assert "'v'" in message
    assert "[2]" in message
    assert "[3]" in message


def test_hidden_files_are_not_of_the_source(tmp_path: Path) -> None:
    write(tmp_path / "in")
    (tmp_path / "in" / "_SUCCESS").write_text("")
    (tmp_path / "in" / ".a.parquet.crc").write_text("x")
    check_source(SourceSettings(path=str(tmp_path / "in")), SCHEMA)


def test_every_type_of_the_configuration_can_be_read_from_itself() -> None:
    names = [*SIMPLE, "timestamp[us]", "timestamp[us, UTC]", "vector[4]"]
    for name in names:
        assert readable(parse_type(name), parse_type(name)), name
    spark_schema(pa.schema([(name, parse_type(name)) for name in [*names, "vector[4, float16]"]]))


@pytest.mark.parametrize(
    ("found", "wanted", "fits"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.int64(), pa.int32(), False),
        (pa.uint64(), pa.int64(), False),
        (pa.float64(), pa.float32(), True),
        (pa.float16(), pa.float32(), False),
        (pa.list_(pa.float64()), pa.list_(pa.float32(), 3), True),
        (pa.float32(), pa.float64(), True),
        (pa.string(), pa.large_string(), True),
        (pa.dictionary(pa.int32(), pa.string()), pa.string(), True),
        (pa.string(), pa.binary(), False),
        (pa.timestamp("ns"), pa.timestamp("us"), False),
        (pa.timestamp("us", "UTC"), pa.timestamp("us"), False),
        (pa.list_(pa.float32()), pa.list_(pa.float32(), 3), True),
        (pa.list_(pa.string()), pa.list_(pa.float32(), 3), False),
    ],
)
def test_what_spark_reads_as_what(found: pa.DataType, wanted: pa.DataType, fits: bool) -> None:
    assert readable(found, wanted) is fits


NAMES = ["01.parquet", "02.parquet", "10.parquet"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a directory with three files that are not written in the order of their names."""
    directory = tmp_path / "feed"
    directory.mkdir()
    for name in ("10.parquet", "01.parquet", "02.parquet"):
        (directory / name).write_bytes(name.encode() * 1000)
    (directory / "_SUCCESS").write_bytes(b"")
    (directory / ".hidden").write_bytes(b"")
    return directory


def landed(target: Path) -> list[str]:
    """Return the file names in Spark's reading order: by modification time in milliseconds."""
    return [file.name for file in sorted(visible_files(target), key=lambda file: file.stat().st_mtime_ns // 1_000_000)]


def land(source: Path, target: Path, clock: FakeClock | None = None) -> Feed:
    feed = Feed(source, target, 0.0, clock or FakeClock())
    feed.start()
    feed.finished.wait()
    return feed


def test_files_land_whole_in_name_order_and_alone(source: Path, tmp_path: Path) -> None:
    """Their modification times differ by a millisecond though the clock stands still."""
    target = tmp_path / "target"
    feed = land(source, target)
    assert (feed.failure, feed.landed, feed.files) == (None, 3, 3)
    assert landed(target) == sorted(entry.name for entry in target.iterdir()) == NAMES
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in NAMES)
    times = [(target / name).stat().st_mtime_ns for name in NAMES]
    assert min(times[1] - times[0], times[2] - times[1]) >= 1_000_000


def test_a_clock_that_was_set_back_does_not_change_the_order(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    land(source, target)
    (source / "11.parquet").write_bytes(b"late")
    land(source, target, FakeClock(start=1_000.0))
    assert landed(target) == [*NAMES, "11.parquet"]


def test_a_second_feed_leaves_landed_files_alone(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    land(source, target)
    before = {name: (target / name).stat() for name in NAMES}
    (target / "02.parquet").unlink()
    land(source, target)
    after = {name: (target / name).stat() for name in NAMES}
    for name in ("01.parquet", "10.parquet"):
        assert (before[name].st_ino, before[name].st_mtime_ns) == (after[name].st_ino, after[name].st_mtime_ns)
    assert landed(target) == ["01.parquet", "10.parquet", "02.parquet"]


def test_another_file_of_the_same_name_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    land(source, target)
    (source / "02.parquet").write_bytes(b"changed")
    feed = land(source, target)
    assert isinstance(feed.failure, Invalid)
    assert "source.feed" in str(feed.failure)
    assert "02.parquet" in str(feed.failure)
    assert "7" in str(feed.failure)
    assert (target / "02.parquet").read_bytes() == b"02.parquet" * 1000


def test_a_feed_ends_when_it_is_stopped(source: Path, tmp_path: Path, wait_until: object) -> None:
    feed = Feed(source, tmp_path / "target", 3600.0, FakeClock())
    feed.start()
    wait_until(lambda: feed.landed == 1)  # type: ignore[operator]
    feed.stop()
    assert feed.finished.is_set()
    assert feed.failure is None
    assert landed(tmp_path / "target") == NAMES[:1]


def test_a_directory_that_cannot_be_read_or_is_empty_is_named(tmp_path: Path) -> None:
    with raises(Invalid):
        feed_files(tmp_path / "nowhere")
    with raises(Invalid):
        feed_files(tmp_path)
