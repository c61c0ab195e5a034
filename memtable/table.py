"""The memtable: the rows of one generation that are not in an SST yet, queryable as soon as they are put.

apply() is atomic and its rows become visible at once. Its steps:

 1. Check the rows completely; nothing has changed so far.
 2. Pass the rows to the structures that are addressed by row position. No snapshot reads them beyond its own rows. They
    only record the rows: index_step() indexes them, and a read indexes the rest.
 3. Publish the prefix by one assignment: later snapshots include the rows.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from memwal.memtable.arrays import GrowableArray
from memwal.memtable.batch_store import BatchStore
from memwal.memtable.errors import InvalidRows, MemTableFailed, MemTableFrozen
from memwal.memtable.filter.scalar_index import ScalarIndex
from memwal.memtable.index_spec import IndexSpec, check_indexes, is_key_type, vector_width
from memwal.memtable.key.index import KeyIndex, NoKeys
from memwal.memtable.schema import TOMBSTONE
from memwal.memtable.snapshot import Indexes, Snapshot
from memwal.memtable.text.index import TextIndex
from memwal.memtable.vector.column import VectorBatch, read_vectors, usable_vectors
from memwal.memtable.vector.index import VectorIndex
from memwal.memtable.vector.quantiser import VectorModel


@dataclass(frozen=True)
class Checked:
    """Rows that passed every check, in the form that each structure takes; `size`: their bytes.

    Thread safety. Immutable. Valid for any memtable of the same schema, key and indexes.
    """

    rows: pa.Table
    vectors: dict[str, VectorBatch]
    size: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.rows.num_rows)


class MemTable:
    """Rows, key index and secondary indexes of one generation.

    Thread safety. apply() and freeze() from one thread; everything else from any. Taking a snapshot holds no lock.
    Durability. None: pure memory, no I/O, no clock, no randomness but faiss' seeded training.
    Invariants. (1) A row never moves or changes. (2) A snapshot holds whole batches only. (3) Rows refused by apply()
    leave no trace.
    """

    def __init__(
        self,
        schema: pa.Schema,
        key: Sequence[str],
        indexes: Sequence[IndexSpec],
        generation: int,
        *,
        models: Mapping[str, VectorModel] | None = None,
    ) -> None:
        """Create an empty memtable for rows of the row schema `schema` (schema.row_schema).

        `key`: () if the table has none. `models`: by column, the models of the base table's vector indexes; without one
        an index trains itself. Raises InvalidRows if the key, an index or a model does not fit the schema.
        """
        _check_key(schema, key)
        check_indexes(schema, indexes)
        self.schema = schema
        self.key = tuple(key)
        self.specs = tuple(indexes)
        self.generation = generation
        self.batches = 0
        self._store = BatchStore(schema)
        self._indexes = _indexes(schema, self.key, self.specs, models or {})
        self.frozen = False
        """Whether freeze() was called."""
        self._failed = False
        self._writing = threading.Lock()

    @property
    def rows(self) -> int:
        """Number of rows put, superseded ones and tombstones included."""
        return self._store.prefix.rows

    def check(self, rows: pa.Table, size: int | None = None) -> Checked:
        """Raise what apply(rows) would raise, and change nothing. apply() also takes the result. Any thread.

        `size`: bytes of the rows, if the caller knows them; for few rows counting takes as long as the rest.

        Call it before the rows are appended to the WAL: an entry whose rows cannot be applied could not be replayed
        either.
        """
        rows = self._conforming(rows)
        vectors = self._indexes.vectors.values()
        read = {v.column: read_vectors(rows.column(v.column), v.column, v.metric) for v in vectors}
        return Checked(rows, read, int(rows.nbytes) if size is None else size)

    def restore(self, rows: pa.Table) -> None:
        """Put rows that storage already holds: as apply(), but no vector is refused.

        A vector that an index cannot take was put before its column had that index, and acknowledged. It is omitted
        from the index, as in Lance's.
        """
        rows = self._conforming(rows)
        vectors = self._indexes.vectors.values()
        read = {v.column: usable_vectors(rows.column(v.column), v.metric) for v in vectors}
        self.apply(Checked(rows, read, int(rows.nbytes)))

    def apply(self, rows: pa.Table | Checked) -> None:
        """Put rows of the row schema, checked before or not; every snapshot taken after the return includes them all.

        A later row replaces an earlier one of the same key, within the batch too; without a key no row replaces
        another. Raises InvalidRows (column, row) for another schema, a null key or an unusable vector, with nothing
        changed, and MemTableFrozen after freeze(). Any other error (of memory, of an index library) leaves the rows
        invisible and the memtable failed: every later apply() raises MemTableFailed, since its parts may be
        inconsistent.
        """
        with self._writing:
            if self.frozen:
                raise MemTableFrozen(self.generation)
            if self._failed:
                raise MemTableFailed(self.generation)
            checked = rows if isinstance(rows, Checked) else self.check(rows)
            if checked.num_rows:
                self._put(checked)

    def index_step(self) -> bool:
        """Move one bounded block of the waiting rows into each index except the B-trees. Return False when none waits.

        Any thread, also after freeze(), concurrently with apply() and reads; concurrent calls wait for each other.
        Reads find waiting rows too, at the cost of visiting each, or, for keys, of indexing them first.
        """
        held = self._indexes
        steps = [held.keys.step()]
        steps += [vector.index_step() for vector in held.vectors.values()]
        steps += [text.index_step() for text in held.texts.values()]
        return any(steps)

    def freeze(self) -> None:
        """Accept no more rows. Reads continue; memory that only index writers need is freed."""
        with self._writing:
            self.frozen = True
            for text in self._indexes.texts.values():
                text.close_writer()

    def snapshot(self) -> Snapshot:
        """Return a fixed view of all rows put so far. O(1), never waits for the writer."""
        return Snapshot(self._store.prefix, self.key, self.generation, self._indexes)

    @property
    def bytes(self) -> int:
        """Bytes held by rows and indexes: the sum of usage()."""
        return sum(self.usage().values())

    def usage(self) -> dict[str, int]:
        """Return the bytes by part: rows, key, vector, text, scalar. Exact for arrays, estimated for dicts and text."""
        held = self._indexes
        return {
            "rows": self._store.bytes,
            "key": held.keys.bytes + held.tombstones.bytes + held.hidden.bytes,
            "vector": sum(index.bytes for index in held.vectors.values()),
            "text": sum(index.bytes for index in held.texts.values()),
            "scalar": sum(index.bytes for index in held.scalars.values()),
        }

    def _conforming(self, rows: pa.Table) -> pa.Table:
        """Check the schema and the columns that are never null; return the rows with the memtable's own schema."""
        same = rows.schema.equals(self.schema, check_metadata=True)
        if not same and not rows.schema.equals(self.schema, check_metadata=False):
            raise InvalidRows(_schema_difference(rows.schema, self.schema))
        for name in (*self.key, TOMBSTONE):
            if (column := rows.column(name)).null_count:
                row = int(column.is_null().to_pylist().index(True))
                raise InvalidRows(f"column {name!r} is null in row {row}: give it a value", column=name, row=row)
        # One schema for all batches, metadata too.
        return rows if same else pa.Table.from_arrays(rows.columns, schema=self.schema)

    def _put(self, checked: Checked) -> None:
        rows, held, first = checked.rows, self._indexes, self.rows
        self._failed = True  # until every step is done
        prefix = self._store.append(rows, checked.size)
        for name, text in held.texts.items():
            text.add(rows.column(name), first)
        for name, vector in held.vectors.items():
            vector.add(checked.vectors[name])
        held.tombstones.extend(rows.column(TOMBSTONE).to_numpy())
        held.keys.add(rows)
        self._store.publish(prefix)
        self.batches += 1
        self._failed = False


def _indexes(
    schema: pa.Schema, key: tuple[str, ...], specs: Sequence[IndexSpec], models: Mapping[str, VectorModel]
) -> Indexes:
    def vector(spec: IndexSpec) -> VectorIndex:
        return VectorIndex(spec, vector_width(schema.field(spec.column).type) or 0, models.get(spec.column))

    btrees = [spec.column for spec in specs if spec.kind == "btree"]
    return Indexes(
        KeyIndex(schema, key) if key else NoKeys(),
        GrowableArray(np.bool_),
        {spec.column: vector(spec) for spec in specs if spec.kind == "ivf_pq"},
        {spec.column: TextIndex(spec) for spec in specs if spec.kind == "fts"},
        {name: ScalarIndex(schema.field(name).type) for name in dict.fromkeys((*key, *btrees))},
    )


def _check_key(schema: pa.Schema, key: Sequence[str]) -> None:
    if TOMBSTONE not in schema.names:
        raise InvalidRows(f"the schema has no column {TOMBSTONE!r}: build it with row_schema()", column=TOMBSTONE)
    for name in key:
        if name not in schema.names or not is_key_type(schema.field(name).type):
            raise InvalidRows(f"key column {name!r} is missing or of a type that cannot be a key", column=name)


def _schema_difference(found: pa.Schema, wanted: pa.Schema) -> str:
    """Describe the first difference between a batch's fields and the row schema."""
    for place, field in enumerate(wanted):
        if place >= len(found.names):
            return f"rows have no column {field.name!r}: bring them to the row schema with with_tombstone()"
        if not found.field(place).equals(field):
            return f"column {place} of the rows is {found.field(place)}, the row schema has {field}: convert it"
    return f"rows have {len(found.names)} columns, the row schema has {len(wanted.names)}: drop the others"
