"""The task that validates the rows of a micro-batch and computes the region of each, before the shuffle.

If rows go to many tables, only the owners know their regions (`sink.send`). All rows of a table go to one task: in
place of a region they get a hash of the table's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.errors import Invalid
from memwal.ingest.service.client.target import Target, opened, reopened, template_target
from memwal.ingest.settings.values import check_table_name
from memwal.ingest.spark.dlq import bad_rows
from memwal.ingest.spark.source import columns as col
from memwal.ingest.spark.source.whole_input import with_counts
from memwal.ingest.spark.task import task_edge
from memwal.memtable import InvalidRows


@dataclass(frozen=True, slots=True)
class RouteTask:
    """Validates batches against the table and adds the columns `ADDED`.

    Good rows pass unchanged, then count rows follow (`source.whole_input`). If `letters` is not "fail", bad rows
    continue as dead letters, with the column `LETTER`. `refused`: rows that their region refused in an earlier attempt,
    or that are dead letters of this micro-batch; with "fail" they are left out.

    Raises (as TaskError): Invalid with the column, and the row and its file if there is one. With dead letters, only
    for columns that fit no row.
    """

    uri: str
    options: tuple[tuple[str, str], ...]
    routing: int = 1
    """Version of the routing that the driver uses. A worker that knows another version opens the table again."""
    letters: bad_rows.Mode = "fail"
    refused: Mapping[bad_rows.Place, bad_rows.BadRow] = field(default_factory=dict)
    template: str = ""
    """If rows go to many tables: see `template_target`. Then `uri` is not opened."""
    named_by: str = col.TABLE
    """Column with the name of a row's table, which becomes the column `TABLE`."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            yield from with_counts(self.routed(batches))

    def routed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """As a call, but raises errors unchanged and yields no count rows. Raises: Invalid."""
        numbers = RowNumbers()
        for batch in batches:
            yield self._routed(batch, numbers.of(batch))

    def warm_up(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Open the table in this worker; pass batches of any kind through."""
        with task_edge():
            self._target(())
            yield from batches

    def _routed(self, batch: pa.RecordBatch, numbers: npt.NDArray[np.int64]) -> pa.RecordBatch:
        target = self._target(col.of_table(batch.schema.names))
        refused = bad_rows.rows_at(self.refused, batch, numbers)
        if self.letters == "fail":
            if refused:  # dead letters of an earlier run
                others = np.setdiff1d(np.arange(batch.num_rows), list(refused))
                batch, numbers = batch.take(pa.array(others)), numbers[others]
            batch, bad = self._read(batch, target)
            for row, why in sorted(bad.items())[:1]:
                what = "; correct the file, or set dlq.mode" if col.FILE in batch.schema.names else ""
                raise Invalid(f"{why.reason}{_where(batch, numbers, row)}{what}", {"stage": why.stage})
            try:
                conformed = bad_rows.conformed_to(target, batch)
            except InvalidRows as error:
                raise Invalid(f"{error}{_where(batch, numbers, error.row)}", {"column": error.column}) from error
            return _with_places(batch, numbers, pa.array(self._buckets(target, conformed, batch), pa.int32()))
        batch, bad = self._read(batch, target)
        bad |= refused
        rest = np.setdiff1d(np.arange(batch.num_rows), list(bad)) if bad else None
        asked = batch if rest is None else batch.take(pa.array(rest))
        unfit, conformed = bad_rows.unfit_of(asked, lambda rows: bad_rows.conformed_to(target, rows))
        bad |= {row if rest is None else int(rest[row]): why for row, why in unfit.items()}
        good = np.ones(batch.num_rows, dtype=bool)
        good[list(bad)] = False
        if conformed is None:
            conformed = bad_rows.conformed_to(target, batch.filter(pa.array(good)))
        buckets = np.full(batch.num_rows, col.NO_REGION, dtype=np.int32)
        buckets[good] = self._buckets(target, conformed, batch)[good if self.template else slice(None)]
        return self._sorted_out(batch, numbers, bad, buckets)

    def _read(self, batch: pa.RecordBatch, target: Target) -> tuple[pa.RecordBatch, dict[int, bad_rows.BadRow]]:
        """Return the batch with the names of the tables, if rows go to many, and its bad rows."""
        batch, bad = bad_rows.read_again(batch, target.base.schema)
        if not self.template:
            return batch, bad
        if self.named_by != col.TABLE:
            batch = batch.append_column(col.TABLE, batch[self.named_by].cast(pa.string()))
        return batch, dict(sorted((_misnamed(batch[col.TABLE]) | bad).items()))

    def _buckets(self, target: Target, conformed: pa.Table, batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
        """Return the region of each row of `conformed`; with a template, the hash of each name in `batch`."""
        if not self.template:
            return target.base.route(conformed)
        names = batch[col.TABLE].fill_null("").dictionary_encode()
        hashes = [crc32(name.encode()) & _HASH for name in names.dictionary.to_pylist()]
        buckets: npt.NDArray[np.int32] = pa.array(hashes, pa.int32()).take(names.indices).to_numpy()
        return buckets

    def _target(self, columns: Sequence[str]) -> Target:
        if self.template:
            return template_target(self.template)
        target = opened(self.uri, self.options, self.routing)
        if not set(columns) <= set(target.base.schema.names):
            target = reopened(target, self.uri, self.options, self.routing)
        return target

    def _sorted_out(
        self,
        batch: pa.RecordBatch,
        numbers: npt.NDArray[np.int64],
        bad: Mapping[int, bad_rows.BadRow],
        buckets: npt.NDArray[np.int32],
    ) -> pa.RecordBatch:
        """Return all rows in order: good rows with their region, bad rows without values but with their dead letter."""
        letter = bad_rows.letter_column(batch, bad, col.of_table(batch.schema.names), raw=self.letters == "table")
        good = pa.array(buckets != col.NO_REGION)
        for name in col.of_table(batch.schema.names) if bad else ():
            at = batch.schema.get_field_index(name)
            kept = pc.if_else(good, batch[name], pa.scalar(None, batch[name].type))
            batch = batch.set_column(at, batch.schema.field(at).with_nullable(True), kept)
        return _with_places(batch, numbers, pa.array(buckets)).append_column(col.LETTER, letter)


_HASH = (1 << 31) - 1
"""Bits of the hash of a table's name: none is `NO_REGION`."""


def _misnamed(names: pa.Array) -> dict[int, bad_rows.BadRow]:
    """Return the rows whose table has no name, or a name that no table can have."""
    encoded = names.dictionary_encode(null_encoding="encode")
    wrong: dict[int, bad_rows.BadRow] = {}
    for number, name in enumerate(encoded.dictionary.to_pylist()):
        try:
            if name is None:
                raise ValueError("the name of its table is null, or cannot be evaluated")
            check_table_name(name)
        except ValueError as error:
            why = bad_rows.BadRow("route", None, str(error))
            wrong |= dict.fromkeys(np.flatnonzero(encoded.indices.to_numpy() == number).tolist(), why)
    return wrong


def _with_places(batch: pa.RecordBatch, numbers: npt.NDArray[np.int64], buckets: pa.Array) -> pa.RecordBatch:
    beside = [name for name in col.NOT_SHUFFLED if name in batch.schema.names]
    return batch.drop_columns(beside).append_column(col.ROW, pa.array(numbers)).append_column(col.BUCKET, buckets)


class RowNumbers:
    """Numbers the rows of a task within their part of a file (without files: within the task).

    A replay may divide the source into other tasks. A part of a file is always read in its own order, so these numbers
    do not depend on the division.
    """

    def __init__(self) -> None:
        self._part: tuple[object, object] | None = None
        self._next = 0

    def of(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows of the next batch: int64[rows]."""
        numbers = np.empty(batch.num_rows, dtype=np.int64)
        for start, end in self._parts(batch):
            part = (
                (batch[col.FILE][start].as_py(), batch[col.BLOCK][start].as_py())
                if col.FILE in batch.schema.names
                else (None, None)
            )
            first = self._next if part == self._part else 0
            numbers[start:end] = np.arange(first, first + end - start)
            self._part, self._next = part, first + end - start
        return numbers

    @staticmethod
    def _parts(batch: pa.RecordBatch) -> Sequence[tuple[int, int]]:
        if not batch.num_rows:
            return ()
        if col.FILE not in batch.schema.names:
            return ((0, batch.num_rows),)
        files = batch[col.FILE].dictionary_encode().indices.to_numpy()
        return col.runs(files, batch[col.BLOCK].to_numpy())


def _where(batch: pa.RecordBatch, numbers: npt.NDArray[np.int64], row: int | None) -> str:
    """Return the place of a refused row for the end of its message: its number in the file, not in the batch."""
    if row is None:
        return ""
    if col.TOPIC in batch.schema.names and batch[col.TOPIC][row].is_valid:
        topic, partition, offset = bad_rows.place_of(batch, row, 0)
        return f" (offset {offset} of partition {partition} of topic {topic})"
    if col.FILE not in batch.schema.names:
        of = f" of Spark partition {batch[col.BLOCK][row].as_py()}" if col.BLOCK in batch.schema.names else ""
        return f" (row {int(numbers[row])}{of}, counted from 0)" if of else ""
    name = PurePosixPath(str(batch[col.FILE][row].as_py())).name
    return f" (row {int(numbers[row])} of {name}, counted from 0)"
