"""Limit the log lines of a failure that repeats, and name the table in the log lines of a fleet."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import Any

EVERY = 60.0
"""Seconds between two log lines about the same step."""


class LogLimit:
    """Passes the first failure of a step, and then at most one a minute.

    Thread safety. One thread for each step.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Limit by the clock `monotonic`, which returns seconds."""
        self._monotonic = monotonic
        self._due: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def text(self, step: str, text: str) -> str | None:
        """Return `text`, with the number of failures of `step` since its last line; None if this failure is not
        logged."""
        now, left_out = self._monotonic(), self._left_out.get(step, 0)
        if now < self._due.get(step, now):
            self._left_out[step] = left_out + 1
            return None
        self._due[step], self._left_out[step] = now + EVERY, 0
        return f"{text} ({left_out + 1} failures since the last message)" if left_out else text


class TableLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines begin with the name of a table, which is also their field `table`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the line with the name."""
        table = dict(self.extra or {})
        return f"{table['table']}: {msg}", {**kwargs, "extra": table | (kwargs.get("extra") or {})}


Log = logging.Logger | TableLog


def log_of(logger: logging.Logger, table: str) -> Log:
    """Return `logger` for the lines of a table of a fleet; "" for an only table, which needs no name."""
    return TableLog(logger, {"table": table}) if table else logger
