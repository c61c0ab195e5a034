"""Operator actions over HTTP: POST /pause, /resume, /flush and /commit, with an admin token.

1. A role other than admin gets 403, and so does a page of another site (`http_server`). Neither changes anything, nor
   does a malformed body.
2. The action is logged with the caller's address (logger `memwal.access`), and runs in its own thread.
3. The answer follows when the action is done. One action runs at a time for each path. A caller that requests the
   same meanwhile gets the answer of the running action, with `"joined": true`; a different request gets 429. If a
   caller disconnects, the action continues.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from memwal.ingest.engine.table.pauses import WHATS
from memwal.ingest.errors import Invalid
from memwal.ingest.service.ops.answers import PATIENCE, STATUSES, TABLE, in_a_thread, refusal, response
from memwal.ingest.service.ops.pages import Act, Page
from memwal.ingest.service.rpc.guard import AccessLog, Grant
from memwal.wal import SystemClock

GRANT: web.RequestKey[Grant | None] = web.RequestKey("grant", object)  # type: ignore[arg-type]
"""The rights of a request's caller; None for a wrong token, which only few paths accept."""
_STATUSES = STATUSES | {"UNKNOWN_OUTCOME": 503, "FENCED": 409}
_FIELDS: Mapping[str, tuple[str, ...]] = {"/pause": ("what", "reason"), "/resume": ("what",)}
"""Permitted fields of the body, by path."""


class Actions:
    """The handlers of the actions. Runs on one event loop."""

    def __init__(self, acts: Mapping[str, Act]) -> None:
        """Serve `acts`, by path. Each is called with the body and the caller's address and returns what was done.

        The body has the name of the table too, if the request has it as a parameter.
        """
        self._acts = acts
        self._running: dict[tuple[str, str | None], tuple[Any, asyncio.Future[Page]]] = {}
        self._log = AccessLog(SystemClock())

    def add_to(self, application: web.Application) -> None:
        """Add the paths."""
        for path, act in self._acts.items():
            application.router.add_post(path, partial(self._answered, path, act))

    async def _answered(self, path: str, act: Act, request: web.Request) -> web.StreamResponse:
        table, peer = request.query.get(TABLE), str(request.remote)
        call = f"POST {path}" if table is None else f"POST {path}, table {table!r:.120}"
        if (refused := self._log.refusal(request[GRANT], "admin", call, peer, table)) is not None:
            return refusal(403, refused, why="role")
        try:
            asked = await _asked(path, request)
        except Invalid as error:
            return refusal(400, error.message)
        self._running = {key: each for key, each in self._running.items() if not each[1].done()}
        joined = (running := self._running.get((path, table))) is not None
        if running is None:
            self._log.admin(call, peer)
            told = asked if table is None else asked | {TABLE: table}
            running = asked, asyncio.wrap_future(in_a_thread(lambda: Page.of(act(told, peer)), _STATUSES))
            self._running[path, table] = running
        elif running[0] != asked:
            return refusal(429, f"another {path} is running; ask again when it is done", "1")
        page = await asyncio.shield(running[1])
        return response(Page.of(json.loads(page.body) | {"joined": True}, page.status) if joined else page)


async def _asked(path: str, request: web.Request) -> dict[str, Any]:
    """Return the body, {} without one. Raises: Invalid."""
    try:
        data = await asyncio.wait_for(request.read(), PATIENCE)
    except TimeoutError:
        raise Invalid(f"the body did not arrive within {PATIENCE:g} s") from None
    if not data:
        return {}
    if request.content_type != "application/json":
        raise Invalid("send the body as JSON, with Content-Type: application/json, or none")
    try:
        asked = json.loads(data)
    except (ValueError, RecursionError):
        raise Invalid("the body is not JSON") from None
    if not isinstance(asked, dict):
        raise Invalid('the body is no object; write {"reason": "…"}')
    fields = _FIELDS.get(path, ())
    for name, value in asked.items():
        if name not in fields:
            raise Invalid(f"{path} takes {' and '.join(fields) or 'no fields'}, and not {name!r:.60}")
        if not isinstance(value, str):
            raise Invalid(f"{name}: write a text")
    if asked.get("what", WHATS[0]) not in WHATS:
        raise Invalid(f"what = {asked['what']!r:.60}: write one of {', '.join(WHATS)}")
    return asked
