"""The floor of every durable put: the time that storage alone needs to make the same bytes durable.

The bytes are the batch as an uncompressed Arrow IPC stream, encoded before the clock starts. Timed is the minimum for a
put-if-absent that survives a power cut on a local disk: write, fsync, link to the final name, unlink, fsync of the
directory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.benchmark import Contender, Sample, Watch
from bench.latencies import timed_each


class StorageFloor(Contender):
    """A lower bound without encoding, memtable or index; not a competitor."""

    def __init__(self, batches: Sequence[pa.Table]) -> None:
        super().__init__(
            "storage alone: write, fsync, link, fsync of the directory",
            "floor",
            {},
            question="",
            note="the same bytes without encoding, memtable or index; nobody who syncs can be faster",
        )
        self._batches = batches

    def round(self, at: Path, watch: Watch) -> Sample:
        """Write one object per batch."""
        blobs = [_stream(batch) for batch in self._batches]
        directory = os.open(at, os.O_RDONLY)

        def put(n: int) -> None:
            temporary, final = at / f"{n}.tmp", at / f"{n}.arrow"
            file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            os.write(file, blobs[n])
            os.fsync(file)
            os.close(file)
            os.link(temporary, final)
            temporary.unlink()
            os.fsync(directory)

        try:
            with watch.timed():
                latencies = timed_each(put, range(len(blobs)))
        finally:
            os.close(directory)
        return Sample(np.asarray(latencies), watch.seconds, sum(each.num_rows for each in self._batches), "")


def _stream(rows: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue()
