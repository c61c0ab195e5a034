"""The pages that a process serves over HTTP: /metrics, /health/livez, /health/readyz, /status.

The server is a module of its own, since it imports aiohttp: a tenth of a daemon's start, saved where none listens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal.ingest.ops.health import Reason

if TYPE_CHECKING:
    from memwal.ingest.ops.metrics import Scrape


@dataclass(frozen=True, slots=True)
class Page:
    """The answer of one path."""

    body: bytes
    content_type: str = "application/json"
    status: int = 200

    @classmethod
    def of(cls, found: Any, status: int = 200) -> Page:
        """Return a page of JSON."""
        return cls(json.dumps(found, default=str).encode() + b"\n", status=status)


Render = Callable[[], Page]


def pages_of(
    scrape: Scrape, reasons: Callable[[], list[Reason]], status: Callable[[], Mapping[str, Any]]
) -> dict[str, Render]:
    """Return the four pages: metrics, liveness, readiness (503 with reasons) and status."""
    from memwal.ingest.ops.metrics import CONTENT_TYPE

    def ready() -> Page:
        found = reasons()
        return Page.of({"ready": not found, "reasons": found}, 503 if found else 200)

    return {
        "/metrics": lambda: Page(scrape.text(), CONTENT_TYPE),
        "/health/livez": lambda: Page.of({"alive": True}),
        "/health/readyz": ready,
        "/status": lambda: Page.of(status()),
    }
