"""The contract of a table: the effect of each method, whatever the way in. Embedded with entries of either format,
through a daemon, and read from storage beside its owner.

The oracle is a dict per level, computed from the calls alone, without a read of the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lancedb.rerankers import LinearCombinationReranker, MRRReranker, RRFReranker

import memwal
from memwal.ingest.engine.api.reads import READS
from memwal.ingest.engine.read.merged import MergedView
from tests.conftest import INDEXES, SCHEMA, OpenSmall, Tree
from tests.messages import raises
from tests.support.rows import by_key
from tests.ways import entered

LEVELS = ("committed", "flushed", "durable", "latest")
Model = dict[int, dict[str, Any]]


class _ReadByOthers:
    """A table that its owner writes, and that is read from storage without a claim, as another process would."""

    def __init__(self, owner: Any, reader: Any) -> None:
        self._owner, self._reader = owner, reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader if name in (*READS, "hybrid") else self._owner, name)


def through(way: str, owner: Any, ends: ExitStack) -> Any:
    """Return the object that the test calls."""
    entrance = entered(way, owner, ends)
    return _ReadByOthers(owner, entrance) if way == "storage" else entrance


WAYS = [("embedded", "lance"), ("embedded", "arrow"), ("flight", "lance"), ("storage", "lance")]


@pytest.fixture(params=WAYS)
def table(request: pytest.FixtureRequest, open_small: OpenSmall, ends: ExitStack) -> Any:
    """Return an empty table, for each way into it and each format of WAL entries."""
    way, entries = request.param
    return through(way, open_small(wal={"format": entries}), ends)


@pytest.fixture(scope="module", params=WAYS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Any]]:
    """Yield a function that returns an empty table like `table`, for tests of this module that only read."""
    way, entries = request.param
    settings = {"commit": {"interval": "0s"}, "wal": {"format": entries}}
    with ExitStack() as ends:

        def open_table() -> Any:
            uri = tmp_path_factory.mktemp("read") / "table.lance"
            owner = memwal.open(uri, schema=SCHEMA, key="id", regions=2, indexes=INDEXES, settings=settings)
            return through(way, ends.enter_context(owner), ends)

        yield open_table


@pytest.fixture(scope="module")
def layered(opened: Callable[[], Any], made: Any) -> tuple[Any, dict[str, Model]]:
    """Fill a table, which tests only read; return it with the expected rows per level."""
    table = opened()
    return table, filled(table, made)


@pytest.fixture(scope="module")
def two_texts(opened: Callable[[], Any], made: Any) -> tuple[Any, dict[str, Model]]:
    """Return the same with a second text index, of the column `name`. A row's name is "row ID vVERSION"."""
    table = opened()
    table.create_index("name", "fts", with_position=True)
    return table, filled(table, made)


def filled(table: Any, made: Any) -> dict[str, Model]:
    """Put rows at every level, newer versions and deletes above older ones; return the expected rows per level."""
    model: Model = {}

    def put(ids: range, version: int) -> None:
        table.put(made.table(list(ids), version))
        model.update((row["id"], row) for row in made.rows(list(ids), version))

    def delete(*ids: int) -> None:
        table.delete(list(ids))
        for id in ids:
            model.pop(id, None)

    put(range(30), 0)
    table.flush()
    table.commit()
    levels = {"committed": dict(model)}
    delete(5)
    put(range(10, 20), 1)
    put(range(30, 35), 1)
    table.flush()
    levels["flushed"] = dict(model)
    put(range(15, 25), 2)
    delete(11, 31, 7)
    put(range(35, 40), 2)
    put(range(7, 8), 2)
    levels["durable"] = levels["latest"] = dict(model)
    return levels


# ---- reads at every level ------------------------------------------------------------------------------------------


def test_scan_and_count_return_the_newest_rows_of_every_level(layered: tuple[Any, dict[str, Model]]) -> None:
    table, levels = layered
    for level in LEVELS:
        assert by_key(table.scan(level=level).read_all()) == levels[level], level
        assert table.count(level=level) == len(levels[level]), level


def test_facets_count_the_newest_rows_of_every_level(layered: tuple[Any, dict[str, Model]]) -> None:
    table, levels = layered
    for level in LEVELS:
        for predicate, low in ((None, 0), ("price >= 300", 300)):
            found = table.facets("price", predicate, level=level)
            prices = Counter(row["price"] for row in levels[level].values() if row["price"] >= low)
            expected = sorted(prices.items(), key=lambda each: (-each[1], each[0]))
            assert [*zip(*found.to_pydict().values(), strict=True)] == expected, (level, predicate)
            assert found.schema == pa.schema([table.schema.field("price"), ("_count", pa.int64())])


def test_the_default_level_is_latest(layered: tuple[Any, dict[str, Model]]) -> None:
    table, levels = layered
    assert by_key(table.scan().read_all()) == levels["latest"]
    assert table.count() == len(levels["latest"])
    assert by_key(table.get(list(range(50)))) == levels["latest"]


def test_filters_judge_the_newest_version_only(layered: tuple[Any, dict[str, Model]]) -> None:
    table, levels = layered
    for level in LEVELS:
        for low, high in ((0, 300), (300, 800), (250, 260)):
            predicate = f"price >= {low} AND price < {high}"
            expected = {id: row for id, row in levels[level].items() if low <= row["price"] < high}
            assert by_key(table.scan(filter=predicate, level=level).read_all()) == expected, (level, predicate)
            assert table.count(predicate, level=level) == len(expected), (level, predicate)


def test_get_returns_what_is_there_and_nothing_for_the_rest(layered: tuple[Any, dict[str, Model]]) -> None:
    table, levels = layered
    for level in LEVELS:
        assert by_key(table.get(list(range(-3, 45)), level=level)) == levels[level], level
        for id in (5, 7, 11, 16, 31, 37, 99):
            expected = [levels[level][id]] if id in levels[level] else []
            assert table.get(id, level=level).to_pylist() == expected, (level, id)


def test_search_is_exact_over_all_levels(layered: tuple[Any, dict[str, Model]], made: Any) -> None:
    table, levels = layered
    for level in LEVELS:
        for query in (made.row(16, 2)["vector"], made.row(500)["vector"]):
            for bound in (None, 500):
                rows = [row for row in levels[level].values() if bound is None or row["price"] < bound]
                distances = {row["id"]: np.sum((np.float32(row["vector"]) - np.float32(query)) ** 2) for row in rows}
                expected = sorted(distances, key=lambda id: distances[id])[:6]
                predicate = None if bound is None else f"price < {bound}"
                found = table.search("vector", query, k=6, filter=predicate, level=level)
                assert found["id"].to_pylist() == expected, (level, bound)
                wanted = [distances[id] for id in expected]
                assert found["_distance"].to_pylist() == pytest.approx(wanted, rel=1e-3, abs=1e-4), (level, bound)


def test_match_finds_every_row_with_the_word_and_no_other(layered: tuple[Any, dict[str, Model]]) -> None:
    table, levels = layered
    for level in LEVELS:
        for word in ("harbor", "violet", "zebra"):
            expected = {id for id, row in levels[level].items() if word in row["body"].split()}
            found = table.match("body", word, k=100, level=level)
            assert set(by_key(found)) == expected, (level, word)
            scores = found["_score"].to_pylist()
            assert scores == sorted(scores, reverse=True)
            filtered = table.match("body", word, k=100, filter="price < 500", level=level)
            assert set(by_key(filtered)) == {id for id in expected if levels[level][id]["price"] < 500}, (level, word)


def _has(row: dict[str, Any], *words: str) -> bool:
    return any(word in f"{row['name']} {row['body']}".split() for word in words)


TWO_TEXTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "harbor v1": lambda row: _has(row, "harbor", "v1"),
    "+harbor +v0": lambda row: _has(row, "harbor") and _has(row, "v0"),
    "v2 -harbor": lambda row: _has(row, "v2") and not _has(row, "harbor"),
    "habor~": lambda row: _has(row, "harbor"),
    "+hrabor~2 +v2 -violet": lambda row: _has(row, "harbor") and _has(row, "v2") and not _has(row, "violet"),
    "har* -v0": lambda row: _has(row, "harbor") and not _has(row, "v0"),
    "xyzzy~ -row": lambda row: False,
}


def test_a_match_of_two_columns_finds_the_newest_rows_only(two_texts: tuple[Any, dict[str, Model]]) -> None:
    table, levels = two_texts
    for level, (text, fits) in product(LEVELS, TWO_TEXTS.items()):
        expected = {id for id, row in levels[level].items() if fits(row)}
        found = table.match(["name", "body"], text, k=100, level=level)
        assert set(by_key(found)) == expected, (level, text)
        boosts = {"name": 3.0, "body": 0.5}
        predicate = "price < 500"
        found = table.match(boosts, text, k=100, filter=predicate, level=level)
        assert set(by_key(found)) == {id for id in expected if levels[level][id]["price"] < 500}, (level, text)
        scores = found["_score"].to_pylist()
        assert scores == sorted(scores, reverse=True)
        best = table.match(boosts, text, k=2, filter=predicate, level=level)["_score"].to_pylist()
        assert best == pytest.approx(scores[:2], rel=1e-5)


def test_scores_of_two_columns_are_boosted_sums(two_texts: tuple[Any, dict[str, Model]], made: Any) -> None:
    table, _ = two_texts
    for level in LEVELS:
        for text in ("harbor v1 v0", "habor~ v2~"):
            name, body = (
                {row["id"]: row["_score"] for row in table.match(column, text, 100, level=level).to_pylist()}
                for column in ("name", "body")
            )
            wanted = {id: 3 * name.get(id, 0) + 0.5 * body.get(id, 0) for id in {*name, *body}}
            boosts = {"name": 3.0, "body": 0.5}
            found = table.match(boosts, text, 100, level=level).to_pylist()
            assert {row["id"]: row["_score"] for row in found} == pytest.approx(wanted, rel=1e-5), level
            vector = made.row(12, 1)["vector"]
            both = table.hybrid(vector, text, 100, text_column=boosts, level=level).to_pylist()
            scored = {row["id"]: row["_score"] for row in both if row["_score"] is not None}
            assert scored == pytest.approx(wanted, rel=1e-5), level
            arms = table.candidates(vector, text, 100, text_column=["name", "body"], level=level).to_pylist()
            assert {row["id"] for row in arms if row["_score"] is not None} == set(wanted), level
            assert set(by_key(table.match("name", text, 100, level=level))) == set(name)


def hybrid_by_hand(table: Any, model: Model, vector: Any, text: str, n: int, level: str) -> dict[int, float]:
    """Return the relevance by id, from ranks by exact distance over the model, and from the scores of the table's own
    match.
    """
    distances = {id: float(np.sum((np.array(row["vector"]) - vector) ** 2)) for id, row in model.items()}
    nearest = sorted(distances, key=lambda id: distances[id])[:n]
    relevance = {id: 1 / (60 + rank) for rank, id in enumerate(nearest, 1)}
    matched = table.match("body", text, k=n, level=level)
    scores = dict(zip(matched["id"].to_pylist(), matched["_score"].to_pylist(), strict=True))
    for id, score in scores.items():
        rank = 1 + sum(other > score for other in scores.values())
        relevance[id] = relevance.get(id, 0.0) + 1 / (60 + rank)
    return relevance


def test_hybrid_fuses_the_ranks_of_both_arms(layered: tuple[Any, dict[str, Model]], made: Any) -> None:
    table, levels = layered
    vector = np.array(made.row(12, 1)["vector"])
    for level in LEVELS:
        text = levels[level][20]["body"].split()[0]
        for n in (10, 50):
            expected = hybrid_by_hand(table, levels[level], vector, text, n, level)
            found = table.hybrid(vector, text, k=60, candidates=n, level=level)
            assert by_key(found.select(table.schema.names)) == {id: levels[level][id] for id in expected}, (level, n)
            relevance = dict(zip(found["id"].to_pylist(), found["_relevance_score"].to_pylist(), strict=True))
            assert relevance == pytest.approx(expected, rel=1e-5), (level, n)
            assert found["_relevance_score"].to_pylist() == sorted(relevance.values(), reverse=True)
            matched = {row["id"]: row["_score"] for row in table.match("body", text, k=n, level=level).to_pylist()}
            nearest = {
                row["id"]: row["_distance"] for row in table.search("vector", vector, k=n, level=level).to_pylist()
            }
            for row in found.to_pylist():
                assert (row["_distance"], row["_score"]) == (nearest.get(row["id"]), matched.get(row["id"])), level
            few = table.hybrid(vector, text, k=3, candidates=n, columns=["name"], level=level)
            assert few.column_names == ["name", "_distance", "_score", "_relevance_score"]
            assert few["name"].to_pylist() == found["name"].to_pylist()[:3]


def test_hybrid_takes_weights_a_filter_and_a_rerank(layered: tuple[Any, dict[str, Model]], made: Any) -> None:
    table, levels = layered
    vector, text = np.array(made.row(12, 1)["vector"]), levels["latest"][20]["body"].split()[0]
    by_vector = table.hybrid(vector, text, weights=(1, 0))
    assert by_vector["id"].to_pylist() == table.search("vector", vector)["id"].to_pylist()
    by_text = table.hybrid(vector, text, weights=(0, 1))["_score"].to_pylist()
    assert by_text[:3] == table.match("body", text, 3)["_score"].to_pylist()
    cheap = {id for id, row in levels["latest"].items() if row["price"] < 500}
    found = table.hybrid(vector, text, k=60, filter="price < 500")
    assert set(found["id"].to_pylist()) == cheap

    def dearest(candidates: pa.Table) -> Any:
        return candidates["price"]

    prices = table.hybrid(vector, text, k=5, rerank=dearest)
    assert prices["price"].to_pylist() == sorted((row["price"] for row in levels["latest"].values()), reverse=True)[:5]
    assert prices["_relevance_score"].to_pylist() == prices["price"].to_pylist()
    for wrong in (lambda _: [1.0], lambda rows: [float("nan")] * rows.num_rows, lambda _: "best"):
        with raises(memwal.Invalid):
            table.hybrid(vector, text, rerank=wrong)


def test_rerankers_of_lancedb_rank_as_they_rank_the_arms_by_themselves(
    layered: tuple[Any, dict[str, Model]], made: Any
) -> None:
    table, levels = layered
    vector, text = np.array(made.row(12, 1)["vector"]), levels["latest"][20]["body"].split()[0]
    near, matching = table.search("vector", vector, 50), table.match("body", text, 50)
    arms = [rows.append_column("_rowid", rows["id"].cast(pa.uint64())) for rows in (near, matching)]
    for reranker in (LinearCombinationReranker(), RRFReranker(), MRRReranker()):
        found = table.hybrid(vector, text, k=50, rerank=memwal.lancedb_reranker(reranker, text))
        alone = reranker.rerank_hybrid(text, *arms)
        assert found["_relevance_score"].to_pylist() == sorted(found["_relevance_score"].to_pylist(), reverse=True)
        assert set(found["id"].to_pylist()) == set(alone["id"].to_pylist())
        if isinstance(reranker, LinearCombinationReranker):  # the others count ranks, which equal scores take in turn
            scores = dict(zip(alone["id"].to_pylist(), alone["_relevance_score"].to_pylist(), strict=True))
            assert dict(zip(found["id"].to_pylist(), found["_relevance_score"].to_pylist(), strict=True)) == (
                pytest.approx(scores)
            )


def test_both_arms_of_a_hybrid_search_see_one_moment(table: Any, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row, other = made.row(1) | {"body": "harbor"}, made.row(1) | {"body": "copper", "vector": [9.0] * 8}
    table.put([row])
    best = MergedView.best

    def put_between(view: MergedView, *given: Any) -> Any:
        found = best(view, *given)
        table.put([other])
        return found

    monkeypatch.setattr(MergedView, "best", put_between)
    found = table.hybrid(row["vector"], "harbor").to_pylist()
    assert [(each["body"], each["_distance"], each["_score"] is None) for each in found] == [("harbor", 0.0, False)]
    monkeypatch.undo()
    assert table.hybrid(row["vector"], "harbor")["_score"].to_pylist() == [None]


def test_columns_and_limit_are_what_was_asked_for(layered: tuple[Any, dict[str, Model]], made: Any) -> None:
    table, levels = layered
    assert table.scan(columns=["price"]).read_all().column_names == ["price"]
    assert sorted(table.scan(columns=["price"]).read_all()["price"].to_pylist()) == sorted(
        row["price"] for row in levels["latest"].values()
    )
    assert table.get([1, 2], columns=["name", "id"]).column_names == ["name", "id"]
    assert table.scan(limit=7).read_all().num_rows == 7
    assert table.scan(limit=1000).read_all().num_rows == len(levels["latest"])
    assert table.search("vector", made.row(1)["vector"], k=3, columns=["name"]).column_names == ["name", "_distance"]
    assert table.match("body", "harbor", k=3, columns=["name"]).column_names == ["name", "_score"]
    assert "_tombstone" not in table.scan().read_all().column_names


# ---- writes --------------------------------------------------------------------------------------------------------


def test_a_row_is_in_every_read_when_its_put_returns(table: Any, made: Any) -> None:
    for version in range(3):
        # Another process does not see rows that are only in the owner's memory.
        for durable in (True,) if isinstance(table, _ReadByOthers) else (True, False):
            row = made.row(7, version) | {"body": f"marker{version}{durable:d} harbor"}
            receipt = table.put([row], durable=durable)
            assert (receipt.rows, receipt.applied) == (1, True)
            assert table.get(7).to_pylist() == [row]
            assert table.scan().read_all().to_pylist() == [row]
            assert table.count(f"price = {row['price']}") == 1
            assert table.search("vector", row["vector"], k=1)["id"].to_pylist() == [7]
            assert table.match("body", f"marker{version}{durable:d}")["id"].to_pylist() == [7]


def test_an_old_version_is_found_by_no_read(table: Any, made: Any) -> None:
    old = made.row(1) | {"body": "oldword", "price": 17, "vector": [50.0] * 8}
    new = made.row(1) | {"body": "newword", "price": 18, "vector": [-50.0] * 8}
    table.put([old])
    for step in (lambda: None, table.flush, table.commit):
        step()
        table.put([new])
        assert table.match("body", "oldword").num_rows == 0
        assert table.count("price = 17") == 0
        assert table.search("vector", old["vector"], k=5)["_distance"].to_pylist() == pytest.approx([8 * 100.0**2])
        table.put([old])
    table.put([new])
    table.delete(1)
    assert table.match("body", "newword").num_rows == 0
    assert table.search("vector", new["vector"], k=5).num_rows == 0
    assert table.count() == 0
    table.put([old])
    assert table.get(1).to_pylist() == [old]


class _Frame:
    """To Arrow, a pandas or polars frame is an object that exports a stream."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._rows.__arrow_c_stream__(requested_schema)


def test_rows_come_in_every_promised_form(table: Any, made: Any) -> None:
    rows = made.table(range(10))
    forms = {
        "table": rows,
        "chunked table": pa.concat_tables([rows.slice(0, 3), rows.slice(3)]),
        "batch": rows.combine_chunks().to_batches()[0],
        "reader": rows.to_reader(max_chunksize=4),
        "frame": _Frame(rows),
        "dicts": rows.to_pylist(),
        "other column order": rows.select(["body", "vector", "id", "price", "name"]),
        "int32 key, large text": rows.set_column(0, "id", rows["id"].cast(pa.int32())).set_column(
            1, "name", rows["name"].cast(pa.large_string())
        ),
    }
    for form, given in forms.items():
        assert table.put(given).rows == 10, form
        assert by_key(table.scan().read_all()) == by_key(rows), form
        table.delete(list(range(10)))
        assert table.count() == 0, form
    table.put([{"id": 1}, {"id": 2, "price": 5}], missing="null")
    assert by_key(table.scan(columns=["id", "price", "body"]).read_all()) == {
        1: {"id": 1, "price": None, "body": None},
        2: {"id": 2, "price": 5, "body": None},
    }
    assert table.put(rows.slice(0, 0)).rows == 0
    assert table.put([]).rows == 0


def test_the_last_of_two_rows_with_one_key_in_one_put_wins(table: Any, made: Any) -> None:
    table.put(made.rows([1, 2], 0) + made.rows([1], 1) + made.rows([3, 1], 2))
    expected = {1: made.row(1, 2), 2: made.row(2, 0), 3: made.row(3, 2)}
    assert by_key(table.scan().read_all()) == expected
    table.flush()
    assert by_key(table.scan(level="flushed").read_all()) == expected
    table.commit()
    assert by_key(table.scan(level="committed").read_all()) == expected


def test_deleting_what_is_not_there_changes_nothing(table: Any, made: Any) -> None:
    table.delete([1, 2, 3])
    table.put(made.rows([2]))
    table.delete([3, 4])
    table.flush()
    table.commit()
    assert by_key(table.scan(level="committed").read_all()) == {2: made.row(2)}


def test_a_delete_by_filter_deletes_the_rows_whose_newest_version_passes(table: Any, made: Any) -> None:
    model = filled(table, made)["latest"]
    for predicate, passes in (
        ("price >= 500 AND name LIKE '%v0'", lambda row: row["price"] >= 500 and row["name"].endswith("v0")),
        ("ID < 12 OR body LIKE '%harbor%'", lambda row: row["id"] < 12 or "harbor" in row["body"]),
        ("price > 100000", lambda _: False),
        ("true", lambda _: True),
    ):
        gone = [id for id, row in model.items() if passes(row)]
        receipt = table.delete(filter=predicate)
        assert (receipt.rows, receipt.skipped, receipt.applied) == (len(gone), 0, True), predicate
        assert sum(counts.applied for counts in receipt.regions.values()) == len(gone)
        for id in gone:
            del model[id]
        assert by_key(table.scan().read_all()) == model, predicate
    table.flush()
    table.commit()
    assert table.count(level="committed") == 0


def test_a_delete_by_filter_with_a_token_is_applied_once(table: Any, made: Any) -> None:
    table.put(made.rows([1, 2, 3]))
    assert table.delete(filter="id = 2", token="cleaner:1").rows == 1
    table.put(made.rows(range(2, 30)))
    again = table.delete(filter="id >= 2", token="cleaner:1")
    assert (again.rows, again.applied) == (0, False)
    assert table.count() == 29, "no region applied it again, those that had no row to delete neither"
    assert table.delete(filter="id = 2", token="cleaner:2", durable=False).rows == 1
    assert table.delete(filter="id = 2", token="cleaner:3").rows == 0
    table.put(made.rows([2]))
    assert table.delete(filter="id = 2", token="cleaner:3").applied is False
    table.put(made.rows([1]), token="loader:1")
    with raises(memwal.Invalid):
        table.delete(filter="true", token="loader:0")
    assert table.count() == 29


def test_a_token_that_no_entry_can_hold_is_refused_and_lingering_rows_stay(table: Any, made: Any) -> None:
    table.put(made.table([1], 1), durable=False)
    for sequence in (2**63, 10**5000):
        with raises(memwal.Invalid):
            table.put(made.table([2], 1), token=("loader", sequence))
    assert table.put(made.table([3], 1), token=("loader", 2**63 - 1)).applied
    table.flush()
    assert sorted(table.get([1, 2, 3])["id"].to_pylist()) == [1, 3]


def test_a_token_is_applied_once(table: Any, made: Any) -> None:
    assert table.put(made.rows(range(10), 0), token="loader:1").applied is True
    again = table.put(made.rows(range(10), 9), token="loader:1")
    assert (again.rows, again.applied) == (10, False)
    assert table.put(made.rows(range(10), 9), token=("loader", 0)).applied is False
    assert by_key(table.scan().read_all()) == by_key(made.table(range(10), 0))
    assert table.put(made.rows([3], 1), token=memwal.Token("loader", 2)).applied is True
    assert table.put(made.rows([3], 2), token="other:1").applied is True
    assert table.get(3).to_pylist() == made.rows([3], 2)
    assert table.delete([3], token="other:2").applied is True
    table.put(made.rows([3], 3))
    assert table.delete([3], token="other:2").applied is False
    assert table.get(3).num_rows == 1


# ---- rejected calls ------------------------------------------------------------------------------------------------

BAD_ROWS = {
    "missing key column": ([{"name": "x"}], ("'id'", "missing")),
    "null key": ([{"id": 1}, {"id": None}], ("'id'", "row 1", "null")),
    "wrong type": ([{"id": 1, "price": "many"}], ("'price'",)),
    "fraction": ([{"id": 1, "price": 2.7}], ("'price'", "int64")),
    "fraction as a key": ([{"id": 1.5}], ("'id'", "int64")),
    "wrong key type": (pa.table({"id": ["a"]}), ("'id'", "int64")),
    "unknown column": ([{"id": 1, "prise": 3}], ("'prise'", "'price'")),
    "wrong width": ([{"id": 1, "vector": [1.0] * 7}], ("'vector'", "7", "8")),
    "wrong width, arrow": (
        pa.table({"id": [1], "vector": pa.array([[1.0] * 9], pa.list_(pa.float32(), 9))}),
        ("'vector'", "9", "8"),
    ),
    "doubled column": (pa.table([pa.array([1]), pa.array([2])], names=["id", "id"]), ("'id'", "twice")),
    "not finite": ([{"id": 1, "vector": [float("nan")] * 8}], ("'vector'", "row 0")),
    "no rows at all": (17, ("int",)),
}


def test_bad_rows_are_refused_in_one_line_and_nothing_is_written(table: Any, made: Any, uri: str, tree: Tree) -> None:
    table.put(made.rows(range(3)))
    before = tree(Path(uri))
    for case, (rows, named) in BAD_ROWS.items():
        with pytest.raises(memwal.Invalid) as refused:
            table.put(rows, missing="null")
        text = str(refused.value)
        assert len(text.splitlines()) == 1, case
        assert [name for name in named if name not in text] == [], (case, text)
        assert tree(Path(uri)) == before, case
        assert by_key(table.scan().read_all()) == by_key(made.table(range(3))), case
    table.put(made.rows([9]))
    assert table.count() == 4


# ---- state ---------------------------------------------------------------------------------------------------------


def test_status_follows_the_rows_from_memtable_to_base(table: Any, made: Any, uri: str) -> None:
    table.put(made.rows(range(20)))
    status = table.status()
    assert status["table"] == uri
    assert status["rows"] == 0
    assert [region["bucket"] for region in status["regions"]] == [0, 1]
    assert all(region["epoch"] == 1 and region["wal_position"] == 1 for region in status["regions"])
    assert sum(region["memtable_rows"] for region in status["regions"]) == 20
    assert all(region["memtable_bytes"] > 0 and region["ssts"] == [] for region in status["regions"])
    table.flush()
    flushed = table.status()["regions"]
    assert all(region["memtable_rows"] == 0 and region["replay_after"] == 1 for region in flushed)
    assert [[sst["generation"] for sst in region["ssts"]] for region in flushed] == [[1], [1]]
    assert sum(sst["rows"] for region in flushed for sst in region["ssts"]) == 20
    report = table.commit()
    assert (report.rows_inserted, report.rows_updated, report.rows_deleted) == (20, 0, 0)
    committed = table.status()
    assert committed["rows"] == 20
    assert committed["base_version"] > status["base_version"]
    assert all(sst["committed"] for region in committed["regions"] for sst in region["ssts"])
    table.put(made.rows(range(5), 1))
    table.delete([19])
    table.put(made.rows([30], 1))
    table.flush()
    report = table.commit()
    assert (report.rows_inserted, report.rows_updated, report.rows_deleted) == (1, 5, 1)
    before = table.status()["base_version"]
    table.flush()
    table.commit()
    assert table.status()["base_version"] == before, "nothing was pending, yet a version was made"
