"""Creating, finding, adopting and describing the base table."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable

from memwal.flush import BaseTable, NotALanceTable, NotInitialised, TableExists, UnsupportedTable, WriteRules
from memwal.flush.base import create as table_creation
from memwal.flush.base.open import open_dataset
from memwal.flush.base.shape import column_ids, first_ids
from memwal.memtable import IndexSpec, InvalidRows
from memwal.wal import Corrupt, bucket_region
from tests.messages import raises
from tests.support.interpose import killed_at

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("name", pa.string(), metadata={"about": "words"}),
        pa.field("vector", pa.list_(pa.float32(), 4)),
        pa.field("price", pa.int32()),
        pa.field("day", pa.date32()),
    ],
    metadata={"pandas": "noise"},
)
ROUTED_BY_WHOLE_KEY = [3, 2, 3, 1, 0, 2, 1, 0, 0, 2, 0, 3]
"""Buckets of the ids 0 to 11 with one name; the key has both columns."""
INDEXES = [
    IndexSpec("price", "btree"),
    IndexSpec("name", "fts", {"with_position": True}),
    IndexSpec("vector", "ivf_pq", {"metric": "cosine"}),
]


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def create(uri: str, buckets: int = 2) -> BaseTable:
    return BaseTable.create(uri, SCHEMA, ["id"], buckets, INDEXES)


def test_a_created_table_is_found_as_it_was_created(uri: str) -> None:
    create(uri)
    base = BaseTable.open(uri)
    assert (base.key, base.buckets, base.indexes, dict(base.committed)) == (("id",), 2, tuple(INDEXES), {})
    assert base.schema.names == SCHEMA.names
    assert not base.schema.field("id").nullable
    assert base.schema.field("name").metadata == {b"about": b"words"}
    assert not base.schema.metadata
    assert {each.name for each in base.dataset.describe_indices()} >= {"price_idx", "name_idx"}
    details = base.dataset.mem_wal_index_details()
    assert details is not None
    assert (details["sharding_specs"], details["maintained_indexes"]) == ([], [])


def test_nothing_is_there(uri: str) -> None:
    assert BaseTable.find(uri) is None
    with raises(NotALanceTable):
        BaseTable.open(uri)


@pytest.mark.parametrize("begun", [False, True])
def test_a_table_that_another_process_creates_between_two_looks_is_found(
    uri: str, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Daemons that start together all search for the table, and one creates it. `begun`: at the first search its
    first version is not written yet."""
    looks: list[str] = []

    def late(store: Any, at: str, version: int | None = None, session: Any = None) -> Any:
        looks.append(at)
        found = open_dataset(store, at, version, session)
        if len(looks) == 1 and begun:
            store.put("_versions/begun", b"")
        if len(looks) == 1 + begun:
            monkeypatch.setattr(table_creation, "open_dataset", open_dataset)
            store.delete("_versions/begun")
            create(uri)
        return found

    monkeypatch.setattr(table_creation, "open_dataset", late)
    base = BaseTable.find(uri)
    assert base is not None
    assert base.key == ("id",)


def test_something_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for action in (BaseTable.find, BaseTable.open, create):
        with raises(NotALanceTable):
            action(str(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


def test_a_table_is_never_created_over_another(uri: str) -> None:
    create(uri)
    with raises(TableExists):
        create(uri)


def test_of_processes_that_create_a_table_at_once_one_does(tmp_path: Path) -> None:
    for number in range(5):
        at, together = str(tmp_path / str(number)), threading.Barrier(8)

        def created(_: int, at: str = at, together: threading.Barrier = together) -> bool:
            together.wait()
            try:
                return bool(create(at))
            except TableExists:
                return False

        with ThreadPoolExecutor(8) as threads:
            assert sorted(threads.map(created, range(8))) == [False] * 7 + [True]


def test_no_such_version(uri: str) -> None:
    create(uri)
    with raises(NotALanceTable):
        BaseTable.open(uri, version=99)


def test_a_bad_definition_writes_nothing(uri: str) -> None:
    """Which definitions are bad: `test_flush_table_definition`."""
    with raises(InvalidRows):
        BaseTable.create(uri, SCHEMA, ["id", "id"], 2, [])
    assert not Path(uri).exists()


def test_a_creation_that_crashed_is_completed(uri: str) -> None:
    with killed_at(lance.LanceDataset, "initialize_mem_wal"):
        create(uri)
    with raises(NotInitialised):
        BaseTable.open(uri)
    base = BaseTable.find(uri)
    assert base is not None
    assert base.indexes == tuple(INDEXES)


def test_a_creation_that_was_cut_off_before_its_first_version_begins_again(tmp_path: Path) -> None:
    uri = tmp_path / "table.lance"
    for name in ("_transactions/0-a.txn", "_versions/.tmp_1.manifest_b", "_versions/latest_version_hint.json"):
        (uri / name).parent.mkdir(parents=True, exist_ok=True)
        (uri / name).write_bytes(b"")
    assert BaseTable.find(str(uri)) is None
    create(str(uri))
    assert BaseTable.find(str(uri)) is not None


def test_a_plain_lance_table_is_adopted_with_its_rows(uri: str) -> None:
    lance.write_dataset(pa.table({"id": [1, 2], "text": ["a", "b"]}), uri)
    with raises(NotInitialised):
        BaseTable.open(uri)
    base = BaseTable.adopt(uri, ["id"], 3, [IndexSpec("text", "fts")])
    assert (base.key, base.buckets, base.dataset.count_rows()) == (("id",), 3, 2)
    assert BaseTable.adopt(uri, ["id"], 3, []).version == base.version


def test_a_table_that_repeats_a_key_is_not_adopted(uri: str) -> None:
    lance.write_dataset(pa.table({"id": [1, 2, 1]}), uri)
    with raises(InvalidRows):
        BaseTable.adopt(uri, ["id"], 2, [])
    assert lance.dataset(uri).version == 1


def test_the_ids_of_a_new_tables_columns_are_known_before_it_is_written(uri: str) -> None:
    nested = pa.struct([pa.field("x", pa.list_(pa.struct([("y", pa.int64()), ("z", pa.string())]))), ("w", pa.int8())])
    kinds = {"a": pa.int64(), "b": nested, "c": pa.list_(pa.float32(), 4), "d": pa.large_list(pa.int64())}
    schema = pa.schema([*((name, kind) for name, kind in kinds.items()), ("e", pa.timestamp("us")), ("f", nested)])
    dataset = lance.write_dataset(schema.empty_table(), uri)
    assert first_ids(schema) == column_ids(dataset)


def test_field_ids_with_gaps_are_kept(uri: str) -> None:
    dataset = lance.write_dataset(pa.table({"id": [1], "gone": [1], "kept": [{"a": 1, "b": 2}]}), uri)
    dataset.drop_columns(["gone"])
    assert BaseTable.adopt(uri, ["id"], 2, []).row_field_ids == (0, 2, 3, 4, 5)
    assert create(f"{uri}2").row_field_ids is None


def test_a_primary_key_that_a_table_declares_is_its_key(uri: str) -> None:
    lance.write_dataset(pa.table({"id": [1, 2], "n": [1, 1]}, schema=LANCES), uri)
    with raises(InvalidRows):
        BaseTable.adopt(uri, ["n"], 1, [])
    assert BaseTable.adopt(uri, [], 3, []).key == ("id",)


# ---- format of the log ---------------------------------------------------------------------------------------------

LANCES = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field("n", pa.int64()),
    ]
)


def initialised(uri: str, schema: pa.Schema = LANCES, **sharding: Any) -> lance.LanceDataset:
    """Create a table whose MemWAL Lance has initialised, not memwal."""
    dataset = lance.write_dataset(schema.empty_table(), uri, schema=schema)
    dataset.initialize_mem_wal(**sharding)
    return dataset


def test_the_arrow_format_publishes_the_sharding_by_which_rows_are_routed(uri: str) -> None:
    base = BaseTable.create(uri, SCHEMA, ["name", "id"], 4, INDEXES, wal_format="arrow")
    details = base.dataset.mem_wal_index_details()
    assert details is not None
    ((field,),) = (spec["fields"] for spec in details["sharding_specs"])
    assert (field["transform"], field["parameters"], field["source_ids"]) == ("bucket", {"num_buckets": "4"}, [1])
    assert details["maintained_indexes"] == []
    assert (base.wal_format, base.codec.suffix) == ("arrow", "arrow")
    assert base.regions == tuple(bucket_region(n) for n in range(4))


def test_a_table_made_before_there_was_a_choice_has_the_lance_format(uri: str) -> None:
    dataset = create(uri).dataset
    dataset.update_schema_metadata({"memwal:wal_format": None})
    assert BaseTable.open(uri).wal_format == "lance"
    dataset.update_schema_metadata({"memwal:wal_format": "parquet"})
    with raises(UnsupportedTable):
        BaseTable.open(uri)


def test_the_write_rules_belong_to_the_table(uri: str) -> None:
    rules = WriteRules("merge", "fail")
    base = BaseTable.create(uri, SCHEMA, ["id"], 2, [], rules=rules)
    assert base.rules == base.latest().rules == BaseTable.open(uri).rules == rules
    assert BaseTable.adopt(uri, ["id"], 2, [], rules=WriteRules("insert")).rules == rules
    base.dataset.update_schema_metadata({"memwal:upsert": None, "memwal:on_duplicate": None})
    assert BaseTable.open(uri).rules == WriteRules("replace", "last")  # as in a table of a release without this setting
    for key, value in (("memwal:upsert", "append"), ("memwal:on_duplicate", "any")):
        lance.dataset(uri).update_schema_metadata({key: value})
        with raises(UnsupportedTable):
            BaseTable.open(uri)
        lance.dataset(uri).update_schema_metadata({key: None})


def test_an_adopted_table_keeps_its_write_rules_beside_another_programs_metadata_too(uri: str) -> None:
    initialised(uri, bucket_column="id", num_buckets=3)
    rules = WriteRules("insert", "first")
    assert BaseTable.adopt(uri, [], 7, [], rules=rules).rules == BaseTable.open(uri).rules == rules


@pytest.mark.parametrize(
    ("sharding", "regions"),
    [
        ({"bucket_column": "id", "num_buckets": 3}, [bucket_region(n) for n in range(3)]),
        ({"unsharded": True}, [UUID("aa48498d-ac91-59e2-8452-69f46010ace2")]),
    ],
)
def test_a_table_that_another_program_initialised_is_adopted_as_it_is(
    uri: str, sharding: dict[str, Any], regions: list[UUID]
) -> None:
    dataset = initialised(uri, **sharding)
    for action in (BaseTable.open, BaseTable.find):
        with raises(NotInitialised):
            action(uri)
    base = BaseTable.adopt(uri, [], 7, [IndexSpec("n", "btree")])
    assert (base.wal_format, list(base.regions), base.key) == ("arrow", regions, ("id",))
    assert base.indexes == (IndexSpec("n", "btree"),)
    assert lance.dataset(uri).schema.metadata == dataset.schema.metadata  # otherwise the table's log would not fit it
    assert len(base.table_id) == 32
    assert BaseTable.adopt(uri, [], 7, []).version == BaseTable.open(uri).version == base.version


@pytest.mark.parametrize(
    ("sharding", "schema", "arguments"),
    [
        ({"identity_column": "id"}, LANCES, {}),
        ({"bucket_column": "n", "num_buckets": 2}, LANCES, {}),
        ({}, LANCES, {}),
        ({"unsharded": True}, pa.schema([("id", pa.int64())]), {}),
        ({"unsharded": True}, LANCES, {"wal_format": "lance"}),
    ],
)
def test_a_table_that_cannot_be_shared_is_refused_untouched(
    uri: str, sharding: dict[str, Any], schema: pa.Schema, arguments: dict[str, Any]
) -> None:
    version = initialised(uri, schema, **sharding).version
    with raises(UnsupportedTable):
        BaseTable.adopt(uri, ["id"], 2, [], **arguments)
    assert lance.dataset(uri).version == version


@pytest.mark.parametrize("beside_another_program", [False, True])
@pytest.mark.parametrize(
    ("schema_metadata", "config"), [("3", None), (None, "3"), ("1", "3"), ("3", "1"), ("1", "two"), (None, "9" * 5000)]
)
def test_a_newer_storage_version_is_refused_wherever_it_is_written(
    uri: str, schema_metadata: str | None, config: str | None, beside_another_program: bool
) -> None:
    """A later release may raise the storage version, and may write it to another of the possible places."""
    if beside_another_program:
        initialised(uri, bucket_column="id", num_buckets=3)
        BaseTable.adopt(uri, [], 3, [])
    else:
        create(uri)

    def write(in_schema: str | None, in_config: str | None) -> None:
        if in_schema is not None:
            lance.dataset(uri).update_schema_metadata({"memwal:storage": in_schema})
        if in_config is not None:
            lance.dataset(uri).update_config({"memwal:storage": in_config})

    write(schema_metadata, config)
    for action in (BaseTable.open, BaseTable.find):
        with raises(UnsupportedTable):
            action(uri)
    write("1", "1")
    assert BaseTable.open(uri).key


def test_progress_is_that_of_the_version_opened(uri: str) -> None:
    base = create(uri)
    before = base.version
    rows = pa.table({name: [] for name in base.schema.names}, schema=base.schema)
    for generation in (1, 4):
        done = [CompactedSsTable(str(bucket_region(b)), generation + b) for b in range(2)]
        merge = lance.dataset(uri).merge_insert("id").when_not_matched_insert_all().use_index(False)
        merge.mark_sstables_as_compacted(done).execute(rows)
    assert dict(BaseTable.open(uri, version=before).committed) == {}
    assert dict(BaseTable.open(uri, version=before + 1).committed) == {
        bucket_region(0): 1,
        bucket_region(1): 2,
    }
    assert dict(base.latest().committed) == {bucket_region(0): 4, bucket_region(1): 5}
    assert dict(base.committed) == {}


def test_latest_is_the_same_view_until_something_changes(uri: str) -> None:
    base = create(uri)
    assert base.latest() is base
    lance.dataset(uri).update_config({"a": "b"})
    assert base.latest().version == base.version + 1


def test_a_broken_manifest_is_named(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = create(uri)
    path = Path(uri) / "_versions" / f"{2**64 - 1 - base.version:020}.manifest"
    whole = path.read_bytes()
    opened = lance.dataset(uri)
    path.write_bytes(whole[:-4] + b"XXXX")
    monkeypatch.setattr(lance, "dataset", lambda *_, **__: opened)  # pylance would refuse the file first
    with raises(Corrupt):
        BaseTable.open(uri)


@pytest.mark.parametrize("how", ["open", "latest"])
def test_a_version_that_is_cleaned_up_while_it_is_opened_is_no_damage(
    how: str, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program writes a newer version and deletes this one while memwal opens the table: after Lance opened the
    version, before memwal reads it."""
    base = create(uri)
    lance.dataset(uri).update_config({"a": "b"})
    really, left = lance.dataset, [3]

    def overtaken(*args: Any, **named: Any) -> lance.LanceDataset:
        opened = really(*args, **named)
        if left[0]:
            left[0] -= 1
            newer = really(uri)
            newer.update_config({"a": str(left[0])})
            newer.cleanup_old_versions(older_than=timedelta(0))
        return opened

    monkeypatch.setattr(lance, "dataset", overtaken)
    found = BaseTable.open(uri) if how == "open" else base.latest()
    assert (found.version, left) == (really(uri).version, [0])


@pytest.mark.parametrize(
    "keys",
    [
        pa.array(range(2000), pa.int64()),
        pa.array(range(2000), pa.uint32()),
        pa.array([f"k{i}" for i in range(2000)]),
        pa.array([f"k{i}" for i in range(2000)], pa.large_string()),
        pa.array([f"k{i}".encode() for i in range(2000)], pa.binary()),
        pa.array([f"k{i}".encode() for i in range(2000)], pa.large_binary()),
    ],
    ids=lambda keys: str(keys.type),
)
def test_routing_is_even_and_a_pure_function_of_the_key(uri: str, keys: pa.Array) -> None:
    base = BaseTable.create(uri, pa.schema([pa.field("k", keys.type), pa.field("v", pa.int64())]), ["k"], 4, [])
    rows = pa.table({"k": keys})
    buckets = base.route(rows)
    assert buckets.dtype == np.int32
    assert min(Counter(buckets.tolist()).values()) > 300
    shuffled = np.random.default_rng(1).permutation(len(keys))
    assert (BaseTable.open(uri).route(rows.take(pa.array(shuffled))) == buckets[shuffled]).all()
    assert (base.route(rows.slice(100, 5).combine_chunks().to_batches()[0]) == buckets[100:105]).all()


def test_routing_gives_lances_buckets(uri: str) -> None:
    base = BaseTable.create(uri, pa.schema([pa.field("k", pa.string())]), ["k"], 8, [])
    assert base.route(pa.table({"k": ["a", "b"]})).tolist() == [1, 5]


def test_a_composite_key_is_routed_as_a_whole(uri: str) -> None:
    base = BaseTable.create(uri, SCHEMA, ["name", "id"], 4, [])
    assert base.key == ("name", "id")
    rows = pa.table({"id": range(4000), "name": ["always the same"] * 4000})
    buckets = base.route(rows)
    assert min(Counter(buckets.tolist()).values()) > 800
    assert buckets[:12].tolist() == ROUTED_BY_WHOLE_KEY, "rows would move to other regions"
    assert (base.route(rows.select(["name", "id"])) == buckets).all()
    assert (base.route(rows.slice(70, 1)) == buckets[70:71]).all()
    assert (base.route_into(8, rows) // 2 == buckets).all(), "a bucket is split into two"
    assert (BaseTable.open(uri).route(rows) == buckets).all()
    assert base.hashed == ("name", "id")
    assert lance.dataset(uri).schema.metadata[b"memwal:storage"] == b"2", "older processes refuse the table"


def test_where_lance_routes_or_an_older_version_did_the_first_column_of_the_key_counts(
    uri: str, tmp_path: Path
) -> None:
    rows = pa.table({"id": range(8), "name": ["a", "b"] * 4})
    arrow = BaseTable.create(uri, SCHEMA, ["name", "id"], 4, [], wal_format="arrow")
    older = str(tmp_path / "older.lance")
    BaseTable.create(older, SCHEMA, ["name", "id"], 4, [])
    dataset = lance.dataset(older)
    dataset.update_schema_metadata({"memwal:routed_by": None, "memwal:storage": None})
    for base in (arrow, BaseTable.open(older)):
        buckets = base.route(rows)
        assert len(set(buckets[::2].tolist())) == len(set(buckets[1::2].tolist())) == 1
        assert base.hashed == ("name",)
        assert b"memwal:storage" not in lance.dataset(base.uri).schema.metadata
