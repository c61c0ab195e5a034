"""A consistent prefix of a memtable, for readers and the flush."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.memtable.arrays import GrowableArray, Mask, Positions, Scores
from memwal.memtable.batch_store import Batches
from memwal.memtable.conversion import convert
from memwal.memtable.errors import InvalidRows
from memwal.memtable.filter.conditions import Condition, Narrowing, satisfied
from memwal.memtable.filter.predicate import evaluate, plan
from memwal.memtable.filter.scalar_index import ScalarIndex
from memwal.memtable.index_spec import nearest, vector_width
from memwal.memtable.key.hiding import HiddenRows
from memwal.memtable.key.index import KeyIndex, NoKeys, no_key
from memwal.memtable.schema import TOMBSTONE
from memwal.memtable.text.columns import ColumnsQuery, best_rows
from memwal.memtable.text.index import TextIndex
from memwal.memtable.text.query import TextQuery
from memwal.memtable.vector.column import nearest_exactly
from memwal.memtable.vector.index import VectorIndex, Way

# An index is used if it names less than this fraction of the rows: fetching one row costs as much as evaluating this
# many in place, or half as many for texts.
WORTH = 32
# Up to this many rows are all evaluated: fetching a few of them takes longer.
SCANNED = 4_096


@dataclass(frozen=True, eq=False)
class Indexes:
    """The structures of a memtable, shared by its snapshots; each documents its own thread safety."""

    keys: KeyIndex | NoKeys
    tombstones: GrowableArray
    """bool [rows]: True if the row deletes its key."""
    vectors: Mapping[str, VectorIndex] = field(default_factory=dict)
    texts: Mapping[str, TextIndex] = field(default_factory=dict)
    scalars: Mapping[str, ScalarIndex] = field(default_factory=dict)
    hidden: HiddenRows = field(default_factory=HiddenRows)


class Snapshot:
    """The first `n` rows of a memtable.

    Thread safety. Any thread, also while the memtable takes more rows.
    Invariants. Rows, masks, lookups and filters never change. A vector search may change from exact to approximate when
    the index is trained; text scores are fixed by the first match on a column (statistics over the rows put by then).
    Shapes. Masks: bool [n]. Row positions: int64. They are valid for this snapshot and every later one of the memtable.
    """

    def __init__(self, rows: Batches, key: tuple[str, ...], generation: int, indexes: Indexes) -> None:
        self.n = rows.rows
        self.generation = generation
        self.schema: pa.Schema = rows.schema
        self.key = key
        self._rows = rows
        self._indexes = indexes
        self._masks: dict[str, Mask] = {}
        self._searchers: dict[str, Any] = {}

    def newest(self) -> Mask:
        """Return the newest row of each key, tombstones included; every row in a table without a key. Read-only."""
        return self._kept("newest", lambda: self._indexes.keys.newest(self.n))

    def tombstone(self) -> Mask:
        """Return the rows that delete their key, superseded ones included. Read-only."""
        return self._kept("tombstone", lambda: self._indexes.tombstones.data[: self.n])

    def live(self) -> Mask:
        """Return the newest row of each key unless it is a tombstone. Read-only."""
        return self._kept("live", lambda: self.newest() & ~self.tombstone())

    def lookup(self, keys: pa.Table) -> Positions:
        """Return the position of the newest row (tombstones included) of each key, -1 for a key that is not in the
        snapshot.

        `keys` has exactly the key columns, in any order. Raises InvalidRows for other columns or types, for nulls, and
        if the table has no key.
        """
        if not self.key:
            raise no_key()
        if set(keys.column_names) != set(self.key) or keys.num_columns != len(self.key):
            raise InvalidRows(
                f"lookup takes exactly the key columns {', '.join(self.key)};"
                f" found {', '.join(keys.column_names) or 'none'}"
            )
        return self._indexes.keys.lookup([self._key_column(keys, name) for name in self.key], self.n)

    def uncovered(self, mask: Mask, newer: Sequence[Snapshot]) -> Mask:
        """Return the rows of `mask` whose key is in no snapshot of a `newer` memtable, tombstones included.

        Costs one lookup for each row of a newer memtable that no read has visited yet.
        """
        for other in newer:
            mask = mask & ~self._hidden_by(other)
        return mask

    def keys(self, mask: Mask) -> pa.Table:
        """Return the key columns of the rows of `mask`, in arrival order."""
        return self._rows.table().select(list(self.key)).filter(pa.array(mask))

    def batches(self, mask: Mask) -> Iterator[pa.RecordBatch]:
        """Yield the rows of `mask` in arrival order, all columns. Copies only batches that also hold other rows."""
        start = 0
        for batch in self._rows.batches:
            wanted = mask[start : start + batch.num_rows]
            start += batch.num_rows
            if wanted.all():
                yield batch
            elif wanted.any():
                yield batch.filter(pa.array(wanted))

    def take(self, positions: Positions, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows at `positions`, in that order.

        `columns`: names in the requested order, `_tombstone` allowed; None: all base columns in base order. Raises
        InvalidRows for an unknown column and IndexError for a position outside 0..n-1.
        """
        names = list(self.schema.names if columns is None else columns)
        if columns is None:
            names.remove(TOMBSTONE)
        else:
            for name in names:
                self._check_column(name)
        positions = np.asarray(positions, dtype=np.int64)
        if (positions.view(np.uint64) >= self.n).any():  # as unsigned, a negative position is very large
            raise IndexError(f"row positions must lie in 0..{self.n - 1}")
        return self._rows.take(positions, names)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one column of all rows. Raises InvalidRows for an unknown one."""
        self._check_column(name)
        return self._column(name)

    def where(self, predicate: str, mask: Mask) -> Mask:
        """Return the rows of `mask` that satisfy an SQL predicate, with Lance's meaning (see `filter.translation`).

        Rows outside the mask are not evaluated, so an old version cannot make a cast or a division fail. Raises
        InvalidRows naming the predicate.
        """
        planned = plan(predicate, self.schema, tuple(self._indexes.scalars))
        narrowed = self._narrowed(planned.narrowing, mask)
        rows = np.flatnonzero(mask) if narrowed is None else narrowed
        if planned.valid and not len(rows):
            return np.zeros(self.n, dtype=bool)
        if planned.valid and planned.exact is not None:
            return self._satisfied(planned.exact, mask, narrowed)
        wanted = planned.columns or self.key or (TOMBSTONE,)
        if narrowed is not None:
            table = self._rows.take(rows, wanted)
        else:
            table = self._rows.table().select(wanted)
            table = table if len(rows) == self.n else table.filter(pa.array(mask))
        found = evaluate(predicate, planned.sql, table, rows, self.n)
        planned.valid = True
        return found

    def _satisfied(self, conditions: Narrowing, mask: Mask, rows: Positions | None) -> Mask:
        """Return the rows of `mask` that satisfy exact conditions, from `rows` only if given."""
        if rows is None:
            return mask & satisfied(conditions, self._column)
        found = np.zeros(self.n, dtype=bool)
        taken = self._rows.take(rows, conditions.columns)
        found[rows[satisfied(conditions, taken.column)]] = True
        return found

    def narrowed(self, predicate: str, mask: Mask) -> tuple[int, list[str]]:
        """Return how many rows of `mask` `where` evaluates, and the columns whose indexes name them ([]: all rows)."""
        narrowing = plan(predicate, self.schema, tuple(self._indexes.scalars)).narrowing
        rows = self._narrowed(narrowing, mask)
        if narrowing is None or rows is None:
            return int(np.count_nonzero(mask)), []
        return len(rows), narrowing.columns

    def search(
        self,
        column: str,
        vector: npt.ArrayLike,
        k: int,
        mask: Mask,
        metric: str | None = None,
        low: float | None = None,
    ) -> tuple[Positions, Scores]:
        """Return the k rows of `mask` nearest to `vector`, ascending by exact distance (float32, by Lance's
        definition).

        `metric`: None for the index's. `low`: nearer rows are omitted. A column without an index, or with one of
        another metric, is searched row by row, and so is any with `low`. Fewer than k rows are returned only if the
        mask holds fewer vectors (null vectors, and zero vectors under cosine, do not count).
        Raises InvalidRows for a column that holds no vectors, for one without an index if no metric is given, and for a
        query of another width, with NaN or inf.
        """
        index = self._indexes.vectors.get(column)
        metric = index.metric if index is not None and metric is None else metric
        if index is not None and metric == index.metric and low is None:  # as in `way`
            return index.search(vector, k, mask)
        self._check_column(column)
        if metric is None or vector_width(self.schema.field(column).type) is None:
            raise self._not_indexed(column, "ivf_pq", "search")
        chunks = (batch.column(column) for batch in self._rows.batches)
        return nearest_exactly(chunks, column, vector, metric, k, mask, low)

    def way(
        self, column: str, k: int, mask: Mask, metric: str | None = None, low: float | None = None
    ) -> tuple[int, Way]:
        """Return how many rows `search` would compare exactly now, and the reason why not fewer."""
        index = self._indexes.vectors.get(column)
        if index is not None and metric in (None, index.metric) and low is None:
            return index.way(k, mask)
        return int(np.count_nonzero(mask)), "no index" if index is None else "metric" if low is None else "low"

    def match(self, column: str, text: str | TextQuery, k: int, mask: Mask) -> tuple[Positions, Scores]:
        """Return the k rows of `mask` that match `text` best, descending by BM25 score (float32).

        `text`: in the notation of `memtable.text.query`, or the parsed query. Raises InvalidRows if the column has no
        fts index, and for a text that cannot be answered.
        """
        index, searcher = self._searched(column)
        query = text if isinstance(text, TextQuery) else index.parser.parse(text)
        return index.match(searcher, query, k, mask)

    def match_columns(self, query: ColumnsQuery, k: int, mask: Mask) -> tuple[Positions, Scores]:
        """Return the k rows of `mask` that match a query of several columns best, descending by score (float32).

        Raises InvalidRows if one of the columns has no fts index.
        """
        return best_rows(query, {column: self._searched(column) for column in query.boosts}, k, mask)

    def _searched(self, column: str) -> tuple[TextIndex, Any]:
        """Return the text index of a column, and the searcher that all matches of this snapshot use."""
        index = self._indexes.texts.get(column)
        if index is None:
            raise self._not_indexed(column, "fts", "match")
        searcher = self._searchers.get(column)
        if searcher is None:
            searcher = self._searchers.setdefault(column, index.searcher())
        return index, searcher

    def _narrowed(self, narrowing: Narrowing | None, mask: Mask) -> Positions | None:
        """Return the rows of `mask` that may pass, ascending; None if no index names few enough to be worth using."""
        named = None if narrowing is None else self._named(narrowing, int(np.count_nonzero(mask)) // WORTH)
        if named is None or (len(named) and self.n <= SCANNED):
            return None
        rows = np.sort(named[mask[named]])
        return rows[np.diff(rows, prepend=-1) > 0]

    def _named(self, narrowing: Narrowing, limit: int) -> Positions | None:
        """Return every row that may pass, in any order, possibly repeated; None if there may be more than `limit`."""
        if isinstance(narrowing, Condition):
            index = self._indexes.scalars[narrowing.column]
            return index.candidates(narrowing.asked, partial(self._column, narrowing.column), self.n, limit)
        parts = [self._named(part, limit) for part in narrowing.parts]
        known = sorted((part for part in parts if part is not None), key=len)
        if narrowing.any_of:
            return np.concatenate(known) if len(known) == len(parts) else None
        for other in known[1:]:
            in_both = np.zeros(self.n, dtype=bool)
            in_both[other] = True
            known[0] = known[0][in_both[known[0]]]
        return known[0] if known else None

    def _key_column(self, keys: pa.Table, name: str) -> pa.ChunkedArray:
        column = convert(keys.column(name), self.schema.field(name))
        if column.null_count:
            row = int(np.flatnonzero(pc.is_null(column).to_numpy())[0])
            raise InvalidRows(f"key column {name!r} is null in row {row}: give it a value", column=name, row=row)
        return column

    def _hidden_by(self, newer: Snapshot) -> Mask:
        """Return the rows whose key is in a snapshot of a newer memtable."""

        def lookup(first: int, end: int) -> Positions:
            return self.lookup(newer._rows.between(first, end, self.key))

        return self._indexes.hidden.by(newer._indexes, self.n, newer.n, lookup)

    def _kept(self, name: str, make: Any) -> Mask:
        """Return a mask that is computed once; two threads may both compute it, with the same result."""
        mask = self._masks.get(name)
        if mask is None:
            mask = make()
            mask.flags.writeable = False
            self._masks[name] = mask
        return mask

    def _column(self, name: str) -> pa.ChunkedArray:
        return self._rows.table().column(name)

    def _check_column(self, name: str) -> None:
        if name not in self.schema.names:
            raise InvalidRows(
                f"column {name!r:.200} is not in the table{nearest(name, self.schema.names)}", column=name
            )

    def _not_indexed(self, column: str, kind: str, verb: str) -> InvalidRows:
        self._check_column(column)
        return InvalidRows(f"{verb} of column {column!r}: it has no {kind} index; add one to the table", column=column)
