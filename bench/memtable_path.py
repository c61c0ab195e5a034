"""Reads from the memtable alone: get, search and match with up to a million rows in it.

Lance's side is the nearest equivalent. For gets: a ShardWriter whose memtable holds all rows. For search and match: the
finished index of a base table, because Lance has none that sees a memtable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bench.benchmark import Benchmark, Contender, Parameter, Values
from bench.digest import rows_digest, texts_digest
from bench.lance_side import LanceShard
from bench.memtable_data import VECTORS, in_batches, many_narrow, many_packages, many_vectors, vector_rows
from bench.memtable_puts import HELD, LARGE
from bench.memtable_side import BareMemTable, Shape
from bench.queries import Queries
from bench.search_path import TEXTS
from bench.source_data import NARROW, NARROW_KEY, PACKAGES_KEY, SEED

K = 10
IN_BASE = "the same rows in its base table, indexed; Lance has no search or match that sees a memtable"


# ---- get -----------------------------------------------------------------------------------------------------------


def _get(values: Values) -> list[Contender]:
    rows = many_narrow(values["held"])
    shape, batches = Shape(NARROW, [NARROW_KEY]), in_batches(rows, 1000)
    picked = np.random.default_rng(SEED).choice(values["held"], values["keys"] * values["gets"], replace=False)
    questions = np.split(picked, values["gets"])

    def filled(at: Path) -> LanceShard:
        table = LanceShard(at, NARROW.empty_table(), NARROW_KEY, {}, LARGE)
        for batch in batches:
            table.put(batch)
        return table

    def digest(answers: Sequence[pa.Table]) -> str:
        return texts_digest([rows_digest(answer, [NARROW_KEY]) for answer in answers])

    ours = Queries(
        "memwal, lookup and take",
        "memwal",
        {},
        lambda _: _filled(shape, batches),
        _look_up,
        [pa.table({NARROW_KEY: keys}) for keys in questions],
        digest,
    )
    made: list[Contender] = [ours]
    if values["keys"] == 1:
        made.append(Queries("ShardWriter.lsm_scanner, id = …", "lance", LARGE, filled, _scan_for, questions, digest))
    else:
        name = "ShardWriter.lsm_scanner, scan all and pick"
        made.append(Queries(name, "lance", LARGE, filled, _scan_all_for, questions, digest))
    return made


def _filled(shape: Shape, batches: Sequence[pa.Table]) -> BareMemTable:
    """Return a memtable with these rows of the base schema, all indexed."""
    table = BareMemTable(shape, converting=True)
    for batch in batches:
        table.put(batch)
    table.indexed()
    return table


def _look_up(table: BareMemTable, keys: pa.Table) -> pa.Table:
    snapshot = table.snapshot()
    positions = snapshot.lookup(keys)
    return snapshot.take(positions[positions >= 0])


def _scan_for(table: LanceShard, keys: npt.NDArray[np.int64]) -> pa.Table:
    return table.scanner().filter(f"{NARROW_KEY} = {keys[0]}").to_table()


def _scan_all_for(table: LanceShard, keys: npt.NDArray[np.int64]) -> pa.Table:
    rows = table.rows()
    return rows.filter(pc.is_in(rows.column(NARROW_KEY), pa.array(keys)))


# ---- search --------------------------------------------------------------------------------------------------------


class Indexed:
    """A Lance table with one index and no log."""

    def __init__(self, at: Path, rows: pa.Table, index: Callable[[lance.LanceDataset], object]) -> None:
        self.dataset = lance.write_dataset(rows, str(at / "table.lance"))
        index(self.dataset)

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _search(values: Values) -> list[Contender]:
    vectors = many_vectors(values["held"])
    rng = np.random.default_rng(SEED)
    noise = rng.standard_normal((values["searches"], vectors.shape[1]), dtype=np.float32) * np.float32(0.01)
    queries = list(vectors[rng.integers(0, len(vectors), values["searches"])] + noise)
    exact = [set(np.argsort(((vectors - query) ** 2).sum(axis=1))[:K].tolist()) for query in queries]
    parameters = {"num_partitions": values["lists"], "num_sub_vectors": 16}
    shape = Shape(VECTORS, ["id"], {"vector": {"type": "ivf_pq", "metric": "l2", **parameters}})
    trained: dict[str, Any] = {**parameters, "metric": "l2", "sample_rate": 32}

    def recall(answers: Sequence[pa.Table]) -> Mapping[str, float]:
        found = [set(answer.column("id").to_pylist()) for answer in answers]
        return {"recall": sum(len(a & b) for a, b in zip(exact, found, strict=True)) / (K * len(exact))}

    def ours(table: BareMemTable, query: npt.NDArray[np.float32]) -> pa.Table:
        snapshot = table.snapshot()
        return snapshot.take(snapshot.search("vector", query, K, snapshot.live())[0], ["id"])

    def theirs(settings: Mapping[str, Any]) -> Callable[[Indexed, npt.NDArray[np.float32]], pa.Table]:
        def ask(table: Indexed, query: npt.NDArray[np.float32]) -> pa.Table:
            return table.dataset.to_table(["id"], nearest={"column": "vector", "q": query, "k": K, **settings})

        return ask

    built: list[Indexed] = []

    def indexed(at: Path) -> Indexed:
        if not built:  # one index for all settings of a search
            rows = vector_rows(vectors)
            built.append(Indexed(at, rows, lambda each: each.create_index("vector", "IVF_PQ", **trained)))
        return built[0]

    def anything(_: Sequence[pa.Table]) -> str:
        return ""

    batches = in_batches(vector_rows(vectors), 1000)
    found: list[Contender] = [
        Queries(
            "memwal", "memwal", shape.settings(), lambda _: _filled(shape, batches), ours, queries, anything, recall
        )
    ]
    probing = {"nprobes": values["lists"]}
    for name, settings in (("refined", {**probing, "refine_factor": 20}), ("default", probing)):
        found.append(
            Queries(
                f"LanceDataset, nearest, {name}",
                "lance",
                settings,
                indexed,
                theirs(settings),
                queries,
                anything,
                recall,
                note=IN_BASE,
            )
        )
    return found


# ---- match ---------------------------------------------------------------------------------------------------------


def _match(values: Values) -> list[Contender]:
    rows = many_packages(values["held"]).select([PACKAGES_KEY, "description"])
    shape = Shape(rows.schema, [PACKAGES_KEY], {"description": {"type": "fts"}})
    batches = in_batches(rows, 1000)
    texts = [TEXTS[n % len(TEXTS)] for n in range(values["matches"])]

    def ours(table: BareMemTable, text: str) -> pa.Table:
        snapshot = table.snapshot()
        positions, scores = snapshot.match("description", text, K, snapshot.live())
        return snapshot.take(positions, [PACKAGES_KEY]).append_column("_score", pa.array(scores))

    def theirs(table: Indexed, text: str) -> pa.Table:
        query = {"columns": ["description"], "query": text}
        return table.dataset.to_table([PACKAGES_KEY, "_score"], full_text_query=query, limit=K)

    def indexed(at: Path) -> Indexed:
        return Indexed(at, rows, lambda each: each.create_scalar_index("description", "INVERTED"))

    def scores(answers: Sequence[pa.Table]) -> str:
        return texts_digest([f"{score:.2f}" for answer in answers for score in answer.column("_score").to_pylist()])

    return [
        Queries("memwal", "memwal", shape.settings(), lambda _: _filled(shape, batches), ours, texts, scores),
        Queries("LanceDataset, full_text_query", "lance", {}, indexed, theirs, texts, scores, note=IN_BASE),
    ]


_HUNDRED = Parameter(1500, 100_000, "rows in the memtable")

BENCHMARKS = (
    Benchmark(
        "memtable_get",
        "Memtable alone: get of 1 key",
        "p50_ms",
        {"held": HELD, "keys": Parameter(1, 1, "keys of a get"), "gets": Parameter(3, 200, "gets of a round")},
        _get,
    ),
    Benchmark(
        "memtable_get_many",
        "Memtable alone: get of 10,000 keys",
        "p50_ms",
        {"held": HELD, "keys": Parameter(50, 10_000, "keys of a get"), "gets": Parameter(2, 3, "gets of a round")},
        _get,
    ),
    Benchmark(
        "memtable_search",
        "Memtable alone: vector search, k = 10, 128-d",
        "p50_ms",
        {
            "held": _HUNDRED,
            "lists": Parameter(4, 16, "partitions of both sides' indexes, all of them probed"),
            "searches": Parameter(3, 50, "searches of a round"),
        },
        _search,
    ),
    Benchmark(
        "memtable_match",
        "Memtable alone: text match, k = 10",
        "p50_ms",
        {"held": _HUNDRED, "matches": Parameter(3, 50, "matches of a round")},
        _match,
    ),
)
