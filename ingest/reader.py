"""Reads over all levels: the newest version of each row, then the filter, then the limit or the best k.

In order, for every read:

1. The caller captures the levels above the base (`RegionView`), newest first.
2. Only then is the latest base version opened. A level whose generation the base has committed meanwhile is
skipped: the base holds its rows. Opened the other way round, rows committed in between would be in neither.
3. Levels are read and merged by the rules of `ingest.moment`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flush import BaseTable
from ingest.base_reads import DISTANCE, SCORE, BaseReads
from ingest.errors import Invalid
from ingest.keys import normalise_keys
from ingest.levels import OverTaken, RegionView, Stack
from ingest.moment import Moment, Ranking
from ingest.predicates import unknown_column
from ingest.read_request import checked_columns, checked_k, checked_limit, checked_text, checked_vector, indexed
from ingest.sst_cache import CACHE_BYTES, SstCache
from ingest.sst_loader import load_sst
from ingest.top_k import concatenate, in_order, merge
from memtable import Snapshot
from memtable.text_query import TextParser
from wal import Corrupt, ObjectStore, SsTable

_FILTERS_REMEMBERED = 1000
_NONE = np.empty(0, np.int64)


class Reader:
    """Newest-version reads of one table.

    Thread safety. Every method from any thread. Invariants. Reads nothing but what the views and the latest
    base version name; writes nothing. Results are tables of base columns, key columns not null and all others
    nullable. Errors. ingest.errors.Invalid for what the request got wrong; precise errors of the packages
    otherwise.
    """

    def __init__(self, base: BaseTable, store: ObjectStore, *, cache_bytes: int = CACHE_BYTES) -> None:
        """`base`: any version of the table; its schema, key and indexes hold for all. `cache_bytes`: of
        loaded SSTs.
        """
        self._store, self._cache = store, SstCache(cache_bytes)
        self._lock = threading.Lock()
        self._base = base
        self._indexes = base.indexes
        self._parsers = {spec.column: TextParser(spec) for spec in base.indexes if spec.kind == "fts"}
        self._key = list(base.key)
        self._schema = pa.schema([pa.field(f.name, f.type, f.name not in self._key) for f in base.schema])
        self._planned: set[str] = set()

    def base(self) -> BaseTable:
        """The latest version of the base table."""
        # Storage is asked outside the lock, so that no reader waits for another's round trip.
        latest = self._base.latest()
        with self._lock:
            if latest.version > self._base.version:
                self._base = latest
            return self._base

    def get(self, views: Sequence[RegionView], keys: Any, columns: Sequence[str] | None = None) -> pa.Table:
        """The live rows of `keys`, in the order in which these are first named; what is not there is left
        out.

        `keys`: whatever `ingest.keys.normalise_keys` takes.
        """
        out = checked_columns(columns, self._schema)
        asked = _distinct(normalise_keys(keys, self._schema, self._key))
        found = list(self._moment(views).rows_of(asked, out))
        rows = concatenate([rows for rows, _ in found], self._projected(out))
        return in_order(rows, np.concatenate([at for _, at in found] or [_NONE]))

    def scan(
        self,
        views: Sequence[RegionView],
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Rows whose newest version passes `filter` (SQL), at most `limit`, fresh ones first."""
        out, left = checked_columns(columns, self._schema), checked_limit(limit)
        moment = self._moment(views)
        self._check_filter(moment, filter)
        parts: list[pa.Table] = []
        for rows in moment.visible_rows(out, filter, left):
            parts.append(rows if left is None else rows.slice(0, left))
            left = None if left is None else left - parts[-1].num_rows
            if left == 0:
                break
        return concatenate(parts, self._projected(out))

    def count(self, views: Sequence[RegionView], filter: str | None = None) -> int:
        """Number of rows whose newest version passes `filter`.

        Lance counts the base; of its rows only those whose key a newer level holds are looked at one by one.
        """
        moment = self._moment(views)
        self._check_filter(moment, filter)
        above = moment.keys_above()
        hidden = 0 if above is None else moment.base.held(above, filter)
        return moment.count_above(filter) + moment.base.count(filter) - hidden

    def search(
        self,
        views: Sequence[RegionView],
        column: str,
        vector: Any,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """The `k` rows nearest to `vector` among those that pass `filter`, with `_distance` (float32,
        ascending).

        Distances are exact and in Lance's convention: squared for l2, 1 - cosine, 1 - dot product. `k` rows
        are returned whenever that many live rows with a vector pass. `vector`: numbers, as many as the column
        is wide.
        """
        out, most = checked_columns(columns, self._schema), checked_k(k)
        spec = indexed(column, "ivf_pq", "search", self._schema, self._indexes)
        query = checked_vector(vector, column, self._schema.field(column).type)
        metric = str(spec.parameters.get("metric", "l2"))
        moment = self._moment(views, column)
        self._check_filter(moment, filter)
        ranking = Ranking(
            lambda level, n, mask: level.search(column, query, n, mask),
            lambda base, n, names: base.search(column, query, metric, n, filter, names),
            DISTANCE,
        )
        best = moment.best(most, filter, out, ranking)
        return merge(best, most, ascending=True, name=DISTANCE, schema=self._projected(out))

    def match(
        self,
        views: Sequence[RegionView],
        column: str,
        text: str,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """The `k` rows that match `text` best and pass `filter`, with `_score` (float32, descending).

        `text`: `web server` any word; `+web -server` with, without; `"web server"` a phrase; `serv*` a prefix
        (`memtable.text_query`). Scores are BM25 with the statistics of the level a row lies in, as in Lance's own
        reads over several levels.
        """
        out, most = checked_columns(columns, self._schema), checked_k(k)
        indexed(column, "fts", "match", self._schema, self._indexes)
        query = checked_text(text, self._parsers[column])
        moment = self._moment(views, column)
        self._check_filter(moment, filter)
        ranking = Ranking(
            lambda level, n, mask: level.match(column, query, n, mask),
            lambda base, n, names: base.match(column, query, n, filter, names),
            SCORE,
        )
        best = moment.best(most, filter, out, ranking)
        return merge(best, most, ascending=False, name=SCORE, schema=self._projected(out))

    def ask_storage(self) -> None:
        """Raise what storage itself has to say, if anything: Lance calls it invalid data when storage fails a read."""
        self._store.children("")

    # ---- levels
    # --------------------------------------------------------------------------------------------------

    def _moment(self, views: Sequence[RegionView], *ranked: str) -> Moment:
        """The levels of `views` over the latest base; `ranked`: columns that are searched or matched."""
        base = self.base()
        stacks = tuple(self._stack(view, base, frozenset(ranked)) for view in views)
        return Moment(BaseReads(base), stacks, self._key)

    def _stack(self, view: RegionView, base: BaseTable, ranked: frozenset[str]) -> Stack:
        committed = base.committed.get(view.region, 0)
        if view.unflushed is not None and committed >= view.unflushed:
            raise OverTaken
        levels = [level for level in view.memtables if level.generation > committed]
        ssts = (sst for sst in reversed(view.ssts) if sst.generation > committed)
        levels.extend(self._loaded(base, view.region, sst, ranked) for sst in ssts)
        return Stack(levels, keyed=bool(self._key))

    def _loaded(self, base: BaseTable, region: UUID, sst: SsTable, ranked: frozenset[str]) -> Snapshot:
        load = partial(load_sst, base, self._store, region, sst)
        try:
            # The path alone is unique among the regions only by its random token; the region's id makes it certain.
            return self._cache.get(f"{region}/{sst.path}", ranked, load)
        except (Corrupt, OSError):
            # A read that is slower than the collector's grace: committed and deleted since the base was opened.
            if self.base().committed.get(region, 0) >= sst.generation:
                raise OverTaken from None
            raise

    # ---- requests
    # ------------------------------------------------------------------------------------------------

    def _check_filter(self, moment: Moment, filter: str | None) -> None:
        """Have Lance plan `filter`, once per text: it is the authority for every level. Raises: Invalid."""
        if filter is None or filter in self._planned:
            return
        if not isinstance(filter, str):
            raise Invalid(f'filter {filter!r} is a {type(filter).__name__}; give a SQL predicate such as "price < 20"')
        try:
            moment.base.check(filter)
        except (ValueError, OSError) as error:
            reason = unknown_column(filter, self._schema.names) or _first_line(error)
            raise Invalid(f"filter {filter!r}: {reason}") from None
        with self._lock:
            if len(self._planned) >= _FILTERS_REMEMBERED:
                self._planned.clear()
            self._planned.add(filter)

    def _projected(self, columns: Sequence[str]) -> pa.Schema:
        return pa.schema([self._schema.field(name) for name in columns])


def _distinct(keys: pa.Table) -> pa.Table:
    """Each key once, in order of first appearance."""
    if keys.num_rows < 2:
        return keys
    if keys.num_columns == 1:
        return pa.table([pc.unique(keys.column(0))], names=keys.column_names)
    # Groups come in no order that Arrow promises, so the first row of each is kept and sorted.
    numbered = keys.append_column("_at", pa.array(np.arange(keys.num_rows)))
    first = numbered.group_by(keys.column_names).aggregate([("_at", "min")]).column("_at_min")
    return keys.take(pa.array(np.sort(first.to_numpy())))


def _first_line(error: BaseException) -> str:
    """Lance's message without the source location it appends."""
    return str(error).splitlines()[0].split(", /")[0].removeprefix("Invalid user input: ")
