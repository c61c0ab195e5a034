"""How long changes are kept: by the setting, beside a clean-up of versions, and in an idle region."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pytest

import memwal
from memwal import flush, wal
from memwal.flush.base.manifest import manifest_names
from memwal.flush.commits.maintenance import clean_up as cleaned_up
from memwal.flush.commits.thinning import VersionRules
from memwal.ingest.engine.api.changes import ChangesRequest, Piece, Position
from memwal.ingest.engine.changes.reader import ChangesReader, StoredChanges
from memwal.ingest.engine.changes.start import Gone, Starts
from memwal.ingest.engine.table.garbage import Ages, TableCollector
from memwal.wal.layout import entry_key
from tests.change_world import QUIET, SCHEMA, row
from tests.clean import assert_clean
from tests.messages import raises
from tests.support.clock import FakeClock

HOUR = 3600.0


@pytest.fixture
def table(uri: str) -> Iterator[Any]:
    with memwal.open(uri, schema=SCHEMA, key="id", regions=1, settings=QUIET) as opened:
        yield opened


def committed(table: Any, key: int, n: int) -> None:
    table.put([row(key, n)])
    table.flush()
    table.commit()


def clean_up(uri: str, newest: int, since: float | None = None) -> None:
    rules = VersionRules(age_min=1e-6, hourly=0, daily=0, newest=newest)
    cleaned_up(wal.open_store(uri), lance.dataset(uri), rules, wal.SystemClock().now(), since)


def told(changes: Any) -> list[tuple[Any, ...]]:
    return [(each["_change"], each["id"], each["n"]) for each in changes.read_all().to_pylist()]


def test_manifests_are_kept_by_which_a_reader_finds_where_a_generation_ends(table: Any, uri: str) -> None:
    """There are more manifests than the newest ones that a collection always keeps."""
    clock = wal.SystemClock()
    for n in range(12):
        committed(table, 1, n)
    position, since = table.changes_position(), clock.now()
    for n in range(12, 52):
        committed(table, 1, n)
    clean_up(uri, 1, since)
    base, store = flush.BaseTable.open(uri), wal.open_store(uri)
    collector = TableCollector(store, base.codec, clock, wal.regions(store))
    found = collector.collect(base, Ages(0.0, 0.0, 604_800.0, 0.0, changes=clock.now() - since))
    assert (found.entries, found.manifests) == (12, 23)  # the last one before `since` states where its generation ended
    assert told(table.changes(position, images="both"))[:2] == [("update_preimage", 1, 11), ("update_postimage", 1, 12)]
    assert len(told(table.changes(position))) == 40
    assert_clean(store, uri)


def test_the_setting_is_obeyed_by_an_open_table(uri: str) -> None:
    ages = {"wal_age_min": "0s", "sst_age_min": "0s", "manifest_age_min": "0s"}
    for kept, left in (("1h", [(1, 1), (1, 2), (1, 3)]), ("0s", [])):
        settings = QUIET | {"gc": {"interval": "0s", "changes_age_min": kept, **ages}}
        with memwal.open(uri, schema=SCHEMA, key="id", regions=1, settings=settings) as table:
            if kept == "1h":
                for n in (1, 2, 3):
                    committed(table, 1, n)
            table.upkeep.collect()
            assert [change[1:] for change in told(table.changes())] == left


def test_the_version_that_was_the_newest_is_kept_however_old_it_is(table: Any, uri: str) -> None:
    for n in range(1, 20):
        committed(table, 1, n)
    dataset = lance.dataset(uri)
    kept = [ref["version"] for ref in dataset.version_refs()]
    since = [each["timestamp"] for each in dataset.versions()][10].timestamp()
    clean_up(uri, 1, since)
    left = [ref["version"] for ref in lance.dataset(uri).version_refs()]
    assert set(left) >= set(sorted(kept)[10:])
    assert sorted(kept)[7] not in left
    clean_up(uri, 1)
    assert len(lance.dataset(uri).version_refs()) < len(left)


@pytest.mark.parametrize("idle", [True, False])
def test_a_region_that_was_idle_for_days(table: Any, uri: str, idle: bool) -> None:
    """The version that recorded the region's progress and the version before it were cleaned up. A later version serves
    as well if it is an hour older than the next entry of the region.
    """
    committed(table, 1, 1)
    position = table.changes_position()
    lance.dataset(uri).optimize.compact_files()
    for _ in range(3):
        lance.dataset(uri).update_config({"note": str(_)})
    base = flush.BaseTable.open(uri)
    clean_up(uri, 1)
    versions = Path(uri, "_versions")
    assert len(list(versions.glob("*.manifest"))) < base.version
    if idle:
        name = next(name for name in manifest_names(base.version) if (versions / name).exists())
        written = (versions / name).stat().st_mtime
        os.utime(versions / name, (written - 2 * HOUR, written - 2 * HOUR))
    assert told(table.changes(position)) == []  # nothing is published above it
    table.put([row(1, 2)])
    table.delete([1])
    table.flush()
    table.commit()
    if idle:
        assert told(table.changes(position, images="both")) == [
            ("update_preimage", 1, 1),
            ("update_postimage", 1, 2),
            ("delete", 1, 2),
        ]
    else:
        with raises(memwal.Invalid):
            table.changes(position).read_all()


def resized(uri: str, to: int, n: int) -> memwal.Position:
    """Resize, put every key, and return the position."""
    flush.resize(uri, None, wal.open_store(uri), to, clock=wal.SystemClock(), ids=wal.SystemIds())
    with memwal.open(uri, settings=QUIET) as table:
        table.put([row(key, n) for key in range(40)])
        return table.changes_position()


def only_the_newest_versions_are_kept(uri: str) -> memwal.Position:
    """Commit several times until the base has two versions; return the position."""
    with memwal.open(uri, settings=QUIET) as table:
        for n in range(2, 6):
            table.put([row(key, n) for key in range(40)])
            table.flush()
            table.commit()
    clean_up(uri, 2)  # of both, only the newest has the newest progress of all regions
    return memwal.open(uri, read_only=True).changes_position()


def test_a_region_that_comes_back_after_its_versions_were_cleaned_up(uri: str) -> None:
    """The table shrinks, and grows much later: the log of a region has a new sentinel, which holds no change."""
    with memwal.open(uri, schema=SCHEMA, key="id", regions=4, settings=QUIET) as table:
        table.put([row(key, 0) for key in range(40)])
    resized(uri, 2, 1)
    position = only_the_newest_versions_are_kept(uri)
    resized(uri, 4, 9)
    with memwal.open(uri, settings=QUIET) as table:
        assert sorted(told(table.changes(position))) == [("update", key, 9) for key in range(40)]


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_reader_looks_while_a_resize_opens_its_regions(
    uri: str, comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch to the new regions is made, and the fence of the claim that opens a region exists; its manifest still
    says sealed.
    """
    with memwal.open(uri, schema=SCHEMA, key="id", regions=4 if comes_back else 2, settings=QUIET) as table:
        table.put([row(key, 0) for key in range(40)])
    if comes_back:
        resized(uri, 2, 1)
    position = only_the_newest_versions_are_kept(uri)
    edit, looks = wal.ManifestStore.edit, list[list[tuple[Any, ...]]]()

    def looked_before(*given: Any, **more: Any) -> Any:
        looks.append(told(memwal.open(uri, read_only=True).changes(position)))
        return edit(*given, **more)

    with monkeypatch.context() as looking:
        looking.setattr(wal.ManifestStore, "edit", looked_before)
        flush.resize(uri, None, wal.open_store(uri), 4, clock=wal.SystemClock(), ids=wal.SystemIds())
    assert looks == [[]] * (8 if comes_back else 6), "each opened; the old ones sealed before"
    with memwal.open(uri, settings=QUIET) as table:
        table.put([row(key, 9) for key in range(40)])
        assert sorted(told(table.changes(position))) == [("update", key, 9) for key in range(40)]


@pytest.fixture
def collected_under_a_reader(table: Any, uri: str, monkeypatch: pytest.MonkeyPatch) -> tuple[UUID, int]:
    """Return a region and its newest position. The entry at this position is flushed and collected right before a
    reader requests it, after the reader read the previous manifest; then another row is put.
    """
    table.put([row(1, 1)])
    store, base = wal.open_store(uri), flush.BaseTable.open(uri)
    (region,) = base.regions
    position = table.status()["regions"][0]["wal_position"]
    key = entry_key(region, position, base.codec.suffix)
    exists = type(store).exists

    def collected_before(of: Any, asked: str) -> bool:
        if asked == key:
            monkeypatch.undo()
            table.flush()
            table.commit()
            table.put([row(2, 1)])
            collector = TableCollector(store, base.codec, wal.SystemClock(), [region])
            assert collector.collect(flush.BaseTable.open(uri), Ages(0.0, 0.0, 0.0, 0.0)).entries
            assert not exists(of, asked)
        return exists(of, asked)

    monkeypatch.setattr(type(store), "exists", collected_before)
    return region, position


class SlowClock(FakeClock):
    """Every reading of the clock advances it by 10 seconds, as if a reader ran on a busy machine."""

    def monotonic(self) -> float:
        self.advance(10.0)
        return super().monotonic()


def test_a_piece_ends_in_time_though_no_change_was_found(uri: str) -> None:
    """A client times out on a longer call and requests the same position again, so its feed would never advance."""
    for _ in range(2):  # fences, which change nothing
        with memwal.open(uri, schema=SCHEMA, key="id", regions=4, settings=QUIET):
            pass
    with memwal.open(uri, settings=QUIET) as table:
        table.put([row(1, 1)])
    base, clock = flush.BaseTable.open(uri), SlowClock()
    feed, at, pieces = StoredChanges(base, wal.open_store(uri), clock), Position(base.table_id, 1, {}), list[Piece]()
    while not pieces or pieces[-1].more:
        began = clock.now()
        pieces.append(feed.piece(ChangesRequest(at)))
        assert clock.now() - began < 120.0
        assert pieces[-1].position != at or not pieces[-1].more
        at = pieces[-1].position
    assert any(piece.more and not piece.rows.num_rows for piece in pieces)
    assert [id for piece in pieces for id in piece.rows.column("id").to_pylist()] == [1]


def test_an_entry_that_is_collected_while_a_reader_looks_was_reached(
    collected_under_a_reader: tuple[UUID, int], uri: str
) -> None:
    region, position = collected_under_a_reader
    starts = Starts(flush.BaseTable.open(uri), wal.open_store(uri))
    starts.expect_reached({region: position}, {})
    with pytest.raises(Gone) as never:
        starts.expect_reached({region: position + 9}, {})
    assert never.value.ahead


def test_changes_are_told_though_the_entries_before_them_are_collected_while_a_reader_looks(
    collected_under_a_reader: tuple[UUID, int], uri: str
) -> None:
    region, position = collected_under_a_reader
    base = flush.BaseTable.open(uri)
    request = ChangesRequest(Position(base.table_id, base.routing_version, {region: position}))
    reader = ChangesReader(base, wal.open_store(uri), wal.SystemClock(), request, {region: position + 1})
    assert [(each["_change"], each["id"]) for each in reader.next(None).rows.to_pylist()] == [("insert", 2)]
