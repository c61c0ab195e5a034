"""Stream rows into one region and wait, with the stream open, for an input line.

    streamer.py ENDPOINT REGION PRODUCER SEQUENCE NAME ID...

Lines out: `sent`, then, after the line `finish`, the receipt as JSON. The line `die` ends the process at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from uuid import UUID

import pyarrow as pa

import memwal
from memwal.ingest.service.client.remote import RemoteTable


def main() -> None:
    """Run the program; see the module."""
    endpoint, region, producer, sequence, name, *ids = sys.argv[1:]
    table = RemoteTable(endpoint)
    stream = table.open_stream(UUID(region), memwal.Token(producer, int(sequence)))
    rows = pa.Table.from_pylist([{"id": int(id), "name": name} for id in ids], schema=table.schema)
    for batch in rows.to_batches(max_chunksize=2):
        stream.write(batch)
    print("sent", flush=True)
    if sys.stdin.readline().strip() == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps(asdict(stream.finish())), flush=True)


if __name__ == "__main__":
    main()
