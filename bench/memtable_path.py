"""What the memtable by itself costs: putting, getting, searching and matching in one that holds up to a million rows.

Lance's side does what is nearest. Puts and gets: a ShardWriter that does not wait for its log, its memtable as large as
it takes. Search and match: the base table's finished index, since Lance has none that sees a memtable.
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

from bench import lance_side
from bench.benchmark import Benchmark, Contender, Parameter, Sample, Values, Watch
from bench.digest import rows_digest, texts_digest
from bench.lance_side import LanceShard
from bench.latencies import timed_each
from bench.memtable_data import (
    COMPOSITE,
    COMPOSITE_KEY,
    STRING,
    STRING_KEY,
    VECTORS,
    in_batches,
    many_narrow,
    many_packages,
    many_vectors,
    vector_rows,
    with_composite_key,
    with_string_key,
)
from bench.memtable_side import BareMemTable, Shape
from bench.memwal_side import MemwalTable
from bench.put_path import PACKAGE_INDEXES, Puts
from bench.queries import Queries
from bench.search_path import TEXTS
from bench.source_data import NARROW, NARROW_KEY, PACKAGES_KEY, SEED, narrow_batches, packages
from flush import BaseTable
from ingest.region_context import IndexMode
from memtable import VectorModel, with_tombstone

K = 10
LARGE: Mapping[str, Any] = {
    **lance_side.FAST_BEST,
    "max_memtable_rows": 4_000_000,
    "max_memtable_size": 4 << 30,
    "max_memtable_batches": 100_000,
    "max_unflushed_memtable_bytes": 8 << 30,
}
"""ShardWriter with a memtable that takes a million rows; it flushes at 100,000 by default."""
IN_BASE = "the same rows in its base table, indexed; Lance has no search or match that sees a memtable"


def _as_rows(batches: Sequence[pa.Table], shape: Shape) -> list[pa.Table]:
    return [with_tombstone(batch, shape.row_schema) for batch in batches]


# ---- put ----------------------------------------------------------------------------------------------------------


class BarePuts(Contender):
    """Puts into a memtable, timed as the caller sees them, and until no row waits for an index either.

    `base`: rows of the table below, whose trained indexes the memtable's begin with. `converting`: see BareMemTable.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        batches: Sequence[pa.Table],
        base: pa.Table | None = None,
        *,
        converting: bool = False,
    ) -> None:
        super().__init__(f"memwal, {name}", "memwal", shape.settings())
        self._shape, self._converting = shape, converting
        self._batches = batches if converting else _as_rows(batches, shape)
        self._base = shape.schema.empty_table() if base is None else base
        self._models: Mapping[str, VectorModel] = {}

    def prepare(self, at: Path) -> None:
        """Build the base table's indexes, if any."""
        if self._shape.indexes:
            MemwalTable(at, self._base, self._shape.key[0], self._shape.indexes).close()
            self._models = BaseTable.open(str(at / "table.lance")).vector_models()

    def round(self, at: Path, watch: Watch) -> Sample:  # noqa: ARG002 - nothing is on storage
        """One memtable."""
        table = BareMemTable(self._shape, self._models, converting=self._converting)
        until_indexed = Watch()
        try:
            with until_indexed.timed():
                with watch.timed():
                    latencies = timed_each(table.put, self._batches)
                table.indexed()
            rows = table.rows()
        finally:
            table.close()
        count = sum(batch.num_rows for batch in self._batches)
        seen = pa.concat_tables([self._base, rows])  # the keys put are others than those of the base
        digest = rows_digest(seen, self._shape.key)
        return Sample(
            np.asarray(latencies), watch.seconds, count, digest, {"rows/s until indexed": count / until_indexed.seconds}
        )


# ---- put, the key index alone --------------------------------------------------------------------------------------


def _put(
    schema: pa.Schema, key: Sequence[str], made: Callable[[pa.Table], pa.Table]
) -> Callable[[Values], list[Contender]]:
    """Puts of narrow rows with a key of one kind."""

    def contenders(values: Values) -> list[Contender]:
        shape = Shape(schema, key)
        batches = [made(batch) for batch in narrow_batches(values["puts"], values["rows"])]
        found: list[Contender] = [
            BarePuts("checked and applied", shape, batches),
            BarePuts("and brought to the row schema", shape, batches, converting=True),
        ]
        for name, settings in (("best", lance_side.FAST_BEST), ("default", lance_side.FAST)):
            found.append(_shard_puts(f"ShardWriter, {name}", settings, schema.empty_table(), key, {}, batches))
        return found

    return contenders


def _shard_puts(
    name: str,
    settings: Mapping[str, Any],
    base: pa.Table,
    key: Sequence[str],
    indexes: Mapping[str, Mapping[str, Any]],
    batches: Sequence[pa.Table],
) -> Puts:
    def open_at(at: Path) -> LanceShard:
        return LanceShard(at, base, key, indexes, settings)

    return Puts(name, "lance", settings, open_at, [batches], key)


# ---- put, three indexes --------------------------------------------------------------------------------------------


def _put_packages(values: Values) -> list[Contender]:
    base = packages().slice(0, values["base"])
    rows = many_packages(values["stream"])
    batches = in_batches(rows, values["rows"])
    modes: tuple[IndexMode, ...] = ("async", "sync")
    found: list[Contender] = [
        BarePuts(mode, Shape(rows.schema, [PACKAGES_KEY], PACKAGE_INDEXES, mode), batches, base) for mode in modes
    ]
    for name, settings in (("best", lance_side.FAST_BEST), ("default", lance_side.FAST)):
        found.append(_shard_puts(f"ShardWriter, {name}", settings, base, [PACKAGES_KEY], PACKAGE_INDEXES, batches))
    return found


# ---- put into a full memtable --------------------------------------------------------------------------------------


class FullPuts(Contender):
    """Puts into a table that holds many rows and goes on to hold more; beside that the same into an empty one.

    `times as when empty`: p50 when full by p50 when empty, of one round.
    """

    def __init__(
        self,
        name: str,
        side: Any,
        settings: Mapping[str, Any],
        open_at: Callable[[Path], Any],
        held: Sequence[pa.Table],
        rounds: Sequence[Sequence[pa.Table]],
    ) -> None:
        super().__init__(name, side, settings)
        self._open, self._held, self._rounds = open_at, held, iter(rounds)
        self._full: Any = None

    def prepare(self, at: Path) -> None:
        """Fill it."""
        self._full = self._open(at)
        for batch in self._held:
            self._full.put(batch)

    def round(self, at: Path, watch: Watch) -> Sample:
        """The next batches, into both."""
        batches = next(self._rounds)
        empty = self._open(at)
        try:
            before = timed_each(empty.put, batches)
        finally:
            empty.close()
        with watch.timed():
            latencies = timed_each(self._full.put, batches)
        flat = {"times as when empty": float(np.median(latencies) / np.median(before))}
        count = sum(batch.num_rows for batch in batches)
        return Sample(np.asarray(latencies), watch.seconds, count, self._digest(batches[-1]), flat)

    def _digest(self, put: pa.Table) -> str:
        """Of the rows of one put, without their ids, which are others in each round."""
        rows, ids = self._full.rows().select(NARROW.names), put.column(NARROW_KEY)
        found = rows.take(pc.index_in(ids.combine_chunks(), rows.column(NARROW_KEY)))
        return rows_digest(found.set_column(0, NARROW_KEY, pa.array(np.arange(len(ids)))), [NARROW_KEY])

    def close(self) -> None:
        """Release the full table."""
        if self._full is not None:
            self._full.close()


MOST_ROUNDS = 20


def _put_full(values: Values) -> list[Contender]:
    shape, size = Shape(NARROW, [NARROW_KEY]), values["rows"]
    held = in_batches(many_narrow(values["held"]), size)
    rounds = [_later_batches(values, number) for number in range(MOST_ROUNDS)]

    def shard(at: Path) -> LanceShard:
        return LanceShard(at, NARROW.empty_table(), NARROW_KEY, {}, LARGE)

    return [
        FullPuts(
            "memwal, checked and applied",
            "memwal",
            {},
            lambda _: BareMemTable(shape),
            _as_rows(held, shape),
            [_as_rows(batches, shape) for batches in rounds],
        ),
        FullPuts("ShardWriter, best, one memtable", "lance", LARGE, shard, held, rounds),
    ]


def _later_batches(values: Values, number: int) -> list[pa.Table]:
    """Batches of round `number`: nine new keys, then one that is held already."""
    held, count = values["held"], values["puts"] * values["rows"]
    first = held + number * count
    rng = np.random.default_rng((SEED, number))
    ids = np.arange(first, first + count)
    ids[9::10] = rng.choice(held, len(ids[9::10]), replace=False)
    rows = many_narrow(count)
    return in_batches(rows.set_column(0, NARROW.field(NARROW_KEY), pa.array(ids)), values["rows"])


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
    """A memtable with these rows of the base schema, all of them indexed."""
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
    """A Lance table with one index, no log."""

    def __init__(self, at: Path, rows: pa.Table, index: Callable[[lance.LanceDataset], object]) -> None:
        self.dataset = lance.write_dataset(rows, str(at / "table.lance"))
        index(self.dataset)

    def close(self) -> None:
        """Nothing is held."""


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
        if not built:  # one index, whatever the setting of a search
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


_PUTS = {"puts": Parameter(3, 90, "puts of a round"), "rows": Parameter(100, 1000, "rows of a put")}
_HELD = Parameter(2000, 1_000_000, "rows in the memtable")
_HUNDRED = Parameter(1500, 100_000, "rows in the memtable")

BENCHMARKS = (
    Benchmark(
        "memtable_put_int64",
        "Memtable alone: put, 3 narrow columns, int64 key",
        "rows_per_second",
        _PUTS,
        _put(NARROW, [NARROW_KEY], lambda rows: rows),
    ),
    Benchmark(
        "memtable_put_string",
        "Memtable alone: put, 3 narrow columns, string key",
        "rows_per_second",
        _PUTS,
        _put(STRING, [STRING_KEY], with_string_key),
    ),
    Benchmark(
        "memtable_put_composite",
        "Memtable alone: put, 3 narrow columns, key of string and int64",
        "rows_per_second",
        _PUTS,
        _put(COMPOSITE, COMPOSITE_KEY, with_composite_key),
    ),
    Benchmark(
        "memtable_put_packages",
        "Memtable alone: put of packages, ivf_pq + fts + btree kept",
        "rows_per_second",
        {
            "base": Parameter(256, 1000, "packages in the base table, on which both sides' quantisers are trained"),
            "stream": Parameter(300, 4000, "rows that are put: the packages again, with other names and near vectors"),
            "rows": Parameter(100, 1000, "rows of a put"),
        },
        _put_packages,
    ),
    Benchmark(
        "memtable_put_full",
        "Memtable alone: put into one that is full",
        "p50_ms",
        {"held": _HELD, **_PUTS},
        _put_full,
    ),
    Benchmark(
        "memtable_get",
        "Memtable alone: get of 1 key",
        "p50_ms",
        {"held": _HELD, "keys": Parameter(1, 1, "keys of a get"), "gets": Parameter(3, 200, "gets of a round")},
        _get,
    ),
    Benchmark(
        "memtable_get_many",
        "Memtable alone: get of 10,000 keys",
        "p50_ms",
        {"held": _HELD, "keys": Parameter(50, 10_000, "keys of a get"), "gets": Parameter(2, 3, "gets of a round")},
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
