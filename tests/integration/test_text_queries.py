"""Text queries over the levels: the memtable and Lance find the same rows, with the same scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from memwal.memtable import IndexSpec, MemTable, Snapshot, row_schema, with_tombstone
from memwal.memtable.text.columns import ColumnsQuery
from memwal.memtable.text.query import TextParser
from tests.conftest import extent
from tests.messages import raises

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("body", pa.string())])
ROWS = row_schema(SCHEMA, ["id"])
FTS = {"type": "fts", "with_position": True}
SPEC = IndexSpec("body", "fts", {"with_position": True})
NGRAMS: dict[str, dict[str, Any]] = {"3": {}, "2-4": {"min_ngram_length": 2, "max_ngram_length": 4}}
"""Lengths of ngrams: with one length Lance answers, with several the rows are read."""
PACKAGES = Path(__file__).resolve().parents[2] / "configs" / "quickstart"
COUNT = 1_500
INDEXED = 1_000


def asked(text: str, spec: IndexSpec = SPEC) -> ColumnsQuery:
    return ColumnsQuery.of(text, {"body": 1.0}, {"body": TextParser(spec)})


def texts() -> list[str | None]:
    """Return package descriptions, and some rows without words."""
    files = sorted(PACKAGES.glob("01-packages-*.parquet"))
    found = pa.concat_tables([pq.read_table(file) for file in files])["description"].to_pylist()
    return [*found[: COUNT - 4], None, "", "the of and", "web " * 300]


class Sides:
    """The same rows in a memtable and in a Lance table whose first rows are indexed."""

    def __init__(self, path: Path, spec: IndexSpec = SPEC) -> None:
        self.spec = spec
        rows = pa.table({"id": np.arange(COUNT), "body": texts()}, schema=SCHEMA)
        table = MemTable(ROWS, ["id"], [spec], 1)
        table.apply(with_tombstone(rows, ROWS))
        self.snapshot: Snapshot = table.snapshot()
        base = BaseTable.create(str(path / "t.lance"), SCHEMA, ["id"], 1, [spec])
        dataset = lance.dataset(base.uri)
        dataset.insert(rows.slice(0, INDEXED))
        dataset.optimize.optimize_indices()
        dataset.insert(rows.slice(INDEXED))
        self.base = BaseReads(base.latest())

    def memtable_answer(self, text: str, k: int, mask: Any) -> dict[int, float]:
        positions, scores = self.snapshot.match("body", text, k, mask)
        return dict(zip(positions.tolist(), scores.tolist(), strict=True))

    def base_answer(self, text: str, k: int, filter: str | None) -> dict[int, float]:
        rows = self.base.match(asked(text, self.spec), k, filter, ["id"])
        assert rows.column_names == ["id", "_score"]
        scores = rows["_score"].to_pylist()
        assert scores == sorted(scores, reverse=True)
        return dict(zip(rows["id"].to_pylist(), scores, strict=True))


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    return Sides(tmp_path_factory.mktemp("sides"))


WORDS = st.sampled_from(
    [
        *("library", "libraries", "python", "Web", "server", "the", "of", "for", "data", "files", "development", "zzz"),
        *("runtime", "tools", "debug", "C++", "command-line", "'s", "GNU", "shared", "and", "3"),
    ]
)
PHRASES = st.sampled_from(
    [
        *('"shared library"', '"development files"', '"library for"', '"for the"', '"command line tool"'),
        *('"files for the"', '"shared library for"', '"library"', '"python library"', '"library python"'),
    ]
)
PREFIXES = st.sampled_from(["lib*", "librar*", "library*", "py*", "de*", "tool*", "zzz*"])
SIGNS = st.sampled_from(["", "", "+", "-"])
FILTERS = {None: lambda ids: ids >= 0, "id >= 700": lambda ids: ids >= 700, "id % 97 = 3": lambda ids: ids % 97 == 3}


def queries(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.tuples(SIGNS, parts).map("".join), min_size=1, max_size=5).map(" ".join)


def check(sides: Sides, text: str, filter: str | None, k: int) -> None:
    mask = FILTERS[filter](np.arange(COUNT))
    every = sides.memtable_answer(text, COUNT, mask)
    assert set(sides.base_answer(text, COUNT, filter)) == set(every)
    best = sides.base_answer(text, k, filter)
    assert len(best) == len(sides.memtable_answer(text, k, mask)) == min(k, len(every))
    assert set(best) <= set(every)


AGREE = settings(
    max_examples=extent(40, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@AGREE
@given(queries(WORDS | PHRASES), st.sampled_from(list(FILTERS)), st.sampled_from([1, 10, 200]))
def test_both_sides_find_the_same_rows(sides: Sides, text: str, filter: str | None, k: int) -> None:
    check(sides, text, filter, k)


@pytest.mark.parametrize(
    "text", ["+command-line", "tool -command-line", '+"the library" tool', '-"for the" +of library']
)
def test_both_sides_read_a_marked_word_of_several_tokens_alike(sides: Sides, text: str) -> None:
    check(sides, text, None, 10)
    assert sides.base_answer(text, 10, None)


@settings(AGREE, max_examples=15)
@given(queries(WORDS | PHRASES | PREFIXES | PREFIXES), st.sampled_from(list(FILTERS)), st.sampled_from([1, 10]))
def test_both_sides_find_the_same_rows_by_prefix(sides: Sides, text: str, filter: str | None, k: int) -> None:
    check(sides, text, filter, k)


@pytest.fixture(scope="module", params=list(NGRAMS))
def ngram_sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    spec = IndexSpec("body", "fts", {"base_tokenizer": "ngram", **NGRAMS[request.param]})
    return Sides(tmp_path_factory.mktemp("ngram_sides"), spec)


MARKS = st.sampled_from(["", "", "*", "~", "~2"])


@settings(AGREE, max_examples=30)
@given(queries(st.tuples(WORDS, MARKS).map("".join)), st.sampled_from(list(FILTERS)), st.sampled_from([1, 10]))
def test_both_sides_find_the_same_rows_by_ngrams(ngram_sides: Sides, text: str, filter: str | None, k: int) -> None:
    check(ngram_sides, text, filter, k)


@pytest.mark.parametrize("text", ["+library", "+development +data", "+librar*", "python -library", "+libraries~ tool"])
def test_the_rows_of_a_signed_word_have_all_its_ngrams(ngram_sides: Sides, text: str) -> None:
    """The ngrams have two letters and more, in any order."""
    required = [part[1:].rstrip("*~") for part in text.split() if part[0] == "+"]
    excluded = [part[1:] for part in text.split() if part[0] == "-"]
    plain = [part for part in text.split() if part[0].isalpha()]
    shortest = ngram_sides.spec.parameters.get("min_ngram_length", 3)

    def ngrams(text: str) -> set[str]:
        longest = max(shortest, ngram_sides.spec.parameters.get("max_ngram_length", 3))
        return {
            text.lower()[at : at + size] for size in range(shortest, longest + 1) for at in range(len(text) - size + 1)
        }

    expected = {
        row
        for row, held in enumerate(map(ngrams, (text or "" for text in texts())))
        if all(ngrams(word) <= held for word in required)
        and not any(ngrams(word) <= held for word in excluded)
        and (required or any(ngrams(word) & held for word in plain))
    }
    check(ngram_sides, text, None, 10)
    assert set(ngram_sides.base_answer(text, COUNT, None)) == expected
    assert 0 < len(expected) < COUNT


def test_a_prefix_of_the_base_is_looked_for_in_parts(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sides.base_answer("lib*", COUNT, None)
    monkeypatch.setattr("memwal.ingest.engine.read.base_match.ROWS_PER_INDEX", 100)
    assert sides.base_answer("lib*", COUNT, None) == whole
    assert len(whole) > 100
    assert len(sides.base_answer("lib*", 7, None)) == 7


@pytest.mark.parametrize(
    "text",
    [
        "library",
        "python library",
        "+shared +library files",
        '"shared library"',
        '+"development files" -python',
        "web web",
    ],
)
def test_scores_are_those_of_lance_where_it_indexed_every_row(tmp_path: Path, text: str) -> None:
    rows = pa.table({"id": np.arange(COUNT - 1), "body": texts()[:-1]}, schema=SCHEMA)
    base = BaseTable.create(str(tmp_path / "t.lance"), SCHEMA, ["id"], 1, [SPEC])
    lance.dataset(base.uri).insert(rows)
    lance.dataset(base.uri).optimize.optimize_indices()
    table = MemTable(ROWS, ["id"], [SPEC], 1)
    table.apply(with_tombstone(rows, ROWS))
    found = BaseReads(base.latest()).match(asked(text), COUNT, None, ["id"])
    positions, scores = table.snapshot().match("body", text, COUNT, table.snapshot().live())
    truth = dict(zip(found["id"].to_pylist(), found["_score"].to_pylist(), strict=True))
    assert dict(zip(positions.tolist(), scores.tolist(), strict=True)) == pytest.approx(truth, rel=1e-2)


@pytest.mark.parametrize("place", ["memtable", "sst", "base"])
def test_scores_of_one_level_are_those_of_one_index_over_its_rows(tmp_path: Path, place: str) -> None:
    """Scores agree within 1e-6 for texts of up to 40 tokens, whose lengths tantivy does not round. Over several levels
    a score uses the statistics of its row's level, and in a memtable older versions count too: see
    ingest/engine/read/README.md.
    """
    draw = np.random.default_rng(7)
    words = [f"word{number}" for number in range(40)]
    bodies = [" ".join(draw.choice(words, draw.integers(1, 40))) for _ in range(400)]
    rows = pa.table({"id": np.arange(400), "body": bodies}, schema=SCHEMA)
    oracle = lance.write_dataset(rows, tmp_path / "oracle")
    oracle.create_scalar_index("body", "INVERTED", with_position=True)
    settings = {"commit": {"interval": "0s"}}
    uri = str(tmp_path / "t.lance")
    with memwal.open(uri, schema=SCHEMA, key="id", regions=1, indexes={"body": FTS}, settings=settings) as table:
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


@pytest.fixture(scope="module", params=["latest", "flushed", "committed"])
def leveled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """Yield a table with rows at one level, and the newest versions of some of them there too."""
    rows = {1: "web server", 2: "server of the web", 3: "a library", 4: "web library", 5: "gone web server"}
    with memwal.open(
        str(tmp_path_factory.mktemp("leveled") / "t.lance"),
        schema=SCHEMA,
        key="id",
        regions=2,
        indexes={"body": FTS},
        settings={"commit": {"interval": 0}},
    ) as table:
        table.put([{"id": key, "body": "old web server library"} for key in rows])
        if request.param != "latest":
            table.flush()
        table.put([{"id": key, "body": body} for key, body in rows.items()])
        table.delete([5])
        if request.param != "latest":
            table.flush()
        if request.param == "committed":
            table.commit()
        yield table, request.param


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("web server", {1, 2, 4}),
        ("+web +server", {1, 2}),
        ('"web server"', {1}),
        ("web -server", {4}),
        ("lib*", {3, 4}),
        ("+lib* -web", {3}),
        ("old", set()),
        ("-web", set()),
        ("", set()),
        ('the "of" -', set()),
    ],
)
def test_every_level_answers_alike(leveled: tuple[Any, str], text: str, found: set[int]) -> None:
    table, level = leveled
    assert set(table.match("body", text, columns=["id"], level=level)["id"].to_pylist()) == found
    some = table.match("body", text, 1, columns=["id"], level=level)
    assert some.num_rows == min(1, len(found))
    kept = table.match("body", text, filter="id <> 4", columns=["id"], level=level)
    assert set(kept["id"].to_pylist()) == found - {4}


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
        table.put([{"id": id, "body": body} for id, body in enumerate(bodies)])
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
        table.put([{"id": 1, "body": "web server"}])
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
    dataset.insert(pa.table({"id": [1, 2, 3], "body": [body, body[:500], "gone " + body]}, schema=SCHEMA))
    if built:
        dataset.optimize.optimize_indices()
    found = BaseReads(base.latest()).match(asked(text, spec), 10, None, ["id"])
    assert sorted(found["id"].to_pylist()) == [1, 3]
    assert asked(text, spec).in_lance


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
        table.put([{"id": number, "body": text} for number, text in enumerate(BAD.values())])
        if level != "latest":
            table.flush()
        if level == "committed":
            table.commit()
        for text in ("needle", "+needle -zzz", "need*"):
            found = table.match("body", text, 100, columns=["id"], level=level)
            assert set(found["id"].to_pylist()) == holding
        rows = {row["id"]: row["body"] for row in table.scan(level=level).read_all().to_pylist()}
        assert rows == dict(enumerate(BAD.values()))
