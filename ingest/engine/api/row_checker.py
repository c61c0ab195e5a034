"""Check rows as their region will, before they get there: at the start of a put, in a client of several daemons, in
Spark's tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

from memwal.flush import WriteRules
from memwal.ingest.engine.api.encoding import check_encoding
from memwal.ingest.engine.api.missing import keeps
from memwal.ingest.engine.api.rows import Deletes
from memwal.memtable import Checked, MemTable, tombstones, with_tombstone


class RowChecker:
    """Convert rows to the form of a table's memtables, or reject rows that a memtable would reject.

    Thread safety. Any thread; immutable. Errors. InvalidRows or Invalid, with column and row.
    """

    def __init__(self, memtable: MemTable, required: Sequence[str], rules: WriteRules) -> None:
        """`memtable`: an empty one with all of the table's indexes.

        `required`: columns outside the key that may not be null.
        """
        self._memtable, self._required, self._rules = memtable, tuple(required), rules

    def whole(self, rows: pa.Table, deletes: Deletes = False) -> pa.Table:
        """Return `rows` with all columns of the table and `_tombstone`, set where `deletes` is a mask and true.

        Columns are checked, rows are not.
        """
        required = () if deletes is True else self._required_among(rows.column_names)
        among = None if isinstance(deletes, bool) else deletes
        return with_tombstone(rows, self._memtable.schema, required, among)

    def check(self, rows: pa.Table, deletes: Deletes = False) -> pa.Table:
        """Check every row; return `whole`."""
        check_encoding(rows)
        whole = self.whole(rows, deletes)
        self._memtable.check(whole)
        return whole

    def check_keys(self, keys: pa.Table) -> None:
        """Check the keys of a delete."""
        check_encoding(keys)
        self._memtable.check(tombstones(keys, self._memtable.schema))

    def checked(self, rows: pa.Table, size: int | None = None) -> Checked:
        """Check rows that already have all columns, except the encoding of texts. `size`: their bytes."""
        return self._memtable.check(rows, size)

    def _required_among(self, columns: Collection[str]) -> tuple[str, ...]:
        """Return the columns that a put with `columns` must have.

        These are all of `required`; if missing columns are kept, only those that the put has, and the version column.
        """
        if not keeps(self._memtable.key, self._rules.upsert):
            return self._required
        return tuple(name for name in self._required if name in columns or name == self._rules.version)
