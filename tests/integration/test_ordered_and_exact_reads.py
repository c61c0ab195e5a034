"""Ordered reads, reads with an offset, and vector reads without an index, at every level and through every way into a
table.

The oracle is a dict per level, sorted and measured with NumPy.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.api.reads import READS, Reads
from memwal.ingest.engine.read import reader
from memwal.ingest.service.client.scatter import merged, with_key
from tests.conftest import Cli
from tests.messages import raises
from tests.ways import entered

LEVELS = ("committed", "flushed", "durable", "latest")
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), False),
        ("x", pa.float64()),
        ("word", pa.string()),
        ("plain", pa.list_(pa.float32(), 4)),
        ("body", pa.string()),
    ]
)
ODD = [None, math.nan, -math.nan, -0.0, 0.0, math.inf, -math.inf, 1.5, -2.5]
Model = dict[int, dict[str, Any]]


def row(id: int, version: int) -> dict[str, Any]:
    draw = np.random.default_rng([id, version])
    x = ODD[int(draw.integers(len(ODD)))] if id % 2 else float(draw.integers(-3, 3))
    return {
        "id": id,
        "x": x,
        "word": None if id % 11 == 0 else f"word{draw.integers(5)}",
        "plain": None if id % 13 == 0 else draw.normal(size=4).astype(np.float32).tolist(),
        "body": " ".join(draw.choice(["harbor", "violet", "zebra"], 3).tolist()),
    }


class _Shares(Reads):
    """Reads each region separately, like daemons that own one each, and merges the results like a client."""

    def __init__(self, table: Any) -> None:
        self._table, self.schema, self.key = table, table.schema, table.key

    @property
    def _described(self) -> str:
        return "shares"

    def _answer(self, read: str, level: str, /, **request: Any) -> Any:
        kind = READS[read]
        asked = with_key(kind, request, self.key)
        answers = [
            getattr(self._table.only([region]), read)(**asked, level=level) for region in self._table.base.regions
        ]
        return sum(answers) if kind.counts else merged(kind, answers, request, self.key)


@pytest.fixture(scope="module", params=["embedded", "flight", "storage", "shares"])
def layered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, dict[str, Model]]]:
    """Yield a table with rows at every level, newer versions and deletes above older ones, and the expected rows per
    level. Tests only read it.
    """
    uri, settings = str(tmp_path_factory.mktemp("layered") / "table.lance"), {"commit": {"interval": "0s"}}
    with ExitStack() as opened:
        table = opened.enter_context(
            memwal.open(uri, schema=SCHEMA, key="id", regions=3, indexes={"body": "fts"}, settings=settings)
        )
        levels, model = dict[str, Model](), Model()

        def change(puts: range, version: int, *deletes: int) -> None:
            rows = [row(id, version) for id in puts]
            table.put(pa.Table.from_pylist(rows, SCHEMA))
            model.update((each["id"], each) for each in rows)
            if deletes:
                table.delete(list(deletes))
            for id in deletes:
                model.pop(id)

        change(range(60), 0)
        table.flush()
        table.commit()
        levels["committed"] = dict(model)
        change(range(20, 70), 1, 3, 25)
        table.flush()
        levels["flushed"] = dict(model)
        change(range(40, 80), 2, 4, 50, 61)
        levels["durable"] = levels["latest"] = dict(model)
        yield _Shares(table) if request.param == "shares" else entered(request.param, table, opened), levels


# ---- order and offset ----------------------------------------------------------------------------------------------


def place(value: Any, ascending: bool) -> tuple[int, Any]:
    """Return a sort key: nulls last, NaN beyond infinity on the side of its sign, -0.0 before 0.0,
    in both directions.
    """
    if value is None:
        return (2, 0)
    if isinstance(value, str):
        return (1, value if ascending else tuple(-ord(letter) for letter in value))
    sign = math.copysign(1, value)
    rank = (sign, 0.0, 0.0) if math.isnan(value) else (0, value, sign)
    return (1, rank if ascending else tuple(-part for part in rank))


def test_rows_come_in_the_order_that_was_asked_for(layered: tuple[Any, dict[str, Model]]) -> None:
    table, levels = layered
    orders: list[tuple[Any, list[tuple[str, bool]]]] = [
        ("id", [("id", True)]),
        (("id", "descending"), [("id", False)]),
        ("x  DESC, id", [("x", False), ("id", True)]),
        (["x asc", "id"], [("x", True), ("id", True)]),
        ([("x", "descending"), "id"], [("x", False), ("id", True)]),
        (["word", ("x", "desc"), ("id", "desc")], [("word", True), ("x", False), ("id", False)]),
        ([("word", "desc"), "id"], [("word", False), ("id", True)]),
    ]
    for level in LEVELS:
        for order_by, by in orders:
            for predicate, kept in ((None, lambda _: True), ("id % 3 = 0", lambda each: each["id"] % 3 == 0)):
                rows = [each for each in levels[level].values() if kept(each)]
                rows.sort(key=lambda each: [place(each[name], ascending) for name, ascending in by])
                expected = [each["id"] for each in rows]
                for limit, offset in ((None, 0), (7, 0), (5, 9), (1000, 3), (0, 0)):
                    end = None if limit is None else offset + limit
                    found = table.scan(
                        ["id"], filter=predicate, limit=limit, order_by=order_by, offset=offset, level=level
                    ).read_all()
                    assert found.column_names == ["id"]
                    assert found["id"].to_pylist() == expected[offset:end], (level, order_by, predicate, limit, offset)


@pytest.mark.parametrize(
    ("kind", "values"), [(pa.uuid(), [b"c" * 16, b"a" * 16, b"b" * 16, None]), (pa.bool8(), [1, -1, 0, None])], ids=str
)
def test_rows_are_ordered_by_an_extension_type_as_by_what_stores_it(
    uri: str, kind: pa.BaseExtensionType, values: list[Any]
) -> None:
    rows = pa.table({"id": range(4), "v": pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))})
    with memwal.open(uri, schema=rows.schema, key="id", settings={"commit": {"interval": "0s"}}) as table:
        table.put(rows)
        for committed in (False, True):
            for limit in (2, 3, None):  # without the null, with it, and all rows
                found = table.scan(order_by="v", limit=limit).read_all()
                assert found["id"].to_pylist() == [1, 2, 0, 3][:limit], committed
            table.flush()
            table.commit()


def test_a_column_counts_where_the_order_names_it_first(uri: str) -> None:
    with memwal.open(uri, schema=SCHEMA, key="id", settings={"commit": {"interval": "0s"}}) as table:
        table.put([row(id, 0) for id in (3, 1, 2)])
        for committed in (False, True):
            for order in (["id", "id"], [("id", "asc"), ("id", "desc")]):
                for limit in (2, None):
                    found = table.scan(["id"], order_by=order, limit=limit).read_all()
                    assert found["id"].to_pylist() == [1, 2, 3][:limit], committed
            table.flush()
            table.commit()


def test_columns_with_the_names_of_results_are_told(uri: str) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("_distance", pa.int64()),
            pa.field("_score", pa.int64()),
            pa.field("body", pa.string()),
            pa.field("v", pa.list_(pa.float32(), 2)),
        ]
    )
    rows = [{"id": 1, "_distance": 5, "_score": 6, "body": "web", "v": [1.0, 2.0]}]
    with memwal.open(uri, schema=schema, key="id", indexes={"v": "ivf_pq", "body": "fts"}) as table:
        table.put(rows)
        assert table.get([1]).to_pylist() == rows
        for call in (
            lambda **how: table.search("v", [1.0, 2.0], **how),
            lambda **how: table.match("body", "web", **how),
            lambda **how: table.hybrid([1.0, 2.0], "web", **how),
        ):
            for columns in (None, ["id"]):
                with raises(memwal.Invalid):
                    call(columns=columns)


def test_a_query_of_halves_is_rounded_alike_at_every_level(uri: str) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.list_(pa.float16(), 2))])
    settings = {"commit": {"interval": "0s"}}
    with memwal.open(uri, schema=schema, key="id", indexes={"v": "ivf_pq"}, settings=settings) as table:
        table.put([{"id": 1, "v": [2048.0, 0.0]}, {"id": 2, "v": [2050.0, 0.0]}, {"id": 3, "v": [1.0, 1.0]}])
        for step in (table.flush, table.commit, lambda: None):
            found = table.search("v", [2049.6, 0.0], k=2)
            assert (found["id"].to_pylist(), found["_distance"].to_pylist()) == ([2, 1], [0.0, 4.0])
            with raises(memwal.Invalid):
                table.search("v", [0.0, 70000.0])
            step()


def test_a_truth_value_of_bool8_comes_back_and_a_number_is_none(uri: str) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("b", pa.bool8())])
    rows = [{"id": 1, "b": True}, {"id": 2, "b": False}, {"id": 3, "b": None}]
    with memwal.open(uri, schema=schema, key="id") as table:
        table.put(rows)
        assert sorted(table.scan().read_all().to_pylist(), key=lambda each: each["id"]) == rows
        for wrong in (0.5, 5, 1, "true"):
            with raises(memwal.Invalid):
                table.put([{"id": 4, "b": wrong}])
        assert table.count() == 3


def test_a_struct_that_has_a_field_twice_is_refused(uri: str) -> None:
    inside = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("st", inside)])
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([3])], names=["a", "a"])
    with memwal.open(uri, schema=schema, key="id") as table:
        with raises(memwal.Invalid):
            table.put(pa.table({"id": [1], "st": twice}))
        assert table.count() == 0


def test_rows_are_ordered_without_any_in_the_base(uri: str) -> None:
    with memwal.open(uri, schema=SCHEMA, key="id", settings={"commit": {"interval": "0s"}}) as table:
        assert table.scan(["id"], order_by="id").read_all()["id"].to_pylist() == []
        table.put([row(id, 0) for id in (3, 1, 2)])
        assert table.scan(["id"], order_by="id").read_all()["id"].to_pylist() == [1, 2, 3]


def test_key_columns_may_have_names_that_reads_use(uri: str) -> None:
    rows = [{"_row": 1, "_at": at, "row": 7} for at in (1, 2)]
    with memwal.open(uri, schema=pa.Table.from_pylist(rows).schema, key=["_row", "_at"]) as table:
        table.put(rows)
        table.flush()
        table.commit()
        assert table.get([(1, 2), (1, 1), (1, 2)]).to_pylist() == [rows[1], rows[0]]


def test_an_offset_leaves_out_the_best_rows(layered: tuple[Any, dict[str, Model]]) -> None:
    table, levels = layered
    for level in LEVELS:
        near = table.search("plain", [0.0] * 4, 20, level=level)["id"].to_pylist()
        assert table.search("plain", [0.0] * 4, 12, offset=8, level=level)["id"].to_pylist() == near[8:]
        scores = table.match("body", "zebra", 20, level=level)["_score"].to_pylist()
        assert table.match("body", "zebra", 15, offset=5, level=level)["_score"].to_pylist() == scores[5:]
        both = table.hybrid([0.0] * 4, "zebra", 20, level=level)["_relevance_score"].to_pylist()
        assert table.hybrid([0.0] * 4, "zebra", 10, offset=10, candidates=100, level=level).num_rows == 10
        assert len(both) == 20
        assert table.scan(limit=10_000, offset=5, level=level).read_all().num_rows == len(levels[level]) - 5


# ---- vectors without an index --------------------------------------------------------------------------------------


def distances(model: Model, query: np.ndarray[Any, Any], metric: str) -> dict[int, float]:
    found = {}
    for id, each in model.items():
        if each["plain"] is not None:
            vector = np.array(each["plain"])
            lengths = float(np.linalg.norm(vector) * np.linalg.norm(query))
            measures = {"l2": np.sum((vector - query) ** 2), "dot": 1 - vector @ query}
            found[id] = float(measures[metric] if metric in measures else 1 - vector @ query / lengths)
    return found


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
def test_a_column_without_an_index_is_searched_row_by_row(layered: tuple[Any, dict[str, Model]], metric: str) -> None:
    table, levels = layered
    query = np.array([0.5, -1.0, 0.25, 2.0])
    for level in LEVELS:
        expected = distances(levels[level], query, metric)
        order = sorted(expected, key=lambda id: expected[id])
        found = table.search("plain", query, 1000, metric=metric, level=level)
        assert found["id"].to_pylist() == order, level
        assert found["_distance"].to_pylist() == pytest.approx([expected[id] for id in order], rel=1e-5, abs=1e-6)
        assert table.search("plain", query, 7, metric=metric, level=level)["id"].to_pylist() == order[:7]
        even = table.search("plain", query, 7, "id % 2 = 0", metric=metric, level=level)
        assert even["id"].to_pylist() == [id for id in order if id % 2 == 0][:7]


def test_a_range_of_distances_has_its_lower_end_and_not_its_upper(layered: tuple[Any, dict[str, Model]]) -> None:
    table, _ = layered
    query = np.array([0.5, -1.0, 0.25, 2.0])
    for level in LEVELS:
        everything = table.search("plain", query, 1000, level=level)
        scores, ids = everything["_distance"].to_numpy(), everything["id"].to_numpy()
        ends = [float(score) for score in (scores[3], scores[-5])]
        for low, high in ((None, ends[1]), (ends[0], None), (ends[0], ends[1]), (0, 0.000001)):
            inside = ids[(scores >= (low or 0)) & (scores < (high or math.inf))]
            for k in (4, 1000):
                found = table.search("plain", query, k, distance_range=(low, high), level=level)
                assert found["id"].to_pylist() == inside[:k].tolist(), (level, low, high, k)


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_vectors_without_a_finite_distance_take_no_place_of_others(uri: str, kind: pa.DataType) -> None:
    """Some vectors have the dot distance -inf, which Lance sorts before all others."""
    odd = [[math.inf, 1, 1], [-math.inf, 1, 1], [math.nan, 1, 1], [math.inf, -math.inf, 1], None]
    if kind != pa.float16():
        odd += [[3e38] * 3, [-3e38] * 3]
    vectors = {id: [1.0, 2.0, float(id)] for id in range(8)} | dict(enumerate(odd * 5, 100))
    schema = pa.schema([pa.field("id", pa.int64(), False), ("plain", pa.list_(kind, 3))])
    number = np.dtype(kind.to_pandas_dtype()).type
    with memwal.open(uri, schema=schema, key="id", regions=3, settings={"commit": {"interval": "0s"}}) as table:
        table.put([{"id": id, "plain": v and [number(x) for x in v]} for id, v in vectors.items()])
        for level, step in (("latest", None), ("flushed", table.flush), ("committed", table.commit)):
            if step is not None:
                step()
            for way in (table, _Shares(table)):
                for metric in ("l2", "cosine", "dot"):
                    for query in (np.array([1.0, 2.0, 3.25]), np.array([-1.0, -2.0, -3.25])):
                        measured = distances({id: {"plain": vectors[id]} for id in range(8)}, query, metric)
                        order = sorted(measured, key=lambda id: measured[id])
                        for low, k in ((None, 3), (-math.inf, 3), (None, 50)):
                            how: dict[str, Any] = {"metric": metric, "distance_range": (low, None), "level": level}
                            found = way.search("plain", query, k, **how)
                            assert found["id"].to_pylist() == order[:k], (way, query, k, how)


@pytest.mark.parametrize("built", [True, False], ids=["index", "no index yet"])
def test_rows_that_an_index_does_not_cover_take_no_place_of_others_either(uri: str, built: bool) -> None:
    """A program that writes to the table without memwal may put such vectors into an indexed column."""
    schema = pa.schema([pa.field("id", pa.int64(), False), ("v", pa.list_(pa.float32(), 8))])

    def rows(first: int, vectors: np.ndarray[Any, Any]) -> pa.Table:
        ids = np.arange(first, first + len(vectors))
        return pa.table({"id": ids, "v": pa.array(list(vectors), schema.field("v").type)}, schema=schema)

    vectors = np.random.default_rng(5).normal(size=(400 if built else 200, 8)).astype(np.float32)
    index = {"type": "ivf_pq", "metric": "dot", "train_rows": 256}
    settings = {"commit": {"interval": "0s"}}
    with memwal.open(uri, schema=schema, key="id", indexes={"v": index}, settings=settings) as table:
        table.put(rows(0, vectors))
        table.flush()
        table.commit()
        dataset = lance.dataset(uri)
        assert ("v_idx" in [each.name for each in dataset.describe_indices()]) == built
        odd = np.ones((20, 8), np.float32)
        odd[:, 0] = np.inf
        dataset.insert(rows(1000, odd))
        nearest = np.argsort(-vectors.sum(axis=1))
        assert table.search("v", [1.0] * 8, 5)["id"].to_pylist() == nearest[:5].tolist()


def test_a_hybrid_search_takes_the_only_vector_column_without_an_index(layered: tuple[Any, dict[str, Model]]) -> None:
    table, levels = layered
    found = table.hybrid([0.5, -1.0, 0.25, 2.0], "zebra", 1000, candidates=1000, metric="cosine")
    expected = distances(levels["latest"], np.array([0.5, -1.0, 0.25, 2.0]), "cosine")
    measured = dict(zip(found["id"].to_pylist(), found["_distance"].to_pylist(), strict=True))
    assert {id: score for id, score in measured.items() if score is not None} == pytest.approx(expected, abs=1e-6)


def test_a_search_that_compares_every_row_of_a_large_table_is_logged_once(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reader, "EXACT_ROWS_QUIET", 50)
    caplog.set_level(logging.WARNING, "memwal.read")
    with memwal.open(uri, schema=SCHEMA, key="id", settings={"commit": {"interval": "0s"}}) as table:
        table.put(pa.Table.from_pylist([row(id, 0) for id in range(60)], SCHEMA))
        table.search("plain", [0.0] * 4)
        assert caplog.messages == []
        table.flush()
        table.commit()
        table.search("plain", [0.0] * 4)
        table.search("plain", [0.0] * 4)
    assert len(caplog.messages) == 1
    assert "a search of column plain compares all 60 rows of the base table" in caplog.messages[0]


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, cli: Cli) -> Iterator[Callable[..., Any]]:
    """Run `memwal query` on a table of 40 rows with a column "list price"; it prints JSON."""
    directory = tmp_path_factory.mktemp("asked")
    uri, path = str(directory / "table.lance"), directory / "memwal.toml"
    path.write_text(f'[table]\nuri = "{uri}"\n')
    priced = SCHEMA.append(pa.field("list price", pa.int64()))
    with memwal.open(uri, schema=priced, key="id", indexes={"body": "fts"}) as table:
        table.put(pa.Table.from_pylist([row(id, 0) | {"list price": -id} for id in range(40)], priced))
        yield lambda *options: cli("query", path, *options, "--format", "json", "--columns", "id")


def ids(ran: Any) -> list[int]:
    assert ran.code == 0, ran.err
    return [each["id"] for each in json.loads(ran.out)]


def test_the_command_orders_leaves_out_and_searches_as_told(asked: Callable[..., Any]) -> None:
    assert ids(asked("--order-by", "id desc", "--limit", 3, "--offset", 2)) == [37, 36, 35]
    assert ids(asked("--order-by", "list price  DESC, id desc", "--filter", "id < 12 AND word IS NULL")) == [0, 11]
    model = {id: row(id, 0) for id in range(40)}
    near = ("--near", "plain=[0.5, -1, 0.25, 2]")
    for metric in ("l2", "cosine"):
        expected = distances(model, np.array([0.5, -1.0, 0.25, 2.0]), metric)
        order = sorted(expected, key=lambda id: expected[id])
        assert ids(asked(*near, "--metric", metric, "--limit", 5, "--offset", 1)) == order[1:6]
        end = (expected[order[3]] + expected[order[4]]) / 2
        assert ids(asked(*near, "--metric", metric, "--distance-range", f",{end}")) == order[:4]
        assert ids(asked(*near, "--metric", metric, "--distance-range", f"{end},", "--limit", 2)) == order[4:6]
    assert len(ids(asked(*near, "--match", "body=zebra", "--nprobes", 3, "--refine-factor", 2, "--limit", 4))) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--order-by", "id, list price down"), "column 'list price down' does not exist; did you mean 'list price'?"),
        (("--order-by", "id", "--match", "body=zebra"), "--order-by and --match cannot be combined"),
        (("--key", "1", "--offset", "1"), "--offset and --key cannot be combined"),
        (("--metric", "l2"), "--metric says how to search by vector; add --near"),
        (("--near", "plain=[0, 0, 0, 0]", "--distance-range", "0.5"), "--distance-range '0.5': write LOWEST,BELOW"),
        *(
            (("--near", f"plain={odd}"), "--near: not a JSON list of numbers")
            for odd in ('"1234"', '{"1": 0, "2": 5}', '[true, "3", 1, 2]', f"[{10**400}, 1, 2, 3]", "[" * 20_000)
        ),
        (("--near", "plain=[0, 0, 0, 0]", "--distance-range", "5,x"), "--distance-range '5,x': write LOWEST,BELOW"),
        (("--near", "plain=[0, 0, 0, 0]", "--metric", "L3"), "metric 'L3' is unknown"),
    ],
)
def test_the_command_refuses_what_does_not_go_together(
    asked: Callable[..., Any], options: tuple[str, ...], said: str
) -> None:
    ran = asked(*options)
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert said in ran.error_lines[0]
