"""Log lines on standard error: text for people, or one JSON object per line for programs.

Fields of an event are passed as `extra`: `event` is its name (claim, fence, flush, commit, serving, drain); `region`,
`epoch`, `generation`, `seconds` and others describe it. Text shows only the message, which contains the same facts;
JSON shows both. Secrets are never logged. Settings, which hold only references, are not logged either.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from memwal.ingest.errors import without_source_places

_KNOWN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
"""Attributes of every log record; the others are fields of an event."""


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_source_places(record.getMessage()),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _KNOWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Text(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        del datefmt
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")

    def format(self, record: logging.LogRecord) -> str:
        return without_source_places(super().format(record))


def silence_grpc() -> None:
    """Suppress gRPC's own log lines, one for each failed handshake; memwal's errors contain the same facts.

    Takes effect only if called before gRPC is first used.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def configure_logs(level: str, form: str) -> None:
    """Send memwal's log records of at least `level` to standard error; `form` is "text" or "json"."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(level.upper())  # set on the handler: `RecentEvents` receives more
    logger = logging.getLogger("memwal")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
