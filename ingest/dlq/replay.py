"""Puts dead letters that fit now into the table, each once, however often the replay is begun.

In steps, for dead letters of one region at a time that are all puts or all deletes:

 1. **Map** their raw bytes to rows, and check these as the sink does. Dead letters that still do not fit remain.
 2. **Reserve** a number for them, by a compare-and-swap in the metadata of the table of dead letters: the number and
    their ids. *Crash here: the next replay begins with step 3 for these ids.*
 3. **Put** their rows, tagged with the name of the table of dead letters and the number. All or none are applied, once.
    *Crash here: the next replay puts them again, and the table answers that they were applied before.*
 4. **Delete** the dead letters, then clear the reservation. *Crash in between: the next replay finds nothing to do.*

Two replays at once do the same steps for the same ids. Rows that the region refuses are put in halves, each with its
own number, until the bad rows are alone.

Dead letters of an unfinished micro-batch remain: the micro-batch is replayed, and would take the row of every dead
letter that no longer exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from memwal.ingest.api.tokens import Applied, Receipt, Token
from memwal.ingest.client.target import Target
from memwal.ingest.dlq.bad_rows import conformed_to, unfit_of
from memwal.ingest.dlq.sources import Map
from memwal.ingest.dlq.table import DeadLetters, Replay, quoted
from memwal.ingest.errors import Invalid
from memwal.ingest.source.columns import DELETE, runs

AT_ONCE = 500
"""Dead letters that are mapped, checked and put together; the most ids in the table's metadata."""
_ORDER = [(name, "ascending") for name in ("landed", "topic", "partition", "offset", "file", "block", "row", "id")]

_UNFINISHED = "their micro-batch is not finished; let `memwal run` finish it, then replay them"


class Puts(Protocol):
    """The table that dead letters are put into, open here or at its owner."""

    def put(self, rows: pa.Table, *, token: Token) -> Receipt:
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
    """The outcome of a replay: the number of dead letters put into the table, and why the others were not."""

    replayed: int = 0
    stay: Counter[str] = field(default_factory=Counter)


class Replaying:
    """Replays the letters of one table of dead letters. One thread. Errors: those of `Puts.put` and `DeadLetters`."""

    def __init__(
        self,
        letters: DeadLetters,
        target: Target,
        table: Puts,
        mapping: Map,
        unfinished: Callable[[], tuple[str, int] | None] = lambda: None,
    ) -> None:
        """`unfinished`: returns query id and number of a micro-batch that will be replayed, or None; called after the
        dead letters were read."""
        self._letters, self._target, self._table, self._map = letters, target, table, mapping
        self._unfinished = unfinished
        self._outcome = Outcome()

    def replay(self, condition: str | None, limit: int | None) -> Outcome:
        """Replay what an earlier replay did not finish, then the dead letters that match `condition` (SQL)."""
        self._letters.refresh()
        self._finish(self._letters.replay())
        names = [*(name for name, _ in _ORDER), "query_id", "batch_id"]
        chosen = self._letters.dataset.to_table(names, filter=condition).sort_by(_ORDER).slice(0, limit)
        waits = self._unfinished()
        of = zip(chosen["query_id"].to_pylist(), chosen["batch_id"].to_pylist(), strict=True)
        ids = [id for id, written in zip(chosen["id"].to_pylist(), of, strict=True) if written != waits]
        if len(ids) < chosen.num_rows:
            self._outcome.stay[_UNFINISHED] += chosen.num_rows - len(ids)
        for start in range(0, len(ids), AT_ONCE):
            self._some(ids[start : start + AT_ONCE])
        return self._outcome

    def _some(self, ids: Sequence[str]) -> None:
        found, rows = self._fitting(ids)
        if not rows.num_rows:
            return
        buckets = np.asarray(self._target.base.route(conformed_to(self._target, rows)))
        deletes = _deletes(rows)
        for bucket in np.unique(buckets):
            here = np.flatnonzero(buckets == bucket)
            for start, end in runs(deletes[here].astype(np.int8)):
                self._region([found[int(row)] for row in here[start:end]])

    def _region(self, ids: Sequence[str]) -> None:
        """Do steps 2 to 4 for dead letters that fit; halve what the region refuses."""
        self._letters.refresh()
        self._finish(self._letters.replay())
        reserved = self._letters.reserve(ids, self._letters.replay())
        if reserved is None:  # another replay came first; what it takes is gone in the next round
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
        """Do steps 3 and 4 for what is reserved: by this replay, by an interrupted one, or by one that runs elsewhere
        and does the same. Return the error if the region refuses the rows; the reservation is cleared then.

        Reads the dead letters once more: those that another replay put before the reservation are gone.
        """
        if not reserved.ids:
            return None
        ids, rows = self._fitting(reserved.ids, tell=False)
        token = Token(f"dlq-{self._letters.name}", reserved.sequence)
        # The receipt alone is not enough: if the put was sent twice, it does not say which one was applied.
        newest = self._table.applied(token.producer).newest
        before = newest is not None and newest >= token.sequence
        try:
            if rows.num_rows:
                before |= not self._put(token, rows).applied
        except Invalid as error:
            self._letters.reserve((), reserved)
            return error
        if before:  # then all that was reserved was applied, even if some of it no longer fits
            self._letters.refresh()
            # If another replay has finished this reservation, it has handled its dead letters.
            ids = list(reserved.ids) if self._letters.replay() == reserved else []
        if ids:
            self._outcome.replayed += self._letters.delete(among(ids))
        self._letters.reserve((), reserved)
        return None

    def _put(self, token: Token, rows: pa.RecordBatch) -> Receipt:
        given = pa.Table.from_batches([rows]).select([name for name in rows.schema.names if name != DELETE])
        if _deletes(rows)[0]:
            return self._table.delete(given.select(list(self._target.base.key)), token=token)
        return self._table.put(given, token=token)

    def _fitting(self, ids: Sequence[str], *, tell: bool = True) -> tuple[list[str], pa.RecordBatch]:
        """Do step 1: return ids and rows of the dead letters that fit, in order. `tell`: count why others do not."""
        letters = self._letters.dataset.to_table(filter=among(ids)).sort_by(_ORDER)
        mapped = self._map(letters)
        rows = mapped.rows
        unfit, _ = unfit_of(rows, lambda part: conformed_to(self._target, part)) if rows.num_rows else ({}, None)
        for why in (*mapped.failed.values(), *unfit.values()) if tell else ():
            self._outcome.stay[f"{why.stage}: {why.reason}"] += 1
        fitting = [row for row in range(rows.num_rows) if row not in unfit]
        names = letters["id"].to_pylist()
        return [names[mapped.of[row]] for row in fitting], rows.take(pa.array(fitting, pa.int64()))


def _deletes(rows: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which rows delete their key; of rows that are put together all or none do."""
    if DELETE not in rows.schema.names:
        return np.zeros(rows.num_rows, dtype=bool)
    return np.asarray(rows[DELETE].fill_null(False).to_numpy(zero_copy_only=False), dtype=bool)


def among(ids: Sequence[str]) -> str:
    """Return the condition (SQL) for dead letters with these ids."""
    return f"id IN ({', '.join(map(quoted, ids))})"
