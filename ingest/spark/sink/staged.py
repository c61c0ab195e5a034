"""Stage the rows of a micro-batch as objects on the table's storage, and send them from one process.

For writers that cannot let Spark shuffle rows by region (`connector`; its README has the steps). A task stages
its rows with `StageTask`. The driver sends the rows of all tasks with `send_staged`, through the task that sends
shuffled rows. An object is an Arrow IPC stream of routed rows of one region. This module does not import Spark.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal import wal
from memwal.ingest.errors import Unavailable
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.source.columns import BLOCK, BUCKET, place_column, runs
from memwal.ingest.spark.source.whole_input import RegionRows
from memwal.wal.layout import staged_key
from memwal.wal.slot import put_until_known

_HELD = 64 << 20
"""Bytes of rows that a task holds in memory before it stages them."""
_AT_ONCE = 8
"""Number of objects that a process writes or deletes concurrently; it mostly waits for storage."""
_WRITTEN = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class Staged:
    """One staged object: rows of one region in order. Can be pickled."""

    key: str
    bucket: int
    rows: int
    crc: int
    """CRC-32 of the object."""


class StageTask:
    """Validates, routes and stages the rows of one Spark partition.

    Thread safety. One thread. Raises: as `RouteTask.routed`; wal errors.
    """

    def __init__(self, route: RouteTask, store: wal.ObjectStore, partition: int, held: int = _HELD) -> None:
        """`partition`: number of the Spark partition, used as the place of rows whose source has none."""
        self._route, self._store, self._partition, self._most = route, store, partition, held
        self._held: dict[int, list[pa.RecordBatch]] = defaultdict(list)
        self._staged: list[Staged] = []

    def stage(self, batches: Iterable[pa.RecordBatch]) -> tuple[Staged, ...]:
        """Stage all rows. Return the objects; those of each region are in the order of its rows."""
        size = 0
        for batch in self._route.routed(map(self._placed, batches)):
            for bucket, rows in _by_bucket(batch):
                self._held[bucket].append(rows)
            size += batch.nbytes
            if size >= self._most:
                self._put_all()
                size = 0
        self._put_all()
        return tuple(self._staged)

    def _placed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if place_column(batch.schema.names) in batch.schema.names:
            return batch
        return batch.append_column(BLOCK, pa.array(np.full(batch.num_rows, self._partition)))

    def _put_all(self) -> None:
        held, self._held = sorted(self._held.items()), defaultdict(list)
        with ThreadPoolExecutor(_AT_ONCE, "staging") as pool:
            self._staged += pool.map(lambda each: self._put(*each), held)

    def _put(self, bucket: int, batches: Sequence[pa.RecordBatch]) -> Staged:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batches[0].schema, options=_WRITTEN) as writer:
            for batch in batches:
                writer.write_batch(batch)
        data, key = sink.getvalue().to_pybytes(), staged_key(wal.SystemIds().entry_id())
        put_until_known(self._store, key, data, clock=wal.SystemClock(), options=wal.WalOptions())
        return Staged(key, bucket, sum(batch.num_rows for batch in batches), zlib.crc32(data))


def send_staged(send: SendTask, store: wal.ObjectStore, staged: Sequence[Staged]) -> list[pa.RecordBatch]:
    """Send staged rows, each region in one stream; return the receipts.

    `staged`: objects of all tasks, in the order of rows. Raises: Unavailable if an object is missing or differs; errors
    of `SendTask.sent`.
    """
    by_bucket: dict[int, list[Staged]] = defaultdict(list)
    for each in staged:
        by_bucket[each.bucket].append(each)
    regions = (
        RegionRows(bucket, sum(each.rows for each in of_region), _read(store, of_region))
        for bucket, of_region in sorted(by_bucket.items())
    )
    return list(send.sent(regions))


def delete_staged(store: wal.ObjectStore, staged: Iterable[Staged]) -> None:
    """Delete staged objects. Garbage collection deletes objects that cannot be deleted now."""

    def delete(each: Staged) -> None:
        with suppress(wal.WalError):
            store.delete(each.key)

    with ThreadPoolExecutor(_AT_ONCE, "staging") as pool:
        list(pool.map(delete, staged))


def _by_bucket(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of each region of a routed batch, in their order."""
    if not batch.num_rows:
        return
    ordered = batch.take(pc.array_sort_indices(batch[BUCKET]))  # a stable sort
    buckets = ordered[BUCKET].to_numpy()
    for start, end in runs(buckets):
        yield int(buckets[start]), ordered.slice(start, end - start)


def _read(store: wal.ObjectStore, staged: Sequence[Staged]) -> Iterator[pa.RecordBatch]:
    for each in staged:
        data = store.get(each.key)
        if data is None or zlib.crc32(data) != each.crc:
            found = "is gone" if data is None else "is not what its task wrote"
            raise Unavailable(
                f"{each.key} {found}; nothing of its region was applied: start the query again, Spark replays the "
                "micro-batch"
            )
        yield from pa.ipc.open_stream(pa.py_buffer(data))
