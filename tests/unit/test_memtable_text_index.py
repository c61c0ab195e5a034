"""Text search: the words Lance would match, masks, and texts that could break a tokenizer."""

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memtable import IndexSpec, InvalidRows, MemTable, Snapshot, row_schema, with_tombstone

BASE = pa.schema([pa.field("id", pa.int64(), nullable=False), ("body", pa.string())])
ROWS = row_schema(BASE, ["id"])
TEXTS = [
    "The quick brown foxes were running over lazy dogs",
    "Café naïve ÉCOLE",
    "snake_case and kebab-case, a.b.c and C++ since 3.14; it's so",
    "own doing do does not being no nor",
    "Größe of the ﬁle in Straße",
    "日本語 テキスト",
    "a" * 39 + " " + "b" * 40 + " " + "c" * 41,
    "",
    "running runner runs ran",
    "editor for editing texts: an editor",
]

PACKAGES = Path(__file__).resolve().parents[2] / "configs" / "quickstart"


@pytest.fixture(scope="module")
def real_packages() -> pa.Table:
    """The 4,000 Debian packages of the quickstart, before their updates."""
    return pa.concat_tables(pq.read_table(file) for file in sorted(PACKAGES.glob("01-packages-*.parquet")))


def put(table: MemTable, first: int, texts: list[str | None]) -> None:
    ids = np.arange(first, first + len(texts))
    table.apply(with_tombstone(pa.table({"id": ids, "body": pa.array(texts, pa.string())}), ROWS))


def build(texts: list[str | None], **parameters: Any) -> Snapshot:
    table = MemTable(ROWS, ["id"], [IndexSpec("body", "fts", parameters)], 1)
    put(table, 0, texts)
    return table.snapshot()


def matched(snapshot: Snapshot, text: str, k: int = 1_000) -> set[int]:
    return set(snapshot.match("body", text, k, snapshot.live())[0].tolist())


@pytest.mark.parametrize(
    "parameters",
    [{}, {"stem": False}, {"remove_stop_words": False}, {"ascii_folding": False, "max_token_length": None}],
)
def test_rows_and_scores_are_those_of_lance(
    tmp_path: Path, real_packages: pa.Table, parameters: dict[str, Any]
) -> None:
    texts = TEXTS + real_packages["description"].to_pylist()[:1_000]
    dataset = lance.write_dataset(pa.table({"id": range(len(texts)), "body": texts}), tmp_path / "t")
    dataset.create_scalar_index("body", "INVERTED", **parameters)
    snapshot = build(texts, **parameters)
    words = sorted({word for text in texts[:200] for word in text.split()})[::3]
    for query in [
        *words,
        "text editor for programs",
        "the",
        "not",
        "do",
        "cafe",
        "ecole",
        "it's",
        "running",
        "3.14",
    ]:
        found = dataset.to_table(full_text_query=query, columns=["id", "_score"], limit=2_000)
        rows, scores = snapshot.match("body", query, 2_000, snapshot.live())
        truth = dict(zip(found["id"].to_pylist(), found["_score"].to_pylist(), strict=True))
        assert set(rows.tolist()) == set(truth), query
        if len(set(query.split())) == 1:
            assert dict(zip(rows.tolist(), scores.tolist(), strict=True)) == pytest.approx(truth, rel=1e-3), query


def test_scores_fall_and_rank_the_better_match_first() -> None:
    snapshot = build(["apple pie", "apple apple apple", "pear", "apple pear plum fig date and much more of it"])
    rows, scores = snapshot.match("body", "apple", 10, snapshot.live())
    assert rows[0] == 1
    assert set(rows.tolist()) == {0, 1, 3}
    assert scores.dtype == np.float32
    assert (np.diff(scores) <= 0).all()
    assert (scores > 0).all()


def test_any_word_matches_and_more_words_match_better() -> None:
    snapshot = build(["red apple", "green apple", "green pear", "blue plum"])
    rows, _ = snapshot.match("body", "green apple", 10, snapshot.live())
    assert rows[0] == 1
    assert set(rows.tolist()) == {0, 1, 2}


def test_a_mask_never_costs_results() -> None:
    snapshot = build(["same words here"] * 3_000)
    mask = np.zeros(3_000, dtype=bool)
    mask[[5, 2_990, 2_999]] = True
    assert set(snapshot.match("body", "words", 3, mask)[0].tolist()) == {5, 2_990, 2_999}


def test_a_row_is_found_by_the_first_match_after_its_put_and_by_no_older_snapshot() -> None:
    table = MemTable(ROWS, ["id"], [IndexSpec("body", "fts")], 1)
    put(table, 0, ["first word"])
    before = table.snapshot()
    assert matched(before, "word") == {0}
    put(table, 1, ["second word"])
    unmatched = table.snapshot()
    put(table, 2, ["third word"])
    assert matched(before, "word") == {0}
    assert matched(unmatched, "word") == {0, 1}
    assert matched(table.snapshot(), "word") == {0, 1, 2}


def test_scores_of_a_snapshot_stay_once_asked() -> None:
    table = MemTable(ROWS, ["id"], [IndexSpec("body", "fts")], 1)
    put(table, 0, ["rare word", "common word"])
    snapshot = table.snapshot()
    first = snapshot.match("body", "rare", 5, snapshot.live())[1].tolist()
    put(table, 2, ["rare rare"] * 100)
    matched(table.snapshot(), "rare")
    assert snapshot.match("body", "rare", 5, snapshot.live())[1].tolist() == first


def test_null_and_empty_texts_are_kept_and_never_match() -> None:
    snapshot = build([None, "", "word", None])
    assert matched(snapshot, "word") == {2}
    assert matched(snapshot, "") == set()
    assert snapshot.take(np.arange(4), ["body"]).column("body").to_pylist() == [None, "", "word", None]


def test_texts_that_could_break_a_tokenizer() -> None:
    megabyte = "alpha beta " * 100_000
    snapshot = build([megabyte, "x" * 10_000 + " tail", "\x00 nul byte", "\u202e right to left", "🙂 smile"])
    assert matched(snapshot, "beta") == {0}
    assert matched(snapshot, "tail") == {1}
    assert matched(snapshot, "byte") == {2}
    assert matched(snapshot, "smile") == {4}
    assert matched(snapshot, "x" * 10_000) == set()


@pytest.mark.parametrize("text", ["", "  ", "the of and", '"AND" (', "body:word", "a OR NOT", "🙂", "\x00", "*:*"])
def test_a_query_is_words_never_a_language(text: str) -> None:
    assert matched(build(["plain text"]), text) == set()


def test_an_unlimited_token_length_survives_a_token_beyond_the_engines_own() -> None:
    snapshot = build(["x" * 70_000 + " tail"], max_token_length=None)
    assert matched(snapshot, "tail") == {0}


@pytest.mark.parametrize("language", ["German", "French", "Spanish"])
def test_other_languages_stem(language: str) -> None:
    snapshot = build(["Häuser bauen", "maisons", "casas grandes"], language=language)
    word = {"German": "Haus bauten baut", "French": "maison", "Spanish": "casa"}[language]
    assert matched(snapshot, word) == {{"German": 0, "French": 1, "Spanish": 2}[language]}


def test_a_column_without_index_is_refused_with_the_remedy() -> None:
    snapshot = build(["x"])
    with pytest.raises(InvalidRows, match="no fts index"):
        snapshot.match("id", "x", 1, snapshot.live())
