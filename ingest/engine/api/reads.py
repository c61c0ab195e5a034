"""Define the read methods of every table: embedded, read from storage, or behind daemons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import pyarrow as pa

from memwal.ingest.engine.api.arguments import (
    COUNT_MAX,
    at_least_one,
    best,
    checked_limit,
    distance_range,
    listed,
    mapping,
    not_negative,
    shown,
    sql,
    text_columns,
)
from memwal.ingest.engine.api.arguments import text as a_text
from memwal.ingest.engine.api.changes import Changes, ChangesSource, opened, position_of
from memwal.ingest.engine.api.explanation import Explain, Watch, ended, watching
from memwal.ingest.engine.api.fusion import DISTANCE, SCORE, Rerank, best_of_arms, checked_weights, fused
from memwal.ingest.engine.api.keys import repeatable
from memwal.ingest.engine.api.ordering import checked_order, first_rows, in_rank
from memwal.ingest.engine.api.results import RowStream, trimmed
from memwal.ingest.errors import Invalid, translate_errors
from memwal.ingest.suggest import suggestion

Level = Literal["committed", "flushed", "durable", "latest"]
COUNT = "_count"
"""The column that `facets` adds."""
SQL_MEMORY = 512 << 20
"""Default of `sql.memory_max`, in bytes."""
_SHOWN = 8
"""Columns in the repr of a table."""
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class ReadKind:
    """How a read is sent to daemons, and how the answers of several owners are combined.

    `sends`: the argument that is sent as Arrow data; keys are sent only to their owners. `counts`: the answer is a
    number, and answers are added. `streams`: the answer is a RowStream; rows are concatenated, up to `limit`. `merge`:
    combines the tables of several owners; it receives the tables, the request, and the key, which orders equal rows.
    """

    sends: Literal["keys", "vector"] | None = None
    counts: bool = False
    streams: bool = False
    merge: Callable[[Sequence[pa.Table], Mapping[str, Any], Sequence[str]], pa.Table] | None = None


def value_counts(tables: Sequence[pa.Table], request: Mapping[str, Any], _: Sequence[str] = ()) -> pa.Table:
    """Return the sum of `tables`, each of the column that `request` names and `_count`: one row for each value."""
    column, rows = request["column"], pa.concat_tables(tables)
    kind, values = rows.schema.field(column).type, rows.column(column)
    if isinstance(kind, pa.BaseExtensionType):  # Arrow groups their storage only
        values = pa.chunked_array([chunk.storage for chunk in values.chunks], kind.storage_type)
    summed = pa.table({"value": values, "n": rows.column(COUNT)}).group_by("value").aggregate([("n", "sum")])
    found = summed.column("value").combine_chunks()
    found = pa.ExtensionArray.from_storage(kind, found) if isinstance(kind, pa.BaseExtensionType) else found
    return pa.Table.from_arrays([found, summed.column("n_sum")], schema=rows.schema)


def best_of(
    tables: Sequence[pa.Table], request: Mapping[str, Any], key: Sequence[str], *, score: str, ascending: bool
) -> pa.Table:
    """Return the best `k` rows (of `request`) of several rankings. `key` orders equal scores; NaN is last."""
    rows = pa.concat_tables(tables)
    scores = rows.column(score).to_numpy()
    ties = rows.select(list(key)) if key else rows.drop_columns([score])
    return rows.take(in_rank([scores if ascending else -scores], ties.take, keyed=bool(key), k=request["k"]))


READS: Mapping[str, ReadKind] = {
    "get": ReadKind(sends="keys"),
    "scan": ReadKind(streams=True),
    "count": ReadKind(counts=True),
    "facets": ReadKind(merge=value_counts),
    "search": ReadKind(sends="vector", merge=partial(best_of, score=DISTANCE, ascending=True)),
    "match": ReadKind(merge=partial(best_of, score=SCORE, ascending=False)),
    "candidates": ReadKind(sends="vector", merge=best_of_arms),
}
"""By method name. Clients and daemons know reads only from this table."""


class Reads(ABC):
    """get, scan, count, facets, search, match and hybrid at a level.

    `level`: "committed" (base table) < "flushed" (+ SSTs) < "durable" (+ rows of the WAL) < "latest" (+ rows in the
    owners' memory).
    `explain`: a function that receives the `memwal.Explanation` of the read when its answer is complete
    (`explain=print` shows it): levels, files and indexes, rows and milliseconds. For a scan: after its last row, or at
    `close`.
    Thread safety. Every method from any thread. Errors. Only `ingest.errors` kinds.
    """

    schema: pa.Schema
    """Base schema."""
    key: tuple[str, ...]
    _sql_memory = SQL_MEMORY

    @abstractmethod
    def _answer(self, read: str, level: str, /, *, explain: Watch | None = None, **request: Any) -> Any:
        """Return the answer of the method `read` of `read.reader.Reader`. `explain`: receives the parts."""

    @property
    @abstractmethod
    def _described(self) -> str:
        """The table's location and number of regions, as far as known without a request."""

    @property
    def _shows(self) -> str:
        """The level of reads without `level`."""
        return "reads latest"

    @property
    def _location(self) -> str:
        """The table's location, "" if unknown."""
        return ""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Stream all rows to another Arrow library: DuckDB, Polars, DataFusion and pyarrow accept a table directly.

        Each such call is a `scan` at level `latest`; `scan` and `sql` read only some columns and rows.
        """
        return self.scan().__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return self.count()

    def __bool__(self) -> bool:
        return True  # otherwise a table without rows would be false, and `if table` would count its rows

    def __getitem__(self, row: Any) -> NoReturn:
        raise TypeError("a table has no [ ]: call get(keys), scan(columns, filter) or head(n)")

    def __iter__(self) -> NoReturn:
        raise TypeError("a table is not iterable: iterate over scan(), which yields batches, or head(n).to_pylist()")

    def __repr__(self) -> str:
        key = f"key {', '.join(self.key)}" if self.key else "no key"
        names = self.schema.names
        columns = ", ".join(names[:_SHOWN]) + (f", … ({len(names)})" if len(names) > _SHOWN else "")
        return f"<memwal.{type(self).__name__} {self._described}, {key}, columns {columns}, {self._shows}>"

    @translate_errors
    def get(
        self,
        keys: Any,
        columns: Sequence[str] | None = None,
        *,
        level: str = "latest",
        explain: Explain | None = None,
    ) -> pa.Table:
        """Return the rows of `keys`, in the order of the keys; missing and deleted keys are left out.

        `keys`: a scalar or a list of them (one key column), tuples or dicts (several), or an Arrow table of the key.
        Raises: Invalid if the table has no key.
        """
        watch = watching("get", level, explain)
        rows: pa.Table = self._answer("get", level, keys=repeatable(keys), columns=listed(columns), explain=watch)
        return ended(watch, rows)

    @translate_errors
    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        *,
        order_by: Any = None,
        offset: int = 0,
        level: str = "latest",
        explain: Explain | None = None,
    ) -> RowStream:
        """Return at most `limit` rows whose newest version passes `filter` (SQL), after the first `offset`.

        All rows are of the moment of this call. The result streams: a loop reads batch by batch; `read_all`,
        `to_pandas` and `to_polars` gather all rows. A stream that can no longer be read to its end raises Unavailable
        from the loop: read again.

        - `order_by`: text such as "price desc, id", or a list of columns and of pairs (column, "ascending" or
          "descending"): nulls last, NaN above infinity, text by its bytes. The reading process gathers the rows.
          Without it the order is undefined.
        """
        wanted, skipped = listed(columns), not_negative("offset", offset)
        order = None if order_by is None else checked_order(order_by, self.schema.names)
        request: dict[str, Any] = {"columns": wanted, "filter": sql(filter), "limit": checked_limit(limit, skipped)}
        if order is not None:
            request["order_by"] = order
            if wanted is not None:
                request["columns"] = list(dict.fromkeys([*wanted, *(name for name, _ in order)]))
        watch = watching("scan", level, explain)
        rows: RowStream = self._answer("scan", level, **request, explain=watch)
        return ended(watch, trimmed(rows, request["columns"] if wanted is None else wanted, skipped))

    @translate_errors
    def count(self, filter: str | None = None, *, level: str = "latest", explain: Explain | None = None) -> int:
        """Return the number of rows whose newest version passes `filter`."""
        watch = watching("count", level, explain)
        return ended(watch, int(self._answer("count", level, filter=sql(filter), explain=watch)))

    @translate_errors
    def facets(
        self, column: str, filter: str | None = None, *, level: str = "latest", explain: Explain | None = None
    ) -> pa.Table:
        """Return how many rows that pass `filter` have each value of `column`: its values and `_count` (int64).

        The most frequent value is first; equally frequent ones are in ascending order, null is last. The owners of the
        regions count, and send one row for each value. Raises: Invalid for a list, a struct or a map.
        """
        request = {"column": a_text("column", column, "section"), "filter": sql(filter)}
        watch = watching("facets", level, explain)
        rows: pa.Table = self._answer("facets", level, **request, explain=watch)
        ended(watch, int(np.sum(rows.column(COUNT))))  # the rows that were counted
        return rows.take(first_rows(rows, [(COUNT, False), (column, True)], None))

    @translate_errors
    def search(
        self,
        column: str | None,
        vector: Any,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        metric: str | None = None,
        nprobes: int | None = None,
        refine_factor: int | None = None,
        distance_range: tuple[float | None, float | None] | None = None,
        offset: int = 0,
        level: str = "latest",
        explain: Explain | None = None,
    ) -> pa.Table:
        """Return the `k` rows nearest to `vector` that pass `filter`, with `_distance` (float32, ascending).

        A column without an index, or a `metric` ("l2", "cosine" or "dot") other than its index's, is searched row by
        row. Distances are exact.

        - `column`: None if only one column holds vectors, or only one has an index for them.
        - `nprobes`: partitions of the base table's index that are searched.
        - `refine_factor`: this number times `k` rows of the index are compared exactly. Larger values of both find more
          of the nearest rows, in more time.
        - `distance_range`: the lowest distance (inclusive) and the upper limit (exclusive); None for no limit.
        - `offset`: number of nearest rows to skip.
        """
        named = None if column is None else a_text("column", column, "embedding")
        request: dict[str, Any] = {"column": named, "vector": vector}
        request |= {"k": best(k, offset), "filter": sql(filter)}
        request |= _how(metric, nprobes, refine_factor, distance_range)
        watch = watching("search", level, explain)
        rows: pa.Table = self._answer("search", level, **request, columns=listed(columns), explain=watch)
        return ended(watch, rows.slice(offset))

    @translate_errors
    def match(
        self,
        column: str | Sequence[str] | Mapping[str, float] | None,
        text: str,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        offset: int = 0,
        level: str = "latest",
        explain: Explain | None = None,
    ) -> pa.Table:
        """Return the `k` rows that match `text` best and pass `filter`, with `_score` (float32, descending).

        - `text`: `web server` any of the words; `+web -server` with, without; `"web server"` a phrase; `serv*` words
          with this prefix; `serch~` words within one edit (a letter inserted, deleted or replaced), `serch~2` within
          two. A fuzzy word is analysed first, like the words of the table: with stemming, edits are those between
          stems.
        - `column`: a column with an fts index, a list of them (None: all), or a dict with the boost of each (0.001 to
          1000), such as `{"title": 3.0, "body": 1.0}`. Each part of `text` counts in any of the columns: `+web +server`
          finds a row with web in one and server in the other. `_score` is the sum of boost times BM25 over the columns.
        - `offset`: number of best rows to skip.
        """
        named = None if column is None else _sent("column", column)
        request: dict[str, Any] = {"column": named, "text": text}
        request |= {"k": best(k, offset), "filter": sql(filter)}
        watch = watching("match", level, explain)
        rows: pa.Table = self._answer("match", level, **request, columns=listed(columns), explain=watch)
        return ended(watch, rows.slice(offset))

    @translate_errors
    def hybrid(
        self,
        vector: Any,
        text: str,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        vector_column: str | None = None,
        text_column: str | Sequence[str] | Mapping[str, float] | None = None,
        weights: tuple[float, float] = (1.0, 1.0),
        candidates: int | None = None,
        rerank: Rerank | None = None,
        metric: str | None = None,
        nprobes: int | None = None,
        refine_factor: int | None = None,
        distance_range: tuple[float | None, float | None] | None = None,
        offset: int = 0,
        level: str = "latest",
        explain: Explain | None = None,
    ) -> pa.Table:
        """Return the `k` rows that are best by `vector` and `text` combined and pass `filter`, best first.

        Uses reciprocal rank fusion of the `candidates` (None: 5 `k`, at least 50) nearest rows and best matches, which
        are of one moment. The last columns are `_distance` and `_score`, as of `search` and `match`, null if the row is
        no candidate by it, and `_relevance_score` (float32, descending).

        - `text`, `text_column`: as `text` and `column` of `match`.
        - `vector_column`: as `column` of `search`.
        - `weights`: of the two rankings.
        - `rerank`: a function that receives all candidates (an Arrow table as above, best first) and returns a
          relevance for each, which replaces the ranking; -inf leaves a row out. `memwal.lancedb_reranker` creates one
          from a reranker of LanceDB.
        - `metric` to `distance_range`: as for `search`, for the nearest rows.
        - `offset`: number of best rows to skip.
        """
        most, both = best(k, offset), checked_weights(weights)
        if rerank is not None and not callable(rerank):
            raise Invalid(f"rerank = {shown(rerank)}: give a function of the candidates, or memwal.lancedb_reranker(…)")
        depth = min(max(5 * most, 50), COUNT_MAX) if candidates is None else at_least_one(candidates, "candidates")
        how = _how(metric, nprobes, refine_factor, distance_range)
        request = _arms(vector, text, depth, filter, columns, vector_column, text_column) | how
        watch = watching("hybrid", level, explain)
        found: pa.Table = self._answer("candidates", level, **request, explain=watch)
        return ended(watch, fused(found, most, both, rerank).slice(offset))

    @translate_errors
    def candidates(
        self,
        vector: Any,
        text: str,
        n: int = 50,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        vector_column: str | None = None,
        text_column: str | Sequence[str] | Mapping[str, float] | None = None,
        metric: str | None = None,
        nprobes: int | None = None,
        refine_factor: int | None = None,
        distance_range: tuple[float | None, float | None] | None = None,
        level: str = "latest",
        explain: Explain | None = None,
    ) -> pa.Table:
        """Return the `n` nearest rows and the `n` best matches of one moment, without duplicates, in undefined order.

        These are the rows that `hybrid` ranks, for a custom ranking. Columns as in `hybrid`, without
        `_relevance_score`.
        """
        request = _arms(vector, text, n, filter, columns, vector_column, text_column)
        request |= _how(metric, nprobes, refine_factor, distance_range)
        watch = watching("candidates", level, explain)
        rows: pa.Table = self._answer("candidates", level, **request, explain=watch)
        return ended(watch, rows)

    @translate_errors
    def sql(
        self,
        query: str,
        *,
        tables: Mapping[str, Any] | None = None,
        parameters: Mapping[str, Any] | None = None,
        level: str = "latest",
    ) -> RowStream:
        """Return the rows of a DataFusion SELECT over this table, named `table` in the query.

        Example: "select section, count(*) from table group by 1". Streams as `scan` does; each memwal table of the
        query is read at one moment. Columns and conditions are pushed to the owners; joins, groups and order run in
        this process.

        - `tables`: further tables by name: memwal tables, Arrow tables, frames, streams.
        - `parameters`: values of `$name` in the query.

        Names are taken as written, otherwise in lower case; quote names with other characters in double quotes.
        """
        from memwal.ingest.engine.api.sql.query import Request, run  # DataFusion, which a daemon does not need to start

        given = mapping("tables", {} if tables is None else tables, "{'prices': prices}")
        # The engine behind a public table. The class is checked: a frame may have a column of that name.
        public = {name for name, rows in given.items() if hasattr(type(rows), "_engine")}
        others = {name: rows._engine if name in public else rows for name, rows in given.items()}  # noqa: SLF001
        values = mapping("parameters", {} if parameters is None else parameters, "{'price': 20}")
        asked = a_text("query", query, "select count(*) from table")
        return run(self, self._location, Request(asked, others, values, check_level(level), Reads, self._sql_memory))

    @translate_errors
    def changes(
        self,
        since: Any = None,
        *,
        until: Any = None,
        images: str = "after",
        columns: Sequence[str] | None = None,
        follow: bool = False,
    ) -> Changes:
        """Return the durable inserts, updates and deletes after `since`, as record batches with their positions.

        - `since`: a position from `Changes.position`, "latest", or "earliest" (None): the oldest that is kept, see
          `gc.changes_age_min`.
        - `until`: a position or "latest" (None): the end of the log now.
        - `follow`: wait for further changes instead of ending.
        - `images`: "after", or "both" to include rows before their change.
        - `columns`: None for all; the key is always included.

        Raises: Invalid; its `details["reason"]` is "changes_gone" if changes after `since` are no longer kept.
        """
        source = self._changes_source()
        return opened(source, since, until, images, listed(columns), follow=follow)

    @translate_errors
    def changes_position(self, at: str = "latest") -> dict[str, Any]:
        """Return the "latest" or "earliest" position of changes, a value for JSON.

        The latest costs a few requests per region; every later change is above it.
        """
        return position_of(self._changes_source(), at, "at").to_json()

    def _changes_source(self) -> ChangesSource:
        """Return the source of changes. Raises: Invalid."""
        raise Invalid("changes are read from a whole table, not from some of its regions")


def _sent(name: str, columns: Any) -> str | dict[str, float]:
    """Return the columns of a match for sending: one column without a boost as its name. Raises: Invalid."""
    boosts = text_columns(name, columns)
    return next(iter(boosts)) if list(boosts.values()) == [1.0] else boosts


def _arms(
    vector: Any, text: Any, n: int, filter: Any, columns: Any, vector_column: Any, text_column: Any
) -> dict[str, Any]:
    """Return the arguments of `candidates` in the form for sending. Raises: Invalid."""
    near = None if vector_column is None else a_text("vector_column", vector_column, "embedding")
    matching = None if text_column is None else _sent("text_column", text_column)
    request = {"vector": vector, "text": text, "n": n, "vector_column": near, "text_column": matching}
    return request | {"filter": sql(filter), "columns": listed(columns)}


def _how(metric: Any, nprobes: Any, refine_factor: Any, within: Any) -> dict[str, Any]:
    """Return the given search options, checked. Raises: Invalid."""
    counts = {"nprobes": nprobes, "refine_factor": refine_factor}
    how: dict[str, Any] = {name: at_least_one(value, name) for name, value in counts.items() if value is not None}
    if metric is not None:
        how["metric"] = a_text("metric", metric, "cosine")
    if within is not None:
        how["distance_range"] = distance_range(within)
    return how


def check_level(level: str) -> Level:
    """Return `level`. Raises: Invalid with the nearest name if no level has this name."""
    if not isinstance(level, str):
        raise Invalid(f"level = {shown(level)}: write one of {', '.join(LEVELS)}")
    for known in LEVELS:
        if level == known:
            return known
    raise Invalid(f"level {level[:60]!r} is unknown{suggestion(level, LEVELS)}")
