"""The driver's part of a read: capture one moment of the table, and divide its rows into partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from uuid import UUID

import pyarrow as pa

from memwal import flush, wal
from memwal.flush import BaseTable
from memwal.ingest.engine.read.base import BaseReads
from memwal.ingest.engine.read.pinned import Fragment, Pinned, pin
from memwal.ingest.engine.read.request import check_filter
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.service.client.connect import served_table
from memwal.ingest.spark.connector.options import ReadOptions

BYTES_PER_PARTITION = 256 << 20


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a table, and its columns then. Can be pickled; contains no secret."""

    pinned: Pinned
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one partition: those above the base of one region, or those of some fragments of the base."""

    region: UUID | None = None
    fragments: tuple[int, ...] = ()


def captured(options: ReadOptions) -> Moment:
    """Return the current moment of the table. The room's README has the steps.

    Raises: Invalid for an unknown table, a wrong filter or rejected credentials; Unavailable.
    """
    storage = options.storage_options()
    base = opened_table(options.uri, storage)
    store = wal.open_store(options.uri, storage)
    if options.level == "latest":
        _make_durable(base, store, options)
    pinned, newest = pin(base, store, options.level)
    if options.filter is not None:
        check_filter(options.filter, BaseReads(newest).check, newest.schema.names)
    return Moment(pinned, newest.schema)


def _make_durable(base: BaseTable, store: wal.ObjectStore, options: ReadOptions) -> None:
    """If daemons own the table, make the owners append rows that they have acknowledged and not yet appended.

    A read at level `durable` does this: it answers at a moment when every visible row is on storage.
    """

    def find() -> Sequence[str]:
        notes = owners.find(store, base.regions)
        return () if notes is None else notes.endpoints

    served = served_table(base, store, options.access.options, options.endpoints, find)
    if served is None and options.endpoints:
        endpoints = ", ".join(options.endpoints)
        raise Unavailable(f"{endpoints}: no daemon that serves {base.uri} answers; correct the option endpoint")
    if served is not None:
        with closing(served):
            served.scan(columns=base.schema.names[:1], limit=0, level="durable")


def opened_table(uri: str, storage: Mapping[str, str]) -> BaseTable:
    """Open the newest version of a table. Raises: Invalid for an unknown table."""
    try:
        return BaseTable.open(uri, storage)
    except flush.NotALanceTable:
        raise Invalid(f"{uri}: no Lance table is there; correct the address in load()") from None


def shares(pinned: Pinned, rows_per_partition: int) -> list[Share]:
    """Divide the rows of a moment: first one share per region with rows above the base, then groups of fragments.

    A group has at most `rows_per_partition` rows and `BYTES_PER_PARTITION` bytes, or one fragment with more.
    """
    above = [Share(region=region.region) for region in pinned.regions]
    return [*above, *(Share(fragments=group) for group in _groups(pinned.fragments, rows_per_partition))]


def _groups(fragments: Sequence[Fragment], most: int) -> Iterator[tuple[int, ...]]:
    group: list[int] = []
    rows = size = 0
    for fragment in fragments:
        if group and (rows + fragment.rows > most or size + fragment.bytes > BYTES_PER_PARTITION):
            yield tuple(group)
            group, rows, size = [], 0, 0
        group.append(fragment.id)
        rows, size = rows + fragment.rows, size + fragment.bytes
    if group:
        yield tuple(group)
