"""Read the changes of one region, from one position of its log to another.

A row of the log is whole, and the newest row of a key counts (`region.resolve`). The kind of its change therefore
depends only on the previous row of the same key: the previous one in the group, or else the stored one. The functions
that derive it are pure, over the arrays of a group of rows:

    row            before     change
    not a delete   none       insert
    not a delete   a row      update
    delete         a row      delete
    delete         none       none: the key was absent, nothing changed
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.shape import Shape
from memwal.ingest.engine.api.changes import CHANGE, POSITION, REGION, ROW
from memwal.ingest.engine.api.rows import KeyRuns, Mask, Places
from memwal.ingest.engine.changes.start import Gone, Start
from memwal.ingest.engine.read.base import BaseReads
from memwal.memtable import TOMBSTONE, MemTable
from memwal.wal import Corrupt, Entry, EntryCodec, ObjectStore, WalFormat, codec_for
from memwal.wal.codec.columns import EntryColumns
from memwal.wal.entry_reader import EntryReader
from memwal.wal.replay import BatchAssembler

NOWHERE = -1
"""In `befores`: the key has no row before this one."""
_INSERT, _UPDATE, _DELETE, _PREIMAGE, _POSTIMAGE = range(5)
_NAMES = pa.array(["insert", "update", "delete", "update_preimage", "update_postimage"])
Kinds = npt.NDArray[np.int8]


def befores(runs: KeyRuns, deletes: Mask, stored: Places) -> Places:
    """Return the row before each row: int64 [n], a row of the group, n + a stored row, or NOWHERE.

    `deletes`: bool [n]. `stored`: int64 [m], the live stored row of each key of `runs.first`, NOWHERE if it has none.
    """
    rows = len(runs.order)
    before = np.empty(rows, dtype=np.int64)
    before[1:] = runs.order[:-1]
    before[1:][deletes[runs.order[:-1]]] = NOWHERE
    before[runs.begins] = np.where(stored == NOWHERE, NOWHERE, stored + rows)
    found = np.empty(rows, dtype=np.int64)
    found[runs.order] = before
    return found


def after_images(before: Places, deletes: Mask) -> tuple[Places, Places, Kinds]:
    """Return the changes with after-images: for each its row, the row with its values, and its kind.

    `before`: int64 [n], of `befores`. Rows keep their order; a delete has the values of its own row: the key.
    """
    rows = np.flatnonzero(~deletes | (before != NOWHERE))
    kinds = np.where(deletes, _DELETE, np.where(before == NOWHERE, _INSERT, _UPDATE))[rows].astype(np.int8)
    return rows, rows, kinds


def both_images(before: Places, deletes: Mask) -> tuple[Places, Places, Kinds]:
    """As `after_images`, with before-images: an update has two rows, a delete has the values that it deletes."""
    rows, _, kinds = after_images(before, deletes)
    updates = kinds == _UPDATE
    repeated = np.repeat(np.arange(len(rows)), np.where(updates, 2, 1))
    second = np.zeros(len(repeated), dtype=np.bool_)
    second[1:] = repeated[1:] == repeated[:-1]
    row, kind = rows[repeated], kinds[repeated]
    is_before = (updates[repeated] & ~second) | (kind == _DELETE)
    kind[updates[repeated] & ~second] = _PREIMAGE
    kind[second] = _POSTIMAGE
    return row, np.where(is_before, before[row], row), kind


def change_schema(columns: pa.Schema) -> pa.Schema:
    """Return the schema of changes of a table whose columns are `columns`, without `_tombstone`."""
    head = [pa.field(CHANGE, pa.string()), pa.field(REGION, pa.string())]
    head += [pa.field(POSITION, pa.int64()), pa.field(ROW, pa.int64())]
    fields = (field.with_nullable(True).remove_metadata() for field in columns)
    return pa.schema([*head, *fields])


def change_table(
    schema: pa.Schema, values: pa.Table, region: str, positions: Places, numbers: Places, kinds: Kinds
) -> pa.Table:
    """Return changes as a table of `schema` (`change_schema`).

    `values`: the columns of the table. `positions`, `numbers`: int64 [n], by row. `kinds`: int8 [n].
    """
    head = [
        _NAMES.take(pa.array(kinds)),
        pa.repeat(pa.scalar(region, pa.string()), len(kinds)),
        pa.array(positions),
        pa.array(numbers),
    ]
    return pa.Table.from_arrays([*head, *(values.column(name) for name in schema.names[4:])], schema=schema)


ROWS_MAX = 65_536
BYTES_MAX = 32 << 20
"""A piece ends at the first batch of the log that reaches one of these limits."""
_AHEAD = 8
"""Entries that are read at a time if storage is remote."""
_OVERLAY_MAX = 128 << 20
"""Maximum bytes of keys, or of rows for both images; a larger region is read from a newer base version."""


@dataclass(frozen=True)
class Form:
    """The form of a table's changes.

    Thread safety. Immutable.
    """

    shape: Shape
    key: tuple[str, ...]
    columns: tuple[str, ...]
    """The columns of the changes, including the key, in the order of the table."""
    both: bool
    """Whether before-images are included."""
    wal_format: WalFormat

    @property
    def schema(self) -> pa.Schema:
        """Schema of the changes."""
        return change_schema(pa.schema([self.shape.rows.field(name) for name in self.columns]))

    @property
    def rows(self) -> pa.Schema:
        """The columns of the changes and `_tombstone`, as a row schema."""
        return self.of((*self.columns, TOMBSTONE))

    @property
    def stored(self) -> pa.Schema:
        """The columns needed of stored rows, as a row schema."""
        return self.of((*(self.columns if self.both else self.key), TOMBSTONE))

    @property
    def codec(self) -> EntryCodec:
        """Reads the columns of the changes."""
        return codec_for(self.wal_format, self.rows)

    def of(self, names: Sequence[str]) -> pa.Schema:
        """Return the row schema of these columns, with their field ids."""
        return pa.schema([self.shape.rows.field(name) for name in names])


class StoredRows:
    """The rows of one region as of a position of its log: a base version, and the log above it.

    Thread safety. One thread.
    """

    def __init__(self, form: Form, start: Start) -> None:
        self.base = start.base
        """The version of the base table below the log."""
        self._names = [name for name in form.stored.names if name != TOMBSTONE]
        self._columns = EntryColumns(form.stored)
        self._log = MemTable(self._columns.schema, form.key, (), 1)

    @property
    def is_large(self) -> bool:
        """Whether a newer base version should replace the part in memory."""
        return self._log.bytes > _OVERLAY_MAX

    def apply(self, rows: pa.Table) -> None:
        """Apply rows of the log: the columns of the changes and `_tombstone`."""
        self._log.apply(rows.select([*self._names, TOMBSTONE]).cast(self._columns.schema))

    def live(self, keys: pa.Table) -> tuple[Places, pa.Table]:
        """Return for each of `keys` (distinct) the number of its live row, NOWHERE if it has none, and these rows.

        Raises: errors of Lance and storage.
        """
        at = np.full(keys.num_rows, NOWHERE)
        log = self._log.snapshot()
        logged = log.lookup(keys) if log.n else np.full(keys.num_rows, NOWHERE)
        held = np.flatnonzero(logged >= 0)
        held = held[~log.tombstone()[logged[held]]] if len(held) else held
        at[held] = np.arange(len(held))
        parts = [log.take(logged[held], self._names)] if len(held) else []
        unknown = np.flatnonzero(logged < 0)
        if len(unknown):
            rows, where = self._committed(keys.take(pa.array(unknown)))
            at[unknown[where]] = len(held) + np.arange(rows.num_rows)
            parts.append(rows)
        schema = self._columns.schema.remove(self._columns.schema.get_field_index(TOMBSTONE))
        return at, pa.concat_tables([schema.empty_table(), *(part.cast(schema) for part in parts)])

    def _committed(self, keys: pa.Table) -> tuple[pa.Table, Places]:
        """Return the base rows whose key is among `keys`, and the number of the key of each."""
        base = self.base
        if base is None or not base.dataset.count_rows():
            return self._columns.no_rows.select(self._names), np.empty(0, np.int64)
        ids = self._columns.ids
        names = [name for name, number in base.shape.ids.items() if number in ids.values()] if ids else self._names
        names = [*dict.fromkeys([*base.key, *(name for name in names if name in base.schema.names)])]
        asked = keys.rename_columns(list(base.key)).cast(pa.schema([base.schema.field(name) for name in base.key]))
        rows, where = BaseReads(base).get(asked, names)
        return self._columns.conform(rows, base.shape.ids if ids else {}).select(self._names), where


class RegionChanges:
    """Read the changes of one region in order.

    Thread safety. One thread. After an error it cannot be used any more.
    """

    def __init__(self, store: ObjectStore, region: UUID, form: Form, start: Start, position: int) -> None:
        """Read the log up to `position`, the start of the wanted changes. Raises: Gone, wal errors."""
        self._region, self._form, self._key = region, form, list(form.key)
        codec = form.codec
        self._alone = EntryReader(store, region, codec, log_id=start.log_id)
        self._ahead = EntryReader(store, region, codec, _AHEAD, log_id=start.log_id) if store.remote else self._alone
        self._assembler = BatchAssembler()
        self.at = start.after
        """Every entry up to this position was read."""
        self._position = position
        self.stored = StoredRows(form, start) if form.key else None
        """None in a table without a key."""
        while self.at < position:
            self._take(position)

    def read(self, to: int) -> pa.Table:
        """Return the next changes, at most up to position `to`; an empty table if the entries read have none. Advances
        `at`.

        Raises: Gone if an entry was deleted; wal errors; errors of Lance.
        """
        visible = self._take(to)
        if not visible:
            return self._form.schema.empty_table()
        rows = pa.concat_tables([entry.rows for _, entry in visible])
        counts = [entry.rows.num_rows for _, entry in visible]
        positions = np.repeat([position for position, _ in visible], counts)
        begins = np.ones(len(positions), dtype=np.bool_)
        begins[1:] = positions[1:] != positions[:-1]
        place = np.arange(len(positions))
        numbers = place - np.maximum.accumulate(np.where(begins, place, 0))
        return self._changes(rows, positions, numbers)

    def _changes(self, rows: pa.Table, positions: Places, numbers: Places) -> pa.Table:
        form = self._form
        deletes = rows.column(TOMBSTONE).to_numpy()
        stored_rows = None
        if self.stored is None:
            before = np.full(rows.num_rows, NOWHERE)
        else:
            keys = rows.select(self._key)
            runs = KeyRuns(keys)
            at, stored_rows = self.stored.live(keys.take(pa.array(runs.first)))
            before = befores(runs, deletes, at)
        row, source, kinds = (both_images if form.both else after_images)(before, deletes)
        values = rows.select(list(form.columns))
        if form.both and stored_rows is not None:
            values = pa.concat_tables([values, stored_rows.select(list(form.columns)).cast(values.schema)])
        values = values.take(pa.array(source))
        changes = change_table(form.schema, values, str(self._region), positions[row], numbers[row], kinds)
        self._keep(rows)
        return changes

    def _take(self, to: int) -> list[tuple[int, Entry]]:
        """Read entries up to `to`, or until they fill a piece; return those that became visible.

        Each is returned with the position at which it became visible. Entries at or below the first position only
        update the stored rows.
        """
        reader = self._ahead if to - self.at > 1 else self._alone
        visible: list[tuple[int, Entry]] = []
        rows = size = 0
        with closing(reader.each(range(self.at + 1, to + 1))) as entries:
            for position, entry in enumerate(entries, self.at + 1):
                if entry is None:
                    raise Gone(self._region, position - 1)
                closed = self._closed_by(entry)
                self.at = position
                for each in closed:
                    if position <= self._position:
                        self._keep(each.rows)
                    else:
                        visible.append((position, each))
                    rows, size = rows + each.rows.num_rows, size + each.rows.nbytes
                if rows >= ROWS_MAX or size >= BYTES_MAX or position == self._position:
                    break
        return visible

    def _closed_by(self, entry: Entry) -> list[Entry]:
        try:
            return [each for each in self._assembler.add(entry) if each.rows.num_rows]
        except Corrupt as error:
            raise Corrupt(f"{self._alone.key(entry.position)}: {error}") from error

    def _keep(self, rows: pa.Table) -> None:
        if self.stored is not None:
            self.stored.apply(rows)
