"""What daemons ask of object storage, idle and busy: requests per second, by what they are for.

`python -m bench.requests [--seconds N] [--rates N …] [--s3-latency MS]` prints a table for each rate.

Two daemons with default settings share four regions of a table on an S3 server, behind a proxy that counts. A client
puts so many rows a second into each region, each row durable and a call of its own; rate 0 is a table at rest. Puts
that overlap share an entry, so requests do not rise with the rate for ever.
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
"""By kind, what its keys look like; the first that fits."""
LISTED_AS_PUT = ("PUT", "POST", "LIST", "COPY")
"""Methods that stores charge for as for a write."""


def kind_of(request: Request) -> str:
    """What a request is for."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, request.key))


def table(requests: Sequence[Request], seconds: float) -> list[str]:
    """Requests per second by kind and method."""
    found = Counter((kind_of(each), each.method) for each in requests)
    lines = []
    for kind in KINDS:
        shown = [f"{method} {number / seconds:.2f}" for (of, method), number in sorted(found.items()) if of == kind]
        lines.append(f"  {kind:<17} {', '.join(shown) or 'none'}")
    writes = sum(number for (_, method), number in found.items() if method in LISTED_AS_PUT)
    lines.append(f"  {'all':<17} {len(requests) / seconds:.2f} /s, of which writes and listings {writes / seconds:.2f}")
    return lines


def watched(daemons: Daemons, place: Place, rate: int, seconds: float) -> list[Request]:
    """The requests of so many seconds under `rate` puts a second and region."""
    assert place.proxy is not None
    stop, writers = threading.Event(), []
    with memwal.connect(daemons.endpoints) as client:
        if rate:
            keys = keys_by_region(place).items()
            writers = [Writer(region, each, client, stop, rate) for region, each in keys]
        time.sleep(WARM_UP)
        place.proxy.forget()
        time.sleep(seconds)
        found = place.proxy.requests
        stop.set()
        for writer in writers:
            writer.thread.join()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.requests", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long to count (%(default)s)")
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="puts per second and region")
    parser.add_argument("--s3-latency", type=float, default=20.0, help="ms that a request takes longer (%(default)s)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory, on_s3(Path(directory), given.s3_latency / 1e3) as place:
        sections = {"table": {**place.section, "key": ["id"], "columns": {"id": "int64", "value": "string"}}}
        with Daemons(Path(directory), toml(sections), REGIONS, place.environ) as daemons:
            for rate in given.rates:
                print(f"two daemons, {REGIONS} regions, {rate} puts a second into each", flush=True)
                print("\n".join(table(watched(daemons, place, rate, given.seconds), given.seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
