"""Text queries of one and of several columns: the memtable and Lance find the same rows, with the same scores."""

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
from memwal.ingest.errors import Invalid
from memwal.memtable import IndexSpec, MemTable, row_schema, with_tombstone
from memwal.memtable.text.columns import ColumnsQuery
from memwal.memtable.text.query import TextParser
from tests.conftest import extent
from tests.messages import raises

COLUMNS = ("title", "body")
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("title", pa.string()), ("body", pa.string())])
ROWS = row_schema(SCHEMA, ["id"])
FTS = {"type": "fts", "with_position": True}
SPECS = [IndexSpec(column, "fts", {"with_position": True}) for column in COLUMNS]
NGRAMS: dict[str, dict[str, Any]] = {"3": {}, "2-4": {"min_ngram_length": 2, "max_ngram_length": 4}}
"""Lengths of ngrams: with one length Lance answers, with several the rows are read."""
PACKAGES = Path(__file__).resolve().parents[2] / "configs" / "quickstart"
COUNT = 1_500
INDEXED = 1_000
Boosts = dict[str, float]


def packages() -> pa.Table:
    """Return names and descriptions of packages, and some rows without words."""
    files = sorted(PACKAGES.glob("01-packages-*.parquet"))
    found = pa.concat_tables([pq.read_table(file) for file in files]).slice(0, COUNT - 5)
    titles = [*found["package"].to_pylist(), None, "", "the web", None, "web"]
    bodies = [*found["description"].to_pylist(), "web server", None, "", "the of and", "web " * 300]
    return pa.table({"id": np.arange(COUNT), "title": titles, "body": bodies}, schema=SCHEMA)


class Sides:
    """The same rows in a memtable, in a Lance table that indexed all of them, and in a Lance table that indexed only
    the first ones: INDEXED rows, but of the body half as many if the title has an index too.
    """

    def __init__(self, path: Path, specs: list[IndexSpec]) -> None:
        rows = packages()
        self.specs = {spec.column: spec for spec in specs}
        self.ngrams = any(spec.parameters.get("base_tokenizer") == "ngram" for spec in specs)
        table = MemTable(ROWS, ["id"], specs, 1)
        table.apply(with_tombstone(rows, ROWS))
        self.snapshot = table.snapshot()
        whole, partly = (BaseTable.create(str(path / f"{n}.lance"), SCHEMA, ["id"], 1, specs) for n in range(2))
        dataset = lance.dataset(whole.uri)
        dataset.insert(rows)
        dataset.optimize.optimize_indices()
        dataset = lance.dataset(partly.uri)
        dataset.insert(rows.slice(0, INDEXED // 2))
        dataset.optimize.optimize_indices()
        dataset.insert(rows.slice(INDEXED // 2, INDEXED // 2))
        dataset.optimize.optimize_indices(index_names=[specs[0].name])
        dataset.insert(rows.slice(INDEXED))
        self.whole, self.partly = BaseReads(whole.latest()), BaseReads(partly.latest())

    def asked(self, text: str, boosts: Boosts) -> ColumnsQuery:
        return ColumnsQuery.of(text, boosts, {column: TextParser(spec) for column, spec in self.specs.items()})

    def memtable(self, text: str, boosts: Boosts, k: int, mask: Any) -> dict[int, float]:
        positions, scores = self.snapshot.match_columns(self.asked(text, boosts), k, mask)
        found = dict(zip(positions.tolist(), scores.tolist(), strict=True))
        if list(boosts.values()) == [1.0]:
            alone, _ = self.snapshot.match(*boosts, text, COUNT, mask)
            assert k < COUNT or set(alone.tolist()) == set(found)
        return found


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    return Sides(tmp_path_factory.mktemp("sides"), SPECS)


def of_base(base: BaseReads, query: ColumnsQuery, k: int, filter: str | None = None) -> dict[int, float]:
    rows = base.match(query, k, filter, ["id"])
    assert rows.column_names == ["id", "_score"]
    assert rows.schema.field("_score").type == pa.float32()
    scores = rows["_score"].to_pylist()
    assert scores == sorted(scores, reverse=True)
    return dict(zip(rows["id"].to_pylist(), scores, strict=True))


WORDS = st.sampled_from(
    [
        *("library", "libraries", "python", "Web", "server", "the", "of", "for", "data", "files", "development", "zzz"),
        *("runtime", "tools", "dev", "C++", "command-line", "'s", "GNU", "shared", "and", "3", "lib"),
    ]
)
PHRASES = st.sampled_from(
    [
        *('"shared library"', '"development files"', '"library for"', '"for the"', '"command line tool"', '"web"'),
        *('"files for the"', '"shared library for"', '"library"', '"python library"', '"library python"'),
    ]
)
FUZZY = st.sampled_from(["libary~", "pyton~", "develpment~2", "sever~2", "dev~", "file~1", "zzzzzz~", "the~", "doc~2"])
PREFIXES = st.sampled_from(["lib*", "librar*", "library*", "py*", "de*", "tool*", "zzz*"])
SIGNS = st.sampled_from(["", "", "+", "-"])
BODY: Boosts = {"body": 1.0}
BOTH = st.sampled_from([(1.0, 1.0), (3.0, 1.0), (0.25, 2.0), (10.0, 10.0)]).map(
    lambda boosts: dict(zip(COLUMNS, boosts, strict=True))
)
BOOSTS = st.just(BODY) | st.sampled_from([{"body": 0.5}, {"body": 7.0}]) | BOTH
FILTERS = {None: lambda ids: ids >= 0, "id >= 300": lambda ids: ids >= 300, "id % 97 = 3": lambda ids: ids % 97 == 3}
AGREE = settings(
    max_examples=extent(60, 600),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def queries(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.tuples(SIGNS, parts).map("".join), min_size=1, max_size=5).map(" ".join)


def check(sides: Sides, text: str, boosts: Boosts, filter: str | None, k: int) -> None:
    query, mask = sides.asked(text, boosts), FILTERS[filter](np.arange(COUNT))
    every = sides.memtable(text, boosts, COUNT, mask)
    assert len(sides.memtable(text, boosts, k, mask)) == min(k, len(every))
    for base in (sides.whole, sides.partly):
        found = of_base(base, query, COUNT, filter)
        assert set(found) == set(every)
        if base is sides.whole and query.in_lance and not sides.ngrams:
            for id in found.keys() - {COUNT - 1}:  # tantivy rounds lengths, by more for the last row's 300 words
                assert every[id] == pytest.approx(found[id], rel=1e-2)
        best = of_base(base, query, k, filter)
        assert list(best.values()) == pytest.approx(list(found.values())[:k], rel=1e-5)
        assert set(best) <= set(found)


@AGREE
@given(queries(WORDS | PHRASES | FUZZY), BOOSTS, st.sampled_from(list(FILTERS)), st.sampled_from([1, 10, 200]))
def test_both_sides_find_the_same_rows_with_the_same_scores(
    sides: Sides, text: str, boosts: Boosts, filter: str | None, k: int
) -> None:
    check(sides, text, boosts, filter, k)


@settings(AGREE, max_examples=20)
@given(queries(WORDS | PHRASES | FUZZY | PREFIXES | PREFIXES), BOOSTS, st.sampled_from(list(FILTERS)))
def test_both_sides_find_the_same_rows_by_prefix(sides: Sides, text: str, boosts: Boosts, filter: str | None) -> None:
    check(sides, text, boosts, filter, 10)


@pytest.mark.parametrize(
    "text",
    [
        *("library", "python library", "+shared +library files", '"shared library"', "web web", "+lib +shared"),
        *('+"development files" -python', "+command-line", "tool -command-line", '+"the library" tool'),
        *('-"for the" +of library', "+libary~ -pyton~", '+dev "development files"', "develpment~ for"),
        '+"development files" +libary~2',
    ],
)
def test_both_sides_find_the_rows_of_the_examples(sides: Sides, text: str) -> None:
    for boosts in (BODY, {"title": 3.0, "body": 1.0}):
        check(sides, text, boosts, None, 10)
    assert of_base(sides.whole, sides.asked(text, boosts), 10)


@pytest.fixture(scope="module", params=list(NGRAMS))
def ngram_sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    spec = IndexSpec("body", "fts", {"base_tokenizer": "ngram", **NGRAMS[request.param]})
    return Sides(tmp_path_factory.mktemp("ngram_sides"), [spec])


MARKS = st.sampled_from(["", "", "*", "~", "~2"])


@settings(AGREE, max_examples=30)
@given(queries(st.tuples(WORDS, MARKS).map("".join)), st.sampled_from(list(FILTERS)), st.sampled_from([1, 10]))
def test_both_sides_find_the_same_rows_by_ngrams(ngram_sides: Sides, text: str, filter: str | None, k: int) -> None:
    check(ngram_sides, text, BODY, filter, k)


@pytest.mark.parametrize("text", ["+library", "+development +data", "+librar*", "python -library", "+libraries~ tool"])
def test_the_rows_of_a_signed_word_have_all_its_ngrams(ngram_sides: Sides, text: str) -> None:
    """The ngrams have two letters and more, in any order."""
    required = [part[1:].rstrip("*~") for part in text.split() if part[0] == "+"]
    excluded = [part[1:] for part in text.split() if part[0] == "-"]
    plain = [part for part in text.split() if part[0].isalpha()]
    parameters = ngram_sides.specs["body"].parameters
    shortest = parameters.get("min_ngram_length", 3)

    def ngrams(text: str) -> set[str]:
        longest = max(shortest, parameters.get("max_ngram_length", 3))
        return {
            text.lower()[at : at + size] for size in range(shortest, longest + 1) for at in range(len(text) - size + 1)
        }

    expected = {
        row
        for row, held in enumerate(map(ngrams, (body or "" for body in packages()["body"].to_pylist())))
        if all(ngrams(word) <= held for word in required)
        and not any(ngrams(word) <= held for word in excluded)
        and (required or any(ngrams(word) & held for word in plain))
    }
    check(ngram_sides, text, BODY, None, 10)
    assert set(of_base(ngram_sides.whole, ngram_sides.asked(text, BODY), COUNT)) == expected
    assert 0 < len(expected) < COUNT


def test_a_prefix_of_the_base_is_looked_for_in_parts(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    query = sides.asked("lib*", BODY)
    whole = of_base(sides.partly, query, COUNT)
    monkeypatch.setattr("memwal.ingest.engine.read.base_match.ROWS_PER_INDEX", 100)
    assert of_base(sides.partly, query, COUNT) == whole
    assert len(whole) > 100
    assert len(of_base(sides.partly, query, 7)) == 7


@pytest.mark.parametrize("place", ["memtable", "sst", "base"])
def test_scores_of_one_level_are_those_of_one_index_over_its_rows(tmp_path: Path, place: str) -> None:
    """Scores agree within 1e-6 for texts of up to 40 tokens, whose lengths tantivy does not round. Over several levels
    a score uses the statistics of its row's level, and in a memtable older versions count too: see
    ingest/engine/read/README.md.
    """
    draw = np.random.default_rng(7)
    words = [f"word{number}" for number in range(40)]
    bodies = [" ".join(draw.choice(words, draw.integers(1, 40))) for _ in range(400)]
    rows = pa.table({"id": np.arange(400), "body": bodies})
    oracle = lance.write_dataset(rows, tmp_path / "oracle")
    oracle.create_scalar_index("body", "INVERTED", with_position=True)
    settings = {"commit": {"interval": "0s"}}
    uri = str(tmp_path / "t.lance")
    with memwal.open(uri, schema=rows.schema, key="id", regions=1, indexes={"body": FTS}, settings=settings) as table:
        table.put(rows)
        if place != "memtable":
            table.flush()
        if place == "base":
            table.commit()
    with memwal.open(uri, settings=settings) as table:  # replayed, or loaded from storage
        level = {"memtable": "latest", "sst": "flushed", "base": "committed"}[place]
        for text in (*words[:10], "word1 word2 word3"):
            truth = oracle.to_table(["id", "_score"], full_text_query={"columns": ["body"], "query": text}, limit=400)
            found = table.match("body", text, k=400, columns=["id"], level=level)
            expected = dict(zip(truth["id"].to_pylist(), truth["_score"].to_pylist(), strict=True))
            assert dict(zip(found["id"].to_pylist(), found["_score"].to_pylist(), strict=True)) == pytest.approx(
                expected, rel=1e-6
            )


# ---- a table


ROWS_OF = {
    1: ("web server", "an introduction"),
    2: ("search engine", "server of the web"),
    3: ("library", "searching a library"),
    4: ("serch tool", None),
    5: (None, "web server, gone"),
    6: (None, "web library"),
    7: (None, "a web server of harbors, meadows and tunnels"),
}


@pytest.fixture(scope="module", params=["latest", "flushed", "committed"])
def leveled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """Yield a table with rows at one level, and the newest versions of some of them there too."""
    with memwal.open(
        str(tmp_path_factory.mktemp("leveled") / "t.lance"),
        schema=SCHEMA,
        key="id",
        regions=2,
        indexes=dict.fromkeys(COLUMNS, FTS),
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
    ("columns", "text", "found"),
    [
        (COLUMNS, "web server", {1, 2, 6, 7}),
        (COLUMNS, "+engine +server", {2}),
        (COLUMNS, "+search -engine", {3}),
        (COLUMNS, "serch~", {2, 3, 4}),
        (COLUMNS, "+serch~ -web", {3, 4}),
        (COLUMNS, "libary~ tol~", {3, 4, 6}),
        (COLUMNS, '"web server"', {1, 7}),
        (COLUMNS, "lib* intro*", {1, 3, 6}),
        (COLUMNS, "old", set()),
        (COLUMNS, "gon~", set()),
        (COLUMNS, "-web", set()),
        ("body", "web server", {2, 6, 7}),
        ("body", "+web +server", {2, 7}),
        ("body", '"web server"', {7}),
        ("body", "web -server", {6}),
        ("body", "lib*", {3, 6}),
        ("body", "+lib* -web", {3}),
        ("body", "old", set()),
        ("body", "-web", set()),
        ("body", "", set()),
        ("body", 'the "of" -', set()),
    ],
)
def test_every_level_answers_alike(leveled: tuple[Any, str], columns: Any, text: str, found: set[int]) -> None:
    table, level = leveled
    for of in (columns,) if isinstance(columns, str) else (list(columns), {"title": 3.0, "body": 0.5}):
        assert set(table.match(of, text, columns=["id"], level=level)["id"].to_pylist()) == found
        some = table.match(of, text, 1, columns=["id"], level=level)
        assert some.num_rows == min(1, len(found))
        kept = table.match(of, text, filter="id <> 3", columns=["id"], level=level)
        assert set(kept["id"].to_pylist()) == found - {3}


def test_boosts_change_the_order(leveled: tuple[Any, str]) -> None:
    table, level = leveled
    for boosts, title_first in (({"title": 100, "body": 1}, True), ({"title": 0.01, "body": 1.0}, False)):
        order = table.match(boosts, "server", columns=["id"], level=level)["id"].to_pylist()
        assert (order.index(1) < order.index(2)) == title_first


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


@pytest.mark.parametrize("lengths", list(NGRAMS))
def test_every_level_requires_each_ngram_of_a_signed_word(tmp_path: Path, lengths: str) -> None:
    bodies = ["server", "servers", "serving", "fish ran", "running", "revers ser", "Strasse", "straße", None]
    index = {"type": "fts", "base_tokenizer": "ngram", **NGRAMS[lengths]}
    found = {
        "+server": {0, 1},
        "+servers": {1},
        "+serv*": {0, 1, 2},
        "+server~": {0, 1},
        "+server~2 -servers": {0},
        "running -serving": {4},
        "+running": {4},
        "+straße": {7},  # folded after the split: str, tra, rass, asse
        "-server": set(),
    }
    with memwal.open(
        str(tmp_path / "t.lance"),
        schema=SCHEMA,
        key="id",
        regions=2,
        indexes={"body": index},
        settings={"commit": {"interval": 0}},
    ) as table:
        table.put([{"id": id, "title": None, "body": body} for id, body in enumerate(bodies)])
        for level, step in (("latest", None), ("flushed", table.flush), ("committed", table.commit)):
            if step is not None:
                step()
            answers = {text: table.match("body", text, 50, columns=["id"], level=level) for text in found}
            assert {text: set(rows["id"].to_pylist()) for text, rows in answers.items()} == found, level


@pytest.mark.parametrize(
    "text",
    [7, "web \udc80", "web " * 2_000, '"web server"'],
    ids=["no text", "surrogate", "many words", "phrase"],
)
def test_what_cannot_be_asked_is_refused_in_one_line_and_the_table_lives_on(tmp_path: Path, text: Any) -> None:
    with memwal.open(str(tmp_path / "t.lance"), schema=SCHEMA, key="id", regions=1, indexes={"body": "fts"}) as table:
        table.put([{"id": 1, "title": None, "body": "web server"}])
        with raises(Invalid):
            table.match("body", text)
        assert table.match("body", "web")["id"].to_pylist() == [1]


RAW = ("zzz", "abc", "-abc", "abcd~", '"zzz"', "+zzz", "abc def", "zz*", "", "-zzz", '"abc def"', "+abc -zzz")


def test_an_empty_text_is_found_for_nothing_where_texts_are_whole(tmp_path: Path) -> None:
    """Lance would return the empty text for a query that matches no text."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("t", pa.string())])
    indexes = {"t": {"type": "fts", "base_tokenizer": "raw", "stem": False, "remove_stop_words": False}}
    rows = [{"id": id, "t": text} for id, text in enumerate(["", "abc", " ", "abc def", None])]
    with memwal.open(
        tmp_path / "t", schema=schema, key="id", indexes=indexes, settings={"commit": {"interval": 0}}
    ) as table:
        table.put(rows)
        wanted = {text: sorted(table.match("t", text, k=9)["id"].to_pylist()) for text in RAW}
        assert wanted["abc"] == [1]
        assert wanted["zzz"] == wanted["-abc"] == wanted['"zzz"'] == wanted[""] == []
        for step in (table.flush, table.commit):
            step()
            assert {text: sorted(table.match("t", text, k=9)["id"].to_pylist()) for text in RAW} == wanted


@pytest.mark.parametrize("tokenizer", ["simple", "ngram"])
@pytest.mark.parametrize("built", [False, True], ids=["no index yet", "index"])
def test_a_thousand_required_words_do_not_end_the_process(tmp_path: Path, tokenizer: str, built: bool) -> None:
    """For rows outside the index Lance nests the terms, which overflows its stack."""
    spec = IndexSpec("body", "fts", {"base_tokenizer": tokenizer})
    base = BaseTable.create(str(tmp_path / "t.lance"), SCHEMA, ["id"], 1, [spec])
    words = [f"word{number}" for number in range(1_000)]
    text = " ".join("+" + word for word in words) if tokenizer == "simple" else "+" + "".join(map(chr, LETTERS))
    body = " ".join(words) if tokenizer == "simple" else text[1:]
    dataset = lance.dataset(base.uri)
    rows = [{"id": id, "body": text} for id, text in enumerate((body, body[:500], "gone " + body), 1)]
    dataset.insert(pa.Table.from_pylist(rows, schema=SCHEMA))
    if built:
        dataset.optimize.optimize_indices()
    query = ColumnsQuery.of(text, BODY, {"body": TextParser(spec)})
    assert sorted(of_base(BaseReads(base.latest()), query, 10)) == [1, 3]
    assert query.in_lance


LETTERS = range(0x4E00, 0x4E00 + 1_000)
"""A thousand different characters, and so about as many ngrams."""
BAD = {
    "empty": "",
    "null": None,
    "spaces": " \t\n" * 1_000,
    "control characters": "\x00\x01\x1b[31m needle \x7f",
    "long token": "y" * 10_000 + " needle",
    "megabyte": "alpha beta " * 95_000 + "needle",
    "one token of a megabyte": "z" * 1_000_000,
    "not characters": "\ufffe needle \uffff \ue000",
    "right to left": "\u202eneedle\u202c \u200f",
    "query signs": '+ - * " needle "',
}


@pytest.mark.parametrize("level", ["latest", "flushed", "committed"])
def test_texts_that_could_break_an_index_are_kept_and_found(tmp_path: Path, level: str) -> None:
    holding = {number for number, text in enumerate(BAD.values()) if text and "needle" in text}
    with memwal.open(
        str(tmp_path / "t.lance"),
        schema=SCHEMA,
        key="id",
        regions=1,
        indexes={"body": FTS},
        settings={"commit": {"interval": 0}},
    ) as table:
        table.put([{"id": number, "title": None, "body": text} for number, text in enumerate(BAD.values())])
        if level != "latest":
            table.flush()
        if level == "committed":
            table.commit()
        for text in ("needle", "+needle -zzz", "need*"):
            found = table.match("body", text, 100, columns=["id"], level=level)
            assert set(found["id"].to_pylist()) == holding
        rows = {row["id"]: row["body"] for row in table.scan(level=level).read_all().to_pylist()}
        assert rows == dict(enumerate(BAD.values()))
