"""The names of LanceDB on a memwal table: examples of LanceDB's documentation run on both and give equal results."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.rerankers import RRFReranker

import memwal
from memwal.ingest.engine.api.lancedb_forms import ELSEWHERE
from memwal.ingest.engine.api.query import Query
from tests.inside import of_programs
from tests.messages import raises
from tests.ways import entered

WORDS = ("puppy", "kitten", "house", "garden", "river")
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("price", pa.float64()),
        pa.field("vector", pa.list_(pa.float32(), 4)),
    ]
)
Q = [0.3, 0.1, 0.9, 0.4]
Example = Callable[[Any], Any]


def rows(count: int = 60) -> list[dict[str, Any]]:
    chance = np.random.default_rng(7)
    return [
        {
            "id": id,
            "name": " ".join([WORDS[id % 5]] * (1 + id % 3) + [f"n{id}"] * (id % 7)),
            "price": float(id),
            "vector": chance.normal(size=4).astype("f4").tolist(),
        }
        for id in range(count)
    ]


def upsert(table: Any) -> None:
    new = [{"id": id, "name": "new", "price": 0.5, "vector": [0.0] * 4} for id in (1, 100)]
    table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(new)


def travel(table: Any) -> list[int]:
    before = table.version
    table.delete(filter="id > 50") if isinstance(table, memwal_table()) else table.delete("id > 50")
    if isinstance(table, memwal_table()):
        table.optimize()
    counts = [table.count_rows()]
    table.checkout(before)
    counts.append(table.count_rows())
    table.checkout_latest()
    counts.append(table.count_rows())
    table.restore(before)
    return [*counts, table.count_rows()]


def memwal_table() -> type:
    from memwal.ingest.engine.table.public import Table

    return Table


EXAMPLES: dict[str, Example] = {
    "search a vector": lambda table: table.search(Q).limit(3).to_list(),
    "search an array": lambda table: table.search(np.array(Q)).limit(2).offset(1).to_arrow(),
    "without a limit": lambda table: table.search(Q).to_arrow(),
    "select": lambda table: table.search(Q).select(["id", "price"]).limit(3).to_arrow(),
    "where": lambda table: table.search(Q).where("price < 20 AND name LIKE 'pup%'").limit(4).to_list(),
    "every where counts": lambda table: table.search(Q).where("price < 9").where("price > 5").to_list(),
    "cosine": lambda table: table.search(Q).distance_type("cosine").limit(3).to_list(),
    "metric": lambda table: table.search(Q, vector_column_name="vector").metric("dot").limit(3).to_list(),
    "distance range": lambda table: table.search(Q).distance_range(0.5, 1.5).limit(5).to_list(),
    "probes": lambda table: table.search(Q).nprobes(5).refine_factor(3).limit(3).to_list(),
    "text": lambda table: table.search("puppy", query_type="fts").limit(3).to_list(),
    "text by itself": lambda table: table.search("n6 n13").select(["id"]).limit(3).to_list(),
    "text in a column": lambda table: table.search("river n9", fts_columns="name").limit(1).to_list(),
    "signs in a text": lambda table: table.search('+puppy -"n5" kit* n~').limit(3).to_list(),
    "text with a filter": lambda table: table.search("garden", query_type="fts").where("price > 30").limit(2).to_list(),
    "phrase": lambda table: table.search("kitten n1", query_type="fts").phrase_query().limit(1).to_list(),
    "hybrid": lambda table: table.search(query_type="hybrid").vector(Q).text("n10").limit(4).to_list(),
    "reranked": lambda table: table.search(query_type="hybrid").vector(Q).text("n10").rerank(RRFReranker()).to_list(),
    "no query": lambda table: sorted(row["id"] for row in table.search().where("price >= 55").to_list()),
    "pandas": lambda table: table.search(Q).limit(2).to_pandas()["id"].tolist(),
    "polars": lambda table: table.search(Q).limit(2).to_polars()["id"].to_list(),
    "batches": lambda table: [b.num_rows for b in table.search(Q).limit(5).to_batches(2)][:1],
    "head": lambda table: table.head(3),
    "whole as Arrow": lambda table: table.to_arrow().sort_by("id"),
    "whole as pandas": lambda table: table.to_pandas().sort_values("id")["price"].tolist(),
    "count": lambda table: (table.count_rows(), table.count_rows("price > 10"), len(table)),
    "indexes": lambda table: [(each.index_type, list(each.columns)) for each in table.list_indices()],
    "add": lambda table: (table.add([{"id": 90, "name": "a", "price": 1.0, "vector": Q}]), table.count_rows())[1],
    "update": lambda table: (table.update("id < 3", {"price": 9.5, "vector": Q}), table.to_arrow().sort_by("id"))[1],
    "update by SQL": lambda table: (
        table.update(where="price > 50", values_sql={"price": "price * 2 + id"}),
        table.to_arrow().sort_by("id"),
    )[1],
    "upsert": lambda table: (upsert(table), table.to_arrow().sort_by("id"))[1],
    "time travel": travel,
    "optimize": lambda table: (table.optimize(), table.count_rows())[1],
}


def plain(found: Any) -> Any:
    """Return a result as Python values, floats with five digits."""
    if isinstance(found, pa.Table):
        return [found.column_names, plain(found.to_pylist())]
    if isinstance(found, float):
        return float(f"{found:.5g}")
    if isinstance(found, list | tuple):
        return [plain(each) for each in found]
    return {name: plain(value) for name, value in found.items()} if isinstance(found, dict) else found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """Return a function that creates the table of LanceDB."""

    def make() -> Any:
        where = lancedb.connect(tmp_path_factory.mktemp("lancedb"))
        table = where.create_table("t", pa.Table.from_pylist(rows(), SCHEMA))
        table.create_index("name", config=lancedb.index.FTS(with_position=True))
        return table

    return make


@pytest.mark.parametrize("way", ["embedded", "flight"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_gives_what_it_gives_in_lancedb(
    example: str, way: str, theirs: Callable[[], Any], tmp_path: Any, ends: ExitStack
) -> None:
    indexes = {"name": {"type": "fts", "with_position": True}}
    owner = memwal.open(tmp_path / "t.lance", schema=SCHEMA, key="id", regions=2, indexes=indexes)
    ends.callback(owner.close)
    owner.add(rows())
    owner.optimize()
    table = entered(way, owner, ends)
    assert plain(EXAMPLES[example](table)) == plain(EXAMPLES[example](theirs()))


def test_uncommitted_rows_are_found_too(open_small: Callable[..., Any], made: Any) -> None:
    table = open_small()
    table.add(made.table(range(5), 1))
    vector = table.get([3])["vector"][0].as_py()
    assert table.search(vector).limit(1).to_list()[0]["id"] == 3
    assert table.search(vector).level("committed").to_list() == []


def test_a_column_and_a_vector_are_searched_at_once(open_small: Callable[..., Any], made: Any) -> None:
    table = open_small()
    table.put(made.table(range(5), 1))
    vector = table.get([3])["vector"][0].as_py()
    for found in (
        table.search("vector", vector, 1),
        table.search(column="vector", vector=vector, k=1),
        table.search(None, vector, 1),
        table.search(vector).limit(1).to_arrow(),
    ):
        assert found["id"].to_pylist() == [3]
    assert isinstance(table.search(), Query)
    assert "vector" in table.search(vector).limit(1).analyze_plan()


def test_what_differs_says_what_to_call(open_small: Callable[..., Any], made: Any) -> None:
    table = open_small()
    table.put(made.table(range(5), 1))
    for wrong in (
        lambda: table.add([], mode="overwrite"),
        lambda: table.merge_insert("name"),
        lambda: table.merge_insert("id").when_matched_update_all("price > 1"),
        lambda: table.merge_insert("id").when_not_matched_by_source_delete(),
        lambda: table.merge_insert("id").when_not_matched_insert_all().execute([]),
        lambda: table.merge_insert("id").when_matched_update_all().execute([]),
        lambda: table.create_scalar_index("name", "BITMAP"),
        lambda: table.search("a dog", query_type="vector"),
        lambda: table.search([1.0], query_type="fts"),
        lambda: table.search("a dog", query_type="hybrd"),
        lambda: table.search("a dog", query_type="hybrid").to_list(),
        lambda: table.search(query_type="hybrid").to_list(),
        lambda: table.search("a dog").where("id > 1", prefilter=False),
        lambda: table.search("a dog").select({"twice": "price * 2"}),
        lambda: table.search("a dog").order_by("id").to_list(),
        lambda: table.search([1.0]).to_list(),
        lambda: table.checkout(999),
        lambda: table.checkout("no tag"),
        lambda: table.checkout(datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)),
        lambda: table.checkout(-1),
        lambda: table.tags.create("t", 999),
        lambda: table.tags.delete("t"),
        table.restore,
    ):
        with raises(memwal.Invalid):
            wrong()
    for name in (*ELSEWHERE, "serch", "counts", "to_panda", "xyzzy"):
        with raises(AttributeError):
            of_programs(table, name)
    for name in ("with_row_id", "limitt", "fast_search"):
        with raises(AttributeError):
            getattr(table.search(), name)


@pytest.mark.parametrize("way", ["embedded", "flight", "two daemons"])
def test_versions_by_number_tag_and_time(way: str, open_small: Callable[..., Any], made: Any, ends: ExitStack) -> None:
    owner = open_small()
    table = entered(way, owner, ends)
    table.add(made.table(range(10), 1))
    table.optimize()
    old, then = table.version, datetime.datetime.now(datetime.UTC)
    table.tags.create("old", old)
    before = table.to_arrow().sort_by("id")
    table.update("id < 3", {"name": "changed"})
    table.delete([9])
    table.add(made.table([20], 2))
    table.optimize()
    table.update("id = 5", {"name": "not committed"})
    for version in (old, "old", then):
        table.checkout(version)
        assert table.version == old
        assert table.to_arrow().sort_by("id") == before
        assert table.get([9]).num_rows == table.count("id = 9") == 1
        assert len(table.sql("select id from table where name = 'changed'").read_all()) == 0
        with raises(memwal.Invalid):
            table.add(made.table([30], 1))
        table.checkout_latest()
        assert table.count() == 10
    assert table.tags.list() == {"old": {"version": old}}
    table.tags.update("old", old + 1)
    assert table.tags.get_version("old") == old + 1
    table.tags.delete("old")
    assert table.list_tags() == {}
    assert [each["version"] for each in table.list_versions()] == list(range(1, table.version + 1))
    assert table.restore(old) == 6
    assert table.to_arrow().sort_by("id") == before


async def _async_forms(endpoint: str) -> list[Any]:
    async with await memwal.connect_async(endpoint) as table:
        found = [await table.count_rows(), (await table.head(2)).num_rows, len(await table.list_indices())]
        await table.update("id = 1", {"price": 70})
        found.append(sum([batch.num_rows async for batch in table.scan(["id"])]))
        versions = await table.list_versions()
        await table.checkout(versions[-1]["version"])
        found.append(await table.count_rows())
        await table.checkout_latest()
        with pytest.raises(AttributeError):
            await table.serch()
        return [*found, (await table.get([1]))["price"].to_pylist()]


def test_the_names_can_be_awaited(open_small: Callable[..., Any], made: Any, ends: ExitStack) -> None:
    import asyncio

    from tests.ways import served

    owner = open_small()
    owner.add(made.table(range(5), 1))
    assert asyncio.run(_async_forms(served(owner, ends))) == [5, 2, 3, 5, 0, [70]]
