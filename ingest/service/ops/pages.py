"""The pages that a process serves over HTTP: /metrics, /health/livez, /health/readyz, /status; and the pause actions.

The server is a separate module because it imports aiohttp, a tenth of a daemon's start, which is saved without HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal.ingest.engine.table.pauses import Paused, PauseWatch, What
from memwal.ingest.service.ops.health import Reason

if TYPE_CHECKING:
    from memwal.ingest.service.ops.metrics import Scrape


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
OfTable = Callable[[str], Page]
"""Renders the page of one of several tables, by its name. Raises: Invalid for an unknown name."""
Act = Callable[[Mapping[str, Any], str], Mapping[str, Any]]
"""An action: receives the body and the caller's address, returns what was done. Raises: MemWalError."""


def pausing_acts(watch: Callable[[], PauseWatch], changed: Callable[[], object]) -> dict[str, Act]:
    """Return the actions /pause and /resume. `watch`: returns the table's pauses; `changed`: called after each
    action."""

    def pause(asked: Mapping[str, Any], peer: str) -> Mapping[str, Any]:
        what: What = asked.get("what", "ingestion")
        found, new = watch().pauses.pause(what, f"{peer} over HTTP", asked.get("reason", ""))
        watch().look()
        changed()
        return {"what": what, "paused": True, "already": not new, **found.told()}

    def resume(asked: Mapping[str, Any], _: str) -> Mapping[str, Any]:
        what: What = asked.get("what", "ingestion")
        ended = watch().pauses.resume(what)
        watch().look()
        changed()
        return {"what": what, "paused": False, "already": ended is None, **({} if ended is None else ended.told())}

    return {"/pause": pause, "/resume": resume}


def pages_of(
    scrape: Scrape,
    reasons: Callable[[], list[Reason]],
    status: Callable[[], Mapping[str, Any]],
    paused: Callable[[], Paused] = dict,
) -> dict[str, Render]:
    """Return the four pages: metrics, liveness, readiness (503 with reasons) and status.

    `paused`: returns what an operator has paused, which does not affect readiness.
    """
    from memwal.ingest.service.ops.metrics import CONTENT_TYPE

    def ready() -> Page:
        found = reasons()
        told = {"paused": held} if (held := paused()) else {}
        return Page.of({"ready": not found, "reasons": found, **told}, 503 if found else 200)

    return {
        "/metrics": lambda: Page(scrape.text(), CONTENT_TYPE),
        "/health/livez": lambda: Page.of({"alive": True}),
        "/health/readyz": ready,
        "/status": lambda: Page.of(status()),
    }
