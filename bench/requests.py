"""Count the requests of daemons to object storage, at rest and under load: requests per second by purpose.

`python -m bench.requests [--seconds N] [--rates N …] [--s3-latency MS] [--entry-interval S] [--callers N]` prints a
table for each rate, and the duration of the puts.

Two daemons with default settings share four regions of a table on an S3 server, behind a proxy that counts. A client
puts the given number of rows per second into each region; each row is durable and a call of its own. Rate 0 is a table
at rest. Overlapping puts share an entry, so requests rise less than the rate. With `wal.entry_interval` a caller that
waits for each acknowledgement puts at most once per interval; raise `--callers` for higher rates.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import memwal
from bench.daemons import Daemons
from bench.take_over import REGIONS, Writer, keys_by_region
from tests.conftest import toml
from tests.fault_proxy import Request
from tests.s3_place import Place, on_s3

SECONDS, RATES = 60.0, (0, 10)
WARM_UP = 5.0
KINDS = {
    "log": r"_mem_wal/.*/wal/",
    "region manifests": r"_mem_wal/.*/manifest/",
    "SSTs": r"_mem_wal/.*_gen_",
    "notes of owners": r"owner\.json",
    "base table": r"",
}
"""Patterns of keys by purpose; the first match counts."""
LISTED_AS_PUT = ("PUT", "POST", "LIST", "COPY")
"""Methods that stores charge like a write."""


def kind_of(request: Request) -> str:
    """Return the purpose of a request."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, request.key))


def table(requests: Sequence[Request], seconds: float) -> list[str]:
    """Return the table of requests per second by purpose and method."""
    found = Counter((kind_of(each), each.method) for each in requests)
    lines = []
    for kind in KINDS:
        shown = [f"{method} {number / seconds:.2f}" for (of, method), number in sorted(found.items()) if of == kind]
        lines.append(f"  {kind:<17} {', '.join(shown) or 'none'}")
    writes = sum(number for (_, method), number in found.items() if method in LISTED_AS_PUT)
    lines.append(f"  {'all':<17} {len(requests) / seconds:.2f} /s, of which writes and listings {writes / seconds:.2f}")
    return lines


def watched(
    daemons: Daemons, place: Place, rate: float, callers: int, seconds: float
) -> tuple[list[Request], list[float]]:
    """Return the requests of `seconds` under `rate` puts per second and region, and the durations of the puts."""
    assert place.proxy is not None
    stop, writers = threading.Event(), list[Writer]()
    with memwal.connect(daemons.endpoints) as client:
        if rate:
            keys = keys_by_region(place).items()
            for number in range(callers):
                for region, each in keys:
                    writers.append(Writer(f"{region}/{number}", each[number::callers], client, stop, rate / callers))
                    time.sleep(1 / rate / REGIONS)  # otherwise they would put at the same time and share entries
        time.sleep(WARM_UP)
        place.proxy.forget()
        since = time.perf_counter()
        time.sleep(seconds)
        found = place.proxy.requests
        stop.set()
        for writer in writers:
            writer.thread.join()
    return found, [acked - sent for writer in writers for sent, acked in writer.acks if sent >= since]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.requests", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long to count (%(default)s)")
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="puts per second and region")
    parser.add_argument("--s3-latency", type=float, default=20.0, help="ms that a request takes longer (%(default)s)")
    parser.add_argument("--callers", type=int, default=1, help="of each region, one put at a time (%(default)s)")
    parser.add_argument("--entry-interval", default="0s", help="`wal.entry_interval` of the daemons (%(default)s)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory, on_s3(Path(directory), given.s3_latency / 1e3) as place:
        sections = {
            "table": {**place.section, "key": ["id"], "columns": {"id": "int64", "value": "string"}},
            "wal": {"entry_interval": given.entry_interval},
        }
        with Daemons(Path(directory), toml(sections), REGIONS, place.environ) as daemons:
            for rate in given.rates:
                print(f"two daemons, {REGIONS} regions, {rate} puts a second into each", flush=True)
                requests, waits = watched(daemons, place, rate, given.callers, given.seconds)
                print("\n".join(table(requests, given.seconds)), flush=True)
                if waits:
                    print("  puts took {:.3f} s, p99 {:.3f} s".format(*np.percentile(waits, [50, 99])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
