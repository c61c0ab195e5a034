"""Dead letters into the table again: each that fits now once, however often the replay is begun.

In steps, for the letters of one region at a time:

 1. **Map** their raw bytes to rows, and check these as the sink does. Letters that still do not fit stay.
 2. **Reserve** a number for them, by a compare-and-swap in the metadata of the table of letters: the number and their
    ids. *Crash here: the next replay begins with step 3 for these ids.*
 3. **Put** their rows, tagged with the name of the table of letters and the number. All or none are applied, once.
    *Crash here: the next replay puts them again, and hears that they were applied before.*
 4. **Delete** the letters; reserve nothing. *Crash in between: the next replay finds that nothing is left to do.*

Two replays at once do the same steps for the same ids. Rows that the region refuses are put in halves, each with a
number of its own, until those at fault are alone.

A replayed row counts as put now: it replaces what its key got in the meantime.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from ingest.bad_rows import BadRow, unfit_of
from ingest.dead_letters import DeadLetters, Replay, quoted
from ingest.errors import Invalid
from ingest.receipts import Receipt
from ingest.spark_tasks import Target, conformed_to
from ingest.tokens import Token

AT_ONCE = 500
"""Letters that are mapped, checked and put together; as many ids are in the table's metadata at most."""
_ORDER = [(name, "ascending") for name in ("landed", "topic", "partition", "offset", "file", "block", "row", "id")]


class Puts(Protocol):
    """The table that letters are put into, open here or at its owner."""

    def put(self, rows: pa.Table, *, token: Token) -> Receipt:
        """As `Table.put`."""
        ...


@dataclass(frozen=True, slots=True)
class Mapped:
    """Rows of letters. `rows[n]` comes from letter number `of[n]`; letters without a row are in `failed`."""

    rows: pa.RecordBatch
    of: Sequence[int]
    failed: Mapping[int, BadRow]


Map = Callable[[pa.Table], Mapped]
"""From letters (`dead_letters.SCHEMA`, raw bytes and all) to rows with columns of the table: how a source is read."""


@dataclass
class Outcome:
    """What a replay came to: letters that are in the table now, and why the others are not."""

    replayed: int = 0
    stay: Counter[str] = field(default_factory=Counter)


class Replaying:
    """Replays letters of one table of dead letters. One thread. Errors: those of `Puts.put` and `DeadLetters`."""

    def __init__(self, letters: DeadLetters, target: Target, table: Puts, mapping: Map) -> None:
        self._letters, self._target, self._table, self._map = letters, target, table, mapping
        self._outcome = Outcome()

    def replay(self, condition: str | None, limit: int | None) -> Outcome:
        """Replay what an earlier replay did not finish, then the letters that `condition` (SQL) holds for."""
        self._letters.refresh()
        self._finish(self._letters.replay())
        names = [name for name, _ in _ORDER]
        chosen = self._letters.dataset.to_table(names, filter=condition).sort_by(_ORDER).slice(0, limit)
        ids = chosen["id"].to_pylist()
        for start in range(0, len(ids), AT_ONCE):
            self._some(ids[start : start + AT_ONCE])
        return self._outcome

    def _some(self, ids: Sequence[str]) -> None:
        found, rows = self._fitting(ids)
        if not rows.num_rows:
            return
        buckets = np.asarray(self._target.base.route(conformed_to(self._target, rows)))
        for bucket in np.unique(buckets):
            self._region([found[int(row)] for row in np.flatnonzero(buckets == bucket)])

    def _region(self, ids: Sequence[str]) -> None:
        """Steps 2 to 4 for letters that fit; halves what the region refuses."""
        self._letters.refresh()
        self._finish(self._letters.replay())
        reserved = self._letters.reserve(ids, self._letters.replay())
        if reserved is None:  # another replay is at work; what it takes is gone then
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
        """Steps 3 and 4 of what is reserved: by this replay, by one that was cut off, or by one that is under way
        elsewhere and does the same. Returns why the region refuses it; it is reserved no longer then.

        Looks at the letters once more: those that another replay put before they were reserved are gone.
        """
        if not reserved.ids:
            return None
        ids, rows = self._fitting(reserved.ids, tell=False)
        try:
            if rows.num_rows:
                self._put(reserved, ids, rows)
            refused = None
        except Invalid as error:
            refused = error
        self._letters.reserve((), reserved)
        return refused

    def _put(self, reserved: Replay, ids: Sequence[str], rows: pa.RecordBatch) -> None:
        token = Token(f"dlq-{self._letters.name}", reserved.sequence)
        receipt = self._table.put(pa.Table.from_batches([rows]), token=token)
        if not receipt.applied:  # before, then: all that was reserved, whatever of it still fits
            self._letters.refresh()
            if self._letters.replay() != reserved:
                return  # another replay has finished this one, and maybe the next; it knows what became of the letters
            ids = reserved.ids
        self._outcome.replayed += self._letters.delete(among(ids))

    def _fitting(self, ids: Sequence[str], *, tell: bool = True) -> tuple[list[str], pa.RecordBatch]:
        """Step 1: rows of those letters that fit, and their ids, in order. `tell`: count why the others do not."""
        letters = self._letters.dataset.to_table(filter=among(ids)).sort_by(_ORDER)
        mapped = self._map(letters)
        unfit = unfit_of(mapped.rows, lambda rows: conformed_to(self._target, rows))
        for why in (*mapped.failed.values(), *unfit.values()) if tell else ():
            self._outcome.stay[f"{why.stage}: {why.reason}"] += 1
        fitting = [row for row in range(mapped.rows.num_rows) if row not in unfit]
        names = letters["id"].to_pylist()
        return [names[mapped.of[row]] for row in fitting], mapped.rows.take(pa.array(fitting, pa.int64()))


def among(ids: Sequence[str]) -> str:
    """The condition (SQL) of letters with these ids."""
    return f"id IN ({', '.join(map(quoted, ids))})"


# ---- letters that are rows as JSON -----------------------------------------------------------------------------------


def rows_of_json(letters: pa.Table, schema: pa.Schema) -> Mapped:
    """Letters of file sources: `raw_value` is a JSON object, whose fields of other names are left out."""
    rows: list[dict[str, Any]] = []
    of: list[int] = []
    failed: dict[int, BadRow] = {}
    for number, raw in enumerate(letters["raw_value"].to_pylist()):
        found = _parsed(raw, schema)
        if isinstance(found, BadRow):
            failed[number] = found
        else:
            rows.append(found)
            of.append(number)
    nullable = pa.schema([each.with_nullable(True) for each in schema])
    return Mapped(pa.RecordBatch.from_pylist(rows, schema=nullable), of, failed)


def _parsed(raw: bytes | None, schema: pa.Schema) -> dict[str, Any] | BadRow:
    try:
        given = json.loads(raw or b"")
    except ValueError as error:
        return BadRow("parse", None, f"not JSON: {error}")
    if not isinstance(given, dict):
        return BadRow("parse", None, "not a JSON object")
    row: dict[str, Any] = {}
    for each in schema:
        try:
            row[each.name] = _read(given.get(each.name), each.type)
            pa.array([row[each.name]], each.type)
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            reason = f"column {each.name!r} cannot become {each.type} ({error})"
            return BadRow("parse", each.name, reason)
    return row


def _read(value: Any, kind: pa.DataType) -> Any:
    """A value as `bad_rows.as_json` writes it."""
    types = pa.types
    if isinstance(value, str) and (types.is_binary(kind) or types.is_large_binary(kind)):
        return base64.b64decode(value, validate=True)
    if isinstance(value, str) and types.is_timestamp(kind):
        return datetime.fromisoformat(value)
    if isinstance(value, str) and types.is_date(kind):
        return date.fromisoformat(value)
    if isinstance(value, dict | list) and (types.is_string(kind) or types.is_large_string(kind)):
        return json.dumps(value)  # as Spark reads it
    return value
