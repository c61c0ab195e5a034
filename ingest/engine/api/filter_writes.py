"""Delete or update by filter: find the keys of passing rows; regions write each key whose newest row still passes.

`engine/region/README.md` has the steps with their crash points. They are the same in a process that owns the regions
and in a client of daemons; `FilterWrites` contains the differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from memwal.ingest.engine.api.arguments import mapping, seconds, sql, text, yes_or_no
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.engine.api.rows import as_table
from memwal.ingest.engine.api.tokens import Applied, Receipt, RegionCounts, Token, TokenLike, check_rises
from memwal.ingest.errors import Invalid, MemWalError, Unavailable, UnknownOutcome
from memwal.ingest.suggest import suggestion
from memwal.memtable import InvalidRows
from memwal.memtable.filter.translation import translate
from memwal.wal import Clock

PIECE = 16_384
"""Maximum keys sent at a time. A tombstone has a null in every column, which takes as much memory as a value in
fixed-size types: 25 MB for this number of vectors of 384 numbers.
"""

SCANS = 50
"""Maximum scans of one delete, so that it ends even if rows begin to pass as fast as it deletes. A new scan follows a
commit, so this takes 25 minutes with the default `commit.interval`; the pieces of the last scan only take longer.
"""


UPDATED = 1_024
"""Maximum keys of a piece of an update: the region holds their whole rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """New values of columns, for all rows of an update.

    `values`: one row. `expressions`: SQL over the columns of the row before the update, by column.
    """

    values: pa.Table
    expressions: Mapping[str, str]

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any] | None,
        expressions: Mapping[str, str] | None,
        schema: pa.Schema,
        key: Sequence[str],
    ) -> Update:
        """Check the arguments of `update`. Raises: Invalid for a column that the table lacks, or of the key; for a
        value that does not fit; for both or no values for a column; and for SQL that is not allowed.
        """
        given = mapping("values", {} if values is None else values, "{'price': 20}")
        computed = mapping("values_sql", {} if expressions is None else expressions, "{'price': 'price * 2'}")
        expressions = {name: text(f"values_sql[{name!r}]", sql, "price * 2") for name, sql in computed.items()}
        known = pa.schema([schema.field(name) for name in given if name in schema.names])
        update = cls(as_table([given], known), expressions)
        update.check(schema, key)
        return update

    def check(self, schema: pa.Schema, key: Sequence[str]) -> None:
        """Raise Invalid as `of`."""
        given = self.values.column_names
        if not given and not self.expressions:
            raise Invalid("update(): give values={'price': 20} or values_sql={'price': 'price * 2'}")
        for name in (*given, *self.expressions):
            if name not in schema.names:
                raise Invalid(f"update(): column {name!r} is unknown{suggestion(name, schema.names)}")
            if name in key:
                raise Invalid(
                    f"update(): column {name!r} belongs to the key; put rows with the new key, delete the old"
                )
            if name in given and name in self.expressions:
                raise Invalid(f"update(): column {name!r} is in values and in values_sql; give one of them")
        for name, expression in self.expressions.items():
            try:
                translate(expression, schema)
            except InvalidRows as error:
                raise Invalid(f"update(): column {name!r}: {error}") from None

    def beside(self, keys: pa.Table) -> pa.Table:
        """Return `keys` with the new values as further columns. A client sends an update in this form."""
        every = pa.array(np.zeros(keys.num_rows, dtype=np.int64))
        for name in self.values.column_names:
            keys = keys.append_column(name, self.values.column(name).take(every))
        return keys

    @classmethod
    def sent(cls, rows: pa.Table, expressions: Any, schema: pa.Schema, key: Sequence[str]) -> Update:
        """Return the update that a client has sent beside its keys. Raises: Invalid."""
        such = {"price": "price * 2"}
        computed = mapping("expressions", expressions, str(such))
        update = cls(rows.slice(0, 1).drop_columns(list(key)), {name: str(sql) for name, sql in computed.items()})
        update.check(schema, key)
        for field in update.values.schema:
            if field.type != schema.field(field.name).type:
                raise Invalid(f"update(): the value of column {field.name!r} has another type than the column")
        return update


@dataclass(frozen=True, slots=True, eq=False)
class Where:
    """The condition of a piece: its keys had a row that passes `filter` (SQL) in a scan.

    `version`: the base table's version from before that scan. `update`: new values of passing rows; None to delete
    them.
    """

    filter: str
    version: int
    update: Update | None = None


def rows_of(where: Any) -> str:
    """Return the filter of an update; None means all rows. Raises: Invalid."""
    return sql(where) or "true"


class Table(Protocol):
    """A table with a key: the regions of this process, or those of daemons."""

    key: tuple[str, ...]

    def scan(self, columns: Sequence[str], filter: str, *, level: str) -> RowStream:
        """As `Reads.scan`."""
        ...

    def applied(self, producer: str, *, logged: bool) -> Applied:
        """Return the sequences of `producer` that the regions have applied; `logged`: wait until the logs have them."""
        ...


class FilterWrites(Protocol):
    """The steps that the owners of the regions take."""

    def base_version(self) -> int:
        """Return the newest version of the base table."""
        ...

    def piece(
        self, keys: pa.Table, where: Where, *, durable: bool, token: Token | None, timeout: float | None
    ) -> Receipt:
        """Do step 3 for some keys."""
        ...

    def record(self, token: Token, *, durable: bool, timeout: float | None) -> Mapping[str, int]:
        """Do step 4; return the WAL position of each region."""
        ...


class FilterWrite:
    """One delete or update by filter. Thread safety. One thread."""

    def __init__(
        self, table: Table, writes: FilterWrites, filter: str, clock: Clock, update: Update | None = None
    ) -> None:
        """`clock`: measures the timeout. `update`: None to delete."""
        self._table, self._writes, self._filter, self._clock = table, writes, filter, clock
        self._update = update
        self._regions: dict[str, RegionCounts] = {}
        self._positions: dict[str, int] = {}

    def run(self, token: TokenLike, *, durable: bool, timeout: float | None) -> Receipt:
        """Delete or update; return the receipt. `timeout`: of the whole call (s). Raises: as `Operations.delete`."""
        parsed, limit, durable = Token.parse(token), seconds("timeout", timeout), yes_or_no("durable", durable)
        if not self._table.key:
            raise Invalid("the table has no key (append_only), so no row can be deleted or updated")
        until = None if limit is None else self._clock.monotonic() + limit
        if parsed is not None:  # a repeat if the logs of all regions have it, so that no later owner forgets it
            applied = self._table.applied(parsed.producer, logged=True)
            check_rises(parsed, {"of one region": applied.newest, "of another": applied.everywhere})
            if applied.everywhere is not None and applied.everywhere >= parsed.sequence:
                return Receipt(0, False, {})
        logged = durable or parsed is not None  # the token has a separate entry, which must not outlive the tombstones
        try:
            for where, keys in self._pieces():
                left = self._left(until)
                self._add(self._writes.piece(keys, where, durable=logged, token=parsed, timeout=left))
            if parsed is not None:
                self._positions.update(self._writes.record(parsed, durable=durable, timeout=self._left(until)))
        except MemWalError as error:
            raise self._outcome(error) from error
        return Receipt(self._written, True, self._positions, self._kept, self._regions)

    def _pieces(self) -> Iterator[tuple[Where, pa.Table]]:
        """Yield keys and their condition. A scan holds the keys of all passing rows, and no other column.

        An update scans once: its rows may still pass, and each is updated once.
        """
        scans, size = (SCANS, PIECE) if self._update is None else (1, UPDATED)
        for scan in range(1, scans + 1):
            where = Where(self._filter, self._writes.base_version(), self._update)
            found = self._table.scan(list(self._table.key), self._filter, level="durable").read_all()
            for at in range(0, found.num_rows, size):
                if at and scan < scans and self._writes.base_version() != where.version:
                    break
                yield where, found.slice(at, size)
            else:
                return

    def _add(self, receipt: Receipt) -> None:
        self._positions.update(receipt.positions)
        for region, counts in receipt.regions.items():
            before = self._regions.get(region, RegionCounts(0, 0, 0))
            self._regions[region] = RegionCounts(
                before.applied + counts.applied, before.repeated + counts.repeated, before.skipped + counts.skipped
            )

    def _left(self, until: float | None) -> float | None:
        """Return the remaining seconds. Raises: Unavailable if none remain; nothing more is sent."""
        if until is None:
            return None
        left = until - self._clock.monotonic()
        if left <= 0:
            raise Unavailable(f"the {self._name} did not end in time; call it again, or raise the timeout")
        return left

    def _outcome(self, error: MemWalError) -> MemWalError:
        """Return the caller's error; all but UnknownOutcome mean that nothing was written."""
        if not self._written:
            return error
        advice = "call it again, with the same token if it had one"
        if self._update is not None and self._update.expressions:
            advice = "compare the rows before you call it again, which computes the new values of all rows that pass"
        done = f"{self._written} rows that pass the filter were {self._name}d, others maybe not"
        return UnknownOutcome(f"{done}: {error}; {advice}", error.details)

    @property
    def _name(self) -> str:
        return "delete" if self._update is None else "update"

    @property
    def _written(self) -> int:
        return sum(counts.applied for counts in self._regions.values())

    @property
    def _kept(self) -> int:
        return sum(counts.skipped for counts in self._regions.values())
