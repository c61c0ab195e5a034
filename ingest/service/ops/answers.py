"""Answers over HTTP: pages are rendered in their own threads, so that none delays the event loop or the process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

from aiohttp import web

from memwal.ingest.errors import classify
from memwal.ingest.service.ops.pages import OfTable, Page, Render
from memwal.ingest.service.rpc.guard import Why
from memwal.ingest.threads import start

PATIENCE = 5.0
"""Seconds for rendering a page. A health check needs an answer in time."""
BRIEF_AGE = 1.0
"""Seconds for which callers without a token get the last answer again."""
SERVER = "memwal"
"""Value of the header `Server`, in place of versions of libraries."""
IS_BRIEF = web.RequestKey("brief", bool)
"""Whether the answer consists of its status only."""
WHY = web.ResponseKey("why", str)
"""The reason of a rejection, for an answer whose status does not show it."""


TABLE = "table"
"""The parameter of a request that names one of several tables."""


class Shared:
    """One page, rendered once for all requests that wait at the same time. Runs on one event loop."""

    def __init__(self, path: str, render: Render, of_table: OfTable | None = None) -> None:
        """`of_table`: renders it for a request with the parameter `TABLE`; None: the request is rejected."""
        self._path, self._render, self._of_table = path, render, of_table
        self._rendering: asyncio.Future[Page] | None = None
        self._began = float("-inf")
        self._parts: dict[str, Shared] = {}

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a request; a brief one by the status alone."""
        if (name := request.query.get(TABLE)) is None or request[IS_BRIEF]:
            return await self.shared(request)
        if self._of_table is None:
            return refusal(400, f"{self._path} is of this whole process, or its only table; leave out ?{TABLE}=")
        self._parts = {name: part for name, part in self._parts.items() if not part.is_done}
        return await self._parts.setdefault(name, Shared(self._path, partial(self._of_table, name))).shared(request)

    @property
    def is_done(self) -> bool:
        """Whether no rendering is in progress."""
        return self._rendering is None or self._rendering.done()

    async def shared(self, request: web.Request) -> web.Response:
        """Answer a request with the page of no table, or of the only one."""
        brief, now = request[IS_BRIEF], asyncio.get_running_loop().time()
        if self.is_done and now - self._began >= (BRIEF_AGE if brief else 0.0):
            self._rendering, self._began = asyncio.wrap_future(in_a_thread(self._render)), now
        assert self._rendering is not None
        try:
            page = await asyncio.wait_for(asyncio.shield(self._rendering), PATIENCE)
        except TimeoutError:
            text = f"{self._path} was not rendered within {PATIENCE:g} s; most likely storage does not answer"
            page = Page.of({"ready": False, "reasons": [{"reason": "no_answer", "text": text}]}, 503)
        return response(Page.of({"ready": page.status == 200}, page.status) if brief else page)


STATUSES = {"INVALID": 400, "UNAVAILABLE": 503}


def in_a_thread(render: Render, statuses: Mapping[str, int] = STATUSES) -> Future[Page]:
    """Render in a daemon thread, not in a pool: a hanging thread must not keep the process from ending.

    An error becomes a page with its kind and message. `statuses`: kinds of errors that are not answered with 500.
    """

    def page() -> Page:
        try:
            return render()
        except BaseException as error:  # noqa: BLE001 - the client gets the error
            classified = classify(error)
            told = {"error": {"kind": classified.kind, "message": classified.message}}
            return Page.of(told, statuses.get(classified.kind, 500))

    return start("http-page", page)


def response(page: Page, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return the answer of a page."""
    sent = {
        "Content-Type": page.content_type,
        "Server": SERVER,
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        **(headers or {}),
    }
    return web.Response(body=page.body, status=page.status, headers=sent)


def refusal(status: int, message: str, retry_after: str = "", why: Why | None = None) -> web.Response:
    """Return the answer to a rejected request. `retry_after`: seconds. `why`: the reason if `status` does not show
    it."""
    headers = {"Retry-After": retry_after} if retry_after else {}
    kind = "UNAVAILABLE" if status in (429, 503, 504) else "INVALID"
    answer = response(Page.of({"error": {"kind": kind, "message": message}}, status), headers)
    if why is not None:
        answer[WHY] = why
    return answer
