"""Put dead letters that fit now into the table, each exactly once, however often the replay is started.

Steps for dead letters of one region at a time that are all puts or all deletes:

1. **Map** their raw bytes to rows, and check these as the sink does. Dead letters that still do not fit remain.
2. **Reserve** a number for them with a compare-and-swap in the metadata of the table of dead letters: the number and
   their ids. The number is above all numbers that the table has applied, not only above the last noted one: Lance's
   restore of the table of dead letters restores an old note too. *Crash here: the next replay starts with step 3 for
   these ids.*
3. **Put** their rows, tagged with the name of the table of dead letters and the number. All or none are applied, once.
   *Crash here: the next replay puts them again, and the table answers that they were applied before.*
4. **Delete** the dead letters, then clear the reservation. *Crash in between: the next replay finds no dead letters
   with these ids.*

Two concurrent replays do the same steps for the same ids. Rows that the region refuses are put in halves, each with its
own number, until the bad rows are isolated.

Dead letters of an unfinished micro-batch remain: Spark replays the micro-batch, and would put the row of every dead
letter that no longer exists. If the query's checkpoint can be read, it shows whether the micro-batch is finished. For
any other query (another pipeline into the table, a program of its own, a checkpoint that only Spark can read), a
micro-batch is finished if the query has written dead letters of a later one, or if a region has applied a later one,
since Spark runs them in order. A micro-batch that every region has applied is not applied again, so its dead letters
may be replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from memwal.ingest.engine.api.missing import Missing
from memwal.ingest.engine.api.tokens import Applied, Receipt, Token
from memwal.ingest.errors import Invalid
from memwal.ingest.service.client.target import Target
from memwal.ingest.spark.dlq.bad_rows import conformed_to, unfit_of
from memwal.ingest.spark.dlq.sources import Map
from memwal.ingest.spark.dlq.table import DeadLetters, Replay, sql_text
from memwal.ingest.spark.source.columns import DELETE, runs

AT_ONCE = 500
"""Number of dead letters that are mapped, checked and put together; it bounds the ids in the table's metadata."""
_ORDER = [(name, "ascending") for name in ("landed", "topic", "partition", "offset", "file", "block", "row", "id")]

_UNFINISHED = "their micro-batch is not finished; let `memwal run` finish it, then replay them"
_UNKNOWN = (
    "their micro-batch may not be finished; set sink.checkpoint to the checkpoint of its query, wait for the query's "
    "next micro-batch, or give --force if the query has ended for good"
)
Noted = tuple[str, int, int]
"""What a checkpoint notes: query id, and the last micro-batches begun and done; -1 if there are none."""


class Puts(Protocol):
    """The table that dead letters are put into, opened in this process or through its owner."""

    def put(self, rows: pa.Table, *, missing: Missing | None, token: Token) -> Receipt:
        """As `Table.put`."""
        ...

    def delete(self, keys: pa.Table, *, token: Token) -> Receipt:
        """As `Table.delete`."""
        ...

    def applied(self, producer: str) -> Applied:
        """As `Table.applied`."""
        ...


@dataclass
class Outcome:
    """The outcome of a replay: the number of dead letters put into the table, and why the others remain."""

    replayed: int = 0
    stay: Counter[str] = field(default_factory=Counter)


class Replaying:
    """Replays dead letters of one table. One thread. Raises: errors of `Puts.put` and `DeadLetters`."""

    def __init__(
        self,
        letters: DeadLetters,
        target: Target,
        table: Puts,
        mapping: Map,
        noted: Callable[[], Noted | None] = lambda: None,
        *,
        missing: Missing | None = None,
        force: bool = False,
    ) -> None:
        """`missing`: as for a put. `noted`: returns the notes of one query's checkpoint, None if it cannot be read;
        called after the dead letters were read. `force`: treat micro-batches of other queries as finished.
        """
        self._letters, self._target, self._table, self._map = letters, target, table, mapping
        self._noted, self._missing, self._force = noted, missing, force
        self._outcome = Outcome()

    def replay(self, condition: str | None, limit: int | None) -> Outcome:
        """Finish an interrupted replay, then replay the dead letters that match `condition` (SQL)."""
        self._letters.refresh()
        self._finish(self._letters.replay())
        names = [*(name for name, _ in _ORDER), "query_id", "batch_id"]
        chosen = self._letters.dataset.to_table(names, filter=condition).sort_by(_ORDER).slice(0, limit)
        of = list(zip(chosen["query_id"].to_pylist(), chosen["batch_id"].to_pylist(), strict=True))
        waiting = self._waiting(set(of))
        self._outcome.stay.update(waiting[written] for written in of if written in waiting)
        ids = [id for id, written in zip(chosen["id"].to_pylist(), of, strict=True) if written not in waiting]
        for start in range(0, len(ids), AT_ONCE):
            found, rows = self._fitting(ids[start : start + AT_ONCE])
            if not rows.num_rows:
                continue
            buckets = np.asarray(self._target.base.route(conformed_to(self._target, rows)))
            deletes = _deletes(rows)
            for bucket in np.unique(buckets):
                here = np.flatnonzero(buckets == bucket)
                for first, end in runs(deletes[here].astype(np.int8)):
                    self._region([found[int(row)] for row in here[first:end]])
        return self._outcome

    def _waiting(self, written: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """Return the micro-batches, by query id and number, that Spark may still replay, with the reason."""
        found, known = {}, self._noted()
        for query, number in written:
            if known is not None and query == known[0]:
                if known[1] == number > known[2] and self._table.applied(query).everywhere != number:
                    found[query, number] = _UNFINISHED
                continue
            note = self._letters.note(query)
            if self._force or (note is not None and note.batch_id > number):
                continue
            everywhere, newest = self._table.applied(query)
            if (everywhere is None or everywhere < number) and (newest is None or newest <= number):
                found[query, number] = _UNKNOWN
        return found

    def _region(self, ids: Sequence[str]) -> None:
        """Do steps 2 to 4 for dead letters that fit. Halve those that the region refuses."""
        self._letters.refresh()
        self._finish(self._letters.replay())
        reserved = self._letters.reserve(ids, self._letters.replay(), self._applied() or 0)
        if reserved is None:  # another replay was faster; its dead letters are gone in the next round
            self._region(ids)
            return
        refused = self._finish(reserved)
        if refused is None:
            return
        if len(ids) == 1:
            self._outcome.stay[f"refused: {refused}"] += 1
            return
        middle = len(ids) // 2
        self._region(ids[:middle])
        self._region(ids[middle:])

    def _finish(self, reserved: Replay) -> Invalid | None:
        """Do steps 3 and 4 for a reservation of this replay, of an interrupted one, or of a concurrent one.

        Return the error if the region refuses the rows; the reservation is cleared then. Reads the dead letters once
        more: those that another replay put before the reservation are gone.
        """
        if not reserved.ids:
            return None
        ids, rows = self._fitting(reserved.ids, tell=False)
        token = Token(self._producer, reserved.sequence)
        # The receipt alone is insufficient: if the put was sent twice, it does not say which one was applied.
        newest = self._applied()
        if newest is not None and newest > token.sequence:
            # A later number is reserved only when this one is done. If it is still noted, the table of dead letters was
            # restored to an older version: whether these rows were put is unknown, so their dead letters stay, and get
            # another number.
            self._letters.refresh()
            if self._letters.replay() == reserved:
                self._letters.reserve((), reserved)
            return None
        before = newest == token.sequence
        try:
            if rows.num_rows:
                before |= not self._put(token, rows).applied
        except Invalid as error:
            self._letters.reserve((), reserved)
            return error
        if before:  # then all reserved dead letters were applied, even those that do not fit any more
            self._letters.refresh()
            # If another replay has finished this reservation, it has handled its dead letters.
            ids = list(reserved.ids) if self._letters.replay() == reserved else []
        if ids:
            self._outcome.replayed += self._letters.delete(with_ids(ids))
        self._letters.reserve((), reserved)
        return None

    @property
    def _producer(self) -> str:
        return f"dlq-{self._letters.name}"

    def _applied(self) -> int | None:
        return self._table.applied(self._producer).newest

    def _put(self, token: Token, rows: pa.RecordBatch) -> Receipt:
        given = pa.Table.from_batches([rows]).select([name for name in rows.schema.names if name != DELETE])
        if _deletes(rows)[0]:
            return self._table.delete(given.select(list(self._target.base.key)), token=token)
        return self._table.put(given, missing=self._missing, token=token)

    def _fitting(self, ids: Sequence[str], *, tell: bool = True) -> tuple[list[str], pa.RecordBatch]:
        """Do step 1: return ids and rows of the dead letters that fit, in order.

        `tell`: count why others do not fit.
        """
        letters = self._letters.dataset.to_table(filter=with_ids(ids)).sort_by(_ORDER)
        mapped = self._map(letters)
        rows = mapped.rows
        unfit, _ = unfit_of(rows, lambda part: conformed_to(self._target, part)) if rows.num_rows else ({}, None)
        for why in (*mapped.failed.values(), *unfit.values()) if tell else ():
            self._outcome.stay[f"{why.stage}: {why.reason}"] += 1
        fitting = [row for row in range(rows.num_rows) if row not in unfit]
        names = letters["id"].to_pylist()
        return [names[mapped.of[row]] for row in fitting], rows.take(pa.array(fitting, pa.int64()))


def _deletes(rows: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which rows delete their key. Rows that are put together either all delete or all put."""
    if DELETE not in rows.schema.names:
        return np.zeros(rows.num_rows, dtype=bool)
    return np.asarray(rows[DELETE].fill_null(False).to_numpy(zero_copy_only=False), dtype=bool)


def with_ids(ids: Sequence[str]) -> str:
    """Return the condition (SQL) for dead letters with these ids."""
    return f"id IN ({', '.join(map(sql_text, ids))})"
