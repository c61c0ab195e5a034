"""Delete by filter: find the keys of passing rows; their regions delete each key whose newest row still passes.

`engine/region/README.md` has the steps with their crash points. They are the same in a process that owns the regions
and in a client of daemons; `Deletes` contains the differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from memwal.ingest.engine.api.arguments import seconds, yes_or_no
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.engine.api.tokens import Applied, Receipt, RegionCounts, Token, TokenLike, check_rises
from memwal.ingest.errors import Invalid, MemWalError, Unavailable, UnknownOutcome
from memwal.wal import Clock

PIECE = 16_384
"""Maximum keys sent at a time. A tombstone has a null in every column, which takes as much memory as a value in
fixed-size types: 25 MB for this number of vectors of 384 numbers.
"""

SCANS = 50
"""Maximum scans of one delete, so that it ends even if rows begin to pass as fast as it deletes. A new scan follows a
commit, so this takes 25 minutes with the default `commit.interval`; the pieces of the last scan only take longer.
"""


@dataclass(frozen=True, slots=True)
class Where:
    """The condition of a piece: its keys had a row that passes `filter` (SQL) in a scan.

    `version`: the base table's version from before that scan.
    """

    filter: str
    version: int


class Table(Protocol):
    """A table with a key: the regions of this process, or those of daemons."""

    key: tuple[str, ...]

    def scan(self, columns: Sequence[str], filter: str, *, level: str) -> RowStream:
        """As `Reads.scan`."""
        ...

    def applied(self, producer: str, *, logged: bool) -> Applied:
        """Return the sequences of `producer` that the regions have applied; with `logged`, once they are in the
        logs.
        """
        ...


class Deletes(Protocol):
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


class FilterDelete:
    """One delete by filter. Thread safety. One thread."""

    def __init__(self, table: Table, deletes: Deletes, filter: str, clock: Clock) -> None:
        """`clock`: measures the timeout."""
        self._table, self._deletes, self._filter, self._clock = table, deletes, filter, clock
        self._regions: dict[str, RegionCounts] = {}
        self._positions: dict[str, int] = {}

    def run(self, token: TokenLike, *, durable: bool, timeout: float | None) -> Receipt:
        """Delete, and return the receipt. `timeout`: seconds for the whole call. Raises: as `Operations.delete`."""
        parsed, limit, durable = Token.parse(token), seconds("timeout", timeout), yes_or_no("durable", durable)
        if not self._table.key:
            raise Invalid("the table has no key (append_only), so no row can be deleted")
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
                self._add(self._deletes.piece(keys, where, durable=logged, token=parsed, timeout=left))
            if parsed is not None:
                self._positions.update(self._deletes.record(parsed, durable=durable, timeout=self._left(until)))
        except MemWalError as error:
            raise self._outcome(error) from error
        return Receipt(self._deleted, True, self._positions, self._kept, self._regions)

    def _pieces(self) -> Iterator[tuple[Where, pa.Table]]:
        """Yield keys and their condition. A scan holds the keys of all passing rows, and no other column."""
        for scan in range(1, SCANS + 1):
            where = Where(self._filter, self._deletes.base_version())
            found = self._table.scan(list(self._table.key), self._filter, level="durable").read_all()
            for at in range(0, found.num_rows, PIECE):
                if at and scan < SCANS and self._deletes.base_version() != where.version:
                    break
                yield where, found.slice(at, PIECE)
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
            raise Unavailable("the delete did not end in time; call it again, or raise the timeout")
        return left

    def _outcome(self, error: MemWalError) -> MemWalError:
        """Return the caller's error; all but UnknownOutcome mean that nothing was deleted."""
        if not self._deleted:
            return error
        return UnknownOutcome(
            f"{self._deleted} rows that pass the filter were deleted, others maybe not: {error}; call it again, with "
            "the same token if it had one",
            error.details,
        )

    @property
    def _deleted(self) -> int:
        return sum(counts.applied for counts in self._regions.values())

    @property
    def _kept(self) -> int:
        return sum(counts.skipped for counts in self._regions.values())
