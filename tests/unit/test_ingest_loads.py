"""Files that a load reads: found, read to the same rows in every format, and rejected by file, row and column."""

from __future__ import annotations

import datetime
import gzip
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

import memwal
from memwal.flush import BaseTable, WriteRules
from memwal.ingest.engine.loads import formats
from memwal.ingest.engine.loads.checked import CheckedRows, check_files, check_rules
from memwal.ingest.engine.loads.files import find_files, token_of
from memwal.ingest.errors import Invalid
from memwal.memtable import IndexSpec
from tests.messages import raises

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("total", pa.float32()),
        pa.field("small", pa.int8()),
        pa.field("large", pa.uint64()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("day", pa.date32()),
        pa.field("ok", pa.bool_()),
        pa.field("data", pa.binary()),
    ]
)
VECTOR = pa.field("vector", pa.list_(pa.float32(), 3))


def rows(count: int = 20, *, vectors: bool = False) -> pa.Table:
    """Return rows with every value, and some rows with only the key."""
    made = [
        {
            "id": id,
            "name": f'row, "{id}"',
            "total": id / 4,
            "small": id % 100,
            "large": 2**64 - 1 - id,
            "at": datetime.datetime(2026, 1, 1, 0, 0, id % 60, 5, tzinfo=datetime.UTC),
            "day": datetime.date(2026, 1, 1 + id % 28),
            "ok": id % 2 == 0,
            "data": bytes([id % 256, 0]),
            "vector": [id, 0.5, -1.0],
        }
        if id % 5
        else {"id": id}
        for id in range(count)
    ]
    return pa.Table.from_pylist(made, SCHEMA.append(VECTOR) if vectors else SCHEMA)


@pytest.fixture
def base(tmp_path: Path) -> BaseTable:
    return BaseTable.create(str(tmp_path / "table"), SCHEMA, ["id"], 2, [])


def read_back(checked: CheckedRows) -> pa.Table:
    return pa.Table.from_batches(list(checked.rows.batches()), checked.rows.schema)


def text_of(value: Any) -> Any:
    """Return a value as JSON and CSV contain it."""
    if isinstance(value, bytes):
        import base64

        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, datetime.date) else value


def as_json(table: pa.Table) -> bytes:
    lines = [json.dumps({k: text_of(v) for k, v in row.items() if v is not None}) for row in table.to_pylist()]
    return ("\n".join(lines) + "\n").encode()


def as_csv(table: pa.Table, path: Path) -> None:
    def cell(value: Any) -> str:
        text = str(text_of(value)).lower() if isinstance(value, bool) else str(text_of(value))
        return "" if value is None else '"' + text.replace('"', '""') + '"'

    lines = [",".join(table.column_names), *(",".join(map(cell, row.values())) for row in table.to_pylist())]
    path.write_text("\n".join(lines) + "\n")


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, 7)


def write_file(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, 7)


WRITERS: Mapping[str, Callable[[pa.Table, Path], Any]] = {
    "a.parquet": lambda table, path: pa.parquet.write_table(table, path, row_group_size=6),
    "a.pq": pa.parquet.write_table,
    "a.ndjson": lambda table, path: path.write_bytes(as_json(table)),
    "a.jsonl.gz": lambda table, path: path.write_bytes(gzip.compress(as_json(table))),
    "a.json": lambda table, path: path.write_bytes(b"\n" + as_json(table).rstrip().replace(b"\n", b"\r\n\n")),
    "a.csv": as_csv,
    "a.arrow": write_file,
    "a.ipc": write_stream,
    "a.feather": lambda table, path: pa.feather.write_feather(table, path, compression="zstd"),
    "a.lance": lambda table, path: lance.write_dataset(table, path, max_rows_per_file=6),
}


# ---- the same rows in every format ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(base: BaseTable, tmp_path: Path, name: str) -> None:
    wanted = rows()
    WRITERS[name](wanted, tmp_path / name)
    checked = check_files(base, find_files([str(tmp_path / name)], None, {}))
    assert (checked.read, checked.duplicates, checked.rows.number) == (20, 0, 20)
    assert checked.rows.keys is not None
    assert checked.rows.keys.column("id").to_pylist() == list(range(20))
    for _ in range(2):
        found = read_back(checked)
        assert found.schema.equals(base.schema, check_metadata=True)
        assert found.to_pylist() == wanted.to_pylist()


@pytest.mark.parametrize("way", ["fast", "exact"])
@pytest.mark.parametrize("name", ["a.ndjson", "a.parquet", "a.arrow", "a.lance"])
def test_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str) -> None:
    wanted = rows(vectors=True)
    base = BaseTable.create(str(tmp_path / "table"), wanted.schema, ["id"], 1, [IndexSpec("vector", "ivf_pq")])
    WRITERS[name](wanted, tmp_path / name)
    if way == "exact":
        monkeypatch.setattr(formats.json_columns, "plain", lambda *_, **__: None)
    checked = check_files(base, find_files([str(tmp_path / name)], None, {}))
    assert read_back(checked).to_pylist() == wanted.to_pylist()


def test_several_files_and_columns_that_some_lack(base: BaseTable, tmp_path: Path) -> None:
    pa.parquet.write_table(rows(9000), tmp_path / "1.parquet")
    (tmp_path / "2.csv").write_text("name,id\nx,20000\n,20001\n")
    told: list[tuple[int, str]] = []
    files = find_files([str(tmp_path / "*.parquet"), str(tmp_path / "2.csv")], None, {})
    checked = check_files(base, files, lambda read, name: told.append((read, Path(name).name)), missing="null")
    assert told == [(8192, "1.parquet"), (9000, "1.parquet"), (9002, "2.csv")]
    assert read_back(checked).slice(9000).select(["id", "name", "ok"]).to_pylist() == [
        {"id": 20000, "name": "x", "ok": None},
        {"id": 20001, "name": None, "ok": None},
    ]


def test_a_file_that_lacks_columns_is_refused_where_rows_are_replaced(base: BaseTable, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,name\n1,x\n")
    (tmp_path / "a.ndjson").write_text('{"id": 1, "name": "x"}\n')
    with raises(Invalid):
        check_files(base, find_files([str(tmp_path / "a.csv")], None, {}))
    assert check_files(base, find_files([str(tmp_path / "a.ndjson")], None, {})).read == 1


def test_no_rows(base: BaseTable, tmp_path: Path) -> None:
    pa.parquet.write_table(rows(0), tmp_path / "none.parquet")
    checked = check_files(base, find_files([str(tmp_path / "none.parquet")], None, {}))
    assert (checked.read, checked.rows.number, read_back(checked).num_rows) == (0, 0, 0)


# ---- refused -------------------------------------------------------------------------------------------------------

WRONG: Mapping[str, str] = {
    "no_json.ndjson": '{"id": 1}\n{"id": 2\n',
    "a_list.json": '[{"id": 1}]',
    "unknown.ndjson": '{"id": 1}\n{"id": 2, "nmae": "x"}',
    "number.ndjson": '{"id": 1, "name": 5}',
    "fraction.ndjson": '{"id": 1.5}',
    "range.ndjson": '{"id": 1}\n{"id": 2, "small": 300}',
    "twice.ndjson": '{"id": 1, "id": 2}',
    "no_key.ndjson": '{"id": 1}\n{"name": "x"}',
    "time.ndjson": '{"id": 1, "at": "yesterday"}',
    "unknown.csv": "id,totl\n1,2\n",
    "text.csv": "id,total\n1,1\n2,two\n",
    "infinite.csv": "id,total\n1,inf\n",
    "range.csv": "id,small\n1,128\n",
    "no_key.csv": "id,name\n1,x\n,y\n",
    "lacks_key.csv": "name\nx\n",
    "twice.csv": "id,name,name\n1,x,y\n",
    "header.csv": '"id,name\n1,x\n',
    "open.csv": 'id,name\n1,"x\n2,y\n',
    "behind.csv": 'id,name\n1,x\n2,"y"z\n',
    "short.csv": "id,name\n1,x\n2\n",
    "no_parquet.parquet": "id,name\n",
    "no_arrow.arrow": "id,name\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_texts_are_refused_by_file_row_and_column(base: BaseTable, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(WRONG[name])
    with raises(Invalid):
        check_files(base, find_files([str(tmp_path / name)], None, {}))


def vectors(second: list[Any]) -> pa.Table:
    return pa.table({"id": [1, 2], "vector": pa.array([[1.0, 2.0, 3.0], second], pa.list_(pa.float32()))})


TWICE = pa.table([pa.array([1]), pa.array(["x"]), pa.array(["y"])], ["id", "name", "name"])
WRONG_TABLES: dict[str, tuple[str, pa.Table]] = {
    "out of range": ("a.pq", pa.table({"id": range(9001), "small": [1] * 9000 + [300]})),
    "a null key": ("a.pq", pa.table({"id": [*range(9000), None]})),
    "numbers as text": ("a.pq", pa.table({"id": range(9001), "name": range(9001)})),
    "text as numbers": ("a.pq", pa.table({"id": range(9001), "total": ["1"] * 9001})),
    "the column of deletes": ("a.pq", pa.table({"id": range(9001), "_tombstone": [True] * 9001})),
    **{f"a column twice, {name}": (name, TWICE) for name in ("a.parquet", "a.arrow", "a.ipc")},
    "a short vector": ("a.pq", vectors([1.0, 2.0])),
    "a vector with NaN": ("a.pq", vectors([float("nan"), 1, 2])),
    "a vector with a null": ("a.pq", vectors([1.0, None, 2.0])),
}


@pytest.mark.parametrize("case", WRONG_TABLES)
def test_wrong_tables_are_refused_by_file_row_and_column(tmp_path: Path, case: str) -> None:
    name, table = WRONG_TABLES[case]
    indexes = [IndexSpec("vector", "ivf_pq")]
    base = BaseTable.create(str(tmp_path / "table"), SCHEMA.append(VECTOR), ["id"], 1, indexes)
    WRITERS[name](table, tmp_path / name)
    with raises(Invalid):
        check_files(base, find_files([str(tmp_path / name)], None, {}), missing="null")


def test_files_that_cannot_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "a.csv").write_text("id\n1\n")
    wrong = ["none.csv", "none*.csv", "a.txt", ".", "gs://bucket/a.csv"]
    monkeypatch.chdir(tmp_path)
    with raises(Invalid):
        find_files([*wrong, "a.csv", "./a.csv"], None, {})
    with raises(Invalid):
        find_files(["a.csv"], "cvs", {})
    assert [file.format for file in find_files(["a.txt", "*.csv"], "ndjson", {})] == ["ndjson", "ndjson"]


def test_rules_that_a_load_cannot_follow_are_refused(tmp_path: Path) -> None:
    for name, rules in (
        ("merge", WriteRules("merge")),
        ("insert", WriteRules("insert")),
        ("v", WriteRules(version="small")),
    ):
        base = BaseTable.create(str(tmp_path / name), SCHEMA, ["id"], 1, [], rules=rules)
        with raises(Invalid):
            check_rules(base)
    check_rules(
        BaseTable.create(str(tmp_path / "first"), SCHEMA, ["id"], 1, [], rules=WriteRules(on_duplicate="first"))
    )


# ---- keys that stand twice -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "names"), [("last", ["c", "b"]), ("first", ["a", "b"])])
def test_of_several_rows_with_one_key_one_counts(tmp_path: Path, rule: Any, names: list[str]) -> None:
    base = BaseTable.create(str(tmp_path / "t"), SCHEMA, ["id"], 1, [], rules=WriteRules(on_duplicate=rule))
    (tmp_path / "1.csv").write_text("id,name\n1,a\n2,b\n")
    (tmp_path / "2.csv").write_text("id,name\n1,c\n")
    checked = check_files(base, find_files([str(tmp_path / "[12].csv")], None, {}), missing="null")
    assert (checked.read, checked.duplicates, checked.rows.number) == (3, 1, 2)
    found = {row["id"]: row["name"] for row in read_back(checked).to_pylist()}
    assert [found[1], found[2]] == names
    assert checked.rows.keys is not None
    assert sorted(checked.rows.keys.column("id").to_pylist()) == [1, 2]


def test_keys_that_stand_twice_may_be_refused(tmp_path: Path) -> None:
    keyed = SCHEMA.set(1, pa.field("name", pa.string(), nullable=False))
    base = BaseTable.create(str(tmp_path / "t"), keyed, ["id", "name"], 1, [], rules=WriteRules(on_duplicate="fail"))
    (tmp_path / "1.csv").write_text("id,name\n1,a\n2,b\n1,b\n")
    (tmp_path / "2.csv").write_text("id,name\n3,b\n2,b\n1,b\n")
    with raises(Invalid):
        check_files(base, find_files([str(tmp_path / "[12].csv")], None, {}), missing="null")


def test_a_pipe_is_refused_by_its_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    with raises(Invalid):
        find_files([str(tmp_path / "a.csv")], None, {})


def test_the_first_row_of_csv_may_have_a_long_text_of_several_lines(base: BaseTable, tmp_path: Path) -> None:
    text = "line\n" * 300_000
    (tmp_path / "a.csv").write_text(f'id,name\n1,"{text}"\n2,x\n')
    checked = check_files(base, find_files([str(tmp_path / "a.csv")], None, {}), missing="null")
    assert read_back(checked)["name"].to_pylist() == [text, "x"]


def test_a_table_with_rows_that_are_not_committed_is_refused(tmp_path: Path) -> None:
    """A load reads the base table, which lacks these rows and still has the rows that they delete."""
    schema = pa.schema([SCHEMA.field("id"), SCHEMA.field("name")])
    settings = {"commit": {"interval": "0s"}}
    uri, other = str(tmp_path / "from.lance"), BaseTable.create(str(tmp_path / "to.lance"), schema, ["id"], 1, [])
    with memwal.open(uri, schema=schema, key="id", settings=settings) as table:
        table.put([{"id": 1}, {"id": 2}], missing="null")
        for step in (table.flush, table.commit):
            with raises(Invalid):
                find_files([uri], None, {})
            step()
        (file,) = find_files([uri], None, {})
        assert check_files(other, [file]).read == 2
        table.delete([1])
        with raises(Invalid):
            find_files([uri], None, {})


def test_without_a_key_every_row_counts(tmp_path: Path) -> None:
    base = BaseTable.create(str(tmp_path / "t"), SCHEMA.remove(0), [], 1, [], append_by=())
    (tmp_path / "1.csv").write_text("name\na\na\n")
    checked = check_files(base, find_files([str(tmp_path / "1.csv")], None, {}))
    assert (checked.read, checked.duplicates, checked.rows.keys) == (2, 0, None)
    assert read_back(checked).column("name").to_pylist() == ["a", "a"]


# ---- files that change ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "has_key"), [("appended", True), ("appended", False), ("same size and time", True)])
def test_a_file_that_changes_is_found_out(tmp_path: Path, how: str, has_key: bool) -> None:
    append: dict[str, Any] = {} if has_key else {"append_by": ()}
    base = BaseTable.create(str(tmp_path / "t"), SCHEMA, ["id"] if has_key else [], 1, [], **append)
    path = tmp_path / "a.csv"
    path.write_text("id,name\n1,a\n2,b\n")
    checked = check_files(base, find_files([str(path)], None, {}), missing="null")
    before = path.stat()
    path.write_text("id,name\n1,a\n3,b\n" if how != "appended" else "id,name\n1,a\n2,b\n3,c\n")
    if how != "appended":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with raises(Invalid):
        list(checked.rows.batches())


def test_a_lance_table_is_read_at_one_version(base: BaseTable, tmp_path: Path) -> None:
    lance.write_dataset(rows(5), tmp_path / "in.lance")
    checked = check_files(base, find_files([str(tmp_path / "in.lance")], None, {}))
    lance.write_dataset(rows(5), tmp_path / "in.lance", mode="append")
    assert read_back(checked).num_rows == 5


# ---- tokens --------------------------------------------------------------------------------------------------------


def test_a_token_is_of_the_contents(tmp_path: Path) -> None:
    def token(*names: str) -> str:
        return token_of(find_files([str(tmp_path / name) for name in names], None, {}))

    for name, text in (("a.csv", "id\n1\n"), ("b.csv", "id\n1\n"), ("c.csv", "id\n2\n")):
        (tmp_path / name).write_text(text)
    assert token("a.csv") == token("b.csv") != token("c.csv")
    assert token("a.csv", "c.csv") != token("c.csv", "a.csv")
    lance.write_dataset(rows(5), tmp_path / "in.lance")
    before = token("in.lance")
    assert before == token("in.lance")
    assert before.startswith("sha256:")
    lance.dataset(tmp_path / "in.lance").delete("id = 1")
    assert token("in.lance") != before
    assert len(np.unique([token("a.csv"), token("c.csv"), before])) == 3
