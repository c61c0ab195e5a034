"""Wait for the input line `go`, open a table, and put rows until the line `stop` or a rejected put.

    putter.py URI FIRST

Lines out, JSON: {"ready"}, {"open": epochs}, {"try": n} before and {"ack": n} after each put of the keys 0 and
FIRST + n, {"error": [type, message]} for a rejected put, after which it tries once more, {"end"}.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pyarrow as pa

import memwal

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def say(**line: Any) -> None:
    """Print one line for the process that started this one."""
    print(json.dumps(line), flush=True)


def put_until(table: Any, first: int, stop: threading.Event) -> bool:
    """Put rows until `stop`; return whether a put was rejected."""
    number = 0
    while not stop.is_set():
        number += 1
        rows = [{"id": 0, "name": f"{first}/{number}"}, {"id": first + number, "name": f"{first}/{number}"}]
        say(**{"try": number})
        try:
            table.put(rows)
        except memwal.MemWalError as error:
            say(error=[type(error).__name__, str(error), error.details])
            return True
        say(ack=number)
        if number % 20 == 0:
            try:
                table.flush()
            except memwal.MemWalError as error:
                say(error=[type(error).__name__, str(error), error.details])
                return True
    return False


def main() -> None:
    """Run the program; see the module."""
    uri, first = sys.argv[1], int(sys.argv[2])
    stop = threading.Event()
    memwal.open  # noqa: B018 - the slow imports, before the start
    say(ready=True)
    sys.stdin.readline()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    try:
        quiet = {"commit": {"interval": "0s"}}
        table = memwal.open(uri, schema=SCHEMA, key="id", regions=1, settings=quiet, take_over=True)
    except memwal.FencedError as error:  # a third process may have claimed in between
        say(open=None, error=[type(error).__name__, str(error), error.details])
        return
    say(open=[region["epoch"] for region in table.status()["regions"]])
    if put_until(table, first, stop):
        put_until(table, first + 500_000, stop)
    table.close()
    say(end=True)


if __name__ == "__main__":
    main()
