"""The query that a text stands for and its rows, compared with a scan of every text."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memwal.memtable import IndexSpec, InvalidRows, Snapshot, row_schema, with_tombstone
from memwal.memtable.text.query import MAX_WORDS, TextParser
from tests.index_modes import memtable_in
from tests.messages import raises

ROWS = row_schema(pa.schema([pa.field("id", pa.int64(), nullable=False), ("body", pa.string())]), ["id"])
WORDS = ("web", "the", "server", "serve", "lib", "library")
STEMS = {"server": "server", "serve": "serv", "library": "librari"}


def parsed(text: str, **parameters: Any) -> list[tuple[str, str, str]]:
    parser = TextParser(IndexSpec("body", "fts", {"with_position": True, **parameters}))
    return [(clause.occur, clause.kind, clause.text) for clause in parser.parse(text).clauses]


def build(texts: list[str | None], mode: str = "async", **parameters: Any) -> Snapshot:
    spec = IndexSpec("body", "fts", {"with_position": True, **parameters})
    table = memtable_in(mode, ROWS, ["id"], [spec], 1)
    rows = pa.table({"id": np.arange(len(texts)), "body": pa.array(texts, pa.string())})
    table.apply(with_tombstone(rows, ROWS))
    return table.snapshot()


def matched(snapshot: Snapshot, text: str) -> list[int]:
    return sorted(snapshot.match("body", text, 1_000, snapshot.live())[0].tolist())


# ---- the notation


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("web  server", [("should", "any", "web  server")]),
        ("+web -server cheap", [("must", "all", "web"), ("must_not", "all", "server"), ("should", "any", "cheap")]),
        ('"web server"', [("should", "phrase", "web server")]),
        ('+"web server" -"old one"', [("must", "phrase", "web server"), ("must_not", "phrase", "old one")]),
        ("serv* -lib*", [("should", "prefix", "serv"), ("must_not", "prefix", "lib")]),
        ("+kebab-case", [("must", "all", "kebab-case")]),
        ('"single"', [("should", "all", "single")]),
        ("+the web", [("should", "any", "web")]),
        ("-web", []),
        ("-web +the", []),
        ("the of", []),
        ("", []),
        ("kebab-case~", [("should", "any", "kebab-case~")]),
        ("+kebab-case~", [("must", "all", "kebab-case~")]),
        ("serch~3", [("should", "any", "serch~3")]),
        ("serch~0.8", [("should", "any", "serch~0.8")]),
        ("1~2 a~ the~ ~2", [("should", "any", "1~2 a~ the~ ~2")]),
    ],
)
def test_the_notation(text: str, clauses: list[tuple[str, str, str]]) -> None:
    assert parsed(text) == clauses


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("library~", [("should", "library", 1)]),
        ("+serch~2 -Web~", [("must", "serch", 2), ("must_not", "web", 1)]),
        ("ser*~1", [("should", "ser", 1)]),
    ],
)
def test_a_tilde_asks_for_similar_words(text: str, clauses: list[tuple[str, str, int]]) -> None:
    found = TextParser(IndexSpec("body", "fts", {"stem": False})).parse(text).clauses
    assert [(clause.occur, clause.text, clause.edits) for clause in found if clause.kind == "fuzzy"] == clauses


@pytest.mark.parametrize(
    "prose",
    [
        "kebab-case and C++",
        '5" disk and 3" disk',
        'he said "hello and left',
        "a - b + c",
        "--help ---",
        "*emphasis* **bold** a*b *:*",
        "title:web AND (server OR NOT cheap) ~2 ^3 [a TO b]",
        "lib-foo*",
        'a"quoted part"b',
        "\\ / ! && || ? '",
        "\x00 \x1b[31m \u202e \U0001f642",
    ],
)
def test_prose_is_words(prose: str) -> None:
    """A query of plain prose has only the words that a tokenizer finds in it."""
    assert parsed(prose) in ([("should", "any", prose)], [])


def test_a_raw_tokenizer_is_asked_for_the_text_as_it_stands() -> None:
    assert parsed("two  spaces", base_tokenizer="raw") == [("should", "any", "two  spaces")]
    assert matched(build(["two  spaces", "two spaces"], base_tokenizer="raw"), "two  spaces") == [0]


def test_a_phrase_needs_positions_and_a_word_in_quotes_does_not() -> None:
    snapshot = build(["web server", "server web"], with_position=False)
    with raises(InvalidRows):
        snapshot.match("body", 'some "web server"', 5, snapshot.live())
    assert matched(snapshot, '"server"') == [0, 1]
    assert matched(snapshot, '+web +"the server"') == [0, 1]


def test_a_phrase_of_ngrams_is_refused() -> None:
    with raises(InvalidRows):
        parsed('"web server"', base_tokenizer="ngram")


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("+server", [("must", "all", "server")]),
        ("-serv* web", [("must_not", "all", "serv"), ("should", "any", "web")]),
        ("+server~ +web2~2 +web2~", [("must", "all", "server"), ("must", "all", "web2"), ("must", "all", "web2")]),
        ("+serv~*** +se* web", [("must", "all", "serv"), ("should", "any", "web")]),
        ("serv* web", [("should", "any", "serv"), ("should", "any", "web")]),
        ("a*b serv~3", [("should", "any", "a*b serv~3")]),
        ("+a*b~3", [("must", "all", "a*b~3")]),
    ],
)
def test_of_ngrams_the_signs_behind_a_word_are_left_out(text: str, clauses: list[tuple[str, str, str]]) -> None:
    assert parsed(text, base_tokenizer="ngram") == clauses


def test_a_signed_word_is_all_its_ngrams() -> None:
    snapshot = build(["server", "servers", "serving", "revers ser", "a rv*"], base_tokenizer="ngram")
    assert matched(snapshot, "+server") == [0, 1]
    assert matched(snapshot, "+serv*") == [0, 1, 2]
    assert matched(snapshot, "+servers~2") == [1]
    assert matched(snapshot, "serv -server") == [2, 3]
    assert matched(snapshot, "+rve -servers") == [0]
    assert matched(snapshot, "a" + "*" * 60_000 + "b server") == [0, 1, 2, 3]


def test_lance_is_asked_for_ngrams_that_it_makes_again_of_their_source() -> None:
    def clause(**lengths: Any) -> Any:
        parser = TextParser(IndexSpec("body", "fts", {"base_tokenizer": "ngram", **lengths}))
        return parser.parse("+Straße").clauses[0]

    one_length = clause()
    assert [token for _, token in one_length.tokens] == ["str", "tra", "rass", "asse"]
    assert one_length.ngrams == ("Str", "tra", "raß", "aße")
    assert one_length.in_lance
    assert clause(min_ngram_length=2, max_ngram_length=2).in_lance
    assert not clause(min_ngram_length=2, max_ngram_length=4).in_lance


@pytest.mark.parametrize(
    "text",
    [
        5,
        None,
        b"web",
        "web \ud800",
        "web " * (MAX_WORDS + 1),
        "+web " * (MAX_WORDS + 1),
        "web* " * MAX_WORDS,
        '" ' * 500_000,
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_asked_is_refused_in_one_line(text: Any) -> None:
    snapshot = build(["web"])
    with raises(InvalidRows):
        snapshot.match("body", text, 5, snapshot.live())
    assert matched(snapshot, "web") == [0]


@pytest.mark.parametrize(
    "padding",
    ["x" * 60_000, "+" + "x" * 60_000, "x" * 60_000 + "*", " " * 60_000, '" ' * 30_000, "+-" * 30_000],
    ids=len,
)
def test_a_long_query_of_few_words_finds_what_is_there(padding: str) -> None:
    assert matched(build(["web", "x" * 40]), padding + " web") == [0]


# ---- the rows


def test_a_prefix_is_of_terms_and_a_whole_word_its_own_prefix() -> None:
    snapshot = build(["library", "librarian", "libs", "running", "runner", "Café", "caff"])
    assert matched(snapshot, "librar*") == [0, 1]
    assert matched(snapshot, "library*") == [0]  # the term of "library" is "librari"
    assert matched(snapshot, "LIB*") == [0, 1, 2]
    assert matched(snapshot, "running*") == [3]
    assert matched(snapshot, "runn*") == [4]  # the term of "running" is "run"
    assert matched(snapshot, "café*") == [5]
    assert matched(snapshot, "caf*") == [5, 6]
    assert matched(snapshot, "the*") == []
    assert matched(build(["running", "runner"], stem=False), "runn*") == [0, 1]
    _, scores = snapshot.match("body", "lib*", 5, snapshot.live())
    assert scores.tolist() == [1.0, 1.0, 1.0]


def test_a_phrase_keeps_the_gaps_of_stop_words_as_lance_does() -> None:
    snapshot = build(["quick brown fox", "quick the fox", "quick fox", "fox quick", "the quick and the fox"])
    assert matched(snapshot, '"quick fox"') == [2]
    assert matched(snapshot, '"quick the fox"') == [0, 1]
    assert matched(snapshot, '"the quick"') == [0, 1, 2, 3, 4]


def test_a_repeated_word_weighs_twice_as_in_lance() -> None:
    snapshot = build(["web server", "server"])
    once = snapshot.match("body", "web", 5, snapshot.live())[1]
    assert snapshot.match("body", "web web", 5, snapshot.live())[1] == pytest.approx(2 * once)


SIGNS = st.sampled_from(["", "", "+", "-"])
BASIC = st.sampled_from(WORDS) | st.lists(st.sampled_from(WORDS), min_size=2, max_size=3).map(
    lambda w: f'"{" ".join(w)}"'
)
PARTS = st.tuples(SIGNS, BASIC | st.sampled_from(["serv*", "lib*", "librar*", "we*"]))
TEXTS = st.lists(st.none() | st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join), min_size=1, max_size=9)


def terms(text: str | None) -> dict[int, str]:
    """Return the term of each place, without stop words."""
    return {at: STEMS.get(word, word) for at, word in enumerate((text or "").split()) if word != "the"}


def holds(text: str | None, part: str) -> bool:
    there = terms(text)
    if part.endswith("*"):
        return any(term.startswith(part[:-1]) for term in there.values())
    wanted = terms(part.strip('"'))
    starts = range(-3, 6)
    return any(all(there.get(start + at) == term for at, term in wanted.items()) for start in starts)


@settings(max_examples=80, deadline=None)
@given(TEXTS, st.lists(PARTS, min_size=1, max_size=4), st.sampled_from(["sync", "async"]))
def test_boolean_queries_against_reading_every_text(
    texts: list[str | None], parts: list[tuple[str, str]], mode: str
) -> None:
    asked = [(sign, part) for sign, part in parts if part.endswith("*") or terms(part.strip('"'))]
    must = [part for sign, part in asked if sign == "+"]
    may = [part for sign, part in asked if not sign]
    never = [part for sign, part in asked if sign == "-"]
    wanted = [
        row
        for row, text in enumerate(texts)
        if (must or may)
        and all(holds(text, part) for part in must)
        and (must or any(holds(text, part) for part in may))
        and not any(holds(text, part) for part in never)
    ]
    assert matched(build(texts, mode), " ".join(sign + part for sign, part in parts)) == wanted
