"""Lance tables made by other programs: `memwal init` adopts them with their contents, or rejects them in one line."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.flush import BaseTable
from memwal.flush.base import adoptable
from memwal.flush.verification.runner import verify_table
from memwal.ingest.engine.table.create import initialise
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import load
from memwal.memtable import IndexSpec, InvalidRows
from memwal.wal import open_store
from tests.messages import raises

COUNT, WIDTH = 400, 8
QUIET = {"commit": {"interval": 0}}


def init(uri: str, **table: Any) -> BaseTable:
    return initialise(load({"table": {"uri": uri, "key": ["id"], **table}}, {}), {})[0]


def rows(first: int = 0) -> pa.Table:
    """Return texts that stemming changes, and vectors whose nearest one by angle is not the nearest by distance."""
    lengths = np.linspace(0.1, 9, COUNT)[:, None]
    vectors = np.random.default_rng(first + 1).normal(size=(COUNT, WIDTH)) * lengths
    return pa.table(
        {
            "id": pa.array(range(first, first + COUNT)),
            "text": [f"dogs running {n % 7}" for n in range(COUNT)],
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.astype("f4").ravel()), WIDTH),
        }
    )


# ---- refused ---------------------------------------------------------------------------------------------------------


def struct_in_20(uri: str) -> None:
    lance.write_dataset(pa.table({"id": [1], "st": [{"a": 1}]}), uri, data_storage_version="2.0")


def struct_in_list_in_20(uri: str) -> None:
    lance.write_dataset(pa.table({"id": [1], "l": [[{"a": 1}]]}), uri, data_storage_version="2.0")


def blob(uri: str) -> None:
    field = pa.field("body", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([pa.field("id", pa.int64()), field])
    lance.write_dataset(pa.table({"id": [1], "body": [b"x"]}, schema=schema), uri, data_storage_version="2.1")


def legacy(uri: str) -> None:
    lance.write_dataset(pa.table({"id": [1], "v": [1]}), uri, data_storage_version="0.1")


def null_key(uri: str) -> None:
    lance.write_dataset(pa.table({"id": [1, None, 3]}), uri)


def doubled_key(uri: str) -> None:
    lance.write_dataset(pa.table({"id": [1, 2, 1, 2]}), uri)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (struct_in_20, "column 'st' has the type struct<a: int64>, and files of the format 2.0 hold no null structs"),
        (struct_in_list_in_20, "column 'l' has the type"),
        (blob, "column 'body' is a blob column"),
        (legacy, "its files have the format 0.1"),
        (null_key, "column 'id' is null in 1 or more rows"),
        (doubled_key, "2 of 4 rows repeat a key of id"),
    ],
)
def test_what_cannot_be_ingested_into_is_refused_in_one_line_and_left_as_it_is(
    tmp_path: Path, cli: Callable[..., Any], make: Callable[[str], None], says: str
) -> None:
    uri, config = str(tmp_path / "t.lance"), tmp_path / "c.toml"
    make(uri)
    before = lance.dataset(uri).version
    config.write_text(f'[table]\nuri = "{uri}"\nkey = ["id"]\n')
    ran = cli("init", str(config))
    assert ran.code == 2
    (line,) = ran.error_lines
    assert says in line
    assert line.startswith("memwal: ")
    assert lance.dataset(uri).version == before


def test_files_of_the_format_20_without_structs_are_adopted_and_deleted_from(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(), uri, data_storage_version="2.0")
    init(uri)
    with memwal.open(uri, settings=QUIET) as table:
        table.delete([3])
        table.flush()
        table.commit()
        assert table.count(level="committed") == COUNT - 1


# ---- existing indexes ------------------------------------------------------------------------------------------------


def test_a_full_text_index_keeps_its_parameters_for_fresh_rows(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    there = lance.write_dataset(rows(), uri)
    there.create_scalar_index("text", "INVERTED", stem=False, remove_stop_words=False, with_position=True)
    base = init(uri, indexes={"text": "fts"})
    wanted = {"stem": False, "remove_stop_words": False, "with_position": True}
    assert base.indexes == (IndexSpec("text", "fts", wanted),)
    with memwal.open(uri, settings=QUIET) as table:
        table.put(rows(COUNT))
        for text, count in (("run", 0), ("running", 2 * COUNT), ('"dogs running"', 2 * COUNT)):
            assert table.match("text", text, k=10_000).num_rows == count
        table.flush()
        table.commit()
        assert table.match("text", "run", k=10_000, level="committed").num_rows == 0
        assert table.match("text", "running", k=10_000, level="committed").num_rows == 2 * COUNT


def test_a_vector_index_is_searched_by_its_own_metric(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    there = lance.write_dataset(rows(), uri)
    there.create_index("vector", "IVF_PQ", metric="cosine", num_partitions=2, num_sub_vectors=4)
    (spec,) = init(uri, indexes={"vector": "ivf_pq"}).indexes
    assert (spec.parameters["metric"], spec.parameters["num_sub_vectors"]) == ("cosine", 4)
    query = np.ones(WIDTH, np.float32)
    with memwal.open(uri, settings=QUIET) as table:
        table.put(rows(COUNT))
        fresh = table.search("vector", query, k=5)
        table.flush()
        table.commit()
        committed = table.search("vector", query, k=5, level="committed")
        held = table.scan(["id", "vector"]).read_all().to_pydict()
    vectors = np.array(held["vector"])
    distances = 1 - vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    nearest = np.array(held["id"])[np.argsort(distances)[:5]].tolist()
    assert fresh["id"].to_pylist() == committed["id"].to_pylist() == nearest


def test_an_index_of_another_name_is_used_and_no_second_one_is_built(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    there = lance.write_dataset(rows(), uri)
    there.create_scalar_index("text", "INVERTED", name="words", stem=False)
    there.create_scalar_index("id", "BTREE", name="by number")
    base = init(uri, indexes={"text": "fts", "id": "btree"})
    known = [(spec.name, dict(spec.parameters)) for spec in base.indexes]
    assert known == [("words", {"stem": False}), ("by number", {})]
    with memwal.open(uri, settings=QUIET) as table:
        table.put(rows(COUNT))
        table.flush()
        table.commit()
        assert table.match("text", "running", k=10_000, level="committed").num_rows == 2 * COUNT
    names = {index.name for index in lance.dataset(uri).describe_indices()} - {"__lance_mem_wal"}
    assert names == {"words", "by number"}
    assert BaseTable.open(uri).indexes == base.indexes


@pytest.mark.parametrize(
    ("kind", "parameters", "wanted"),
    [
        ("INVERTED", {"stem": False}, {"type": "fts", "stem": True}),
        ("BTREE", {}, {"type": "fts"}),
        ("INVERTED", {"analyzer": "code"}, {"type": "fts"}),
    ],
)
def test_another_index_than_the_one_that_is_there_is_refused(
    tmp_path: Path, kind: Any, parameters: dict[str, Any], wanted: dict[str, Any]
) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(), uri).create_scalar_index("text", kind, **parameters)
    with raises(InvalidRows):
        init(uri, indexes={"text": wanted})
    assert lance.dataset(uri).version == 2


# ---- the key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "held"), [(pa.int64(), 1 << 23), (pa.int64(), 1_000), (pa.string(), 1_000), (pa.uint8(), 1_000)], ids=str
)
def test_keys_are_compared_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, held: int
) -> None:
    monkeypatch.setattr(adoptable, "_HELD", held)
    monkeypatch.setattr(adoptable, "_BATCH_ROWS", 500)
    count = 250 if kind == pa.uint8() else 5_000
    numbers = pa.array(range(count))
    keys = (numbers if pa.types.is_integer(kind) else numbers.cast(pa.string())).cast(kind)
    dataset = lance.write_dataset(pa.table({"a": keys, "b": pa.array([7] * count)}), tmp_path / "t")
    adoptable.expect_key("t", dataset, ["a"])
    adoptable.expect_key("t", dataset, ["b", "a"])
    with raises(InvalidRows):
        adoptable.expect_key("t", dataset, ["b"])
    more = lance.write_dataset(pa.table({"a": keys.slice(3, 2), "b": pa.array([7, 8])}), tmp_path / "t", mode="append")
    with raises(InvalidRows):
        adoptable.expect_key("t", more, ["a"])
    with raises(InvalidRows):
        adoptable.expect_key("t", more, ["a", "b"])


def test_keys_of_one_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = lance.write_dataset(pa.table({"a": ["x", "y", "z"]}), tmp_path / "t")
    monkeypatch.setattr(adoptable, "_hash", lambda keys: np.zeros(keys.num_rows, np.uint64))
    adoptable.expect_key("t", dataset, ["a"])


def test_the_keys_of_a_large_table_are_not_all_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoptable, "_HELD", 20_000)
    monkeypatch.setattr(adoptable, "_BATCH_ROWS", 4_096)
    keys = [f"a key of some length, as an address is one: {number:040}" for number in range(100_000)]
    dataset = lance.write_dataset(pa.table({"a": keys}), tmp_path / "t")
    size = sum(map(len, keys))
    tracemalloc.start()
    sizes: list[int] = []
    batches = lance.LanceScanner.to_batches

    def watched(scanner: lance.LanceScanner) -> Any:
        for batch in batches(scanner):
            sizes.append(batch.nbytes)
            yield batch

    monkeypatch.setattr(lance.LanceScanner, "to_batches", watched)
    try:
        adoptable.expect_key("t", dataset, ["a"])
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()
    assert len(sizes) > 1
    assert max(sizes) < size / 10


# ---- created and verified --------------------------------------------------------------------------------------------

ID = pa.field("id", pa.int64(), nullable=False)
PRIMARY = {"lance-schema:unenforced-primary-key": "true"}


@pytest.mark.parametrize(
    ("field", "index"),
    [
        (pa.field("c", pa.large_binary(), metadata={"lance-encoding:blob": "true"}), None),
        (pa.field("c", pa.string(), metadata={"ARROW:extension:name": "arrow.json"}), None),
        (pa.field("c", pa.string(), metadata=PRIMARY), None),
        (pa.field("c", pa.string()), {"type": "fts", "language": "Tamil"}),
    ],
    ids=["blob", "json", "primary key", "language"],
)
def test_a_table_that_is_refused_leaves_nothing_behind(tmp_path: Path, field: pa.Field, index: Any) -> None:
    uri, indexes = tmp_path / "t.lance", None if index is None else {"c": index}
    with raises(Invalid):
        memwal.open(uri, schema=pa.schema([ID, field]), key="id", indexes=indexes)
    assert not uri.exists()
    memwal.open(uri, schema=pa.schema([ID, pa.field("c", pa.string())]), key="id").close()


def verified(uri: str) -> list[str]:
    return [str(finding) for finding in verify_table(open_store(uri), uri, deep=True).findings]


def test_an_index_over_nulls_only_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lance writes no file for a vector index without vectors."""
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([ID, pa.field("vector", pa.list_(pa.float32(), WIDTH))])
    nulls = pa.nulls(300, schema.field("vector").type)
    there = lance.write_dataset(pa.table({"id": range(300), "vector": nulls}, schema), uri)
    there.create_index("vector", "IVF_PQ", num_partitions=1, num_sub_vectors=4)
    assert not any(segment.size_bytes for index in there.describe_indices() for segment in index.segments)
    assert not (tmp_path / "t.lance" / "_indices").exists()
    init(uri, indexes={"vector": "ivf_pq"})
    assert verified(uri) == []
    with memwal.open(uri, settings=QUIET) as table:
        table.put(rows(1_000).select(schema.names))
        table.flush()
        table.commit()
        assert verified(uri) == []
        for level in ("latest", "committed"):
            assert table.search("vector", np.ones(WIDTH), k=10, level=level).num_rows == 10
    assert "cannot read the model" not in caplog.text


def test_an_index_whose_files_are_gone_is_damage_still(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(), uri)
    init(uri, indexes={"text": "fts"})
    for directory in (tmp_path / "t.lance" / "_indices").iterdir():
        shutil.rmtree(directory)
    assert ["is missing; index text_idx" in line for line in verified(uri)] == [True]


@pytest.mark.parametrize("make", [struct_in_20, struct_in_list_in_20, blob, legacy])
def test_verify_says_what_init_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[str], None]
) -> None:
    """Covers a table that was set up without the checks of `memwal init`."""
    uri = str(tmp_path / "t.lance")
    make(uri)
    with monkeypatch.context() as before:
        before.setattr("memwal.flush.base.create.expect_fit", lambda *_: None)
        init(uri)
    (line,) = verified(uri)
    assert line.startswith("column")
    assert "; copy its rows into a new table" in line
