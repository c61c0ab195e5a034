"""A consistent prefix of a memtable: what a reader, and the flush, sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memtable.arrays import Mask, Positions, Scores
from memtable.batch_store import Batches
from memtable.conversion import convert
from memtable.errors import InvalidRows
from memtable.filter_plan import plan
from memtable.index_spec import nearest
from memtable.key_index import KeyIndex, key_values
from memtable.narrowing import Condition
from memtable.predicate import evaluate
from memtable.scalar_index import Bounds, ScalarIndex
from memtable.schema import TOMBSTONE
from memtable.text_index import TextIndex
from memtable.vector_index import VectorIndex
from memtable.versions import Versions


@dataclass(frozen=True)
class Indexes:
    """The structures a memtable maintains, shared by its snapshots; each tells its own thread safety."""

    keys: KeyIndex
    versions: Versions
    vectors: Mapping[str, VectorIndex] = field(default_factory=dict)
    texts: Mapping[str, TextIndex] = field(default_factory=dict)
    scalars: Mapping[str, ScalarIndex] = field(default_factory=dict)


class Snapshot:
    """The first `n` rows of a memtable.

    Thread safety. Any thread, also while the memtable takes more rows.
    Invariants. Rows, masks, lookups and filters never change. A vector search may turn from exact to
    approximate when the index is trained; text scores are fixed by the first match on a column (statistics
    over the rows put by then).
    Shapes. Masks: bool [n]. Row positions: int64. They are valid for this snapshot and every later one of the
    memtable.
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
        """The newest row of each key, tombstones included. Read-only."""
        return self._kept("newest", lambda: self._indexes.versions.newest(self.n))

    def tombstone(self) -> Mask:
        """The rows that delete their key, superseded ones included. Read-only."""
        return self._kept("tombstone", lambda: self._column(TOMBSTONE).to_numpy())

    def live(self) -> Mask:
        """The newest row of each key where that is not a tombstone. Read-only."""
        return self._kept("live", lambda: self.newest() & ~self.tombstone())

    def lookup(self, keys: pa.Table) -> Positions:
        """Position of the newest row (tombstones included) of each key, -1 where the key is not here.

        `keys` has exactly the key columns, in any order. Raises InvalidRows for other columns, types and
        nulls.
        """
        if set(keys.column_names) != set(self.key) or keys.num_columns != len(self.key):
            raise InvalidRows(
                f"lookup takes exactly the key columns {', '.join(self.key)};"
                f" found {', '.join(keys.column_names) or 'none'}"
            )
        columns = [self._key_column(keys, name) for name in self.key]
        values = key_values(pa.table(columns, names=list(self.key)), self.key)
        return self._indexes.keys.lookup(values, len(values), self._indexes.versions, self.n)

    def keys(self, mask: Mask) -> pa.Table:
        """The key columns of the rows of `mask`, in arrival order."""
        return self._rows.table().select(list(self.key)).filter(pa.array(mask))

    def take(self, positions: Positions, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows at `positions`, in that order.

        `columns`: names in the order wanted, `_tombstone` among them if wished; None: all base columns in
        base order. Raises InvalidRows for an unknown column and IndexError for a position outside 0..n-1.
        """
        names = [f.name for f in self.schema if f.name != TOMBSTONE] if columns is None else list(columns)
        for name in names:
            self._check_column(name)
        positions = np.asarray(positions, dtype=np.int64)
        if ((positions < 0) | (positions >= self.n)).any():
            raise IndexError(f"row positions must lie in 0..{self.n - 1}")
        return self._rows.table().select(names).take(pa.array(positions))

    def where(self, predicate: str, mask: Mask) -> Mask:
        """The rows of `mask` that satisfy an SQL predicate, with Lance's meaning (see predicate).

        Rows outside the mask are not evaluated, so an old version cannot make a cast or a division fail.
        Raises InvalidRows naming the predicate.
        """
        planned = plan(predicate, self.schema, (*self.key, *self._indexes.scalars))
        rows = self._narrowed(planned.conditions, np.flatnonzero(mask))
        wanted = list(dict.fromkeys([*self.key, *planned.columns]))
        table = self._rows.table().select(wanted)
        if len(rows) < self.n:
            table = table.take(pa.array(rows))
        return evaluate(predicate, planned.sql, table, rows, self.n)

    def search(self, column: str, vector: npt.ArrayLike, k: int, mask: Mask) -> tuple[Positions, Scores]:
        """The k rows of `mask` nearest to `vector`, ascending by exact distance (float32, as Lance counts).

        Fewer than k only where the mask holds fewer vectors (null vectors, and zero ones under cosine, do not
        count). Raises InvalidRows where the column has no ivf_pq index, or for a query of another width, with
        NaN or inf.
        """
        index = self._indexes.vectors.get(column)
        if index is None:
            raise self._not_indexed(column, "ivf_pq", "search")
        return index.search(vector, k, mask)

    def match(self, column: str, text: str, k: int, mask: Mask) -> tuple[Positions, Scores]:
        """The k rows of `mask` that match any word of `text` best, descending by BM25 score (float32).

        Raises InvalidRows where the column has no fts index.
        """
        index = self._indexes.texts.get(column)
        if index is None:
            raise self._not_indexed(column, "fts", "match")
        searcher = self._searchers.get(column)
        if searcher is None:
            searcher = self._searchers.setdefault(column, index.searcher())
        return index.match(searcher, text, k, mask)

    def _narrowed(self, conditions: Sequence[Condition], rows: Positions) -> Positions:
        """`rows` without those an index proves not to satisfy one of the conditions."""
        for condition in conditions:
            possible = self._possible(condition, limit=len(rows) // 2)
            if possible is not None:
                named = np.zeros(self.n, dtype=bool)
                named[possible] = True
                rows = rows[named[rows]]
        return rows

    def _possible(self, condition: Condition, limit: int) -> Positions | None:
        """Every row which may satisfy the condition, in any order; None where that is not worth knowing."""
        if self.key == (condition.column,):
            return self._possible_keys(condition, limit)
        index = self._indexes.scalars.get(condition.column)
        if index is None:
            return None
        if condition.bounds is not None:
            return index.candidates(condition.bounds, self.n, limit)
        parts: list[Positions] = []
        for value in condition.values:
            part = index.candidates(Bounds(value, value), self.n, limit)
            if part is None:
                return None
            limit -= len(part)  # rows not sorted yet come with every value
            parts.append(part)
        return np.concatenate(parts)

    def _possible_keys(self, condition: Condition, limit: int) -> Positions | None:
        keys, versions = self._indexes.keys, self._indexes.versions
        if condition.bounds is None:
            newest = keys.lookup(condition.values, len(condition.values), versions, self.n)
        else:
            bounds = condition.bounds
            inclusive = (bounds.low_inclusive, bounds.high_inclusive)
            found = keys.in_range(bounds.low, bounds.high, inclusive, limit)
            if found is None:
                return None
            newest = np.asarray(found, dtype=np.int64)
        rows = versions.all_versions(newest)
        return rows[rows < self.n]

    def _key_column(self, keys: pa.Table, name: str) -> pa.ChunkedArray:
        column = convert(keys.column(name), self.schema.field(name))
        if column.null_count:
            row = int(np.flatnonzero(pc.is_null(column).to_numpy())[0])
            raise InvalidRows(f"key column {name!r} is null in row {row}: give it a value", column=name, row=row)
        return column

    def _kept(self, name: str, make: Any) -> Mask:
        """A mask computed once; two threads may both compute it, with the same result."""
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
            raise InvalidRows(f"column {name!r} is not in the table{nearest(name, self.schema.names)}", column=name)

    def _not_indexed(self, column: str, kind: str, verb: str) -> InvalidRows:
        self._check_column(column)
        return InvalidRows(f"{verb} of column {column!r}: it has no {kind} index; add one to the table", column=column)
