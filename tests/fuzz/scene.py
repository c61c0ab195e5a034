"""The table that the fuzzer attacks, and the daemon that serves it."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

import memwal
from tests.fuzz.requests import Flight, Http, Request

WIDTH = 16
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("name", pa.string()),
        ("price", pa.int64()),
        ("body", pa.string()),
        ("vector", pa.list_(pa.float32(), WIDTH)),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("x", pa.float64()), ("y", pa.float64())])),
        ("wide", pa.list_(pa.float64(), 2048)),
    ]
)
INDEXES = {"body": "fts", "price": "btree", "vector": "ivf_pq"}
ROWS = 3000
UNCHANGED = list(range(100, ROWS))
"""Keys that no request changes: hostile requests use lower or higher keys."""
TOKENS = {"read": "fuzz-read", "write": "fuzz-write", "": "fuzz-admin"}
ADDRESS_SPACE = 12 << 30
"""Bytes. An idle daemon maps about 3 GiB: stacks of threads, arenas of malloc."""
MEMORY = 384 << 20
"""Bytes of memory that one request may add to the daemon: several times the limits below."""
LIMITS = """
query_memory = "64MiB"
message_max = "4MiB"
put_max = "16MiB"
query_timeout = "10s"
"""
PATIENCE = 30.0
"""Seconds within which the daemon answers any request."""
_ENDED = "memwal: the daemon is gone"


def rows_of(ids: Sequence[int]) -> pa.Table:
    """Return rows with these keys; the other columns follow from the key."""
    words = ("alpha", "beta", "gamma", "delta")
    made = [
        {
            "id": id,
            "name": f"name{id % 17}",
            "price": id % 101,
            "body": f"{words[id % 4]} {words[id % 3]} word{id % 7}",
            "vector": [float((id * (n + 3)) % 13) for n in range(WIDTH)],
            "tags": [words[id % 4]] * (id % 3),
            "place": {"x": id / 7, "y": id / 11},
        }
        for id in ids
    ]
    return pa.Table.from_pylist(made, SCHEMA)


class Scene:
    """One table, its daemon, and connections to it.

    Thread safety. One thread.
    """

    def __init__(self, place: Path, fault: str = "-") -> None:
        self._place, self._fault = place, fault
        self.uri = str(place / "t.lance")
        self.log: deque[str] = deque(maxlen=60)
        self._process: subprocess.Popen[str] | None = None
        for name, token in TOKENS.items():
            (place / f"token-{name}").write_text(token)
        self._config = place / "config.toml"
        secrets = {"token": "token-", "write_token": "token-write", "read_token": "token-read"}
        said = "\n".join(f'{name} = "file:{place / file}"' for name, file in secrets.items())
        self._config.write_text(
            f'[table]\nuri = "{self.uri}"\n[memtable]\nsize_max = "32MiB"\n[commit]\ninterval = "2s"\n'
            f'[gc]\nchanges_age_min = "0s"\n[daemon]\nhttp_port = 0\n{said}\n{LIMITS}'
        )

    def create(self) -> None:
        """Create the table with rows in its base, an SST and its log."""
        settings: dict[str, Any] = {"table": {"indexes": INDEXES}, "commit": {"interval": "0s"}}
        with memwal.open(self.uri, schema=SCHEMA, key="id", regions=2, settings=settings) as table:
            table.put(rows_of(range(ROWS - 400)))
            table.flush()
            table.flush()
            table.commit()
            table.put(rows_of(range(ROWS - 500, ROWS - 200)))
            table.flush()
            table.put(rows_of(range(ROWS - 300, ROWS)))

    def start(self) -> None:
        """Start the daemon, unless it is running."""
        if self.alive:
            return
        command = [sys.executable, "-m", "tests.fuzz.served", str(ADDRESS_SPACE), self._fault, str(self._config)]
        environ = {**os.environ, "RUST_BACKTRACE": "0", "LANCE_LOG": "critical"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
        )
        serving = threading.Event()
        self._told: dict[str, str] = {}
        threading.Thread(target=self._read, args=(self._process, serving), daemon=True).start()
        if not serving.wait(120) or not self.alive:
            raise RuntimeError("the daemon does not start: " + " | ".join(self.log))
        self._client = flight.FlightClient(self._told["grpc"], generic_options=[("grpc.use_local_subchannel_pool", 1)])
        self._address = self._told["http"].removeprefix("http://").split("/")[0]

    def _read(self, process: subprocess.Popen[str], serving: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.log.append(line.rstrip()[:400])
            for word in line.split():
                for scheme in ("grpc", "http"):
                    if word.startswith(f"{scheme}://") and scheme not in self._told:
                        self._told[scheme] = word.rstrip(",;)")
            if "grpc" in self._told and "http" in self._told:
                serving.set()
        serving.set()

    @property
    def alive(self) -> bool:
        """Whether the daemon runs."""
        return self._process is not None and self._process.poll() is None

    def ended(self) -> int | None:
        """Return the daemon's exit code, or None while it runs. Waits up to 2 s, since a lost connection precedes the
        end."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(2.0)
        return None

    def stop(self) -> int | None:
        """End the daemon by SIGTERM; return its exit code, or None if it had to be killed."""
        if self._process is None:
            return 0
        self._process.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """Kill the daemon."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def faults(self) -> list[str]:
        """Return what is wrong with the table after the attack.

        Every stored value must be valid, and rows of UNCHANGED must be as they were. Requires that the daemon has
        ended.
        """
        found = []
        with memwal.open(self.uri, settings={"commit": {"interval": "0s"}}) as table:
            rows = table.scan().read_all()
            try:
                rows.validate(full=True)
            except pa.ArrowInvalid as error:
                found.append(f"a value is not valid: {error}")
            if not table.get(UNCHANGED).equals(rows_of(UNCHANGED)):
                found.append("rows that were put before are not as they were")
            table.flush()
            table.commit()
            if table.count(level="committed") != rows.num_rows:
                found.append("a commit changed the number of rows")
        return found

    def memory(self) -> tuple[int, int]:
        """Return the daemon's memory in bytes: current, and highest since the last call of `forget_peak`."""
        assert self._process is not None
        with suppress(OSError):
            lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
            found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmHWM", "VmRSS"))}
            return int(found.get("VmRSS", 0)) << 10, int(found.get("VmHWM", 0)) << 10
        return 0, 0

    def forget_peak(self) -> None:
        """Reset the highest memory of the daemon."""
        assert self._process is not None
        with suppress(OSError):
            Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def send(self, request: Request) -> str:
        """Return the answer to `request` in a word: "rows", "message", an HTTP status, or the kind of the error."""
        if isinstance(request, Http):
            return self._over_http(request)
        try:
            return self._over_flight(request)
        except flight.FlightError as error:
            return _kind(error)
        except (pa.ArrowException, OSError) as error:
            return f"client {type(error).__name__}: {str(error).splitlines()[0][:200]}"

    def _over_http(self, request: Http) -> str:
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE)
        try:
            connection.putrequest(request.method, request.path, skip_accept_encoding=True)
            for name, value in request.headers:
                connection.putheader(name, value)
            connection.endheaders(request.body or None)
            answer = connection.getresponse()
            answer.read(64 << 20)
            return f"http {answer.status}"
        except TimeoutError:
            return "late"
        except (http.client.HTTPException, OSError, ValueError) as error:
            return f"client {type(error).__name__}"
        finally:
            connection.close()

    def _over_flight(self, request: Flight) -> str:
        options = flight.FlightCallOptions(
            timeout=PATIENCE, headers=[(b"authorization", f"Bearer {TOKENS[request.role]}".encode())]
        )
        client, command = self._client, request.command
        if request.call == "action":
            answer = list(client.do_action(flight.Action(request.action, command), options))
            return f"message {len(answer)}"
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(command), options)
        try:
            with suppress(flight.FlightError, pa.ArrowException):
                if request.batches:
                    writer.begin(request.batches[0].schema)
                    _write(writer, request)
                else:
                    writer.done_writing()
            return _read_answer(reader)
        finally:
            with suppress(flight.FlightError, pa.ArrowException, OSError):
                writer.close()


def _write(writer: Any, request: Flight) -> None:
    for batch in request.batches:
        writer.write_batch(batch)
    if request.closing:
        writer.write_metadata(request.closing)
    writer.done_writing()


def _read_answer(reader: Any) -> str:
    chunks = list(reader)
    return "rows" if not chunks or chunks[0].data is not None else "message"


def _kind(error: flight.FlightError) -> str:
    import json

    extra = getattr(error, "extra_info", b"")
    if extra:
        told = json.loads(extra)
        return f"{told.get('kind')}: {str(told.get('message'))[:200]}"
    if isinstance(error, flight.FlightTimedOutError):
        return "late"
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
