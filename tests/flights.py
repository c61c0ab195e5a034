"""The flights that left New York City in the first week of 2013, as a stream of events, and the resulting table.

Every flight has three events, scheduled, departed and arrived, and one in a hundred is deleted at the end.
A cancelled flight departs without a time. The events of all flights are interleaved by their time; all events of one
flight have the same key, so a topic of any number of partitions keeps their order.

`flights.parquet` is a part of a public-domain data set (US Bureau of Transportation Statistics, 2013).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

WEEK = Path(__file__).resolve().parent.parent / "configs" / "tutorial" / "flights.parquet"
KEY = ("year", "month", "day", "carrier", "flight", "origin")
DEPARTED = ("dep_time", "dep_delay")
"""Columns that are known once the flight has departed."""
ARRIVED = ("arr_time", "arr_delay", "air_time")
"""Columns that are known once it has arrived."""
DELETED_OF = 100
"""One flight in this many is deleted."""
STAGES = ("scheduled", "departed", "arrived")


@dataclass(frozen=True)
class Event:
    """A Kafka record: `key` and `value` are JSON; without a value it deletes the flight."""

    key: bytes
    value: bytes | None


class Flights:
    """Flights, their events and the resulting rows."""

    def __init__(self, path: Path = WEEK, most: int | None = None) -> None:
        """`path`: a Parquet file with the columns of `WEEK`; `most`: the maximum number of its rows to use."""
        table = pq.read_table(path).replace_schema_metadata(None)
        self.table = table if most is None else table.slice(0, most)
        self._rows: list[dict[str, Any]] = self.table.to_pylist()

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table, followed by the stage of the newest event."""
        fields = [pa.field(field.name, _plain(field.type), field.name not in KEY) for field in self.table.schema]
        return pa.schema([*fields, pa.field("stage", pa.string())])

    def events(self) -> Iterator[Event]:
        """Yield every event, in order of time."""
        happen = []
        for number, row in enumerate(self._rows):
            leaves = row["month"] * 100_000 + row["day"] * 2400 + row["sched_dep_time"]
            happen += [(leaves - 300, number, 0), (leaves, number, 1), (leaves + 200, number, 2)]
            if number % DELETED_OF == 0:
                happen.append((leaves + 400, number, 3))
        for _, number, stage in sorted(happen):
            row = self._rows[number]
            yield Event(_json({name: row[name] for name in KEY}), _json(told(row, stage)) if stage < 3 else None)

    def arrived(self) -> list[dict[str, Any]]:
        """Return the rows of the table after all events."""
        return [told(row, 2) for number, row in enumerate(self._rows) if number % DELETED_OF]

    def appended(self) -> list[dict[str, Any]]:
        """Return the rows of a table that keeps every event with a value."""
        return [told(row, stage) for row in self._rows for stage in range(3)]


def told(row: dict[str, Any], stage: int) -> dict[str, Any]:
    """Return the known columns of a flight at a stage."""
    unknown = (*(DEPARTED if stage < 1 else ()), *(ARRIVED if stage < 2 else ()))
    return {**row, **dict.fromkeys(unknown), "stage": STAGES[stage]}


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort rows for a comparison: by key, and by stage if the table keeps every event."""
    return sorted(rows, key=lambda row: (*(row[name] for name in KEY), row["stage"]))


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _plain(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_large_string(kind) else kind
