"""The newest log records of the process, kept in memory for its page."""

from __future__ import annotations

import logging
from collections import deque
from itertools import count
from typing import Any, Self

from memwal.ingest.errors import without_source_places

KEPT = 100
_LONGEST = 500
_FIELDS = ("event", "table", "region", "epoch", "generation", "version", "rows", "seconds")


class RecentEvents(logging.Handler):
    """Keeps the last 100 events (claim, fence, flush, commit, …), warnings and errors of memwal's loggers.

    A context manager: it listens inside. The output to standard error stays as `configure_logs` has set it up, which
    must be called before.
    Thread safety. Any thread. Errors. None: a record that cannot be kept is left out.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._numbers = count(1)
        self._logger = logging.getLogger("memwal")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        fields = {name: vars(record)[name] for name in _FIELDS if name in vars(record)}
        if "event" not in fields and record.levelno < logging.WARNING:
            return
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # a wrong logging call, which the other handlers report
            return
        told = {"number": next(self._numbers), "time": record.created, "level": record.levelname.lower()}
        told["text"] = without_source_places(text)[:_LONGEST]
        self._kept.append(told | fields)

    def newest(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Return the records since unix time `since`, newest first: `number` (counted from 1), `time` (unix seconds),
        `level`, `text` and the fields of the event."""
        self.acquire()  # the lock of a handler, which `emit` holds
        try:
            kept = list(self._kept)
        finally:
            self.release()
        return [told for told in reversed(kept) if told["time"] >= since]

    def __enter__(self) -> Self:
        self._level = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(min(self._level, logging.INFO) if self._level else logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
