"""Find-or-create, partial-column upserts and the rule for equal keys in one put, on real tables with all levels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.ingest.engine.region.resolve import StoredRows
from memwal.ingest.errors import Invalid
from tests.conftest import Cli, SmallConfig
from tests.messages import raises
from tests.ways import entered

SCHEMA = pa.schema(
    [
        pa.field("k", pa.string(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
        pa.field("m", pa.int64()),
        pa.field("text", pa.string()),
        pa.field("must", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)
INDEXES = {"vector": "ivf_pq", "text": "fts", "m": "btree"}
STAGES = ("memtable", "sst", "base", "reopened")


def opened(path: Path, upsert: str = "replace", on_duplicate: str = "last", **sections: Any) -> Any:
    """Open the table with the key (k, n) in two regions."""
    table = {"upsert": upsert, "on_duplicate": on_duplicate}
    settings = {"commit": {"interval": "0s"}, "table": table, **sections}
    if (path / "t.lance").exists():
        return memwal.open(path / "t.lance", settings=settings, take_over=True)
    return memwal.open(path / "t.lance", schema=SCHEMA, key=["k", "n"], regions=2, indexes=INDEXES, settings=settings)


def row(n: int, version: int = 0) -> dict[str, Any]:
    """Return a row that differs from every other in every column."""
    vector = [float(n), float(version)]
    return {"k": f"key {n % 3}", "n": n, "m": n + 100 * version, "text": f"v{version}", "must": n, "vector": vector}


def rows(ids: Any, version: int = 0) -> list[dict[str, Any]]:
    return [row(n, version) for n in ids]


def found(table: Any, level: str = "latest") -> dict[int, Any]:
    """Return all rows by n; each key occurs once."""
    read = table.scan(level=level).read_all().to_pylist()
    by_key = {each["n"]: each for each in read}
    assert len(by_key) == len(read)
    return by_key


def moved(table: Any, path: Path, stage: str, **options: Any) -> Any:
    """Bring everything in the table to `stage`; return the table, which is a new object if it was reopened."""
    if stage in ("sst", "base"):
        table.flush()
    if stage == "base":
        table.commit()
    if stage == "reopened":
        table.close()
        return opened(path, **options)
    return table


@pytest.fixture(params=["embedded", "flight"])
def way_in(request: pytest.FixtureRequest, ends: ExitStack) -> Callable[[Any], Any]:
    """Turn a table into the object that the test calls."""
    return lambda table: entered(request.param, table, ends)


# ---- stored rows at every level ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
@pytest.mark.parametrize("stage", STAGES)
def test_merge_keeps_the_columns_that_a_put_does_not_have(stage: str, wal_format: str, tmp_path: Path) -> None:
    options = {"upsert": "merge", "wal": {"format": wal_format}}
    table = opened(tmp_path, **options)
    table.put(rows(range(8)))
    table.delete([(row(0)["k"], 0)])
    table = moved(table, tmp_path, stage, **options)
    table.put([{"k": row(n)["k"], "n": n, "text": "new"} for n in range(1, 5)])
    table.put(pa.table({"n": [3, 4], "k": [row(3)["k"], row(4)["k"]], "text": pa.nulls(2), "must": [30, 40]}))
    table.put([{"k": row(0)["k"], "n": 0, "must": 7}])
    nothing = {"m": None, "text": None, "vector": None}
    expected = {n: {**row(n), "text": "new"} for n in (1, 2)} | {n: row(n) for n in (5, 6, 7)}
    expected |= {n: {**row(n), "text": None, "must": 10 * n} for n in (3, 4)}
    expected[0] = {**row(0), **nothing, "must": 7}
    assert found(table) == expected
    # The indexes hold the merged rows, and not their parts.
    assert table.search("vector", [2.0, 0.0], k=1).drop(["_distance"]).to_pylist() == [expected[2]]
    assert {each["n"] for each in table.match("text", "new").to_pylist()} == {1, 2}
    assert table.count("m = 5") == 1
    table = moved(table, tmp_path, "reopened", **options)
    assert found(table, "durable") == expected
    table.flush()
    table.commit()
    assert found(table, "committed") == expected
    table.close()


def test_keys_that_another_program_commits_to_the_base_table_count(tmp_path: Path) -> None:
    for upsert, expected in (("insert", {2: row(2, 9), 3: row(3)}), ("merge", {2: {**row(2, 9), "m": 0}, 3: row(3)})):
        with opened(tmp_path / upsert, upsert) as table:
            table.put(rows([3, 4]))
            table.flush()
            table.commit()
            dataset = lance.dataset(tmp_path / upsert / "t.lance")
            stranger = pa.Table.from_pylist(rows([2], 9), schema=SCHEMA).cast(pa.schema(list(dataset.schema)))
            lance.write_dataset(stranger, dataset.uri, mode="append")
            lance.dataset(dataset.uri).delete("n = 4")
            put = [{"k": row(2)["k"], "n": 2, "m": 0}] if upsert == "merge" else rows([2])
            table.put(put)
            assert found(table) == expected
            assert table.put(rows([4], 5)).skipped == 0
            assert found(table) == expected | {4: row(4, 5)}


def test_a_stored_value_that_no_put_may_have_is_told_of(tmp_path: Path) -> None:
    """Another program's vectors may be infinite or NaN; only a put that would keep such a vector is rejected."""
    with opened(tmp_path, "merge") as table:
        dataset = lance.dataset(tmp_path / "t.lance")
        stranger = {**row(1), "vector": [float("nan"), 0.0]}
        fields = pa.schema(list(dataset.schema))
        lance.write_dataset(pa.Table.from_pylist([stranger], schema=SCHEMA).cast(fields), dataset.uri, mode="append")
        with raises(Invalid):
            table.put([{"k": row(1)["k"], "n": 1, "m": 5}])
        table.put([{"k": row(1)["k"], "n": 1, "vector": [1.0, 1.0]}])
        assert found(table) == {1: {**row(1), "vector": [1.0, 1.0]}}


# ---- concurrent writers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
def test_of_twenty_threads_that_insert_a_key_exactly_one_creates_it(durable: bool, tmp_path: Path) -> None:
    limits = {"memtable": {"rows_max": 40}, "commit": {"interval": "50ms"}}
    threads, keys = 20, 60
    receipts: dict[int, list[Any]] = {thread: [] for thread in range(threads)}
    with opened(tmp_path, "insert", **limits) as table:

        def insert(thread: int) -> None:
            order = np.random.default_rng(thread).permutation(keys).tolist()
            for at in range(0, keys, 6):
                receipts[thread].append(table.put(rows(order[at : at + 6], thread), durable=durable))

        running = [threading.Thread(target=insert, args=(thread,)) for thread in range(threads)]
        for each in running:
            each.start()
        for each in running:
            each.join(120)
        last = found(table)
    assert set(last) == set(range(keys))
    creator = {n: int(each["text"][1:]) for n, each in last.items()}
    assert last == {n: row(n, version) for n, version in creator.items()}
    for thread, told in receipts.items():
        created = sum(receipt.rows - receipt.skipped for receipt in told)
        assert created == sum(version == thread for version in creator.values())
    with opened(tmp_path, "insert", **limits) as table:
        assert found(table) == last


def test_counters_merged_by_many_threads_lose_nothing(tmp_path: Path) -> None:
    """Each thread has its own column in the same rows."""
    columns = ["m", "text", "must"]
    with opened(tmp_path, "merge", memtable={"rows_max": 30}, commit={"interval": "50ms"}) as table:
        table.put(rows(range(10)))

        def merge(name: str) -> None:
            for value in range(30):
                given = f"v{value}" if name == "text" else value
                table.put([{"k": row(n)["k"], "n": n, name: given} for n in range(10)])

        running = [threading.Thread(target=merge, args=(name,)) for name in columns]
        for each in running:
            each.start()
        for each in running:
            each.join(120)
        assert found(table) == {n: {**row(n), "m": 29, "text": "v29", "must": 29} for n in range(10)}


def test_a_commit_in_the_middle_of_a_lookup_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, "insert") as table:
        table.put(rows(range(6)))
        table.flush()
    real, commits = StoredRows.__call__, []

    with opened(tmp_path, "insert") as table:

        def found_late(self: StoredRows, view: Any, *asked: Any) -> Any:
            if not commits:  # the view lists SSTs that are committed and pruned by now
                commits.append(table.commit())
            return real(self, view, *asked)

        monkeypatch.setattr(StoredRows, "__call__", found_late)
        assert table.put(rows(range(8), 1)).skipped == 6
        assert commits[0].rows_inserted == 6
        assert found(table) == {n: row(n) for n in range(6)} | {n: row(n, 1) for n in (6, 7)}


@pytest.mark.parametrize("first_durable", [True, False])
def test_the_token_of_a_put_that_changes_nothing_is_remembered(first_durable: bool, tmp_path: Path) -> None:
    """The acknowledgement is durable, so it holds after a crash too, whatever happened to the key since."""
    table = opened(tmp_path, "insert")
    table.put([row(1)])
    receipt = table.put([row(1, 1)], token="loader:1", durable=first_durable)
    assert (receipt.applied, receipt.skipped) == (True, 1)
    if not first_durable:
        assert not table.put([row(1, 1)], token="loader:1").applied
    with opened(tmp_path, "insert") as taken:  # as after a kill: nothing was closed
        taken.delete([(row(1)["k"], 1)])
        assert not taken.put([row(1, 1)], token="loader:1").applied
        assert found(taken) == {}
    with pytest.raises(memwal.FencedError):
        table.put([row(2)])


def test_a_takeover_replays_whole_rows(tmp_path: Path) -> None:
    older = opened(tmp_path, "merge")
    older.put(rows(range(5)))
    older.put([{"k": row(n)["k"], "n": n, "m": -n} for n in range(5)], token=("p", 1))
    with opened(tmp_path, "merge") as newer:  # as after a crash: the older owner did not close
        again = newer.put([{"k": row(n)["k"], "n": n, "m": 0} for n in range(5)], token=("p", 1))
        assert (again.applied, again.skipped) == (False, 0)
        assert found(newer) == {n: {**row(n), "m": -n} for n in range(5)}
        with pytest.raises(memwal.FencedError):
            older.put([{"k": row(0)["k"], "n": 0, "m": 666}])
        newer.put([{"k": row(0)["k"], "n": 0, "text": "newer"}])
        assert found(newer)[0] == {**row(0), "m": 0, "text": "newer"}


# ---- equal keys in one put -----------------------------------------------------------------------------------------


def test_a_put_that_repeats_a_key_is_refused_before_any_region_writes(
    tmp_path: Path, way_in: Callable[[Any], Any]
) -> None:
    with opened(tmp_path, on_duplicate="fail") as table:
        called = way_in(table)
        called.put(rows(range(20)))
        called.put(rows(range(20), 1))  # in a different put
        before = [region["wal_position"] for region in called.status()["regions"]]
        with raises(Invalid):
            called.put([*rows(range(20), 2), row(7, 3), row(5, 3)])
        assert [region["wal_position"] for region in called.status()["regions"]] == before
        assert found(called) == {n: row(n, 1) for n in range(20)}
        called.delete([(row(7)["k"], 7), (row(7)["k"], 7)])
        nulls = pa.table({"k": pa.array([None, None], pa.string()), "n": [1, 1], "must": [1, 1]})
        with raises(Invalid):
            called.put(nulls, missing="null")


def test_the_first_row_of_a_key_counts(tmp_path: Path, way_in: Callable[[Any], Any]) -> None:
    with opened(tmp_path, on_duplicate="first") as table:
        called = way_in(table)
        receipt = called.put([*rows(range(20)), *rows(range(5, 25), 1)])
        assert (receipt.rows, receipt.skipped) == (40, 0)
        assert found(called) == {n: row(n, n // 20) for n in range(25)}
        called.put([row(3, 2), row(3, 3)])
        assert found(called)[3] == row(3, 2)


@pytest.mark.parametrize(("on_duplicate", "kept"), [("last", 2), ("first", 1)])
def test_the_rule_for_equal_keys_comes_before_that_for_stored_ones(
    on_duplicate: str, kept: int, tmp_path: Path
) -> None:
    with opened(tmp_path, "insert", on_duplicate) as table:
        table.put([row(1, 1), row(1, 2), row(2, 1), row(2, 2)])
        assert found(table) == {1: row(1, kept), 2: row(2, kept)}
        assert table.put([row(1, 3), row(1, 4)]).skipped == (2 if on_duplicate == "last" else 1)
        assert found(table) == {1: row(1, kept), 2: row(2, kept)}


def test_a_region_stream_is_one_put(tmp_path: Path) -> None:
    region = wal.bucket_region(0)
    for on_duplicate, versions in (("fail", None), ("first", 0), ("last", 1)):
        with opened(tmp_path / on_duplicate, on_duplicate=on_duplicate) as table:
            all_rows = pa.Table.from_pylist([*rows(range(9)), *rows(range(9), 1)], schema=SCHEMA)
            mine = all_rows.filter(pa.array(table.base.route(all_rows) == 0))
            if versions is None:
                with raises(Invalid):
                    table.put_region(region, mine, None)
                assert table.count() == 0
            else:
                assert table.put_region(region, mine, None).rows == mine.num_rows
                assert {each["text"] for each in table.scan().read_all().to_pylist()} == {f"v{versions}"}


# ---- settings ------------------------------------------------------------------------------------------------------


def test_a_rule_that_contradicts_the_table_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, "insert", "fail").close()
    for name, wrong in (("upsert", "merge"), ("on_duplicate", "last")):
        with raises(Invalid):
            memwal.open(tmp_path / "t.lance", settings={"table": {name: wrong}})
    with memwal.open(tmp_path / "t.lance") as table:  # the defaults are for new tables
        table.put(rows([1]))
        assert table.put(rows([1], 1)).skipped == 1


def test_init_takes_rules_and_says_them_and_refuses_others_with_exit_code_2(
    cli: Cli, small_config: SmallConfig, uri: str
) -> None:
    config = small_config("merge.toml", table={"upsert": "merge", "on_duplicate": "first"})
    ran = cli("init", config)
    assert (ran.code, ran.err) == (0, "")
    assert "upsert merge, on_duplicate first" in ran.out
    assert "merge" in cli("inspect", uri).out
    unknown = cli("init", small_config("unknown.toml", table={"upsert": "insrt"}))
    assert unknown.code == 2
    assert "upsert = 'insrt' must be one of" in unknown.err
    assert "did you mean 'insert'?" in unknown.err
    other = cli("init", small_config("other.toml", table={"on_duplicate": "fail"}))
    assert (other.code, len(other.error_lines)) == (2, 1)
    assert 'on_duplicate = "fail" but the table' in other.err


def test_init_adopts_a_table_with_its_rules(cli: Cli, small_config: SmallConfig, uri: str) -> None:
    lance.write_dataset(pa.table({"id": [1, 2], "name": ["a", "b"]}), uri)
    ran = cli("init", small_config(table={"upsert": "insert", "columns": {"id": "int64"}, "indexes": {}}))
    assert (ran.code, ran.err) == (0, "")
    assert "adopted" in ran.out
    assert "upsert insert" in ran.out
    with memwal.open(uri) as table:
        assert table.put([{"id": 2, "name": "other"}, {"id": 3, "name": "c"}]).skipped == 1
        assert table.scan().read_all().sort_by("id")["name"].to_pylist() == ["a", "b", "c"]
