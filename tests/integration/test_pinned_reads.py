"""A pinned snapshot has the same rows for every process that reads it, whatever is written or committed since."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.api.reads import LEVELS
from memwal.ingest.engine.read.pinned import Pinned, PinnedReads, pin
from memwal.ingest.errors import MemWalError, Unavailable
from memwal.ingest.spark.connector.source import shares
from memwal.memtable import InvalidRows
from memwal.wal.layout import sst_key
from tests.conftest import Cli, OpenSmall
from tests.messages import raises

BY_HAND = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
STORED = [level for level in LEVELS if level != "latest"]
SCHEMA = pa.schema(
    [
        pa.field("a", pa.int64(), nullable=False),
        pa.field("b", pa.string(), nullable=False),
        pa.field("n", pa.int64()),
        pa.field("x", pa.float64()),
        pa.field("s", pa.string()),
    ]
)
FILTERS = (None, "n > 1", "n IS NULL OR s LIKE 'a%'", "x < 0.5", "NOT (n = 2)", "b = 'k1' AND n <= 2", "x != 0")


def pinned(uri: str, level: Any = "durable") -> Pinned:
    """Return a snapshot as another process receives it."""
    moment, _ = pin(BaseTable.open(uri), wal.open_store(uri), level)
    received = pickle.loads(pickle.dumps(moment))
    assert received == moment
    assert hash(received) == hash(moment)
    return received


def plain(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Return rows in comparable form: NaN as text."""
    return [tuple("nan" if value != value else value for value in row.values()) for row in rows.to_pylist()]


def rows_of(moment: Pinned, columns: list[str], filter: str | None = None, per_share: int = 7) -> list[tuple[Any, ...]]:
    """Return all rows of a snapshot; a separate reader reads each share, like executors."""
    found = []
    for share in shares(moment, per_share):
        reads = PinnedReads(moment, {})
        if share.region is not None:
            tables = reads.above(share.region, columns, filter)
        else:
            tables = reads.below(share.fragments, columns, filter)
        for table in tables:
            assert table.column_names == columns
            found += plain(table)
    return sorted(found, key=repr)


def expected(table: Any, columns: list[str], filter: str | None, level: str) -> list[tuple[Any, ...]]:
    return sorted(plain(table.scan(columns, filter, level=level).read_all()), key=repr)


def committed(table: Any) -> None:
    """Commit every row put so far."""
    table.flush()
    table.commit()


def random_rows(rng: np.random.Generator, most: int = 12) -> pa.Table:
    number = int(rng.integers(1, most))
    pairs = {(int(a), f"k{b}") for a, b in rng.integers(0, 6, (number, 2))}
    texts = ["", "a", "ab", "b", None]
    rows = [
        {
            "a": a,
            "b": b,
            "n": None if rng.random() < 0.2 else int(rng.integers(0, 4)),
            "x": [0.0, -0.0, 0.25, float("nan"), None][int(rng.integers(0, 5))],
            "s": texts[int(rng.integers(0, len(texts)))],
        }
        for a, b in sorted(pairs)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


@pytest.mark.parametrize("key", [("a",), ("a", "b"), ()], ids=["one column", "two columns", "no key"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_moment_has_the_rows_of_a_scan_at_every_level_with_every_filter(
    uri: str, key: tuple[str, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    fields = [field.with_nullable(field.name not in key) for field in SCHEMA]
    indexes = {"n": "btree"}
    with memwal.open(uri, schema=pa.schema(fields), key=key, regions=3, indexes=indexes, settings=BY_HAND) as table:
        for step in range(14):
            rows = random_rows(rng).cast(pa.schema(fields))
            if key == ("a",):
                rows = rows.take(pa.array(np.unique(rows.column("a").to_numpy(), return_index=True)[1]))
            table.put(rows)
            if key and step % 2:
                table.delete(random_rows(rng, 4).select(key).group_by(list(key)).aggregate([]))
            if step % 3 == 0:
                table.flush()
            if step % 5 == 4:
                table.commit()
        for level in STORED:
            moment = pinned(uri, level)
            for filter in FILTERS:
                columns = SCHEMA.names if filter is None else ["s", "a"]
                assert rows_of(moment, columns, filter) == expected(table, columns, filter, level), (level, filter)


def test_what_is_written_flushed_and_committed_later_is_not_in_a_moment(
    open_small: OpenSmall, uri: str, made: Any
) -> None:
    table = open_small()
    table.put(made.table(range(40)))
    committed(table)
    table.put(made.table(range(20), 1))
    table.flush()
    table.put(made.table(range(10), 2))
    moments = {level: pinned(uri, level) for level in STORED}
    before = {level: expected(table, ["id", "name"], None, level) for level in STORED}
    table.put(made.table(range(30), 3))
    table.delete([0, 35])
    assert {level: rows_of(moments[level], ["id", "name"]) for level in STORED} == before
    committed(table)
    assert {level: rows_of(moments[level], ["id", "name"]) for level in STORED} == before
    assert rows_of(pinned(uri), ["id", "name"]) == expected(table, ["id", "name"], None, "latest") != before["durable"]


def test_columns_that_were_added_and_renamed_before_the_moment(open_small: OpenSmall, uri: str, made: Any) -> None:
    table = open_small()
    table.put(made.table([1, 2]))
    committed(table)
    table.put(made.table([2, 3], 1))
    table.flush()
    table.put(made.table([3, 4], 2))
    dataset = lance.dataset(uri)
    dataset.add_columns(pa.field("more", pa.int64()))
    dataset.alter_columns({"path": "name", "name": "title"})
    names = {1: "row 1 v0", 2: "row 2 v1", 3: "row 3 v2", 4: "row 4 v2"}
    assert rows_of(pinned(uri), ["id", "title", "more"]) == [(id, name, None) for id, name in names.items()]


def test_a_moment_whose_objects_were_deleted_is_unavailable_and_says_so(
    open_small: OpenSmall, uri: str, made: Any, cli: Cli, tmp_path: Any
) -> None:
    table = open_small(regions=1, gc={"interval": "0s"})
    table.put(made.table(range(5)))
    committed(table)
    table.put(made.table(range(5), 1))
    table.flush()
    ssts = pinned(uri, "flushed")
    table.put(made.table(range(5), 2))
    tail = pinned(uri)
    committed(table)
    for _ in range(3):  # fences and the newest map stay; the entry of the tail is deleted
        table.put(made.table(range(5), 3))
        table.flush()
    config = tmp_path / "gc.toml"
    config.write_text(f'[table]\nuri = "{uri}"\n[gc]\nwal_age_min = "0s"\nsst_age_min = "0s"\n')
    assert cli("gc", config).code == 0
    for moment in (ssts, tail):
        with raises(Unavailable):
            rows_of(moment, ["id"])
    versions = pinned(uri, "committed")
    lance.dataset(uri).optimize.compact_files()
    committed(table)
    lance.dataset(uri).cleanup_old_versions(timedelta(0), delete_unverified=True)
    with raises(Unavailable):
        rows_of(versions, ["id"])


@pytest.mark.usefixtures("only_process")
def test_a_missing_sst_that_the_manifest_lists_is_damage_and_not_a_late_read(
    open_small: OpenSmall, uri: str, made: Any
) -> None:
    table = open_small(regions=1)
    table.put(made.table(range(5)))
    table.flush()
    moment, store = pinned(uri), wal.open_store(uri)
    (region,) = moment.regions
    doomed = [key for key in store.list(f"{sst_key(region.region, region.ssts[0].path)}/") if key.endswith(".lance")]
    for key in doomed:
        store.delete(key)
    with pytest.raises(wal.Corrupt):
        rows_of(moment, ["id"])


def test_a_filter_that_fails_on_a_row_names_the_filter(open_small: OpenSmall, uri: str, made: Any) -> None:
    table = open_small(regions=1)
    table.put(made.table(range(3)))
    committed(table)
    with raises((InvalidRows, MemWalError)):
        rows_of(pinned(uri), ["id"], "CAST(name AS INT) = 5")


def test_shares_are_bounded_by_rows_and_have_each_fragment_once(open_small: OpenSmall, uri: str, made: Any) -> None:
    table = open_small(regions=2)
    for start in range(0, 60, 10):
        table.put(made.table(range(start, start + 10)))
        committed(table)
    table.put(made.table(range(4), 1))
    moment = pinned(uri)
    found = shares(moment, 25)
    assert {share.region for share in found if share.region} == {region.region for region in moment.regions}
    rows = {fragment.id: fragment.rows for fragment in moment.fragments}
    groups = [share.fragments for share in found if share.region is None]
    assert sorted(id for group in groups for id in group) == sorted(rows)
    assert all(len(group) == 1 or sum(rows[id] for id in group) <= 25 for group in groups)
    assert sum(rows.values()) == 60
