"""Define the arguments and results of `table.changes`: positions, requests, pieces, and the stream of changes.

A position is a small value for JSON, `{"table": id, "routing": 1, "regions": {region id: WAL position}}`: every change
at or below these WAL positions was read. A region that it does not name counts as unread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, get_args
from uuid import UUID

import pyarrow as pa

from memwal.ingest.engine.api.arguments import brief, shown, yes_or_no
from memwal.ingest.errors import Invalid, translate_errors
from memwal.ingest.suggest import suggestion
from memwal.wal import Clock, SystemClock

CHANGE, REGION, POSITION, ROW = "_change", "_region", "_position", "_row"
CHANGES_GONE = "changes_gone"
"""`details["reason"]` of Invalid: changes after the position were deleted. `details["oldest"]` is the oldest readable
position, or None.
"""
Images = Literal["after", "both"]
_IMAGES: tuple[str, ...] = get_args(Images)
_METADATA = "memwal:changes"
_ENDS = ("earliest", "latest")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two checks for new changes; each check that finds none doubles the pause."""


@dataclass(frozen=True)
class Position:
    """A position in the changes of a table: every change at or before it was read.

    Thread safety. Immutable. Invariants. A region of an earlier routing than `routing` was read to its end.
    """

    table: str
    """Id of the table; "" in tables without an id."""
    routing: int
    """Version of the routing whose changes are being read. Changes of a version come before those of the next."""
    regions: Mapping[UUID, int] = field(default_factory=dict)
    """WAL position by region; absent = 0."""

    def to_json(self) -> dict[str, Any]:
        """Return the position as a value for JSON."""
        regions = {str(region): position for region, position in sorted(self.regions.items())}
        return {"table": self.table, "routing": self.routing, "regions": regions}

    @staticmethod
    def of_json(value: Any, name: str = "since") -> Position:
        """Return the position in `value`. Raises: Invalid, with the argument `name`."""
        try:
            regions = {UUID(region): int(position) for region, position in value["regions"].items()}
            found = Position(str(value["table"]), int(value["routing"]), regions)
        except (TypeError, ValueError, KeyError, AttributeError):
            such = '{"table": …, "routing": 1, "regions": {…}}'
            raise Invalid(f"{name}: {value!r:.100} is no position; pass one that changes gave, {such}") from None
        if found.routing < 1 or any(position < 0 for position in regions.values()):
            raise Invalid(f"{name}: a routing version or WAL position is too low; pass one that changes gave")
        return found


@dataclass(frozen=True)
class ChangesRequest:
    """A request for one piece of a change feed: the changes after `since` up to `until`, None: up to now."""

    since: Position
    until: Position | None = None
    images: str = "after"
    columns: tuple[str, ...] | None = None
    """None: all."""

    def to_json(self) -> dict[str, Any]:
        """Return the request as a value for JSON."""
        return {
            "since": self.since.to_json(),
            "until": None if self.until is None else self.until.to_json(),
            "images": self.images,
            "columns": None if self.columns is None else list(self.columns),
        }

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> ChangesRequest:
        """Return the request from the result of `to_json`. Raises: Invalid."""
        until, columns = value.get("until"), value.get("columns")
        return ChangesRequest(
            Position.of_json(value["since"]),
            None if until is None else Position.of_json(until, "until"),
            checked_images(value.get("images")),
            None if columns is None else tuple(columns),
        )


@dataclass(frozen=True)
class Piece:
    """A part of a change feed."""

    rows: pa.Table
    """Changes in order; may be empty."""
    position: Position
    """The position after these changes."""
    more: bool
    """Whether the next piece may have changes; False: everything up to `until`, or now, was read."""


def packed(piece: Piece) -> pa.Table:
    """Return `piece` as its rows, with the other fields in the metadata of their schema."""
    told = {"position": piece.position.to_json(), "more": piece.more}
    return piece.rows.replace_schema_metadata({_METADATA: json.dumps(told)})


def unpacked(rows: pa.Table) -> Piece:
    """Return the piece from the result of `packed`."""
    told = json.loads(rows.schema.metadata[_METADATA.encode()])
    return Piece(rows.replace_schema_metadata(None), Position.of_json(told["position"]), bool(told["more"]))


class ChangesSource(Protocol):
    """The source of changes: storage, or a daemon.

    Thread safety. Any thread. Errors. The source's own errors; `Changes` and `Reads` translate them.
    """

    def piece(self, request: ChangesRequest) -> Piece:
        """Return the next changes after `request.since`."""
        ...

    def position(self, at: str) -> Position:
        """Return the "earliest" or the "latest" position."""
        ...


class Changes:
    """The changes of a table, as record batches in order. Iterate once.

    The columns of the table follow these four, all nullable; with `images="after"` a delete has only its key:

    - `_change` (string): "insert", "update", "delete"; with both images "insert", "update_preimage",
      "update_postimage", "delete".
    - `_region` (string).
    - `_position` (int64): the WAL position at which the change became visible.
    - `_row` (int64): its number at that position; a preimage directly precedes its postimage and has the same number.

    Order: by `_position`, then `_row`, within a region, so the changes of a key are in order. Regions alternate. Each
    batch has its own schema, which changes when the table's columns change.

    Thread safety. One thread at a time. Errors. Only `ingest.errors` kinds; after one, a new iteration continues from
    `position`.
    """

    def __init__(
        self, source: ChangesSource, request: ChangesRequest, *, follow: bool, clock: Clock | None = None
    ) -> None:
        """`follow`: wait for further changes at the end. Use `Reads.changes`."""
        self._source, self._request = source, request
        self._follow, self._clock = follow, clock or SystemClock()
        self._read_ahead: Piece | None = None
        self._position = request.since

    @property
    def position(self) -> dict[str, Any]:
        """The position after the last returned batch, a value for JSON: `changes(since=position)` continues from it."""
        return self._position.to_json()

    @property
    @translate_errors
    def schema(self) -> pa.Schema:
        """Schema of the next batch."""
        return self._peeked().rows.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for step in self._steps():
            if isinstance(step, float):
                self._clock.sleep(step)
            else:
                yield step

    def _steps(self) -> Iterator[pa.RecordBatch | float]:
        """Yield batches, and the seconds to wait when no changes are available."""
        pause = _FIRST_PAUSE
        while True:
            piece = self._taken()
            if piece.rows.num_rows:
                pause = _FIRST_PAUSE
                batches = piece.rows.combine_chunks().to_batches()
                yield from batches[:-1]  # a text column of more than 2 GiB is split
                self._position = piece.position
                yield batches[-1]
                continue
            self._position = piece.position
            if piece.more:
                continue
            if not self._follow:
                return
            yield pause
            pause = min(2 * pause, _LONGEST_PAUSE)

    def read_all(self) -> pa.Table:
        """Return all changes as one table. Raises: Invalid if the feed follows and therefore has no end."""
        if self._follow:
            raise Invalid("read_all: a feed with follow=True has no end; iterate over it")
        schema = self.schema
        batches = list(self)
        if all(batch.schema.equals(schema) for batch in batches):
            return pa.Table.from_batches(batches, schema)
        return pa.concat_tables([pa.Table.from_batches([batch]) for batch in batches], promote_options="default")

    def close(self) -> None:
        """Discard the changes that were read ahead."""
        self._read_ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _peeked(self) -> Piece:
        if self._read_ahead is None:
            self._read_ahead = self._source.piece(replace(self._request, since=self._position))
        return self._read_ahead

    @translate_errors
    def _taken(self) -> Piece:
        piece, self._read_ahead = self._peeked(), None
        return piece


def steps_of(changes: Changes) -> Iterator[pa.RecordBatch | float]:
    """Yield the batches of `changes`, and the seconds to wait when no changes are available. Raises: as `changes`."""
    return changes._steps()  # noqa: SLF001 - not public, because users see `Changes`


def resumed(changes: Changes, position: Any) -> Changes:
    """Return the same feed, after `position`."""
    request = replace(changes._request, since=Position.of_json(position))  # noqa: SLF001 - as above
    return Changes(changes._source, request, follow=changes._follow, clock=changes._clock)  # noqa: SLF001


def opened(
    source: ChangesSource, since: Any, until: Any, images: Any, columns: Sequence[str] | None, *, follow: Any
) -> Changes:
    """Return the changes for the arguments of `Reads.changes`. Raises: Invalid."""
    if yes_or_no("follow", follow) and until is not None:
        raise Invalid("follow=True with until: a feed that follows has no end; leave one of them out")
    asked = checked_images(images)
    begin = position_of(source, "earliest" if since is None else since, "since")
    end = None if follow else position_of(source, "latest" if until is None else until, "until")
    names = None if columns is None else tuple(columns)
    return Changes(source, ChangesRequest(begin, end, asked, names), follow=bool(follow))


def position_of(source: ChangesSource, value: Any, name: str) -> Position:
    """Return the position that an argument names. Raises: Invalid."""
    if isinstance(value, str):
        return source.position(checked_end(value, name))
    if not isinstance(value, Position | Mapping):
        raise Invalid(f"{name} = {shown(value)} is no position: write 'earliest', 'latest' or one")
    return value if isinstance(value, Position) else Position.of_json(value, name)


def checked_end(value: str, name: str) -> str:
    """Return `value`, "earliest" or "latest". Raises: Invalid, with the argument `name`."""
    if value not in _ENDS:
        raise Invalid(f"{name} = {brief(value)}: write 'earliest', 'latest' or a position{suggestion(value, _ENDS)}")
    return value


def checked_images(images: Any) -> str:
    """Return `images`. Raises: Invalid."""
    if not isinstance(images, str) or images not in _IMAGES:
        said = brief(images) if isinstance(images, str) else shown(images)
        raise Invalid(f"images = {said}: write 'after', or 'both' for rows before their change too")
    return str(images)
