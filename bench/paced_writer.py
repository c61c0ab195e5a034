"""A table behind one daemon, and a process that puts rows into it at a fixed rate: the write side of a benchmark.

Rows have the vectors of `bench.mixtures`; the key is the position of the vector. Half of the rows are loaded at once;
the writer's process puts the rest in durable batches, and keeps its rate on average.

`python -m bench.paced_writer ENDPOINT ROWS RATE` is the writer's process.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

import memwal
from bench.mixtures import Vectors, column, mixed
from bench.runbooks import SCHEMA

BATCH, LOADED_AT_ONCE = 50, 5_000
_PATIENCE = 300.0


@contextmanager
def serving(at: Path, rows: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a daemon of a new table; yield its endpoint and process."""
    uri = str(at / "table.lance")
    memwal.open(uri, schema=SCHEMA, key="id", regions=2, indexes={"embedding": "ivf_pq"}).close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = at / "daemon.toml"
    config.write_text(
        f'[table]\nuri = "{uri}"\n[memtable]\nrows_max = {max(500, rows // 20)}\n[commit]\ninterval = "5s"\n'
        f"[daemon]\nport = {port}\n"
    )
    command = [sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)]
    with (at / "daemon.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        if "serving" not in process.stdout.readline():
            raise RuntimeError(f"the daemon ended: {(at / 'daemon.log').read_text()}")
        yield f"grpc://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait()


def write(endpoint: str, rows: int, rate: int) -> None:
    """Run the writer's process: after "go N" on standard input it puts rows at the rate until N rows are stored.

    It prints "ready"; then, for each put, the number of stored rows, and when the put was sent and acknowledged by the
    host's monotonic clock.
    """
    vectors, done = mixed(rows, 0), rows // 2
    with memwal.connect(endpoint) as table:
        print("ready", flush=True)
        for line in sys.stdin:
            target, began, first = int(line.split()[1]), time.monotonic(), done
            while done < target:
                time.sleep(max(0.0, began + (done - first) / rate - time.monotonic()))
                ids = np.arange(done, min(done + BATCH, target))
                sent = time.monotonic()
                table.put(pa.table([pa.array(ids), column(vectors[ids])], schema=SCHEMA))
                done = int(ids[-1]) + 1
                print(json.dumps([done, sent, time.monotonic()]), flush=True)


class Writer:
    """The writer's process and its reports.

    Thread safety. `acked` from any thread; everything else from one thread.
    """

    def __init__(self, endpoint: str, rows: int, rate: int) -> None:
        command = [sys.executable, "-m", "bench.paced_writer", endpoint, str(rows), str(rate)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.acked = rows // 2
        """Acknowledged rows. The last put may be missing, which never overstates what a search must see."""
        self.puts: list[tuple[int, float, float]] = []
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the writer ended with exit code {self.process.wait()}")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            done, sent, acked = json.loads(line)
            self.puts.append((done, sent, acked))
            self.acked = done

    def go(self, target: int) -> None:
        """Let the writer put until `target` rows are stored."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"go {target}\n")
        self.process.stdin.flush()

    def wait(self, target: int) -> None:
        """Return when `target` rows are acknowledged. Raises: RuntimeError if the writer ends."""
        while self.acked < target:
            if self.process.poll() is not None:
                raise RuntimeError(f"the writer ended with exit code {self.process.returncode}")
            time.sleep(0.02)

    def close(self) -> None:
        """Stop the writer."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def fill(endpoint: str, vectors: Vectors) -> None:
    """Put `vectors` as fast as possible, and wait until they are in the base table."""
    with memwal.connect(endpoint) as table:
        for first in range(0, len(vectors), LOADED_AT_ONCE):
            some = vectors[first : first + LOADED_AT_ONCE]
            table.put(pa.table([pa.array(np.arange(first, first + len(some))), column(some)], schema=SCHEMA))
        table.flush()
        table.commit()
        deadline = time.monotonic() + _PATIENCE
        while table.count(level="committed") < len(vectors):
            if time.monotonic() > deadline:
                raise TimeoutError("the rows loaded first are not committed")
            time.sleep(0.1)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
