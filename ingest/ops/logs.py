"""Log lines on standard error: text for people, or one JSON object per line for programs.

Whoever logs an event hands its fields over as `extra`: `event` names it (claim, fence, flush, commit, serving, drain);
`region`, `epoch`, `generation`, `seconds` and the like say what it was about. Text shows the message, which says the
same in words; JSON shows both. Settings are never logged, so no secret is: they hold references only.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

_KNOWN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
"""What every record has; the rest are an event's fields."""


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _KNOWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def silence_grpc() -> None:
    """Keep gRPC's own lines, one for every failed handshake of anybody, out of the output of this process.

    What they say our errors say. Takes effect before gRPC is first used.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def configure_logs(level: str, form: str) -> None:
    """Send memwal's log records of at least `level` to standard error; `form` is "text" or "json"."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _Json() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logger = logging.getLogger("memwal")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
