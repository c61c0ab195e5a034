"""Record the operations of clients as a history: when each was invoked, when it returned, and what it returned.

A history is one or more files of JSON lines. Each operation has two lines, joined by `id`:

    {"event": "invoke", "id": "p0/17", "at": 1200, "client": "c3", "op": "put", "region": 0, "rows": {"7": 41}}
    {"event": "return", "id": "p0/17", "at": 1950, "outcome": "ok"}

========  ================================  ================================================================
op        given                             result, if the outcome is `ok`
========  ================================  ================================================================
put       rows: value of each key           all of its rows replace those of their keys, at one moment
insert    rows: value of one key            applied: 1 if the key was absent and has the value now, else 0
version   rows, of one key; version         applied: 1 if no higher version of the key was stored, else 0
delete    keys                              its keys are absent, from one moment on
compare   rows: the expected value of a key applied: 1 if the key had this value and is absent now, else 0
read      keys, level                       rows: the present rows of its keys, at one moment
========  ================================  ================================================================

An operation concerns one region; a put of several regions is one operation for each. Only one operation writes each
value. `at`: nanoseconds of CLOCK_MONOTONIC, which the processes of a machine share; in a simulation its steps.
`level`: `latest` or `durable` of an owner, or `stored`: `durable` from storage alone.

The outcome is `ok`; `failed`: certainly not applied, now or later; or `unknown`: it may be applied at any time from its
invocation on, or never. An operation without a second line is unknown too: its client was killed.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Rows = Mapping[int, int]
"""Value by key."""


class Recorder:
    """Writes the operations of one process to a sink.

    Thread safety. Any thread, if the sink allows it; the sink of `to_file` does.
    Invariants. The sink has the line before `invoke` returns, and before a method that records an outcome returns. So a
    killed process leaves each operation complete, open or not begun.
    """

    def __init__(self, sink: Callable[[str], None], name: str, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`name`: of the process, part of its operations' ids. `clock`: returns the time of an event as an integer."""
        self._sink, self._name, self._clock = sink, name, clock
        self._numbers = itertools.count(1)

    @classmethod
    def to_file(cls, path: Path, clock: Callable[[], int] = time.monotonic_ns) -> Recorder:
        """Create a recorder that appends to a new file. Its lines survive a kill. Raises: FileExistsError."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)

        def write(line: str) -> None:
            os.write(file, f"{line}\n".encode())  # one call: lines of several threads do not mix

        return cls(write, path.stem, clock)

    def invoke(
        self,
        client: str,
        op: str,
        region: int,
        *,
        rows: Rows | None = None,
        keys: Iterable[int] | None = None,
        level: str | None = None,
        version: int | None = None,
    ) -> Operation:
        """Record that `client` begins an operation now. Arguments: see the table of the module."""
        number = f"{self._name}/{next(self._numbers)}"
        given = {"level": level, "keys": None if keys is None else list(keys), "version": version}
        line: dict[str, Any] = {"client": client, "op": op, "region": region, "rows": _texts(rows), **given}
        self._write({"event": "invoke", "id": number, "at": self._clock(), **line})
        return Operation(self, number)

    def returned(self, number: str, outcome: str, **result: Any) -> None:
        """Record the outcome of an operation that returned now."""
        self._write({"event": "return", "id": number, "at": self._clock(), "outcome": outcome, **result})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._sink(json.dumps({name: value for name, value in line.items() if value is not None}))


class Operation:
    """An operation that has begun. Call exactly one method when it returns, and none if it never does."""

    def __init__(self, recorder: Recorder, number: str) -> None:
        self._recorder, self._number = recorder, number

    def ok(self, rows: Rows | None = None, *, applied: int | None = None) -> None:
        """Record success. `rows`: the rows that a read returned. `applied`: 1 or 0, for an operation with a
        condition."""
        self._recorder.returned(self._number, "ok", rows=_texts(rows), applied=applied)

    def failed(self, why: object = None) -> None:
        """Record that it was not applied and never will be, or that a read returned nothing."""
        self._recorder.returned(self._number, "failed", why=_why(why))

    def unknown(self, why: object = None) -> None:
        """Record that it may have been applied, or may still be."""
        self._recorder.returned(self._number, "unknown", why=_why(why))


class Steps:
    """A clock for a simulation: each event is one step later than the event before. Thread safety. One thread."""

    def __init__(self) -> None:
        self._steps = itertools.count(1)

    def __call__(self) -> int:
        return next(self._steps)


def _texts(rows: Rows | None) -> dict[str, int] | None:
    return None if rows is None else {str(key): value for key, value in rows.items()}


def _why(why: object) -> str | None:
    return None if why is None else f"{type(why).__name__}: {why}"[:200] if isinstance(why, BaseException) else str(why)
