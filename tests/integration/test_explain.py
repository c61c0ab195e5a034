"""Explanations of reads through every way into a table: levels, files and indexes, row counts that add up, reasons.

In the table newer rows hide older ones in a known way; the expected numbers are computed by hand from the puts and
deletes below.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.read.levels import CaptureOvertaken
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.read.traced import Trace
from memwal.ingest.engine.region.core import RegionCore
from tests.conftest import INDEXES, SCHEMA, Made, Ran, toml
from tests.integration.test_router import Pair
from tests.messages import raises
from tests.ways import entered

WAYS = ("embedded", "one daemon", "two daemons", "storage")
VECTOR = [1.0] * SCHEMA.field("vector").type.list_size
KEYS = [11, 20, 12, 1, 999]
READS: dict[str, Callable[..., Any]] = {
    "get": lambda table, **how: table.get(KEYS, **how),
    "count": lambda table, **how: table.count("price < 500", **how),
    "scan": lambda table, **how: table.scan(filter="price < 500", **how).read_all(),
    "limited scan": lambda table, **how: table.scan(["id"], limit=9, offset=2, **how).read_all(),
    "ordered scan": lambda table, **how: table.scan(["id"], limit=9, order_by="price", **how).read_all(),
    "search": lambda table, **how: table.search("vector", VECTOR, 9, "price < 900", ["id"], **how),
    "match": lambda table, **how: table.match("body", "harbor copper", 99, columns=["id"], **how),
    "hybrid": lambda table, **how: table.hybrid(VECTOR, "harbor copper", 5, columns=["id"], **how),
    "candidates": lambda table, **how: table.candidates(VECTOR, "harbor copper", 99, columns=["id"], **how),
}


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a table of two regions: ids 0 to 29 in the base; in SSTs 5 deleted, 10 to 19 and 30 to 34 put; in memtables
    11 and 31 deleted, 7, 15 to 24 and 35 to 39 put.
    """
    made, uri = Made(), str(tmp_path_factory.mktemp("explain") / "table.lance")
    settings = {"commit": {"interval": "0s"}}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=2, indexes=INDEXES, settings=settings) as table:
        table.put(made.table(range(30)))
        table.flush()
        table.commit()
        table.delete([5])
        table.put(made.table([*range(10, 20), *range(30, 35)], 1))
        table.flush()
        table.delete([11, 31])
        table.put(made.table([7, *range(15, 25), *range(35, 40)], 2))
        yield table


@pytest.fixture(scope="module")
def ways(owner: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield the table by each way into it; two daemons share a copy, each with one region."""
    with ExitStack() as ends:
        copy, config = tmp_path_factory.mktemp("copy") / "table.lance", tmp_path_factory.mktemp("config") / "two.toml"
        shutil.copytree(owner.base.uri, copy)
        config.write_text(toml({"table": {"uri": str(copy)}, "commit": {"interval": "0s"}}))
        two = ends.enter_context(memwal.connect(Pair(config, ends).endpoints))
        stored = ends.enter_context(memwal.open(owner.base.uri, read_only=True))
        one = entered("flight", owner, ends)
        yield {"embedded": owner, "one daemon": one, "two daemons": two, "storage": stored}


def explained(read: Callable[..., Any], *arguments: Any, **how: Any) -> tuple[Any, memwal.Explanation]:
    told: list[memwal.Explanation] = []
    answer = read(*arguments, **how, explain=told.append)
    assert len(told) == 1
    return answer, told[0]


def in_one_order(answer: Any) -> Any:
    """Return the rows sorted, since rows with equal scores have no guaranteed order."""
    return sorted(answer.to_pylist(), key=str) if isinstance(answer, pa.Table) else answer


def sums(told: memwal.Explanation, by: str | None = None) -> dict[str, tuple[int, int, int, int]]:
    """Return the numbers of found, hidden, deleted and returned rows by kind of level."""
    found: dict[str, Any] = {}
    for level in told.levels:
        for search in level.searches:
            if by in (None, search.by):
                counts = np.array([search.found, search.hidden, search.deleted, search.returned])
                found[level.kind] = found.get(level.kind, 0) + counts
    return {kind: tuple(counts.tolist()) for kind, counts in found.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", READS)
def test_an_explanation_names_every_level_and_its_rows_add_up(read: str, way: str, ways: Any, owner: Any) -> None:
    table = ways[way]
    plain = READS[read](table)
    answer, told = explained(READS[read], table)
    assert in_one_order(answer) == in_one_order(plain)
    if isinstance(plain, pa.Table):
        assert answer.schema.equals(plain.schema, check_metadata=True)
    assert told.read == read.rpartition(" ")[2]
    assert told.rows == (plain if read == "count" else plain.num_rows)
    left_out = {"limited scan": 2, "hybrid": told.found - 5}.get(read, 0)
    if way == "two daemons" and read not in ("get", "count", "scan"):  # each daemon finds all requested rows
        assert told.found >= told.rows + left_out
    else:
        assert told.found == told.rows + left_out

    regions = {region["id"]: region for region in owner.status()["regions"]}
    above = "wal" if way == "storage" else "memtable"
    for part in told.parts:
        each = [(level.kind, level.region) for level in part.levels]
        assert each == [*((kind, region) for region in part.regions for kind in (above, "sst")), ("base", None)]
        assert part.base_version == owner.base_version
        steps = part.capture_ms + part.open_ms + part.merge_ms
        steps += sum(level.load_ms + sum(search.ms for search in level.searches) for level in part.levels)
        assert steps == pytest.approx(part.ms, abs=1.0)
        assert part.ms <= told.ms + 1.0
    assert sorted(region for part in told.parts for region in part.regions) == sorted(regions)
    for level in told.levels:
        if level.kind == "sst":
            (sst,) = regions[str(level.region)]["ssts"]
            assert (level.generation, level.path, level.rows) == (sst["generation"], sst["path"], sst["rows"])
            assert level.state in ("loaded", "cached")
        elif level.kind == "wal":
            region = regions[str(level.region)]
            assert level.positions == (region["replay_after"] + 1, region["wal_position"])
        elif level.kind == "memtable":
            assert level.state == "active"
            assert level.generation == regions[str(level.region)]["generation"]
    endpoints = [part.endpoint for part in told.parts]
    expected = {"one daemon": 1, "two daemons": 2}.get(way, 0)
    assert [endpoint is not None for endpoint in endpoints] == [True] * expected or endpoints == [None]
    assert len(set(endpoints)) == max(1, expected)
    assert (told.network_ms > 0) == bool(expected)
    assert memwal.Explanation.of(json.loads(told.to_json()) | {"of a later version": 1}) == told


@pytest.mark.parametrize("way", WAYS)
def test_hidden_and_deleted_rows_are_counted_where_they_are(way: str, ways: Any) -> None:
    table, above = ways[way], "wal" if way == "storage" else "memtable"
    expected = {above: (16, 0, 0, 16), "sst": (8, 7, 0, 8), "base": (30, 17, 0, 13)}
    assert sums(explained(table.count)[1]) == expected
    assert sums(explained(lambda **how: table.scan(**how).read_all())[1]) == expected
    assert sums(explained(table.count, level="flushed")[1]) == {"sst": (15, 0, 0, 15), "base": (30, 11, 0, 19)}
    found = explained(table.search, "vector", VECTOR, 40)[1]
    assert sums(found, "vector") == expected
    of_keys = explained(table.get, KEYS)[1]
    assert sums(of_keys) == {above: (2, 0, 1, 1), "sst": (1, 0, 0, 1), "base": (1, 0, 0, 1)}
    asked = [search.looked_at for level in of_keys.levels if level.kind != "base" for search in level.searches]
    assert max(asked) <= 5


@pytest.mark.parametrize(
    ("how", "above", "below"),
    [
        ({}, "too few for the index", "the index is not built yet"),
        ({"metric": "cosine"}, "the index has another metric", "the index has another metric"),
        ({"distance_range": (0.1, None)}, "a lower limit of distance_range", "a lower limit of distance_range"),
    ],
)
def test_an_exact_search_says_why_it_is_exact(how: dict[str, Any], above: str, below: str, owner: Any) -> None:
    _, told = explained(owner.search, "vector", VECTOR, 3, **how)
    assert told.indexes == ()
    for level in told.levels:
        (search,) = level.searches
        assert f"every row compared: {'' if 'index' in above else 'no index serves '}{above}" in search.how or (
            level.kind == "base" and below in search.how
        )
        assert level.kind != "base" or search.looked_at >= 30


@pytest.fixture
def indexed(uri: str) -> Iterator[Any]:
    """Yield a table with 4,000 rows in the base with every index, and 50 rows that another program appended there."""
    rng, rows = np.random.default_rng(7), 4_050
    schema = pa.schema([field for field in SCHEMA if field.name != "name"])
    vectors = pa.array(rng.standard_normal(rows * len(VECTOR)), pa.float32())
    columns: dict[str, Any] = {"id": np.arange(rows), "price": np.arange(rows), "body": ["harbor copper"] * rows}
    columns["vector"] = pa.FixedSizeListArray.from_arrays(vectors, len(VECTOR))
    whole = pa.table({field.name: columns[field.name] for field in schema}).cast(schema)
    indexes: Any = {"id": "btree", "price": "btree", "body": "fts", "vector": {"type": "ivf_pq", "train_rows": 256}}
    settings = {"commit": {"interval": "0s"}}
    with memwal.open(uri, schema=schema, key="id", regions=1, indexes=indexes, settings=settings) as table:
        table.put(whole.slice(0, 4_000))
        table.flush()
        table.commit()
        lance.write_dataset(whole.slice(4_000), uri, mode="append")
        table.put(whole.slice(0, 3_000))
        yield table


def test_indexes_are_named_at_every_level_with_the_rows_that_they_lack(indexed: Any) -> None:
    asked: dict[str, tuple[Any, set[str], set[str]]] = {
        "vector": (lambda **how: indexed.search("vector", VECTOR, 3, **how), {"vector_idx"}, {"vector_idx"}),
        "text": (lambda **how: indexed.match("body", "harbor", 3, **how), {"body_idx"}, {"body_idx"}),
        # Evaluating these few rows above the base is faster than an index lookup.
        "filter": (lambda **how: indexed.count("price >= 4010", **how), set(), {"price_idx"}),
        "key": (lambda **how: indexed.get([3_999], **how), {"key"}, {"id_idx"}),
    }
    for by, (read, above, below) in asked.items():
        for _ in range(20 if by == "vector" else 1):  # searches train and fill the memtable's index
            read()
        _, told = explained(read)
        memtable, base = told.levels
        (upper,) = memtable.searches
        (lower,) = base.searches
        assert (upper.by, lower.by) == (by, by)
        assert (set(upper.indexes), set(lower.indexes)) == (above, below), (by, upper.how, lower.how)
        assert lower.unindexed == 50
        assert "50 rows without it read one by one" in lower.how
        assert set(told.indexes) == above | below
        assert any(index in plan or "MatchQuery" in plan for index in below for plan in lower.lance)
    _, told = explained(indexed.search, "vector", VECTOR, 3)
    compared = [level.searches[0].looked_at for level in told.levels]
    assert 0 < compared[0] < 3_000
    assert 0 < compared[1] < 4_000
    _, told = explained(indexed.search, "vector", VECTOR, 3, "price < 5")
    assert [search.by for search in told.levels[0].searches] == ["filter", "vector"]
    assert (told.levels[0].searches[0].looked_at, told.levels[0].searches[0].indexes) == (3_000, ())


@pytest.mark.parametrize("way", WAYS)
def test_a_scan_is_explained_at_its_end_or_when_it_is_closed(way: str, ways: Any) -> None:
    told: list[memwal.Explanation] = []
    owner = ways[way]
    rows = owner.scan(explain=told.append)
    first = next(rows)
    assert told == []
    rows.close()
    assert [(each.complete, each.rows) for each in told] == [(False, first.num_rows)]
    assert "closed before its last row" in str(told[0])
    with raises(memwal.Invalid):
        owner.count(explain=True)
    with pytest.raises(memwal.Invalid):
        owner.count("prise < 1", explain=told.append)
    assert len(told) == 1  # a failed read has no explanation


def test_a_frozen_memtable_is_told_from_the_active_one(uri: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, held = RegionCore.publish_next, threading.Event()

    def when_told(core: RegionCore) -> bool:
        held.wait(60)
        return publish(core)

    monkeypatch.setattr(RegionCore, "publish_next", when_told)
    with memwal.open(uri, schema=SCHEMA, key="id", regions=1, settings={"commit": {"interval": "0s"}}) as table:
        table.put(made.table(range(3)))
        (writer,) = table.regions.writers
        published = writer.freeze()
        table.put(made.table(range(2, 7), 1))
        _, told = explained(table.count)
        levels = [(level.generation, level.state, level.rows) for level in told.levels if level.kind == "memtable"]
        assert levels == [(2, "active", 5), (1, "frozen", 3)]
        assert sums(told) == {"memtable": (7, 1, 0, 7), "base": (0, 0, 0, 0)}
        held.set()
        published()


def test_attempts_are_counted(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count, failures = Reader.count, [CaptureOvertaken()]

    def overtaken(reader: Reader, *arguments: Any, **how: Any) -> int:
        if failures:
            raise failures.pop()
        return int(count(reader, *arguments, **how))

    monkeypatch.setattr(Reader, "count", overtaken)
    rows, told = explained(owner.count)
    assert (rows, told.parts[0].attempts, told.found) == (37, 2, 37)
    assert ", 2 attempts" in str(told)


@pytest.mark.parametrize("way", WAYS)
def test_without_explain_nothing_is_measured(way: str, ways: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a read that nobody explains was measured")

    monkeypatch.setattr(Trace, "__init__", never)
    for read in READS.values():
        read(ways[way])


def test_rows_without_a_key_hide_none(uri: str) -> None:
    with memwal.open(uri, schema=pa.schema([("a", pa.int64())]), key=(), settings={"commit": {"interval": "0s"}}) as t:
        assert explained(t.count)[1].found == 0
        for step in (t.flush, t.commit, t.flush):
            t.put([{"a": 1}, {"a": 1}])
            step()
        t.put([{"a": 1}])
        _, told = explained(lambda **how: t.scan(filter="a = 1", **how).read_all())
        assert [told.rows, sum(each[1] for each in sums(told).values())] == [7, 0]


def test_the_command_prints_it_after_the_rows(
    owner: Any, cli: Callable[..., Ran], small_config: Callable[..., Path]
) -> None:
    config = small_config(table={"uri": owner.base.uri})
    ran = cli("query", config, "--filter", "price < 500", "--columns", "id", "--limit", "99", "--explain")
    rows = owner.count("price < 500", level="durable")
    lines = ran.out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith(f"scan at latest: {rows} rows in ")]
    assert f"version {owner.base_version} of {owner.base.uri}, 2 regions; capture " in lines[at + 2]
    names = ["region", "level", "rows", "by", "looked", "at", "found", "hidden", "returned", "ms", "how"]
    assert lines[at + 3].split() == names
    kinds = [line[lines[at + 3].index("level") :].split()[0] for line in lines[at + 4 : at + 9]]
    assert kinds == ["wal", "sst", "wal", "sst", "base"]
    assert [line.split()[0] for line in lines[at + 4 : at + 8]] == ["0", "0", "1", "1"]
    assert lines[at + 8].split()[:4] == ["base", str(owner.base_version), "30", "filter"]
    plain = cli("query", config, "--key", "20", "--format", "json")
    ran = cli("query", config, "--key", "20", "--format", "json", "--explain")
    assert ran.out == plain.out
    assert (json.loads(ran.err)["read"], json.loads(ran.err)["rows"]) == ("get", 1)
