"""Matches over several columns and of fuzzy words, compared with a scan of every text; scores, compared with those of
each column."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memwal.memtable import IndexSpec, InvalidRows, Snapshot, row_schema, with_tombstone
from memwal.memtable.text.columns import ColumnsQuery
from memwal.memtable.text.index import MAX_SIMILAR, Terms, TextIndex
from memwal.memtable.text.query import MAX_FUZZY, MAX_FUZZY_WORDS, MAX_WORDS, TextParser
from tests.conftest import extent
from tests.index_modes import memtable_in
from tests.messages import raises

COLUMNS = ("title", "body")
ROWS = row_schema(
    pa.schema([pa.field("id", pa.int64(), nullable=False), *((column, pa.string()) for column in COLUMNS)]), ["id"]
)
PLAIN = {"with_position": True, "stem": False}
Parameters = dict[str, dict[str, Any]]


def specs(parameters: Parameters | None = None) -> list[IndexSpec]:
    return [IndexSpec(column, "fts", (parameters or {}).get(column, PLAIN)) for column in COLUMNS]


def build(texts: list[tuple[str | None, str | None]], parameters: Parameters | None = None) -> Snapshot:
    table = memtable_in("async", ROWS, ["id"], specs(parameters), 1)
    titles, bodies = ([text[at] for text in texts] for at in (0, 1))
    rows = {"id": np.arange(len(texts)), "title": pa.array(titles, pa.string()), "body": pa.array(bodies, pa.string())}
    table.apply(with_tombstone(pa.table(rows), ROWS))
    return table.snapshot()


def asked(text: Any, boosts: dict[str, float] | None = None, parameters: Parameters | None = None) -> ColumnsQuery:
    parsers = {spec.column: TextParser(spec) for spec in specs(parameters)}
    return ColumnsQuery.of(text, boosts or dict.fromkeys(COLUMNS, 1.0), parsers)


def answer(snapshot: Snapshot, query: ColumnsQuery, k: int = 1_000) -> dict[int, float]:
    rows, scores = snapshot.match_columns(query, k, snapshot.live())
    assert (np.diff(scores) <= 0).all()
    assert all(one < other for one, other, same in zip(rows, rows[1:], np.diff(scores) == 0, strict=False) if same)
    return dict(zip(rows.tolist(), scores.tolist(), strict=True))


def one_column(snapshot: Snapshot, column: str, text: str) -> dict[int, float]:
    rows, scores = snapshot.match(column, text, 1_000, snapshot.live())
    return dict(zip(rows.tolist(), scores.tolist(), strict=True))


# ---- several columns


def test_a_required_word_may_be_in_any_column_and_an_excluded_one_in_none() -> None:
    texts = [
        ("web", "server"),
        ("server", "web"),
        ("web server", None),
        ("web", None),
        ("web", "old server"),
        ("x", "y"),
    ]
    snapshot = build(texts)  # type: ignore[arg-type]
    assert set(answer(snapshot, asked("+web +server"))) == {0, 1, 2, 4}
    assert set(answer(snapshot, asked("+web +server -old"))) == {0, 1, 2}
    assert set(answer(snapshot, asked("web -server"))) == {3}
    assert set(answer(snapshot, asked('"web server"'))) == {2}  # a phrase is of one column
    assert set(answer(snapshot, asked("ser*"))) == {0, 1, 2, 4}
    assert answer(snapshot, asked("-web")) == answer(snapshot, asked("")) == {}


def test_a_score_is_the_sum_of_boost_times_score_over_the_columns() -> None:
    snapshot = build([("web", "server web"), ("server", "web web"), ("farm", "of the web")])
    title, body = (one_column(snapshot, column, "web server") for column in COLUMNS)
    for first, second in ((1.0, 1.0), (3.0, 1.0), (0.5, 2.0), (0.001, 1000.0)):
        wanted = {row: first * title.get(row, 0) + second * body.get(row, 0) for row in {*title, *body}}
        assert answer(snapshot, asked("web server", {"title": first, "body": second})) == pytest.approx(wanted)
    assert answer(snapshot, asked("web", {"title": 3.0})) == pytest.approx(
        {0: 3 * one_column(snapshot, "title", "web")[0]}
    )


def test_one_column_with_boost_one_has_exactly_the_scores_of_a_match_of_that_column() -> None:
    snapshot = build([("web server", None), ("server", "x"), ("serve web web", None)])
    for text in ("web server", "+web serv* -x", '"web server" web', "serves~ web"):
        assert answer(snapshot, asked(text, {"title": 1.0})) == one_column(snapshot, "title", text), text


def test_each_column_has_its_own_tokenizer() -> None:
    parameters = {
        "title": {"stem": True},
        "body": {"base_tokenizer": "whitespace", "stem": False, "remove_stop_words": False},
    }
    texts = [("servers", "x"), ("x", "servers"), ("x", "c++ the"), ("c", "x"), ("the", "x")]
    snapshot = build(texts, parameters)  # type: ignore[arg-type]
    assert set(answer(snapshot, asked("server", None, parameters))) == {0}
    assert set(answer(snapshot, asked("+c++", None, parameters))) == {2, 3}
    assert set(answer(snapshot, asked("+the", None, parameters))) == {2}  # a stop word in title
    assert set(answer(snapshot, asked("c+*", None, parameters))) == {2, 3}


@pytest.mark.parametrize(
    "text",
    [
        5,
        "web " * (MAX_WORDS + 1),
        "serch~ " * (MAX_FUZZY_WORDS + 1),
        '"web server"',
        "x" * (MAX_FUZZY + 1) + "~",
    ],
    ids=["number", "words", "fuzzy words", "phrase", "long fuzzy word"],
)
def test_what_cannot_be_asked_is_refused_in_one_line(text: Any) -> None:
    parameters = {"title": {**PLAIN, "max_token_length": None}, "body": {"stem": False}}
    with raises(InvalidRows):
        asked(text, None, parameters)


WORDS = ("web", "wed", "server", "serve", "severe", "lib", "library")
TEXT = st.none() | st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join)
PARTS = st.sampled_from(
    [*WORDS, "ser*", "we*", "librar*", '"web server"', '"lib library"', "serv~", "servr~2", "wbe~2", "web~", "libary~1"]
)
SIGNED = st.tuples(st.sampled_from(["", "", "+", "-"]), PARTS)


def edits(one: str, other: str) -> int:
    """Return Levenshtein's distance by the textbook algorithm."""
    row = list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        above, row = row, [at]
        for to, wanted in enumerate(other, 1):
            row.append(min(above[to - 1] + (letter != wanted), above[to] + 1, row[-1] + 1))
    return row[-1]


def holds(text: str | None, part: str) -> bool:
    words = (text or "").split()
    if part.startswith('"'):
        return tuple(part.strip('"').split()) in set(pairwise(words))
    if part.endswith("*"):
        return any(word.startswith(part[:-1]) for word in words)
    word, tilde, most = part.partition("~")
    return any(edits(word, each) <= (int(most or 1) if tilde else 0) for each in words)


@settings(max_examples=extent(50, 150))
@given(
    st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=9),
    st.lists(SIGNED, min_size=1, max_size=4),
    st.sampled_from([(1.0, 1.0), (3.0, 1.0), (0.5, 2.0)]),
    st.integers(1, 9),
)
def test_queries_of_two_columns_against_reading_every_text(
    texts: list[tuple[str | None, str | None]], parts: list[tuple[str, str]], boosts: tuple[float, float], k: int
) -> None:
    def found(row: int, part: str) -> bool:
        return any(holds(text, part) for text in texts[row])

    by_sign = {sign: [part for each, part in parts if each == sign] for sign in ("", "+", "-")}
    wanted = [
        row
        for row in range(len(texts))
        if (by_sign["+"] or by_sign[""])
        and all(found(row, part) for part in by_sign["+"])
        and (by_sign["+"] or any(found(row, part) for part in by_sign[""]))
        and not any(found(row, part) for part in by_sign["-"])
    ]
    snapshot = build(texts)
    boosts = dict(zip(COLUMNS, boosts, strict=True))
    query = asked(" ".join(sign + part for sign, part in parts), boosts)
    every = answer(snapshot, query)
    assert sorted(every) == wanted
    scores = dict.fromkeys(wanted, 0.0)
    for sign, part in parts:
        for column, boost in boosts.items():
            for row, score in one_column(snapshot, column, part).items() if sign != "-" else ():
                if row in scores:
                    scores[row] += boost * score
    assert every == pytest.approx(scores, rel=1e-5)
    assert list(answer(snapshot, query, k)) == list(every)[:k]


# ---- fuzzy words


def test_a_fuzzy_word_is_analysed_before_it_is_compared() -> None:
    snapshot = build([("library", None), ("Café", None), ("running", None)], {"title": {}, "body": {}})
    assert set(one_column(snapshot, "title", "libraries~")) == {0}  # both are "librari"
    assert set(one_column(snapshot, "title", "libary~")) == {0}  # "libari"
    assert set(one_column(snapshot, "title", "CAFFÉ~")) == {1}
    assert set(one_column(snapshot, "title", "runnning~")) == {2}  # "runn" and "run"
    assert one_column(snapshot, "title", "runner~2") == {}  # the stem of "running" is "run"
    assert one_column(snapshot, "title", "runnnig~2") == {}  # not stemmed: three letters more than "run"


def test_two_swapped_letters_are_two_edits_and_no_first_letter_is_fixed() -> None:
    snapshot = build([("search", None), ("church", None)])
    assert one_column(snapshot, "title", "saerch~") == {}
    assert set(one_column(snapshot, "title", "saerch~2")) == {0}
    assert set(one_column(snapshot, "title", "zearch~")) == {0}


def test_similar_terms_score_as_words() -> None:
    snapshot = build([("search serch", None), ("search", None), ("serch serch", None), ("web", None)])
    fuzzy, words = (one_column(snapshot, "title", text) for text in ("serch~", "serch search"))
    assert fuzzy == pytest.approx(words)
    assert set(fuzzy) == {0, 1, 2}


def test_no_similar_term_is_no_row_and_rows_put_later_are_found() -> None:
    table = memtable_in("async", ROWS, ["id"], specs(), 1)

    def put(id: int, title: str) -> None:
        table.apply(with_tombstone(pa.table({"id": [id], "title": [title], "body": pa.nulls(1, pa.string())}), ROWS))

    put(0, "web")
    before = table.snapshot()
    assert one_column(before, "title", "serch~") == {}
    assert one_column(before, "title", "web -serch~") == one_column(before, "title", "web")
    put(1, "search")
    after = table.snapshot()
    assert set(one_column(after, "title", "serch~")) == {1}
    assert one_column(before, "title", "serch~") == {}


@pytest.mark.parametrize("alphabet", ["ab", "aé日\U0001f642"])
def test_distances_are_those_of_the_textbook(alphabet: str) -> None:
    rng = np.random.default_rng(5)
    words = sorted({"".join(rng.choice(list(alphabet), size)) for size in range(1, 8) for _ in range(40)})
    terms = Terms(words)
    for word in words[::7]:
        for most in (1, 2):
            assert terms.similar(word, most) == [each for each in words if edits(word, each) <= most]


def test_of_too_many_similar_terms_the_first_in_byte_order_count() -> None:
    words = [f"{a}{b}{c}z" for a in "zyxwvutsrqponm" for b in "abcdefghijklmno" for c in "abcdefghij"]
    assert Terms(words).similar("aaaz", 2) == sorted(word for word in words if edits("aaaz", word) <= 2)[:MAX_SIMILAR]
    assert Terms([f"{word}zz" for word in words]).similar("zzzzz", 1) == []
    assert Terms([]).similar("web", 2) == []


def test_the_list_of_terms_counts_as_memory() -> None:
    index = TextIndex(IndexSpec("title", "fts", PLAIN))
    index.add(pa.chunked_array([[f"word{number:06}" for number in range(10_000)]]), 0)
    index.close_writer()
    searcher, before = index.searcher(), index.bytes
    mask = np.ones(10_000, dtype=np.bool_)
    assert len(index.match(searcher, index.parser.parse("word000001~"), 10_000, mask)[0]) == 1 + 9 * 4
    assert 10_000 * len("word000000") < index.bytes - before < 400_000
