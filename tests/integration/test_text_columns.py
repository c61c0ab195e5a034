"""Matches of several columns, and fuzzy words: the memtable and Lance find the same rows with the same scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memwal
from memwal.flush import BaseTable
from memwal.ingest.engine.read.base import BaseReads
from memwal.memtable import IndexSpec, MemTable, row_schema, with_tombstone
from memwal.memtable.text.columns import ColumnsQuery
from memwal.memtable.text.query import TextParser
from tests.conftest import extent

COLUMNS = ("title", "body")
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("title", pa.string()), ("body", pa.string())])
ROWS = row_schema(SCHEMA, ["id"])
SPECS = [IndexSpec(column, "fts", {"with_position": True}) for column in COLUMNS]
PACKAGES = Path(__file__).resolve().parents[2] / "configs" / "quickstart"
COUNT = 1_500
INDEXED = 1_000


def packages() -> pa.Table:
    """Return names and descriptions of packages, and some rows without words."""
    files = sorted(PACKAGES.glob("01-packages-*.parquet"))
    found = pa.concat_tables([pq.read_table(file) for file in files]).slice(0, COUNT - 3)
    titles = [*found["package"].to_pylist(), None, "", "the web"]
    bodies = [*found["description"].to_pylist(), "web server", None, ""]
    return pa.table({"id": np.arange(COUNT), "title": titles, "body": bodies}, schema=SCHEMA)


def asked(text: str, boosts: dict[str, float]) -> ColumnsQuery:
    return ColumnsQuery.of(text, boosts, {spec.column: TextParser(spec) for spec in SPECS})


class Sides:
    """The same rows in a memtable, in a Lance table that indexed all of them, and in a Lance table that indexed only
    the first ones: those of the title up to INDEXED, and half as many of the body.
    """

    def __init__(self, path: Path) -> None:
        rows = packages()
        table = MemTable(ROWS, ["id"], SPECS, 1)
        table.apply(with_tombstone(rows, ROWS))
        self.snapshot = table.snapshot()
        whole, partly = (BaseTable.create(str(path / f"{n}.lance"), SCHEMA, ["id"], 1, SPECS) for n in range(2))
        dataset = lance.dataset(whole.uri)
        dataset.insert(rows)
        dataset.optimize.optimize_indices()
        dataset = lance.dataset(partly.uri)
        names = {spec.column: spec.name for spec in SPECS}
        dataset.insert(rows.slice(0, INDEXED // 2))
        dataset.optimize.optimize_indices()
        dataset.insert(rows.slice(INDEXED // 2, INDEXED // 2))
        dataset.optimize.optimize_indices(index_names=[names["title"]])
        dataset.insert(rows.slice(INDEXED))
        self.whole, self.partly = BaseReads(whole.latest()), BaseReads(partly.latest())

    def memtable(self, query: ColumnsQuery, k: int, mask: Any) -> dict[int, float]:
        positions, scores = self.snapshot.match_columns(query, k, mask)
        return dict(zip(positions.tolist(), scores.tolist(), strict=True))


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    return Sides(tmp_path_factory.mktemp("sides"))


def of_base(base: BaseReads, query: ColumnsQuery, k: int, filter: str | None) -> dict[int, float]:
    rows = base.match(query, k, filter, ["id"])
    assert rows.column_names == ["id", "_score"]
    assert rows.schema.field("_score").type == pa.float32()
    scores = rows["_score"].to_pylist()
    assert scores == sorted(scores, reverse=True)
    return dict(zip(rows["id"].to_pylist(), scores, strict=True))


PARTS = st.sampled_from(
    [
        *(
            "library",
            "python",
            "dev",
            "server",
            "the",
            "for",
            "data",
            "files",
            "web",
            "zzz",
            "lib",
            "C++",
            "command-line",
        ),
        *('"development files"', '"shared library"', '"library for the"', '"python library"', '"for the"', '"web"'),
        *("libary~", "pyton~", "develpment~2", "sever~2", "dev~", "file~1", "zzzzzz~", "the~", "doc~2"),
    ]
)
PREFIXES = st.sampled_from(["lib*", "py*", "zzz*", "develop*"])
SIGNS = st.sampled_from(["", "", "+", "-"])
BOOSTS = st.sampled_from([(1.0, 1.0), (3.0, 1.0), (0.25, 2.0), (10.0, 10.0)])
FILTERS = {None: lambda ids: ids >= 0, "id >= 300": lambda ids: ids >= 300, "id % 97 = 3": lambda ids: ids % 97 == 3}


def queries(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.tuples(SIGNS, parts).map("".join), min_size=1, max_size=4).map(" ".join)


AGREE = settings(
    max_examples=extent(40, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(sides: Sides, query: ColumnsQuery, filter: str | None, k: int) -> None:
    mask = FILTERS[filter](np.arange(COUNT))
    every = sides.memtable(query, COUNT, mask)
    for base in (sides.whole, sides.partly):
        found = of_base(base, query, COUNT, filter)
        assert set(found) == set(every)
        if base is sides.whole and query.in_lance:
            assert every == pytest.approx(found, rel=1e-2)  # tantivy rounds lengths
        best = of_base(base, query, k, filter)
        assert list(best.values()) == pytest.approx(list(found.values())[:k], rel=1e-5)
        assert set(best) <= set(found)


@AGREE
@given(queries(PARTS), BOOSTS, st.sampled_from(list(FILTERS)), st.sampled_from([1, 10, 200]))
def test_both_sides_find_the_same_rows_with_the_same_scores(
    sides: Sides, text: str, boosts: tuple[float, float], filter: str | None, k: int
) -> None:
    check(sides, asked(text, dict(zip(COLUMNS, boosts, strict=True))), filter, k)


@settings(AGREE, max_examples=15)
@given(queries(PARTS | PREFIXES | PREFIXES), BOOSTS, st.sampled_from(list(FILTERS)), st.sampled_from([1, 10]))
def test_both_sides_find_the_same_rows_by_prefix(
    sides: Sides, text: str, boosts: tuple[float, float], filter: str | None, k: int
) -> None:
    check(sides, asked(text, dict(zip(COLUMNS, boosts, strict=True))), filter, k)


@settings(AGREE, max_examples=30)
@given(queries(PARTS), st.sampled_from([1.0, 0.5, 7.0]), st.sampled_from(list(FILTERS)))
def test_both_sides_agree_on_one_column_with_a_boost(sides: Sides, text: str, boost: float, filter: str | None) -> None:
    check(sides, asked(text, {"body": boost}), filter, 10)


@pytest.mark.parametrize(
    "text",
    [
        "+libary~ -pyton~",
        '+dev "development files"',
        '+"development files" +libary~2',
        "develpment~ for",
        "+lib +shared",
    ],
)
def test_the_examples_find_rows(sides: Sides, text: str) -> None:
    query = asked(text, {"title": 3.0, "body": 1.0})
    check(sides, query, None, 10)
    assert of_base(sides.whole, query, 10, None)


def test_fuzzy_words_with_punctuation_are_read_from_the_rows(tmp_path: Path) -> None:
    """Lance splits a fuzzy word with its simple tokenizer, whatever tokenizer the index has."""
    parameters = {"base_tokenizer": "whitespace", "stem": False, "remove_stop_words": False}
    rows = pa.table(
        {"id": [1, 2, 3], "title": ["c++17 code", "c++14", "c web"], "body": [None, "x", "y"]}, schema=SCHEMA
    )
    indexes = {column: {"type": "fts", **parameters} for column in COLUMNS}
    with memwal.open(str(tmp_path / "t.lance"), schema=SCHEMA, key="id", regions=1, indexes=indexes) as table:
        table.put(rows)
        for level in ("latest", "committed"):
            found = table.match(["title", "body"], "c++18~", columns=["id"], level=level)["id"].to_pylist()
            assert sorted(found) == [1, 2], level
            table.flush()
            table.commit()


# ---- a table


ROWS_OF = {
    1: ("web server", "an introduction"),
    2: ("search engine", "server of the web"),
    3: ("library", "searching"),
    4: ("serch tool", None),
    5: (None, "web server, gone"),
}


@pytest.fixture(scope="module", params=["latest", "flushed", "committed"])
def leveled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """Yield a table with rows at one level, and the newest versions of some of them there too."""
    with memwal.open(
        str(tmp_path_factory.mktemp("leveled") / "t.lance"),
        schema=SCHEMA,
        key="id",
        regions=2,
        indexes={column: {"type": "fts", "with_position": True} for column in COLUMNS},
        settings={"commit": {"interval": 0}},
    ) as table:
        table.put([{"id": key, "title": "old web server", "body": "old search library"} for key in ROWS_OF])
        if request.param != "latest":
            table.flush()
        table.put([{"id": key, "title": title, "body": body} for key, (title, body) in ROWS_OF.items()])
        table.delete([5])
        if request.param != "latest":
            table.flush()
        if request.param == "committed":
            table.commit()
        yield table, request.param


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("web server", {1, 2}),
        ("+engine +server", {2}),
        ("+search -engine", {3}),
        ("serch~", {2, 3, 4}),
        ("+serch~ -web", {3, 4}),
        ("libary~ tol~", {3, 4}),
        ('"web server"', {1}),
        ("lib* intro*", {1, 3}),
        ("old", set()),
        ("gon~", set()),
        ("-web", set()),
    ],
)
def test_every_level_answers_alike(leveled: tuple[Any, str], text: str, found: set[int]) -> None:
    table, level = leveled
    for columns in (["title", "body"], {"title": 3.0, "body": 0.5}):
        assert set(table.match(columns, text, columns=["id"], level=level)["id"].to_pylist()) == found
        some = table.match(columns, text, 1, columns=["id"], level=level)
        assert some.num_rows == min(1, len(found))
        kept = table.match(columns, text, filter="id <> 3", columns=["id"], level=level)
        assert set(kept["id"].to_pylist()) == found - {3}


def test_boosts_change_the_order(leveled: tuple[Any, str]) -> None:
    table, level = leveled
    for boosts, first in (({"title": 100, "body": 1}, 1), ({"title": 0.01, "body": 1.0}, 2)):
        assert table.match(boosts, "server", columns=["id"], level=level)["id"].to_pylist()[0] == first


def test_one_column_with_boost_one_is_a_match_of_that_column(leveled: tuple[Any, str]) -> None:
    table, level = leveled
    for text in ("web server", "+search", "serch~", "lib*", '"web server"'):
        alone = table.match("title", text, level=level)
        assert table.match(["title"], text, level=level) == alone
        assert table.match({"title": 1}, text, level=level) == alone


def test_the_regions_of_several_owners_together_have_every_row(leveled: tuple[Any, str]) -> None:
    table, level = leveled
    regions = [UUID(region["id"]) for region in table.status()["regions"]]
    for text in ("web server", "serch~", "+search -engine", "lib*"):
        parts = [table.only([region]).match({"title": 3.0, "body": 1.0}, text, level=level) for region in regions]
        whole = table.match({"title": 3.0, "body": 1.0}, text, level=level)
        assert pa.concat_tables(parts).sort_by("id").equals(whole.sort_by("id")), text


def test_a_fuzzy_word_finds_rows_that_no_index_covers_yet(tmp_path: Path, made: Any) -> None:
    uri = str(tmp_path / "t.lance")
    indexes = {"name": "fts", "body": "fts", "vector": "ivf_pq"}
    with memwal.open(uri, schema=made.schema, key="id", regions=2, indexes=indexes) as table:
        table.put([made.row(id) | {"name": "library", "body": None} for id in range(10)])
        table.flush()
        table.commit()
        others = [made.row(id) | {"name": None, "body": "librari of harbors"} for id in range(10, 15)]
        lance.dataset(uri).insert(pa.Table.from_pylist(others, schema=made.schema))
        table.put([made.row(id) | {"name": "web", "body": None} for id in (3, 12)])
        rest = set(range(15)) - {3, 12}
        for level in ("latest", "flushed", "committed"):
            wanted = set(range(15)) if level == "committed" else rest
            found = table.match({"name": 2.0, "body": 1.0}, "libary~", 100, level=level)
            assert set(found["id"].to_pylist()) == wanted, level
            assert found.schema.field("vector").type == made.schema.field("vector").type
            assert table.match(["name", "body"], "+libary~ +harbr~", 100, level=level).num_rows == len(
                wanted - set(range(10))
            )
            parts = [table.only([UUID(region["id"])]) for region in table.status()["regions"]]
            shares = [part.match("body", "libary~", 100, level=level)["id"].to_pylist() for part in parts]
            assert sorted(id for share in shares for id in share) == sorted(wanted - set(range(10))), level
            table.flush()
