"""The feed lands each file whole, in order and once."""

from __future__ import annotations

from pathlib import Path

import pytest

from memwal.ingest.errors import Invalid
from memwal.ingest.spark.source.feed import Feed, feed_files, visible_files
from tests.messages import raises
from tests.support.clock import FakeClock

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
    feed.wait()
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
    assert feed.finished()
    assert feed.failure is None
    assert landed(tmp_path / "target") == NAMES[:1]


def test_a_directory_that_cannot_be_read_or_is_empty_is_named(tmp_path: Path) -> None:
    with raises(Invalid):
        feed_files(tmp_path / "nowhere")
    with raises(Invalid):
        feed_files(tmp_path)
