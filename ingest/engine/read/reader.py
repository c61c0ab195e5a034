"""Read over all levels: the newest version of each row, then the filter, then the limit or the best k.

README.md of this package lists the steps of a read.

Until its end the stream of a scan holds the memtables and loaded SSTs of its view in memory, and the version of the
base table, whose files are opened one after another. Flushes, commits and collections change none of these; a writer
never waits for a reader. If maintenance removes a base version while it is read, the stream ends with Unavailable.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal.flush import BaseTable, NotALanceTable, NotInitialised
from memwal.flush.base.shape import Shape
from memwal.flush.base.ttl import Expiry
from memwal.ingest.caller import expect_waiting
from memwal.ingest.engine.api.arguments import at_least_one, checked_limit, text_columns
from memwal.ingest.engine.api.fusion import DISTANCE, SCORE
from memwal.ingest.engine.api.keys import normalise_keys
from memwal.ingest.engine.api.ordering import Order, Places, Scores, check_orderable
from memwal.ingest.engine.api.reads import COUNT, value_counts
from memwal.ingest.engine.api.results import RowStream, gathered
from memwal.ingest.engine.read.base import BaseReads, BucketReads
from memwal.ingest.engine.read.levels import BaseChanged, CaptureOvertaken, Mask, RegionView, Reshaped, Stack
from memwal.ingest.engine.read.merged import ROWS_PER_STEP, MergedView, Ranking
from memwal.ingest.engine.read.request import (
    KnownColumns,
    VectorQuery,
    all_texts,
    check_filter,
    checked_columns,
    distinct,
    expect_indexed,
    only_vectors,
    vector_query,
)
from memwal.ingest.engine.read.sst_cache import CACHE_BYTES, SstCache, SstId, load_sst
from memwal.ingest.engine.read.top_k import HiddenShare, concatenate, in_order, merge, merge_arms
from memwal.ingest.engine.read.traced import Trace, TracedView
from memwal.ingest.errors import Invalid, Unavailable
from memwal.memtable import TOMBSTONE, IndexSpec, InvalidRows, MemTable, Snapshot
from memwal.memtable.text.columns import ColumnsQuery
from memwal.memtable.vector.index import Way
from memwal.wal import Clock, Corrupt, ObjectStore, SsTable, SystemClock
from memwal.wal.panics import RustPanic, panics_as_errors

_LOG = logging.getLogger("memwal.read")
TEXT_SPARE = 16
"""Rows of a match that are fetched beyond the best, because short texts often tie. 16 rows with vectors take 0.3 ms, a
further fetch 1.2 ms.
"""
EXACT_ROWS_QUIET = 100_000
"""Maximum rows of the base table for a search without an index and without a warning: about 0.1 s on a local disk."""
_UNCOUNTED = 1 << 20
"""Rows that `facets` gathers before it counts them."""
_FILTERS_REMEMBERED = 1000
_NONE = np.empty(0, np.int64)


class Captured(NamedTuple):
    """The rows to read: the captured levels above the base table, and those base rows that are in some buckets."""

    views: Sequence[RegionView]
    buckets: Collection[int] | None = None
    """Buckets of the base rows, whose regions the views are of; None: all."""
    trace: Trace | None = None
    """Measures the read."""
    routing: int | None = None
    """Version of the routing of `buckets`."""


class _Moment(NamedTuple):
    """The captured levels of a read, the base version that it has opened afterwards, and its columns."""

    levels: Captured
    base: BaseTable
    known: KnownColumns


class Reader:
    """Read the newest versions of one table's rows.

    Thread safety. Every method from any thread. Invariants. Reads only objects that the views and the latest base
    version name; writes nothing. Results are tables of base columns, key columns not null and all others nullable.
    Errors. ingest.errors.Invalid for a wrong request; precise errors of the packages otherwise.
    """

    def __init__(
        self,
        base: BaseTable,
        store: ObjectStore,
        *,
        cache_bytes: int = CACHE_BYTES,
        clock: Clock | None = None,
    ) -> None:
        """`base`: any version of the table. `cache_bytes`: limit for loaded SSTs.

        `clock`: determines which rows have expired; None for the system's.
        """
        self._clock = clock or SystemClock()
        self._store, self.cache = store, SstCache(cache_bytes)
        self._lock = threading.Lock()
        self._base = base
        self._columns = KnownColumns.of(base)
        self._planned: set[tuple[int, str]] = set()
        self._nearness, self._share = Nearness(), HiddenShare()

    def base(self) -> BaseTable:
        """Open and return the latest version of the base table. (model: Commit!ReadBase, Tail!ReadBase)"""
        # Outside the lock, so that reads do not wait for each other's round trips.
        latest = self._base.latest()
        with self._lock:
            # Not the higher version of the two: the table's directory may have been restored from a backup.
            before, self._base = self._base, latest
        if latest is not before and latest.committed != before.committed:
            self.cache.drop(lambda sst: sst.generation <= latest.committed.get(sst.region, 0))
        return latest

    def at(self, version: int) -> Reader:
        """Return a reader of one version. Raises: Invalid if it is not kept."""
        try:
            base = BaseTable.open(self._base.uri, self._base.storage_options, version)
        except NotALanceTable:
            kept = "list_versions() has those that are"
            raise Invalid(f"version {version} of the table at {self._base.uri} is not kept; {kept}") from None
        except NotInitialised:
            older = f"version {version} of the table at {self._base.uri} is older than its set-up for ingestion"
            raise Invalid(f"{older}; read it with lance.dataset(uri, version={version})") from None
        return _FixedReader(base, self._store, clock=self._clock)

    def keep(self, region: UUID, sst: SsTable, memtable: MemTable, shape: Shape | None) -> None:
        """Answer reads of `sst` from the memtable of `shape` that was flushed as it; see `region.context.Keep`.

        The memtable has the rows of the SST and older versions of their keys, which no memtable read returns.
        """
        known = self._columns
        if shape == known.shape:
            self.cache.keep(SstId(known.version, region, sst.path, sst.generation), _searched(memtable.specs), memtable)

    @property
    def opened(self) -> BaseTable:
        """The base table version that was opened last. Makes no request to storage."""
        return self._base

    def expiry(self) -> Expiry | None:
        """Return the present expiry rule of the version that was opened last. Makes no request to storage."""
        base = self._base
        return None if base.ttl is None else base.expiry(self._clock.now())

    @property
    def gone(self) -> Mapping[str, str]:
        """Error texts for former columns of the table, by column."""
        return self._columns.gone

    def get(
        self,
        levels: Captured,
        keys: Any,
        columns: Sequence[str] | None = None,
        shape: Shape | None = None,
        *,
        tombstones: bool = False,
        above: int | None = None,
    ) -> pa.Table:
        """Return the live rows of `keys`, in the order of their first appearance; missing keys are left out.

        `keys`: any form that `api.keys.normalise_keys` accepts. `shape`: the shape that the base table must
        have. `tombstones`: also return tombstones, and `_tombstone` as the last column. `above`: return no base rows;
        the base table must have this version. Raises: Reshaped, BaseChanged.
        """
        moment = self._moment(levels)
        known = moment.known
        if shape is not None and known.shape != shape:
            raise Reshaped
        if above not in (None, moment.base.version):
            raise BaseChanged
        out = checked_columns(columns, known.schema, known.gone)
        asked = distinct(normalise_keys(keys, known.schema, known.key))
        view = self._merged_view(moment, None)
        parts = list(view.rows_of(asked, out, tombstones=tombstones, base=above is None))
        schema = known.projected(out)
        schema = schema.append(pa.field(TOMBSTONE, pa.bool_())) if tombstones else schema
        rows = concatenate([rows for rows, _ in parts], schema)
        return in_order(rows, np.concatenate([at for _, at in parts] or [_NONE]))

    def scan(
        self,
        levels: Captured,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        order_by: Order | None = None,
    ) -> RowStream:
        """Stream at most `limit` rows whose newest version passes `filter` (SQL), newest levels first.

        The first batch is read before the method returns, so that its errors are raised here. `order_by`: the order of
        the rows; `columns` must have its columns, and all rows are read before the method returns.
        """
        moment = self._moment(levels)
        known = moment.known
        schema, most = known.projected(checked_columns(columns, known.schema, known.gone)), checked_limit(limit)
        if order_by is not None:
            checked_columns([name for name, _ in order_by], known.schema, known.gone, "order_by")
            check_orderable(order_by, known.schema)
        merged_view = self._merged_view(moment, filter)
        if order_by is not None and most != 0:  # Lance fails to sort zero rows
            rows = merged_view.first_rows(schema.names, filter, most, order_by)
            return gathered(concatenate([rows], schema))
        batches = batches_of(merged_view, schema, filter, most)
        first = next(batches, None)
        return RowStream(schema, iter(()) if first is None else self._rest(first, batches, moment.base, filter))

    def count(self, levels: Captured, filter: str | None = None) -> int:
        """Return the number of rows whose newest version passes `filter`."""
        return self._merged_view(self._moment(levels), filter).count(filter)

    def facets(self, levels: Captured, column: str, filter: str | None = None) -> pa.Table:
        """Return the values of `column` in the rows that pass `filter`, and `_count`, in no order.

        Memory: three rows for each value, and `_UNCOUNTED` rows.
        """
        moment = self._moment(levels)
        known = moment.known
        schema = known.projected(checked_columns([column], known.schema, known.gone, "column", added=(COUNT,)))
        check_orderable([(column, True)], schema, "facets")
        merged_view = self._merged_view(moment, filter)
        counted, request = schema.append(pa.field(COUNT, pa.int64())), {"column": column}
        parts, waiting = [counted.empty_table()], 0
        for batch in batches_of(merged_view, schema, filter, None):
            ones = pa.array(np.ones(batch.num_rows, np.int64))
            parts.append(pa.Table.from_arrays([batch.column(0), ones], schema=counted))
            waiting += batch.num_rows
            if waiting > 2 * parts[0].num_rows + _UNCOUNTED:
                parts, waiting = [value_counts(parts, request)], 0
        return value_counts(parts, request)

    def search(
        self,
        levels: Captured,
        column: str | None,
        vector: Any,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        **how: Any,
    ) -> pa.Table:
        """Return the `k` rows nearest to `vector` that pass `filter`, with `_distance` (float32, ascending).

        Distances are exact and in Lance's convention: squared for l2, 1 - cosine, 1 - dot product. Fewer than `k` rows
        are returned only if fewer live rows with a vector pass. `column`: None if only one column holds vectors.
        `vector`: as many numbers as the column's width. `how`: see `read.request.vector_query`. Without an index every
        row is compared.
        """
        moment = self._moment(levels)
        known = moment.known
        out, most = checked_columns(columns, known.schema, known.gone, added=(DISTANCE,)), at_least_one(k)
        column = column or only_vectors("column", known)
        ranking = self._nearness.ranking("search", moment, column, vector, filter, how)
        (best,) = self._merged_view(moment, filter, column).best(most, filter, out, ranking)
        return merge(best, most, ascending=True, name=DISTANCE, schema=known.projected(out), keyed=bool(known.key))

    def match(
        self,
        levels: Captured,
        column: str | Sequence[str] | Mapping[str, float] | None,
        text: str,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Return the `k` rows that match `text` best and pass `filter`, with `_score` (float32, descending).

        `text`: in the notation of `memtable.text.query`. `column`: one, several, or several with a boost for each; None
        for all with an fts index. Scores are BM25 with the statistics of the row's level, times the boost, summed over
        the columns.
        """
        moment = self._moment(levels)
        known = moment.known
        out, most = checked_columns(columns, known.schema, known.gone, added=(SCORE,)), at_least_one(k)
        boosts = text_columns("column", all_texts("column", known) if column is None else column)
        ranking = relevance("match", known, boosts, text, filter)
        (best,) = self._merged_view(moment, filter, *boosts).best(most, filter, out, ranking)
        return merge(best, most, ascending=False, name=SCORE, schema=known.projected(out), keyed=bool(known.key))

    def candidates(
        self,
        levels: Captured,
        vector: Any,
        text: str,
        n: int,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        vector_column: str | None = None,
        text_column: str | Sequence[str] | Mapping[str, float] | None = None,
        **how: Any,
    ) -> pa.Table:
        """Return the `n` rows nearest to `vector` and the `n` that match `text` best, of one moment, without
        duplicates.

        The last two columns are `_distance` and `_score`, as in `search` and `match`, null if the row is not among the
        `n` best by it. `vector_column`: as `column` of `search`; `text_column`: as `column` of `match`. `how`: as for
        `search`.
        """
        moment = self._moment(levels)
        known = moment.known
        out = checked_columns(columns, known.schema, known.gone, added=(DISTANCE, SCORE))
        most = at_least_one(n, "n")
        near = vector_column or only_vectors("vector_column", known)
        matching = all_texts("text_column", known) if text_column is None else text_column
        boosts = text_columns("text_column", matching)
        by_vector = self._nearness.ranking("vector_column", moment, near, vector, filter, how)
        by_text = relevance("text_column", known, boosts, text, filter)
        merged_view = self._merged_view(moment, filter, near, *boosts)
        closest, fittest = merged_view.best(most, filter, out, by_vector, by_text)
        names, schema = (DISTANCE, SCORE), known.projected(out)
        return merge_arms(closest, fittest, most, names, schema, keyed=bool(known.key))

    def _rest(
        self, first: pa.RecordBatch, batches: Iterator[pa.RecordBatch], base: BaseTable, filter: str | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield `first` and the other batches of a scan of `base`, which can no longer be repeated after an error."""
        yield first
        del first
        try:
            with panics_as_errors:
                yield from batches
        except (pa.ArrowInvalid, OSError, RustPanic) as error:
            self.ask_storage()
            self.raise_filter_error(filter)
            if base.is_kept():
                raise
            where = f"{base.uri}: version {base.version}"
            raise Unavailable(f"{where} was removed while it was read; read again, and take the rows faster") from error

    def raise_filter_error(self, filter: str | None) -> None:
        """Raise InvalidRows if `filter` fails on a base row; Lance has no error type for that.

        Reads the columns of the filter up to the failing row. Returns if no row fails or the columns cannot be read.
        """
        if filter is not None:
            BaseReads(self._base).raise_filter_error(filter)

    def ask_storage(self) -> None:
        """Make one request to storage and raise its error, if any: Lance reports a failed read as invalid data."""
        self._store.children("")

    # ---- levels --------------------------------------------------------------------------------------------------

    def _moment(self, levels: Captured) -> _Moment:
        """Open the latest base version for a read. Raises: UnsupportedTable if it lost its key."""
        trace = levels.trace
        base = self.base() if trace is None else trace.measured("open", self.base)
        base.expect_readable()
        known = self._columns
        if base.shape == known.shape:
            return _Moment(levels, base, known)
        columns = known.after(base)
        with self._lock:
            # Otherwise another read saw a newer version; this read keeps its own.
            if columns.version > self._columns.version:
                self._columns = columns
        return _Moment(levels, base, columns)

    def _merged_view(self, moment: _Moment, filter: str | None, *ranked: str) -> MergedView:
        """Merge the captured levels with the base table. `ranked`: columns that are searched or matched.

        Raises: CaptureOvertaken if the base table has another routing than the views and buckets; Invalid for `filter`.
        """
        (views, buckets, trace, routing), base, known = moment
        if buckets is not None and routing not in (None, base.routing_version):
            raise CaptureOvertaken
        indexed = _searched(known.indexes) & frozenset(ranked)
        stacks = tuple(self._stack(view, moment, indexed) for view in views)
        base = base if trace is None else trace.begin(base, stacks)
        expiry = None if base.ttl is None else base.expiry(self._clock.now())
        below = BaseReads(base, expiry) if buckets is None else BucketReads(base, buckets, expiry)
        view = (below, stacks, known.key, self._share, expiry)
        merged_view = MergedView(*view) if trace is None else TracedView(*view, trace=trace, specs=known.indexes)
        if filter is not None and (known.version, filter) not in self._planned:
            # Planned once per text: it is valid at every level or at none.
            check_filter(filter, merged_view.base.check, known.schema.names, known.gone)
            with self._lock:
                if len(self._planned) >= _FILTERS_REMEMBERED:
                    self._planned.clear()
                self._planned.add((known.version, filter))
        return merged_view

    def _stack(self, view: RegionView, moment: _Moment, ranked: frozenset[str]) -> Stack:
        base, known = moment.base, moment.known
        if any(shape != known.shape for shape in view.shapes):
            raise Reshaped
        if view.routing not in (None, base.routing_version):
            raise CaptureOvertaken
        committed = base.committed.get(view.region, 0)
        if view.unflushed is not None and committed >= view.unflushed:
            raise CaptureOvertaken
        if any(level.generation <= committed for level in view.memtables):
            # Another owner may have cut the log into other generations: the base table may lack some of these rows.
            raise CaptureOvertaken
        levels = list(view.memtables)
        ssts = (sst for sst in reversed(view.ssts) if sst.generation > committed)
        levels.extend(self._loaded(moment, view.region, sst, ranked) for sst in ssts)
        return Stack(levels, keyed=bool(known.key))

    def _loaded(self, moment: _Moment, region: UUID, sst: SsTable, ranked: frozenset[str]) -> Snapshot:
        expect_waiting()
        trace, sst_id = moment.levels.trace, SstId(moment.known.version, region, sst.path, sst.generation)

        def load(columns: frozenset[str]) -> MemTable:
            read = partial(load_sst, moment.base, self._store, region, sst, columns)
            return read() if trace is None else trace.measured((region, sst.path), read)

        try:
            return self.cache.get(sst_id, ranked, load)
        except (Corrupt, OSError):
            # This read was slower than `gc.sst_age_min`: the SST was committed and deleted after the base table was
            # opened. (model: Commit!Answer)
            if self.base().committed.get(region, 0) >= sst.generation:
                raise CaptureOvertaken from None
            raise


class _FixedReader(Reader):
    """Reads one version, whatever is newer."""

    def base(self) -> BaseTable:
        return self._base


def batches_of(view: MergedView, schema: pa.Schema, filter: str | None, limit: int | None) -> Iterator[pa.RecordBatch]:
    """Yield at most `limit` visible rows of `view` that pass `filter`, newest levels first; no batch is empty.

    `schema`: of the wanted columns; batches have at most ROWS_PER_STEP rows.
    """
    if limit == 0:
        return
    for rows in view.visible_rows(schema.names, filter, limit):
        part = rows if limit is None else rows.slice(0, limit)
        limit = None if limit is None else limit - part.num_rows
        alike = pa.Table.from_arrays(part.select(schema.names).columns, schema=schema)
        yield from (batch for batch in alike.to_batches(ROWS_PER_STEP) if batch.num_rows)
        if limit == 0:
            return


def _searched(indexes: Sequence[IndexSpec]) -> frozenset[str]:
    """Return the columns with an index that a search or match uses."""
    return frozenset(spec.column for spec in indexes if spec.kind != "btree")


# ---- rankings: the best rows of each level ------------------------------------------------------------------------


class Nearness:
    """Create rankings by distance, and warn once per column about searches that no index serves.

    Thread safety. Any thread; two searches that begin at once may both warn.
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def ranking(
        self, what: str, moment: _Moment, column: str, vector: Any, filter: str | None, how: Mapping[str, Any]
    ) -> Ranking:
        """Rank by distance. `what`: the read or its argument, for messages. `how`: see `vector_query`.

        Raises: Invalid.
        """
        query = vector_query(what, column, vector, moment.known, **how)
        if query.exact:
            self._warn(moment.base, query)

        def above(level: Snapshot, n: int, mask: Mask) -> tuple[Places, Scores]:
            rows, scores = level.search(column, query.vector, n, mask, query.metric, query.low)
            near = query.within(scores)
            return rows[near], scores[near]

        def way(level: Snapshot, n: int, mask: Mask) -> tuple[int, Way]:
            return level.way(column, n, mask, query.metric, query.low)

        def below(rows: BaseReads, n: int, names: Sequence[str]) -> pa.Table:
            return rows.search(query, n, filter, names)

        exact: Way | None = None if query.low is None else "low"
        if not query.indexed:
            has_index = any((spec.column, spec.kind) == (column, "ivf_pq") for spec in moment.known.indexes)
            exact = "metric" if has_index else "no index"
        return Ranking(above, below, DISTANCE, (column,), way, exact)

    def _warn(self, base: BaseTable, query: VectorQuery) -> None:
        if query.column in self._warned or (rows := base.dataset.count_rows()) < EXACT_ROWS_QUIET:
            return
        self._warned.add(query.column)
        reason = f"it has no index of the metric {query.metric}; table.create_index or `memwal index add` makes one"
        if query.indexed:
            reason = "no index serves a lower limit of distance_range"
        where = (base.uri, query.column, rows, reason)
        _LOG.warning("%s: a search of column %s compares all %d rows of the base table: %s", *where)


def relevance(what: str, known: KnownColumns, boosts: Mapping[str, float], text: str, filter: str | None) -> Ranking:
    """Rank by BM25, summed over the columns. `what`: the read or its argument, for messages. Raises: Invalid."""
    for column in boosts:
        expect_indexed(column, "fts", what, known)
    try:
        query = ColumnsQuery.of(text, boosts, known.parsers)
    except InvalidRows as error:
        raise Invalid(str(error)) from None
    return Ranking(
        lambda level, n, mask: level.match_columns(query, n, mask),
        lambda base, n, names: base.match(query, n, filter, names),
        SCORE,
        tuple(boosts),
        lambda *_: (None, "text"),
        spare=TEXT_SPARE,
    )
