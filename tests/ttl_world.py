"""The world of `tests.reads_world` with rows that expire: time moves only in the step `advance`.

`python -m tests.ttl_world --seeds 200` runs many seeds. The oracle keeps every row; a level shows the rows whose time
is not older than now - ttl, independently of older versions of their keys.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lance
import pyarrow as pa

from memwal import flush, wal
from memwal.flush.commits.expiry import GRACE
from memwal.ingest.engine.read.pinned import PinnedReads, pin
from tests.reads_world import SCHEMA, SETTINGS, Model, ReadsWorld
from tests.support.rows import by_key

KINDS = (
    pa.timestamp("us", "UTC"),
    pa.timestamp("ns"),
    pa.timestamp("ms", "America/New_York"),
    pa.timestamp("s", "+05:30"),
    pa.date32(),
)
DAY = timedelta(days=1)


class Time:
    """The clock of this process. `now` moves with `advance` only; `monotonic` runs, and jumps with it."""

    def __init__(self) -> None:
        self.now, self.offset = 2_000_000_000.0, 0.0  # later than any file, so that a collection deletes all garbage

    def advance(self, seconds: float) -> None:
        self.now, self.offset = self.now + seconds, self.offset + seconds

    @property
    def moment(self) -> datetime:
        return datetime.fromtimestamp(self.now, UTC)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Use this clock in `wal.SystemClock` inside the context."""
        monotonic = time.monotonic
        with (
            mock.patch.object(wal.SystemClock, "now", side_effect=lambda: self.now),
            mock.patch.object(wal.SystemClock, "monotonic", side_effect=lambda: monotonic() + self.offset),
        ):
            yield


class TtlWorld(ReadsWorld):
    """One seed: rows of about the age of the ttl."""

    def __init__(self, seed: int, directory: Path, clock: Time) -> None:
        self.clock, self.kind = clock, KINDS[seed % len(KINDS)]
        self.unit = DAY if pa.types.is_date(self.kind) else timedelta(seconds=10)
        self.ttl: timedelta | None = 10 * self.unit
        self.schema = SCHEMA.append(pa.field("t", self.kind)).append(pa.field("at", pa.timestamp("us", "UTC")))
        self.settings = SETTINGS | {"memtable": {"age_max": "36500d"}, "table": self._table()}
        super().__init__(seed, directory)

    def kinds(self) -> list[tuple[Callable[[], None], float]]:
        return [*super().kinds(), (self.advance, 8), (self.change_ttl, 1)]

    # ---- steps -------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        self.clock.advance(float(self.draw.integers(1, 30)) / 5 * self.unit.total_seconds())

    def change_ttl(self) -> None:
        """Open the table with a new configuration: another ttl, none, or no ttl setting."""
        chosen = int(self.draw.integers(3))
        if chosen < 2:
            self.ttl = (None, int(self.draw.integers(5, 15)) * self.unit)[chosen]
        self.settings = self.settings | {"table": self._table() if chosen < 2 else {}}
        self.reopen()

    def commit(self) -> None:
        """Commit when the next collection is due: rows that expired more than the grace time ago are deleted."""
        self.clock.advance(3600.0 if pa.types.is_date(self.kind) else 10.0)
        super().commit()
        if self.ttl is None:
            return
        left = lance.dataset(self.uri).to_table(columns=["at"])["at"].to_pylist()
        bound = self.clock.moment - self.ttl - timedelta(seconds=GRACE)
        gone = [row for row in self.levels["committed"].values() if row["at"] is not None and row["at"] < bound]
        for row in gone:  # another ttl does not bring them back
            for level, model in self.levels.items():
                if model.get(row["id"]) is row:
                    self.levels[level] = {id: other for id, other in self.levels[level].items() if id != row["id"]}
        assert all(at is None or at >= bound for at in left), f"an expired row was not deleted: {left}, {bound}"

    # ---- reads -------------------------------------------------------------------------------------------------------

    def visible(self, level: str) -> Model:
        if self.ttl is None:
            return self.levels[level]
        bound = self.clock.moment - self.ttl
        return {id: row for id, row in self.levels[level].items() if row["at"] is None or row["at"] >= bound}

    def check_rows(self, table: Any, level: str, model: Model) -> None:
        super().check_rows(table, level, model)
        counted = table.sql("SELECT count(*) AS n FROM table", level=level).read_all()
        assert counted.to_pylist() == [{"n": len(model)}]
        found = by_key(table.sql("SELECT * FROM table WHERE n < 50", level=level).read_all())
        assert found == {id: row for id, row in model.items() if row["n"] < 50}
        if level != "latest":
            base = flush.BaseTable.open(self.uri)
            pinned, _ = pin(base, wal.open_store(self.uri, {}), level)  # type: ignore[arg-type]
            reads, names = PinnedReads(pinned, {}), self.schema.names
            parts = [part for each in pinned.regions for part in reads.above(each.region, names, None)]
            parts += reads.below([each.id for each in pinned.fragments], names, None)
            rows = [row for part in parts for row in part.to_pylist()]
            assert sorted(row["id"] for row in rows) == sorted(model)
            assert {row["id"]: row for row in rows} == model

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _table(self) -> dict[str, Any]:
        if self.ttl is None:
            return {"ttl": "off"}
        return {"ttl": f"{int(self.ttl.total_seconds())}s", "ttl_column": "t"}

    def row(self, id: int) -> dict[str, Any]:
        """Return a row of random age, sometimes exactly the ttl; `at` is the same moment as `t`, in microseconds."""
        at = self.clock.moment - int(self.draw.integers(-5, 80)) / 5 * self.unit
        if pa.types.is_date(self.kind):
            at = at.replace(hour=0, minute=0, second=0)
        t = at.date() if pa.types.is_date(self.kind) else at if self.kind.tz else at.replace(tzinfo=None)
        known = self.draw.random() < 0.9
        return super().row(id) | {"t": t if known else None, "at": at if known else None}


def run_seed(seed: int, steps: int) -> None:
    """Run one seed in its own directory. Raises: AssertionError naming the seed."""
    clock = Time()
    with tempfile.TemporaryDirectory() as directory, clock.kept():
        try:
            world = TtlWorld(seed, Path(directory), clock)
            try:
                world.run(steps)
            finally:
                world.close()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def main() -> int:
    """Run many seeds; return the exit code: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.ttl_world", description=__doc__)
    parser.add_argument("--start", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    failed = 0
    for seed in range(asked.start, asked.start + asked.seeds):
        try:
            run_seed(seed, asked.steps)
        except AssertionError as error:
            print(error)
            failed += 1
    print(f"{asked.seeds} seeds of {asked.steps} steps, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
