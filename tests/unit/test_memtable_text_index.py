"""Text search: the words that Lance matches, masks, and texts that could break a tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import IndexSpec, InvalidRows, MemTable, Snapshot, row_schema, with_tombstone
from memwal.memtable.text import index as text_index
from memwal.memtable.text.analysis import analyzer
from memwal.memtable.text.index import TextIndex
from tests.index_modes import memtable_in
from tests.messages import raises

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

LANGUAGES = (
    *("Arabic", "Danish", "Dutch", "English", "Finnish", "French", "German", "Greek", "Hungarian", "Italian"),
    *("Norwegian", "Portuguese", "Romanian", "Russian", "Spanish", "Swedish", "Tamil", "Turkish"),
)


def put(table: MemTable, first: int, texts: list[str | None]) -> None:
    ids = np.arange(first, first + len(texts))
    table.apply(with_tombstone(pa.table({"id": ids, "body": pa.array(texts, pa.string())}), ROWS))


def empty(mode: str = "async", **parameters: Any) -> MemTable:
    return memtable_in(mode, ROWS, ["id"], [IndexSpec("body", "fts", parameters)], 1)


def build(texts: list[str | None], **parameters: Any) -> Snapshot:
    table = empty(**parameters)
    put(table, 0, texts)
    return table.snapshot()


def matched(snapshot: Snapshot, text: str, k: int = 1_000) -> set[int]:
    return set(snapshot.match("body", text, k, snapshot.live())[0].tolist())


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"stem": False},
        {"remove_stop_words": False},
        {"ascii_folding": False, "max_token_length": None},
        {"lower_case": False},
        {"base_tokenizer": "whitespace"},
        {"base_tokenizer": "raw"},
        {"base_tokenizer": "ngram"},
        {"base_tokenizer": "ngram", "min_ngram_length": 2, "max_ngram_length": 4, "stem": True},
        {"base_tokenizer": "ngram", "max_ngram_length": 5, "prefix_only": True},
        {"custom_stop_words": ["editor", "library"]},
        {"custom_stop_words": []},
        *({"language": language, "remove_stop_words": False} for language in LANGUAGES),
    ],
    ids=str,
)
def test_tokens_are_those_of_lance(real_packages: pa.Table, parameters: dict[str, Any]) -> None:
    ours = analyzer(IndexSpec("body", "fts", parameters))
    # tantivy also folds some punctuation, which Lance does not; only tokens with punctuation show the difference.
    texts = [text.replace("\u2012", "-") for text in real_packages["description"].to_pylist()[:1_000]]
    for text in TEXTS + texts:
        tokens = ours.pre_tokenize(text).tokens
        found = [(token.text, token.position - tokens[0].position) for token in tokens]
        assert found == [(token.text, token.position) for token in lance.tokenize(text, **parameters)], text


@pytest.mark.parametrize("language", ["Arabic", "Greek", "Romanian", "Tamil", "Turkish"])
def test_a_language_without_stop_words_is_refused_with_the_remedy(language: str) -> None:
    with raises(InvalidRows):
        empty(language=language)
    assert matched(build(["one two"], language=language, custom_stop_words=["one"]), "one two") == {0}


# tantivy rounds the length of a text of more than 40 tokens, and ngrams are many.
@pytest.mark.parametrize(
    ("parameters", "digits"), [({}, 1e-3), ({"stem": False}, 1e-3), ({"base_tokenizer": "ngram"}, 5e-2)], ids=str
)
def test_rows_and_scores_are_those_of_lance(
    tmp_path: Path, real_packages: pa.Table, parameters: dict[str, Any], digits: float
) -> None:
    texts = TEXTS + real_packages["description"].to_pylist()[:1_000]
    dataset = lance.write_dataset(pa.table({"id": range(len(texts)), "body": texts}), tmp_path / "t")
    dataset.create_scalar_index("body", "INVERTED", **parameters)
    snapshot = build(texts, **parameters)
    words = sorted({word.replace('"', "").strip("+-*") for text in texts[:200] for word in text.split()})[::3]
    for query in [*words, "text editor for programs", "editor editors", "the", "it's", "running", "3.14"]:
        found = dataset.to_table(full_text_query=query, columns=["id", "_score"], limit=2_000)
        rows, scores = snapshot.match("body", query, 2_000, snapshot.live())
        truth = dict(zip(found["id"].to_pylist(), found["_score"].to_pylist(), strict=True))
        assert dict(zip(rows.tolist(), scores.tolist(), strict=True)) == pytest.approx(truth, rel=digits), query


@pytest.mark.parametrize("allowed", [[0], [5, 2_990, 2_999], range(700, 760), range(0, 3_000, 40), range(3_000)])
@pytest.mark.parametrize("asked", ["words", "+words here", "wor*"])
def test_a_mask_never_costs_results_nor_changes_scores(allowed: Sequence[int], asked: str) -> None:
    """The masks allow a few runs of rows, or many scattered rows."""
    snapshot = build(["same words here", "same words"] * 1_500)
    every = dict(zip(*snapshot.match("body", asked, 3_000, snapshot.live()), strict=True))
    mask = np.zeros(3_000, dtype=bool)
    mask[list(allowed)] = True
    for k in (1, 50, 3_000):
        rows, scores = snapshot.match("body", asked, k, mask)
        assert len(rows) == min(k, len(allowed))
        assert set(rows.tolist()) <= set(allowed)
        assert scores.tolist() == pytest.approx([every[row] for row in rows])
        best = sorted((every[row] for row in allowed), reverse=True)[:k]
        assert scores.tolist() == pytest.approx(best)


def test_scores_of_a_snapshot_stay_once_asked() -> None:
    table = empty()
    put(table, 0, ["rare word", "common word"])
    snapshot = table.snapshot()
    first = snapshot.match("body", "rare", 5, snapshot.live())[1].tolist()
    put(table, 2, ["rare rare"] * 100)
    matched(table.snapshot(), "rare")
    assert snapshot.match("body", "rare", 5, snapshot.live())[1].tolist() == first


def test_an_unlimited_token_length_survives_a_token_beyond_the_engines_own() -> None:
    snapshot = build(["x" * 70_000 + " tail"], max_token_length=None)
    assert matched(snapshot, "tail") == {0}


@pytest.mark.parametrize(
    "parameters",
    [
        {"base_tokenizer": "icu"},
        {"base_tokenizer": "ngram", "min_ngram_length": 4},
        {"base_tokenizer": "ngram", "max_ngram_length": 0},
        {"base_tokenizer": "ngram", "prefix_only": "yes"},
        {"custom_stop_words": "the"},
        {"custom_stop_words": [1]},
    ],
    ids=str,
)
def test_parameters_that_only_one_side_has_or_none_are_refused(parameters: dict[str, Any]) -> None:
    with raises(InvalidRows):
        empty(**parameters)


# ---- when rows enter the index


def test_scores_do_not_depend_on_when_rows_are_indexed(real_packages: pa.Table) -> None:
    texts = real_packages["description"].to_pylist()
    ways: dict[str, MemTable] = {"sync": empty("sync"), "async": empty(), "stepped": empty(), "closed": empty()}
    for at in range(0, len(texts), 300):
        for way, table in ways.items():
            put(table, at, texts[at : at + 300])
            if way == "stepped" and at % 900 == 0:
                table.index_step()
    ways["closed"].freeze()
    while ways["closed"].index_step():
        pass
    for query in ("python library", "+web -server", "deb*"):
        found = []
        for table in ways.values():
            snapshot = table.snapshot()
            rows, scores = snapshot.match("body", query, 4_000, snapshot.live())
            found.append(dict(zip(rows.tolist(), scores.tolist(), strict=True)))
        assert len(found[0]) > 10
        assert all(other == pytest.approx(found[0]) for other in found[1:])


def test_a_step_is_one_block_and_a_put_none(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[int] = []
    real = text_index._as_strings
    monkeypatch.setattr(text_index, "_as_strings", lambda texts: handed.append(len(texts)) or real(texts))
    table = empty()
    put(table, 0, ["some words"] * 600)
    put(table, 600, ["other words"])
    assert handed == []
    assert [table.index_step() for _ in range(5)] == [True, True, True, False, False]
    assert handed == [256, 256, 88, 1]


@pytest.mark.parametrize("rows", [255, 256, 257, 512, 513])
def test_no_row_is_lost_between_two_blocks(rows: int) -> None:
    table = empty()
    put(table, 0, ["some words"] * rows)
    assert matched(table.snapshot(), "words") == set(range(rows))


def test_steps_commit_now_and_then_so_that_a_match_does_not_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "COMMIT_DOCUMENTS", 300)
    index = TextIndex(IndexSpec("body", "fts"))

    def put(texts: list[str | None], first: int) -> int:
        """Index texts by steps; return how many are committed."""
        index.add(pa.chunked_array([texts]), first)
        while index.index_step():
            pass
        index._index.reload()
        return int(index._index.searcher().num_docs)

    assert put(["some words", None, ""] * 300, 0) == 300
    assert put(["some words"], 900) == 300
    assert index.searcher().num_docs == 301


@pytest.mark.parametrize("by", ["step", "match"])
def test_after_a_freeze_rows_are_still_indexed_and_then_the_writer_goes(by: str) -> None:
    table = empty()
    put(table, 0, ["some words"] * 1_000)
    table.index_step()
    writing = table.usage()["text"]
    table.freeze()
    assert table.usage()["text"] >= writing
    if by == "step":
        while table.index_step():
            pass
    else:
        assert len(matched(table.snapshot(), "words")) == 1_000
    assert table.usage()["text"] < writing
    assert not table.index_step()
    assert len(matched(table.snapshot(), "words")) == 1_000


def test_an_index_that_took_no_text_is_frozen_too() -> None:
    table = empty()
    put(table, 0, [None, ""])
    table.freeze()
    assert not table.index_step()
    assert matched(table.snapshot(), "word") == set()
