"""The lifetime of rows: a table's time column, the age at which its rows expire, and a test for expired rows.

A row expires when the value of its time column is less than now - ttl. A null never expires. A timestamp without a zone
counts as UTC, a date as its midnight UTC. The value is compared as an integer in the column's own unit:

    expired  <=>  value < least,  least = ceil((now - ttl) / unit)

The comparison is therefore exact to the microsecond in every unit, and no literal is rounded. In filters for Lance the
bound is written as `arrow_cast(integer, type)`: a `timestamp '…'` literal is read as local time if the column has a
zone other than UTC (pylance 14.0.2), and a cast of the column would prevent the use of a B-tree on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.memtable import TOMBSTONE, InvalidRows
from memwal.memtable.index_spec import nearest

MIN_SECONDS, MAX_SECONDS = 1.0, 36_500 * 86_400.0
"""Limits of a ttl. A hundred years before now is a valid timestamp in every unit."""
EXPIRED = "memwal: rows expired"
"""Commit message of the versions that delete expired rows."""
_MICROSECONDS_PER_DAY = 86_400_000_000
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_UNITS = {"s": "Second", "ms": "Millisecond", "us": "Microsecond", "ns": "Nanosecond"}


class Ttl(NamedTuple):
    """When the rows of a table expire."""

    column: str
    """The column with the time of a row."""
    seconds: float
    """The age at which a row expires."""


def check_ttl(schema: pa.Schema, ttl: Ttl) -> None:
    """Raise InvalidRows, with the reason, if rows with the columns `schema` cannot expire by `ttl`."""
    name, times = ttl.column, [field.name for field in schema if is_time(field.type)]
    fit = f"; columns that fit: {', '.join(times)}" if times else "; the table has no such column"
    if name not in schema.names:
        raise InvalidRows(f"ttl_column {name!r} is not in the table{nearest(name, schema.names)}", column=name)
    if not is_time(kind := schema.field(name).type):
        raise InvalidRows(
            f"ttl_column {name!r} has the type {kind}: name a column of timestamps or dates{fit}", column=name
        )
    if not MIN_SECONDS <= ttl.seconds <= MAX_SECONDS:
        raise InvalidRows(f"ttl is {ttl.seconds:g} s: give at least 1 s, and at most 36500 d")


def is_time(kind: pa.DataType) -> bool:
    """Return whether rows can expire by a column of this type."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


@dataclass(frozen=True, slots=True)
class Expiry:
    """The rows of a table that have expired at one moment.

    Thread safety. Immutable.
    """

    column: str
    kind: pa.DataType
    least: int
    """Values below this have expired; in the unit of `kind`."""

    @staticmethod
    def at(ttl: Ttl, kind: pa.DataType, now: float) -> Expiry:
        """Return what has expired at `now`, Unix time in seconds, by a column of the type `kind`."""
        microseconds = round(now * 1e6) - round(ttl.seconds * 1e6)
        if pa.types.is_date32(kind):
            return Expiry(ttl.column, kind, -(-microseconds // _MICROSECONDS_PER_DAY))
        per_second = 10**3 if pa.types.is_date(kind) else _PER_SECOND[kind.unit]
        return Expiry(ttl.column, kind, -(-microseconds * per_second // 10**6))  # rounded up

    @property
    def live(self) -> str:
        """A filter for Lance that passes the rows that have not expired."""
        return f"`{self.column}` IS NULL OR `{self.column}` >= {self._bound}"

    @property
    def expired(self) -> str:
        """A filter for Lance that passes the rows that have expired."""
        return f"`{self.column}` < {self._bound}"

    def of_live(self, filter: str | None) -> str:
        """Return a filter for rows that pass `filter` (None: all) and have not expired."""
        return self.live if filter is None else f"({self.live}) AND ({filter}\n)"  # `filter` may end with a comment

    def mask(self, values: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
        """Return which of `values`, of the time column, have expired: bool [n]."""
        numbers = integers(values if values.type == self.kind else values.cast(self.kind))
        below: npt.NDArray[np.bool_] = pc.fill_null(pc.less(numbers, self.least), False).to_numpy()
        return below

    def as_deleted(self, rows: pa.Table, kept: list[str]) -> pa.Table:
        """Return `rows` with expired rows changed to deletions: `_tombstone` true, columns not in `kept` null.

        Requires: `rows` has the time column and `_tombstone`.
        """
        expired = self.mask(rows.column(self.column))
        if not expired.any():
            return rows
        places = pa.array(np.arange(rows.num_rows), mask=expired)
        columns = {name: rows.column(name) for name in rows.column_names}
        columns |= {name: column.take(places) for name, column in columns.items() if name not in kept}
        columns[TOMBSTONE] = pa.chunked_array([rows.column(TOMBSTONE).to_numpy() | expired])
        return pa.table(columns)

    @property
    def _bound(self) -> str:
        kind = self.kind
        if pa.types.is_date(kind):
            return f"arrow_cast({self.least}, '{'Date32' if pa.types.is_date32(kind) else 'Date64'}')"
        zone = "None" if kind.tz is None else f'Some("{kind.tz}")'
        return f"arrow_cast({self.least}, 'Timestamp({_UNITS[kind.unit]}, {zone})')"


def integers(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values of a time column as integers in its unit."""
    return values.cast(pa.int32() if pa.types.is_date32(values.type) else pa.int64())
