"""Check the rows of files as a put does, for a load: once before anything is written, and again at each further read.

Memory holds some thousand rows and, for a table with a key, the keys of all rows. The keys decide which of several rows
with one key counts, and show that the files are unchanged when they are read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush import BaseTable, RowsToLoad
from memwal.ingest.engine.api.missing import CallersColumns, Missing, missing_rule
from memwal.ingest.engine.api.rows import KeyRuns, RowChecker, key_text
from memwal.ingest.engine.loads.files import InputFile, changed
from memwal.ingest.engine.loads.formats import tables
from memwal.ingest.errors import Invalid
from memwal.memtable import InvalidRows, MemTable, row_schema
from memwal.wal.codec.lance_arrays import importable_table

Tell = Callable[[int, str], None]
"""Called with the number of rows read so far and the file."""
_ROW = re.compile(r"\brow (\d+)\b")


@dataclass(frozen=True)
class CheckedRows:
    """The result of checking files."""

    rows: RowsToLoad
    read: int
    """Number of rows in the files."""
    duplicates: int
    """Number of these rows that another row with the same key replaces."""


def check_rules(base: BaseTable) -> None:
    """Raise Invalid for a table whose write rules a load cannot follow, because a load replaces the rows of its keys.

    Also for a table with a column that memwal cannot hold.
    """
    if base.puts_rejected is not None:
        raise Invalid(f"{base.uri}: no rows are accepted: {base.puts_rejected}")
    chosen = {name: rule for name, rule in base.rules.chosen().items() if name != "on_duplicate"}
    if chosen:
        said = ", ".join(f"{name} = {rule!r}" for name, rule in chosen.items())
        raise Invalid(
            f"{base.uri}: a load replaces the rows of its keys, and the table has the rule {said}; put the rows "
            "instead, for example by `memwal run --once`"
        )


def check_files(
    base: BaseTable, files: Sequence[InputFile], tell: Tell = lambda *_: None, missing: Missing | None = None
) -> CheckedRows:
    """Read and check every row of `files` for the table `base`. `missing`: None or "null", as of a put.

    Raises: Invalid for the first wrong row, with file, row (from 1) and column.
    """
    reader, keys, numbers = FileReader(base, files, tell, missing), list[pa.Table](), list[int]()
    for rows in reader.read():
        numbers.append(rows.num_rows)
        if base.key:
            # Copied: a column of an Arrow file is a slice of the whole batch, and would keep the batch in memory.
            keys.append(rows.select(list(base.key)).take(pa.array(np.arange(rows.num_rows))))
    read = sum(numbers)
    if not base.key:
        return CheckedRows(RowsToLoad(base.schema, read, None, lambda: reader.again(read)), read, 0)
    schema = pa.schema([base.schema.field(name) for name in base.key])
    given = pa.concat_tables([schema.empty_table(), *keys])
    counts = _counting(given, base, reader)
    kept = given if counts.all() else given.filter(pa.array(counts))
    rows_to_load = RowsToLoad(base.schema, kept.num_rows, kept, lambda: reader.again(read, given, counts))
    return CheckedRows(rows_to_load, read, read - kept.num_rows)


def _counting(keys: pa.Table, base: BaseTable, reader: FileReader) -> npt.NDArray[np.bool_]:
    """Return which rows count, bool [rows]: the last or the first row of each key, by the table's rule.

    Raises: Invalid if the rule rejects equal keys.
    """
    counts = np.zeros(keys.num_rows, dtype=np.bool_)
    if not keys.num_rows:
        return counts
    rule, runs = base.rules.on_duplicate, KeyRuns(keys)
    first, last = runs.first, runs.order[np.append(runs.begins[1:], True)]
    counts[first if rule == "first" else last] = True
    if rule == "fail" and len(first) < keys.num_rows:
        pairs = np.flatnonzero(first != last)
        at = int(pairs[np.argmin(first[pairs])])
        here, there = reader.place(int(first[at])), reader.place(int(last[at]))
        raise Invalid(
            f"the key {key_text(keys, base.key, int(first[at]))} is in {here} and in {there}, which the table refuses "
            '(on_duplicate = "fail"); leave each key in the files once'
        )
    return counts


class FileReader:
    """Read and check the files from first to last, any number of times. Thread safety. One thread."""

    def __init__(
        self,
        base: BaseTable,
        files: Sequence[InputFile],
        tell: Tell = lambda *_: None,
        missing: Missing | None = None,
        *,
        closed: bool = True,
    ) -> None:
        """`closed`: reject columns that the table lacks, else leave them out."""
        memtable = MemTable(row_schema(base.schema, base.key), base.key, base.indexes, generation=0)
        self._checker = RowChecker(memtable, base.required, base.rules)
        self._schema, self._key, self._files, self._tell = base.schema, base.key, files, tell
        self._required, self._missing = base.required, missing_rule(missing, base.key, base.rules.upsert)
        self._columns = CallersColumns(base.schema.names)
        self._closed = closed
        self._ends: list[int] = []
        """Cumulative number of rows at the end of each file."""

    def read(self) -> Iterator[pa.Table]:
        """Yield all rows in base schema, checked."""
        self._ends, read = [], 0
        for file in self._files:
            before = read
            for rows in tables(file, self._schema, closed=self._closed):
                yield self._checked(file, rows, read - before)
                read += rows.num_rows
                self._tell(read, file.name)
            file.expect_unchanged()
            self._ends.append(read)

    def again(
        self, number: int, keys: pa.Table | None = None, counts: npt.NDArray[np.bool_] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows once more, only those in `counts`, in a form that Lance accepts.

        `number`, `keys`: of all rows at the first read. Raises: Invalid if they have changed.
        """
        read = 0
        for rows in self.read():
            part = slice(read, read + rows.num_rows)
            if keys is not None and not keys.slice(read, rows.num_rows).equals(rows.select(list(self._key))):
                raise changed(self._file(read))
            read += rows.num_rows
            kept = rows if counts is None or counts[part].all() else rows.filter(pa.array(counts[part]))
            yield from importable_table(kept).to_batches()
        if read != number:
            raise changed(self._files[-1].name)

    def place(self, row: int) -> str:
        """Return the location of a row, for a message: `row 3 of a.csv`."""
        at = next(at for at, end in enumerate(self._ends) if row < end)
        return f"row {row - (self._ends[at - 1] if at else 0) + 1:,} of {self._files[at].name}"

    def _file(self, row: int) -> str:
        at = sum(end <= row for end in self._ends)
        return self._files[min(at, len(self._files) - 1)].name

    def _checked(self, file: InputFile, rows: pa.Table, before: int) -> pa.Table:
        try:
            whole = self._checker.check(rows)
            of = (rows.column_names, self._schema, self._key, self._required, self._missing)
            self._columns.nulls(*of, remedy="give --missing null (set them to null)")
        except (InvalidRows, Invalid) as error:
            said = _ROW.sub(lambda found: f"row {int(found[1]) + before + 1:,}", str(error), count=1)
            raise Invalid(f"{file.name}: {said}") from error
        return whole.select(self._schema.names).cast(self._schema)
