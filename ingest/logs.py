"""Log lines on standard error, as text or as JSON."""

from __future__ import annotations

import json
import logging


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


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
